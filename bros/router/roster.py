"""The replicas that a router has, and which request is at which of them.

    add -> DOWN -- it answers --> UP -- it is lost --> DOWN -- give_up --> GONE

The fleet is told of all that changes here and nowhere else. A replica that comes up again is a new
one to it, as nothing is cached there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Sequence

from bros.core.clock import Clock
from bros.core.errors import EngineDeadError, InvalidRequestError, NotFoundError
from bros.core.interfaces import EngineStats, Notice, WatchableClient
from bros.router.balance import PlanReport
from bros.router.fleet import Fleet
from bros.router.member import Member, ReplicaState, Restart, Routed
from bros.router.totals import total_stats

logger = logging.getLogger(__name__)

_COMES_S = 5.0
"""When to ask again, if a replica is coming up."""

_LOOK_S = 0.05
"""How often it is looked who is alive. Open requests and new ones notice by themselves."""


class Roster:
    """Create it inside a running event loop. on_up: called when a replica has come up that takes
    requests."""

    def __init__(self, fleet: Fleet, clock: Clock) -> None:
        self.replicas: dict[int, Member] = {}
        self.none_left = "No replica was started."
        self.on_up: Callable[[], None] = lambda: None
        self._fleet = fleet
        self._clock = clock
        self.removed = EngineStats()
        self._added = 0
        self._by_key: dict[int, Member] = {}
        self._arrivals: list[tuple[Routed, Collection[Member]]] = []
        self._homeless: list[Routed] = []
        self._emptied: dict[int, asyncio.Event] = {}
        self._routing: asyncio.Handle | None = None
        self._timer = asyncio.get_running_loop().call_soon(self._look_again)

    @property
    def plan_report(self) -> PlanReport | None:
        """See Fleet."""
        return self._fleet.plan_report

    # Which replicas there are

    def add(self, client: WatchableClient, name: str, restart: Restart | None) -> Member:
        """One more. It takes requests as soon as it is up."""
        number, self._added = self._added, self._added + 1
        replica = Member(number, name or f"replica-{number}", client, restart)
        self.replicas[number] = replica
        client.watch(functools.partial(self._on_notice, replica))
        self.look()
        return replica

    def find(self, number: int) -> Member:
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

    def lose(self, replica: Member) -> None:
        """Its engine is no more. What was open there hears so from its stream."""
        if replica.key is None:
            return
        if not (replica.restarting or replica.gone):
            replica.lost += 1
            logger.warning("%s is lost with %d open requests", replica.name, len(replica.open))
        self._fleet.remove(replica.key)
        del self._by_key[replica.key]
        replica.key = None
        replica.notice = Notice(version=0)
        replica.stats_lost()

    def give_up(self, replica: Member, reason: str) -> None:
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

    def remove(self, replica: Member) -> None:
        """As if it had never been there, but for what was counted."""
        replica.gone = True  # its notices are of no interest any more
        self.lose(replica)
        self.removed = total_stats((), [self.removed, replica.stats_before])
        del self.replicas[replica.number]

    def set_draining(self, replica: Member, draining: bool) -> None:
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

    async def emptied(self, replica: Member) -> None:
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
        self, item: Routed, avoid: Collection[Member], *, patient: bool
    ) -> asyncio.Future[Member]:
        """Who serves it, decided together with all others that come in this turn of the loop.

        avoid: who has just refused it. patient: wait if nobody takes requests now.
        Raises EngineDeadError if nobody does, or will.
        """
        item.placed = asyncio.get_running_loop().create_future()
        item.patient = patient
        self._arrivals.append((item, avoid))
        if self._routing is None:
            self._routing = asyncio.get_running_loop().call_soon(self._route)
        return item.placed

    @property
    def takers(self) -> list[Member]:
        """Who takes requests: if there is no other, those that are drained as well."""
        there = [replica for replica in self.replicas.values() if replica.takes]
        return there or [replica for replica in self.replicas.values() if replica.could_take]

    def others_take(self, than: Collection[Member]) -> bool:
        return any(other not in than for other in self.takers)

    def promote(self, item: Routed) -> None:
        """What it still asks for where it is counts as real-time work."""
        if item.is_there:
            self._fleet.promoted(item.id)

    def begun(self, item: Routed, cached_tokens: int) -> None:
        """What it asks for is computed as far as the first token."""
        item.begun = True
        if item.replica is not None and item.is_there:
            item.replica.prompt_tokens += len(item.current.prompt_token_ids)
            item.replica.cached_tokens += cached_tokens
            self._fleet.begun(item.id, cached_tokens, self._clock.now())

    def leave(self, item: Routed, *, cached: bool = False) -> None:
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
        # Those that somebody has given up meanwhile are done.
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

    def _decide(self, items: Sequence[Routed], avoid: Collection[Member] = ()) -> None:
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

    def _keep_waiting(self, item: Routed) -> None:
        if all(replica.gone for replica in self.replicas.values()):
            _refuse(item, EngineDeadError(self.none_left))
        elif item.patient:
            self._homeless.append(item)
        else:
            comes = any(each.key is None and not each.gone for each in self.replicas.values())
            message = "No replica takes requests now."
            _refuse(item, EngineDeadError(message, _COMES_S if comes else None))

    def _tell_draining(self, replica: Member, draining: bool) -> None:
        if replica.key is not None:
            self._fleet.set_draining(replica.key, draining)

    def _bring_home(self) -> None:
        homeless, self._homeless = self._homeless, []
        self._arrivals += [(item, ()) for item in homeless]
        if self._arrivals and self._routing is None:
            self._routing = asyncio.get_running_loop().call_soon(self._route)

    def _come_up(self, replica: Member) -> None:
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

    def _on_notice(self, replica: Member, notice: Notice) -> None:
        if replica.key is None and not replica.gone:
            self.look()  # it may be the first sign of life
        if replica.key is not None:
            if replica.stuck:
                replica.stuck = False
                self._bring_home()
            replica.notice = notice
            self._fleet.take(replica.key, notice, self._clock.now())

    def _look_again(self) -> None:
        self.look()
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)


def _refuse(item: Routed, error: Exception) -> None:
    if item.waits:
        assert item.placed is not None
        item.placed.set_exception(error)
