"""Best-effort requests in groups by how much of their prompt is cached (Preble, section 3.3).

    cached     0 .. 10 %   ..   60 .. 70 %   ..   90 .. 100 %
    group          1       ..        7       ..        10        each by arrival
    a round    1 of it     ..     7 of it    ..     10 of it     the highest group first

What is cached is used before it is evicted, and whoever has nothing cached gets a share all the
same. A round goes on from step to step, however few of it a step has room for. Nobody stays in
a group: it is that of what is cached now, which is looked up again for a few at each step, in turn,
and by packing for those it comes to. Whoever has waited for `max_wait_s` goes before all groups.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from bros.scheduler.state import Rank, RequestState

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
            # Most of the time of a step goes here, so there is no call for who has nothing.
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
        """What is left of the round, then whole ones, until nobody is left."""
        left, at = self._left, [0] * len(groups)
        order = [group for group in range(NUM_GROUPS, 0, -1) if groups[group]]
        while len(order) > 1:
            for group in order:
                until = at[group] + left[group]
                yield from groups[group][at[group] : until]
                at[group] = until
            order = [group for group in order if at[group] < len(groups[group])]
            left = _a_round()
        for group in order:  # nobody else is left
            yield from groups[group][at[group] :]


def group_of(state: RequestState) -> int:
    """From 1 to NUM_GROUPS, by the share of its tokens that are cached."""
    return max(1, -(-NUM_GROUPS * state.num_cached // len(state.token_ids)))


def _a_round() -> dict[int, int]:
    """How many each group may begin."""
    return {group: group for group in range(1, NUM_GROUPS + 1)}
