"""POST /v1/chat/completions"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams
from bros.server.answer import Answer, FinishedChoice
from bros.server.body import read_request
from bros.server.exchange import Exchange
from bros.server.logprobs import chat_logprobs
from bros.server.prompts import encode_chat
from bros.server.protocol import ChatCompletionRequest
from bros.server.replies import AssistantMessage, ChatChoice, ChatCompletion, ChatLogprobs
from bros.server.state import ServerState
from bros.server.stream import ChatChunkWriter
from bros.server.terms import chat_sampling
from bros.server.unsupported import CHAT


async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    state = ServerState.of(request)
    arrival_s = state.clock.now()
    body = await read_request(request, ChatCompletionRequest, CHAT)
    sampling = chat_sampling(body)
    exchange = Exchange(request, body, sampling, id_prefix="chatcmpl", arrival_s=arrival_s)

    async def start() -> None:
        limit = state.engine.info.max_model_len
        prompt = await encode_chat(state, body.messages, body.chat_template_kwargs, limit)
        if not prompt:
            raise InvalidRequestError("The messages give an empty prompt.", param="messages")
        await exchange.generate([prompt], param="messages")

    def complete(choices: list[FinishedChoice], answer: Answer) -> ChatCompletion:
        return ChatCompletion(
            **exchange.header,
            choices=[_choice(state, sampling, choice) for choice in choices],
            usage=answer.usage(),
        )

    def make_writer() -> ChatChunkWriter:
        frame = exchange.frame("chat.completion.chunk")
        return ChatChunkWriter(frame, state.tokenizer, sampling.logprobs is not None)

    return await exchange.respond(start(), make_writer, complete)


def _choice(state: ServerState, sampling: SamplingParams, choice: FinishedChoice) -> ChatChoice:
    logprobs = None
    if sampling.logprobs is not None:
        logprobs = ChatLogprobs(content=chat_logprobs(state.tokenizer, choice.logprobs))
    return ChatChoice(
        index=choice.index,
        message=AssistantMessage(content=choice.text),
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


ROUTES = (Route("/v1/chat/completions", create_chat_completion, methods=["POST"]),)
