"""Real-time requests by deadline, best-effort requests in the time that is left.

Source: BROS sections 3.1-3.4 (Algorithm 1 is packing.py). Beyond the paper: steps are bounded
by predicted seconds instead of rows alone, late tokens get a new deadline, and best-effort work
has deadlines of its own and a guaranteed share.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bros.core.errors import OverloadedError
from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from bros.scheduler.packing import Bounds, Packing, Rules
from bros.scheduler.policies.base import Policy, Proposal
from bros.scheduler.policies.best_effort_order import BestEffortOrder, StartOrder
from bros.scheduler.state import (
    Queues,
    Rank,
    RequestState,
    by_deadline,
    deadline_key,
    rank_key,
    section,
)

# ---- In what order real-time requests run, and what becomes of a token whose deadline is lost.
#
#     waiting   on time | begun | late        sections of the queue, each by deadline
#     order     on time, begun and all that run, by deadline; then late
#     turns     one step in _TURN begins with the request that is late for longest, one with the
#               oldest begun
#
# Late first tokens wait behind those that can still be on time. A user who has a part of the
# answer
# already is reading it: when it was interrupted it gets a new deadline, and one more each time that
# is lost. But a request whose pace cannot be met is always due before it, so it has turns,
# too.


_ON_TIME, _BEGUN, _LATE = 0.0, 1.0, 2.0
"""Sections of the waiting real-time requests: begun are those that were interrupted, and have lost
the deadline that they got for that."""

_TURN = 8
"""Every so many steps, the request that has been late for longest goes before all others; and half
of that later the oldest of those that have begun."""


class UrgentOrder:
    """mode: renew (a lost deadline is followed by a new one), edf (it stays), or shed (drop
    requests whose first token is late). rows: most that run at once."""

    def __init__(self, mode: str, predictor: StepTimePredictor, rows: int) -> None:
        self._mode = mode
        self._predictor = predictor
        self._most = rows + 1  # one more, which then says why it waits

    def key(self, state: RequestState, now: float) -> Rank:
        """Place in the queue of a request that starts, or starts over."""
        if state.num_outputs and self._mode != "edf":
            self._give_time(state, now)  # it has lost its memory, and has to start over
        return (_ON_TIME, state.deadline_s, state.arrival_index)

    def renew(self, running: Sequence[RequestState], queues: Queues, now: float) -> None:
        """Find tokens whose deadline is lost; give them a new one, or mark them as late.

        The published algorithm ("edf") keeps the old deadline, so that under overload the
        latest token comes first and everybody is late. A first token that is late waits behind
        those that can still be on time; a running request gets a full interval anew.
        """
        if self._mode == "edf":
            return
        for state in running:
            if state.deadline_s < now:
                interval_s = state.slo.tpot_s if state.num_outputs else state.slo.ttft_s
                state.deadline_s = now + (interval_s or 0.0)
                state.late = True
        waiting = queues.waiting[ServiceClass.RT]
        for place in (_ON_TIME, _BEGUN):
            at = _start_of(place, waiting)
            while at < len(waiting) and section(waiting[at]) == place:
                state = waiting[at]
                if state.deadline_s >= now + self._predictor.prefill_seconds(state.remaining):
                    break
                state.late = True
                if state.num_outputs:
                    self._give_time(state, now)
                goes_to = _BEGUN if state.num_outputs else _LATE
                queues.requeue(state, (goes_to, state.deadline_s, state.arrival_index))

    def given_up(self, queues: Queues) -> Sequence[RequestState]:
        """Requests that are dropped; none whose answer has begun."""
        waiting = queues.waiting[ServiceClass.RT]
        return waiting[_start_of(_LATE, waiting) :] if self._mode == "shed" else ()

    def of(
        self, running: Sequence[RequestState], queues: Queues, step: int
    ) -> Iterable[RequestState]:
        """step: how many there have been."""
        waiting = queues.waiting[ServiceClass.RT]
        begins, ends = _start_of(_BEGUN, waiting), _start_of(_LATE, waiting)
        on_time = waiting[: min(begins, self._most)]
        begun, late = waiting[begins:ends], waiting[ends:]
        if self._mode == "shed":
            late = []
        first: list[RequestState] = []
        if late and step % _TURN == 0:
            first = [late.pop(0)]
        elif begun and step % _TURN == _TURN // 2:
            first = [min(begun, key=rank_key)]
            begun.remove(first[0])
        order: Iterable[RequestState] = by_deadline(running)
        if on_time or begun:
            order = heapq.merge(order, on_time, begun, key=deadline_key)
        return itertools.chain(first, order, late[: self._most]) if first or late else order

    def _give_time(self, state: RequestState, now: float) -> None:
        """A new deadline for a request that was interrupted: a user is reading its answer.

        It has to compute its prompt again, so it gets what that takes at the least.
        """
        least_s = 2.0 * self._predictor.prefill_seconds(state.remaining)
        state.deadline_s = now + max(state.slo.ttft_s or 0.0, least_s)
        state.late = True


def _start_of(place: float, waiting: Sequence[RequestState]) -> int:
    return bisect.bisect_left(waiting, place, key=section)


# ---- Whether a real-time request can be on time, asked once, when it arrives.
#
# backlog   prompts of real-time requests that wait and are still on time
# share     part of a step that decode rows of real-time requests leave to prompts
# place     when enough real-time requests have ended to leave a seat and KV memory for the backlog
#           and this one; best-effort requests do not count, they are preempted
#
# time to first token  ~  the later of (backlog + own prompt) / share and place + own prompt


_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 120.0
_MIN_SHARE = 0.05
_REFERENCE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Room:
    """What requests in progress share: seats in the batch, and tokens of KV memory.

    shared_tokens: of one request, that lie in blocks of the prefix cache.
    all_shared_tokens: in all such blocks.
    """

    seats: int
    kv_tokens: int
    shared_tokens: Callable[[RequestState], int] = lambda state: 0
    all_shared_tokens: Callable[[], int] = lambda: 0

    def held_by(self, states: Sequence[RequestState]) -> int:
        """KV tokens of these requests, where what they share counts once."""
        shared = sum(map(self.shared_tokens, states))
        own = sum(state.num_cached for state in states) - shared
        return own + min(shared, self.all_shared_tokens())


class OverloadGuard:
    """mode: late (serve it anyway), relegate (serve it as best-effort), reject (refuse it).

    expected_tokens: how many more tokens a request is likely to produce.
    """

    def __init__(
        self,
        mode: str,
        predictor: StepTimePredictor,
        room: Room,
        expected_tokens: Callable[[RequestState], int],
    ) -> None:
        self._mode = mode
        self._predictor = predictor
        self.room = room
        self._expected_tokens = expected_tokens

    def classify(
        self, state: RequestState, queues: Queues, step_s: float, now: float
    ) -> ServiceClass:
        """The class to serve a new request as. step_s: usual time of a step.

        Of a resumed request a user has read a part already: it keeps its class.
        Raises OverloadedError in mode "reject" if its objectives cannot be met.
        """
        if self._mode == "late" or state.service_class is ServiceClass.BE or state.num_outputs:
            return state.service_class
        missing_s = self._missing_s(state, queues, step_s, now)
        if missing_s <= 0.0:
            return ServiceClass.RT
        if self._mode == "relegate":
            return ServiceClass.BE
        retry_s = min(max(math.ceil(missing_s), _MIN_RETRY_S), _MAX_RETRY_S)
        raise OverloadedError(
            "The server is too busy to meet this request's time objectives; "
            f"retry in {retry_s:.0f} s, or use service_tier 'flex' to wait for a gap.",
            retry_s,
        )

    def _missing_s(self, state: RequestState, queues: Queues, step_s: float, now: float) -> float:
        """By how much the objectives would be missed; not positive if they would be met."""
        predictor, slo = self._predictor, state.slo
        decode = StepLoad()
        running = queues.running_of(ServiceClass.RT)
        for other in running:
            decode.add_row(other.num_cached)
        decode_s = predictor.safe_seconds(decode)
        if slo.tpot_s is not None:
            decode.add_row(state.prompt_len)
            if predictor.safe_seconds(decode) > slo.tpot_s:
                return predictor.safe_seconds(decode)
        if slo.ttft_s is None:
            return -math.inf
        share = max(1.0 - decode_s / (slo.tpot_s or slo.ttft_s), _MIN_SHARE)
        ahead = [
            other
            for other in queues.waiting[ServiceClass.RT]
            if not other.late and other.deadline_s <= state.deadline_s
        ]
        tokens = sum(other.remaining for other in ahead)
        tokens += sum(other.remaining for other in running if other.remaining > 1)
        own_s = predictor.prefill_seconds(state.remaining, state.num_cached)
        work_s = (self._prompts_s(tokens) + own_s) / share
        place_s = self._place_s([*ahead, state], running, max(step_s, decode_s))
        waited_s = now - state.record.arrival_s
        return waited_s + max(work_s, place_s + own_s) - slo.ttft_s

    def _place_s(
        self, new_requests: Sequence[RequestState], running: Sequence[RequestState], step_s: float
    ) -> float:
        """When the last of the new requests has a row and memory, if they get both in their order.

        Requests end when they have as many tokens as is usual; no other request arrives meanwhile.
        """
        seats = self.room.seats - len(running)
        room = self.room
        tokens = room.kv_tokens - room.held_by(running) - sum(s.remaining for s in running)
        ends = [
            (self._expected_tokens(s) * step_s, len(s.token_ids) - room.shared_tokens(s))
            for s in running
        ]
        heapq.heapify(ends)
        place_s = 0.0
        for state in new_requests:
            needed = state.remaining  # what is cached of it is there already
            while ends and (seats < 1 or tokens < needed):
                place_s, freed = heapq.heappop(ends)
                seats, tokens = seats + 1, tokens + freed
            seats, tokens = seats - 1, tokens - needed
            end_s = place_s + self._expected_tokens(state) * step_s
            heapq.heappush(ends, (end_s, needed))
        return place_s

    def _prompts_s(self, tokens: int) -> float:
        """Time for prompts that are computed together with others."""
        added_s = self._predictor.added_prefill_seconds(_REFERENCE_TOKENS)
        return tokens * added_s / _REFERENCE_TOKENS


# ---- How many rows the next step may have: TCP's congestion control, with steps for round trips.
#
#     rows
#       |               x          x  violation: a decode row is late because of the others.
#       |             _/|        _/|  The batch is halved (multiplicative decrease).
#       |           _/  |      _/  |
#       |         _/    |    _/    |  congestion avoidance: one more row per step
#       |        | first|___/      |_
#       |       _| violation
#       |     _|    slow start: doubling until the first violation
#    B0 |____|
#       +------------------------------- steps that were full
#
# Source: BROS section 3.4, where growth is one row per step throughout and a violation starts over
# at B0 ("additive"). B grows only when it was what ended the batch, else it would drift up while
# there is little to do. What a step can hold is first of all decided by its predicted time; B
# bounds the damage where the prediction is off. Starting over at B0 does more harm than that: with
# 260 requests running it makes most of them late, which is the next violation.


class AdaptiveBatchSize:
    """`rows` is what the next step may hold: B0 <= rows <= most."""

    def __init__(self, initial: int, most: int, growth: str = "tcp") -> None:
        """initial: B0. growth: "tcp" or "additive"."""
        self._initial = min(initial, most)
        self._most = most
        self._halves = growth == "tcp"
        self._slow_start = growth == "tcp"
        self.rows = self._initial
        self.resets = 0

    def settle(self, *, violated: bool, was_full: bool) -> None:
        """Take in what became of a step."""
        if violated:
            self._slow_start = False
            self.rows = max(self.rows // 2, self._initial) if self._halves else self._initial
            self.resets += 1
        elif was_full:
            self.rows = min(self.rows * 2 if self._slow_start else self.rows + 1, self._most)


_PRESSING, _OTHERS, _EARLY = 0.0, 1.0, 2.0
"""Sections of the waiting best-effort requests; the last one holds early prefills."""

_MAX_GAP, _MAX_GAP_BEHIND = 2.5, 1.5
"""Longest time between two tokens, in objectives, if a step is aborted for another request's first
token: of a request that is ahead of its mean pace, and of one that is not."""

_ABANDONED_SHARE, _MAX_ABANDONED_S = 0.03, 1.0
"""Most time that may go into aborted steps: share of all, and saved up."""

_MIN_GAIN = 0.2
"""Share of a step that must be left for it to be aborted."""

_RECENT, _USUAL, _LUCK = 64, 0.9, 1.25
"""Filler leaves time for a prompt that is longer than this share of the latest ones."""

_TBAR_ALPHA = 0.2
_TIGHT_FOR_S = 60.0
_INITIAL_ROWS = 8
_MAX_CREDIT_S = 2.0
_MAX_STALE = 64
_CROWDED_FROM, _CROWDED_TO = 0.6, 0.9
"""Share of KV memory with real-time requests in it, from which on best-effort work gets less time,
and at which it gets none: the longer their steps take, the longer they stay, and new requests
find no memory."""

_LAXITY = 1.5
"""A best-effort deadline is pressing when so many times the estimated work is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrosSettings:
    """The policy's options, see EngineConfig.

    ttft_s, tpot_s: objectives of usual requests.
    depth: steps in flight at once, which a new request has to wait for.
    """

    rows: int
    tokens: int
    ttft_s: float = 0.4
    tpot_s: float = 0.2
    rt_wait: float = 0.5
    be_share: float = 0.02
    be_max_wait_s: float = 30.0
    late: str = "renew"
    growth: str = "tcp"
    depth: int = 1
    rules: Rules = Rules()

    @property
    def usual_best_effort_s(self) -> float:
        """Longest step with best-effort work in it while objectives are the usual ones."""
        return self.rt_wait * self.ttft_s


class BrosPolicy(Policy):
    name = "bros"
    new_requests_preempt = True

    def __init__(
        self,
        settings: BrosSettings,
        predictor: StepTimePredictor,
        guard: OverloadGuard,
        expected_tokens: Callable[[RequestState], int],
        order: StartOrder | None = None,
    ) -> None:
        self._settings = settings
        self._predictor = predictor
        self._guard = guard
        self._expected_tokens = expected_tokens
        self._batch = AdaptiveBatchSize(_INITIAL_ROWS, settings.rows, settings.growth)
        self._tbar_s = 0.0
        self._credit_s = 0.0
        self._allowance_s = _MAX_ABANDONED_S
        self._steps = 0
        self._allowed_rows = self._batch.rows
        self._tight: deque[tuple[float, float]] = deque()  # (until, objective), both rising
        self._prompts: deque[int] = deque(maxlen=_RECENT)
        self._usual_prompt = 1
        self._known_deadlines = 0  # after the last clean-up
        self._deadlines: list[tuple[float, int, RequestState]] = []
        self._urgent = UrgentOrder(settings.late, predictor, settings.rows)
        self._order = order or BestEffortOrder(settings.be_max_wait_s)

    @property
    def predictor(self) -> StepTimePredictor:
        return self._predictor

    @property
    def expected_tokens(self) -> Callable[[RequestState], int]:
        return self._expected_tokens

    @property
    def batch_size(self) -> tuple[int, int]:
        return self._allowed_rows, self._batch.resets

    def classify(self, state: RequestState, queues: Queues, now: float) -> ServiceClass:
        return self._guard.classify(state, queues, self._tbar_s, now)

    def place(self, state: RequestState, now: float) -> None:
        """Real-time by deadline, best-effort as its StartOrder has it."""
        best_effort = state.service_class is ServiceClass.BE
        state.rank = (best_effort, state.arrival_index)
        if not best_effort:
            self._heed(state, now)
            state.queue_key = self._urgent.key(state, now)
            return
        state.queue_key = (_EARLY if state.early else _OTHERS, *self._order.key(state, now))
        if state.slo.deadline_s is not None:
            due_s = state.record.arrival_s + state.slo.deadline_s
            start_s = due_s - _LAXITY * self._work_s(state)
            if start_s >= state.record.arrival_s:  # else it was lost before it began
                heapq.heappush(self._deadlines, (start_s, state.arrival_index, state))
            if len(self._deadlines) > _MAX_STALE + 2 * self._known_deadlines:
                self._forget_ended()

    def propose(self, queues: Queues, now: float) -> Proposal:
        running = queues.running_of(ServiceClass.RT)
        self._urgent.renew(running, queues, now)
        self._press(queues, now)
        self._allowed_rows = self._rows(len(running))
        return Proposal(
            urgent=self._urgent.of(running, queues, self._steps),
            best_effort=self._best_effort(queues, now),
            bounds=Bounds(
                rows=self._allowed_rows,
                tokens=self._settings.tokens,
                best_effort_s=self._best_effort_s(running, now),
                best_effort_share=self._best_effort_share(running),
                best_effort_credit_s=self._due_credit_s(),
                tbar_s=self._tbar_s,
                rules=self._settings.rules,
            ),
            drop=self._urgent.given_up(queues),
        )

    def _rows(self, running: int) -> int:
        """The batch size bounds best-effort work and new requests, never answers that users read.

        With fewer rows than running real-time requests most of these would be late, each would be
        a violation, and the batch would never grow again.
        """
        rows, settings = self._batch.rows, self._settings
        if settings.rules.strict_rows:
            return rows
        return min(max(rows, running + _INITIAL_ROWS), settings.rows)

    @property
    def aborts_steps(self) -> bool:
        return self._settings.rules.aborts_steps

    def yields(
        self, packing: Packing[RequestState], began_s: float, tokens: int, due_s: float, now: float
    ) -> bool:
        """If the first token would be late after this step, would not be in a step that starts
        now, and no token that was to come from this step gets late by that; if there is
        something to gain, and not too often."""
        ends_s = max(began_s + packing.seconds, now)
        gain_s, loss_s = ends_s - now, now - began_s
        if gain_s < _MIN_GAIN * packing.seconds or loss_s > self._allowance_s:
            return False
        predictor = self._predictor
        load = StepLoad()
        urgent = packing.selected[: packing.num_urgent]
        for state, num_tokens in urgent:
            sampled = state.samples and state.remaining == 0
            load.add(num_tokens, state.num_cached - num_tokens, sampled)
        load.add(tokens, 0, True)
        if ends_s + predictor.safe_seconds(load) <= due_s:
            return False
        # A request that is late in any case, as its objective cannot be met, does not count.
        others = (_latest_s(state) for state, _ in urgent if not state.late)
        bounds = [due_s, *(latest_s for latest_s in others if latest_s >= ends_s)]
        return now + predictor.seconds(load) <= min(bounds)

    def aborted(self, packing: Packing[RequestState], seconds: float) -> None:
        for state, _ in packing.selected[: packing.num_urgent]:
            state.deadline_s = max(state.deadline_s, _latest_s(state))
        self._allowance_s = max(0.0, self._allowance_s - seconds)
        self._credit_s = min(self._credit_s + self._settings.be_share * seconds, _MAX_CREDIT_S)

    def settle(self, packing: Packing[RequestState], seconds: float, be_waits: bool) -> None:
        self._steps += 1
        self._allowance_s = min(self._allowance_s + _ABANDONED_SHARE * seconds, _MAX_ABANDONED_S)
        weight = _TBAR_ALPHA if self._tbar_s else 1.0
        self._tbar_s += weight * (seconds - self._tbar_s)
        self._batch.settle(violated=packing.violated, was_full=packing.full)
        if not be_waits and len(packing.selected) == packing.num_urgent:
            self._credit_s = 0.0
            return
        best_effort_s = max(packing.seconds - packing.urgent_s, 0.0)
        share = best_effort_s / packing.seconds if packing.seconds else 0.0
        self._credit_s += (self._settings.be_share - share) * seconds
        self._credit_s = min(max(self._credit_s, 0.0), _MAX_CREDIT_S)

    # Real-time

    def _heed(self, state: RequestState, now: float) -> None:
        """Note a prompt, and an objective that is tighter than usual: the next are not far.

        Unless it cannot be met in any case.
        """
        ttft_s = state.slo.ttft_s
        prefill_s = self._predictor.prefill_seconds(state.remaining)
        if ttft_s is None or ttft_s < prefill_s:
            return
        if ttft_s <= self._settings.ttft_s and not state.num_outputs:
            self._prompts.append(state.remaining)
            self._usual_prompt = sorted(self._prompts)[int(_USUAL * (len(self._prompts) - 1))]
        if ttft_s < prefill_s + self._tbar_s:
            return
        while self._tight and self._tight[-1][1] >= ttft_s:
            self._tight.pop()
        self._tight.append((now + _TIGHT_FOR_S, ttft_s))

    def _best_effort_s(self, running: Sequence[RequestState], now: float) -> float:
        """Longest step with best-effort work in it.

        No request waits longer for a token than the interval asked for, even if all are ahead of
        their pace: that lead is for first tokens. Follows the tightest recent objectives, and
        what prompts take on this machine, down to half of what is usual, so that no request can
        stop best-effort work by asking for the impossible.
        """
        settings = self._settings
        while self._tight and self._tight[0][0] < now:
            self._tight.popleft()
        wait_s = settings.usual_best_effort_s
        if self._tight:
            ttft_s = min(max(self._tight[0][1], settings.ttft_s / 2), settings.ttft_s)
            wait_s = settings.rt_wait * ttft_s
        wait_s = min(wait_s, max(self._wait_for_prompt_s(running), wait_s / 2)) / settings.depth
        intervals = (state.slo.tpot_s for state in running if state.slo.tpot_s is not None)
        return min(wait_s, max(min(intervals, default=wait_s), settings.tpot_s / 2))

    def _wait_for_prompt_s(self, running: Sequence[RequestState]) -> float:
        """Longest step that leaves enough of the usual objective for a new request's own step; a
        quarter more, as few arrive right at its beginning, and then it may be aborted."""
        load = StepLoad()
        load.add(self._usual_prompt, 0, True)
        contexts = [state.num_cached for state in running if state.remaining == 1]
        load.add_rows(len(contexts), sum(contexts))
        return _LUCK * (self._settings.ttft_s - self._predictor.safe_seconds(load))

    def _best_effort_share(self, running: Sequence[RequestState]) -> float:
        """How much of that best-effort work may use.

        When real-time requests fill the memory, new ones wait for their ends, and best-effort work
        puts these off.
        """
        room = self._guard.room
        used = room.held_by(running) / room.kv_tokens
        return min(max((_CROWDED_TO - used) / (_CROWDED_TO - _CROWDED_FROM), 0.0), 1.0)

    # Best-effort

    def chosen(self, packing: Packing[RequestState]) -> None:
        best_effort = packing.selected[packing.num_urgent :]
        self._order.started(s for s, _ in best_effort if not s.running and section(s) == _OTHERS)

    def _best_effort(self, queues: Queues, now: float) -> Iterator[RequestState]:
        """Decode rows, then what must start now, prompts that are nearly done, new requests."""
        running = queues.running_of(ServiceClass.BE)
        rows = [s for s in running if s.remaining == 1]
        rows.sort(key=lambda s: s.num_missing)  # requests that must be restored come later
        prompts = sorted((s for s in running if s.remaining > 1), key=lambda s: s.remaining)
        waiting, most = queues.waiting[ServiceClass.BE], self._settings.rows + 1
        pressing = min(most, bisect.bisect_left(waiting, _OTHERS, key=section))
        rest = self._order.first(waiting, pressing, most - pressing, now)
        return itertools.chain(rows, waiting[:pressing], prompts, rest)

    def _press(self, queues: Queues, now: float) -> None:
        """Move best-effort requests to the front that must start now to meet their deadline."""
        while self._deadlines and self._deadlines[0][0] <= now:
            start_s, _, state = heapq.heappop(self._deadlines)
            waits = not state.running and _has_deadline(state)
            if waits and section(state) == _OTHERS:
                queues.requeue(state, (_PRESSING, start_s, state.arrival_index))

    def _forget_ended(self) -> None:
        """Drop deadlines that nothing is to be done about any more; they may be days away."""
        self._deadlines = [entry for entry in self._deadlines if _has_deadline(entry[2])]
        heapq.heapify(self._deadlines)
        self._known_deadlines = len(self._deadlines)

    def _work_s(self, state: RequestState) -> float:
        """Time that a best-effort request is going to take, in steps of the longest kind."""
        step_s = max(self._tbar_s, self._settings.usual_best_effort_s)
        prompt_s = self._predictor.prefill_seconds(state.remaining)
        return prompt_s + self._expected_tokens(state) * step_s

    def _due_credit_s(self) -> float:
        """What best-effort work is owed, once that pays for a piece of a prompt.

        Paid in steps that are no longer than usual, however much has added up; unless a usual
        one has no room for a piece beside some rows, as with a small --rt-wait.
        """
        piece_s = self._predictor.added_prefill_seconds(self._settings.rules.min_chunk)
        if self._credit_s < piece_s:
            return 0.0
        most_s = max(self._settings.usual_best_effort_s, 2.0 * piece_s)
        return min(self._credit_s, most_s)


def _latest_s(state: RequestState) -> float:
    """When the token of an interrupted step is due at the latest."""
    last_s, interval_s = state.record.last_token_s, state.slo.tpot_s
    if last_s is None or interval_s is None:
        return state.deadline_s
    paced_s = state.paced_deadline_s(_MAX_GAP)
    return max(state.deadline_s, paced_s, last_s + _MAX_GAP_BEHIND * interval_s)


def _has_deadline(state: RequestState) -> bool:
    """Whether a request that had one as a best-effort one still is one."""
    return not state.record.left and state.service_class is ServiceClass.BE
