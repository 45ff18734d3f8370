"""All that is known of the replicas, and the one place where it changes. Pure: no time, no tasks.

    route(requests) -> decisions -> begun -> ended        a request
    take(report)                                          what replicas say of their caches
    add, remove, set_draining                             which replicas there are

A prompt counts as cached where it was sent at once, before it has been computed there: the next
requests of the same prefix, which come meanwhile, find it there when their turn comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from bros.core.errors import ConfigError, EngineDeadError
from bros.core.interfaces import EngineReport
from bros.core.request import EngineRequest
from bros.router.balance import Balancer, Planner, PlanReport
from bros.router.e2 import E2, Cost, LeastLoaded, OraclePartition, RoundRobin, cost_of, place_group
from bros.router.forest import Forest, PrefixNode, ReplicaCache
from bros.router.state import (
    ROUTERS,
    Ask,
    Decision,
    Ledger,
    Origin,
    Replica,
    ReplicaFacts,
    ReplicaWork,
    RouterSettings,
    RoutingPolicy,
    State,
    Waits,
)

# ---- What replicas say of their caches, in the forest.
#
#     path of request r    [ node a ][ node b ][ node c ]
#     (r, all)               there     there     there
#     (r, a + half of b)     there     half      gone         nodes after what is kept are gone too
#
# A report says how things are and not what has changed, and of each request the latest one counts:
# repeated ones and old ones change nothing. One that is lost leaves the forest wrong until the next
# digest, which is everything that the replica has.


def take_report(forest: Forest, replica: Replica, report: EngineReport) -> None:
    """Have the forest say what a replica says."""
    if report.version > replica.version:
        replica.version = report.version
        replica.running, replica.slowdown = report.running, report.slowdown
    if report.version <= replica.digest_version:
        return
    if report.full:
        replica.digest_version = report.version
        _take_digest(forest, replica, report)
        return
    for request_id, kept in report.kept:
        origin = replica.origins.get(request_id)
        if origin is not None and origin.version < report.version:
            origin.version = report.version
            _keep(forest, replica, request_id, origin, kept)


def _keep(forest: Forest, replica: Replica, request_id: str, origin: Origin, kept: int) -> None:
    """Of a request's path, so many tokens are there."""
    work = replica.works.get(request_id)
    if work is not None and not work.begun:
        return  # what it is going to compute counts as there
    if kept:
        origin.leaf = forest.revive(origin.leaf)
    leaf = node = origin.leaf
    number = replica.number
    while node.parent is not None:
        parent, tokens = node.parent, min(kept, node.end) - node.start
        if tokens > 0 and node.cached.get(number) == tokens == node.end - node.start:
            break  # and all before it
        if node.alive:
            forest.mark(node, number, max(tokens, 0))
        if tokens <= 0 and work is None:
            origin.leaf = parent
        node = parent
    forest.prune(leaf)


def _take_digest(forest: Forest, replica: Replica, report: EngineReport) -> None:
    """What it names is there, and what requests that run have or are going to have."""
    number, origins = replica.number, replica.origins
    named = {request_id: kept for request_id, kept in report.kept if request_id in origins}
    for request_id in named:
        origin = origins[request_id]
        origin.version = report.version
        origin.leaf = forest.revive(origin.leaf)  # which may split nodes: before any is looked at
        origins.move_to_end(request_id)
    there: dict[PrefixNode, int] = {}
    for request_id, kept in named.items():
        _collect(origins[request_id].leaf, kept, there)
    for work in replica.works.values():
        _collect(work.leaf, work.leaf.end, there)
    for request_id in [
        other for other in origins if not (other in named or other in replica.works)
    ]:
        del origins[request_id]
    for node, tokens in there.items():
        if node.cached.get(number) != tokens:
            forest.mark(node, number, tokens)
    for node in [node for node in forest.caches[number].nodes if node not in there]:
        forest.mark(node, number, 0)
    for request_id in named:
        forest.prune(origins[request_id].leaf)


def _collect(leaf: PrefixNode, kept: int, there: dict[PrefixNode, int]) -> None:
    """Note of a path what is kept."""
    node = leaf
    while node.parent is not None:
        tokens = min(kept, node.end) - node.start
        if tokens > 0:
            if there.get(node) == node.end - node.start:
                return
            there[node] = max(there.get(node, 0), tokens)
        node = node.parent


_MANY_PARKED = 100_000


class Fleet:
    """Times are seconds of one clock that never goes back.

    policy, state: for those who look. balances: whether prefixes are moved and replicated, or
    placed by a plan.
    """

    def __init__(
        self,
        policy: RoutingPolicy,
        settings: RouterSettings,
        block_size: int = 16,
        *,
        balances: bool = True,
    ) -> None:
        self.policy = policy
        self._block_size = block_size
        self.state = State(settings, Forest(block_size, settings.max_tokens))
        self._balances = balances
        self._balancer = Balancer()
        self._planner = None if settings.plan == "off" else Planner(settings.plan == "on")
        self._ledger = Ledger(self.state)
        self._parked: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._next = 0

    @property
    def replicas(self) -> Mapping[int, Replica]:
        """By their numbers."""
        return self.state.replicas

    @property
    def forest(self) -> Forest:
        return self.state.forest

    @property
    def plan_report(self) -> PlanReport | None:
        """None if nothing is planned."""
        if self._planner is None:
            return None
        return self._planner.report(max(1, len(self.state.replicas)))

    def add(self, facts: ReplicaFacts, now: float) -> int:
        """One more replica, with an empty cache; its number, which is never used again."""
        number, self._next = self._next, self._next + 1
        self.state.replicas[number] = Replica(number, facts, Waits(self.state.settings.window_s))
        self.state.forest.caches[number] = ReplicaCache()
        self._size_forest()
        return number

    def remove(self, replica: int) -> list[str]:
        """A replica is lost, with all that it had; the ids of requests that were open there."""
        lost = dict(self.state.replicas[replica].works)
        for request_id, work in lost.items():
            self._ledger.close(request_id)
            self.state.forest.prune(work.leaf)
        del self.state.replicas[replica]
        self.state.forest.drop_cache(replica)
        self._size_forest()
        for program, (number, _) in list(self._parked.items()):
            if number == replica:
                del self._parked[program]
        return list(lost)

    def set_draining(self, replica: int, draining: bool) -> None:
        """Nothing new goes there, or it does again."""
        self.state.replicas[replica].draining = draining

    def route(
        self, requests: Sequence[EngineRequest], now: float, avoid: frozenset[int] = frozenset()
    ) -> list[Decision]:
        """Where requests that have come at once go, one decision each, in their order.

        avoid: replicas that have just refused them. Raises EngineDeadError if there is no replica.
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
        placed: dict[str, Decision] = {}
        for group in _groups(requests) if self._balances else ():
            placed.update(self._route_group(group, candidates, now))
        return [
            placed.get(request.request_id) or self._route_one(request, candidates, now)
            for request in requests
        ]

    def costs(self, request: EngineRequest, now: float) -> dict[int, Cost]:
        """What it would cost on each replica, for reports."""
        self._ledger.expire(now)
        ask = self._ask(request, list(self.state.replicas.values()), now)
        return {replica.number: cost_of(self.state, ask, replica) for replica in ask.candidates}

    def begun(self, request_id: str, cached_tokens: int, now: float) -> None:
        """Its first token has come: its prompt is cached where it runs."""
        work = self._ledger.works.get(request_id)
        if work is None or work.begun:
            return
        self.state.replicas[work.replica].waits.add(now, now - work.time_s)
        self._ledger.begin(work)
        if work.leaf.alive:
            self.state.forest.use(work.leaf, work.replica)

    def promoted(self, request_id: str) -> None:
        """It is real-time from now on. Unknown ids are ignored."""
        work = self._ledger.works.get(request_id)
        if work is not None:
            self._ledger.promote(work)

    def ended(
        self, request_id: str, output_ids: Sequence[int], now: float, *, cached: bool = True
    ) -> None:
        """It is over. cached: prompt and answer stay where it ran, if it had begun; they do
        anyway if it was aborted later, but no later request needs them."""
        work = self._ledger.works.get(request_id)
        if work is None:
            return
        replica, request = self.state.replicas[work.replica], work.request
        assert request is not None, "it is open"
        self._ledger.close(request_id)
        if cached or work.begun:
            context = len(request.prompt_token_ids)
            decode_s = replica.decode_s(len(output_ids), context)
            self._ledger.settle(work, work.prefill_s, decode_s)
            if not request.prefill_only:
                replica.learn_output(request.resumed + len(output_ids))
            self._extend(request, work.leaf, output_ids, replica)
        else:
            self._ledger.settle(work, 0.0, 0.0)
            self._take_back(work)
        if cached:
            self._park(request, work.replica, now)
        self.state.forest.prune(work.leaf)

    def take(self, replica: int, report: EngineReport, now: float) -> None:
        """What a replica says. In any order, twice, or not at all: a digest puts it right."""
        if replica in self.state.replicas:
            take_report(self.state.forest, self.state.replicas[replica], report)

    def _ask(self, request: EngineRequest, candidates: Sequence[Replica], now: float) -> Ask:
        forest = self.state.forest
        pieces = forest.pieces(request)
        path = forest.walk(request.cache_salt, pieces)
        parked = self._parked.get(request.hints.program) if request.hints.program else None
        return Ask(
            request=request,
            pieces=pieces,
            path=path,
            length=len(request.prompt_token_ids),
            matched=self.state.matched(path),
            candidates=candidates,
            parked=parked[0] if parked is not None and parked[1] > now else None,
        )

    def _route_one(
        self, request: EngineRequest, candidates: Sequence[Replica], now: float
    ) -> Decision:
        ask = self._ask(request, candidates, now)
        replica, reason = self.policy.choose(self.state, ask, now)
        return self._commit(ask, replica, reason, now)

    def _route_group(
        self, requests: Sequence[EngineRequest], candidates: Sequence[Replica], now: float
    ) -> dict[str, Decision]:
        asks = [self._ask(request, candidates, now) for request in requests]
        places = place_group(
            self.state, asks, self.state.forest.common([ask.pieces for ask in asks])
        )
        found = {}
        for request in requests:
            ask = self._ask(request, candidates, now)  # those before it have changed the forest
            replica = places[request.request_id]
            found[request.request_id] = self._commit(ask, replica, "group", now)
        return found

    def _commit(self, ask: Ask, replica: Replica, reason: str, now: float) -> Decision:
        """It goes there: from now on it is part of the load, and its prompt of the cache."""
        state, request, number = self.state, ask.request, replica.number
        matched = ask.matched.get(number, 0)
        leaf = state.forest.insert(request.cache_salt, ask.pieces, ask.path)
        # Only now: the node that it shares with others may have been split just before.
        key = ask.key(max(ask.matched.values(), default=0))
        work = ReplicaWork(
            request=request,
            service_class=request.service_class,
            replica=number,
            leaf=leaf,
            key=key,
            time_s=now,
            matched=matched,
            prefill_s=replica.prefill_s(ask.length - matched, matched),
            decode_s=replica.decode_s(replica.expected_output(request), ask.length),
        )
        self._ledger.open(request.request_id, work)
        self._remember(request.request_id, leaf, replica)
        state.forest.use(leaf, number)
        state.forest.make_room(number, replica.facts.capacity_tokens)
        state.forest.shrink()
        if self._planner is not None:
            self._planner.note(state, work, ask.length)
        return Decision(
            request_id=request.request_id, replica=number, matched=matched, reason=reason
        )

    def _remember(self, request_id: str, leaf: PrefixNode, replica: Replica) -> None:
        """What it will be the first to compute is told under its name. Of each that matters at
        least a block is cached, which bounds how many there can be."""
        replica.origins[request_id] = Origin(leaf)
        most = replica.facts.capacity_tokens // self._block_size + len(replica.works)
        for other in list(islice(replica.origins, max(0, len(replica.origins) - most))):
            if other in replica.works:
                replica.origins.move_to_end(other)
            else:
                del replica.origins[other]

    def _extend(
        self, request: EngineRequest, leaf: PrefixNode, output_ids: Sequence[int], replica: Replica
    ) -> None:
        """The answer is cached as well."""
        forest = self.state.forest
        if len(request.prompt_token_ids) + len(output_ids) - 1 >= leaf.end + self._block_size:
            after = leaf if leaf.alive and leaf.parent is not None else None
            pieces = forest.pieces(request, output_ids, after.end if after is not None else 0)
            path = forest.walk(request.cache_salt, pieces, after)
            leaf = forest.insert(request.cache_salt, pieces, path, after)
            origin = replica.origins.get(request.request_id)
            if origin is not None:
                origin.leaf = leaf
        forest.use(leaf, replica.number)
        forest.make_room(replica.number, replica.facts.capacity_tokens)

    def _park(self, request: EngineRequest, replica: int, now: float) -> None:
        """Its program comes back to it."""
        program, keep_s = request.hints.program, request.hints.keep_s
        if program and keep_s > 0.0:
            self._parked[program] = (replica, now + keep_s)
            self._parked.move_to_end(program)
            if len(self._parked) > _MANY_PARKED:
                self._parked.popitem(last=False)

    def _take_back(self, work: ReplicaWork) -> None:
        """It was not computed: forget what was not cached before and no other request asked for."""
        node = work.leaf
        while node.parent is not None and node.end > work.matched:
            parent = node.parent
            if not node.alive or node.active or node.num_asked > 1:
                return
            if work.replica in node.cached:
                before = max(0, work.matched - node.start)
                self.state.forest.mark(node, work.replica, before)
            node = parent

    def _size_forest(self) -> None:
        """It has room for all caches in any case."""
        total = sum(replica.facts.capacity_tokens for replica in self.state.replicas.values())
        self.state.forest.max_tokens = max(self.state.settings.max_tokens, total)


def _groups(requests: Sequence[EngineRequest]) -> list[list[EngineRequest]]:
    """Two or more members each."""
    found: dict[tuple[str, int, str], list[EngineRequest]] = {}
    for request in requests:
        hints = request.hints
        if hints.grouped and hints.program:
            found.setdefault((hints.program, hints.depth, request.cache_salt), []).append(request)
    return [group for group in found.values() if len(group) > 1]


# ---- Puts a router together.


def make_fleet(
    policy: str,
    settings: RouterSettings | None = None,
    block_size: int = 16,
    oracle: Callable[[EngineRequest], int] | None = None,
) -> Fleet:
    """A fleet without replicas. oracle: see OraclePartition, for policy "oracle".

    Raises ConfigError if there is no such policy.
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
