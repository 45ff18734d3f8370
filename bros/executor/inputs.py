"""The tensors of a step: built from a StepPlan on the host, then uploaded to the decoder's device.

This runs in every step, so no Python code loops over segments, nor over chunks where the extension
was built.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bros.core.plan import Kept, SharedPrefix, StepPlan
from bros.executor.chunk_arrays import concatenate
from bros.executor.readout import ReadRequest
from bros.executor.sampler import SampleRequest
from bros.kernels.interface import AttentionBatch, HeadLayout, Kernels, SharedParts
from bros.kernels.offsets import lengths_of, offsets
from bros.kernels.staging import Staging

_NO_ROWS = torch.empty(0, dtype=torch.int32)

_ALIGNMENT = 4  # int32 elements; Triton compiles a kernel anew for pointers of other alignment


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The inputs of the decoder. All tensors are int32.

    token_ids, positions, slots: [tokens].
    sample_rows: [samples], the tokens whose hidden states become logits.
    samples: of these tokens, in plan order.
    read_rows: [read], the tokens whose hidden states are read for readouts.
    num_scored: how many of these, the first ones, need logits; the others are pooled.
    readouts: of the chunks that have one, in the order of read_rows; empty on ranks other than 0.
    step: number of the plan.
    kept: where the last chunks continue, in the order of their layers.
    dropped: what the executor keeps no longer.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionBatch
    sample_rows: Tensor
    samples: tuple[SampleRequest, ...]
    read_rows: Tensor = _NO_ROWS
    num_scored: int = 0
    readouts: tuple[ReadRequest, ...] = ()
    step: int = 0
    kept: tuple[Kept, ...] = ()
    dropped: tuple[Kept, ...] = ()

    def first(self, rows: int) -> StepInputs:
        """The inputs of the first rows alone, for layers in which the others take no part.

        They sample nothing. Any shared parts must be of these rows.
        """
        attention = self.attention
        tokens, segments = int(attention.query_start[rows]), int(attention.segment_start[rows])
        return StepInputs(
            self.token_ids[:tokens],
            self.positions[:tokens],
            self.slots[:tokens],
            AttentionBatch(
                attention.query_start[: rows + 1],
                attention.segment_start[: rows + 1],
                attention.segments[:segments],
                attention.shared,
            ),
            _NO_ROWS,
            (),
        )


def build_inputs(plan: StepPlan) -> StepInputs:
    """Concatenate the chunks of a plan. Tensors of the result may share memory with each other.

    Raises TypeError, ValueError or OverflowError if numbers of a chunk are not what Chunk says.
    """
    arrays = concatenate(plan.chunks)
    attention = AttentionBatch(arrays.query_start, arrays.segment_start, arrays.segments)
    readouts: tuple[ReadRequest, ...] = ()
    kept: tuple[Kept, ...] = ()
    read_rows, num_scored = _NO_ROWS, 0
    if arrays.special:
        readouts, read_rows, num_scored = read_inputs(plan, arrays.query_start.numpy())
        kept = tuple([chunk.kept for chunk in plan.chunks if chunk.kept is not None])
    return StepInputs(
        token_ids=arrays.token_ids,
        positions=arrays.positions,
        slots=arrays.slots,
        attention=with_shared_parts(attention, plan.shared),
        sample_rows=arrays.sample_rows,
        samples=arrays.samples,
        read_rows=read_rows,
        num_scored=num_scored,
        readouts=readouts,
        step=plan.step,
        kept=kept,
        dropped=plan.dropped,
    )


def read_inputs(
    plan: StepPlan, query_start: NDArray[np.int32]
) -> tuple[tuple[ReadRequest, ...], Tensor, int]:
    """(readouts, read_rows, num_scored) of a plan. query_start: the first token of each chunk."""
    found = [(row, chunk) for row, chunk in enumerate(plan.chunks) if chunk.readout is not None]
    if not found:
        return (), _NO_ROWS, 0
    scored: list[tuple[ReadRequest, NDArray[np.int32]]] = []
    pooled: list[tuple[ReadRequest, NDArray[np.int32]]] = []
    for row, chunk in found:
        readout = chunk.readout
        assert readout is not None
        at = query_start[row]
        rows = np.arange(at + readout.first, at + readout.end, dtype=np.int32)
        request = ReadRequest(chunk.request_id, chunk.start, readout)
        (scored if readout.pooling is None else pooled).append((request, rows))
    num_scored = sum(len(rows) for _, rows in scored)
    requests, each = zip(*scored, *pooled, strict=True)
    return requests, torch.from_numpy(np.concatenate(each)), num_scored


def with_shared_parts(batch: AttentionBatch, shared: Sequence[SharedPrefix]) -> AttentionBatch:
    """The same attention, with `shared` as shared parts instead of segments of each row.

    batch: has no shared parts; returned unchanged if `shared` is empty.
    """
    assert batch.shared is None
    if not shared:
        return batch
    start, segments = batch.segment_start.numpy(), batch.segments.numpy()
    rows = np.frombuffer(bytearray().join(prefix.rows for prefix in shared), np.int32)
    counts = np.array([len(prefix.rows) for prefix in shared], np.int32)
    firsts = np.array([prefix.first for prefix in shared], np.int32)
    sizes = np.array([prefix.end for prefix in shared], np.int32) - firsts
    row_start = offsets(counts)
    begins = start[rows] + np.repeat(firsts, counts)
    lengths = np.repeat(sizes, counts)
    # +1 where a shared piece begins in a row, -1 where it ends: the sum is 0 outside all pieces.
    borders = np.bincount(begins, minlength=len(segments) + 1)
    borders -= np.bincount(begins + lengths, minlength=len(segments) + 1)
    own = np.cumsum(borders[:-1]) == 0
    num_shared = np.bincount(rows, lengths, batch.num_rows).astype(np.int32)
    in_first_row = begins[row_start[:-1]].tolist()
    pieces = [segments[a : a + n] for a, n in zip(in_first_row, sizes.tolist(), strict=True)]
    return AttentionBatch(
        batch.query_start,
        torch.from_numpy(offsets(lengths_of(start) - num_shared)),
        torch.from_numpy(segments[own]),
        SharedParts(
            row_start=torch.from_numpy(row_start),
            rows=torch.from_numpy(rows),
            segment_start=torch.from_numpy(offsets(sizes)),
            segments=torch.from_numpy(np.concatenate(pieces)),
        ),
    )


# ---- Uploading the inputs.


@dataclass(frozen=True, slots=True)
class PendingTokens:
    """Input tokens that the previous step samples; only the device knows them yet.

    tokens: int32 [rows of the previous step], on the device.
    sources: int32 [tokens of this step], on the host: index into `tokens`, or -1 if token_ids
        holds the token.
    """

    tokens: Tensor
    sources: Tensor


class InputUploader:
    """Uploads the inputs of each step to the decoder's device. One per runner."""

    def __init__(
        self,
        kernels: Kernels,
        layout: HeadLayout,
        device: torch.device,
        staging: Staging | None = None,
    ) -> None:
        """staging: None if the decoder reads host memory."""
        self._kernels = kernels
        self._layout = layout
        self._device = device
        self._staging = staging

    def __call__(
        self,
        inputs: StepInputs,
        pending: PendingTokens | None = None,
        slot_positions: Tensor | None = None,
    ) -> StepInputs:
        """The same inputs on the device. The host does not wait for the device.

        slot_positions: KvMemory.positions.
        """
        attention = self._kernels.prepare(
            inputs.attention, self._layout, self._device, slot_positions=slot_positions
        )
        if self._staging is None:
            assert pending is None, "on the host all tokens are known"
            if attention is inputs.attention:
                return inputs
            return dataclasses.replace(inputs, attention=attention)
        on_device = upload(
            [inputs.token_ids, inputs.positions, inputs.slots, inputs.sample_rows, inputs.read_rows]
            + ([] if pending is None else [pending.sources]),
            self._staging,
            self._device,
        )
        if pending is not None:
            on_device[0] = pending_filled_in(on_device[0], pending.tokens, on_device.pop())
        token_ids, positions, slots, sample_rows, read_rows = on_device
        return dataclasses.replace(
            inputs,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            attention=attention,
            sample_rows=sample_rows,
            read_rows=read_rows,
        )


def upload(tensors: Sequence[Tensor], staging: Staging, device: torch.device) -> list[Tensor]:
    """Copy int32 vectors from the host to the device, all in one copy."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-len(tensor) // _ALIGNMENT) * _ALIGNMENT)
    host = staging.take(starts[-1])
    for tensor, start in zip(tensors, starts, strict=False):
        host[start : start + len(tensor)] = tensor
    on_device = torch.empty(starts[-1], dtype=torch.int32, device=device)
    on_device.copy_(host, non_blocking=True)
    staging.sent()
    return [
        on_device[start : start + len(tensor)]
        for tensor, start in zip(tensors, starts, strict=False)
    ]


def pending_filled_in(token_ids: Tensor, tokens: Tensor, sources: Tensor) -> Tensor:
    """tokens[sources[i]] where sources[i] is not -1, else token_ids[i]; int32, on the device."""
    found = tokens.index_select(0, sources.clamp(min=0))
    return torch.where(sources < 0, token_ids, found)
