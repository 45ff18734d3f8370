"""What one request holds: in which blocks its tokens lie, and which of them are missing.

    tokens     0 ... 15   16 ... 25   26 ... 31   32 ... 41   42   43
    blocks     2 shared   7 right     3 right     missing     3 right

    chain      [node of block 2]                          full blocks from the start, see below
    runs       {7: [[16, 10]], 3: [[26, 6], [42, 2]]}     from the bottom of each stack
    missing    [(32, 10)]                                 to be restored before it can run
    segments   (2, 0, 16) (7, 6, 16) (3, 8, 16)           what kernels read; shared ones in front

The chain begins with the blocks that belong to the prefix cache, `num_shared` of them, which are
in no run; then come those of its own that others may find there, and which are in `runs` too.
Segments begin with the shared ones in the same order, by which kernels see what rows have in
common; the others come in any.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence

from bros.core.plan import SEGMENT_WIDTH
from bros.kvcache.blocks import Node, Side

Run = tuple[int, int]
"""(first token, how many)"""


class Holding:
    """Bookkeeping only: the slots are those of Stacks. num_tokens: computed, missing or not.

    tail: the block that was pushed onto last, -1 if none. alone: blocks without anybody else's
    tokens. pushed_last: (block, tokens) of the latest append, which may be taken back. common: what
    sharing.py has found others to have as well, common_as_of so many changes.
    """

    __slots__ = (
        "_places",
        "alone",
        "chain",
        "common",
        "common_as_of",
        "missing",
        "num_missing",
        "num_shared",
        "num_tokens",
        "number",
        "pushed_last",
        "request_id",
        "runs",
        "segments",
        "side",
        "sorted",
        "tail",
    )

    def __init__(self, request_id: str, number: int, side: Side) -> None:
        self.request_id = request_id
        self.number = number
        self.side = side
        self.num_tokens = 0
        self.tail = -1
        self.alone = 0
        self.chain: list[Node] = []
        self.common: Sequence[tuple[Node, int]] = ()
        self.common_as_of = 0
        self.num_shared = 0
        self.runs: dict[int, list[list[int]]] = {}
        self.segments = array("i")
        self.missing: list[Run] = []
        self.num_missing = 0
        self.sorted = True  # tokens rise from the bottom of every stack to its top
        self.pushed_last: list[tuple[int, int]] = []
        self._places: dict[int, int] = {}

    def push(self, where: tuple[int, int, int], start: int, count: int) -> None:
        """Tokens [start, start + count) went into a block, where its range is now `where`."""
        block = where[0]
        self.tail = block
        self.pushed_last.append((block, count))
        runs = self.runs.get(block)
        if runs is None:
            self.runs[block] = [[start, count]]
            self._places[block] = len(self.segments)
            self.segments.extend(where)
            return
        self._lengthen(runs, start, count)
        place = self._places[block]
        self.segments[place + 1 : place + SEGMENT_WIDTH] = array("i", where[1:])

    def fill(self, blocks: Sequence[int], start: int, size: int) -> None:
        """Tokens from `start` on went into new blocks, `size` into each, which are full now."""
        runs, places, segments = self.runs, self._places, self.segments
        pushed = self.pushed_last
        for block in blocks:
            runs[block] = [[start, size]]
            places[block] = len(segments)
            segments.extend((block, 0, size))
            pushed.append((block, size))
            start += size
        self.tail = blocks[-1]

    def grow(self, count: int) -> array[int]:
        """Its next tokens went on top of its last block; returns the segments before that."""
        before = self.segments[:]
        self.pushed_last = [(self.tail, count)]
        self._lengthen(self.runs[self.tail], self.num_tokens, count)
        place = self._places[self.tail]
        if self.side is Side.LEFT:
            self.segments[place + 2] += count
        else:
            self.segments[place + 1] -= count
        self.num_tokens += count
        return before

    def pop(self, where: tuple[int, int, int], count: int) -> list[Run]:
        """The top `count` tokens of its stack in a block are gone; which these are, top first."""
        block, low, high = where
        runs, popped = self.runs[block], []
        while count:
            start, length = runs[-1]
            taken = min(count, length)
            popped.append((start + length - taken, taken))
            count -= taken
            if taken == length:
                runs.pop()
            else:
                runs[-1][1] -= taken
        if low < high:
            place = self._places[block]
            self.segments[place + 1] = low
            self.segments[place + 2] = high
            return popped
        self._leave(block)
        self._drop_segment(self._places.pop(block))
        return popped

    def leave(self, blocks: Sequence[int]) -> None:
        """All of its tokens in some blocks are gone; blocks: one after the other, from the end."""
        for block in blocks:
            self._leave(block)
        places = sorted(map(self._places.pop, blocks))
        if places[0] == len(self.segments) - SEGMENT_WIDTH * len(places):
            del self.segments[places[0] :]
            return
        for place in reversed(places):  # so that the last segment is never one of these
            self._drop_segment(place)

    def join(self, node: Node, size: int) -> None:
        """Have the next node of a prefix, whose `size` slots belong to the cache."""
        assert self.num_shared == len(self.chain), "what is shared comes first"
        self.chain.append(node)
        self.num_shared += 1
        self._places[node.block] = len(self.segments)
        self.segments.extend((node.block, 0, size))
        self._bring_forward(node.block)

    def share(self) -> Node:
        """The first node of its own belongs to the cache from now on; which it is."""
        node = self.chain[self.num_shared]
        self.num_shared += 1
        self._leave(node.block)
        self._bring_forward(node.block)
        return node

    def unshare(self, count: int, size: int) -> list[Node]:
        """The last `count` shared nodes, of `size` tokens each, are its own again."""
        first = self.num_shared - count
        nodes = self.chain[first : self.num_shared]
        self.num_shared = first
        own = {node.block: [[index * size, size]] for index, node in enumerate(nodes, first)}
        self.runs = own | self.runs  # in the order of tokens, for robbing from the end
        self.tail = next(reversed(self.runs)) if self.tail < 0 else self.tail
        return nodes

    def forget_shared(self) -> None:
        """All that is shared is gone from it; it has no node of its own any more."""
        assert self.num_shared == len(self.chain)
        for node in self.chain:
            self._drop_segment(self._places.pop(node.block))
        self.chain.clear()
        self.num_shared = 0

    def lose(self, run: Run) -> None:
        """Tokens that were popped are missing from now on."""
        start, count = run
        self.num_missing += count
        if self.missing and self.missing[-1][0] == start + count:
            # Who is robbed from its end loses what comes right before, mostly.
            count += self.missing.pop()[1]
        self.missing.append((start, count))

    def blocks_from_end(self, first: int = 0, count: int | None = None) -> list[int]:
        """Blocks in the reverse order of their first tokens in it, as it is now.

        first, count: how many to leave out, and how many to name.
        """
        end = None if count is None else first + count
        return list(itertools.islice(reversed(self.runs), first, end))

    def check_integrity(self, size: int) -> None:
        """Raise AssertionError unless shared, runs and missing are all tokens, once each."""
        runs = [(start, count) for stack in self.runs.values() for start, count in stack]
        end = self.num_shared * size
        for start, count in sorted([*runs, *self.missing]):
            assert count > 0 and start == end, f"{self.request_id}: {start=} after {end=}"
            end = start + count
        assert end == self.num_tokens, f"{self.request_id}: {end} of {self.num_tokens} tokens"
        assert self.num_missing == sum(count for _, count in self.missing)
        shared = {node.block: [[0, size]] for node in self.chain[: self.num_shared]}
        assert self._places.keys() == {*self.runs, *shared}
        for block, place in self._places.items():
            found, low, high = self.segments[place : place + SEGMENT_WIDTH]
            stack = shared.get(block) or self.runs[block]
            assert found == block and high - low == sum(count for _, count in stack)
        assert len(self.segments) == SEGMENT_WIDTH * (len(self.runs) + self.num_shared)
        for index, node in enumerate(self.chain):
            assert node.depth == index and node.alive and self.number in node.holders
            assert node.shared == (index < self.num_shared)
            assert node.shared or self.runs[node.block] == [[index * size, size]]
            assert not node.shared or self._places[node.block] == index * SEGMENT_WIDTH

    def _lengthen(self, runs: list[list[int]], start: int, count: int) -> None:
        """Tokens [start, start + count) went on top of a stack."""
        last = runs[-1]
        if last[0] + last[1] == start:
            last[1] += count
        else:
            self.sorted &= last[0] < start
            runs.append([start, count])

    def _leave(self, block: int) -> None:
        """Nothing of its own is in a block any more."""
        if self.tail != block:
            del self.runs[block]
            return
        # Mostly the last one, which popitem forgets; del leaves a hole to look behind.
        last, stack = self.runs.popitem()
        if last != block:
            self.runs[last] = stack
            del self.runs[block]
        self.tail = next(reversed(self.runs), -1)

    def _bring_forward(self, block: int) -> None:
        """The segment of the last shared node changes places with the one right after those of the
        shared nodes before it."""
        place, front = self._places[block], (self.num_shared - 1) * SEGMENT_WIDTH
        if place == front:
            return
        segments = self.segments
        moved = segments[front : front + SEGMENT_WIDTH]
        segments[front : front + SEGMENT_WIDTH] = segments[place : place + SEGMENT_WIDTH]
        segments[place : place + SEGMENT_WIDTH] = moved
        self._places[block], self._places[moved[0]] = front, place

    def _drop_segment(self, place: int) -> None:
        """The last segment takes its place: the order of what is not shared means nothing."""
        last = self.segments[-SEGMENT_WIDTH:]
        del self.segments[-SEGMENT_WIDTH:]
        if place < len(self.segments):
            self.segments[place : place + SEGMENT_WIDTH] = last
            self._places[last[0]] = place
