"""What it costs to put a request on a replica (Preble 3.2, LoadCost).

    load      what the replica has to do already, of that what counts for the request's class
  + evicted   what others will have to compute again, as their prefix makes room for this prompt
  + prefill   what is not cached of this prompt
  + late      by how much its first token would miss its objective, times a weight

All in seconds of that replica.
"""

from __future__ import annotations

from itertools import islice
from typing import NamedTuple

from bros.router.replica import RT, Replica
from bros.router.state import Ask, State

_MOST_LOOKED = 256
"""Nodes that may have to make way, of which those in use do not."""


class Cost(NamedTuple):
    load_s: float
    evicted_s: float
    prefill_s: float
    late_s: float

    @property
    def total_s(self) -> float:
        return self.load_s + self.evicted_s + self.prefill_s + self.late_s


def cost_of(state: State, ask: Ask, replica: Replica) -> Cost:
    """The terms, for a candidate."""
    load_s, prefill_s, late_s = _without_evictions(state, ask, replica)
    return Cost(load_s, evicted_s(state, ask, replica), prefill_s, late_s)


def cheapest(state: State, ask: Ask, among: list[Replica]) -> Replica:
    """The one with the lowest cost; of equal ones the first."""
    # What has to make way takes longest to say, and is never negative.
    quick = [(sum(_without_evictions(state, ask, replica)), replica) for replica in among]
    if len(quick) == 1:
        return quick[0][1]
    best, least = among[0], float("inf")
    for lower, replica in sorted(quick, key=_first):
        if lower >= least:
            break
        total = lower + evicted_s(state, ask, replica)
        if total < least:
            best, least = replica, total
    return best


def _first(pair: tuple[float, Replica]) -> float:
    return pair[0]


def _without_evictions(state: State, ask: Ask, replica: Replica) -> tuple[float, float, float]:
    prefill_s = ask.prefill_s(replica)
    return (
        state.load_s(replica, ask.service_class),
        prefill_s,
        _late_s(state, ask, replica, prefill_s),
    )


def _late_s(state: State, ask: Ask, replica: Replica, prefill_s: float) -> float:
    """Only prompts before it count: answers go on beside it."""
    ttft_s = ask.request.slo.ttft_s or replica.facts.ttft_s
    if ask.service_class is not RT or ttft_s is None:
        return 0.0
    first_s = state.queue_s(replica, RT) + prefill_s
    return max(0.0, first_s - ttft_s) * state.settings.late_weight


def evicted_s(state: State, ask: Ask, replica: Replica) -> float:
    """To compute again what goes, as often as it was asked for within the window: the least
    recently used that nobody uses, until there is room. What one request alone has asked for
    nobody shares."""
    cache = state.forest.caches[replica.number]
    missing = ask.length - ask.matched.get(replica.number, 0)
    missing += cache.num_tokens - replica.facts.capacity_tokens
    if missing <= 0:
        return 0.0
    seconds, own = 0.0, ask.path.nodes
    for node in islice(cache.nodes, _MOST_LOOKED):
        if node.active or node in own:
            continue
        kept = node.cached[replica.number]
        asked = node.asked.get(replica.number, 0)
        if asked > 1:
            seconds += asked * replica.prefill_s(kept, node.start)
        missing -= kept
        if missing <= 0:
            break
    return seconds
