"""Measuring step times on an executor whose times are planted, and what is done with them."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.interfaces import EngineInfo, Grouping
from bros.core.plan import StepPlan, StepResult
from bros.executor.cuda.graphs import MIXED_PADDING
from bros.profiling.fitting import Sample, StepShape, error_of, fit, load_of, with_copies
from bros.profiling.measuring import (
    COPIED_TOKENS,
    OVERLAPPED_TOKENS,
    StepLimits,
    decode_rows,
    full_grid,
    full_profile,
    measure_copies,
    measure_steps,
    profile_key,
    prompt,
    quick_grid,
    quick_profile,
    random_steps,
    step_padding,
    step_time_profile,
)
from bros.profiling.profiles import MEASURED, QUICK, Profile, find_profile, load_profile
from bros.scheduler.cost_model import CostModel, StepLoad
from support.planted import PlantedExecutor
from support.tier import examples

INFO = EngineInfo(
    model="planted",
    weights="fp32",
    kernels="cpu-generic",
    kv_dtype="fp32",
    device="cpu",
    max_model_len=2048,
    vocab_size=1000,
    block_size=16,
    num_kv_blocks=1456,
    policy="bros",
    yields=True,
)
TINY = dataclasses.replace(INFO, max_model_len=64, num_kv_blocks=32, vocab_size=10)
DEFAULTS = EngineConfig()
MODEL = CostModel(
    constant_s=0.028,
    token_s=0.0002,
    sample_s=0.0002,
    pair_s=4e-7,
    context_s=2.4e-6,
    hinges=((8, 0.0008),),
)


def slower(factor: float) -> CostModel:
    return dataclasses.replace(
        MODEL,
        constant_s=MODEL.constant_s * factor,
        token_s=MODEL.token_s * factor,
        sample_s=MODEL.sample_s * factor,
        pair_s=MODEL.pair_s * factor,
        context_s=MODEL.context_s * factor,
        hinges=tuple((knot, slope * factor) for knot, slope in MODEL.hinges),
    )


def ignore(line: str) -> None:
    raise AssertionError(line)


engines = st.builds(
    StepLimits,
    tokens=st.integers(1, 2048),
    rows=st.integers(1, 4096),
    length=st.integers(2, 8192),
    blocks=st.integers(1, 2000),
    block_size=st.sampled_from([1, 4, 16]),
).flatmap(
    lambda limits: st.builds(
        dataclasses.replace,
        st.just(limits),
        grouping=st.none()
        | st.builds(Grouping, st.just(limits.block_size), st.integers(1, 20), st.integers(2, 5)),
    )
)


def check_alike(shape: StepShape, limits: StepLimits) -> None:
    """A kernel that keeps to the rule reads what they share once, and all that they share."""
    rule, (first, *others) = limits.grouping, shape
    assert rule is not None and first.shared == 0 and len(shape) >= rule.min_rows
    for chunk in others:
        assert chunk.tokens == first.tokens == 1 and chunk.shared <= first.context
        assert chunk.shared == others[0].shared >= rule.min_blocks * rule.block_size
        assert chunk.shared % rule.block_size == 0


@settings(max_examples=examples(30))
@given(engines)
def test_every_grid_keeps_to_what_the_engine_can_run(limits: StepLimits) -> None:
    if limits.length > limits.blocks * limits.block_size:
        limits = dataclasses.replace(limits, length=max(limits.blocks * limits.block_size, 2))
    others = random_steps(limits, 5, random.Random(0))
    for shapes in (quick_grid(limits), full_grid(limits), others):
        assert len(shapes) == len(set(shapes))
        for shape in shapes:
            assert len(shape) <= limits.rows
            assert sum(chunk.tokens for chunk in shape) <= limits.tokens
            assert all(c.tokens > 0 for c in shape)
            assert all(0 <= c.context <= limits.length - c.tokens for c in shape)
            held = sum(-(-(c.tokens + c.context) // limits.block_size) for c in shape)
            held -= sum(chunk.shared // limits.block_size for chunk in shape)
            assert held <= limits.blocks
            if any(chunk.shared for chunk in shape):
                check_alike(shape, limits)
    if limits.blocks * limits.block_size > 1:
        assert quick_grid(limits)


def test_grids_hold_all_kinds_of_steps() -> None:
    limits = StepLimits.of(EngineConfig(max_batch_tokens=1024), INFO)
    for shapes in (
        quick_grid(limits),
        full_grid(limits),
        random_steps(limits, 60, random.Random(1)),
    ):
        kinds = {(any(c.tokens == 1 for c in s), any(c.tokens > 1 for c in s)) for s in shapes}
        assert kinds == {(True, False), (False, True), (True, True)}
        assert {c.sampled for s in shapes for c in s if c.tokens > 1} == {True, False}
    assert len(quick_grid(limits)) <= 45


def test_large_steps_fit_a_small_device() -> None:
    """With chunks beside decode rows of every size, though all rows cannot have long contexts."""
    limits = StepLimits(tokens=2048, rows=256, length=4096, blocks=1500, block_size=16)
    mixed = [shape for shape in quick_grid(limits) if 1 < len(shape) and shape[-1].tokens > 100]
    assert {len(shape) + shape[-1].tokens - 1 for shape in mixed} >= {256, 512, 1024, 2048}


def test_a_quick_profile_of_large_steps_survives_noise() -> None:
    """Chunks far behind the begin of a prompt are predicted as well as those at its begin, and many
    rows with long contexts as well as few with short ones."""
    truth = CostModel(  # as an H100 has it for 8 billion weights
        constant_s=5.7e-3,
        token_s=1e-6,
        sample_s=0.0,
        pair_s=1.43e-9,
        context_s=4.4e-8,
        hinges=((200, 18.3e-6),),
        padding=MIXED_PADDING,
    )
    limits = StepLimits(tokens=2048, rows=256, length=8192, blocks=24_000, block_size=16)
    rng = random.Random(0)
    mixed = [
        decode_rows(rng.randint(1, 60), rng.randint(100, 3000))
        + prompt(rng.randint(2, 1024), rng.randrange(6000), False)
        for _ in range(100)
    ]
    many = [decode_rows(rng.randint(64, 256), rng.randint(500, 4000)) for _ in range(50)]
    for _ in range(8):
        noisy = [
            Sample(shape, truth.seconds(load_of(shape)) * rng.uniform(0.95, 1.05))
            for shape in quick_grid(limits)
        ]
        fitted = fit(noisy, MIXED_PADDING).model
        for shapes in (mixed, many):
            exact = [Sample(shape, truth.seconds(load_of(shape))) for shape in shapes]
            assert error_of(fitted, exact).mape < 0.05


def test_on_a_gpu_larger_steps_are_measured() -> None:
    gpu = dataclasses.replace(INFO, device="NVIDIA H200")
    for config, tokens, rows in (
        (EngineConfig(), 2048, 256),
        (EngineConfig(max_batch_tokens=512, max_num_seqs=9), 512, 9),
    ):
        limits = StepLimits.of(config, gpu)
        assert (limits.tokens, limits.rows) == (tokens, rows)
        assert max(sum(chunk.tokens for chunk in shape) for shape in quick_grid(limits)) > 256
    limits = StepLimits.of(EngineConfig(), INFO)
    assert (limits.tokens, limits.rows) == (256, 64)


def test_random_steps_depend_on_the_seed_only() -> None:
    limits = StepLimits.of(EngineConfig(), INFO)
    assert random_steps(limits, 9, random.Random(3)) == random_steps(limits, 9, random.Random(3))
    assert random_steps(limits, 9, random.Random(3)) != random_steps(limits, 9, random.Random(4))


def measured(
    shapes: list[StepShape],
    *,
    repeats: int,
    noise: list[float] | None = None,
    limit_s: float = float("inf"),
) -> tuple[dict[StepShape, float], PlantedExecutor, ManualClock]:
    clock = ManualClock()
    factors = iter(noise or [])
    executor = PlantedExecutor(MODEL, INFO, clock, lambda: next(factors, 1.0))
    limits = StepLimits.of(EngineConfig(), INFO)
    samples = measure_steps(
        executor, INFO, limits, shapes, clock, repeats=repeats, time_limit_s=limit_s
    )
    return {sample.chunks: sample.seconds for sample in samples}, executor, clock


SHAPES = [decode_rows(4, 0), prompt(32, 0), decode_rows(2, 0) + prompt(8, 0, False)]


def test_shapes_are_run_as_asked_and_interleaved() -> None:
    times, executor, _ = measured(SHAPES, repeats=3)
    assert list(times) == SHAPES
    runs = executor.shapes[-4 * len(SHAPES) :]
    for at in range(0, len(runs), len(SHAPES)):
        assert sorted(runs[at : at + len(SHAPES)]) == sorted(SHAPES)
    for sample in times.items():
        assert sample[1] == pytest.approx(measured([sample[0]], repeats=1)[0][sample[0]])


def test_disturbed_moments_and_the_first_run_do_not_count() -> None:
    quiet, _, _ = measured(SHAPES[:1], repeats=5)
    touching = [1.0]  # one plan that writes to the block of each of the four rows
    noise = touching + [9.0] + [1.0, 3.0, 1.0, 5.0, 2.0]
    disturbed, executor, _ = measured(SHAPES[:1], repeats=5, noise=noise)
    assert len(executor.shapes) == len(noise)
    assert disturbed == pytest.approx(quiet)


class QueueingExecutor:
    """A device that computes one launched step after the other, each for 10 ms; launching takes
    the host 2 ms."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.free_s = 0.0
        self.in_flight = 0

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        return self.launch(plan).result()

    def launch(self, plan: StepPlan) -> QueuedStep:
        self.clock.advance(0.002)
        self.free_s = max(self.free_s, self.clock.now()) + 0.010
        self.in_flight += 1
        assert self.in_flight <= 2
        return QueuedStep(self, self.free_s, StepResult(plan.step, ()))

    def close(self) -> None:
        pass


@dataclasses.dataclass
class QueuedStep:
    executor: QueueingExecutor
    end_s: float
    found: StepResult

    def result(self) -> StepResult:
        clock = self.executor.clock
        clock.advance(max(0.0, self.end_s - clock.now()))
        self.executor.in_flight -= 1
        return self.found


@pytest.mark.parametrize(("ahead", "seconds"), [(False, 0.012), (True, 0.010)])
def test_steps_are_timed_as_the_engine_runs_them(ahead: bool, seconds: float) -> None:
    clock = ManualClock()
    executor = QueueingExecutor(clock)
    limits = StepLimits.of(EngineConfig(), INFO)
    launcher = executor if ahead else None
    samples = measure_steps(executor, INFO, limits, SHAPES, clock, repeats=3, launcher=launcher)
    assert [sample.seconds for sample in samples] == pytest.approx([seconds] * len(SHAPES))
    assert executor.in_flight == 0


def test_mixed_steps_are_padded_to_those_that_a_gpu_has_recorded() -> None:
    gpu = dataclasses.replace(INFO, device="NVIDIA H100", kernels="triton")
    assert step_padding(EngineConfig(), gpu) == MIXED_PADDING
    largest = MIXED_PADDING[-1][0]
    longer = EngineConfig(max_batch_tokens=2 * largest)
    assert step_padding(longer, gpu) == (*MIXED_PADDING, (2 * largest, 1))
    assert step_padding(EngineConfig(cuda_graphs="off"), gpu) == ()
    assert step_padding(EngineConfig(async_scheduling="off"), gpu) == ()
    assert step_padding(EngineConfig(), INFO) == ()


def test_progress_ends_with_everything_done() -> None:
    seen: list[tuple[int, int]] = []
    clock = ManualClock()
    limits = StepLimits.of(EngineConfig(), INFO)
    measure_steps(
        PlantedExecutor(MODEL, INFO, clock),
        INFO,
        limits,
        SHAPES,
        clock,
        repeats=2,
        progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(done, 9) for done in range(1, 10)]


def test_time_that_runs_out_leaves_out_what_was_not_run() -> None:
    _, _, clock = measured([], repeats=0)
    began = clock.now()
    shapes = [prompt(256, 0), decode_rows(1, 0), prompt(16, 0)]
    times, executor, clock = measured(shapes, repeats=5, limit_s=0.2)
    assert clock.now() - began < 0.3
    assert decode_rows(1, 0) in times and prompt(256, 0) not in times
    never, executor, _ = measured(shapes, repeats=5, limit_s=0.0)
    assert list(never) == [decode_rows(1, 0)] == executor.shapes


def test_memory_that_takes_long_to_map_leaves_time_for_the_steps() -> None:
    limit_s = 2.0
    mapping = limit_s / MODEL.seconds(load_of(prompt(4, 0)))  # the first step, alone, takes as long
    times, _, _ = measured(SHAPES, repeats=2, noise=[2 * mapping], limit_s=limit_s)
    assert list(times) == SHAPES


@pytest.mark.parametrize("factor", [0.1, 1.0, 10.0, 100.0])
def test_quick_measuring_ends_in_time_and_fits(factor: float) -> None:
    clock = ManualClock()
    executor = PlantedExecutor(slower(factor), INFO, clock, unwritten=factor > 1.0)
    began = clock.now()
    profile = quick_profile(EngineConfig(), executor, INFO, clock)
    assert clock.now() - began < 15.0
    assert profile.kind == QUICK
    assert profile.fitted is not None and profile.fitted.mape < 0.03
    assert profile.max_step_tokens <= 256
    assert max(sum(c.tokens for c in shape) for shape in executor.shapes) <= 256


def test_a_tiny_engine_can_be_measured() -> None:
    clock = ManualClock()
    config = EngineConfig(max_num_seqs=4, max_batch_tokens=32)
    executor = PlantedExecutor(MODEL, TINY, clock)
    quick = quick_profile(config, executor, TINY, clock)
    assert quick.fitted is not None and quick.fitted.max < 1e-6
    full = full_profile(config, executor, TINY, clock, repeats=1, progress=lambda *_: None)
    assert full.profile.fitted is not None and full.profile.fitted.max < 1e-6


def test_a_full_profile_predicts_random_steps_despite_noise() -> None:
    clock, rng = ManualClock(), random.Random(0)
    executor = PlantedExecutor(MODEL, INFO, clock, lambda: rng.lognormvariate(0.0, 0.03))
    config = EngineConfig(max_batch_tokens=1024)
    result = full_profile(config, executor, INFO, clock, repeats=3, progress=lambda *_: None)
    profile = result.profile
    assert profile.kind == MEASURED and profile.key == profile_key(config, INFO)
    assert profile.steps == len(result.fitted) > 150 and len(result.held_out) > 50
    assert not {s.chunks for s in result.fitted} & {s.chunks for s in result.held_out}
    assert profile.held_out == error_of(profile.model, result.held_out)
    assert profile.held_out.mape < 0.04
    assert 512 < profile.max_step_tokens <= 1024
    assert profile.date.startswith("2023-11-14T")


READS_TOGETHER = dataclasses.replace(INFO, grouping=Grouping(16, min_blocks=16, min_rows=4))


def test_common_prefixes_are_measured_where_rows_read_them_together() -> None:
    planted = dataclasses.replace(MODEL, context_s=4e-7, unique_context_s=2e-6)
    clock, rng = ManualClock(), random.Random(0)
    executor = PlantedExecutor(planted, READS_TOGETHER, clock, lambda: rng.lognormvariate(0, 0.02))
    config = EngineConfig(max_batch_tokens=1024)
    full = full_profile(
        config, executor, READS_TOGETHER, clock, repeats=3, progress=lambda *_: None
    )
    quick = quick_profile(EngineConfig(), executor, READS_TOGETHER, clock)
    for model, tolerance in ((full.profile.model, 0.2), (quick.model, 0.5)):
        assert model.unique_context_s == pytest.approx(2e-6, rel=tolerance)
        assert model.context_s + model.unique_context_s == pytest.approx(2.4e-6, rel=0.1)
    for samples in (full.fitted, full.held_out):
        shared = [s for s in samples if any(chunk.shared for chunk in s.chunks)]
        assert len(shared) > 5
        for sample in shared:
            assert len(sample.chunks) >= 4
            assert all(c.shared % 16 == 0 and c.shared >= 256 for c in sample.chunks[1:])
    assert full.profile.held_out is not None and full.profile.held_out.mape < 0.04
    assert Profile.from_json(full.profile.to_json()) == full.profile


def test_where_each_row_reads_for_itself_no_common_prefixes_are_measured() -> None:
    clock = ManualClock()
    executor = PlantedExecutor(MODEL, INFO, clock)
    config = EngineConfig(max_batch_tokens=1024)
    result = full_profile(config, executor, INFO, clock, repeats=1, progress=lambda *_: None)
    assert result.profile.model.unique_context_s == 0.0
    assert not any(chunk.shared for shape in executor.shapes for chunk in shape)


COPYING = dataclasses.replace(
    MODEL,
    swap_constant_s=0.0004,
    swap_token_s=1.5e-5,
    swap_out_constant_s=0.001,
    swap_out_token_s=2.5e-5,
)


@pytest.mark.parametrize(("host_blocks", "blocks"), [(4000, 1456), (40, 1456), (4000, 50)])
def test_copies_are_measured_in_both_directions(host_blocks: int, blocks: int) -> None:
    info = dataclasses.replace(INFO, num_host_kv_blocks=host_blocks, num_kv_blocks=blocks)
    clock = ManualClock()
    began = clock.now()
    samples = measure_copies(PlantedExecutor(COPYING, info, clock), info, clock, repeats=2)
    assert clock.now() - began < 2.0
    most = 16 * min(host_blocks, blocks - 1)
    assert {sample.tokens for sample in samples} == {min(n, most) for n in COPIED_TOKENS}
    for sample in samples:
        load = StepLoad()
        load.swap_tokens = sample.tokens
        load.swap_out_tokens = sample.tokens if sample.out else 0
        assert sample.seconds == pytest.approx(COPYING.swap_seconds(load))
    assert with_copies(MODEL, samples).swap_token_s == pytest.approx(1.5e-5)


def test_copies_that_run_beside_a_step_are_measured_once_they_take_longer() -> None:
    """28 ms hide the smallest number in one direction, and the two smaller in the other."""
    info = dataclasses.replace(INFO, num_kv_blocks=5000, num_host_kv_blocks=5000)
    planted = dataclasses.replace(
        MODEL, swap_token_s=4e-6, swap_out_token_s=1e-6, overlap_swap=True
    )
    clock = ManualClock()
    executor = PlantedExecutor(planted, info, clock)
    samples = measure_copies(
        executor, info, clock, repeats=2, sizes=OVERLAPPED_TOKENS, overlap=True
    )
    assert {(s.out, s.tokens) for s in samples} == {(False, 16384), (False, 65536), (True, 65536)}
    model = with_copies(MODEL, samples, overlap=True)
    assert model.swap_token_s == pytest.approx(4e-6)
    assert model.swap_out_token_s == pytest.approx(1e-6)
    assert model.overlap_swap


def test_profiles_tell_how_long_copies_take() -> None:
    info = dataclasses.replace(INFO, num_host_kv_blocks=1000)
    clock, config = ManualClock(), EngineConfig(max_batch_tokens=64)
    executor = PlantedExecutor(COPYING, info, clock)
    quick = quick_profile(config, executor, info, clock)
    full = full_profile(config, executor, info, clock, repeats=1, progress=lambda *_: None)
    for model in (quick.model, full.profile.model):
        for name in ("swap_constant_s", "swap_token_s", "swap_out_constant_s", "swap_out_token_s"):
            assert getattr(model, name) == pytest.approx(getattr(COPYING, name))
    assert len(full.copies) == 6
    assert Profile.from_json(quick.to_json()) == quick


def test_without_memory_or_time_for_copies_none_are_measured() -> None:
    clock = ManualClock()
    executor = PlantedExecutor(COPYING, INFO, clock)
    assert measure_copies(executor, INFO, clock, repeats=3) == []
    assert executor.shapes == []
    info = dataclasses.replace(INFO, num_host_kv_blocks=1000)
    executor = PlantedExecutor(slower(100.0), info, clock)
    began = clock.now()
    assert measure_copies(executor, info, clock, repeats=3, time_limit_s=4.0) == []
    assert clock.now() - began < 4.0


def test_disturbed_moments_do_not_count_for_copies() -> None:
    info = dataclasses.replace(INFO, num_host_kv_blocks=1000)
    clock, factors = ManualClock(), itertools.cycle([1.0, 1.0, 1.0, 1.0, 3.0])
    executor = PlantedExecutor(COPYING, info, clock, lambda: next(factors))
    model = with_copies(MODEL, measure_copies(executor, info, clock, repeats=9))
    assert model.swap_out_token_s == pytest.approx(COPYING.swap_out_token_s)


class Case:
    """An engine that asks for its step time model, several times over."""

    def __init__(self, folder: Path, noise: float = 0.0) -> None:
        self.clock = ManualClock()
        rng = random.Random(0)
        self.executor = PlantedExecutor(
            MODEL, INFO, self.clock, lambda: rng.lognormvariate(0.0, noise)
        )
        self.folders = [folder / "mine", folder / "shipped"]
        self.told: list[str] = []

    def model(self, config: EngineConfig = DEFAULTS) -> CostModel:
        """The steps it took to get it are in executor.shapes, from zero."""
        return self.profile(config).model

    def profile(self, config: EngineConfig = DEFAULTS, before: str = "") -> Profile:
        self.executor.shapes.clear()
        return step_time_profile(
            config, self.executor, INFO, self.clock, self.folders, self.told.append, before
        )


def test_what_was_measured_once_is_kept(tmp_path: Path) -> None:
    case = Case(tmp_path)
    first = case.model()
    assert case.executor.shapes and len(case.told) == 1 and "Measuring" in case.told[0]
    key = profile_key(EngineConfig(), INFO)
    kept = find_profile(case.folders[:1], key, ignore)
    assert kept is not None and kept.model == first and kept.kind == QUICK
    assert case.model() == first
    assert case.executor.shapes == [] and len(case.told) == 1
    assert not (tmp_path / "shipped").exists()


def test_other_kernels_are_measured_anew(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.model()
    (path,) = (tmp_path / "mine").rglob("*.json")
    stored = load_profile(path)
    older = {**stored.versions, "compiled": "older"}
    path.write_text(dataclasses.replace(stored, versions=older).to_json())
    case.model()
    assert case.executor.shapes
    assert load_profile(path).versions == stored.versions


def test_other_settings_are_measured_anew(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.model()
    case.model(EngineConfig(threads=77))
    assert case.executor.shapes
    case.model(EngineConfig(threads=77))
    assert not case.executor.shapes


def test_a_quick_profile_of_small_steps_does_not_serve_large_ones(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.model(EngineConfig(max_batch_tokens=16))
    case.model(EngineConfig(max_batch_tokens=8))
    assert not case.executor.shapes
    case.model()
    assert case.executor.shapes
    case.model(EngineConfig(max_batch_tokens=4096))
    assert not case.executor.shapes


@pytest.mark.parametrize("noise", [0.2, 1.0])
def test_noisy_measurements_are_used_but_not_kept(tmp_path: Path, noise: float) -> None:
    """With the smaller noise the error is below a tenth for fitted steps only."""
    case = Case(tmp_path, noise)
    assert case.model().constant_s > 0.0
    assert "perhaps because the machine is busy" in case.told[-1]
    assert not list(tmp_path.rglob("*"))


def test_a_measurement_that_ran_out_of_time_is_used_but_not_kept(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.executor = PlantedExecutor(slower(300.0), INFO, case.clock, lambda: 1.0)
    assert case.model().constant_s > 0.0
    assert "steps could be measured in 10 s" in case.told[-1]
    assert not list(tmp_path.rglob("*"))


def test_an_engine_that_replaces_another_one_takes_its_noisy_profile(tmp_path: Path) -> None:
    case = Case(tmp_path, 0.2)
    first = case.profile()
    assert case.profile(before=first.to_json()) == first and not case.executor.shapes
    older = dataclasses.replace(first, versions={**first.versions, "compiled": "older"})
    for other in (older, dataclasses.replace(first, key=dataclasses.replace(first.key, tp=2))):
        case.profile(before=other.to_json())
        assert case.executor.shapes
    case.profile(before="{}")
    assert case.executor.shapes
    quiet = Case(tmp_path).profile()
    assert case.profile(before=first.to_json()) == quiet, "a stored one comes first"


def test_a_folder_that_cannot_be_written_to_does_not_stop_an_engine(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.folders[0].write_text("a file where a folder should be")
    assert case.model().constant_s == pytest.approx(MODEL.constant_s, rel=0.01)
    assert "cannot be stored" in case.told[-1]


def test_without_folders_nothing_is_kept() -> None:
    case = Case(Path("unused"))
    case.folders = []
    assert case.model().constant_s == pytest.approx(MODEL.constant_s, rel=0.01)


def test_the_profile_that_was_named_wins_over_stored_ones(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.model()
    [stored] = tmp_path.rglob("*.json")
    given = dataclasses.replace(load_profile(stored), model=slower(2.0))
    other = given.save(tmp_path / "elsewhere")
    assert case.model(EngineConfig(profile=str(other))) == slower(2.0)
    assert not case.executor.shapes and len(case.told) == 1


def test_a_named_profile_of_another_device_is_used_with_a_warning(tmp_path: Path) -> None:
    case = Case(tmp_path)
    case.model()
    [stored] = tmp_path.rglob("*.json")
    text = stored.read_text().replace('"threads": ', '"threads": 9')
    other = tmp_path / "other.json"
    other.write_text(text)
    model = case.model(EngineConfig(profile=str(other)))
    assert model == load_profile(stored).model
    assert "is for threads 9" in case.told[-1]


def test_a_named_profile_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    case = Case(tmp_path)
    with pytest.raises(ConfigError, match="^--profile: the profile .*absent.json cannot be read"):
        case.model(EngineConfig(profile=str(tmp_path / "absent.json")))
    assert case.executor.shapes == []
