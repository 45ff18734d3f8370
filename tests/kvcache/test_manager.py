"""The KV manager against a dict: which token, after which others, lies in every slot."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from bros.kvcache.blocks import Node, Side
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import PrefixCache, extend_keys
from bros.kvcache.sharing import NO_MATCH, Match
from support.tier import examples

NAMES = [f"r{i}" for i in range(6)]
LONGEST = 2000


def tokens_of(name: str, family: int, split: int) -> array[int]:
    """A text: what it has in common with its family, then its own."""
    return array("i", [family] * split + [10 + NAMES.index(name)] * (LONGEST - split))


class KvMachine(RuleBasedStateMachine):
    """A device and a host as dicts of slots; copies happen as the executor would make them.

    What a slot holds is (position, all tokens up to there), as K and V depend on just that.
    """

    @initialize(
        num_blocks=st.integers(1, 8),
        block_size=st.sampled_from([1, 2, 4, 16]),
        shared=st.booleans(),
        literal=st.booleans(),
        num_host_blocks=st.integers(0, 10),
        rule_name=st.sampled_from(["class-aware", "lru", "off"]),
        protected=st.integers(0, 8),
    )
    def build(
        self,
        num_blocks: int,
        block_size: int,
        shared: bool,
        literal: bool,
        num_host_blocks: int,
        rule_name: str,
        protected: int,
    ) -> None:
        self.kv = KvCacheManager(
            num_blocks, block_size,
            shared=shared, literal=literal, num_host_blocks=num_host_blocks,
            prefixes=None if rule_name == "off" else PrefixCache(rule_name, protected),
        )  # fmt: skip
        self.size = num_blocks * block_size
        self.device: dict[int, tuple[int, bytes]] = {}
        self.host: dict[int, tuple[int, bytes]] = {}
        self.texts: dict[str, tuple[array[int], str]] = {}
        self.lengths: dict[str, int] = {}
        self.step: dict[str, int] = {}  # name -> tokens before
        self.written: dict[int, str] = {}
        self.new: set[str] = set()  # in this step
        self.waiting: list[list[bytes]] = []

    def keys(self, name: str, num_tokens: int) -> list[bytes]:
        text, salt = self.texts[name]
        keys: list[bytes] = []
        size = self.kv.block_size
        extend_keys(keys, text, size, num_tokens // size, salt)
        return keys

    def payload(self, name: str, token: int) -> tuple[int, bytes]:
        text, salt = self.texts[name]
        return token, salt.encode() + text[: token + 1].tobytes()

    @rule(
        name=st.sampled_from(NAMES),
        count=st.integers(1, 40),
        best_effort=st.booleans(),
        order=st.permutations(NAMES),
        robbable=st.integers(0, len(NAMES)),
        family=st.integers(0, 1),
        split=st.integers(0, 60),
        salt=st.sampled_from(["", "", "", "other"]),
    )
    def append(
        self,
        name: str,
        count: int,
        best_effort: bool,
        order: list[str],
        robbable: int,
        family: int,
        split: int,
        salt: str,
    ) -> None:
        if name in self.step:
            return
        victims = [
            other
            for other in order[:robbable]
            if other in self.lengths and other != name and other not in self.step
        ]
        side, match = Side.RIGHT if best_effort else Side.LEFT, NO_MATCH
        if name not in self.lengths:
            self.texts[name] = (tokens_of(name, family, split), salt)
            match = self.match(name, count)
        missing = self.kv.num_missing(name)
        room = self.kv.num_available_blocks(side, match)
        got = self.kv.append(name, count, side, lambda: victims, match)
        if got is None:
            assert count + missing > room * self.kv.block_size, "there was room"
            assert self.kv.num_missing(name) == missing
            return
        segments, slots = got
        self.copy()
        start = self.lengths.get(name, match.num_tokens)
        assert sorted(self.contents(segments)) == [self.payload(name, t) for t in range(start)]
        front = 0
        for node, tokens in self.kv.common_parts(name):
            front += tokens
            at = 3 * (front // self.kv.block_size - 1)
            assert list(segments[at : at + 3]) == [node.block, 0, self.kv.block_size]
        assert len(set(slots)) == len(slots) == count
        assert self.written.keys().isdisjoint(slots), "written twice in a step"
        for token, slot in enumerate(slots, start):
            assert 0 <= slot < self.size
            self.device[slot] = self.payload(name, token)
        self.written.update(dict.fromkeys(slots, name))
        self.step[name] = start
        self.new |= {name} - self.lengths.keys()
        self.lengths[name] = start + count
        self.cut()

    def match(self, name: str, num_tokens: int) -> Match:
        """A prompt of which something is always left to compute."""
        if not self.kv.finds_prefixes:
            return NO_MATCH
        keys = self.keys(name, num_tokens + 40)
        earlier = self.kv.match(keys[: len(keys) // 2])
        match = self.kv.match(keys, earlier)
        assert match == self.kv.match(keys)
        assert match.producer in (None, *self.lengths)
        return match

    @rule(name=st.sampled_from(NAMES), keep=st.booleans())
    def free(self, name: str, keep: bool) -> None:
        self.kv.free(name, keep=keep)
        self.lengths.pop(name, None)
        self.leave_step(name)

    @precondition(lambda self: self.step)
    @rule(data=st.data())
    def abort_step(self, data: st.DataObject) -> None:
        """The latest append of a request of the step comes to nothing."""
        name = data.draw(st.sampled_from(sorted(self.step)))
        before, is_new = self.step[name], name in self.new
        self.leave_step(name)
        if is_new:
            self.kv.free(name)
            del self.lengths[name]
        else:
            self.kv.truncate(name, before)
            self.lengths[name] = before

    def leave_step(self, name: str) -> None:
        self.step.pop(name, None)
        self.new.discard(name)
        self.written = {slot: owner for slot, owner in self.written.items() if owner != name}

    @rule()
    def next_step(self) -> None:
        if self.kv.finds_prefixes:
            for name in self.step:
                self.kv.computed(name, self.keys(name, self.lengths[name]), self.side_of(name))
        self.step.clear()
        self.new.clear()
        self.written.clear()

    @rule(name=st.sampled_from(NAMES), count=st.integers(1, 60))
    def wait(self, name: str, count: int) -> None:
        if name in self.texts:
            self.waiting.append(self.keys(name, count))
            self.kv.expect(self.waiting[-1], waits=True)

    @precondition(lambda self: self.waiting)
    @rule()
    def wait_no_more(self) -> None:
        self.kv.expect(self.waiting.pop(0), waits=False)

    def side_of(self, name: str) -> Side:
        return Side(NAMES.index(name) % 2)

    def copy(self) -> None:
        copies = self.kv.take_copies()
        if copies is None:
            return
        for slot, host_slot in zip(copies.out_device, copies.out_host, strict=True):
            assert slot not in self.written, "copied after it was written over"
            self.host[host_slot] = self.device[slot]
        for host_slot, slot in zip(copies.back_host, copies.back_device, strict=True):
            self.device[slot] = self.host[host_slot]

    def cut(self) -> None:
        for name, left in self.kv.take_cuts().items():
            assert name not in self.step and left < self.lengths[name]
            if left:
                self.lengths[name] = left
            else:
                del self.lengths[name]

    def contents(self, segments: Sequence[int]) -> list[tuple[int, bytes]]:
        size, slots = self.kv.block_size, []
        for i in range(0, len(segments), 3):
            block, low, high = segments[i : i + 3]
            slots += range(block * size + low, block * size + high)
        assert self.written.keys().isdisjoint(slots), "read before it is computed"
        return [self.device[slot] for slot in slots]

    @invariant()
    def is_sound(self) -> None:
        if not hasattr(self, "kv"):
            return
        self.kv.check_integrity()
        for name in NAMES:
            assert self.kv.num_tokens(name) == self.lengths.get(name, 0)
            if name in self.step:
                assert self.kv.num_missing(name) == 0
        self.check_common_parts()

    def check_common_parts(self) -> None:
        """Each is that of two or more, with the same tokens up to its end."""
        ends: dict[Node, set[tuple[int, bytes]]] = {}
        counts: Counter[Node] = Counter()
        for name in self.lengths:
            end = 0
            for node, tokens in self.kv.common_parts(name):
                end += tokens
                counts[node] += 1
                ends.setdefault(node, set()).add(self.payload(name, end - 1))
        assert all(count > 1 for count in counts.values())
        assert all(len(found) == 1 for found in ends.values())
        assert self.kv.has_common_parts == bool(counts)

    def teardown(self) -> None:
        if hasattr(self, "kv"):
            for name in NAMES:
                self.kv.free(name)
            assert self.kv.num_used_blocks == 0
            assert self.kv.num_available_blocks(Side.LEFT) == self.kv.num_blocks
            assert self.kv.num_host_blocks_used == 0
            assert self.kv.append("all", self.size, Side.RIGHT) is not None


KvMachine.TestCase.settings = settings(
    max_examples=examples(100), stateful_step_count=40, deadline=None
)
TestKvMachine = KvMachine.TestCase


class Prompts:
    """Requests for a manager, by what they begin with."""

    def __init__(self, num_blocks: int, **options: Any) -> None:
        options.setdefault("prefixes", PrefixCache(protected=options.pop("protected", 0)))
        self.kv = KvCacheManager(num_blocks, 4, **options)
        self.texts: dict[str, array[int]] = {}

    def keys(self, name: str, num_tokens: int) -> list[bytes]:
        keys: list[bytes] = []
        extend_keys(keys, self.texts[name], 4, num_tokens // 4)
        return keys

    def start(self, name: str, text: list[int], side: Side = Side.LEFT) -> int | None:
        """Compute a prompt; how much of it was there, None if it does not fit."""
        self.texts[name] = array("i", text)
        match = self.kv.match(self.keys(name, len(text) - 1))
        if self.kv.append(name, len(text) - match.num_tokens, side, match=match) is None:
            return None
        self.kv.computed(name, self.keys(name, len(text)), side)
        self.kv.check_integrity()
        return match.num_tokens


def test_a_prefix_is_held_once_and_stays_when_its_requests_end() -> None:
    prompts = Prompts(8)
    common = [1, 2, 3, 4, 5, 6, 7, 8]
    assert prompts.start("a", [*common, 9]) == 0
    assert prompts.start("b", [*common, 10, 11]) == 8
    assert prompts.kv.num_used_blocks == 4
    prompts.kv.free("a")
    prompts.kv.free("b")
    assert (prompts.kv.num_used_blocks, prompts.kv.num_cached_blocks) == (0, 2)
    assert prompts.start("c", common) == 4, "its last token is to be computed"


def test_answers_are_part_of_the_next_prompt() -> None:
    prompts = Prompts(8)
    prompts.start("turn 1", [1, 2, 3, 4, 5])
    prompts.texts["turn 1"].extend([6, 7, 8])
    for _ in range(3):
        assert prompts.kv.append("turn 1", 1, Side.LEFT) is not None
        count = prompts.kv.num_tokens("turn 1")
        prompts.kv.computed("turn 1", prompts.keys("turn 1", count), Side.LEFT)
    prompts.kv.free("turn 1")
    assert prompts.start("turn 2", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == 8


@pytest.mark.parametrize(("protected", "left"), [(2, 8), (1, 4), (0, 0)])
def test_best_effort_work_evicts_what_real_time_work_has_used_down_to_a_share(
    protected: int, left: int
) -> None:
    prompts = Prompts(4, protected=protected)
    prompts.start("chat", [1, 2, 3, 4, 5, 6, 7, 8])
    prompts.kv.free("chat")
    for job in range(5):
        name, available = f"job {job}", prompts.kv.num_available_blocks(Side.RIGHT)
        assert available == 4 - min(2, protected)
        assert prompts.start(name, [10 + job] * 4 * available, Side.RIGHT) == 0
        prompts.kv.free(name)
    assert prompts.start("chat again", [1, 2, 3, 4, 5, 6, 7, 8, 9]) == left


def test_best_effort_work_preempts_others_before_it_evicts_what_is_protected() -> None:
    prompts = Prompts(4, protected=2)
    chat = [1, 2, 3, 4, 5, 6, 7, 8]
    prompts.start("chat", chat)
    prompts.kv.free("chat")
    assert prompts.start("victim", [10] * 8, Side.RIGHT) == 0
    assert prompts.kv.append("job", 8, Side.RIGHT, lambda: ["victim"]) is not None
    assert prompts.kv.take_losses()["victim"].tokens == 8
    assert prompts.kv.num_evicted_blocks(Side.RIGHT) == 0
    assert prompts.start("chat again", [*chat, 9]) is None, "its prompt is there, but no more room"
    assert prompts.kv.match(prompts.keys("chat again", 8)).num_tokens == 8


def test_what_was_asked_for_more_often_stays_longer() -> None:
    prompts = Prompts(3)
    for text in ([1] * 5, [1] * 5, [2] * 5):
        prompts.start("x", text)
        prompts.kv.free("x")
    prompts.start("y", [3] * 8, Side.RIGHT)  # two of three blocks: one of the cached ones goes
    assert prompts.kv.match(prompts.keys("x", 4)).num_tokens == 0
    prompts.texts["x"] = array("i", [1] * 4)
    assert prompts.kv.match(prompts.keys("x", 4)).num_tokens == 4


def test_what_a_waiting_request_begins_with_stays_longer() -> None:
    prompts = Prompts(3)
    for text in ([1] * 5, [2] * 5):
        prompts.start("x", text, Side.RIGHT)
        prompts.kv.free("x")
    prompts.texts["waiting"] = array("i", [1] * 5)
    keys = prompts.keys("waiting", 4)
    prompts.kv.expect(keys, waits=True)
    prompts.start("y", [3] * 8, Side.RIGHT)
    assert prompts.kv.match(keys).num_tokens == 4
    prompts.kv.expect(keys, waits=False)


def test_the_producer_of_a_prefix_is_named_until_it_is_computed_or_freed() -> None:
    prompts = Prompts(16)
    prompts.texts["b"] = array("i", range(40))
    keys = prompts.keys("b", 39)
    match = prompts.kv.match(keys)
    assert match.producer is None
    prompts.kv.append("a", 12, Side.LEFT, match=match)
    assert (prompts.kv.match(keys).producer, prompts.kv.match(keys).num_producing) == ("a", 36)
    prompts.texts["a"] = prompts.texts["b"]
    prompts.kv.computed("a", prompts.keys("a", 12), Side.LEFT)
    match = prompts.kv.match(keys)
    assert (match.num_tokens, match.producer, match.num_producing) == (12, "a", 24)
    prompts.kv.free("a")
    assert prompts.kv.match(keys).producer is None


def test_two_requests_that_computed_the_same_block_keep_one() -> None:
    prompts = Prompts(8)
    text = [1, 2, 3, 4, 5]
    for name in ("a", "b"):
        prompts.texts[name] = array("i", text)
        assert prompts.kv.append(name, 5, Side.LEFT) is not None
    assert prompts.kv.num_used_blocks == 4
    for name in ("a", "b"):
        prompts.kv.computed(name, prompts.keys(name, 5), Side.LEFT)
        prompts.kv.check_integrity()
    assert prompts.kv.num_used_blocks == 3
    # It comes first for both, though it was the last that one of them got.
    grown = [prompts.kv.append(name, 1, Side.LEFT) for name in ("a", "b")]
    fronts = [got[0][:3] for got in grown if got is not None]
    assert fronts[0] == fronts[1] and len(fronts) == 2
    [(node, tokens)] = prompts.kv.common_parts("b")
    assert (node.block, tokens) == (fronts[0][0], 4)
    assert prompts.kv.common_parts("a") == [(node, tokens)]


def test_common_parts_end_where_fewer_requests_go_on() -> None:
    prompts = Prompts(40)
    begin = list(range(100, 112))
    for name, text in {
        "a": [*begin, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        "b": [*begin, 1, 2, 3, 4, 5, 6, 7, 8, 10],
        "c": [*begin, 9, 9, 9, 9, 9],
        "d": [7, 7, 7, 7, 7],
    }.items():
        prompts.start(name, text)
    found = {name: prompts.kv.common_parts(name) for name in "abcd"}
    assert [[tokens for _, tokens in found[name]] for name in "abcd"] == [
        [12, 8],
        [12, 8],
        [12],
        [],
    ]
    assert found["a"] == found["b"] and found["c"] == found["a"][:1]
    before = prompts.kv.sharing_changes
    prompts.kv.free("d")
    assert prompts.kv.sharing_changes == before
    prompts.kv.free("c")
    assert prompts.kv.sharing_changes != before
    assert [tokens for _, tokens in prompts.kv.common_parts("a")] == [20]
    prompts.kv.free("b")
    assert not prompts.kv.common_parts("a") and not prompts.kv.has_common_parts


def test_what_went_wrong_is_not_kept() -> None:
    prompts = Prompts(4)
    prompts.start("a", [1, 2, 3, 4, 5])
    prompts.kv.free("a", keep=False)
    assert prompts.start("b", [1, 2, 3, 4, 5]) == 0


def test_with_another_salt_nothing_is_found() -> None:
    keys: dict[str, list[bytes]] = {salt: [] for salt in ("", "x", "x" * 100, "x" * 101)}
    for salt, own in keys.items():
        extend_keys(own, array("i", range(8)), 4, 2, salt)
    assert len({key for own in keys.values() for key in own}) == 2 * len(keys)


def test_shared_tokens_are_taken_when_nothing_else_is_left() -> None:
    prompts = Prompts(4, num_host_blocks=8)
    for name in ("a", "b"):
        prompts.start(name, [1, 2, 3, 4, 5, 6, 7, 8, 9], Side.RIGHT)
    assert prompts.kv.num_available_blocks(Side.LEFT) == 0
    assert prompts.kv.append("chat", 12, Side.LEFT, lambda: ["a"]) is None, "b has them too"
    assert prompts.kv.append("chat", 16, Side.LEFT, lambda: ["a", "b"]) is not None
    assert prompts.kv.take_cuts() == {"a": 0}
    assert prompts.kv.num_missing("b") == 9, "what only b was left with was copied"
    prompts.kv.check_integrity()


def test_what_is_known_of_evictable_blocks_does_not_grow_with_time() -> None:
    """Entries of blocks that changed class, or are gone, are left behind now and then."""
    prompts = Prompts(8)
    for cycle in range(400):
        text = [cycle] * 9
        for side in (Side.RIGHT, Side.LEFT):
            prompts.start("x", text, side)
            prompts.kv.free("x")
        prompts.start("y", [1000 + cycle] * 32)
        prompts.kv.free("y")
    heaps = prompts.kv._cache._evictable
    assert sum(map(len, heaps)) < 200


def test_a_request_without_room_leaves_no_trace() -> None:
    prompts = Prompts(4, protected=4)
    prompts.start("a", [1, 2, 3, 4, 5, 6, 7, 8, 9], Side.RIGHT)
    assert prompts.start("rt", [1, 2, 3, 4, 5, 6, 7, 8, *range(20, 30)]) is None
    prompts.kv.free("a")
    assert prompts.kv.num_available_blocks(Side.RIGHT) == 4, "no real-time request has had them"


def test_what_does_not_fit_on_the_host_is_lost_from_its_end() -> None:
    """All after the first lost token has to be computed again: a copy of that would be useless."""
    kv = KvCacheManager(10, 4, num_host_blocks=2)
    assert kv.append("be", 40, Side.RIGHT)
    assert kv.append("rt", 24, Side.LEFT, victims=lambda: ["be"])
    (lost,) = kv.take_losses().values()
    assert (lost.tokens, lost.copied) == (24, 8)
    assert kv.take_cuts() == {"be": 24}
    assert kv.num_missing("be") == 8  # tokens 16 to 23, which are on the host


def test_copies_that_stay_are_no_room_for_the_rest_of_the_same_request() -> None:
    """Two host blocks hold its first eight tokens since it made way before: four more are lost."""
    kv = KvCacheManager(4, 4, num_host_blocks=2)
    kv.append("a", 8, Side.LEFT)
    kv.append("b", 16, Side.LEFT, lambda: ["a"])
    kv.take_copies()
    kv.free("b")
    kv.append("a", 4, Side.LEFT)
    kv.take_copies()
    assert kv.append("b", 16, Side.LEFT, lambda: ["a"]) is not None
    assert kv.take_cuts() == {"a": 8}
    assert (kv.num_tokens("a"), kv.num_missing("a")) == (8, 8)
    kv.check_integrity()


def test_a_victim_preempted_in_the_step_that_restored_it_keeps_its_copies() -> None:
    """Its row was given back, another one took the memory, and only then were copies made."""
    kv = KvCacheManager(3, 4, num_host_blocks=2)
    kv.append("a", 8, Side.LEFT)
    kv.append("b", 12, Side.LEFT, lambda: ["a"])
    kv.take_copies()
    kv.free("b")
    kv.append("a", 1, Side.LEFT)
    kv.truncate("a", 8)
    kv.append("b", 12, Side.LEFT, lambda: ["a"])
    kv.take_copies()
    kv.check_integrity()
    kv.free("b")
    kv.append("c", 8, Side.LEFT)
    assert kv.append("d", 12, Side.LEFT, lambda: ["c"]) is not None
    assert kv.take_cuts() == {"c": 0}, "no room beside the copies of the first one"
    assert kv.num_missing("a") == 8


def test_a_request_that_ends_before_its_copies_are_read_frees_its_host_blocks_once() -> None:
    kv = KvCacheManager(3, 4, num_host_blocks=2)
    kv.append("a", 8, Side.LEFT)
    kv.append("b", 12, Side.LEFT, lambda: ["a"])
    kv.take_copies()
    kv.free("b")
    kv.append("a", 1, Side.LEFT)
    kv.free("a")
    kv.take_copies()
    kv.check_integrity()
    assert kv.num_host_blocks_used == 0


def test_host_copies_of_tokens_that_will_be_recomputed_are_evicted() -> None:
    """The one host block has a copy of the last four tokens until those before them are lost."""
    kv = KvCacheManager(4, 4, num_host_blocks=1)
    kv.append("be", 16, Side.RIGHT)
    lost = []
    for _ in range(3):
        assert kv.append("rt", 4, Side.LEFT, lambda: ["be"]) is not None
        lost.append((kv.take_losses()["be"].copied, kv.take_cuts(), kv.num_missing("be")))
        kv.take_copies()
        kv.check_integrity()
    assert lost == [(4, {}, 4), (0, {"be": 8}, 0), (4, {}, 4)]


def test_a_shared_block_of_the_other_side_stays_shared_when_one_request_is_left() -> None:
    """That request grows from the right; the block was filled from the left."""
    prompts = Prompts(8)
    prompts.start("rt", [1, 2, 3, 4, 5, 6, 7, 8, 9])
    prompts.start("be", [1, 2, 3, 4, 5, 6, 7, 8, 9], Side.RIGHT)
    prompts.kv.free("rt")
    prompts.kv.check_integrity()
    assert prompts.kv.num_shared_blocks == 2


def test_a_preempted_request_is_no_longer_a_producer() -> None:
    prompts = Prompts(16, num_host_blocks=16)
    prompts.texts["a"] = array("i", range(40))
    keys = prompts.keys("a", 39)
    prompts.kv.append("a", 12, Side.RIGHT, match=prompts.kv.match(keys))
    assert prompts.kv.match(keys).producer == "a"
    assert prompts.kv.append("rt", 60, Side.LEFT, lambda: ["a"]) is not None
    assert prompts.kv.match(keys).producer is None


def test_the_literal_policy_preempts_blocks_with_the_most_free_slots_first() -> None:
    kv = KvCacheManager(2, 4, literal=True)
    kv.append("full", 4, Side.RIGHT)
    kv.append("half", 2, Side.RIGHT)
    assert kv.append("rt", 6, Side.LEFT, lambda: ["full", "half"]) is not None
    assert {name: lost.tokens for name, lost in kv.take_losses().items()} == {"half": 2, "full": 2}
    kv.check_integrity()


@pytest.mark.parametrize("side", list(Side))
@pytest.mark.parametrize("begin", [0, 3, 8])
@pytest.mark.parametrize("computed", [0, 1, 5, 9])
def test_the_first_tokens_of_an_append_can_be_computed_and_the_others_undone(
    side: Side, begin: int, computed: int
) -> None:
    prompts = Prompts(16)
    prompts.texts["a"] = array("i", range(40))
    kv = prompts.kv
    places: list[int] = []
    if begin:
        granted = kv.append("a", begin, side)
        assert granted is not None
        places += granted[1]
        kv.computed("a", prompts.keys("a", begin), side)
    granted = kv.append("a", 10, side)
    assert granted is not None
    places += granted[1]
    end = begin + computed
    for count in (begin, end):
        segments = kv.segments_before("a", count)
        blocks = zip(segments[::3], segments[1::3], segments[2::3], strict=True)
        assert sorted(places[:count]) == sorted(
            4 * block + offset for block, low, high in blocks for offset in range(low, high)
        )
    kv.computed("a", prompts.keys("a", end), side, end)
    assert kv.num_tokens("a") == begin + 10
    kv.truncate("a", end)
    kv.check_integrity()
    assert kv.num_tokens("a") == end
    assert kv.match(prompts.keys("a", 40)).num_tokens == end // 4 * 4
    kv.free("a")
    assert kv.num_used_blocks == 0
