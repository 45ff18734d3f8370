"""Choosing where the logits are against choosing row by row on the host."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.core.plan import SampledToken
from bros.core.request import SamplingParams
from bros.executor.sampler import DeviceStepSampler, HostStepSampler, SampleRequest
from support.device_runners import draw as draw_on_host
from support.kernel_cases import needs_triton, triton_backend
from support.sampling import ROW_SAMPLERS, IndexedSpec, ask, row_sampler

FASTEST = row_sampler(ROW_SAMPLERS[min(1, len(ROW_SAMPLERS) - 1)])  # that of engines
ON_HOST = HostStepSampler(FASTEST)
ON_DEVICE = DeviceStepSampler(FASTEST, draw_on_host)
GREEDY_ON_DEVICE = DeviceStepSampler(FASTEST)


def logits_of(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    """No two alike, so that nothing depends on how sums are rounded."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((rows, vocab)).astype(np.float32) * spread)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.0, 1e-30, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([1.0, 1.0, 0.95, 0.5, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 3, 50, 10**6]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5, 1.0]),
    logprobs=st.sampled_from([None, None, None, 2]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.0, 1.3]),
)


@st.composite
def specs(draw: st.DrawFn) -> IndexedSpec:
    params = draw(PARAMS)
    return IndexedSpec(
        params,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        index=draw(st.integers(0, 10**5)),
        prompt_len=1,
        token_ids=[3, 5, 3] if params.needs_history else (),
        forbidden=draw(st.sampled_from([(), (), (), (0, 2)])),
    )


@given(
    asked=st.lists(specs(), min_size=1, max_size=9),
    vocab=st.sampled_from([7, 255, 256, 257, 1000]),
    spread=st.sampled_from([0.01, 1.0, 5.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_device_chooses_what_the_host_chooses(
    asked: list[IndexedSpec], vocab: int, spread: float, seed: int
) -> None:
    logits = logits_of(len(asked), vocab, seed, spread)
    before = logits.clone()
    named = [ask(str(index), spec) for index, spec in enumerate(asked)]
    expected = ON_HOST(logits, named)
    assert ON_DEVICE(logits, named) == GREEDY_ON_DEVICE(logits, named) == expected
    assert torch.equal(logits, before)


@needs_triton
def test_triton_draws_what_the_host_draws() -> None:
    """A mixture of all that it can do; its kernel has tests of its own."""
    from bros.executor.cuda.device_sampler import draw

    device = triton_backend().device
    step_sampler = DeviceStepSampler(FASTEST, draw)
    logits = logits_of(9, 700, seed=1)
    logits[4, 600] = float("nan")
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-30),
        SamplingParams(temperature=0.6, top_p=0.95),
        SamplingParams(top_k=10**6, min_p=0.01),
        SamplingParams(top_k=20, top_p=0.8),
        SamplingParams(logprobs=1),
    ]
    for count in (9, 5):
        asked = [
            ask(str(row), IndexedSpec(kinds[row % 6], seed=-row, index=row)) for row in range(count)
        ]
        assert step_sampler(logits[:count].to(device), asked) == ON_HOST(logits[:count], asked)
    drawn = [ask(str(row), IndexedSpec(kinds[4], seed=7, index=row)) for row in range(9)]
    choice = step_sampler.begin(logits.to(device), drawn)
    assert choice.host_rows == []
    tokens = choice.tokens
    assert tokens is not None and tokens.dtype == torch.int32
    assert 0 <= int(tokens[4]) < 700, "a step after this one may look it up"
    assert choice.finish() == ON_HOST(logits, drawn)


def test_equal_logits_pass_top_k_together_and_the_first_wins_greedily() -> None:
    logits = torch.zeros(1, 600)
    logits[0, [500, 20, 300]] = 4.0
    greedy = IndexedSpec(SamplingParams(temperature=0.0), 0)
    assert ON_DEVICE(logits, [ask("a", greedy)])[0].token_id == 20
    top = IndexedSpec(SamplingParams(temperature=9.0, top_k=2), 0)
    rows = [ask(str(i), dataclasses.replace(top, index=i)) for i in range(40)]
    drawn = {token.token_id for token in ON_DEVICE(logits.expand(40, -1), rows)}
    assert drawn == {20, 300, 500}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_tokens_are_forbidden_the_host_chooses(temperature: float) -> None:
    logits = logits_of(1, 300, seed=0)
    best, second = logits[0].topk(2).indices.tolist()
    params = SamplingParams(temperature=temperature, top_k=1)
    choice = ON_DEVICE.begin(logits, [ask("a", IndexedSpec(params, 1, forbidden=(best,)))])
    assert list(choice.host_rows) == [0]
    assert choice.finish()[0].token_id == second


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_fail_their_own_row(bad: float, temperature: float) -> None:
    logits = logits_of(3, 300, seed=0)
    logits[1, 100:200] = bad
    if bad < 0:
        logits[1] = bad
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=5)
    asked = [ask(name, IndexedSpec(params, 1)) for name in "abc"]
    chosen = ON_DEVICE(logits, asked)
    assert chosen == ON_HOST(logits, asked)
    assert [token.error is None for token in chosen] == [True, False, True]


def test_no_request_samples() -> None:
    assert ON_DEVICE(torch.empty(0, 9), []) == ON_HOST(torch.empty(0, 9), []) == ()


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_the_device_has_the_tokens_that_need_no_host(plain: list[bool], rng: random.Random) -> None:
    """What the next step may take from there, before anything has come to the host."""
    choices = {
        True: [SamplingParams(temperature=0.0), SamplingParams(top_k=4)],
        False: [SamplingParams(logprobs=0), SamplingParams(logit_bias={3: 2.0})],
    }
    asked: list[SampleRequest] = [
        ask(str(row), IndexedSpec(rng.choice(choices[is_plain]), seed=row))
        for row, is_plain in enumerate(plain)
    ]
    logits = logits_of(len(asked), 300, rng.randrange(1000))
    choice = ON_DEVICE.begin(logits, asked)
    assert list(choice.host_rows) == [row for row, is_plain in enumerate(plain) if not is_plain]
    assert (choice.tokens is None) == (not any(plain))
    finished: tuple[SampledToken, ...] = choice.finish()
    assert finished == ON_HOST(logits, asked)
    for row, is_plain in enumerate(plain):
        if is_plain:
            assert choice.tokens is not None and choice.tokens.dtype == torch.int32
            assert int(choice.tokens[row]) == finished[row].token_id
    greedy = [row for row, (_, spec, _) in enumerate(asked) if spec.params.greedy]
    others = GREEDY_ON_DEVICE.begin(logits, asked).host_rows
    assert sorted([*others, *greedy]) == list(range(len(asked)))
