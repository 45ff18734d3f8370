"""From prompts to streams of text: n choices per prompt, stop strings, log-probabilities.

    engine -- outputs of a step --> client --> _Choice.put      detokenizes, parses, matches stops
                                                    |
    reader <-- TextDelta -- Generation <-- filled --+           waits for any slot
    sink   <-- text --------+  at the end of a turn of the event loop

Each choice has a slot for new output. The engine's client fills it directly; outputs that arrive
before the reader has taken its content are added to it, so nothing queues. A reader either waits
for deltas, or has the output forwarded to a sink, which costs no task switch per token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, Self

from bros.core.clock import Clock
from bros.core.errors import (
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
    TenantLimitError,
)
from bros.core.interfaces import EngineClient, RequestStream
from bros.core.request import (
    NO_HINTS,
    EngineRequest,
    FinishReason,
    Hints,
    IdGenerator,
    Output,
    PackedLogprobs,
    PromptLogprobs,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    TokenLogprobs,
    expanded,
)
from bros.core.tenants import REQUESTS, QuotaHolds, Resource, TenantAccounts
from bros.text.answers import AnswerParser, AnswerParsing, AnswerPart, ReasoningPart, TextPart
from bros.text.public_prefixes import PublicPrefixes
from bros.text.stop_strings import StopMatcher
from bros.text.tokenizer import Tokenizer

_NO_SLO = Slo()


@dataclass(slots=True)
class TextDelta:
    """The new output of one choice: of one step, or of several if the reader is slow.

    Not frozen, because many are made, and freezing would triple the time.

    index: choice i of prompt p has index p * n + i.
    text: may be empty, and may lag behind the tokens, because text that was given never changes.
    token_ids: new tokens, a final stop token included.
    logprobs: one per token, if requested.
    prompt_logprobs: of the next prompt tokens, if requested; all come before the first token.
    finish_reason: set in the last delta of a choice.
    stop_reason: with STOP: the stop string or stop_token_ids entry that ended the choice; None for
        the model's own end of sequence.
    num_output_tokens: tokens of this choice so far.
    cached_tokens: prompt tokens that were in the prefix cache.
    error: with ERROR: why the request failed.
    retry_after_s: with ERROR: the request was dropped for lack of capacity; the client may retry
        after this many seconds.
    param: with ERROR: the field of the request with the grammar, which cannot go on.
    parts: if the answer is parsed: its new parts. Then `text` is that of the TextParts among them.
    reasoning_tokens: if the answer is parsed: tokens of its reasoning so far, markers included.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: Sequence[TokenLogprobs] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_output_tokens: int = 0
    cached_tokens: int = 0
    error: str | None = None
    retry_after_s: float | None = None
    param: str | None = None
    parts: tuple[AnswerPart, ...] = ()
    reasoning_tokens: int = 0
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceResult:
    """One complete choice; fields as in TextDelta.

    reasoning: if the answer is parsed: what the model thought before it, without the markers.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_output_tokens: int
    cached_tokens: int
    error: str | None
    retry_after_s: float | None = None
    param: str | None = None
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    reasoning: str = ""


def failure_of(
    ended: RequestOutput | TextDelta | ChoiceResult,
    otherwise: type[BrosError],
    default: str = "The engine ended the request before it was complete.",
) -> BrosError:
    """The exception for a request that the engine has ended incomplete: OverloadedError if it was
    dropped for lack of capacity, InvalidRequestError if its grammar cannot go on, else `otherwise`.

    default: the message if the engine gave none.
    """
    message = ended.error or default
    if ended.retry_after_s is not None:
        return OverloadedError(message, ended.retry_after_s)
    if ended.param is not None:
        return InvalidRequestError(message, ended.param, "invalid_grammar")
    return otherwise(message)


class DeltaSink(Protocol):
    """Receives forwarded output synchronously, see Generation.forward."""

    def ready(self) -> bool:
        """False ends the forwarding: the next output has to wait, e.g. for a slow client."""
        ...

    def put_text(self, index: int, text: str, num_tokens: int) -> None:
        """New text of an unfinished choice, without logprobs."""
        ...

    def put(self, delta: TextDelta) -> None:
        """New output of an unfinished choice."""
        ...


_FORWARDED = 2_000
_RICH_FORWARDED = 100
"""Outputs that are forwarded in one turn of the event loop: of text, and with more than that."""


class _OutputForwarder:
    """Choices whose slots were filled in the current turn of the event loop.

    They forward their output at its end, so outputs of several steps in one turn become one.
    """

    def __init__(self) -> None:
        self._filled: list[_Choice] = []

    def add(self, choice: _Choice) -> None:
        if not self._filled:
            asyncio.get_running_loop().call_soon(self._end)
        self._filled.append(choice)

    def _end(self) -> None:
        """Forward the outputs; if they are many with log-probabilities or parts, in several turns,
        since each of these takes up to 0.1 ms."""
        filled, self._filled = self._filled, []
        left = _FORWARDED
        for number, choice in enumerate(filled, start=1):
            left -= 1 if choice.is_cheap else _FORWARDED // _RICH_FORWARDED
            choice.forward()
            if left <= 0 and number < len(filled):
                self._filled = filled[number:] + self._filled
                asyncio.get_running_loop().call_soon(self._end)
                return


@dataclass(slots=True)
class Occupancy:
    """How many of something there are, and the time integral of that number.

    count: their number now.
    total_s: their number times seconds, until as_of_s.
    """

    count: int = 0
    total_s: float = 0.0
    as_of_s: float = 0.0

    def change(self, by: int, now: float) -> None:
        """Count `by` more, or fewer if it is negative."""
        self.total_s, self.as_of_s = self.seconds(now), now
        self.count += by

    def seconds(self, now: float) -> float:
        """The integral until now."""
        return self.total_s + self.count * (now - self.as_of_s)


class TextGenerator:
    """Starts generations on an engine. One per server.

    open: the real-time requests that it has started, those of `without_limits` included.
    """

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer,
        clock: Clock,
        ids: IdGenerator,
        accounts: TenantAccounts | None = None,
        public: PublicPrefixes | None = None,
        open_requests: Occupancy | None = None,
    ) -> None:
        """accounts: count the open requests of each tenant; None: there are no limits.
        public: what tenants share; None: nothing.
        open_requests: where real-time requests are counted; None: a new one.
        """
        self.public = public
        self.open = Occupancy() if open_requests is None else open_requests
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock
        self._ids = ids
        self._forwarder = _OutputForwarder()
        self._accounts = accounts or TenantAccounts()

    def without_limits(self) -> TextGenerator:
        """The same without limits of tenants but those of traces, for requests whose number is
        limited otherwise."""
        return TextGenerator(
            self._engine,
            self._tokenizer,
            self._clock,
            self._ids,
            self._accounts.of_batches(),
            public=self.public,
            open_requests=self.open,
        )

    async def start(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams,
        *,
        request_id: str | None = None,
        service_class: ServiceClass = ServiceClass.RT,
        slo: Slo = _NO_SLO,
        tenant: str = "",
        user: str = "",
        cache_salt: str = "",
        param: str = "messages",
        arrival_s: float | None = None,
        checked_s: float = 0.0,
        hints: Hints = NO_HINTS,
        parsing: AnswerParsing | None = None,
        streamed: bool = True,
    ) -> Generation:
        """Submit sampling.n requests per prompt; returns when the engine has accepted all.

        request_id: base of the engine's request ids, see choice_ids. None: a new one.
        param: the request field that a PromptTooLongError names.
        arrival_s: time from which the objectives count, on this generator's clock; None: now.
        checked_s: for how long the check of its grammar was waited for since then.
        parsing: reads the parts of each answer; None: answers are nothing but text that goes on
            where their prompt ends. Stop strings are searched in the text of an answer only, not in
            its reasoning and its calls.
        streamed: the caller wants tokens as they come; else best-effort ones come many at once, and
            those that have not come when it closes do not count for the tenant.

        With a seed, choice i of a prompt uses seed + i. Raises TenantLimitError if the tenant would
        have too many open requests, and what EngineClient.submit raises, after aborting all of the
        requests.
        """
        for prompt in prompts:
            self.check(len(prompt), sampling, param)
        base_id = request_id or self._ids.new("req")
        names = iter(choice_ids(base_id, len(prompts), sampling.n))
        max_traces = self._accounts.limits(tenant).traces
        # A stop string has to be found before the engine generates more tokens after it.
        gathered = not (streamed or sampling.stop) and service_class is ServiceClass.BE
        requests: list[EngineRequest] = []
        for prompt in prompts:
            public = 0 if self.public is None else self.public.count(prompt, cache_salt)
            requests += (
                EngineRequest(
                    request_id=next(names),
                    prompt_token_ids=prompt,
                    sampling=_for_choice(sampling, choice),
                    service_class=service_class,
                    slo=slo,
                    arrival_s=self._clock.now() if arrival_s is None else arrival_s,
                    tenant=tenant,
                    user=user,
                    max_traces=max_traces,
                    public_tokens=public,
                    cache_salt=cache_salt,
                    hints=hints,
                    checked_s=checked_s,
                    gathered=gathered,
                )
                for choice in range(sampling.n)
            )
        counted = [REQUESTS[service_class]]
        if sampling.grammar is not None:
            counted.append(Resource.GRAMMARS)
        held = self._accounts.hold_all(tenant, counted, len(requests))
        try:
            streams = await self._submit_counted(tenant, sum(map(len, prompts)), requests)
        except PromptTooLongError as error:
            held.release()
            raise PromptTooLongError(error.prompt_tokens, error.max_model_len, param) from None
        except BaseException:
            held.release()
            raise
        if parsing is None:
            parsing = AnswerParsing(None, partial(self._tokenizer.detokenizer, continued=True))
        count_open = self._count_open if service_class is ServiceClass.RT else None
        return Generation(
            self._engine,
            base_id,
            requests,
            streams,
            sampling,
            parsing,
            self._forwarder,
            held=held,
            output=HeldOutput(self._accounts, tenant),
            count_tokens=partial(self._accounts.count_tokens, tenant),
            count_open=count_open,
        )

    async def _submit_counted(
        self, tenant: str, prompt_tokens: int, requests: Sequence[EngineRequest]
    ) -> list[RequestStream]:
        """Submit the requests of a call, which counts for the limits per minute."""
        self._accounts.begin_request(tenant, prompt_tokens)
        try:
            return await self._submit_all(requests)
        except BaseException:
            self._accounts.undo_request(tenant, prompt_tokens)
            raise

    def _count_open(self, by: int) -> None:
        self.open.change(by, self._clock.now())

    def check(self, num_tokens: int, sampling: SamplingParams, param: str) -> None:
        """Raises PromptTooLongError or InvalidRequestError if a prompt of `num_tokens` cannot be
        served. param: as for `start`."""
        info = self._engine.info
        if num_tokens + (sampling.max_tokens != 0) > info.max_model_len:
            # Checked here, so that n copies of a huge prompt never go to the engine.
            raise PromptTooLongError(num_tokens, info.max_model_len, param)
        if sampling.n > info.max_queue:
            message = f"n must be at most {info.max_queue} on this server, got {sampling.n}."
            raise InvalidRequestError(message, "n")

    async def _submit_all(self, requests: Sequence[EngineRequest]) -> list[RequestStream]:
        if len(requests) == 1:
            return [await self._engine.submit(requests[0])]
        # Concurrently: the engine accepts between two steps, so one by one would take n steps. But
        # not all in one turn of the event loop, which encodes each copy of a prompt.
        tasks: list[asyncio.Future[RequestStream]] = []
        try:
            in_turn = 0
            for request in requests:
                in_turn += len(request.prompt_token_ids) + _TOKENS_PER_REQUEST
                if in_turn > MAX_SUBMITTED_TOKENS and tasks:
                    await asyncio.sleep(0)
                    in_turn = len(request.prompt_token_ids) + _TOKENS_PER_REQUEST
                tasks.append(asyncio.ensure_future(self._engine.submit(request)))
            return await asyncio.gather(*tasks)
        except BaseException:
            await _finish_even_if_cancelled(self._abort_all(requests, tasks))
            tasks.clear()  # they have the error that knows this frame
            raise

    async def _abort_all(
        self, requests: Sequence[EngineRequest], tasks: Sequence[asyncio.Future[RequestStream]]
    ) -> None:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request, task in zip(requests, tasks, strict=False):  # the last ones were not submitted
            if not task.cancelled() and task.exception() is None:
                await self._engine.abort(request.request_id)


MAX_SUBMITTED_TOKENS = 300_000
"""Prompt tokens of a call that are submitted in one turn of the event loop, unless a single prompt
has more: 2 ms."""

_TOKENS_PER_REQUEST = 3_000
"""As how many tokens a request counts besides its prompt."""


FREE_OUTPUT_BYTES = 2**16
"""Log-probabilities of a call that do not count, as replies of this size do not."""


class HeldOutput:
    """Counts the log-probabilities of a call that its tenant has the server hold."""

    def __init__(self, accounts: TenantAccounts, tenant: str) -> None:
        self._accounts = accounts
        self._held = accounts.count(tenant, Resource.OUTPUT_BYTES, 0)
        self._num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Count bytes that are held from now on, or, if negative, no more. Raises TenantLimitError
        if the tenant, or all together, hold too much besides."""
        total = self._num_bytes + num_bytes
        counted = total if total > FREE_OUTPUT_BYTES else 0
        if counted != self._held.amount:
            self._accounts.grow(self._held, counted)
        self._num_bytes = total

    def release(self) -> None:
        """May be called repeatedly; what is added later does not count."""
        self._held.release()


class Generation:
    """The deltas of all choices of a TextGenerator.start, in the order in which slots are filled.

    Iterate it once, or call `ready` until it returns nothing: it ends after the finish_reason of
    every choice. If the engine dies, it raises EngineDeadError once, after all earlier deltas.
    Cancelling an iteration step loses nothing. To stop early, call `aclose` (or use `async with`),
    which aborts the requests.

    sink: where choices forward their output to; None: they report filled slots to `on_filled`.
    is_parsed: whether answers have parts.
    output: counts log-probabilities that wait for the reader; it may count what it keeps of them.
    """

    def __init__(
        self,
        engine: EngineClient,
        request_id: str,
        requests: Sequence[EngineRequest],
        streams: Sequence[RequestStream],
        sampling: SamplingParams,
        parsing: AnswerParsing,
        forwarder: _OutputForwarder,
        *,
        held: QuotaHolds,
        output: HeldOutput,
        count_tokens: Callable[[int], None],
        count_open: Callable[[int], None] | None,
    ) -> None:
        """Made by TextGenerator.start.

        held: what the requests count as until all have ended.
        output: counts the output that is held for the reader, and by it.
        count_tokens: called with the number of output tokens, once they have ended.
        count_open: called with the change of the number of open requests; None: not called.
        """
        self.request_id = request_id
        self.is_parsed = parsing.parser is not None
        self._engine = engine
        self._n = sampling.n
        self._prompt_tokens = sum(
            len(request.prompt_token_ids) for request in requests[:: sampling.n]
        )
        self._service_classes = tuple(stream.service_class for stream in streams)
        self._unread = len(requests)
        self._held = held
        self.output = output
        self._count_tokens = count_tokens
        self._counted_tokens = 0
        self._count_open = count_open
        if count_open is not None:
            count_open(len(requests))
        self._filled: list[_Choice] = []
        self._failure: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self.sink: DeltaSink | None = None
        self._aborts: list[asyncio.Future[None]] = []
        self._closing: asyncio.Future[None] | None = None
        self._choices = [
            _Choice(i, request.request_id, sampling, parsing, self, forwarder)
            for i, request in enumerate(requests)
        ]
        for choice, stream in zip(self._choices, streams, strict=True):
            stream.connect(choice.put)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each prompt counted once."""
        return self._prompt_tokens

    @property
    def service_classes(self) -> tuple[ServiceClass, ...]:
        """The class of each choice as served; BE for relegated real-time ones."""
        return self._service_classes

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were cached before this generation: per prompt the least of its
        choices, because later choices find the prompt that the first one computed."""
        total = 0
        for first in range(0, len(self._choices), self._n):
            group = self._choices[first : first + self._n]
            total += min((c.cached_tokens for c in group if c.num_output_tokens), default=0)
        return total

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices so far."""
        return sum(choice.num_output_tokens for choice in self._choices)

    @property
    def reasoning_tokens(self) -> int:
        """Output tokens that are reasoning, if the answers are parsed."""
        return sum(choice.reasoning_tokens for choice in self._choices)

    async def ready(self) -> list[TextDelta]:
        """Wait until a slot is filled and take the deltas of all filled slots; [] at the end."""
        if not self._filled:
            await self._wait()
        filled, self._filled = self._filled, []
        deltas = []
        for choice in filled:
            delta = choice.take()
            if delta.finish_reason is not None:
                self._note_end()
            deltas.append(delta)
        return deltas

    async def forward(self, sink: DeltaSink) -> None:
        """Call `sink` with the output of every turn of the event loop, at the end of the turn.

        Returns when `ready` has to be called for what follows: a choice has finished or failed, or
        has log-probabilities of its prompt, or the sink is not ready. Raises what the sink raises.
        """
        if self._failure is not None or not self._unread:
            return
        filled, self._filled = self._filled, []
        self.sink, self._reader = sink, asyncio.get_running_loop().create_future()
        try:
            for choice in filled:
                choice.forward()
            await self._reader
        finally:
            self.sink = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TextDelta:
        if not self._filled:
            await self._wait()
        if not self._filled:
            raise StopAsyncIteration
        delta = self._filled.pop(0).take()
        if delta.finish_reason is not None:
            self._note_end()
        return delta

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Abort unfinished choices and end the iteration. May be called at any time, repeatedly,
        and from a cancelled task: the clean-up then completes in the background."""
        if self._closing is None:
            self._held.release()
            self.output.release()
            self._count_output()
            if self._count_open is not None:
                self._count_open(-self._unread)
            self._unread = 0
            self._filled = []
            self.wake()
            unfinished = [choice for choice in self._choices if not choice.finished]
            for choice in self._choices:
                choice.end()
            if not unfinished and not self._aborts:
                return
            self._closing = asyncio.ensure_future(self._close(unfinished))
        await asyncio.shield(self._closing)

    # ---- Called by the choices.

    def on_filled(self, choice: _Choice) -> None:
        """The empty slot of a choice was filled, and its content is not forwarded."""
        if self._unread:  # else it was closed
            self._filled.append(choice)
            self.wake()

    def on_end(self, choice: _Choice) -> None:
        """Abort the request of a choice that has ended here, by a stop string or without room for
        its output: the engine knows nothing of that."""
        self._aborts.append(asyncio.ensure_future(self._engine.abort(choice.request_id)))

    def on_failure(self, error: Exception) -> None:
        """A choice failed. Of several errors the first one is raised."""
        self._failure = self._failure or error
        self.wake()

    def _note_end(self) -> None:
        """The end of a choice has been read."""
        self._unread -= 1
        self._held.resize(self._unread)
        if self._count_open is not None:
            self._count_open(-1)
        if not self._unread:
            self._count_output()

    def _count_output(self) -> None:
        """Count the output tokens that do not count yet."""
        tokens = self.num_output_tokens
        self._count_tokens(tokens - self._counted_tokens)
        self._counted_tokens = tokens

    def wake(self, error: Exception | None = None) -> None:
        """End `forward`, which raises the error, or `_wait`."""
        self.sink = None
        if self._reader is None or self._reader.done():
            return
        if error is None:
            self._reader.set_result(None)
        else:
            self._reader.set_exception(error)

    async def _wait(self) -> None:
        """Wait until a slot is filled or all choices are finished."""
        while self._unread and not self._filled:
            if self._failure is not None:
                error = self._failure
                await self.aclose()
                raise error
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader

    async def _close(self, unfinished: Sequence[_Choice]) -> None:
        await asyncio.gather(*self._aborts, return_exceptions=True)
        for choice in unfinished:
            await self._engine.abort(choice.request_id)


def numbered(base_id: str, count: int) -> tuple[str, ...]:
    """`count` ids: `base_id` itself if count is 1, else `base_id-0`, `base_id-1`, ..."""
    return (base_id,) if count == 1 else tuple(f"{base_id}-{i}" for i in range(count))


def choice_ids(base_id: str, prompts: int, n: int) -> tuple[str, ...]:
    """The engine's request ids of all choices, in the order of their index: n per prompt."""
    return tuple(
        choice_id
        for prompt_id in numbered(base_id, prompts)
        for choice_id in numbered(prompt_id, n)
    )


async def collect(generation: Generation) -> list[ChoiceResult]:
    """Wait for all choices; returns them in the order of their index."""
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
        retry_after_s=last.retry_after_s,
        param=last.param,
        prompt_logprobs=tuple(piece for delta in deltas for piece in delta.prompt_logprobs),
        reasoning="".join(
            part.text for delta in deltas for part in delta.parts if isinstance(part, ReasoningPart)
        ),
    )


_NO_LOGPROBS = PackedLogprobs()
"""Of slots without any; nothing is added to it."""


class _Read(NamedTuple):
    """What was read of some tokens.

    text: of the answer, up to a stop string.
    num_tokens: up to the end of a stop string; None: all, and what follows them.
    stop: the stop string, if there is one.
    """

    text: str
    num_tokens: int | None = None
    stop: str | None = None


class _Choice:
    """One request: turns its outputs into text as they arrive, and holds it in a slot.

    _texts, _token_ids, _logprobs, _prompt_logprobs: the content of the slot, which is filled if it
        has texts.
    finish_reason, stop_reason, error, retry_after_s: as in TextDelta, once the choice has ended.
    """

    __slots__ = (
        "_detokenizer", "_exempt", "_forwarder", "_generation", "_is_plain", "_logprobs",
        "_matcher", "_parser", "_parts", "_prompt_logprobs", "_sampling", "_texts", "_token_ids",
        "cached_tokens", "error", "finish_reason", "finished", "index", "num_output_tokens",
        "param", "reasoning_tokens", "request_id", "retry_after_s", "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        request_id: str,
        sampling: SamplingParams,
        parsing: AnswerParsing,
        generation: Generation,
        forwarder: _OutputForwarder,
    ) -> None:
        self.index = index
        self.request_id = request_id
        self.num_output_tokens = 0
        self.cached_tokens = 0
        self.finished = False
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.error: str | None = None
        self.retry_after_s: float | None = None
        self.param: str | None = None
        self._generation: Generation | None = generation
        self._forwarder = forwarder
        self._sampling = sampling
        self._detokenizer = parsing.detokenizer()
        self._exempt = 0  # characters of text to come in which stop strings do not count
        self._matcher = StopMatcher(sampling.stop) if sampling.stop else None
        self._parser = parsing.parser() if parsing.parser is not None else None
        self._parts: list[AnswerPart] = []
        self.reasoning_tokens = 0
        self._is_plain = self._matcher is None and self._parser is None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs = _NO_LOGPROBS
        self._prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    def put(self, item: Output | EngineDeadError) -> None:
        """The OutputSink of the request."""
        generation, texts = self._generation, self._texts
        if self.finished or generation is None:
            return
        try:
            if isinstance(item, tuple) and self._is_plain:  # nearly always
                token_id = item[1]
                texts.append(self._detokenizer.push_token(token_id))
                self._token_ids.append(token_id)
                self.num_output_tokens += 1
            elif isinstance(item, Exception):
                raise item
            else:
                texts.append(self._full_output(expanded(item)))
        except Exception as error:  # raised in the reader, not in the engine's client
            if isinstance(error, TenantLimitError):  # it may be long until the reader takes it
                self.finished = True
                generation.on_end(self)
            generation.on_failure(error)
            return
        if len(texts) > 1:
            return
        if generation.sink is None:
            generation.on_filled(self)
        else:
            self._forwarder.add(self)

    @property
    def is_cheap(self) -> bool:
        """Whether the slot has nothing but text."""
        return not (self._logprobs or self._parts)

    def end(self) -> None:
        """Ignore further outputs. It forgets the generation, so that both are freed without the
        garbage collector."""
        self.finished, self._generation = True, None

    def take(self) -> TextDelta:
        """Empty the slot, which must be filled."""
        delta = TextDelta(
            index=self.index,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=self._logprobs,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            num_output_tokens=self.num_output_tokens,
            cached_tokens=self.cached_tokens,
            error=self.error,
            retry_after_s=self.retry_after_s,
            param=self.param,
            parts=tuple(self._parts),
            reasoning_tokens=self.reasoning_tokens,
            prompt_logprobs=self._prompt_logprobs,
        )
        if self._logprobs and self._generation is not None:
            self._generation.output.add(-self._logprobs.num_bytes)
        self._texts, self._token_ids, self._logprobs, self._parts = [], [], _NO_LOGPROBS, []
        self._prompt_logprobs = ()
        return delta

    def forward(self) -> None:
        """Empty the slot, which must be filled, into the sink, or end Generation.forward."""
        generation = self._generation
        if generation is None:
            return
        sink = generation.sink
        if sink is None or self.finished or self._prompt_logprobs or not sink.ready():
            generation.on_filled(self)
            return
        try:
            if self._logprobs or self._parts:
                sink.put(self.take())
            else:
                text, num_tokens = "".join(self._texts), len(self._token_ids)
                self._texts, self._token_ids = [], []
                sink.put_text(self.index, text, num_tokens)
        except Exception as error:  # other generations go on
            generation.wake(error)

    def _full_output(self, output: RequestOutput) -> str:
        """Add an output to the slot, all but its text, which is returned."""
        token_ids, reason = output.token_ids, output.finish_reason
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        shown = token_ids[:-1] if reason is FinishReason.STOP else token_ids
        if self._parser is None:
            text, count, stop = self._read_text(shown, ended=reason is not None)
        else:
            text, count, stop = self._read_parts(shown, reason, self._parser)
        count = len(token_ids) if count is None else count
        self.num_output_tokens += count
        self._token_ids += token_ids[:count]
        if output.logprobs:
            self._hold(output.logprobs[:count])
        if output.prompt_logprobs:
            self._prompt_logprobs += output.prompt_logprobs
        if stop is not None:
            if reason is None:
                assert self._generation is not None, "put checks it"
                self._generation.on_end(self)
            self.finish_reason, self.stop_reason = FinishReason.STOP, stop
        else:
            self.finish_reason = reason
            if reason is FinishReason.STOP and token_ids[-1] in self._sampling.stop_token_ids:
                self.stop_reason = token_ids[-1]
        if self.finish_reason is FinishReason.ERROR:
            self.error, self.retry_after_s = output.error, output.retry_after_s
            self.param = output.param
        self.finished = self.finish_reason is not None
        return text

    def _hold(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Add log-probabilities to the slot. Raises TenantLimitError."""
        assert self._generation is not None, "put checks it"
        packed = self._logprobs or PackedLogprobs()
        before = packed.num_bytes
        packed.extend(logprobs)
        self._logprobs = packed
        self._generation.output.add(packed.num_bytes - before)

    def _read_text(self, token_ids: Sequence[int], *, ended: bool) -> _Read:
        """Read tokens of an answer that is nothing but text. ended: they are the last ones."""
        detokenizer, matcher = self._detokenizer, self._matcher
        if matcher is None:
            text = detokenizer.push(token_ids)
            return _Read(text + (detokenizer.finish() if ended else ""))
        texts = []
        for count, token_id in enumerate(token_ids, start=1):
            text, stop = detokenizer.push_token(token_id), None
            if self._may_stop(count):
                text, stop = matcher.push(text)
            texts.append(text)
            if stop is not None:
                return _Read("".join(texts), count, stop)
        if not ended:
            return _Read("".join(texts))
        text, stop = matcher.push(detokenizer.finish())  # a held character may complete a match
        texts.append(text if stop is not None else text + matcher.finish())
        return _Read("".join(texts), None, stop)

    def _read_parts(
        self, token_ids: Sequence[int], reason: FinishReason | None, parser: AnswerParser
    ) -> _Read:
        """Read tokens and add their parts to the slot. reason: why they are the last ones."""
        before = len(self._parts)
        stop: str | None = None
        for count, token_id in enumerate(token_ids, start=1):
            in_reasoning = parser.in_reasoning
            parts = parser.push(self._detokenizer.push_token(token_id))
            if in_reasoning or parser.in_reasoning:  # each token counts as what it is
                self.reasoning_tokens += 1
            stop = self._add_parts(parts, parser, may_stop=self._may_stop(count))
            if stop is not None:
                return _Read(self._text_from(before), count, stop)
        if reason is not None:
            parts = parser.push(self._detokenizer.finish())
            if reason is FinishReason.STOP and parser.in_reasoning:
                self.reasoning_tokens += 1  # the stop token
            parts += parser.finish(cut=reason is FinishReason.LENGTH)
            stop = self._add_parts(parts, parser)
            if stop is None and self._matcher is not None:
                self._add_text(self._matcher.finish())
        return _Read(self._text_from(before), None, stop)

    def _add_parts(
        self, parts: Sequence[AnswerPart], parser: AnswerParser, *, may_stop: bool = True
    ) -> str | None:
        """Add parts to the slot, up to a stop string in their text; returns it, or None.

        may_stop: stop strings count.

        The parser holds white space until it knows that no call follows: stop strings are looked
        for there, too, since a small model may write nothing else any more.
        """
        matcher = self._matcher
        if matcher is None:
            self._parts += parts
            return None
        for part in parts:
            if isinstance(part, TextPart):
                exempt = len(part.text) if not may_stop else self._exempt
                self._add_text(part.text[:exempt])
                text, stop = matcher.push(part.text[exempt:])
            else:
                text, stop = matcher.finish(), None  # no stop string reaches across a call
            self._exempt = 0
            self._add_text(text)
            if stop is not None:
                return stop
            if not isinstance(part, TextPart):
                self._parts.append(part)
        space = parser.held_space
        if not may_stop:
            self._exempt = len(space)  # it does not count when it becomes text, either
        elif matcher.would_stop(space[self._exempt :]):
            self._add_text(space[: self._exempt])
            text, stop = matcher.push(space[self._exempt :])
            self._add_text(text)
            return stop
        return None

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextPart(text))

    def _text_from(self, first: int) -> str:
        """The text of the parts in the slot from this one on."""
        return "".join(part.text for part in self._parts[first:] if isinstance(part, TextPart))

    def _may_stop(self, count: int) -> bool:
        """Whether stop strings count in the text of the `count`-th of the new tokens."""
        return self.num_output_tokens + count > self._sampling.min_tokens


def _for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The engine's parameters for choice `index`: without n and stop strings."""
    if sampling.n == 1 and not sampling.stop:
        return sampling
    return sampling.with_changes(n=1, seed=shifted_seed(sampling.seed, index), stop=())


def shifted_seed(seed: int | None, index: int) -> int | None:
    """seed + index, wrapped around in int64: the seed of one of several answers."""
    return None if seed is None else (seed + index + 2**63) % 2**64 - 2**63


async def _finish_even_if_cancelled(work: Coroutine[object, None, None]) -> None:
    """Await `work`; if the caller is cancelled, `work` continues in the background."""
    await asyncio.shield(asyncio.ensure_future(work))
