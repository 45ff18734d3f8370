"""Finds tile sizes of the attention kernels for the device that is there; for gpu_speed.py.

Each launch that the workloads below need is tried with tiles, warps and stages around the default,
one launch at a time, on the workload that needs it first. What was fastest is written to where
the kernels read it, bros/kernels/triton/tuned/DEVICE.json.

Compiling takes longer than measuring, so processes beside this one compile all candidates first;
Triton keeps what they make on disk.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from gpu_model import BLOCK, Sizes, batch_of, full_segments, shared_by_all
from gpu_timing import Line, Timer

from bros.executor.models.spec import ModelSpec
from bros.kernels.interface import AttentionBatch, HeadLayout
from bros.kernels.triton import settings as triton_settings
from bros.kernels.triton.settings import Kind, Launch, Settings, Shape, settings_for
from bros.kernels.triton_ops import TritonKernels

KEYS, WARPS, STAGES = (32, 64, 128), (4, 8), (2, 3, 4)
PROGRAMS: dict[Kind, tuple[int, ...]] = {"one": (2, 4, 8), "tile": (1, 2, 4)}
WORKERS = 12
TUNED = Path(triton_settings.__file__).parent / "tuned"


@dataclass(frozen=True, slots=True)
class Watched(Settings):
    """Settings that note which launches are asked for."""

    asked: list[Shape] = field(default_factory=list)

    def launch(self, shape: Shape) -> Launch:
        if shape not in self.asked:
            self.asked.append(shape)
        return self.tuned.get(shape) or self.default(shape)


@dataclass(frozen=True, slots=True)
class Workload:
    """Attention of one layer."""

    name: str
    tokens: int
    batch: AttentionBatch
    blocks: int


def workloads(sizes: Sizes) -> list[Workload]:
    """Decodes, a chunk of a prompt, and rows with a common prefix."""
    found = []
    longest = max(sizes.contexts)
    for rows in (min(8, sizes.attention[0]), sizes.attention[0]):
        blocks = np.random.default_rng(0).permutation(rows * (longest // BLOCK)).astype(np.int32)
        segments = [full_segments(each, longest) for each in np.split(blocks, rows)]
        found.append(Workload(f"{rows} x {longest}", rows, batch_of(segments), len(blocks)))
    chunk = dataclasses.replace(
        batch_of([full_segments(np.arange(longest // BLOCK, dtype=np.int32), longest)]),
        query_start=torch.tensor([0, longest], dtype=torch.int32),
    )
    found.append(Workload(f"chunk of {longest}", longest, chunk, longest // BLOCK))
    for rows in sizes.sharers:
        prefix = np.arange(sizes.prefix // BLOCK, dtype=np.int32)
        own = [np.array([len(prefix) + row], np.int32) for row in range(rows)]
        batch = batch_of([full_segments(each, BLOCK) for each in own], shared_by_all(prefix, rows))
        found.append(Workload(f"{rows} sharing", rows, batch, len(prefix) + rows))
    return found


class Attending:
    """One workload's tensors, run with any settings."""

    def __init__(self, sizes: Sizes, work: Workload, device: torch.device) -> None:
        spec = ModelSpec.from_config(sizes.model)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._layout = HeadLayout(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._device, self._batch = device, work.batch
        self._qkv = torch.randn(work.tokens, self._layout.qkv_size, device=device).to(dtype)
        shape = (2, 2, work.blocks, spec.num_kv_heads, BLOCK, spec.head_dim)
        self._caches = torch.randn(shape, device=device, dtype=dtype)

    def with_settings(self, settings: Settings) -> Callable[[int], object]:
        kernels = TritonKernels(self._device, settings)
        batch = kernels.prepare(self._batch, self._layout, self._device)
        scale = self._layout.head_dim**-0.5
        return lambda i: kernels.attention(
            self._qkv, self._layout, *self._caches[i % 2], batch, scale
        )


def tune(sizes: Sizes, timer: Timer, folder: Path | None = None) -> Iterator[Line]:
    """Best launches of one device, a line for each; saved at the end, and what is there replaced.

    folder: where; by default where the kernels look.
    """
    best = dataclasses.replace(settings_for(timer.device), tuned={})
    todo = workloads(sizes)
    shapes = list(_shapes(sizes, todo, best, timer.device))
    if timer.on_cuda:
        _compile(sizes, [work for work, _ in shapes], [shape for _, shape in shapes], best)
    for work, shape in shapes:
        run = Attending(sizes, work, timer.device)
        default = best.default(shape)
        times = {}
        for launch in dict.fromkeys((default, *_candidates(default, timer.on_cuda))):
            seconds = _seconds(run, with_launch(best, shape, launch), timer)
            if seconds is not None:
                times[launch] = seconds
        chosen = min(times, key=times.__getitem__)
        best = with_launch(best, shape, chosen)
        yield _line(
            f"{shape.kind}, {shape.rows} rows: {_words(chosen)}",
            times[chosen],
            times[default],
            f"{len(times)} tried on {work.name}",
        )
    for kind, counts in PROGRAMS.items():
        work = next(work for work, shape in shapes if shape.kind == kind)
        run = Attending(sizes, work, timer.device)
        options = {count: _programs(best, kind, count) for count in counts}
        found = {count: _seconds(run, each, timer) for count, each in options.items()}
        known = {count: seconds for count, seconds in found.items() if seconds is not None}
        count = min(known, key=known.__getitem__)
        before = _seconds(run, best, timer)
        best = options[count]
        yield _line(f"{kind}: {count} programs per processor", known[count], before or 0.0, "")
    target = (folder or TUNED) / triton_settings.file_name(best.device)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(triton_settings.as_json(best), encoding="utf-8")


def with_launch(settings: Settings, shape: Shape, launch: Launch) -> Settings:
    return dataclasses.replace(settings, tuned={**settings.tuned, shape: launch})


def _programs(settings: Settings, kind: Kind, count: int) -> Settings:
    return dataclasses.replace(settings, programs={**settings.programs, kind: count})


def _shapes(
    sizes: Sizes, todo: Sequence[Workload], settings: Settings, device: torch.device
) -> Iterator[tuple[Workload, Shape]]:
    """Each launch once, with the first workload that needs it."""
    seen: set[Shape] = set()
    for work in todo:
        watched = Watched(settings.device, settings.processors, settings.major, settings.programs)
        Attending(sizes, work, device).with_settings(watched)(0)
        for shape in watched.asked:
            if shape not in seen:
                seen.add(shape)
                yield work, shape


def _candidates(default: Launch, many: bool) -> Iterator[Launch]:
    if not many:  # to try the program
        yield default._replace(block_n=KEYS[0])
        return
    for keys, warps, stages in itertools.product(KEYS, WARPS, STAGES):
        yield default._replace(block_n=keys, warps=warps, stages=stages)


def _seconds(run: Attending, settings: Settings, timer: Timer) -> float | None:
    """None if it cannot be launched: too much shared memory, for one."""
    try:
        return timer.on_device(run.with_settings(settings)).median
    except Exception as error:  # Triton has many kinds of them
        print(f"  {settings.tuned}: {error}"[:200])
        return None


def _compile(
    sizes: Sizes, works: Sequence[Workload], shapes: Sequence[Shape], settings: Settings
) -> None:
    jobs = [
        (sizes, work, with_launch(settings, shape, launch))
        for work, shape in zip(works, shapes, strict=True)
        for launch in _candidates(settings.default(shape), True)
    ]
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        list(pool.map(_compile_one, *zip(*jobs, strict=True)))


def _compile_one(sizes: Sizes, work: Workload, settings: Settings) -> None:
    try:
        Attending(sizes, work, torch.device("cuda")).with_settings(settings)(0)
        torch.cuda.synchronize()
    except Exception as error:  # it will be seen again when it is measured
        print(f"  {type(error).__name__}")


def _line(name: str, seconds: float, default: float, note: str) -> Line:
    return Line(
        "tune",
        name,
        measured=seconds * 1e3,
        share=default / seconds,
        share_of="times as fast as before",
        note=note,
    )


def _words(launch: Launch) -> str:
    return f"{launch.block_m} x {launch.block_n}, {launch.warps} warps, {launch.stages} stages"
