"""The routes of chat and text completions, /v1/models, /tokenize and /detokenize."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from bros.core.errors import InvalidRequestError
from bros.core.request import MAX_OBJECTIVE_MS, MIN_OBJECTIVE_MS, check_token_ids
from bros.server.http import (
    json_list,
    json_pieces,
    json_response,
    offload_reply,
    read_held,
    read_request,
    validate,
)
from bros.server.openai.calls import (
    MAX_ENCODED_BYTES,
    check_counts,
    encode_chat,
    encode_text,
    refuse_unsupported,
    tool_use,
)
from bros.server.openai.exchange import create_chat_completion, create_completion
from bros.server.openai.schema import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    DetokenizeReply,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizeRequest,
)
from bros.server.operations.openapi import ApiRoute, Schemas
from bros.server.state import ServerState
from bros.text.tokenizer import Tokenizer


def _objective(meaning: str, name: str) -> dict[str, Any]:
    text = (
        f"{meaning}, in milliseconds; alias x-llm-d-slo-{name}-ms. The slo field of the body takes "
        "precedence"
    )
    return {
        "type": "number",
        "minimum": MIN_OBJECTIVE_MS,
        "maximum": MAX_OBJECTIVE_MS,
        "description": text,
    }


OBJECTIVE_HEADERS: Schemas = {
    "x-slo-ttft-ms": _objective("Arrival to first token", "ttft"),
    "x-slo-tpot-ms": _objective("Mean time between two tokens", "tpot"),
    "x-slo-gap-ms": _objective("Longest time between two tokens", "gap"),
    "x-slo-deadline-ms": _objective("Arrival to last token", "deadline"),
}
"""Headers of all requests to the engine."""

REQUEST_HEADERS: Schemas = {
    **OBJECTIVE_HEADERS,
    "x-bros-session": {
        "type": "string",
        "description": "Id of the session that the request belongs to, also as "
        "metadata.bros_session. An unknown id creates a session, unless it begins with sess-",
    },
    "x-bros-node": {
        "type": "string",
        "description": "Name of the request in the graph of its session, also as "
        "metadata.bros_node",
    },
    "x-bros-inputs": {
        "type": "string",
        "description": "Ids of the responses of this session whose answers the prompt contains, "
        "with commas between them, also as metadata.bros_inputs. Unknown ids are ignored",
    },
}

_GENERATION = (
    ApiRoute(
        "POST",
        "/v1/chat/completions",
        create_chat_completion,
        ChatCompletion,
        ChatCompletionRequest,
        headers=REQUEST_HEADERS,
        streams=True,
    ),
    ApiRoute(
        "POST",
        "/v1/completions",
        create_completion,
        Completion,
        CompletionRequest,
        headers=REQUEST_HEADERS,
        streams=True,
    ),
)


# ---- GET /v1/models and /v1/models/{model}


async def list_models(request: Request) -> Response:
    """List the served models: one."""
    card = _card(ServerState.of(request))
    return json_response(ModelList(data=[card], first_id=card.id, last_id=card.id))


async def retrieve_model(request: Request) -> Response:
    """The description of a model."""
    state = ServerState.of(request)
    state.check_model(request.path_params["model"])
    return json_response(_card(state))


def _card(state: ServerState) -> ModelCard:
    info = state.engine.info
    return ModelCard(
        id=state.model_name,
        created=state.created,
        root=info.model,
        max_model_len=info.max_model_len,
        display_name=state.model_name,
        created_at=datetime.fromtimestamp(state.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


_MODELS = (
    ApiRoute("GET", "/v1/models", list_models, ModelList),
    # `path`, because model ids of hubs contain a slash.
    ApiRoute("GET", "/v1/models/{model:path}", retrieve_model, ModelCard),
)


# ---- POST /tokenize and /detokenize, compatible with vLLM


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    state, tenant = ServerState.of(request), ServerState.tenant(request)
    body, _ = await read_held(request, state.max_body_bytes, _tokenize_request)
    state.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either 'prompt' or 'messages'.", param="prompt")
    if body.messages is not None:
        prompt = await encode_chat(
            state,
            tenant,
            body.messages,
            _tokenize_variables(body),
            tools=tool_use(body.tools, None).tools,
            allow_special_tokens=body.allow_special_tokens is True,
        )
        tokens = prompt.token_ids
    else:
        tokens = await encode_text(
            state,
            tenant,
            body.prompt or "",
            add_special_tokens=body.add_special_tokens is not False,
            allow_special_tokens=body.allow_special_tokens is not False,
        )

    def render() -> bytes:
        names = b"null"
        if body.return_token_strs:
            names = json_list([state.tokenizer.token_text(token_id) for token_id in tokens])
        # A TokenizeReply. Dumping the model would hold the interpreter for 45 ms per 10^6 tokens.
        return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
            len(tokens),
            state.engine.info.max_model_len,
            json_list(tokens),
            names,
        )

    reply = await offload_reply(state, tenant, render, len(tokens))
    return Response(reply, media_type="application/json")


_TOKENIZE_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "chat_template": (None, ""),
    "continue_final_message": (None, False),
}
"""Field -> values without an effect."""


def _tokenize_variables(body: TokenizeRequest) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.add_generation_prompt is not None:
        variables["add_generation_prompt"] = body.add_generation_prompt
    return variables


def _tokenize_request(fields: Mapping[str, Any]) -> TokenizeRequest:
    check_counts(fields)
    refuse_unsupported(fields, _TOKENIZE_UNSUPPORTED)
    return validate(TokenizeRequest, fields)


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = ServerState.of(request)
    body = await read_request(request, DetokenizeRequest)
    vocab_size = state.engine.info.vocab_size

    def render() -> bytes:
        if body.tokens:
            check_token_ids("tokens", body.tokens, vocab_size)
        text = _decode(state.tokenizer, body.tokens)
        # A DetokenizeReply. Dumping the model would hold the interpreter.
        return b'{"prompt":%b}' % b"".join(json_pieces(text))

    size, tenant = len(body.tokens), state.tenant(request)
    reply = await offload_reply(state, tenant, render, size)
    return Response(reply, media_type="application/json")


_DECODED_AT_ONCE = 1000


def _decode(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
    """Raises InvalidRequestError for a text of more than MAX_ENCODED_BYTES: one token can be a
    hundred spaces."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=False)
    texts, num_bytes = [], 0
    for begin in range(0, len(token_ids), _DECODED_AT_ONCE):
        texts.append(detokenizer.push(token_ids[begin : begin + _DECODED_AT_ONCE]))
        num_bytes += len(texts[-1].encode())
        if num_bytes > MAX_ENCODED_BYTES:
            raise InvalidRequestError(
                f"The text of the tokens has more than {MAX_ENCODED_BYTES} bytes; send them in "
                "parts.",
                param="tokens",
                code="array_above_max_length",
            )
    return "".join(texts) + detokenizer.finish()


_TOKENS = (
    ApiRoute("POST", "/tokenize", tokenize, TokenizeReply, TokenizeRequest),
    ApiRoute("POST", "/detokenize", detokenize, DetokenizeReply, DetokenizeRequest),
)


ROUTES = (*_GENERATION, *_MODELS, *_TOKENS)
