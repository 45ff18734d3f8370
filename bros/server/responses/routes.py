"""/v1/responses: create, retrieve, cancel and delete responses; their input items."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bros.batch.objects import StoreFullError
from bros.batch.responses import ResponseStatus, StoredResponse, check_conversation
from bros.core.errors import InvalidRequestError, NotFoundError, PromptTooLongError
from bros.core.request import NO_HINTS, Hints
from bros.core.tenants import QuotaHold, Resource
from bros.server.errors import ApiError, renaming_fields
from bros.server.http import (
    check_query_names,
    held_output,
    json_pieces,
    json_response,
    json_size,
    offload_reply,
    pieces_response,
    query_choice,
    query_flag,
    query_int,
    read_held,
    validate,
)
from bros.server.openai.calls import BEST_EFFORT, slo_of
from bros.server.openai.exchange import Exchange, respond, system_fingerprint
from bros.server.openai.routes import REQUEST_HEADERS
from bros.server.openai.stream import AnswerStream, ChunkFrame, EventStream, Offload
from bros.server.operations.openapi import ApiRoute, Schemas
from bros.server.responses.call import ResponseCall
from bros.server.responses.events import (
    Events,
    LiveResponse,
    ResponseWriter,
    background_events,
)
from bros.server.responses.items import Item, references, response_id_of
from bros.server.responses.running import RunningResponse
from bros.server.responses.schema import (
    CountInputTokens,
    CreateResponse,
    DeletedResponse,
    InputItemList,
    InputTokens,
    ResponseObject,
)
from bros.server.sessions.joining import join, metadata_of
from bros.server.state import Jobs, ServerState
from bros.text.generation import TextDelta

# ---- POST /v1/responses


_PIN_S = 60.0
"""How long the KV of a conversation that goes on stays pinned: a tool or a user answers by then."""

_WINDOWS_S: Mapping[str | None, float] = {"2h": 7200.0, "8h": 28800.0}
_WINDOW_S = 86400.0


async def create_response(request: Request) -> Response:
    """Generate a response; with stream, as server-sent events."""
    state = ServerState.of(request)
    arrival_s = state.arrival_s(request)
    metadata, call, held = await _read(request, lambda fields: fields)
    if call.given.background:
        tenant = state.tenant(request)
        tokens = await _check_prompt(state, call, tenant)
        state.accounts.begin_request(tenant, tokens)
        try:
            response = await _begin(request, call)
        except BaseException:
            state.accounts.undo_request(tenant, tokens)
            raise
        held.release()
        return response
    session_call, due_ms = join(request, metadata, call)
    make = partial(ResponseExchange, jobs=Jobs.of(request))
    return await respond(request, call, arrival_s, held, session_call, due_ms, make)


async def _check_prompt(state: ServerState, call: ResponseCall, tenant: str) -> int:
    """Tokens of the prompt. Raises what a background response would fail of when it runs, so that
    its client knows."""
    with renaming_fields(call.field_names):
        await state.check_grammar(tenant, call.sampling.grammar, BEST_EFFORT.service_class)
    (prompt,) = await call.prompts(tenant)
    limit = state.engine.info.max_model_len
    if len(prompt) >= limit:
        raise PromptTooLongError(len(prompt), limit, call.param)
    return len(prompt)


async def _read(
    request: Request, checked: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[Mapping[str, str], ResponseCall, QuotaHold]:
    """(metadata, call, what it counts as) of the body, with what it refers to: items, and a
    conversation.

    checked: returns the fields that count, and raises InvalidRequestError for wrong ones.
    """
    state = ServerState.of(request)

    def make(fields: dict[str, Any]) -> tuple[Mapping[str, str], ResponseCall | dict[str, Any]]:
        metadata, fields = metadata_of(fields), checked(fields)
        refers = bool(references(fields.get("input")))
        return metadata, fields if refers else ResponseCall(state, fields)

    (metadata, made), held = await read_held(request, state.max_body_bytes, make)
    call = made if isinstance(made, ResponseCall) else await _follow_references(request, made)
    await _continue(request, call)
    return metadata, call, held


async def _follow_references(request: Request, fields: Mapping[str, Any]) -> ResponseCall:
    """The call of a body whose input refers to items. Raises NotFoundError for an unknown one."""
    jobs, state = Jobs.of(request), ServerState.of(request)
    tenant, now = state.tenant(request), state.clock.unix_time()
    state.accounts.check_cpu(tenant)  # the responses may have 16 MB

    def load() -> ResponseCall:
        wanted = references(fields["input"])
        items = jobs.responses.outputs(tenant, map(response_id_of, wanted.values()), now)
        found = {item["id"]: item for item in items}
        sizes = {item_id: json_size(item) for item_id, item in found.items()}
        num_bytes = 0  # of the copies: an item may be named often
        for param, item_id in wanted.items():
            num_bytes += sizes.get(item_id, 0)
            if item_id not in found:
                message = f"There is no item {item_id[:100]!r} in the output of a stored response."
                raise NotFoundError(message, param, "item_not_found")
        check_conversation(len(wanted), num_bytes, "input")
        return ResponseCall(state, fields, referenced=found)

    return await jobs.read(tenant, load)


async def _continue(request: Request, call: ResponseCall) -> None:
    """Put the conversation that it goes on from before the call's messages."""
    previous_id = call.given.previous_response_id
    if previous_id is None:
        return
    jobs, state = Jobs.of(request), ServerState.of(request)
    tenant, now = state.tenant(request), state.clock.unix_time()

    state.accounts.check_cpu(tenant)  # a conversation may have 16 MB

    def load() -> None:
        call.continue_from(jobs.responses.conversation(tenant, previous_id, now))

    await jobs.read(tenant, load)


class ResponseExchange(Exchange):
    """One response, which is stored before its last event or the reply is sent."""

    def __init__(
        self, state: ServerState, call: ResponseCall, *, jobs: Jobs, **options: Any
    ) -> None:
        """options: of Exchange."""
        self._keeps = call.given.store is not False
        goes_on = call.given.previous_response_id is not None or bool(call.given.tools)
        hints = Hints(keep_s=_PIN_S) if goes_on and self._keeps else NO_HINTS
        super().__init__(state, call, hints=hints, **options)
        self._response_call = call
        self._jobs = jobs

    async def start(self) -> None:
        """Raises also StoreFullError: else the response would be generated in vain."""
        if self._keeps and self._jobs.responses.is_full:
            raise StoreFullError(
                "The disk of the store is full, so the response could not be stored; send "
                '"store": false, or delete what is not needed.'
            )
        await super().start()

    async def respond(self) -> Response:
        choices, size = await self._collected()
        call, state, tenant = self._response_call, self._state, self._tenant

        def end() -> LiveResponse:
            return call.end(self.header, choices, self.answer)

        response = await offload_reply(state, tenant, end, size)
        choices.clear()
        await self.keep(response)
        size = response.size
        return await pieces_response(state, tenant, response.pieces, size, kept_bytes=size)

    def stream(self) -> AnswerStream:
        call = self._response_call
        writer = call.writer(ChunkFrame(call.chunk_kind, self.header, include_usage=False))
        writer.hold = self.answer.held_output.add
        return _ResponseStream(self, writer, self._state, self._tenant, self._offload)

    async def keep(self, response: LiveResponse) -> None:
        """Store a response that has ended, unless the client does not want that."""
        if not self._keeps:
            return
        state, call, now = self._state, self._response_call, self._state.clock.unix_time()

        def put() -> None:
            stored = StoredResponse(
                id=response.id,
                tenant=self._tenant,
                served_model=state.model_name,
                previous_id=call.given.previous_response_id,
                status=ResponseStatus(response.status),
                background=False,
                created_at=response.created_at,
                expires_at=int(now + state.config.response_ttl),
                input=call.input_json,
                body=response.to_json(),
            )
            self._jobs.responses.put(stored, state.accounts.limits(self._tenant))

        await self._jobs.io(self._tenant, put)


class _ResponseStream(AnswerStream):
    done = b""

    def __init__(
        self,
        exchange: ResponseExchange,
        writer: ResponseWriter,
        state: ServerState,
        tenant: str,
        offload: Offload,
    ) -> None:
        heartbeat_s = state.config.stream_heartbeat
        super().__init__(exchange.answer, writer, state.stopping, heartbeat_s, offload)
        self._exchange = exchange
        self._response_writer = writer
        self._state = state
        self._tenant = tenant

    async def send_all(self) -> None:
        await super().send_all()
        writer = self._response_writer
        await self._send_made(writer.close(self._answer.usage()))
        await self.with_heartbeats(self._exchange.keep(writer.response))
        await self.close()
        await self._send_made(writer.last())

    def ending(self) -> bytes:
        return b""

    def may_forward(self) -> bool:
        return not self._response_writer.is_large

    async def send_failed(self, failure: ApiError) -> None:
        await self._send_made(self._response_writer.fail(failure))
        await self.send_events(b"", more=False)

    async def _written(self, deltas: Sequence[TextDelta]) -> bytes:
        events = await super()._written(deltas)
        if not self._response_writer.is_large:
            return events
        await self._send_made(events)
        return b""

    async def _send_made(self, events: bytes) -> None:
        """Send events that the writer has returned, and what it has not returned because it is
        large."""
        if events:
            await self.send_events(events)
        if self._response_writer.is_large:
            await self.send_pieces(self._state, self._tenant, self._response_writer.large())


async def _begin(request: Request, call: ResponseCall) -> Response:
    """Store a background response, which a BackgroundRunner will run."""
    state, jobs, given = ServerState.of(request), Jobs.of(request), call.given
    tenant, now = state.tenant(request), state.clock.unix_time()
    slo = slo_of(call.body, request.headers, state.engine.info.default_slo)
    options = given.background_options
    window = None if options is None else options.completion_window
    window_s = _WINDOWS_S.get(window, _WINDOW_S)
    deadline_at = now + min(window_s, slo.deadline_s or window_s)
    response = call.response(
        state.ids.new("resp", "_"),
        created_at=int(now),
        service_tier=BEST_EFFORT.name,
        system_fingerprint=system_fingerprint(state.engine.info),
        status="queued",
    )

    def put() -> str:
        body = response.to_json()
        stored = StoredResponse(
            id=response.id,
            tenant=tenant,
            served_model=state.model_name,
            previous_id=given.previous_response_id,
            status=ResponseStatus.QUEUED,
            background=True,
            created_at=response.created_at,
            expires_at=int(deadline_at + state.config.response_ttl),
            deadline_at=deadline_at,
            input=call.input_json,
            body=body,
            request=call.request,
        )
        jobs.responses.put(stored, state.accounts.limits(tenant))
        return body

    body = await jobs.io(tenant, put)
    jobs.background.wake()
    if given.stream:
        return BackgroundStream(request, response.id, after=-1)
    return Response(body, media_type="application/json")


# ---- GET /v1/responses/{id}, its cancellation, and DELETE


_NO_EVENT = b": no more events\n\n"


class BackgroundStream(EventStream):
    """The events of a background response. It goes on if the client leaves.

    Where this process runs the response, its events come as its output does; else those of its
    output come when it has ended.
    """

    done = b""

    def __init__(self, request: Request, response_id: str, *, after: int) -> None:
        """after: number of the last event that the client has."""
        state = ServerState.of(request)
        super().__init__(state.stopping, state.config.stream_heartbeat)
        self._request = request
        self._state = state
        self._jobs = Jobs.of(request)
        self._tenant = state.tenant(request)
        self._id = response_id
        self._after = after

    async def send_all(self) -> None:
        jobs, waits = self._jobs, self._state.accounts.hold(self._tenant, Resource.WAITS)
        look, runs_here = self._look, lambda: jobs.running.get(self._id) is not None
        shown = False
        with waits, jobs.watched.followed(self._tenant, self._id, look, runs_here) as watched:
            while not (stored := await self.with_heartbeats(watched.stored())).status.is_final:
                version = watched.version
                running = jobs.running.get(self._id)
                if running is not None:
                    await self._follow(running)
                elif not shown:
                    response = await self._read(stored)
                    await self._send_those(background_events(response, self._after, runs=False))
                shown = True
                await self.with_heartbeats(watched.changed(version))
        with held_output(self._request, len(stored.body)):
            response = await self._read(stored)
            await self._send_those(background_events(response, self._after, runs=True))
        if not self._begun:
            await self.send_events(_NO_EVENT)

    async def close(self) -> None:
        return

    async def _follow(self, running: RunningResponse) -> None:
        """Send events of the output as it comes."""
        while not running.over:
            version = running.version
            await self._send_those(running.events(self._after))
            await self.with_heartbeats(running.changed(version))

    async def _look(self) -> StoredResponse:
        """The response as it is stored."""
        now = self._state.clock.unix_time()
        return await self._jobs.read(
            self._tenant, self._jobs.responses.get, self._tenant, self._id, now
        )

    async def _read(self, stored: StoredResponse) -> LiveResponse:
        def read() -> LiveResponse:
            return LiveResponse.of(stored.to_object())

        return await offload_reply(self._state, self._tenant, read, len(stored.body))

    async def _send_those(self, events: Events) -> None:
        self._after = events.last
        if events.large is not None:
            await self.send_pieces(self._state, self._tenant, events.large)
        elif events.data:
            await self.send_events(events.data)


async def retrieve_response(request: Request) -> Response:
    """A stored response. A background response can be streamed, from any of its events on."""
    query = request.query_params
    check_query_names(query, _RETRIEVE_NAMES)
    streams = query_flag(query, "stream")
    after = query_int(query, "starting_after", -1, low=0, high=_MAX_EVENT)
    if not streams and "starting_after" in query:
        raise InvalidRequestError(
            "'starting_after' needs 'stream' to be true.", "starting_after", "invalid_value"
        )
    if query_flag(query, "include_obfuscation"):
        raise InvalidRequestError(
            "'include_obfuscation': only false is supported by this server.",
            "include_obfuscation",
            "unsupported_value",
        )
    stored = await _find(request)
    if streams:
        if not stored.background:
            raise InvalidRequestError(
                "Only a response that was created with background=true can be streamed.",
                "stream",
                "invalid_response_status",
            )
        return BackgroundStream(request, stored.id, after=after)
    return await _reply(request, stored)


async def cancel_response(request: Request) -> Response:
    """Cancel a background response. One that has ended stays as it is."""
    state, jobs = ServerState.of(request), Jobs.of(request)
    now, tenant = state.clock.unix_time(), state.tenant(request)
    response_id = request.path_params["id"]
    stored = await jobs.io(tenant, jobs.responses.cancel, tenant, response_id, now)
    jobs.background.wake()
    return await _reply(request, stored)


async def delete_response(request: Request) -> Response:
    """Delete a stored response. A background response that has not ended is aborted."""
    state, jobs = ServerState.of(request), Jobs.of(request)
    now, tenant = state.clock.unix_time(), state.tenant(request)
    response_id = request.path_params["id"]
    await jobs.io(tenant, jobs.responses.delete, tenant, response_id, now)
    jobs.background.wake()
    return json_response(DeletedResponse(id=response_id))


async def _find(request: Request) -> StoredResponse:
    state, jobs = ServerState.of(request), Jobs.of(request)
    now, tenant = state.clock.unix_time(), state.tenant(request)
    return await jobs.read(tenant, jobs.responses.get, tenant, request.path_params["id"], now)


async def _reply(request: Request, stored: StoredResponse) -> Response:
    state, size = ServerState.of(request), len(stored.body)

    def write() -> Iterator[bytes]:
        if not stored.is_body_complete:
            yield from json_pieces(stored.to_object())
            return
        for begin in range(0, size, _SLICE):
            yield stored.body[begin : begin + _SLICE].encode("ascii")

    return await pieces_response(state, state.tenant(request), write, size, kept_bytes=size)


_SLICE = 2**16


# ---- GET /v1/responses/{id}/input_items, POST /v1/responses/input_tokens


_ITEMS_PAGE, _MAX_ITEMS_PAGE = 20, 100


async def list_input_items(request: Request) -> Response:
    """What a response was generated from: the items of the conversation before it, and its own."""
    state, jobs, query = ServerState.of(request), Jobs.of(request), request.query_params
    limit = query_int(query, "limit", _ITEMS_PAGE, low=1, high=_MAX_ITEMS_PAGE)
    newest_first = query_choice(query, "order", ("desc", "asc")) == "desc"
    tenant, now = state.tenant(request), state.clock.unix_time()
    response_id = request.path_params["id"]
    state.accounts.check_cpu(tenant)  # a conversation may have 16 MB

    def load() -> tuple[dict[str, Any], int]:
        turns = jobs.responses.turns(tenant, response_id, now)
        items = [item for turn in turns[:-1] for item in (*turn.input, *turn.output)]
        items = _with_unique_ids([*items, *turns[-1].input])
        if newest_first:
            items.reverse()
        begin = 0
        after = query.get("after")
        if after is not None:
            found = (i for i, item in enumerate(items, start=1) if item["id"] == after)
            begin = next(found, 0)
            if not begin:
                message = f"'after': there is no item {after[:100]!r}."
                raise NotFoundError(message, param="after", code="not_found")
        page = items[begin : begin + limit]
        shown = InputItemList(
            data=[],
            first_id=page[0]["id"] if page else None,
            last_id=page[-1]["id"] if page else None,
            has_more=begin + limit < len(items),
        )
        return {**shown.model_dump(), "data": page}, json_size(page)

    value, size = await jobs.read(tenant, load)
    make = partial(json_pieces, value)
    return await pieces_response(state, tenant, make, size, kept_bytes=size)


def _with_unique_ids(items: Sequence[Item]) -> list[Item]:
    """The items. One with the id of an earlier one, as clients send items back, gets another id,
    which is the same in each page."""
    found: list[Item] = []
    counts: dict[str, int] = {}
    for item in items:
        count = counts[item["id"]] = counts.get(item["id"], 0) + 1
        found.append(item if count == 1 else {**item, "id": f"{item['id']}.{count}"})
    return found


async def count_input_tokens(request: Request) -> Response:
    """The number of tokens of the prompt that a request to /v1/responses would have."""
    _, call, _ = await _read(request, _prompt_only)
    prompts = await call.prompts(ServerState.tenant(request))
    return json_response(InputTokens(input_tokens=len(prompts[0])))


def _prompt_only(fields: Mapping[str, Any]) -> dict[str, Any]:
    validate(CountInputTokens, fields)
    return {name: fields[name] for name in CountInputTokens.model_fields if name in fields}


_MAX_EVENT = 10**9 - 1
_RETRIEVE_NAMES = ("stream", "starting_after", "include", "include[]", "include_obfuscation")
_RETRIEVE_QUERY: Schemas = {
    "stream": {"type": "boolean", "default": False, "description": "As server-sent events"},
    "starting_after": {
        "type": "integer",
        "minimum": 0,
        "description": "sequence_number of the last event that is not wanted",
    },
    "include": {"type": "string", "description": "No effect"},
    "include_obfuscation": {"const": False, "description": "true is not supported"},
}
_ITEMS_QUERY: Schemas = {
    "after": {"type": "string", "description": "The last id of the previous page"},
    "limit": {
        "type": "integer",
        "minimum": 1,
        "maximum": _MAX_ITEMS_PAGE,
        "default": _ITEMS_PAGE,
        "description": "Most items on the page",
    },
    "order": {"enum": ["desc", "asc"], "description": "The newest or the oldest first"},
    "include": {"type": "string", "description": "No effect"},
}

ROUTES = (
    ApiRoute(
        "POST",
        "/v1/responses",
        create_response,
        ResponseObject,
        CreateResponse,
        headers=REQUEST_HEADERS,
        streams=True,
    ),
    ApiRoute(
        "POST", "/v1/responses/input_tokens", count_input_tokens, InputTokens, CountInputTokens
    ),
    ApiRoute(
        "GET",
        "/v1/responses/{id}",
        retrieve_response,
        ResponseObject,
        query=_RETRIEVE_QUERY,
        streams=True,
    ),
    ApiRoute("DELETE", "/v1/responses/{id}", delete_response, DeletedResponse),
    ApiRoute("POST", "/v1/responses/{id}/cancel", cancel_response, ResponseObject),
    ApiRoute(
        "GET", "/v1/responses/{id}/input_items", list_input_items, InputItemList, query=_ITEMS_QUERY
    ),
)
