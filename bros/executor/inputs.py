"""A StepPlan as tensors. On the path of every iteration: no Python loop over segments."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bros.core.plan import SEGMENT_WIDTH, SampleSpec, StepPlan
from bros.kernels.interface import AttentionBatch
from bros.kernels.parts import offsets


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
    lengths = np.fromiter((len(chunk.token_ids) for chunk in chunks), np.int32, len(chunks))
    starts = np.fromiter((chunk.start for chunk in chunks), np.int32, len(chunks))
    widths = np.fromiter((len(chunk.segments) for chunk in chunks), np.int32, len(chunks))
    query_start = offsets(lengths)
    positions = np.arange(len(token_ids), dtype=np.int32)
    positions += np.repeat(starts - query_start[:-1], lengths)
    sampled = [index for index, chunk in enumerate(chunks) if chunk.sample is not None]
    return StepInputs(
        token_ids=_tensor(token_ids),
        positions=torch.from_numpy(positions),
        slots=_tensor(bytearray().join(chunk.slots for chunk in chunks)),
        attention=AttentionBatch(
            query_start=torch.from_numpy(query_start),
            segment_start=torch.from_numpy(offsets(widths // SEGMENT_WIDTH)),
            segments=_tensor(bytearray().join(chunk.segments for chunk in chunks)).view(
                -1, SEGMENT_WIDTH
            ),
        ),
        sample_rows=torch.from_numpy(query_start[1:][sampled] - 1),
        samples=tuple(
            (chunk.request_id, chunk.sample) for chunk in chunks if chunk.sample is not None
        ),
    )


def _tensor(buffer: array[int] | bytearray) -> Tensor:
    """A view of the buffer's int32 values; torch.frombuffer refuses an empty one."""
    if not buffer:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(buffer, dtype=torch.int32)
