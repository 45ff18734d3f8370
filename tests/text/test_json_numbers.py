"""Numbers in JSON that are too long or too large are found before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.text.json_numbers import wrong_number

DIGITS, LARGE = "a number of more than 40 digits", "a number that is too large for"


@pytest.mark.parametrize(
    ("number", "wrong"),
    [
        ("9" * 41, DIGITS),
        ("-" + "9" * 41, DIGITS),
        ("0." + "9" * 41, DIGITS),
        ("1e" + "0" * 41, DIGITS),
        ("9" * 40, None),
        ("0." + "9" * 40, None),
        ("1e400", LARGE),
        ("-1E+400", LARGE),
        ("0.1e0310", LARGE),
        ("1e308", None),
        ("1e-400", None),
        ("0e400", None),
    ],
)
@pytest.mark.parametrize("before", [0, 2**18 - 60, 2**18 - 41, 2**18 - 20, 2**18 - 4, 2**19])
def test_wrong_numbers_are_found_wherever_they_are(
    number: str, wrong: str | None, before: int
) -> None:
    text = f'{{"a": [1, "{"x" * before}", {number}]}}'.encode()
    assert json.loads(text)["a"][2] is not None
    found = wrong_number(text)
    assert found is None if wrong is None else (found or "").startswith(wrong)
    quoted = json.dumps({"a": "x" * before + f'"{number}'}).encode()
    assert wrong_number(quoted) is None


@given(st.lists(st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()))
def test_what_python_writes_has_no_wrong_number(values: list[Any]) -> None:
    for text in (json.dumps(values), json.dumps([*values, "x" * 5000], ensure_ascii=False)):
        long = any(isinstance(value, int) and abs(value) >= 10**40 for value in values)
        assert (wrong_number(text.encode()) is None) != long
