"""Steps that are launched before the one before has ended choose the same tokens."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.interfaces import LaunchingExecutor
from bros.core.plan import PENDING, Chunk, SampledToken, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from support.device_runners import BLOCK, VOCAB, Assembled, assemble

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
        self._computed = self._outputs = 0
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
        spec = SampleSpec(self.params, seed=7, output_index=self._outputs)
        self._computed, self._outputs = end, self._outputs + 1
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


Samples = tuple[SampledToken, ...]
Steps = list[list[int]]


def run_one_by_one(
    made: Assembled, requests: list[Request], steps: list[list[int]]
) -> list[Samples]:
    last: dict[str, int] = {}
    out = []
    for number, chosen in enumerate(steps):
        chunks = tuple(requests[i].chunk(last.get(requests[i].name)) for i in chosen)
        result = made.runner.execute(StepPlan(number, chunks))
        assert result is not None
        last |= {sample.request_id: sample.token_id for sample in result.samples}
        out.append(result.samples)
    return out


def run_ahead(made: Assembled, requests: list[Request], steps: Steps) -> list[Samples]:
    """As an engine does: two steps are under way, and the second takes tokens of the first."""
    last: dict[str, int] = {}
    running, out = None, []
    before: list[int] = []
    for number, chosen in enumerate(steps):
        chunks = []
        for i in chosen:
            known = last.get(requests[i].name)
            chunks.append(requests[i].chunk(PENDING if i in before else known))
        launched = made.runner.launch(StepPlan(number, tuple(chunks)))
        if running is not None:
            result = running.result()
            last |= {sample.request_id: sample.token_id for sample in result.samples}
            out.append(result.samples)
        running, before = launched, chosen
    assert running is not None
    return [*out, running.result().samples]


@settings(max_examples=25)
@given(
    count=st.integers(1, 6),
    steps=st.integers(1, 8),
    graph_rows=st.sampled_from([None, 2, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_running_ahead_chooses_the_same_tokens(
    count: int, steps: int, graph_rows: int | None, seed: int
) -> None:
    plain, ahead = assemble(), assemble(graph_rows=graph_rows)
    expected = run_one_by_one(
        plain, make_requests(random.Random(seed), count), script(random.Random(seed), count, steps)
    )
    found = run_ahead(
        ahead, make_requests(random.Random(seed), count), script(random.Random(seed), count, steps)
    )
    tokens = [[(s.request_id, s.token_id) for s in samples] for samples in expected]
    assert [[(s.request_id, s.token_id) for s in samples] for samples in found] == tokens
    for one, other in zip(plain.kv.layers, ahead.kv.layers, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


def test_it_is_an_executor_that_launches() -> None:
    assert isinstance(assemble().runner, LaunchingExecutor)


@pytest.mark.parametrize("params", PARAMS)
def test_after_a_row_that_failed_any_token_will_do(params: SamplingParams) -> None:
    """The next step may have been launched by the time the failure shows."""
    made = assemble()
    request = Request("a", [1, 2, 3], params, 0)
    made.runner.launch(StepPlan(0, (request.chunk(None),)))
    for layer in made.kv.layers:
        layer[0].fill_(float("nan"))
    failed = made.runner.launch(StepPlan(1, (request.chunk(PENDING),)))
    after = made.runner.launch(StepPlan(2, (request.chunk(PENDING),)))
    for launched in (failed, after):
        assert "the best logit is nan" in str(launched.result().samples[0].error)


def test_closing_with_steps_under_way() -> None:
    made = assemble()
    [request] = make_requests(random.Random(0), 1)
    made.runner.launch(StepPlan(0, (request.chunk(None),)))
    made.runner.launch(StepPlan(1, (request.chunk(PENDING),)))
    made.runner.close()
    made.runner.close()
    with pytest.raises(AssertionError, match="the executor is closed"):
        made.runner.launch(StepPlan(2, (request.chunk(3),)))
