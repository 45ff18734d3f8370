"""The scheduler's state of one request, and the running and waiting queues."""

from __future__ import annotations

import bisect
import itertools
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from bros.core.interfaces import GrammarState, RequestTrace, StopRule
from bros.core.plan import PENDING, Kept, Readout, SampleSpec
from bros.core.request import EngineRequest, FinishReason, Pooling, ServiceClass, Slo
from bros.kvcache.blocks import Side
from bros.kvcache.prefix_cache import extend_keys
from bros.kvcache.sharing import NO_MATCH
from bros.scheduler.metrics import BlockedTime, RequestRecord

Rank = tuple[float, ...]
"""Position in an order: lower is first."""


SIDES: Mapping[ServiceClass, Side] = MappingProxyType(
    {ServiceClass.RT: Side.LEFT, ServiceClass.BE: Side.RIGHT}
)
"""The side of a block on which requests of a class grow."""


def arrival_s(request: EngineRequest, now: float) -> float:
    """The request's own arrival time; `now` if it has none, or one in the future."""
    return min(request.arrival_s, now) or now


@dataclass(slots=True)
class Suspended:
    """The next tokens of a request, which were in a suspended step.

    kept: what the executor keeps of them.
    slots: of each of them, as in the plan that was suspended; its request still has them.
    done: share of the layers that are computed, see suspended.share_done.
    seconds: their part of the time of the suspended steps.
    after: the tokens after these, if they are kept before another layer, or were left when a step
        that continued these was suspended.
    """

    kept: Kept
    slots: array[int]
    done: float
    seconds: float
    after: Suspended | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def total_tokens(self) -> int:
        """Of these, and of all after them."""
        return sum(each.num_tokens for each in self)

    def __iter__(self) -> Iterator[Suspended]:
        """These, and all after them."""
        found: Suspended | None = self
        while found is not None:
            yield found
            found = found.after


class RequestState:
    """One request from submission to its last token.

        token_ids             [ prompt .................... | output so far ]
        num_computed_tokens   [ computed ........... )
        remaining                                    [ to compute .......... )  -> sample

    The output includes the tokens of a resumed request that another engine generated. If the next
    step is planned while a step samples a token for this request, the last of token_ids is PENDING
    and counts like any other.

    num_computed_tokens: computed tokens; of a waiting request, those found in the prefix cache.
    num_missing: computed tokens that were preempted and must be restored first.
    num_reused: prompt tokens that were cached when it began; None before that.
    running: it holds KV memory.
    rank: requests with a lower rank may preempt it; constant within a class. Set by the policy.
    queue_key: order among the waiting requests of its class. Set by the policy.
    deadline_s: when the token after `remaining` is due, in clock seconds. Each token moves it; the
        policy moves it once it has passed.
    late: the first deadline of the next token has passed; deadline_s may be a later one.
    match: result of its last look-up in the prefix cache.
    needs_history: sampling needs the token ids before, so none of them may be PENDING.
    plain_spec: how to sample any of its tokens; None if that differs, see `sample_spec`, or if it
        generates none.
    patient: its first token is not waited for: it is a member of a task group, of which only the
        end of the last member counts.
    samples: False if it generates no token: it ends when no token is `remaining`.
    num_read: the first position that is still to be read, see plan.Readout.
    read_end: one more than the last position to read; 0 if none is.
    stop_rule: where its output may end, for its grammar; None without a grammar or an EOS token.
    early: it is an early prefill, see Hints.
    grammar: how far its output has got in its grammar; None without one, see `follow`.
    unsent: the first tokens of the output, which the grammar forced before any was sampled. They
        are computed with the prompt, and sent with the first sampled token.
    ignored_step: number of a running step whose sample is ignored, because the grammar has forced
        another token in its place; 0: there is none.
    suspended: its next tokens, if they were in a step that was suspended. Its next chunk consists
        of them, or of the first of them.
    """

    __slots__ = (
        "arrival_index",
        "deadline_s",
        "early",
        "grammar",
        "ignored_step",
        "late",
        "match",
        "max_length",
        "needs_history",
        "num_computed_tokens",
        "num_missing",
        "num_read",
        "num_reused",
        "patient",
        "plain_spec",
        "prefix_keys",
        "prompt_len",
        "queue_key",
        "rank",
        "read_end",
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
        "stop_rule",
        "suspended",
        "token_ids",
        "unsent",
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
        self.samples = request.samples
        self.patient = request.patient
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
        self.plain_spec: SampleSpec | None = None
        if self.samples and not (self.needs_history or params.min_tokens or params.grammar):
            self.plain_spec = SampleSpec(params, seed, self.prompt_len)
        self.num_computed_tokens = 0
        self.num_missing = 0
        self.num_read, self.read_end = _positions_to_read(request, self.prompt_len)
        self.num_reused: int | None = None
        self.running = False
        self.match = NO_MATCH
        self.prefix_keys: list[bytes] = []
        self.rank: Rank = (arrival_index,)  # until Policy.assign_rank
        self.queue_key: Rank = self.rank
        self.late = False
        self.record = RequestRecord(arrival_s(request, now), slo, request.resumed, now)
        self.deadline_s = self.record.due_s
        most = (params.max_tokens or max_length) if self.samples else 0
        self.max_length = min(self.prompt_len + most, max_length)
        # With a grammar, these are sampled only where it is complete, or where nothing can follow.
        eos = frozenset() if params.ignore_eos and not params.grammar else eos_token_ids
        self.stop_ids = eos.union(params.stop_token_ids)
        self.stop_rule: StopRule | None = None
        if params.grammar is not None and eos_token_ids:
            stops = frozenset(params.stop_token_ids) if params.ignore_eos else self.stop_ids
            self.stop_rule = StopRule(stops, params.min_tokens, min(eos_token_ids))
        self.grammar: GrammarState | None = None
        self.unsent: Sequence[int] = ()
        self.ignored_step = 0
        self.suspended: Suspended | None = None

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_pending(self) -> bool:
        """Whether a running step samples its last token."""
        return self.token_ids[-1] == PENDING

    @property
    def num_reusable(self) -> int:
        """How many of its first tokens need no hidden states, so that cached KV will do."""
        return self.num_read if self.num_read < self.read_end else len(self.token_ids) - 1

    def readout(self, start: int, end: int) -> Readout | None:
        """What to read of the hidden states of tokens [start, end)."""
        first, last = max(start, self.num_read), min(end, self.read_end)
        if first >= last:
            return None
        request, rows = self.request, (first - start, last - start)
        if request.pooling is not None:
            return Readout(*rows, pooling=request.pooling, second_from=request.second_from)
        top = request.sampling.prompt_logprobs
        assert top is not None
        return Readout(*rows, self.token_ids[first + 1 : last + 1], top)

    def keys(self, block_size: int, num_tokens: int) -> list[bytes]:
        """Keys of the full blocks among its first `num_tokens` tokens, see kvcache/prefix_cache.py.

        None of these tokens may be PENDING.
        """
        count = num_tokens // block_size
        known = self.prefix_keys
        if count > len(known):
            request, hints = self.request, self.request.hints
            extend_keys(
                known, self.token_ids, block_size, count, request.kv_salt,
                hints.private_from, hints.private_salt, request.public_tokens,
            )  # fmt: skip
        return known if count == len(known) else known[:count]

    def serve_as(self, service_class: ServiceClass, slo: Slo, since_s: float) -> None:
        """Serve it as another class. slo: its objectives, which hold from `since_s` on.

        If it is enqueued, the policy has to place it again. Its KV keeps growing on the side where
        it began.
        """
        self.service_class = service_class
        self.side = SIDES[service_class]
        self.slo = slo
        self.record.reset_objectives(since_s, slo)
        self.late = False
        self.deadline_s = self.record.due_s

    def tighten(self, slo: Slo, now: float) -> None:
        """Hold it to these objectives, none of which is looser than before. If it waits, the policy
        has to place it again, unless it is late."""
        self.record.tighten_objectives(now, self.slo, slo)
        self.slo = slo
        if not self.late:  # else its deadline has been renewed, and it cannot be on time any more
            self.deadline_s = min(self.deadline_s, self.record.due_s)

    def trace(
        self, blocked: Mapping[str, float] | None, finish_reason: FinishReason | None
    ) -> RequestTrace:
        """blocked: BlockedTime.so_far of its class and tenant, if it is waiting right now."""
        record, is_real_time = self.record, self.service_class is ServiceClass.RT
        return RequestTrace(
            request_id=self.request_id,
            tenant=self.request.tenant,
            service_class=self.service_class,
            requested_class=self.request.service_class,
            slo=self.slo,
            prompt_tokens=self.prompt_len,
            output_tokens=record.num_tokens,
            events=tuple((at - record.arrival_s, what) for at, what in record.events),
            waits=record.waits_so_far(blocked),
            ttft_s=record.ttft_s,
            tpot_s=record.tpot_s,
            longest_gap_s=record.longest_gap_s,
            slowdown=record.slowdown if is_real_time else None,
            late_tokens=record.late_tokens,
            preemptions=record.preemptions,
            finish_reason=finish_reason,
        )

    def follow(self, grammar: GrammarState) -> None:
        """Let the output, which may have resumed tokens, match a grammar from now on.

        The tokens that it forces first need not be sampled. One place is left, so that the request
        ends with a sampled token like any other.
        """
        assert self.stop_rule is not None
        self.grammar = grammar
        tokens = self.token_ids
        forced = grammar.advance(tokens[self.prompt_len :], self._most_forced(1))
        ends = bool(forced) and forced[-1] == self.stop_rule.end
        self.unsent = forced[:-1] if ends else forced
        tokens.extend(self.unsent)

    def _most_forced(self, kept: int) -> int:
        """Most tokens that the grammar may force now; `kept` places are left free."""
        if self.request.sampling.logprobs is not None:
            return 0  # those of each token are asked for
        return max(0, self.max_length - len(self.token_ids) - kept)

    def advance(self, token_id: int, step: int) -> tuple[Sequence[int], FinishReason | None]:
        """Let the grammar advance over the token that was added last. Returns the tokens that it
        forces after it, which are added too, and why the request is finished by them.

        step: number of the latest step. Raises ValueError if the grammar cannot go on.
        """
        assert self.grammar is not None and self.stop_rule is not None
        forced = self.grammar.advance((token_id,), self._most_forced(0))
        if not forced:
            return (), None
        if self.remaining == 0:  # the latest step runs, and samples the first of them
            self.ignored_step = step
        self.token_ids.extend(forced)
        if self.running:
            self.deadline_s = self.paced_deadline_s()
        if forced[-1] == self.stop_rule.end:
            return forced, FinishReason.STOP
        return forced, FinishReason.LENGTH if len(self.token_ids) >= self.max_length else None

    def sample_spec(self) -> SampleSpec:
        """How to sample the token after all computed tokens, if there is no `plain_spec`."""
        params, num_outputs = self.request.sampling, len(self.token_ids) - self.prompt_len
        history = self.token_ids[:] if self.needs_history else ()
        forbidden: tuple[int, ...] = ()
        constraint = None
        if self.grammar is not None:
            constraint = self.grammar.constraint(int(self.is_pending))
        elif num_outputs < params.min_tokens:
            forbidden = tuple(self.stop_ids)
        return SampleSpec(params, self.seed, self.prompt_len, history, forbidden, constraint)

    def expect_output(self, at_s: float) -> None:
        """Append PENDING for the token that a running step will sample, at `at_s` seconds."""
        assert not self.needs_history, "sampling needs the token ids before"
        self.token_ids.append(PENDING)
        self.late = False
        self.deadline_s = self.paced_deadline_s(at_s)

    def add_output(self, token_id: int) -> FinishReason | None:
        """Append a sampled token, which `record` has; returns why the request is finished, None if
        not."""
        tokens = self.token_ids
        if tokens[-1] == PENDING:
            tokens[-1] = token_id
        else:
            tokens.append(token_id)
        if self.running:  # else it lost its memory meanwhile and has a new deadline already
            self.late = False
            # If a running step computes this token already, the next plan comes after
            # `expect_output`, or after the step's own token where that cannot be expected.
            if self.num_computed_tokens < len(tokens):
                self.deadline_s = self.paced_deadline_s()
        if token_id in self.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(tokens) >= self.max_length else None

    def paced_deadline_s(self, last_s: float | None = None) -> float:
        """Deadline of the next token: a TPOT after the last one, or later if ahead of the pace.

        TPOT is a mean. A request that is ahead of it may wait for the prompt of another request,
        but for no longer than its gap objective.

        last_s: when the last token is expected, if a running step samples it.
        """
        slo, record = self.slo, self.record
        interval_s, first_s = slo.tpot_s, record.pace_from_s
        if last_s is None:
            last_s = record.last_token_s
        elif first_s is None:
            first_s = last_s
        if interval_s is None or first_s is None or last_s is None:
            return self.deadline_s  # of the first token or of a best-effort request, or infinite
        # Without min and max, which would take most of the time, twice for each row of a step.
        due_s, gap_s = last_s + interval_s, slo.gap_s
        on_pace_s = first_s + (len(self.token_ids) - self.prompt_len) * interval_s
        if on_pace_s > due_s:
            due_s = on_pace_s
        return due_s if gap_s is None or due_s < last_s + gap_s else last_s + gap_s


def _positions_to_read(request: EngineRequest, prompt_len: int) -> tuple[int, int]:
    """(first, end) of the positions of a prompt that are still to be read; end 0 if none are."""
    match request.pooling:
        case Pooling.LAST:
            return prompt_len - 1, prompt_len
        case Pooling.MEAN:
            return request.num_read, prompt_len
        case Pooling.FIRST | Pooling.SCORE:
            return 0, 1
    if request.sampling.prompt_logprobs is None:
        return 0, 0
    return request.num_read, prompt_len - 1


class Queues:
    """The running and the waiting requests. Only the methods change the lists.

    Ranks and queue keys are unique, so that bisection finds a request.

    running: requests that hold KV memory, sorted by rank.
    running_of: the same by class.
    waiting: requests that hold none, by class, sorted by queue_key.
    waiting_of: how many wait of each tenant with waiting requests, by class.
    open_of: how many wait or run of each tenant with such requests, by class.
    blocked: for how long each class and tenant has waited, by reason.
    """

    def __init__(self) -> None:
        self.running: list[RequestState] = []
        self.running_of: Mapping[ServiceClass, list[RequestState]] = {
            cls: [] for cls in ServiceClass
        }
        self.waiting: Mapping[ServiceClass, list[RequestState]] = {cls: [] for cls in ServiceClass}
        self.waiting_of: Mapping[ServiceClass, dict[str, int]] = {cls: {} for cls in ServiceClass}
        self.open_of: Mapping[ServiceClass, dict[str, int]] = {cls: {} for cls in ServiceClass}
        self.blocked = BlockedTime()

    def enqueue(self, state: RequestState) -> None:
        """Add a request that holds no memory to its waiting queue."""
        self._count(self.open_of, state, 1)
        self._enqueue(state)

    def _enqueue(self, state: RequestState) -> None:
        bisect.insort(self.waiting[state.service_class], state, key=_queue_key)
        self._count(self.waiting_of, state, 1)
        state.record.queued(self.blocked.so_far(state.service_class, state.request.tenant))

    def _dequeue(self, state: RequestState) -> None:
        queue = self.waiting[state.service_class]
        del queue[_index(queue, state, _queue_key)]
        self._count(self.waiting_of, state, -1)
        state.record.dequeued(self.blocked.so_far(state.service_class, state.request.tenant))

    def _count(
        self, counts: Mapping[ServiceClass, dict[str, int]], state: RequestState, change: int
    ) -> None:
        of_class, tenant = counts[state.service_class], state.request.tenant
        count = of_class.get(tenant, 0) + change
        if count:
            of_class[tenant] = count
        else:
            del of_class[tenant]

    def requeue(self, state: RequestState, key: Rank) -> None:
        """Move a waiting request within its queue."""
        queue = self.waiting[state.service_class]
        del queue[_index(queue, state, _queue_key)]
        state.queue_key = key
        bisect.insort(queue, state, key=_queue_key)

    def start(self, state: RequestState) -> None:
        """Move a request from waiting to running."""
        self._dequeue(state)
        state.running = True
        self._add_running(state)

    def stop(self, state: RequestState) -> None:
        """Move a request from running to waiting."""
        self._remove_running(state)
        state.running = False
        self._enqueue(state)

    def remove(self, state: RequestState) -> None:
        """Remove a request from its queue."""
        self._count(self.open_of, state, -1)
        if state.running:
            self._remove_running(state)
        else:
            self._dequeue(state)

    def put_back(self, state: RequestState) -> None:
        """Add a removed request again, after its class, rank and queue_key have changed."""
        if state.running:
            self._count(self.open_of, state, 1)
            self._add_running(state)
        else:
            self.enqueue(state)

    def _add_running(self, state: RequestState) -> None:
        for queue in (self.running, self.running_of[state.service_class]):
            bisect.insort(queue, state, key=rank_key)

    def _remove_running(self, state: RequestState) -> None:
        for queue in (self.running, self.running_of[state.service_class]):
            del queue[_index(queue, state, rank_key)]

    def __iter__(self) -> Iterator[RequestState]:
        return itertools.chain(self.running, *self.waiting.values())

    def check_integrity(self) -> None:
        """Raise AssertionError unless all queues are sorted and every request is in its own."""
        assert all(a.rank < b.rank for a, b in itertools.pairwise(self.running)), "not sorted"
        assert all(state.running for state in self.running)
        assert all(s.num_computed_tokens > 0 or s.suspended is not None for s in self.running)
        for service_class, queue in self.waiting.items():
            running = [s for s in self.running if s.service_class is service_class]
            assert self.running_of[service_class] == running
            assert all(a.queue_key < b.queue_key for a, b in itertools.pairwise(queue))
            assert not any(state.running for state in queue)
            assert all(state.service_class is service_class for state in queue)
            assert self.waiting_of[service_class] == Counter(s.request.tenant for s in queue)
            served = [s for s in self if s.service_class is service_class]
            assert self.open_of[service_class] == Counter(s.request.tenant for s in served)


rank_key = attrgetter("rank")
"""The order of `Queues.running`, for merging sorted queues."""

deadline_key = attrgetter("deadline_s", "rank")
"""The order of `by_deadline`, for merging sorted queues."""


def section(state: RequestState) -> float:
    """The section of the waiting queue that the policy has put the request in: the first element
    of its queue_key, under policies that have sections."""
    return state.queue_key[0]


def by_deadline(states: Iterable[RequestState]) -> list[RequestState]:
    """Sorted by absolute deadline, and by rank where that is equal. states: sorted by rank."""
    return sorted(states, key=_deadline)  # sorting is stable


def _index(
    queue: list[RequestState], state: RequestState, key: Callable[[RequestState], Rank]
) -> int:
    index = bisect.bisect_left(queue, key(state), key=key)
    assert queue[index] is state
    return index


_deadline = attrgetter("deadline_s")
_queue_key = attrgetter("queue_key")
