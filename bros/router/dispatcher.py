"""Carries requests: to a replica that accepts them, and on to another if that one is lost.

    placed (Roster, Fleet) -> accepted by a replica -> connected: outputs ... -> the last one
       ▲                            │ refuses: others are asked
       └── with the tokens so far ──┴ is lost, or is to be empty

The slot of a request (OutputStream) stays the same all the way. The replica that has the request is
connected to it, so that an output goes from the engine's client to the reader in one call. Only
what is between two replicas has a task.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import OrderedDict

from bros.core.errors import (
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
)
from bros.core.interfaces import RequestStream
from bros.core.request import FinishReason, RequestOutput
from bros.router.replica_set import ReplicaHandle, ReplicaSet, RoutedRequest

logger = logging.getLogger(__name__)

_MAX_LOSSES = 3
"""Engines that a request may be lost with. Of those that lost all but one, one at a time begins:
which of them it was that ends engines is not known."""

_REMEMBERED = 16_384
"""Requests that have ended of which it is known where they were."""

_LEAST_WAIT_S = 0.01

_STUCK_WAIT_S = 0.1
"""Before an engine is asked again that has not yet ended what was taken away from it."""


class _LostTooOftenError(EngineDeadError):
    """A request has failed, as too many engines were lost with it."""


class _TakenAwayError(Exception):
    """A replica was asked to accept a request, which goes on elsewhere without its answer."""


class _Suspects:
    """Requests that may be lost with one engine more, of which one at a time begins.

    waits -- turn --> begins -- clear: it has begun or ended, or its engine is lost --> next
    """

    def __init__(self) -> None:
        self._beginning: RoutedRequest | None = None
        self._cleared = asyncio.Event()

    async def turn(self, item: RoutedRequest) -> None:
        """Wait until no other begins; then this one does, until `clear`."""
        while self._beginning is not None:
            await self._cleared.wait()
        self._beginning, item.suspect = item, True
        self._cleared.clear()

    def clear(self, item: RoutedRequest) -> None:
        """It does not begin any more, if it did."""
        if self._beginning is item:
            self._beginning, item.suspect = None, False
            self._cleared.set()


class Dispatcher:
    """All requests that are open.

    ended: where the latest were that are not. continued, moved: how often one went on elsewhere,
    because its engine was lost or was to be empty. closing: why there are no more engines.
    """

    def __init__(self, replica_set: ReplicaSet) -> None:
        self.open: dict[str, RoutedRequest] = {}
        self.ended: OrderedDict[str, ReplicaHandle] = OrderedDict()
        self.continued = 0
        self.moved = 0
        self.closing: str | None = None
        self._replica_set = replica_set
        self._suspects = _Suspects()

    async def start(self, item: RoutedRequest) -> None:
        """Have a replica accept it; its outputs go to its stream from then on.

        Raises what EngineClient.submit raises.
        """
        self.open[item.id] = item
        try:
            inner = await self._settle(item, patient=False)
        except BaseException:
            del self.open[item.id]
            raise
        item.stream.service_class = inner.service_class
        self._connect(item, inner)

    def close(self, reason: str) -> list[asyncio.Task[None]]:
        """Fail all open requests with the reason, and end the tasks that are left."""
        self.closing = reason
        tasks = []
        for item in list(self.open.values()):
            if item.task is not None:
                item.task.cancel()
                tasks.append(item.task)
            elif item.connected:
                self._disconnect(item)
                item.stream.put(EngineDeadError(reason))
                self._forget(item)
        return tasks

    async def _settle(self, item: RoutedRequest, *, patient: bool) -> RequestStream:
        """Have a replica accept it: the one where it is best, or those that do not refuse it.

        patient: it was accepted once, so wait for as long as a replica may come to take it.
        """
        refused: dict[ReplicaHandle, QueueFullError | OverloadedError] = dict(item.refusals)
        while True:
            item.moving = False
            try:
                shunned = [item.shuns] if item.shuns is not None else []
                avoid = [*refused, *shunned]
                replica = await self._replica_set.place(item, avoid, patient=patient)
                return await self._hand_over(item, replica)
            except (QueueFullError, OverloadedError) as error:
                assert item.replica is not None
                refused[item.replica] = error
                self._replica_set.leave(item)
            except EngineDeadError as error:
                if item.replica is None:
                    raise  # there is no replica left to ask
                self._lose(item, error)
                continue
            except _TakenAwayError:
                self._leave_behind(item)
                continue
            except BaseException:
                self._replica_set.leave(item)
                raise
            if not self._replica_set.others_take(refused):
                soonest = min(refused.values(), key=lambda error: error.retry_after_s)
                if not patient or item.refusals:
                    raise soonest
                await asyncio.sleep(max(soonest.retry_after_s, _LEAST_WAIT_S))
                refused.clear()

    async def _hand_over(self, item: RoutedRequest, replica: ReplicaHandle) -> RequestStream:
        """Have this one accept it. Raises _TakenAwayError if it is taken away from it meanwhile."""
        item.accepting = asyncio.ensure_future(self._accept(item, replica))
        try:
            return await item.accepting
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            assert caller is not None
            if caller.cancelling():
                raise
            raise _TakenAwayError from None
        finally:
            item.accepting = None

    async def _accept(self, item: RoutedRequest, replica: ReplicaHandle) -> RequestStream:
        try:
            inner = await replica.client.submit(item.current)
        except InvalidRequestError as error:
            if replica not in item.left:
                raise
            # It has not ended what it had of this one.
            raise OverloadedError(str(error), _STUCK_WAIT_S) from error
        item.accepted, item.shuns = True, None
        # What was said of it while it was accepted, or elsewhere.
        if item.promoted is not None:
            await replica.client.promote(item.id, item.promoted)
        if item.aborted or item.moving:
            await replica.client.abort(item.id)
        return inner

    def take_away(self, item: RoutedRequest) -> None:
        """It goes on elsewhere, whatever the engine that has it is doing."""
        if item.accepting is not None:
            item.accepting.cancel()
        elif item.connected:
            if item.aborted:
                self._end(item, FinishReason.ABORT)
            else:
                self._leave_behind(item)
                self._go_on(item)

    def _leave_behind(self, item: RoutedRequest) -> None:
        """It was taken away."""
        self._suspects.clear(item)
        if item.replica is not None:
            item.left.add(item.replica)
            item.replica.stuck = item.is_there
        self._replica_set.leave(item)
        self.moved += 1

    # Outputs

    def _connect(self, item: RoutedRequest, inner: RequestStream) -> None:
        item.connection += 1
        item.connected = True
        inner.connect(functools.partial(self._on_output, item, item.connection))

    def _disconnect(self, item: RoutedRequest) -> None:
        """What its engine still says is not for it."""
        item.connection += 1
        item.connected = False

    def _on_output(
        self, item: RoutedRequest, connection: int, output: RequestOutput | EngineDeadError
    ) -> None:
        """Take what a replica gives, as an OutputSink."""
        if connection != item.connection:
            return
        try:
            if isinstance(output, EngineDeadError):
                self._on_death(item, output)
            elif output.finish_reason is not None and self._goes_on(item, output):
                self._go_on(item)
            else:
                self._take(item, output)
        except Exception as error:  # ours, and others are not to suffer
            self._fail(item, error)

    def _on_death(self, item: RoutedRequest, error: EngineDeadError) -> None:
        """Its engine is gone. Raises _LostTooOftenError."""
        if item.aborted:
            self._end(item, FinishReason.ABORT)
            return
        self._lose(item, error)
        self.continued += 1
        self._go_on(item)

    def _go_on(self, item: RoutedRequest) -> None:
        """Find another replica for it."""
        self._disconnect(item)
        item.task = asyncio.create_task(self._resettle(item), name="routed-request")

    async def _resettle(self, item: RoutedRequest) -> None:
        try:
            if item.losses >= _MAX_LOSSES - 1:
                await self._suspects.turn(item)
            inner = await self._settle(item, patient=True)
        except asyncio.CancelledError:
            if self.closing is None:  # aborted between two replicas
                self._end(item, FinishReason.ABORT)
            else:
                item.stream.put(EngineDeadError(self.closing))
                self._forget(item)
        except Exception as error:
            self._fail(item, error)
        else:
            item.task = None
            self._connect(item, inner)

    def _fail(self, item: RoutedRequest, error: Exception) -> None:
        """It cannot go on."""
        if isinstance(error, OverloadedError):
            self._end(item, FinishReason.ERROR, str(error), error.retry_after_s)
        elif isinstance(error, _LostTooOftenError):
            self._end(item, FinishReason.ERROR, str(error))
        elif isinstance(error, EngineDeadError):
            self._disconnect(item)
            item.stream.put(EngineDeadError(str(error)))
            self._forget(item)
        else:
            if not isinstance(error, BrosError):
                logger.error("a request cannot be continued", exc_info=error)
            self._end(item, FinishReason.ERROR, f"It could not be continued elsewhere: {error}")

    def _end(
        self,
        item: RoutedRequest,
        reason: FinishReason,
        error: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """It ends without a word of an engine."""
        self._disconnect(item)
        self._replica_set.leave(item)
        item.end(reason, error, retry_after_s)
        self._forget(item)

    def _forget(self, item: RoutedRequest) -> None:
        """It is not open any more."""
        self._suspects.clear(item)
        self._replica_set.leave(item)
        self.open.pop(item.id, None)

    def _goes_on(self, item: RoutedRequest, output: RequestOutput) -> bool:
        """Whether it has ended where it is, but not elsewhere."""
        reason, replica = output.finish_reason, item.replica
        if item.aborted or replica is None:
            return False
        if reason is FinishReason.ABORT and item.moving:
            self.moved += 1
        elif reason is FinishReason.ERROR and output.retry_after_s is not None and not item.given:
            refused = OverloadedError(output.error or "It was refused.", output.retry_after_s)
            if not self._replica_set.others_take([*item.refusals, replica]):
                return False
            item.refusals[replica] = refused
        else:
            return False
        self._suspects.clear(item)
        self._replica_set.leave(item)
        return True

    def _take(self, item: RoutedRequest, output: RequestOutput) -> None:
        reason = output.finish_reason
        if not item.begun and (output.token_ids or reason is FinishReason.LENGTH):
            self._suspects.clear(item)
            self._replica_set.begun(item, output.cached_tokens)
            item.refusals.clear()
        if reason is None:
            item.forward(output)
            return
        if item.replica is not None:
            self._remember(item.id, item.replica)
        self._disconnect(item)
        item.forward(output)
        self._replica_set.leave(item, cached=reason.complete)
        self._forget(item)

    def _lose(self, item: RoutedRequest, error: EngineDeadError) -> None:
        """The engine that has it is gone. Raises _LostTooOftenError."""
        self._suspects.clear(item)
        if item.replica is not None and item.is_there:
            self._replica_set.lose(item.replica)
        self._replica_set.leave(item)
        item.losses += 1
        if item.losses >= _MAX_LOSSES:
            raise _LostTooOftenError(
                f"The request failed, as {item.losses} engines were lost with it. The last: {error}"
            )

    def _remember(self, request_id: str, replica: ReplicaHandle) -> None:
        self.ended[request_id] = replica
        if len(self.ended) > _REMEMBERED:
            self.ended.popitem(last=False)
