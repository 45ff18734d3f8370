"""Carries requests: to a replica that accepts them, and on to another if that one is lost.

placed (Roster, Fleet) -> accepted by a replica -> outputs ... -> the last one
   ▲                            │ refuses: others are asked
   └── with the tokens so far ──┴ is lost, or is to be empty
"""

from __future__ import annotations

import asyncio
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
from bros.router.member import Member, Routed
from bros.router.roster import Roster

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
    """A request is given up."""


class Carrier:
    """All requests that are open.

    ended: where the latest were that are not. continued, moved: how often one went on elsewhere,
    because its engine was lost or was to be empty. closing: why there are no more engines.
    """

    def __init__(self, roster: Roster) -> None:
        self.open: dict[str, Routed] = {}
        self.ended: OrderedDict[str, Member] = OrderedDict()
        self.continued = 0
        self.moved = 0
        self.closing: str | None = None
        self._roster = roster
        self._suspects = asyncio.Lock()

    async def start(self, item: Routed) -> None:
        """Have a replica accept it; its outputs are forwarded from then on.

        Raises what EngineClient.submit raises.
        """
        self.open[item.id] = item
        try:
            inner = await self._settle(item, patient=False)
        except BaseException:
            del self.open[item.id]
            raise
        item.stream.service_class = inner.service_class
        item.task = asyncio.create_task(self._run(item, inner), name="routed-request")

    async def _settle(self, item: Routed, *, patient: bool) -> RequestStream:
        """Have a replica accept it: the one where it is best, or those that do not refuse it.

        patient: it was accepted once, so wait for as long as a replica may come to take it.
        """
        refused: dict[Member, QueueFullError | OverloadedError] = dict(item.refusals)
        while True:
            item.moving = False
            try:
                shunned = [item.shuns] if item.shuns is not None else []
                avoid = [*refused, *shunned]
                replica = await self._roster.place(item, avoid, patient=patient)
                return await self._hand_over(item, replica)
            except (QueueFullError, OverloadedError) as error:
                assert item.replica is not None
                refused[item.replica] = error
                self._roster.leave(item)
            except EngineDeadError as error:
                if item.replica is None:
                    raise  # there is nobody to ask
                self._lose(item, error)
                continue
            except TimeoutError:
                self._leave_behind(item)
                continue
            except BaseException:
                self._roster.leave(item)
                raise
            if not self._roster.others_take(refused):
                soonest = min(refused.values(), key=lambda error: error.retry_after_s)
                if not patient or item.refusals:
                    raise soonest
                await asyncio.sleep(max(soonest.retry_after_s, _LEAST_WAIT_S))
                refused.clear()

    async def _hand_over(self, item: Routed, replica: Member) -> RequestStream:
        """Have this one accept it. Raises TimeoutError if it is taken away from it meanwhile."""
        async with asyncio.timeout(None) as item.engine_wait:
            try:
                inner = await replica.client.submit(item.current)
            except InvalidRequestError as error:
                if replica not in item.left:
                    raise
                # It has not ended what it had of this one.
                raise OverloadedError(str(error), _STUCK_WAIT_S) from error
            item.accepted, item.shuns = True, None
            await self._catch_up(item, replica)
            item.engine_wait = None
            return inner

    def take_away(self, item: Routed) -> None:
        """It goes on elsewhere, whatever the engine that has it is doing, if somebody waits for
        that just now."""
        if item.engine_wait is not None:
            item.engine_wait.reschedule(asyncio.get_running_loop().time())
            item.engine_wait = None

    def _leave_behind(self, item: Routed) -> None:
        """It was taken away."""
        self._clear(item)
        if item.replica is not None:
            item.left.add(item.replica)
            item.replica.stuck = item.is_there
        self._roster.leave(item)
        self.moved += 1

    async def _catch_up(self, item: Routed, replica: Member) -> None:
        """Tell the engine what was said of a request while it was accepted, or elsewhere."""
        if item.promoted is not None:
            await replica.client.promote(item.id, item.promoted)
        if item.aborted or item.moving:
            await replica.client.abort(item.id)

    async def _run(self, item: Routed, inner: RequestStream) -> None:
        """Forward its outputs until the last, from wherever they come."""
        try:
            while not await self._pump(item, inner):
                if item.losses >= _MAX_LOSSES - 1:
                    await self._suspects.acquire()
                    item.suspect = True
                inner = await self._settle(item, patient=True)
        except asyncio.CancelledError:
            if self.closing is None:  # aborted between two replicas
                item.end(FinishReason.ABORT)
            else:
                item.stream.put(EngineDeadError(self.closing))
        except OverloadedError as error:
            item.end(FinishReason.ERROR, str(error), error.retry_after_s)
        except _LostTooOftenError as error:
            item.end(FinishReason.ERROR, str(error))
        except EngineDeadError as error:
            item.stream.put(EngineDeadError(str(error)))
        except Exception as error:
            if not isinstance(error, BrosError):
                logger.exception("a request cannot be continued")
            item.end(FinishReason.ERROR, f"It could not be continued elsewhere: {error}")
        finally:
            self._clear(item)
            self._roster.leave(item)
            self.open.pop(item.id, None)

    async def _pump(self, item: Routed, inner: RequestStream) -> bool:
        """Forward what one replica gives; True if that was all."""
        error = EngineDeadError("The engine's output ended without a finish reason.")
        try:
            async with asyncio.timeout(None) as item.engine_wait:
                async for output in inner:
                    if output.finish_reason is not None and self._goes_on(item, output):
                        return False
                    self._take(item, output)
                    if output.finish_reason is not None:
                        return True
        except TimeoutError:
            if not item.aborted:
                self._leave_behind(item)
                return False
        except EngineDeadError as death:
            error = death
        if item.aborted:
            self._roster.leave(item)
            item.end(FinishReason.ABORT)
            return True
        self._lose(item, error)
        self.continued += 1
        return False

    def _goes_on(self, item: Routed, output: RequestOutput) -> bool:
        """Whether it has ended where it is, but not elsewhere."""
        reason, replica = output.finish_reason, item.replica
        if item.aborted or replica is None:
            return False
        if reason is FinishReason.ABORT and item.moving:
            self.moved += 1
        elif reason is FinishReason.ERROR and output.retry_after_s is not None and not item.given:
            refused = OverloadedError(output.error or "It was refused.", output.retry_after_s)
            if not self._roster.others_take([*item.refusals, replica]):
                return False
            item.refusals[replica] = refused
        else:
            return False
        self._clear(item)
        self._roster.leave(item)
        return True

    def _take(self, item: Routed, output: RequestOutput) -> None:
        reason = output.finish_reason
        if not item.begun and (output.token_ids or reason is FinishReason.LENGTH):
            self._clear(item)
            self._roster.begun(item, output.cached_tokens)
            item.refusals.clear()
        if reason is not None and item.replica is not None:
            self._remember(item.id, item.replica)
        item.forward(output)
        if reason is not None:
            self._roster.leave(item, cached=reason.complete)
            self.open.pop(item.id, None)

    def _lose(self, item: Routed, error: EngineDeadError) -> None:
        """The engine that has it is gone. Raises _LostTooOftenError."""
        self._clear(item)
        if item.replica is not None and item.is_there:
            self._roster.lose(item.replica)
        self._roster.leave(item)
        item.losses += 1
        if item.losses >= _MAX_LOSSES:
            raise _LostTooOftenError(
                f"The request is given up, as {item.losses} engines were lost with it. The last: "
                f"{error}"
            )

    def _clear(self, item: Routed) -> None:
        """It has not ended the engine by beginning there, or has: the next suspect may begin."""
        if item.suspect:
            item.suspect = False
            self._suspects.release()

    def _remember(self, request_id: str, replica: Member) -> None:
        self.ended[request_id] = replica
        if len(self.ended) > _REMEMBERED:
            self.ended.popitem(last=False)
