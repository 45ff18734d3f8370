"""What is told of a prefix cache, against what can be found there."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bros.kvcache.blocks import Side
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import PrefixCache, extend_keys
from bros.kvcache.sharing import NO_MATCH
from support.tier import examples

LONGEST = 160
SIZE = 4

Reported = tuple[int, bool, dict[str, int]]
"""Version, everything, request -> tokens."""


class View:
    """A reader of the reports that knows the tokens of all requests: the blocks that are there.

    A report that is older than the latest one is of no use.
    """

    def __init__(self, keys: Mapping[str, list[bytes]]) -> None:
        self._keys = keys
        self._version = 0
        self.there: set[bytes] = set()

    def take(self, told: Reported) -> None:
        version, everything, kept = told
        if version <= self._version:
            return
        self._version = version
        if everything:
            self.there.clear()
        for name, tokens in kept.items():
            keys, blocks = self._keys[name], tokens // SIZE
            if not everything:
                self.there.difference_update(keys[blocks:])
            self.there.update(keys[:blocks])


class OriginsMachine(RuleBasedStateMachine):
    """Requests come and go, and preempt each other; a model records which computed a block first.

    before: blocks before the first subscription, of which there is no record.
    """

    @initialize(
        num_blocks=st.integers(2, 12),
        num_host_blocks=st.sampled_from([0, 0, 4]),
        rule_name=st.sampled_from(["class-aware", "lru"]),
        watched=st.booleans(),
    )
    def build(self, num_blocks: int, num_host_blocks: int, rule_name: str, watched: bool) -> None:
        self.cache = PrefixCache(rule_name, 2)
        self.kv = KvCacheManager(
            num_blocks, SIZE, num_host_blocks=num_host_blocks, prefixes=self.cache
        )
        self.keys: dict[str, list[bytes]] = {}
        self.lengths: dict[str, int] = {}
        self.step: dict[str, int] = {}
        self.started: set[str] = set()
        self.owners: dict[bytes, str] = {}  # the naive model: which request computed a block first
        self.told: list[Reported] = []
        self.events: set[str] = set()
        self.view = View(self.keys)
        self.watched = False
        if watched:
            self.watch()

    @precondition(lambda self: not self.watched)
    @rule()
    def watch(self) -> None:
        self.kv.subscribe()
        self.watched = True
        self.tell(everything=True)

    @rule(
        family=st.integers(0, 1),
        split=st.sampled_from([0, 6, 20, LONGEST, LONGEST]),
        count=st.integers(1, 24),
    )
    def begin(self, family: int, split: int, count: int) -> None:
        """Often with the same tokens as others from beginning to end."""
        name = f"r{len(self.keys)}"
        tokens = array("i", [family] * split + [10 + len(self.keys)] * (LONGEST - split))
        self.keys[name] = []
        extend_keys(self.keys[name], tokens, SIZE, LONGEST // SIZE)
        self.append(name, count, ())

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), count=st.integers(1, 12), robbable=st.integers(0, 4))
    def go_on(self, data: st.DataObject, count: int, robbable: int) -> None:
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        if name in self.step:
            return
        others = [other for other in self.lengths if other != name and other not in self.step]
        self.append(name, count, data.draw(st.permutations(others))[:robbable])

    @precondition(lambda self: self.keys.keys() - self.lengths.keys())
    @rule(data=st.data(), count=st.integers(1, 40), robbable=st.integers(0, 4))
    def come_back(self, data: st.DataObject, count: int, robbable: int) -> None:
        """One that lost everything, or had ended: the same tokens, computed once more."""
        name = data.draw(st.sampled_from(sorted(self.keys.keys() - self.lengths.keys())))
        others = [other for other in self.lengths if other not in self.step]
        self.append(name, count, data.draw(st.permutations(others))[:robbable])

    def append(self, name: str, count: int, victims: tuple[str, ...] | list[str]) -> None:
        is_new, match = name not in self.lengths, NO_MATCH
        if is_new:
            match = self.kv.match(self.keys[name][: (count + 30) // SIZE])
        start = self.lengths.get(name, match.num_tokens)
        if start + count > LONGEST:
            return
        got = self.kv.append(name, count, self.side_of(name), lambda: victims, match)
        for victim, left in self.kv.take_cuts().items():
            self.lengths[victim] = left
            if not left:
                del self.lengths[victim]
        self.kv.take_copies()
        if got is not None:
            self.step[name] = start
            self.started |= {name} if is_new else set()
            self.lengths[name] = start + count
        self.note()

    @rule()
    def next_step(self) -> None:
        for name in self.step:
            keys = self.keys[name][: self.lengths[name] // SIZE]
            self.kv.computed(name, keys, self.side_of(name))
            self.note(name)
        self.step.clear()
        self.started.clear()

    @precondition(lambda self: self.lengths)
    @rule(data=st.data(), keep=st.booleans())
    def end(self, data: st.DataObject, keep: bool) -> None:
        """Also in the middle of a step: it was aborted."""
        name = data.draw(st.sampled_from(sorted(self.lengths)))
        self.kv.free(name, keep=keep)
        del self.lengths[name]
        self.step.pop(name, None)
        self.note()

    @precondition(lambda self: self.step)
    @rule(data=st.data())
    def abort_step(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.step)))
        before = self.step.pop(name)
        if name in self.started:
            self.kv.free(name)
            del self.lengths[name]
        else:
            self.kv.truncate(name, before)
            self.lengths[name] = before
        self.note()

    def note(self, computed_by: str = "") -> None:
        """Compare what there is with what there was."""
        there = {node.key for node in self.cache.nodes()}
        gone, new = self.owners.keys() - there, there - self.owners.keys()
        assert computed_by or not new, "blocks come only from what was computed"
        self.events |= {self.owners.pop(key) for key in gone}
        self.events |= {computed_by} if new else set()
        self.owners.update(dict.fromkeys(new, computed_by))

    @precondition(lambda self: self.watched)
    @rule(everything=st.booleans())
    def tell(self, everything: bool) -> None:
        told = (len(self.told) + 1, everything, self.kv.take_cached_lengths(everything))
        if everything:
            ends = {
                name: SIZE * (1 + max(self.keys[name].index(key) for key in keys))
                for name in set(self.owners.values())
                if (keys := [key for key, owner in self.owners.items() if owner == name])
            }
            assert told[2] == ends
        else:
            assert told[2].keys() == self.events
        self.events.clear()
        self.told.append(told)
        self.view.take(told)
        self.check(self.view)

    @precondition(lambda self: self.watched)
    @rule(data=st.data())
    def be_told_by_a_bad_messenger(self, data: st.DataObject) -> None:
        """Some are lost, some come twice, in any order: the next digest puts it right."""
        view = View(self.keys)
        for told in data.draw(st.lists(st.sampled_from(self.told), max_size=8)):
            view.take(told)
        self.tell(everything=True)
        view.take(self.told[-1])
        self.check(view)

    def check(self, view: View) -> None:
        assert view.there == self.owners.keys()
        for name, keys in self.keys.items():
            found = self.kv.match(keys).num_tokens // SIZE
            assert view.there.issuperset(keys[:found]), name
            assert found == len(keys) or keys[found] not in view.there

    def side_of(self, name: str) -> Side:
        return Side(int(name[1:]) % 2)

    @invariant()
    def is_sound(self) -> None:
        if hasattr(self, "kv"):
            self.kv.check_integrity()
            if self.cache.origins is not None:
                self.cache.origins.check_integrity(self.cache.nodes())


OriginsMachine.TestCase.settings = settings(
    max_examples=examples(30, long=2000), stateful_step_count=40, deadline=None
)
TestOriginsMachine = OriginsMachine.TestCase


def compute(kv: KvCacheManager, name: str, keys: list[bytes], tokens: int) -> None:
    match = kv.match(keys[: (tokens - 1) // SIZE])
    assert kv.append(name, tokens - match.num_tokens, Side.LEFT, match=match) is not None
    kv.computed(name, keys[: tokens // SIZE], Side.LEFT)


def keys_of(*tokens: int) -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, array("i", tokens), SIZE, len(tokens) // SIZE)
    return keys


def test_the_origin_of_a_block_is_the_request_that_computed_it_first() -> None:
    kv = KvCacheManager(4, SIZE, prefixes=PrefixCache())
    assert kv.take_cached_lengths(everything=True) == {}, "there is no subscriber"
    kv.subscribe()
    first, second = keys_of(*[1] * 8), keys_of(*[1] * 8, *[2] * 4)
    compute(kv, "a", first, 8)
    compute(kv, "b", second, 12)
    assert list(kv.take_cached_lengths(everything=False).items()) == [("a", 8), ("b", 12)]
    assert kv.take_cached_lengths(everything=False) == {}
    for name in "ab":
        kv.free(name)
    compute(kv, "c", keys_of(*[3] * 8), 8)  # b's block has to go
    assert list(kv.take_cached_lengths(everything=False).items()) == [("b", 8), ("c", 8)]
    assert kv.take_cached_lengths(everything=True) == {"a": 8, "c": 8}


def test_a_reused_request_id_is_the_origin_of_its_later_prompt_only() -> None:
    kv = KvCacheManager(4, SIZE, prefixes=PrefixCache())
    kv.subscribe()
    for token in (1, 2):
        compute(kv, "a", keys_of(*[token] * 8), 8)
        kv.free("a")
    assert kv.take_cached_lengths(everything=True) == {"a": 8}
    compute(kv, "b", keys_of(*[3] * 16), 16)  # evicts all
    assert kv.take_cached_lengths(everything=False)["b"] == 16
    assert kv.take_cached_lengths(everything=True) == {"b": 16}


def test_a_request_may_have_computed_what_comes_before_and_after_the_blocks_of_another() -> None:
    kv = KvCacheManager(6, SIZE, prefixes=PrefixCache())
    kv.subscribe()
    keys = keys_of(*[1] * 20)
    compute(kv, "a", keys, 8)
    compute(kv, "b", keys, 16)
    for count in (8, 4):  # the first two that it computes now are b's
        assert kv.append("a", count, Side.LEFT) is not None
        kv.computed("a", keys[: kv.num_tokens("a") // SIZE], Side.LEFT)
    assert kv.take_cached_lengths(everything=True) == {"a": 20, "b": 16}
    for name in "ab":
        kv.free(name)
    compute(kv, "c", keys_of(*[2] * 8), 8)
    assert kv.take_cached_lengths(everything=False) == {"a": 16, "c": 8}, "so much of it is there"
    assert kv.take_cached_lengths(everything=True) == {"a": 8, "b": 16, "c": 8}, (
        "so much is its own"
    )


def test_the_request_that_computed_a_prefix_last_is_reported_last() -> None:
    kv = KvCacheManager(4, SIZE, prefixes=PrefixCache())
    kv.subscribe()
    keys = keys_of(*[1] * 16)
    compute(kv, "a", keys, 8)
    compute(kv, "b", keys, 16)
    for name in "ab":
        kv.free(name)
    compute(kv, "c", keys_of(*[2] * 8), 8)  # b's blocks have to go,
    kv.free("c")
    kv.append("d", 8, Side.LEFT)
    kv.free("d")
    compute(kv, "a", keys, 16)  # and a computes them in its turn
    changes = list(kv.take_cached_lengths(everything=False).items())
    assert changes[-1] == ("a", 16) and ("b", 8) in changes[:-1]
