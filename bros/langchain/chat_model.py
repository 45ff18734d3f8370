"""LangChain's chat model over /v1/chat/completions."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import httpx
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, OutputTokenDetails, UsageMetadata
from langchain_core.messages.tool import (
    ToolCall,
    invalid_tool_call,
    tool_call,
    tool_call_chunk,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import ConfigDict, SecretStr, field_validator

from bros.core.errors import BrosError
from bros.core.sse import EventReader, read_events
from bros.semantic.client.http_backend import read_error, read_error_response
from bros.semantic.errors import ServerUnreachableError

_CONNECT_TIMEOUT_S = 10.0
_CALL_ID = re.compile(r"[\w-]{1,128}", re.ASCII)  # other models' messages may have other ids
_MAX_CALL_IDS = 64  # of x-bros-inputs
_STREAM_OPTIONS = {"include_usage": True}


class BrosChat(BaseChatModel):
    """A chat model behind /v1/chat/completions of a bros server.

    `bind_tools` and `with_structured_output` work; reasoning is in
    `additional_kwargs["reasoning_content"]` of the answers.

    url: URL of the server, with or without /v1.
    session: id of the session that records the requests; an id of your own opens a new session.
        Answers of the session that a prompt contains, as messages or within texts, are the inputs
        of its request in the graph.
    node: name of the requests in the session's graph.
    service_tier: "flex" for best-effort requests.
    slo: objectives such as {"ttft_ms": 300}.
    timeout: seconds without received data after which a request fails.
    extra_body: further fields of the request body.

    Raises pydantic's ValidationError, a ValueError, for unknown arguments and for those that no
    header can carry.
    """

    # LangChain's default ignores unknown arguments, so that a misspelled one has no effect. Errors
    # would show invalid keys.
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    url: str = "http://localhost:8000"
    model: str | None = None
    api_key: SecretStr | None = None
    session: str | None = None
    node: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    service_tier: str | None = None
    slo: dict[str, float] | None = None
    timeout: float = 600.0
    extra_body: dict[str, Any] | None = None

    @field_validator("session", "node", "api_key")
    @classmethod
    def _fits_a_header(cls, value: str | SecretStr | None) -> str | SecretStr | None:
        text = value.get_secret_value() if isinstance(value, SecretStr) else value
        if text is not None and not (text.isascii() and text.isprintable()):
            raise ValueError("a header carries it, so it must be printable ASCII characters")
        return value

    @property
    def _llm_type(self) -> str:
        return "bros"

    @property
    def _identifying_params(self) -> Mapping[str, Any]:
        return {"url": self.url, "model": self.model, "session": self.session}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """The model with tools that it may call.

        tool_choice: as in OpenAI's API; or "any" or True: it must call one; or the name of one.
        """
        definitions = [convert_to_openai_tool(tool) for tool in tools]
        choice: str | dict[str, Any] | None
        if tool_choice in ("any", True):
            choice = "required"
        elif isinstance(tool_choice, str) and tool_choice not in ("none", "auto", "required"):
            choice = {"type": "function", "function": {"name": tool_choice}}
        else:
            choice = tool_choice or None  # type: ignore[assignment]
        return self.bind(tools=definitions, tool_choice=choice, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = _encoded(self._body(messages, stop, kwargs))
        with httpx.Client(**self._client_options(messages)) as http, _readable_errors(self.url):
            return _result(http.post("chat/completions", content=body))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        body = _encoded(self._body(messages, stop, kwargs))
        with _readable_errors(self.url):
            async with httpx.AsyncClient(**self._client_options(messages)) as http:
                return _result(await http.post("chat/completions", content=body))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        body = _encoded(self._stream_body(messages, stop, kwargs))
        with (
            _readable_errors(self.url),
            httpx.Client(**self._client_options(messages)) as http,
            http.stream("POST", "chat/completions", content=body) as answer,
        ):
            if not answer.is_success:
                answer.read()
                raise read_error_response(answer)
            events, chunks = EventReader(), _ChunkReader()
            received = (event for piece in answer.iter_bytes() for event in events.feed(piece))
            for event in received:
                if (chunk := chunks.read(event.data)) is not None:
                    if run_manager is not None:
                        run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        body = _encoded(self._stream_body(messages, stop, kwargs))
        with _readable_errors(self.url):
            async with (
                httpx.AsyncClient(**self._client_options(messages)) as http,
                http.stream("POST", "chat/completions", content=body) as answer,
            ):
                if not answer.is_success:
                    await answer.aread()
                    raise read_error_response(answer)
                chunks = _ChunkReader()
                async for data in read_events(answer.aiter_bytes()):
                    if (chunk := chunks.read(data)) is not None:
                        if run_manager is not None:
                            await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                        yield chunk

    @cached_property
    def _ssl(self) -> ssl.SSLContext:
        """Cached, because creating it loads all CA certificates."""
        return ssl.create_default_context()

    def _client_options(self, messages: Sequence[BaseMessage]) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key.get_secret_value()}"
        if self.session is not None:
            headers["x-bros-session"] = self.session
            if call_ids := _call_ids(messages):
                headers["x-bros-inputs"] = ",".join(call_ids)
        if self.node is not None:
            headers["x-bros-node"] = self.node
        return {
            "base_url": self.url.rstrip("/").removesuffix("/v1") + "/v1/",
            "headers": headers,
            "timeout": httpx.Timeout(self.timeout, connect=_CONNECT_TIMEOUT_S),
            "verify": self._ssl,
        }

    def _stream_body(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        # The caller's own stream_options take precedence.
        body = {"stream_options": _STREAM_OPTIONS, **self._body(messages, stop, kwargs)}
        return {**body, "stream": True}

    def _body(
        self, messages: Sequence[BaseMessage], stop: Sequence[str] | None, kwargs: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = {
            "model": self.model,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "seed": self.seed,
            "service_tier": self.service_tier,
            "slo": self.slo,
            "stop": stop,
            **(self.extra_body or {}),
            **{name: value for name, value in kwargs.items() if not name.startswith("ls_")},
        }
        given = {name: value for name, value in own.items() if value is not None}
        return {"messages": convert_to_openai_messages(messages), **given}


def _encoded(body: Mapping[str, Any]) -> bytes:
    """A request body as JSON. Raises TypeError or ValueError for what JSON cannot hold, which is a
    mistake of the caller and not of the server."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def _result(answer: httpx.Response) -> ChatResult:
    if not answer.is_success:
        raise read_error_response(answer)
    body = answer.json()
    choice = body["choices"][0]
    usage = body.get("usage") or {}
    reply = choice["message"]
    calls = _calls(reply.get("tool_calls") or ())
    message = AIMessage(
        reply["content"] or "",
        tool_calls=[call for call in calls if call["type"] == "tool_call"],
        invalid_tool_calls=[call for call in calls if call["type"] == "invalid_tool_call"],
        additional_kwargs=_reasoning(reply),
        usage_metadata=_usage(usage) if usage else None,
        response_metadata={
            "id": body["id"],
            "finish_reason": choice["finish_reason"],
            "model_name": body["model"],
            **_logprobs(choice),
        },
    )
    return ChatResult(generations=[ChatGeneration(message=message)])


def _calls(entries: Sequence[Mapping[str, Any]]) -> list[ToolCall | InvalidToolCall]:
    """The calls of an answer; those whose arguments are no JSON object are invalid."""
    calls: list[ToolCall | InvalidToolCall] = []
    for entry in entries:
        call_id, function = entry["id"], entry["function"]
        try:
            arguments = json.loads(function["arguments"])
        except ValueError:
            arguments = None
        if isinstance(arguments, dict):
            calls.append(tool_call(name=function["name"], args=arguments, id=call_id))
        else:
            calls.append(
                invalid_tool_call(
                    name=function["name"],
                    args=function["arguments"],
                    id=call_id,
                    error="The arguments are not a JSON object.",
                )
            )
    return calls


def _logprobs(choice: Mapping[str, Any]) -> dict[str, Any]:
    """Where ChatOpenAI has them; LangChain joins the lists of all chunks."""
    logprobs = choice.get("logprobs")
    return {"logprobs": logprobs} if logprobs else {}


def _reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    return {"reasoning_content": reasoning} if reasoning else {}


def _call_ids(messages: Sequence[BaseMessage]) -> list[str]:
    """Ids of the latest responses that are among the messages."""
    ids = [message.response_metadata.get("id") for message in messages]
    call_ids = [one for one in ids if isinstance(one, str) and _CALL_ID.fullmatch(one)]
    return call_ids[-_MAX_CALL_IDS:]


def _usage(usage: Mapping[str, Any]) -> UsageMetadata:
    found = UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
    )
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        found["input_token_details"] = InputTokenDetails(cache_read=cached)
    reasoning = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens")
    if reasoning is not None:
        found["output_token_details"] = OutputTokenDetails(reasoning=reasoning)
    return found


class _ChunkReader:
    """The chunks of one stream. The first one, which may have no text, has the id of the response;
    the last ones have why it ended and its usage."""

    def __init__(self) -> None:
        self._started = False

    def read(self, data: bytes) -> ChatGenerationChunk | None:
        """The chunk of an event; None if it has nothing. Raises the error that an event reports."""
        if data == b"[DONE]":
            return None
        event = json.loads(data)
        if event.get("error") is not None:  # some servers name it in every event
            raise read_error(None, event["error"], None)
        choice = event["choices"][0] if event["choices"] else {}
        delta, usage = choice.get("delta") or {}, event.get("usage")
        calls = [
            tool_call_chunk(
                name=call["function"].get("name"),
                args=call["function"].get("arguments"),
                id=call.get("id"),
                index=call["index"],
            )
            for call in delta.get("tool_calls") or ()
        ]
        # Each only once, because LangChain joins the strings of all chunks.
        metadata = {} if self._started else {"id": event["id"]}
        metadata |= _logprobs(choice)
        if choice.get("finish_reason"):
            metadata |= {"finish_reason": choice["finish_reason"], "model_name": event["model"]}
        text, reasoning = delta.get("content") or "", _reasoning(delta)
        if not (text or reasoning or calls or metadata or usage):
            return None
        self._started = True
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content=text,
                tool_call_chunks=calls,
                additional_kwargs=reasoning,
                response_metadata=metadata,
                usage_metadata=_usage(usage) if usage else None,
            )
        )


@contextlib.contextmanager
def _readable_errors(url: str) -> Iterator[None]:
    try:
        yield
    except BrosError:
        raise
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise ServerUnreachableError(f"{url} does not answer: {reason}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ServerUnreachableError(f"{url} does not speak OpenAI's API: {error!r}") from error
