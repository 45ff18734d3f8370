"""TextGenerator over an engine whose every word is scripted."""

from __future__ import annotations

import asyncio
import gc
import random
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    TenantLimitError,
)
from bros.core.grammars import json_object
from bros.core.interfaces import EngineInfo, EngineStats, RequestTrace
from bros.core.request import (
    MAX_SEED,
    EngineRequest,
    FinishReason,
    IdGenerator,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
    TokenLogprobs,
    shortened,
)
from bros.core.tenants import Resource, TenantAccounts, TenantLimits
from bros.engine.client import OutputStream
from bros.text.answers import (
    AnswerParser,
    AnswerParsing,
    HermesCalls,
    ReasoningReader,
    TextPart,
)
from bros.text.chat_format import ChatFormat, ReasoningStart
from bros.text.generation import (
    MAX_SUBMITTED_TOKENS,
    ChoiceResult,
    Generation,
    TextDelta,
    TextGenerator,
    collect,
    numbered,
)
from bros.text.tokenizer import ChatTemplates, Tokenizer
from bros.text.tools import NO_TOOLS
from support.answer_parts import joined_parts
from support.tiny_tokenizer import sentencepiece_backend, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
EOS = 1
PROMPT = [5, 6, 7]
THINKING = AnswerParsing(
    lambda: AnswerParser(ReasoningReader("<think>", "</think>", opened=False), None),
    TOKENIZER.detokenizer,
)


def reader_of_calls() -> AnswerParser:
    """Reads reasoning and calls."""
    return AnswerParser(
        ReasoningReader("<think>", "</think>", opened=False),
        HermesCalls("<tool_call>", "</tool_call>", {"f"}, None),
    )


CALLING = AnswerParsing(reader_of_calls, TOKENIZER.detokenizer)


class ScriptedEngine:
    """Streams say what the test puts in; submissions and aborts wait while `gate` is closed."""

    alive = True

    def __init__(self, *, max_model_len: int = 1000, max_queue: int = 1000) -> None:
        self.info = EngineInfo(
            model="m", weights="w", kernels="k", kv_dtype="d", device="none",
            max_model_len=max_model_len, vocab_size=1000, block_size=16, num_kv_blocks=100,
            policy="fcfs", max_queue=max_queue,
        )  # fmt: skip
        self.submitted: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.refusals: dict[str, Exception] = {}
        self.relegated: set[str] = set()
        self.streams: dict[str, OutputStream] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def submit(self, request: EngineRequest) -> OutputStream:
        self.submitted.append(request)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)  # as EngineClient.submit promises
            raise
        if request.request_id in self.refusals:
            raise self.refusals[request.request_id]
        relegated = request.request_id in self.relegated
        service_class = ServiceClass.BE if relegated else request.service_class
        self.streams[request.request_id] = OutputStream(service_class)
        return self.streams[request.request_id]

    async def abort(self, request_id: str) -> None:
        await self.gate.wait()
        self.aborted.append(request_id)

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        pass

    async def stats(self) -> EngineStats:
        return EngineStats()

    async def trace(self, request_id: str) -> RequestTrace | None:
        return None

    async def close(self) -> None:
        return None

    def say(
        self,
        text: str | Sequence[int],
        finish: FinishReason | None = None,
        *,
        to: str = "r",
        logprobs: bool = False,
        cached: int = 0,
        error: str | None = None,
        retry_after_s: float | None = None,
        param: str | None = None,
    ) -> None:
        """In the short form if it has one."""
        token_ids = one_by_one(text) if isinstance(text, str) else tuple(text)
        entries = tuple(TokenLogprobs(i, -0.5) for i in token_ids) if logprobs else ()
        output = RequestOutput(
            request_id=to,
            token_ids=token_ids,
            logprobs=entries,
            finish_reason=finish,
            cached_tokens=cached,
            error=error,
            retry_after_s=retry_after_s,
            param=param,
        )
        self.streams[to].put(shortened(output))


def one_by_one(text: str) -> tuple[int, ...]:
    """A token (or, beyond ASCII, several) per character."""
    return tuple(token_id for char in text for token_id in TOKENIZER.encode(char))


def generator(engine: ScriptedEngine, clock: ManualClock | None = None) -> TextGenerator:
    return TextGenerator(engine, TOKENIZER, clock or ManualClock(), IdGenerator(random.Random(0)))


async def start(engine: ScriptedEngine, **sampling: object) -> Generation:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return await generator(engine).start([PROMPT], params, request_id="r")


async def settled() -> None:
    """Let every task run until it waits for something from outside."""
    for _ in range(20):
        await asyncio.sleep(0)


# ---- Requests


async def test_request_carries_what_was_asked() -> None:
    engine, clock = ScriptedEngine(), ManualClock(start_s=12.5)
    sampling = SamplingParams(seed=4, stop=("x",), max_tokens=9)
    slo = Slo(ttft_s=0.1)
    generation = await generator(engine, clock).start(
        [PROMPT], sampling, request_id="id", service_class=ServiceClass.BE, slo=slo, tenant="t"
    )
    assert engine.submitted == [
        EngineRequest(
            request_id="id",
            prompt_token_ids=PROMPT,
            sampling=SamplingParams(seed=4, max_tokens=9),
            service_class=ServiceClass.BE,
            slo=slo,
            arrival_s=12.5,
            tenant="t",
        )
    ]
    assert (generation.request_id, generation.prompt_tokens) == ("id", 3)
    await generation.aclose()


@pytest.mark.parametrize(
    ("service_class", "stop", "streamed", "gathered"),
    [
        (ServiceClass.BE, (), False, True),
        (ServiceClass.BE, (), True, False),
        (ServiceClass.BE, ("x",), False, False),  # the engine would generate beyond the stop string
        (ServiceClass.RT, (), False, False),  # its pace is measured where tokens arrive
    ],
)
async def test_who_waits_for_single_tokens(
    service_class: ServiceClass, stop: tuple[str, ...], streamed: bool, gathered: bool
) -> None:
    engine = ScriptedEngine()
    generation = await generator(engine).start(
        [PROMPT], SamplingParams(stop=stop), service_class=service_class, streamed=streamed
    )
    assert engine.submitted[0].gathered is gathered
    await generation.aclose()


async def test_without_an_id_one_is_made() -> None:
    engine = ScriptedEngine()
    first = await generator(engine).start([PROMPT], SamplingParams())
    assert first.request_id == engine.submitted[0].request_id
    assert first.request_id.startswith("req-")
    await first.aclose()


async def test_each_request_counts_to_its_tenant_until_it_has_ended() -> None:
    engine, accounts = ScriptedEngine(), TenantAccounts()
    starts = TextGenerator(
        engine,
        TOKENIZER,
        ManualClock(),
        IdGenerator(random.Random(0)),
        accounts=accounts,
    )
    both = await starts.start([PROMPT], SamplingParams(n=2), request_id="r", tenant="ann")
    assert accounts.used("ann", Resource.RT_REQUESTS) == 2
    engine.say("x", FinishReason.STOP, to="r-1")
    await anext(both)
    assert accounts.used("ann", Resource.RT_REQUESTS) == 1
    engine.say("x", FinishReason.STOP, to="r-0")
    await both.ready()
    assert accounts.held == {}
    await both.aclose()


async def test_outputs_with_a_grammar_count_apart() -> None:
    engine, limits = ScriptedEngine(), TenantLimits(requests=9, grammars=2, traces=7)
    accounts = TenantAccounts({"ann": limits})
    ids = IdGenerator(random.Random(0))
    starts = TextGenerator(engine, TOKENIZER, ManualClock(), ids, accounts=accounts)
    constrained = SamplingParams(n=2, grammar=json_object())
    both = await starts.start([PROMPT], constrained, request_id="r", tenant="ann")
    assert engine.submitted[0].max_traces == 7
    with pytest.raises(TenantLimitError, match=r"2 outputs with a grammar.*\(max_grammars\)"):
        await starts.start([PROMPT], SamplingParams(grammar=json_object()), tenant="ann")
    assert accounts.used("ann", Resource.RT_REQUESTS) == 2
    engine.say("x", FinishReason.STOP, to="r-1")
    await anext(both)
    assert accounts.used("ann", Resource.GRAMMARS) == 1
    rows = starts.without_limits()
    more = await rows.start([PROMPT], constrained, request_id="row", tenant="ann")
    assert accounts.used("ann", Resource.GRAMMARS) == 1
    assert engine.submitted[-1].max_traces == 7
    await both.aclose()
    await more.aclose()
    assert accounts.held == {}


async def test_real_time_requests_count_until_they_end() -> None:
    engine, clock = ScriptedEngine(), ManualClock(start_s=5.0)
    starts = generator(engine, clock)
    both = await starts.start([PROMPT], SamplingParams(n=2), request_id="r")
    batch = ServiceClass.BE
    await starts.start([PROMPT], SamplingParams(), request_id="be", service_class=batch)
    other = await starts.without_limits().start([PROMPT], SamplingParams(), request_id="o")
    assert starts.open.count == 3
    clock.advance(2.0)
    engine.say("x", FinishReason.STOP, to="r-0")
    await anext(both)
    assert (starts.open.count, starts.open.seconds(clock.now())) == (2, 6.0)
    clock.advance(1.0)
    await both.aclose()
    await both.aclose()
    assert (starts.open.count, starts.open.seconds(clock.now())) == (1, 8.0)
    engine.streams["o"].put(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError):
        await anext(other)
    clock.advance(9.0)
    assert (starts.open.count, starts.open.seconds(clock.now())) == (0, 8.0)


@pytest.mark.parametrize(
    ("seed", "expected"),
    [(None, [None] * 3), (7, [7, 8, 9]), (MAX_SEED - 1, [MAX_SEED - 1, MAX_SEED, -MAX_SEED - 1])],
)
async def test_each_choice_has_its_own_id_and_seed(
    seed: int | None, expected: list[int | None]
) -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=3, seed=seed)
    assert [r.request_id for r in engine.submitted] == ["r-0", "r-1", "r-2"]
    assert [r.sampling.seed for r in engine.submitted] == expected
    assert {r.sampling.n for r in engine.submitted} == {1}
    await generation.aclose()


async def test_all_choices_are_submitted_before_the_first_is_accepted() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    starting = asyncio.create_task(start(engine, n=3))
    await settled()
    assert len(engine.submitted) == 3
    assert not starting.done()
    engine.gate.set()
    await (await starting).aclose()


@pytest.mark.parametrize("asked", ServiceClass)
async def test_each_choice_says_what_the_engine_serves_it_as(asked: ServiceClass) -> None:
    engine = ScriptedEngine()
    engine.relegated = {"r-1"}
    generation = await generator(engine).start(
        [PROMPT], SamplingParams(n=3), request_id="r", service_class=asked
    )
    assert generation.service_classes == (asked, ServiceClass.BE, asked)
    await generation.aclose()


@pytest.mark.parametrize(("count", "ids"), [(1, ("a",)), (3, ("a-0", "a-1", "a-2"))])
def test_parts_of_a_whole_are_numbered_if_there_are_several(
    count: int, ids: tuple[str, ...]
) -> None:
    assert numbered("a", count) == ids


# ---- Refusals


@pytest.mark.parametrize("refused", [0, 1, 2])
async def test_one_refused_choice_withdraws_the_others(refused: int) -> None:
    engine = ScriptedEngine()
    engine.refusals[f"r-{refused}"] = QueueFullError(5, 1.0)
    with pytest.raises(QueueFullError):
        await start(engine, n=3)
    assert {f"r-{i}" for i in range(3)} - {f"r-{refused}"} <= set(engine.aborted)


async def test_a_refused_id_does_not_abort_the_request_that_has_it() -> None:
    engine = ScriptedEngine()
    first = await start(engine, n=1)
    engine.refusals["r"] = InvalidRequestError("in use", "request_id")
    with pytest.raises(InvalidRequestError):
        await start(engine, n=1)
    assert engine.aborted == []
    await first.aclose()


async def test_what_can_never_be_served_is_refused_before_the_engine_sees_it() -> None:
    engine = ScriptedEngine(max_model_len=len(PROMPT), max_queue=4)
    with pytest.raises(PromptTooLongError) as caught:
        await start(engine, n=3)
    assert (caught.value.prompt_tokens, caught.value.max_model_len) == (len(PROMPT), len(PROMPT))
    engine = ScriptedEngine(max_queue=4)
    with pytest.raises(InvalidRequestError, match="n must be at most 4"):
        await start(engine, n=5)
    assert engine.submitted == []


async def test_prompt_too_long_names_the_callers_field() -> None:
    engine = ScriptedEngine()
    engine.refusals["r"] = PromptTooLongError(300, 200)
    with pytest.raises(PromptTooLongError) as caught:
        await generator(engine).start([PROMPT], SamplingParams(), request_id="r", param="prompt")
    error = caught.value
    assert (error.param, error.prompt_tokens, error.max_model_len) == ("prompt", 300, 200)


async def test_cancelled_while_starting_leaves_nothing_running() -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    starting = asyncio.create_task(start(engine, n=2))
    await settled()
    starting.cancel()
    engine.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert set(engine.aborted) == {"r-0", "r-1"}


# ---- Text


async def test_deltas_arrive_as_the_engine_gives_them() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    engine.say("H", cached=2)
    assert await anext(generation) == TextDelta(
        index=0, text="H", token_ids=one_by_one("H"), num_output_tokens=1, cached_tokens=2
    )
    engine.say("e")
    assert (await anext(generation)).text == "e"
    engine.say("y", FinishReason.LENGTH)
    assert await anext(generation) == TextDelta(
        index=0,
        text="y",
        token_ids=one_by_one("y"),
        finish_reason=FinishReason.LENGTH,
        num_output_tokens=3,
        cached_tokens=2,
    )
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    assert (generation.num_output_tokens, generation.cached_tokens) == (3, 2)
    assert engine.aborted == []


async def test_what_one_choice_computes_for_the_others_was_not_cached_before() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=3)
    assert generation.cached_tokens == 0
    for choice, cached, expected in (("r-1", 32, 32), ("r-0", 16, 16), ("r-2", 32, 16)):
        engine.say("H", FinishReason.LENGTH, to=choice, cached=cached)
        assert (await anext(generation)).cached_tokens == cached
        assert generation.cached_tokens == expected
    await generation.aclose()


async def test_half_a_character_waits_for_the_rest() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    smile = TOKENIZER.encode("\U0001f680")  # not in the training text: four bytes, four tokens
    assert len(smile) > 1
    for token_id in smile[:-1]:
        engine.say([token_id])
        assert (await anext(generation)).text == ""
    engine.say(smile[-1:])
    assert (await anext(generation)).text == "\U0001f680"
    engine.say(smile[:2], FinishReason.LENGTH)
    assert (await anext(generation)).text == "\ufffd"


@pytest.mark.parametrize(("chat", "text"), [(False, " the the"), (True, "the the")])
async def test_only_an_answer_of_its_own_drops_the_space_at_its_beginning(
    chat: bool, text: str
) -> None:
    """A decoder of SentencePiece drops it at the beginning of a text, which a completion is not."""
    backend = sentencepiece_backend()
    tokenizer = Tokenizer(backend, {}, ChatTemplates({}, {}, ManualClock()))
    engine, ids = ScriptedEngine(), IdGenerator(random.Random(0))
    parsing = ChatFormat(tokenizer).parsing(NO_TOOLS, ReasoningStart.NONE) if chat else None
    generation = await TextGenerator(engine, tokenizer, ManualClock(), ids).start(
        [tokenizer.encode("the")], SamplingParams(), request_id="r", parsing=parsing
    )
    engine.say([backend.token_to_id("▁the")] * 2, FinishReason.LENGTH)
    [result] = await collect(generation)
    assert result.text == text


@pytest.mark.parametrize(
    ("token_id", "stop_token_ids", "reason"), [(EOS, (), None), (40, (40,), 40), (EOS, (40,), None)]
)
async def test_the_final_stop_token_is_counted_but_not_shown(
    token_id: int, stop_token_ids: tuple[int, ...], reason: int | None
) -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop_token_ids=stop_token_ids, logprobs=0)
    engine.say("ab", logprobs=True)
    engine.say([token_id], FinishReason.STOP, logprobs=True)
    [result] = await collect(generation)
    assert result.text == "ab"
    assert result.token_ids == (*one_by_one("ab"), token_id)
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    assert (result.finish_reason, result.stop_reason) == (FinishReason.STOP, reason)
    assert result.num_output_tokens == 3


async def test_an_empty_answer_is_an_answer() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("x",))
    engine.say([EOS], FinishReason.STOP)
    [result] = await collect(generation)
    assert (result.text, result.num_output_tokens) == ("", 1)


async def test_an_answer_without_a_token() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    engine.say([], FinishReason.ABORT)
    [result] = await collect(generation)
    assert (result.text, result.token_ids) == ("", ())
    assert result.finish_reason is FinishReason.ABORT


async def test_a_failed_request_says_why() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    engine.say("a", FinishReason.ERROR, error="out of memory")
    [result] = await collect(generation)
    assert (result.finish_reason, result.error) == (FinishReason.ERROR, "out of memory")


@pytest.mark.parametrize("retry_after_s", [None, 4.5])
async def test_a_dropped_request_says_when_to_retry(
    retry_after_s: float | None,
) -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    engine.say("", FinishReason.ERROR, error="busy", retry_after_s=retry_after_s)
    (delta,) = [delta async for delta in generation]
    assert (delta.error, delta.retry_after_s) == ("busy", retry_after_s)


async def test_a_request_that_failed_by_its_own_fault_names_the_field() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    engine.say("", FinishReason.ERROR, error="too complex", param="response_format")
    [result] = await collect(generation)
    assert (result.error, result.param) == ("too complex", "response_format")


async def test_choices_are_merged_as_they_arrive() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=3)
    arrivals = []
    for index, text in [(2, "x"), (0, "a"), (2, "y"), (1, "m")]:
        engine.say(text, to=f"r-{index}")
        delta = await anext(generation)
        arrivals.append((delta.index, delta.text))
    assert arrivals == [(2, "x"), (0, "a"), (2, "y"), (1, "m")]
    for index in (1, 0, 2):
        engine.say("!", FinishReason.LENGTH, to=f"r-{index}")
    last = [delta async for delta in generation]
    assert [delta.index for delta in last] == [1, 0, 2]
    assert generation.num_output_tokens == 7


@given(
    answer=st.lists(st.sampled_from(["<think>", "</think>", "a", " b", "x", "\n"]), max_size=20),
    cuts=st.sets(st.integers(1, 90)),
    stop=st.sampled_from([(), ("xa",)]),
    reason=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_it_does_not_matter_which_tokens_come_together(
    answer: list[str], cuts: set[int], stop: tuple[str, ...], reason: FinishReason
) -> None:
    """Text, reasoning and its tokens are as if each token came alone."""
    token_ids = one_by_one("".join(answer)) + ((EOS,) if reason is FinishReason.STOP else ())

    async def result(ends: Collection[int]) -> list[object]:
        engine = ScriptedEngine()
        generation = await generator(engine).start(
            [PROMPT], SamplingParams(stop=stop), request_id="r", parsing=THINKING, streamed=False
        )
        begin = 0
        for end in [*sorted(end for end in ends if end < len(token_ids)), len(token_ids)]:
            engine.say(token_ids[begin:end], reason if end == len(token_ids) else None)
            begin = end
        (choice,) = await collect(generation)
        return [choice, generation.reasoning_tokens]

    alone = asyncio.run(result(range(1, len(token_ids))))
    assert asyncio.run(result(cuts)) == alone


@pytest.mark.parametrize("reason", [FinishReason.LENGTH, FinishReason.STOP])
async def test_a_stop_token_within_reasoning_is_reasoning(reason: FinishReason) -> None:
    engine = ScriptedEngine()
    generation = await generator(engine).start(
        [PROMPT], SamplingParams(), request_id="r", parsing=THINKING
    )
    token_ids = one_by_one("<think>Hm") + ((EOS,) if reason is FinishReason.STOP else ())
    engine.say(token_ids, reason)
    (result,) = await collect(generation)
    assert (result.text, result.reasoning) == ("", "Hm")
    # The first characters of the marker do not say yet that it is one.
    assert generation.reasoning_tokens == len(token_ids) - len("<think")


async def test_collect_sorts_choices() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=2)
    engine.say("late", FinishReason.LENGTH, to="r-1")
    engine.say("first", FinishReason.LENGTH, to="r-0")
    assert [(r.index, r.text) for r in await collect(generation)] == [(0, "first"), (1, "late")]


# ---- Stop strings


async def test_stop_string_across_tokens_ends_the_choice_and_aborts_it() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("END",), logprobs=0)
    engine.say("one E", logprobs=True)
    delta = await anext(generation)
    assert (delta.text, len(delta.token_ids), len(delta.logprobs)) == ("one ", 5, 5)
    engine.say("NDtail", logprobs=True)
    delta = await anext(generation)
    assert delta.text == ""
    assert delta.token_ids == one_by_one("ND")
    assert [entry.token_id for entry in delta.logprobs] == list(one_by_one("ND"))
    assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "END")
    assert delta.num_output_tokens == 7
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    await settled()
    assert engine.aborted == ["r"]


async def test_stop_string_inside_a_token() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("to",))
    token_ids = TOKENIZER.encode("stop")
    assert len(token_ids) < 4
    engine.say(token_ids)
    delta = await anext(generation)
    assert (delta.text, delta.stop_reason) == ("s", "to")


async def test_stop_string_completed_by_the_last_token_wins_over_length() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("b",))
    engine.say("ab", FinishReason.LENGTH)
    [result] = await collect(generation)
    assert (result.text, result.finish_reason, result.stop_reason) == ("a", FinishReason.STOP, "b")
    assert engine.aborted == []  # the engine is through with it


async def test_text_held_for_a_stop_string_is_given_at_the_end() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("abc",))
    engine.say("xab")
    assert (await anext(generation)).text == "x"
    engine.say([EOS], FinishReason.STOP)
    delta = await anext(generation)
    assert (delta.text, delta.stop_reason) == ("ab", None)


async def test_stop_strings_do_not_count_within_min_tokens() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("aa",), min_tokens=3)
    engine.say("aaaaxa")
    assert (await anext(generation)).text == "aaaax"
    engine.say("ab")
    delta = await anext(generation)
    assert (delta.text, delta.stop_reason, delta.num_output_tokens) == ("", "aa", 7)


CALL = '<tool_call>{"name": "f", "arguments": {"a": "xa"}}</tool_call>'


@given(
    answer=st.lists(
        st.sampled_from(["<think>", "</think>", CALL, "a", " b", "x", "\n"]), max_size=9
    ),
    stop=st.sampled_from(["xa", " b", "<", "}", "\na"]),
    reason=st.sampled_from([FinishReason.LENGTH, FinishReason.STOP]),
)
def test_stop_strings_end_only_the_text_of_an_answer(
    answer: list[str], stop: str, reason: FinishReason
) -> None:
    parser, whole = reader_of_calls(), "".join(answer)
    expected = joined_parts(
        [*parser.push(whole), *parser.finish(cut=reason is FinishReason.LENGTH)]
    )
    ended: tuple[FinishReason, str | None] = reason, None
    for index, part in enumerate(expected):
        if isinstance(part, TextPart) and stop in part.text:
            shown = part.text.partition(stop)[0]
            expected[index:] = [TextPart(shown)] if shown else []
            ended = FinishReason.STOP, stop
            break

    async def deltas() -> list[TextDelta]:
        engine = ScriptedEngine()
        generation = await generator(engine).start(
            [PROMPT], SamplingParams(stop=(stop,)), request_id="r", parsing=CALLING
        )
        for token_id in one_by_one(whole):
            engine.say((token_id,))
        engine.say((EOS,) if reason is FinishReason.STOP else (), reason)
        return [delta async for delta in generation]

    found = asyncio.run(deltas())
    assert joined_parts([part for delta in found for part in delta.parts]) == expected
    assert "".join(d.text for d in found) == "".join(
        part.text for part in expected if isinstance(part, TextPart)
    )
    assert (found[-1].finish_reason, found[-1].stop_reason) == ended


@pytest.mark.parametrize(
    ("text", "min_tokens", "shown", "stop", "num_tokens"),
    [
        ("a\n\nb", 0, "a", "\n\n", 3),
        ("a" + "\n" * 9, 0, "a", "\n\n", 3),
        ("b\n\n" + CALL, 0, "b", "\n\n", 3),
        (CALL + "\n\n" + CALL, 0, "", None, 2 * len(CALL) + 2),
        (CALL + "b\n\n" + CALL, 0, "b", "\n\n", len(CALL) + 3),
        ("a\n\nbcd", 3, "a\n\nbcd", None, 6),
        ("a\n\n", 3, "a\n\n", None, 3),
        ("a\n\n\n\nb", 3, "a\n\n", "\n\n", 5),
        ("<think>\n\n</think>\n\nb", 0, "b", None, 20),
    ],
)
async def test_white_space_that_may_come_before_a_call_is_searched_at_once(
    text: str, min_tokens: int, shown: str, stop: str | None, num_tokens: int
) -> None:
    """Else a small model that writes nothing else any more would not stop."""
    engine = ScriptedEngine()
    sampling = SamplingParams(stop=("\n\n",), min_tokens=min_tokens)
    generation = await generator(engine).start([PROMPT], sampling, request_id="r", parsing=CALLING)
    for token_id in one_by_one(text):
        engine.say((token_id,))
    engine.say((), FinishReason.LENGTH)
    found = [delta async for delta in generation]
    assert ("".join(d.text for d in found), found[-1].stop_reason) == (shown, stop)
    assert found[-1].num_output_tokens == num_tokens


async def test_one_choice_may_stop_while_others_go_on() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=2, stop=(".",))
    engine.say("a.b", to="r-0")
    assert (await anext(generation)).finish_reason is FinishReason.STOP
    engine.say("cd", to="r-1")
    assert (await anext(generation)).text == "cd"
    engine.say("e", FinishReason.LENGTH, to="r-1")
    assert (await anext(generation)).finish_reason is FinishReason.LENGTH
    await settled()
    assert engine.aborted == ["r-0"]


def first_stop(text: str, stops: Sequence[str]) -> int | None:
    """Where the first match ends."""
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    return min(ends, default=None)


@given(
    text=st.text(st.sampled_from("abé"), min_size=1, max_size=20),
    sizes=st.lists(st.integers(1, 5), min_size=40, max_size=40),
    stops=st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_result_does_not_depend_on_how_tokens_arrive(
    text: str, sizes: list[int], stops: list[str], min_tokens: int
) -> None:
    token_ids = one_by_one(text)

    async def run() -> list[ChoiceResult]:
        engine = ScriptedEngine()
        generation = await start(engine, stop=stops, min_tokens=min_tokens, logprobs=0)
        position = 0
        while position < len(token_ids):
            size = sizes.pop()
            part = token_ids[position : position + size]
            position += size
            last = FinishReason.LENGTH if position >= len(token_ids) else None
            engine.say(part, last, logprobs=True)
        return await collect(generation)

    [result] = asyncio.run(run())
    exempt = TOKENIZER.decode(token_ids[:min_tokens]).rstrip("\ufffd")
    end = first_stop(text[len(exempt) :], stops)
    shown = text if end is None else text[: len(exempt) + end]
    assert result.token_ids == token_ids[: len(one_by_one(shown))]
    assert tuple(entry.token_id for entry in result.logprobs) == result.token_ids
    assert result.num_output_tokens == len(result.token_ids)
    if end is None:
        assert (result.text, result.stop_reason) == (text, None)
    else:
        assert result.stop_reason in stops
        assert result.text + str(result.stop_reason) == shown


# ---- Leaving early, cancelling, dying


async def test_closing_aborts_what_is_unfinished_and_nothing_else() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=3)
    engine.say("a", FinishReason.LENGTH, to="r-1")
    await anext(generation)
    await generation.aclose()
    assert engine.aborted == ["r-0", "r-2"]
    with pytest.raises(StopAsyncIteration):
        await anext(generation)
    await generation.aclose()
    assert engine.aborted == ["r-0", "r-2"]


async def test_closing_a_finished_generation_aborts_nothing() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    engine.say("a", FinishReason.LENGTH)
    async with aclosing(generation):
        assert [delta.text async for delta in generation] == ["a"]
    assert engine.aborted == []


@pytest.mark.parametrize("finished", [True, False])
async def test_a_closed_generation_is_no_garbage_for_the_collector(finished: bool) -> None:
    """Servers make full collections only while they are idle."""
    engine = ScriptedEngine()
    gc.disable()
    try:
        generation = await start(engine, n=2)
        engine.say("a", FinishReason.LENGTH if finished else None, to="r-0")
        await anext(generation)
        await generation.aclose()
        engine.say("b", to="r-1")  # an output that was on its way
        await settled()
        closed = weakref.ref(generation)
        del generation
        assert closed() is None
    finally:
        gc.enable()


async def test_closing_wakes_a_waiting_reader() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    reader = asyncio.create_task(collect(generation))
    await settled()
    await generation.aclose()
    assert await reader == []


async def test_a_cancelled_reader_aborts_in_its_finally() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=2)
    reader = asyncio.create_task(collect(generation))
    await settled()
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    assert engine.aborted == ["r-0", "r-1"]


async def test_closing_is_completed_even_if_it_is_cancelled() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=2)
    closer = asyncio.create_task(generation.aclose())
    await asyncio.sleep(0)
    closer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closer
    await settled()
    assert engine.aborted == ["r-0", "r-1"]


async def test_closing_does_not_cut_off_the_abort_after_a_stop_string() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("b",))
    engine.gate.clear()
    engine.say("ab")
    assert (await anext(generation)).finish_reason is FinishReason.STOP
    closer = asyncio.create_task(generation.aclose())
    await settled()
    engine.gate.set()
    await closer
    assert engine.aborted == ["r"]


async def test_a_step_that_was_cancelled_loses_nothing() -> None:
    engine = ScriptedEngine()
    generation = await start(engine)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(generation), timeout=0.001)
    engine.say("ab", FinishReason.LENGTH)
    assert [delta.text async for delta in generation] == ["ab"]


async def test_engine_death_is_raised_once_after_what_came_before() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=2)
    engine.say("a", to="r-0")
    for stream in engine.streams.values():
        stream.put(EngineDeadError("gone"))
    assert (await anext(generation)).text == "a"
    with pytest.raises(EngineDeadError, match="gone"):
        await anext(generation)
    with pytest.raises(StopAsyncIteration):
        await anext(generation)


async def test_engine_death_after_the_end_does_not_matter() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("b",))
    engine.say("ab")
    engine.streams["r"].put(EngineDeadError("gone"))
    [result] = await collect(generation)
    assert result.text == "a"


# ---- Slots: what comes while the reader is busy is merged


class CollectingSink:
    """Keeps what it is given. ready: its answers in turn, then True."""

    def __init__(self, ready: Sequence[bool] = ()) -> None:
        self.deltas: list[TextDelta] = []
        self.num_tokens = 0
        self._ready = iter(ready)

    def ready(self) -> bool:
        return next(self._ready, True)

    def put_text(self, index: int, text: str, num_tokens: int) -> None:
        self.deltas.append(TextDelta(index, text))
        self.num_tokens += num_tokens

    def put(self, delta: TextDelta) -> None:
        assert delta.finish_reason is None
        self.deltas.append(delta)


async def read(generation: Generation, sink: CollectingSink | None = None) -> list[TextDelta]:
    """All deltas. sink: the one that they are forwarded to whenever that is possible."""
    found: list[TextDelta] = [] if sink is None else sink.deltas
    while deltas := await generation.ready():
        found += deltas
        if sink is not None:
            await generation.forward(sink)
    return found


@given(
    puts=st.lists(
        st.tuples(st.integers(0, 2), st.text(st.sampled_from("abé世"), max_size=3)), max_size=12
    ),
    taken_after=st.sets(st.integers(0, 14)),
    stops=st.sampled_from(((), ("b",), ("é世",))),
    ready=st.lists(st.booleans(), max_size=8) | st.none(),
)
def test_any_turns_of_putting_and_taking_give_the_same_answer(
    puts: list[tuple[int, str]],
    taken_after: set[int],
    stops: tuple[str, ...],
    ready: list[bool] | None,
) -> None:
    """ready: what a sink says to which deltas are forwarded; None if a reader waits for them."""
    script = [*puts, (0, "a"), (1, "é"), (2, "b")]
    last = {index: i for i, (index, _) in enumerate(script)}

    async def run(
        taken_after: Collection[int], sink: CollectingSink | None
    ) -> tuple[list[TextDelta], int]:
        engine = ScriptedEngine()
        generation = await start(engine, n=3, stop=stops, logprobs=0)
        reading = asyncio.ensure_future(read(generation, sink))
        for i, (index, text) in enumerate(script):
            end = FinishReason.LENGTH if last[index] == i else None
            engine.say(text, end, to=f"r-{index}", logprobs=True, cached=index)
            if i in taken_after:
                await settled()
        return await reading, generation.num_output_tokens

    merged, num_merged = asyncio.run(
        run(taken_after, None if ready is None else CollectingSink(ready))
    )
    single, num_single = asyncio.run(run(range(len(script)), None))
    assert num_merged == num_single
    for index in range(3):
        ours = [delta for delta in merged if delta.index == index]
        theirs = [delta for delta in single if delta.index == index]
        assert len(ours) <= len(theirs)
        for deltas in (ours, theirs):
            ends = [delta.finish_reason is not None for delta in deltas]
            assert ends == [*[False] * (len(deltas) - 1), True], "once, and last"
        assert _joined(ours) == _joined(theirs)


async def test_outputs_that_arrive_in_one_turn_are_forwarded_as_one_delta() -> None:
    engine, sink = ScriptedEngine(), CollectingSink()
    generation = await start(engine, n=2)
    reading = asyncio.ensure_future(read(generation, sink))
    await settled()
    engine.say("a", to="r-1")
    await settled()
    for text in "bcd":
        engine.say(text, to="r-1")
        engine.say(text.upper(), to="r-0")
    await settled()
    assert [(delta.index, delta.text) for delta in sink.deltas] == [
        (1, "a"),
        (1, "bcd"),
        (0, "BCD"),
    ]
    await generation.aclose()
    assert await reading is sink.deltas


class Turns:
    """Counts the turns of the event loop while it is entered."""

    def __init__(self) -> None:
        self.now = 0

    async def __aenter__(self) -> Turns:
        self._task = asyncio.create_task(self._count())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _count(self) -> None:
        while True:
            self.now += 1
            await asyncio.sleep(0)


async def test_many_rich_outputs_of_one_turn_are_forwarded_in_several() -> None:
    forwarded: Counter[int] = Counter()
    async with Turns() as turns:

        class Sink(CollectingSink):
            def put(self, delta: TextDelta) -> None:
                forwarded[turns.now] += 1
                super().put(delta)

        engine, sink = ScriptedEngine(), Sink()
        generation = await start(engine, n=120, logprobs=0)
        reading = asyncio.ensure_future(read(generation, sink))
        await settled()
        for text in "ab":
            for index in range(120):
                engine.say(text, to=f"r-{index}", logprobs=True)
            await settled()
    assert forwarded.total() >= 120 and max(forwarded.values()) <= 100
    assert Counter(delta.text for delta in sink.deltas) == {"a": 120, "b": 120}
    await generation.aclose()
    await reading


async def test_log_probabilities_that_wait_count_and_end_a_call_without_room() -> None:
    engine, accounts = ScriptedEngine(), TenantAccounts({"ann": TenantLimits(output_bytes=100_000)})
    ids = IdGenerator(random.Random(0))
    starts = TextGenerator(engine, TOKENIZER, ManualClock(), ids, accounts=accounts)
    calls = [
        await starts.start([PROMPT], SamplingParams(logprobs=0), request_id=name, tenant="ann")
        for name in ("a", "b")
    ]
    for _ in range(9):
        engine.say("x" * 1_000, to="a", logprobs=True)
    assert accounts.used("ann", Resource.OUTPUT_BYTES) == 9 * 16_000, "it may be the only one"
    for _ in range(9):
        engine.say("x" * 1_000, to="b", logprobs=True)
    assert accounts.used("ann", Resource.OUTPUT_BYTES) == 9 * 16_000
    delta = await anext(calls[1])
    assert len(delta.logprobs) == 5_000, "nothing comes after it"
    with pytest.raises(TenantLimitError, match="max_output_bytes"):
        await anext(calls[1])
    assert engine.aborted == ["b"]
    await anext(calls[0])
    assert accounts.used("ann", Resource.OUTPUT_BYTES) == 0
    engine.say("x" * 9_000, to="a", logprobs=True)
    await calls[0].aclose()
    assert accounts.used("ann", Resource.OUTPUT_BYTES) == 0


async def test_copies_of_a_long_prompt_are_submitted_in_several_turns() -> None:
    submitted: Counter[int] = Counter()
    async with Turns() as turns:

        class Engine(ScriptedEngine):
            async def submit(self, request: EngineRequest) -> OutputStream:
                submitted[turns.now] += len(request.prompt_token_ids)
                return await super().submit(request)

        engine, prompt = Engine(max_model_len=200_000), [5] * 100_000
        sampling = SamplingParams(n=20)
        generation = await generator(engine).start([prompt], sampling, request_id="r")
    assert submitted.total() == 20 * len(prompt)
    assert max(submitted.values()) <= MAX_SUBMITTED_TOKENS
    await generation.aclose()


async def test_a_call_that_is_cancelled_while_it_is_submitted_leaves_nothing() -> None:
    engine = ScriptedEngine(max_model_len=200_000)
    submitting = generator(engine).start([[5] * 100_000], SamplingParams(n=20), request_id="r")
    task = asyncio.ensure_future(submitting)
    for _ in range(4):
        await asyncio.sleep(0)
    assert 0 < len(engine.submitted) < 20
    task.cancel()
    await asyncio.wait([task])
    await settled()
    begun = {request.request_id for request in engine.submitted}
    assert task.cancelled() and set(engine.aborted) == begun


async def test_an_engine_that_dies_ends_the_forwarding_after_all_deltas() -> None:
    engine, sink = ScriptedEngine(), CollectingSink()
    generation = await start(engine)
    reading = asyncio.ensure_future(read(generation, sink))
    await settled()
    engine.say("a")
    await settled()
    engine.say("b")
    engine.streams["r"].put(EngineDeadError("gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        await reading
    assert "".join(delta.text for delta in sink.deltas) == "ab"


async def test_a_sink_that_fails_fails_its_own_reader_only() -> None:
    class BrokenSink(CollectingSink):
        def put_text(self, index: int, text: str, num_tokens: int) -> None:
            raise ZeroDivisionError

    engine, sink = ScriptedEngine(), CollectingSink()
    both = generator(engine)
    broken, fine = [await both.start([PROMPT], SamplingParams()) for _ in range(2)]
    ids = [request.request_id for request in engine.submitted]
    readers = [
        asyncio.ensure_future(read(broken, BrokenSink())),
        asyncio.ensure_future(read(fine, sink)),
    ]
    for text in "ab":
        for request_id in ids:
            engine.say(text, to=request_id)
        await settled()
    engine.say("c", FinishReason.LENGTH, to=ids[1])
    with pytest.raises(ZeroDivisionError):
        await readers[0]
    assert "".join(delta.text for delta in await readers[1]) == "abc"


def _joined(deltas: Sequence[TextDelta]) -> TextDelta:
    """As if all had been merged."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
    )


async def test_a_reader_that_is_late_finds_one_delta_for_each_choice() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, n=2)
    for _ in range(500):
        engine.say("a", to="r-1")
        engine.say("b", to="r-0")
    engine.say("!", FinishReason.LENGTH, to="r-0")
    first, second = await generation.ready()
    assert (first.index, first.text, first.finish_reason) == (1, "a" * 500, None)
    assert (second.index, second.text) == (0, "b" * 500 + "!")
    assert second.finish_reason is FinishReason.LENGTH
    assert (second.num_output_tokens, len(second.token_ids)) == (501, 501)
    await generation.aclose()
    assert await generation.ready() == []


async def test_a_stop_string_ends_the_request_though_no_one_reads() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("END",))
    engine.say("one E")
    engine.say("ND two")
    engine.say(" three", FinishReason.LENGTH)
    await settled()
    assert engine.aborted == ["r"]
    [delta] = await generation.ready()
    assert (delta.text, delta.stop_reason, delta.num_output_tokens) == ("one ", "END", 7)


async def test_an_output_that_cannot_become_text_fails_its_reader_only() -> None:
    engine = ScriptedEngine()
    broken, fine = await start(engine), await generator(engine).start([PROMPT], SamplingParams())
    other_id = engine.submitted[1].request_id
    engine.say([object()], to="r")  # type: ignore[list-item]
    engine.say("a", FinishReason.LENGTH, to=other_id)
    assert [delta.text async for delta in fine] == ["a"]
    with pytest.raises(TypeError):
        await anext(broken)
    assert engine.aborted == ["r"]


async def test_choices_of_several_prompts_are_numbered_through() -> None:
    engine = ScriptedEngine()
    generation = await generator(engine).start(
        [PROMPT, [8]], SamplingParams(n=2, seed=5), request_id="r"
    )
    assert [r.request_id for r in engine.submitted] == ["r-0-0", "r-0-1", "r-1-0", "r-1-1"]
    assert [r.sampling.seed for r in engine.submitted] == [5, 6, 5, 6]
    assert [len(r.prompt_token_ids) for r in engine.submitted] == [3, 3, 1, 1]
    assert generation.prompt_tokens == 4
    for request, cached in zip(engine.submitted, (2, 3, 1, 1), strict=True):
        engine.say("a", FinishReason.LENGTH, to=request.request_id, cached=cached)
    assert [result.index for result in await collect(generation)] == [0, 1, 2, 3]
    assert generation.cached_tokens == 3, "2 of the first prompt, 1 of the second"


async def test_an_incomplete_character_at_the_end_can_complete_a_stop_string() -> None:
    engine = ScriptedEngine()
    generation = await start(engine, stop=("x\ufffd",))
    half = TOKENIZER.encode("\U0001f680")[:2]
    engine.say([*one_by_one("ax"), *half], FinishReason.LENGTH)
    delta = await anext(generation)
    assert (delta.text, delta.stop_reason) == ("a", "x\ufffd")
    assert delta.finish_reason is FinishReason.STOP
