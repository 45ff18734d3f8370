"""The blocks of one request: where its tokens are, and which of them are missing.

    tokens     0 ... 15   16 ... 25   26 ... 31   32 ... 41   42   43
    blocks     2 shared   7 right     3 right     missing     3 right

    chain      [node of block 2]                          full blocks from the start, see below
    runs       {7: [[16, 10]], 3: [[26, 6], [42, 2]]}     from the bottom of each stack
    missing    [(32, 10)]                                 to be restored before the request runs
    segments   (2, 0, 16) (7, 6, 16) (3, 8, 16)           what kernels read; shared ones in front

The chain begins with the `num_shared` shared nodes of the request, whose blocks belong to the
prefix cache and are in no run; then come its private nodes, whose blocks are in `runs` as well.
The segments begin with those of the shared nodes, in chain order; the others are in no order.
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
    """Bookkeeping of one request; Stacks has the slots.

    number: identifies the request as an owner of slots, inside kvcache.
    side: the side on which the request grows.
    num_tokens: computed ones, missing or not.
    num_missing: preempted ones that are not restored yet.
    tail: the block that was pushed on last; -1 if it holds no private block.
    tail_run: the run on top of the tail, so that most decode rows of a step need no look-up; None
        if it is to be found again.
    tail_end: index in `segments` of the end at which the tail grows, if there is a tail_run.
    num_exclusive: number of its blocks that hold no other request's tokens.
    sorted: tokens rise from the bottom to the top of each of its stacks.
    pushed_last: (block, tokens) of the latest append, for `truncate`.
    common, common_as_of: cached result of Sharing.common_parts, and the version it is of.
    """

    __slots__ = (
        "_segment_index",
        "_top",
        "_up",
        "chain",
        "common",
        "common_as_of",
        "missing",
        "num_exclusive",
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
        "tail_end",
        "tail_run",
    )

    def __init__(self, request_id: str, number: int, side: Side) -> None:
        self.request_id = request_id
        self.number = number
        self.side = side
        # Index in a segment of the end at which the stack grows, and its change per token.
        self._top, self._up = (2, 1) if side is Side.LEFT else (1, -1)
        self.num_tokens = 0
        self.tail = -1
        self.num_exclusive = 0
        self.chain: list[Node] = []
        self.common: Sequence[tuple[Node, int]] = ()
        self.common_as_of = 0
        self.num_shared = 0
        self.runs: dict[int, list[list[int]]] = {}
        self.segments = array("i")
        self.missing: list[Run] = []
        self.num_missing = 0
        self.sorted = True
        self.pushed_last: list[tuple[int, int]] = []
        self._segment_index: dict[int, int] = {}
        self.tail_run: list[int] | None = None
        self.tail_end = 0

    def push(self, where: tuple[int, int, int], start: int, count: int) -> None:
        """Record tokens [start, start + count) on top of a block's stack; where: its range now."""
        block = where[0]
        self.tail, self.tail_run = block, None
        self.pushed_last.append((block, count))
        runs = self.runs.get(block)
        if runs is None:
            self.runs[block] = [[start, count]]
            self._segment_index[block] = len(self.segments)
            self.segments.extend(where)
            return
        self._lengthen(runs, start, count)
        index = self._segment_index[block]
        self.segments[index + 1 : index + SEGMENT_WIDTH] = array("i", where[1:])

    def push_full(self, blocks: Sequence[int], start: int, size: int) -> None:
        """Record tokens from `start` on in new blocks, `size` in each, which are full now."""
        runs, indices, segments = self.runs, self._segment_index, self.segments
        pushed = self.pushed_last
        for block in blocks:
            runs[block] = [[start, size]]
            indices[block] = len(segments)
            segments.extend((block, 0, size))
            pushed.append((block, size))
            start += size
        self.tail, self.tail_run = blocks[-1], None

    def grow(self, count: int) -> array[int]:
        """Record the next `count` tokens on top of the tail; returns the segments before that.

        KvCacheManager.append_rows does the same for rows.
        """
        segments, run, last = self.segments, self.tail_run, self.num_tokens
        before = segments[:]
        if run is None:
            self._lengthen(self.runs[self.tail], last, count)
            self.tail_run = self.runs[self.tail][-1]
            self.tail_end = self._segment_index[self.tail] + self._top
        else:
            run[1] += count
        self.pushed_last = [(self.tail, count)]
        segments[self.tail_end] += self._up * count
        self.num_tokens = last + count
        return before

    def begin(self, where: tuple[int, int, int]) -> array[int]:
        """Record the next token as the first one in a new tail; returns the segments before that.

        where: its range.
        """
        segments, block, last = self.segments, where[0], self.num_tokens
        before, index = segments[:], len(segments)
        segments.extend(where)
        self.tail, self.tail_run, self.tail_end = block, [last, 1], index + self._top
        self.runs[block], self._segment_index[block] = [self.tail_run], index
        self.pushed_last = [(block, 1)]
        self.num_tokens = last + 1
        return before

    def pop(self, where: tuple[int, int, int], count: int) -> list[Run]:
        """Record that `count` tokens of a stack were popped; returns their runs, top first.

        where: the range of the stack now.
        """
        block, low, high = where
        runs, popped, self.tail_run = self.runs[block], [], None
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
            index = self._segment_index[block]
            self.segments[index + 1] = low
            self.segments[index + 2] = high
            return popped
        self._forget_block(block)
        self._drop_segment(self._segment_index.pop(block))
        return popped

    def drop_blocks(self, blocks: Sequence[int]) -> None:
        """Record that all tokens of some blocks were popped. blocks: consecutive, last first."""
        for block in blocks:
            self._forget_block(block)
        indices = sorted(map(self._segment_index.pop, blocks))
        if indices[0] == len(self.segments) - SEGMENT_WIDTH * len(indices):
            del self.segments[indices[0] :]
            return
        for index in reversed(indices):  # so that the last segment is never one still to drop
            self._drop_segment(index)

    def last_pushed(self, count: int) -> list[tuple[int, int]]:
        """(block, tokens) of the last `count` tokens of the latest append, the last ones first."""
        found = []
        for block, pushed in reversed(self.pushed_last):
            if not count:
                break
            taken = min(pushed, count)
            found.append((block, taken))
            count -= taken
        return found

    def segments_without(self, count: int) -> array[int]:
        """The segments without those of the last `count` tokens of the latest append."""
        segments, emptied = self.segments[:], []
        for block, taken in self.last_pushed(count):
            index = self._segment_index[block]
            segments[index + self._top] -= self._up * taken
            if segments[index + 1] == segments[index + 2]:
                emptied.append(index)
        for index in sorted(emptied, reverse=True):
            del segments[index : index + SEGMENT_WIDTH]
        return segments

    def join(self, node: Node, size: int) -> None:
        """Add the next node of a shared prefix, a block of `size` tokens."""
        assert self.num_shared == len(self.chain), "shared nodes come before private ones"
        self.chain.append(node)
        self.num_shared += 1
        self._segment_index[node.block] = len(self.segments)
        self.segments.extend((node.block, 0, size))
        self._bring_forward(node.block)

    def share(self) -> Node:
        """Make the first private node a shared one; returns it."""
        node = self.chain[self.num_shared]
        self.num_shared += 1
        self._forget_block(node.block)
        self._bring_forward(node.block)
        return node

    def unshare(self, count: int, size: int) -> list[Node]:
        """Make the last `count` shared nodes, of `size` tokens each, private; returns them."""
        first = self.num_shared - count
        nodes = self.chain[first : self.num_shared]
        self.num_shared = first
        own = {node.block: [[index * size, size]] for index, node in enumerate(nodes, first)}
        self.runs = own | self.runs  # in token order: victims are preempted from the end
        self.tail = next(reversed(self.runs)) if self.tail < 0 else self.tail
        self.tail_run = None
        return nodes

    def drop_shared(self) -> None:
        """Remove all shared nodes; there must be no private one."""
        assert self.num_shared == len(self.chain)
        for node in self.chain:
            self._drop_segment(self._segment_index.pop(node.block))
        self.chain.clear()
        self.num_shared = 0

    def mark_missing(self, run: Run) -> None:
        """Record that popped tokens are missing from now on."""
        start, count = run
        self.num_missing += count
        if self.missing and self.missing[-1][0] == start + count:
            # Victims are preempted from the end, so this run mostly ends where the last began.
            count += self.missing.pop()[1]
        self.missing.append((start, count))

    def blocks_from_end(self, first: int = 0, count: int | None = None) -> list[int]:
        """The request's blocks, the one with its last tokens first.

        first: how many to leave out at the end.
        count: how many to return; None for all.
        """
        end = None if count is None else first + count
        return list(itertools.islice(reversed(self.runs), first, end))

    def check_integrity(self, size: int) -> None:
        """Raise AssertionError unless every token is in one shared node or run, or missing."""
        runs = [(start, count) for stack in self.runs.values() for start, count in stack]
        end = self.num_shared * size
        for start, count in sorted([*runs, *self.missing]):
            assert count > 0 and start == end, f"{self.request_id}: {start=} after {end=}"
            end = start + count
        assert end == self.num_tokens, f"{self.request_id}: {end} of {self.num_tokens} tokens"
        assert self.num_missing == sum(count for _, count in self.missing)
        shared = {node.block: [[0, size]] for node in self.chain[: self.num_shared]}
        assert self._segment_index.keys() == {*self.runs, *shared}
        for block, index in self._segment_index.items():
            found, low, high = self.segments[index : index + SEGMENT_WIDTH]
            stack = shared.get(block) or self.runs[block]
            assert found == block and high - low == sum(count for _, count in stack)
        if self.tail_run is not None:
            assert self.tail_run is self.runs[self.tail][-1]
            assert self.tail_end == self._segment_index[self.tail] + self._top
        assert len(self.segments) == SEGMENT_WIDTH * (len(self.runs) + self.num_shared)
        for index, node in enumerate(self.chain):
            assert node.depth == index and node.alive and self.number in node.holders
            assert node.shared == (index < self.num_shared)
            assert node.shared or self.runs[node.block] == [[index * size, size]]
            assert not node.shared or self._segment_index[node.block] == index * SEGMENT_WIDTH

    def _lengthen(self, runs: list[list[int]], start: int, count: int) -> None:
        """Record tokens [start, start + count) on top of a stack."""
        last = runs[-1]
        if last[0] + last[1] == start:
            last[1] += count
        else:
            self.sorted &= last[0] < start
            runs.append([start, count])

    def _forget_block(self, block: int) -> None:
        """Remove a block that holds no private tokens any more."""
        self.tail_run = None
        if self.tail != block:
            del self.runs[block]
            return
        # The tail is mostly the last key. popitem is faster than del, which leaves a hole that
        # later reversed() calls have to step over.
        last, stack = self.runs.popitem()
        if last != block:
            self.runs[last] = stack
            del self.runs[block]
        self.tail = next(reversed(self.runs), -1)

    def _bring_forward(self, block: int) -> None:
        """Move the segment of the last shared node to the end of the shared ones, by a swap."""
        index, front = self._segment_index[block], (self.num_shared - 1) * SEGMENT_WIDTH
        if index == front:
            return
        self.tail_run = None
        segments = self.segments
        moved = segments[front : front + SEGMENT_WIDTH]
        segments[front : front + SEGMENT_WIDTH] = segments[index : index + SEGMENT_WIDTH]
        segments[index : index + SEGMENT_WIDTH] = moved
        self._segment_index[block], self._segment_index[moved[0]] = front, index

    def _drop_segment(self, index: int) -> None:
        """Remove a segment: the last one takes its index, since private ones are in no order."""
        self.tail_run = None
        last = self.segments[-SEGMENT_WIDTH:]
        del self.segments[-SEGMENT_WIDTH:]
        if index < len(self.segments):
            self.segments[index : index + SEGMENT_WIDTH] = last
            self._segment_index[last[0]] = index
