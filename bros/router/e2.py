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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter, itemgetter
from typing import NamedTuple

from bros.core.interfaces import GroupCosts
from bros.core.request import EngineRequest, ServiceClass
from bros.router.forest import PrefixNode
from bros.router.state import BE, RT, Replica, RouterState, RoutingQuery

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


# ---- Task groups: requests whose results one later call needs together (Parrot's Algorithm 1).
#
# [ common prefix ][ document 1 ]     One replica computes the common prefix once. A group is split
# [ common prefix ][ document 2 ]     over more replicas only if all of it is done sooner that way;
# [ common prefix ][ document 3 ]     members whose prompts continue alike then stay together.
#
# Members that decode together share the steps: each additional one costs a row, not a step.
#
#     replica 1   | open work | common prefix | prefills of members | their answers, in one batch |
#     replica 2   | open work .............. | common prefix | prefill | answer |
#                                                                               done: the later one


_MAX_KV_SHARE = 0.75
"""Share of a replica's KV cache that one task group should need at most."""


_IDLE_WEIGHT = 0.3
"""A group that is split computes its common prefix again on every further replica, and other
requests wait for that. This is the weight of a second of such work on a replica that has no other
work, where only requests that arrive meanwhile wait. On a replica that has other work it is 1.

Measured with simulated programs of 6 maps over 800 tokens on three replicas, against one weight for
all replicas, the share of the last three minutes in which they were busy:

- Programs that arrive as a Poisson process (LLaMA-7B on A6000, a small model on CPUs) take 0.98 to
  0.51 times as long.
- 12 programs, three at once, compute no prefix twice; with the one weight they did so up to 18
  times.
- If the idle weight is 0.5, a group alone on three idle replicas takes 1.06 times as long as with
  the best placement. If it is 0.1, programs on CPUs take 1.05 times as long at low load."""


class _MemberWork(NamedTuple):
    """Seconds of a member's work."""

    prefill_s: float
    decode_s: float


@dataclass(frozen=True, slots=True)
class QueryGroup:
    """common: length of the prefix that all members have, in tokens."""

    queries: Sequence[RoutingQuery]
    common: int

    @property
    def service_class(self) -> ServiceClass:
        """Best-effort if any member is: the group is done when its last member is."""
        return BE if any(query.service_class is BE for query in self.queries) else RT

    def common_s(self, replica: Replica) -> float:
        """Seconds to compute the part of the common prefix that is not cached."""
        most = max(query.matched.get(replica.number, 0) for query in self.queries)
        cached = min(most, self.common)
        return replica.prefill_s(self.common - cached, cached)

    def member_work(self, query: RoutingQuery, replica: Replica, rows: int) -> _MemberWork:
        """A member's work without the common prefix. rows: members that decode together."""
        cached = max(query.matched.get(replica.number, 0), self.common)
        answer = replica.expected_output(query.request)
        return _MemberWork(
            replica.prefill_s(max(query.length - cached, 0), cached),
            replica.decode_s(answer, query.length, rows),
        )

    def member_work_s(self, query: RoutingQuery, replica: Replica, rows: int) -> float:
        """The seconds of `member_work`."""
        return sum(self.member_work(query, replica, rows))

    def fits(self, replica: Replica, count: int) -> bool:
        """Whether a share of 1 / count leaves room in the KV cache."""
        own = sum(
            query.length - self.common + replica.expected_output(query.request)
            for query in self.queries
        )
        return self.common + own / count <= _MAX_KV_SHARE * replica.facts.capacity_tokens


class _Split(NamedTuple):
    """The replicas of a group.

    members: replica -> the members that it gets.
    done_s: when the last one is done.
    others_s: weighted seconds that other requests wait while all replicas but one compute the
        common prefix again.
    """

    members: dict[Replica, list[RoutingQuery]]
    done_s: float
    others_s: float

    @property
    def cost_s(self) -> float:
        """What is compared with other splits of the same group."""
        return self.done_s + self.others_s


class _Choice(NamedTuple):
    """The split of a group, and the cost of the cheapest other one that was considered; None if
    there was none."""

    split: _Split
    alternative_s: float | None


def _cost_s(choices: Sequence[_Choice]) -> float:
    """When the last group is done, and for how long others wait."""
    done_s = max(choice.split.done_s for choice in choices)
    return done_s + sum(choice.split.others_s for choice in choices)


class GroupPlace(NamedTuple):
    """Where a member of a group goes.

    costs: those of the group.
    """

    replica: Replica
    costs: GroupCosts


def place_groups(state: RouterState, groups: Sequence[QueryGroup]) -> dict[str, GroupPlace]:
    """request id -> its place, for groups that arrived together. All have the same candidates.

    Groups that are split delay each other, since each needs its common prefix computed on more
    replicas. So several groups are placed on up to one replica each, on up to two, and so on, and
    the cheapest placement counts. In simulated time (LLaMA-7B on an A6000), two groups of 3 maps
    over 800 tokens each on two replicas were both split, and their programs took 1.10 times as long
    as with one group per replica.
    """
    most = len(groups[0].queries[0].candidates)
    limits = [most] if len(groups) == 1 else range(1, most + 1)
    plans = [_plan(state, groups, limit) for limit in limits]
    chosen = min(plans, key=_cost_s)
    return {
        query.request.request_id: GroupPlace(
            replica, GroupCosts(split.cost_s, alternative_s, len(split.members))
        )
        for split, alternative_s in chosen
        for replica, queries in split.members.items()
        for query in queries
    }


class _WorkBefore:
    """What a replica has to do before or beside a group: prompts come before its own, and the rows
    that decode make each of its steps longer."""

    def __init__(self, state: RouterState, replica: Replica) -> None:
        self._replica = replica
        self._be_weight = state.weight(replica)
        self._totals = replica.open_work.copy()

    def add(self, group: QueryGroup, members: Sequence[RoutingQuery]) -> None:
        """These members of a group are placed here."""
        common_s = group.common_s(self._replica)
        for query in members:
            work = group.member_work(query, self._replica, len(members))
            self._totals.add(query.service_class, common_s + work.prefill_s, work.decode_s)
            common_s = 0.0

    def delay_s(self, group: QueryGroup) -> float:
        """By how much it delays a group, which waits for work as requests of its class do."""
        members, replica = len(group.queries), self._replica
        together = members + self._totals.num_requests

        def added_s(query: RoutingQuery) -> float:
            tokens = replica.expected_output(query.request)
            alone_s = members * replica.decode_s(tokens, query.length, members)
            return together * replica.decode_s(tokens, query.length, together) - alone_s

        prefill_s = self._totals.prefill_total_s(group.service_class, self._be_weight)
        decode_s = self._totals.total_s(group.service_class, self._be_weight) - prefill_s
        return prefill_s + min(decode_s, max(map(added_s, group.queries)))

    @property
    def weight(self) -> float:
        """Weight of a second in which the replica computes a common prefix again."""
        return 1.0 if self._totals.num_requests else _IDLE_WEIGHT


def _plan(state: RouterState, groups: Sequence[QueryGroup], limit: int) -> list[_Choice]:
    """A split of each group over at most `limit` replicas; real-time groups come first, since they
    hardly wait for best-effort ones, and of one class the one with most work."""
    candidates = groups[0].queries[0].candidates
    work_before = {replica: _WorkBefore(state, replica) for replica in candidates}

    def precedence(group: QueryGroup) -> tuple[bool, float]:
        return group.service_class is RT, _work_s(group, candidates[0])

    found = []
    for group in sorted(groups, key=precedence, reverse=True):
        choice = _split(group, work_before, limit)
        for replica, members in choice.split.members.items():
            work_before[replica].add(group, members)
        found.append(choice)
    return found


def _work_s(group: QueryGroup, replica: Replica) -> float:
    rows = len(group.queries)
    work_s = sum(group.member_work_s(query, replica, rows) for query in group.queries)
    return group.common_s(replica) + work_s


def _split(group: QueryGroup, work_before: Mapping[Replica, _WorkBefore], limit: int) -> _Choice:
    """The cheapest split of a group over those that can start it soonest.

    work_before: by candidate. limit: most replicas, unless it does not fit.
    """
    begin_s = {
        replica: before.delay_s(group) + group.common_s(replica)
        for replica, before in work_before.items()
    }
    order = sorted(begin_s, key=begin_s.__getitem__)
    most = min(len(order), len(group.queries))
    splits = [_assign(group, order[:count], begin_s, work_before) for count in range(1, most + 1)]
    best, num = splits[0], 1
    for count, split in enumerate(splits[1:], 2):
        cheaper = split.cost_s < best.cost_s
        if (count <= limit and cheaper) or not group.fits(order[count - 1], num):
            best, num = split, count
    elsewhere = [_assign(group, [replica], begin_s, work_before) for replica in order[1:2]]
    others_s = [split.cost_s for split in (*splits, *elsewhere) if split is not best]
    return _Choice(best, min(others_s, default=None))


def _assign(
    group: QueryGroup,
    replicas: Sequence[Replica],
    begin_s: Mapping[Replica, float],
    work_before: Mapping[Replica, _WorkBefore],
) -> _Split:
    """Split the members, sorted by tokens, into runs, one per replica, that are done at about the
    same time."""
    queries = sorted(group.queries, key=_token_bytes)
    rows = -(-len(queries) // len(replicas))
    work_s = [group.member_work_s(query, replicas[0], rows) for query in queries]
    done_s = (sum(work_s) + sum(begin_s[replica] for replica in replicas)) / len(replicas)
    members: dict[Replica, list[RoutingQuery]] = {replica: [] for replica in replicas}
    index, until_s, passed_s = 0, max(0.0, done_s - begin_s[replicas[0]]), 0.0
    for query, seconds in zip(queries, work_s, strict=True):
        while passed_s + seconds / 2 >= until_s and index < len(replicas) - 1:
            index += 1
            until_s += max(0.0, done_s - begin_s[replicas[index]])
        members[replicas[index]].append(query)
        passed_s += seconds
    members = {replica: queries for replica, queries in members.items() if queries}
    ends_s = [
        begin_s[replica]
        + sum(group.member_work_s(query, replica, len(queries)) for query in queries)
        for replica, queries in members.items()
    ]
    again_s = [work_before[replica].weight * group.common_s(replica) for replica in members]
    return _Split(members, max(ends_s), sum(again_s) - min(again_s))


def _token_bytes(query: RoutingQuery) -> list[bytes]:
    return [data for _, data in query.pieces]
