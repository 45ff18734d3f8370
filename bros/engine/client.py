"""The client's end of an engine connection, whatever the transport."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from bros.core.errors import EngineDeadError, InvalidRequestError
from bros.core.interfaces import EngineInfo, EngineReport, EngineStats, OutputSink, RequestTrace
from bros.core.request import EngineRequest, RequestOutput, ServiceClass, Slo
from bros.engine.messages import (
    Abort,
    Accepted,
    AskStats,
    AskTrace,
    Command,
    Failed,
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
    """The outputs of one request, for one taker: a sink that is called, or a reader that iterates.

        put -> slot                 no reader yet, or it is busy: merged into one output
        put -> sink                 since `connect`

    A reader therefore gets at least one output and at most as many as were put, the same tokens in
    the same order, and one finish_reason; or EngineDeadError after what came before it.
    """

    __slots__ = ("_death", "_reader", "_slot", "put", "service_class")

    def __init__(self, service_class: ServiceClass) -> None:
        self.service_class = service_class  # the engine's word replaces the caller's wish
        self.put: OutputSink = self._keep
        """Take in the next output, or that none follows. Call it in the event loop."""
        self._slot: RequestOutput | None = None
        self._death: EngineDeadError | None = None
        self._reader: asyncio.Future[None] | None = None

    def connect(self, sink: OutputSink) -> None:
        """Hand everything to `sink` from now on, what waits in the slot first."""
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

    def _keep(self, item: RequestOutput | EngineDeadError) -> None:
        if isinstance(item, EngineDeadError):
            self._death = item
        else:
            self._slot = item if self._slot is None else merged(self._slot, item)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def merged(first: RequestOutput, then: RequestOutput) -> RequestOutput:
    """Both as if one step had given them."""
    return RequestOutput(
        request_id=then.request_id,
        token_ids=first.token_ids + then.token_ids,
        logprobs=first.logprobs + then.logprobs,
        finish_reason=then.finish_reason,
        cached_tokens=max(first.cached_tokens, then.cached_tokens),
        error=then.error,
        retry_after_s=then.retry_after_s,
    )


class MessageClient:
    """An EngineClient on top of `send`; the transport feeds `on_reply` in the event loop.

    A submission is answered by the request's id, a question by its number.
    """

    def __init__(self, send: Callable[[Command], None]) -> None:
        self._send = send
        self._info: EngineInfo | None = None
        self._alive = False
        self._came_up = False  # in the present life
        self._death = "The engine is not running."
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, OutputStream] = {}
        self._submissions: dict[str, asyncio.Future[ServiceClass]] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}
        self._question_numbers = itertools.count()
        self._listener: Callable[[EngineReport], None] | None = None

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

        Raises PromptTooLongError, InvalidRequestError, QueueFullError, OverloadedError or
        EngineDeadError.
        """
        self._check_alive()
        request_id = request.request_id
        if request_id in self._streams:
            raise InvalidRequestError(f"request id {request_id!r} is in use.", "request_id")
        accepted: asyncio.Future[ServiceClass] = asyncio.get_running_loop().create_future()
        stream = OutputStream(request.service_class)
        self._streams[request_id] = stream
        self._submissions[request_id] = accepted
        try:
            self._send(Submit(request))
            stream.service_class = await accepted
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

    async def promote(self, request_id: str, slo: Slo) -> None:
        """Serve a best-effort request as real-time from now on; its first token is due slo.ttft_s
        from now if it has none yet. Real-time ones and unknown ids are ignored."""
        if request_id in self._streams and self._alive:
            self._send(Promote(request_id, slo))

    async def release(self, request_id: str) -> None:
        """What a request has left is kept no longer (Hints.keep_s). Unknown ids are ignored."""
        if self._alive:
            self._send(Release(request_id))

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError if there is no engine to ask."""
        stats: EngineStats = await self._ask(AskStats)
        return stats

    async def trace(self, request_id: str) -> RequestTrace | None:
        """What is known of a running or recent request; None if nothing is.

        Raises EngineDeadError if there is no engine to ask.
        """
        trace: RequestTrace | None = await self._ask(lambda number: AskTrace(number, request_id))
        return trace

    def subscribe(self, listener: Callable[[EngineReport], None]) -> None:
        """Have `listener` told every report from now on, and from every engine that comes up
        later: its versions begin at 1 again, with a digest. Call it in the event loop, once."""
        self._listener = listener
        if self._alive:
            self._send(Subscribe())

    def on_reply(self, reply: Reply) -> None:
        """Take in one message of the engine. Call it in the event loop, not within `send`."""
        match reply:
            case Outputs(outputs):
                self._deliver(outputs)
            case Accepted(request_id, service_class):
                self._resolve(request_id, service_class)
            case Refused(request_id):
                self._resolve(request_id, reply.to_error())
            case StatsReply(question, answer) | TraceReply(question, answer):
                asked = self._questions.get(question)
                if asked is not None and not asked.done():
                    asked.set_result(answer)
            case Reported(report):
                if self._listener is not None:
                    self._listener(report)
            case Ready(info):
                self._come_up(info)
            case Failed(message):
                self.on_death(message)

    def on_death(self, message: str) -> None:
        """The engine is gone: fail everything that is open, at once. May be called twice."""
        self._alive, self._death = False, message
        if self._ready.done():
            self._ready = asyncio.get_running_loop().create_future()
        if not self._came_up:
            self._ready.set_exception(EngineDeadError(message))
            self._ready.exception()  # asyncio logs an exception that was never retrieved
        waiting: list[asyncio.Future[Any]] = [
            *self._submissions.values(),
            *self._questions.values(),
        ]
        for future in waiting:
            if not future.done():
                future.set_exception(EngineDeadError(message))
        for stream in self._streams.values():
            stream.put(EngineDeadError(message))
        self._submissions.clear()
        self._questions.clear()
        self._streams.clear()

    def _come_up(self, info: EngineInfo) -> None:
        self._info, self._alive, self._came_up = info, True, True
        if self._ready.done():  # an earlier life failed to start
            self._ready = asyncio.get_running_loop().create_future()
        self._ready.set_result(None)
        if self._listener is not None:
            self._send(Subscribe())

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineDeadError(self._death)

    async def _ask(self, question: Callable[[int], AskStats | AskTrace]) -> Any:
        """Send a question under a number of its own, and wait for the answer with that number."""
        self._check_alive()
        number = next(self._question_numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(question(number))
            return await answer
        finally:
            self._questions.pop(number, None)

    def _deliver(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand what a step gave to the requests that it belongs to."""
        streams = self._streams
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue  # the caller gave up while the request was being accepted
            if output.finish_reason is not None:
                del streams[output.request_id]
            stream.put(output)

    def _resolve(self, request_id: str, result: ServiceClass | Exception) -> None:
        future = self._submissions.get(request_id)
        if future is None or future.done():
            return
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)
