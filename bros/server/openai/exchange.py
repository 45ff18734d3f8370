"""Chat and text completions: from the HTTP request, or the row of a batch, to the response."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import bros
from bros.core.errors import BrosError
from bros.core.interfaces import EngineInfo
from bros.core.request import NO_HINTS, Hints, ServiceClass, Slo
from bros.core.tenants import QuotaHold
from bros.semantic.service.runner import PlainCall
from bros.server.errors import renaming_fields
from bros.server.http import (
    CancelOnDisconnect,
    count_kept,
    offload_reply,
    pieces_response,
    read_held,
)
from bros.server.openai.calls import CALLS, Call, Tier, response_tier, slo_of, tier_of
from bros.server.openai.prompt_logprobs import NUMBER_CHARS, num_numbers
from bros.server.openai.stream import (
    Answer,
    AnswerStream,
    ChunkFrame,
    FinishedChoice,
    Observer,
)
from bros.server.sessions.joining import SESSION_HEADERS, SessionObserver, join, metadata_of
from bros.server.state import ServerState
from bros.text.generation import choice_ids


def system_fingerprint(info: EngineInfo) -> str:
    """What determines the output besides seed and parameters."""
    return f"bros-{bros.__version__}-{info.weights}-{info.kernels}-{info.kv_dtype}"


class Exchange:
    """One call and its answer. Always call `aclose` or `stream`; else its requests keep running.

    shows_progress: output can be read while it runs, also without `stream`.
    """

    shows_progress = False

    def __init__(
        self,
        state: ServerState,
        call: Call,
        *,
        tier: Tier,
        slo: Slo,
        tenant: str,
        arrival_s: float,
        session_call: PlainCall | None = None,
        request_id: str | None = None,
        created: int | None = None,
        hints: Hints = NO_HINTS,
        held: QuotaHold | None = None,
    ) -> None:
        """tenant: whose call it is, see EngineRequest. The body names the user.
        arrival_s: on the state's clock; deadlines count from it.
        session_call: the call's place in a session, if it belongs to one.
        request_id: id of the response; None: a new one. A call of a session has that of its place.
        created: Unix seconds; None: now.
        hints: of a call that belongs to no session.
        held: what its body counts as; None: it does not count.
        """
        self._state = state
        self._call = call
        self._tier = tier
        self._slo = slo
        self._tenant = tenant
        self._arrival_s = arrival_s
        self._held = held
        self._session_call = session_call
        # A call of a session has one id in the graph, in the response and in traces.
        if session_call is not None:
            self._id, self._hints = session_call.request_id, session_call.hints
        else:
            self._id, self._hints = request_id or state.ids.new(call.id_prefix, ""), hints
        self._created = int(state.clock.unix_time()) if created is None else created
        self._answer: Answer | None = None

    @property
    def answer(self) -> Answer:
        """Valid after `start`."""
        assert self._answer is not None
        return self._answer

    @property
    def header(self) -> dict[str, Any]:
        """Common fields of responses and chunks. Valid after `start`, when the service class that
        the engine has chosen is known."""
        return {
            "id": self._id,
            "created": self._created,
            "model": self._state.model_name,
            "service_tier": response_tier(self._tier, best_effort=self.answer.best_effort),
            "system_fingerprint": system_fingerprint(self._state.engine.info),
        }

    async def start(self) -> None:
        """Submit all prompts. Raises what `Call.prompts`, ServerState.check_grammar and
        TextGenerator.start raise."""
        state, call = self._state, self._call
        prompts = await call.prompts(self._tenant)
        service_class, checked_s = self._tier.service_class, 0.0
        if call.sampling.grammar is not None:
            with renaming_fields(call.field_names):
                checked_s = await state.check_grammar(
                    self._tenant, call.sampling.grammar, service_class
                )
        generation = await state.generator.start(
            prompts,
            call.sampling,
            request_id=self._id,
            service_class=service_class,
            slo=self._slo,
            tenant=self._tenant,
            user=call.body.safety_identifier or call.body.user or "",
            cache_salt=call.body.cache_salt or "",
            param=call.param,
            arrival_s=self._arrival_s,
            checked_s=checked_s,
            hints=self._hints,
            parsing=call.parsing(),
            streamed=self.shows_progress or bool(call.body.stream),
        )
        observer = partial(self._observer, len(prompts), sum(map(len, prompts)))
        self._answer = Answer(generation, observer, call.field_names)
        state.recent.note(self._tenant, self._id, prompts=len(prompts), n=call.sampling.n)
        count_kept(self._held, call.shrink_body())

    async def complete(self) -> str:
        """Wait for all choices; returns the response as JSON. Raises what Answer.collect raises."""
        choices, size = await self._collected()

        def render() -> str:
            pieces = self._call.reply(self.header, choices, self.answer)
            return b"".join(pieces).decode()

        return await offload_reply(self._state, self._tenant, render, size)

    async def respond(self) -> Response:
        """Wait for all choices; returns the response. Raises what Answer.collect raises."""
        choices, size = await self._collected()
        return await pieces_response(
            self._state,
            self._tenant,
            lambda: self._call.reply(self.header, choices, self.answer),
            size,
            kept_bytes=sum(choice.logprobs.num_bytes for choice in choices),
        )

    async def _collected(self) -> tuple[list[FinishedChoice], int]:
        """All choices, once they have ended, and how long writing them takes, in characters."""
        choices = await self.answer.collect()
        await self.answer.aclose()
        numbers = sum(
            choice.logprobs.num_numbers + num_numbers(choice.prompt_logprobs) for choice in choices
        )
        texts = sum(self._call.echo_chars() + len(choice.text) for choice in choices)
        return choices, texts + NUMBER_CHARS * numbers

    async def _offload(self, work: Callable[[], bytes], size: int) -> bytes:
        return await offload_reply(self._state, self._tenant, work, size)

    async def aclose(self) -> None:
        """Abort unfinished requests."""
        if self._answer is not None:
            await self._answer.aclose()

    def _observer(
        self, num_prompts: int, prompt_tokens: int, classes: Sequence[ServiceClass]
    ) -> Observer:
        observer = self._state.metrics.observer(self._arrival_s, classes)
        session_call = self._session_call
        if session_call is None:
            return observer
        engine_ids = choice_ids(self._id, num_prompts, self._call.sampling.n)
        served_as = ServiceClass.BE if ServiceClass.BE in classes else ServiceClass.RT
        session_call.accepted(served_as, engine_ids)
        return SessionObserver(
            session_call, observer, num_choices=len(classes), prompt_tokens=prompt_tokens
        )

    def stream(self) -> AnswerStream:
        """The answer as server-sent events. From then on the stream closes the answer."""
        call, options = self._call, self._call.body.stream_options
        include_usage = bool(options and options.include_usage)
        frame = ChunkFrame(call.chunk_kind, self.header, include_usage=include_usage)
        state, writer = self._state, call.writer(frame)
        return AnswerStream(
            self.answer,
            writer,
            state.stopping,
            state.config.stream_heartbeat,
            self._offload,
            call.echo_chars(),
        )


async def create_chat_completion(request: Request) -> Response:
    """Generate the next message of a conversation; with stream, as server-sent events."""
    return await _generate(request)


async def create_completion(request: Request) -> Response:
    """Continue prompts; with stream, as server-sent events."""
    return await _generate(request)


async def _generate(request: Request) -> Response:
    state = ServerState.of(request)
    arrival_s = state.arrival_s(request)
    make = CALLS[request.scope["path"]]
    (metadata, call), held = await read_held(
        request, state.max_body_bytes, lambda fields: (metadata_of(fields), make(state, fields))
    )
    session_call = due_ms = None
    # Only the metadata and these headers can name a session.
    if metadata or any(name in request.headers for name in SESSION_HEADERS):
        session_call, due_ms = join(request, metadata, call)
    return await respond(request, call, arrival_s, held, session_call, due_ms)


async def respond(
    request: Request,
    call: Call,
    arrival_s: float,
    held: QuotaHold,
    session_call: PlainCall | None = None,
    deadline_ms: float | None = None,
    make: Callable[..., Exchange] = Exchange,
) -> Response:
    """Respond to a call over HTTP.

    held: what its body counts as.
    session_call: the call's place in a session, if it belongs to one.
    deadline_ms: applies if neither the body nor a header has a deadline.
    make: makes the exchange; takes the arguments of Exchange.

    If the client disconnects or anything fails, the requests are aborted. Raises
    InvalidRequestError for wrong headers, EngineDeadError, and what Exchange raises.
    """
    state = ServerState.of(request)
    try:
        exchange = make(
            state,
            call,
            tier=tier_of(call.body),
            slo=slo_of(call.body, request.headers, state.engine.info.default_slo, deadline_ms),
            tenant=state.tenant(request),
            arrival_s=arrival_s,
            held=held,
            session_call=session_call,
        )
        return await _run(request, state, exchange, call)
    except BaseException as error:
        if session_call is not None:
            if isinstance(error, BrosError):
                session_call.failed(str(error))
            else:
                session_call.cancelled()
        raise


async def _run(request: Request, state: ServerState, exchange: Exchange, call: Call) -> Response:
    try:
        async with CancelOnDisconnect(request.receive, state.stopping):
            await exchange.start()
            if call.body.stream:
                return exchange.stream()
            return await exchange.respond()
    except BaseException:
        await exchange.aclose()
        raise
