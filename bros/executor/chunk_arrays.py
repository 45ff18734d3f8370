"""The chunks of a plan as arrays, laid end to end.

    chunks          [ a: tokens 1 2 3 ][ b: 4 ][ c: 5 6 ]      b has no sample spec
    query_start     0                  3       4         6
    sample_rows                    2                   5

This runs in every step. The compiled function (csrc/step_inputs.h) takes less than a third of the
time of the Python function, which is used where the extension was not built.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bros.core.plan import SEGMENT_WIDTH, Chunk
from bros.executor.sampler import SampleRequest
from bros.kernels.offsets import offsets


class ChunkArrays(NamedTuple):
    """All tensors are int32, on the CPU, and may share memory with each other.

    query_start, segment_start: [chunks + 1], the first token and the first segment of each chunk,
        and how many there are.
    sample_rows: [samples], the last token of each chunk with a sample spec.
    token_ids, positions: [tokens].
    slots: [tokens].
    segments: [n, 3].
    samples: of the chunks with a sample spec, in plan order.
    special: whether a chunk has a readout or continues what is kept.
    """

    query_start: Tensor
    segment_start: Tensor
    sample_rows: Tensor
    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    segments: Tensor
    samples: tuple[SampleRequest, ...]
    special: bool


def reference_concatenate(chunks: tuple[Chunk, ...]) -> ChunkArrays:
    """The arrays of these chunks, which they share no memory with.

    Segments are copied as whole buffers: 32 requests of 500 tokens have a thousand segments, and a
    Python loop over these would take longer than the attention.
    """
    token_ids = array("i")
    for chunk in chunks:
        token_ids.extend(chunk.token_ids)
    starts = _int32([chunk.start for chunk in chunks])
    widths = _int32([len(chunk.segments) for chunk in chunks])
    if len(token_ids) == len(chunks):  # only decode rows
        query_start = np.arange(len(chunks) + 1, dtype=np.int32)
        positions = starts
    else:
        lengths = _int32([len(chunk.token_ids) for chunk in chunks])
        query_start = offsets(lengths)
        positions = np.arange(len(token_ids), dtype=np.int32)
        positions += np.repeat(starts - query_start[:-1], lengths)
    samples = [
        (
            chunk.request_id,
            chunk.sample,
            chunk.start + len(chunk.token_ids) - chunk.sample.prompt_len,
        )
        for chunk in chunks
        if chunk.sample is not None
    ]
    ends = query_start[1:]
    if len(samples) < len(chunks):
        ends = ends[[index for index, chunk in enumerate(chunks) if chunk.sample is not None]]
    return ChunkArrays(
        query_start=torch.from_numpy(query_start),
        segment_start=torch.from_numpy(offsets(widths // SEGMENT_WIDTH)),
        sample_rows=torch.from_numpy(ends - 1),
        token_ids=_tensor(token_ids),
        positions=torch.from_numpy(positions),
        slots=_tensor(bytearray().join([chunk.slots for chunk in chunks])),
        segments=_tensor(bytearray().join([chunk.segments for chunk in chunks])).view(
            -1, SEGMENT_WIDTH
        ),
        samples=tuple(samples),
        special=any(chunk.readout is not None or chunk.kept is not None for chunk in chunks),
    )


def _int32(values: list[int]) -> NDArray[np.int32]:
    """np.array(values) in half the time."""
    return np.frombuffer(array("i", values), np.int32)


def _tensor(buffer: array[int] | bytearray) -> Tensor:
    """A view of the buffer's int32 values. torch.frombuffer raises for an empty buffer."""
    if not buffer:
        return torch.empty(0, dtype=torch.int32)
    return torch.frombuffer(buffer, dtype=torch.int32)


try:
    from bros.kernels._C import concatenate_chunks as _concatenate
except ImportError:  # the extension was not built
    concatenate = reference_concatenate
else:

    def concatenate(chunks: tuple[Chunk, ...]) -> ChunkArrays:
        """As reference_concatenate.

        Raises TypeError if `chunks` is no tuple, a token or start is no integer, or segments or
        slots are no buffers of int32; OverflowError if a number does not fit int32; ValueError if
        the segments of a chunk are not triples.
        """
        numbers, tokens, slots, segments, samples, special = _concatenate(chunks)
        starts = len(chunks) + 1
        lengths = (
            starts,
            starts,
            len(samples),
            tokens,
            tokens,
            slots,
            segments * SEGMENT_WIDTH,
        )
        query_start, segment_start, sample_rows, token_ids, positions, in_slots, triples = (
            torch.split_with_sizes(torch.frombuffer(numbers, dtype=torch.int32), lengths)
        )
        return ChunkArrays(
            query_start,
            segment_start,
            sample_rows,
            token_ids,
            positions,
            in_slots,
            triples.view(-1, SEGMENT_WIDTH),
            samples,
            special,
        )
