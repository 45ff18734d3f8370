"""Moves prefixes, not requests: where the next ones of a prefix go (Preble 3.2, post-assignment).

loads    A ########################    B ########       A > balance x B
keys     A [ p: ## | q: ##### | r: ############# ]      p, q move to B, r would turn it round;
                                                        if requests for r wait longer and
                                                        longer, r is on A and B from now on
"""

from __future__ import annotations

from collections.abc import Sequence

from bros.router.forest import Node
from bros.router.replica import Replica
from bros.router.state import State

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


def _keys_of(replica: Replica) -> Sequence[tuple[Node, float]]:
    """Prefixes that several requests of the window had and that are not elsewhere already, by the
    seconds of these requests there."""
    number = replica.number
    found = [
        (key, key.load[number])
        for key in replica.keys
        if key.num_asked > 1 and (key.homes is None or number in key.homes)
    ]
    return sorted(found, key=_seconds)


def _again_s(key: Node, replica: Replica) -> float:
    """What computing a prefix takes where it is not cached."""
    there = key.end if key.cached.get(replica.number) == key.num_tokens else 0
    return replica.prefill_s(key.end - there, there)


def _seconds(pair: tuple[Node, float]) -> float:
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


def _is_full(state: State, key: tuple[Node, float], now: float) -> bool:
    """Whether it takes that much of the time since the window, or the first request."""
    passed_s = max(_LEAST_S, min(state.settings.window_s, now - state.since_s))
    return key[1] > _FULL * passed_s
