"""Where requests stand: holding KV memory, or waiting for it by class."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping

from bros.core.request import ServiceClass
from bros.scheduler.record import BlockedTime
from bros.scheduler.state import Rank, RequestState


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
