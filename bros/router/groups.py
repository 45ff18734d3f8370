"""Task groups: requests that a later one waits for all of, placed as one (Parrot's Algorithm 1).

[ common prefix ][ document 1 ]          one replica computes the prefix once; more than one
[ common prefix ][ document 2 ]          only if all would be done sooner, each then with
[ common prefix ][ document 3 ]          those that go on alike
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bros.router.replica import Replica
from bros.router.state import Ask, State

_ROOM = 0.75
"""Of a replica's KV cache, what one group should need at most."""


@dataclass(frozen=True, slots=True)
class Group:
    """common: tokens that all of them begin with."""

    asks: Sequence[Ask]
    common: int

    def work_s(self, replica: Replica) -> float:
        """Of what the members do not have in common."""
        return sum(_own_s(ask, self.common, replica) for ask in self.asks)

    def tokens(self, replica: Replica) -> float:
        """Of KV, all at once."""
        own = sum(
            ask.length - self.common + replica.expected_output(ask.request) for ask in self.asks
        )
        return self.common + own


def place_group(state: State, asks: Sequence[Ask], common: int) -> dict[str, Replica]:
    """request id -> where it goes. All of them have the same candidates."""
    group = Group(asks, common)
    service_class = asks[0].service_class
    begin_s = {
        replica: state.open_s(replica, service_class) + _common_s(group, replica)
        for replica in asks[0].candidates
    }
    order = sorted(begin_s, key=begin_s.__getitem__)
    chosen = order[: _parts(group, order, begin_s)]
    return _share_out(group, chosen)


def _parts(group: Group, order: Sequence[Replica], begin_s: dict[Replica, float]) -> int:
    """On how many replicas, the one that can begin first coming first.

    One more if the group does not fit, or is done sooner by more than that one has to compute of
    what they have in common, which it then cannot do for others.
    """
    best, best_s = 0, 0.0
    for parts in range(1, min(len(order), len(group.asks)) + 1):
        last = order[parts - 1]
        done_s = begin_s[last] + group.work_s(last) / parts
        own = (group.tokens(last) - group.common) / parts
        fits = group.common + own <= _ROOM * last.facts.capacity_tokens
        if best and fits and best_s - done_s <= _common_s(group, last):
            break
        best, best_s = parts, done_s
    return best


def _share_out(group: Group, replicas: Sequence[Replica]) -> dict[str, Replica]:
    """Members that go on alike together, and about as much work for each replica."""
    asks = sorted(group.asks, key=_tokens)
    each_s = group.work_s(replicas[0]) / len(replicas)
    found, done_s = {}, 0.0
    for ask in asks:
        own_s = _own_s(ask, group.common, replicas[0])
        middle_s = done_s + own_s / 2
        part = min(int(middle_s / each_s) if each_s > 0.0 else 0, len(replicas) - 1)
        found[ask.request.request_id] = replicas[part]
        done_s += own_s
    return found


def _tokens(ask: Ask) -> list[bytes]:
    return [data for _, data in ask.pieces]


def _common_s(group: Group, replica: Replica) -> float:
    """To compute what of the common prefix is not there."""
    there = min(max(ask.matched.get(replica.number, 0) for ask in group.asks), group.common)
    return replica.prefill_s(group.common - there, there)


def _own_s(ask: Ask, common: int, replica: Replica) -> float:
    there = max(ask.matched.get(replica.number, 0), common)
    answer_s = replica.decode_s(replica.expected_output(ask.request), ask.length)
    return replica.prefill_s(max(ask.length - there, 0), there) + answer_s
