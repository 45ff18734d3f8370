"""Checkpoints of KV in host memory, by request and token.

    request 5, tokens  0 .. 15   16 .. 31   32 .. 47
    block index        0         1          2
    host block         2         -          0
    valid              all                  32 .. 40      copied to the host
    needed                                  36 .. 40      missing on the device

KV never changes once it is computed, so a copy stays valid when its tokens are restored: if they
are preempted again, nothing is copied. Blocks without needed tokens are evicted, oldest first.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass

from bros.core.plan import KvCopies
from bros.kvcache.holding import Holding, Run

_FIRST_BLOCKS = 256


class HostPool:
    """Allocates host slots; slot s is in block s // block_size. num_blocks may be 0.

    Requests are identified by Holding.number, their tokens by block index as above. The tables
    cover the blocks that have been used so far: small models have millions of slots in a GiB.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free: list[int] = []  # of the blocks in the tables
        self._full = (1 << block_size) - 1
        self._slots = array("i")  # all slots in the tables, to slice ranges from
        self._blocks: dict[int, dict[int, int]] = {}  # request -> block index -> host block
        self._valid: list[int] = []  # bit k: slot k of the block
        self._needed: list[int] = []
        # Host block -> (request, block index) for blocks without needed tokens. The next step still
        # reads those that are being restored.
        self._evictable: OrderedDict[int, tuple[int, int]] = OrderedDict()
        self._restoring: dict[int, tuple[int, int]] = {}

    @property
    def num_used(self) -> int:
        return len(self._valid) - len(self._free)

    def checkpoint(self, number: int, run: Run) -> tuple[array[int], list[Run]] | None:
        """Reserve host slots for a run of preempted tokens; None if the pool has no room.

        Returns the host slots of tokens that have no valid copy yet, and the ranges [low, high) of
        these tokens, counted from the first token of the run.
        """
        blocks = self._blocks.get(number)
        if blocks is None:
            blocks = self._blocks[number] = {}
        size = self.block_size
        first, end = run[0] // size, (run[0] + run[1] - 1) // size + 1
        while end - first > len(self._free) and len(self._valid) < self.num_blocks:
            self._grow()
        if end - first > len(self._free) and not self._has_room(blocks, range(first, end)):
            return None
        slots, ranges = array("i"), []
        low, offset = 0, run[0] - first * size
        for index in range(first, end):
            count = min(size - offset, run[1] - low)
            block = blocks.get(index, -1)
            if block < 0:
                block = blocks[index] = self._allocate()
            else:
                self._evictable.pop(block, None)
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
        """The host slots of missing tokens; they stay valid at least until `settle`."""
        blocks, size, slots = self._blocks[number], self.block_size, array("i")
        start, count = run
        index, offset = divmod(start, size)
        while count:
            length = min(count, size - offset)
            block = blocks[index]
            bits = self._full if length == size else ((1 << length) - 1) << offset
            needed = self._needed[block]
            assert needed & bits == bits, f"{run} of {number} is not missing"
            self._needed[block] = needed & ~bits
            if needed == bits:
                self._restoring[block] = (number, index)
            place = block * size + offset
            slots += self._slots[place : place + length]
            index, offset, count = index + 1, 0, count - length
        return slots

    def settle(self) -> None:
        """Make copies of restored tokens evictable, since only later plans can overwrite them."""
        for block, owner in self._restoring.items():
            if not self._needed[block]:
                self._evictable[block] = owner
        self._restoring.clear()

    def release(self, number: int, first: int) -> None:
        """Mark copies of tokens from `first` on as not needed, since they will be recomputed."""
        for index, block in self._blocks.get(number, {}).items():
            below = max(0, min(self.block_size, first - index * self.block_size))
            if self._needed[block] >> below:
                self._needed[block] &= (1 << below) - 1
                if not self._needed[block]:
                    self._evictable[block] = (number, index)

    def forget(self, number: int) -> None:
        """Drop all copies of a request."""
        for block in self._blocks.pop(number, {}).values():
            self._evictable.pop(block, None)
            self._restoring.pop(block, None)
            self._clear(block)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or has one request."""
        owned = [block for blocks in self._blocks.values() for block in blocks.values()]
        assert sorted([*owned, *self._free]) == list(range(len(self._valid)))
        assert len(self._valid) <= self.num_blocks
        for number, blocks in self._blocks.items():
            for index, block in blocks.items():
                assert self._needed[block] & ~self._valid[block] == 0, "needed, but no copy"
                evictable = self._evictable.get(block) or self._restoring.get(block)
                assert self._needed[block] or evictable == (number, index)
                assert not (self._needed[block] and block in self._evictable)
        assert self._evictable.keys() | self._restoring.keys() <= set(owned)

    def needed(self, number: int) -> list[int]:
        """Tokens of a request that are missing on the device, for integrity checks."""
        return [
            index * self.block_size + offset
            for index, block in sorted(self._blocks.get(number, {}).items())
            for offset in range(self.block_size)
            if self._needed[block] >> offset & 1
        ]

    def _has_room(self, blocks: dict[int, int], indices: range) -> bool:
        """Whether all block indices can have a host block; those that have one keep it."""
        known = [blocks[index] for index in indices if index in blocks]
        kept = [block for block in known if block in self._evictable]
        if len(indices) - len(known) > len(self._free) + len(self._evictable) - len(kept):
            return False
        for block in kept:
            del self._evictable[block]
        return True

    def _grow(self) -> None:
        """Add blocks to the tables, as many as they have."""
        known = len(self._valid)
        end = min(self.num_blocks, max(2 * known, _FIRST_BLOCKS))
        self._free[:0] = range(end - 1, known - 1, -1)
        self._slots.extend(range(known * self.block_size, end * self.block_size))
        self._valid += [0] * (end - known)
        self._needed += [0] * (end - known)

    def _allocate(self) -> int:
        if not self._free:
            block, (number, index) = self._evictable.popitem(last=False)
            del self._blocks[number][index]
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
    """Collects copies, losses and cuts until the scheduler takes them.

    cuts: request id -> first token without a checkpoint, from which the request recomputes.
    """

    def __init__(self, host: HostPool) -> None:
        self._host = host
        self._copies = KvCopies()
        self._losses: dict[str, Loss] = {}
        self.cuts: dict[str, int] = {}

    def preempt(self, victim: Holding, run: Run, slots: array[int]) -> None:
        """Record a run of popped tokens of a victim; slots: where they were, in token order."""
        victim.mark_missing(run)
        loss = self._loss(victim)
        loss.tokens += run[1]
        self._copy(victim, run, slots, loss)

    def drop_shared(self, victim: Holding, count: int) -> None:
        """Record that a victim lost its first `count` tokens, which were in shared blocks."""
        self._loss(victim).tokens += count
        self.cuts[victim.request_id] = 0
        victim.mark_missing((0, count))

    def restore(self, holding: Holding, run: Run, slots: array[int]) -> None:
        """Record that missing tokens of a request are restored into these slots."""
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
        """Copy a run to the host as far as there is room, from its first token on: once a token is
        lost, all tokens after it have to be recomputed anyway."""
        start, end = run[0], run[0] + run[1]
        cut = self.cuts.get(victim.request_id, end)
        if cut <= start:
            return  # these tokens are recomputed in any case
        kept = self._host.checkpoint(victim.number, run)
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
