"""Which requests get KV memory in the step being packed, and which are preempted for it.

Requests are ranked by their policy once and for all; lower ranks keep their memory longer. A
request may take memory from requests of higher rank number that are not in the step, which
then wait until there is room for what they miss, or compute it again. The request of lowest
rank can take everything, and fits alone (checked on submission), so there is always progress
and never a deadlock.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence

from bros.core.request import ServiceClass
from bros.kvcache.blocks import Side
from bros.kvcache.host_pool import Loss
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.sharing import CommonPart
from bros.scheduler.prefixes import Prefixes
from bros.scheduler.state import RequestState

_FILL_MARGIN = 2.0
"""What others compute in the same steps may take as much time again."""


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


class StepMemory:
    """Implements selection.Reservations on a KvCacheManager, for one step.

    Packing reserves only what it then selects, so a reservation is an allocation already.

    running: requests that hold memory, sorted by rank. states: all requests by id. max_holders:
    how many may hold some; real-time requests count only their own kind. newcomers_preempt:
    requests that hold none may take memory from others, too; those that are late only from
    best-effort ones, as requests that are on time would have to wait for them.
    expected_tokens: how many more tokens a request is likely to produce; with it, new best-effort
    requests are admitted only if the expected growth of all requests fits beside them, or if no
    best-effort request runs at all.
    prefill_seconds: see CostModel; None if time does not matter.

    num_copied: tokens that are copied to the host for reservations so far.
    granted: request id -> (segments, slots) of its reservation. losses: requests that had to
    lose some of their tokens, and can not be in this step any more. restored: tokens that
    come back.
    """

    def __init__(
        self,
        kv: KvCacheManager,
        prefixes: Prefixes,
        running: Sequence[RequestState],
        states: Mapping[str, RequestState],
        now: float,
        *,
        max_holders: int,
        new_requests_preempt: bool,
        expected_tokens: Callable[[RequestState], int] | None = None,
        prefill_seconds: Callable[[int, int], float] | None = None,
    ) -> None:
        self._kv = kv
        self._prefixes = prefixes
        self._running = running
        self._now = now
        self._new_requests_preempt = new_requests_preempt
        self._seats = {
            ServiceClass.BE: max_holders - len(running),
            ServiceClass.RT: max_holders
            - sum(state.service_class is ServiceClass.RT for state in running),
        }
        self._expected_tokens = expected_tokens
        self._prefill_seconds = prefill_seconds
        self._states = states
        # What is kept for real-time prompts must not keep best-effort work from running at all.
        self._has_best_effort = any(s.service_class is ServiceClass.BE for s in reversed(running))
        self._made_room: set[str] = set()
        self._new_requests: list[tuple[int, int]] = []
        self._promised = 0  # blocks that new requests need for the rest of their prompts
        self._open = True
        self._asking: RequestState | None = None
        self._asked_for_victims = False
        self._growth: list[tuple[int, int]] | None = None
        self.granted: dict[str, tuple[array[int], array[int]]] = {}
        self.losses: dict[str, Loss] = {}
        self.restored: dict[ServiceClass, int] = {cls: 0 for cls in ServiceClass}
        self.refusal = "memory"
        self.num_copied = 0

    def is_tight(self, num_rows: int, num_tokens: int) -> bool:
        """False if so many rows and tokens, and all that is missing, fit without copies."""
        if not self._kv.num_host_blocks:
            return False
        size = self._kv.block_size
        missing = sum(state.num_missing for state in self._running)
        wanted = num_rows + (num_tokens + missing) // size  # each row leaves one block unfilled
        return self._kv.num_available_blocks(Side.RIGHT) < wanted

    def free_slots(self, state: RequestState) -> int:
        """Of a candidate's tokens, how many get free slots."""
        return self._kv.num_free_slots(state.request_id, state.side, state.match)

    @property
    def has_common_parts(self) -> bool:
        """See selection.Reservations; this one and the next two."""
        return self._kv.has_common_parts

    @property
    def sharing_changes(self) -> int:
        return self._kv.sharing_changes

    def common_parts(self, state: RequestState) -> Sequence[CommonPart]:
        return self._kv.common_parts(state.request_id)

    def look_up(self, state: RequestState) -> bool:
        """Find the cached prefix of a new request; False if it should wait for more of it."""
        if not self._may_start(state):
            return True  # to be refused
        self._prefixes.look_up(state)
        return not self._is_about_to_be_cached(state)

    def _is_about_to_be_cached(self, state: RequestState) -> bool:
        """Whether it should wait for what another request is computing, which takes no longer.

        Only for requests before it in rank, so never real-time for best-effort requests under
        `bros`, and then not beyond its own deadline. Best-effort requests wait for each other
        whatever their ranks, which is not the order in which they start.
        """
        match = state.match
        producer = self._states.get(match.producer) if match.producer else None
        if producer is None or producer.num_missing:
            return False
        best_effort = state.service_class is ServiceClass.BE
        alike = best_effort and producer.service_class is ServiceClass.BE
        if producer.rank > state.rank and not alike:
            return False
        if best_effort or self._prefill_seconds is None:
            return True
        until = match.num_tokens + match.num_producing
        wait_s = self._prefill_seconds(max(1, until - producer.num_cached), producer.num_cached)
        rest_s = self._prefill_seconds(len(state.token_ids) - until, until)
        if self._now + _FILL_MARGIN * (wait_s + rest_s) <= state.deadline_s:
            return True
        # A request that is late in any case loses less by waiting than by computing all of it.
        alone_s = self._prefill_seconds(state.remaining, state.num_cached)
        return self._now + alone_s > state.deadline_s

    def _may_start(self, state: RequestState) -> bool:
        self.refusal = "memory" if not self._open else "rows"
        return self._open and self._seats[state.service_class] > 0

    def reserve(self, state: RequestState, num_tokens: int) -> bool:
        """True if the next `num_tokens` tokens fit, and what it misses; they are its own then."""
        self.refusal = "memory"
        if not state.running:
            return self._admit(state, num_tokens)
        if self.losses and state.request_id in self.losses:
            return False
        return self._append(state, num_tokens)

    def reserve_rows(self, states: Sequence[RequestState]) -> int:
        """See Reservations: one token for each of these decode rows, which miss nothing."""
        append, granted, victims = self._kv.append, self.granted, self._victim_ids
        self.refusal = "memory"
        self._asked_for_victims = False
        for count, state in enumerate(states):
            if self.losses and state.request_id in self.losses:
                return count
            self._asking = state
            places = append(state.request_id, 1, state.side, victims, state.match)
            if places is None:
                return count
            granted[state.request_id] = places
            if self._asked_for_victims:
                self._note_losses(state)
                return count + 1
        return len(states)

    def may_cancel(self, state: RequestState) -> bool:
        """False if others lost memory for its reservation, so that it stays."""
        return state.request_id not in self._made_room

    def cancel(self, state: RequestState) -> None:
        """Give a reservation back. What came back for it stays."""
        del self.granted[state.request_id]
        self._kv.truncate(state.request_id, state.num_cached)
        state.num_missing = 0

    def _append(self, state: RequestState, num_tokens: int) -> bool:
        self._asking, self._asked_for_victims = state, False
        granted = self._kv.append(
            state.request_id, num_tokens, state.side, self._victim_ids, state.match
        )
        if granted is None:
            return False
        self.granted[state.request_id] = granted
        if state.num_missing:
            self.restored[state.service_class] += state.num_missing
        if self._asked_for_victims:
            self._note_losses(state)
        return True

    def _victim_ids(self) -> Iterator[str]:
        assert self._asking is not None
        self._asked_for_victims = True
        return (victim.request_id for victim in self._victims(self._asking))

    def _note_losses(self, winner: RequestState) -> None:
        for name, lost in self._kv.take_losses().items():
            self._made_room.add(winner.request_id)
            total = self.losses.setdefault(name, Loss())
            total.tokens += lost.tokens
            total.copied += lost.copied
            self.num_copied += lost.copied

    def _admit(self, state: RequestState, num_tokens: int) -> bool:
        """A new request must fit with all it has to compute, and none overtakes one that waits.

        Every holder that it may not preempt must have a block to grow into then, so that no request
        is admitted only to be preempted, or to preempt others, a moment later.
        """
        if not self._may_start(state):
            return False
        self.refusal = "memory"
        size = self._kv.block_size
        everything, now = -(-state.remaining // size), -(-num_tokens // size)
        victims = list(self._victims(state))
        holders = len(self._running) - len(victims) + len(self._new_requests)
        self._open = (
            self._fits_with_growth(state)
            and self._can_have(state, everything + self._promised + holders, victims)
            and self._append(state, num_tokens)
        )
        if self._open:
            self._promised += everything - now
            for service_class in {state.service_class, ServiceClass.BE}:
                self._seats[service_class] -= 1
            self._new_requests.append(self._growth_of(state))
            self._has_best_effort |= state.service_class is ServiceClass.BE
        return self._open

    def _can_have(self, state: RequestState, blocks: int, victims: Sequence[RequestState]) -> bool:
        """Whether so many are free, or can be taken from others."""
        side = state.side if self._has_best_effort else Side.LEFT
        free = self._kv.num_available_blocks(side, state.match)
        if free < blocks and victims:
            free += self._kv.blocks_without(victim.request_id for victim in victims)
        return free >= blocks

    def _victims(self, state: RequestState) -> Iterator[RequestState]:
        """Possible victims of a request, last in rank first; none that is in this step."""
        is_new_request = not state.running
        if is_new_request and not self._new_requests_preempt:
            return
        spares_rt = is_new_request and state.late
        for victim in reversed(self._running):
            if victim.rank <= state.rank:
                return
            if spares_rt and victim.service_class is ServiceClass.RT:
                return
            if victim.request_id not in self.granted:
                yield victim

    def _fits_with_growth(self, state: RequestState) -> bool:
        if self._expected_tokens is None or state.service_class is ServiceClass.RT:
            return True
        if not any(other.service_class is ServiceClass.BE for other in self._running):
            return True
        if self._growth is None:
            self._growth = [self._growth_of(other) for other in self._running]
        holders = [*self._growth, *self._new_requests, self._growth_of(state)]
        # Half a block per request is lost to rounding on average.
        needed = peak_tokens(holders) / self._kv.block_size + len(holders) / 2
        return needed <= self._kv.num_blocks - self._kv.num_kept_blocks

    def _growth_of(self, state: RequestState) -> tuple[int, int]:
        """(tokens of its own once its prompt is computed, tokens to come after that)"""
        expected = self._expected_tokens(state) if self._expected_tokens else 0
        if state.running:
            shared = self._kv.num_shared_tokens(state.request_id)
        else:
            shared = state.match.num_tokens
        return state.num_cached + state.remaining - shared, expected
