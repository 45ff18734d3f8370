"""Whom E2 is compared with."""

from __future__ import annotations

from collections.abc import Callable

from bros.core.request import EngineRequest
from bros.router.replica import Replica
from bros.router.state import Ask, State


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        later = [replica for replica in ask.candidates if replica.number > self._last]
        found = min(later or ask.candidates, key=_number)
        self._last = found.number
        return found, "turn"


class LeastLoaded:
    """Where there is least to do; of equal ones, where there was least to do lately."""

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        service_class = ask.service_class

        def load(replica: Replica) -> tuple[float, float]:
            return state.open_s(replica, service_class), state.load_s(replica, service_class)

        return min(ask.candidates, key=load), "least"


class OraclePartition:
    """Every prefix has its replica, which somebody knows who has seen all requests beforehand.

    part_of: request -> number of its part; part p goes to the candidate p modulo their number.
    """

    def __init__(self, part_of: Callable[[EngineRequest], int]) -> None:
        self._part_of = part_of

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        candidates = sorted(ask.candidates, key=_number)
        return candidates[self._part_of(ask.request) % len(candidates)], "oracle"


def _number(replica: Replica) -> int:
    return replica.number
