"""Who gets KV blocks in the step being packed, and who has to give them up.

Requests are ranked by their policy once and for all; lower ranks keep their memory longer. A
request may take blocks from requests of higher rank number that are not in the step, which
then start over (recompute). The request of lowest rank can take everything, and fits alone
(checked on submission), so there is always progress and never a deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bros.core.request import ServiceClass
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.state import RequestState


def peak_tokens(holders: Sequence[tuple[int, int]]) -> int:
    """Most KV tokens that requests will hold at once, if each leaves when it is done.

    holders: (tokens held, tokens still to come) of each. All grow by one token per step, so
    memory peaks just before one of them leaves; those with less to come have left by then.
    """
    peak = held = 0
    count = 0
    for tokens, to_come in sorted(holders, key=lambda holder: -holder[1]):
        held += tokens
        count += 1
        # When this one leaves, it and those with more to come have each grown by `to_come`.
        peak = max(peak, held + count * to_come)
    return peak


class TrialMemory:
    """Implements selection.Reservations on a KvCacheManager; changes nothing.

    running: requests that hold blocks, sorted by rank. max_holders: how many may hold some;
    real-time requests count only their own kind. newcomers_preempt: requests that hold
    none may take memory from others, too. expected_tokens: how many more tokens a request is
    likely to produce; with it, best-effort newcomers are admitted only if everybody's expected
    growth fits beside them, or if no best-effort request runs at all.
    """

    def __init__(
        self,
        kv: KvCacheManager,
        running: Sequence[RequestState],
        *,
        max_holders: int,
        newcomers_preempt: bool,
        expected_tokens: Callable[[RequestState], int] | None = None,
    ) -> None:
        self._kv = kv
        self._running = running
        self._newcomers_preempt = newcomers_preempt
        self._seats = {
            ServiceClass.BE: max_holders - len(running),
            ServiceClass.RT: max_holders
            - sum(state.service_class is ServiceClass.RT for state in running),
        }
        self._expected_tokens = expected_tokens
        self._free = kv.num_free_blocks
        self._last_victim = len(running)  # victims come from the end of `running`
        self._reserved: dict[str, int] = {}
        self._made_room: set[str] = set()
        self._newcomers: list[tuple[int, int]] = []
        self._promised = 0  # blocks that newcomers need for the rest of their prompts
        self._open = True
        self._growth: list[tuple[int, int]] | None = None
        self.victims: list[RequestState] = []
        self.refusal = "memory"

    def reserve(self, state: RequestState, num_tokens: int) -> bool:
        """True if the next `num_tokens` tokens fit, after what was reserved before."""
        self.refusal = "memory"
        if state.num_cached == 0:
            return self._admit(state, num_tokens)
        if state in self.victims:
            return False
        return self._take(state, self._kv.blocks_needed(state.request_id, num_tokens), 0, True)

    def cancel(self, state: RequestState) -> bool:
        """Give a reservation back; False if others lost memory for it, so that it stays."""
        if state.request_id in self._made_room:
            return False
        self._free += self._reserved.pop(state.request_id)
        return True

    def _admit(self, state: RequestState, num_tokens: int) -> bool:
        """A newcomer must fit with all it has to compute, and nobody overtakes one that waits.

        The last in line must leave every holder one block to grow into, so that it is not
        admitted only to be thrown out.
        """
        if not self._open or self._seats[state.service_class] <= 0:
            self.refusal = "memory" if not self._open else "rows"
            return False
        size = self._kv.block_size
        everything, now = -(-state.remaining // size), -(-num_tokens // size)
        spare = everything - now + self._promised
        if self._running and state.rank > self._running[-1].rank:
            spare += len(self._running) + len(self._newcomers)
        self._open = self._fits_with_growth(state) and self._take(
            state, now, spare, self._newcomers_preempt
        )
        if self._open:
            self._promised += everything - now
            for service_class in {state.service_class, ServiceClass.BE}:
                self._seats[service_class] -= 1
            self._newcomers.append(self._growth_of(state))
        return self._open

    def _take(self, state: RequestState, blocks: int, spare: int, preempt: bool) -> bool:
        """Reserve `blocks`, if `spare` more would be free as well."""
        shortfall = blocks + spare - self._free
        victims: list[RequestState] = []
        index = self._last_victim
        while shortfall > 0:
            index -= 1
            if not preempt or index < 0 or self._running[index].rank <= state.rank:
                return False
            victim = self._running[index]
            if victim.request_id not in self._reserved:  # never one of this very step
                victims.append(victim)
                shortfall -= self._kv.blocks_of(victim.request_id)
        if victims:
            self._last_victim = index
            self._made_room.add(state.request_id)
            self.victims += victims
            self._free += sum(self._kv.blocks_of(victim.request_id) for victim in victims)
        self._free -= blocks
        self._reserved[state.request_id] = blocks
        return True

    def _fits_with_growth(self, state: RequestState) -> bool:
        if self._expected_tokens is None or state.service_class is ServiceClass.RT:
            return True
        if not any(other.service_class is ServiceClass.BE for other in self._running):
            return True
        if self._growth is None:
            self._growth = [self._growth_of(other) for other in self._running]
        holders = [*self._growth, *self._newcomers, self._growth_of(state)]
        # Half a block per request is lost to rounding on average.
        needed = peak_tokens(holders) / self._kv.block_size + len(holders) / 2
        return needed <= self._kv.num_blocks

    def _growth_of(self, state: RequestState) -> tuple[int, int]:
        """(tokens once its prompt is computed, tokens to come after that)"""
        expected = self._expected_tokens(state) if self._expected_tokens else 0
        return state.num_cached + state.remaining, expected
