"""A scheduler and a toy model on a clock that moves by what steps cost."""

from __future__ import annotations

from bros.core.plan import StepPlan
from bros.core.request import EngineRequest, RequestOutput, ServiceClass, Slo
from bros.scheduler.cost_model import CostModel, StepLoad
from support.scheduling import MODEL, make_scheduler, request
from support.toy_model import ToyModel

RT, BE = ServiceClass.RT, ServiceClass.BE


def plan_seconds(plan: StepPlan, model: CostModel = MODEL, only: set[str] | None = None) -> float:
    """What a step takes; `only`: if it held just the chunks of these requests."""
    load = StepLoad()
    for chunk in plan.chunks:
        if only is None or chunk.request_id in only:
            load.add(len(chunk.token_ids), chunk.start, chunk.sample is not None)
    return model.seconds(load)


class VirtualRun:
    """Steps take exactly what `truth` says.

    token_times: when tokens came. first_run: when a request first was in a step, in that order.
    """

    def __init__(self, policy: str = "bros", *, truth: CostModel = MODEL, **options: object):
        self.scheduler = make_scheduler(policy, **{"blocks": 4000, **options})  # type: ignore[arg-type]
        self._executor = ToyModel(4)
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
        **params: object,
    ) -> ServiceClass:
        """A request that arrives now. salt: prompts with different ones share no prefix."""
        ids = [1 + (salt + i) % 900 for i in range(prompt)]
        asked = request(name, ids, service_class, arrival_s=self.now, slo=slo, **params)
        served_as = self.scheduler.submit(asked, self.now)
        self.requests[name] = asked
        self.token_times[name] = []
        return served_as

    def step(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.now)
        outputs = self.scheduler.take_given_up()
        if plan is not None:
            for chunk in plan.chunks:
                self.first_run.setdefault(chunk.request_id, self.now)
            self.plans.append(plan)
            self.seconds.append(plan_seconds(plan, self._truth))
            result = self._executor.execute(plan)
            self.now += self.seconds[-1]
            outputs += self.scheduler.apply(result, self.now)
        self.outputs += outputs
        for output in outputs:
            self.token_times[output.request_id] += [self.now] * len(output.token_ids)
        return plan

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
