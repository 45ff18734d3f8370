"""Post-assignment rebalancing (Preble 3.2): moves and replicates prefixes, never requests.

loads    A ########################    B ########       A > balance x B
keys     A [ p: ## | q: ##### | r: ############# ]      p and q move to B; r stays, because with
                                                        it B would be heavier than A. If TTFT on
                                                        A keeps growing, r is replicated to B.

A moved prefix has new homes: its next requests go there (e2.py), and to its other homes as before.
Open requests stay where they are.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from types import MappingProxyType

from bros.router.forest import PrefixNode
from bros.router.state import Replica, ReplicaWork, RouterState, RoutingQuery

_MIN_REQUESTS = 10
"""Requests in each half of the window that a comparison of their TTFT needs."""

_MAX_PREFIX_SHARE = 0.5
"""Share of a heavy replica's time that one prefix may take before it is replicated."""

_MIN_PERIOD_S = 10.0
"""Least period that a share of time is computed over."""


class Balancer:
    """Checks the loads every `period_s` seconds."""

    def __init__(self, period_s: float = 1.0) -> None:
        self._period_s = period_s
        self._next_s = 0.0
        self._moved: dict[PrefixNode, None] = {}  # as long as the window has requests of them

    def run(self, state: RouterState, now: float) -> None:
        """Move prefixes from heavy to light replicas, and replicate one if moving does not help."""
        if now < self._next_s:
            return
        self._next_s = now + self._period_s
        settings = state.settings
        replicas = [r for r in state.replicas.values() if not r.draining]
        if len(replicas) < 2 or state.num_routed < settings.warm_up * len(replicas):
            return
        loads = self._loads_to_come(state, replicas)
        if settings.rebalancing:
            self._moved.update(dict.fromkeys(_rebalance(loads, settings.balance, self._period_s)))
        heaviest, lightest = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
        if settings.replication and loads[heaviest] > settings.balance * loads[lightest]:
            _replicate(state, heaviest, lightest, now)

    def _loads_to_come(
        self, state: RouterState, replicas: Sequence[Replica]
    ) -> dict[Replica, float]:
        """The load of each replica in seconds. What the window has of a moved prefix counts for the
        new homes: else a prefix would be followed by others until the window has passed."""
        loads = {replica: state.assigned_s(replica) for replica in replicas}
        there = {replica.number: replica for replica in replicas}
        self._moved = {key: None for key in self._moved if key.alive and key.load and key.homes}
        for key in self._moved:
            homes = [there[number] for number in key.homes or () if number in there]
            for number, seconds in key.load.items():
                if homes and number in there and there[number] not in homes:
                    loads[there[number]] -= seconds
                    for home in homes:
                        loads[home] += seconds / len(homes)
        return loads


def _rebalance(loads: dict[Replica, float], balance: float, period_s: float) -> list[PrefixNode]:
    """Move prefixes off the heaviest replica, then off the next ones, cheapest prefixes first.
    Changes `loads` as if the moves had happened; returns what was moved.

    period_s: time until the next check. A replica that will compute its new prefixes for that long
        gets no more of them now: else requests would wait for those of many others where a replica
        has just come up.
    """
    moved: list[PrefixNode] = []
    again_s = dict.fromkeys(loads, 0.0)
    for heavy in sorted(loads, key=loads.__getitem__, reverse=True):
        for key, key_s in _movable_keys(heavy):
            light = min(loads, key=loads.__getitem__)
            if loads[heavy] <= balance * loads[light] or again_s[light] >= period_s:
                return moved
            recompute_s = _recompute_s(key, light)
            if key_s <= recompute_s:
                continue  # recomputing the prefix there costs more than the move saves
            if loads[heavy] - key_s < loads[light] + key_s + recompute_s:
                break  # the lighter replica would become the heavier one
            others = (number for number in _homes_of(key) if number != heavy.number)
            key.homes = tuple(dict.fromkeys((*others, light.number)))
            moved.append(key)
            again_s[light] += recompute_s
            loads[heavy] -= key_s
            loads[light] += key_s + recompute_s
    return moved


def _movable_keys(replica: Replica) -> Sequence[tuple[PrefixNode, float]]:
    """(key node, seconds of its requests there), ascending. Keys that only one request of the
    window has, and keys that were moved to other replicas, are left out."""
    number = replica.number
    found = [
        (key, key.load[number])
        for key in replica.keys
        if key.num_requests > 1 and (key.homes is None or number in key.homes)
    ]
    return sorted(found, key=itemgetter(1))


def _homes_of(key: PrefixNode) -> tuple[int, ...]:
    """The replicas that a prefix was assigned to, or else those that have it cached."""
    if key.homes is not None:
        return key.homes
    return tuple(number for number, tokens in key.cached.items() if tokens == key.num_tokens)


def _recompute_s(key: PrefixNode, replica: Replica) -> float:
    """Seconds to compute a prefix on a replica; 0 if it is cached there."""
    cached = key.end if key.cached.get(replica.number) == key.num_tokens else 0
    return replica.prefill_s(key.end - cached, cached)


def _replicate(state: RouterState, heavy: Replica, light: Replica, now: float) -> None:
    """Add the lightest replica to the homes of the heaviest one's most expensive prefix, if TTFT
    there keeps growing, or if the prefix takes too much of its time."""
    keys = _movable_keys(heavy)
    if not keys or not (_ttft_grows(state, heavy, now) or _exceeds_share(state, keys[-1], now)):
        return
    key, key_s = keys[-1]
    if key_s <= _recompute_s(key, light):
        return
    homes = _homes_of(key)
    if light.number not in homes:
        # The heavy one, too, if a part of the prefix is evicted there: it is to have less of it.
        key.homes = tuple(dict.fromkeys((*homes, heavy.number, light.number)))


def _ttft_grows(state: RouterState, replica: Replica, now: float) -> bool:
    """Whether mean TTFT in the later half of the window is `replicate` times the earlier half's."""
    early, early_s, later, later_s = replica.ttft_history.halves(now)
    if min(early, later) < _MIN_REQUESTS:
        return False
    return later_s / later >= state.settings.replicate * early_s / early


def _exceeds_share(state: RouterState, key: tuple[PrefixNode, float], now: float) -> bool:
    """Whether a prefix takes more than its share of the window, or of the time so far."""
    return key[1] > _MAX_PREFIX_SHARE * _passed_s(state, now)


def _passed_s(state: RouterState, now: float) -> float:
    """The window, or the time so far."""
    return max(_MIN_PERIOD_S, min(state.settings.window_s, now - state.since_s))


# ---- Planned placement of hot prefixes, from the requests of the window (CacheRoute).
#
# The planner assigns the prefixes of the window, the most expensive first, to the replica with the
# least load so far (longest processing time first: Graham 1969). But a prefix stays where it is if
# the loads remain about even: otherwise each plan would move most of them. A prefix that takes more
# time than one replica has goes to several. A shadow plan does not change where requests go; the
# planner only records what it would have saved.


_PLAN_PERIOD_S = 10.0

_MAX_PLANNED_SHARE = 0.8
"""Share of a replica's time that one prefix may take before the plan replicates it."""

_MAX_UNEVEN = 1.2
"""A prefix stays where it is as long as the planned load there is at most this many times the mean.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """The gain of plans since the start.

    requests: requests of planned prefixes that have got their first token; the other fields are
        about these.
    prefill_s: estimated prefill seconds where the requests went.
    planned_s: estimated prefill seconds on the replicas of the plan.
    balance, planned_balance: largest load of a replica over the mean load, since a replica last
        came or went.
    """

    requests: int
    prefill_s: float
    planned_s: float
    balance: float
    planned_balance: float


@dataclass(slots=True)
class Planner:
    """Plans placements, and measures their gain.

    applies: requests follow the plan; otherwise it is a shadow plan.
    _warm: (prefix, replica) pairs for which the plan has the prefix cached.
    _numbers: the replicas that the loads are of.
    """

    applies: bool
    _next_s: float = 0.0
    _plan: dict[PrefixNode, tuple[int, ...]] = field(default_factory=dict)
    _warm: set[tuple[PrefixNode, int]] = field(default_factory=set)
    _numbers: set[int] = field(default_factory=set)
    _turn: int = 0
    _requests: int = 0
    _prefill_s: float = 0.0
    _planned_s: float = 0.0
    _load_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    _planned_load_s: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, state: RouterState, now: float) -> None:
        """Make a new plan every few seconds."""
        if now < self._next_s:
            return
        self._next_s = now + _PLAN_PERIOD_S
        replicas = [replica for replica in state.replicas.values() if not replica.draining]
        if state.replicas.keys() != self._numbers:  # loads of other replicas say nothing of these
            self._numbers = set(state.replicas)
            self._load_s.clear()
            self._planned_load_s.clear()
        before, self._plan = self._plan, plan(state, replicas, now, self._plan)
        self._warm = {pair for pair in self._warm if pair[0] in self._plan}
        if self.applies:
            for key in before:
                _clear_homes(key)
            for key, homes in self._plan.items():
                key.homes = homes

    def compare(self, state: RouterState, work: ReplicaWork, query: RoutingQuery) -> None:
        """Set where the plan has a request, and what its prompt takes there. query: as it was
        routed."""
        homes = self._plan.get(work.key) if work.key is not None else None
        if not homes or work.key is None:
            return
        self._turn += 1  # the homes take turns, also before any first token
        number = work.replica if work.replica in homes else homes[self._turn % len(homes)]
        replica = state.replicas.get(number)
        if replica is None:
            return
        cached = query.matched.get(number, 0)
        if (work.key, number) in self._warm:
            # The earlier requests were there, so what is cached anywhere is cached there.
            cached = max(query.matched.values(), default=0)
        self._warm.add((work.key, number))
        work.planned = number, replica.prefill_s(query.length - cached, cached)

    def count(self, work: ReplicaWork) -> None:
        """Count a request that has got its first token: others may have been refused."""
        if work.planned is None or work.planned[0] not in self._numbers:
            return
        number, planned_s = work.planned
        self._requests += 1
        self._prefill_s += work.prefill_s
        self._planned_s += planned_s
        self._load_s[work.replica] += work.seconds
        self._planned_load_s[number] += planned_s + work.decode_s

    def report(self, replicas: int) -> PlanReport:
        return PlanReport(
            requests=self._requests,
            prefill_s=self._prefill_s,
            planned_s=self._planned_s,
            balance=_balance(self._load_s, replicas),
            planned_balance=_balance(self._planned_load_s, replicas),
        )


def plan(
    state: RouterState,
    replicas: Sequence[Replica],
    now: float,
    before: Mapping[PrefixNode, tuple[int, ...]] = MappingProxyType({}),
) -> dict[PrefixNode, tuple[int, ...]]:
    """key node -> the replicas that should have it. before: the same of the last plan."""
    keys = {
        key: sum(key.load.values())
        for replica in replicas
        for key in replica.keys
        if key.num_requests > 1
    }
    full_s = _MAX_PLANNED_SHARE * _passed_s(state, now)
    most_s = _MAX_UNEVEN * sum(keys.values()) / len(replicas)
    load_s = dict.fromkeys((replica.number for replica in replicas), 0.0)
    found = {}
    for key in sorted(keys, key=keys.__getitem__, reverse=True):
        copies = min(max(1, math.ceil(keys[key] / full_s)), len(replicas))
        part_s = keys[key] / copies
        stays = {
            number
            for number in before.get(key, key.cached)
            if load_s.get(number, most_s) + part_s <= most_s
        }
        # Of equally loaded replicas, those that have most of it cached come first.
        order = sorted(
            load_s,
            key=lambda number: (number not in stays, load_s[number], -key.cached.get(number, 0)),
        )
        found[key] = tuple(order[:copies])
        for number in found[key]:
            load_s[number] += part_s
    return found


def _clear_homes(key: PrefixNode) -> None:
    """Clear the homes of a prefix, and of the ancestors that were split off it since."""
    homes, node = key.homes, key
    while node.parent is not None and node.homes == homes:
        node.homes, node = None, node.parent


def _balance(load_s: Mapping[int, float], replicas: int) -> float:
    total = sum(load_s.values())
    return max(load_s.values()) * replicas / total if total > 0.0 else 1.0
