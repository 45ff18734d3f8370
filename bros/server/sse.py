"""An answer as server-sent events."""

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
    """Sends deltas as they come. The answer is closed however the stream ends.

    The status line goes out with the first event, so an error before it has a status of its
    own. A later one is sent as an event with the error envelope, and no [DONE] follows.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, writer: ChunkWriter, stopping: asyncio.Event) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._answer = answer
        self._writer = writer
        self._stopping = stopping
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        failure: ApiError | None = None
        try:
            await run_interruptible(self._send_deltas(send), receive, self._stopping)
        except (ClientDisconnect, OSError):
            raise ClientDisconnect() from None
        except Exception as error:
            if not isinstance(error, BrosError):
                logger.exception("a stream failed")
            failure = describe(error)
        finally:
            await self._answer.aclose()
        if failure is None:
            rest = self._writer.end(self._answer.usage()) + DONE
            await self._send(send, rest, more=False)
        elif self._begun:
            await self._send(send, failure.to_event(), more=False)
        else:
            await failure.to_response()(scope, receive, send)

    async def _send_deltas(self, send: Send) -> None:
        write = self._writer.write
        async with contextlib.aclosing(self._answer.deltas()) as deltas:
            async for delta in deltas:
                events = write(delta)
                if events:
                    await self._send(send, events, more=True)

    async def _send(self, send: Send, events: bytes, *, more: bool) -> None:
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
