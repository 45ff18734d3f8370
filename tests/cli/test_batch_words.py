"""Durations and moments in words: short, and true to half of the smallest unit that is shown."""

from __future__ import annotations

import re
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.cli.batch_client import duration, expectation, moment, plural, printable, speed

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400}


@given(st.floats(0, 1e7))
def test_duration_can_be_read_back(seconds: float) -> None:
    parts = re.findall(r"(\d+) (s|min|h|d)\b", duration(seconds))
    assert " ".join(f"{count} {unit}" for count, unit in parts) == duration(seconds)
    assert len(parts) <= 2
    shown = sum(int(count) * UNITS[unit] for count, unit in parts)
    precision = 1 if seconds < 90 else 60 if seconds < 47 * 3600 else 3600
    assert abs(shown - seconds) <= precision / 2


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"),
        (89.4, "89 s"),
        (90, "2 min"),
        (5400, "1 h 30 min"),
        (7199, "2 h"),
        (86_400, "24 h"),
        (200_000, "2 d 8 h"),
        (7 * 86_400, "7 d"),
    ],
)
def test_duration_in_words(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_moment_names_the_day_only_if_it_is_another() -> None:
    noon = datetime(2026, 11, 22, 12, 0).timestamp()
    assert moment(noon + 300, noon) == "12:05 (in 5 min)"
    assert moment(noon - 7200, noon) == "10:00 (2 h ago)"
    assert moment(noon + 86_400, noon) == "2026-11-23 12:00 (in 24 h)"
    assert expectation(noon + 300, noon) == moment(noon + 300, noon)
    assert expectation(noon - 1, noon) == "any moment"


def test_speed_is_per_minute_below_one_a_second() -> None:
    assert (speed(12.34), speed(1), speed(0.05)) == ("12.3 rows/s", "1.0 rows/s", "3.0 rows/min")


def test_counts_are_grouped_and_nouns_agree() -> None:
    assert (plural(1, "row"), plural(0, "row"), plural(1200, "row")) == (
        "1 row",
        "0 rows",
        "1,200 rows",
    )


@given(st.text())
def test_printable_text_has_no_controls_and_keeps_its_length(text: str) -> None:
    shown = printable(text)
    assert len(shown) == len(text)
    assert not any(ord(char) < 0x20 or 0x7F <= ord(char) < 0xA0 for char in shown)
