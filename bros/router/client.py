"""Several engines as one."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from bros.core.clock import Clock
from bros.core.errors import EngineDeadError, InvalidRequestError
from bros.core.interfaces import (
    EngineInfo,
    EngineStats,
    ReportingClient,
    RequestTrace,
)
from bros.core.request import EngineRequest, ServiceClass, Slo
from bros.engine.client import OutputStream
from bros.router.balance import PlanReport
from bros.router.dispatcher import Dispatcher
from bros.router.fleet import Fleet
from bros.router.replica_set import (
    ReplicaHandle,
    ReplicaSet,
    ReplicaStatus,
    Restart,
    RoutedRequest,
    requests_to_rebalance,
    total_info,
    total_stats,
)

logger = logging.getLogger(__name__)

_STATS_TIMEOUT_S = 2.0
"""Of one replica, whose latest figures are taken instead."""

_MOVE_S = 1.0
"""Of an engine, to give back what is to go on elsewhere, before that does so without it."""

_LOOK_S = 0.1
"""How often one that is to be empty, or restarted, is looked at."""

_CLOSING = "The server is shutting down."


class RouterClient:
    """An EngineClient made of others. Create it inside a running event loop, then add replicas.

    Streams go on where they were when a replica is lost, with the same tokens: whatever is drawn
    depends on the seed and the position alone, so requests that bring no seed are given one.
    on_final_death: called with the reason when no replica is left that could come back.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        rng: random.Random,
        on_final_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """rng: seeds of requests that bring none."""
        self._replica_set = ReplicaSet(fleet, clock)
        self._clock = clock
        self._rng = rng
        self._on_final_death = on_final_death
        self._dispatcher = Dispatcher(self._replica_set)
        self._replica_set.on_up = self._rebalance
        self._chores: set[asyncio.Task[None]] = set()

    # An EngineClient

    @property
    def info(self) -> EngineInfo:
        """Of all that were up so far, together. Raises EngineDeadError if none was."""
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        if not infos:
            raise EngineDeadError("No replica has come up yet.")
        return total_info(infos)

    @property
    def alive(self) -> bool:
        return any(replica.client.alive for replica in self._replicas if not replica.gone)

    @property
    def takes(self) -> bool:
        """Whether requests can go anywhere now."""
        self._replica_set.look()
        return bool(self._replica_set.takers)

    @property
    def continued(self) -> int:
        """How often a request went on elsewhere, because its engine was lost."""
        return self._dispatcher.continued

    @property
    def moved(self) -> int:
        """How often one did, because its replica was to be empty, or another one came up."""
        return self._dispatcher.moved

    @property
    def plan_report(self) -> PlanReport | None:
        """What planned places for prefixes gain; None if nothing is planned."""
        return self._replica_set.plan_report

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._dispatcher.open)

    async def submit(self, request: EngineRequest) -> OutputStream:
        """Hand over a request; returns once a replica has accepted it.

        Raises what EngineClient.submit raises: refusals for want of capacity only if all refuse.
        """
        if request.request_id in self._dispatcher.open:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use.", "request_id")
        item = RoutedRequest(self._with_seed(request))
        await self._dispatcher.start(item)
        return item.stream

    async def abort(self, request_id: str) -> None:
        """Stop a request and free its KV at the next iteration. Unknown ids are ignored."""
        item = self._dispatcher.open.get(request_id)
        if item is None:
            return
        item.aborted = True
        if item.accepted and item.replica is not None:
            await item.replica.client.abort(request_id)
        elif item.task is not None:
            item.task.cancel()  # it is between two replicas

    async def promote(self, request_id: str, slo: Slo) -> None:
        """Serve a best-effort request as real-time from now on, wherever it goes. Unknown ids are
        ignored."""
        item = self._dispatcher.open.get(request_id)
        if item is None:
            return
        item.promote(slo, self._clock.now())
        self._replica_set.promote(item)
        if item.accepted and item.replica is not None:
            await item.replica.client.promote(request_id, slo)

    async def release(self, request_id: str) -> None:
        """What a request has left is kept no longer (Hints.keep_s). Unknown ids are ignored."""
        await asyncio.gather(*(r.client.release(request_id) for r in self._where(request_id)))

    async def stats(self) -> EngineStats:
        """Sums over replicas. Raises EngineDeadError if there is no engine to ask."""
        asked = [replica for replica in self._replicas if replica.client.alive and not replica.gone]
        deaths = await asyncio.gather(*map(_update_stats, asked))
        parts = [replica.stats for replica in self._replicas if replica.stats is not None]
        if not parts:
            reasons = [str(death) for death in deaths if death is not None]
            raise EngineDeadError(reasons[0] if reasons else "No replica answers.")
        before = [replica.stats_before for replica in self._replicas]
        return total_stats(parts, [*before, self._replica_set.removed])

    async def trace(self, request_id: str) -> RequestTrace | None:
        """What is known of it where it is, or was; None if nothing is.

        Raises EngineDeadError if there is no engine to ask.
        """
        found = await asyncio.gather(
            *(replica.client.trace(request_id) for replica in self._where(request_id)),
            return_exceptions=True,
        )
        deaths = [error for error in found if isinstance(error, EngineDeadError)]
        if deaths and not self.alive:
            raise EngineDeadError(str(deaths[0]))
        return next((trace for trace in found if isinstance(trace, RequestTrace)), None)

    async def close(self) -> None:
        """End everything that is open, and all engines."""
        self._replica_set.close(_CLOSING)
        tasks = self._dispatcher.close(_CLOSING)
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*tasks, *self._chores, return_exceptions=True)
        closings = (replica.client.close() for replica in self._replicas)
        for result in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("an engine did not end well: %s", result)

    # For operators

    def add(
        self, client: ReportingClient, *, name: str = "", restart: Restart | None = None
    ) -> int:
        """One more replica, which takes requests as soon as it is up; returns its number.

        restart: how its engine is ended and started anew.
        """
        return self._replica_set.add(client, name, restart).number

    def give_up(self, number: int, reason: str) -> None:
        """A replica does not come back. Requests that were there go on elsewhere."""
        self._replica_set.give_up(self._replica_set.find(number), reason)
        if all(replica.gone for replica in self._replicas) and self._dispatcher.closing is None:
            self._on_final_death(reason)

    def remove(self, number: int) -> None:
        """Forget a replica. Whoever added it closes it, best when it is drained."""
        self._replica_set.remove(self._replica_set.find(number))

    def due(self, now: float) -> list[tuple[float, float | None]]:
        """Of each best-effort request that is open: the share of it that is left, and seconds
        until it is due, None if it may take as long as it takes."""
        found = []
        for item in self._dispatcher.open.values():
            asked, limit = item.asked, item.asked.slo.deadline_s
            if asked.service_class is ServiceClass.BE and item.promoted is None:
                tokens = asked.hints.expected_tokens or asked.sampling.max_tokens
                left = 1 - len(item.given) / tokens if tokens else 1.0
                by = None if limit is None else asked.arrival_s + limit - now
                found.append((max(0.0, left), by))
        return found

    def replicas(self) -> list[ReplicaStatus]:
        """All that were added and not removed, by their numbers."""
        self._replica_set.look()
        return [replica.status() for replica in self._replicas]

    def drain(self, number: int, *, move: bool = False, restart: bool = False) -> None:
        """Send nothing new to a replica from now on.

        move: what is open there goes on elsewhere at once, also if the engine does not answer.
        restart: when nothing is open any more, its engine is ended and started anew, and takes
        requests again.
        Raises NotFoundError, or InvalidRequestError if no other replica takes requests.
        """
        replica = self._replica_set.find(number)
        if restart and replica.restart is None:
            raise InvalidRequestError(f"{replica.name} cannot be restarted from here.", "restart")
        self._replica_set.set_draining(replica, True)
        logger.info("%s is drained: move=%s, restart=%s", replica.name, move, restart)
        if move:
            self._in_background(self._move(replica))
        if restart and not replica.restarting:
            self._in_background(self._restart(replica))

    async def drained(self, number: int) -> None:
        """Wait until nothing is open at a replica. Raises NotFoundError."""
        await self._replica_set.emptied(self._replica_set.find(number))

    def resume(self, number: int) -> None:
        """Send requests to a replica again. Raises NotFoundError."""
        replica = self._replica_set.find(number)
        self._replica_set.set_draining(replica, False)
        logger.info("%s takes requests again", replica.name)

    async def _move(self, replica: ReplicaHandle) -> None:
        """What is open there goes on elsewhere."""
        key, items = replica.key, list(replica.open.values())
        for item in items:
            item.moving = True
        for item in items:
            if item.accepted:
                await replica.client.abort(item.id)
        await asyncio.sleep(_MOVE_S)
        while left := [item for item in items if item.moving and item.is_at(replica, key)]:
            logger.warning("%s does not give back %d requests", replica.name, len(left))
            for item in left:
                self._dispatcher.take_away(item)
            await asyncio.sleep(_LOOK_S)

    def _rebalance(self) -> None:
        """There is one more: what waits elsewhere need not."""
        for item in requests_to_rebalance(self._replicas):
            assert item.replica is not None
            item.shuns, item.moving = item.replica, True
            if item.accepted:
                self._in_background(item.replica.client.abort(item.id))

    async def _restart(self, replica: ReplicaHandle) -> None:
        assert replica.restart is not None
        await self._replica_set.emptied(replica)
        while replica.draining and not self._replica_set.others_take([replica]):
            await asyncio.sleep(_LOOK_S)  # it is the only one that is there
            await self._replica_set.emptied(replica)
        if not replica.draining or replica.gone or replica.restarting:
            return  # it was resumed meanwhile, or cannot be, or another caller has asked for it
        replica.restarting = True
        try:
            await replica.restart()
        finally:
            replica.restarting = False
            if not replica.gone:
                self._replica_set.set_draining(replica, False)
            self._replica_set.look()

    def _with_seed(self, request: EngineRequest) -> EngineRequest:
        sampling = request.sampling
        if sampling.greedy or sampling.seed is not None:
            return request
        seeded = sampling.with_changes(seed=self._rng.getrandbits(63))
        return dataclasses.replace(request, sampling=seeded)

    @property
    def _replicas(self) -> Sequence[ReplicaHandle]:
        return list(self._replica_set.replicas.values())

    def _where(self, request_id: str) -> Sequence[ReplicaHandle]:
        """Where a request is or was: all, if nothing is known."""
        item = self._dispatcher.open.get(request_id)
        replica = item.replica if item is not None else self._dispatcher.ended.get(request_id)
        return [replica] if replica is not None else self._replicas

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_logged(work))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


async def _update_stats(replica: ReplicaHandle) -> EngineDeadError | None:
    """What came of it, if it is dead. One that does not answer is waited for once."""
    if replica.asked is None:
        replica.asked = asyncio.create_task(_ask_stats(replica))
    asked = replica.asked
    _, late = await asyncio.wait([asked], timeout=0 if replica.silent else _STATS_TIMEOUT_S)
    if late:
        replica.silent = True
        return None
    return asked.result()


async def _ask_stats(replica: ReplicaHandle) -> EngineDeadError | None:
    try:
        replica.stats = await replica.client.stats()
    except EngineDeadError as error:
        replica.stats_lost()
        return error
    finally:
        replica.asked, replica.silent = None, False
    return None


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """For a reply that no caller waits for."""
    try:
        await work
    except EngineDeadError as error:
        logger.warning("%s", error)
    except Exception:
        logger.exception("a message to an engine failed")
