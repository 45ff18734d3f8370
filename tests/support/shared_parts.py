"""Batches with shared parts, and the same without."""

from __future__ import annotations

import numpy as np
import torch

from bros.kernels.interface import AttentionBatch
from bros.kernels.triton.plan import copy_parts_to_rows


def without_shared(batch: AttentionBatch) -> AttentionBatch:
    """The same attention with shared=None: each row lists the segments of its parts itself."""
    shared = batch.shared
    if shared is None:
        return batch
    part = np.repeat(np.arange(shared.num_parts), np.diff(shared.row_start.numpy()))
    start, segments = copy_parts_to_rows(
        batch.segment_start.numpy(),
        batch.segments.numpy(),
        shared.rows.numpy(),
        shared.segment_start.numpy()[part],
        shared.segment_start.numpy()[part + 1],
        shared.segments.numpy(),
    )
    return AttentionBatch(
        batch.query_start, torch.from_numpy(start), torch.from_numpy(segments), None
    )
