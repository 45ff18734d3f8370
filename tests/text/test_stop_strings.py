"""Stop strings are found wherever the cuts of the text are."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.text.stop_strings import StopMatcher
from support.tier import examples


def first_match(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """(text before the match, the match): the earliest end, then the longest."""
    for end in range(1, len(text) + 1):
        ending_here = [stop for stop in stops if text[:end].endswith(stop)]
        if ending_here:
            longest = max(ending_here, key=len)
            return text[: end - len(longest)], longest
    return text, None


def possible_beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    beginnings = {stop[:n] for stop in stops for n in range(len(stop))}
    return max(n for n in range(len(text) + 1) if text[len(text) - n :] in beginnings)


letters = st.sampled_from("ab")
stop_lists = st.lists(st.text(letters, min_size=2, max_size=6), min_size=1, max_size=3)


@settings(max_examples=examples(150, long=3000))
@given(pieces=st.lists(st.text(letters, max_size=6), max_size=12), stops=stop_lists)
def test_matching_in_pieces_is_searching_the_whole(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown, text, found = "", "", None
    for piece in pieces:
        text += piece
        emitted, found = matcher.push(piece)
        shown += emitted
        if found is not None:
            break
        assert shown == text[: len(text) - possible_beginning(text, stops)]
    if found is None:
        shown += matcher.finish()
    assert (shown, found) == first_match("".join(pieces), stops)


def test_of_stops_that_end_together_the_longest_is_taken_out() -> None:
    matcher = StopMatcher(["b", "aab", "ab"])
    assert matcher.push("xaa") == ("x", None)
    assert matcher.push("b tail") == ("", "aab")


def test_a_stop_that_ends_sooner_wins_over_one_that_began_sooner() -> None:
    matcher = StopMatcher(["abcdef", "cd"])
    assert matcher.push("abc") == ("", None)
    assert matcher.push("def") == ("ab", "cd")


@pytest.mark.parametrize(
    ("text", "stop", "before"),
    [("aaab", "aab", "a"), ("abababac", "ababac", "ab"), ("aabaabaaab", "aabaaa", "aab")],
)
def test_a_failed_beginning_may_contain_the_next(text: str, stop: str, before: str) -> None:
    matcher = StopMatcher([stop])
    found = [matcher.push(char) for char in text[: len(before + stop)]]
    assert "".join(emitted for emitted, _ in found) == before
    assert found[-1][1] == stop


def test_nothing_is_held_back_without_need() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == ("one", None)
    assert matcher.push("two") == ("\ntwo", None)
    assert matcher.push("\n") == ("", None)
    assert matcher.finish() == "\n"


def test_without_stops_everything_passes() -> None:
    matcher = StopMatcher([])
    assert matcher.push("abc") == ("abc", None)
    assert matcher.finish() == ""
