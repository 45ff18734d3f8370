"""Places for hot prefixes, planned from what was asked for lately (CacheRoute).

The prefixes of the window, the one that takes most time first, go to the replica that has least to
do by then (longest processing time first: Graham 1969). One that takes more than a replica has is
put on as many as it needs. In the shadow, requests go where they would anyway, and it is noted what
the plan would have spared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bros.router.forest import Node
from bros.router.replica import Replica, Work
from bros.router.state import State

_EVERY_S = 10.0

_FULL = 0.8
"""Of its time, what a prefix may take of one replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What plans were worth since the start.

    requests: those of planned prefixes. prefill_s: what prompts took to compute, for these.
    planned_s: what they would have taken on the replicas of the plan. balance, planned_balance: the
    most that a replica had to do for these requests, over the mean.
    """

    requests: int
    prefill_s: float
    planned_s: float
    balance: float
    planned_balance: float


@dataclass(slots=True)
class Planner:
    """applies: requests follow the plan; otherwise it is a shadow."""

    applies: bool
    _next_s: float = 0.0
    _plan: dict[Node, tuple[int, ...]] = field(default_factory=dict)
    _warm: set[tuple[Node, int]] = field(default_factory=set)
    _requests: int = 0
    _prefill_s: float = 0.0
    _planned_s: float = 0.0
    _load_s: dict[int, float] = field(default_factory=dict)
    _planned_load_s: dict[int, float] = field(default_factory=dict)

    def run(self, state: State, now: float) -> None:
        """Plan anew, every few seconds."""
        if now < self._next_s:
            return
        self._next_s = now + _EVERY_S
        replicas = [replica for replica in state.replicas.values() if not replica.draining]
        before, self._plan = self._plan, plan(state, replicas)
        self._warm = {pair for pair in self._warm if pair[0] in self._plan}
        if self.applies:
            for key in before:
                _forget(key)
            for key, homes in self._plan.items():
                key.homes = homes

    def note(self, state: State, work: Work, length: int) -> None:
        """A request went somewhere: see what the plan would have made of it."""
        homes = self._plan.get(work.key) if work.key is not None else None
        if not homes or work.key is None:
            return
        number = homes[self._requests % len(homes)]
        replica = state.replicas.get(number)
        if replica is None:
            return
        there = work.key.end if (work.key, number) in self._warm else 0
        self._warm.add((work.key, number))
        planned_s = replica.prefill_s(length - there, there)
        self._requests += 1
        self._prefill_s += work.prefill_s
        self._planned_s += planned_s
        _add(self._load_s, work.replica, work.seconds)
        _add(self._planned_load_s, number, planned_s + work.decode_s)

    def report(self, replicas: int) -> PlanReport:
        return PlanReport(
            requests=self._requests,
            prefill_s=self._prefill_s,
            planned_s=self._planned_s,
            balance=_balance(self._load_s, replicas),
            planned_balance=_balance(self._planned_load_s, replicas),
        )


def plan(state: State, replicas: Sequence[Replica]) -> dict[Node, tuple[int, ...]]:
    """prefix -> the replicas it should be on."""
    keys = {key: sum(key.load.values()) for replica in replicas for key in replica.keys}
    full_s = _FULL * state.settings.window_s
    load_s = dict.fromkeys((replica.number for replica in replicas), 0.0)
    found = {}
    for key in sorted(keys, key=keys.__getitem__, reverse=True):
        if key.num_asked < 2:
            continue
        copies = min(max(1, math.ceil(keys[key] / full_s)), len(replicas))
        # Of equally busy ones those that have it already.
        order = sorted(load_s, key=lambda number: (load_s[number], -key.cached.get(number, 0)))
        found[key] = tuple(order[:copies])
        for number in found[key]:
            load_s[number] += keys[key] / copies
    return found


def _forget(key: Node) -> None:
    """A prefix has no home any more, nor has what was split off it since."""
    homes, node = key.homes, key
    while node.parent is not None and node.homes == homes:
        node.homes, node = None, node.parent


def _add(sums: dict[int, float], number: int, seconds: float) -> None:
    sums[number] = sums.get(number, 0.0) + seconds


def _balance(load_s: dict[int, float], replicas: int) -> float:
    total = sum(load_s.values())
    return max(load_s.values()) * replicas / total if total > 0.0 else 1.0
