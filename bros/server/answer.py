"""The generations of one HTTP request, seen as one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from bros.core.errors import EngineDeadError, OverloadedError
from bros.core.request import FinishReason, ServiceClass, TokenLogprobs
from bros.engine.generation import Generation, TextDelta
from bros.server.errors import GenerationFailedError
from bros.server.replies import PromptTokensDetails, Usage


class Observer(Protocol):
    """Is told what becomes of a request; see RequestObserver."""

    def on_delta(self, delta: TextDelta) -> None: ...

    def on_error(self, message: str) -> None:
        """The engine died."""
        ...

    def close(self) -> None:
        """Nothing follows."""
        ...


Observe = Callable[[Sequence[ServiceClass]], Observer]


@dataclass(slots=True)
class FinishedChoice:
    """One choice when nothing more follows. logprobs: of the tokens that are part of the text."""

    index: int
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None


class Answer:
    """Choice c of prompt p has index p * n + c. Use `deltas` or `collect` once; always close.

    best_effort: whether any choice is served as that, asked for or relegated.
    """

    def __init__(self, generations: Sequence[Generation], n: int, observe: Observe) -> None:
        """observe: given what each choice is served as, makes who is told about its deltas."""
        self._generations = generations
        self._n = n
        classes = [cls for generation in generations for cls in generation.service_classes]
        self.best_effort = ServiceClass.BE in classes
        self._observer = observe(classes)
        self._closed = False

    @classmethod
    async def start(
        cls,
        starts: Sequence[Coroutine[Any, Any, Generation]],
        n: int,
        observe: Observe,
    ) -> Self:
        """Await the generations of all prompts; if one is refused, none is left running."""
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            return cls(await asyncio.gather(*tasks), n, observe)
        except BaseException:
            await asyncio.shield(asyncio.ensure_future(_close_all(tasks)))
            raise

    def usage(self) -> Usage:
        """Tokens so far."""
        prompt = sum(generation.prompt_tokens for generation in self._generations)
        completion = sum(generation.num_output_tokens for generation in self._generations)
        cached = sum(generation.cached_tokens for generation in self._generations)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=completion,
            total_tokens=prompt + completion,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
        )

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """What happens, as it happens.

        Raises OverloadedError if a choice was given up for want of capacity,
        GenerationFailedError if it ends without a proper finish for any other reason, and
        EngineDeadError if the engine dies.
        """
        try:
            if len(self._generations) == 1:
                async for delta in self._generations[0]:
                    self._take(delta)
                    yield delta
                return
            async with contextlib.aclosing(self._merged()) as merged:
                async for delta in merged:
                    self._take(delta)
                    yield delta
        except EngineDeadError as error:
            self._observer.on_error(str(error))
            raise

    async def collect(self) -> list[FinishedChoice]:
        """Wait for everything; the choices in the order of their index. Raises as `deltas`."""
        choices = [FinishedChoice(i) for i in range(len(self._generations) * self._n)]
        async for delta in self.deltas():
            choice = choices[delta.index]
            choice.text += delta.text
            choice.logprobs += visible_logprobs(delta)
            if delta.finish_reason is not None:
                choice.finish_reason = delta.finish_reason.value
                choice.stop_reason = delta.stop_reason
        return choices

    async def aclose(self) -> None:
        """Abort what is unfinished. Completed in the background if the caller is cancelled."""
        if self._closed:
            return
        self._closed = True
        self._observer.close()
        closing = asyncio.gather(*(generation.aclose() for generation in self._generations))
        await asyncio.shield(closing)

    def _take(self, delta: TextDelta) -> None:
        self._observer.on_delta(delta)
        if delta.finish_reason is None or delta.finish_reason.complete:
            return
        message = delta.error or "The engine ended the request before it was complete."
        if delta.retry_after_s is not None:
            raise OverloadedError(message, delta.retry_after_s)
        raise GenerationFailedError(message)

    async def _merged(self) -> AsyncGenerator[TextDelta, None]:
        queue: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue()

        async def pump(position: int, generation: Generation) -> None:
            first = position * self._n
            try:
                async for delta in generation:
                    queue.put_nowait(dataclasses.replace(delta, index=first + delta.index))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)  # raised to whoever iterates

        tasks = [asyncio.create_task(pump(*item)) for item in enumerate(self._generations)]
        open_generations = len(tasks)
        try:
            while open_generations:
                item = await queue.get()
                if isinstance(item, Exception):
                    raise item
                if item is None:
                    open_generations -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()


def visible_logprobs(delta: TextDelta) -> tuple[TokenLogprobs, ...]:
    """Without the stop token, which is not part of the text; a stop string has none."""
    if delta.finish_reason is FinishReason.STOP and not isinstance(delta.stop_reason, str):
        return delta.logprobs[:-1]
    return delta.logprobs


async def _close_all(tasks: Sequence[asyncio.Future[Generation]]) -> None:
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Generation):
            await result.aclose()
