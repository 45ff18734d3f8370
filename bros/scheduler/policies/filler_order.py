"""In what order best-effort requests start that have no deadline to meet.

By arrival, where some count as if they had come earlier (times in units of `max_wait_s`):

    -1/2                    0                     1/2                     1
      |  <-- half -- group  |----- joined by ----->|                      |
      |                     |  program or prefix, joined by whoever comes until then
      a group starts here   first one came

whose program has begun     with the first one of it, so that what was begun is finished
who begins alike            with the first one, if they are of no program: KV may be shared
who is grouped              with its group, and half of max_wait_s before that

Nobody comes more than max_wait_s earlier than it did. So whoever waits is not overtaken by those
that arrive longer than that after it, however many they are, and ordering needs no ageing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
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


class FillerOrder:
    """Implements StartOrder: keys say it all. Remembers who was the first of which group, for
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
