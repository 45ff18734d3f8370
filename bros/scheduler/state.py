"""What the scheduler remembers about one request."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from bros.core.interfaces import RequestTrace
from bros.core.plan import PENDING, SampleSpec
from bros.core.request import EngineRequest, FinishReason, ServiceClass, Slo
from bros.kvcache.blocks import Side
from bros.kvcache.prefix_cache import extend_keys
from bros.kvcache.sharing import NO_MATCH
from bros.scheduler.metrics import BlockedTime, RequestRecord

Rank = tuple[float, ...]
"""Position in an order: lower is first."""


SIDES: Mapping[ServiceClass, Side] = MappingProxyType(
    {ServiceClass.RT: Side.LEFT, ServiceClass.BE: Side.RIGHT}
)
"""Where requests of a class grow in blocks."""

_MAX_GAP = 1.5
"""Longest time to the next token that is planned for, in objectives; see paced_deadline_s."""


def due_from_s(request: EngineRequest, now: float) -> float:
    """From when its next token is due, if it comes now: from when this engine was asked for it."""
    return now if request.resumed else arrived_s(request, now)


def arrived_s(request: EngineRequest, now: float) -> float:
    """When it arrived, by its own account; now if it gives none, or one in the future."""
    return min(request.arrival_s, now) or now


class RequestState:
    """One request from submission to its last token.

    token_ids   [ prompt .................... | output so far ]     also what another engine gave
    num_cached  [ computed ........... )        while it waits: by others, and still in the cache
    num_missing   how many of these are not in KV memory, and have to come back first
    num_reused    how many of the prompt were there when it began; None before
    remaining                          [ to compute .......... )   then a token is sampled

    While a step runs that samples a token for it, and the next one is planned, the last of
    token_ids is PENDING, and counts as any other.

    running: it holds KV memory. rank: who keeps that longer; the same while its class is.
    queue_key: place among the waiting requests of its class. deadline_s: when the token after
    `remaining` is due, in clock seconds; moved by every token, and by the policy once it is lost
    (`late`). These three belong to the policy. match: what of its prompt was found in the cache
    last.
    needs_history: its tokens are chosen by those before, which have to be known for that.
    samples: tokens are chosen for it; False if it is prefill-only, when it ends as soon as no token
    is `remaining`.
    early: an early prefill, see Hints.
    """

    __slots__ = (
        "arrival_index",
        "deadline_s",
        "early",
        "late",
        "match",
        "max_length",
        "needs_history",
        "num_cached",
        "num_missing",
        "num_reused",
        "prefix_keys",
        "prompt_len",
        "queue_key",
        "rank",
        "record",
        "request",
        "request_id",
        "running",
        "samples",
        "seed",
        "service_class",
        "side",
        "slo",
        "stop_ids",
        "token_ids",
    )

    def __init__(
        self,
        request: EngineRequest,
        *,
        service_class: ServiceClass,
        slo: Slo,
        now: float,
        arrival_index: int,
        seed: int,
        max_length: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        """slo: the request's objectives with the defaults of its class filled in."""
        params = request.sampling
        self.request = request
        self.samples = not request.prefill_only
        self.early = request.prefill_only and request.hints.early
        self.needs_history = self.samples and params.needs_history
        self.request_id = request.request_id
        self.service_class = service_class
        self.side = SIDES[service_class]
        self.slo = slo
        self.arrival_index = arrival_index
        self.seed = seed
        self.token_ids = array("i", request.prompt_token_ids)
        self.prompt_len = len(self.token_ids) - request.resumed
        self.num_cached = 0
        self.num_missing = 0
        self.num_reused: int | None = None
        self.running = False
        self.match = NO_MATCH
        self.prefix_keys: list[bytes] = []
        self.rank: Rank = (arrival_index,)  # until a policy has its say
        self.queue_key: Rank = self.rank
        self.late = False
        self.record = RequestRecord(arrived_s(request, now), slo, request.resumed, now)
        self.deadline_s = self.record.due_s
        most = (params.max_tokens or max_length) if self.samples else 0
        self.max_length = min(self.prompt_len + most, max_length)
        eos = frozenset() if params.ignore_eos else eos_token_ids
        self.stop_ids = eos.union(params.stop_token_ids)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_cached

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_pending(self) -> bool:
        """Whether its last token is still to come out of a step that runs."""
        return self.token_ids[-1] == PENDING

    def keys(self, block_size: int, num_tokens: int) -> list[bytes]:
        """Of the full blocks among its first `num_tokens` tokens, see kvcache/prefix_cache.py.

        All of these have to be known.
        """
        count = num_tokens // block_size
        known = self.prefix_keys
        if count > len(known):
            request, hints = self.request, self.request.hints
            extend_keys(
                known, self.token_ids, block_size, count, request.cache_salt,
                hints.private_from, hints.private_salt,
            )  # fmt: skip
        return known if count == len(known) else known[:count]

    @property
    def num_known(self) -> int:
        """Of a request that has ended, how many of its tokens were computed."""
        return len(self.token_ids) - self.samples

    def relegate(self, service_class: ServiceClass, slo: Slo) -> None:
        """Serve a request that has not been queued yet as another class than it asked for."""
        self.service_class = service_class
        self.side = SIDES[service_class]
        self.slo = slo
        self.record.hold_to(slo)
        self.deadline_s = self.record.due_s

    def promote(self, slo: Slo, now: float) -> None:
        """Serve a best-effort request as real-time; slo: its objectives from now on.

        The policy has to place it anew. What it holds in KV memory grows where it grew before.
        """
        self.service_class = ServiceClass.RT
        self.side = SIDES[ServiceClass.RT]
        self.slo = slo
        self.record.hold_from(now, slo)
        self.late = False
        self.deadline_s = self.record.due_s

    def trace(
        self, blocked: Mapping[str, float] | None, finish_reason: FinishReason | None
    ) -> RequestTrace:
        """blocked: BlockedTime.so_far of its class, if it is waiting right now."""
        return self.record.trace(
            self.request_id,
            service_class=self.service_class,
            requested_class=self.request.service_class,
            slo=self.slo,
            prompt_tokens=self.prompt_len,
            blocked=blocked,
            finish_reason=finish_reason,
        )

    def sample_spec(self) -> SampleSpec:
        """How to choose the token after everything computed so far."""
        params, num_outputs = self.request.sampling, len(self.token_ids) - self.prompt_len
        return SampleSpec(
            params,
            self.seed,
            num_outputs,
            self.prompt_len,
            self.token_ids[:] if self.needs_history else (),
            tuple(self.stop_ids) if num_outputs < params.min_tokens else (),
        )

    def expect_output(self, at_s: float) -> None:
        """A step that runs samples a token for it, which will be there at `at_s`: plan with it."""
        assert not self.needs_history, "its tokens have to be known first"
        self.token_ids.append(PENDING)
        self.late = False
        self.deadline_s = self.paced_deadline_s(_MAX_GAP, at_s)

    def add_output(self, token_id: int, now: float) -> FinishReason | None:
        """Take in a token sampled at `now`; says why the request is finished, if it is."""
        tokens = self.token_ids
        if tokens[-1] == PENDING:
            tokens[-1] = token_id
        else:
            tokens.append(token_id)
        if self.running:  # else it has to start over meanwhile, and has a deadline for that
            self.late = False
            self.deadline_s = self.paced_deadline_s(_MAX_GAP)
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.max_length else None

    def paced_deadline_s(self, max_gap: float, last_s: float | None = None) -> float:
        """An interval after the last token, or later if the request is ahead of its mean pace.

        The objective is the mean time between tokens. A request that is ahead of it may be
        kept waiting for another's prompt, but never for more than `max_gap` intervals.
        last_s: when the last token is expected, if it is still to come.
        """
        interval_s, record = self.slo.tpot_s, self.record
        first_s = record.pace_from_s
        if last_s is None:
            last_s = record.last_token_s
        elif first_s is None:
            first_s = last_s
        if interval_s is None or first_s is None or last_s is None:
            return self.deadline_s  # of a first token, of a whole best-effort request, or none
        on_pace_s = first_s + (len(self.token_ids) - self.prompt_len) * interval_s
        return max(last_s + interval_s, min(on_pace_s, last_s + max_gap * interval_s))


# ---- Where requests stand: holding KV memory, or waiting for it by class.


class Queues:
    """running: hold KV memory, sorted by rank. waiting: hold none, by class, sorted by queue_key.

    Both keys end with something unique, so that a request is found by bisection.
    """

    def __init__(self) -> None:
        self._running: list[RequestState] = []
        self._waiting: dict[ServiceClass, list[RequestState]] = {cls: [] for cls in ServiceClass}
        self.blocked = BlockedTime()

    @property
    def running(self) -> list[RequestState]:
        """Not a copy: to be read only."""
        return self._running

    @property
    def waiting(self) -> Mapping[ServiceClass, list[RequestState]]:
        """Not copies: to be read only."""
        return self._waiting

    def running_of(self, service_class: ServiceClass) -> list[RequestState]:
        """Those of one class, sorted by rank."""
        return [state for state in self._running if state.service_class is service_class]

    def enqueue(self, state: RequestState) -> None:
        """A request that holds no memory starts to wait."""
        bisect.insort(self._waiting[state.service_class], state, key=_queue_key)
        state.record.queued(self.blocked.so_far(state.service_class))

    def requeue(self, state: RequestState, key: Rank) -> None:
        """Move a waiting request to another place in its queue."""
        queue = self._waiting[state.service_class]
        del queue[_index(queue, state, _queue_key)]
        state.queue_key = key
        bisect.insort(queue, state, key=_queue_key)

    def start(self, state: RequestState) -> None:
        """From waiting to running."""
        queue = self._waiting[state.service_class]
        del queue[_index(queue, state, _queue_key)]
        state.record.dequeued(self.blocked.so_far(state.service_class))
        state.running = True
        bisect.insort(self._running, state, key=rank_key)

    def stop(self, state: RequestState) -> None:
        """From running back to waiting."""
        del self._running[_index(self._running, state, rank_key)]
        state.running = False
        self.enqueue(state)

    def remove(self, state: RequestState) -> None:
        """A request leaves for good."""
        if state.running:
            del self._running[_index(self._running, state, rank_key)]
            return
        queue = self._waiting[state.service_class]
        del queue[_index(queue, state, _queue_key)]
        state.record.dequeued(self.blocked.so_far(state.service_class))

    def put_back(self, state: RequestState) -> None:
        """A request that was removed is back, with another class, rank and queue_key."""
        if state.running:
            bisect.insort(self._running, state, key=rank_key)
        else:
            self.enqueue(state)

    def __iter__(self) -> Iterator[RequestState]:
        return itertools.chain(self._running, *self._waiting.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues are sorted and requests where they belong."""
        assert all(a.rank < b.rank for a, b in itertools.pairwise(self._running)), "not sorted"
        assert all(state.running and state.num_cached > 0 for state in self._running)
        for service_class, queue in self._waiting.items():
            assert all(a.queue_key < b.queue_key for a, b in itertools.pairwise(queue))
            assert not any(state.running for state in queue)
            assert all(state.service_class is service_class for state in queue)


def rank_key(state: RequestState) -> Rank:
    """The order of `Queues.running`, for merging sorted queues."""
    return state.rank


def section(state: RequestState) -> float:
    """The part of its waiting queue that a policy has put it in, if its keys begin with one."""
    return state.queue_key[0]


def by_deadline(states: Iterable[RequestState]) -> list[RequestState]:
    """Sorted by absolute deadline, and by rank where that is equal."""
    return sorted(states, key=deadline_key)


def deadline_key(state: RequestState) -> tuple[float, Rank]:
    """The order of `by_deadline`, for merging sorted queues."""
    return state.deadline_s, state.rank


def _index(
    queue: list[RequestState], state: RequestState, key: Callable[[RequestState], Rank]
) -> int:
    index = bisect.bisect_left(queue, key(state), key=key)
    assert queue[index] is state
    return index


def _queue_key(state: RequestState) -> Rank:
    return state.queue_key
