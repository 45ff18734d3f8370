"""KV memory of the step being packed: admission of new requests, and the choice of victims.

The policy gives each request a rank. A request may preempt requests of higher rank that are not in
the step; these victims wait until their missing tokens can be restored, or recompute them. The
request of lowest rank can preempt all others, and fits alone (checked on submission), so a step
always makes progress and there is no deadlock.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

from bros.core.request import ServiceClass
from bros.kvcache.blocks import Side
from bros.kvcache.host_pool import Loss
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.sharing import CommonPart
from bros.scheduler.prefixes import look_up
from bros.scheduler.shares import SHARE
from bros.scheduler.state import Rank, RequestState, deadline_key

_WAIT_MARGIN = 2.0
"""Expected times are doubled, since other requests are computed in the same steps."""

_KEPT_ROWS = 16
"""Tenants that are behind leave one of so many rows to real-time requests of others."""

_SPARE_BLOCKS = 1.0
"""For each holder, beside its expected tokens: half a block is lost to rounding on average, and
half is for answers that are longer than expected. Ablation: tenants, throughput -12 % with no more
than the first half, as best-effort requests are preempted and restored again and again. One and a
half gain no more there. The second half costs `batch prefixes` 4 %, a third one 4 % more."""


def peak_tokens(holders: Sequence[tuple[int, int]]) -> int:
    """Most KV tokens that requests will hold at once, if each frees its memory when it is done.

    holders: (tokens held, tokens still to come) of each. All grow by one token per step, so
    memory peaks just before one of them ends; those with fewer tokens to come have ended by then.
    """
    peak = held = 0
    count = 0
    for tokens, to_come in sorted(holders, key=lambda holder: -holder[1]):
        held += tokens
        count += 1
        # When this one ends, it and those with more to come have each grown by `to_come`.
        peak = max(peak, held + count * to_come)
    return peak


class StepMemory:
    """KV memory for the step being packed. Every reservation is selected, or canceled.

    Packing reserves only what it then selects, so a reservation allocates at once.

    running: requests that hold memory, sorted by rank.
    states: all requests by id.
    max_holders: most requests that may hold memory; a new real-time request counts only real-time
        ones. Ablation: programs, attainment -4 points.
    new_requests_preempt: whether a request that holds no memory may preempt others. If it is late
        it may preempt only best-effort ones, so that no request that is on time waits for it.
    expected_tokens: how many more tokens a request is likely to generate. If given, a new
        best-effort request is admitted only if the expected growth of all requests fits, or if no
        best-effort request runs. Ablation: tenants, throughput -16 %.
    prefill_seconds: see CostModel; None if the policy predicts no times.
    behind: tenants whose real-time requests give memory and leave rows to those of others, see
        Proposal.
    owes_best_effort: best-effort work is owed time, so one such request may start although
        real-time ones hold all rows, if none holds memory.
    drop: undoes what is suspended of a request.

    refusal: why the latest request found no place: "memory", "rows" if too many run, or "share".
    num_copied: tokens to be copied to the host for the reservations so far.
    granted: request id -> (segments, slots) of its reservation.
    losses: request id -> preempted tokens; these victims cannot be in this step any more.
    restored: tokens to be restored, by class.
    """

    def __init__(
        self,
        kv: KvCacheManager,
        running: Sequence[RequestState],
        states: Mapping[str, RequestState],
        now: float,
        *,
        drop: Callable[[RequestState], None],
        max_holders: int,
        new_requests_preempt: bool,
        expected_tokens: Callable[[RequestState], int] | None = None,
        prefill_seconds: Callable[[int, int], float] | None = None,
        behind: Collection[str] = (),
        owes_best_effort: bool = False,
    ) -> None:
        self._kv = kv
        self._running = running
        self._now = now
        self._drop = drop
        self._new_requests_preempt = new_requests_preempt
        real_time = ServiceClass.RT
        num_real_time = sum([state.service_class is real_time for state in running])
        self._free_rows = {
            ServiceClass.BE: max_holders - len(running),
            ServiceClass.RT: max_holders - num_real_time,
        }
        self._expected_tokens = expected_tokens
        self._prefill_seconds = prefill_seconds
        self._states = states
        self._runs_best_effort = num_real_time < len(running)
        # Also true once one starts. Before, it may use blocks that are protected for real-time.
        self._has_best_effort = self._runs_best_effort
        self._owes_best_effort = owes_best_effort
        self._preemptors: set[str] = set()
        self._new_requests: list[tuple[int, int]] = []
        self._refused: RequestState | None = None  # the latest new request without memory
        self._behind = behind
        # All that may be preempted, the last one first.
        self._victims_by_rank = running[::-1]
        if behind:
            self._victims_by_rank = sorted(running, key=self._effective_rank, reverse=True)
        self._has_real_time = self._free_rows[ServiceClass.RT] < max_holders
        self._kept_rows = max_holders // _KEPT_ROWS
        self.granted: dict[str, tuple[array[int], array[int]]] = {}
        self.losses: dict[str, Loss] = {}
        self.restored = dict.fromkeys(ServiceClass, 0)
        self.refusal = "memory"
        self.num_copied = 0

    def is_tight(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step of so many rows and tokens, and all missing tokens, may cause copies to
        the host."""
        if not self._kv.num_host_blocks:
            return False
        size = self._kv.block_size
        missing = sum(state.num_missing for state in self._running)
        wanted = num_rows + (num_tokens + missing) // size  # each row leaves one block unfilled
        return self._kv.num_available_blocks(Side.RIGHT) < wanted

    def free_slots(self, state: RequestState) -> int:
        """Tokens of a candidate, missing ones included, that fit without preemption. Each token
        beyond these causes about one token of a victim to be copied to the host."""
        return self._kv.num_free_slots(state.request_id, state.side, state.match)

    @property
    def has_common_parts(self) -> bool:
        """Whether any two requests share cached tokens."""
        return self._kv.has_common_parts

    @property
    def sharing_changes(self) -> int:
        """A version that changes whenever `common_parts` of any request may have changed."""
        return self._kv.sharing_changes

    def common_parts(self, state: RequestState) -> Sequence[CommonPart]:
        """See KvCacheManager.common_parts."""
        return self._kv.common_parts(state.request_id)

    def look_up(self, state: RequestState) -> bool:
        """Find the cached prefix of a new request; False if it should wait for a producer."""
        if not self.may_start(state):
            return True  # `reserve` will refuse it
        look_up(self._kv, state)
        return not self._should_wait_for_prefix(state)

    def _should_wait_for_prefix(self, state: RequestState) -> bool:
        """Whether a new request should wait for the producer of its prefix.

        A request waits only for producers of lower rank, so that under `bros` a real-time request
        never waits for a best-effort one; and not beyond its own deadline, unless the producer's
        comes first: steps compute the producer's tokens before its own then, so waiting costs it
        nothing. Best-effort requests wait for each other whatever their ranks, since they do not
        start in order of rank. Ablation: programs, throughput -38 %.
        """
        match = state.match
        producer = self._states.get(match.producer) if match.producer else None
        if producer is None or producer.num_missing:
            return False
        best_effort = state.service_class is ServiceClass.BE
        both_best_effort = best_effort and producer.service_class is ServiceClass.BE
        if producer.rank > state.rank and not both_best_effort:
            return False
        if best_effort or self._prefill_seconds is None:
            return True
        if deadline_key(producer) < deadline_key(state):
            return True
        until = match.num_tokens + match.num_producing
        done = producer.num_computed_tokens
        wait_s = self._prefill_seconds(max(1, until - done), done)
        rest_s = self._prefill_seconds(len(state.token_ids) - until, until)
        if self._now + _WAIT_MARGIN * (wait_s + rest_s) <= state.deadline_s:
            return True
        # A request that would be late on its own, too, loses less by waiting.
        alone_s = self._prefill_seconds(state.remaining, state.num_computed_tokens)
        return self._now + alone_s > state.deadline_s

    def may_start(self, state: RequestState) -> bool:
        """False if `reserve` will refuse a request that holds no memory, whatever its tokens; sets
        `refusal`."""
        reason = self._why_not(state)
        self.refusal = reason or "memory"
        return reason is None

    def _why_not(self, state: RequestState) -> str | None:
        """Why a request that holds no memory may not start; None if it may."""
        behind, best_effort = self._is_behind(state), state.service_class is ServiceClass.BE
        if self._refused is not None:
            spared = not (best_effort or behind) and self._is_behind(self._refused)
            if not spared:
                return "memory"
        free_rows = self._free_rows[state.service_class]
        if behind and self._has_real_time:
            return None if free_rows > self._kept_rows else SHARE
        if best_effort and self._owes_best_effort and not self._has_best_effort:
            return None
        return None if free_rows > 0 else "rows"

    def _is_behind(self, state: RequestState) -> bool:
        if not self._behind or state.service_class is ServiceClass.BE:
            return False
        return state.request.tenant in self._behind

    def _effective_rank(self, state: RequestState) -> Rank:
        """Its rank, where real-time requests of tenants that are behind come after all others."""
        if not self._behind:
            return state.rank
        *first, last = state.rank
        return (*first, self._is_behind(state), last)

    def reserve(self, state: RequestState, num_tokens: int) -> bool:
        """Allocate the next `num_tokens` tokens, and restore missing ones; False if they do not
        fit."""
        self.refusal = "memory"
        if not state.running:
            return self._admit(state, num_tokens)
        if state.suspended is not None:
            segments = self._kv.segments_before(state.request_id, state.num_computed_tokens)
            self.granted[state.request_id] = segments, state.suspended.slots[:num_tokens]
            return True
        if self.losses and state.request_id in self.losses:
            return False
        return self._append(state, num_tokens)

    def reserve_rows(self, states: Sequence[RequestState]) -> int:
        """`reserve` one token for each of these decode rows, which have no missing ones, in order;
        returns for how many.

        Stops before the first row that does not fit, and after the first one that preempts.
        """
        kv, granted = self._kv, self.granted
        self.refusal = "memory"
        ids = [state.request_id for state in states]
        if self.losses:
            preempted = (index for index, name in enumerate(ids) if name in self.losses)
            del ids[next(preempted, len(ids)) :]
        count = 0
        while True:
            count = kv.append_rows(ids, count, granted)
            if count == len(ids):
                return count
            state = states[count]
            one = kv.append(ids[count], 1, state.side, partial(self._victim_ids, state))
            if one is None:
                return count
            granted[ids[count]] = one
            count += 1
            if self._note_losses(state):
                return count

    def may_cancel(self, state: RequestState) -> bool:
        """Whether its reservation preempted no tokens, so that it can be canceled."""
        return state.request_id not in self._preemptors

    def cancel(self, state: RequestState) -> None:
        """Cancel a reservation. Tokens that were restored for it stay."""
        del self.granted[state.request_id]
        self._kv.truncate(state.request_id, state.num_computed_tokens)
        state.num_missing = 0

    def _append(self, state: RequestState, num_tokens: int) -> bool:
        victims = partial(self._victim_ids, state)
        granted = self._kv.append(state.request_id, num_tokens, state.side, victims, state.match)
        if granted is None:
            return False
        self.granted[state.request_id] = granted
        self.restored[state.service_class] += state.num_missing
        self._note_losses(state)
        return True

    def _victim_ids(self, state: RequestState) -> Iterator[str]:
        """The ids of its victims. What is suspended of those that are taken is dropped first: only
        whole KV is preempted."""
        for victim in self._victims(state):
            if victim.suspended is not None:
                self._drop(victim)
            yield victim.request_id

    def _note_losses(self, preemptor: RequestState) -> bool:
        """Add what its reservation has preempted to `losses`; False if that is nothing."""
        found = self._kv.take_losses()
        if not found:
            return False
        self._preemptors.add(preemptor.request_id)
        for name, lost in found.items():
            total = self.losses.setdefault(name, Loss())
            total.tokens += lost.tokens
            total.copied += lost.copied
            self.num_copied += lost.copied
        return True

    def _admit(self, state: RequestState, num_tokens: int) -> bool:
        """Reserve for a new request, if its whole prompt fits; after a refusal none is admitted."""
        if not self.may_start(state):
            return False
        if not (
            self._fits_with_growth(state)
            and self._can_get(state, -(-state.remaining // self._kv.block_size))
            and self._append(state, num_tokens)
        ):
            self._refused = state
            return False
        for service_class in {state.service_class, ServiceClass.BE}:
            self._free_rows[service_class] -= 1
        self._new_requests.append(self._growth_of(state))
        self._has_best_effort |= state.service_class is ServiceClass.BE
        return True

    def _can_get(self, state: RequestState, blocks: int) -> bool:
        """Whether a request can get so many blocks: free ones, and all those of its victims."""
        side = state.side if self._has_best_effort else Side.LEFT
        free = self._kv.num_available_blocks(side, state.match)
        if free < blocks:
            free += self._kv.blocks_without(victim.request_id for victim in self._victims(state))
        return free >= blocks

    def _victims(self, state: RequestState) -> Iterator[RequestState]:
        """Requests that a request may preempt, the last one first; none that is in this step.

        Ablation: overload, attainment -12 points if new requests preempt none, throughput -2 % if
        late ones do not spare others; full memory, throughput -10 % if the oldest is the first
        victim.
        """
        is_new_request = not state.running
        if is_new_request and not self._new_requests_preempt:
            return
        spares_rt = is_new_request and state.late
        rank = self._effective_rank(state)
        for victim in self._victims_by_rank:
            if self._effective_rank(victim) <= rank:
                return
            is_spared = spares_rt and victim.service_class is ServiceClass.RT
            if is_spared and self._is_behind(victim) == self._is_behind(state):
                return
            if victim.request_id not in self.granted:
                yield victim

    def _fits_with_growth(self, state: RequestState) -> bool:
        if self._expected_tokens is None or state.service_class is ServiceClass.RT:
            return True
        if not self._runs_best_effort:
            return True
        holders = [*self._growth, *self._new_requests, self._growth_of(state)]
        needed = peak_tokens(holders) / self._kv.block_size + _SPARE_BLOCKS * len(holders)
        return needed <= self._kv.num_blocks - self._kv.num_kept_blocks

    @functools.cached_property
    def _growth(self) -> list[tuple[int, int]]:
        """`_growth_of` those that hold memory before this step."""
        return [self._growth_of(state) for state in self._running]

    def _growth_of(self, state: RequestState) -> tuple[int, int]:
        """(private tokens once its prompt is computed, tokens to come after that)"""
        expected = self._expected_tokens(state) if self._expected_tokens else 0
        if state.running:
            shared = self._kv.num_shared_tokens(state.request_id)
        else:
            shared = state.match.num_tokens
        return state.num_computed_tokens + state.remaining - shared, expected
