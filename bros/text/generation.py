"""From a prompt to streams of text: n choices, stop strings, log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from dataclasses import dataclass
from typing import Self

from bros.core.clock import Clock
from bros.core.errors import EngineDeadError, InvalidRequestError, PromptTooLongError
from bros.core.interfaces import EngineClient, RequestStream
from bros.core.request import (
    NO_HINTS,
    EngineRequest,
    FinishReason,
    Hints,
    IdGenerator,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    TokenLogprobs,
)
from bros.text.detokenizer import IncrementalDetokenizer, StopMatcher
from bros.text.tokenizer import Tokenizer

_NO_SLO = Slo()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextDelta:
    """What one step gave one choice.

    token_ids and logprobs are the tokens of this step, a final stop token included; text is
    what became certain with them, so it may lag behind and may be empty. The delta with a
    finish_reason is the last one of its choice. stop_reason: with STOP, the stop string or the
    one of stop_token_ids that ended it; None for the model's own end of sequence.
    num_output_tokens counts this choice's tokens so far. error: what happened, with ERROR;
    retry_after_s: that it was for want of capacity, and when to come back.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult:
    """One complete choice; fields as in TextDelta."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_output_tokens: int
    cached_tokens: int
    error: str | None


class TextGenerator:
    """Starts generations on an engine. One per server; holds no state of its own."""

    def __init__(
        self, engine: EngineClient, tokenizer: Tokenizer, clock: Clock, ids: IdGenerator
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock
        self._ids = ids

    async def start(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        service_class: ServiceClass = ServiceClass.RT,
        slo: Slo = _NO_SLO,
        tenant: str = "",
        cache_salt: str = "",
        param: str = "messages",
        arrival_s: float | None = None,
        hints: Hints = NO_HINTS,
    ) -> Generation:
        """Submit sampling.n requests; returns when the engine has accepted all of them.

        arrival_s: from when objectives count, on the generator's clock; None: from now.
        They are called as `numbered(request_id, n)` says. With a seed, choice i uses seed + i.
        `param` is what a PromptTooLongError names. Raises what EngineClient.submit raises;
        nothing is left running then.
        """
        self._check(prompt_token_ids, sampling, param)
        base_id = request_id or self._ids.new("req")
        requests = [
            EngineRequest(
                request_id=choice_id,
                prompt_token_ids=prompt_token_ids,
                sampling=_for_choice(sampling, i),
                service_class=service_class,
                slo=slo,
                arrival_s=self._clock.now() if arrival_s is None else arrival_s,
                tenant=tenant,
                cache_salt=cache_salt,
                hints=hints,
            )
            for i, choice_id in enumerate(numbered(base_id, sampling.n))
        ]
        try:
            streams = await self._submit_all(requests)
        except PromptTooLongError as error:
            raise PromptTooLongError(error.prompt_tokens, error.max_model_len, param) from None
        choices = [
            _Choice(i, request.request_id, sampling, self._tokenizer.detokenizer())
            for i, request in enumerate(requests)
        ]
        return Generation(self._engine, base_id, len(prompt_token_ids), choices, streams)

    def _check(self, prompt: Sequence[int], sampling: SamplingParams, param: str) -> None:
        info = self._engine.info
        if len(prompt) >= info.max_model_len:
            # Here already, so that n copies of a huge prompt never go to the engine.
            raise PromptTooLongError(len(prompt), info.max_model_len, param)
        if sampling.n > info.max_queue:
            message = f"n must be at most {info.max_queue} on this server, got {sampling.n}."
            raise InvalidRequestError(message, "n")

    async def _submit_all(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        # All at once: the engine answers between two steps, so one by one would cost n steps.
        tasks = [asyncio.ensure_future(self._engine.submit(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        except BaseException:
            await _finish_even_if_cancelled(self._withdraw(requests, tasks))
            raise

    async def _withdraw(
        self, requests: Sequence[EngineRequest], tasks: Sequence[asyncio.Future[RequestStream]]
    ) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request, task in zip(requests, tasks, strict=True):
            if not task.cancelled() and task.exception() is None:
                await self._engine.abort(request.request_id)


class Generation:
    """The choices of one `start`, merged in the order in which their text arrives.

    Iterate it once; it ends after every choice's finish_reason. Raises EngineDeadError, once, if
    the engine dies. Cancelling an iteration step loses nothing. Leave it early only with
    `aclose` (or `async with`): nothing else frees the engine's work.
    """

    def __init__(
        self,
        engine: EngineClient,
        request_id: str,
        prompt_tokens: int,
        choices: Sequence[_Choice],
        streams: Sequence[RequestStream],
    ) -> None:
        """Made by TextGenerator.start."""
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self._engine = engine
        self._choices = choices
        self._service_classes = tuple(stream.service_class for stream in streams)
        self._deltas: asyncio.Queue[TextDelta | Exception | None] = asyncio.Queue()
        self._undelivered = len(choices)
        self._pumps = [
            asyncio.create_task(self._pump(choice, stream))
            for choice, stream in zip(choices, streams, strict=True)
        ]
        self._closing: asyncio.Future[None] | None = None

    @property
    def service_classes(self) -> tuple[ServiceClass, ...]:
        """What the engine serves each choice as; BE for real-time ones that were relegated."""
        return self._service_classes

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached before: what the first choice computes is not."""
        begun = [choice.cached_tokens for choice in self._choices if choice.begun]
        return min(begun, default=0)

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_output_tokens for choice in self._choices)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if not self._undelivered:
            raise StopAsyncIteration
        item = await self._deltas.get()
        if item is None:  # closed meanwhile
            raise StopAsyncIteration
        if isinstance(item, Exception):
            await self.aclose()
            raise item
        if item.finish_reason is not None:
            self._undelivered -= 1
        return item

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is unfinished and end the iteration. May be called at any time, repeatedly,
        and from a cancelled task: the clean-up is then completed in the background."""
        self._undelivered = 0
        if self._closing is None:
            self._deltas.put_nowait(None)  # wakes up whoever waits in an iteration step
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for pump, choice in zip(self._pumps, self._choices, strict=True):
            if not choice.finished:  # a finished one may be aborting its request just now
                pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for choice in self._choices:
            if not choice.finished:
                await self._engine.abort(choice.request_id)

    async def _pump(self, choice: _Choice, stream: RequestStream) -> None:
        outputs = aiter(stream)
        try:
            async for output in outputs:
                delta = choice.take(output)
                self._deltas.put_nowait(delta)
                if choice.finished:
                    if output.finish_reason is None:  # a stop string, which the engine cannot see
                        await self._engine.abort(choice.request_id)
                    return
            raise EngineDeadError("The engine's output ended without a finish reason.")
        except Exception as error:
            self._deltas.put_nowait(error)  # raised to whoever iterates
        finally:
            if isinstance(outputs, AsyncGenerator):
                await outputs.aclose()


def numbered(base_id: str, count: int) -> tuple[str, ...]:
    """Ids of `count` parts of one whole: `base_id` itself, or `base_id-0`, `base_id-1`, ..."""
    return (base_id,) if count == 1 else tuple(f"{base_id}-{i}" for i in range(count))


async def collect(generation: Generation) -> list[ChoiceResult]:
    """Wait for every choice; the results in the order of their index."""
    deltas: dict[int, list[TextDelta]] = {}
    async with generation:
        async for delta in generation:
            deltas.setdefault(delta.index, []).append(delta)
    return [_joined(deltas[index]) for index in sorted(deltas)]


def _joined(deltas: Sequence[TextDelta]) -> ChoiceResult:
    last = deltas[-1]
    assert last.finish_reason is not None
    return ChoiceResult(
        index=last.index,
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_output_tokens=last.num_output_tokens,
        cached_tokens=last.cached_tokens,
        error=last.error,
    )


class _Choice:
    """One request's tokens on their way to text."""

    __slots__ = (
        "_detokenizer",
        "_matcher",
        "_sampling",
        "begun",
        "cached_tokens",
        "finished",
        "index",
        "num_output_tokens",
        "request_id",
    )

    def __init__(
        self,
        index: int,
        request_id: str,
        sampling: SamplingParams,
        detokenizer: IncrementalDetokenizer,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_output_tokens = 0
        self.cached_tokens = 0
        self.begun = False
        self.finished = False
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None

    def take(self, output: RequestOutput) -> TextDelta:
        """The delta for one output of the engine. Not to be called after `finished`."""
        reason = output.finish_reason
        shown = len(output.token_ids) - (reason is FinishReason.STOP)
        if self._matcher is None:
            text, stop, count = self._detokenizer.push(output.token_ids[:shown]), None, shown
        else:
            text, stop, count = self._match(output.token_ids[:shown], self._matcher)
        if stop is None:
            count = len(output.token_ids)
            if reason is not None:
                tail, stop = self._flush()
                text += tail
        self.num_output_tokens += count
        self.begun |= bool(output.token_ids)
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        stop_reason: str | int | None = stop
        if stop is not None:
            reason = FinishReason.STOP
        elif reason is FinishReason.STOP and output.token_ids[-1] in self._sampling.stop_token_ids:
            stop_reason = output.token_ids[-1]
        self.finished = reason is not None
        return TextDelta(
            index=self.index,
            text=text,
            token_ids=output.token_ids[:count],
            logprobs=output.logprobs[:count],
            finish_reason=reason,
            stop_reason=stop_reason,
            num_output_tokens=self.num_output_tokens,
            cached_tokens=self.cached_tokens,
            error=output.error if reason is FinishReason.ERROR else None,
            retry_after_s=output.retry_after_s if reason is FinishReason.ERROR else None,
        )

    def _match(self, token_ids: Sequence[int], matcher: StopMatcher) -> tuple[str, str | None, int]:
        """(text, stop string found or None, tokens up to the one that completed it)."""
        text = ""
        for count, token_id in enumerate(token_ids, start=1):
            piece = self._detokenizer.push((token_id,))
            if self.num_output_tokens + count <= self._sampling.min_tokens:
                text += piece
                continue
            piece, stop = matcher.push(piece)
            text += piece
            if stop is not None:
                return text, stop, count
        return text, None, len(token_ids)

    def _flush(self) -> tuple[str, str | None]:
        """What was held back, at the end; a last half character may complete a stop string."""
        tail = self._detokenizer.finish()
        if self._matcher is None:
            return tail, None
        text, stop = self._matcher.push(tail)
        return (text, stop) if stop is not None else (text + self._matcher.finish(), None)


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """What choice `index` asks of the engine, which knows neither n nor stop strings."""
    if sampling.n == 1 and not sampling.stop:
        return sampling
    seed = sampling.seed
    if seed is not None:
        seed = (seed + index + 2**63) % 2**64 - 2**63  # wraps where the largest seed ends
    return sampling.with_changes(n=1, seed=seed, stop=())


async def _finish_even_if_cancelled(work: Coroutine[object, None, None]) -> None:
    """Await `work`; if the caller is cancelled meanwhile, it goes on without it."""
    await asyncio.shield(asyncio.ensure_future(work))
