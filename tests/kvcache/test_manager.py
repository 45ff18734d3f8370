"""KvCacheManager against a model that keeps every token's slot in a dictionary."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bros.kvcache.manager import KvCacheManager

BLOCK = 4
NUM_BLOCKS = 12


def slots_of(segments: list[int]) -> set[int]:
    triples = zip(segments[0::3], segments[1::3], segments[2::3], strict=True)
    return {block * BLOCK + offset for block, lo, hi in triples for offset in range(lo, hi)}


class ManagerMachine(RuleBasedStateMachine):
    """Any order of appends and frees leaves every token in the one slot it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvCacheManager(NUM_BLOCKS, BLOCK)
        self.slots: dict[str, list[int]] = {}

    @rule(request=st.sampled_from("abcdef"), tokens=st.integers(1, 3 * BLOCK))
    def append(self, request: str, tokens: int) -> None:
        needed = self.kv.blocks_needed(request, tokens)
        held = len(self.slots.get(request, []))
        assert needed == -(-(held + tokens) // BLOCK) - -(-held // BLOCK)
        if needed > self.kv.num_free_blocks:
            return
        free_before = self.kv.num_free_blocks
        segments, slots = self.kv.append(request, tokens)
        known = self.slots.setdefault(request, [])
        assert len(slots) == tokens
        assert slots_of(list(segments)) == set(known), "segments must cover the earlier tokens"
        known.extend(slots)
        assert self.kv.num_free_blocks == free_before - needed

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.slots)))
        blocks = {slot // BLOCK for slot in self.slots.pop(request)}
        assert self.kv.free(request) == len(blocks)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.slots)))
        kept = data.draw(st.integers(0, len(self.slots[request])))
        held = self.kv.blocks_of(request)
        free_before = self.kv.num_free_blocks
        self.kv.truncate(request, kept)
        del self.slots[request][kept:]
        if kept == 0:
            del self.slots[request]
        assert self.kv.num_free_blocks == free_before + held - -(-kept // BLOCK)

    @rule()
    def free_unknown(self) -> None:
        assert self.kv.free("nobody") == 0

    @invariant()
    def no_slot_has_two_tokens(self) -> None:
        everything = [slot for slots in self.slots.values() for slot in slots]
        assert len(everything) == len(set(everything))
        assert all(0 <= slot < NUM_BLOCKS * BLOCK for slot in everything)

    @invariant()
    def books_agree(self) -> None:
        self.kv.check_integrity()
        for request, slots in self.slots.items():
            assert self.kv.num_tokens(request) == len(slots)
            assert self.kv.blocks_of(request) == len({slot // BLOCK for slot in slots})


TestManager = ManagerMachine.TestCase
TestManager.settings = settings(max_examples=60, stateful_step_count=40)


def test_a_new_manager_is_empty() -> None:
    kv = KvCacheManager(3, 16)
    assert (kv.num_free_blocks, kv.num_used_blocks) == (3, 0)
    assert kv.num_tokens("a") == 0 and kv.blocks_of("a") == 0


@pytest.mark.parametrize(("blocks", "size"), [(0, 16), (1, 0)])
def test_no_memory_is_an_error(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        KvCacheManager(blocks, size)


def test_integrity_check_notices_a_block_given_back_twice() -> None:
    kv = KvCacheManager(4, 16)
    kv.append("a", 20)
    kv._pool.release([kv._tables["a"].blocks[0]])
    with pytest.raises(AssertionError, match="free and owned"):
        kv.check_integrity()
