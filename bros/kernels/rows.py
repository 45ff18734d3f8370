"""Tensors with spare rows, so that matrix products see few different row counts.

oneDNN compiles code for every new number of rows, about a millisecond and a megabyte each, and
a step may have any number of tokens. Row counts are therefore rounded up (never for 16 rows or
fewer, else by at most an eighth or so). What the spare rows hold does not matter: the rows of
a product do not depend on each other, and the result is cut back.

    storage   [ rows of the step ............ | spare ]
    tensor    [ rows of the step ............ ]
"""

from __future__ import annotations

import torch
from torch import Tensor

_EXACT_ROWS = 16

ROW_PADDING = ((_EXACT_ROWS, 1), *((128 << i, 8 << i) for i in range(7)))
"""rounded_rows as (limit, multiple) pairs: up to `limit` rows, and more than the limit before, go
to the next multiple. Beyond the last limit, at 8192 rows, its multiple is taken to go on."""


def rounded_rows(rows: int) -> int:
    """The number of rows a product is computed for.

    17 .. 128 go to multiples of 8, up to 256 of 16, up to 512 of 32, and so on.
    """
    if rows <= _EXACT_ROWS:
        return rows
    step = max(8, 1 << ((rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def empty_rows(rows: int, width: int) -> Tensor:
    """An uninitialised fp32 tensor [rows, width] with spare rows behind it."""
    return torch.empty(rounded_rows(rows), width)[:rows]


def with_spare_rows(x: Tensor) -> Tensor:
    """x [rows, width] as [rounded_rows(rows), width]: its own storage if there is room."""
    rows, width = x.shape
    rounded = rounded_rows(rows)
    if rounded == rows:
        return x
    last = x.storage_offset() + rounded * width
    if x.is_contiguous() and x.untyped_storage().nbytes() >= last * x.element_size():
        return x.as_strided((rounded, width), (width, 1))
    padded = x.new_zeros(rounded, width)
    padded[:rows] = x
    return padded
