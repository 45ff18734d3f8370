"""CUDA graphs of decode steps: captured once, then replayed with one launch for the whole step.

A graph does the same work on the same addresses in every replay. So one graph is captured for each
of some numbers of rows (the capture sizes), inputs are copied into static buffers before a replay,
and a step with fewer rows than its graph is padded:

    token_ids   12 77  5  0      token and position of padding are 0
    positions   40  9 31  0
    slots       99  7 55 -1      -1: its K and V are not cached
    logits       x  x  x  .      ignored

Attention knows the real rows (see Kernels.prepare) and reads nothing for padding.
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bros.executor.inputs import PendingTokens, StepInputs, fill_pending_tokens
from bros.executor.models.decoder import Decoder, LayerCache
from bros.kernels.interface import (
    AttentionBatch,
    GraphBuffers,
    GraphLimits,
    HeadLayout,
    Kernels,
)
from bros.kernels.staging import Staging

logger = logging.getLogger("bros.executor")

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures the device work of a function; returns a function that replays it."""

_MAX_ROWS = 256
_MIN_SHARED_ROWS = 8
_SHARED_PER_ROW = 2  # the most shared parts that a row reads, on average


def capture_sizes(rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... up to the first that is at least `rows`, or up to 256."""
    most = min(rows, _MAX_ROWS)
    sizes = (1, 2, 4, *range(8, _MAX_ROWS + 1, 8))
    return sizes[: bisect.bisect_left(sizes, most) + 1]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Limits of the steps that graphs can replay.

    rows: the most rows of a step.
    segments_per_row: the most segments of one row, on average.
    segments: the most segments of a step.
    shares: whether there are graphs for steps with shared parts.
    """

    rows: int
    segments_per_row: int
    segments: int
    shares: bool = False

    @classmethod
    def of(
        cls, rows: int, max_model_len: int, num_blocks: int, block_size: int, shares: bool
    ) -> GraphSizes:
        """Limits with a margin for partly filled blocks and for prefixes that several rows list.
        A step that exceeds them runs without a graph."""
        per_row = math.ceil(max_model_len / block_size) * 5 // 4 + 16
        return cls(rows, per_row, 2 * num_blocks + 16 * rows, shares)

    def limits(self, rows: int, sharing: bool) -> GraphLimits:
        segments = min(rows * self.segments_per_row, self.segments)
        return GraphLimits(rows, segments, rows * _SHARED_PER_ROW if sharing else 0)


@dataclass(frozen=True, slots=True)
class _Graph:
    rows: int
    buffers: GraphBuffers
    replay: Callable[[], None]


class StepGraphs:
    """The CUDA graphs of one decoder over its KV caches."""

    @torch.inference_mode()
    def __init__(
        self,
        decoder: Decoder,
        caches: Sequence[LayerCache],
        kernels: Kernels,
        layout: HeadLayout,
        device: torch.device,
        vocab_size: int,
        sizes: GraphSizes,
        capture: Capture,
    ) -> None:
        """Capture all graphs. This runs a step of each size a few times without changing the KV.

        Raises whatever `capture` raises, and RuntimeError if the kernels cannot be captured.
        """
        row_counts = capture_sizes(sizes.rows)
        self._decoder = decoder
        self._caches = caches
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._staging = Staging(device)
        self._inputs = torch.empty(4, row_counts[-1], dtype=torch.int32, device=device)
        self._logits = torch.empty(row_counts[-1], vocab_size, device=device)
        self._write_inputs(())
        self._plain: list[_Graph] = []
        self._sharing: list[_Graph] = []
        # The largest first: the smaller graphs then reuse the memory of its pool.
        for rows in reversed(row_counts):
            self._plain.insert(0, self._capture(sizes.limits(rows, False), capture))
            if sizes.shares and rows >= min(_MIN_SHARED_ROWS, row_counts[-1]):
                self._sharing.insert(0, self._capture(sizes.limits(rows, True), capture))

    def find(self, inputs: StepInputs) -> _Graph | None:
        """The graph that can replay this step; None unless every row has one token, samples, is
        not read, and begins with the first layer."""
        attention, rows = inputs.attention, inputs.attention.num_rows
        if inputs.kept:
            return None
        if not rows == len(inputs.token_ids) == len(inputs.sample_rows) or len(inputs.read_rows):
            return None
        graphs = self._plain if attention.shared is None else self._sharing
        at = bisect.bisect_left(graphs, rows, key=lambda graph: graph.rows)
        if at < len(graphs) and graphs[at].buffers.fits(attention):
            return graphs[at]
        return None

    def replay(
        self, graph: _Graph, inputs: StepInputs, pending: PendingTokens | None = None
    ) -> Tensor:
        """fp32 logits [rows, vocab], in a buffer that the next call overwrites.

        graph: from `find`.
        inputs: on the host; their attention batch is not prepared.
        """
        known = (inputs.token_ids, inputs.positions, inputs.slots)
        self._write_inputs(known if pending is None else (*known, pending.sources))
        if pending is not None:
            fill_pending_tokens(self._inputs[0], pending.tokens, self._inputs[3])
        self._kernels.prepare(inputs.attention, self._layout, self._device, graph.buffers)
        graph.replay()
        return self._logits[: inputs.attention.num_rows]

    def _write_inputs(self, tensors: Sequence[Tensor]) -> None:
        """tensors: token_ids, positions, slots and sources, each [rows]; pads them."""
        host = self._staging.take(self._inputs.numel()).view(self._inputs.shape)
        host[:2] = 0
        host[2:] = -1
        for row, tensor in zip(host, tensors, strict=False):
            row[: len(tensor)] = tensor
        self._inputs.copy_(host, non_blocking=True)
        self._staging.sent()

    def _capture(self, limits: GraphLimits, capture: Capture) -> _Graph:
        rows = limits.rows
        buffers = self._kernels.graph_buffers(limits, self._layout, self._device)
        if buffers is None:
            raise RuntimeError(f"{self._kernels.name} kernels cannot be captured in a CUDA graph")
        batch = _rows_without_context(rows)
        token_ids, positions, slots = (row[:rows] for row in self._inputs[:3])
        prepared = self._kernels.prepare(batch, self._layout, self._device, buffers)
        sample_rows = torch.arange(rows, dtype=torch.int32, device=self._device)
        inputs = StepInputs(token_ids, positions, slots, prepared, sample_rows, ())

        def run() -> None:
            logits = self._decoder(inputs, self._caches)
            assert logits is not None
            self._logits[: len(logits)].copy_(logits)  # ranks other than 0 have no logits

        return _Graph(rows, buffers, capture(run))


def _rows_without_context(rows: int) -> AttentionBatch:
    """Rows of one token each."""
    return AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        segment_start=torch.zeros(rows + 1, dtype=torch.int32),
        segments=torch.zeros(0, 3, dtype=torch.int32),
    )


def capture_or_warn(capture: Callable[[], StepGraphs]) -> StepGraphs | None:
    """The result of `capture`; if that fails, logs a warning with the reason and returns None."""
    try:
        return capture()
    except Exception as error:  # any failure: steps run without graphs too
        reason = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("Decode steps run without CUDA graphs, more slowly: %s", reason[0])
        torch.cuda.empty_cache()
        return None


class CudaGraphCapture:
    """Captures on a separate stream; all graphs share one memory pool. A Capture."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs `run` once before, so that kernels are compiled and libraries initialized."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                run()
            # thread_local: work of another thread does not make the capture fail.
            mode = "thread_local"
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                run()
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
        before.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay
