"""Pinned blocks: any history against a model that knows nothing of trees or heaps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bros.scheduler.prefixes import Pins
from support.tier import examples

NAMES = st.sampled_from(["a", "b", "c", "d"])
PATHS = st.text("xyz", max_size=6)


def keys_of(path: str) -> list[bytes]:
    """One for each beginning of it, so that paths share what prompts that begin alike share."""
    return [path[: end + 1].encode() for end in range(len(path))]


class Cache:
    """Takes keys in the order that PrefixCache asks for, and only once each."""

    def __init__(self) -> None:
        self.pinned: set[bytes] = set()

    def pin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            assert key not in self.pinned
            assert len(key) == 1 or key[:-1] in self.pinned, "those before it come first"
            self.pinned.add(key)

    def unpin(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self.pinned.remove(key)
            assert not any(other[:-1] == key for other in self.pinned), "those after it come first"


class PinsMachine(RuleBasedStateMachine):
    """entries: (name, keys, until) of what should be pinned, the oldest first."""

    @initialize(max_blocks=st.integers(0, 8), max_entries=st.integers(1, 4))
    def start(self, max_blocks: int, max_entries: int) -> None:
        self.cache = Cache()
        self.pins = Pins(self.cache, max_blocks, max_entries)
        self.max_blocks, self.max_entries = max_blocks, max_entries
        self.entries: list[tuple[str, set[bytes], float]] = []
        self.now = 0.0

    @rule(name=NAMES, path=PATHS, keep_s=st.integers(1, 9))
    def pin(self, name: str, path: str, keep_s: float) -> None:
        self.pins.pin(name, keys_of(path), self.now + keep_s)
        self.forget(name)
        keys = set(keys_of(path)[: self.max_blocks])
        if keys:
            self.entries.append((name, keys, self.now + keep_s))
        while len(self.expected()) > self.max_blocks or len(self.entries) > self.max_entries:
            self.entries.pop(0)

    @rule(name=NAMES)
    def release(self, name: str) -> None:
        self.pins.release(name)
        self.forget(name)

    @precondition(lambda self: self.now < 100.0)
    @rule(seconds=st.integers(0, 5))
    def expire(self, seconds: float) -> None:
        self.now += seconds
        self.pins.expire(self.now)
        self.entries = [entry for entry in self.entries if entry[2] > self.now]

    def forget(self, name: str) -> None:
        self.entries = [entry for entry in self.entries if entry[0] != name]

    def expected(self) -> set[bytes]:
        return {key for _, keys, _ in self.entries for key in keys}

    @invariant()
    def is_right(self) -> None:
        if not hasattr(self, "pins"):
            return
        self.pins.check_integrity()
        assert len(self.pins._entries) == len(self.entries)
        assert self.cache.pinned == self.expected()

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            self.pins.expire(1000.0)
            assert not self.cache.pinned


PinsMachine.TestCase.settings = settings(
    max_examples=examples(30, long=2000), stateful_step_count=40, deadline=None
)
TestPins: Any = PinsMachine.TestCase


def test_what_is_released_again_and_again_leaves_nothing_behind() -> None:
    """Its time would be over in hours."""
    pins = Pins(Cache(), max_blocks=4)
    for number in range(1000):
        pins.pin(f"r{number}", keys_of("xyz"), until_s=1e6)
        pins.release(f"r{number}")
    assert len(pins._ends) < 100


def test_who_pins_something_again_is_given_the_later_time() -> None:
    cache = Cache()
    pins = Pins(cache, max_blocks=8)
    pins.pin("a", keys_of("xy"), until_s=1.0)
    pins.pin("a", keys_of("xyz"), until_s=5.0)
    pins.expire(1.0)
    assert cache.pinned == {*keys_of("xyz")}
    pins.expire(5.0)
    assert not cache.pinned
