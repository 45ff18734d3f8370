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
from bros.server.errors import describe
from bros.server.interrupts import run_interruptible
from bros.server.stream import DONE, ChunkWriter

logger = logging.getLogger(__name__)

_HEADERS = {
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # tells nginx to pass on every chunk at once
}


class EventStream(Response):
    """Sends deltas as they come. The answer is closed however the stream ends.

    An error on the way is sent as an event with the error envelope, and no [DONE] follows.
    """

    media_type = "text/event-stream"

    def __init__(self, answer: Answer, writer: ChunkWriter, stopping: asyncio.Event) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._answer = answer
        self._writer = writer
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            await run_interruptible(self._send_deltas(send), receive, self._stopping)
            rest = self._writer.end(self._answer.usage()) + DONE
        except (ClientDisconnect, OSError):
            raise ClientDisconnect() from None
        except BrosError as error:
            rest = describe(error).to_event()
        except Exception as error:
            logger.exception("a stream failed")
            rest = describe(error).to_event()
        finally:
            await self._answer.aclose()
        await send({"type": "http.response.body", "body": rest, "more_body": False})

    async def _send_deltas(self, send: Send) -> None:
        write = self._writer.write
        async with contextlib.aclosing(self._answer.deltas()) as deltas:
            async for delta in deltas:
                events = write(delta)
                if events:
                    await send({"type": "http.response.body", "body": events, "more_body": True})
