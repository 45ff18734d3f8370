"""Parts of JSON are counted before it is parsed, and large values are written piece by piece."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.text import json_text
from bros.text.json_text import JsonParts, excess_of, has_more_parts, write_json

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a"\\[{,:ä'),
    lambda parts: st.lists(parts) | st.dictionaries(st.text(alphabet='b"\\]}:,'), parts),
)


def inner_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def parts_of(value: Any) -> JsonParts:
    """By walking through it."""
    inner = list(
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    )
    found = [parts_of(each) for each in inner]
    own = JsonParts(
        int(isinstance(value, dict | list)),
        len(value) if isinstance(value, dict) else 0,
        max(len(inner) - 1, 0),  # commas
    )
    return JsonParts(*(sum(column) for column in zip(own, *found, strict=True)))


@given(VALUES)
def test_parts_are_those_outside_of_strings(value: Any) -> None:
    text = json.dumps(value).encode()
    containers, keys, commas = parts_of(value)
    exact = JsonParts(containers, keys, commas + 1)
    assert excess_of(text, exact) is None
    for smaller in (
        exact._replace(containers=containers - 1),
        exact._replace(keys=keys - 1),
        exact._replace(values=commas),
    ):
        assert excess_of(text, smaller) == exact


@given(VALUES, st.integers(0, 40))
def test_parts_of_a_value_are_its_keys_and_values(value: Any, most: int) -> None:
    containers, keys, _ = parts_of(value)

    def values(each: Any) -> int:
        return 1 + sum(map(values, inner_of(each)))

    assert has_more_parts(value, most) == (values(value) + keys > most)


@given(VALUES, st.sampled_from([{}, {"ensure_ascii": False}, {"indent": 1}, {"sort_keys": True}]))
def test_a_large_value_is_written_like_a_small_one(value: Any, options: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_SMALL_PARTS", 2)
        assert write_json(value, **options) == json.dumps(value, **options)


def test_a_large_value_is_not_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = json.dumps([0.5] * 50_000)
    monkeypatch.setattr(json, "dumps", lambda value: pytest.fail("at once"))
    assert write_json([0.5] * 50_000) == expected
