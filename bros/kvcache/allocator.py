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
from collections.abc import Callable, Iterator, Mapping, Sequence

from bros.kvcache.holding import Holding, Run
from bros.kvcache.prefix_cache import Node, PrefixCache
from bros.kvcache.stacks import Side, Stacks

Robbed = Mapping[int, Holding]
"""Who may be robbed, by number; least deserving first."""


class Allocator:
    """Pushes and pops tokens of requests, and keeps their Holdings up to date.

    holdings: all of them by number. rob: told before tokens of a request are popped for another
    one: (request, block, how many); pops them. lose: told of who loses all that it shares.
    """

    def __init__(
        self,
        stacks: Stacks,
        cache: PrefixCache,
        holdings: Mapping[int, Holding],
        *,
        rob: Callable[[Holding, int, int], None],
        lose: Callable[[Holding], None],
        literal: bool = False,
    ) -> None:
        self._stacks = stacks
        self._cache = cache
        self._holdings = holdings
        self._rob = rob
        self._lose = lose
        self._literal = literal
        self.evicted = {side: 0 for side in Side}  # blocks of the prefix cache, by who needed them

    def available(self, side: Side, but: Sequence[Node] = ()) -> int:
        """Blocks that a side gets without anybody losing anything, beside some idle ones."""
        return self._stacks.num_free + self._cache.num_evictable(side is Side.LEFT, but)

    def extend(self, holding: Holding, count: int) -> tuple[array[int], array[int]] | None:
        """Its next tokens into the block it wrote to last, if they fit; see KvCacheManager.append.

        What `places` would say first, and what all of it does to the books.
        """
        tail = holding.tail
        if tail < 0:
            return None
        pushed = self._stacks.grow(tail, holding.side, count)
        if pushed is None:
            return None
        return holding.grow(count), array("i", pushed)

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

    def places(
        self, holding: Holding, side: Side, count: int, robbed: Robbed
    ) -> Iterator[tuple[int, range]]:
        """Where `count` tokens go, which fit: (block, slots). Pushed and robbed when it says so.

        side: of its class now, which says what it may evict; it grows on `holding.side`.
        """
        for place in self._all_places(holding, side, count, robbed):
            count -= len(place[1])
            yield place
            if not count:
                return
        assert count == 0, f"{count} tokens of {holding.request_id} were said to fit"

    def pop(self, holding: Holding, block: int, count: int) -> tuple[range, list[Run]]:
        """Its last tokens in a block: their slots, last one first, and which these are."""
        stacks, side = self._stacks, holding.side
        self._drop_nodes(holding, block)
        slots = stacks.pop(block, side, count)
        if not stacks.height(block, side):
            other = self._holdings.get(stacks.owner(block, side.other))
            if other is None:
                holding.alone -= 1
            else:
                other.alone += 1
        return slots, holding.pop(stacks.range_of(block, side), count)

    def _drop_nodes(self, holding: Holding, block: int) -> None:
        """A block that changes is not to be found any more, nor what comes after it."""
        index = holding.runs[block][0][0] // self._stacks.block_size
        if index < len(holding.chain) and holding.chain[index].block == block:
            for node in reversed(holding.chain[index:]):
                self._cache.drop(node)
            del holding.chain[index:]

    def _all_places(
        self, holding: Holding, side: Side, count: int, robbed: Robbed
    ) -> Iterator[tuple[int, range]]:
        """As many of the tokens as are still to come; the caller stops when it has all."""
        stacks, tail = self._stacks, holding.tail
        if tail >= 0 and (room := stacks.room(tail)):
            pushed = self._push(holding, tail, min(count, room))
            yield tail, pushed
            count -= len(pushed)
        if self._literal and tail >= 0 and count:
            if pushed := self._squeeze(holding, tail, count, robbed):
                yield tail, pushed
                count -= len(pushed)
        for place in self._whole_blocks(holding, side, count):
            yield place
            count -= len(place[1])
        for block, victims in self._blocks_in_use(holding, robbed) if count else ():
            if pushed := self._squeeze(holding, block, count, victims):
                yield block, pushed
                count -= len(pushed)
        for victim in robbed.values():
            self._lose(victim)
            for place in self._whole_blocks(holding, side, count):
                yield place
                count -= len(place[1])
        yield from self._whole_blocks(holding, side, count, anything=True)

    def _whole_blocks(
        self, holding: Holding, side: Side, count: int, *, anything: bool = False
    ) -> Iterator[tuple[int, range]]:
        """Free ones, and as many of the prefix cache as it may have."""
        stacks = self._stacks
        while count and (stacks.num_free or self._evict(side, anything)):
            place = self._take(holding, min(count, stacks.block_size))
            yield place
            count -= len(place[1])

    def _evict(self, side: Side, anything: bool) -> bool:
        """Free an idle block of the prefix cache; False if there is none that may go."""
        node = self._cache.evict(side is Side.LEFT, anything=anything)
        if node is None:
            return False
        self._stacks.pop(node.block, node.side, self._stacks.block_size)
        self.evicted[side] += 1
        return True

    def _blocks_in_use(self, holding: Holding, robbed: Robbed) -> Iterator[tuple[int, Robbed]]:
        """Blocks that others are in, each with those who may be robbed there."""
        nobody: dict[int, Holding] = {}
        if holding.tail >= 0:
            yield holding.tail, robbed
        if self._literal:
            blocks = [block for victim in robbed.values() for block in victim.blocks_from_end()]
            for block in sorted(blocks, key=self._stacks.room, reverse=True):
                yield block, robbed
        so_far: dict[int, Holding] = {}
        for number, victim in robbed.items():
            # Who is beside the first ones in a block may be among the last, whose turn comes later.
            so_far[number] = victim
            for block in victim.blocks_from_end():
                yield block, so_far
        for block in self._tails_beside(holding):
            yield block, nobody
        for block in holding.blocks_from_end():
            yield block, robbed

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

    def _squeeze(self, holding: Holding, block: int, count: int, robbed: Robbed) -> range:
        """At most `count` tokens into a block in use, over those of the robbed; their slots."""
        if not self._gain(holding, block, robbed):
            return range(0)
        stacks, side = self._stacks, holding.side
        owner, other = stacks.owner(block, side), stacks.owner(block, side.other)
        if owner in robbed:
            self._rob(robbed[owner], block, stacks.height(block, side))
        over = min(count - stacks.room(block), stacks.height(block, side.other))
        if over > 0 and other in robbed:
            self._rob(robbed[other], block, over)
        count = min(count, stacks.room(block))
        if stacks.room(block) == stacks.block_size:
            taken, pushed = self._take(holding, count)
            assert taken == block, "it came free just now"
            return pushed
        return self._push(holding, block, count)

    def _take(self, holding: Holding, count: int) -> tuple[int, range]:
        holding.alone += 1
        return self._stacks.take(holding.side, holding.number, count)

    def _push(self, holding: Holding, block: int, count: int) -> range:
        stacks, side = self._stacks, holding.side
        if not stacks.height(block, side):
            self._holdings[stacks.owner(block, side.other)].alone -= 1
        return stacks.push(block, side, holding.number, count)
