"""From prompts to streams of text: n choices of each, stop strings, log-probabilities.

    engine -- outputs of a step --> client --> _Choice.put      text, stop strings: in its slot
                                                    |
    reader <-- TextDelta -- Generation <-- filled --+           waits for any slot

There is one slot for each choice and nothing between it and the engine's client. What comes before
the reader has taken the last delta is merged into that one: nothing queues.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

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


@dataclass(slots=True)
class TextDelta:
    """What one choice was given since its last delta: by one step, or more if the reader is slow.

    Not frozen, as one is made per token, and that takes three times as long.
    """

    index: int
    """Choice i of prompt p has index p * n + i."""
    text: str
    """What became certain; it may lag behind the tokens and may be empty."""
    token_ids: tuple[int, ...] = ()
    """Of these steps, a final stop token included."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of token_ids, if they were asked for."""
    finish_reason: FinishReason | None = None
    """Only in the last delta of a choice, and always there."""
    stop_reason: str | int | None = None
    """With STOP: the stop string or the one of stop_token_ids that ended the choice; None for the
    model's own end of sequence."""
    num_output_tokens: int = 0
    """Tokens of this choice so far."""
    cached_tokens: int = 0
    error: str | None = None
    """With ERROR: what happened."""
    retry_after_s: float | None = None
    """With ERROR: that it was for want of capacity, and when to come back."""


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
        """`start_all` with one prompt."""
        return await self.start_all(
            [prompt_token_ids],
            sampling,
            request_id=request_id,
            service_class=service_class,
            slo=slo,
            tenant=tenant,
            cache_salt=cache_salt,
            param=param,
            arrival_s=arrival_s,
            hints=hints,
        )

    async def start_all(
        self,
        prompts: Sequence[Sequence[int]],
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
        """Submit sampling.n requests for each prompt; returns when the engine has accepted all.

        arrival_s: from when objectives count, on the generator's clock; None: from now.
        They are called as `choice_ids` says. With a seed, choice i of a prompt uses seed + i.
        `param` is what a PromptTooLongError names. Raises what EngineClient.submit raises;
        nothing is left running then.
        """
        for prompt in prompts:
            self._check(prompt, sampling, param)
        base_id = request_id or self._ids.new("req")
        each = [(prompt, i) for prompt in prompts for i in range(sampling.n)]
        requests = [
            EngineRequest(
                request_id=choice_id,
                prompt_token_ids=prompt,
                sampling=_for_choice(sampling, i),
                service_class=service_class,
                slo=slo,
                arrival_s=self._clock.now() if arrival_s is None else arrival_s,
                tenant=tenant,
                cache_salt=cache_salt,
                hints=hints,
            )
            for (prompt, i), choice_id in zip(
                each, choice_ids(base_id, len(prompts), sampling.n), strict=True
            )
        ]
        try:
            streams = await self._submit_all(requests)
        except PromptTooLongError as error:
            raise PromptTooLongError(error.prompt_tokens, error.max_model_len, param) from None
        return Generation(self._engine, base_id, requests, streams, sampling, self._tokenizer)

    def _check(self, prompt: Sequence[int], sampling: SamplingParams, param: str) -> None:
        info = self._engine.info
        if len(prompt) >= info.max_model_len:
            # Here already, so that n copies of a huge prompt never go to the engine.
            raise PromptTooLongError(len(prompt), info.max_model_len, param)
        if sampling.n > info.max_queue:
            message = f"n must be at most {info.max_queue} on this server, got {sampling.n}."
            raise InvalidRequestError(message, "n")

    async def _submit_all(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        if len(requests) == 1:
            return [await self._engine.submit(requests[0])]
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
    """The choices of one `start_all`, in the order in which their slots are filled.

    Iterate it once, or call `ready` until it is empty: it ends after every choice's finish_reason.
    Raises EngineDeadError, once and after what came before, if the engine dies. Cancelling an
    iteration step loses nothing. Leave it early only with `aclose` (or `async with`): nothing else
    frees the engine's work.
    """

    def __init__(
        self,
        engine: EngineClient,
        request_id: str,
        requests: Sequence[EngineRequest],
        streams: Sequence[RequestStream],
        sampling: SamplingParams,
        tokenizer: Tokenizer,
    ) -> None:
        """Made by TextGenerator.start_all."""
        self.request_id = request_id
        self._engine = engine
        self._n = sampling.n
        self._prompt_tokens = sum(
            len(request.prompt_token_ids) for request in requests[:: sampling.n]
        )
        self._service_classes = tuple(stream.service_class for stream in streams)
        self._unread = len(requests)
        self._filled: deque[_Choice] = deque()
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self._aborts: list[asyncio.Future[None]] = []
        self._closing: asyncio.Future[None] | None = None
        self._choices = [
            _Choice(i, request.request_id, sampling, tokenizer.detokenizer(), self)
            for i, request in enumerate(requests)
        ]
        for choice, stream in zip(self._choices, streams, strict=True):
            stream.connect(choice.put)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts, each counted once."""
        return self._prompt_tokens

    @property
    def service_classes(self) -> tuple[ServiceClass, ...]:
        """What the engine serves each choice as; BE for real-time ones that were relegated."""
        return self._service_classes

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached before: what the first choice computes is not."""
        total = 0
        for first in range(0, len(self._choices), self._n):
            group = self._choices[first : first + self._n]
            total += min((choice.cached_tokens for choice in group if choice.begun), default=0)
        return total

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all choices so far."""
        return sum(choice.num_output_tokens for choice in self._choices)

    async def ready(self) -> list[TextDelta]:
        """Wait until any slot is filled, and take what is in all of them; empty at the end."""
        if await self._wait():
            return [self._take() for _ in range(len(self._filled))]
        return []

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if await self._wait():
            return self._take()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort what is unfinished and end the iteration. May be called at any time, repeatedly,
        and from a cancelled task: the clean-up is then completed in the background."""
        self._unread = 0
        if self._closing is None:
            self._wake()
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    # For choices

    def on_filled(self, choice: _Choice) -> None:
        """The slot of a choice, which was empty, has something."""
        self._filled.append(choice)
        self._wake()

    def on_stop_string(self, choice: _Choice) -> None:
        """It is finished, which the engine cannot see."""
        self._aborts.append(asyncio.ensure_future(self._engine.abort(choice.request_id)))

    def on_failure(self, error: Exception) -> None:
        """Nothing follows from one of the choices. Of several errors the first is raised."""
        self._failure = self._failure or error
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    async def _wait(self) -> bool:
        """Until there is a delta to take; False if none follows."""
        while self._unread:
            if self._filled:
                return True
            if self._failure is not None:
                error = self._failure
                await self.aclose()
                raise error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        return False

    def _take(self) -> TextDelta:
        delta = self._filled.popleft().take()
        if delta.finish_reason is not None:
            self._unread -= 1
        return delta

    async def _close(self) -> None:
        unfinished = [choice for choice in self._choices if not choice.finished]
        for choice in unfinished:
            choice.finished = True  # what the engine still says is not for anyone
        await asyncio.gather(*self._aborts, return_exceptions=True)
        for choice in unfinished:
            await self._engine.abort(choice.request_id)


def numbered(base_id: str, count: int) -> tuple[str, ...]:
    """Ids of `count` parts of one whole: `base_id` itself, or `base_id-0`, `base_id-1`, ..."""
    return (base_id,) if count == 1 else tuple(f"{base_id}-{i}" for i in range(count))


def choice_ids(base_id: str, prompts: int, n: int) -> tuple[str, ...]:
    """What the engine knows the choices of a request as, by index: n for each prompt."""
    return tuple(
        choice_id
        for prompt_id in numbered(base_id, prompts)
        for choice_id in numbered(prompt_id, n)
    )


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
    """One request's slot: its outputs become text when they come, and wait in it for the reader."""

    __slots__ = (
        *("_detokenizer", "_generation", "_logprobs", "_matcher", "_sampling"),
        *("_text", "_token_ids", "_waiting", "_end", "begun", "cached_tokens", "finished"),
        *("index", "num_output_tokens", "request_id"),
    )

    def __init__(
        self,
        index: int,
        request_id: str,
        sampling: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        generation: Generation,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_output_tokens = 0
        self.cached_tokens = 0
        self.begun = False
        self.finished = False
        """Nothing is put any more."""
        self._generation = generation
        self._sampling = sampling
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None
        self._waiting = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._end: _End | None = None

    def put(self, item: RequestOutput | EngineDeadError) -> None:
        """Take in what the engine's client hands over, as an OutputSink."""
        if self.finished:
            return
        if isinstance(item, Exception):
            self._generation.on_failure(item)
            return
        try:
            self._add(item)
        except Exception as error:  # raised to the reader; others are not to suffer
            self._generation.on_failure(error)
            return
        if not self._waiting:
            self._waiting = True
            self._generation.on_filled(self)

    def take(self) -> TextDelta:
        """Empty the slot, which must have been filled."""
        end = self._end or _NOT_ENDED
        delta = TextDelta(
            self.index,
            "".join(self._text),
            tuple(self._token_ids),
            tuple(self._logprobs) if self._logprobs else (),
            end.reason,
            end.stop_reason,
            self.num_output_tokens,
            self.cached_tokens,
            end.error,
            end.retry_after_s,
        )
        self._waiting = False
        self._text.clear()
        self._token_ids.clear()
        self._logprobs.clear()
        return delta

    def _add(self, output: RequestOutput) -> None:
        token_ids, reason = output.token_ids, output.finish_reason
        if token_ids:
            self.begun = True
        if output.cached_tokens > self.cached_tokens:
            self.cached_tokens = output.cached_tokens
        if reason is None and self._matcher is None:  # by far the most
            self._text.append(self._detokenizer.push(token_ids))
            self._keep(output, len(token_ids))
            return
        shown = len(token_ids) - (reason is FinishReason.STOP)
        stop: str | None = None
        if self._matcher is None:
            text, count = self._detokenizer.push(token_ids[:shown]), shown
        else:
            text, stop, count = self._match(token_ids[:shown], self._matcher)
        if stop is None:
            count = len(token_ids)
            if reason is not None:
                tail, stop = self._flush()
                text += tail
        self._text.append(text)
        self._keep(output, count)
        self._finish(output, stop)

    def _keep(self, output: RequestOutput, count: int) -> None:
        """The first `count` of its tokens belong to the answer."""
        self._token_ids += output.token_ids[:count]
        self.num_output_tokens += count
        if output.logprobs:
            self._logprobs += output.logprobs[:count]

    def _finish(self, output: RequestOutput, stop: str | None) -> None:
        """Note the end, if this is it. stop: the stop string that was found."""
        reason = output.finish_reason
        if stop is not None:
            self._end = _End(FinishReason.STOP, stop)
            if reason is None:
                self._generation.on_stop_string(self)
        elif reason is FinishReason.STOP and output.token_ids[-1] in self._sampling.stop_token_ids:
            self._end = _End(reason, output.token_ids[-1])
        elif reason is FinishReason.ERROR:
            self._end = _End(reason, None, output.error, output.retry_after_s)
        elif reason is not None:
            self._end = _End(reason)
        self.finished = self._end is not None

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


class _End(NamedTuple):
    """How a choice ended; the fields of TextDelta."""

    reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    retry_after_s: float | None = None


_NOT_ENDED = _End()


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
