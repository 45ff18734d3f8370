"""Offline use: `from bros import LLM`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from bros.core.config import EngineConfig
from bros.core.errors import InvalidRequestError
from bros.core.loop_thread import LoopThread
from bros.core.request import SamplingParams, ServiceClass
from bros.executor.model_store import default_cache_dir
from bros.terminal import progress_bar
from bros.text.generation import ChoiceResult, collect
from bros.transport.local import LocalEngine, open_local

Prompt = str | Sequence[int]
Message = Mapping[str, Any]


class LLM:
    """A model for scripts and notebooks. Close it, or use it in a `with` block.

        with LLM() as llm:
            for answer in llm.generate(["The capital of France is"], SamplingParams(max_tokens=8)):
                print(answer[0].text)

    model: as in EngineConfig.
    data_dir: folder for converted models and profiles; default: as for `bros serve`.
    options: other fields of EngineConfig (the flags of `bros serve` with underscores).
    Raises ModelError or ConfigError if the model cannot be served with these options.
    """

    def __init__(
        self, model: str | None = None, *, data_dir: str | Path | None = None, **options: Any
    ) -> None:
        # No user waits for a first token, so prompts run in their order.
        defaults = {"max_queue": 1_000_000, "policy": "fcfs"}
        config = EngineConfig(model=model, **{**defaults, **options})
        cache_dir = Path(data_dir) if data_dir else default_cache_dir()
        self._loop = LoopThread("bros-llm")
        self._exit = contextlib.AsyncExitStack()
        try:
            opening = self._exit.enter_async_context(open_local(config, cache_dir))
            self._engine: LocalEngine = self._loop.run(opening)
        except BaseException:
            self._loop.close()
            raise

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service_class: ServiceClass = ServiceClass.BE,
        progress: bool = True,
    ) -> list[tuple[ChoiceResult, ...]]:
        """Complete texts (or lists of token ids); returns params.n choices per prompt, in order.

        params: one for all prompts or one per prompt.
        progress: show a progress bar.
        Raises InvalidRequestError or PromptTooLongError if a prompt cannot be served, after
        aborting the others.
        """
        single = isinstance(prompts, str) or (prompts and isinstance(prompts[0], int))
        many: Sequence[Any] = [prompts] if single else prompts
        tokenizer = self._engine.tokenizer
        ids = [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in many]
        return self._run_all(ids, params, service_class, progress, "prompt")

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        service_class: ServiceClass = ServiceClass.BE,
        progress: bool = True,
    ) -> list[tuple[ChoiceResult, ...]]:
        """Answer one or more conversations; returns params.n choices per conversation, in order.

        messages: each is {"role": ..., "content": ...}.
        Otherwise as `generate`.
        """
        single = bool(messages) and isinstance(messages[0], Mapping)
        many: Sequence[Any] = [messages] if single else messages
        ids = [self._engine.tokenizer.apply_chat_template(m) for m in many]
        return self._run_all(ids, params, service_class, progress, "messages")

    def close(self) -> None:
        """Stop the engine and free its memory. May be called twice."""
        if not self._loop.closed:
            self._loop.run(self._exit.aclose())
            self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run_all(
        self,
        ids: Sequence[list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None,
        service_class: ServiceClass,
        progress: bool,
        param: str,
    ) -> list[tuple[ChoiceResult, ...]]:
        each = _one_per_prompt(params, len(ids))
        done = done_tokens = 0
        with progress_bar("generating", shown=progress) as advance:
            advance(0, len(ids), "0 tokens")

            async def one(prompt: list[int], sampling: SamplingParams) -> tuple[ChoiceResult, ...]:
                nonlocal done, done_tokens
                generation = await self._engine.generator.start(
                    [prompt],
                    sampling,
                    request_id=self._engine.ids.new("llm"),
                    service_class=service_class,
                    param=param,
                )
                result = tuple(await collect(generation))
                done_tokens += sum(len(choice.token_ids) for choice in result)
                done += 1
                advance(done, len(ids), f"{done_tokens} tokens")
                return result

            async def everything() -> list[tuple[ChoiceResult, ...]]:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(one(*pair)) for pair in zip(ids, each, strict=True)]
                return [task.result() for task in tasks]

            try:
                return self._loop.run(everything())
            except BaseExceptionGroup as group:
                raise group.exceptions[0] from None


def _one_per_prompt(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"{len(params)} sampling params for {count} prompts; pass one for all or one each.",
            param="params",
        )
    return list(params)
