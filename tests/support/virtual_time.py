"""A scheduler and a toy model on a clock that moves by what steps cost."""

from __future__ import annotations

import hashlib
import random
from dataclasses import replace

from bros.core.plan import StepPlan, StepResult, SuspendedStep
from bros.core.request import EngineRequest, RequestOutput, ServiceClass, Slo
from bros.scheduler.cost_model import CostModel, StepLoad
from bros.scheduler.suspended import share_done
from support.outputs import expand_all
from support.scheduling import MODEL, make_scheduler, request
from support.suspending_model import LAYERS
from support.toy_model import ToyModel

RT, BE = ServiceClass.RT, ServiceClass.BE


def plan_seconds(plan: StepPlan, model: CostModel = MODEL, only: set[str] | None = None) -> float:
    """What a step takes; `only`: if it held just the chunks of these requests."""
    load = StepLoad()
    for chunk in plan.chunks:
        if only is not None and chunk.request_id not in only:
            continue
        size = len(chunk.token_ids), chunk.start, chunk.sample is not None
        if chunk.kept is None:
            load.add(*size)
        else:
            load.add(*size, done=share_done(chunk.kept.layer, LAYERS))
    return model.seconds(load)


class VirtualRun:
    """Steps take exactly what `truth` says.

    token_times: when tokens came. first_run: when a request first was in a step, in that order.
    """

    def __init__(
        self,
        policy: str = "bros",
        *,
        truth: CostModel = MODEL,
        executor: ToyModel | None = None,
        **options: object,
    ) -> None:
        self.scheduler = make_scheduler(policy, **{"blocks": 4000, **options})  # type: ignore[arg-type]
        self._executor = executor or ToyModel(4)
        self._truth = truth
        self.now = 0.0
        self.plans: list[StepPlan] = []
        self.seconds: list[float] = []
        self.outputs: list[RequestOutput] = []
        self.requests: dict[str, EngineRequest] = {}
        self.token_times: dict[str, list[float]] = {}
        self.first_run: dict[str, float] = {}

    def submit(
        self,
        name: str,
        prompt: int,
        service_class: ServiceClass = RT,
        *,
        slo: Slo | None = None,
        salt: int = 0,
        arrived_s: float | None = None,
        tenant: str = "",
        **params: object,
    ) -> ServiceClass:
        """A request that arrived now, or before. salt: with different ones, no common prefix."""
        ids = [1 + (salt + i) % 900 for i in range(prompt)]
        asked = request(name, ids, service_class, slo=slo, **params)  # type: ignore[arg-type]
        arrival_s = self.now if arrived_s is None else arrived_s
        asked = replace(asked, arrival_s=arrival_s, tenant=tenant)
        served_as = self.scheduler.submit(asked, self.now)
        self.requests[name] = asked
        self.token_times[name] = []
        return served_as

    def step(self, stops_before: int | None = None) -> StepPlan | None:
        """stops_before: the layer before which a SuspendingModel suspends the step, if that may
        yield; it begins with the layers that are left."""
        plan = self.scheduler.schedule(self.now)
        outputs = self.scheduler.take_ended()
        if plan is not None:
            for chunk in plan.chunks:
                self.first_run.setdefault(chunk.request_id, self.now)
            self.plans.append(plan)
            self.seconds.append(plan_seconds(plan, self._truth))
            if stops_before is not None and self.scheduler.may_abort:
                outputs += self._execute_until(plan, stops_before)
            else:
                result = self._executor.execute(plan)
                assert isinstance(result, StepResult)
                self.now += self.seconds[-1]
                outputs += expand_all(self.scheduler.apply(result, self.now))
        self.outputs += outputs
        for output in outputs:
            self.token_times[output.request_id] += [self.now] * len(output.token_ids)
        return plan

    def _execute_until(self, plan: StepPlan, layer: int) -> list[RequestOutput]:
        first = min(0 if chunk.kept is None else chunk.kept.layer for chunk in plan.chunks)
        layers = iter(range(first, LAYERS))
        result = self._executor.execute(plan, lambda: next(layers) >= layer)
        if isinstance(result, SuspendedStep):
            self.seconds[-1] *= (result.layer - first) / (LAYERS - first)
            self.now += self.seconds[-1]
            self.scheduler.suspend_step(plan, result, self.now)
            return []
        assert result is not None
        self.now += self.seconds[-1]
        return expand_all(self.scheduler.apply(result, self.now))

    def abort(self, name: str) -> None:
        output = self.scheduler.abort(name, self.now)
        if output is not None:
            self.outputs.append(output)

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def drain(self, most: int = 5000) -> None:
        """Until all work is done."""
        for _ in range(most):
            if not self.scheduler.has_work:
                return
            assert self.step() is not None or not self.scheduler.has_work, "deadlock"
        raise AssertionError(f"not done after {most} steps")

    def classes(self, plan: StepPlan) -> set[ServiceClass]:
        return {self.requests[chunk.request_id].service_class for chunk in plan.chunks}

    def waiting(self, service_class: ServiceClass) -> int:
        return self.scheduler.stats().by_class[service_class].waiting

    def be_share(self) -> float:
        """Part of the time that steps took longer for best-effort work in them."""
        names = {n for n, r in self.requests.items() if r.service_class is RT}
        without = [plan_seconds(plan, self._truth, names) for plan in self.plans]
        return 1.0 - sum(without) / sum(self.seconds)


def random_run(policy: str, seed: int, *, requests: int = 40, **options: object) -> VirtualRun:
    """Requests of both classes at random times, in more memory than they need or in less."""
    rng = random.Random(seed)
    chosen = {"blocks": rng.choice([24, 60, 400]), "max_batch_tokens": rng.choice([16, 64])}
    run = VirtualRun(policy, **(chosen | options))  # type: ignore[arg-type]
    for number in range(requests):
        slo = rng.choice([Slo(), Slo(), Slo(0.1, 0.05), Slo(5.0, 1.0, 10.0)])
        service_class = rng.choice([RT, BE])
        run.submit(
            f"r{number}",
            rng.choice([1, 5, 20, 60]),
            service_class,
            slo=slo,
            salt=rng.randrange(9),
            max_tokens=rng.randint(1, 12),
        )
        if rng.random() < 0.1:
            run.abort(f"r{rng.randrange(number + 1)}")
        run.steps(rng.choice([0, 0, 1, 2, 5]))
    run.drain()
    return run


def plans_digest(policy: str, seed: int) -> str:
    """A hash of every plan of a random run, and of every output."""
    run = random_run(policy, seed)
    digest = hashlib.sha256()
    for plan in run.plans:
        for chunk in plan.chunks:
            drawn = chunk.sample.seed if chunk.sample else None
            fields = (chunk.request_id, chunk.start, list(chunk.token_ids), drawn)
            digest.update(repr((*fields, chunk.segments, chunk.slots)).encode())
    digest.update(repr(run.outputs).encode())
    return digest.hexdigest()
