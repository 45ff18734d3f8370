"""In what order real-time requests run, and what becomes of a token whose deadline is lost.

    waiting   on time | begun | late        sections of the queue, each by deadline
    order     on time, begun and all that run, by deadline; then late
    turns     one step in _TURN begins with who is late for longest, one with the oldest begun

Late first tokens wait behind those that can still be on time. Somebody who has a part of the answer
already is reading it: when it was interrupted it gets a new deadline, and one more each time that
is lost. But who runs with a pace that cannot be met is always due before it, so it has turns, too.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence

from bros.core.request import ServiceClass
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.queues import Queues, by_deadline, deadline_key, rank_key, section
from bros.scheduler.state import Rank, RequestState

_ON_TIME, _BEGUN, _LATE = 0.0, 1.0, 2.0
"""Sections of the waiting real-time requests: begun are those that were interrupted, and have lost
the deadline that they got for that."""

_TURN = 8
"""Every so many steps, the request that has been late for longest goes before all others; and half
of that later the oldest of those that have begun."""


class UrgentOrder:
    """mode: renew (a lost deadline is followed by a new one), edf (it stays), or shed (give up
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
        """Who is not to be served any more; nobody whose answer has begun."""
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
        order: Iterator[RequestState] = heapq.merge(
            by_deadline(running), on_time, begun, key=deadline_key
        )
        return itertools.chain(first, order, late[: self._most]) if first or late else order

    def _give_time(self, state: RequestState, now: float) -> None:
        """A deadline anew for a request that was interrupted: somebody is reading its answer.

        It has to compute its prompt again, so it gets what that takes at the least.
        """
        least_s = 2.0 * self._predictor.prefill_seconds(state.remaining)
        state.deadline_s = now + max(state.slo.ttft_s or 0.0, least_s)
        state.late = True


def _start_of(place: float, waiting: Sequence[RequestState]) -> int:
    return bisect.bisect_left(waiting, place, key=section)
