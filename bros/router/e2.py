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

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, islice, pairwise
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
# A replica computes all prompts first, also those of other groups, and then decodes in steps that
# all answers share: each additional one costs a row, not a step.
#
#     replica 1   | open work | common prefix | prompts of members | all answers | the longest ones |
#     replica 2   | open work .............. | common prefix | prompt | answer |
#                                                                          done: the later of the two


_MAX_KV_SHARE = 0.75
"""Share of a replica's KV cache that one task group should need at most."""


_IDLE_WEIGHT = 0.15
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


_MAX_PLACED_AGAIN = 8
"""Up to so many groups that arrived together are placed again when the others have their places."""


class QueryGroup:
    """Members of a task group that arrived together.

    queries: in the order of their tokens, so that those that begin alike are neighbours.
    service_class: best-effort if any member is: the group is done when its last member is.
    tokens: expected length of the longest answer.
    """

    def __init__(self, queries: Sequence[RoutingQuery], common: int) -> None:
        """common: length of the prefix that all members have, in tokens."""
        self.queries = sorted(queries, key=_token_bytes)
        self.service_class = BE if any(query.service_class is BE for query in queries) else RT
        self._common = common
        replica = queries[0].candidates[0]
        answers = [replica.expected_output(query.request) for query in queries]
        self.tokens = max(answers)
        self._lengths = [0, *accumulate(query.length for query in self.queries)]
        self.mean_length = self._lengths[-1] / len(queries)
        self._own_tokens = self._lengths[-1] + sum(answers) - common * len(queries)
        self._prefill_s: dict[Replica, tuple[float, list[float]]] = {}
        self._middles_s: dict[Replica, tuple[list[float], float]] = {}

    def fits(self, replica: Replica, count: int) -> bool:
        """Whether a share of 1 / count leaves room in the KV cache."""
        most = _MAX_KV_SHARE * replica.facts.capacity_tokens
        return self._common + self._own_tokens / count <= most

    def common_s(self, replica: Replica) -> float:
        """Seconds to compute the part of the common prefix that is not cached."""
        return self._prefill_on(replica)[0]

    def share(self, replica: Replica, start: int, stop: int) -> _Share:
        """Members start to stop - 1 on a replica, which also computes the common prefix."""
        common_s, sums_s = self._prefill_on(replica)
        return _Share(
            group=self,
            replica=replica,
            start=start,
            stop=stop,
            prefill_s=common_s + sums_s[stop] - sums_s[start],
            context=self._lengths[stop] - self._lengths[start],
        )

    def middles_s(self, replica: Replica) -> tuple[list[float], float]:
        """When each member is half done, if they are computed one after another, and the common
        prefix and the steps are there anyway; and when all are done."""
        found = self._middles_s.get(replica)
        if found is None:
            sums_s, step_s = self._prefill_on(replica)[1], replica.step_s(0, 0)
            ends_s = [
                prefill_s + self.tokens * (replica.step_s(rows, context) - step_s)
                for rows, (prefill_s, context) in enumerate(zip(sums_s, self._lengths, strict=True))
            ]
            middles_s = [(begin_s + end_s) / 2 for begin_s, end_s in pairwise(ends_s)]
            found = self._middles_s[replica] = middles_s, ends_s[-1]
        return found

    def _prefill_on(self, replica: Replica) -> tuple[float, list[float]]:
        """Seconds for the common prefix, and for what else the first 0, 1, .. members have."""
        found = self._prefill_s.get(replica)
        if found is None:
            cached = [query.matched.get(replica.number, 0) for query in self.queries]
            known = min(max(cached), self._common)
            own_s = (
                replica.prefill_s(max(query.length - begin, 0), begin)
                for query, begin in zip(
                    self.queries, [max(tokens, self._common) for tokens in cached], strict=True
                )
            )
            found = replica.prefill_s(self._common - known, known), [0.0, *accumulate(own_s)]
            self._prefill_s[replica] = found
        return found


def _token_bytes(query: RoutingQuery) -> list[bytes]:
    return [data for _, data in query.pieces]


class _Share(NamedTuple):
    """Members start to stop - 1 of a group on one replica.

    prefill_s: seconds to compute their prompts.
    context: tokens of their prompts, together.
    """

    group: QueryGroup
    replica: Replica
    start: int
    stop: int
    prefill_s: float
    context: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


class _Load:
    """What a replica has to do: its open work, and shares of the groups.

    last_s: when the last of the shares is done.
    """

    def __init__(self, state: RouterState, replica: Replica, now: float) -> None:
        self.replica = replica
        self.last_s = 0.0
        self._be_weight = state.weight(replica)
        self._shares: list[_Share] = []
        totals = replica.open_work.copy()
        self._others = totals.num_requests
        running = replica.running_prompt()
        if running is not None:
            begun_s = max(running.time_s, replica.prefilled_s)
            done_s = min(running.prefill_s, now - begun_s)
            totals.prefill_s[running.service_class] -= done_s
        self._open_s = {}  # class -> (prompts, answers) that a group of the class waits for
        for service_class in (RT, BE):
            prefill_s = totals.prefill_total_s(service_class, self._be_weight)
            decode_s = totals.total_s(service_class, self._be_weight) - prefill_s
            self._open_s[service_class] = prefill_s, decode_s

    @property
    def weight(self) -> float:
        """Weight of a second in which the replica computes a common prefix again."""
        return 1.0 if self._others else _IDLE_WEIGHT

    def add(self, share: _Share) -> None:
        self._shares.append(share)
        self.last_s = max(self.ends_s().values())

    def remove(self, group: QueryGroup) -> None:
        self._shares = [share for share in self._shares if share.group is not group]
        self.last_s = max(self.ends_s().values(), default=0.0)

    def ends_s(self, *more: _Share) -> dict[QueryGroup, float]:
        """When each group is done here, if it gets more shares."""
        replica, shares = self.replica, sorted([*self._shares, *more], key=_tokens)
        rows, context = sum(share.rows for share in shares), sum(share.context for share in shares)
        prefill_s = {RT: 0.0, BE: 0.0}
        for share in shares:
            prefill_s[share.group.service_class] += share.prefill_s
        decode_s, steps, found = 0.0, 0.0, {}
        for share in shares:
            group, others = share.group, self._others
            decode_s += (group.tokens - steps) * replica.step_s(rows, context)
            steps = group.tokens
            before_s, beside_s = self._open_s[group.service_class]
            more_s = replica.step_s(rows + others, context + others * group.mean_length)
            more_s -= replica.step_s(rows, context)
            found[group] = (
                before_s
                + min(beside_s, steps * more_s)
                + prefill_s[RT]
                + (1.0 if group.service_class is BE else self._be_weight) * prefill_s[BE]
                + decode_s
            )
            rows, context = rows - share.rows, context - share.context
        return found


def _tokens(share: _Share) -> float:
    return share.group.tokens


class _Split(NamedTuple):
    """The shares of a group.

    done_s: when its last member is done.
    others_s: weighted seconds that other requests wait while all replicas but one compute the
        common prefix again.
    last_s: when the last of all groups is done that have a place.
    """

    shares: list[_Share]
    done_s: float
    others_s: float
    last_s: float

    @property
    def cost_s(self) -> float:
        """Of this group alone."""
        return self.done_s + self.others_s

    @property
    def rank(self) -> tuple[float, float]:
        """The least one is best: all groups count, and then this one."""
        return self.last_s + self.others_s, self.cost_s


class GroupPlace(NamedTuple):
    """Where a member of a group goes.

    costs: those of the group.
    """

    replica: Replica
    costs: GroupCosts


def place_groups(
    state: RouterState, groups: Sequence[QueryGroup], now: float
) -> dict[str, GroupPlace]:
    """request id -> its place, for groups that arrived together. All have the same candidates.

    Groups that are split delay each other, since each needs its common prefix computed on more
    replicas. So several groups are placed on one replica each, and on as many as are best for each,
    and the cheaper placement counts. TODO
    """
    most = len(groups[0].queries[0].candidates)
    limits = {most} if len(groups) == 1 else {1, most}
    plans = [_plan(state, groups, now, limit) for limit in sorted(limits)]
    _, splits = min(plans, key=itemgetter(0))
    return {
        query.request.request_id: GroupPlace(
            share.replica, GroupCosts(split.cost_s, alternative_s, len(split.shares))
        )
        for split, alternative_s in splits
        for share in split.shares
        for query in share.group.queries[share.start : share.stop]
    }


class _Choice(NamedTuple):
    """The split of a group, and the cost of the cheapest other one that was considered; None if
    there was none."""

    split: _Split
    alternative_s: float | None


def _plan(
    state: RouterState, groups: Sequence[QueryGroup], now: float, limit: int
) -> tuple[float, Sequence[_Choice]]:
    """A split of each group over at most `limit` replicas, and what it costs. Real-time groups come
    first, since they hardly wait for best-effort ones, and of one class the one with most work."""
    candidates = groups[0].queries[0].candidates
    loads = {replica: _Load(state, replica, now) for replica in candidates}
    found: dict[QueryGroup, _Choice] = {}

    def place(group: QueryGroup, limit: int) -> None:
        found[group] = _split(group, loads, limit)
        for share in found[group].split.shares:
            loads[share.replica].add(share)

    order = sorted(groups, key=lambda group: _precedence(group, candidates[0]), reverse=True)
    for group in order:
        place(group, limit)
    if 1 < len(groups) <= _MAX_PLACED_AGAIN:
        for group in ROUNDS * order:
            old = found[group]
            for share in old.split.shares:
                loads[share.replica].remove(group)
            old_rank = _evaluate(group, old.split.shares, loads).rank
            new = _split(group, loads, len(candidates))
            if not new.split.rank < old_rank: new = old
            found[group] = new
            for share in found[group].split.shares:
                loads[share.replica].add(share)
    last_s = max(load.last_s for load in loads.values())
    return last_s + sum(choice.split.others_s for choice in found.values()), list(found.values())

ROUNDS = 2

def _precedence(group: QueryGroup, replica: Replica) -> tuple[bool, float]:
    share = group.share(replica, 0, len(group.queries))
    work_s = share.prefill_s + group.tokens * replica.step_s(share.rows, share.context)
    return group.service_class is RT, work_s


def _split(group: QueryGroup, loads: Mapping[Replica, _Load], limit: int) -> _Choice:
    """The best split of a group over those that can start it soonest.

    loads: of all candidates. limit: most replicas, unless it does not fit.
    """
    size = len(group.queries)
    alone = {
        replica: _evaluate(group, [group.share(replica, 0, size)], loads) for replica in loads
    }
    order = sorted(alone, key=lambda replica: alone[replica].rank)
    begin_s = {replica: loads[replica].ends_s(group.share(replica, 0, 0))[group] for replica in order}
    splits = [alone[order[0]]]
    for count in range(2, min(len(order), size) + 1):
        splits.append(_evaluate(group, _assign(group, order[:count], begin_s), loads))
    best, num = splits[0], 1
    for count, split in enumerate(splits[1:], 2):
        better = split.rank < best.rank
        if (count <= limit and better) or not group.fits(order[count - 1], num):
            best, num = split, count
    others_s = [
        split.cost_s for split in (*splits, *islice(alone.values(), None)) if split is not best
    ]
    return _Choice(best, min(others_s, default=None))


def _assign(
    group: QueryGroup, replicas: Sequence[Replica], begin_s: Mapping[Replica, float]
) -> list[_Share]:
    """Split the members into runs, one per replica, that are done at about the same time."""
    middles_s, size = group.middles_s(replicas[0])
    end_s = (size + sum(begin_s[replica] for replica in replicas)) / len(replicas)
    shares, start, until_s = [], 0, 0.0
    for replica in replicas:
        until_s += max(0.0, end_s - begin_s[replica])
        stop = len(group.queries) if replica is replicas[-1] else bisect_left(middles_s, until_s)
        if stop > start:
            shares.append(group.share(replica, start, stop))
            start = stop
    return shares


def _evaluate(
    group: QueryGroup, shares: list[_Share], loads: Mapping[Replica, _Load]
) -> _Split:
    """loads: without the group."""
    ends_s = {share.replica: loads[share.replica].ends_s(share) for share in shares}
    last_s = max(
        max(ends_s[replica].values()) if replica in ends_s else load.last_s
        for replica, load in loads.items()
    )
    again_s = [loads[replica].weight * group.common_s(replica) for replica in ends_s]
    done_s = max(ends[group] for ends in ends_s.values())
    return _Split(shares, done_s, sum(again_s) - min(again_s), last_s)
