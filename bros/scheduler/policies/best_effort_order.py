"""In what order best-effort requests start that have no deadline to meet.

By arrival, where some count as if they had come earlier (times in units of `max_wait_s`):

    -1/2                    0                     1/2                     1
      |  <-- half -- group  |----- joined by ----->|                      |
      |                     |  program or prefix, joined by requests that come until then
      a group starts here   first one came

whose program has begun     with the first one of it, so that what was begun is finished
who begins alike            with the first one, if they are of no program: KV may be shared
a grouped request           with its group, and half of max_wait_s before that

No request is ranked more than max_wait_s before its arrival. So requests that arrive later than
that do not overtake a waiting one, however many they are, and ordering needs no ageing.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from bros.scheduler.state import Rank, RequestState

_PREFIX_TOKENS = 64
"""Requests with the same first tokens begin alike."""

_MAX_KNOWN = 10_000

_Group = tuple[str, str, bytes, int]
"""Tenant, program, first tokens of the prompt if there is no program, depth if it is grouped."""

_First = tuple[float, int]
"""When the first one of some arrived, and its arrival_index."""


class StartOrder(Protocol):
    """In what order best-effort requests start that are not pressing."""

    def key(self, state: RequestState, now: float) -> Rank:
        """Place in the queue; different for all requests."""
        ...

    def first(
        self, waiting: Sequence[RequestState], start: int, count: int, now: float
    ) -> Sequence[RequestState]:
        """The next `count` of those that wait, sorted by key, from place `start` on; early fills
        after all others."""
        ...

    def started(self, states: Iterable[RequestState]) -> None:
        """These have begun."""
        ...


class BestEffortOrder:
    """Implements StartOrder: keys say it all. Remembers the first request of each group, for
    `max_wait_s`."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._firsts: OrderedDict[_Group, _First] = OrderedDict()

    def key(self, state: RequestState, now: float) -> Rank:
        """Lower starts first; different for all requests.

        Those of one program or group are next to each other: grouped ones, then others, and
        those that have more calls behind them first.
        """
        self._forget(now)
        hints, tenant = state.request.hints, state.request.tenant
        prompt = state.token_ids[: min(state.prompt_len, _PREFIX_TOKENS)]
        alike = b"" if hints.program else prompt.tobytes()
        place = self._first((tenant, hints.program, alike, -1), state, self._max_wait_s)
        if hints.grouped:
            half_s = self._max_wait_s / 2
            group = (tenant, hints.program, alike, hints.depth)
            came_s, first = self._first(group, state, half_s)
            place = min(place, (came_s - half_s, first))
        return (*place, not hints.grouped, -hints.depth, state.arrival_index)

    def first(
        self, waiting: Sequence[RequestState], start: int, count: int, now: float
    ) -> Sequence[RequestState]:
        return waiting[start : start + count]

    def started(self, states: Iterable[RequestState]) -> None:
        pass

    def _first(self, group: _Group, state: RequestState, follow_s: float) -> _First:
        """The first one of a group that came no longer than follow_s before this one."""
        own = (state.record.arrival_s, state.arrival_index)
        first = self._firsts.get(group)
        if first is None or own[0] - first[0] > follow_s:
            self._firsts[group] = first = own
            self._firsts.move_to_end(group)
        return min(first, own)

    def _forget(self, now: float) -> None:
        firsts = self._firsts
        while firsts and (
            next(iter(firsts.values()))[0] < now - self._max_wait_s or len(firsts) >= _MAX_KNOWN
        ):
            firsts.popitem(last=False)


# ---- Best-effort requests in groups by how much of their prompt is cached (Preble, section 3.3).
#
#     cached     0 .. 10 %   ..   60 .. 70 %   ..   90 .. 100 %
#     group          1       ..        7       ..        10        each by arrival
#     a round    1 of it     ..     7 of it    ..     10 of it     the highest group first
#
# What is cached is used before it is evicted, and requests that have nothing cached get a share as
# well. A round goes on from step to step, however few of its requests fit into one. A request's
# group is that of its prefix that is cached now; it is looked up again for a few requests at each
# step, in turn, and by packing. A request that has waited for `max_wait_s` goes before all groups.


NUM_GROUPS = 10

_WINDOW = 256
"""So many of those that came first are put in groups; the others wait for a place among them."""

_LOOKED_UP = 8
"""Waiting requests whose prompt is looked up again at each step."""


class PrefixGroups:
    """Implements StartOrder. look_up: sees what is cached of a waiting request's prompt now, and
    moves its `num_cached`."""

    def __init__(self, max_wait_s: float, look_up: Callable[[RequestState], None]) -> None:
        self._max_wait_s = max_wait_s
        self._look_up = look_up
        self._next = 0  # to be looked up, as a place in the window
        self._left = _a_round()

    def key(self, state: RequestState, now: float) -> Rank:
        return (state.record.arrival_s, state.arrival_index)

    def first(
        self, waiting: Sequence[RequestState], start: int, count: int, now: float
    ) -> list[RequestState]:
        window = waiting[start : start + _WINDOW]
        self._look_up_some(window)
        usual = bisect.bisect_left(window, True, key=lambda state: state.early)
        aged = bisect.bisect_right(
            window, now - self._max_wait_s, hi=usual, key=lambda state: state.record.arrival_s
        )
        groups: list[list[RequestState]] = [[] for _ in range(NUM_GROUPS + 1)]
        for state in window[aged:usual]:
            # Most of the time of a step goes here, so requests without cached tokens cost no call.
            groups[group_of(state) if state.num_cached else 1].append(state)
        order = itertools.chain(window[:aged], self._in_turns(groups), window[usual:])
        return list(itertools.islice(order, count))

    def started(self, states: Iterable[RequestState]) -> None:
        for state in states:
            group = group_of(state)
            if not self._left[group]:
                self._left = _a_round()
            self._left[group] -= 1

    def _look_up_some(self, window: Sequence[RequestState]) -> None:
        if self._next >= len(window):
            self._next = 0
        for state in window[self._next : self._next + _LOOKED_UP]:
            self._look_up(state)
        self._next += _LOOKED_UP

    def _in_turns(self, groups: Sequence[list[RequestState]]) -> Iterator[RequestState]:
        """What is left of the round, then whole ones, until no request is left."""
        left, at = self._left, [0] * len(groups)
        order = [group for group in range(NUM_GROUPS, 0, -1) if groups[group]]
        while len(order) > 1:
            for group in order:
                until = at[group] + left[group]
                yield from groups[group][at[group] : until]
                at[group] = until
            order = [group for group in order if at[group] < len(groups[group])]
            left = _a_round()
        for group in order:  # only these are left
            yield from groups[group][at[group] :]


def group_of(state: RequestState) -> int:
    """From 1 to NUM_GROUPS, by the share of its tokens that are cached."""
    return max(1, -(-NUM_GROUPS * state.num_cached // len(state.token_ids)))


def _a_round() -> dict[int, int]:
    """How many each group may begin."""
    return {group: group for group in range(1, NUM_GROUPS + 1)}
