"""POST /v1/chat/completions and /v1/completions"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import InvalidRequestError
from bros.server import http as offload
from bros.server.http import read_object, read_request
from bros.server.openai.calls import CALLS, encode_chat, encode_text
from bros.server.openai.exchange import respond
from bros.server.openai.schema import (
    DetokenizeReply,
    DetokenizeRequest,
    ModelCard,
    ModelList,
    TokenizeReply,
    TokenizeRequest,
)
from bros.server.sessions.joining import deadline_ms, join
from bros.server.state import ServerState


async def generate(request: Request) -> Response:
    """Answer a conversation, or continue prompts."""
    state = ServerState.of(request)
    arrival_s = state.clock.now()
    fields = await read_object(request, state.max_body_bytes)
    call = CALLS[request.url.path](state, fields)
    joined = join(request, fields)
    due_ms = None if joined is None else deadline_ms(fields)
    return await respond(request, call, arrival_s, joined, due_ms)


_GENERATION = tuple(Route(path, generate, methods=["POST"]) for path in CALLS)


# ---- GET /v1/models and /v1/models/{model}


async def list_models(request: Request) -> Response:
    """The one model there is."""
    reply = ModelList(data=[_card(ServerState.of(request))])
    return Response(reply.model_dump_json(), media_type="application/json")


async def retrieve_model(request: Request) -> Response:
    """The model under the name it was asked for."""
    state = ServerState.of(request)
    state.check_model(request.path_params["model"])
    return Response(_card(state).model_dump_json(), media_type="application/json")


def _card(state: ServerState) -> ModelCard:
    info = state.engine.info
    return ModelCard(
        id=state.model_name,
        created=state.created,
        root=info.model,
        max_model_len=info.max_model_len,
    )


_MODELS = (
    Route("/v1/models", list_models, methods=["GET"]),
    # A path, because model ids of hubs contain a slash.
    Route("/v1/models/{model:path}", retrieve_model, methods=["GET"]),
)


# ---- POST /tokenize and /detokenize, as vLLM has them


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt or of a conversation."""
    state = ServerState.of(request)
    body = await read_request(request, TokenizeRequest)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Give either 'prompt' or 'messages'.", param="prompt")
    if body.messages is not None:
        tokens = await encode_chat(state, body.messages, body.chat_template_kwargs)
    else:
        special = body.add_special_tokens is not False
        tokens = await encode_text(state, body.prompt or "", add_special_tokens=special)

    def render() -> str:
        names = None
        if body.return_token_strs:
            names = [state.tokenizer.token_text(token_id) for token_id in tokens]
        return TokenizeReply(
            count=len(tokens),
            max_model_len=state.engine.info.max_model_len,
            tokens=tokens,
            token_strs=names,
        ).model_dump_json()

    return Response(await offload.run(state, render, len(tokens)), media_type="application/json")


async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = ServerState.of(request)
    body = await read_request(request, DetokenizeRequest)
    vocab_size = state.engine.info.vocab_size
    if body.tokens and max(body.tokens) >= vocab_size:
        raise InvalidRequestError(
            f"Token id {max(body.tokens)} is outside the vocabulary [0, {vocab_size}).",
            param="tokens",
        )

    def render() -> str:
        text = state.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return DetokenizeReply(prompt=text).model_dump_json()

    size = len(body.tokens)
    return Response(await offload.run(state, render, size), media_type="application/json")


_TOKENS = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
)


ROUTES = (*_GENERATION, *_MODELS, *_TOKENS)
