"""The client's end of an engine connection, whatever the transport."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from bros.core.errors import EngineDeadError, InvalidRequestError
from bros.core.interfaces import EngineInfo, EngineReport, EngineStats, OutputSink, RequestTrace
from bros.core.request import (
    EngineRequest,
    Output,
    RequestOutput,
    ServiceClass,
    Slo,
    expanded,
    merged,
)
from bros.engine.messages import (
    Abort,
    Accepted,
    Command,
    Failed,
    GetStats,
    GetTrace,
    Outputs,
    Promote,
    Ready,
    Refused,
    Release,
    Reply,
    Reported,
    StatsReply,
    Submit,
    Subscribe,
    TraceReply,
)


class OutputStream:
    """The outputs of one request, for one consumer: a connected sink, or a reader that iterates.

        put -> slot     without a sink; outputs are merged until the reader takes them
        put -> sink     after `connect`

    A reader gets all tokens in order, in one or more outputs, and one finish_reason or
    EngineDeadError at the end.
    """

    __slots__ = ("_death", "_reader", "_slot", "put", "service_class")

    def __init__(self, service_class: ServiceClass) -> None:
        self.service_class = service_class  # as requested, until the engine has accepted
        self.put: OutputSink = self._put_in_slot
        """Deliver the next output, or the error that ends the stream. Call it in the event loop."""
        self._slot: RequestOutput | None = None
        self._death: EngineDeadError | None = None
        self._reader: asyncio.Future[None] | None = None

    def connect(self, sink: OutputSink) -> None:
        """Deliver the content of the slot and all later outputs to `sink`."""
        output, death = self._slot, self._death
        self.put, self._slot, self._death = sink, None, None
        if output is not None:
            sink(output)
        if death is not None:
            sink(death)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while True:
            while self._slot is None:
                if self._death is not None:
                    raise self._death
                self._reader = asyncio.get_running_loop().create_future()
                await self._reader
            output, self._slot = self._slot, None
            yield output
            if output.finish_reason is not None:
                return

    def _put_in_slot(self, item: Output | EngineDeadError) -> None:
        if isinstance(item, EngineDeadError):
            self._death = item
        else:
            output = expanded(item)
            self._slot = output if self._slot is None else merged(self._slot, output)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _is_refused(accepted: asyncio.Future[ServiceClass]) -> bool:
    return accepted.done() and not accepted.cancelled() and accepted.exception() is not None


class MessageClient:
    """An EngineClient on top of `send`; the transport calls `on_reply` in the event loop.

    The engine replies to a submission with the request's id and to a query with the query's id.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._info: EngineInfo | None = None
        self._alive = False
        self._was_ready = False  # since the engine was last started
        self._death_reason = "The engine is not running."
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, OutputStream] = {}
        self._submissions: dict[str, asyncio.Future[ServiceClass]] = {}
        # Ids of requests whose `submit` was cancelled, until the engine has refused or ended them:
        # what it says about them must not reach a later request with the same id.
        self._withdrawn: set[str] = set()
        self._queries: dict[int, asyncio.Future[Any]] = {}
        self._query_ids = itertools.count()
        self._listener: Callable[[EngineReport], None] | None = None

    @property
    def info(self) -> EngineInfo:
        """Raises EngineDeadError before the engine is ready for the first time."""
        if self._info is None:
            raise EngineDeadError(self._death_reason)
        return self._info

    @property
    def alive(self) -> bool:
        return self._alive

    @property
    def num_open(self) -> int:
        """Number of requests submitted and not yet finished."""
        return len(self._streams)

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine is ready. Raises EngineDeadError if it fails to start."""
        await asyncio.shield(self._ready)
        return self.info

    async def submit(self, request: EngineRequest) -> OutputStream:
        """See EngineClient."""
        self._check_alive()
        request_id = request.request_id
        if request_id in self._streams or request_id in self._withdrawn:
            raise InvalidRequestError(f"request id {request_id!r} is in use.", "request_id")
        accepted: asyncio.Future[ServiceClass] = asyncio.get_running_loop().create_future()
        stream = OutputStream(request.service_class)
        self._streams[request_id] = stream
        self._submissions[request_id] = accepted
        try:
            self._send(Submit(request))
            stream.service_class = await accepted
        except BaseException as error:
            has_ended = self._streams.pop(request_id, None) is None or _is_refused(accepted)
            if isinstance(error, asyncio.CancelledError) and self._alive and not has_ended:
                self._withdrawn.add(request_id)
                self._send(Abort(request_id))  # the engine may have accepted it already
            raise
        finally:
            self._submissions.pop(request_id, None)
            # A refusal knows this frame, and the future the refusal: a cycle that only the garbage
            # collector frees, 100 objects large. A full engine refuses hundreds of requests.
            del accepted
        return stream

    async def abort(self, request_id: str) -> None:
        """See EngineClient."""
        if request_id in self._streams and self._alive:
            self._send(Abort(request_id))

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        """See EngineClient."""
        if request_id in self._streams and self._alive:
            self._send(Promote(request_id, slo, awaited))

    async def release(self, request_id: str) -> None:
        """See EngineClient."""
        if self._alive:
            self._send(Release(request_id))

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError if the engine is not running."""
        stats: EngineStats = await self._query(GetStats)
        return stats

    async def trace(self, request_id: str) -> RequestTrace | None:
        """See EngineClient."""
        trace: RequestTrace | None = await self._query(partial(GetTrace, request_id=request_id))
        return trace

    def subscribe(self, listener: Callable[[EngineReport], None]) -> None:
        """See ReportingClient."""
        self._listener = listener
        if self._alive:
            self._send(Subscribe())

    def on_reply(self, reply: Reply) -> None:
        """Handle one message of the engine. Call it in the event loop, not within `send`."""
        match reply:
            case Outputs(outputs):
                self._deliver(outputs)
            case Accepted(request_id, service_class):
                self._resolve(request_id, service_class)
            case Refused(request_id):
                self._resolve(request_id, reply.to_error())
            case StatsReply(query_id, answer) | TraceReply(query_id, answer):
                query = self._queries.get(query_id)
                if query is not None and not query.done():
                    query.set_result(answer)
            case Reported(report):
                if self._listener is not None:
                    self._listener(report)
            case Ready(info):
                self._on_ready(info)
            case Failed(message):
                self.on_death(message)

    @property
    def num_lost(self) -> int:
        return 0

    @property
    def num_hung(self) -> int:
        return 0

    @property
    def hung(self) -> bool:
        return False

    @property
    def retry_after_s(self) -> float | None:
        """Seconds until requests may be accepted again; None if that is not expected. Asked while
        the engine is not running."""
        return None

    def on_death(self, message: str) -> None:
        """Fail everything that is open with EngineDeadError. May be called twice."""
        self._alive, self._death_reason = False, message
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        if not self._was_ready:
            self._ready.set_exception(EngineDeadError(message))
            self._ready.exception()  # asyncio logs an exception that was never retrieved
        waiting: list[asyncio.Future[Any]] = [
            *self._submissions.values(),
            *self._queries.values(),
        ]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDeadError(message, self.retry_after_s))
        for stream in self._streams.values():
            stream.put(EngineDeadError(message, self.retry_after_s))
        self._submissions.clear()
        self._queries.clear()
        self._streams.clear()
        self._withdrawn.clear()

    def _on_ready(self, info: EngineInfo) -> None:
        self._info, self._alive, self._was_ready = info, True, True
        if self._ready.done():  # an earlier start failed
            self._ready = asyncio.get_running_loop().create_future()
        self._ready.set_result(None)
        if self._listener is not None:
            self._send(Subscribe())

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineDeadError(self._death_reason, self.retry_after_s)

    async def _query(self, make: Callable[[int], GetStats | GetTrace]) -> Any:
        """Send a query with a fresh id and wait for its answer."""
        self._check_alive()
        query_id = next(self._query_ids)
        answer = self._queries[query_id] = asyncio.get_running_loop().create_future()
        try:
            self._send(make(query_id))
            return await answer
        finally:
            self._queries.pop(query_id, None)
            del answer  # as `submit` does

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Put each output of a step into the stream of its request."""
        streams = self._streams
        for output in outputs:
            if isinstance(output, tuple):
                stream = streams.get(output[0])
            elif output.finish_reason is None:
                stream = streams.get(output.request_id)
            else:
                stream = streams.pop(output.request_id, None)
                if stream is None:
                    self._withdrawn.discard(output.request_id)
            if stream is not None:  # else `submit` was cancelled before the engine had accepted
                stream.put(output)

    def _resolve(self, request_id: str, result: ServiceClass | Exception) -> None:
        future = self._submissions.get(request_id)
        if future is None or future.done():
            if isinstance(result, Exception):
                self._withdrawn.discard(request_id)
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
