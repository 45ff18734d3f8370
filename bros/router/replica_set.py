"""The replicas that a router has, and which request is at which of them.

    add -> DOWN -- it answers --> UP -- it is lost --> DOWN -- give_up --> GONE

The fleet is told of all that changes here and nowhere else. A replica that comes up again is a new
one to it, as nothing is cached there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import functools
import logging
from collections import Counter
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
    Prices,
    ReportingClient,
    RequestStream,
)
from bros.core.request import EngineRequest, FinishReason, RequestOutput, ServiceClass, Slo
from bros.engine.client import OutputStream
from bros.router.balance import PlanReport
from bros.router.fleet import Fleet
from bros.router.state import ReplicaFacts

# ---- Facts and figures of several engines as those of one.


_MOST_QUEUED = 2**31 - 1

_GAUGES = frozenset(
    {
        *("batch_size", "kv_blocks_used", "kv_blocks_total", "kv_blocks_shared"),
        *("kv_blocks_cached", "kv_blocks_parked", "host_kv_blocks_used", "host_kv_blocks_total"),
        *("running", "waiting", "kv_blocks"),
    }
)
"""What ends with an engine; everything else counts on."""

_NO_SUMS = frozenset({"by_class", "slack", "safety_factor"})

_Figures = TypeVar("_Figures", EngineStats, ClassStats)


def total_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Of at least one engine. What cannot be added up is that of the first."""
    return dataclasses.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_kv_blocks=sum(info.num_kv_blocks for info in infos),
        num_host_kv_blocks=sum(info.num_host_kv_blocks for info in infos),
        max_queue=min(sum(info.max_queue for info in infos), _MOST_QUEUED),
    )


def total_stats(parts: Sequence[EngineStats], before: Sequence[EngineStats] = ()) -> EngineStats:
    """Sums; of the safety factor the largest.

    before: counters of engines that are no more (`counters`), so that sums never fall.
    """
    total = _sum(EngineStats(), [*parts, *before])
    by_class = {}
    for service_class in ServiceClass:
        of_class = [stats.by_class.get(service_class, ClassStats()) for stats in (*parts, *before)]
        slack = total_buckets([values.slack for values in of_class])
        by_class[service_class] = dataclasses.replace(_sum(ClassStats(), of_class), slack=slack)
    safety = max((stats.safety_factor for stats in parts), default=1.0)
    return dataclasses.replace(total, by_class=by_class, safety_factor=safety)


def counters(stats: EngineStats) -> EngineStats:
    """The same without what ends with the engine."""
    by_class = {name: _without_gauges(values) for name, values in stats.by_class.items()}
    return dataclasses.replace(_without_gauges(stats), by_class=by_class)


def total_buckets(parts: Sequence[Buckets]) -> Buckets:
    """Those that count nothing need not have the bounds of the others."""
    parts = [part for part in parts if any(part.counts)] or list(parts[:1])
    if not parts:
        return Buckets()
    bounds = parts[0].bounds
    assert all(part.bounds == bounds for part in parts), "engines of one kind"
    counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
    return Buckets(bounds, counts, sum(part.total for part in parts))


def _sum(none: _Figures, parts: Sequence[_Figures]) -> _Figures:
    """Of what are numbers that can be added."""
    names = {field.name for field in dataclasses.fields(none)} - _NO_SUMS
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    return dataclasses.replace(none, **sums)


def _without_gauges(figures: _Figures) -> _Figures:
    names = {field.name for field in dataclasses.fields(figures)} & _GAUGES
    nothing: dict[str, Any] = dict.fromkeys(names, 0)
    return dataclasses.replace(figures, **nothing)


# ---- One engine among several, and one request on its way through them.


_LEAST_LEFT_S = 0.001
"""Until something is due that is late already."""

Restart = Callable[[], Awaitable[None]]
"""Ends an engine on which nothing is open, and returns when the next one is up."""


class ReplicaState(enum.StrEnum):
    """UP takes requests, DRAINING only finishes those that it has, DRAINED has none left.

    RESTARTING: it was asked to. DOWN: lost, but it may come back. GONE: it does not.
    """

    UP = "up"
    DRAINING = "draining"
    DRAINED = "drained"
    RESTARTING = "restarting"
    DOWN = "down"
    GONE = "gone"


RUNNING = frozenset({ReplicaState.UP, ReplicaState.DRAINING, ReplicaState.DRAINED})
"""With an engine that answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """A snapshot for operators. Counters count since the server started.

    open: requests that are there.
    running, waiting: as it last said itself.
    routed: requests by the reason of the decision, see Decision.
    prompt_tokens, cached_tokens: of requests that began there, and those of them that were cached.
    lost: how often its engine was.
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
    """key: its number in the fleet, a new one each time it comes up; None while it is down.

    number: what operators call it.
    info, stats: the latest of its engine, and of those before it the counters (stats_before).
    asked: a question for the next ones that it has not answered.
    silent: for long.
    stuck: it has not given back what was to go on elsewhere.
    """

    number: int
    name: str
    client: ReportingClient
    restart: Restart | None = None
    key: int | None = None
    draining: bool = False
    restarting: bool = False
    gone: bool = False
    stuck: bool = False
    silent: bool = False
    asked: asyncio.Task[EngineDeadError | None] | None = None
    info: EngineInfo | None = None
    stats: EngineStats | None = None
    stats_before: EngineStats = field(default_factory=EngineStats)
    report: EngineReport = field(default_factory=lambda: EngineReport(version=0))
    open: dict[str, RoutedRequest] = field(default_factory=dict)
    routed: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    lost: int = 0

    @property
    def takes(self) -> bool:
        """Whether requests may go there."""
        return self.key is not None and not self.draining

    @property
    def could_take(self) -> bool:
        """Whether they may, if there is no other."""
        return self.key is not None and not (self.restarting or self.stuck)

    @property
    def state(self) -> ReplicaState:
        if self.gone:
            return ReplicaState.GONE
        if self.restarting:
            return ReplicaState.RESTARTING
        if self.key is None:
            return ReplicaState.DOWN
        if not self.draining:
            return ReplicaState.UP
        return ReplicaState.DRAINING if self.open else ReplicaState.DRAINED

    def facts(self) -> ReplicaFacts:
        """What a fleet has to know of it, once it is up."""
        assert self.info is not None
        yields = self.info.policy == "bros"
        return ReplicaFacts(
            capacity_tokens=self.info.num_kv_blocks * self.info.block_size,
            prices=self.info.prices or Prices(),
            yields=yields,
            ttft_s=self.info.default_slo.ttft_s if yields else None,
            name=self.name,
        )

    def stats_lost(self) -> None:
        """Its engine is no more, but what it has counted counts."""
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


class RoutedRequest:
    """A request that is open, with all that is needed to go on with it elsewhere.

    asked            as it came, but with a seed
    current          what of it the present engine was asked for
    given            all tokens of the answer so far
    replica, key     where it is, and in which life of that; None while it is between two
    placed           the decision that it waits for
    patient          whether it can wait long for that
    accepting        the present engine is asked to accept it, and has not answered
    accepted         the present engine has it
    connection       number of the engine's stream that its outputs come from; others are ignored
    connected        they come: no task is needed until the engine is lost or gives it back
    task             finds another replica, between two
    begun            the present engine has given the first output
    aborted          by its client
    promoted         to which objectives, and when (promoted_s)
    moving, shuns    it is to go on elsewhere, and not where it shuns
    left             replicas that may still have it
    refusals         of those that had accepted it, and then did not begin
    losses           engines that were lost with it
    suspect          it begins now, and no other that was lost with as many may
    """

    __slots__ = (
        *("_cached_tokens", "_given_before", "aborted", "accepted", "accepting", "asked", "begun"),
        *("connected", "connection", "current", "given", "key", "left", "losses", "moving"),
        *("patient", "placed", "promoted", "promoted_s", "refusals", "replica", "shuns", "stream"),
        *("suspect", "task"),
    )

    def __init__(self, asked: EngineRequest) -> None:
        self.asked = self.current = asked
        self.stream = OutputStream(asked.service_class)
        self.given: list[int] = []
        self.replica: ReplicaHandle | None = None
        self.key: int | None = None
        self.placed: asyncio.Future[ReplicaHandle] | None = None
        self.patient = False
        self.accepting: asyncio.Future[RequestStream] | None = None
        self.connection = 0
        self.connected = False
        self.task: asyncio.Task[None] | None = None
        self.accepted = self.begun = self.aborted = self.moving = False
        self.left: set[ReplicaHandle] = set()
        self.refusals: dict[ReplicaHandle, OverloadedError] = {}
        self.promoted: Slo | None = None
        self.promoted_s = 0.0
        self.shuns: ReplicaHandle | None = None
        self.losses = 0
        self.suspect = False
        self._given_before = 0
        self._cached_tokens: int | None = None

    @property
    def id(self) -> str:
        return self.asked.request_id

    @property
    def is_there(self) -> bool:
        """Whether the engine that it was given to is still the one of its replica."""
        return self.replica is not None and self.key == self.replica.key is not None

    def is_at(self, replica: ReplicaHandle, key: int | None) -> bool:
        """Whether it is where it was, in the same life."""
        return self.replica is replica and self.key == key

    @property
    def waits(self) -> bool:
        """For a decision."""
        return self.placed is not None and not self.placed.done()

    @property
    def given_here(self) -> list[int]:
        """Tokens of the answer that are not part of the prompt where it is."""
        return self.given[self._given_before :]

    def next_request(self) -> EngineRequest:
        """What the next engine is asked for: the rest of the answer."""
        self._given_before = len(self.given)
        self.begun = False
        self.current = self._promoted()
        if self.given:
            self.current = dataclasses.replace(
                self.current,
                prompt_token_ids=[*self.asked.prompt_token_ids, *self.given],
                resumed=self.asked.resumed + len(self.given),
            )
        return self.current

    def promote(self, slo: Slo, now: float) -> None:
        """It is real-time from now on. Only the first time counts."""
        if self.promoted is None:
            self.promoted, self.promoted_s = slo, now

    def _promoted(self) -> EngineRequest:
        """As if it had come when it was promoted. Of a whole that is due, the rest is left."""
        slo, asked = self.promoted, self.asked
        if slo is None or self.stream.service_class is ServiceClass.RT:
            return asked  # it was real-time already
        if slo.deadline_s is None and asked.slo.deadline_s is not None:
            left_s = asked.arrival_s + asked.slo.deadline_s - self.promoted_s
            slo = dataclasses.replace(slo, deadline_s=max(left_s, _LEAST_LEFT_S))
        return dataclasses.replace(
            asked, service_class=ServiceClass.RT, slo=slo, arrival_s=self.promoted_s
        )

    def forward(self, output: RequestOutput) -> None:
        """Hand it to the reader. Cached tokens count where the answer began."""
        if self._cached_tokens is None:
            self._cached_tokens = output.cached_tokens
        elif output.cached_tokens != self._cached_tokens:
            output = dataclasses.replace(output, cached_tokens=self._cached_tokens)
        self.given += output.token_ids
        self.stream.put(output)

    def end(
        self,
        reason: FinishReason,
        error: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Give the last output, without an engine."""
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

_COMES_S = 5.0
"""When to ask again, if a replica is coming up."""

_LOOK_S = 0.05
"""How often it is looked who is alive. Open requests and new ones notice by themselves."""


class ReplicaSet:
    """Create it inside a running event loop. on_up: called when a replica has come up that takes
    requests."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self.replicas: dict[int, ReplicaHandle] = {}
        self.none_left = "No replica was started."
        self.on_up: Callable[[], None] = lambda: None
        self._fleet = fleet
        self._clock = clock
        self.removed = EngineStats()
        self._added = 0
        self._by_key: dict[int, ReplicaHandle] = {}
        self._arrivals: list[tuple[RoutedRequest, Collection[ReplicaHandle]]] = []
        self._homeless: list[RoutedRequest] = []
        self._emptied: dict[int, asyncio.Event] = {}
        self._routing: asyncio.Handle | None = None
        self._timer = asyncio.get_running_loop().call_soon(self._look_again)

    @property
    def plan_report(self) -> PlanReport | None:
        """See Fleet."""
        return self._fleet.plan_report

    # Which replicas there are

    def add(self, client: ReportingClient, name: str, restart: Restart | None) -> ReplicaHandle:
        """One more. It takes requests as soon as it is up."""
        number, self._added = self._added, self._added + 1
        replica = ReplicaHandle(number, name or f"replica-{number}", client, restart)
        self.replicas[number] = replica
        client.subscribe(functools.partial(self._on_report, replica))
        self.look()
        return replica

    def find(self, number: int) -> ReplicaHandle:
        """Raises NotFoundError."""
        if number not in self.replicas:
            numbers = ", ".join(map(str, self.replicas))
            message = f"There is no replica {number}; there are {numbers or 'none'}."
            raise NotFoundError(message, code="replica_not_found")
        return self.replicas[number]

    def look(self) -> None:
        """Notice who has come up and who is lost."""
        for replica in self.replicas.values():
            if replica.gone:
                continue
            if replica.key is None and replica.client.alive:
                self._come_up(replica)
            elif replica.key is not None and not replica.client.alive:
                self.lose(replica)

    def lose(self, replica: ReplicaHandle) -> None:
        """Its engine is no more. What was open there hears so from its stream."""
        if replica.key is None:
            return
        if not (replica.restarting or replica.gone):
            replica.lost += 1
            logger.warning("%s is lost with %d open requests", replica.name, len(replica.open))
        self._fleet.remove(replica.key)
        del self._by_key[replica.key]
        replica.key = None
        replica.report = EngineReport(version=0)
        replica.stats_lost()

    def give_up(self, replica: ReplicaHandle, reason: str) -> None:
        """It does not come back."""
        self.lose(replica)
        replica.gone = True
        left = [other for other in self.replicas.values() if not other.gone]
        if not left:
            self.close(reason)
        elif all(other.draining for other in left):
            logger.warning("only replicas that were draining are left: they take requests again")
            for other in left:
                self.set_draining(other, False)

    def remove(self, replica: ReplicaHandle) -> None:
        """As if it had never been there, but for what was counted."""
        replica.gone = True  # its reports are of no interest any more
        self.lose(replica)
        self.removed = total_stats((), [self.removed, replica.stats_before])
        del self.replicas[replica.number]

    def set_draining(self, replica: ReplicaHandle, draining: bool) -> None:
        """Nothing new goes there, or it does again. Raises InvalidRequestError if nothing would
        go anywhere."""
        if draining and not any(
            other.takes for other in self.replicas.values() if other != replica
        ):
            raise InvalidRequestError(
                f"{replica.name} cannot be drained: no other replica takes requests now.",
                code="last_replica",
            )
        replica.draining = draining
        self._tell_draining(replica, draining)
        if replica.takes:
            self._bring_home()

    async def emptied(self, replica: ReplicaHandle) -> None:
        """Wait until nothing is open there."""
        while replica.open:
            await self._emptied.setdefault(replica.number, asyncio.Event()).wait()

    def close(self, reason: str) -> None:
        """Whoever waits for a replica waits in vain."""
        self.none_left = reason
        self._timer.cancel()
        for item in [*self._homeless, *(item for item, _ in self._arrivals)]:
            _refuse(item, EngineDeadError(reason))
        self._homeless, self._arrivals = [], []

    # Which request is where

    def place(
        self, item: RoutedRequest, avoid: Collection[ReplicaHandle], *, patient: bool
    ) -> asyncio.Future[ReplicaHandle]:
        """Who serves it, decided together with all others that come in this turn of the loop.

        avoid: replicas that have just refused it. patient: wait if no replica takes requests now.
        Raises EngineDeadError if none does, or will.
        """
        item.placed = asyncio.get_running_loop().create_future()
        item.patient = patient
        self._arrivals.append((item, avoid))
        if self._routing is None:
            self._routing = asyncio.get_running_loop().call_soon(self._route)
        return item.placed

    @property
    def takers(self) -> list[ReplicaHandle]:
        """Who takes requests: if there is no other, those that are drained as well."""
        there = [replica for replica in self.replicas.values() if replica.takes]
        return there or [replica for replica in self.replicas.values() if replica.could_take]

    def others_take(self, than: Collection[ReplicaHandle]) -> bool:
        return any(other not in than for other in self.takers)

    def promote(self, item: RoutedRequest) -> None:
        """What it still asks for where it is counts as real-time work."""
        if item.is_there:
            self._fleet.promoted(item.id)

    def begun(self, item: RoutedRequest, cached_tokens: int) -> None:
        """What it asks for is computed as far as the first token."""
        item.begun = True
        if item.replica is not None and item.is_there:
            item.replica.prompt_tokens += len(item.current.prompt_token_ids)
            item.replica.cached_tokens += cached_tokens
            self._fleet.begun(item.id, cached_tokens, self._clock.now())

    def leave(self, item: RoutedRequest, *, cached: bool = False) -> None:
        """It is nowhere any more. cached: what it has computed stays where it was."""
        replica = item.replica
        if replica is None:
            return
        if item.is_there:
            self._fleet.ended(item.id, item.given_here, self._clock.now(), cached=cached)
        item.replica, item.key, item.accepted = None, None, False
        del replica.open[item.id]
        if not replica.open and replica.number in self._emptied:
            self._emptied.pop(replica.number).set()

    def _route(self) -> None:
        self._routing = None
        self.look()
        arrivals, self._arrivals = self._arrivals, []
        # Requests that were aborted meanwhile are done.
        open_now = [(item, avoid) for item, avoid in arrivals if item.waits]
        takers = self.takers
        if not takers:
            for item, _ in open_now:
                self._keep_waiting(item)
            return
        drained = [replica for replica in takers if replica.draining]
        for replica in drained:  # there is no other, but they stay what they are
            self._tell_draining(replica, False)
        self._decide([item for item, avoid in open_now if not avoid])
        for item, avoid in open_now:
            if avoid:
                self._decide([item], avoid if self.others_take(avoid) else ())
        for replica in drained:
            self._tell_draining(replica, True)

    def _decide(
        self, items: Sequence[RoutedRequest], avoid: Collection[ReplicaHandle] = ()
    ) -> None:
        if not items:
            return
        keys = frozenset(replica.key for replica in avoid if replica.key is not None)
        requests = [item.next_request() for item in items]
        try:
            decisions = self._fleet.route(requests, self._clock.now(), keys)
        except Exception as error:  # raised to those who wait
            for item in items:
                _refuse(item, error)
            return
        for item, decision in zip(items, decisions, strict=True):
            replica = self._by_key[decision.replica]
            item.replica, item.key = replica, decision.replica
            replica.open[item.id] = item
            replica.routed[decision.reason] += 1
            assert item.placed is not None
            item.placed.set_result(replica)

    def _keep_waiting(self, item: RoutedRequest) -> None:
        if all(replica.gone for replica in self.replicas.values()):
            _refuse(item, EngineDeadError(self.none_left))
        elif item.patient:
            self._homeless.append(item)
        else:
            comes = any(each.key is None and not each.gone for each in self.replicas.values())
            message = "No replica takes requests now."
            _refuse(item, EngineDeadError(message, _COMES_S if comes else None))

    def _tell_draining(self, replica: ReplicaHandle, draining: bool) -> None:
        if replica.key is not None:
            self._fleet.set_draining(replica.key, draining)

    def _bring_home(self) -> None:
        homeless, self._homeless = self._homeless, []
        self._arrivals += [(item, ()) for item in homeless]
        if self._arrivals and self._routing is None:
            self._routing = asyncio.get_running_loop().call_soon(self._route)

    def _come_up(self, replica: ReplicaHandle) -> None:
        replica.info = replica.client.info
        replica.stuck = False
        replica.key = self._fleet.add(replica.facts(), self._clock.now())
        self._by_key[replica.key] = replica
        self._tell_draining(replica, replica.draining)
        self._bring_home()
        if not replica.draining:
            self.on_up()
        if replica.lost and replica.state is ReplicaState.UP:
            logger.warning("%s is back", replica.name)

    def _on_report(self, replica: ReplicaHandle, report: EngineReport) -> None:
        if replica.key is None and not replica.gone:
            self.look()  # it may be the first sign of life
        if replica.key is not None:
            if replica.stuck:
                replica.stuck = False
                self._bring_home()
            replica.report = report
            self._fleet.take(replica.key, report, self._clock.now())

    def _look_again(self) -> None:
        self.look()
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)


def _refuse(item: RoutedRequest, error: Exception) -> None:
    if item.waits:
        assert item.placed is not None
        item.placed.set_exception(error)


# ---- Rebalancing: which requests continue elsewhere when a replica was added. Pure.


def requests_to_rebalance(replicas: Sequence[ReplicaHandle]) -> list[RoutedRequest]:
    """So many that all replicas that take requests have equally many open, but only what waits in
    the queue of one: nothing of it has been computed. The latest first."""
    taking = [replica for replica in replicas if replica.takes]
    if len(taking) < 2:
        return []
    fair = -(-sum(len(replica.open) for replica in taking) // len(taking))
    moved = []
    for replica in taking:
        going = sum(item.moving for item in replica.open.values())
        count = min(replica.report.waiting, len(replica.open) - fair) - going
        waiting = [item for item in replica.open.values() if _waits(item)]
        moved += waiting[max(0, len(waiting) - max(0, count)) :][::-1]
    return moved


def _waits(item: RoutedRequest) -> bool:
    done = item.begun or item.given or item.aborted
    return item.accepted and not (done or item.moving or item.suspect)
