"""Padding of rows, so that matrix products run with few different row counts.

oneDNN compiles code for every new number of rows, which costs about a millisecond and a megabyte,
and a step may have any number of tokens. So row counts above 16 are rounded up, by about an eighth
at most. The content of padding rows is irrelevant: the rows of a product are independent, and the
result is sliced.

    storage   [ rows of the step ............ | padding ]
    tensor    [ rows of the step ............ ]
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT_ROWS = 16

ROW_PADDING = ((_EXACT_ROWS, 1), *((128 << i, 8 << i) for i in range(7)))
"""padded_rows as (limit, multiple) pairs: row counts up to `limit`, and above the previous limit,
are rounded up to the next multiple. The last multiple also applies beyond its limit of 8192."""


def padded_rows(rows: int) -> int:
    """The number of rows for which a product of `rows` rows is computed.

    17 .. 128 are rounded up to multiples of 8, up to 256 to multiples of 16, up to 512 of 32, ...
    """
    if rows <= _EXACT_ROWS:
        return rows
    step = max(8, 1 << ((rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def empty_with_padding(rows: int, width: int) -> Tensor:
    """An uninitialized fp32 tensor [rows, width] whose storage has padding rows behind it."""
    return torch.empty(padded_rows(rows), width)[:rows]


def with_padding(x: Tensor) -> Tensor:
    """x as [padded_rows(rows), width]: a view if its storage has enough padding, else a copy."""
    rows, width = x.shape
    rounded = padded_rows(rows)
    if rounded == rows:
        return x
    last = x.storage_offset() + rounded * width
    if x.is_contiguous() and x.untyped_storage().nbytes() >= last * x.element_size():
        return x.as_strided((rounded, width), (width, 1))
    padded = x.new_zeros(rounded, width)
    padded[:rows] = x
    return padded
