"""What policies decide on: the replicas, the forest, and what is asked for."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from bros.core.interfaces import Prices
from bros.core.request import EngineRequest, ServiceClass
from bros.router.forest import Forest, Path, Pieces, PrefixNode

# ---- What can be set, and what a decision says.


ROUTERS = ("e2", "rr", "least", "oracle")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSettings:
    """Of all policies; the defaults are Preble's (3.2 and its code).

    window_s: what was asked for so long ago counts as load, and for who shares what.
    balance: how many times the lightest replica's load the heaviest one's may be before prefixes
        move.
    replicate: a prefix gets one more replica when requests wait so many times as long as before.
    decode_share: a replica that spends more than this on answers is given prompts first.
    warm_up: requests per replica before anything moves.
    history: where a request goes, what a second of the window counts beside one that is still to be
        done.
    patience: a request waits for its prefix at most so many times as long as computing it again
        would take.
    late_weight: of a second by which a first token would be late.
    be_weight: what a second of best-effort work counts for a real-time request, on an engine that
        may evict that.
    max_tokens: most tokens that the forest of prefixes may hold.
    plan: where hot prefixes go: "off", "on", or "shadow": only say what it would gain.
    rebalancing, replication, decode_aware: for ablations.
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
    """What a router has to know of an engine.

    capacity_tokens: of its KV cache.
    yields: its best-effort work yields to real-time work (policy bros).
    ttft_s: objective of real-time requests that bring none; None: there is none.
    """

    capacity_tokens: int
    prices: Prices
    yields: bool = True
    ttft_s: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and why.

    replica: its number.
    matched: tokens of the prompt that are cached there, as far as is known.
    reason: "exploit", "again", "explore", "decode", "moved", "parked", "group", "planned", "turn"
        (rr), "least", "oracle", "only".
    """

    request_id: str
    replica: int
    matched: int
    reason: str


# ---- What is known of one replica besides its cache: what it was given, and what that costs there.


_FIRST_GUESS = 64.0
"""Tokens of an answer, before the first one has ended."""

_ALPHA = 0.05
"""Of the moving average over answers."""

_PARTS = 32
"""Of a window, of which waits are summed up."""

RT, BE = ServiceClass.RT, ServiceClass.BE


@dataclass(slots=True, eq=False)
class ReplicaWork:
    """One request where it went: open until it has ended, and of the window for a while.

    request: None once it has ended.
    matched: tokens that were cached there when it came.
    leaf: where its prompt ends.
    key: the part of it that others ask for as well (e2.py), if there is one.
    prefill_s: of what was not cached there.
    decode_s: of the answer, as far as is known.
    begun: its first token is there.
    in_window: it counts as load.
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
    begun: bool = False
    in_window: bool = True

    @property
    def seconds(self) -> float:
        return self.prefill_s + self.decode_s


class Sums:
    """Seconds of work by class and kind."""

    __slots__ = ("decode_s", "num", "prefill_s")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.num = 0
        self.prefill_s = {RT: 0.0, BE: 0.0}
        self.decode_s = {RT: 0.0, BE: 0.0}

    def add(self, service_class: ServiceClass, prefill_s: float, decode_s: float) -> None:
        self.num += 1
        self.prefill_s[service_class] += prefill_s
        self.decode_s[service_class] += decode_s

    def remove(self, service_class: ServiceClass, prefill_s: float, decode_s: float) -> None:
        """Take back an `add` with the same arguments."""
        self.num -= 1
        self.prefill_s[service_class] -= prefill_s
        self.decode_s[service_class] -= decode_s
        if not self.num:
            self.clear()  # rounding leaves something

    def of(self, service_class: ServiceClass, be_weight: float) -> float:
        """What counts for a request of a class. be_weight: best-effort work for real-time ones."""
        weight = 1.0 if service_class is BE else be_weight
        return (
            self.prompts(service_class, be_weight) + self.decode_s[RT] + weight * self.decode_s[BE]
        )

    def prompts(self, service_class: ServiceClass, be_weight: float) -> float:
        """The same of prompts alone."""
        weight = 1.0 if service_class is BE else be_weight
        return self.prefill_s[RT] + weight * self.prefill_s[BE]

    @property
    def decode_share(self) -> float:
        """Of all the time; 0 if there is none."""
        decode = self.decode_s[RT] + self.decode_s[BE]
        total = decode + self.prefill_s[RT] + self.prefill_s[BE]
        return decode / total if total > 0.0 else 0.0


class Waits:
    """What requests waited for their first token, within the window."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._parts: deque[list[float]] = deque()  # [when it began, requests, seconds]

    def add(self, now: float, wait_s: float) -> None:
        part_s = self._window_s / _PARTS
        if not self._parts or now >= self._parts[-1][0] + part_s:
            self._parts.append([now // part_s * part_s, 0.0, 0.0])
            while self._parts[0][0] <= now - self._window_s:
                self._parts.popleft()
        self._parts[-1][1] += 1
        self._parts[-1][2] += wait_s

    def halves(self, now: float) -> tuple[float, float, float, float]:
        """(requests, seconds) of the earlier half of the window, and of the later one."""
        halves = [0.0, 0.0, 0.0, 0.0]
        for began_s, count, seconds in self._parts:
            if began_s > now - self._window_s:
                first = 2 * (began_s >= now - self._window_s / 2)
                halves[first] += count
                halves[first + 1] += seconds
        return halves[0], halves[1], halves[2], halves[3]


@dataclass(slots=True)
class Origin:
    """A request that was the first to compute something that is cached.

    leaf: what of its path may be.
    version: of the last report about it.
    """

    leaf: PrefixNode
    version: int = 0


@dataclass(slots=True, eq=False)
class Replica:
    """window: what came within the window.
    open: what has not ended; of what has its first token, the answer alone.
    works: the same by request id.
    keys: of how many requests of the window which prefixes are the key.
    slowdown: steps take so many times what the prices say.
    """

    number: int
    facts: ReplicaFacts
    waits: Waits
    draining: bool = False
    mean_output: float = _FIRST_GUESS
    running: int = 0
    slowdown: float = 1.0
    version: int = 0
    digest_version: int = 0
    window: Sums = field(default_factory=Sums)
    open: Sums = field(default_factory=Sums)
    works: dict[str, ReplicaWork] = field(default_factory=dict)
    keys: dict[PrefixNode, int] = field(default_factory=dict)
    origins: OrderedDict[str, Origin] = field(default_factory=OrderedDict)

    def prefill_s(self, tokens: int, context: int) -> float:
        return self.slowdown * self.facts.prices.prefill_s(tokens, context)

    def decode_s(self, tokens: float, context: int) -> float:
        rows = max(self.running, self.open.num, 1)
        return self.slowdown * self.facts.prices.decode_s(tokens, context, rows)

    def expected_output(self, request: EngineRequest) -> float:
        """Tokens of its answer, as far as one can tell."""
        if request.prefill_only:
            return 0.0
        expected = request.hints.expected_tokens or self.mean_output
        most = request.sampling.max_tokens
        return expected if most is None else min(expected, most - request.resumed)

    def learn_output(self, tokens: int) -> None:
        self.mean_output += _ALPHA * (tokens - self.mean_output)


@dataclass(slots=True)
class Ask:
    """A request that has to go somewhere.

    length: tokens of its prompt.
    matched: replica -> tokens of it that are cached there, of those that have any.
    candidates: where it may go.
    parked: the replica that keeps the KV of the turn before.
    """

    request: EngineRequest
    pieces: Pieces
    path: Path
    length: int
    matched: dict[int, int]
    candidates: Sequence[Replica]
    parked: int | None = None

    @property
    def service_class(self) -> ServiceClass:
        return self.request.service_class

    def prefill_s(self, replica: Replica) -> float:
        """What of its prompt is not cached there."""
        matched = self.matched.get(replica.number, 0)
        return replica.prefill_s(self.length - matched, matched)

    def key(self, tokens: int) -> PrefixNode | None:
        """Of the nodes that begin within its first so many tokens the last one that is longer than
        all before it together: what it should be placed by (Preble 3.2: the key portion)."""
        for node in reversed(self.path.nodes):
            if node.start < tokens and node.num_tokens > node.start:
                return node
        return None


@dataclass(slots=True)
class State:
    """Everything, at one moment.

    num_routed: requests so far.
    since_s: when the first one came.
    asked_tokens: of the prompts of the window, of which matched_tokens were cached where they went.
    """

    settings: RouterSettings
    forest: Forest
    replicas: dict[int, Replica] = field(default_factory=dict)
    num_routed: int = 0
    since_s: float = 0.0
    asked_tokens: int = 0
    matched_tokens: int = 0

    @property
    def hits(self) -> float:
        """The share of what was asked for that caches had."""
        return self.matched_tokens / self.asked_tokens if self.asked_tokens else 0.0

    def matched(self, path: Path) -> dict[int, int]:
        """replica -> how many of the first tokens of a prompt are cached there, if any are."""
        found: dict[int, int] = {}
        whole: set[int] | None = None
        for node in path.nodes:
            asked, size = min(node.end, path.end) - node.start, node.end - node.start
            goes_on = set()
            for replica, kept in node.cached.items():
                if whole is None or replica in whole:
                    found[replica] = node.start + min(kept, asked)
                    if kept == size:
                        goes_on.add(replica)
            if not goes_on:
                break
            whole = goes_on
        return found

    def weight(self, replica: Replica) -> float:
        """What a second of best-effort work there counts for a real-time request."""
        return self.settings.be_weight if replica.facts.yields else 1.0

    def open_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """Work that it has, which a new request of a class would have beside or before it."""
        return replica.open.of(service_class, self.weight(replica))

    def queue_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """Of that, prompts alone: the next one comes after them, but beside the answers."""
        return replica.open.prompts(service_class, self.weight(replica))

    def load_s(self, replica: Replica, service_class: ServiceClass) -> float:
        """What it still has to do; of two that are as busy, the one that got less lately."""
        window = replica.window.of(service_class, self.weight(replica))
        return self.settings.history * window + self.open_s(replica, service_class)

    def given_s(self, replica: Replica) -> float:
        """What it was given within the window, and has not done of what came before. It says where
        too many prefixes are; what is open at the moment, by itself, would move them to and fro."""
        return replica.window.of(BE, 1.0) + replica.open.of(BE, 1.0)


class RoutingPolicy(Protocol):
    """Chooses among candidates; changes nothing but what is its own."""

    def choose(self, state: State, ask: Ask, now: float) -> tuple[Replica, str]:
        """Where a request goes, and why: the `reason` of a Decision. There is a candidate."""
        ...


# ---- Counts what was given to whom: per replica, per prefix, within the window and open.


class Ledger:
    """Every request is in it from `open` to `close`, and until it leaves the window.

    works: those that are open, by id.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._window: deque[ReplicaWork] = deque()
        self.works: dict[str, ReplicaWork] = {}

    def open(self, request_id: str, work: ReplicaWork) -> None:
        """It goes to its replica."""
        assert request_id not in self.works, "one at a time has an id"
        replica = self._state.replicas[work.replica]
        if not self._state.num_routed:
            self._state.since_s = work.time_s
        self._state.num_routed += 1
        self._state.asked_tokens += work.leaf.end
        self._state.matched_tokens += work.matched
        self.works[request_id] = replica.works[request_id] = work
        replica.open.add(work.service_class, work.prefill_s, work.decode_s)
        replica.window.add(work.service_class, work.prefill_s, work.decode_s)
        self._window.append(work)
        if work.key is not None:
            replica.keys[work.key] = replica.keys.get(work.key, 0) + 1
            work.key.load[work.replica] = work.key.load.get(work.replica, 0.0) + work.seconds
        node: PrefixNode | None = work.leaf
        while node is not None:
            node.active += 1
            node.num_asked += 1
            node.asked[work.replica] = node.asked.get(work.replica, 0) + 1
            node = node.parent

    def begin(self, work: ReplicaWork) -> None:
        """Its prompt is done."""
        replica = self._state.replicas[work.replica]
        replica.open.remove(work.service_class, work.prefill_s, work.decode_s)
        work.begun = True
        replica.open.add(work.service_class, 0.0, work.decode_s)

    def promote(self, work: ReplicaWork) -> None:
        """It counts as real-time work from now on."""
        if work.service_class is ServiceClass.RT:
            return
        replica = self._state.replicas[work.replica]
        prefill_s = 0.0 if work.begun else work.prefill_s
        replica.open.remove(work.service_class, prefill_s, work.decode_s)
        replica.open.add(ServiceClass.RT, prefill_s, work.decode_s)
        if work.in_window:
            replica.window.remove(work.service_class, work.prefill_s, work.decode_s)
            replica.window.add(ServiceClass.RT, work.prefill_s, work.decode_s)
        work.service_class = ServiceClass.RT

    def close(self, request_id: str) -> ReplicaWork | None:
        """It has ended, or is lost; None if it is not open."""
        work = self.works.pop(request_id, None)
        if work is None:
            return None
        replica = self._state.replicas[work.replica]
        del replica.works[request_id]
        work.request = None  # prompts are long, and windows as well
        prefill_s = 0.0 if work.begun else work.prefill_s
        replica.open.remove(work.service_class, prefill_s, work.decode_s)
        node: PrefixNode | None = work.leaf
        while node is not None:
            node.active -= 1
            node = node.parent
        return work

    def settle(self, work: ReplicaWork, prefill_s: float, decode_s: float) -> None:
        """What it took is known now; it is closed."""
        if work.in_window:
            replica = self._state.replicas[work.replica]
            replica.window.remove(work.service_class, work.prefill_s, work.decode_s)
            replica.window.add(work.service_class, prefill_s, decode_s)
            if work.key is not None:
                work.key.load[work.replica] += prefill_s + decode_s - work.seconds
            work.prefill_s, work.decode_s = prefill_s, decode_s

    def expire(self, now: float) -> None:
        """What is older than the window does not count any more."""
        before = now - self._state.settings.window_s
        while self._window and self._window[0].time_s <= before:
            work = self._window.popleft()
            work.in_window = False
            self._state.asked_tokens -= work.leaf.end
            self._state.matched_tokens -= work.matched
            replica = self._state.replicas.get(work.replica)
            if replica is not None:
                replica.window.remove(work.service_class, work.prefill_s, work.decode_s)
                _take_from_key(replica, work)
            _ask_less(work)
            self._state.forest.prune(work.leaf)


def _take_from_key(replica: Replica, work: ReplicaWork) -> None:
    key, number = work.key, work.replica
    if key is None:
        return
    replica.keys[key] -= 1
    key.load[number] -= work.seconds
    if not replica.keys[key]:
        del replica.keys[key], key.load[number]


def _ask_less(work: ReplicaWork) -> None:
    number = work.replica
    node: PrefixNode | None = work.leaf
    while node is not None:
        node.num_asked -= 1
        node.asked[number] -= 1
        if not node.asked[number]:
            del node.asked[number]
        node = node.parent
