"""/v1/messages and /v1/messages/count_tokens, as Anthropic's clients expect them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bros.server.errors import MESSAGES_PATH, ApiError
from bros.server.http import json_response, read_held, validate
from bros.server.messages.call import MessageCall
from bros.server.messages.events import MessageWriter
from bros.server.messages.schema import CountTokens, CreateMessage, MessageObject, TokenCount
from bros.server.openai.exchange import Exchange, respond
from bros.server.openai.routes import REQUEST_HEADERS
from bros.server.openai.stream import AnswerStream, ChunkFrame
from bros.server.operations.openapi import ApiRoute
from bros.server.sessions.joining import join, metadata_of
from bros.server.state import ServerState


async def create_message(request: Request) -> Response:
    """Generate the next message of a conversation; with stream, as server-sent events."""
    state = ServerState.of(request)
    arrival_s = state.arrival_s(request)
    (metadata, call), held = await read_held(
        request,
        state.max_body_bytes,
        lambda fields: (metadata_of(fields), MessageCall(state, fields)),
    )
    session_call, due_ms = join(request, metadata, call)
    return await respond(request, call, arrival_s, held, session_call, due_ms, MessageExchange)


class MessageExchange(Exchange):
    """One message."""

    def __init__(self, state: ServerState, call: MessageCall, **options: Any) -> None:
        """options: of Exchange."""
        super().__init__(state, call, **options)
        self._message_call = call

    def stream(self) -> AnswerStream:
        call = self._message_call
        writer = call.writer(ChunkFrame(call.chunk_kind, self.header, include_usage=False))
        writer.usage = self.answer.usage
        state = self._state
        heartbeat_s = state.config.stream_heartbeat
        return _MessageStream(self.answer, writer, state.stopping, heartbeat_s, self._offload)


class _MessageStream(AnswerStream):
    done = b""
    _writer: MessageWriter

    def failed(self, failure: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % failure.to_json(MESSAGES_PATH).encode()

    def refused(self, failure: ApiError) -> Response:
        return failure.to_response(MESSAGES_PATH)


async def count_tokens(request: Request) -> Response:
    """The number of tokens of the prompt that a request to /v1/messages would have."""
    state, tenant = ServerState.of(request), ServerState.tenant(request)
    call, _ = await read_held(
        request, state.max_body_bytes, lambda fields: MessageCall(state, _prompt_only(fields))
    )
    (prompt,) = await call.prompts(tenant)
    return json_response(TokenCount(input_tokens=len(prompt)))


def _prompt_only(fields: Mapping[str, Any]) -> dict[str, Any]:
    validate(CountTokens, fields)
    given = {name: fields[name] for name in CountTokens.model_fields if name in fields}
    return {**given, "max_tokens": 1}


ROUTES = (
    ApiRoute(
        "POST",
        MESSAGES_PATH,
        create_message,
        MessageObject,
        CreateMessage,
        headers=REQUEST_HEADERS,
        streams=True,
    ),
    ApiRoute("POST", f"{MESSAGES_PATH}/count_tokens", count_tokens, TokenCount, CountTokens),
)
