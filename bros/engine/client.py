"""The client's end of an engine connection, whatever the transport."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

from bros.core.errors import EngineDeadError, InvalidRequestError
from bros.core.interfaces import EngineInfo, EngineStats
from bros.core.request import EngineRequest, RequestOutput
from bros.engine.messages import (
    Abort,
    Accepted,
    AskStats,
    Command,
    Failed,
    Outputs,
    Ready,
    Refused,
    Reply,
    StatsReply,
    Submit,
)


class OutputStream:
    """Outputs of one request, in order. One consumer; ends after a finish_reason."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[RequestOutput | EngineDeadError] = asyncio.Queue()

    def put(self, item: RequestOutput | EngineDeadError) -> None:
        self._queue.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            item = await self._queue.get()
            if isinstance(item, EngineDeadError):
                raise item
            yield item
            if item.finish_reason is not None:
                return


class MessageClient:
    """An EngineClient on top of `send`; the transport feeds `on_reply` in the event loop.

    Submissions and statistics are answered in the order in which they were sent.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._info: EngineInfo | None = None
        self._alive = False
        self._death = "The engine is not running."
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, OutputStream] = {}
        self._submissions: dict[str, asyncio.Future[None]] = {}
        self._stats: deque[asyncio.Future[EngineStats]] = deque()

    @property
    def info(self) -> EngineInfo:
        """Raises EngineDeadError before the engine has come up for the first time."""
        if self._info is None:
            raise EngineDeadError(self._death)
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._streams)

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine is up. Raises EngineDeadError if it fails to start."""
        await asyncio.shield(self._ready)
        return self.info

    async def submit(self, request: EngineRequest) -> OutputStream:
        """Hand over a request; returns once the engine has accepted it.

        Raises PromptTooLongError, InvalidRequestError, QueueFullError or EngineDeadError.
        """
        self._check_alive()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use.", "request_id")
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        stream = OutputStream()
        self._streams[request_id] = stream
        self._submissions[request_id] = accepted
        try:
            self._send(Submit(request))
            await accepted
        except BaseException as error:
            self._streams.pop(request_id, None)
            if isinstance(error, asyncio.CancelledError) and self._alive:
                self._send(Abort(request_id))  # the engine may have accepted it already
            raise
        finally:
            self._submissions.pop(request_id, None)
        return stream

    async def abort(self, request_id: str) -> None:
        """Stop a request and free its KV at the next iteration. Unknown ids are ignored."""
        if request_id in self._streams and self._alive:
            self._send(Abort(request_id))

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError if there is no engine to ask."""
        self._check_alive()
        reply: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(reply)
        self._send(AskStats())
        return await reply

    def on_reply(self, reply: Reply) -> None:
        """Take in one message of the engine. Call it in the event loop only."""
        match reply:
            case Outputs(outputs):
                for output in outputs:
                    self._deliver(output)
            case Accepted(request_id):
                self._resolve(request_id, None)
            case Refused(request_id):
                self._resolve(request_id, reply.to_error())
            case StatsReply(stats):
                future = self._stats.popleft()
                if not future.done():
                    future.set_result(stats)
            case Ready(info):
                self._info, self._alive = info, True
                if not self._ready.done():
                    self._ready.set_result(None)
            case Failed(message):
                self.on_death(message)

    def on_death(self, message: str) -> None:
        """The engine is gone: fail everything that is open, at once. May be called twice."""
        self._alive, self._death = False, message
        error = EngineDeadError(message)
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        else:
            self._ready.set_exception(error)
            self._ready.exception()  # it may be that nobody waits
        waiting: list[asyncio.Future[Any]] = [*self._submissions.values(), *self._stats]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDeadError(message))
        for stream in self._streams.values():
            stream.put(EngineDeadError(message))
        self._submissions.clear()
        self._stats.clear()
        self._streams.clear()

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineDeadError(self._death)

    def _deliver(self, output: RequestOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # the caller gave up while the request was being accepted
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        stream.put(output)

    def _resolve(self, request_id: str, error: Exception | None) -> None:
        future = self._submissions.get(request_id)
        if future is None or future.done():
            return
        if error is None:
            future.set_result(None)
        else:
            future.set_exception(error)
