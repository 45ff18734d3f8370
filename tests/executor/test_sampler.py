"""The row samplers against a plain float64 one, against transformers, and against statistics.

Every test runs on NumPy and on the fastest compiled kernels; those that compare them, on each
instruction set.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bros.core.plan import SampleSpec
from bros.core.request import SamplingParams
from bros.executor.sampler import (
    DeviceStepSampler,
    HostStepSampler,
    RowSampler,
    _nucleus_bound,
    noise,
    noise_start,
    noise_starts,
)
from support.kernel_cases import torch_threads
from support.sampling import ROW_SAMPLERS, IndexedSpec, ask, row_sampler, sample_rows
from support.tier import by_tier
from support.tier import seed as tier_seed

NAMES = ("seed", "index", "number")


@pytest.fixture(scope="module", params=ROW_SAMPLERS[:2])
def sampler(request: pytest.FixtureRequest) -> RowSampler:
    return row_sampler(request.param)


# ---- The oracle: every step written as it is defined, one token after the other.


def oracle(logits: list[float], spec: IndexedSpec, d_mass: float = 0.0) -> set[int]:
    """The token, and those that win as well but for a near-tie (1e-4). d_mass moves top_p."""
    x = adjusted_by_oracle(logits, spec)
    if spec.params.temperature == 0:
        return {x.index(max(x))}
    weights = [math.exp((value - max(x)) / spec.params.temperature) for value in x]
    allowed = set(allowed_by_oracle(x, weights, spec.params, d_mass))
    masses = [weight if i in allowed else 0.0 for i, weight in enumerate(weights)]
    return winners(masses, spec)


def winners(masses: Sequence[float], spec: IndexedSpec, tie: float = 1e-4) -> set[int]:
    """The race between blocks of 256, then between the tokens of a block that may have won."""
    seed, index = spec.seed, spec.index
    starts = range(0, len(masses), 256)
    blocks = [math.fsum(masses[start : start + 256]) for start in starts]
    found = set()
    for block in close_to_first(blocks, noise(seed, index, 2**32, len(blocks)), tie):
        start = block * 256
        inner = masses[start : start + 256]
        times = noise(seed, index, start, len(inner))
        found |= {start + i for i in close_to_first(inner, times, tie)}
    return found


def close_to_first(masses: Sequence[float], noises: np.ndarray, tie: float) -> list[int]:
    times = [float(t) / m if m > 0 else math.inf for t, m in zip(noises, masses, strict=True)]
    return [i for i, time in enumerate(times) if time <= min(times) * (1 + tie)]


def adjusted_by_oracle(logits: list[float], spec: IndexedSpec) -> list[float]:
    p, x = spec.params, list(logits)
    for token, bias in p.logit_bias.items():
        x[token] += bias
    for token in spec.forbidden:
        x[token] = -math.inf
    for token in set(spec.token_ids):
        factor = p.repetition_penalty
        x[token] = x[token] / factor if x[token] > 0 else x[token] * factor
    for token, count in Counter(spec.token_ids[spec.prompt_len :]).items():
        x[token] -= p.presence_penalty + p.frequency_penalty * count
    return x


def allowed_by_oracle(
    x: list[float], weights: list[float], p: SamplingParams, d_mass: float
) -> list[int]:
    allowed = [i for i in range(len(x)) if weights[i] >= p.min_p]
    if 0 < p.top_k < len(allowed):
        kth = sorted((x[i] for i in allowed), reverse=True)[p.top_k - 1]
        allowed = [i for i in allowed if x[i] >= kth]
    if p.top_p < 1:
        mass, goal = 0.0, (p.top_p + d_mass) * sum(weights[i] for i in allowed)
        for last in sorted(allowed, key=lambda i: -x[i]):
            mass += weights[last]
            if mass >= goal:
                break
        allowed = [i for i in allowed if x[i] >= x[last]]
    return allowed


def acceptable(logits: list[float], spec: IndexedSpec) -> set[int]:
    """What the oracle says, also with top_p a hair's breadth (1e-5) away."""
    return set().union(*(oracle(logits, spec, d_mass) for d_mass in (0.0, -1e-5, 1e-5)))


def sample_one(sampler: RowSampler, logits: list[float] | np.ndarray, spec: IndexedSpec) -> int:
    row = torch.tensor(np.asarray(logits, dtype=np.float32))[None]
    return sample_rows(sampler, row, [spec])[0][0]


# A grid, so that equal logits occur and different ones differ by more than rounding.
grid = st.integers(-640, 640).map(lambda i: i / 32)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], IndexedSpec]:
    logits = draw(st.lists(grid, min_size=2, max_size=40))
    token = st.integers(0, len(logits) - 1)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.05, 0.7, 1.0, 1.3, 10.0])),
        top_p=draw(st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01])),
        top_k=draw(st.sampled_from([0, 1, 2, 5, 30, 1000])),
        min_p=draw(st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0])),
        logit_bias=draw(st.dictionaries(token, st.sampled_from([-100, -1, 0.5, 100]), max_size=3)),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.5, -1.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.25, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.25, 0.5])),
    )
    history = draw(st.lists(token, max_size=12)) if params.needs_history else []
    forbidden = draw(st.lists(token, max_size=min(3, len(logits) - 1)))
    spec = IndexedSpec(
        params,
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        index=draw(st.integers(0, 100_000)),
        prompt_len=draw(st.integers(0, len(history))),
        token_ids=history,
        forbidden=forbidden,
    )
    return logits, spec


@given(cases())
def test_token_is_the_one_of_the_plain_sampler(
    sampler: RowSampler, case: tuple[list[float], IndexedSpec]
) -> None:
    logits, spec = case
    assert sample_one(sampler, logits, spec) in acceptable(logits, spec)


@pytest.mark.parametrize("vocab", [255, 256, 257, 5003, 49152])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6, top_p=0.95),
        SamplingParams(temperature=2.0, top_p=0.9),
        SamplingParams(top_k=200, top_p=0.8),
        SamplingParams(top_k=4000, min_p=0.02),
    ],
    ids=["plain", "nucleus", "hot nucleus", "top_k and top_p", "large top_k and min_p"],
)
def test_large_vocabularies(
    sampler: RowSampler, vocab: int, spread: float, params: SamplingParams
) -> None:
    rng = np.random.default_rng(vocab)
    logits = np.round(rng.standard_normal(vocab) * spread * 512) / 512
    for index in range(3):
        spec = IndexedSpec(params, seed=7, index=index)
        assert sample_one(sampler, logits, spec) in fast_acceptable(logits, spec)


def fast_acceptable(
    logits: np.ndarray, spec: IndexedSpec, tie: float = 1e-4, d_min_p: float = 0.0
) -> set[int]:
    """The oracle for filters and draws only, in float64 arrays because of the size."""
    p = spec.params
    weights = np.exp((logits - logits.max()) / p.temperature)
    order = np.argsort(-logits, kind="stable")
    found: set[int] = set()
    for d_mass in (-1e-5, 0.0, 1e-5):
        bound = -np.inf
        if 0 < p.top_k < len(logits):
            bound = logits[order[p.top_k - 1]]
        allowed = (logits >= bound) & (weights >= p.min_p * (1 + d_min_p))
        if p.top_p < 1.0:
            ranked = order[allowed[order]]
            reached = np.cumsum(weights[ranked])
            size = np.searchsorted(reached, (p.top_p + d_mass) * reached[-1])
            allowed &= logits >= logits[ranked[min(size, len(ranked) - 1)]]
        found |= winners(np.where(allowed, weights, 0.0), spec, tie)
    return found


# ---- The compiled sampler against the definition.


def any_logits(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Peaked and flat rows, some with many equal logits or many impossible tokens."""
    spread = rng.choice([0.001, 0.3, 1.0, 4.0, 12.0], (rows, 1))
    logits = rng.standard_normal((rows, vocab)) * spread
    logits[::3] = np.round(logits[::3] * 2) / 2
    logits[1::4, : vocab // 2] = -np.inf
    logits[:, rng.integers(vocab)] += rng.choice([0.0, 0.0, 8.0], rows)
    return logits.astype(np.float32)


def any_spec(rng: random.Random, vocab: int) -> IndexedSpec:
    params = SamplingParams(
        temperature=rng.choice([0.0, 0.2, 0.7, 1.0, 3.0, 100.0]),
        top_p=rng.choice([1.0, 1.0, 0.999999, 0.95, 0.5, 0.01]),
        top_k=rng.choice([0, 0, 1, 2, 40, vocab - 1, rng.randrange(1, vocab + 1)]),
        min_p=rng.choice([0.0, 0.0, 1e-6, 0.05, 0.9, 1.0]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.0, 1.3, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, 0.0, 1.0, -0.5]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.0, 0.3]),
        logit_bias={rng.randrange(vocab): rng.uniform(-5, 5) for _ in range(rng.choice([0, 0, 4]))},
    )
    history = [rng.randrange(vocab) for _ in range(60)] if params.needs_history else []
    forbidden = [
        rng.randrange(vocab // 2) for _ in range(rng.choice([0, 0, 2]) if vocab > 9 else 0)
    ]
    seed = rng.getrandbits(64) - 2**63
    return IndexedSpec(params, seed, 20, history, forbidden, index=rng.randrange(10**6))


@pytest.mark.parametrize("name", ROW_SAMPLERS[1:])
def test_the_compiled_sampler_draws_the_tokens_of_the_definition(name: str) -> None:
    """Or where two tokens, or a bound and a token, tie within 1e-5."""
    compiled, defined = row_sampler(name), row_sampler("numpy")
    chance = random.Random(tier_seed(5))
    rng = np.random.default_rng(chance.getrandbits(60))
    differing = 0
    rounds, rows = by_tier(fast=12, long=250), 16
    for _ in range(rounds):
        for vocab in (1, 2, 255, 256, 257, 1000, 4111):
            logits = any_logits(rng, rows, vocab)
            specs = [any_spec(chance, vocab) for _ in range(rows)]
            given = torch.from_numpy(logits)
            found = sample_rows(compiled, given, specs)
            for row, (ours, theirs) in enumerate(
                zip(found, sample_rows(defined, given, specs), strict=True)
            ):
                if ours[0] != theirs[0]:
                    differing += 1
                    ties = near_ties(logits[row], specs[row])
                    assert {ours[0], theirs[0]} <= ties, (vocab, specs[row])
    assert differing <= rounds * 7 * rows / 2000


def near_ties(logits: np.ndarray, spec: IndexedSpec) -> set[int]:
    changed = np.array(adjusted_by_oracle(logits.tolist(), spec))
    return set().union(*(fast_acceptable(changed, spec, 1e-5, d) for d in (0.0, -1e-5, 1e-5)))


@pytest.mark.parametrize("name", ROW_SAMPLERS[1:])
def test_log_probabilities_are_those_of_the_definition(name: str) -> None:
    rng = np.random.default_rng(3)
    for vocab in (1, 6, 255, 257, 3000):
        logits = torch.from_numpy(any_logits(rng, 12, vocab))
        params = [SamplingParams(logprobs=k, logit_bias={0: 1.0}) for k in (0, 1, 5, 20)]
        specs = [IndexedSpec(params[row % 4], row) for row in range(12)]
        found = sample_rows(row_sampler(name), logits, specs)
        for (_, ours), (_, theirs) in zip(
            found, sample_rows(row_sampler("numpy"), logits, specs), strict=True
        ):
            assert ours is not None and theirs is not None
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-6)
            assert [t for t, _ in ours.top] == [t for t, _ in theirs.top]
            values = [value for _, value in theirs.top]
            assert [value for _, value in ours.top] == pytest.approx(values, abs=1e-6)


@pytest.mark.parametrize("name", ROW_SAMPLERS[1:])
def test_a_token_outside_the_vocabulary_is_found(name: str) -> None:
    penalized = SamplingParams(repetition_penalty=1.1)
    for spec in (
        IndexedSpec(SamplingParams(logit_bias={500: 1.0}), 0),
        IndexedSpec(SamplingParams(), 0, forbidden=[500]),
        IndexedSpec(penalized, 0, 1, [3, 500]),
        IndexedSpec(penalized, 0, 1, [3, -1]),
    ):
        with pytest.raises(IndexError, match="outside the vocabulary"):
            sample_rows(row_sampler(name), torch.zeros(1, 500), [spec])


# ---- Independence


def mixed_specs(rng: random.Random, rows: int, vocab: int) -> list[IndexedSpec]:
    specs = []
    for row in range(rows):
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.5, 1.0, 1.5]),
            top_p=rng.choice([1.0, 0.95, 0.3]),
            top_k=rng.choice([0, 0, 1, 40, 3000]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            logprobs=rng.choice([None, 0, 5]),
            repetition_penalty=rng.choice([1.0, 1.2]),
            logit_bias=rng.choice([{}, {3: 5.0}]),
        )
        history = [rng.randrange(vocab) for _ in range(30)] if params.needs_history else []
        specs.append(IndexedSpec(params, rng.getrandbits(60), 10, history, index=row))
    return specs


@pytest.mark.parametrize("vocab", [300, 5003, 49152])
def test_a_row_is_the_same_alone_in_a_batch_and_in_any_order(
    sampler: RowSampler, vocab: int
) -> None:
    rows = 12
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(rows, vocab, generator=generator) * 4
    specs = mixed_specs(random.Random(vocab), rows, vocab)
    together = sample_rows(sampler, logits, specs)
    backwards = sample_rows(sampler, logits.flip(0), specs[::-1])
    alone = [sample_rows(sampler, logits[i : i + 1].clone(), [specs[i]])[0] for i in range(rows)]
    assert together == alone == backwards[::-1]
    for threads in (2, 5):
        with torch_threads(threads):
            assert sample_rows(sampler, logits, specs) == together


def test_logits_are_not_changed_and_no_rows_are_fine(sampler: RowSampler) -> None:
    logits = torch.randn(8, 500, generator=torch.Generator().manual_seed(0))
    before = logits.clone()
    sample_rows(sampler, logits, mixed_specs(random.Random(1), 8, 500))
    assert torch.equal(logits, before)
    assert sample_rows(sampler, logits[:0], []) == []


# ---- Statistics


def chi_square_limit(degrees: int, z: float = 3.3) -> float:
    """Wilson and Hilferty's approximation of a chi-square quantile; z = 3.3 is 99.95 %."""
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3


@pytest.mark.parametrize("seed", by_tier(fast=[0, -5], long=[0, 1, -5, 2**63 - 1]))
def test_draws_follow_the_distribution(sampler: RowSampler, seed: int) -> None:
    logits = torch.linspace(-2, 1.5, 30)
    draws = 20_000
    params = SamplingParams(temperature=0.8)
    specs = [IndexedSpec(params, seed, index=i) for i in range(draws)]
    counts = Counter(token for token, _ in sample_rows(sampler, logits.expand(draws, -1), specs))
    expected = torch.softmax(logits.double() / 0.8, dim=0) * draws
    chi_square = sum((counts[i] - e) ** 2 / e for i, e in enumerate(expected.tolist()))
    assert chi_square < chi_square_limit(29)


def test_draws_follow_the_distribution_over_many_blocks(sampler: RowSampler) -> None:
    """Ten blocks of unequal mass; counted by block and, within all of them, by position."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2500, generator=generator) + torch.linspace(0, 1, 2500)
    draws, rows = 20_000, logits.expand(1000, -1)
    drawn = torch.tensor(
        [
            token
            for first in range(0, draws, 1000)
            for token, _ in sample_rows(
                sampler,
                rows,
                [IndexedSpec(SamplingParams(), 9, index=first + i) for i in range(1000)],
            )
        ]
    )
    chances = torch.softmax(logits.double(), dim=0)
    for groups in (torch.arange(2500) // 256, torch.arange(2500) % 25):
        expected = torch.zeros(25).double().index_add_(0, groups, chances)[: groups.max() + 1]
        counts = torch.bincount(groups[drawn], minlength=len(expected))
        chi_square = float(((counts - expected * draws) ** 2 / (expected * draws)).sum())
        assert chi_square < chi_square_limit(len(expected) - 1)


def test_rounding_errors_change_a_draw_only_at_near_ties(sampler: RowSampler) -> None:
    """Logits of another batch differ by about 1e-5: of 3000 draws hardly one may change."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(1, 49152, generator=generator) * 3
    shifted = logits + torch.randn(1, 49152, generator=generator) * 1e-5
    changed = 0
    for index in range(3000):
        spec = IndexedSpec(SamplingParams(), 5, index=index)
        changed += sample_rows(sampler, logits, [spec]) != sample_rows(sampler, shifted, [spec])
    assert changed <= 2


@pytest.mark.parametrize("along", ["seed", "index", "number", "all"])
def test_random_numbers_are_exponential_and_independent_of_their_neighbours(along: str) -> None:
    def draw(i: int) -> float:
        seed, index, number = (i if along in (name, "all") else 11 for name in NAMES)
        return math.exp(-noise(seed, index, number, 1)[0])

    numbers = [draw(i) for i in range(40_000)]
    assert all(0.0 < u < 1.0 for u in numbers)
    pairs = Counter(
        (int(a * 8), int(b * 8)) for a, b in zip(numbers[::2], numbers[1::2], strict=True)
    )
    expected = 20_000 / 64
    chi_square = sum((pairs[a, b] - expected) ** 2 / expected for a in range(8) for b in range(8))
    assert chi_square < chi_square_limit(63)


def test_noise_depends_on_its_number_alone() -> None:
    assert np.array_equal(noise(-4, 2, 100, 50), noise(-4, 2, 0, 1000)[100:150])


@given(st.lists(st.tuples(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**40)), max_size=9))
def test_the_starts_of_many_draws_are_those_of_each(drawn: list[tuple[int, int]]) -> None:
    specs = [IndexedSpec(SamplingParams(), seed, index=index) for seed, index in drawn]
    assert noise_starts(specs, [index for _, index in drawn]).tolist() == [
        noise_start(seed, index) for seed, index in drawn
    ]


def test_same_seed_same_draw_other_index_other_draw(sampler: RowSampler) -> None:
    logits = [0.0] * 1000
    spec = IndexedSpec(SamplingParams(), seed=3)
    assert sample_one(sampler, logits, spec) == sample_one(sampler, logits, spec)
    draws = [sample_one(sampler, logits, dataclasses.replace(spec, index=i)) for i in range(20)]
    assert len(set(draws)) > 15


# ---- Against transformers


def allowed_by_draws(sampler: RowSampler, logits: torch.Tensor, params: SamplingParams) -> set[int]:
    specs = [IndexedSpec(params, 5, index=index) for index in range(2000)]
    return {token for token, _ in sample_rows(sampler, logits.expand(2000, -1), specs)}


def allowed_by_transformers(scores: torch.Tensor, *warpers: object) -> set[int]:
    for warper in warpers:
        scores = warper(None, scores)  # type: ignore[operator]
    return set(torch.nonzero(torch.isfinite(scores[0])).flatten().tolist())


@pytest.mark.parametrize("seed", by_tier(fast=[1], long=[1, 2, 3]))
def test_filters_allow_what_those_of_transformers_allow(sampler: RowSampler, seed: int) -> None:
    # Every token has more than 1.5 % of the mass: 2000 draws meet all that are allowed.
    logits = torch.rand(20, generator=torch.Generator().manual_seed(seed)) * 2
    scores = logits[None]
    for top_k in (1, 7, 19):
        expected = allowed_by_transformers(scores, TopKLogitsWarper(top_k))
        assert allowed_by_draws(sampler, logits, SamplingParams(top_k=top_k)) == expected
    for top_p in (0.01, 0.5, 0.93):
        expected = allowed_by_transformers(scores, TopPLogitsWarper(top_p))
        assert allowed_by_draws(sampler, logits, SamplingParams(top_p=top_p)) == expected
    for min_p in (0.2, 0.6, 1.0):
        expected = allowed_by_transformers(scores, MinPLogitsWarper(min_p))
        assert allowed_by_draws(sampler, logits, SamplingParams(min_p=min_p)) == expected
    expected = allowed_by_transformers(
        scores / 0.9, MinPLogitsWarper(0.2), TopKLogitsWarper(12), TopPLogitsWarper(0.8)
    )
    params = SamplingParams(temperature=0.9, min_p=0.2, top_k=12, top_p=0.8)
    assert allowed_by_draws(sampler, logits, params) == expected


@pytest.mark.parametrize("penalty", [0.5, 1.1, 2.0])
def test_repetition_penalty_is_that_of_transformers(sampler: RowSampler, penalty: float) -> None:
    processor = RepetitionPenaltyLogitsProcessor(penalty)
    rng = torch.Generator().manual_seed(9)
    logits = torch.randn(200, 12, generator=rng)
    history = torch.randint(0, 12, (200, 8), generator=rng)
    expected = processor(history, logits.clone()).argmax(1).tolist()
    params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
    specs = [IndexedSpec(params, 0, 3, row) for row in history.tolist()]
    tokens = [token for token, _ in sample_rows(sampler, logits, specs)]
    assert tokens == expected
    assert tokens != logits.argmax(1).tolist()


# ---- Single rules


GREEDY = SamplingParams(temperature=0.0)


def test_greedy_takes_the_first_of_equals(sampler: RowSampler) -> None:
    assert sample_one(sampler, [1.0, 4.0, 4.0, 0.0], IndexedSpec(GREEDY, 0)) == 1


def test_presence_and_frequency_count_output_only(sampler: RowSampler) -> None:
    logits = [2.0, 1.5, 0.0]
    presence = GREEDY.with_changes(presence_penalty=1.0)
    assert sample_one(sampler, logits, IndexedSpec(presence, 0, 2, [0, 0])) == 0
    assert sample_one(sampler, logits, IndexedSpec(presence, 0, 1, [0, 0])) == 1
    frequency = GREEDY.with_changes(frequency_penalty=0.3)
    assert sample_one(sampler, logits, IndexedSpec(frequency, 0, 0, [0])) == 0
    assert sample_one(sampler, logits, IndexedSpec(frequency, 0, 0, [0, 0])) == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bias_of_100_forces_and_bans(sampler: RowSampler, temperature: float) -> None:
    logits = [5.0, 4.0, -9.0]
    for index in range(50):
        forced = SamplingParams(temperature=temperature, logit_bias={2: 100})
        assert sample_one(sampler, logits, IndexedSpec(forced, 1, index=index)) == 2
        banned = SamplingParams(temperature=temperature, logit_bias={0: -100})
        assert sample_one(sampler, logits, IndexedSpec(banned, 1, index=index)) != 0


def test_forbidden_beats_bias_and_filters(sampler: RowSampler) -> None:
    params = SamplingParams(logit_bias={0: 100}, top_k=1)
    assert sample_one(sampler, [5.0, 4.0, 3.0], IndexedSpec(params, 1, forbidden=(0,))) == 1


@pytest.mark.parametrize("temperature", [1e-300, 1e-6, 1.0, 100.0])
def test_top_k_of_one_is_greedy_at_any_temperature(sampler: RowSampler, temperature: float) -> None:
    logits = [10.0, 10.000001, 9.0]
    params = SamplingParams(temperature=temperature, top_k=1)
    assert {sample_one(sampler, logits, IndexedSpec(params, 1, index=i)) for i in range(20)} == {1}


def test_the_nucleus_of_many_tokens_that_are_nearly_alike_is_a_part_of_them(
    sampler: RowSampler,
) -> None:
    """So many that they are counted and not sorted, all in one place but the last."""
    logits = [*np.linspace(0.0, -0.0015, 6000), -3.9]
    params = SamplingParams(top_p=0.5)
    drawn = {
        sample_one(sampler, logits, IndexedSpec(params, 1, index=index)) for index in range(20)
    }
    assert len(drawn) > 15
    assert max(drawn) <= 3001


@pytest.mark.parametrize("share", [0.01, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0])
def test_the_nucleus_of_many_tokens_ends_where_it_does_after_a_full_sort(
    spread: float, share: float
) -> None:
    logits = np.random.default_rng(0).normal(0.0, spread, 20_000).astype(np.float32)
    weights = np.exp(logits - logits.max())
    ordered = np.sort(weights)[::-1]
    reached = np.cumsum(ordered, dtype=np.float64)
    assert _nucleus_bound(weights, share) == ordered[np.searchsorted(reached, share * reached[-1])]


def test_top_k_beyond_the_vocabulary_is_off(sampler: RowSampler) -> None:
    logits = [0.1 * i for i in range(20)]
    for index in range(50):
        spec = IndexedSpec(SamplingParams(top_k=10_000), 1, index=index)
        plain = IndexedSpec(SamplingParams(), 1, index=index)
        assert sample_one(sampler, logits, spec) == sample_one(sampler, logits, plain)


def test_equal_logits_pass_a_filter_together(sampler: RowSampler) -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 3.0, 0.0])
    assert allowed_by_draws(sampler, logits, SamplingParams(top_k=2)) == {1, 2, 3}
    assert allowed_by_draws(sampler, logits, SamplingParams(top_p=0.1)) == {1, 2, 3}
    equal = allowed_by_draws(
        sampler, torch.zeros(5000), SamplingParams(top_p=0.5)
    )  # > half of them
    assert min(equal) < 100 and max(equal) > 4900


def test_tokens_that_cannot_be_are_never_drawn(sampler: RowSampler) -> None:
    logits = torch.full((600,), -math.inf)
    logits[[0, 300, 599]] = 0.0
    assert allowed_by_draws(sampler, logits, SamplingParams()) == {0, 300, 599}
    assert allowed_by_draws(sampler, logits, SamplingParams(top_k=50, top_p=0.99)) == {0, 300, 599}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
def test_broken_logits_are_refused(sampler: RowSampler, bad: float, params: SamplingParams) -> None:
    with pytest.raises(ValueError, match="no token can be chosen"):
        sample_one(sampler, [0.0, bad, 1.0], IndexedSpec(params, 0))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_broken_logits_of_a_forbidden_token_give_no_logprobs(
    sampler: RowSampler, bad: float
) -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    with pytest.raises(ValueError, match="no token can be chosen"):
        sample_one(sampler, [0.0, bad, 1.0], IndexedSpec(params, 0, forbidden=(1,)))


@given(data=st.data())
def test_no_parameters_that_are_valid_make_it_fail(
    sampler: RowSampler, data: st.DataObject
) -> None:
    """A failure here would stop the engine for everybody."""
    tokens = st.integers(0, 49)
    params = SamplingParams(
        temperature=data.draw(st.sampled_from([0.0, 5e-324, 1e-40, 1e-10, 1.0, 100.0])),
        top_p=data.draw(st.sampled_from([5e-324, 1e-10, 0.5, 1.0])),
        top_k=data.draw(st.sampled_from([0, 1, 49, 2**31 - 1])),
        min_p=data.draw(st.sampled_from([0.0, 5e-324, 0.5, 1.0])),
        presence_penalty=data.draw(st.sampled_from([-2.0, 0.0, 2.0])),
        frequency_penalty=data.draw(st.sampled_from([-2.0, 0.0, 2.0])),
        repetition_penalty=data.draw(st.sampled_from([0.01, 1.0, 100.0])),
        logit_bias=data.draw(st.dictionaries(tokens, st.sampled_from([-100.0, 100.0]))),
        logprobs=data.draw(st.sampled_from([None, 0, 20])),
    )
    scale = data.draw(st.sampled_from([0.0, 1.0, 1e4]))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    history = data.draw(st.lists(tokens, min_size=3, max_size=30))
    spec = IndexedSpec(params, data.draw(st.integers(0, 2**63 - 1)), 2, history)
    ((token, _),) = sample_rows(sampler, torch.randn(1, 50, generator=generator) * scale, [spec])
    assert 0 <= token < 50


def test_everything_forbidden_is_refused(sampler: RowSampler) -> None:
    with pytest.raises(ValueError, match="no token can be chosen"):
        sample_one(sampler, [0.0, 1.0], IndexedSpec(GREEDY, 0, forbidden=(0, 1)))


# ---- Log-probabilities


@pytest.mark.parametrize("vocab", [5, 3000])
def test_logprobs_are_those_of_the_model_whatever_the_sampling(
    sampler: RowSampler, vocab: int
) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(4)) * 3
    expected = torch.log_softmax(logits[0].double(), dim=0)
    params = SamplingParams(temperature=0.2, top_k=3, logit_bias={0: 50.0}, logprobs=5)
    token, logprobs = sample_rows(sampler, logits, [IndexedSpec(params, 1)])[0]
    assert logprobs is not None
    assert token == logprobs.token_id == 0
    assert logprobs.logprob == pytest.approx(expected[0].item(), abs=1e-5)
    best = expected.topk(5)
    assert [i for i, _ in logprobs.top] == best.indices.tolist()
    assert [v for _, v in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_number_of_logprobs(sampler: RowSampler) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    none, zero, two, many = (
        sample_rows(sampler, logits, [IndexedSpec(GREEDY.with_changes(logprobs=k), 0)])[0][1]
        for k in (None, 0, 2, 20)
    )
    assert none is None
    assert zero is not None and zero.top == ()
    assert two is not None and [i for i, _ in two.top] == [1, 2]
    assert many is not None and [i for i, _ in many.top] == [1, 2, 3, 0]


# ---- Grammars.


class Allowing:
    """A constraint that allows some tokens; `asked` counts the masks."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = frozenset(tokens)
        self.asked = 0

    def allows(self, token_id: int) -> bool:
        return token_id in self._tokens

    def mask(self) -> bytes:
        self.asked += 1
        mask = bytearray(max(self._tokens, default=0) // 8 + 1)
        for token_id in self._tokens:
            mask[token_id // 8] |= 1 << token_id % 8
        return bytes(mask)


def constrained(spec: IndexedSpec, tokens: Sequence[int]) -> tuple[IndexedSpec, Allowing]:
    constraint = Allowing(tokens)
    return dataclasses.replace(spec, constraint=constraint), constraint


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.7, 1.5]), st.sampled_from([0, 3]))
def test_a_grammar_changes_nothing_where_it_allows_the_token(
    sampler: RowSampler, seed: int, temperature: float, top_k: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 2, (1, 700)).astype(np.float32))
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=0.9, logprobs=2)
    spec = IndexedSpec(params, seed, index=5)
    ((free, logprobs),) = sample_rows(sampler, logits, [spec])
    others = rng.choice(700, 40, replace=False).tolist()
    same, asked = constrained(spec, [*others, free])
    assert sample_rows(sampler, logits, [same]) == [(free, logprobs)] and asked.asked == 0
    other, asked = constrained(spec, [t for t in others if t != free])
    ((token, _),) = sample_rows(sampler, logits, [other])
    assert token in others and token != free and asked.asked == 1
    if temperature == 0.0:
        assert token == max((t for t in others if t != free), key=lambda t: float(logits[0, t]))


def test_tokens_under_a_grammar_have_their_probability_among_the_allowed_ones(
    sampler: RowSampler,
) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, 1.5, 0.2, 0.9]])
    allowed, draws = [1, 3, 5], by_tier(fast=4000, long=100_000)
    counts: Counter[int] = Counter()
    for seed in range(draws):
        spec, _ = constrained(IndexedSpec(SamplingParams(), seed), allowed)
        ((token, _),) = sample_rows(sampler, logits, [spec])
        counts[token] += 1
    weights = {token: math.exp(float(logits[0, token])) for token in allowed}
    for token, weight in weights.items():
        share = weight / sum(weights.values())
        error = math.sqrt(share * (1 - share) / draws)
        assert abs(counts[token] / draws - share) < 4 * error
    assert set(counts) == set(allowed)


class Failing:
    """A constraint whose grammar cannot say."""

    def allows(self, token_id: int) -> bool:
        raise ValueError("too complex")

    def mask(self) -> bytes:
        raise AssertionError("asked although it cannot say")


def test_each_row_of_a_step_gets_what_its_own_grammar_says(sampler: RowSampler) -> None:
    logits = torch.randn(5, 900, generator=torch.Generator().manual_seed(2)) * 2
    specs = [IndexedSpec(SamplingParams(top_p=0.9), row) for row in range(5)]
    free = [token for token, _ in sample_rows(sampler, logits, specs)]
    bound = [
        specs[0],
        constrained(specs[1], [free[1], 7])[0],
        constrained(specs[2], [t for t in (5, 600, 899) if t != free[2]])[0],
        dataclasses.replace(specs[3], constraint=Failing()),
        constrained(specs[4], [])[0],
    ]
    requests = [ask(str(row), spec) for row, spec in enumerate(bound)]
    step = HostStepSampler(sampler)
    found = step(logits, requests)
    assert [token.request_id for token in found] == list("01234")
    assert [token.token_id for token in found[:2]] == free[:2]
    assert found[2].token_id in (5, 600, 899)
    assert [token.error for token in found[3:]] == [
        "too complex",
        "the grammar allows no token here",
    ]
    assert [token.of_grammar for token in found] == [False, False, False, True, True]
    alone = [step(logits[row : row + 1], [requests[row]])[0] for row in range(5)]
    assert list(found) == alone


@pytest.mark.parametrize("vocab", [3, 8, 255, 700, 4100])
def test_masks_may_be_shorter_or_longer_than_the_vocabulary(
    sampler: RowSampler, vocab: int
) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab))
    greedy = IndexedSpec(GREEDY, 0)
    best = int(logits.argmax())
    for allowed in ([vocab - 1], [0], [1, vocab // 2], [vocab - 1, vocab + 3, vocab + 90]):
        spec, _ = constrained(greedy, [token for token in allowed if token != best])
        inside = [token for token in allowed if token != best and token < vocab]
        if not inside:
            with pytest.raises(ValueError, match="allows no token"):
                sample_rows(sampler, logits, [spec])
            continue
        ((token, _),) = sample_rows(sampler, logits, [spec])
        assert token == max(inside, key=lambda t: float(logits[0, t]))


def test_a_grammar_that_allows_nothing_is_an_error_of_its_row(sampler: RowSampler) -> None:
    spec, _ = constrained(IndexedSpec(SamplingParams(), 0), [])
    with pytest.raises(ValueError, match="allows no token"):
        sample_rows(sampler, torch.zeros(1, 10), [spec])


def test_rows_with_a_grammar_are_left_to_the_host_by_a_device_that_samples(
    sampler: RowSampler,
) -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [0.0, 3.0, 2.0, 1.0]])
    greedy = IndexedSpec(SamplingParams(temperature=0.0), 0)
    bound, _ = constrained(greedy, [2, 3])
    pending = DeviceStepSampler(sampler).begin(logits, [ask("a", greedy), ask("b", bound)])
    assert list(pending.host_rows) == [1]
    assert [sampled.token_id for sampled in pending.finish()] == [1, 2]


def test_each_step_of_a_device_leaves_its_own_rows_to_the_host(sampler: RowSampler) -> None:
    """Also where the parameters are those of the step before, or only some of them are."""
    logits = torch.randn(3, 8)
    greedy, drawn, logprobs = (
        IndexedSpec(SamplingParams(temperature=0.0), 0),
        IndexedSpec(SamplingParams(temperature=1.0), 0),
        IndexedSpec(SamplingParams(temperature=0.0, logprobs=1), 0),
    )
    forbidding = dataclasses.replace(greedy, forbidden=(1,))
    on_device: list[list[SampleSpec]] = []

    def draw(
        rows: torch.Tensor, specs: Sequence[SampleSpec], indexes: Sequence[int]
    ) -> torch.Tensor:
        on_device.append(list(specs))
        return torch.full((len(rows),), 7, dtype=torch.int32)

    device = DeviceStepSampler(sampler, draw)
    for specs, host_rows, drawn_rows in (
        ([greedy, greedy, drawn], [], [2]),
        ([greedy, forbidding, drawn], [1], [2]),
        ([greedy, greedy, drawn], [], [2]),
        ([greedy, logprobs, greedy], [1], []),
        ([logprobs, greedy], [0], []),
        ([drawn, drawn], [], [0, 1]),
    ):
        on_device.clear()
        pending = device.begin(logits[: len(specs)], [ask(str(i), s) for i, s in enumerate(specs)])
        assert list(pending.host_rows) == host_rows
        assert on_device == ([[specs[row] for row in drawn_rows]] if drawn_rows else [])
        tokens = [sampled.token_id for sampled in pending.finish()]
        assert all(tokens[row] == 7 for row in drawn_rows)
