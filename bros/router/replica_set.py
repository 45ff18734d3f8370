"""The replicas of a router, and the requests that are open on each.

    add -> DOWN -- mark_up --> UP -- mark_down --> DOWN -- mark_gone --> GONE

Only this module updates the fleet. The fleet sees a replica that comes up again as a new one,
because its cache is empty.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bros.core.clock import Clock
from bros.core.errors import EngineDeadError, InvalidRequestError, NotFoundError, OverloadedError
from bros.core.interfaces import (
    Buckets,
    ClassStats,
    EngineInfo,
    EngineReport,
    EngineStats,
    Placement,
    Prices,
    ReportingClient,
    RequestStream,
)
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Output,
    RequestOutput,
    ServiceClass,
    Slo,
)
from bros.core.slices import Slices
from bros.engine.client import OutputStream
from bros.router.fleet import Fleet
from bros.router.state import ReplicaFacts

# ---- Infos and statistics of several engines, combined into those of one.


_MAX_QUEUE = 2**31 - 1

_GAUGES = frozenset({
    "batch_size", "kv_blocks_used", "kv_blocks_total", "kv_blocks_shared", "kv_blocks_cached",
    "kv_blocks_pinned", "host_kv_blocks_used", "host_kv_blocks_total", "running", "waiting",
    "kv_blocks",
})  # fmt: skip
"""Statistics that end with an engine; all others are counters."""

_NOT_SUMMED = frozenset({
    "by_class", "slack", "slowdown", "device_s", "traces", "yielding", "safety_factor",
    "rare_factor",
})  # fmt: skip
"""Statistics that `total_stats` combines in other ways than by a sum, or not at all."""

_Stats = TypeVar("_Stats", EngineStats, ClassStats)


def total_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Combine the infos of one engine or more. Fields that cannot be added up are the first's."""
    return dataclasses.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_kv_blocks=sum(info.num_kv_blocks for info in infos),
        num_host_kv_blocks=sum(info.num_host_kv_blocks for info in infos),
        max_queue=min(sum(info.max_queue for info in infos), _MAX_QUEUE),
    )


def total_stats(parts: Sequence[EngineStats], before: Sequence[EngineStats] = ()) -> EngineStats:
    """The sums of all statistics; of factors and a tenant's traces, the largest.

    before: counters of engines that have ended (see `counters`), so that sums never decrease.
    """
    total = _sum(EngineStats(), [*parts, *before])
    by_class = {}
    for service_class in ServiceClass:
        of_class = [stats.by_class.get(service_class, ClassStats()) for stats in (*parts, *before)]
        slack = total_buckets([values.slack for values in of_class])
        slowdown = total_buckets([values.slowdown for values in of_class])
        device_s: dict[str, float] = {}
        for values in of_class:
            for tenant, seconds in values.device_s.items():
                device_s[tenant] = device_s.get(tenant, 0.0) + seconds
        by_class[service_class] = dataclasses.replace(
            _sum(ClassStats(), of_class), slack=slack, slowdown=slowdown, device_s=device_s
        )
    traces = Counter[str]()
    for stats in parts:
        traces |= Counter(stats.traces)  # the larger number of each tenant
    return dataclasses.replace(
        total,
        by_class=by_class,
        safety_factor=max((stats.safety_factor for stats in parts), default=1.0),
        rare_factor=max((stats.rare_factor for stats in parts), default=1.0),
        traces=dict(traces),
        yielding=total_buckets([stats.yielding for stats in (*parts, *before)]),
    )


def counters(stats: EngineStats) -> EngineStats:
    """The same statistics with gauges set to 0."""
    by_class = {name: _without_gauges(values) for name, values in stats.by_class.items()}
    return dataclasses.replace(_without_gauges(stats), by_class=by_class, traces={})


def total_buckets(parts: Sequence[Buckets]) -> Buckets:
    """Sum histograms with equal bounds; empty ones may have other bounds."""
    parts = [part for part in parts if any(part.counts)] or list(parts[:1])
    if not parts:
        return Buckets()
    bounds = parts[0].bounds
    assert all(part.bounds == bounds for part in parts), "engines of one kind"
    counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
    return Buckets(bounds, counts, sum(part.total for part in parts))


def _sum(zero: _Stats, parts: Sequence[_Stats]) -> _Stats:
    """Add up the fields that are numbers. zero: statistics without counts."""
    names = {field.name for field in dataclasses.fields(zero)} - _NOT_SUMMED
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    return dataclasses.replace(zero, **sums)


def _without_gauges(stats: _Stats) -> _Stats:
    names = {field.name for field in dataclasses.fields(stats)} & _GAUGES
    nothing: dict[str, Any] = dict.fromkeys(names, 0)
    return dataclasses.replace(stats, **nothing)


# ---- One replica, and one request that moves between replicas.


_MIN_DEADLINE_S = 0.001
"""Deadline of a promoted request that is overdue already."""

Restart = Callable[[], Awaitable[None]]
"""Restarts an engine that has no open requests; returns when it is up again."""


class ReplicaState(enum.StrEnum):
    """UP: accepts requests.
    DRAINING: only finishes its open requests.
    DRAINED: has none left.
    RESTARTING: an operator restarts its engine.
    DOWN: its engine is lost but may come back.
    GONE: its engine does not come back.
    """

    UP = "up"
    DRAINING = "draining"
    DRAINED = "drained"
    RESTARTING = "restarting"
    DOWN = "down"
    GONE = "gone"


RUNNING = frozenset({ReplicaState.UP, ReplicaState.DRAINING, ReplicaState.DRAINED})
"""States with an engine that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A snapshot for operators. Counters count since the server started.

    open: open requests of the router on this replica.
    running, waiting: requests of the engine, from its latest report.
    routed: requests by the reason of the decision (Decision.reason).
    prompt_tokens: prompt tokens of requests that got a first token.
    cached_tokens: those of them that were cached.
    lost: how often its engine was lost.
    """

    number: int
    name: str
    state: ReplicaState
    open: int
    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
    total_blocks: int
    prompt_tokens: int
    cached_tokens: int
    lost: int
    routed: Mapping[str, int]


@dataclass(slots=True, eq=False)
class ReplicaHandle:
    """One replica.

    number: its number for operators; it stays the same when the engine restarts.
    fleet_id: its number in the fleet, a new one each time it comes up; None while it is down.
    draining: it gets no more requests, until it is resumed.
    restarting: its engine is being replaced.
    restart_wanted: the latest command to drain or resume it asks for a restart.
    gone: its engine does not come back.
    stuck: its engine did not end a request that was to move, and has not reported since.
    stats_task: a request for statistics that the engine has not answered yet.
    stats_late: the last one has timed out.
    info, stats: the latest ones of its engine.
    stats_before: counters of its earlier engines.
    report: the latest one of its engine.
    applying: reports that the fleet does not have or not wholly, the oldest first.
    open: request id -> open request.
    routed, prompt_tokens, cached_tokens: see ReplicaStatus.
    lost: how often its engine was lost.
    hung: how often of these it hung.
    """

    number: int
    name: str
    client: ReportingClient
    restart: Restart | None = None
    fleet_id: int | None = None
    draining: bool = False
    restarting: bool = False
    restart_wanted: bool = False
    gone: bool = False
    stuck: bool = False
    stats_late: bool = False
    stats_task: asyncio.Task[EngineDeadError | None] | None = None
    info: EngineInfo | None = None
    stats: EngineStats | None = None
    stats_before: EngineStats = field(default_factory=EngineStats)
    report: EngineReport = field(default_factory=lambda: EngineReport(version=0))
    applying: deque[Slices[None]] = field(default_factory=deque)
    open: dict[str, RoutedRequest] = field(default_factory=dict)
    routed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost: int = 0
    hung: int = 0

    @property
    def available(self) -> bool:
        """Whether it accepts requests."""
        return self.fleet_id is not None and not self.draining

    @property
    def usable(self) -> bool:
        """Whether it accepts requests if no other replica does."""
        return self.fleet_id is not None and not (self.restarting or self.stuck)

    @property
    def state(self) -> ReplicaState:
        if self.gone:
            return ReplicaState.GONE
        if self.restarting:
            return ReplicaState.RESTARTING
        if self.fleet_id is None:
            return ReplicaState.DOWN
        if not self.draining:
            return ReplicaState.UP
        return ReplicaState.DRAINING if self.open else ReplicaState.DRAINED

    def facts(self) -> ReplicaFacts:
        """What the fleet needs to know about it. It must be up."""
        assert self.info is not None
        return ReplicaFacts(
            capacity_tokens=self.info.num_kv_blocks * self.info.block_size,
            prices=self.info.prices or Prices(),
            yields=self.info.yields,
            ttft_s=self.info.default_slo.ttft_s if self.info.yields else None,
        )

    def retain_counters(self) -> None:
        """Its engine has ended: keep only its counters."""
        if self.stats is not None:
            before = [self.stats_before, counters(self.stats)]
            self.stats, self.stats_before = None, total_stats((), before)

    def status(self) -> ReplicaStatus:
        return ReplicaStatus(
            number=self.number,
            name=self.name,
            state=self.state,
            open=len(self.open),
            running=self.report.running,
            waiting=self.report.waiting,
            used_blocks=self.report.used_blocks,
            cached_blocks=self.report.cached_blocks,
            total_blocks=self.info.num_kv_blocks if self.info else 0,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            lost=self.lost,
            routed=dict(self.routed),
        )


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """An open request, with all that is needed to continue it on another replica.

    original: the request as submitted, with a seed.
    current: the request as sent to its present engine.
    stream: its outputs, from all engines.
    num_read: positions of the prompt that were read so far, see EngineRequest.
    output_ids: all output tokens so far, from all engines.
    replica: its replica; None while it is between two.
    fleet_id: the replica's fleet_id when the request was routed there.
    placement: the replica that it is routed to, once that is decided.
    placed: the same with the reason, for those who ask; the last one if there are several.
    can_wait: it waits if no replica accepts requests now.
    accepting: the pending submit to the present engine.
    accepted: the present engine has accepted it.
    connection: number of the engine stream that it reads; outputs of others are ignored.
    connected: it is connected to that stream.
    task: finds another replica, while it is between two.
    has_output: the present engine has sent its first output.
    aborted: its client has aborted it.
    promoted: the objectives that it was promoted to first, at promoted_s.
    latest: those that it was promoted to last, at latest_s.
    awaited: something waits for it alone, see RequestGroup.
    moving: it is to continue on another replica.
    avoided: the replica that it must not go to, as it is moved away from there.
    unreleased: replicas that it was withdrawn from, and that may still run it.
    refusals: replicas that accepted it and then refused it before its first output.
    losses: engines that were lost while they had it.
    suspect: it starts alone among the requests with as many losses (dispatcher.py).
    """

    original: EngineRequest
    current: EngineRequest = field(init=False)
    stream: OutputStream = field(init=False)
    num_read: int = field(init=False)
    output_ids: list[int] = field(default_factory=list)
    replica: ReplicaHandle | None = None
    fleet_id: int | None = None
    placement: asyncio.Future[ReplicaHandle] | None = None
    placed: Placement | None = None
    can_wait: bool = False
    accepting: asyncio.Future[RequestStream] | None = None
    accepted: bool = False
    connection: int = 0
    connected: bool = False
    task: asyncio.Task[None] | None = None
    has_output: bool = False
    aborted: bool = False
    promoted: Slo | None = None
    promoted_s: float = 0.0
    latest: Slo | None = None
    latest_s: float = 0.0
    awaited: bool = False
    moving: bool = False
    avoided: ReplicaHandle | None = None
    unreleased: set[ReplicaHandle] = field(default_factory=set)
    refusals: dict[ReplicaHandle, OverloadedError] = field(default_factory=dict)
    losses: int = 0
    suspect: bool = False
    _num_output_before: int = 0
    _cached_tokens: int | None = None

    def __post_init__(self) -> None:
        self.current = self.original
        self.stream = OutputStream(self.original.service_class)
        self.num_read = self.original.num_read

    @property
    def id(self) -> str:
        return self.original.request_id

    @property
    def is_real_time(self) -> bool:
        """Whether it is served as real-time work: from the start, or since it was promoted."""
        return self.promoted is not None or self.stream.service_class is ServiceClass.RT

    @property
    def on_live_engine(self) -> bool:
        """Whether the engine that it was routed to is still up."""
        return self.replica is not None and self.fleet_id == self.replica.fleet_id is not None

    def is_at(self, replica: ReplicaHandle, fleet_id: int | None) -> bool:
        """Whether it is on the replica, and on the same engine there."""
        return self.replica is replica and self.fleet_id == fleet_id

    @property
    def awaits_placement(self) -> bool:
        """Whether no replica has been chosen for it yet."""
        return self.placement is not None and not self.placement.done()

    @property
    def output_ids_here(self) -> list[int]:
        """Output tokens of the present engine."""
        return self.output_ids[self._num_output_before :]

    def next_request(self) -> EngineRequest:
        """The request for the next engine: prompt and output so far, and the rest to be sampled."""
        self._num_output_before = len(self.output_ids)
        self.has_output = False
        self.current = self._promoted()
        if self.num_read:
            self.current = dataclasses.replace(self.current, num_read=self.num_read)
        if self.output_ids:
            self.current = dataclasses.replace(
                self.current,
                prompt_token_ids=[*self.original.prompt_token_ids, *self.output_ids],
                resumed=self.original.resumed + len(self.output_ids),
            )
        return self.current

    def promote(self, slo: Slo, awaited: bool, now: float) -> None:
        """Make it real-time from now on, or its objectives stricter. The caller tells the present
        engine; the dispatcher tells the next ones of the latest promotion."""
        if self.promoted is None:
            self.promoted, self.promoted_s = slo, now
        self.latest, self.latest_s = slo, now
        self.awaited |= awaited

    def _promoted(self) -> EngineRequest:
        """The request by its first promotion, with the deadline of the latest one if that is
        earlier: the time between two engines counts."""
        request, slo = self._promoted_first(), self.latest
        if slo is None or slo is self.promoted or slo.deadline_s is None:
            return request
        left_s = max(self.latest_s + slo.deadline_s - request.arrival_s, _MIN_DEADLINE_S)
        if request.slo.deadline_s is not None:
            left_s = min(left_s, request.slo.deadline_s)
        slo = dataclasses.replace(request.slo, deadline_s=left_s)
        return dataclasses.replace(request, slo=slo)

    def _promoted_first(self) -> EngineRequest:
        """The original, as if it had arrived when it was promoted. A deadline of the original holds
        unless the promotion sets one."""
        slo, original = self.promoted, self.original
        if slo is None or self.stream.service_class is ServiceClass.RT:
            return original  # it was real-time from the start
        if slo.deadline_s is None and original.slo.deadline_s is not None:
            left_s = original.arrival_s + original.slo.deadline_s - self.promoted_s
            slo = dataclasses.replace(slo, deadline_s=max(left_s, _MIN_DEADLINE_S))
        return dataclasses.replace(
            original, service_class=ServiceClass.RT, slo=slo, arrival_s=self.promoted_s
        )

    def forward(self, output: Output) -> None:
        """Send an output to the client. Only the first engine's cached tokens count."""
        if isinstance(output, tuple):
            self.output_ids.append(output[1])
        else:
            self.num_read = max(self.num_read, output.num_read)
            if not output.has_begun:
                pass  # cached tokens come with the first output after the prompt
            elif self._cached_tokens is None:
                self._cached_tokens = output.cached_tokens
            elif output.cached_tokens:
                output = dataclasses.replace(output, cached_tokens=0)
            self.output_ids += output.token_ids
        self.stream.put(output)

    def end(
        self,
        reason: FinishReason,
        error: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Send a last output that does not come from an engine."""
        self.forward(
            RequestOutput(
                request_id=self.id,
                finish_reason=reason,
                cached_tokens=self._cached_tokens or 0,
                error=error,
                retry_after_s=retry_after_s,
            )
        )


logger = logging.getLogger(__name__)

_RETRY_AFTER_S = 5.0
"""When a client should retry, while a replica starts."""

_CHECK_PERIOD_S = 0.05
"""Period of the liveness check. Open and new requests notice lost engines by themselves."""


class ReplicaSet:
    """The replicas, and the placement of requests on them. Create it inside a running event loop.

    on_up: called when a replica that accepts requests has come up.
    removed_stats: counters of replicas that were removed.
    removed_lost, removed_hung: the same of their `lost` and `hung`.
    """

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self.replicas: dict[int, ReplicaHandle] = {}
        self._no_replica_reason = "No replica was started."
        self.on_up: Callable[[], None] = lambda: None
        self._fleet = fleet
        self._clock = clock
        self.removed_stats = EngineStats()
        self.removed_lost = self.removed_hung = 0
        self._added = 0
        self._by_fleet_id: dict[int, ReplicaHandle] = {}
        self._arrivals: list[tuple[RoutedRequest, Collection[ReplicaHandle]]] = []
        self._unplaced: list[RoutedRequest] = []
        self._empty_events: dict[int, asyncio.Event] = {}
        self._routing: asyncio.Handle | None = None
        self._timer = asyncio.get_running_loop().call_soon(self._check_periodically)

    # Replicas

    def add(self, client: ReportingClient, name: str, restart: Restart | None) -> ReplicaHandle:
        """Add a replica. It accepts requests as soon as it is up."""
        number, self._added = self._added, self._added + 1
        replica = ReplicaHandle(number, name or f"replica-{number}", client, restart)
        self.replicas[number] = replica
        client.subscribe(functools.partial(self._on_report, replica))
        self.check_liveness()
        return replica

    def find(self, number: int) -> ReplicaHandle:
        """Raises NotFoundError."""
        if number not in self.replicas:
            numbers = ", ".join(map(str, self.replicas))
            message = f"There is no replica {number}; there are {numbers or 'none'}."
            raise NotFoundError(message, code="replica_not_found")
        return self.replicas[number]

    def check_liveness(self) -> None:
        """Mark replicas whose engine has come up, and those whose engine is lost."""
        for replica in self.replicas.values():
            if replica.gone:
                continue
            if replica.fleet_id is None and replica.client.alive:
                self.mark_up(replica)
            elif replica.fleet_id is not None and not replica.client.alive:
                self.mark_down(replica)

    def mark_down(self, replica: ReplicaHandle) -> None:
        """The engine of a replica is lost. Its open requests learn that from their streams."""
        if replica.fleet_id is None:
            return
        if not (replica.restarting or replica.gone):
            replica.lost += 1
            replica.hung += replica.client.hung
            logger.warning("%s is lost with %d open requests", replica.name, len(replica.open))
        self._fleet.remove(replica.fleet_id)
        del self._by_fleet_id[replica.fleet_id]
        replica.fleet_id = None
        replica.report = EngineReport(version=0)
        replica.applying.clear()
        replica.retain_counters()

    def mark_gone(self, replica: ReplicaHandle, reason: str) -> None:
        """The engine of a replica does not come back."""
        self.mark_down(replica)
        replica.gone = True
        left = [other for other in self.replicas.values() if not other.gone]
        if not left:
            self.close(reason)
        elif all(other.draining for other in left):
            logger.warning("only draining replicas are left: they accept requests again")
            for other in left:
                self.set_draining(other, False)

    def remove(self, replica: ReplicaHandle) -> None:
        """Remove a replica, and keep its counters."""
        replica.gone = True  # so that its reports are ignored
        self.mark_down(replica)
        self.removed_stats = total_stats((), [self.removed_stats, replica.stats_before])
        self.removed_lost += replica.lost
        self.removed_hung += replica.hung
        del self.replicas[replica.number]

    def set_draining(self, replica: ReplicaHandle, draining: bool) -> None:
        """Stop routing requests to a replica, or resume it. Raises InvalidRequestError if it is the
        last one that accepts requests."""
        if draining and not any(
            other.available for other in self.replicas.values() if other != replica
        ):
            raise InvalidRequestError(
                f"{replica.name} cannot be drained: no other replica takes requests now.",
                code="last_replica",
            )
        replica.draining = draining
        self._set_fleet_draining(replica, draining)
        if replica.available:
            self._route_unplaced()

    async def wait_empty(self, replica: ReplicaHandle) -> None:
        """Wait until a replica has no open requests."""
        while replica.open:
            await self._empty_events.setdefault(replica.number, asyncio.Event()).wait()

    def close(self, reason: str) -> None:
        """Fail the requests that wait for a replica, and stop the liveness check."""
        self._no_replica_reason = reason
        self._timer.cancel()
        for item in [*self._unplaced, *(item for item, _ in self._arrivals)]:
            _refuse(item, EngineDeadError(reason))
        self._unplaced, self._arrivals = [], []

    # Requests

    def place(
        self, item: RoutedRequest, avoid: Collection[ReplicaHandle], *, can_wait: bool
    ) -> asyncio.Future[ReplicaHandle]:
        """Route a request, together with all others that arrive in this turn of the event loop.

        avoid: replicas that have just refused it.
        can_wait: wait if no replica accepts requests now.
        The future raises EngineDeadError if none does and can_wait is off, or if all are gone.
        """
        item.placement = asyncio.get_running_loop().create_future()
        item.can_wait = can_wait
        self._arrivals.append((item, avoid))
        if self._routing is None:
            self._routing = asyncio.get_running_loop().call_soon(self._route)
        return item.placement

    @property
    def candidates(self) -> list[ReplicaHandle]:
        """Replicas that accept requests; if there are none, those that are draining."""
        there = [replica for replica in self.replicas.values() if replica.available]
        return there or [replica for replica in self.replicas.values() if replica.usable]

    def others_available(self, than: Collection[ReplicaHandle]) -> bool:
        return any(other not in than for other in self.candidates)

    def promote(self, item: RoutedRequest) -> None:
        """Count the work of a promoted request as real-time."""
        if item.on_live_engine:
            self._fleet.on_promoted(item.id)

    def on_first_output(self, item: RoutedRequest, cached_tokens: int) -> None:
        """The present engine of a request has sent its first output."""
        item.has_output = True
        if item.replica is not None and item.on_live_engine:
            item.replica.prompt_tokens += len(item.current.prompt_token_ids)
            item.replica.cached_tokens += cached_tokens
            self._fleet.on_first_token(item.id, self._clock.now())

    def detach(self, item: RoutedRequest, *, cached: bool = False) -> None:
        """Remove a request from its replica. cached: it ran to its end, its KV is cached there."""
        replica = item.replica
        if replica is None:
            return
        if item.on_live_engine:
            self._fleet.on_finished(item.id, item.output_ids_here, self._clock.now(), cached=cached)
        item.replica, item.fleet_id, item.accepted = None, None, False
        del replica.open[item.id]
        if not replica.open and replica.number in self._empty_events:
            self._empty_events.pop(replica.number).set()

    def check_integrity(self) -> None:
        """Raise AssertionError unless replicas, open requests and fleet agree (for tests)."""
        self._fleet.check_integrity()
        up = self._by_fleet_id
        assert up == {r.fleet_id: r for r in self.replicas.values() if r.fleet_id is not None}
        assert up.keys() == self._fleet.replicas.keys()
        for number, replica in up.items():
            here = [item.id for item in replica.open.values() if item.fleet_id == number]
            assert sorted(here) == sorted(self._fleet.replicas[number].works)
            assert replica.draining == self._fleet.replicas[number].draining
        for replica in self.replicas.values():
            assert not (replica.gone and replica.fleet_id is not None)
            for request_id, item in replica.open.items():
                assert item.id == request_id and item.replica is replica
        assert all(item.replica is None for item in self._unplaced if item.awaits_placement)
        assert self._routing is not None or not self._arrivals

    def _route(self) -> None:
        self._routing = None
        self.check_liveness()
        arrivals, self._arrivals = self._arrivals, []
        # Requests that were aborted meanwhile do not wait any more.
        open_now = [(item, avoid) for item, avoid in arrivals if item.awaits_placement]
        candidates = self.candidates
        if not candidates:
            for item, _ in open_now:
                self._wait_or_refuse(item)
            return
        drained = [replica for replica in candidates if replica.draining]
        for replica in drained:  # they serve these requests, and are draining again afterwards
            self._set_fleet_draining(replica, False)
        self._route_batch([item for item, avoid in open_now if not avoid])
        for item, avoid in open_now:
            if avoid:
                self._route_batch([item], avoid if self.others_available(avoid) else ())
        for replica in drained:
            self._set_fleet_draining(replica, True)

    def _route_batch(
        self, items: Sequence[RoutedRequest], avoid: Collection[ReplicaHandle] = ()
    ) -> None:
        if not items:
            return
        fleet_ids = frozenset(replica.fleet_id for replica in avoid if replica.fleet_id is not None)
        requests = [item.next_request() for item in items]
        try:
            decisions = self._fleet.route(requests, self._clock.now(), fleet_ids)
        except Exception as error:  # raised to the callers of `place`
            for item in items:
                _refuse(item, error)
            return
        for item, decision in zip(items, decisions, strict=True):
            replica = self._by_fleet_id[decision.replica]
            item.replica, item.fleet_id = replica, decision.replica
            item.placed = Placement(
                replica=replica.number,
                reason=decision.reason,
                expected_tokens=decision.matched,
                group=decision.group,
            )
            replica.open[item.id] = item
            replica.routed[decision.reason] += 1
            assert item.placement is not None
            item.placement.set_result(replica)

    def _wait_or_refuse(self, item: RoutedRequest) -> None:
        if all(replica.gone for replica in self.replicas.values()):
            _refuse(item, EngineDeadError(self._no_replica_reason))
        elif item.can_wait:
            self._unplaced.append(item)
        else:
            starting = any(
                each.fleet_id is None and not each.gone for each in self.replicas.values()
            )
            message = "No replica takes requests now."
            _refuse(item, EngineDeadError(message, _RETRY_AFTER_S if starting else None))

    def _set_fleet_draining(self, replica: ReplicaHandle, draining: bool) -> None:
        if replica.fleet_id is not None:
            self._fleet.set_draining(replica.fleet_id, draining)

    def _route_unplaced(self) -> None:
        unplaced, self._unplaced = self._unplaced, []
        self._arrivals += [(item, ()) for item in unplaced]
        if self._arrivals and self._routing is None:
            self._routing = asyncio.get_running_loop().call_soon(self._route)

    def mark_up(self, replica: ReplicaHandle) -> None:
        replica.info = replica.client.info
        replica.stuck = False
        replica.fleet_id = self._fleet.add(replica.facts(), self._clock.now())
        self._by_fleet_id[replica.fleet_id] = replica
        self._set_fleet_draining(replica, replica.draining)
        self._route_unplaced()
        if not replica.draining:
            self.on_up()
        if replica.lost and replica.state is ReplicaState.UP:
            logger.warning("%s is back", replica.name)

    def _on_report(self, replica: ReplicaHandle, report: EngineReport) -> None:
        if replica.fleet_id is None and not replica.gone:
            self.check_liveness()  # it may be the first message of a new engine
        if replica.fleet_id is not None:
            if replica.stuck:
                replica.stuck = False
                self._route_unplaced()
            replica.report = report
            now = self._clock.now()
            replica.applying.append(self._fleet.applying_report(replica.fleet_id, report, now))
            if len(replica.applying) == 1:
                self._apply_reports(replica)

    def _apply_reports(self, replica: ReplicaHandle) -> None:
        """Apply the reports of a replica in their order, a long digest in slices: other work of the
        event loop runs between them."""
        while replica.applying:
            report = replica.applying.popleft()
            try:
                for _ in report:
                    replica.applying.appendleft(report)
                    asyncio.get_running_loop().call_soon(self._apply_reports, replica)
                    return
            except Exception:
                replica.applying.clear()  # else all later ones would wait behind these
                raise

    def _check_periodically(self) -> None:
        self.check_liveness()
        self._timer = asyncio.get_running_loop().call_later(
            _CHECK_PERIOD_S, self._check_periodically
        )


def _refuse(item: RoutedRequest, error: Exception) -> None:
    if item.awaits_placement:
        assert item.placement is not None
        item.placement.set_exception(error)


# ---- Rebalancing: which requests move when a replica has come up. Pure.


def requests_to_rebalance(replicas: Sequence[ReplicaHandle]) -> list[RoutedRequest]:
    """Requests to move so that all replicas that accept requests have equally many open ones. Only
    requests that wait in an engine's queue move, as nothing of them has been computed; the latest
    ones first."""
    available = [replica for replica in replicas if replica.available]
    if len(available) < 2:
        return []
    fair = -(-sum(len(replica.open) for replica in available) // len(available))
    moved = []
    for replica in available:
        num_moving = sum(item.moving for item in replica.open.values())
        count = min(replica.report.waiting, len(replica.open) - fair) - num_moving
        waiting = [item for item in replica.open.values() if _can_move(item)]
        moved += waiting[max(0, len(waiting) - max(0, count)) :][::-1]
    return moved


def _can_move(item: RoutedRequest) -> bool:
    done = item.has_output or item.output_ids or item.aborted
    return item.accepted and not (done or item.moving or item.suspect)
