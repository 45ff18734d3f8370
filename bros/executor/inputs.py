"""A StepPlan as tensors. On the path of every iteration: no Python loop over segments."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bros.core.plan import SEGMENT_WIDTH, SampleSpec, SharedPrefix, StepPlan
from bros.kernels.interface import AttentionBatch, SharedParts
from bros.kernels.parts import lengths_of, offsets


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the decoder reads. All int32: token_ids, positions, slots [tokens].

    sample_rows: which tokens' hidden states become logits, one per entry of `samples`, which
    are (request id, how to choose) in plan order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    attention: AttentionBatch
    sample_rows: Tensor
    samples: tuple[tuple[str, SampleSpec], ...]


def build_inputs(plan: StepPlan) -> StepInputs:
    """Lay the chunks of a plan end to end.

    segments are copied buffer by buffer: 32 requests of 500 tokens are a thousand segments,
    and touching each in Python would cost more than the attention over it.
    """
    chunks = plan.chunks
    token_ids = array("i")
    for chunk in chunks:
        token_ids.extend(chunk.token_ids)
    starts = np.array([chunk.start for chunk in chunks], np.int32)
    widths = np.array([len(chunk.segments) for chunk in chunks], np.int32)
    if len(token_ids) == len(chunks):  # decode rows alone
        query_start = np.arange(len(chunks) + 1, dtype=np.int32)
        positions = starts
    else:
        lengths = np.array([len(chunk.token_ids) for chunk in chunks], np.int32)
        query_start = offsets(lengths)
        positions = np.arange(len(token_ids), dtype=np.int32)
        positions += np.repeat(starts - query_start[:-1], lengths)
    sampled = [index for index, chunk in enumerate(chunks) if chunk.sample is not None]
    attention = AttentionBatch(
        query_start=torch.from_numpy(query_start),
        segment_start=torch.from_numpy(offsets(widths // SEGMENT_WIDTH)),
        segments=_tensor(bytearray().join([chunk.segments for chunk in chunks])).view(
            -1, SEGMENT_WIDTH
        ),
    )
    return StepInputs(
        token_ids=_tensor(token_ids),
        positions=torch.from_numpy(positions),
        slots=_tensor(bytearray().join([chunk.slots for chunk in chunks])),
        attention=read_together(attention, plan.shared),
        sample_rows=torch.from_numpy(query_start[1:][sampled] - 1),
        samples=tuple(
            [(chunk.request_id, chunk.sample) for chunk in chunks if chunk.sample is not None]
        ),
    )


def read_together(batch: AttentionBatch, shared: Sequence[SharedPrefix]) -> AttentionBatch:
    """The same attention, with these pieces as shared parts instead of segments of each row.

    batch: without shared parts; it is returned as it is if `shared` is empty.
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
    borders = np.bincount(begins, minlength=len(segments) + 1)
    borders -= np.bincount(begins + lengths, minlength=len(segments) + 1)
    own = np.cumsum(borders[:-1]) == 0
    taken = np.bincount(rows, lengths, batch.num_rows).astype(np.int32)
    examples = begins[row_start[:-1]].tolist()
    pieces = [segments[a : a + n] for a, n in zip(examples, sizes.tolist(), strict=True)]
    return AttentionBatch(
        batch.query_start,
        torch.from_numpy(offsets(lengths_of(start) - taken)),
        torch.from_numpy(segments[own]),
        SharedParts(
            row_start=torch.from_numpy(row_start),
            rows=torch.from_numpy(rows),
            segment_start=torch.from_numpy(offsets(sizes)),
            segments=torch.from_numpy(np.concatenate(pieces)),
        ),
    )


def _tensor(buffer: array[int] | bytearray) -> Tensor:
    """A view of the buffer's int32 values; torch.frombuffer refuses an empty one."""
    if not buffer:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(buffer, dtype=torch.int32)
