"""Counts what was given to whom: per replica, per prefix, within the window and open."""

from __future__ import annotations

from collections import deque

from bros.core.request import ServiceClass
from bros.router.forest import Node
from bros.router.replica import Replica, Work
from bros.router.state import State


class Ledger:
    """Every request is in it from `open` to `close`, and until it leaves the window.

    works: those that are open, by id.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._window: deque[Work] = deque()
        self.works: dict[str, Work] = {}

    def open(self, request_id: str, work: Work) -> None:
        """It goes to its replica."""
        assert request_id not in self.works, "one at a time has an id"
        replica = self._state.replicas[work.replica]
        if not self._state.num_routed:
            self._state.since_s = work.time_s
        self._state.num_routed += 1
        self._state.asked_tokens += work.leaf.end
        self._state.matched_tokens += work.matched
        self.works[request_id] = replica.works[request_id] = work
        replica.open.add(work.service_class, work.prefill_s, work.decode_s)
        replica.window.add(work.service_class, work.prefill_s, work.decode_s)
        self._window.append(work)
        if work.key is not None:
            replica.keys[work.key] = replica.keys.get(work.key, 0) + 1
            work.key.load[work.replica] = work.key.load.get(work.replica, 0.0) + work.seconds
        node: Node | None = work.leaf
        while node is not None:
            node.active += 1
            node.num_asked += 1
            node.asked[work.replica] = node.asked.get(work.replica, 0) + 1
            node = node.parent

    def begin(self, work: Work) -> None:
        """Its prompt is done."""
        replica = self._state.replicas[work.replica]
        replica.open.remove(work.service_class, work.prefill_s, work.decode_s)
        work.begun = True
        replica.open.add(work.service_class, 0.0, work.decode_s)

    def promote(self, work: Work) -> None:
        """It counts as real-time work from now on."""
        if work.service_class is ServiceClass.RT:
            return
        replica = self._state.replicas[work.replica]
        prefill_s = 0.0 if work.begun else work.prefill_s
        replica.open.remove(work.service_class, prefill_s, work.decode_s)
        replica.open.add(ServiceClass.RT, prefill_s, work.decode_s)
        if work.in_window:
            replica.window.remove(work.service_class, work.prefill_s, work.decode_s)
            replica.window.add(ServiceClass.RT, work.prefill_s, work.decode_s)
        work.service_class = ServiceClass.RT

    def close(self, request_id: str) -> Work | None:
        """It has ended, or is lost; None if it is not open."""
        work = self.works.pop(request_id, None)
        if work is None:
            return None
        replica = self._state.replicas[work.replica]
        del replica.works[request_id]
        work.request = None  # prompts are long, and windows as well
        prefill_s = 0.0 if work.begun else work.prefill_s
        replica.open.remove(work.service_class, prefill_s, work.decode_s)
        node: Node | None = work.leaf
        while node is not None:
            node.active -= 1
            node = node.parent
        return work

    def settle(self, work: Work, prefill_s: float, decode_s: float) -> None:
        """What it took is known now; it is closed."""
        if work.in_window:
            replica = self._state.replicas[work.replica]
            replica.window.remove(work.service_class, work.prefill_s, work.decode_s)
            replica.window.add(work.service_class, prefill_s, decode_s)
            if work.key is not None:
                work.key.load[work.replica] += prefill_s + decode_s - work.seconds
            work.prefill_s, work.decode_s = prefill_s, decode_s

    def expire(self, now: float) -> None:
        """What is older than the window does not count any more."""
        before = now - self._state.settings.window_s
        while self._window and self._window[0].time_s <= before:
            work = self._window.popleft()
            work.in_window = False
            self._state.asked_tokens -= work.leaf.end
            self._state.matched_tokens -= work.matched
            replica = self._state.replicas.get(work.replica)
            if replica is not None:
                replica.window.remove(work.service_class, work.prefill_s, work.decode_s)
                _take_from_key(replica, work)
            _ask_less(work)
            self._state.forest.prune(work.leaf)


def _take_from_key(replica: Replica, work: Work) -> None:
    key, number = work.key, work.replica
    if key is None:
        return
    replica.keys[key] -= 1
    key.load[number] -= work.seconds
    if not replica.keys[key]:
        del replica.keys[key], key.load[number]


def _ask_less(work: Work) -> None:
    number = work.replica
    node: Node | None = work.leaf
    while node is not None:
        node.num_asked -= 1
        node.asked[number] -= 1
        if not node.asked[number]:
            del node.asked[number]
        node = node.parent
