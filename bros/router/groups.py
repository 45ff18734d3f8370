"""Places task groups: requests whose results one later call needs together (Parrot's Algorithm 1).

    [ common prefix ][ document 1 ]     One replica computes the common prefix once. A group is
    [ common prefix ][ document 2 ]     split over more replicas only if all of it is done sooner
    [ common prefix ][ document 3 ]     that way; members that continue alike then stay together.

A replica computes all prompts first, also those of other groups, and then decodes in steps that all
answers share: each additional one costs a row, not a step.

    replica 1   | open work | common prefix | prompts of members | all answers | longest ones |
    replica 2   | open work .............. | common prefix | prompt | answer |
                                                                      done: the later of the two
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

from bros.core.interfaces import GroupCosts
from bros.router.state import BE, RT, Replica, RouterState, RoutingQuery

_MAX_KV_SHARE = 0.75
"""Share of a replica's KV cache that one task group should need at most."""


_IDLE_WEIGHT = 0.15
"""A group that is split computes its common prefix again on every further replica, and other
requests wait for that. This is the weight of a second of such work on a replica that has no other
work, where only requests that arrive meanwhile wait. On a replica that has other work it is 1.

Measured in virtual time with programs of 3 to 6 maps over 400 or 800 tokens that arrive as a
Poisson process at three replicas. The lower the weights, the earlier is a program that is alone
(mean of 200, relative to the best placement), and the later are programs beside others:

- 0.3, 0.2, 0.15 where idle: 1.012, 1.010, 1.009 alone. With 0.15 instead of 0.3, programs at low
  load take 1.001 times as long on an A6000, and 1.01 times where steps are as long as their tokens.
- 1, 0.5, 0.3 where busy: at medium load programs take 1, 1.09 and 1.16 times as long."""


_BESIDE_ANSWERS = 0.3
"""Share of its time by which a best-effort prompt takes at least longer where real-time answers
decode and best-effort work yields. With this, programs as in
tests/semantic/test_fixed_placements.py that meet such answers take 1.011 instead of 1.018 times as
long as with the best placement (mean of 132), and 1.17 instead of 1.62 in the worst case; with 0.5,
1.014 on average."""


_MAX_COMPARED = 4
"""Most groups that arrived together and are placed in several ways, of which the best counts.
Placing 4 groups of 16 on 8 replicas takes about 15 ms."""


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

    def halfway_s(self, replica: Replica) -> list[float]:
        """When each member is half done, if they are computed one after another, and the common
        prefix and the steps are there anyway."""
        ends_s = [self.own_s(replica, count) for count in range(len(self.queries) + 1)]
        return [(begin_s + end_s) / 2 for begin_s, end_s in pairwise(ends_s)]

    def own_s(self, replica: Replica, count: int) -> float:
        """Seconds that the first `count` members add to the common prefix and to the steps."""
        rows_s = replica.step_s(count, self._lengths[count]) - replica.step_s(0, 0)
        return self._prefill_on(replica)[1][count] + self.tokens * rows_s

    def _prefill_on(self, replica: Replica) -> tuple[float, list[float]]:
        """Seconds for the common prefix, and for what else the first 0, 1, .. members have."""
        found = self._prefill_s.get(replica)
        if found is None:
            cached = [query.matched.get(replica.number, 0) for query in self.queries]
            known = min(max(cached), self._common)
            begins = [max(tokens, self._common) for tokens in cached]
            own_s = [
                replica.prefill_s(max(query.length - begin, 0), begin)
                for query, begin in zip(self.queries, begins, strict=True)
            ]
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
        self._rt_answers_s = totals.decode_s[RT] if replica.facts.yields else 0.0
        if running is not None and (running.service_class is RT or not self._rt_answers_s):
            begun_s = max(running.time_s, replica.prefilled_s)
            done_s = min(running.prefill_s, now - begun_s)
            totals.prefill_s[running.service_class] -= done_s
        self._open_s = {}  # class -> seconds of prompts and of answers that delay it
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

    def remove(self, share: _Share) -> None:
        self._shares.remove(share)
        self.last_s = max(self.ends_s().values(), default=0.0)

    def ends_s(self, *more: _Share) -> dict[QueryGroup, float]:
        """When each group is done here, if it gets more shares."""
        replica, others = self.replica, self._others
        shares = sorted([*self._shares, *more], key=attrgetter("group.tokens"))
        rows, context = sum(share.rows for share in shares), sum(share.context for share in shares)
        prefill_s = {RT: 0.0, BE: 0.0}
        for share in shares:
            prefill_s[share.group.service_class] += share.prefill_s
        decode_s, steps, found = 0.0, 0.0, {}
        for share in shares:
            group = share.group
            decode_s += (group.tokens - steps) * replica.step_s(rows, context)
            steps = group.tokens
            before_s, beside_s = self._open_s[group.service_class]
            # Answers of others make these steps longer, until they end.
            more_s = replica.step_s(rows + others, context + others * group.mean_length)
            more_s -= replica.step_s(rows, context)
            if group.service_class is BE:
                prompts_s = prefill_s[RT] + prefill_s[BE]
                prompts_s += min(self._rt_answers_s, _BESIDE_ANSWERS * prefill_s[BE])
            else:
                prompts_s = prefill_s[RT] + self._be_weight * prefill_s[BE]
            found[group] = before_s + min(beside_s, steps * more_s) + prompts_s + decode_s
            rows, context = rows - share.rows, context - share.context
        return found


class _Split(NamedTuple):
    """The shares of a group.

    done_s: when its last member is done.
    others_s: weighted seconds that other requests wait while all replicas but one compute the
        common prefix again.
    last_s: when the last of all groups is done that have a place.
    alternative_s: the cost of the cheapest other split that was considered; None if there was none.
    """

    shares: list[_Share]
    done_s: float
    others_s: float
    last_s: float
    alternative_s: float | None = None

    @property
    def cost_s(self) -> float:
        """Of this group alone."""
        return self.done_s + self.others_s


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
    replicas. None of them would gain by giving way alone, so a few groups are placed in several
    ways: first each on one replica, or each on as many as it likes, and in either order.
    """
    most = len(groups[0].queries[0].candidates)
    few = 1 < len(groups) <= _MAX_COMPARED
    limits = {1, most} if few else {max(1, most // len(groups))}
    plans = [
        _plan(state, groups, now, limit, most_first)
        for limit in sorted(limits)
        for most_first in ((True, False) if few else (True,))
    ]
    return {
        query.request.request_id: GroupPlace(
            share.replica, GroupCosts(split.cost_s, split.alternative_s, len(split.shares))
        )
        for split in min(plans, key=_cost_s)
        for share in split.shares
        for query in share.group.queries[share.start : share.stop]
    }


def _cost_s(splits: Sequence[_Split]) -> float:
    """When the last group is done, and for how long others wait."""
    return splits[-1].last_s + sum(split.others_s for split in splits)


def _plan(
    state: RouterState, groups: Sequence[QueryGroup], now: float, limit: int, most_first: bool
) -> list[_Split]:
    """A split of each group over at most `limit` replicas. Real-time groups come first, since they
    hardly wait for best-effort ones, and of one class the one with most work, or the other way
    round. Then each of a few groups gets another place if that is better beside the others, on any
    number of replicas."""
    candidates = groups[0].queries[0].candidates
    loads = {replica: _Load(state, replica, now) for replica in candidates}

    def precedence(group: QueryGroup) -> tuple[bool, float]:
        whole = group.share(candidates[0], 0, len(group.queries))
        return group.service_class is RT, _evaluate([whole], loads).done_s

    order = sorted(groups, key=precedence, reverse=most_first)
    splits = []
    for group in order:
        splits.append(_split(group, loads, limit))
        _add(splits[-1], loads)
    for index, group in enumerate(order if 1 < len(order) <= _MAX_COMPARED else ()):
        for share in splits[index].shares:
            loads[share.replica].remove(share)
        kept = _evaluate(splits[index].shares, loads)
        again = _split(group, loads, len(candidates))
        kept = kept._replace(alternative_s=min(again.cost_s, again.alternative_s or again.cost_s))
        splits[index] = min(kept, again, key=_rank)
        _add(splits[index], loads)
    return splits


def _split(group: QueryGroup, loads: Mapping[Replica, _Load], limit: int) -> _Split:
    """The best split of a group over those that can start it soonest.

    loads: of all candidates. limit: most replicas, unless it does not fit.
    """
    size = len(group.queries)
    splits = sorted((_evaluate([group.share(r, 0, size)], loads) for r in loads), key=_rank)
    order = [split.shares[0].replica for split in splits]
    begin_s = [
        split.done_s - group.own_s(replica, size)
        for split, replica in zip(splits, order, strict=True)
    ]
    halfway_s, work_s = group.halfway_s(order[0]), group.own_s(order[0], size)
    best, num = splits[0], 1
    for count in range(2, min(len(order), size) + 1):
        fits = group.fits(order[count - 1], num)
        if fits and count > limit:
            break
        # Runs of members, one per replica, that are done at about the same time.
        end_s = (work_s + sum(begin_s[:count])) / count
        until_s = accumulate(max(0.0, end_s - begin) for begin in begin_s[: count - 1])
        stops = [0, *(bisect_left(halfway_s, seconds) for seconds in until_s), size]
        shares = [
            group.share(replica, *run)
            for replica, run in zip(order[:count], pairwise(stops), strict=True)
            if run[0] < run[1]
        ]
        splits.append(_evaluate(shares, loads))
        if not fits or _rank(splits[-1]) < _rank(best):
            best, num = splits[-1], count
    others_s = [split.cost_s for split in splits if split is not best]
    return best._replace(alternative_s=min(others_s, default=None))


def _evaluate(shares: list[_Share], loads: Mapping[Replica, _Load]) -> _Split:
    """The split of a group into these shares. loads: of all candidates, without the group."""
    group = shares[0].group
    ends_s = {share.replica: loads[share.replica].ends_s(share) for share in shares}
    last_s = max(
        max(ends_s[replica].values()) if replica in ends_s else load.last_s
        for replica, load in loads.items()
    )
    again_s = [loads[replica].weight * group.common_s(replica) for replica in ends_s]
    done_s = max(ends[group] for ends in ends_s.values())
    return _Split(shares, done_s, sum(again_s) - min(again_s), last_s)


def _rank(split: _Split) -> tuple[float, float]:
    """The least one is best: all groups that have a place count, and then this one."""
    return split.last_s + split.others_s, split.cost_s


def _add(split: _Split, loads: Mapping[Replica, _Load]) -> None:
    for share in split.shares:
        loads[share.replica].add(share)
