"""Cost models recovered from steps whose times are known."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from bros.profiling.fitting import (
    MAX_KNOTS,
    ChunkShape,
    CopySample,
    Sample,
    StepShape,
    error_of,
    fit,
    load_of,
    nnls,
    relative_errors,
    with_copies,
)
from bros.scheduler.cost_model import CostModel
from support.tier import examples

PADDING = ((16, 1), (128, 8), (256, 16), (512, 32))
PLANTED = CostModel(
    constant_s=0.028,
    token_s=0.0002,
    sample_s=0.0003,
    pair_s=4e-7,
    context_s=2.4e-6,
    hinges=((8, 0.0009), (64, -0.0002)),
    padding=PADDING,
)


def grid() -> list[StepShape]:
    decodes = [
        (ChunkShape(1, context, True),) * rows
        for rows in (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)
        for context in (15, 255, 1023)
    ]
    prompts = [
        (ChunkShape(tokens, context, sampled),)
        for tokens in (4, 8, 16, 32, 64, 96, 128, 256, 512)
        for context in (0, 512)
        for sampled in (True, False)
    ]
    return decodes + prompts


def mixed_steps(rng: random.Random, count: int) -> list[StepShape]:
    return [
        (ChunkShape(1, rng.randrange(800), True),) * rng.randrange(1, 40)
        + (ChunkShape(rng.randrange(2, 300), rng.randrange(600), rng.random() < 0.5),)
        for _ in range(count)
    ]


def alike(rows: int, context: int, shared: int) -> StepShape:
    """Rows that have their first `shared` tokens in common."""
    others = (ChunkShape(1, context, True, shared),) * (rows - 1)
    return (ChunkShape(1, context, True), *others)


ALIKE = [
    alike(rows, shared + own, shared)
    for rows in (4, 8, 16, 32)
    for shared in (256, 1024)
    for own in (15, 255)
]


def timed(
    shapes: list[StepShape], model: CostModel, noise: float = 0.0, rng: random.Random | None = None
) -> list[Sample]:
    draw = rng or random.Random(0)
    return [
        Sample(shape, model.seconds(load_of(shape)) * draw.lognormvariate(0.0, noise))
        for shape in shapes
    ]


def test_planted_coefficients_are_recovered() -> None:
    result = fit(timed(grid(), PLANTED), PADDING)
    for name in ("constant_s", "token_s", "sample_s", "pair_s", "context_s"):
        assert getattr(result.model, name) == pytest.approx(getattr(PLANTED, name), rel=1e-6)
    assert [knot for knot, _ in result.model.hinges] == [8, 64]
    assert [slope for _, slope in result.model.hinges] == pytest.approx([0.0009, -0.0002], rel=1e-6)
    assert result.model.padding == PADDING
    assert result.fitted.max < 1e-9 and result.held_out.max < 1e-6


@pytest.mark.parametrize(
    ("context_s", "unique_s"), [(2.4e-6, 0.0), (0.0, 2.4e-6), (0.4e-6, 2.0e-6)]
)
def test_reading_is_told_from_computing_by_rows_that_share(
    context_s: float, unique_s: float
) -> None:
    planted = dataclasses.replace(PLANTED, context_s=context_s, unique_context_s=unique_s)
    model = fit(timed(grid() + ALIKE, planted), PADDING).model
    assert model.context_s == pytest.approx(context_s, abs=1e-11)
    assert model.unique_context_s == pytest.approx(unique_s, abs=1e-11)
    noisy = fit(timed(grid() + ALIKE, planted, noise=0.02), PADDING).model
    assert noisy.context_s == pytest.approx(context_s, abs=3e-7)
    assert noisy.unique_context_s == pytest.approx(unique_s, abs=3e-7)


def test_without_rows_that_share_all_counts_as_context_of_each() -> None:
    planted = dataclasses.replace(PLANTED, context_s=0.0, unique_context_s=PLANTED.context_s)
    model = fit(timed(grid(), planted), PADDING).model
    assert model.unique_context_s == 0.0
    assert model.context_s == pytest.approx(PLANTED.context_s, rel=1e-6)


def test_rows_that_share_are_counted_once() -> None:
    load = load_of(alike(3, 100, 64))
    assert (load.decode_rows, load.context, load.unique_context) == (3, 303, 303 - 2 * 64)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_averaged_out_for_steps_that_were_not_measured(seed: int) -> None:
    rng = random.Random(seed)
    samples = timed(grid(), PLANTED, noise=0.05, rng=rng)
    held_out = timed(mixed_steps(rng, 60), PLANTED)
    result = fit(samples, PADDING, held_out)
    assert 0.02 < result.fitted.mape < 0.06
    assert result.held_out.mape < 0.03
    assert result.held_out == error_of(result.model, held_out)


def test_noise_does_not_add_knots() -> None:
    straight = CostModel(constant_s=0.03, token_s=0.001, sample_s=0.0, pair_s=0.0, context_s=1e-6)
    for seed in range(5):
        samples = timed(grid(), straight, noise=0.03, rng=random.Random(seed))
        assert len(fit(samples).model.hinges) <= 1


def test_all_steps_count_alike_however_long_they_take() -> None:
    """Of two steps that cannot both be met, the error is shared in proportion."""
    shape = (ChunkShape(1, 0, True),)
    [low, high] = [Sample(shape, 0.010), Sample(shape, 0.030)]
    model = fit([low, high]).model
    weighted = (1 / 0.010 + 1 / 0.030) / (1 / 0.010**2 + 1 / 0.030**2)
    assert model.seconds(load_of(shape)) == pytest.approx(weighted)


@settings(max_examples=examples(25))
@given(st.data())
def test_whatever_was_measured_more_work_never_takes_less_time(data: st.DataObject) -> None:
    shapes = data.draw(st.lists(st.sampled_from(grid()), min_size=1, max_size=12, unique=True))
    seconds = st.floats(1e-4, 10.0)
    samples = [Sample(shape, data.draw(seconds)) for shape in shapes]
    model = fit(samples, data.draw(st.sampled_from([(), PADDING]))).model
    assert min(model.constant_s, model.sample_s, model.pair_s, model.context_s) >= 0.0
    assert len(model.hinges) <= MAX_KNOTS
    tokens = [1, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 200, 512, 600, 5000]
    times = [model.prefill_seconds(n) for n in tokens[1:]]
    rows = [model.seconds(load_of((ChunkShape(1, 9, True),) * n)) for n in tokens]
    for series in (times, rows):
        assert all(low <= high * (1 + 1e-9) for low, high in itertools.pairwise(series))


def test_few_samples_are_enough_for_a_model() -> None:
    shapes = [(ChunkShape(1, 15, True),), (ChunkShape(64, 0, True),)]
    for count in (1, 2):
        samples = timed(shapes[:count], PLANTED)
        assert fit(samples).fitted.max < 1e-6


def test_cross_validation_sees_an_error_that_the_fit_hides() -> None:
    """Three steps of different kinds can be met exactly; predicting one from two cannot."""
    shapes = [grid()[0], (ChunkShape(64, 0, True),), (ChunkShape(128, 500, True),)]
    result = fit(timed(shapes, PLANTED))
    assert result.fitted.max < 1e-6 < 0.01 < result.held_out.max


def test_errors_are_relative_and_signed() -> None:
    shape = (ChunkShape(1, 0, True),)
    model = CostModel(constant_s=1.0, token_s=0.0, sample_s=0.0, pair_s=0.0, context_s=0.0)
    samples = [Sample(shape, 2.0), Sample(shape, 0.8)]
    assert relative_errors(model, samples) == pytest.approx([-0.5, 0.25])
    assert error_of(model, samples).mape == pytest.approx(0.375)
    assert error_of(model, samples).max == pytest.approx(0.5)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_times_that_cannot_be_are_refused(seconds: float) -> None:
    with pytest.raises(ValueError, match="not positive"):
        fit([Sample((ChunkShape(1, 0, True),), seconds)])


def copies(
    constant_s: float, token_s: float, out: bool, rng: random.Random, noise_s: float = 0.0
) -> list[CopySample]:
    return [
        CopySample(out, n, max(constant_s + token_s * n + rng.gauss(0.0, noise_s), 0.0))
        for n in (16, 512, 2048)
    ]


def test_times_of_copies_are_recovered_for_each_direction() -> None:
    rng = random.Random(0)
    samples = copies(0.001, 2e-5, True, rng) + copies(0.0005, 1e-5, False, rng)
    model = with_copies(PLANTED, samples)
    assert model.swap_out_constant_s == pytest.approx(0.001)
    assert model.swap_out_token_s == pytest.approx(2e-5)
    assert model.swap_constant_s == pytest.approx(0.0005)
    assert model.swap_token_s == pytest.approx(1e-5)
    assert model.prefill_seconds(100) == PLANTED.prefill_seconds(100)
    one_size = with_copies(PLANTED, samples[:1])
    assert one_size.swap_out_constant_s == 0.0
    assert one_size.swap_out_token_s == pytest.approx(0.001 / 16 + 2e-5)
    assert (one_size.swap_constant_s, one_size.swap_token_s) == (0.0, 0.0)
    assert with_copies(PLANTED, []) == PLANTED


@pytest.mark.parametrize("seed", range(5))
def test_steps_that_vary_change_the_time_of_many_copies_little(seed: int) -> None:
    rng = random.Random(seed)
    samples = copies(0.001, 2e-5, True, rng, 0.002) + copies(0.0, 2e-5, False, rng, 0.002)
    model = with_copies(PLANTED, samples)
    assert model.swap_out_constant_s + 2048 * model.swap_out_token_s == pytest.approx(
        0.001 + 2048 * 2e-5, abs=0.006
    )
    assert min(model.swap_constant_s, model.swap_token_s) >= 0.0


matrices = st.tuples(st.integers(1, 8), st.integers(1, 5)).flatmap(
    lambda shape: st.tuples(
        arrays.arrays(float, shape, elements=st.integers(-5, 5).map(float)),
        arrays.arrays(float, shape[:1], elements=st.integers(-9, 9).map(float)),
    )
)


@given(matrices)
def test_nnls_meets_the_optimality_conditions(system: tuple[np.ndarray, np.ndarray]) -> None:
    """Karush-Kuhn-Tucker: no descent along any column, none either way where x is positive."""
    matrix, target = system
    x = nnls(matrix, target)
    gradient = matrix.T @ (matrix @ x - target)
    assert np.all(x >= 0.0)
    assert np.all(gradient >= -1e-3)
    assert np.all(np.abs(gradient[x > 1e-9]) <= 1e-3)
