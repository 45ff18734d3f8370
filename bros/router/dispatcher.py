"""Dispatches each request to a replica, and to another one if the first refuses it or is lost.

    placed (ReplicaSet, Fleet) -> accepted by a replica -> connected: outputs ... -> last output
       ▲                              │ refused
       └── with the output so far ────┴ engine lost, replica draining, or rebalanced

A request keeps its stream (OutputStream) to the end. The stream of its present engine is connected
to it, so an output goes from the engine's client to the reader in one call. Only a request that is
between two replicas has a task.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
from collections import Counter, OrderedDict
from dataclasses import replace
from typing import NamedTuple

from bros.core.errors import (
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
)
from bros.core.interfaces import Placement, RequestStream
from bros.core.request import FinishReason, Output, RequestOutput, ServiceClass, expanded
from bros.router.replica_set import ReplicaHandle, ReplicaSet, RoutedRequest

logger = logging.getLogger(__name__)

_MAX_LOSSES = 3
"""Lost engines after which a request that they had fails. It may be the request that kills them, so
requests that are one loss short of this start one at a time."""

_MAX_ENDED = 16_384
"""Ended requests whose replica is remembered, for `trace`, `placement` and `release`."""

_MIN_WAIT_S = 0.01

_STUCK_WAIT_S = 0.1
"""Pause before a request is submitted again to an engine that has not yet aborted it."""


class EndedRequest(NamedTuple):
    """What is remembered of a request that has ended."""

    replica: ReplicaHandle
    placed: Placement | None


class _LostTooOftenError(EngineDeadError):
    """Too many engines were lost while they had the request."""


class _WithdrawnError(Exception):
    """A request was withdrawn from a replica that has not answered whether it accepts it."""


class _SuspectGate:
    """Starts requests that are one loss short of _MAX_LOSSES one at a time, real-time ones first:
    a best-effort one may wait in its engine for as long as that has real-time work.

    waits ── begin ──▶ starting ── end ──▶ the next one begins

    A start begins before the request is placed again. It ends with the first output, or when the
    request is detached from its replica. A refusal does not end it: the request tries the next
    replica.

    starting: the request that starts now, whose `suspect` is then True; None: none does.
    """

    def __init__(self) -> None:
        self.starting: RoutedRequest | None = None
        self._turns: dict[RoutedRequest, asyncio.Future[None]] = {}  # of those that wait

    async def begin(self, item: RoutedRequest) -> None:
        """Wait until no other request starts; then this one does."""
        turn = self._turns[item] = asyncio.get_running_loop().create_future()
        self._start_next_soon()
        try:
            await turn
        finally:
            self._turns.pop(item, None)

    def end(self, item: RoutedRequest) -> None:
        """The request has started or is detached. No effect if it is not the one that starts."""
        if self.starting is item:
            self.starting, item.suspect = None, False
            self._start_next_soon()

    def _start_next_soon(self) -> None:
        """Not at once: all that were lost with an engine come in one turn of the event loop."""
        asyncio.get_running_loop().call_soon(self._start_next)

    def _start_next(self) -> None:
        if self.starting is not None:  # before the others are looked at: it is called for each one
            return
        waiting = [item for item, turn in self._turns.items() if not turn.done()]
        if waiting:
            item = min(waiting, key=lambda item: not item.is_real_time)  # of equals the first one
            self.starting, item.suspect = item, True
            self._turns[item].set_result(None)


class Dispatcher:
    """The open requests, and how they reach their replicas.

    open: request id -> open request.
    ended: request id -> what is remembered of the latest requests that ended.
    continued: how often a request continued on another replica because its engine was lost.
    moved: how often one did because of draining or rebalancing.
    refused: requests by class that ended with the refusals of all replicas that were asked.
    closing: the reason, once the router shuts down.
    """

    def __init__(self, replica_set: ReplicaSet) -> None:
        self.open: dict[str, RoutedRequest] = {}
        self.ended: OrderedDict[str, EndedRequest] = OrderedDict()
        self.continued = 0
        self.moved = 0
        self.refused = Counter[ServiceClass]()
        self.closing: str | None = None
        self._replica_set = replica_set
        self._suspect_gate = _SuspectGate()

    async def start(self, item: RoutedRequest) -> None:
        """Find a replica that accepts a request, and connect its outputs to its stream.

        Raises what EngineClient.submit raises.
        """
        self.open[item.id] = item
        try:
            inner = await self._place(item, can_wait=False)
        except BaseException as error:
            if isinstance(error, QueueFullError | OverloadedError):
                self._count_refused(item)
            self._suspect_gate.end(item)
            del self.open[item.id]
            raise
        item.stream.service_class = inner.service_class
        self._connect(item, inner)

    def close(self, reason: str) -> list[asyncio.Task[None]]:
        """Fail all open requests with the reason; return their tasks, which are cancelled."""
        self.closing = reason
        tasks = []
        for item in list(self.open.values()):
            if item.task is not None:
                item.task.cancel()
                tasks.append(item.task)
            elif item.connected:
                self._disconnect(item)
                item.stream.put(EngineDeadError(reason))
                self._remove(item)
        return tasks

    async def _place(self, item: RoutedRequest, *, can_wait: bool) -> RequestStream:
        """Submit a request to the replica that the fleet chooses, and on refusal to others.

        can_wait: it was accepted before, so wait as long as any replica may come up to accept it.
        """
        refused: dict[ReplicaHandle, QueueFullError | OverloadedError] = dict(item.refusals)
        try:
            return await self._place_but_on(refused, item, can_wait=can_wait)
        finally:
            refused.clear()  # the errors know these frames, see MessageClient.submit

    async def _place_but_on(
        self,
        refused: dict[ReplicaHandle, QueueFullError | OverloadedError],
        item: RoutedRequest,
        *,
        can_wait: bool,
    ) -> RequestStream:
        """As `_place`. refused: by which replicas, and why; it is changed."""
        while True:
            item.moving = False
            try:
                avoid = [*refused, *([item.avoided] if item.avoided is not None else [])]
                replica = await self._replica_set.place(item, avoid, can_wait=can_wait)
                return await self._submit(item, replica)
            except (QueueFullError, OverloadedError) as error:
                assert item.replica is not None
                refused[item.replica], item.avoided = error, None
                self._replica_set.detach(item)
            except EngineDeadError as error:
                if item.replica is None:
                    raise  # no replica is left
                self._on_engine_lost(item, error)
                await self._start_alone_if_suspect(item)
                continue
            except _WithdrawnError:
                self._on_withdrawn(item)
                continue
            except BaseException:
                # The caller may be cancelled in the turn after the engine has accepted the request.
                if item.accepted and item.replica is not None:
                    await item.replica.client.abort(item.id)
                self._replica_set.detach(item)
                raise
            if not self._replica_set.others_available(refused):
                soonest_s = min(map(_retry_after_s, refused.values()))
                if not can_wait or item.refusals or soonest_s == math.inf:
                    raise min(refused.values(), key=_retry_after_s)
                await asyncio.sleep(max(soonest_s, _MIN_WAIT_S))
                refused.clear()

    async def _submit(self, item: RoutedRequest, replica: ReplicaHandle) -> RequestStream:
        """Submit a request to a replica. Raises _WithdrawnError if it is withdrawn meanwhile."""
        item.accepting = asyncio.ensure_future(self._accept(item, replica))
        try:
            return await item.accepting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            assert caller is not None
            if caller.cancelling():
                raise
            raise _WithdrawnError from None
        finally:
            item.accepting = None

    async def _accept(self, item: RoutedRequest, replica: ReplicaHandle) -> RequestStream:
        try:
            inner = await replica.client.submit(item.current)
        except InvalidRequestError as error:
            if replica not in item.unreleased:
                raise
            message = f"{replica.name} still has this request from before it was withdrawn."
            raise OverloadedError(message, _STUCK_WAIT_S) from error
        item.accepted, item.avoided = True, None
        # What the client asked for before this engine had accepted the request.
        if item.latest is not None:
            await replica.client.promote(item.id, item.latest, item.awaited)
        if item.aborted or item.moving:
            await replica.client.abort(item.id)
        return inner

    def withdraw(self, item: RoutedRequest) -> None:
        """Continue a request on another replica without waiting for its present engine."""
        if item.accepting is not None:
            item.accepting.cancel()
        elif item.connected:
            if item.aborted:
                self._end(item, FinishReason.ABORT)
            else:
                self._on_withdrawn(item)
                self._continue_elsewhere(item)

    def _on_withdrawn(self, item: RoutedRequest) -> None:
        """Detach a withdrawn request from its replica, which may still run it."""
        if item.replica is not None:
            item.unreleased.add(item.replica)
            item.replica.stuck = item.on_live_engine
        self._detach(item)
        self.moved += 1

    # Outputs

    def _connect(self, item: RoutedRequest, inner: RequestStream) -> None:
        item.connection += 1
        item.connected = True
        inner.connect(functools.partial(self._on_output, item, item.connection))

    def _disconnect(self, item: RoutedRequest) -> None:
        """Ignore further outputs of its engine."""
        item.connection += 1
        item.connected = False

    def _on_output(
        self, item: RoutedRequest, connection: int, output: Output | EngineDeadError
    ) -> None:
        """Handle an output of an engine; this is the OutputSink of its stream."""
        if connection != item.connection:
            return
        try:
            if isinstance(output, EngineDeadError):
                self._on_death(item, output)
            elif isinstance(output, tuple) and item.has_output:  # nearly always
                item.forward(output)
            else:
                self._on_full_output(item, expanded(output))
        except Exception as error:  # a bug must not affect other requests
            self._fail(item, error)

    def _on_full_output(self, item: RoutedRequest, output: RequestOutput) -> None:
        if output.finish_reason is not None and self._must_continue(item, output):
            self._continue_elsewhere(item)
        else:
            self._deliver(item, output)

    def _on_death(self, item: RoutedRequest, error: EngineDeadError) -> None:
        """Its engine has died. Raises _LostTooOftenError."""
        if item.aborted:
            self._end(item, FinishReason.ABORT)
            return
        self._on_engine_lost(item, error)
        self.continued += 1
        self._continue_elsewhere(item)

    def _continue_elsewhere(self, item: RoutedRequest) -> None:
        """Start a task that finds another replica for a request; while closing, fail it."""
        self._disconnect(item)
        if self.closing is not None:
            item.stream.put(EngineDeadError(self.closing))
            self._remove(item)
            return
        item.task = asyncio.create_task(self._continue(item), name="routed-request")
        item.task.add_done_callback(functools.partial(self._on_task_done, item))

    async def _continue(self, item: RoutedRequest) -> None:
        try:
            await self._start_alone_if_suspect(item)
            inner = await self._place(item, can_wait=True)
        except Exception as error:
            self._fail(item, error)
        else:
            item.task = None
            self._connect(item, inner)

    async def _start_alone_if_suspect(self, item: RoutedRequest) -> None:
        if item.losses >= _MAX_LOSSES - 1:
            await self._suspect_gate.begin(item)

    def _on_task_done(self, item: RoutedRequest, task: asyncio.Task[None]) -> None:
        """End a request whose task was cancelled. The task itself cannot, because it never runs if
        it is cancelled in the turn of the event loop in which it was created."""
        if not task.cancelled():
            return
        if self.closing is None:  # aborted between two replicas
            self._end(item, FinishReason.ABORT)
        else:
            item.stream.put(EngineDeadError(self.closing))
            self._remove(item)

    def _fail(self, item: RoutedRequest, error: Exception) -> None:
        """End a request that cannot continue."""
        if isinstance(error, QueueFullError | OverloadedError):
            self._count_refused(item)
            self._end(item, FinishReason.ERROR, str(error), error.retry_after_s)
        elif isinstance(error, _LostTooOftenError):
            self._end(item, FinishReason.ERROR, str(error))
        elif isinstance(error, EngineDeadError):
            self._disconnect(item)
            item.stream.put(EngineDeadError(str(error), error.retry_after_s))
            self._remove(item)
        else:
            if not isinstance(error, BrosError):
                logger.error("a request cannot be continued", exc_info=error)
            self._end(
                item,
                FinishReason.ERROR,
                f"The request could not be continued on another replica: {error}",
            )

    def _end(
        self,
        item: RoutedRequest,
        reason: FinishReason,
        error: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """End a request without a last output from an engine."""
        self._disconnect(item)
        self._detach(item)
        item.end(reason, error, retry_after_s)
        self._remove(item)

    def _remove(self, item: RoutedRequest) -> None:
        """Remove a request from the open ones."""
        self._detach(item)
        self.open.pop(item.id, None)

    def _detach(self, item: RoutedRequest, *, cached: bool = False) -> None:
        """Remove a request from its replica, if it has one, and end its start. cached: it ran to
        its end."""
        self._suspect_gate.end(item)
        self._replica_set.detach(item, cached=cached)

    def _must_continue(self, item: RoutedRequest, output: RequestOutput) -> bool:
        """Whether a request that its engine has ended continues on another replica: it was moved,
        or the engine refused it before its first output. If so, it is detached."""
        reason, replica = output.finish_reason, item.replica
        if item.aborted or replica is None:
            return False
        if reason is FinishReason.ABORT and item.moving:
            self.moved += 1
            if output.token_ids:  # its engine has held them back (EngineRequest.gathered)
                item.forward(replace(output, finish_reason=None))
        elif (
            reason is FinishReason.ERROR
            and output.retry_after_s is not None
            and not item.output_ids
        ):
            refused = OverloadedError(output.error or "It was refused.", output.retry_after_s)
            if not self._replica_set.others_available([*item.refusals, replica]):
                return False
            item.refusals[replica] = refused
        else:
            return False
        self._detach(item)
        return True

    def _deliver(self, item: RoutedRequest, output: RequestOutput) -> None:
        reason = output.finish_reason
        if not item.has_output and (output.token_ids or reason is FinishReason.LENGTH):
            self._suspect_gate.end(item)
            self._replica_set.on_first_output(item, output.cached_tokens)
            item.refusals.clear()
        if reason is None:
            item.forward(output)
            return
        if reason is FinishReason.ERROR and output.retry_after_s is not None:
            self._count_refused(item)
        if item.replica is not None:
            self._remember(item.id, EndedRequest(item.replica, item.placed))
        self._disconnect(item)
        item.forward(output)
        self._detach(item, cached=reason.complete)
        self._remove(item)

    def _count_refused(self, item: RoutedRequest) -> None:
        self.refused[ServiceClass.RT if item.is_real_time else ServiceClass.BE] += 1

    def _on_engine_lost(self, item: RoutedRequest, error: EngineDeadError) -> None:
        """Detach a request whose engine is lost. Raises _LostTooOftenError."""
        if item.replica is not None and item.on_live_engine:
            self._replica_set.mark_down(item.replica)
        self._detach(item)
        item.losses += 1
        if item.losses >= _MAX_LOSSES:
            raise _LostTooOftenError(
                f"The request failed, as {item.losses} engines were lost with it. The last: {error}"
            )

    def _remember(self, request_id: str, ended: EndedRequest) -> None:
        self.ended[request_id] = ended
        if len(self.ended) > _MAX_ENDED:
            self.ended.popitem(last=False)


def _retry_after_s(error: QueueFullError | OverloadedError) -> float:
    return error.retry_after_s
