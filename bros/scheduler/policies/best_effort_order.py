"""The order in which best-effort requests start, unless a deadline is pressing.

Between tenants: by what each has used of the device (shares.py). Of one tenant: by arrival, where
some requests count as if they had arrived earlier (times in units of `max_wait_s`):

    -1/2                    0                     1/2                     1
      |  <-- half -- group  |----- joined by ----->|                      |
      |                     |  program or prefix, joined by requests that arrive until then
      a group starts here   the first request arrived

    requests of one program     as the first of them, so that programs that have begun are finished
    requests with one prefix    as the first of them, if they are of no program: they may share KV
    requests of a task group    as the first of the group, and half of max_wait_s before that, if a
                                client waits for what follows (RequestGroup.precedes)

A program keeps its place while a request of it is open, and for max_wait_s after the last one has
arrived or ended; a group likewise, for half of that.
No request counts as more than max_wait_s earlier than its arrival. So requests that arrive later
than that never overtake a waiting one, however many they are, and no aging is needed.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from bros.core.request import ServiceClass
from bros.scheduler.shares import TenantShares
from bros.scheduler.state import Queues, Rank, RequestState, section

_PREFIX_TOKENS = 64
"""Requests with so many equal first tokens are taken to share a prefix. Ablation: batch prefixes,
throughput -21 %."""

_MAX_KNOWN = 10_000

_Key = tuple[str, str, bytes, str]
"""(user, program, first tokens of the prompt if there is no program, id of a task group)"""

_Arrival = tuple[float, int]
"""(arrival_s, arrival_index) of a request."""


@dataclass(slots=True)
class _Place:
    """A place in the order.

    first: the arrival of the first request.
    last_s: when the last one arrived or ended.
    num_open: requests that keep the place since they have not ended.
    """

    first: _Arrival
    last_s: float
    num_open: int = 0


class StartOrder(ABC):
    """The order in which the best-effort requests of one tenant start that are not pressing."""

    @abstractmethod
    def key(self, state: RequestState, now: float) -> Rank:
        """Position in the queue; unique."""

    @abstractmethod
    def first(
        self, waiting: Sequence[RequestState], span: range, count: int, now: float
    ) -> Sequence[RequestState]:
        """The next `count` requests to start; early prefills come last.

        waiting: sorted by key; only requests with an index in `span` count.
        """

    def started(self, state: RequestState) -> None:
        """A request has started."""
        return

    def ended(self, state: RequestState, now: float) -> None:
        """A request of either class has ended; the order may never have seen it."""
        return


class BestEffortOrder(StartOrder):
    """Orders by keys alone; remembers each place for `max_wait_s` seconds."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._places: OrderedDict[_Key, _Place] = OrderedDict()  # by last_s
        self._open: dict[str, tuple[_Key, ...]] = {}  # request id -> places that it keeps

    def key(self, state: RequestState, now: float) -> Rank:
        """Requests of one program are adjacent: those of task groups first, then the deepest."""
        self._forget(now)
        request, hints = state.request, state.request.hints
        prompt = state.token_ids[: min(state.prompt_len, _PREFIX_TOKENS)]
        prefix = b"" if hints.program else prompt.tobytes()
        key = (request.user, hints.program, prefix, "")
        start = self._start(key, state, self._max_wait_s, lasts=bool(hints.program))
        kept = [key] if hints.program else []
        group = hints.group if hints.group is not None and hints.group.precedes else None
        if group is not None:
            half_s, group_key = self._max_wait_s / 2, (*key[:-1], group.id)
            group_s, first = self._start(group_key, state, half_s, lasts=True)
            start = min(start, (group_s - half_s, first))
            kept.append(group_key)
        if kept and request.request_id not in self._open:  # else it waits again, preempted
            self._open[request.request_id] = tuple(kept)
            for each in kept:
                self._places[each].num_open += 1
        return (*start, group is None, -hints.depth, state.arrival_index)

    def first(
        self, waiting: Sequence[RequestState], span: range, count: int, now: float
    ) -> Sequence[RequestState]:
        return waiting[span.start : min(span.start + count, span.stop)]

    def ended(self, state: RequestState, now: float) -> None:
        for key in self._open.pop(state.request_id, ()):
            place = self._places.get(key)
            if place is not None:  # else there were too many places
                place.num_open -= 1
                place.last_s = max(place.last_s, now)
                self._places.move_to_end(key)

    def _start(self, key: _Key, state: RequestState, window_s: float, *, lasts: bool) -> _Arrival:
        """The first arrival of a place, or at most window_s before this one.

        lasts: the place lasts while requests of it are open and for window_s after that, not only
            for window_s after its first.
        """
        own = (state.record.arrival_s, state.arrival_index)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(own, own[0])
        elif not place.num_open and own[0] - (place.last_s if lasts else place.first[0]) > window_s:
            place.first = own
        place.last_s = max(place.last_s, own[0])
        self._places.move_to_end(key)
        if place.first[0] < own[0] - window_s:
            return own[0] - window_s, own[1]
        return min(place.first, own)

    def _forget(self, now: float) -> None:
        places = self._places
        while places:
            key, place = next(iter(places.items()))
            if len(places) < _MAX_KNOWN:
                if place.last_s >= now - self._max_wait_s:
                    return
                if place.num_open:
                    place.last_s = now
                    places.move_to_end(key)
                    continue
            del places[key]


# ---- Several tenants.
#
#     waiting   others of a | others of b | early prefills of a | of b      sections of the queue
#     order     a b b a b   . . .           then a b a
#
# Each tenant has a StartOrder of its own. Of two tenants the one that has used less comes first,
# and each request that is taken counts as used, as far as its prompt goes.


class TenantOrders:
    """The order of all tenants' best-effort requests.

    expected_s: what a request is expected to use of the device before its first token.
    """

    def __init__(
        self,
        make: Callable[[], StartOrder],
        shares: TenantShares,
        expected_s: Callable[[RequestState], float],
    ) -> None:
        """make: makes the StartOrder of a tenant."""
        self._make = make
        self._shares = shares
        self._expected_s = expected_s
        self._orders: dict[str, tuple[int, StartOrder]] = {}

    def key(self, state: RequestState, now: float) -> Rank:
        """Position in its section of the queue; unique."""
        tenant = state.request.tenant
        if tenant not in self._orders:
            self._orders[tenant] = len(self._orders), self._make()
        number, order = self._orders[tenant]
        return (number, *order.key(state, now))

    def first(self, queues: Queues, start: int, count: int, now: float) -> Iterable[RequestState]:
        """The next `count` best-effort requests to start; early prefills come last.

        queues: sorted by section and key; only waiting requests from index `start` on count.
        """
        waiting = queues.waiting[ServiceClass.BE]
        if start == len(waiting):
            return ()
        if len(queues.waiting_of[ServiceClass.BE]) == 1:
            order = self._order_of(waiting[start])
            return order.first(waiting, range(start, len(waiting)), count, now)
        return itertools.islice(self._by_share(waiting, start, count, now), count)

    def _by_share(
        self, waiting: Sequence[RequestState], start: int, count: int, now: float
    ) -> Iterator[RequestState]:
        while start < len(waiting):
            firsts = {}
            this = section(waiting[start])
            end = bisect.bisect_right(waiting, this, lo=start, key=section)
            for span in _spans(waiting, start, end):
                first = waiting[span.start]
                order = self._order_of(first)
                firsts[first.request.tenant] = order.first(waiting, span, count, now)
            yield from self._shares.merge(firsts, self._expected_s)
            start = end

    def started(self, states: Iterable[RequestState]) -> None:
        """These requests have started."""
        for state in states:
            self._order_of(state).started(state)

    def ended(self, state: RequestState, now: float) -> None:
        """A request of either class has ended; the order may never have seen it."""
        found = self._orders.get(state.request.tenant)
        if found is not None:
            found[1].ended(state, now)

    def _order_of(self, state: RequestState) -> StartOrder:
        return self._orders[state.request.tenant][1]


def _spans(waiting: Sequence[RequestState], start: int, end: int) -> Iterator[range]:
    """The spans of one tenant each in a section [start, end) of a queue whose keys have a number
    of the tenant after the section."""
    while start < end:
        number = waiting[start].queue_key[1]
        stop = bisect.bisect_right(waiting, number, lo=start, hi=end, key=_tenant_number)
        yield range(start, stop)
        start = stop


def _tenant_number(state: RequestState) -> float:
    return state.queue_key[1]


# ---- Best-effort requests in groups by the cached share of their prompt (Preble, section 3.3).
#
#     cached     0 .. 10 %   ..   60 .. 70 %   ..   90 .. 100 %
#     group          1       ..        7       ..        10        each by arrival
#     a round    1 of it     ..     7 of it    ..     10 of it     the highest group first
#
# So cached prefixes are used before they are evicted, and requests without one get a share as well.
# A round may take several steps. A request that has waited for `max_wait_s` goes before all groups.
# The group of a request follows what is cached now: each step looks up the prompts of a few waiting
# requests, in turn, and packing looks up those that it considers.


NUM_GROUPS = 10

_WINDOW = 256
"""So many of the first arrivals are put in groups; later ones wait until they are among these."""

_LOOKED_UP = 8
"""Waiting requests whose prompt is looked up again at each step."""


class PrefixGroups(StartOrder):
    """See above.

    look_up: updates `num_computed_tokens` of a waiting request.
    """

    def __init__(self, max_wait_s: float, look_up: Callable[[RequestState], None]) -> None:
        self._max_wait_s = max_wait_s
        self._look_up = look_up
        self._next = 0  # index in the window of the next request to look up
        self._round_left = _new_round()  # group -> how many more may start in this round

    def key(self, state: RequestState, now: float) -> Rank:
        return (state.record.arrival_s, state.arrival_index)

    def first(
        self, waiting: Sequence[RequestState], span: range, count: int, now: float
    ) -> list[RequestState]:
        window = waiting[span.start : min(span.start + _WINDOW, span.stop)]
        self._look_up_some(window)
        usual = bisect.bisect_left(window, True, key=lambda state: state.early)
        aged = bisect.bisect_right(
            window, now - self._max_wait_s, hi=usual, key=lambda state: state.record.arrival_s
        )
        groups: list[list[RequestState]] = [[] for _ in range(NUM_GROUPS + 1)]
        for state in window[aged:usual]:
            # The hot loop of a step: requests without cached tokens cost no call.
            groups[group_of(state) if state.num_computed_tokens else 1].append(state)
        order = itertools.chain(window[:aged], self._round_robin(groups), window[usual:])
        return list(itertools.islice(order, count))

    def started(self, state: RequestState) -> None:
        group = group_of(state)
        if not self._round_left[group]:
            self._round_left = _new_round()
        self._round_left[group] -= 1

    def _look_up_some(self, window: Sequence[RequestState]) -> None:
        if self._next >= len(window):
            self._next = 0
        for state in window[self._next : self._next + _LOOKED_UP]:
            self._look_up(state)
        self._next += _LOOKED_UP

    def _round_robin(self, groups: Sequence[list[RequestState]]) -> Iterator[RequestState]:
        """The rest of the current round, then whole rounds, until no request is left."""
        left, at = self._round_left, [0] * len(groups)
        order = [group for group in range(NUM_GROUPS, 0, -1) if groups[group]]
        while len(order) > 1:
            for group in order:
                until = at[group] + left[group]
                yield from groups[group][at[group] : until]
                at[group] = until
            order = [group for group in order if at[group] < len(groups[group])]
            left = _new_round()
        for group in order:  # only these are left; in rounds, they would take 0.2 ms of a step
            yield from groups[group][at[group] :]


def group_of(state: RequestState) -> int:
    """1 to NUM_GROUPS, by the share of its tokens that are cached."""
    return max(1, -(-NUM_GROUPS * state.num_computed_tokens // len(state.token_ids)))


def _new_round() -> dict[int, int]:
    """Group -> how many of it may start in a round."""
    return {group: group for group in range(1, NUM_GROUPS + 1)}
