"""Spare rows: few row counts, and the same numbers."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.kernels.row_padding import empty_with_padding, padded_rows, with_padding


@given(rows=st.integers(0, 5000))
def test_rounding_goes_up_a_little_and_stays(rows: int) -> None:
    rounded = padded_rows(rows)
    assert rows <= rounded <= rows + max(7, rows // 8)
    assert padded_rows(rounded) == rounded


def test_there_are_few_row_counts() -> None:
    assert len({padded_rows(rows) for rows in range(1, 257)}) <= 40
    assert len({padded_rows(rows) for rows in range(1, 4097)}) <= 80


@given(rows=st.integers(1, 70), width=st.integers(1, 5), spare=st.booleans())
def test_the_rows_are_kept_and_storage_is_shared_where_it_can_be(
    rows: int, width: int, spare: bool
) -> None:
    x = empty_with_padding(rows, width) if spare else torch.empty(rows, width)
    x.copy_(torch.arange(rows * width).view(rows, width))
    wide = with_padding(x)
    assert wide.shape == (padded_rows(rows), width)
    assert torch.equal(wide[:rows], x)
    if spare:
        assert wide.data_ptr() == x.data_ptr()


def test_a_slice_in_the_middle_of_other_data_is_not_widened_past_its_storage() -> None:
    buffer = torch.zeros(40, 3)
    middle = buffer[10:30]
    assert with_padding(middle).data_ptr() == middle.data_ptr()
    last = buffer[20:40]
    wide = with_padding(last)
    assert wide.data_ptr() != last.data_ptr() and wide.shape == (24, 3)
