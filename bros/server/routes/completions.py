"""POST /v1/completions"""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams
from bros.server.answer import Answer, FinishedChoice
from bros.server.body import read_request
from bros.server.exchange import Exchange
from bros.server.logprobs import CompletionLogprobsWriter
from bros.server.prompts import encode_text
from bros.server.protocol import CompletionRequest
from bros.server.replies import Completion, CompletionChoice
from bros.server.state import ServerState
from bros.server.stream import CompletionChunkWriter
from bros.server.terms import completion_sampling
from bros.server.unsupported import COMPLETION

MAX_CHOICES = 1024
"""Most prompts times n of one request."""


async def create_completion(request: Request) -> Response:
    """Continue one or several prompts."""
    state = ServerState.of(request)
    arrival_s = state.clock.now()
    body = await read_request(request, CompletionRequest, COMPLETION)
    sampling = completion_sampling(body)
    most = min(MAX_CHOICES, state.engine.info.max_queue)
    if len(body.prompt) * sampling.n > most:
        raise InvalidRequestError(
            f"{len(body.prompt)} prompts with n = {sampling.n} make more than {most} choices; "
            "send several requests.",
            param="prompt",
        )
    exchange = Exchange(request, body, sampling, id_prefix="cmpl", arrival_s=arrival_s)
    echoes: dict[int, str] = {}

    async def start() -> None:
        prompts = await asyncio.gather(*(_token_ids(state, item) for item in body.prompt))
        await exchange.generate(prompts, param="prompt")
        if body.echo:  # only now, when no prompt is longer than the context
            echoes.update(_echoes(state, body, sampling.n))

    def complete(choices: list[FinishedChoice], answer: Answer) -> Completion:
        for choice in choices:
            choice.text = echoes.get(choice.index, "") + choice.text
        return Completion(
            **exchange.header,
            choices=[_choice(state, sampling, choice) for choice in choices],
            usage=answer.usage(),
        )

    def make_writer() -> CompletionChunkWriter:
        frame = exchange.frame("text_completion")
        return CompletionChunkWriter(frame, state.tokenizer, sampling.logprobs, echoes)

    return await exchange.respond(start(), make_writer, complete)


async def _token_ids(state: ServerState, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    return await encode_text(state, prompt, limit=state.engine.info.max_model_len)


def _echoes(state: ServerState, body: CompletionRequest, n: int) -> dict[int, str]:
    """Index of a choice -> the prompt that goes before its text."""
    texts = [
        prompt if isinstance(prompt, str) else state.tokenizer.decode(prompt)
        for prompt in body.prompt
    ]
    return {i: texts[i // n] for i in range(len(texts) * n)}


def _choice(
    state: ServerState, sampling: SamplingParams, choice: FinishedChoice
) -> CompletionChoice:
    logprobs = None
    if sampling.logprobs is not None:
        writer = CompletionLogprobsWriter(state.tokenizer, with_top=sampling.logprobs > 0)
        logprobs = writer.write(choice.logprobs)
    return CompletionChoice(
        index=choice.index,
        text=choice.text,
        logprobs=logprobs,
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
    )


ROUTES = (Route("/v1/completions", create_completion, methods=["POST"]),)
