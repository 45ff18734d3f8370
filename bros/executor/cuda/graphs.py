"""Decode steps recorded once and replayed: the launches of a whole step become one.

A graph does the same work on the same addresses every time. So there is one per bucket of row
counts, its inputs lie in static buffers that are filled before each replay, and a step with fewer
rows than its bucket is padded:

    token_ids   12 77  5  0      position and token of padding are 0
    positions   40  9 31  0
    slots       99  7 55 -1      -1: nothing is cached for it
    logits       x  x  x  .      not looked at

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

from bros.executor.feed import Pending, fill_in
from bros.executor.inputs import StepInputs
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

Recorder = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes work on the device, returns what does the same work again."""

_LARGEST = 256
_LEAST_SHARING = 8
_SHARED_PER_ROW = 2  # parts that a row reads on average, at most


def buckets_for(rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... until one holds `rows`, or until 256."""
    most = min(rows, _LARGEST)
    buckets = (1, 2, 4, *range(8, _LARGEST + 1, 8))
    return buckets[: bisect.bisect_left(buckets, most) + 1]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """What recorded steps may hold.

    segments_per_row, segments: the most of one row and in all.
    """

    rows: int
    segments_per_row: int
    segments: int
    shares: bool = False

    @classmethod
    def of(
        cls, rows: int, max_model_len: int, num_blocks: int, block_size: int, shares: bool
    ) -> GraphSizes:
        """A row's tokens lie in few more blocks than they fill, and those of all rows in few more
        than there are, unless many have a prefix in common. What exceeds that runs unrecorded."""
        per_row = math.ceil(max_model_len / block_size) * 5 // 4 + 16
        return cls(rows, per_row, 2 * num_blocks + 16 * rows, shares)

    def limits(self, rows: int, sharing: bool) -> GraphLimits:
        segments = min(rows * self.segments_per_row, self.segments)
        return GraphLimits(rows, segments, rows * _SHARED_PER_ROW if sharing else 0)


@dataclass(frozen=True, slots=True)
class _Recording:
    rows: int
    buffers: GraphBuffers
    replay: Callable[[], None]


class StepGraphs:
    """Graphs of one decoder over its KV caches."""

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
        recorder: Recorder,
    ) -> None:
        """Record everything, which runs each bucket a few times; the KV caches stay as they are.

        Raises whatever recording raises, and RuntimeError if the kernels cannot be recorded.
        """
        buckets = buckets_for(sizes.rows)
        self._decoder = decoder
        self._caches = caches
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._staging = Staging(device)
        self._inputs = torch.empty(4, buckets[-1], dtype=torch.int32, device=device)
        self._logits = torch.empty(buckets[-1], vocab_size, device=device)
        self._write_inputs(())
        self._plain: list[_Recording] = []
        self._sharing: list[_Recording] = []
        # The largest first: those after it find room for theirs in the memory it left.
        for rows in reversed(buckets):
            self._plain.insert(0, self._record(sizes.limits(rows, False), recorder))
            if sizes.shares and rows >= min(_LEAST_SHARING, buckets[-1]):
                self._sharing.insert(0, self._record(sizes.limits(rows, True), recorder))

    def fitting(self, inputs: StepInputs) -> _Recording | None:
        """For `run`, if a recording does this step: one token per row, all of them sampled."""
        attention, rows = inputs.attention, inputs.attention.num_rows
        if not rows == len(inputs.token_ids) == len(inputs.sample_rows):
            return None
        recordings = self._plain if attention.shared is None else self._sharing
        at = bisect.bisect_left(recordings, rows, key=lambda recording: recording.rows)
        if at < len(recordings) and recordings[at].buffers.fits(attention):
            return recordings[at]
        return None

    def run(
        self, recording: _Recording, inputs: StepInputs, pending: Pending | None = None
    ) -> Tensor:
        """fp32 logits [rows, vocab], in a buffer that the next call overwrites.

        inputs: on the host; attention is not prepared yet.
        """
        known = (inputs.token_ids, inputs.positions, inputs.slots)
        self._write_inputs(known if pending is None else (*known, pending.sources))
        if pending is not None:
            fill_in(self._inputs[0], pending.tokens, self._inputs[3])
        self._prepare(inputs, recording.buffers)
        recording.replay()
        return self._logits[: inputs.attention.num_rows]

    def _prepare(self, inputs: StepInputs, buffers: GraphBuffers) -> None:
        self._kernels.prepare(inputs.attention, self._layout, self._device, buffers)

    def _write_inputs(self, tensors: Sequence[Tensor]) -> None:
        """token_ids, positions, slots and sources [rows] each, and padding after them."""
        host = self._staging.take(self._inputs.numel()).view(self._inputs.shape)
        host[:2] = 0
        host[2:] = -1
        for row, tensor in zip(host, tensors, strict=False):
            row[: len(tensor)] = tensor
        self._inputs.copy_(host, non_blocking=True)
        self._staging.sent()

    def _record(self, limits: GraphLimits, recorder: Recorder) -> _Recording:
        rows = limits.rows
        buffers = self._kernels.graph_buffers(limits, self._layout, self._device)
        if buffers is None:
            raise RuntimeError(f"{self._kernels.name} kernels cannot be recorded")
        batch = _rows_without_context(rows)
        token_ids, positions, slots = (row[:rows] for row in self._inputs[:3])
        prepared = self._kernels.prepare(batch, self._layout, self._device, buffers)
        sample_rows = torch.arange(rows, dtype=torch.int32, device=self._device)
        inputs = StepInputs(token_ids, positions, slots, prepared, sample_rows, ())

        def run() -> None:
            logits = self._decoder(inputs, self._caches)
            assert logits is not None
            self._logits[: len(logits)].copy_(logits)  # ranks but the first have none

        return _Recording(rows, buffers, recorder(run))


def _rows_without_context(rows: int) -> AttentionBatch:
    """One token each."""
    return AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        segment_start=torch.zeros(rows + 1, dtype=torch.int32),
        segments=torch.zeros(0, 3, dtype=torch.int32),
    )


def recorded_or_warn(record: Callable[[], StepGraphs]) -> StepGraphs | None:
    """What `record` gives; None, and a warning with the reason, if it fails."""
    try:
        return record()
    except Exception as error:  # whatever it is, steps run without graphs, too
        reason = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("Decode steps run without CUDA graphs, more slowly: %s", reason[0])
        torch.cuda.empty_cache()
        return None


class CudaRecorder:
    """Records on a stream of its own; all graphs share one memory pool."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """Runs it once before, so that kernels are compiled and libraries set up."""
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                run()
            # Another thread may use the GPU meanwhile; that need not spoil the recording.
            mode = "thread_local"
            with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode=mode):
                run()
        finally:
            torch.cuda.set_stream(before)  # which a recording that fails leaves set to its own
        before.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay
