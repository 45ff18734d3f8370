"""An EngineClient over several replicas, with operations for draining and restarting them."""

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
    Placement,
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
"""After this, `stats` uses the previous statistics of a replica that does not answer."""

_MOVE_TIMEOUT_S = 1.0
"""How long an engine may take to abort requests that move, before they are withdrawn."""

_POLL_S = 0.1
"""How often a replica that is drained by moving, or restarted, is checked."""

_CLOSING = "The server is shutting down."


class RouterClient:
    """An EngineClient made of others. Create it inside a running event loop, then add replicas.

    If a replica is lost, its streams continue on others with the same tokens: a sampled token
    depends only on the seed and the position, so requests without a seed get one.
    """

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        rng: random.Random,
        on_final_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """rng: draws seeds for requests without one.
        on_final_death: called with the reason when no replica is left that could come back.
        """
        self._fleet = fleet
        self._replica_set = ReplicaSet(fleet, clock)
        self._clock = clock
        self._rng = rng
        self._on_final_death = on_final_death
        self._dispatcher = Dispatcher(self._replica_set)
        self._replica_set.on_up = self._rebalance
        self._background_tasks: set[asyncio.Task[None]] = set()

    # An EngineClient

    @property
    def info(self) -> EngineInfo:
        """Combined info of all replicas that have been up. Raises EngineDeadError if none has."""
        infos = [replica.info for replica in self._replicas if replica.info is not None]
        if not infos:
            raise EngineDeadError("No replica has come up yet.")
        return total_info(infos)

    @property
    def alive(self) -> bool:
        return self.num_alive > 0

    @property
    def num_alive(self) -> int:
        """Number of replicas that run."""
        return sum(replica.client.alive for replica in self._replicas if not replica.gone)

    @property
    def num_lost(self) -> int:
        lost = sum(status.lost for status in self.replicas())
        return self._replica_set.removed_lost + lost

    @property
    def num_hung(self) -> int:
        hung = sum(replica.hung for replica in self._replicas)
        return self._replica_set.removed_hung + hung

    @property
    def available(self) -> bool:
        """Whether any replica accepts requests now."""
        self._replica_set.check_liveness()
        return bool(self._replica_set.candidates)

    @property
    def places_groups(self) -> bool:
        """Whether it places the members of a task group that arrive together as one now: there is
        a choice, and its policy does so."""
        return self._fleet.places_groups and len(self._replica_set.candidates) > 1

    @property
    def continued(self) -> int:
        """How often a request continued on another replica because its engine was lost."""
        return self._dispatcher.continued

    @property
    def moved(self) -> int:
        """How often one did because its replica was drained, or because another one came up."""
        return self._dispatcher.moved

    @property
    def plan_report(self) -> PlanReport | None:
        """The gain of planned placement; None if planning is off."""
        return self._fleet.plan_report

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._dispatcher.open)

    async def submit(self, request: EngineRequest) -> OutputStream:
        """Submit a request; returns once a replica has accepted it.

        Raises what EngineClient.submit raises; QueueFullError and OverloadedError only if all
        replicas refuse the request.
        """
        if request.request_id in self._dispatcher.open:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use.", "request_id")
        item = RoutedRequest(self._with_seed(request))
        await self._dispatcher.start(item)
        return item.stream

    async def abort(self, request_id: str) -> None:
        """Stop a request and free its KV at the next step. Unknown ids are ignored."""
        item = self._dispatcher.open.get(request_id)
        if item is None:
            return
        item.aborted = True
        if item.accepted and item.replica is not None:
            await item.replica.client.abort(request_id)
        elif item.task is not None:
            item.task.cancel()  # the request is between two replicas

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        """See EngineClient; on any replica."""
        item = self._dispatcher.open.get(request_id)
        if item is None:
            return
        item.promote(slo, awaited, self._clock.now())
        self._replica_set.promote(item)
        if item.accepted and item.replica is not None:
            await item.replica.client.promote(request_id, slo, item.awaited)

    async def release(self, request_id: str) -> None:
        """Unpin the KV of an ended request (Hints.keep_s). Unknown ids are ignored."""
        await asyncio.gather(*(r.client.release(request_id) for r in self._replicas_of(request_id)))

    async def stats(self) -> EngineStats:
        """Sums over replicas; of refusals only those that clients were told, as another replica may
        take what one has refused. Raises EngineDeadError if no engine runs."""
        running = [
            replica for replica in self._replicas if replica.client.alive and not replica.gone
        ]
        deaths = await asyncio.gather(*map(_update_stats, running))
        parts = [replica.stats for replica in self._replicas if replica.stats is not None]
        if not parts:
            reasons = [str(death) for death in deaths if death is not None]
            raise EngineDeadError(reasons[0] if reasons else "No replica answers.")
        before = [replica.stats_before for replica in self._replicas]
        total = total_stats(parts, [*before, self._replica_set.removed_stats])
        refused = self._dispatcher.refused
        by_class = {
            service_class: dataclasses.replace(values, rejected=refused[service_class])
            for service_class, values in total.by_class.items()
        }
        return dataclasses.replace(total, by_class=by_class)

    async def trace(self, request_id: str) -> RequestTrace | None:
        """The trace of an open or ended request from its replica; None if it is unknown.

        Raises EngineDeadError if no engine runs.
        """
        found = await asyncio.gather(
            *(replica.client.trace(request_id) for replica in self._replicas_of(request_id)),
            return_exceptions=True,
        )
        deaths = [error for error in found if isinstance(error, EngineDeadError)]
        if deaths and not self.alive:
            raise EngineDeadError(str(deaths[0]))
        trace = next((trace for trace in found if isinstance(trace, RequestTrace)), None)
        if trace is None:
            return None
        return dataclasses.replace(trace, placement=self.placement(request_id))

    def placement(self, request_id: str) -> Placement | None:
        """Where a request was placed last, and why; None if it is unknown or not placed yet. The
        latest ended requests are remembered."""
        request = self._dispatcher.open.get(request_id) or self._dispatcher.ended.get(request_id)
        return None if request is None else request.placed

    async def close(self) -> None:
        """Fail all open requests, and close all engines."""
        self._replica_set.close(_CLOSING)
        tasks = self._dispatcher.close(_CLOSING)
        for task in self._background_tasks:
            task.cancel()
        await asyncio.gather(*tasks, *self._background_tasks, return_exceptions=True)
        closings = (replica.client.close() for replica in self._replicas)
        for result in await asyncio.gather(*closings, return_exceptions=True):
            if isinstance(result, Exception):
                logger.error("closing an engine failed: %s", result)

    # For operators

    def add(
        self, client: ReportingClient, *, name: str = "", restart: Restart | None = None
    ) -> int:
        """Add a replica, which accepts requests as soon as it is up; returns its number.

        restart: restarts its engine; None if that is not possible.
        """
        return self._replica_set.add(client, name, restart).number

    def mark_gone(self, number: int, reason: str) -> None:
        """The engine of a replica does not come back. Its requests continue on others."""
        self._replica_set.mark_gone(self._replica_set.find(number), reason)
        if all(replica.gone for replica in self._replicas) and self._dispatcher.closing is None:
            self._on_final_death(reason)

    def remove(self, number: int) -> None:
        """Remove a replica. Its owner closes the client, best after draining it."""
        self._replica_set.remove(self._replica_set.find(number))

    def check_integrity(self) -> None:
        """Raise AssertionError unless each open request is in one place (for tests)."""
        self._replica_set.check_integrity()
        opened = self._dispatcher.open
        for replica in self._replicas:
            assert replica.open.keys() <= opened.keys()
        for request_id, item in opened.items():
            assert item.id == request_id
            assert item.replica is None or item.replica.open.get(request_id) is item
            assert not (item.connected and item.task is not None), "it reads and looks for another"
            if item.connected:
                assert item.replica is not None and item.accepted

    def be_deadlines(self, now: float) -> list[tuple[float, float | None]]:
        """(share of its output that is left, seconds until its deadline) of each open best-effort
        request; None if it has no deadline."""
        found = []
        for item in self._dispatcher.open.values():
            request, limit = item.original, item.original.slo.deadline_s
            if request.service_class is ServiceClass.BE and item.promoted is None:
                tokens = request.hints.expected_tokens or request.sampling.max_tokens
                left = 1 - len(item.output_ids) / tokens if tokens else 1.0
                by = None if limit is None else request.arrival_s + limit - now
                found.append((max(0.0, left), by))
        return found

    def replicas(self) -> list[ReplicaStatus]:
        """The status of all replicas that were added and not removed, sorted by number."""
        self._replica_set.check_liveness()
        return [replica.status() for replica in self._replicas]

    def drain(self, number: int, *, move: bool = False, restart: bool = False) -> None:
        """Route no new requests to a replica.

        move: its open requests continue on other replicas at once, even if the engine does not
            answer.
        restart: restart its engine when it has no open requests, then resume it.
        Raises NotFoundError, or InvalidRequestError if no other replica accepts requests.
        """
        replica = self._replica_set.find(number)
        if restart and replica.restart is None:
            raise InvalidRequestError(f"{replica.name} cannot be restarted from here.", "restart")
        self._replica_set.set_draining(replica, True)
        replica.restart_wanted = restart
        logger.info("%s is draining: move=%s, restart=%s", replica.name, move, restart)
        if move:
            self._in_background(self._move(replica))
        if restart and not replica.restarting:
            self._in_background(self._restart(replica))

    async def wait_drained(self, number: int) -> None:
        """Wait until a replica has no open requests. Raises NotFoundError."""
        await self._replica_set.wait_empty(self._replica_set.find(number))

    def resume(self, number: int) -> None:
        """Route requests to a replica again. Raises NotFoundError."""
        replica = self._replica_set.find(number)
        self._replica_set.set_draining(replica, False)
        replica.restart_wanted = False
        logger.info("%s takes requests again", replica.name)

    async def _move(self, replica: ReplicaHandle) -> None:
        """Move the open requests of a replica to others."""
        fleet_id, items = replica.fleet_id, list(replica.open.values())
        for item in items:
            item.moving = True
        for item in items:
            if item.accepted:
                await replica.client.abort(item.id)
        await asyncio.sleep(_MOVE_TIMEOUT_S)
        while left := [item for item in items if item.moving and item.is_at(replica, fleet_id)]:
            logger.warning(
                "%s did not abort %d requests that move: they are withdrawn",
                replica.name,
                len(left),
            )
            for item in left:
                self._dispatcher.withdraw(item)
            await asyncio.sleep(_POLL_S)

    def _rebalance(self) -> None:
        """Move waiting requests of other replicas, as one more has come up."""
        for item in requests_to_rebalance(self._replicas):
            assert item.replica is not None
            item.avoided, item.moving = item.replica, True
            if item.accepted:
                self._in_background(item.replica.client.abort(item.id))

    async def _restart(self, replica: ReplicaHandle) -> None:
        """Restart a replica once it is empty, as long as the latest command asks for that."""
        assert replica.restart is not None
        await self._replica_set.wait_empty(replica)
        while (
            replica.restart_wanted
            and replica.draining
            and not self._replica_set.others_available([replica])
        ):
            await asyncio.sleep(_POLL_S)  # no other replica is up
            await self._replica_set.wait_empty(replica)
        wanted = replica.restart_wanted and replica.draining
        if not wanted or replica.gone or replica.restarting:
            return  # it was resumed or drained anew, does not come back, or restarts already
        replica.restarting = True
        try:
            await replica.restart()
        finally:
            replica.restarting = False
            if not replica.gone and replica.restart_wanted:  # else it is drained or resumed anew
                self._replica_set.set_draining(replica, False)
            self._replica_set.check_liveness()

    def _with_seed(self, request: EngineRequest) -> EngineRequest:
        sampling = request.sampling
        if sampling.greedy or sampling.seed is not None:
            return request
        seeded = sampling.with_changes(seed=self._rng.getrandbits(63))
        return dataclasses.replace(request, sampling=seeded)

    @property
    def _replicas(self) -> Sequence[ReplicaHandle]:
        return list(self._replica_set.replicas.values())

    def _replicas_of(self, request_id: str) -> Sequence[ReplicaHandle]:
        """The replica that has or had a request; all replicas if it is unknown."""
        item = self._dispatcher.open.get(request_id)
        ended = self._dispatcher.ended.get(request_id)
        if item is not None:
            replica = item.replica
        else:
            replica = None if ended is None else ended.replica
        return [replica] if replica is not None else self._replicas

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_log_errors(work))
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)


async def _update_stats(replica: ReplicaHandle) -> EngineDeadError | None:
    """Fetch the statistics of a replica; return the error if its engine is dead. After a timeout
    the call stays pending, and the next calls do not wait for it."""
    if replica.stats_task is None:
        replica.stats_task = asyncio.create_task(_fetch_stats(replica))
    task = replica.stats_task
    _, late = await asyncio.wait([task], timeout=0 if replica.stats_late else _STATS_TIMEOUT_S)
    if late:
        replica.stats_late = True
        return None
    return task.result()


async def _fetch_stats(replica: ReplicaHandle) -> EngineDeadError | None:
    fleet_id = replica.fleet_id
    try:
        stats = await replica.client.stats()
        if replica.fleet_id == fleet_id:  # else the counters of the engine are retained already
            replica.stats = stats
    except EngineDeadError as error:
        replica.retain_counters()
        return error
    finally:
        replica.stats_task, replica.stats_late = None, False
    return None


async def _log_errors(work: Coroutine[Any, Any, None]) -> None:
    """Run a background task, and log its errors."""
    try:
        await work
    except EngineDeadError as error:
        logger.warning("%s", error)
    except Exception:
        logger.exception("a message to an engine failed")
