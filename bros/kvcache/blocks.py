"""Blocks as double stacks: one request grows from the left, another one from the right.

    slot     0   1   2   3   4   5   6   7   8   9  10  11  12  13  14  15
    block  [ a0  a1  a2  a3  a4   .   .   .   .   .   .   .   .  b2  b1  b0 ]
             left, height 5 ->                             <- right, height 3

Each side is a stack with one owner. A kernel may read tokens in any order (see core/plan.py), so
it reads a side as one range (block, lo, hi) of slots, whichever way the stack grows. If one
side preempts slots of the other, the top of the other stack is popped: the tokens pushed last (BROS
5.1).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

CACHE = 0
"""Owner of the blocks that belong to the prefix cache; requests have higher numbers."""


class Side(IntEnum):
    LEFT = 0
    RIGHT = 1

    @property
    def other(self) -> Side:
        return Side.RIGHT if self is Side.LEFT else Side.LEFT


LEFT = Side.LEFT
"""For what runs once per row of a step: CPython finds a member of an enum more slowly."""


class Stacks:
    """Heights and owners of all blocks; no operation's time depends on the number of blocks.

    heights: of each block, by side.
    numbers: slot s at index s + 1, so that a slice may go down to slot 0. Slicing this array takes
        a tenth of the time of making a range.

    Owners are numbers >= 0. A block is free when both stacks are empty; the most recently freed
    block is allocated first, since it is warm in the processor's caches.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or not 1 <= block_size <= 255:
            raise ValueError(f"need blocks of 1 to 255 slots: {num_blocks=}, {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.heights = (bytearray(num_blocks), bytearray(num_blocks))
        self._owners = ([-1] * num_blocks, [-1] * num_blocks)
        self._free = list(range(num_blocks - 1, -1, -1))
        self.numbers = array("i", range(-1, num_blocks * block_size))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def height(self, block: int, side: Side) -> int:
        """Number of tokens on a side."""
        return self.heights[side][block]

    def owner(self, block: int, side: Side) -> int:
        """Owner of a side's tokens; -1 if it is empty."""
        return self._owners[side][block]

    def free_slots(self, block: int) -> int:
        """Slots between the stacks."""
        return self.block_size - self.heights[0][block] - self.heights[1][block]

    def both_sides(self, block: int, side: Side) -> tuple[int, int, int, int]:
        """(height, owner) of a side, then of the other side."""
        mine, other = int(side), 1 - side
        heights, owners = self.heights, self._owners
        return (
            heights[mine][block],
            owners[mine][block],
            heights[other][block],
            owners[other][block],
        )

    def slots(self, block: int, side: Side, low: int, high: int) -> array[int]:
        """Slots of the tokens [low, high) of a stack, in the order of pushing."""
        if side is Side.LEFT:
            first = block * self.block_size + 1
            return self.numbers[first + low : first + high]
        last = (block + 1) * self.block_size
        return self.numbers[last - low : last - high : -1]

    def range_of(self, block: int, side: Side) -> tuple[int, int, int]:
        """(block, lo, hi): the slots of a side; lo == hi if it is empty."""
        height = self.heights[side][block]
        if side is Side.LEFT:
            return block, 0, height
        return block, self.block_size - height, self.block_size

    def allocate(self, side: Side, owner: int, count: int) -> int:
        """Push `count` tokens on a free block; returns the block.

        Raises IndexError if no block is free; ValueError unless 1 <= count <= block_size.
        """
        if not 1 <= count <= self.block_size:
            raise ValueError(f"{count} tokens into a block of {self.block_size} slots")
        block = self._free.pop()
        self._owners[side][block] = owner
        self.heights[side][block] = count
        return block

    def allocate_full(self, side: Side, owner: int, count: int) -> tuple[list[int], array[int]]:
        """Fill `count` >= 1 free blocks; returns them, and their slots in the order of pushing.

        Raises ValueError if fewer are free.
        """
        if not 1 <= count <= len(self._free):
            raise ValueError(f"{count} blocks of {len(self._free)} free ones")
        blocks = self._free[: -count - 1 : -1]
        del self._free[-count:]
        heights, owners, size = self.heights[side], self._owners[side], self.block_size
        slots = array("i")
        for block in blocks:
            owners[block] = owner
            heights[block] = size
            slots += self.slots(block, side, 0, size)
        return blocks, slots

    def push(self, block: int, side: Side, owner: int, count: int) -> array[int]:
        """Push `count` >= 1 tokens on a side that is empty or the owner's, in a block in use.

        Returns their slots in the order of pushing. Raises ValueError if they do not fit, the side
        has another owner, or the block is free.
        """
        height, other = self.heights[side][block], self.heights[1 - side][block]
        if not 1 <= count <= self.block_size - height - other:
            raise ValueError(f"{count} tokens into {self.free_slots(block)} free slots of {block=}")
        if height == 0:
            if other == 0:
                raise ValueError(f"{block=} is free, and not for pushing")
            self._owners[side][block] = owner
        elif self._owners[side][block] != owner:
            raise ValueError(f"the {side.name} side of {block=} is not {owner}'s")
        self.heights[side][block] = height + count
        return self.slots(block, side, height, height + count)

    def grow(self, block: int, side: Side, count: int) -> array[int] | None:
        """`push` for the owner of a side that is not empty; None if there is no room.

        KvCacheManager.append_rows does the same for rows.
        """
        left, right = self.heights
        on_left, on_right, size = left[block], right[block], self.block_size
        if on_left + on_right + count > size:
            return None
        # `slots` without its call, since every decode row of every step comes here.
        if side is LEFT:
            left[block] = on_left + count
            first = block * size + on_left + 1
            return self.numbers[first : first + count]
        right[block] = on_right + count
        last = (block + 1) * size - on_right
        return self.numbers[last : last - count : -1]

    def pop(self, block: int, side: Side, count: int) -> int:
        """Pop the `count` >= 1 tokens pushed last on a side; returns how many are left.

        Raises ValueError if there are fewer.
        """
        height = self.heights[side][block]
        if not 1 <= count <= height:
            raise ValueError(f"{count} tokens from a stack of {height} in {block=}")
        left = self.heights[side][block] = height - count
        if not left:
            self._owners[side][block] = -1
            if self.heights[1 - side][block] == 0:
                self._free.append(block)
        return left

    def clear(self, blocks: Sequence[int], side: Side) -> array[int]:
        """Pop all tokens of blocks whose other side is empty; returns their slots.

        Slots of the last block come first, those of each stack in the order of pushing.
        """
        heights, others, owners = self.heights[side], self.heights[1 - side], self._owners[side]
        slots = array("i")
        for block in reversed(blocks):
            assert heights[block] and not others[block], f"{block=} is not one stack's alone"
            slots += self.slots(block, side, 0, heights[block])
            heights[block] = 0
            owners[block] = -1
        self._free += blocks
        return slots

    def hand_over(self, block: int, side: Side, owner: int) -> None:
        """Give the tokens of a side to another owner."""
        assert self.heights[side][block], "nothing to hand over"
        self._owners[side][block] = owner

    def check_integrity(self) -> None:
        """Raise AssertionError unless heights, owners and the free list agree."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        for block in range(self.num_blocks):
            heights = [self.heights[side][block] for side in Side]
            assert sum(heights) <= self.block_size, f"the stacks of {block=} overlap"
            for side in Side:
                assert (self._owners[side][block] >= 0) == (heights[side] > 0), f"{block=} {side=}"
            assert (block in free) == (sum(heights) == 0), f"{block=} in the free list"


@dataclass(slots=True, eq=False)
class Node:
    """A full block of the prefix cache; prefix_cache.py has the tree that nodes form.

    key: hash of its tokens and of all before them.
    parent: the node of the block before; None for the first one.
    block, side: where its tokens are.
    depth: number of blocks before it.
    real_time: a real-time request has used it.
    origin: id of the request that computed it first.
    shared: the block belongs to the cache, not to its only holder.
    alive: it is in the cache.
    children: number of nodes whose parent it is.
    hits: number of requests that have found it.
    priority: among evictable nodes, the lowest is evicted first.
    entry_id: of its valid entry in a heap of evictable nodes, -1 if it has none. An entry stays in
        its heap while requests hold the node.
    holders: numbers of the requests that hold it.
    """

    key: bytes
    parent: Node | None
    block: int
    side: Side
    depth: int
    real_time: bool
    origin: str
    shared: bool = False
    alive: bool = True
    children: int = 0
    hits: int = 0
    priority: float = 0.0
    entry_id: int = -1
    holders: set[int] = field(default_factory=set)
