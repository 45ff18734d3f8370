"""A fleet that sends requests to replicas by turns, and insists on being told everything once."""

from __future__ import annotations

from collections.abc import Sequence

from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest
from bros.core.slices import Slices
from bros.router.balance import PlanReport
from bros.router.fleet import Fleet
from bros.router.state import Decision, ReplicaFacts


class TurnFleet(Fleet):
    """groups: what was routed together. open: id -> replica. kept: what ended and stays cached."""

    plan_report: PlanReport | None = None
    places_groups = False

    def __init__(self) -> None:
        self.facts: dict[int, ReplicaFacts] = {}
        self.draining: set[int] = set()
        self.open: dict[str, int] = {}
        self.begun_ids: set[str] = set()
        self.groups: list[tuple[str, ...]] = []
        self.kept: dict[str, tuple[int, ...]] = {}
        self.reports: list[tuple[int, EngineReport]] = []
        self._added = 0
        self._turn = 0
        self._now = 0.0

    def add(self, facts: ReplicaFacts, now: float) -> int:
        self._pass(now)
        self._added += 1
        self.facts[self._added] = facts
        return self._added

    def remove(self, replica: int) -> list[str]:
        del self.facts[replica]
        self.draining.discard(replica)
        lost = [name for name, where in self.open.items() if where == replica]
        for name in lost:
            del self.open[name]
            self.begun_ids.discard(name)
        return lost

    def set_draining(self, replica: int, draining: bool) -> None:
        assert replica in self.facts
        (self.draining.add if draining else self.draining.discard)(replica)

    def route(
        self, requests: Sequence[EngineRequest], now: float, avoid: frozenset[int] = frozenset()
    ) -> list[Decision]:
        self._pass(now)
        possible = [key for key in self.facts if key not in self.draining | avoid]
        if not possible:
            raise EngineDeadError("There is no replica.")
        self.groups.append(tuple(request.request_id for request in requests))
        decisions = []
        for request in requests:
            assert request.request_id not in self.open, "routed twice"
            self._turn += 1
            key = possible[self._turn % len(possible)]
            self.open[request.request_id] = key
            decisions.append(Decision(request_id=request.request_id, replica=key, matched=0,
                                      reason="turn"))  # fmt: skip
        return decisions

    def on_first_token(self, request_id: str, now: float) -> None:
        self._pass(now)
        assert request_id in self.open and request_id not in self.begun_ids
        self.begun_ids.add(request_id)

    def on_promoted(self, request_id: str) -> None:
        assert request_id in self.open

    def on_finished(
        self, request_id: str, output_ids: Sequence[int], now: float, *, cached: bool = True
    ) -> None:
        self._pass(now)
        del self.open[request_id]
        assert not cached or request_id in self.begun_ids
        self.begun_ids.discard(request_id)
        if cached:
            self.kept[request_id] = tuple(output_ids)

    def applying_report(self, replica: int, report: EngineReport, now: float) -> Slices[None]:
        self._pass(now)
        assert replica in self.facts
        self.reports.append((replica, report))
        yield from ()

    def _pass(self, now: float) -> None:
        assert now >= self._now, "the clock never goes back"
        self._now = now
