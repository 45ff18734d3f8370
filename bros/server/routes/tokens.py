"""POST /tokenize and /detokenize, as vLLM has them"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import InvalidRequestError
from bros.server import offload
from bros.server.body import read_request
from bros.server.prompts import encode_chat, encode_text
from bros.server.protocol import DetokenizeRequest, TokenizeRequest
from bros.server.replies import DetokenizeReply, TokenizeReply
from bros.server.state import ServerState


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


ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
)
