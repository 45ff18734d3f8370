"""`completion_window`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.batch.objects import MAX_WINDOW_S, parse_window
from bros.core.errors import InvalidRequestError

UNIT_S = {"m": 60, "h": 3_600, "d": 86_400}


def test_a_day_as_openai_writes_it() -> None:
    assert parse_window("24h") == 86_400


@given(count=st.integers(0, 10**7), unit=st.sampled_from("mhd"))
def test_any_length_of_time_up_to_thirty_days(count: int, unit: str) -> None:
    seconds = count * UNIT_S[unit]
    if 0 < seconds <= MAX_WINDOW_S:
        assert parse_window(f"{count}{unit}") == seconds
    else:
        with pytest.raises(InvalidRequestError):
            parse_window(f"{count}{unit}")


@pytest.mark.parametrize(
    "text",
    ["", "24", "h", "24s", "24H", " 24h", "24h ", "24h\n", "024h", "-1h", "+1h", "1.5h", "1h30m",
     "٢٤h", "24 h", "1" * 10_000 + "h"],
)  # fmt: skip
def test_everything_else_is_refused_with_the_name_of_the_field(text: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        parse_window(text)
    assert (refused.value.param, refused.value.code) == ("completion_window", "invalid_value")
    assert len(str(refused.value)) < 250
