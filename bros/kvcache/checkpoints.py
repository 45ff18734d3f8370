"""What requests have had to give up: copied to the host if there is room there, or lost."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from bros.core.plan import KvCopies
from bros.kvcache.holding import Holding, Run
from bros.kvcache.host_pool import HostPool


@dataclass(slots=True)
class Loss:
    """What a request has had to give up. copied: tokens that had no copy on the host yet."""

    tokens: int = 0
    copied: int = 0


class Checkpoints:
    """Collects copies, losses and cuts for whoever plans the next step."""

    def __init__(self, host: HostPool) -> None:
        self._host = host
        self._copies = KvCopies()
        self._losses: dict[str, Loss] = {}
        self.cuts: dict[str, int] = {}  # request -> its first token that is lost

    def give_up(self, victim: Holding, run: Run, slots: array[int]) -> None:
        """These tokens of a request were popped; slots: where they were, in their order."""
        victim.lose(run)
        loss = self._loss(victim)
        loss.tokens += run[1]
        self._copy(victim, run, slots, loss)

    def give_up_shared(self, victim: Holding, count: int) -> None:
        """Its first tokens, which it shared, are lost."""
        self._loss(victim).tokens += count
        self.cuts[victim.request_id] = 0
        victim.lose((0, count))

    def bring_back(self, holding: Holding, run: Run, slots: array[int]) -> None:
        """Missing tokens of a request go into these slots."""
        self._copies.back_host += self._host.restore(holding.number, run)
        self._copies.back_device += slots

    def forget(self, holding: Holding) -> None:
        """It has gone, with its copies."""
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
        """To the host, as far as there is room, from the front: once a token is lost, all after it
        have to be computed again, too."""
        start, end = run[0], run[0] + run[1]
        cut = self.cuts.get(victim.request_id, end)
        if cut <= start:
            return  # to be computed again in any case
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
