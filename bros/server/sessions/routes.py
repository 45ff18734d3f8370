"""/v1/sessions: programs of many calls, and their graphs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import Response

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.request import MIN_OBJECTIVE_MS
from bros.semantic.errors import ConflictError, GetTimeoutError, UpstreamError
from bros.semantic.schema import (
    MAX_WAIT_S,
    CallSpec,
    CancelledRequest,
    CreateSession,
    CreateVariable,
    Criteria,
    DeletedSession,
    FailCall,
    FailedRequest,
    PaperGet,
    PaperSubmit,
    PaperSubmitted,
    PaperValue,
    Perf,
    SessionList,
    SessionSummary,
    SessionView,
    SetVariable,
    SubmitCall,
    SubmitProgram,
    SubmittedCall,
    SubmittedProgram,
    UpstreamErrorEnvelope,
    VariableList,
    VariableView,
    WantVariable,
    to_json,
)
from bros.semantic.service.service import SessionService
from bros.server.errors import ApiError, describe
from bros.server.http import (
    CancelOnDisconnect,
    check_query_names,
    in_turns,
    large_response,
    offload_reply,
    query_flag,
    query_number,
    read_as,
    read_object,
)
from bros.server.openai.stream import EventStream
from bros.server.operations.openapi import ApiRoute, Schemas
from bros.server.sessions.graph import render_dot, render_mermaid, render_page
from bros.server.sessions.wire import (
    BODIES,
    REPLIES,
    check_call,
    check_sampling,
    parse_perf,
    read,
    reply,
)
from bros.server.state import ServerState, StopSignal

# ---- Sessions and their graphs.


_DEFAULT_WAIT_S = 60.0


class SessionScope(NamedTuple):
    """The session in a request's path, and the request's tenant."""

    service: SessionService
    tenant: str
    session_id: str

    @classmethod
    def of(cls, request: Request) -> SessionScope:
        return cls(_sessions_of(request), ServerState.tenant(request), request.path_params["sid"])


def _sessions_of(request: Request) -> SessionService:
    sessions = ServerState.of(request).sessions
    assert sessions is not None
    return sessions


_CHARS_PER_CALL = 100
"""Cost of rendering a call, as the `size` of `offload`."""

_GRAPH_HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": (
        "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
    ),
    "x-content-type-options": "nosniff",
}


async def create_session(request: Request) -> Response:
    """Open a session, which holds a program of many calls."""
    state = ServerState.of(request)
    wanted = await read_as(request, state.max_body_bytes, _session)
    await check_grammar(state, state.tenant(request), wanted.sampling or {}, "")
    view = _sessions_of(request).create(
        state.tenant(request),
        criteria=wanted.criteria,
        ttl_s=wanted.ttl_s,
        scope=wanted.tenant,
        sharing=wanted.sharing,
        session_id=wanted.id,
        metadata=wanted.metadata,
        sampling=wanted.sampling,
    )
    return reply(view)


def _session(fields: Mapping[str, Any]) -> CreateSession:
    wanted = read(CreateSession, fields)
    check_sampling(wanted.sampling or {}, "sampling")
    return wanted


async def list_sessions(request: Request) -> Response:
    """List your sessions, the oldest first."""
    found = _sessions_of(request).sessions(ServerState.tenant(request))
    return await _respond(request, SessionList(data=found), _CHARS_PER_CALL * len(found))


async def retrieve_session(request: Request) -> Response:
    """A session with the graph of its requests and variables."""
    view = await _view(request)
    return await _respond(request, view, _size(view))


async def delete_session(request: Request) -> Response:
    """Delete a session. Its running requests are aborted, and waiting clients get status 410."""
    service, tenant, session_id = SessionScope.of(request)
    await service.delete(tenant, session_id)
    return reply(DeletedSession(id=session_id))


async def graph_page(request: Request) -> Response:
    """The graph as a page that refreshes itself."""
    return await _graph(request, render_page, "text/html")


async def graph_mermaid(request: Request) -> Response:
    """The graph as Mermaid text."""
    return await _graph(request, render_mermaid, "text/plain")


async def graph_dot(request: Request) -> Response:
    """The graph as Graphviz DOT text."""
    return await _graph(request, render_dot, "text/plain")


async def _graph(
    request: Request, render: Callable[[SessionView], str], media_type: str
) -> Response:
    view = await _view(request)
    state = ServerState.of(request)
    text = await offload_reply(state, state.tenant(request), lambda: render(view), _size(view))
    return Response(text, headers=_GRAPH_HEADERS, media_type=media_type)


async def _view(request: Request) -> SessionView:
    service, tenant, session_id = SessionScope.of(request)
    return await service.view(tenant, session_id)


def _size(view: SessionView) -> int:
    return _CHARS_PER_CALL * len(view.calls) + _size_of_variables(view.variables)


def _size_of_variables(views: Sequence[VariableView]) -> int:
    """Cost of writing variables with their values, in characters."""
    return _CHARS_PER_CALL * len(views) + sum(len(view.value) for view in views if view.value)


async def _respond(request: Request, record: Any, size: int) -> Response:
    """A JSON response with a record. size: cost of writing it, in characters."""
    state = ServerState.of(request)
    return await large_response(state, state.tenant(request), lambda: to_json(record), size)


async def _respond_variable(request: Request, view: VariableView) -> Response:
    return await _respond(request, view, _size_of_variables([view]))


_SESSIONS = (
    ApiRoute(
        "POST", "/v1/sessions", create_session, REPLIES[SessionSummary], BODIES[CreateSession]
    ),
    ApiRoute("GET", "/v1/sessions", list_sessions, REPLIES[SessionList]),
    ApiRoute("GET", "/v1/sessions/{sid}", retrieve_session, REPLIES[SessionView]),
    ApiRoute("DELETE", "/v1/sessions/{sid}", delete_session, REPLIES[DeletedSession]),
    ApiRoute("GET", "/v1/sessions/{sid}/graph", graph_page, "text/html"),
    ApiRoute("GET", "/v1/sessions/{sid}/graph.mmd", graph_mermaid, "text/plain"),
    ApiRoute("GET", "/v1/sessions/{sid}/graph.dot", graph_dot, "text/plain"),
)


# ---- Waiting for the outputs of calls in the request that submits them.


_LOWEST_CRITERIA = Criteria(perf=Perf.THROUGHPUT)
"""For values that are ready, or that the calls which read them already make urgent."""


_SLICE = 20
"""Calls or outputs that are looked at in one turn of the event loop: wanting one takes 0.1 ms."""


class _Output(NamedTuple):
    """One output of a submitted call.

    call: index of its call.
    placeholder: its name in the call's template.
    variable: the id of its variable.
    criteria: the criteria given with the call, if any.
    is_final: no LLM call of the program reads it, also not through native ones, which say nothing
        about how urgent it is.
    """

    call: int
    placeholder: str
    variable: str
    criteria: Criteria | None
    is_final: bool


async def wait_for_outputs(
    scope: SessionScope,
    calls: Sequence[CallSpec],
    submitted: Sequence[SubmittedCall],
    timeout_s: float,
) -> list[dict[str, str]]:
    """For each call, placeholder -> value of its outputs: those with criteria; if no output has
    criteria, all that the model generates.

    Outputs that are neither final nor have criteria are not wanted by themselves, which would
    change their scheduling: they are ready when the final ones are. Raises the first error of
    SessionService.get_all.
    """
    outputs = await _outputs(scope, calls, submitted)
    if any(output.criteria is not None for output in outputs):
        outputs = [output for output in outputs if output.criteria is not None]
    wanted = [output for output in outputs if output.criteria is not None or output.is_final]
    values: list[dict[str, str]] = [{} for _ in calls]
    asked = [(output.variable, output.criteria) for output in wanted]
    views = await scope.service.get_all(scope.tenant, scope.session_id, asked, timeout_s)
    for output, view in zip(wanted, views, strict=True):
        values[output.call][output.placeholder] = view.value or ""
    async for output in in_turns(outputs, _SLICE):
        if output.placeholder not in values[output.call]:
            view = await scope.service.get(
                scope.tenant, scope.session_id, output.variable, _LOWEST_CRITERIA, timeout_s
            )
            values[output.call][output.placeholder] = view.value or ""
    return values


async def _outputs(
    scope: SessionScope, calls: Sequence[CallSpec], submitted: Sequence[SubmittedCall]
) -> list[_Output]:
    natives = {call.request_id for spec, call in zip(calls, submitted, strict=True) if spec.native}
    found: list[tuple[int, str, str, Criteria | None, Sequence[str]]] = []
    read_by: dict[str, list[str]] = {call.request_id: [] for call in submitted}  # native producers
    views: dict[str, VariableView] = {}  # each has all its consumers, which may be all the calls
    async for index, placeholder, wanted in in_turns(_placeholders(calls, submitted), _SLICE):
        spec, call = calls[index], submitted[index]
        variable_id = call.variables[placeholder]
        if variable_id not in views:
            view = scope.service.variable(scope.tenant, scope.session_id, variable_id)
            views[variable_id] = view
        view = views[variable_id]
        if view.producer != call.request_id:
            if view.producer in natives:
                read_by[call.request_id].append(view.producer)
        elif not spec.native or wanted is not None:
            found.append((index, placeholder, variable_id, wanted, view.consumers))
    readers = read_by.keys() - natives
    waiting = [name for reader in readers for name in read_by[reader]]
    while waiting:
        native = waiting.pop()
        if native not in readers:
            readers.add(native)
            waiting += read_by[native]
    return [
        _Output(index, placeholder, variable_id, wanted, readers.isdisjoint(consumers))
        for index, placeholder, variable_id, wanted, consumers in found
    ]


def _placeholders(
    calls: Sequence[CallSpec], submitted: Sequence[SubmittedCall]
) -> Iterator[tuple[int, str, Criteria | None]]:
    """(index of the call, name, criteria) of all placeholders."""
    for index, (spec, call) in enumerate(zip(calls, submitted, strict=True)):
        criteria = {parameter.name: parameter.criteria for parameter in spec.parameters}
        for placeholder in call.variables:
            yield index, placeholder, criteria.get(placeholder)


# ---- /v1/sessions/{sid}/requests: submit, cancel and fail calls.


_SINGLE_CALL_PREFIX = "requests[0]."


class _Program(NamedTuple):
    """The body of a submission. is_one: it is a single call, which has no place in a list."""

    calls: Sequence[CallSpec]
    wait: bool
    timeout_s: float
    key: str | None = None
    is_one: bool = False


async def submit(request: Request) -> Response:
    """Add a request, or a whole program of requests; with wait, reply when their values are ready.
    A request runs when a client wants a value that depends on it."""
    state, scope = ServerState.of(request), SessionScope.of(request)
    program = await read_as(request, state.max_body_bytes, _program)
    async for place, sampling in in_turns(_samplings(program.calls), _SLICE):
        place = place.removeprefix(_SINGLE_CALL_PREFIX) if program.is_one else place
        await check_grammar(state, scope.tenant, sampling, place)
    try:
        submitted = await scope.service.accept(
            scope.tenant, scope.session_id, program.calls, program.key
        )
    except (InvalidRequestError, ConflictError, NotFoundError) as error:
        if program.is_one and error.param is not None:
            error.param = error.param.removeprefix(_SINGLE_CALL_PREFIX)
        raise
    values: Sequence[Mapping[str, str] | None] = [None] * len(submitted)
    size = _CHARS_PER_CALL * len(submitted)
    if program.wait:
        try:
            async with CancelOnDisconnect(request.receive, state.stopping):
                values = await wait_for_outputs(scope, program.calls, submitted, program.timeout_s)
        except (UpstreamError, GetTimeoutError) as error:
            # The calls stay submitted, and those that do not depend on a failed one go on.
            failed = describe(error)
            return await offload_reply(
                state, scope.tenant, lambda: _failed_program(failed, submitted), size
            )
        size += sum(len(value) for found in values if found for value in found.values())

    def body() -> Any:
        return to_json(_program_of(submitted, values), defaults=False)

    return await large_response(state, scope.tenant, body, size)


def _samplings(calls: Sequence[CallSpec]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(place in the body, sampling parameters) of the calls and outputs that have any."""
    for i, call in enumerate(calls):
        if call.sampling:
            yield f"requests[{i}].", call.sampling
        for k, parameter in enumerate(call.parameters):
            if parameter.sampling:
                yield f"requests[{i}].parameters[{k}].", parameter.sampling


async def check_grammar(
    state: ServerState, tenant: str, sampling: Mapping[str, Any], place: str
) -> None:
    """Raises InvalidRequestError if the engine cannot compile the grammar of an output."""
    try:
        await state.check_grammar(tenant, sampling.get("grammar"))
    except InvalidRequestError as error:
        raise InvalidRequestError(
            error.message, f"{place}sampling.{error.param}", error.code
        ) from None


def _program_of(
    submitted: Sequence[SubmittedCall], values: Sequence[Mapping[str, str] | None]
) -> SubmittedProgram:
    pairs = zip(submitted, values, strict=True)
    return SubmittedProgram(requests=[replace(call, values=found) for call, found in pairs])


def _failed_program(failed: ApiError, submitted: Sequence[SubmittedCall]) -> Response:
    """The error, with the calls that were accepted."""
    accepted = to_json(_program_of(submitted, [None] * len(submitted)), defaults=False)
    return replace(failed, more={**failed.more, **accepted}).to_response()


async def cancel(request: Request) -> Response:
    """Cancel a request; the requests that depend on its outputs fail."""
    scope, request_id = SessionScope.of(request), request.path_params["rid"]
    scope.service.cancel(scope.tenant, scope.session_id, request_id)
    return reply(CancelledRequest(id=request_id))


async def fail(request: Request) -> Response:
    """Report that a native function has failed."""
    scope, request_id = SessionScope.of(request), request.path_params["rid"]
    body = await read_object(request, ServerState.of(request).max_body_bytes)
    message = read(FailCall, body).message
    scope.service.fail(scope.tenant, scope.session_id, request_id, message)
    return reply(FailedRequest(id=request_id))


def _one_call(fields: Mapping[str, Any]) -> _Program:
    body = read(SubmitCall, fields)
    check_call(body, "")
    return _Program([body], body.wait, body.timeout_s or _DEFAULT_WAIT_S, is_one=True)


def _program(fields: Mapping[str, Any]) -> _Program:
    if "requests" not in fields:
        return _one_call(fields)
    body = read(SubmitProgram, fields)
    for i, call in enumerate(body.requests):
        check_call(call, f"requests[{i}].")
    return _Program(body.requests, body.wait, body.timeout_s or _DEFAULT_WAIT_S, body.key)


_REQUESTS = (
    ApiRoute(
        "POST",
        "/v1/sessions/{sid}/requests",
        submit,
        REPLIES[SubmittedProgram],
        BODIES[SubmitCall],
        BODIES[SubmitProgram],
        errors={424: REPLIES[UpstreamErrorEnvelope]},
    ),
    ApiRoute("DELETE", "/v1/sessions/{sid}/requests/{rid}", cancel, REPLIES[CancelledRequest]),
    ApiRoute(
        "POST",
        "/v1/sessions/{sid}/requests/{rid}/fail",
        fail,
        REPLIES[FailedRequest],
        BODIES[FailCall],
    ),
)


# ---- The value of a semantic variable as server-sent events, while it is generated.


_PART_CHARS = 50_000
"""Characters of a value that are written in one turn of the event loop."""

# Non-ASCII stays escaped: some clients split lines at U+0085 and U+2028, which JSON allows.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class ValueStream(EventStream):
    """Events: {"delta"} for each piece, then {"value", "state"}."""

    def __init__(
        self,
        pieces: AsyncGenerator[str, None],
        result: Callable[[], VariableView],
        stopping: StopSignal,
        *,
        timeout_s: float,
        heartbeat_s: float,
    ) -> None:
        """result: returns the variable; called after the last piece.
        timeout_s: longest wait for a piece; then the stream ends with GetTimeoutError.
        heartbeat_s: of EventStream.
        """
        super().__init__(stopping, heartbeat_s)
        self._pieces = pieces
        self._result = result
        self._timeout_s = timeout_s

    async def send_all(self) -> None:
        while (piece := await self._next()) is not None:
            await self._send_text("delta", piece)
        view = self._result()
        await self._send_text("value", view.value, state=view.state.value)

    async def close(self) -> None:
        await self._pieces.aclose()

    async def _send_text(self, name: str, text: str | None, **others: str) -> None:
        """Send the event {name: text, **others}. Other tasks run between parts of a long text."""
        begin, _, end = _event({name: "", **others}).partition(b'""')
        if text is None or len(text) <= _PART_CHARS:
            await self.send_events(begin + _to_json(text).encode("ascii") + end)
            return
        await self.send_events(begin + b'"')
        for at in range(0, len(text), _PART_CHARS):
            part = _to_json(text[at : at + _PART_CHARS])
            await self.send_events(part[1:-1].encode("ascii"))
            await asyncio.sleep(0)
        await self.send_events(b'"' + end)

    async def _next(self) -> str | None:
        """The next piece, None after the last one."""
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self.with_heartbeats(anext(self._pieces, None))
        except TimeoutError:
            raise GetTimeoutError(
                f"No output within {self._timeout_s:g} s; the request can be repeated."
            ) from None


def _event(fields: dict[str, object]) -> bytes:
    return f"data: {_to_json(fields)}\n\n".encode("ascii")


# ---- /v1/sessions/{sid}/variables: values that calls read and write.


_TIMES_MS = ("ttft_ms", "tpot_ms", "deadline_ms")
_CRITERIA = ("criteria", *_TIMES_MS)
_MAX_MS = 1e12


async def create_variable(request: Request) -> Response:
    """Create a variable, with or without a value."""
    scope = SessionScope.of(request)
    body = read(CreateVariable, await _body(request))
    view = scope.service.declare(scope.tenant, scope.session_id, body.name, body.value, body.id)
    return await _respond_variable(request, view)


async def list_variables(request: Request) -> Response:
    """List the variables of a session."""
    service, tenant, session_id = SessionScope.of(request)
    views = await service.variables(tenant, session_id)
    return await _respond(request, VariableList(data=views), _size_of_variables(views))


async def retrieve_variable(request: Request) -> Response:
    """The state of a variable; with wait, when its value is ready; with stream, its value in
    pieces."""
    state, scope, query = ServerState.of(request), SessionScope.of(request), request.query_params
    check_query_names(query, tuple(_QUERY))
    wait, stream = query_flag(query, "wait"), query_flag(query, "stream")
    criteria, timeout_s = _criteria(query), query_number(query, "timeout", most=MAX_WAIT_S)
    service, variable = scope.service, (*scope[1:], request.path_params["vid"])
    if stream:
        pieces = service.stream(*variable, criteria)
        return ValueStream(
            pieces,
            lambda: service.variable(*variable),
            state.stopping,
            timeout_s=timeout_s or MAX_WAIT_S,
            heartbeat_s=state.config.stream_heartbeat,
        )
    if wait:
        async with CancelOnDisconnect(request.receive, state.stopping):
            view = await service.get(*variable, criteria, timeout_s or _DEFAULT_WAIT_S)
        return await _respond_variable(request, view)
    for name in (*_CRITERIA, "timeout"):
        if name in query:
            message = f"'{name}' needs wait=true or stream=true."
            raise InvalidRequestError(message, param=name, code="invalid_value")
    return await _respond_variable(request, service.variable(*variable))


async def set_variable(request: Request) -> Response:
    """Set the value of a variable, which can be done once."""
    scope = SessionScope.of(request)
    value = read(SetVariable, await _body(request)).value
    view = scope.service.set(scope.tenant, scope.session_id, request.path_params["vid"], value)
    return await _respond_variable(request, view)


async def want_variable(request: Request) -> Response:
    """Start the requests that a variable depends on, or make them more urgent."""
    scope = SessionScope.of(request)
    criteria = read(WantVariable, await _body(request)).criteria
    view = scope.service.want(scope.tenant, scope.session_id, request.path_params["vid"], criteria)
    return await _respond_variable(request, view)


def _criteria(query: QueryParams) -> Criteria | None:
    ttft_ms, tpot_ms, deadline_ms = (
        query_number(query, name, most=_MAX_MS, least=MIN_OBJECTIVE_MS) for name in _TIMES_MS
    )
    if "criteria" not in query and ttft_ms is tpot_ms is deadline_ms is None:
        return None
    perf = parse_perf(query.get("criteria", Perf.LATENCY.value), "criteria")
    return Criteria(
        perf=perf,
        ttft_s=_seconds(ttft_ms),
        tpot_s=_seconds(tpot_ms),
        deadline_s=_seconds(deadline_ms),
    )


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


async def _body(request: Request) -> dict[str, Any]:
    return await read_object(request, ServerState.of(request).max_body_bytes)


_MS = {"type": "number", "minimum": MIN_OBJECTIVE_MS, "maximum": _MAX_MS}
_FLAG = {"type": "boolean", "default": False}
_QUERY: Schemas = {
    "wait": {**_FLAG, "description": "Reply when its value is ready"},
    "stream": {**_FLAG, "description": "Reply with the value in pieces, as server-sent events"},
    "timeout": {
        "type": "number",
        "exclusiveMinimum": 0,
        "maximum": MAX_WAIT_S,
        "description": "Longest wait in seconds: with wait, for the value; with stream, for the "
        "next piece",
    },
    "criteria": {
        "enum": [perf.value for perf in Perf],
        "description": "How soon the value is wanted",
    },
    "ttft_ms": {**_MS, "description": "Milliseconds until its first token"},
    "tpot_ms": {**_MS, "description": "Mean milliseconds between its tokens"},
    "deadline_ms": {**_MS, "description": "Milliseconds until it is complete"},
}
_VARIABLES_PATH = "/v1/sessions/{sid}/variables"

_VARIABLES = (
    ApiRoute(
        "POST", _VARIABLES_PATH, create_variable, REPLIES[VariableView], BODIES[CreateVariable]
    ),
    ApiRoute("GET", _VARIABLES_PATH, list_variables, REPLIES[VariableList]),
    ApiRoute(
        "GET",
        f"{_VARIABLES_PATH}/{{vid}}",
        retrieve_variable,
        REPLIES[VariableView],
        query=_QUERY,
        streams=True,
        errors={424: REPLIES[UpstreamErrorEnvelope]},
    ),
    ApiRoute(
        "PUT",
        f"{_VARIABLES_PATH}/{{vid}}",
        set_variable,
        REPLIES[VariableView],
        BODIES[SetVariable],
    ),
    ApiRoute(
        "PATCH",
        f"{_VARIABLES_PATH}/{{vid}}",
        want_variable,
        REPLIES[VariableView],
        BODIES[WantVariable],
    ),
)


# ---- POST /v1/submit and /v1/get: the two request bodies of the Parrot paper (section 7).


# (our name, the paper's name), for the `param` of errors.
_PAPER_NAMES = (
    ("requests[0].", ""),
    ("template", "prompt"),
    ("parameters[", "placeholders["),
    ("].variable", "].semantic_var_id"),
    ("].role", "].in_out"),
)


async def paper_submit(request: Request) -> Response:
    """Submit a prompt with placeholders, as in the Parrot paper.

    Its session and its variables are created if they do not exist.
    """
    state, service = ServerState.of(request), _sessions_of(request)
    body = await read_as(request, state.max_body_bytes, partial(read, PaperSubmit))
    tenant = state.tenant(request)
    service.ensure(tenant, body.session_id)
    try:
        (call,) = await service.accept(tenant, body.session_id, [body.to_call()])
    except (InvalidRequestError, ConflictError, NotFoundError) as error:
        if error.param is not None:
            for ours, theirs in _PAPER_NAMES:
                error.param = error.param.replace(ours, theirs, 1)
        raise
    return reply(PaperSubmitted(request_id=call.request_id))


async def paper_get(request: Request) -> Response:
    """Wait for the value of a variable, as in the Parrot paper."""
    state, service = ServerState.of(request), _sessions_of(request)
    body = read(PaperGet, await read_object(request, state.max_body_bytes))
    criteria = None if body.criteria is None else Criteria(perf=body.criteria)
    async with CancelOnDisconnect(request.receive, state.stopping):
        view = await service.get(
            state.tenant(request),
            body.session_id,
            body.semantic_var_id,
            criteria,
            body.timeout_s or _DEFAULT_WAIT_S,
        )
    value = PaperValue(semantic_var_id=view.id, content=view.value or "")
    return await _respond(request, value, len(value.content))


_PAPER = (
    ApiRoute("POST", "/v1/submit", paper_submit, REPLIES[PaperSubmitted], BODIES[PaperSubmit]),
    ApiRoute(
        "POST",
        "/v1/get",
        paper_get,
        REPLIES[PaperValue],
        BODIES[PaperGet],
        errors={424: REPLIES[UpstreamErrorEnvelope]},
    ),
)


ROUTES = (*_SESSIONS, *_REQUESTS, *_VARIABLES, *_PAPER)
