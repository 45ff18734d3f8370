"""Contexts: token sequences that a caller fills, generates into, forks and frees.

    system = contexts.new()
    fill(system, s)                    system   [ s ]
    chat = system.fork()               chat     [ s ]
    generate(chat, q, sampling)        chat     [ s | q | answer ]
    generate(system.fork(), r, ...)             [ s | r | answer ]
    free(system)                       chat stays as it is

This is the interface that Parrot expects of an engine (section 7: Fill, Generate, FreeContext),
built on requests and the prefix cache. A context is only a list of tokens; its KV lives in the
prefix cache. So contexts share the KV of common prefixes, in whatever order they are freed, and the
next job of a context recomputes KV that was evicted.
"""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from bros.core.errors import BrosError, InvalidRequestError
from bros.core.interfaces import EngineClient
from bros.core.request import (
    EngineRequest,
    Hints,
    IdGenerator,
    RequestOutput,
    SamplingParams,
    ServiceClass,
)
from bros.text.generation import ChoiceResult, TextGenerator, collect, failure_of

_PARAM = "context"


@dataclass(eq=False, slots=True)
class TokenContext:
    """A token sequence and its state. Only `Contexts` changes it.

    tokens: replaced when a job ends, never modified, because forks share them.
    service_class: of its jobs.
    request_id: the engine request that pins its KV, or the KV of its first tokens.
    busy: a job is running.
    freed: it can no longer be used.
    """

    tokens: array[int]
    service_class: ServiceClass
    request_id: str | None = None
    busy: bool = False
    freed: bool = False

    def fork(self) -> TokenContext:
        """A new context with the same tokens. Raises InvalidRequestError, see `check_idle`."""
        self.check_idle()
        return TokenContext(self.tokens, self.service_class)

    def check_idle(self) -> None:
        """Raises InvalidRequestError if the context was freed or a job is running in it."""
        if self.freed:
            raise InvalidRequestError("The context has been freed.", _PARAM)
        if self.busy:
            raise InvalidRequestError("A job is running in the context.", _PARAM)


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """Append `token_ids` to the context and generate more.

    sampling: with n = 1.
    """

    context: TokenContext
    token_ids: Sequence[int]
    sampling: SamplingParams


class Contexts:
    """Runs the jobs of contexts on one engine. For one event loop.

    A context runs one job at a time. A job that succeeds appends its tokens to the context; one
    that fails or is cancelled leaves the context unchanged, and aborts its requests.

    keep_s: seconds after a job for which its KV stays pinned, see Hints.keep_s.
    """

    def __init__(
        self,
        engine: EngineClient,
        generator: TextGenerator,
        ids: IdGenerator,
        *,
        keep_s: float = 600.0,
    ) -> None:
        self._engine = engine
        self._generator = generator
        self._ids = ids
        self._hints = Hints(keep_s=keep_s)

    def new(self, service_class: ServiceClass = ServiceClass.RT) -> TokenContext:
        """An empty context. service_class: of its jobs, and of those of its forks."""
        return TokenContext(array("i"), service_class)

    async def fill(self, context: TokenContext, token_ids: Sequence[int]) -> None:
        """Append tokens to a context and compute their KV.

        Raises InvalidRequestError if the context was freed, if a job is running in it, or for token
        ids that are none; what EngineClient.submit raises; OverloadedError or BrosError if the
        request fails.
        """
        async with self._reserved([context]) as (request_id,):
            if not token_ids:
                return
            tokens = _extended(context, token_ids)
            request = EngineRequest(
                request_id=request_id,
                prompt_token_ids=tokens,
                sampling=SamplingParams(),
                service_class=context.service_class,
                prefill_only=True,
                hints=self._hints,
            )
            async for output in await self._engine.submit(request):
                _check_success(output)
            await self._replace(context, tokens, request_id)

    async def generate(self, jobs: Sequence[GenerationJob]) -> list[ChoiceResult]:
        """Run jobs of different contexts as one batch; returns their answers in order.

        Each context then has the prompt and the answer: all of its tokens, a final stop token
        included; with a stop string, those up to and including the token in which it ends. If a job
        fails, the others are aborted, and no context changes. Raises InvalidRequestError also for
        n > 1, for a context in two jobs, and for a grammar that cannot go on; otherwise what
        `fill` and TextGenerator.start raise.
        """
        for job in jobs:
            if job.sampling.n != 1:
                message = f"A context has one continuation, got n={job.sampling.n}; fork it."
                raise InvalidRequestError(message, "n")
        async with self._reserved([job.context for job in jobs]) as request_ids:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._generate(job, request_id))
                        for job, request_id in zip(jobs, request_ids, strict=True)
                    ]
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
            answers = [task.result() for task in tasks]
            for job, request_id, answer in zip(jobs, request_ids, answers, strict=True):
                await self._extend(job, request_id, answer)
        return answers

    async def free(self, context: TokenContext) -> int:
        """Unpin a context's KV and end its use; returns its number of tokens, 0 if it was freed.

        Its forks stay as they are. Raises InvalidRequestError if a job is running in it.
        """
        if context.freed:
            return 0
        context.check_idle()
        context.freed = True
        if context.request_id is not None:
            await self._engine.release(context.request_id)
        return len(context.tokens)

    async def _generate(self, job: GenerationJob, request_id: str) -> ChoiceResult:
        generation = await self._generator.start(
            [_extended(job.context, job.token_ids)],
            job.sampling,
            request_id=request_id,
            service_class=job.context.service_class,
            param=_PARAM,
            hints=self._hints,
            streamed=False,
        )
        (answer,) = await collect(generation)
        _check_success(answer)
        return answer

    async def _extend(self, job: GenerationJob, request_id: str, answer: ChoiceResult) -> None:
        """Append the prompt and the answer of a job to its context."""
        context = job.context
        tokens = array("i", [*context.tokens, *job.token_ids, *answer.token_ids])
        if isinstance(answer.stop_reason, str):
            # An abort has ended the request. It pins nothing, or more than the context has. What
            # was pinned before stays pinned; the new KV is cached like that of any request.
            await self._engine.release(request_id)
            context.tokens = tokens
        else:
            await self._replace(context, tokens, request_id)

    @contextlib.asynccontextmanager
    async def _reserved(self, contexts: Sequence[TokenContext]) -> AsyncIterator[list[str]]:
        """Keep other jobs out of these contexts during the block; yields an engine request id for
        each. If the block fails, the requests are aborted and their KV is unpinned."""
        for context in contexts:
            context.check_idle()
        if len(set(map(id, contexts))) < len(contexts):
            message = "A context cannot run two jobs at once; fork it."
            raise InvalidRequestError(message, _PARAM)
        request_ids = [self._ids.new("ctx") for _ in contexts]
        for context in contexts:
            context.busy = True
        try:
            yield request_ids
        except BaseException:
            for request_id in request_ids:
                await self._engine.abort(request_id)
                await self._engine.release(request_id)  # it may have succeeded by then
            raise
        finally:
            for context in contexts:
                context.busy = False

    async def _replace(self, context: TokenContext, tokens: array[int], request_id: str) -> None:
        """Give a context the tokens whose KV a request has computed and pins from now on."""
        before, context.tokens, context.request_id = context.request_id, tokens, request_id
        if before is not None:
            await self._engine.release(before)


def _extended(context: TokenContext, token_ids: Sequence[int]) -> array[int]:
    """The context's tokens and these."""
    try:
        return array("i", [*context.tokens, *token_ids])
    except (OverflowError, TypeError) as error:
        raise InvalidRequestError(f"Token ids are integers of 32 bits: {error}.", _PARAM) from None


def _check_success(result: RequestOutput | ChoiceResult) -> None:
    """Raises what `failure_of` makes of a request that failed or was aborted."""
    if result.finish_reason is not None and not result.finish_reason.complete:
        raise failure_of(result, BrosError, "The job was aborted.")
