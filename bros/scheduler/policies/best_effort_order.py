"""The order in which best-effort requests start, unless a deadline is pressing.

By arrival, where some requests count as if they had arrived earlier (times in units of
`max_wait_s`):

    -1/2                    0                     1/2                     1
      |  <-- half -- group  |----- joined by ----->|                      |
      |                     |  program or prefix, joined by requests that arrive until then
      a group starts here   the first request arrived

    requests of one program     as the first of them, so that programs that have begun are finished
    requests with one prefix    as the first of them, if they are of no program: they may share KV
    requests of a task group    as the first of the group, and half of max_wait_s before that

No request counts as more than max_wait_s earlier than its arrival. So requests that arrive later
than that never overtake a waiting one, however many they are, and no aging is needed.
"""

from __future__ import annotations

import bisect
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from bros.scheduler.state import Rank, RequestState

_PREFIX_TOKENS = 64
"""Requests with so many equal first tokens are taken to share a prefix."""

_MAX_KNOWN = 10_000

_Group = tuple[str, str, str, bytes, int]
"""(tenant, user, program, first tokens of the prompt if there is no program, depth of a task group
or -1)
"""

_Arrival = tuple[float, int]
"""(arrival_s, arrival_index) of a request."""


class StartOrder(Protocol):
    """The order in which best-effort requests start that are not pressing."""

    def key(self, state: RequestState, now: float) -> Rank:
        """Position in the queue; unique."""
        ...

    def first(
        self, waiting: Sequence[RequestState], start: int, count: int, now: float
    ) -> Sequence[RequestState]:
        """The next `count` requests to start; early prefills come last.

        waiting: sorted by key; only requests from index `start` on count.
        """
        ...

    def started(self, states: Iterable[RequestState]) -> None:
        """These requests have started."""
        ...


class BestEffortOrder:
    """Implements StartOrder by keys alone; remembers the first request of each group for
    `max_wait_s` seconds."""

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._starts: OrderedDict[_Group, _Arrival] = OrderedDict()

    def key(self, state: RequestState, now: float) -> Rank:
        """Requests of one program are adjacent: those of task groups first, then the deepest."""
        self._forget(now)
        request, hints = state.request, state.request.hints
        prompt = state.token_ids[: min(state.prompt_len, _PREFIX_TOKENS)]
        prefix = b"" if hints.program else prompt.tobytes()
        group = (request.tenant, request.user, hints.program, prefix, -1)
        start = self._group_start(group, state, self._max_wait_s)
        if hints.grouped:
            half_s = self._max_wait_s / 2
            group = (*group[:-1], hints.depth)
            group_s, first = self._group_start(group, state, half_s)
            start = min(start, (group_s - half_s, first))
        return (*start, not hints.grouped, -hints.depth, state.arrival_index)

    def first(
        self, waiting: Sequence[RequestState], start: int, count: int, now: float
    ) -> Sequence[RequestState]:
        return waiting[start : start + count]

    def started(self, states: Iterable[RequestState]) -> None:
        pass

    def _group_start(self, group: _Group, state: RequestState, window_s: float) -> _Arrival:
        """The first arrival of a group if at most window_s before this one, else this one."""
        own = (state.record.arrival_s, state.arrival_index)
        first = self._starts.get(group)
        if first is None or own[0] - first[0] > window_s:
            self._starts[group] = first = own
            self._starts.move_to_end(group)
        return min(first, own)

    def _forget(self, now: float) -> None:
        starts = self._starts
        while starts and (
            next(iter(starts.values()))[0] < now - self._max_wait_s or len(starts) >= _MAX_KNOWN
        ):
            starts.popitem(last=False)


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


class PrefixGroups:
    """Implements StartOrder. look_up: updates `num_computed_tokens` of a waiting request."""

    def __init__(self, max_wait_s: float, look_up: Callable[[RequestState], None]) -> None:
        self._max_wait_s = max_wait_s
        self._look_up = look_up
        self._next = 0  # index in the window of the next request to look up
        self._round_left = _new_round()  # group -> how many more may start in this round

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
            # The hot loop of a step: requests without cached tokens cost no call.
            groups[group_of(state) if state.num_computed_tokens else 1].append(state)
        order = itertools.chain(window[:aged], self._round_robin(groups), window[usual:])
        return list(itertools.islice(order, count))

    def started(self, states: Iterable[RequestState]) -> None:
        for state in states:
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
        for group in order:  # only these are left
            yield from groups[group][at[group] :]


def group_of(state: RequestState) -> int:
    """1 to NUM_GROUPS, by the share of its tokens that are cached."""
    return max(1, -(-NUM_GROUPS * state.num_computed_tokens // len(state.token_ids)))


def _new_round() -> dict[int, int]:
    """Group -> how many of it may start in a round."""
    return {group: group for group in range(1, NUM_GROUPS + 1)}
