"""CUDA graphs of steps: captured once, then replayed with one launch for the whole step.

A graph does the same work on the same addresses in every replay. So one graph is captured for each
of some sizes (the capture sizes), inputs are copied into static buffers before a replay, and a
smaller step is padded:

    token_ids   12 77  5  0      token and position of padding are 0
    positions   40  9 31  0
    slots       99  7 55 -1      -1: its K and V are not cached
    sources      1 -1  0 -1      -1: the token is known; else a row of the step before
    logits       x  x  x  .      ignored

Attention knows the real rows (see Kernels.prepare) and reads nothing for padding.

A graph begins with the tokens that the step before has sampled, and ends with the best token of
each row, both at one place for all graphs: the host has two launches and five operations less.

    best   [ token of row 0, 1, 2, ... | bits of their logits ]     see sampler.Best
             read by the next graph

Decode steps, in which every row has one token and samples, have graphs by their number of rows.
Mixed steps, with chunks of prompts, have graphs by their tokens and samples: launching their
kernels one by one takes the host as long as the device computes a thousand tokens (10 ms for 32
layers, H100).
"""

from __future__ import annotations

import bisect
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from bros.executor.inputs import PendingTokens, StepInputs, pending_filled_in
from bros.executor.models.decoder import Decoder, LayerCache
from bros.executor.sampler import Best
from bros.kernels.interface import (
    AttentionBatch,
    GraphBuffers,
    GraphLimits,
    HeadLayout,
    Kernels,
)
from bros.kernels.staging import Staging, to_device

logger = logging.getLogger("bros.executor")

Capture = Callable[[Callable[[], None]], Callable[[], None]]
"""Captures the device work of a function; returns a function that replays it."""

_MAX_ROWS = 256
_MIN_SHARED_ROWS = 8
_SHARED_PER_ROW = 2  # the most shared parts that a row reads, on average
_MIXED_SAMPLES = (16, 64, 256)
_CHUNKS = 16  # the most chunks of a mixed step that is recorded

MIXED_PADDING = ((128, 16), (256, 32), (512, 64), (2048, 128))
"""(limit, multiple) with rising limits: mixed steps of up to `limit` tokens are padded to a
multiple of `multiple`. Larger ones have no graph: they are launched while the step before them
runs, which takes the device longer than launching takes the host."""


def capture_sizes(rows: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 24, 32, ... up to the first that is at least `rows`, or up to 256."""
    most = min(rows, _MAX_ROWS)
    sizes = (1, 2, 4, *range(8, _MAX_ROWS + 1, 8))
    return sizes[: bisect.bisect_left(sizes, most) + 1]


def mixed_sizes(rows: int, tokens: int) -> list[tuple[int, int]]:
    """(tokens, samples) of the graphs of mixed steps, both rising.

    A mixed step has fewer samples than tokens, so that every one of up to `tokens` tokens has a
    graph with no more padding than MIXED_PADDING says.

    rows, tokens: the most of a step.
    """
    counts = [0]
    for limit, multiple in MIXED_PADDING:
        counts += range(counts[-1] + multiple, limit + 1, multiple)
    counts = counts[: bisect.bisect_left(counts, tokens) + 1]
    samples = _MIXED_SAMPLES[: bisect.bisect_left(_MIXED_SAMPLES, rows) + 1]
    return [(n, each) for n in counts[1:] for each in sorted({min(s, n - 1) for s in samples})]


@dataclass(frozen=True, slots=True)
class GraphSizes:
    """Limits of the steps that graphs can replay.

    rows: the most rows of a step.
    segments_per_row: the most segments of one row, on average.
    segments: the most segments of a step.
    shares: whether there are graphs for steps with shared parts.
    tokens: the most tokens of a mixed step; 0: no mixed steps.
    """

    rows: int
    segments_per_row: int
    segments: int
    shares: bool = False
    tokens: int = 0

    @classmethod
    def of(
        cls,
        rows: int,
        max_model_len: int,
        num_blocks: int,
        block_size: int,
        shares: bool,
        tokens: int = 0,
    ) -> GraphSizes:
        """Limits with a margin for partly filled blocks and for prefixes that several rows list.
        A step that exceeds them runs without a graph."""
        per_row = math.ceil(max_model_len / block_size) * 5 // 4 + 16
        return cls(rows, per_row, 2 * num_blocks + 16 * rows, shares, tokens)

    def limits(self, rows: int, sharing: bool) -> GraphLimits:
        segments = min(rows * self.segments_per_row, self.segments)
        return GraphLimits(rows, segments, rows * _SHARED_PER_ROW if sharing else 0)

    def mixed_limits(self, samples: int, tokens: int) -> GraphLimits:
        """Of steps with up to `samples` samples; all graphs with as many share buffers."""
        rows = samples + _CHUNKS  # not all chunks sample
        plain = self.limits(rows, self.shares)
        return GraphLimits(rows, plain.segments, plain.shared_rows, _CHUNKS, tokens)


class _Inputs:
    """Static inputs of graphs, int32 on the device.

    token_ids, positions, slots, sources: [tokens].
    sample_rows: [samples]; padding samples row 0.
    """

    def __init__(self, tokens: int, samples: int, device: torch.device) -> None:
        self._staging = Staging(device)
        self._tokens = tokens
        self._all = torch.empty(4 * tokens + samples, dtype=torch.int32, device=device)
        self.token_ids, self.positions, self.slots, self.sources = self._all[: 4 * tokens].view(
            4, tokens
        )
        self.sample_rows = self._all[4 * tokens :]
        self.write((), None)

    def write(self, tensors: Sequence[Tensor], sample_rows: Tensor | None) -> None:
        """Upload and pad. tensors: token_ids, positions, slots, sources, or the first of these."""
        host = self._staging.take(self._all.numel())
        numbers = host.numpy()  # a view of a tensor takes ten times as long to make as one of these
        by_token = numbers[: 4 * self._tokens].reshape(4, self._tokens)
        by_token[:2] = 0
        by_token[2:] = -1
        for row, tensor in zip(by_token, tensors, strict=False):
            row[: len(tensor)] = tensor.numpy()
        sampled = numbers[4 * self._tokens :]
        sampled[:] = 0
        if sample_rows is not None:
            sampled[: len(sample_rows)] = sample_rows.numpy()
        self._all.copy_(host, non_blocking=True)
        self._staging.sent()


@dataclass(frozen=True, slots=True)
class _Graph:
    """rows: most rows of a decode step, or samples of a mixed one.
    tokens: most tokens of a mixed step; 0: for decode steps.
    """

    rows: int
    buffers: GraphBuffers
    inputs: _Inputs
    replay: Callable[[], None]
    tokens: int = 0


class Replayed(NamedTuple):
    """What a graph computes, in buffers that the next replay overwrites; undefined on ranks other
    than 0.

    logits: fp32 [samples, vocab].
    best: int32 [2, at least `samples`], see sampler.Best.
    """

    logits: Tensor
    best: Tensor


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
        best: Best,
    ) -> None:
        """Capture all graphs. This runs a step of each size a few times without changing the KV.

        best: finds the best tokens of logits.

        Raises whatever `capture` raises, and RuntimeError if the kernels cannot be captured.
        """
        row_counts = capture_sizes(sizes.rows)
        mixed = mixed_sizes(row_counts[-1], sizes.tokens)
        self._decoder = decoder
        self._caches = caches
        self._kernels = kernels
        self._layout = layout
        self._device = device
        most_samples = max([samples for _, samples in mixed], default=0)
        self._find_best = best
        most_rows = max(row_counts[-1], most_samples)
        self._logits = torch.empty(most_rows, vocab_size, device=device)
        self._best = torch.zeros(2 * most_rows, dtype=torch.int32, device=device)
        self._plain: list[_Graph] = []
        self._sharing: list[_Graph] = []
        self._mixed: list[_Graph] = []
        # The largest first: the smaller graphs then reuse the memory of its pool.
        if mixed:
            self._mixed = self._capture_mixed(mixed, sizes, most_samples, capture)
        inputs = _Inputs(row_counts[-1], 0, device)
        for rows in reversed(row_counts):
            self._plain.insert(0, self._capture(sizes.limits(rows, False), inputs, capture))
            if sizes.shares and rows >= min(_MIN_SHARED_ROWS, row_counts[-1]):
                self._sharing.insert(0, self._capture(sizes.limits(rows, True), inputs, capture))

    @property
    def has_mixed(self) -> bool:
        """Whether there are graphs of mixed steps."""
        return bool(self._mixed)

    def drop_mixed(self) -> None:
        """Let mixed steps run without graphs."""
        self._mixed = []

    def find(self, inputs: StepInputs, *, whole: bool = True) -> _Graph | None:
        """The graph that can replay this step; None if the step is read or does not begin with the
        first layer.

        whole: whether the step may be launched as a whole; else only decode steps have a graph,
            because it is worth suspending others between layers.
        """
        attention, rows = inputs.attention, inputs.attention.num_rows
        samples, tokens = len(inputs.sample_rows), len(inputs.token_ids)
        if inputs.kept or len(inputs.read_rows):
            return None
        if not rows == tokens == samples:
            return self._find_mixed(tokens, samples, attention) if whole else None
        graphs = self._plain if attention.shared is None else self._sharing
        at = bisect.bisect_left(graphs, rows, key=lambda graph: graph.rows)
        if at < len(graphs) and graphs[at].buffers.fits(attention):
            return graphs[at]
        return None

    def _find_mixed(self, tokens: int, samples: int, batch: AttentionBatch) -> _Graph | None:
        first = bisect.bisect_left(self._mixed, tokens, key=lambda graph: graph.tokens)
        for graph in self._mixed[first:]:
            if graph.rows >= samples:
                return graph if graph.buffers.fits(batch) else None
        return None

    def replay(
        self, graph: _Graph, inputs: StepInputs, pending: PendingTokens | None = None
    ) -> Replayed:
        """Run a step. The host does not wait for the device.

        graph: from `find`.
        inputs: on the host; their attention batch is not prepared.
        """
        known = (inputs.token_ids, inputs.positions, inputs.slots)
        graph.inputs.write(
            known if pending is None else (*known, self._sources(pending)),
            inputs.sample_rows if graph.tokens else None,
        )
        self._kernels.prepare(inputs.attention, self._layout, self._device, graph.buffers)
        graph.replay()
        samples = len(inputs.sample_rows)
        return Replayed(self._logits[:samples], self._best[: 2 * graph.rows].view(2, graph.rows))

    def _sources(self, pending: PendingTokens) -> Tensor:
        """PendingTokens.sources in self._best, which then has the pending tokens."""
        tokens, sources = pending.tokens, pending.sources
        if tokens.data_ptr() == self._best.data_ptr():
            return sources
        # The step before was no replay, or this is not the rank that samples.
        if len(tokens) > len(self._best):  # it had more rows than any graph: only those of this one
            wanted = sources >= 0
            tokens = tokens.index_select(0, to_device(sources[wanted], self._device))
            sources = torch.where(wanted, wanted.cumsum(0).int() - 1, sources)
        self._best[: len(tokens)].copy_(tokens)
        return sources

    def _capture(self, limits: GraphLimits, inputs: _Inputs, capture: Capture) -> _Graph:
        """A decode step."""
        rows = limits.rows
        buffers = self._buffers(limits)
        sample_rows = torch.arange(rows, dtype=torch.int32, device=self._device)
        run = self._step(rows, rows, inputs, buffers, sample_rows)
        return _Graph(rows, buffers, inputs, capture(run))

    def _capture_mixed(
        self,
        mixed: Sequence[tuple[int, int]],
        sizes: GraphSizes,
        most_samples: int,
        capture: Capture,
    ) -> list[_Graph]:
        """All mixed steps, in the order of `mixed`, which is that of mixed_sizes."""
        most = mixed[-1][0]
        inputs = _Inputs(most, most_samples, self._device)
        # The largest first: the others then share its memory for partial results.
        shared = {
            step: self._buffers(sizes.mixed_limits(step, most))
            for step in sorted({_sample_step(n) for _, n in mixed}, reverse=True)
        }
        found = []
        for tokens, samples in reversed(mixed):
            buffers = shared[_sample_step(samples)]
            rows = inputs.sample_rows[:samples]
            run = self._step(tokens, samples, inputs, buffers, rows)
            found.append(_Graph(samples, buffers, inputs, capture(run), tokens))
        return found[::-1]

    def _buffers(self, limits: GraphLimits) -> GraphBuffers:
        buffers = self._kernels.graph_buffers(limits, self._layout, self._device)
        if buffers is None:
            raise RuntimeError(f"{self._kernels.name} kernels cannot be captured in a CUDA graph")
        return buffers

    def _step(
        self,
        tokens: int,
        rows: int,
        inputs: _Inputs,
        buffers: GraphBuffers,
        sample_rows: Tensor,
    ) -> Callable[[], None]:
        """The computation of a step of this size. It writes to self._logits and self._best."""
        batch = _rows_without_context(rows)
        prepared = self._kernels.prepare(batch, self._layout, self._device, buffers)
        token_ids, positions, slots = (
            each[:tokens] for each in (inputs.token_ids, inputs.positions, inputs.slots)
        )
        sources, last = inputs.sources[:tokens], self._best
        found = self._best[: 2 * rows].view(2, rows)

        def run() -> None:
            known = pending_filled_in(token_ids, last, sources)
            step = StepInputs(known, positions, slots, prepared, sample_rows, ())
            logits = self._decoder(step, self._caches)
            assert logits is not None
            if len(logits):  # ranks other than 0 have none
                self._logits[: len(logits)].copy_(logits)
                self._find_best(logits, found)

        return run


def _sample_step(samples: int) -> int:
    return next(step for step in _MIXED_SAMPLES if samples <= step)


def _rows_without_context(rows: int) -> AttentionBatch:
    """Rows of one token each."""
    return AttentionBatch(
        query_start=torch.arange(rows + 1, dtype=torch.int32),
        segment_start=torch.zeros(rows + 1, dtype=torch.int32),
        segments=torch.zeros(0, 3, dtype=torch.int32),
    )


def capture_or_warn(capture: Callable[[], StepGraphs], steps: str = "Steps") -> StepGraphs | None:
    """The result of `capture`; if that fails, logs a warning with the reason and returns None.

    steps: those that then run without graphs, for the warning.
    """
    try:
        return capture()
    except Exception as error:  # any failure: steps run without graphs too
        reason = str(error).strip().splitlines() or [type(error).__name__]
        logger.warning("%s run without CUDA graphs, more slowly: %s", steps, reason[0])
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
                # Not by torch.cuda.graph, which collects garbage and frees cached memory each time.
                # thread_local: work of another thread does not make the capture fail.
                graph.capture_begin(self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            torch.cuda.set_stream(before)  # a failed capture leaves its own stream current
        before.wait_stream(self._stream)
        replay: Callable[[], None] = graph.replay
        return replay
