"""Moves prefixes, not requests: where the next ones of a prefix go (Preble 3.2, post-assignment).

loads    A ########################    B ########       A > balance x B
keys     A [ p: ## | q: ##### | r: ############# ]      p, q move to B, r would turn it round;
                                                        if requests for r wait longer and
                                                        longer, r is on A and B from now on
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from bros.router.forest import PrefixNode
from bros.router.state import Replica, ReplicaWork, State

_FEW = 10
"""Requests in each half of the window, before a rise of their waits means anything."""

_FULL = 0.5
"""Of its time, what one prefix may take of a replica while another one has much less to do."""

_LEAST_S = 10.0
"""Of a window, before it says how much time something takes."""


class Balancer:
    """Looks at the loads every `every_s` seconds."""

    def __init__(self, every_s: float = 1.0) -> None:
        self._every_s = every_s
        self._next_s = 0.0

    def run(self, state: State, now: float) -> None:
        """Give prefixes of the heaviest replicas to the lightest ones, from now on."""
        if now < self._next_s:
            return
        self._next_s = now + self._every_s
        settings = state.settings
        replicas = [r for r in state.replicas.values() if not r.draining]
        if len(replicas) < 2 or state.num_routed < settings.warm_up * len(replicas):
            return
        loads = {replica: state.given_s(replica) for replica in replicas}
        if settings.rebalancing:
            _rebalance(loads, settings.balance)
        heaviest, lightest = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
        if settings.replication and loads[heaviest] > settings.balance * loads[lightest]:
            _replicate(state, heaviest, lightest, now)


def _rebalance(loads: dict[Replica, float], balance: float) -> None:
    """The cheapest prefixes first, from the heaviest replica, then from the next ones."""
    for heavy in sorted(loads, key=loads.__getitem__, reverse=True):
        for key, key_s in _keys_of(heavy):
            light = min(loads, key=loads.__getitem__)
            if loads[heavy] <= balance * loads[light]:
                return
            again_s = _again_s(key, light)
            if key_s <= again_s:
                continue  # that the prefix has to be computed there costs more than moving spares
            if loads[heavy] - key_s < loads[light] + key_s + again_s:
                break  # it would turn round which of the two is the heavier one
            key.homes = (light.number,)
            loads[heavy] -= key_s
            loads[light] += key_s + again_s


def _keys_of(replica: Replica) -> Sequence[tuple[PrefixNode, float]]:
    """Prefixes that several requests of the window had and that are not elsewhere already, by the
    seconds of these requests there."""
    number = replica.number
    found = [
        (key, key.load[number])
        for key in replica.keys
        if key.num_asked > 1 and (key.homes is None or number in key.homes)
    ]
    return sorted(found, key=_seconds)


def _again_s(key: PrefixNode, replica: Replica) -> float:
    """What computing a prefix takes where it is not cached."""
    there = key.end if key.cached.get(replica.number) == key.num_tokens else 0
    return replica.prefill_s(key.end - there, there)


def _seconds(pair: tuple[PrefixNode, float]) -> float:
    return pair[1]


def _replicate(state: State, heavy: Replica, light: Replica, now: float) -> None:
    """If most of a replica's time goes into one prefix, and its requests wait longer and longer
    (or it needs more than there is), the lightest one has it as well."""
    keys = _keys_of(heavy)
    if not keys or not (_waits_grow(state, heavy, now) or _is_full(state, keys[-1], now)):
        return
    key, key_s = keys[-1]
    if key_s <= _again_s(key, light):
        return
    homes = key.homes or tuple(number for number in key.cached if number in state.replicas)
    if light.number not in homes:
        key.homes = (*homes, light.number)


def _waits_grow(state: State, replica: Replica, now: float) -> bool:
    """Whether the mean wait of the later half of the window is so many times the earlier one's."""
    early, early_s, later, later_s = replica.waits.halves(now)
    if min(early, later) < _FEW:
        return False
    return later_s / later >= state.settings.replicate * early_s / early


def _is_full(state: State, key: tuple[PrefixNode, float], now: float) -> bool:
    """Whether it takes that much of the time since the window, or the first request."""
    passed_s = max(_LEAST_S, min(state.settings.window_s, now - state.since_s))
    return key[1] > _FULL * passed_s


# ---- Places for hot prefixes, planned from what was asked for lately (CacheRoute).
#
# The prefixes of the window, the one that takes most time first, go to the replica that has least
# to
# do by then (longest processing time first: Graham 1969). One that takes more than a replica has is
# put on as many as it needs. In the shadow, requests go where they would anyway, and it is noted
# what
# the plan would have spared.


_EVERY_S = 10.0

_PLAN_FULL = 0.8
"""Of its time, what a prefix may take of one replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What plans were worth since the start.

    requests: those of planned prefixes.
    prefill_s: what prompts took to compute, for these.
    planned_s: what they would have taken on the replicas of the plan.
    balance, planned_balance: the most that a replica had to do for these requests, over the mean.
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
    _plan: dict[PrefixNode, tuple[int, ...]] = field(default_factory=dict)
    _warm: set[tuple[PrefixNode, int]] = field(default_factory=set)
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

    def note(self, state: State, work: ReplicaWork, length: int) -> None:
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


def plan(state: State, replicas: Sequence[Replica]) -> dict[PrefixNode, tuple[int, ...]]:
    """prefix -> the replicas it should be on."""
    keys = {key: sum(key.load.values()) for replica in replicas for key in replica.keys}
    full_s = _PLAN_FULL * state.settings.window_s
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


def _forget(key: PrefixNode) -> None:
    """A prefix has no home any more, nor has what was split off it since."""
    homes, node = key.homes, key
    while node.parent is not None and node.homes == homes:
        node.homes, node = None, node.parent


def _add(sums: dict[int, float], number: int, seconds: float) -> None:
    sums[number] = sums.get(number, 0.0) + seconds


def _balance(load_s: dict[int, float], replicas: int) -> float:
    total = sum(load_s.values())
    return max(load_s.values()) * replicas / total if total > 0.0 else 1.0
