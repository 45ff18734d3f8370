"""Finds slots for a request's next tokens, and preempts tokens of victims where none are free.

The order in which slots are taken ("tail" is the block that the request wrote to last; a victim
is a request that the policy lets this one preempt):

    1  free slots of the tail
    2  free blocks, then evictable blocks of the prefix cache
    3  the top of the victim's stack on the other side of the tail
    4  the victims' blocks, one victim after another, each from its last token backwards
    5  free slots on this side of another request's tail
    6  the top of victims' stacks in the request's own other blocks
    7  shared blocks that only victims hold; those victims lose all their tokens
    8  evictable blocks of the prefix cache that are reserved for real-time prompts

With `literal=True` the order is that of the paper's FindBlock and FindPreemptBlock (BROS section
5.2): 3 before 2, then the victims' blocks by their number of free slots; and best-effort prompts
begin in the blocks with the most free slots, half-used ones included.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from bros.kvcache.blocks import Node, Side, Stacks
from bros.kvcache.holding import Holding, Run
from bros.kvcache.host_pool import Checkpoints
from bros.kvcache.prefix_cache import PrefixCache

Victims = Mapping[int, Holding]
"""Holdings that may be preempted, by number, in the order in which they lose tokens."""


class _Placing:
    """A run of tokens while it is given slots.

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

    def took(self, slots: array[int]) -> None:
        """The next `len(slots)` tokens have got these slots."""
        self.slots += slots
        self.start += len(slots)
        self.count -= len(slots)


class Allocator:
    """Pushes and pops tokens of requests, and keeps their Holdings up to date.

    stacks: the blocks.
    cache: evictable blocks of the prefix cache count as free.
    holdings: of all requests, by number.
    checkpoints: told of every token that is preempted.
    lose: called with a victim that loses all its tokens, shared ones included (rule 7).
    """

    def __init__(
        self,
        stacks: Stacks,
        cache: PrefixCache,
        holdings: Mapping[int, Holding],
        checkpoints: Checkpoints,
        *,
        lose: Callable[[Holding], None],
        literal: bool = False,
    ) -> None:
        self._stacks = stacks
        self._cache = cache
        self._holdings = holdings
        self._checkpoints = checkpoints
        self._lose = lose
        self._literal = literal
        self.evicted = {side: 0 for side in Side}  # blocks of the prefix cache, by requesting side

    def available(self, side: Side, but: Sequence[Node] = ()) -> int:
        """Free blocks and those that the side may evict from the cache, without `but`."""
        return self._stacks.num_free + self._cache.num_evictable(side is Side.LEFT, but)

    def extend(self, holding: Holding, count: int) -> tuple[array[int], array[int]] | None:
        """Rule 1 alone: `count` tokens on top of the tail; None if they do not fit there.

        Returns what KvCacheManager.append does. Most calls of a decode step end here.
        """
        tail = holding.tail
        if tail < 0:
            return None
        pushed = self._stacks.grow(tail, holding.side, count)
        if pushed is None:
            return None
        return holding.grow(count), pushed

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
        assert pushed is not None, "there is room now"
        return holding.grow(1), pushed

    def fits_freely(self, holding: Holding, side: Side, wanted: int) -> bool:
        """Whether rules 1 and 2 give `wanted` slots."""
        room = self._stacks.room(holding.tail) if holding.tail >= 0 else 0
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
        """Give a run of tokens, which is known to fit, its slots; returns them in token order.

        side: of the request's present class, which decides what it may evict.
        """
        todo, tail = _Placing(holding, side, run), holding.tail
        if tail >= 0 and (room := self._stacks.room(tail)):
            self._push(todo, tail, min(todo.count, room))
        if self._literal and tail >= 0:
            self._squeeze(todo, tail, victims)
        self._take_free(todo)
        if todo.count:
            self._take_from(todo, victims)
        if todo.count:
            for victim in victims.values():
                self._lose(victim)
                self._take_free(todo)
            self._take_free(todo, anything=True)
        assert todo.count == 0, f"{todo.count} tokens of {holding.request_id} were said to fit"
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
                holding.alone -= 1
            else:
                other.alone += 1
        return holding.pop(stacks.range_of(block, side), count)

    def _drop_nodes(self, holding: Holding, block: int) -> None:
        """Take a block that changes, and all after it, out of the prefix cache."""
        index = holding.runs[block][0][0] // self._stacks.block_size
        if index < len(holding.chain) and holding.chain[index].block == block:
            self._cut_chain(holding, index)

    def _cut_chain(self, holding: Holding, index: int) -> None:
        for node in reversed(holding.chain[index:]):
            self._cache.drop(node)
        del holding.chain[index:]

    def _take_free(self, todo: _Placing, *, anything: bool = False) -> None:
        """Rule 2; rule 8 with `anything`."""
        stacks, holding, size = self._stacks, todo.holding, self._stacks.block_size
        if not todo.count or not (stacks.num_free or self._cache.num_idle):
            return
        wanted = -(-todo.count // size)
        while stacks.num_free < wanted and self._evict(todo.side, anything):
            pass
        if whole := min(todo.count // size, stacks.num_free):
            blocks, slots = stacks.fill(holding.side, holding.number, whole)
            holding.alone += whole
            holding.fill(blocks, todo.start, size)
            todo.took(slots)
        if 0 < todo.count and stacks.num_free:
            self._take(todo, todo.count)

    def _evict(self, side: Side, anything: bool) -> bool:
        """Free one evictable block of the prefix cache; False if there is none."""
        node = self._cache.evict(side is Side.LEFT, anything=anything)
        if node is None:
            return False
        self._stacks.pop(node.block, node.side, self._stacks.block_size)
        self.evicted[side] += 1
        return True

    def _take_from(self, todo: _Placing, victims: Victims) -> None:
        """Rules 3 to 6."""
        if todo.holding.tail >= 0:
            self._squeeze(todo, todo.holding.tail, victims)
            if not todo.count:
                return
        if self._literal:
            blocks = [block for victim in victims.values() for block in victim.blocks_from_end()]
            self._squeeze_all(todo, sorted(blocks, key=self._stacks.room, reverse=True), victims)
        so_far: dict[int, Holding] = {}
        for number, victim in victims.items():
            # A block of this victim may be shared with a later victim, which is not preempted yet.
            so_far[number] = victim
            self._take_from_end(todo, victim, so_far)
            if not todo.count:
                return
        self._squeeze_all(todo, self._tails_beside(todo.holding), {})
        self._squeeze_all(todo, todo.holding.blocks_from_end(), victims)

    def _take_from_end(self, todo: _Placing, victim: Holding, victims: Victims) -> None:
        """Rule 4 for one victim; several blocks at once where they hold nothing else."""
        stays = 0  # blocks at the victim's end of which it keeps some tokens
        while todo.count:
            whole = todo.count // self._stacks.block_size
            blocks = victim.blocks_from_end(stays, whole or 1)
            if not blocks:
                return
            if whole and self._preempt_whole(victim, blocks):
                self._take_free(todo)
                continue
            self._squeeze(todo, blocks[0], victims)
            stays += blocks[0] in victim.runs

    def _preempt_whole(self, victim: Holding, blocks: Sequence[int]) -> int:
        """Preempt leading blocks of `blocks` whole, and return how many.

        blocks: of the victim, its last first. Only blocks that hold nothing but the victim's
        tokens, as long as these are one range, so that one copy event covers them.
        """
        stacks, runs, other = self._stacks, victim.runs, victim.side.other
        start, count, freed = -1, 0, 0
        is_alone = victim.alone == len(runs)  # in all its blocks
        for block in blocks:
            stack = runs[block]
            first, length = stack[0]
            if len(stack) > 1 or (freed and first + length != start):
                break
            if not is_alone and stacks.height(block, other):
                break
            start, count, freed = first, count + length, freed + 1
        if not freed:
            return 0
        self._cut_chain(victim, -(-start // stacks.block_size))
        self._cache.stop_producing(victim.number)
        slots = stacks.clear(blocks[:freed], victim.side)
        victim.alone -= freed
        victim.leave(blocks[:freed])
        self._checkpoints.preempt(victim, (start, count), slots)
        return freed

    def _tails_beside(self, holding: Holding) -> list[int]:
        """Tails of the other side's requests, free on this side, emptiest first (rule 5)."""
        side, stacks = holding.side, self._stacks
        found = [
            other.tail
            for other in self._holdings.values()
            if other.side is not side
            and other.tail >= 0
            and not stacks.height(other.tail, side)
            and stacks.room(other.tail)
        ]
        return sorted(found, key=stacks.room, reverse=True)

    def _gain(self, holding: Holding, block: int, victims: Victims) -> int:
        """Slots of a block in use that a request would get by preempting the victims in it."""
        stacks, side = self._stacks, holding.side
        gain, owner = stacks.room(block), stacks.owner(block, side)
        if owner in victims:
            gain += stacks.height(block, side)
        elif owner not in (-1, holding.number):
            return 0
        if stacks.owner(block, side.other) in victims:
            gain += stacks.height(block, side.other)
        return gain

    def _squeeze_all(self, todo: _Placing, blocks: Sequence[int], victims: Victims) -> None:
        for block in blocks:
            if not todo.count:
                return
            self._squeeze(todo, block, victims)

    def _squeeze(self, todo: _Placing, block: int, victims: Victims) -> None:
        """Push as many tokens as fit into a block in use, preempting victims in it as needed."""
        stacks, holding, wanted = self._stacks, todo.holding, todo.count
        height, owner, others, other = stacks.look(block, holding.side)
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
            taken = self._take(todo, count)
            assert taken == block, "it came free just now"
        else:
            self._push(todo, block, count)

    def _take(self, todo: _Placing, count: int) -> int:
        """Push the next `count` tokens on a free block; returns the block."""
        stacks, holding = self._stacks, todo.holding
        block = stacks.take(holding.side, holding.number, count)
        holding.alone += 1
        holding.push(stacks.range_of(block, holding.side), todo.start, count)
        todo.took(stacks.slots(block, holding.side, 0, count))
        return block

    def _push(self, todo: _Placing, block: int, count: int) -> None:
        stacks, holding = self._stacks, todo.holding
        if not stacks.height(block, holding.side):
            self._holdings[stacks.owner(block, holding.side.other)].alone -= 1
        slots = stacks.push(block, holding.side, holding.number, count)
        holding.push(stacks.range_of(block, holding.side), todo.start, count)
        todo.took(slots)
