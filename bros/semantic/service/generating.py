"""Runs one LLM call on the engine, with retries.

the engine is overloaded, or its    wait for its retry-after time, and submit again, in turn with
tenant's limit is reached           others that were refused (RefusedCalls)
the engine died                     wait until it has recovered, and submit again if the text is
                                    reproducible
it is withdrawn, because its        submit it again
class has become another one
any other error                     the LLM call fails
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from bros.core.clock import Clock
from bros.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    QueueFullError,
    TenantLimitError,
)
from bros.core.grammars import is_json
from bros.core.interfaces import EngineClient
from bros.core.request import FinishReason, Grammar, Hints, SamplingParams, ServiceClass, Slo
from bros.semantic.core.prompt import Prompt
from bros.semantic.errors import FailedStage
from bros.semantic.service.live import SessionSettings
from bros.text.answers import AnswerParsing
from bros.text.generation import Generation, TextDelta, TextGenerator

_CHECK_S = 0.05


class EngineRecovery:
    """Waits for a dead engine. All waiters share one polling timer."""

    def __init__(self, engine: EngineClient, clock: Clock, patience_s: float) -> None:
        """patience_s: how long each waiter waits."""
        self._engine = engine
        self._clock = clock
        self._patience_s = patience_s
        # Waiter -> end of its wait, in ascending order, because all wait equally long.
        self._waiting: dict[asyncio.Future[bool], float] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def wait(self) -> bool:
        """Returns True as soon as the engine is alive, False if it does not recover in time."""
        if self._engine.alive:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = self._clock.now() + self._patience_s
        self._schedule_check()
        try:
            return await waiter
        finally:
            self._waiting.pop(waiter, None)

    def _schedule_check(self) -> None:
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_CHECK_S, self._check)

    def _check(self) -> None:
        self._timer = None
        alive, now = self._engine.alive, self._clock.now()
        finished = [
            waiter
            for waiter, _ in itertools.takewhile(
                lambda item: alive or item[1] <= now, self._waiting.items()
            )
        ]
        for waiter in finished:
            del self._waiting[waiter]
            if not waiter.done():
                waiter.set_result(alive)
        self._schedule_check()


Refusal = QueueFullError | OverloadedError | TenantLimitError

_MIN_WAIT_S = 0.01

RETRIES_TOGETHER = 32
"""Refused LLM calls that are submitted again together without knowing of a place, which takes about
5 ms of the server and 2 ms of the engine, between two of its steps."""

RETRIES_EVERY_S = 0.025
"""Pause between these, as long as none is refused again."""

_LOOK_EVERY_S = 1.0
"""How often a line looks for LLM calls that have been promoted; among 10,000 that takes 5 ms."""


class RefusedCalls:
    """A line of LLM calls of one tenant and class that were refused. They try again in their order:

        an accepted call of this tenant and class has ended    one, in its place, unless it was
                                                               cancelled
        the retry-after time of a refusal has passed           RETRIES_TOGETHER; when all have their
                                                               answers and none was refused, as many
                                                               again, and so on

    While there is a line, new calls ask the engine, too, but at most RETRIES_TOGETHER are without
    an answer; others join the line. Each call that `may_ask` or `wait` has allowed to try must call
    `answered`.

    The engine answers between two steps, while all streams wait. If all calls of a program of
    10,000 asked whenever there might be a place, it would refuse a thousand of them at a time, and
    the event loop would do little else, too.
    """

    def __init__(self, on_over: Callable[[], None]) -> None:
        """on_over: called when no call waits, and none has been allowed to ask."""
        self._on_over = on_over
        # Place -> whether its call was promoted. Calls that have tried again come first.
        self._again: OrderedDict[asyncio.Future[None], Callable[[], bool]] = OrderedDict()
        self._first: OrderedDict[asyncio.Future[None], Callable[[], bool]] = OrderedDict()
        self._timer: asyncio.TimerHandle | None = None
        self._is_open = False  # none has been refused since some have tried again
        self._asking = 0  # attempts without an answer
        self._look_s = 0.0
        self.reason = ""
        """Of the last refusal. The error itself would keep the frames alive that it has passed."""

    def __len__(self) -> int:
        return len(self._again) + len(self._first)

    def may_ask(self) -> bool:
        """Whether a new LLM call may try now. If not, it has to wait."""
        if self._asking >= RETRIES_TOGETHER:
            return False
        self._asking += 1
        return True

    async def wait(self, promoted: Callable[[], bool], *, again: bool) -> None:
        """Wait until an LLM call may try.

        promoted: whether it is of another class by now, and so must not wait in this line.
        again: whether it has waited before, and was refused.
        """
        place = asyncio.get_running_loop().create_future()
        line = self._again if again else self._first
        line[place] = promoted
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled():  # another one may try instead
                self._allow(1)
                self.answered()
            raise
        finally:
            line.pop(place, None)
            if not self and self._timer is not None:
                self._timer.cancel()
                self._timer = None
            self._check_over()

    def refused(self, refusal: Refusal) -> None:
        """An LLM call was refused."""
        self.reason = str(refusal)
        wait_s = max(refusal.retry_after_s, _MIN_WAIT_S)
        sooner = self._timer is not None and _now_s() + wait_s < self._timer.when()
        if self._timer is None or self._is_open or sooner:
            self._set_timer(wait_s)
            self._is_open = False

    def ended(self) -> None:
        """A call of this tenant and class that the engine had accepted has ended."""
        self._allow(1)

    def answered(self) -> None:
        """The engine has accepted or refused an LLM call that was allowed to try."""
        self._asking -= 1
        if self and not self._asking and self._timer is None:
            self._is_open = True
            self._set_timer(RETRIES_EVERY_S)
        self._check_over()

    def _check_over(self) -> None:
        if not self and not self._asking:
            self._on_over()

    def _set_timer(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self._try_again)

    def _try_again(self) -> None:
        self._timer = None
        for place in self._promoted():
            self._call(place)
        self._allow(RETRIES_TOGETHER - self._asking)

    def _allow(self, most: int) -> None:
        """Let up to `most` calls try."""
        for line in (self._again, self._first):
            while line and most > 0:
                place, _ = line.popitem(last=False)
                most -= self._call(place)

    def _call(self, place: asyncio.Future[None]) -> bool:
        """Whether the call of this place has not been cancelled, and may try now."""
        if place.done():
            return False
        self._asking += 1
        place.set_result(None)
        return True

    def _promoted(self) -> list[asyncio.Future[None]]:
        """Remove the LLM calls that have been promoted, from time to time."""
        now = _now_s()
        if now < self._look_s:
            return []
        self._look_s = now + _LOOK_EVERY_S
        found = []
        for line in (self._again, self._first):
            leaving = [place for place, promoted in line.items() if promoted()]
            found += leaving
            for place in leaving:
                del line[place]
        return found


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class LlmCallFailedError(Exception):
    """An LLM call has failed, and is not retried. For the fields see Cause."""

    def __init__(self, stage: FailedStage, message: str, variable: str | None = None) -> None:
        super().__init__(message)
        self.stage = stage
        self.message = message
        self.variable = variable


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmRequest:
    """An LLM call as a request for the engine.

    prompt: which is not extended while the call runs.
    arrival_s: time when its last input was set.
    grammar: as in OutputPiece.
    parsing: as in OutputPiece.
    """

    request_id: str
    prompt: Prompt
    sampling: SamplingParams
    tenant: str
    arrival_s: float
    grammar: Grammar | None = None
    parsing: AnswerParsing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationTerms:
    """Scheduling parameters of an engine request, which may change between submissions."""

    service_class: ServiceClass
    slo: Slo
    hints: Hints


@dataclass(frozen=True, slots=True, kw_only=True)
class LlmAnswer:
    """A complete answer of the engine.

    text: without the model's reasoning.
    token_ids: generated tokens, those of the reasoning too, without a stop token at the end. If a
        stop string ended the answer, they extend beyond the text.
    output_tokens: number of generated tokens.
    reasoning_tokens: how many of the first ones are the model's reasoning, markers included.
    """

    text: str
    token_ids: tuple[int, ...]
    output_tokens: int
    reasoning_tokens: int = 0


Progress = Callable[[str, int, int], None]
"""As LlmCallWatcher.progress."""


class LlmCallWatcher(Protocol):
    """Provides the current terms of an LLM call, and receives its events."""

    def terms(self) -> GenerationTerms:
        """The terms for a submission now."""
        ...

    @property
    def service_class(self) -> ServiceClass:
        """That of these terms."""
        ...

    def accepted(
        self, request_id: str, service_class: ServiceClass, withdraw: Callable[[], None]
    ) -> None:
        """The engine has accepted the request with this id and service class.

        withdraw: aborts the request, and submits it again with the terms of then. To be called
            before `ended` only, and at most once.
        """
        ...

    def progress(self, text: str, cached_tokens: int, output_tokens: int) -> None:
        """The engine has generated more. text: the whole text of the current submission."""
        ...

    def ended(self) -> None:
        """What the engine had accepted has ended, however."""
        ...


class LlmCallGenerator:
    """Runs all LLM calls of one engine."""

    def __init__(
        self,
        generator: TextGenerator,
        engine: EngineClient,
        clock: Clock,
        settings: SessionSettings,
    ) -> None:
        self._generator = generator
        self._recovery = EngineRecovery(engine, clock, settings.recovery_s)
        self._clock = clock
        self._settings = settings
        self._refused: dict[tuple[str, ServiceClass], RefusedCalls] = {}

    async def run(self, request: LlmRequest, watcher: LlmCallWatcher) -> LlmAnswer:
        """Returns the complete answer. Cancelling it aborts the engine request.

        Raises LlmCallFailedError.
        """
        deaths, attempt = 0, 0
        first_refused_s: float | None = None
        has_waited = any_output = False

        def progress(text: str, cached_tokens: int, output_tokens: int) -> None:
            nonlocal any_output
            any_output |= output_tokens > 0
            watcher.progress(text, cached_tokens, output_tokens)

        while True:
            attempt += 1
            request_id = request.request_id if attempt == 1 else f"{request.request_id}~{attempt}"
            line = self._refused.get((request.tenant, watcher.service_class))
            if line is not None and (first_refused_s is not None or not line.may_ask()):
                await self._wait(line, watcher, first_refused_s, again=has_waited)
                has_waited = True
            try:
                answer = await self._once(request_id, request, watcher, progress, line)
                if answer is not None:
                    return answer
            except EngineDeadError as error:
                deaths += 1
                may_restart = not any_output or _is_reproducible(request.sampling)
                if deaths > self._settings.retries or not may_restart:
                    raise LlmCallFailedError(FailedStage.ENGINE, str(error)) from error
                if not await self._recovery.wait():
                    raise LlmCallFailedError(FailedStage.ENGINE, str(error)) from error
            except (QueueFullError, OverloadedError, TenantLimitError) as error:
                now = self._clock.now()
                first_refused_s = now if first_refused_s is None else first_refused_s
                if error.retry_after_s > first_refused_s + self._settings.patience_s - now:
                    raise LlmCallFailedError(FailedStage.ENGINE, str(error)) from error
                self._line(request.tenant, watcher.service_class).refused(error)
            except PromptTooLongError as error:
                raise LlmCallFailedError(FailedStage.FILL, str(error)) from error
            except InvalidRequestError as error:
                raise LlmCallFailedError(FailedStage.GENERATE, str(error)) from error

    async def _wait(
        self,
        line: RefusedCalls,
        watcher: LlmCallWatcher,
        first_refused_s: float | None,
        *,
        again: bool,
    ) -> None:
        """Wait in a line until an LLM call may try.

        first_refused_s: when it was refused for the first time; None: it was not.
        again: whether it has waited before.

        Raises LlmCallFailedError if it would wait for longer than the settings allow.
        """
        service_class, left_s = watcher.service_class, self._settings.patience_s
        if first_refused_s is not None:
            left_s -= self._clock.now() - first_refused_s
        try:
            async with asyncio.timeout(left_s):
                await line.wait(lambda: watcher.service_class is not service_class, again=again)
        except TimeoutError:
            raise LlmCallFailedError(FailedStage.ENGINE, line.reason) from None

    def _line(self, tenant: str, service_class: ServiceClass) -> RefusedCalls:
        key = tenant, service_class
        found = self._refused.get(key)
        if found is None:
            found = self._refused[key] = RefusedCalls(lambda: self._end_line(key))
        return found

    def _give_place(self, tenant: str, service_class: ServiceClass) -> None:
        """An accepted LLM call has ended."""
        line = self._refused.get((tenant, service_class))
        if line is not None:
            line.ended()

    def _end_line(self, key: tuple[str, ServiceClass]) -> None:
        self._refused.pop(key, None)

    async def _once(
        self,
        request_id: str,
        request: LlmRequest,
        watcher: LlmCallWatcher,
        progress: Progress,
        line: RefusedCalls | None,
    ) -> LlmAnswer | None:
        """Submit the request once. Returns None if it was withdrawn.

        line: it has allowed that; None: there is none.
        """
        try:
            terms = watcher.terms()
            generation = await self._generator.start(
                [request.prompt.token_ids()],
                request.sampling,
                request_id=request_id,
                service_class=terms.service_class,
                slo=terms.slo,
                tenant=request.tenant,
                arrival_s=request.arrival_s,
                hints=terms.hints,
                param="template",
                parsing=request.parsing,
            )
        finally:
            if line is not None:
                line.answered()
        try:
            async with generation:
                found = await self._watched(request_id, generation, watcher, progress)
        except asyncio.CancelledError:
            raise  # nearly always with its whole session, so that those in the line end, too
        except BaseException:
            self._give_place(request.tenant, terms.service_class)
            raise
        self._give_place(request.tenant, terms.service_class)
        if found is None:
            return None
        answer, last = found
        if answer.reasoning_tokens and not answer.text:
            message = f"The model has reasoned for {answer.output_tokens} tokens without an answer"
            more = "; give more max_tokens" if last.finish_reason is FinishReason.LENGTH else ""
            raise LlmCallFailedError(FailedStage.GENERATE, f"{message}{more}.")
        if request.grammar is not None:
            _check_complete(request.grammar, answer, last)
        return answer

    async def _watched(
        self,
        request_id: str,
        generation: Generation,
        watcher: LlmCallWatcher,
        progress: Progress,
    ) -> tuple[LlmAnswer, TextDelta] | None:
        """`_collect`, until the request is withdrawn; then None."""
        never = asyncio.timeout(None)
        withdraw = partial(never.reschedule, 0.0)  # that time has passed
        try:
            async with never:
                watcher.accepted(request_id, generation.service_classes[0], withdraw)
                try:
                    return await self._collect(generation, progress)
                finally:
                    watcher.ended()
        except TimeoutError:
            if not never.expired():
                raise
            return None  # not an error: if its handling is cancelled, that would refer to the task
        finally:
            del never, withdraw  # they refer to the task, whose error refers to this frame

    async def _collect(
        self, generation: Generation, progress: Progress
    ) -> tuple[LlmAnswer, TextDelta]:
        """The answer and its last delta."""
        text = ""
        token_ids: list[int] = []
        last: TextDelta | None = None
        async for last in generation:
            text += last.text
            token_ids += last.token_ids
            progress(text, generation.cached_tokens, len(token_ids))
        assert last is not None, "a generation ends with a finish reason"
        if last.finish_reason is FinishReason.ERROR:
            message = last.error or "The engine aborted the request."
            if last.retry_after_s is not None:
                raise OverloadedError(message, last.retry_after_s)
            raise LlmCallFailedError(FailedStage.GENERATE, message)
        if last.finish_reason is FinishReason.ABORT:
            raise LlmCallFailedError(FailedStage.GENERATE, "The request was aborted.")
        ended_by_token = last.finish_reason is FinishReason.STOP and not isinstance(
            last.stop_reason, str
        )
        answer = LlmAnswer(
            text=text,
            token_ids=tuple(token_ids[:-1] if ended_by_token else token_ids),
            output_tokens=len(token_ids),
            reasoning_tokens=last.reasoning_tokens,
        )
        return answer, last


def _check_complete(grammar: Grammar, answer: LlmAnswer, last: TextDelta) -> None:
    """Raises LlmCallFailedError for an answer that was cut before it matched its grammar: the calls
    that read it rely on its form."""
    if last.finish_reason is FinishReason.LENGTH:
        failed = f"it was cut after {answer.output_tokens} tokens; give more max_tokens"
    elif isinstance(last.stop_reason, str) and not _is_whole_json(grammar, answer.text):
        failed = f"it was cut by the stop string {last.stop_reason!r}"
    else:
        return
    message = f"The answer does not match '{grammar.param}': {failed}."
    raise LlmCallFailedError(FailedStage.GENERATE, message)


def _is_whole_json(grammar: Grammar, text: str) -> bool:
    """Whether the beginning of a match of a grammar of JSON is all of it: every JSON value has its
    own end but a number."""
    try:
        return is_json(grammar) and type(json.loads(text)) not in (int, float)
    except ValueError:
        return False


def _is_reproducible(sampling: SamplingParams) -> bool:
    """Whether another submission generates the same text."""
    return sampling.greedy or sampling.seed is not None
