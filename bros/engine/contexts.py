"""Contexts: named token sequences that callers fill, generate into, fork and free.

    fill("system", None, s)                      system   [ s ]
    fill("chat", "system", q)                    chat     [ s | q ]             forked from "system"
    generate("chat", "system", a, sampling)      chat     [ s | q | a | output ]
    generate("other", "system", b, sampling)     other    [ s | b | output ]
    free("system")                               chat and other stay as they are

This is the interface that Parrot expects of an engine (section 7: Fill, Generate, FreeContext),
built on requests and the prefix cache. A context is only a list of tokens; its KV lives in the
prefix cache. So contexts share the KV of common prefixes, in whatever order they are freed, and the
next job of a context recomputes KV that was evicted.
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
    """parent_id: the context that it was forked from.
    tokens: replaced when a job ends, never modified, because forks share them.
    request_id: the request of its last job, which pins its KV.
    busy: a job is running.
    is_new: no job has succeeded yet.
    """

    parent_id: str | None
    tokens: array[int]
    request_id: str | None = None
    busy: bool = False
    is_new: bool = True


class Contexts:
    """Contexts of one engine, by ids that callers choose. For one event loop.

    The first job with an unknown id creates the context as a fork of its parent's current tokens. A
    context runs one job at a time. A job that succeeds appends its tokens to the context; one that
    fails or is aborted leaves the context unchanged.

    keep_s: seconds after a job for which its KV stays pinned, see Hints.keep_s.
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
        """The current tokens of a context; empty if it is unknown."""
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
        """Append tokens to a context and compute their KV; returns how many were appended.

        Without tokens it only forks. Raises InvalidRequestError if a job is running in the context
        or in the parent to fork from, if the parent does not exist, or if the context was forked
        from another parent; what EngineClient.submit raises; OverloadedError or BrosError if the
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
        """Append tokens to a context and generate more; yields the outputs of the engine.

        With the last output the context has all these tokens, a stop token included. The job starts
        with the first iteration; closing the generator aborts it. `sampling.n` and `sampling.stop`
        have no effect, see EngineRequest. Iterating raises what `fill` raises.
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
        """Remove a context and unpin its KV; returns its number of tokens, 0 if it is unknown.

        Its forks stay as they are. Raises InvalidRequestError if a job is running in it.
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
        """The context for the next job; an unknown one is forked from its parent."""
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
        """Run a job whose prompt is appended to its context; yields the outputs."""
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
                await self._engine.release(job.request_id)  # it may have succeeded by then


def _check_success(last: RequestOutput) -> None:
    """Raise OverloadedError or BrosError if a job failed or was aborted."""
    if last.finish_reason is not None and last.finish_reason.complete:
        return
    message = last.error or "The job was aborted."
    if last.retry_after_s is not None:
        raise OverloadedError(message, last.retry_after_s)
    raise BrosError(message)


def _check_idle(context_id: str, context: _Context) -> None:
    if context.busy:
        raise InvalidRequestError(f"a job runs in context {context_id!r}.", "context_id")
