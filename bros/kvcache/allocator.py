"""The allocator: finds slots for a request's next tokens, and preempts tokens of victims for them.

It takes slots in this order ("tail" is the block that the request wrote to last; a victim is a
request that the policy lets this one preempt):

    1  free slots of the tail
    2  free blocks, then evictable blocks of the prefix cache
    3  the top of the victim's stack on the other side of the tail
    4  the victims' blocks, one victim after another, each from its last token backwards
    5  free slots on this side of another request's tail
    6  the top of victims' stacks in the request's own other blocks
    7  shared blocks that only victims hold; those victims lose all their tokens
    8  evictable blocks of the prefix cache that are protected for real-time prompts

With `literal=True` the order is that of the paper's FindBlock and FindPreemptBlock (BROS section
5.2): 3 before 2, and the victims' blocks by their number of free slots.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from bros.kvcache.blocks import Node, Side, Stacks
from bros.kvcache.holding import Holding, Run
from bros.kvcache.host_pool import Checkpoints
from bros.kvcache.prefix_cache import PrefixCache

Victims = Mapping[int, Holding]
"""Holdings that may be preempted, by number, in the order of preemption."""


class _PendingRun:
    """A run of tokens while the allocator gives it slots.

    holding: of the request; its tokens go on `holding.side`.
    side: of the request's present class, which decides what it may evict.
    start, count: the tokens that have no slot yet.
    slots: of the tokens that have one, in token order.
    """

    __slots__ = ("count", "holding", "side", "slots", "start")

    def __init__(self, holding: Holding, side: Side, run: Run) -> None:
        self.holding = holding
        self.side = side
        self.start, self.count = run
        self.slots = array("i")

    def advance(self, slots: array[int]) -> None:
        """Assign these slots to the next `len(slots)` tokens."""
        self.slots += slots
        self.start += len(slots)
        self.count -= len(slots)


class Allocator:
    """Pushes and pops tokens of requests, and keeps their Holdings up to date.

    stacks: the blocks.
    cache: the prefix cache, whose evictable blocks count as free.
    holdings: of all requests, by number.
    checkpoints: records every token that is preempted.
    preempt_all: preempts all tokens of a victim, shared ones included (rule 7).
    evicted: blocks of the prefix cache that were evicted, by the side of the requester's class.
    """

    def __init__(
        self,
        stacks: Stacks,
        cache: PrefixCache,
        holdings: Mapping[int, Holding],
        checkpoints: Checkpoints,
        *,
        preempt_all: Callable[[Holding], None],
        literal: bool = False,
    ) -> None:
        self._stacks = stacks
        self._cache = cache
        self._holdings = holdings
        self._checkpoints = checkpoints
        self._preempt_all = preempt_all
        self._literal = literal
        self.evicted = {side: 0 for side in Side}

    def available(self, side: Side, excluding: Sequence[Node] = ()) -> int:
        """Free blocks, and blocks that a side may evict from the cache, without `excluding`."""
        return self._stacks.num_free + self._cache.num_evictable(side is Side.LEFT, excluding)

    def extend(self, holding: Holding, count: int) -> tuple[array[int], array[int]] | None:
        """Rule 1 alone: push `count` tokens on the tail; or rule 2 for one token, if a block is
        free. None if neither is enough.

        Returns what KvCacheManager.append does. Most calls of a decode step end here.
        """
        tail, stacks = holding.tail, self._stacks
        if tail >= 0:
            pushed = stacks.grow(tail, holding.side, count)
            if pushed is not None:
                return holding.grow(count), pushed
        if count > 1 or not stacks.num_free:
            return None
        side = holding.side
        block = stacks.allocate(side, holding.number, 1)
        holding.num_exclusive += 1
        return holding.begin(stacks.range_of(block, side)), stacks.slots(block, side, 0, 1)

    def extend_over(
        self, holding: Holding, victims: Victims
    ) -> tuple[array[int], array[int]] | None:
        """Rule 3 alone, for one token; None if the other side of the tail is no victim's.

        Returns what KvCacheManager.append does. A real-time decode row in full memory ends here:
        the last token of the best-effort request in the same block is preempted.
        """
        tail, stacks = holding.tail, self._stacks
        other = stacks.owner(tail, holding.side.other) if tail >= 0 else -1
        if other not in victims:
            return None
        self.preempt(victims[other], tail, 1)
        pushed = stacks.grow(tail, holding.side, 1)
        assert pushed is not None, "a slot has just become free"
        return holding.grow(1), pushed

    def fits_freely(self, holding: Holding, side: Side, wanted: int) -> bool:
        """Whether rules 1 and 2 give `wanted` slots."""
        room = self._stacks.free_slots(holding.tail) if holding.tail >= 0 else 0
        return wanted <= room + self.available(side) * self._stacks.block_size

    def fits(self, holding: Holding, wanted: int, victims: Victims) -> bool:
        """Whether all rules together give `wanted` slots: exact, linear in the victims' blocks."""
        stacks, cache = self._stacks, self._cache
        free = (stacks.num_free + cache.num_idle) * stacks.block_size
        blocks = {*holding.runs, *self._tails_beside(holding)}
        for victim in victims.values():
            blocks.update(victim.runs)
        gain = sum(self._gain(holding, block, victims) for block in blocks)
        gain += stacks.block_size * len(self.shared_among(victims))
        return wanted <= free + gain

    def shared_among(self, victims: Victims) -> set[Node]:
        """Shared blocks that are held by these victims only."""
        found: set[Node] = set()
        for victim in victims.values():
            for node in reversed(victim.chain[: victim.num_shared]):
                # A holder of a node holds all nodes before it, so those have at least its holders.
                if node in found or not node.holders <= victims.keys():
                    break
                found.add(node)
        return found

    def place(self, holding: Holding, side: Side, run: Run, victims: Victims) -> array[int]:
        """Allocate slots for a run of tokens that is known to fit; returns them in token order.

        side: of the request's present class, which decides what it may evict.
        """
        todo, tail = _PendingRun(holding, side, run), holding.tail
        if tail >= 0 and (room := self._stacks.free_slots(tail)):
            self._push(todo, tail, min(todo.count, room))
        if self._literal and tail >= 0:
            self._preempt_into(todo, tail, victims)
        self._use_free(todo)
        if todo.count:
            self._use_victims(todo, victims)
        if todo.count:
            for victim in victims.values():
                self._preempt_all(victim)
                self._use_free(todo)
            self._use_free(todo, protected_too=True)
        assert todo.count == 0, f"{todo.count} tokens of {holding.request_id} do not fit"
        return todo.slots

    def preempt(self, victim: Holding, block: int, count: int) -> None:
        """Preempt the last `count` tokens that a victim pushed on a block."""
        stacks, side = self._stacks, victim.side
        height = stacks.height(block, side)
        slots = stacks.slots(block, side, height - count, height)
        self._cache.stop_producing(victim.number)
        for run in self.pop(victim, block, count):
            count -= run[1]
            self._checkpoints.preempt(victim, run, slots[count:] if count else slots)
            del slots[count:]

    def pop(self, holding: Holding, block: int, count: int) -> list[Run]:
        """Remove the last `count` tokens of a request in a block; returns their runs, top first."""
        stacks, side = self._stacks, holding.side
        if holding.chain:
            self._drop_nodes(holding, block)
        if not stacks.pop(block, side, count):
            other = self._holdings.get(stacks.owner(block, side.other))
            if other is None:
                holding.num_exclusive -= 1
            else:
                other.num_exclusive += 1
        return holding.pop(stacks.range_of(block, side), count)

    def _drop_nodes(self, holding: Holding, block: int) -> None:
        """Remove a block that changes, and all blocks after it, from the prefix cache."""
        index = holding.runs[block][0][0] // self._stacks.block_size
        if index < len(holding.chain) and holding.chain[index].block == block:
            self._cut_chain(holding, index)

    def _cut_chain(self, holding: Holding, index: int) -> None:
        for node in reversed(holding.chain[index:]):
            self._cache.drop(node)
        del holding.chain[index:]

    def _use_free(self, todo: _PendingRun, *, protected_too: bool = False) -> None:
        """Rule 2; rule 8 with `protected_too`."""
        stacks, holding, size = self._stacks, todo.holding, self._stacks.block_size
        if not todo.count or not (stacks.num_free or self._cache.num_idle):
            return
        wanted = -(-todo.count // size)
        while stacks.num_free < wanted and self._evict(todo.side, protected_too):
            pass
        if whole := min(todo.count // size, stacks.num_free):
            blocks, slots = stacks.allocate_full(holding.side, holding.number, whole)
            holding.num_exclusive += whole
            holding.push_full(blocks, todo.start, size)
            todo.advance(slots)
        if 0 < todo.count and stacks.num_free:
            self._push_on_free_block(todo, todo.count)

    def _evict(self, side: Side, protected_too: bool) -> bool:
        """Free one evictable block of the prefix cache; False if there is none."""
        node = self._cache.evict(side is Side.LEFT, protected_too=protected_too)
        if node is None:
            return False
        self._stacks.pop(node.block, node.side, self._stacks.block_size)
        self.evicted[side] += 1
        return True

    def _use_victims(self, todo: _PendingRun, victims: Victims) -> None:
        """Rules 3 to 6."""
        if todo.holding.tail >= 0:
            self._preempt_into(todo, todo.holding.tail, victims)
            if not todo.count:
                return
        if self._literal:
            blocks = [block for victim in victims.values() for block in victim.blocks_from_end()]
            blocks.sort(key=self._stacks.free_slots, reverse=True)
            self._preempt_into_all(todo, blocks, victims)
        so_far: dict[int, Holding] = {}
        for number, victim in victims.items():
            # A block of this victim may be shared with a later victim, which is not preempted yet.
            so_far[number] = victim
            self._preempt_from_end(todo, victim, so_far)
            if not todo.count:
                return
        self._preempt_into_all(todo, self._tails_beside(todo.holding), {})
        self._preempt_into_all(todo, todo.holding.blocks_from_end(), victims)

    def _preempt_from_end(self, todo: _PendingRun, victim: Holding, victims: Victims) -> None:
        """Rule 4 for one victim; several blocks at once where they hold only its tokens."""
        stays = 0  # blocks at the victim's end in which it keeps some tokens
        while todo.count:
            whole = todo.count // self._stacks.block_size
            blocks = victim.blocks_from_end(stays, whole or 1)
            if not blocks:
                return
            if whole and self._preempt_whole(victim, blocks):
                self._use_free(todo)
                continue
            self._preempt_into(todo, blocks[0], victims)
            stays += blocks[0] in victim.runs

    def _preempt_whole(self, victim: Holding, blocks: Sequence[int]) -> int:
        """Preempt the first ones of `blocks` as a whole; returns how many.

        It stops at a block that other tokens share, or that does not continue the range of tokens,
        so that one call of Checkpoints.preempt covers all.

        blocks: of the victim, its last first.
        """
        stacks, runs, other = self._stacks, victim.runs, victim.side.other
        start, count, freed = -1, 0, 0
        all_exclusive = victim.num_exclusive == len(runs)
        for block in blocks:
            stack = runs[block]
            first, length = stack[0]
            if len(stack) > 1 or (freed and first + length != start):
                break
            if not all_exclusive and stacks.height(block, other):
                break
            start, count, freed = first, count + length, freed + 1
        if not freed:
            return 0
        self._cut_chain(victim, -(-start // stacks.block_size))
        self._cache.stop_producing(victim.number)
        slots = stacks.clear(blocks[:freed], victim.side)
        victim.num_exclusive -= freed
        victim.drop_blocks(blocks[:freed])
        self._checkpoints.preempt(victim, (start, count), slots)
        return freed

    def _tails_beside(self, holding: Holding) -> list[int]:
        """Tails of requests on the other side, with an empty stack on this side (rule 5).

        The block with the most free slots comes first.
        """
        side, stacks = holding.side, self._stacks
        found = [
            other.tail
            for other in self._holdings.values()
            if other.side is not side
            and other.tail >= 0
            and not stacks.height(other.tail, side)
            and stacks.free_slots(other.tail)
        ]
        return sorted(found, key=stacks.free_slots, reverse=True)

    def _gain(self, holding: Holding, block: int, victims: Victims) -> int:
        """Slots that a request could use in a block in use, if it preempts the victims there."""
        stacks, side = self._stacks, holding.side
        gain, owner = stacks.free_slots(block), stacks.owner(block, side)
        if owner in victims:
            gain += stacks.height(block, side)
        elif owner not in (-1, holding.number):
            return 0
        if stacks.owner(block, side.other) in victims:
            gain += stacks.height(block, side.other)
        return gain

    def _preempt_into_all(self, todo: _PendingRun, blocks: Sequence[int], victims: Victims) -> None:
        for block in blocks:
            if not todo.count:
                return
            self._preempt_into(todo, block, victims)

    def _preempt_into(self, todo: _PendingRun, block: int, victims: Victims) -> None:
        """Push as many tokens as fit into a block in use, preempting victims there as needed."""
        stacks, holding, wanted = self._stacks, todo.holding, todo.count
        height, owner, others, other = stacks.both_sides(block, holding.side)
        room = stacks.block_size - height - others
        if owner in victims and wanted:
            self.preempt(victims[owner], block, height)
            room += height
        elif owner not in (-1, holding.number):
            return
        if room < wanted and other in victims:
            over = min(wanted - room, others)
            self.preempt(victims[other], block, over)
            room, others = room + over, others - over
        count = min(wanted, room)
        if not count:
            return
        if room == stacks.block_size:
            taken = self._push_on_free_block(todo, count)
            assert taken == block, "the block was freed last, so it is allocated first"
        else:
            self._push(todo, block, count)

    def _push_on_free_block(self, todo: _PendingRun, count: int) -> int:
        """Push the next `count` tokens on a free block; returns the block."""
        stacks, holding = self._stacks, todo.holding
        block = stacks.allocate(holding.side, holding.number, count)
        holding.num_exclusive += 1
        holding.push(stacks.range_of(block, holding.side), todo.start, count)
        todo.advance(stacks.slots(block, holding.side, 0, count))
        return block

    def _push(self, todo: _PendingRun, block: int, count: int) -> None:
        stacks, holding = self._stacks, todo.holding
        if not stacks.height(block, holding.side):
            self._holdings[stacks.owner(block, holding.side.other)].num_exclusive -= 1
        slots = stacks.push(block, holding.side, holding.number, count)
        holding.push(stacks.range_of(block, holding.side), todo.start, count)
        todo.advance(slots)
