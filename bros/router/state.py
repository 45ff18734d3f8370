"""The router's state: the replicas, the prefix forest, and the load of recent requests."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bros.core.interfaces import GroupCosts, Prices
from bros.core.request import EngineRequest, ServiceClass
from bros.router.forest import Forest, Path, Pieces, PrefixNode

# ---- Settings and decisions.


ROUTERS = ("e2", "rr", "least", "oracle")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Settings of all policies. The defaults are Preble's (3.2 and its code).

    window_s: sliding window H; requests in it count as load, and as users of their prefixes.
    balance: prefixes move if the heaviest replica has more than this many times the load of the
        lightest one (Th_bal).
    replicate: a prefix gets one more replica if TTFT has grown by this factor within the window.
    decode_share: a replica that spends more than this share of its time on decoding is decode-heavy
        and gets prompts first.
    warm_up: requests per replica before prefixes are moved or replicated.
    history: weight of a second of work of the window, relative to a second of unfinished work.
    patience: a request waits for a replica that has its prefix at most this many times as long as
        recomputing the prefix takes.
    late_weight: cost of each second by which the first token would miss its objective.
    be_weight: weight of best-effort work in the load that a real-time request sees, on a replica
        whose best-effort work yields.
    max_tokens: capacity of the prefix forest.
    plan: planned placement of hot prefixes: "off", "on", or "shadow" (only report its gain).
    rebalancing, replication, decode_aware: switches for ablations.
    """

    window_s: float = 180.0
    balance: float = 1.5
    replicate: float = 2.0
    decode_share: float = 0.7
    warm_up: int = 50
    history: float = 0.05
    patience: float = 8.0
    late_weight: float = 10.0
    be_weight: float = 0.1
    max_tokens: int = 64_000_000
    plan: str = "off"
    rebalancing: bool = True
    replication: bool = True
    decode_aware: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What the router needs to know about an engine.

    capacity_tokens: size of its KV cache.
    yields: whether its best-effort work yields to real-time work, see EngineInfo.
    ttft_s: TTFT objective of real-time requests that set none; None if there is no default.
    """

    capacity_tokens: int
    prices: Prices
    yields: bool = True
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and why.

    replica: its number in the fleet, ReplicaHandle.fleet_id; Placement has the one for operators.
    matched: tokens of the prompt that the router believes to be cached there.
    reason: what decided:
        exploit   the prefix is cached there
        again     the prefix was cached there, but has been evicted
        explore   lowest cost
        decode    the replica is decode-heavy
        moved     a home of the prefix, after rebalancing or replication
        planned   a home of the prefix, by the plan
        pinned    the KV of the program's previous call is pinned there
        group     placed with its task group
        only      no other candidate
        turn, least, oracle    the policies rr, least and oracle
    group: what the placement of its task group costs; None if it was not placed with one.
    """

    request_id: str
    replica: int
    matched: int
    reason: str
    group: GroupCosts | None = None


# ---- The load of one replica: the requests that it got, and what they cost there.


_DEFAULT_OUTPUT_TOKENS = 64.0
"""Expected output length until the first request of a replica has finished."""

_OUTPUT_LEARNING_RATE = 0.05
"""Weight of the newest output length in the moving average."""

_NUM_BUCKETS = 32
"""Buckets of the window in TtftHistory."""

RT, BE = ServiceClass.RT, ServiceClass.BE


@dataclass(slots=True, eq=False)
class ReplicaWork:
    """The work of one request on its replica: open until it ends, and counted in the window.

    request: None once the request has ended.
    leaf: the node where its prompt ends.
    key: the node that it is placed by (RoutingQuery.key); None if there is none.
    time_s: when it was routed.
    matched: prompt tokens that were cached on the replica at that time.
    prefill_s: seconds to compute the tokens that were not cached.
    decode_s: seconds of decoding; an estimate until the request ends.
    prefilled: its first token has been sampled.
    in_window: it is not older than the window, and was computed or still may be.
    planned: the replica that the plan has it on, and seconds to compute its prompt there; None if
        no plan has its prefix.
    """

    request: EngineRequest | None
    service_class: ServiceClass
    replica: int
    leaf: PrefixNode
    key: PrefixNode | None
    time_s: float
    matched: int
    prefill_s: float
    decode_s: float
    prefilled: bool = False
    in_window: bool = True
    planned: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


class WorkTotals:
    """Seconds of prefill and of decoding, by service class."""

    __slots__ = ("decode_s", "num_requests", "prefill_s")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num_requests = 0
        self.prefill_s = {RT: 0.0, BE: 0.0}
        self.decode_s = {RT: 0.0, BE: 0.0}

    def copy(self) -> WorkTotals:
        """Totals of their own that begin with these sums."""
        totals = WorkTotals()
        totals.num_requests = self.num_requests
        totals.prefill_s, totals.decode_s = dict(self.prefill_s), dict(self.decode_s)
        return totals

    def add(self, service_class: ServiceClass, prefill_s: float, decode_s: float) -> None:
        self.num_requests += 1
        self.prefill_s[service_class] += prefill_s
        self.decode_s[service_class] += decode_s

    def remove(self, service_class: ServiceClass, prefill_s: float, decode_s: float) -> None:
        """Undo an `add` with the same arguments."""
        self.num_requests -= 1
        self.prefill_s[service_class] -= prefill_s
        self.decode_s[service_class] -= decode_s
        if not self.num_requests:
            self.clear()  # rounding errors must not remain

    def total_s(self, service_class: ServiceClass, be_weight: float) -> float:
        """The seconds that delay a request of a class. Best-effort work counts be_weight times for
        a real-time request."""
        weight = 1.0 if service_class is BE else be_weight
        return (
            self.prefill_total_s(service_class, be_weight)
            + self.decode_s[RT]
            + weight * self.decode_s[BE]
        )

    def prefill_total_s(self, service_class: ServiceClass, be_weight: float) -> float:
        """The prefill part of total_s."""
        weight = 1.0 if service_class is BE else be_weight
        return self.prefill_s[RT] + weight * self.prefill_s[BE]

    def check_equals(self, other: WorkTotals) -> None:
        """Raise AssertionError unless the other one has the same sums, up to rounding errors."""
        assert self.num_requests == other.num_requests
        for mine, others in ((self.prefill_s, other.prefill_s), (self.decode_s, other.decode_s)):
            for service_class, seconds in mine.items():
                assert math.isclose(seconds, others[service_class], rel_tol=1e-6, abs_tol=1e-6)

    @property
    def decode_share(self) -> float:
        """Share of decoding in all the seconds; 0 if there are none."""
        decode = self.decode_s[RT] + self.decode_s[BE]
        total = decode + self.prefill_s[RT] + self.prefill_s[BE]
        return decode / total if total > 0.0 else 0.0


class TtftHistory:
    """TTFT of the requests of the window, summed per bucket."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._buckets: deque[list[float]] = deque()  # [start, requests, seconds]

    def add(self, now: float, ttft_s: float) -> None:
        bucket_s = self._window_s / _NUM_BUCKETS
        if not self._buckets or now >= self._buckets[-1][0] + bucket_s:
            self._buckets.append([now // bucket_s * bucket_s, 0.0, 0.0])
            while self._buckets[0][0] <= now - self._window_s:
                self._buckets.popleft()
        self._buckets[-1][1] += 1
        self._buckets[-1][2] += ttft_s

    def halves(self, now: float) -> tuple[float, float, float, float]:
        """(requests, seconds) of the earlier half of the window, and of the later one."""
        halves = [0.0, 0.0, 0.0, 0.0]
        for began_s, count, seconds in self._buckets:
            if began_s > now - self._window_s:
                first = 2 * (began_s >= now - self._window_s / 2)
                halves[first] += count
                halves[first + 1] += seconds
        return halves[0], halves[1], halves[2], halves[3]


@dataclass(slots=True)
class Origin:
    """A request that may have been the first to compute blocks that are still cached.

    leaf: last node of its path that may be cached.
    version: version of the latest report about it.
    """

    leaf: PrefixNode
    version: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """One replica as the router sees it.

    mean_output: moving average of output lengths in tokens.
    running, slowdown, version: from its latest report; steps take slowdown times what its prices
        predict.
    digest_version: version of its latest digest.
    prefilled_s: when it last ended a prompt.
    window_work: work of the requests of the window.
    open_work: work that is not done yet: prefill and decoding of requests without a first token,
        decoding of the others.
    works: request id -> open request.
    keys: key node -> requests of the window that were placed by it.
    origins: request id -> origin.
    """

    number: int
    facts: ReplicaFacts
    ttft_history: TtftHistory
    draining: bool = False
    mean_output: float = _DEFAULT_OUTPUT_TOKENS
    running: int = 0
    slowdown: float = 1.0
    version: int = 0
    digest_version: int = 0
    prefilled_s: float = -math.inf
    window_work: WorkTotals = field(default_factory=WorkTotals)
    open_work: WorkTotals = field(default_factory=WorkTotals)
    works: dict[str, ReplicaWork] = field(default_factory=dict)
    keys: dict[PrefixNode, int] = field(default_factory=dict)
    origins: OrderedDict[str, Origin] = field(default_factory=OrderedDict)

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.slowdown * self.facts.prices.prefill_s(tokens, context)

    def decode_s(self, tokens: float, context: int, rows: int = 1) -> float:
        """rows: rows that will be in the steps at least."""
        rows = max(self.running, self.open_work.num_requests, rows)
        return self.slowdown * self.facts.prices.decode_s(tokens, context, rows)

    def step_s(self, rows: float, context: float) -> float:
        """Seconds of a step of `rows` rows with `context` tokens before them, together."""
        return self.slowdown * self.facts.prices.step_s(rows, context)

    def expected_output(self, request: EngineRequest) -> float:
        """Estimated output tokens of a request."""
        if request.prefill_only:
            return 0.0
        expected = request.hints.expected_tokens or self.mean_output
        most = request.sampling.max_tokens
        return expected if most is None else min(expected, most - request.resumed)

    def running_prompt(self) -> ReplicaWork | None:
        """The request whose prompt it computes now, as far as is known: the first real-time one
        without a first token, or else the first of all."""
        waiting = [work for work in self.works.values() if not work.prefilled]
        return min(waiting, key=lambda work: work.service_class is BE, default=None)

    def learn_output(self, tokens: int) -> None:
        self.mean_output += _OUTPUT_LEARNING_RATE * (tokens - self.mean_output)


@dataclass(slots=True)
class RoutingQuery:
    """A request that has to be routed.

    length: tokens of its prompt.
    matched: replica -> prompt tokens that are cached there; replicas without any may be missing.
    candidates: replicas that may get it.
    pinned: the replica that pins the KV of the program's previous call.
    """

    request: EngineRequest
    pieces: Pieces
    path: Path
    length: int
    matched: dict[int, int]
    candidates: Sequence[Replica]
    pinned: int | None = None

    @property
    def service_class(self) -> ServiceClass:
        return self.request.service_class

    def prefill_s(self, replica: Replica) -> float:
        """Seconds to compute the tokens of its prompt that are not cached on a replica."""
        matched = self.matched.get(replica.number, 0)
        return replica.prefill_s(self.length - matched, matched)

    def shared_tokens(self) -> int:
        """Length of the prefix that it can be placed by: what is cached anywhere, or else what the
        forest knows of its prompt, if that is more than the rest; 0 if neither is."""
        cached, known = max(self.matched.values(), default=0), self.path.end
        if self.length - cached < cached:
            return cached
        return known if self.length - known < known else 0

    def key(self, tokens: int) -> PrefixNode | None:
        """The node to place it by (Preble 3.2: the key portion): of the nodes that start within the
        first `tokens` tokens, the last one that is longer than all nodes before it together."""
        for node in reversed(self.path.nodes):
            if node.start < tokens and node.num_tokens > node.start:
                return node
        return None


@dataclass(slots=True)
class RouterState:
    """The whole state that policies decide on.

    num_routed: requests routed so far.
    since_s: time of the first one.
    window_prompt_tokens: prompt tokens of the window's requests, in whole blocks.
    window_matched_tokens: those of them that were cached where the requests went.
    """

    settings: RouterSettings
    forest: Forest
    replicas: dict[int, Replica] = field(default_factory=dict)
    num_routed: int = 0
    since_s: float = 0.0
    window_prompt_tokens: int = 0
    window_matched_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the window's prompt tokens that were cached."""
        return (
            self.window_matched_tokens / self.window_prompt_tokens
            if self.window_prompt_tokens
            else 0.0
        )

    def matched(self, path: Path) -> dict[int, int]:
        """replica -> length of the cached prefix of a prompt, in tokens."""
        found: dict[int, int] = {}
        whole: set[int] | None = None
        for node in path.nodes:
            wanted, size = min(node.end, path.end) - node.start, node.end - node.start
            goes_on = set()
            for replica, kept in node.cached.items():
                if whole is None or replica in whole:
                    found[replica] = node.start + min(kept, wanted)
                    if kept == size:
                        goes_on.add(replica)
            if not goes_on:
                break
            whole = goes_on
        return found

    def weight(self, replica: Replica) -> float:
        """Weight of best-effort work there in the load that a real-time request sees."""
        return self.settings.be_weight if replica.facts.yields else 1.0

    def open_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """Unfinished work that would run before or beside a new request of a class."""
        return replica.open_work.total_s(service_class, self.weight(replica))

    def queue_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """The prefill part of open_s: a new prompt waits for other prompts, not for decoding."""
        return replica.open_work.prefill_total_s(service_class, self.weight(replica))

    def load_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """open_s plus a little of the window's work, which decides between equally busy ones."""
        window = replica.window_work.total_s(service_class, self.weight(replica))
        return self.settings.history * window + self.open_s(replica, service_class)

    def assigned_s(self, replica: Replica) -> float:
        """Work of the window plus unfinished work, of both classes alike. This tells which replica
        has too many prefixes; unfinished work alone would move them back and forth."""
        return replica.window_work.total_s(BE, 1.0) + replica.open_work.total_s(BE, 1.0)


class RoutingPolicy(Protocol):
    """Chooses among candidates. It must not change the router's state."""

    def choose(self, state: RouterState, query: RoutingQuery) -> tuple[Replica, str]:
        """The replica and the `reason` of the Decision. There is at least one candidate."""
        ...


# ---- Accounts for work per replica and per prefix: open work, and work of the window.


class Ledger:
    """Adds a request to all sums on `open`, and removes it from them on `close`, and on `withdraw`
    or `expire`.

    works: request id -> open request.
    """

    def __init__(self, state: RouterState) -> None:
        self._state = state
        self._window: deque[ReplicaWork] = deque()
        self.works: dict[str, ReplicaWork] = {}

    def open(self, request_id: str, work: ReplicaWork) -> None:
        """Add a request to its replica."""
        assert request_id not in self.works, "request ids of open requests are unique"
        replica = self._state.replicas[work.replica]
        if not self._state.num_routed:
            self._state.since_s = work.time_s
        self._state.num_routed += 1
        self._state.window_prompt_tokens += work.leaf.end
        self._state.window_matched_tokens += work.matched
        self.works[request_id] = replica.works[request_id] = work
        replica.open_work.add(work.service_class, work.prefill_s, work.decode_s)
        replica.window_work.add(work.service_class, work.prefill_s, work.decode_s)
        self._window.append(work)
        if work.key is not None:
            replica.keys[work.key] = replica.keys.get(work.key, 0) + 1
            work.key.load[work.replica] = work.key.load.get(work.replica, 0.0) + work.seconds
        for node in _path_of(work.leaf):
            node.active += 1
            node.num_requests += 1
            node.requests[work.replica] = node.requests.get(work.replica, 0) + 1

    def mark_prefilled(self, work: ReplicaWork) -> None:
        """Count the prompt of a request as done."""
        replica = self._state.replicas[work.replica]
        replica.open_work.remove(work.service_class, work.prefill_s, work.decode_s)
        work.prefilled = True
        replica.open_work.add(work.service_class, 0.0, work.decode_s)

    def promote(self, work: ReplicaWork) -> None:
        """Count a best-effort request as real-time from now on."""
        if work.service_class is ServiceClass.RT:
            return
        replica = self._state.replicas[work.replica]
        prefill_s = 0.0 if work.prefilled else work.prefill_s
        replica.open_work.remove(work.service_class, prefill_s, work.decode_s)
        replica.open_work.add(ServiceClass.RT, prefill_s, work.decode_s)
        if work.in_window:
            replica.window_work.remove(work.service_class, work.prefill_s, work.decode_s)
            replica.window_work.add(ServiceClass.RT, work.prefill_s, work.decode_s)
        work.service_class = ServiceClass.RT

    def close(self, request_id: str) -> None:
        """Remove an open request that has ended or is lost."""
        work = self.works.pop(request_id)
        replica = self._state.replicas[work.replica]
        del replica.works[request_id]
        work.request = None  # the work stays for the window, the long prompt need not
        prefill_s = 0.0 if work.prefilled else work.prefill_s
        replica.open_work.remove(work.service_class, prefill_s, work.decode_s)
        for node in _path_of(work.leaf):
            node.active -= 1

    def settle(self, work: ReplicaWork, prefill_s: float, decode_s: float) -> None:
        """Replace the estimates of a closed request by its real cost."""
        if work.in_window:
            replica = self._state.replicas[work.replica]
            replica.window_work.remove(work.service_class, work.prefill_s, work.decode_s)
            replica.window_work.add(work.service_class, prefill_s, decode_s)
            if work.key is not None:
                work.key.load[work.replica] += prefill_s + decode_s - work.seconds
            work.prefill_s, work.decode_s = prefill_s, decode_s

    def withdraw(self, work: ReplicaWork) -> None:
        """Remove a closed request that was never computed from the window."""
        if work.in_window:
            self._leave_window(work)

    def expire(self, now: float) -> None:
        """Remove requests that are older than the window."""
        before = now - self._state.settings.window_s
        while self._window and self._window[0].time_s <= before:
            work = self._window.popleft()
            if work.in_window:
                self._leave_window(work)
                self._state.forest.prune(work.leaf)

    def _leave_window(self, work: ReplicaWork) -> None:
        work.in_window = False
        self._state.window_prompt_tokens -= work.leaf.end
        self._state.window_matched_tokens -= work.matched
        replica = self._state.replicas.get(work.replica)
        if replica is not None:
            replica.window_work.remove(work.service_class, work.prefill_s, work.decode_s)
            _remove_from_key(replica, work)
        _remove_from_nodes(work)

    def check_integrity(self) -> None:
        """Raise AssertionError unless all sums and counts are those of the works (for tests)."""
        live = self._state.replicas
        by_replica = {number: replica.works for number, replica in live.items()}
        there = [item for works in by_replica.values() for item in works.items()]
        assert len(there) == len(self.works) and dict(there) == self.works
        active: Counter[PrefixNode] = Counter()
        requests: Counter[tuple[PrefixNode, int]] = Counter()
        for work in self.works.values():
            assert work.request is not None and work.replica in live
            active.update(_path_of(work.leaf))
        in_window = [work for work in self._window if work.in_window]
        for work in in_window:
            requests.update((node, work.replica) for node in _path_of(work.leaf))
        for node, count in active.items():
            assert node.active == count
        for (node, number), count in requests.items():
            assert node.requests[number] == count
        for number, replica in live.items():
            open_work, window_work = WorkTotals(), WorkTotals()
            for work in replica.works.values():
                prefill_s = 0.0 if work.prefilled else work.prefill_s
                open_work.add(work.service_class, prefill_s, work.decode_s)
            for work in in_window:
                if work.replica == number:
                    window_work.add(work.service_class, work.prefill_s, work.decode_s)
            replica.open_work.check_equals(open_work)
            replica.window_work.check_equals(window_work)


def _path_of(leaf: PrefixNode) -> Iterator[PrefixNode]:
    """The node and its ancestors."""
    node: PrefixNode | None = leaf
    while node is not None:
        yield node
        node = node.parent


def _remove_from_key(replica: Replica, work: ReplicaWork) -> None:
    key, number = work.key, work.replica
    if key is None:
        return
    replica.keys[key] -= 1
    key.load[number] -= work.seconds
    if not replica.keys[key]:
        del replica.keys[key], key.load[number]


def _remove_from_nodes(work: ReplicaWork) -> None:
    number = work.replica
    for node in _path_of(work.leaf):
        node.num_requests -= 1
        node.requests[number] -= 1
        if not node.requests[number]:
            del node.requests[number]
