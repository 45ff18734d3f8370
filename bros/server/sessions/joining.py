"""Requests of plain OpenAI clients that belong to a session: recorded as calls of its graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request

from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.request import FinishReason
from bros.semantic.core.matching import MAX_INPUTS, PlainPrompt
from bros.semantic.schema import MAX_NAME_CHARS
from bros.semantic.service.runner import PlainCall
from bros.server.openai.calls import Call, to_milliseconds
from bros.server.openai.schema import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    GenerationRequest,
)
from bros.server.operations.metrics import RequestObserver
from bros.server.state import ServerState
from bros.text.answers import ParsedAnswer
from bros.text.generation import TextDelta

SESSION_HEADERS = ("x-bros-session", "x-dynamo-session-id")
"""Each names the session of a request; the body's metadata may name it instead."""

_NODE_HEADERS = ("x-bros-node",)
_INPUT_HEADERS = ("x-bros-inputs",)
_SESSION_FIELD, _NODE_FIELD, _INPUT_FIELD = "bros_session", "bros_node", "bros_inputs"
_DEADLINE_FIELD = "bros_deadline_ms"
_FIELDS = (_SESSION_FIELD, _NODE_FIELD, _INPUT_FIELD, _DEADLINE_FIELD)
_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:@~-]{0,127}")


def metadata_of(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a body's metadata say about sessions, so that nothing else of the body is kept."""
    metadata = fields.get("metadata")
    if not isinstance(metadata, dict):
        return {}
    found = {name: metadata[name] for name in _FIELDS if metadata.get(name) is not None}
    # Of what is refused later only the type counts.
    return {name: value if isinstance(value, str) else False for name, value in found.items()}


def join(
    request: Request, metadata: Mapping[str, Any], call: Call
) -> tuple[PlainCall | None, float | None]:
    """Add a request to the session that a header or the body's metadata names. Returns its place
    there and its deadline in milliseconds, each None if there is none.

    metadata: see metadata_of.
    Raises InvalidRequestError for an invalid id or name, and what SessionService.join raises.
    """
    state = ServerState.of(request)
    if state.sessions is None:
        return None, None
    session_id, named_by = _find(request, metadata, SESSION_HEADERS, _SESSION_FIELD)
    if session_id is None:
        return None, None
    if not _ID.fullmatch(session_id):
        message = f"'{named_by}' must match {_ID.pattern}."
        raise InvalidRequestError(message, param=named_by, code="invalid_value")
    node, param = _find(request, metadata, _NODE_HEADERS, _NODE_FIELD)
    if node is not None and len(node) > MAX_NAME_CHARS:
        message = f"'{param}' must have at most {MAX_NAME_CHARS} characters."
        raise InvalidRequestError(message, param=param, code="invalid_value")
    prompt = _prompt(call.body, _inputs(request, metadata))
    due_ms = _deadline_ms(metadata)  # an invalid one is refused before the session is created
    try:
        session_call = state.sessions.join(
            state.tenant(request), session_id, node or "", id_prefix=call.id_prefix, prompt=prompt
        )
    except NotFoundError as error:
        raise NotFoundError(str(error), named_by, error.code) from None
    return session_call, due_ms


def _inputs(request: Request, metadata: Mapping[str, Any]) -> Sequence[str]:
    """The ids of earlier responses that the prompt contains, as the client says."""
    listed, param = _find(request, metadata, _INPUT_HEADERS, _INPUT_FIELD)
    call_ids = [call_id.strip() for call_id in (listed or "").split(",") if call_id.strip()]
    if len(call_ids) > MAX_INPUTS:
        message = f"'{param}' must have at most {MAX_INPUTS} ids, got {len(call_ids)}."
        raise InvalidRequestError(message, param=param, code="invalid_value")
    for call_id in call_ids:
        if not _ID.fullmatch(call_id):
            message = f"'{param}' must be ids with commas between them, got {call_id[:50]!r}."
            raise InvalidRequestError(message, param=param, code="invalid_value")
    return call_ids


def _prompt(body: GenerationRequest, inputs: Sequence[str]) -> PlainPrompt:
    if isinstance(body, ChatCompletionRequest):
        contents = [(message.role, _text(message)) for message in body.messages]
        return PlainPrompt(
            texts=[text for role, text in contents if role != "assistant"],
            replies=[text for role, text in contents if role == "assistant"],
            inputs=inputs,
        )
    prompts = body.prompt if isinstance(body, CompletionRequest) else ()
    texts = [prompts] if isinstance(prompts, str) else prompts
    return PlainPrompt(texts=[text for text in texts if isinstance(text, str)], inputs=inputs)


def _text(message: ChatMessage) -> str:
    """What the session knows of a message: its text, and its calls as in SessionObserver."""
    calls = [
        _call_text(call.function.name, call.function.arguments) for call in message.tool_calls or ()
    ]
    return (message.content or "") + "".join(calls)


def _call_text(name: str, arguments: str) -> str:
    return f"\n{name}({arguments})"


def _find(
    request: Request, metadata: Mapping[str, Any], headers: Sequence[str], field: str
) -> tuple[str | None, str]:
    """(value, where it was found). Headers take precedence over metadata."""
    for header in headers:
        if header in request.headers:
            return request.headers[header], header
    return _value(metadata, field), f"metadata.{field}"


def _value(metadata: Mapping[str, Any], field: str) -> str | None:
    value, param = metadata.get(field), f"metadata.{field}"
    if value is not None and not isinstance(value, str):
        message = f"'{param}' must be a string."
        raise InvalidRequestError(message, param=param, code="invalid_type")
    return value


def _deadline_ms(metadata: Mapping[str, Any]) -> float | None:
    text = _value(metadata, _DEADLINE_FIELD)
    param = f"metadata.{_DEADLINE_FIELD}"
    return None if text is None else to_milliseconds(text, f"'{param}'", param)


class SessionObserver:
    """Passes the deltas of a request to its session and to the metrics' observer. The session gets
    the text of the first choice, and after it the tool calls."""

    def __init__(
        self,
        session_call: PlainCall,
        observer: RequestObserver,
        *,
        num_choices: int,
        prompt_tokens: int,
    ) -> None:
        self._session_call = session_call
        self._observer = observer
        self._prompt_tokens = prompt_tokens
        self._open = num_choices
        self._begun = False
        self._texts: list[str] = []
        self._answer = ParsedAnswer()
        self._output_tokens = 0
        self._cached_tokens = 0

    def on_delta(self, delta: TextDelta) -> None:
        self._observer.on_delta(delta)
        self._add(delta.index, delta.text, len(delta.token_ids))
        if delta.index == 0:
            self._cached_tokens = delta.cached_tokens
            self._answer.add(delta.parts)
        if delta.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            self._session_call.failed(delta.error or "The engine ended the request.")
        elif delta.finish_reason is not None:
            self._open -= 1
            if not self._open:
                calls = [_call_text(call.name, call.arguments) for call in self._answer.calls]
                self._session_call.finished(
                    "".join([*self._texts, *calls]),
                    prompt_tokens=self._prompt_tokens,
                    cached_tokens=self._cached_tokens,
                    output_tokens=self._output_tokens,
                )

    def on_text(self, index: int, text: str, num_tokens: int) -> None:
        self._observer.on_text(index, text, num_tokens)
        self._add(index, text, num_tokens)

    def _add(self, index: int, text: str, num_tokens: int) -> None:
        self._output_tokens += num_tokens
        if index == 0:
            self._texts.append(text)
        if not self._begun and num_tokens:
            self._begun = True
            self._session_call.first_token()

    def on_error(self, message: str) -> None:
        self._observer.on_error(message)
        self._session_call.failed(message)

    def close(self) -> None:
        self._observer.close()
        self._session_call.cancelled()
