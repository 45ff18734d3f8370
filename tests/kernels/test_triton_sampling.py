"""Tokens chosen on the device against the executor's sampler, which is the definition."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.core.request import SamplingParams
from bros.executor.sampler import noise_start
from support.kernel_cases import needs_triton, triton_backend
from support.sampling import IndexedSpec, sample_on_host
from support.tier import by_tier, examples

BACKEND = triton_backend()
VOCAB = 1500


@pytest.fixture(autouse=True, scope="module")
def scratch_with_anything() -> Iterator[None]:
    """What is allocated is not zero, as it mostly is where nothing ran before."""
    new_empty = Tensor.new_empty
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "new_empty", lambda *args, **kw: new_empty(*args, **kw).fill_(1))
        yield


def on_device(logits: Tensor, specs: Sequence[IndexedSpec]) -> list[int]:
    from bros.kernels.triton.sampling import SamplingTensors, sample_tokens

    starts = [noise_start(spec.seed, spec.index) for spec in specs]
    params = [spec.params for spec in specs]

    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=BACKEND.device)

    chosen = sample_tokens(
        logits.to(BACKEND.device),
        SamplingTensors(
            column([p.temperature for p in params], torch.float32),
            column([p.min_p for p in params], torch.float32),
            column([p.top_k for p in params], torch.int32),
            column([p.top_p for p in params], torch.float64),
            column([s - 2**64 if s >= 2**63 else s for s in starts], torch.int64),
        ),
    )
    tokens: list[int] = chosen.tolist()
    return tokens


@needs_triton
@pytest.mark.parametrize("vocab", [1, 7, 4096, 9000])
def test_the_best_tokens_are_those_of_torch(vocab: int) -> None:
    from bros.kernels.triton.sampling import best_tokens

    logits = torch.randn(12, vocab, generator=torch.Generator().manual_seed(vocab)).round(
        decimals=1
    )
    logits[1, vocab // 2] = logits[1, -1] = 1e9  # the first of equal ones
    logits[2] = float("-inf")
    logits[3, vocab // 2] = float("inf")
    logits[4] = 0.0
    logits[5, -1] = float("nan")
    out = torch.full((2, len(logits)), -7, dtype=torch.int32, device=BACKEND.device)
    best_tokens(logits.to(BACKEND.device), out)
    tokens, bits = out.cpu()
    peaks = bits.view(torch.float32)
    expected, best = logits.max(dim=1)
    torch.testing.assert_close(peaks, expected, rtol=0, atol=0, equal_nan=True)
    known = ~expected.isnan()
    assert torch.equal(tokens[known], best[known].int())
    assert ((tokens >= 0) & (tokens < vocab)).all()


def assert_same(logits: Tensor, specs: Sequence[IndexedSpec]) -> None:
    expected = [token for token, _ in sample_on_host(logits, specs)]
    assert on_device(logits, specs) == expected


def random_logits(rows: int, seed: int, spread: float = 3.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, VOCAB, generator=generator) * spread


@needs_triton
@pytest.mark.parametrize("seed", range(2))
def test_the_same_tokens_are_drawn(seed: int) -> None:
    rng = random.Random(seed)
    specs = [
        IndexedSpec(
            SamplingParams(
                temperature=rng.choice([0.0, 0.3, 1.0, 2.0]),
                top_k=rng.choice([0, 1, 7, 200, 10_000]),
                top_p=rng.choice([1.0, 0.95, 0.4, 0.01]),
                min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
            ),
            seed=rng.getrandbits(64) - 2**63,
            index=index,
        )
        for index in range(8)
    ]
    assert_same(random_logits(8, seed, rng.choice([0.1, 1.0, 5.0])), specs)


@needs_triton
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=3),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.2),
        SamplingParams(top_k=40, top_p=0.7, temperature=1.5),
    ],
    ids=["top_k", "top_p", "min_p", "all"],
)
def test_equal_logits_are_allowed_or_refused_together(params: SamplingParams) -> None:
    # Few different values, so that every bound lies in the middle of many equals.
    logits = (random_logits(4, 5) / 2).round()
    assert_same(logits, [IndexedSpec(params, seed=7, index=i) for i in range(4)])


@st.composite
def rows_of_logits(draw: st.DrawFn) -> Tensor:
    """fp32 [1, vocab] whose best tokens lie anywhere, or all in one group, among many equals or
    alone, or beside tokens that are impossible."""
    vocab = draw(st.integers(1, 40 * 256))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    logits = torch.randn(1, vocab, generator=generator) * draw(st.sampled_from([0.1, 2.0, 8.0]))
    kind = draw(st.sampled_from(["any", "ascending", "few values", "a peak", "impossible"]))
    if kind == "ascending":
        logits = logits.sort(dim=1).values
    elif kind == "few values":
        logits = (logits / 2).round()
    elif kind == "a peak":
        logits[0, draw(st.integers(0, vocab - 1))] = 60.0
    elif kind == "impossible" and vocab > 1:
        logits[0, : draw(st.integers(1, vocab - 1))] = float("-inf")
    return logits


@needs_triton
@settings(max_examples=examples(8), deadline=None)
@given(
    logits=rows_of_logits(),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 50), st.integers(1, 40 * 256)),
    top_p=st.one_of(st.just(1.0), st.sampled_from([1e-6, 0.3, 0.9, 0.999])),
    min_p=st.sampled_from([0.0, 0.0, 1e-4, 0.3]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_any_bounds_leave_the_tokens_they_should(
    logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same(logits, [IndexedSpec(params, seed=seed, index=3)])


@needs_triton
@pytest.mark.parametrize("top_k", [2, pytest.param(9, marks=pytest.mark.long)])
def test_every_allowed_token_is_drawn_and_no_other(top_k: int) -> None:
    """They are about as likely as each other, so that one more or less would show."""
    rows = 12 if top_k == 2 else 64
    logits = random_logits(1, 8, 1e-3).expand(rows, VOCAB).contiguous()
    params = SamplingParams(top_k=top_k)
    specs = [IndexedSpec(params, seed=9, index=i) for i in range(rows)]
    assert set(on_device(logits, specs)) == set(logits[0].topk(top_k).indices.tolist())


@needs_triton
@pytest.mark.parametrize(
    "params",
    by_tier(
        fast=[(14, 0.9, 1e-4), (7, 1.0, 0.3)],
        long=[(5, 0.999, 0.0), (14, 0.9, 1e-4), (3, 0.3, 0.0), (7, 1.0, 0.3)],
    ),
)
@pytest.mark.parametrize("groups", [17, pytest.param(8, marks=pytest.mark.long)])
def test_the_best_tokens_may_lie_in_one_group(
    groups: int, params: tuple[int, float, float]
) -> None:
    """The best of most groups are then beyond all bounds."""
    top_k, top_p, min_p = params
    generator = torch.Generator().manual_seed(groups)
    logits = torch.randn(3, 256 * groups, generator=generator).sort(dim=1).values
    sampling = SamplingParams(temperature=3.0, top_k=top_k, top_p=top_p, min_p=min_p)
    assert_same(logits, [IndexedSpec(sampling, seed=1, index=i) for i in range(3)])


@needs_triton
def test_of_equals_the_first_is_the_greedy_choice() -> None:
    logits = random_logits(3, 1)
    logits[0, [1200, 30, 1400]] = 50.0
    logits[1, VOCAB - 1] = 50.0
    logits[2] = -7.0
    greedy = IndexedSpec(SamplingParams(temperature=0.0), seed=0)
    assert on_device(logits, [greedy] * 3) == [30, VOCAB - 1, 0]


@needs_triton
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_are_found(temperature: float) -> None:
    logits = random_logits(5, 2)
    logits[0, 1400] = float("nan")
    logits[1, 3] = float("inf")
    logits[2] = float("-inf")
    logits[3, 5:] = float("-inf")
    spec = IndexedSpec(SamplingParams(temperature=temperature), seed=3, index=1)
    found = on_device(logits, [spec] * 5)
    assert found[:3] == [-1, -1, -1]
    assert found[3:] == [token for token, _ in sample_on_host(logits[3:], [spec] * 2)]


@needs_triton
def test_no_rows_give_no_tokens() -> None:
    assert on_device(torch.zeros(0, VOCAB), []) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@needs_triton
@pytest.mark.gpu
def test_the_same_tokens_are_drawn_from_a_large_vocabulary() -> None:
    rng = random.Random(0)
    logits = torch.randn(200, 128_256, generator=torch.Generator().manual_seed(0)) * 4
    specs = [
        IndexedSpec(
            SamplingParams(
                temperature=rng.uniform(0.1, 2.0),
                top_k=rng.choice([0, 1, 50, 3000]),
                top_p=rng.choice([1.0, 0.95, 0.5]),
                min_p=rng.choice([0.0, 0.05]),
            ),
            seed=rng.getrandbits(63),
            index=index,
        )
        for index in range(200)
    ]
    expected = [token for token, _ in sample_on_host(logits, specs)]
    # Sums of 100,000 weights: a bound may fall beside a token once in a while.
    differing = sum(a != b for a, b in zip(on_device(logits, specs), expected, strict=True))
    assert differing <= 2
