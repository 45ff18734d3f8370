"""E2: exploit cached prefixes, or explore other replicas for load (Preble 3.2).

    missed < cached   exploit: the replicas that have the prefix cached, or its homes
    missed < known    again: most of the prompt was requested within the window, but is evicted now;
                      the replicas that it went to, unless the hit rate is low
    else              explore: the replica with the lowest cost; or, if one is decode-heavy, that
                      one, because prefill and decoding use different resources

`cached` is the longest cached prefix on any replica, `known` the longest prefix in the forest,
`missed` the rest of the prompt. Of several replicas the cheapest gets the request. If waiting there
takes much longer than recomputing the prefix, the request goes to the least loaded other replica,
which has the prefix cached from then on: a burst for one prefix does not wait for balance.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

from bros.core.request import EngineRequest
from bros.router.forest import PrefixNode
from bros.router.state import RT, Replica, RouterState, RoutingQuery

# ---- The cost of a request on a replica (Preble 3.2, LoadCost), in seconds of that replica.
#
#     load      work of the replica that delays the request's class
#   + evicted   recomputing the prefixes that are evicted for this prompt
#   + prefill   computing the tokens of this prompt that are not cached
#   + late      by how much its first token would miss its objective, times a weight


_MAX_NODES_CHECKED = 256
"""Nodes that evicted_s considers, those in use included."""


class Cost(NamedTuple):
    """See above."""

    load_s: float
    evicted_s: float
    prefill_s: float
    late_s: float

    @property
    def total_s(self) -> float:
        return self.load_s + self.evicted_s + self.prefill_s + self.late_s


def cost_of(state: RouterState, query: RoutingQuery, replica: Replica) -> Cost:
    """The cost of a request on one candidate."""
    load_s, prefill_s, late_s = _terms_without_evictions(state, query, replica)
    return Cost(load_s, evicted_s(state, query, replica), prefill_s, late_s)


def cheapest(state: RouterState, query: RoutingQuery, among: list[Replica]) -> Replica:
    """The replica with the lowest cost; of equal ones the first."""
    # The cost of evictions is slow to compute and never negative: the other terms are a lower
    # bound, which rules out most replicas.
    quick = [(sum(_terms_without_evictions(state, query, replica)), replica) for replica in among]
    if len(quick) == 1:
        return quick[0][1]
    best, least = among[0], float("inf")
    for lower, replica in sorted(quick, key=itemgetter(0)):
        if lower >= least:
            break
        total = lower + evicted_s(state, query, replica)
        if total < least:
            best, least = replica, total
    return best


def _terms_without_evictions(
    state: RouterState, query: RoutingQuery, replica: Replica
) -> tuple[float, float, float]:
    prefill_s = query.prefill_s(replica)
    return (
        state.load_s(replica, query.service_class),
        prefill_s,
        _late_s(state, query, replica, prefill_s),
    )


def _late_s(state: RouterState, query: RoutingQuery, replica: Replica, prefill_s: float) -> float:
    """The first token waits for the prefill of other requests, but decoding runs beside it."""
    ttft_s = query.request.slo.ttft_s or replica.facts.ttft_s
    if query.service_class is not RT or ttft_s is None:
        return 0.0
    first_s = state.queue_s(replica, RT) + prefill_s
    return max(0.0, first_s - ttft_s) * state.settings.late_weight


def evicted_s(state: RouterState, query: RoutingQuery, replica: Replica) -> float:
    """Seconds to recompute what a replica evicts for a prompt: its least recently used idle nodes,
    until the prompt fits, each as often as requests of the window went there with it. A node that
    only one request had is not shared and costs nothing."""
    cache = state.forest.caches[replica.number]
    missing = query.length - query.matched.get(replica.number, 0)
    missing += cache.num_tokens - replica.facts.capacity_tokens
    if missing <= 0:
        return 0.0
    seconds, own = 0.0, query.path.nodes
    for node in islice(cache.nodes, _MAX_NODES_CHECKED):
        if node.active or node in own:
            continue
        kept = node.cached[replica.number]
        requests = node.requests.get(replica.number, 0)
        if requests > 1:
            seconds += requests * replica.prefill_s(kept, node.start)
        missing -= kept
        if missing <= 0:
            break
    return seconds


_NEARLY_ALL = 0.95
"""Share of the longest cached prefix that a replica must have to count as having it."""

_MIN_MOVE_SHARE = 0.25
"""Least cost of moving a prefix, as a share of the prefill of the request."""

_MIN_HIT_RATE = 0.25
"""Hit rate from which an evicted prefix goes back to the replica that had it."""

_DECODE_MARGIN = 0.1
"""How far a decode-heavy replica's decode share is above the mean, so that it is not chance."""


class E2:
    """The E2 policy. It has no state of its own: nodes remember their homes (PrefixNode.homes)."""

    def choose(self, state: RouterState, query: RoutingQuery) -> tuple[Replica, str]:
        candidates = list(query.candidates)
        if len(candidates) == 1:
            return candidates[0], "only"
        cached = max((query.matched.get(r.number, 0) for r in candidates), default=0)
        if query.length - cached < cached:
            holders, reason = _with_prefix(state, query, candidates, cached)
        else:
            holders, reason = _with_evicted_prefix(state, query, candidates)
        if not holders:
            return _explore(state, query, candidates)
        found = cheapest(state, query, holders)
        other = _recompute_target(state, query, found, [r for r in candidates if r not in holders])
        return (found, reason) if other is None else (other, "explore")


def _with_prefix(
    state: RouterState, query: RoutingQuery, candidates: Sequence[Replica], cached: int
) -> tuple[list[Replica], str]:
    """The replicas that have the cached prefix of the request, or the homes of its key, and why.

    Unlike in the paper, they must have the whole cached prefix and not just the key: with nested
    prefixes (examples, then a problem) every replica has the key, and so the part after it would be
    spread over all replicas as well.
    """
    key = query.key(cached)
    assert key is not None, "the first node always qualifies"
    least = _NEARLY_ALL * cached
    holders = [r for r in candidates if query.matched.get(r.number, 0) >= least]
    pinned = [replica for replica in holders if replica.number == query.pinned]
    if pinned:
        return pinned, "pinned"
    homes, reason = _assigned_replicas(state, key, candidates)
    return (homes, reason) if homes else (holders, "exploit")


def _with_evicted_prefix(
    state: RouterState, query: RoutingQuery, candidates: Sequence[Replica]
) -> tuple[list[Replica], str]:
    """The replicas that an evicted prefix went to within the window, and those that have most of
    the rest of it.

    Computing it takes as long elsewhere. But the forest runs ahead of the caches, because requests
    wait there: if prefixes moved whenever they seem evicted, several caches would hold copies, and
    each would hold fewer prefixes. With a low hit rate it would be evicted again anyway, so then
    there are none.
    """
    known = query.path.end
    if query.length - known >= known or state.hit_rate < _MIN_HIT_RATE:
        return [], ""
    key = query.key(known)
    assert key is not None, "the first node always qualifies"
    homes, reason = _assigned_replicas(state, key, candidates)
    if homes:
        return homes, reason
    where = {
        number
        for node in query.path.nodes
        if min(node.end, known) >= _NEARLY_ALL * known
        for number in node.requests
    }
    most = max(query.matched.values(), default=0)
    where |= {number for number, tokens in query.matched.items() if tokens >= _NEARLY_ALL * most}
    return [replica for replica in candidates if replica.number in where], "again"


def _assigned_replicas(
    state: RouterState, key: PrefixNode, candidates: Sequence[Replica]
) -> tuple[list[Replica], str]:
    """The homes of a prefix among the candidates; none if it has not been moved."""
    homes = [replica for replica in candidates if replica.number in (key.homes or ())]
    return homes, "planned" if state.settings.plan == "on" else "moved"


def _recompute_target(
    state: RouterState, query: RoutingQuery, found: Replica, others: Sequence[Replica]
) -> Replica | None:
    """The least loaded other replica, if waiting at `found` takes `patience` times as long as
    recomputing the prefix there, and what is evicted for it; else None."""
    if not others:
        return None
    lightest = min(others, key=lambda replica: state.open_s(replica, query.service_class))
    wait_s = state.open_s(found, query.service_class) - state.open_s(lightest, query.service_class)
    # The difference is negative right after a move, when the prefix is not at its new home yet:
    # then that home has to compute it.
    recompute_s = abs(query.prefill_s(lightest) - query.prefill_s(found))
    recompute_s = max(recompute_s, _MIN_MOVE_SHARE * query.prefill_s(lightest))
    patience = state.settings.patience
    if wait_s <= patience * recompute_s:
        return None
    recompute_s += evicted_s(state, query, lightest)
    return lightest if wait_s > patience * recompute_s else None


def _explore(
    state: RouterState, query: RoutingQuery, candidates: list[Replica]
) -> tuple[Replica, str]:
    """The cheapest replica, or a decode-heavy one: prefill is bound by compute and decoding by
    memory, so they run well together. The extra cost must not exceed the prefill itself."""
    found = cheapest(state, query, candidates)
    decode_heavy = _decode_heavy(state, candidates) if state.settings.decode_aware else []
    if decode_heavy and found not in decode_heavy:
        other = cheapest(state, query, decode_heavy)
        more_s = cost_of(state, query, other).total_s - cost_of(state, query, found).total_s
        if more_s <= query.prefill_s(other):
            return other, "decode"
    return found, "explore"


def _decode_heavy(state: RouterState, candidates: Sequence[Replica]) -> list[Replica]:
    """Where answers take more of the time than they should, and than they do on average, unless
    these have been given much more than others."""
    settings = state.settings
    shares = [replica.window_work.decode_share for replica in candidates]
    share = max(settings.decode_share, sum(shares) / len(shares) + _DECODE_MARGIN)
    if max(shares) <= share:
        return []
    limit_s = settings.balance * min(map(state.assigned_s, candidates))
    return [
        replica
        for replica in candidates
        if replica.window_work.decode_share > share and state.assigned_s(replica) <= limit_s
    ]


# ---- Baselines.


class RoundRobin:
    """Each request goes to the next replica."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, state: RouterState, query: RoutingQuery) -> tuple[Replica, str]:
        later = [replica for replica in query.candidates if replica.number > self._last]
        found = min(later or query.candidates, key=attrgetter("number"))
        self._last = found.number
        return found, "turn"


class LeastLoaded:
    """The replica with the least open work; of equal ones, the least loaded within the window."""

    def choose(self, state: RouterState, query: RoutingQuery) -> tuple[Replica, str]:
        service_class = query.service_class

        def load(replica: Replica) -> tuple[float, float]:
            return state.open_s(replica, service_class), state.load_s(replica, service_class)

        return min(query.candidates, key=load), "least"


class OraclePartition:
    """Static partition of the prefixes, made with knowledge of all requests beforehand.

    part_of: request -> number of its part p; it goes to candidate p % number of candidates.
    """

    def __init__(self, part_of: Callable[[EngineRequest], int]) -> None:
        self._part_of = part_of

    def choose(self, state: RouterState, query: RoutingQuery) -> tuple[Replica, str]:
        candidates = sorted(query.candidates, key=attrgetter("number"))
        return candidates[self._part_of(query.request) % len(candidates)], "oracle"
