"""Where a request's next tokens go, and who has to make way for them.

    1  what is free in the block it wrote to last
    2  a free block; an idle one of the prefix cache
    3  in the same block over the top of the other side, if that may be robbed
    4  blocks of those who may be robbed, each from its end, and what is free there first
    5  what is free on its side of somebody else's last block
    6  its own other blocks, over those who may be robbed
    7  blocks that only those share who may be robbed, who have lost everything then
    8  idle blocks that real-time requests may ask for again

With `literal=True` the rules are those of the paper's FindBlock and FindPreemptBlock (BROS section
5.2): 3 before 2, then blocks of one who may be robbed in the order of their empty slots; and
best-effort prompts begin in the blocks with the most empty slots, shared ones included.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence

from bros.kvcache.blocks import Node, Side, Stacks
from bros.kvcache.holding import Holding, Run
from bros.kvcache.host_pool import Checkpoints
from bros.kvcache.prefix_cache import PrefixCache

Robbed = Mapping[int, Holding]
"""Who may be robbed, by number; least deserving first."""


class _Placing:
    """Tokens that are being given their places.

    start, count: those that are still to come. side: of the request's class now, which says what
    it may evict; it grows on `holding.side`. slots: of those that are there, in their order.
    """

    __slots__ = ("count", "holding", "side", "slots", "start")

    def __init__(self, holding: Holding, side: Side, run: Run) -> None:
        self.holding = holding
        self.side = side
        self.start, self.count = run
        self.slots = array("i")

    def took(self, slots: array[int]) -> None:
        """These are the places of the next ones."""
        self.slots += slots
        self.start += len(slots)
        self.count -= len(slots)


class Allocator:
    """Pushes and pops tokens of requests, and keeps their Holdings up to date.

    holdings: all of them by number. checkpoints: told of tokens that are popped for another
    request. lose: told of who loses all that it shares.
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
        self.evicted = {side: 0 for side in Side}  # blocks of the prefix cache, by who needed them

    def available(self, side: Side, but: Sequence[Node] = ()) -> int:
        """Blocks that a side gets without anybody losing anything, beside some idle ones."""
        return self._stacks.num_free + self._cache.num_evictable(side is Side.LEFT, but)

    def extend(self, holding: Holding, count: int) -> tuple[array[int], array[int]] | None:
        """Its next tokens into the block it wrote to last, if they fit; see KvCacheManager.append.

        What `place` does first, and mostly all that it does.
        """
        tail = holding.tail
        if tail < 0:
            return None
        pushed = self._stacks.grow(tail, holding.side, count)
        if pushed is None:
            return None
        return holding.grow(count), pushed

    def extend_over(self, holding: Holding, robbed: Robbed) -> tuple[array[int], array[int]] | None:
        """Its next token over the top of the other side of the block it wrote to last.

        What `place` does with one token if nothing is free; None if that side may not be robbed.
        """
        tail, stacks = holding.tail, self._stacks
        other = stacks.owner(tail, holding.side.other) if tail >= 0 else -1
        if other not in robbed:
            return None
        self.rob(robbed[other], tail, 1)
        pushed = stacks.grow(tail, holding.side, 1)
        assert pushed is not None, "there is room now"
        return holding.grow(1), pushed

    def fits_freely(self, holding: Holding, side: Side, wanted: int) -> bool:
        """Whether it gets so many slots without anybody else's block."""
        room = self._stacks.room(holding.tail) if holding.tail >= 0 else 0
        return wanted <= room + self.available(side) * self._stacks.block_size

    def fits(self, holding: Holding, wanted: int, robbed: Robbed) -> bool:
        """Whether it gets so many slots, counted one by one."""
        stacks, cache = self._stacks, self._cache
        free = (stacks.num_free + cache.num_idle) * stacks.block_size
        blocks = {*holding.runs, *self._tails_beside(holding)}
        for victim in robbed.values():
            blocks.update(victim.runs)
        gain = sum(self._gain(holding, block, robbed) for block in blocks)
        gain += stacks.block_size * len(self.shared_among(robbed))
        return wanted <= free + gain

    def shared_among(self, robbed: Robbed) -> set[Node]:
        """Blocks of prefixes that nobody else has."""
        found: set[Node] = set()
        for victim in robbed.values():
            for node in reversed(victim.chain[: victim.num_shared]):
                # Whoever has a node has all before it: these have more holders yet, or are found.
                if node in found or not node.holders <= robbed.keys():
                    break
                found.add(node)
        return found

    def place(self, holding: Holding, side: Side, run: Run, robbed: Robbed) -> array[int]:
        """Give tokens of a request, which fit, their places; returns their slots.

        side: of its class now, which says what it may evict.
        """
        todo, tail = _Placing(holding, side, run), holding.tail
        if tail >= 0 and (room := self._stacks.room(tail)):
            self._push(todo, tail, min(todo.count, room))
        if self._literal and tail >= 0:
            self._squeeze(todo, tail, robbed)
        self._take_free(todo)
        if todo.count:
            self._take_from(todo, robbed)
        if todo.count:
            for victim in robbed.values():
                self._lose(victim)
                self._take_free(todo)
            self._take_free(todo, anything=True)
        assert todo.count == 0, f"{todo.count} tokens of {holding.request_id} were said to fit"
        return todo.slots

    def rob(self, victim: Holding, block: int, count: int) -> None:
        """The tokens that it pushed last in a block make way."""
        stacks, side = self._stacks, victim.side
        height = stacks.height(block, side)
        slots = stacks.slots(block, side, height - count, height)
        self._cache.stop_filling(victim.number)
        for run in self.pop(victim, block, count):
            count -= run[1]
            self._checkpoints.give_up(victim, run, slots[count:] if count else slots)
            del slots[count:]

    def pop(self, holding: Holding, block: int, count: int) -> list[Run]:
        """Take away its last tokens in a block; which these are, the top of the stack first."""
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
        """A block that changes is not to be found any more, nor what comes after it."""
        index = holding.runs[block][0][0] // self._stacks.block_size
        if index < len(holding.chain) and holding.chain[index].block == block:
            self._cut_chain(holding, index)

    def _cut_chain(self, holding: Holding, index: int) -> None:
        for node in reversed(holding.chain[index:]):
            self._cache.drop(node)
        del holding.chain[index:]

    def _take_free(self, todo: _Placing, *, anything: bool = False) -> None:
        """Free blocks, and as many of the prefix cache as it may have."""
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
        """Free an idle block of the prefix cache; False if there is none that may go."""
        node = self._cache.evict(side is Side.LEFT, anything=anything)
        if node is None:
            return False
        self._stacks.pop(node.block, node.side, self._stacks.block_size)
        self.evicted[side] += 1
        return True

    def _take_from(self, todo: _Placing, robbed: Robbed) -> None:
        """Room in blocks that others are in, until there is enough of it."""
        if todo.holding.tail >= 0:
            self._squeeze(todo, todo.holding.tail, robbed)
            if not todo.count:
                return
        if self._literal:
            blocks = [block for victim in robbed.values() for block in victim.blocks_from_end()]
            self._squeeze_all(todo, sorted(blocks, key=self._stacks.room, reverse=True), robbed)
        so_far: dict[int, Holding] = {}
        for number, victim in robbed.items():
            # Who is beside the first ones in a block may be among the last, whose turn comes later.
            so_far[number] = victim
            self._take_from_end(todo, victim, so_far)
            if not todo.count:
                return
        self._squeeze_all(todo, self._tails_beside(todo.holding), {})
        self._squeeze_all(todo, todo.holding.blocks_from_end(), robbed)

    def _take_from_end(self, todo: _Placing, victim: Holding, robbed: Robbed) -> None:
        """Blocks of one who may be robbed, several at once where that is simple."""
        stays = 0  # blocks at its end that it keeps something of
        while todo.count:
            whole = todo.count // self._stacks.block_size
            blocks = victim.blocks_from_end(stays, whole or 1)
            if not blocks:
                return
            if whole and self._rob_whole(victim, blocks):
                self._take_free(todo)
                continue
            self._squeeze(todo, blocks[0], robbed)
            stays += blocks[0] in victim.runs

    def _rob_whole(self, victim: Holding, blocks: Sequence[int]) -> int:
        """Free the first ones of `blocks`, which come from its end; how many.

        Those that only it is in, as long as their tokens are one range.
        """
        stacks, runs, other = self._stacks, victim.runs, victim.side.other
        start, count, freed = -1, 0, 0
        is_alone = victim.alone == len(runs)  # in all of them
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
        self._cache.stop_filling(victim.number)
        slots = stacks.clear(blocks[:freed], victim.side)
        victim.alone -= freed
        victim.leave(blocks[:freed])
        self._checkpoints.give_up(victim, (start, count), slots)
        return freed

    def _tails_beside(self, holding: Holding) -> list[int]:
        """Last blocks of requests on the other side with nothing on this one, emptiest first."""
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

    def _gain(self, holding: Holding, block: int, robbed: Robbed) -> int:
        """Slots of a block that is in use which it would get."""
        stacks, side = self._stacks, holding.side
        gain, owner = stacks.room(block), stacks.owner(block, side)
        if owner in robbed:
            gain += stacks.height(block, side)
        elif owner not in (-1, holding.number):
            return 0
        if stacks.owner(block, side.other) in robbed:
            gain += stacks.height(block, side.other)
        return gain

    def _squeeze_all(self, todo: _Placing, blocks: Sequence[int], robbed: Robbed) -> None:
        for block in blocks:
            if not todo.count:
                return
            self._squeeze(todo, block, robbed)

    def _squeeze(self, todo: _Placing, block: int, robbed: Robbed) -> None:
        """As many tokens as it may have into a block in use, over those of the robbed."""
        stacks, holding, wanted = self._stacks, todo.holding, todo.count
        height, owner, others, other = stacks.look(block, holding.side)
        room = stacks.block_size - height - others
        if owner in robbed and wanted:
            self.rob(robbed[owner], block, height)
            room += height
        elif owner not in (-1, holding.number):
            return
        if room < wanted and other in robbed:
            over = min(wanted - room, others)
            self.rob(robbed[other], block, over)
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
        """A free block."""
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
