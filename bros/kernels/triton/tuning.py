"""Finds launch configurations for the device that is there, by measuring attention on it.

    settings = settings_for(device)
    for layout, dtype in models:
        settings = tune(settings, device, layout, dtype, measure)
    write as_json(settings) to tuned/ under file_name(settings.device)

`measure` runs a function often and returns the time of one call, in any unit;
triton.testing.do_bench does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.runtime.errors import OutOfResources

from bros.kernels.interface import AttentionBatch, HeadLayout
from bros.kernels.triton.attention import Attention
from bros.kernels.triton.settings import Kind, Launch, Settings, Shape

Measure = Callable[[Callable[[], object]], float]

_BLOCK_SIZE = 16
_KINDS: tuple[Kind, ...] = ("one", "tile")
_PROGRAMS: Mapping[Kind, Sequence[int]] = {"one": (2, 3, 4, 6, 8), "tile": (1, 2)}


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: `rows` rows of `tokens` tokens each, after `context` cached ones."""

    rows: int
    tokens: int
    context: int


LOADS: Mapping[Kind, Load] = {"one": Load(64, 1, 2048), "tile": Load(2, 1024, 1024)}


def tune(
    settings: Settings,
    device: torch.device,
    layout: HeadLayout,
    dtype: torch.dtype,
    measure: Measure,
    loads: Mapping[Kind, Load] = LOADS,
) -> Settings:
    """`settings` with the fastest launches for activations and cache of this layout and type, and
    with how many programs share a processor."""
    for kind in _KINDS:
        bench = _Bench(device, layout, dtype, loads[kind])
        shape = bench.attention(settings).shape(kind, layout, dtype, loads[kind].tokens)
        found: list[tuple[float, Settings]] = []
        for launch in [settings.launch(shape), *candidates(shape)]:
            tried = replace(settings, tuned={**settings.tuned, shape: launch})
            try:
                found.append((measure(bench.call(tried)), tried))
            except OutOfResources:  # more shared memory or registers than there are
                continue
        settings = _fastest(found)
        counts = [
            replace(settings, programs={**settings.programs, kind: n})
            for n in (settings.programs[kind], *_PROGRAMS[kind])
        ]
        settings = _fastest([(measure(bench.call(tried)), tried) for tried in counts])
    return settings


def candidates(shape: Shape) -> Iterator[Launch]:
    """Launches worth trying. Larger tiles than the default of fp32 spill registers."""
    if shape.element_bytes > 2:
        for keys in (16, 32):
            yield from (Launch(16, keys, warps, 3) for warps in (4, 8))
        return
    rows = (shape.rows,) if shape.kind == "one" else tuple({shape.rows, min(shape.rows, 64)})
    for block_m in rows:
        for keys in (32, 64, 128):
            for warps in (4, 8):
                yield from (Launch(block_m, keys, warps, stages) for stages in (2, 3, 4, 5))


def _fastest(found: Sequence[tuple[float, Settings]]) -> Settings:
    """The first of equals: what was there before is kept unless something beats it."""
    return min(found, key=lambda pair: pair[0])[1]


class _Bench:
    """One step's attention with random contents."""

    def __init__(
        self, device: torch.device, layout: HeadLayout, dtype: torch.dtype, load: Load
    ) -> None:
        per_row = -(-load.context // _BLOCK_SIZE)
        blocks = load.rows * per_row
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(0))
        segments = torch.zeros(blocks, 3, dtype=torch.int32)
        segments[:, 0], segments[:, 2] = order, _BLOCK_SIZE
        starts = torch.arange(load.rows + 1, dtype=torch.int32)
        self._batch = AttentionBatch(starts * load.tokens, starts * per_row, segments)
        self._device, self._layout = device, layout
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device).to(dtype)

        cache = (blocks, layout.num_kv_heads, _BLOCK_SIZE, layout.head_dim)
        self._qkv = random(load.rows * load.tokens, layout.qkv_size)
        self._k_cache, self._v_cache = random(*cache), random(*cache)

    def attention(self, settings: Settings) -> Attention:
        return Attention(settings, self._device)

    def call(self, settings: Settings) -> Callable[[], Tensor]:
        """Attention of one layer, prepared."""
        attention, layout = self.attention(settings), self._layout
        batch = attention.prepare(self._batch, layout, None)
        scale = layout.head_dim**-0.5

        def run() -> Tensor:
            return attention.run(self._qkv, layout, self._k_cache, self._v_cache, batch, scale)

        return run
