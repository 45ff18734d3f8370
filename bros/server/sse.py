"""Answers as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bros.core.errors import BrosError
from bros.server.answer import Answer
from bros.server.errors import ApiError, describe
from bros.server.interrupts import run_interruptible
from bros.server.stream import DONE, ChunkWriter

logger = logging.getLogger(__name__)

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # tells nginx to pass on every chunk at once
}


class EventStream(Response):
    """Sends events as they come. What they come from is closed however the stream ends.

    The status line goes out with the first event, so an error before it has a status of its
    own. A later one is sent as an event with the error envelope, and no [DONE] follows.
    """

    media_type = "text/event-stream"

    def __init__(self, stopping: asyncio.Event) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._stopping = stopping
        self._begun = False

    async def send_all(self, send: Send) -> None:
        """`send_events` with everything but what `ending` gives."""
        raise NotImplementedError

    def ending(self) -> bytes:
        """The last events, before [DONE]."""
        return b""

    async def close(self) -> None:
        """Called in any case, once nothing is sent any more but the end."""
        raise NotImplementedError

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: ApiError | None = None
        try:
            await run_interruptible(self.send_all(send), receive, self._stopping)
        except (ClientDisconnect, OSError):
            raise ClientDisconnect() from None
        except Exception as error:
            if not isinstance(error, BrosError):
                logger.exception("a stream failed")
            failure = describe(error)
        finally:
            await self.close()
        if failure is None:
            await self.send_events(send, self.ending() + DONE, more=False)
        elif self._begun:
            await self.send_events(send, failure.to_event(), more=False)
        else:
            await failure.to_response()(scope, receive, send)

    async def send_events(self, send: Send, events: bytes, *, more: bool = True) -> None:
        """For send_all."""
        if not self._begun:
            self._begun = True
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
        await send({"type": "http.response.body", "body": events, "more_body": more})


class AnswerStream(EventStream):
    """The deltas of an answer."""

    def __init__(self, answer: Answer, writer: ChunkWriter, stopping: asyncio.Event) -> None:
        super().__init__(stopping)
        self._answer = answer
        self._writer = writer

    async def send_all(self, send: Send) -> None:
        write = self._writer.write
        async with contextlib.aclosing(self._answer.deltas()) as deltas:
            async for delta in deltas:
                events = write(delta)
                if events:
                    await self.send_events(send, events)

    def ending(self) -> bytes:
        return self._writer.end(self._answer.usage())

    async def close(self) -> None:
        await self._answer.aclose()
