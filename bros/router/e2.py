"""Exploit what is cached, or explore for load (Preble 3.2, E2).

    missed < cached   the request goes where the part of it is cached that matters: exploit
    missed < known    most of it was asked for within the window but has been evicted: it goes
                      where that went, if caches are worth something: again
    else              it goes where it costs least: explore; or where answers take most of the
                      time, as prompts fit in there best

`cached` is the most that any replica has. Besides, work is not put behind what takes longer
than computing the prefix again would: then the replica that costs least gets it, and has it cached
from then on. That is what keeps a burst for one prefix from waiting until balance.py moves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from bros.core.request import EngineRequest
from bros.router.forest import PrefixNode
from bros.router.state import RT, Ask, Replica, State

# ---- What it costs to put a request on a replica (Preble 3.2, LoadCost).
#
#     load      what the replica has to do already, of that what counts for the request's class
#   + evicted   what others will have to compute again, as their prefix makes room for this prompt
#   + prefill   what is not cached of this prompt
#   + late      by how much its first token would miss its objective, times a weight
#
# All in seconds of that replica.


_MOST_LOOKED = 256
"""Nodes that are looked at as candidates for eviction; nodes in use are passed over."""


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
    # The cost of evictions takes longest to compute, and is never negative.
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
    recently used idle nodes, until the prompt fits. What one request alone has asked for is
    not shared."""
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


_NEARLY = 0.95
"""Of what the best replica has of a prompt, what others must have to be as good."""

_MOVE = 0.25
"""What moving a prefix costs at least, as a share of computing it, even if it is cached nowhere."""

_WORTH = 0.25
"""Of what is asked for, what caches must hold for a prefix to come back to one."""

_MORE = 0.1
"""By how much a replica's share of decoding has to be above the mean, to be more than chance."""


class E2:
    """The policy. Has no state of its own: prefixes remember their homes (Node.homes)."""

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        candidates = list(ask.candidates)
        if len(candidates) == 1:
            return candidates[0], "only"
        cached = max((ask.matched.get(r.number, 0) for r in candidates), default=0)
        if ask.length - cached < cached:
            having, reason = _having(state, ask, candidates, cached)
        else:
            having, reason = _formerly(state, ask, candidates)
        if not having:
            return _explore(state, ask, candidates)
        found = cheapest(state, ask, having)
        other = _instead(state, ask, found, [r for r in candidates if r not in having])
        return (found, reason) if other is None else (other, "explore")


def _having(
    state: State, ask: Ask, candidates: Sequence[Replica], cached: int
) -> tuple[list[Replica], str]:
    """Where what is cached of the request is, or where its key was moved to.

    That is all of it and not just the key, unlike in the paper: where prefixes are nested (the
    examples, then the problem), the key is everywhere, and what comes after it would be as well.
    """
    key = ask.key(cached)
    assert key is not None, "the first node is longer than nothing"
    least = _NEARLY * cached
    having = [r for r in candidates if ask.matched.get(r.number, 0) >= least]
    parked = [replica for replica in having if replica.number == ask.parked]
    if parked:
        return parked, "parked"
    homes, reason = _homes(state, key, candidates)
    return (homes, reason) if homes else (having, "exploit")


def _formerly(state: State, ask: Ask, candidates: Sequence[Replica]) -> tuple[list[Replica], str]:
    """Where a prefix that was evicted went within the window, and where most of it is left.

    Computing it takes as long elsewhere, but what is known of caches is behind by what waits: if
    prefixes moved whenever they seem to be gone, they would be in several caches at once, and all
    of these would hold less. Not where caches hold so little of what is asked for that it would be
    gone again the next time.
    """
    known = ask.path.end
    if ask.length - known >= known or state.hits < _WORTH:
        return [], ""
    key = ask.key(known)
    assert key is not None, "more than nothing is known"
    homes, reason = _homes(state, key, candidates)
    if homes:
        return homes, reason
    where = {
        number
        for node in ask.path.nodes
        if min(node.end, known) >= _NEARLY * known
        for number in node.asked
    }
    most = max(ask.matched.values(), default=0)
    where |= {number for number, tokens in ask.matched.items() if tokens >= _NEARLY * most}
    return [replica for replica in candidates if replica.number in where], "again"


def _homes(
    state: State, key: PrefixNode, candidates: Sequence[Replica]
) -> tuple[list[Replica], str]:
    """Where a prefix was moved to; none if it was not."""
    homes = [replica for replica in candidates if replica.number in (key.homes or ())]
    return homes, "planned" if state.settings.plan == "on" else "moved"


def _instead(state: State, ask: Ask, found: Replica, others: Sequence[Replica]) -> Replica | None:
    """Who computes the prefix again, and what makes room for it, sooner than `found` comes to the
    request; None if no replica does."""
    if not others:
        return None
    lightest = min(others, key=lambda replica: state.open_s(replica, ask.service_class))
    wait_s = state.open_s(found, ask.service_class) - state.open_s(lightest, ask.service_class)
    # Below 0 where a prefix has moved and is not there yet: the first request has to wait as well.
    again_s = abs(ask.prefill_s(lightest) - ask.prefill_s(found))
    again_s = max(again_s, _MOVE * ask.prefill_s(lightest))
    patience = state.settings.patience
    if wait_s <= patience * again_s:
        return None
    again_s += evicted_s(state, ask, lightest)
    return lightest if wait_s > patience * again_s else None


def _explore(state: State, ask: Ask, candidates: list[Replica]) -> tuple[Replica, str]:
    """Prompts are limited by arithmetic and answers by memory: each fits in beside the other.

    Not where that costs more by as much as the prompt takes.
    """
    found = cheapest(state, ask, candidates)
    decoding = _decoding(state, candidates) if state.settings.decode_aware else []
    if decoding and found not in decoding:
        other = cheapest(state, ask, decoding)
        more_s = cost_of(state, ask, other).total_s - cost_of(state, ask, found).total_s
        if more_s <= ask.prefill_s(other):
            return other, "decode"
    return found, "explore"


def _decoding(state: State, candidates: Sequence[Replica]) -> list[Replica]:
    """Where answers take more of the time than they should, and than they do on average, unless
    these have been given much more than others."""
    settings = state.settings
    shares = [replica.window.decode_share for replica in candidates]
    share = max(settings.decode_share, sum(shares) / len(shares) + _MORE)
    if max(shares) <= share:
        return []
    limit_s = settings.balance * min(map(state.given_s, candidates))
    return [
        replica
        for replica in candidates
        if replica.window.decode_share > share and state.given_s(replica) <= limit_s
    ]


# ---- Policies that E2 is compared with.


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
    """Every prefix has its replica, chosen with knowledge of all requests beforehand.

    part_of: request -> number of its part; part p goes to the candidate p modulo their number.
    """

    def __init__(self, part_of: Callable[[EngineRequest], int]) -> None:
        self._part_of = part_of

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        candidates = sorted(ask.candidates, key=_number)
        return candidates[self._part_of(ask.request) % len(candidates)], "oracle"


def _number(replica: Replica) -> int:
    return replica.number


# ---- Task groups: requests that a later one waits for all of, placed as one (Parrot's Algorithm
# 1).
#
# [ common prefix ][ document 1 ]          one replica computes the prefix once; more than one
# [ common prefix ][ document 2 ]          only if all would be done sooner, each then with
# [ common prefix ][ document 3 ]          those that go on alike


_ROOM = 0.75
"""Of a replica's KV cache, what one group should need at most."""


@dataclass(frozen=True, slots=True)
class AskGroup:
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
    group = AskGroup(asks, common)
    service_class = asks[0].service_class
    begin_s = {
        replica: state.open_s(replica, service_class) + _common_s(group, replica)
        for replica in asks[0].candidates
    }
    order = sorted(begin_s, key=begin_s.__getitem__)
    chosen = order[: _parts(group, order, begin_s)]
    return _share_out(group, chosen)


def _parts(group: AskGroup, order: Sequence[Replica], begin_s: dict[Replica, float]) -> int:
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


def _share_out(group: AskGroup, replicas: Sequence[Replica]) -> dict[str, Replica]:
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


def _common_s(group: AskGroup, replica: Replica) -> float:
    """To compute what of the common prefix is not there."""
    there = min(max(ask.matched.get(replica.number, 0) for ask in group.asks), group.common)
    return replica.prefill_s(group.common - there, there)


def _own_s(ask: Ask, common: int, replica: Replica) -> float:
    there = max(ask.matched.get(replica.number, 0), common)
    answer_s = replica.decode_s(replica.expected_output(ask.request), ask.length)
    return replica.prefill_s(max(ask.length - there, 0), there) + answer_s
