"""Contexts: token sequences that are filled, generated into, forked and freed by name.

    fill("system", None, s)                      system   [ s ]
    fill("chat", "system", q)                    chat     [ s | q ]             forked from "system"
    generate("chat", "system", a, sampling)      chat     [ s | q | a | what was generated ]
    generate("other", "system", b, sampling)     other    [ s | b | what was generated ]
    free("system")                               chat and other stay as they are

This is the interface that Parrot expects of an engine (section 7: Fill, Generate, FreeContext), on
top of requests and the prefix cache. A context is a list of tokens; its KV is whatever the cache
has of them. So what contexts have in common is computed once and held once, whichever is freed
first, and a context whose KV was evicted is computed again and never wrong.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from bros.core.errors import BrosError, InvalidRequestError, OverloadedError
from bros.core.interfaces import EngineClient
from bros.core.request import (
    NO_HINTS,
    EngineRequest,
    Hints,
    IdGenerator,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
)


@dataclass(slots=True)
class _Context:
    """parent_id: of the context that it was forked from.
    tokens: replaced when a job ends, never changed, as forks have the same ones.
    request_id: of its last job, which keeps its KV.
    busy: a job runs.
    is_new: none has ended well.
    """

    parent_id: str | None
    tokens: array[int]
    request_id: str | None = None
    busy: bool = False
    is_new: bool = True


class Contexts:
    """Contexts of one engine, by ids that callers choose. For one event loop.

    A context comes into being with the first job of an unknown id, as a fork of its parent's tokens
    at that time. It has one job at a time, and what a job adds becomes part of it when the job
    has ended; one that fails, or is aborted, leaves it as it was.
    keep_s: for how long after a job the KV is kept for the next one, see Hints.keep_s.
    cache_salt: see EngineRequest.
    """

    def __init__(
        self,
        engine: EngineClient,
        ids: IdGenerator,
        *,
        keep_s: float = 600.0,
        cache_salt: str = "",
    ) -> None:
        self._engine = engine
        self._ids = ids
        self._keep_s = keep_s
        self._cache_salt = cache_salt
        self._contexts: dict[str, _Context] = {}

    def __len__(self) -> int:
        return len(self._contexts)

    def token_ids(self, context_id: str) -> Sequence[int]:
        """Tokens of a context so far; of none if it is unknown."""
        context = self._contexts.get(context_id)
        return () if context is None else tuple(context.tokens)

    async def fill(
        self,
        context_id: str,
        parent_id: str | None,
        token_ids: Sequence[int],
        *,
        service_class: ServiceClass = ServiceClass.RT,
        slo: Slo | None = None,
        hints: Hints = NO_HINTS,
    ) -> int:
        """Add tokens to a context and compute their KV; returns how many were added.

        Without tokens it only forks. Raises InvalidRequestError if a job runs in the context or in
        the parent that it is forked from, if there is no such parent or it is another one than it
        was forked from, and what EngineClient.submit raises; OverloadedError or BrosError if the
        job fails.
        """
        if not token_ids:
            self._find(context_id, parent_id).is_new = False
            return 0
        job = EngineRequest(
            request_id=self._ids.new("ctx"),
            prompt_token_ids=token_ids,
            sampling=SamplingParams(),
            service_class=service_class,
            slo=slo or Slo(),
            cache_salt=self._cache_salt,
            prefill_only=True,
            hints=hints,
        )
        async for _ in self._run(context_id, parent_id, job):
            pass
        return len(token_ids)

    def generate(
        self,
        context_id: str,
        parent_id: str | None,
        token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        service_class: ServiceClass = ServiceClass.RT,
        slo: Slo | None = None,
        hints: Hints = NO_HINTS,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Add tokens to a context and generate more: the outputs of the engine.

        All of it becomes part of the context with the last output, a stop token included. The job
        begins when the first output is asked for; who wants no more of them closes the generator.
        `sampling.n` and `sampling.stop` are the caller's business, see EngineRequest. The iterator
        raises what `fill` does.
        """
        job = EngineRequest(
            request_id=self._ids.new("ctx"),
            prompt_token_ids=token_ids,
            sampling=sampling,
            service_class=service_class,
            slo=slo or Slo(),
            cache_salt=self._cache_salt,
            hints=hints,
        )
        return self._run(context_id, parent_id, job)

    async def free(self, context_id: str) -> int:
        """Forget a context and keep nothing for it; returns how many tokens it had, 0 if unknown.

        Contexts that were forked from it stay as they are. Raises InvalidRequestError if a job runs
        in it.
        """
        context = self._contexts.get(context_id)
        if context is None:
            return 0
        _check_idle(context_id, context)
        del self._contexts[context_id]
        if context.request_id is not None:
            await self._engine.release(context.request_id)
        return len(context.tokens)

    def _find(self, context_id: str, parent_id: str | None) -> _Context:
        """The context for the next job; a fork of its parent if it is unknown."""
        context = self._contexts.get(context_id)
        if context is None:
            context = _Context(parent_id, self._forked(parent_id))
            self._contexts[context_id] = context
        elif parent_id is not None and parent_id != context.parent_id:
            raise InvalidRequestError(
                f"context {context_id!r} was not forked from {parent_id!r}.", "parent_id"
            )
        _check_idle(context_id, context)
        return context

    def _forked(self, parent_id: str | None) -> array[int]:
        if parent_id is None:
            return array("i")
        parent = self._contexts.get(parent_id)
        if parent is None:
            raise InvalidRequestError(f"there is no context {parent_id!r}.", "parent_id")
        _check_idle(parent_id, parent)
        return parent.tokens

    async def _run(
        self, context_id: str, parent_id: str | None, job: EngineRequest
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a job the prompt of which is added to its context."""
        context = self._find(context_id, parent_id)
        tokens = array("i", [*context.tokens, *job.prompt_token_ids])
        hints = replace(job.hints, keep_s=self._keep_s)
        context.busy, done = True, False
        try:
            stream = await self._engine.submit(replace(job, prompt_token_ids=tokens, hints=hints))
            async for output in stream:
                tokens.extend(output.token_ids)
                if output.finish_reason is not None:
                    _check_success(output)
                    before = context.request_id
                    context.tokens, context.request_id = tokens, job.request_id
                    context.busy = context.is_new = False
                    done = True
                    if before is not None:
                        await self._engine.release(before)
                yield output
        finally:
            if not done:
                context.busy = False
                if context.is_new:
                    del self._contexts[context_id]
                await self._engine.abort(job.request_id)
                await self._engine.release(job.request_id)  # it may have ended well by then


def _check_success(last: RequestOutput) -> None:
    """Raise what a job ended with, unless it ended well."""
    if last.finish_reason is not None and last.finish_reason.complete:
        return
    message = last.error or "The job was aborted."
    if last.retry_after_s is not None:
        raise OverloadedError(message, last.retry_after_s)
    raise BrosError(message)


def _check_idle(context_id: str, context: _Context) -> None:
    if context.busy:
        raise InvalidRequestError(f"a job runs in context {context_id!r}.", "context_id")
