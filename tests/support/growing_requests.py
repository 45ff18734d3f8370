"""Requests that grow by what a runner chooses, one step after the other or run ahead."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from bros.core.plan import PENDING, Chunk, SampledToken, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.runner import LaunchingRunner, ModelRunner
from support.device_runners import BLOCK, VOCAB

Samples = tuple[SampledToken, ...]
Steps = list[list[int]]

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.2),
    SamplingParams(temperature=0.8, top_p=0.9, top_k=20),
    SamplingParams(temperature=0.0, logprobs=1),  # the host chooses for these two
    SamplingParams(temperature=1.0, logit_bias={5: 3.0}),
)


class Request:
    """Grows by a token per step it is in; what that is is not its business."""

    def __init__(self, name: str, prompt: Sequence[int], params: SamplingParams, number: int):
        self.name = name
        self.params = params
        self._prompt = prompt
        self._computed = 0
        self._blocks = range(number * 8, number * 8 + 8)

    def chunk(self, token: int | None) -> Chunk:
        """token: what it got in its last step, or None for the prompt."""
        tokens = list(self._prompt) if token is None else [token]
        start, end = self._computed, self._computed + len(tokens)
        segments = array("i")
        for index in range(-(-start // BLOCK)):
            segments.extend((self._blocks[index], 0, min(BLOCK, start - index * BLOCK)))
        slots = array(
            "i", (self._blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end))
        )
        spec = SampleSpec(self.params, seed=7, prompt_len=len(self._prompt))
        self._computed = end
        return Chunk(self.name, start, tokens, segments, slots, spec)


def make_requests(rng: random.Random, count: int) -> list[Request]:
    return [
        Request(
            str(number),
            [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
            rng.choice(PARAMS),
            number,
        )
        for number in range(count)
    ]


def script(rng: random.Random, count: int, steps: int) -> Steps:
    """Which requests are in each step."""
    return [sorted(rng.sample(range(count), rng.randint(1, count))) for _ in range(steps)]


def run_one_by_one(runner: ModelRunner, requests: list[Request], steps: Steps) -> list[Samples]:
    last: dict[str, int] = {}
    out = []
    for number, chosen in enumerate(steps):
        chunks = tuple(requests[i].chunk(last.get(requests[i].name)) for i in chosen)
        result = runner.execute(StepPlan(number, chunks))
        assert result is not None
        last |= {sample.request_id: sample.token_id for sample in result.samples}
        out.append(result.samples)
    return out


def run_ahead(runner: LaunchingRunner, requests: list[Request], steps: Steps) -> list[Samples]:
    """As an engine does: two steps are under way, and the second takes tokens of the first."""
    last: dict[str, int] = {}
    running, out = None, []
    before: list[int] = []
    for number, chosen in enumerate(steps):
        chunks = []
        for i in chosen:
            known = last.get(requests[i].name)
            chunks.append(requests[i].chunk(PENDING if i in before else known))
        launched = runner.launch(StepPlan(number, tuple(chunks)))
        if running is not None:
            result = running.result()
            last |= {sample.request_id: sample.token_id for sample in result.samples}
            out.append(result.samples)
        running, before = launched, chosen
    assert running is not None
    return [*out, running.result().samples]
