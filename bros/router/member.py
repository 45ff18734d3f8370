"""One engine among several, and one request on its way through them."""

from __future__ import annotations

import asyncio
import dataclasses
import enum
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from bros.core.errors import EngineDeadError, OverloadedError
from bros.core.interfaces import (
    EngineInfo,
    EngineStats,
    Notice,
    Prices,
    RequestStream,
    WatchableClient,
)
from bros.core.request import EngineRequest, FinishReason, RequestOutput, ServiceClass, Slo
from bros.engine.client import OutputStream
from bros.router.state import ReplicaFacts
from bros.router.totals import counters, total_stats

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

    open: requests that are there. running, waiting: as it last said itself. routed: requests by
    the reason of the decision, see Decision. prompt_tokens, cached_tokens: of requests that began
    there, and those of them that were cached. lost: how often its engine was.
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
class Member:
    """key: its number in the fleet, a new one each time it comes up; None while it is down.

    number: what operators call it. info, stats: the latest of its engine, and of those before it
    the counters (stats_before). asked: a question for the next ones that it has not answered;
    silent: for long. stuck: it has not given back what was to go on elsewhere.
    """

    number: int
    name: str
    client: WatchableClient
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
    notice: Notice = field(default_factory=lambda: Notice(version=0))
    open: dict[str, Routed] = field(default_factory=dict)
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
            running=self.notice.running,
            waiting=self.notice.waiting,
            used_blocks=self.notice.used_blocks,
            cached_blocks=self.notice.cached_blocks,
            total_blocks=self.info.num_kv_blocks if self.info else 0,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            lost=self.lost,
            routed=dict(self.routed),
        )


class Routed:
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
    aborted          as somebody has said
    promoted         how somebody has promoted it, and when (promoted_s)
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
        self.replica: Member | None = None
        self.key: int | None = None
        self.placed: asyncio.Future[Member] | None = None
        self.patient = False
        self.accepting: asyncio.Future[RequestStream] | None = None
        self.connection = 0
        self.connected = False
        self.task: asyncio.Task[None] | None = None
        self.accepted = self.begun = self.aborted = self.moving = False
        self.left: set[Member] = set()
        self.refusals: dict[Member, OverloadedError] = {}
        self.promoted: Slo | None = None
        self.promoted_s = 0.0
        self.shuns: Member | None = None
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

    def is_at(self, replica: Member, key: int | None) -> bool:
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
        """Give it to whoever asked. What was cached counts where the answer began."""
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
