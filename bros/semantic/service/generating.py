"""One LLM call on the engine, submitted again where that may help.

refused for want of capacity     wait as long as the engine says, and submit again
the engine died                  wait until it is back, and restart what gives the same text again
anything else                    the LLM call has failed
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bros.core.clock import Clock
from bros.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
)
from bros.core.interfaces import EngineClient
from bros.core.request import FinishReason, Hints, SamplingParams, ServiceClass, Slo
from bros.semantic.errors import FailedStage
from bros.semantic.service.live import SessionSettings
from bros.text.generation import Generation, TextDelta, TextGenerator

_LOOK_S = 0.05


class Revival:
    """All who wait for one engine: however many they are, it is looked at as often."""

    def __init__(self, engine: EngineClient, clock: Clock, patience_s: float) -> None:
        """patience_s: how long each of them waits."""
        self._engine = engine
        self._clock = clock
        self._patience_s = patience_s
        self._waiting: dict[asyncio.Future[bool], float] = {}  # until when; all wait equally long
        self._timer: asyncio.TimerHandle | None = None

    async def comes(self) -> bool:
        """True as soon as the engine is alive; False if it does not come back in time."""
        if self._engine.alive:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = self._clock.now() + self._patience_s
        self._look_later()
        try:
            return await waiter
        finally:
            self._waiting.pop(waiter, None)

    def _look_later(self) -> None:
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        alive, now = self._engine.alive, self._clock.now()
        told = [
            waiter
            for waiter, _ in itertools.takewhile(
                lambda item: alive or item[1] <= now, self._waiting.items()
            )
        ]
        for waiter in told:
            del self._waiting[waiter]
            if not waiter.done():
                waiter.set_result(alive)
        self._look_later()


_LEAST_WAIT_S = 0.01


class LlmCallFailedError(Exception):
    """An LLM call has failed for good. The fields are those of a Cause."""

    def __init__(self, stage: FailedStage, message: str, variable: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.message = message
        self.variable = variable


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A request to the engine.

    arrival_s: when all its inputs were there.
    """

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingParams
    tenant: str
    cache_salt: str
    arrival_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTerms:
    """How the engine is to serve it, which may change while it waits."""

    service_class: ServiceClass
    slo: Slo
    hints: Hints


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmAnswer:
    """An answer of the engine.

    token_ids: of the text, without the token that ended it. After a stop string they go on.
    output_tokens: all that were generated.
    """

    text: str
    token_ids: tuple[int, ...]
    cached_tokens: int
    output_tokens: int


class LlmCallWatcher(Protocol):
    """What is told how an LLM call proceeds."""

    def terms(self) -> GenerationTerms:
        """How it is to be served as of now."""
        ...

    def accepted(self, request_id: str, service_class: ServiceClass) -> None:
        """The engine has it, under this id and as this class. It may have to be promoted now."""
        ...

    def progress(self, text: str, cached_tokens: int, output_tokens: int) -> None:
        """The text so far: from its beginning on, because it may have begun anew."""
        ...


class _Heard:
    """A watcher of which is known whether it was told of any text."""

    def __init__(self, watcher: LlmCallWatcher) -> None:
        self.terms = watcher.terms
        self.accepted = watcher.accepted
        self._progress = watcher.progress
        self.any = False

    def progress(self, text: str, cached_tokens: int, output_tokens: int) -> None:
        self.any |= output_tokens > 0
        self._progress(text, cached_tokens, output_tokens)


class LlmCallGenerator:
    """Runs LLM calls, all those of one engine."""

    def __init__(
        self,
        generator: TextGenerator,
        engine: EngineClient,
        clock: Clock,
        settings: SessionSettings,
    ) -> None:
        self._generator = generator
        self._revival = Revival(engine, clock, settings.recovery_s)
        self._clock = clock
        self._settings = settings

    async def run(self, asked: Asked, watcher: LlmCallWatcher) -> LlmAnswer:
        """The whole answer. Raises LlmCallFailedError. Cancelling it aborts the request."""
        deaths, attempt = 0, 0
        refused_s: float | None = None
        heard = _Heard(watcher)
        while True:
            attempt += 1
            request_id = asked.request_id if attempt == 1 else f"{asked.request_id}~{attempt}"
            try:
                return await self._once(request_id, asked, heard)
            except EngineDeadError as error:
                deaths += 1
                again = not heard.any or _gives_the_same(asked.sampling)
                if deaths > self._settings.retries or not again:
                    raise LlmCallFailedError(FailedStage.ENGINE, str(error)) from error
                if not await self._revival.comes():
                    raise LlmCallFailedError(FailedStage.ENGINE, str(error)) from error
            except (QueueFullError, OverloadedError) as error:
                now = self._clock.now()
                refused_s = now if refused_s is None else refused_s
                wait_s = max(error.retry_after_s, _LEAST_WAIT_S)
                if now + wait_s - refused_s > self._settings.patience_s:
                    raise LlmCallFailedError(FailedStage.ENGINE, str(error)) from error
                await asyncio.sleep(wait_s)
            except PromptTooLongError as error:
                raise LlmCallFailedError(FailedStage.FILL, str(error)) from error
            except InvalidRequestError as error:
                raise LlmCallFailedError(FailedStage.GENERATE, str(error)) from error

    async def _once(self, request_id: str, asked: Asked, watcher: LlmCallWatcher) -> LlmAnswer:
        terms = watcher.terms()
        generation = await self._generator.start(
            [asked.token_ids],
            asked.sampling,
            request_id=request_id,
            service_class=terms.service_class,
            slo=terms.slo,
            tenant=asked.tenant,
            cache_salt=asked.cache_salt,
            arrival_s=asked.arrival_s,
            hints=terms.hints,
            param="template",
        )
        async with generation:
            watcher.accepted(request_id, generation.service_classes[0])
            return await self._collect(generation, watcher)

    async def _collect(self, generation: Generation, watcher: LlmCallWatcher) -> LlmAnswer:
        text = ""
        token_ids: list[int] = []
        last: TextDelta | None = None
        async for last in generation:
            text += last.text
            token_ids += last.token_ids
            watcher.progress(text, generation.cached_tokens, len(token_ids))
        assert last is not None, "a generation ends with a finish reason"
        if last.finish_reason is FinishReason.ERROR:
            message = last.error or "The engine gave the request up."
            if last.retry_after_s is not None:
                raise OverloadedError(message, last.retry_after_s)
            raise LlmCallFailedError(FailedStage.GENERATE, message)
        if last.finish_reason is FinishReason.ABORT:
            raise LlmCallFailedError(FailedStage.GENERATE, "The request was aborted.")
        ended_by_token = last.finish_reason is FinishReason.STOP and not isinstance(
            last.stop_reason, str
        )
        return LlmAnswer(
            text=text,
            token_ids=tuple(token_ids[:-1] if ended_by_token else token_ids),
            cached_tokens=generation.cached_tokens,
            output_tokens=len(token_ids),
        )


def _gives_the_same(sampling: SamplingParams) -> bool:
    """Whether asking again gives the same text."""
    return sampling.greedy or sampling.seed is not None
