"""Checkpoints of KV in host memory, by request and token.

    request 5, tokens  0 .. 15   16 .. 31   32 .. 47
    host block         2         -          0
    valid              all                  32 .. 40      copied once
    needed                                  36 .. 40      missing there

KV never changes once it is computed, so a copy stays valid when its tokens are restored: if they
are preempted again, nothing is copied. Copies that are not needed are evicted, oldest first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from bros.core.plan import KvCopies
from bros.kvcache.holding import Holding, Run


class HostPool:
    """Hands out host slots; slot s lies in block s // block_size. May have no blocks at all."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._full = (1 << block_size) - 1
        self._slots = array("i", range(num_blocks * block_size))  # to cut ranges out of
        self._blocks: dict[int, dict[int, int]] = {}  # request -> part of its tokens -> block
        self._valid = [0] * num_blocks  # bit k: slot k
        self._needed = [0] * num_blocks
        self._spare: OrderedDict[int, tuple[int, int]] = OrderedDict()  # none of it needed
        self._leaving: dict[int, tuple[int, int]] = {}  # the same, but still to be read

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def keep(self, number: int, run: Run) -> tuple[array[int], list[Run]] | None:
        """Keep a copy of tokens that are being preempted; None if the host has no room.

        Returns what has to be copied because it has no valid copy yet: host slots, and the ranges
        [low, high) of tokens that go there, counted from the first token of the run.
        """
        blocks = self._blocks.get(number)
        if blocks is None:
            blocks = self._blocks[number] = {}
        size = self.block_size
        first, end = run[0] // size, (run[0] + run[1] - 1) // size + 1
        if end - first > len(self._free) and not self._has_room(blocks, range(first, end)):
            return None
        slots, ranges = array("i"), []
        low, offset = 0, run[0] - first * size
        for part in range(first, end):
            count = min(size - offset, run[1] - low)
            block = blocks.get(part, -1)
            if block < 0:
                block = blocks[part] = self._take()
            else:
                self._spare.pop(block, None)
            bits = self._full if count == size else ((1 << count) - 1) << offset
            new = bits & ~self._valid[block]
            self._needed[block] |= bits
            if new == bits:
                self._valid[block] |= bits
                place = block * size + offset
                slots += self._slots[place : place + count]
                ranges.append((low, low + count))
            elif new:
                self._valid[block] |= bits
                for k in range(offset, offset + count):
                    if new >> k & 1:
                        slots.append(block * size + k)
                        ranges.append((low + k - offset, low + k - offset + 1))
            low, offset = low + count, 0
        return slots, ranges

    def restore(self, number: int, run: Run) -> array[int]:
        """The host slots of missing tokens, which are needed until `settle`."""
        blocks, size, slots = self._blocks[number], self.block_size, array("i")
        start, count = run
        part, offset = divmod(start, size)
        while count:
            length = min(count, size - offset)
            block = blocks[part]
            bits = self._full if length == size else ((1 << length) - 1) << offset
            needed = self._needed[block]
            assert needed & bits == bits, f"{run} of {number} is not missing"
            self._needed[block] = needed & ~bits
            if needed == bits:
                self._leaving[block] = (number, part)
            place = block * size + offset
            slots += self._slots[place : place + length]
            part, offset, count = part + 1, 0, count - length
        return slots

    def settle(self) -> None:
        """Restored tokens have been read: their copies may be evicted from now on."""
        for block, owner in self._leaving.items():
            if not self._needed[block]:
                self._spare[block] = owner
        self._leaving.clear()

    def release(self, number: int, first: int) -> None:
        """Tokens from `first` on will be recomputed: their copies are not needed."""
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

    def _has_room(self, blocks: dict[int, int], parts: range) -> bool:
        """Whether all parts get a block; parts that have one are not evicted for the others."""
        known = [blocks[part] for part in parts if part in blocks]
        kept = [block for block in known if block in self._spare]
        if len(parts) - len(known) > len(self._free) + len(self._spare) - len(kept):
            return False
        for block in kept:
            del self._spare[block]
        return True

    def _take(self) -> int:
        if not self._free:
            block, (number, part) = self._spare.popitem(last=False)
            del self._blocks[number][part]
            self._clear(block)
        return self._free.pop()

    def _clear(self, block: int) -> None:
        self._valid[block] = self._needed[block] = 0
        self._free.append(block)


@dataclass(slots=True)
class Loss:
    """Tokens of a request that were preempted.

    tokens: how many.
    copied: how many of them had to be copied to the host.
    """

    tokens: int = 0
    copied: int = 0


class Checkpoints:
    """Collects copies, losses and cuts until the next step is planned.

    cuts: request id -> its first token that is lost, so that it recomputes from there.
    """

    def __init__(self, host: HostPool) -> None:
        self._host = host
        self._copies = KvCopies()
        self._losses: dict[str, Loss] = {}
        self.cuts: dict[str, int] = {}

    def preempt(self, victim: Holding, run: Run, slots: array[int]) -> None:
        """Tokens of a victim were popped; slots: where they were, in token order."""
        victim.lose(run)
        loss = self._loss(victim)
        loss.tokens += run[1]
        self._copy(victim, run, slots, loss)

    def drop_shared(self, victim: Holding, count: int) -> None:
        """The first `count` tokens of a victim, which it shared, are lost."""
        self._loss(victim).tokens += count
        self.cuts[victim.request_id] = 0
        victim.lose((0, count))

    def restore(self, holding: Holding, run: Run, slots: array[int]) -> None:
        """Missing tokens of a request are restored into these slots."""
        self._copies.back_host += self._host.restore(holding.number, run)
        self._copies.back_device += slots

    def forget(self, holding: Holding) -> None:
        """Drop all copies of a request that has ended."""
        self._host.forget(holding.number)
        self.cuts.pop(holding.request_id, None)

    def take_copies(self) -> KvCopies | None:
        """See KvCacheManager."""
        copies = self._copies
        self._host.settle()
        if not len(copies):
            return None
        self._copies = KvCopies()
        return copies

    def take_losses(self) -> dict[str, Loss]:
        """See KvCacheManager."""
        losses, self._losses = self._losses, {}
        return losses

    def _loss(self, victim: Holding) -> Loss:
        loss = self._losses.get(victim.request_id)
        if loss is None:
            loss = self._losses[victim.request_id] = Loss()
        return loss

    def _copy(self, victim: Holding, run: Run, slots: array[int], loss: Loss) -> None:
        """Copy a run to the host as far as it has room, from the front: once a token is lost, all
        tokens after it have to be recomputed anyway."""
        start, end = run[0], run[0] + run[1]
        cut = self.cuts.get(victim.request_id, end)
        if cut <= start:
            return  # recomputed in any case
        kept = self._host.keep(victim.number, run)
        if kept is not None:
            copies, (host_slots, without) = self._copies, kept
            loss.copied += len(host_slots)
            copies.out_host += host_slots
            for low, high in without:
                copies.out_device += slots[low:high]
            return
        size = self._host.block_size
        if start // size == (end - 1) // size:
            self.cuts[victim.request_id] = min(cut, start)
            return
        at = start
        while at < end and self.cuts.get(victim.request_id, end) > at:
            stop = min(end, (at // size + 1) * size)
            self._copy(victim, (at, stop - at), slots[at - start : stop - start], loss)
            at = stop
