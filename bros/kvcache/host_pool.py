"""Copies of KV in host memory, by request and token.

    request 5, tokens  0 .. 15   16 .. 31   32 .. 47
    host block         2         -          0
    valid              all                  32 .. 40      copied once
    needed                                  36 .. 40      missing there

KV never changes once it is computed, so a copy stays valid when its tokens are restored: taking
them away again costs nothing. Copies that are not needed make way for others, oldest first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from bros.kvcache.holding import Run


class HostPool:
    """Hands out host slots; slot s lies in block s // block_size. May have no blocks at all."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._blocks: dict[int, dict[int, int]] = {}  # request -> part of its tokens -> block
        self._valid = [0] * num_blocks  # bit k: slot k
        self._needed = [0] * num_blocks
        self._spare: OrderedDict[int, tuple[int, int]] = OrderedDict()  # none of it needed
        self._leaving: dict[int, tuple[int, int]] = {}  # the same, but still to be read

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def keep(self, number: int, runs: list[Run]) -> list[list[tuple[int, range]]] | None:
        """These tokens are about to be missing from the device; None if there is no room.

        Returns for each run what has to be copied, since it has no copy yet: (tokens of the run
        before it, its host slots).
        """
        blocks = self._blocks.setdefault(number, {})
        wanted = {part for run in runs for part, _, _ in self._pieces(run)}
        new = wanted - blocks.keys()
        kept = sum(blocks[part] in self._spare for part in wanted & blocks.keys())
        if len(new) > len(self._free) + len(self._spare) - kept:
            return None
        for part in wanted & blocks.keys():
            self._spare.pop(blocks[part], None)
        for part in sorted(new):
            blocks[part] = self._take()
        return [list(self._copies(blocks, run)) for run in runs]

    def restore(self, number: int, run: Run) -> array[int]:
        """The host slots of missing tokens, which are needed until `settle`."""
        blocks, slots = self._blocks[number], array("i")
        for part, offset, count in self._pieces(run):
            block, bits = blocks[part], ((1 << count) - 1) << offset
            assert self._needed[block] & bits == bits, f"{run} of {number} is not missing"
            self._needed[block] &= ~bits
            if not self._needed[block]:
                self._leaving[block] = (number, part)
            slots.extend(self._slots(block, offset, count))
        return slots

    def settle(self) -> None:
        """What was restored has been read: its copies may make way for others now."""
        for block, owner in self._leaving.items():
            if not self._needed[block]:
                self._spare[block] = owner
        self._leaving.clear()

    def release(self, number: int, first: int) -> None:
        """Tokens from `first` on will be computed again: their copies are not needed."""
        for part, block in self._blocks.get(number, {}).items():
            below = max(0, min(self.block_size, first - part * self.block_size))
            if self._needed[block] >> below:
                self._needed[block] &= (1 << below) - 1
                if not self._needed[block]:
                    self._spare[block] = (number, part)

    def forget(self, number: int) -> None:
        """Drop all copies of a request."""
        for block in self._blocks.pop(number, {}).values():
            self._spare.pop(block, None)
            self._leaving.pop(block, None)
            self._clear(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or has one owner."""
        owned = [block for blocks in self._blocks.values() for block in blocks.values()]
        assert sorted([*owned, *self._free]) == list(range(self.num_blocks))
        for number, blocks in self._blocks.items():
            for part, block in blocks.items():
                assert self._needed[block] & ~self._valid[block] == 0, "needed, but no copy"
                spare = self._spare.get(block) or self._leaving.get(block)
                assert self._needed[block] or spare == (number, part)
                assert not (self._needed[block] and block in self._spare)
        assert self._spare.keys() | self._leaving.keys() <= set(owned)

    def needed(self, number: int) -> list[int]:
        """Tokens of a request that are missing on the device, for integrity checks."""
        return [
            part * self.block_size + offset
            for part, block in sorted(self._blocks.get(number, {}).items())
            for offset in range(self.block_size)
            if self._needed[block] >> offset & 1
        ]

    def _pieces(self, run: Run) -> Iterator[tuple[int, int, int]]:
        """A run, block by block: (part of the request's tokens, offset in it, how many)."""
        start, count = run
        while count:
            part, offset = divmod(start, self.block_size)
            length = min(count, self.block_size - offset)
            yield part, offset, length
            start, count = start + length, count - length

    def _copies(self, blocks: dict[int, int], run: Run) -> Iterator[tuple[int, range]]:
        """Mark a run as needed and valid; what was not valid before."""
        before = 0
        for part, offset, count in self._pieces(run):
            block, bits = blocks[part], ((1 << count) - 1) << offset
            new = bits & ~self._valid[block]
            self._needed[block] |= bits
            self._valid[block] |= bits
            if new == bits:
                yield before, self._slots(block, offset, count)
            elif new:
                for k in range(count):
                    if new >> (offset + k) & 1:
                        yield before + k, self._slots(block, offset + k, 1)
            before += count

    def _slots(self, block: int, offset: int, count: int) -> range:
        first = block * self.block_size + offset
        return range(first, first + count)

    def _take(self) -> int:
        if not self._free:
            block, (number, part) = self._spare.popitem(last=False)
            del self._blocks[number][part]
            self._clear(block)
        return self._free.pop()

    def _clear(self, block: int) -> None:
        self._valid[block] = self._needed[block] = 0
        self._free.append(block)
