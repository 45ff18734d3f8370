"""What requests for text mean, wherever they come from: over HTTP or as rows of a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from bros.core.errors import InvalidRequestError
from bros.core.request import SamplingParams
from bros.server.answer import Answer, FinishedChoice
from bros.server.body import validate
from bros.server.logprobs import CompletionLogprobsWriter, chat_logprobs
from bros.server.prompts import encode_chat, encode_text
from bros.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from bros.server.replies import (
    AssistantMessage,
    ChatChoice,
    ChatCompletion,
    ChatLogprobs,
    Completion,
    CompletionChoice,
)
from bros.server.state import ServerState
from bros.server.stream import ChatChunkWriter, ChunkFrame, ChunkWriter, CompletionChunkWriter
from bros.server.terms import chat_sampling, completion_sampling
from bros.server.unsupported import CHAT, COMPLETION, refuse_unsupported

R = TypeVar("R", bound=GenerationRequest)

_CHARS_PER_ID = 4

MAX_CHOICES = 1024
"""Most prompts times n of one request."""


class Call(Protocol):
    """A checked request of one endpoint.

    id_prefix: of the response's id. param: the field with the prompts. chunk_kind: `object` of
    the chunks of a stream.
    """

    id_prefix: str
    param: str
    chunk_kind: str

    @property
    def body(self) -> GenerationRequest: ...

    @property
    def sampling(self) -> SamplingParams: ...

    async def prompts(self) -> list[list[int]]:
        """Token ids. Raises InvalidRequestError; PromptTooLongError beyond the context."""
        ...

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> BaseModel: ...

    def writer(self, frame: ChunkFrame) -> ChunkWriter: ...

    def beginning(self) -> str:
        """What the prompt begins with, as text, for telling which begin alike."""
        ...

    def num_chars(self) -> int:
        """Length of all prompts; a token id counts as a word."""
        ...


class ChatCall:
    """POST /v1/chat/completions"""

    id_prefix, param, chunk_kind = "chatcmpl", "messages", "chat.completion.chunk"

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError for what is wrong with the fields."""
        self._state = state
        self.body = _checked(state, ChatCompletionRequest, fields, CHAT)
        self.sampling = chat_sampling(self.body)

    async def prompts(self) -> list[list[int]]:
        body, limit = self.body, self._state.engine.info.max_model_len
        prompt = await encode_chat(self._state, body.messages, body.chat_template_kwargs, limit)
        if not prompt:
            raise InvalidRequestError("The messages give an empty prompt.", param="messages")
        return [prompt]

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> ChatCompletion:
        return ChatCompletion(
            **header, choices=[self._choice(choice) for choice in choices], usage=answer.usage()
        )

    def writer(self, frame: ChunkFrame) -> ChatChunkWriter:
        return ChatChunkWriter(frame, self._state.tokenizer, self.sampling.logprobs is not None)

    def beginning(self) -> str:
        return "".join(f"{m.role}\0{m.content or ''}\0" for m in self.body.messages)

    def num_chars(self) -> int:
        return len(self.beginning())

    def _choice(self, choice: FinishedChoice) -> ChatChoice:
        logprobs = None
        if self.sampling.logprobs is not None:
            logprobs = ChatLogprobs(content=chat_logprobs(self._state.tokenizer, choice.logprobs))
        return ChatChoice(
            index=choice.index,
            message=AssistantMessage(content=choice.text),
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


class CompletionCall:
    """POST /v1/completions"""

    id_prefix, param, chunk_kind = "cmpl", "prompt", "text_completion"

    def __init__(self, state: ServerState, fields: Mapping[str, Any]) -> None:
        """Raises InvalidRequestError or NotFoundError for what is wrong with the fields."""
        self._state = state
        self.body = _checked(state, CompletionRequest, fields, COMPLETION)
        self.sampling = completion_sampling(self.body)
        most, prompts = min(MAX_CHOICES, state.engine.info.max_queue), len(self.body.prompt)
        if prompts * self.sampling.n > most:
            raise InvalidRequestError(
                f"{prompts} prompts with n = {self.sampling.n} make more than {most} choices; "
                "send several requests.",
                param="prompt",
            )

    async def prompts(self) -> list[list[int]]:
        return await asyncio.gather(*(self._token_ids(prompt) for prompt in self.body.prompt))

    def reply(
        self, header: Mapping[str, Any], choices: list[FinishedChoice], answer: Answer
    ) -> Completion:
        echoes = self._echoes()
        for choice in choices:
            choice.text = echoes.get(choice.index, "") + choice.text
        return Completion(
            **header, choices=[self._choice(choice) for choice in choices], usage=answer.usage()
        )

    def writer(self, frame: ChunkFrame) -> CompletionChunkWriter:
        return CompletionChunkWriter(
            frame, self._state.tokenizer, self.sampling.logprobs, self._echoes()
        )

    def beginning(self) -> str:
        first = self.body.prompt[0]
        return first if isinstance(first, str) else " ".join(map(str, first))

    def num_chars(self) -> int:
        prompts = self.body.prompt
        return sum(len(p) if isinstance(p, str) else _CHARS_PER_ID * len(p) for p in prompts)

    async def _token_ids(self, prompt: str | list[int]) -> list[int]:
        if not isinstance(prompt, str):
            return prompt
        return await encode_text(self._state, prompt, limit=self._state.engine.info.max_model_len)

    def _echoes(self) -> dict[int, str]:
        """Index of a choice -> the prompt that goes before its text. Only once the engine has
        accepted the prompts, so that none is longer than the context."""
        if not self.body.echo:
            return {}
        texts = [
            prompt if isinstance(prompt, str) else self._state.tokenizer.decode(prompt)
            for prompt in self.body.prompt
        ]
        n = self.sampling.n
        return {i: texts[i // n] for i in range(len(texts) * n)}

    def _choice(self, choice: FinishedChoice) -> CompletionChoice:
        logprobs = None
        if self.sampling.logprobs is not None:
            writer = CompletionLogprobsWriter(
                self._state.tokenizer, with_top=self.sampling.logprobs > 0
            )
            logprobs = writer.write(choice.logprobs)
        return CompletionChoice(
            index=choice.index,
            text=choice.text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
        )


CALLS: Mapping[str, Callable[[ServerState, Mapping[str, Any]], Call]] = {
    "/v1/chat/completions": ChatCall,
    "/v1/completions": CompletionCall,
}
"""Path of an endpoint -> what its requests mean."""


def _checked(
    state: ServerState,
    model: type[R],
    fields: Mapping[str, Any],
    unsupported: Mapping[str, tuple[Any, ...]],
) -> R:
    body = validate(model, fields)
    state.check_model(body.model)
    refuse_unsupported(fields, unsupported)
    return body
