"""A driver of a scheduler with a prefix cache, with the toy model as its executor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from bros.core.plan import Chunk, StepPlan, StepResult
from bros.core.request import (
    NO_HINTS,
    EngineRequest,
    FinishReason,
    Hints,
    RequestOutput,
    ServiceClass,
    Slo,
    expanded,
)
from support.scheduling import make_scheduler, request
from support.toy_model import ToyModel
from support.virtual_time import plan_seconds

RT, BE = ServiceClass.RT, ServiceClass.BE
SIZE = 4


class Run:
    """A scheduler with a prefix cache, and the toy model, which reads only the slots of its plans.

    answers, cached: tokens and `cached_tokens` of each request. computed: tokens of its prompt
    that were computed for it. ends: why each ended.
    """

    def __init__(self, policy: str = "bros", **options: object) -> None:
        chosen = {"prefix_cache": "class-aware", "blocks": 400, "max_batch_tokens": 64, **options}
        self.scheduler = make_scheduler(policy, block_size=SIZE, **chosen)  # type: ignore[arg-type]
        self.model = ToyModel(SIZE)
        self.now = 0.0
        self.requests: dict[str, EngineRequest] = {}
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.ends: dict[str, FinishReason] = {}

    def submit(
        self,
        name: str,
        prompt: int | Sequence[int],
        service_class: ServiceClass = RT,
        *,
        cache_salt: str = "",
        prefill_only: bool = False,
        hints: Hints = NO_HINTS,
        slo: Slo | None = None,
        **params: object,
    ) -> None:
        """Prompts of so many tokens all begin alike."""
        asked = request(name, prompt, service_class, arrival_s=self.now, slo=slo, **params)
        asked = dataclasses.replace(
            asked, cache_salt=cache_salt, prefill_only=prefill_only, hints=hints
        )
        self.scheduler.submit(asked, self.now)
        self.requests[name] = asked
        self.answers[name] = []
        self.cached[name] = 0
        self.computed[name] = 0
        self.ends.pop(name, None)

    def abort(self, name: str) -> None:
        output = self.scheduler.abort(name, self.now)
        self.scheduler.check_integrity()
        self._take([output] if output else [])

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        assert plan is not None
        return plan

    def finish(self, plan: StepPlan, result: StepResult | None = None) -> list[RequestOutput]:
        self.now += plan_seconds(plan)
        result = result or self.model.execute(plan) or _nothing()
        outputs = [*map(expanded, self.scheduler.apply(result, self.now))]
        self.scheduler.check_integrity()
        self._take(outputs)
        for chunk in plan.chunks:
            prompt = len(self.requests[chunk.request_id].prompt_token_ids)
            new = min(prompt, chunk.start + len(chunk.token_ids)) - min(prompt, chunk.start)
            self.computed[chunk.request_id] += new
        return outputs

    def step(self) -> dict[str, Chunk]:
        """The chunks of one; none if all there was has ended without."""
        plan = self.scheduler.schedule(self.now)
        self.scheduler.check_integrity()
        ended = self.scheduler.take_ended()
        self._take(ended)
        if plan is None:
            assert ended, "nothing can run"
            return {}
        self.finish(plan)
        return {chunk.request_id: chunk for chunk in plan.chunks}

    def drain(self) -> None:
        """Until all is done; every answer must be right then."""
        steps = 0
        while self.scheduler.has_work:
            self.step()
            steps += 1
            assert steps < 5000, "no progress"
        for name, answer in self.answers.items():
            assert answer == self.answer(name)[: len(answer)]

    def answer(self, name: str) -> list[int]:
        """The right one."""
        asked = self.requests[name]
        assert asked.sampling.max_tokens is not None
        if not asked.samples:
            return []
        return ToyModel.continuation(asked.prompt_token_ids, asked.sampling.max_tokens)

    def _take(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name not in self.ends, "an output after the last one"
            self.answers[name] += output.token_ids
            self.cached[name] = max(self.cached[name], output.cached_tokens)
            if output.finish_reason is not None:
                self.ends[name] = output.finish_reason

    def prefix_wait_s(self, name: str) -> float | None:
        trace = self.scheduler.trace(name)
        assert trace is not None
        return trace.waits.get("prefix")


def _nothing() -> StepResult:
    raise AssertionError("the model does not abort steps by itself")
