"""Routes requests, and is the only place that changes the router's state. Pure: no clock, no tasks.

    route(requests) -> on_first_token -> on_finished      the life of a request
    apply_report(report)                                  what a replica has cached
    add, remove, set_draining                             which replicas there are

The fleet counts a prompt as cached on its replica from the moment of routing, before the replica
has computed it: requests with the same prefix that arrive meanwhile will find it there.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Mapping, Sequence
from itertools import islice

from bros.core.errors import ConfigError, EngineDeadError
from bros.core.interfaces import EngineReport, GroupCosts
from bros.core.request import EngineRequest
from bros.core.slices import Slices, whole
from bros.router.balance import Balancer, Planner, PlanReport
from bros.router.e2 import (
    E2,
    Cost,
    LeastLoaded,
    OraclePartition,
    RoundRobin,
    cost_of,
)
from bros.router.forest import Forest, PrefixNode, ReplicaCache
from bros.router.groups import QueryGroup, place_groups
from bros.router.state import (
    ROUTERS,
    Decision,
    Ledger,
    Origin,
    Replica,
    ReplicaFacts,
    ReplicaWork,
    RouterSettings,
    RouterState,
    RoutingPolicy,
    RoutingQuery,
    TtftHistory,
)

# ---- Applies the reports of replicas to the forest.
#
#     path of request r    [ node a ][ node b ][ node c ]
#     (r, all)               cached    cached    cached
#     (r, a + half of b)     cached    half      evicted
#
# A report is state and not change, and the latest one about a request counts, so a repeated or old
# report changes nothing. If a report is lost, the forest is wrong until the next digest, a full
# report that lists everything that the replica has cached.


_SLICE = 500
"""Prefixes of a digest that are applied without a pause: 1 to 3 ms."""


def updating_forest(forest: Forest, replica: Replica, report: EngineReport) -> Slices[None]:
    """Apply a report of a replica to the forest. It pauses where the caller may let other work run.
    No other report of the replica may be applied before it has ended."""
    if report.version > replica.version:
        replica.version = report.version
        replica.running, replica.slowdown = report.running, report.slowdown
    if report.version <= replica.digest_version:
        return
    if report.full:
        replica.digest_version = report.version
        yield from _applying_digest(forest, replica, report)
        return
    for request_id, num_cached in report.cached_prefixes:
        origin = replica.origins.get(request_id)
        if origin is not None and origin.version < report.version:
            origin.version = report.version
            _apply_cached_prefix(forest, replica, request_id, origin, num_cached)


def _apply_cached_prefix(
    forest: Forest, replica: Replica, request_id: str, origin: Origin, kept: int
) -> None:
    """Mark the first `kept` tokens of a request's path as cached, and the rest as evicted."""
    work = replica.works.get(request_id)
    if work is not None and not work.prefilled:
        return  # its whole prompt counts as cached already
    if kept:
        origin.leaf = forest.revive(origin.leaf)
    leaf = node = origin.leaf
    number = replica.number
    while node.parent is not None:
        parent, tokens = node.parent, min(kept, node.end) - node.start
        if tokens > 0 and node.cached.get(number) == tokens == node.end - node.start:
            break  # then so are its ancestors
        if node.alive:
            forest.set_cached(node, number, max(tokens, 0))
        if tokens <= 0 and work is None:
            origin.leaf = parent
        node = parent
    forest.prune(leaf)


def _applying_digest(forest: Forest, replica: Replica, report: EngineReport) -> Slices[None]:
    """Mark as cached what a digest lists and what open requests have or will compute, and
    everything else as evicted. What is routed or ends during a pause is newer than the digest."""
    number, origins, works = replica.number, replica.origins, replica.works
    forest.caches[number].digests += 1
    opened = dict.fromkeys(works)
    for done, request_id in enumerate(opened, start=1):
        work = works.get(request_id)
        if work is not None:
            forest.confirm_cached(work.leaf, number, work.leaf.end)
        if done % _SLICE == 0:
            yield
    for done, (request_id, kept) in enumerate(report.cached_prefixes, start=1):
        origin = origins.get(request_id)
        if origin is not None:
            origin.version, origin.leaf = report.version, forest.revive(origin.leaf)
            origins.move_to_end(request_id)
            forest.confirm_cached(origin.leaf, number, kept)
            forest.prune(origin.leaf)
        if done % _SLICE == 0:
            yield
    yield from _evicting_others(forest, replica, opened)


def _evicting_others(forest: Forest, replica: Replica, opened: Container[str]) -> Slices[None]:
    """Mark as evicted what neither the digest that is being applied nor anything since it began has
    confirmed. opened: ids of the requests that were open when it began."""
    origins, works = replica.origins, replica.works
    for done, request_id in enumerate([*origins], start=1):
        origin = origins.get(request_id)
        if origin is not None and origin.version < replica.digest_version:
            if not (request_id in opened or request_id in works):
                del origins[request_id]
        if done % _SLICE == 0:
            yield
    for done, node in enumerate([*forest.caches[replica.number].nodes], start=1):
        forest.evict_unconfirmed(node, replica.number)
        if done % _SLICE == 0:
            yield


# ---- The fleet.


_MAX_PINNED_PROGRAMS = 100_000
"""Programs for which the replica that pins their KV is remembered."""


class Fleet:
    """The router's decisions. All times are seconds of one monotonic clock.

    policy, state: read-only for callers.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        settings: RouterSettings,
        block_size: int = 16,
        *,
        balances: bool = True,
    ) -> None:
        """balances: move and replicate prefixes, and place task groups as one (E2)."""
        self.policy = policy
        self._block_size = block_size
        self.state = RouterState(settings, Forest(block_size, settings.max_tokens))
        self._balances = balances
        self._balancer = Balancer()
        self._planner = None if settings.plan == "off" else Planner(settings.plan == "on")
        self._ledger = Ledger(self.state)
        self._pinned: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._next = 0

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """number -> replica."""
        return self.state.replicas

    @property
    def places_groups(self) -> bool:
        """Whether the policy places the members of a task group as one."""
        return self._balances

    @property
    def forest(self) -> Forest:
        return self.state.forest

    @property
    def plan_report(self) -> PlanReport | None:
        """None if planning is off."""
        if self._planner is None:
            return None
        return self._planner.report(max(1, len(self.state.replicas)))

    def add(self, facts: ReplicaFacts, now: float) -> int:
        """Add a replica with an empty cache; return its number, which is never reused."""
        number, self._next = self._next, self._next + 1
        self.state.replicas[number] = Replica(
            number, facts, TtftHistory(self.state.settings.window_s)
        )
        self.state.forest.caches[number] = ReplicaCache()
        self._size_forest()
        return number

    def remove(self, replica: int) -> list[str]:
        """Remove a replica and its cache; return the ids of the requests that were open there."""
        lost = dict(self.state.replicas[replica].works)
        for request_id, work in lost.items():
            self._ledger.close(request_id)
            self.state.forest.prune(work.leaf)
        del self.state.replicas[replica]
        self.state.forest.drop_cache(replica)
        self._size_forest()
        for program, (number, _) in list(self._pinned.items()):
            if number == replica:
                del self._pinned[program]
        return list(lost)

    def set_draining(self, replica: int, draining: bool) -> None:
        """Stop routing requests to a replica, or resume it."""
        self.state.replicas[replica].draining = draining

    def route(
        self, requests: Sequence[EngineRequest], now: float, avoid: frozenset[int] = frozenset()
    ) -> list[Decision]:
        """Route requests that arrived together; one decision each, in their order.

        avoid: replicas that have just refused them. Raises EngineDeadError if no replica is left.
        """
        candidates = [
            replica
            for number, replica in self.state.replicas.items()
            if not replica.draining and number not in avoid
        ]
        if not candidates:
            raise EngineDeadError("No replica is up that takes requests.")
        self._ledger.expire(now)
        if self._balances and self._planner is not None:
            self._planner.run(self.state, now)
        if self._balances and (self._planner is None or not self._planner.applies):
            self._balancer.run(self.state, now)
        groups = _task_groups(requests) if self._balances else []
        placed = self._route_groups(groups, candidates, now) if groups else {}
        return [
            placed.get(request.request_id) or self._route_one(request, candidates, now)
            for request in requests
        ]

    def costs(self, request: EngineRequest, now: float) -> dict[int, Cost]:
        """replica -> cost of a request there. It does not route the request."""
        self._ledger.expire(now)
        query = self._query(request, list(self.state.replicas.values()), now)
        return {replica.number: cost_of(self.state, query, replica) for replica in query.candidates}

    def on_first_token(self, request_id: str, now: float) -> None:
        """A request has its first token, so its prompt is cached on its replica."""
        work = self._ledger.works.get(request_id)
        if work is None or work.prefilled:
            return
        replica = self.state.replicas[work.replica]
        replica.ttft_history.add(now, now - work.time_s)
        replica.prefilled_s = now
        self._ledger.mark_prefilled(work)
        if self._planner is not None:
            self._planner.count(work)
        if work.leaf.alive:
            self.state.forest.mark_used(work.leaf, work.replica)

    def on_promoted(self, request_id: str) -> None:
        """A request is real-time from now on. Unknown ids are ignored."""
        work = self._ledger.works.get(request_id)
        if work is not None:
            self._ledger.promote(work)

    def on_finished(
        self, request_id: str, output_ids: Sequence[int], now: float, *, cached: bool = True
    ) -> None:
        """A request has ended. Unknown ids are ignored.

        cached: it ran to its end, so prompt and output are cached. They are as well if it was
        aborted after its first token, but then its program does not come back to them.
        """
        work = self._ledger.works.get(request_id)
        if work is None:
            return
        replica, request = self.state.replicas[work.replica], work.request
        assert request is not None, "the request is open"
        self._ledger.close(request_id)
        if cached or work.prefilled:
            context = len(request.prompt_token_ids)
            decode_s = replica.decode_s(len(output_ids), context)
            self._ledger.settle(work, work.prefill_s, decode_s)
            if not request.prefill_only:
                replica.learn_output(request.resumed + len(output_ids))
            self._insert_output(request, work.leaf, output_ids, replica)
        else:
            self._ledger.withdraw(work)
            self._uncache(work)
        if cached:
            self._note_pinned(request, work.replica, now)
        self.state.forest.prune(work.leaf)

    def apply_report(self, replica: int, report: EngineReport, now: float) -> None:
        """Update the forest from a report of a replica. Reports may come in any order, twice or not
        at all: the next digest corrects the forest."""
        whole(self.applying_report(replica, report, now))

    def applying_report(self, replica: int, report: EngineReport, now: float) -> Slices[None]:
        """`apply_report` in slices: it pauses where the caller may let other work run, but not
        apply another report of the replica."""
        found = self.state.replicas.get(replica)
        if found is None:
            return
        for _ in updating_forest(self.state.forest, found, report):
            yield
            if replica not in self.state.replicas:
                return

    def check_integrity(self) -> None:
        """Raise AssertionError unless the parts of the state agree (for tests)."""
        state = self.state
        state.forest.check_integrity()
        self._ledger.check_integrity()
        assert state.forest.caches.keys() == state.replicas.keys()
        assert all(number in state.replicas for number, _ in self._pinned.values())
        for replica in state.replicas.values():
            assert replica.works.keys() <= replica.origins.keys()

    def _query(
        self, request: EngineRequest, candidates: Sequence[Replica], now: float
    ) -> RoutingQuery:
        forest = self.state.forest
        pieces = forest.pieces(request)
        path = forest.walk(forest.root(request), pieces)
        pinned = self._pinned.get(request.hints.program) if request.hints.program else None
        return RoutingQuery(
            request=request,
            pieces=pieces,
            path=path,
            length=len(request.prompt_token_ids),
            matched=self.state.matched(path),
            candidates=candidates,
            pinned=pinned[0] if pinned is not None and pinned[1] > now else None,
        )

    def _route_one(
        self, request: EngineRequest, candidates: Sequence[Replica], now: float
    ) -> Decision:
        query = self._query(request, candidates, now)
        replica, reason = self.policy.choose(self.state, query)
        return self._commit(query, replica, reason, now)

    def _route_groups(
        self,
        groups: Sequence[Sequence[EngineRequest]],
        candidates: Sequence[Replica],
        now: float,
    ) -> dict[str, Decision]:
        query_groups = []
        for requests in groups:
            queries = [self._query(request, candidates, now) for request in requests]
            common = self.state.forest.common([query.pieces for query in queries])
            query_groups.append(QueryGroup(queries, common))
        places = place_groups(self.state, query_groups, now)
        found = {}
        for request in (request for requests in groups for request in requests):
            query = self._query(request, candidates, now)  # earlier members changed the forest
            place = places[request.request_id]
            found[request.request_id] = self._commit(
                query, place.replica, "group", now, place.costs
            )
        return found

    def _commit(
        self,
        query: RoutingQuery,
        replica: Replica,
        reason: str,
        now: float,
        group: GroupCosts | None = None,
    ) -> Decision:
        """Count a routed request in the load of its replica, and its prompt in the cache there."""
        state, request, number = self.state, query.request, replica.number
        matched, shared = query.matched.get(number, 0), query.shared_tokens()
        leaf = state.forest.insert(state.forest.root(request), query.pieces, query.path)
        # After the insertion, which may split the node that the request shares with others.
        key = query.key(shared)
        work = ReplicaWork(
            request=request,
            service_class=request.service_class,
            replica=number,
            leaf=leaf,
            key=key,
            time_s=now,
            matched=matched,
            prefill_s=replica.prefill_s(query.length - matched, matched),
            decode_s=replica.decode_s(replica.expected_output(request), query.length),
        )
        self._ledger.open(request.request_id, work)
        self._record_origin(request.request_id, leaf, replica)
        state.forest.mark_used(leaf, number)
        state.forest.evict(number, replica.facts.capacity_tokens)
        state.forest.shrink()
        if self._planner is not None:
            self._planner.compare(state, work, query)
        return Decision(
            request_id=request.request_id,
            replica=number,
            matched=matched,
            reason=reason,
            group=group,
        )

    def _record_origin(self, request_id: str, leaf: PrefixNode, replica: Replica) -> None:
        """Remember a request, as reports name blocks by the request that computed them first. Each
        origin that matters has a cached block, which bounds how many are kept."""
        # Older reports than the latest digest are ignored, also while that is being applied.
        replica.origins[request_id] = Origin(leaf, replica.digest_version)
        most = replica.facts.capacity_tokens // self._block_size + len(replica.works)
        for other in list(islice(replica.origins, max(0, len(replica.origins) - most))):
            if other in replica.works:
                replica.origins.move_to_end(other)
            else:
                del replica.origins[other]

    def _insert_output(
        self, request: EngineRequest, leaf: PrefixNode, output_ids: Sequence[int], replica: Replica
    ) -> None:
        """Add the output of a request to the forest, and mark its whole path as cached."""
        forest = self.state.forest
        if len(request.prompt_token_ids) + len(output_ids) - 1 >= leaf.end + self._block_size:
            after = leaf if leaf.alive and leaf.parent is not None else None
            pieces = forest.pieces(request, output_ids, after.end if after is not None else 0)
            path = forest.walk(forest.root(request), pieces, after)
            leaf = forest.insert(forest.root(request), pieces, path, after)
            origin = replica.origins.get(request.request_id)
            if origin is not None:
                origin.leaf = leaf
        forest.mark_used(leaf, replica.number)
        forest.evict(replica.number, replica.facts.capacity_tokens)

    def _note_pinned(self, request: EngineRequest, replica: int, now: float) -> None:
        """Remember the replica that pins a request's KV for the next call of its program."""
        program, keep_s = request.hints.program, request.hints.keep_s
        if program and keep_s > 0.0:
            self._pinned[program] = (replica, now + keep_s)
            self._pinned.move_to_end(program)
            if len(self._pinned) > _MAX_PINNED_PROGRAMS:
                self._pinned.popitem(last=False)

    def _uncache(self, work: ReplicaWork) -> None:
        """Unmark the prompt of a request that was never computed: nodes that were not cached before
        and that no other request has there."""
        node = work.leaf
        while node.parent is not None and node.end > work.matched:
            parent = node.parent
            if not node.alive or node.active or work.replica in node.requests:
                return
            if work.replica in node.cached:
                before = max(0, work.matched - node.start)
                self.state.forest.set_cached(node, work.replica, before)
            node = parent

    def _size_forest(self) -> None:
        """Make the forest at least as large as all caches together."""
        total = sum(replica.facts.capacity_tokens for replica in self.state.replicas.values())
        self.state.forest.max_tokens = max(self.state.settings.max_tokens, total)


def _task_groups(requests: Sequence[EngineRequest]) -> list[list[EngineRequest]]:
    """The task groups with two or more members among requests that arrived together."""
    found: dict[tuple[str, str], list[EngineRequest]] = {}
    for request in requests:
        group = request.hints.group
        if group is not None:
            found.setdefault((group.id, request.kv_salt), []).append(request)
    return [group for group in found.values() if len(group) > 1]


# ---- Builds a fleet.


def make_fleet(
    policy: str,
    settings: RouterSettings | None = None,
    block_size: int = 16,
    oracle: Callable[[EngineRequest], int] | None = None,
) -> Fleet:
    """A fleet without replicas. oracle: see OraclePartition, for policy "oracle".

    policy: one of ROUTERS. Raises ConfigError if it is not.
    """
    settings = settings or RouterSettings()
    return Fleet(_policy(policy, oracle), settings, block_size, balances=policy == "e2")


def _policy(name: str, oracle: Callable[[EngineRequest], int] | None) -> RoutingPolicy:
    if name == "e2":
        return E2()
    if name == "rr":
        return RoundRobin()
    if name == "least":
        return LeastLoaded()
    if name == "oracle" and oracle is not None:
        return OraclePartition(oracle)
    raise ConfigError(f"--router: {name!r} is not one of {', '.join(ROUTERS)}")
