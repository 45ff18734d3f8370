"""Tunes the kernels of attention and of products of few rows for the present device; for
gpu_speed.py.

For each launch shape of the workloads below, candidate tiles, warps and stages around the default
are timed on all workloads that use it, and the best geometric mean wins. The result is stored where
the kernels read it, bros/kernels/triton/tuned/DEVICE.json. The merge kernel has no parameters; all
times include it. A product of few rows gets a configuration only if it is about as fast as torch's
at least.

Compiling takes longer than measuring, so worker processes first compile all candidates into
Triton's disk cache. The result is saved after each launch shape, so a time limit loses little.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from gpu_model import BLOCK, Sizes, batch_of, full_segments, shared_by_all
from gpu_timing import Line, Timer

from bros.executor.models.spec import ModelSpec
from bros.kernels.interface import AttentionBatch, HeadLayout
from bros.kernels.triton import settings as triton_settings
from bros.kernels.triton.ops import TritonKernels
from bros.kernels.triton.products import RowProducts
from bros.kernels.triton.settings import (
    MIN_ROWS,
    Kind,
    LaunchConfig,
    ProductLaunch,
    ProductShape,
    Shape,
    TritonSettings,
    rows_step,
    settings_for,
)

T = TypeVar("T")
RunAll = Callable[..., Iterable[list[Shape]]]

KEYS, WARPS = (32, 64, 128), (4, 8)
# For rows of one token, Triton 3.6 compiles 2 to 4 alike: it prefetches one tile; with 5, two.
STAGES: dict[Kind, tuple[int, ...]] = {"one": (2, 5), "tile": (2, 3, 4)}
SMALLER_TILE = 64  # rows, tried in addition to larger ones
MOST_SHARED = 227 * 1024  # bytes of shared memory per program on Hopper; less on older GPUs
PROGRAMS: dict[Kind, tuple[int, ...]] = {"one": (1, 2, 4), "tile": (1, 2, 4)}
WORKERS = 12
COMPILE_S, MEASURE_S = 30.0, 25.0
COLD_BYTES = 2**28  # of KV, more than the cache of a device; runs alternate between copies
PRODUCT_ROWS = (1, 8, 32, 64, 128)
UP_TO_16_ROWS = (
    (32, 256, 2, 4),
    (32, 256, 2, 6),
    (32, 256, 4, 6),
    (32, 128, 2, 6),
    (16, 128, 2, 6),
)
MORE_ROWS = (
    *((128, 128, 8, 4), (128, 128, 8, 3), (128, 64, 8, 4), (64, 128, 4, 6), (64, 128, 4, 4)),
    *((64, 256, 4, 3), (64, 64, 4, 8), (32, 256, 4, 5), (32, 128, 4, 6), (32, 128, 4, 4)),
)
"""Candidates for products: block_n, block_k, warps and stages. The best of some 25 that were tried
on an H100."""
LEAST_GAIN = 0.99
"""Against torch's product alone. In a step, a product that is launched early gains more: with 32
rows, four own products took 6.73 ms a step and three 6.78, though the fourth is as fast as torch's
alone."""
TUNED = Path(triton_settings.__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class RecordingSettings(TritonSettings):
    """Settings that record the requested launch shapes."""

    requested: list[Shape] = field(default_factory=list)

    def launch(self, shape: Shape) -> LaunchConfig:
        if shape not in self.requested:
            self.requested.append(shape)
        return self.tuned.get(shape) or self.default(shape)


@dataclass(frozen=True, slots=True)
class Workload:
    """Attention of one layer. kind: of the launches that it tunes."""

    name: str
    kind: Kind
    tokens: int
    batch: AttentionBatch
    blocks: int


def workloads(sizes: Sizes) -> list[Workload]:
    """Decode batches, a chunk of a prompt, and rows with a shared prefix."""
    found = []
    longest = max(sizes.contexts)
    most = sizes.attention[0]
    shortest = min(sizes.contexts)
    decodes = {(min(8, most), longest), (most, longest), (min(32, most), shortest), (1, shortest)}
    for rows, context in sorted(decodes):
        blocks = np.random.default_rng(0).permutation(rows * (context // BLOCK)).astype(np.int32)
        segments = [full_segments(each, context) for each in np.split(blocks, rows)]
        found.append(Workload(f"{rows} x {context}", "one", rows, batch_of(segments), len(blocks)))
    chunk = dataclasses.replace(
        batch_of([full_segments(np.arange(longest // BLOCK, dtype=np.int32), longest)]),
        query_start=torch.tensor([0, longest], dtype=torch.int32),
    )
    found.append(Workload(f"chunk of {longest}", "tile", longest, chunk, longest // BLOCK))
    prompt = dataclasses.replace(
        batch_of([full_segments(np.empty(0, np.int32), 0)]), query_start=chunk.query_start
    )
    found.append(Workload(f"prompt of {longest}", "tile", longest, prompt, 1))
    for rows in sorted({*sizes.few_sharers, *sizes.sharers}):
        prefix = np.arange(sizes.prefix // BLOCK, dtype=np.int32)
        own = [np.array([len(prefix) + row], np.int32) for row in range(rows)]
        batch = batch_of([full_segments(each, BLOCK) for each in own], shared_by_all(prefix, rows))
        found.append(Workload(f"{rows} sharing", "tile", rows, batch, len(prefix) + rows))
    return found


class AttentionRun:
    """The tensors of one workload, to be run with any settings."""

    def __init__(self, sizes: Sizes, work: Workload, device: torch.device) -> None:
        spec = ModelSpec.from_config(sizes.model)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._layout = HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._device, self._batch = device, work.batch
        self._qkv = torch.randn(work.tokens, self._layout.qkv_size, device=device).to(dtype)
        shape = (2, work.blocks, spec.num_kv_heads, BLOCK, spec.head_dim)
        cold = COLD_BYTES if device.type == "cuda" else 0
        copies = max(2, -(-cold // (math.prod(shape) * dtype.itemsize)))
        self._caches = torch.randn(copies, *shape, device=device, dtype=dtype)

    def with_settings(self, settings: TritonSettings) -> Callable[[int], object]:
        kernels = TritonKernels(self._device, settings)
        batch = kernels.prepare(self._batch, self._layout, self._device)
        scale = self._layout.head_dim**-0.5
        return lambda i: kernels.attention(
            self._qkv, self._layout, *self._caches[i % len(self._caches)], batch, scale
        )


def tune(sizes: Sizes, timer: Timer, folder: Path | None = None) -> Iterator[Line]:
    """Tune one device; yields a line per launch shape, after saving the result so far.

    folder: output folder; by default the one that the kernels read.
    """
    deadline = time.perf_counter() + COMPILE_S + MEASURE_S
    best = settings_for(timer.device)
    file = (folder or TUNED) / triton_settings.file_name(best.device)
    if timer.on_cuda:
        shapes = _compiled(sizes, best, deadline - MEASURE_S)
    else:
        shapes = _shapes(sizes, best, map)
    for shape, works in shapes.items():
        default = best.default(shape)
        candidates = _candidates(shape, default, timer.on_cuda)
        # The one in use comes first: it is kept if there is no time for others.
        launches = dict.fromkeys((best.launch(shape), default, *candidates))
        # The best tile of rows of one token depends on how many programs run at once.
        programs = PROGRAMS["one"] if shape.kind == "one" and timer.on_cuda else ()
        options = {
            (launch, count): _programs(with_launch(best, shape, launch), shape.kind, count)
            for count in dict.fromkeys((best.programs[shape.kind], *programs))
            for launch in launches
        }
        times = measured(_runs(sizes, works, timer), options, timer, deadline)
        chosen = min(times, key=times.__getitem__)
        best = options[chosen]
        _save(file, best)
        note = f"{len(times)} of {len(options)} tried on {', '.join(work.name for work in works)}"
        name = f"{shape.kind}, {shape.rows} rows: {_launch_text(*chosen)}"
        yield _line(name, times, chosen, note)
    works = next(works for shape, works in shapes.items() if shape.kind == "tile")
    counts = PROGRAMS["tile"] if timer.on_cuda else ()
    options = {
        count: _programs(best, "tile", count)
        for count in dict.fromkeys((best.programs["tile"], *counts))
    }
    found = measured(_runs(sizes, works, timer), options, timer, deadline)
    count = min(found, key=found.__getitem__)
    best = options[count]
    _save(file, best)
    note = f"{len(found)} of {len(options)} tried"
    yield _line(f"tile: {count} programs per processor", found, count, note)
    yield from _tune_products(sizes, timer, best, file)


def _tune_products(sizes: Sizes, timer: Timer, best: TritonSettings, file: Path) -> Iterator[Line]:
    """The products of a layer, against torch's."""
    deadline = time.perf_counter() + COMPILE_S + MEASURE_S
    shapes = _product_shapes(sizes, timer.device)
    candidates = {shape: _product_candidates(shape, timer.on_cuda) for _, shape, _ in shapes}
    if timer.on_cuda:
        with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
            jobs = [
                pool.submit(_compile_product, shape, launch, gated)
                for _, shape, gated in shapes
                for launch in candidates[shape]
            ]
            wait(jobs, max(0.0, deadline - MEASURE_S - time.perf_counter()))
            pool.shutdown(cancel_futures=True)
    for rows, shape, gated in shapes:
        if time.perf_counter() > deadline:
            break
        run = ProductRun(shape, rows, timer.device, gated=gated)
        times: dict[ProductLaunch | None, float] = {
            None: timer.on_device(run.torch, recorded=True).median
        }
        for launch in candidates[shape]:
            seconds = _seconds_of(lambda run=run, launch=launch: run.with_launch(launch), timer)
            if seconds is not None:
                times[launch] = seconds
        chosen = chosen_product(times)
        name = f"{rows} rows, {shape.inputs} to {shape.outputs}"
        note = f"{len(times) - 1} of {len(candidates[shape])} tried"
        others = {key: launch for key, launch in best.products.items() if key != shape}
        kept = others if chosen is None else {**others, shape: chosen}
        best = dataclasses.replace(best, products=kept)
        _save(file, best)
        if chosen is not None:
            name += f": {chosen.block_n} x {chosen.block_k}, {chosen.warps} warps"
            name += f", {chosen.stages} stages"
        else:
            name += ": torch"
        yield _line(name, times, chosen, note)


def chosen_product(times: Mapping[ProductLaunch | None, float]) -> ProductLaunch | None:
    """The fastest launch; None for torch's product, if that is faster beyond LEAST_GAIN.

    times: seconds of each, of torch's product for None.
    """
    own = {launch: seconds for launch, seconds in times.items() if launch is not None}
    if not own:
        return None
    best = min(own, key=own.__getitem__)
    return best if own[best] * LEAST_GAIN <= times[None] else None


def _product_shapes(sizes: Sizes, device: torch.device) -> list[tuple[int, ProductShape, bool]]:
    """(measured rows, shape, whether gated) of every product of a layer."""
    spec = ModelSpec.from_config(sizes.model)
    layout = HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    matrices = (
        (layout.qkv_size, hidden, False),
        (hidden, layout.q_size, False),
        (2 * inner, hidden, True),
        (hidden, inner, False),
    )
    size = 2 if device.type == "cuda" else 4
    found = []
    for rows in PRODUCT_ROWS if device.type == "cuda" else PRODUCT_ROWS[:1]:
        step = rows_step(rows)
        assert step is not None
        found += [
            (rows, ProductShape(step, outputs, inputs, size), gated)
            for outputs, inputs, gated in matrices
        ]
    return found


def _product_candidates(shape: ProductShape, many: bool) -> list[ProductLaunch]:
    if not many:  # only a test of the program
        return [ProductLaunch(16, 32, 2, 1)]
    listed = UP_TO_16_ROWS if shape.rows <= 16 else MORE_ROWS
    return [launch for values in listed if _fits(launch := ProductLaunch(*values), shape)]


def _fits(launch: ProductLaunch, shape: ProductShape) -> bool:
    """Whether blocks divide the matrix, and the stages fit the shared memory of a program."""
    rows = max(shape.rows, MIN_ROWS)
    shared = (rows + launch.block_n) * launch.block_k * shape.element_bytes * launch.stages
    divides = shape.outputs % launch.block_n == 0 and shape.inputs % launch.block_k == 0
    return divides and shared <= MOST_SHARED


class ProductRun:
    """The tensors of one product; weights alternate, so that they are not in the cache.

    gated: with the activation after it.
    """

    def __init__(
        self, shape: ProductShape, rows: int, device: torch.device, *, gated: bool
    ) -> None:
        self._shape, self._device, self._gated = shape, device, gated
        self._kernels = TritonKernels(device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        cold = COLD_BYTES if device.type == "cuda" else 0
        copies = max(2, -(-cold // (shape.outputs * shape.inputs * shape.element_bytes)))
        self._x = torch.randn(rows, shape.inputs, device=device, dtype=dtype)
        self._weights = torch.randn(copies, shape.outputs, shape.inputs, device=device, dtype=dtype)

    def torch(self, i: int) -> object:
        out = torch.nn.functional.linear(self._x, self._weights[i % len(self._weights)])
        return self._kernels.silu_and_mul(out) if self._gated else out

    def with_launch(self, launch: ProductLaunch) -> Callable[[int], object]:
        settings = dataclasses.replace(settings_for(self._device), products={self._shape: launch})
        products = RowProducts(settings)
        multiply = products.gated if self._gated else products
        return lambda i: multiply(self._x, self._weights[i % len(self._weights)])


def _compile_product(shape: ProductShape, launch: ProductLaunch, gated: bool) -> None:
    try:
        ProductRun(shape, shape.rows, torch.device("cuda"), gated=gated).with_launch(launch)(0)
        torch.cuda.synchronize()
    except Exception as error:  # it occurs again when measured
        print(f"  {type(error).__name__}")


def _save(file: Path, settings: TritonSettings) -> None:
    """Write atomically."""
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(".new")
    new.write_text(triton_settings.as_json(settings), encoding="utf-8")
    new.replace(file)


def measured(
    runs: Sequence[AttentionRun], options: Mapping[T, TritonSettings], timer: Timer, deadline: float
) -> dict[T, float]:
    """Option -> geometric mean of the seconds over `runs`, for options that run. Stops after the
    deadline (time.perf_counter()), but not before the first option."""
    times: dict[T, float] = {}
    for option, settings in options.items():
        if times and time.perf_counter() > deadline:
            break
        seconds = [_seconds(run, settings, timer) for run in runs]
        known = [each for each in seconds if each is not None]
        if len(known) == len(runs):
            times[option] = math.prod(known) ** (1 / len(known))
    return times


def _runs(sizes: Sizes, works: Sequence[Workload], timer: Timer) -> list[AttentionRun]:
    return [AttentionRun(sizes, work, timer.device) for work in works]


def with_launch(settings: TritonSettings, shape: Shape, launch: LaunchConfig) -> TritonSettings:
    return dataclasses.replace(settings, tuned={**settings.tuned, shape: launch})


def _programs(settings: TritonSettings, kind: Kind, count: int) -> TritonSettings:
    return dataclasses.replace(settings, programs={**settings.programs, kind: count})


def _shapes(sizes: Sizes, settings: TritonSettings, run_all: RunAll) -> dict[Shape, list[Workload]]:
    """Launch shape -> the workloads that use it. run_all: map, or that of a pool."""
    works = workloads(sizes)
    found: dict[Shape, list[Workload]] = {}
    requested = run_all(
        _requested_shapes, *zip(*[(sizes, i, settings) for i in range(len(works))], strict=True)
    )
    for work, shapes in zip(works, requested, strict=True):
        for shape in shapes:
            if shape.kind == work.kind:
                found.setdefault(shape, []).append(work)
    return found


def _requested_shapes(sizes: Sizes, number: int, settings: TritonSettings) -> list[Shape]:
    """The launch shapes of a workload; running it compiles the defaults."""
    recording = RecordingSettings(
        settings.device, settings.processors, settings.major, settings.programs
    )
    _run_once(sizes, number, recording)
    return recording.requested


def _candidates(shape: Shape, default: LaunchConfig, many: bool) -> Iterator[LaunchConfig]:
    if not many:  # only a test of the program
        yield default._replace(block_n=KEYS[0])
        return
    for rows in sorted({default.block_m, min(default.block_m, SMALLER_TILE)}, reverse=True):
        for keys, warps, stages in itertools.product(KEYS, WARPS, STAGES[shape.kind]):
            launch = LaunchConfig(rows, keys, warps, stages)
            if shape.kind == "one" or _tile_bytes(shape, launch) <= MOST_SHARED:
                yield launch


def _tile_bytes(shape: Shape, launch: LaunchConfig) -> int:
    """Bytes of shared memory of a tile: its queries, and K and V for every stage."""
    tokens = launch.block_m + 2 * launch.stages * launch.block_n
    return tokens * shape.head_dim * shape.element_bytes


def _seconds(run: AttentionRun, settings: TritonSettings, timer: Timer) -> float | None:
    return _seconds_of(lambda: run.with_settings(settings), timer)


def _seconds_of(make: Callable[[], Callable[[int], object]], timer: Timer) -> float | None:
    """The time of what `make` makes; None if it cannot be launched, e.g. for lack of shared
    memory."""
    try:
        return timer.on_device(make(), recorded=True).median
    except Exception as error:  # Triton raises many kinds
        print(f"  {type(error).__name__}: {error}"[:200])
        return None


def _compiled(sizes: Sizes, settings: TritonSettings, until: float) -> dict[Shape, list[Workload]]:
    """As _shapes, and compiles the candidates until the deadline, the rest when measured."""
    names = [work.name for work in workloads(sizes)]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        shapes = _shapes(sizes, settings, pool.map)
        numbers = {shape: names.index(works[0].name) for shape, works in shapes.items()}
        jobs = [
            pool.submit(_compile_one, sizes, number, with_launch(settings, shape, launch))
            for shape, number in numbers.items()
            for launch in _candidates(shape, settings.default(shape), True)
        ]
        wait(jobs, max(0.0, until - time.perf_counter()))
        pool.shutdown(cancel_futures=True)
    return shapes


def _compile_one(sizes: Sizes, number: int, settings: TritonSettings) -> None:
    try:
        _run_once(sizes, number, settings)
        torch.cuda.synchronize()
    except Exception as error:  # it occurs again when measured
        print(f"  {type(error).__name__}")


def _run_once(sizes: Sizes, number: int, settings: TritonSettings) -> None:
    """Run a workload by its number: passing tensors between processes would hold open files."""
    device = torch.device("cpu" if settings.interpreted else "cuda")
    AttentionRun(sizes, workloads(sizes)[number], device).with_settings(settings)(0)


def _line(name: str, times: Mapping[T, float], chosen: T, note: str) -> Line:
    """A line for the chosen option; the first of `times` is the previous setting."""
    return Line(
        "tune",
        name,
        measured=times[chosen] * 1e3,
        share=next(iter(times.values())) / times[chosen],
        share_of="times as fast as before",
        note=note,
    )


def _launch_text(launch: LaunchConfig, programs: int) -> str:
    tile = f"{launch.block_m} x {launch.block_n}, {launch.warps} warps, {launch.stages} stages"
    return f"{tile}, {programs} programs per processor"
