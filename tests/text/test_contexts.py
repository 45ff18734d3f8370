"""Contexts against plain requests: the same tokens, computed once, and nothing left pinned."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.clock import ManualClock
from bros.core.errors import (
    BrosError,
    EngineDeadError,
    InvalidRequestError,
    OverloadedError,
    PromptTooLongError,
)
from bros.core.plan import Chunk, SampledToken, StepPlan, StepResult
from bros.core.request import (
    EngineRequest,
    FinishReason,
    IdGenerator,
    RequestOutput,
    SamplingParams,
)
from bros.engine.client import OutputStream
from bros.engine.engine import Engine
from bros.engine.thread_client import ThreadEngineClient
from bros.text.contexts import Contexts, GenerationJob, TokenContext
from bros.text.generation import ChoiceResult, TextGenerator
from support.scheduling import engine_info, make_scheduler
from support.tier import examples
from support.tiny_tokenizer import tiny_tokenizer
from support.toy_model import ToyModel

SIZE, BLOCKS = 4, 100
UNLUCKY = 0  # which the toy model never chooses
"""A prompt that ends with this gets no token."""
TOKENIZER = tiny_tokenizer()


class CountingModel(ToyModel):
    """computed: tokens so far. broken: it fails as a whole. script: what it says, token by token,
    in place of its own tokens."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.computed = 0
        self.broken = False
        self.script: list[int] = []

    def execute(self, plan: StepPlan, should_abort: object = None) -> StepResult | None:
        if self.broken:
            raise RuntimeError("device on fire")
        self.computed += plan.num_tokens
        return super().execute(plan)

    def choose(self, chunk: Chunk, tokens: Sequence[int]) -> SampledToken:
        if tokens[-1] == UNLUCKY:
            return SampledToken(chunk.request_id, -1, error="No token could be chosen.")
        if self.script:
            return SampledToken(chunk.request_id, self.script.pop(0))
        return super().choose(chunk, tokens)


class Desk:
    """Contexts of a toy engine on a thread, and what a test asks them."""

    def __init__(self, model: CountingModel, client: ThreadEngineClient) -> None:
        self.model, self.client = model, client
        ids = IdGenerator(random.Random(1))
        generator = TextGenerator(client, TOKENIZER, ManualClock(), ids)
        self.contexts = Contexts(client, generator, ids)

    async def filled(self, tokens: Sequence[int]) -> TokenContext:
        context = self.contexts.new()
        await self.contexts.fill(context, tokens)
        return context

    async def generate(
        self, context: TokenContext, tokens: Sequence[int], count: int = 3, **sampling: Any
    ) -> ChoiceResult:
        (answer,) = await self.contexts.generate([job(context, tokens, count, **sampling)])
        return answer

    async def left(self) -> tuple[int, int]:
        """(blocks that are in use, blocks that are pinned)"""
        stats = await self.client.stats()
        return stats.kv_blocks_used, stats.kv_blocks_pinned


def job(
    context: TokenContext, tokens: Sequence[int], count: int = 3, **sampling: Any
) -> GenerationJob:
    params = SamplingParams(max_tokens=count, ignore_eos=True, **sampling)
    return GenerationJob(context, tokens, params)


@contextlib.asynccontextmanager
async def open_desk(**options: object) -> AsyncIterator[Desk]:
    model = CountingModel()
    chosen = {"blocks": BLOCKS, "prefix_cache": "class-aware", **options}
    scheduler = make_scheduler("fcfs", block_size=SIZE, **chosen)  # type: ignore[arg-type]
    info = engine_info(blocks=BLOCKS, block_size=SIZE, policy="fcfs")
    client = ThreadEngineClient(lambda: Engine(scheduler, model, ManualClock(), info))
    await client.wait_ready()
    try:
        yield Desk(model, client)
    finally:
        await client.close()


async def test_what_is_generated_is_what_one_plain_request_would_get() -> None:
    async with open_desk() as desk:
        context = await desk.filled(range(1, 10))
        first = (await desk.generate(context, [50, 51], 5)).token_ids
        assert list(first) == ToyModel.continuation([*range(1, 10), 50, 51], 5)
        second = (await desk.generate(context, [60], 2)).token_ids
        said = [*range(1, 10), 50, 51, *first, 60]
        assert list(second) == ToyModel.continuation(said, 2)
        assert list(context.tokens) == [*said, *second]


async def test_forks_are_computed_once_and_together() -> None:
    """40 tokens of 10 blocks, and for each fork those of its own that come before the last one."""
    async with open_desk() as desk:
        system = await desk.filled(range(1, 41))
        assert desk.model.computed == 40
        forks = [system.fork() for _ in range(5)]
        answers = await desk.contexts.generate(
            [job(fork, [100 + number, 101]) for number, fork in enumerate(forks)]
        )
        assert desk.model.computed == 40 + 5 * (2 + 2)
        for number, answer in enumerate(answers):
            assert answer.cached_tokens == 40
            said = [*range(1, 41), 100 + number, 101]
            assert list(answer.token_ids) == ToyModel.continuation(said, 3)


async def test_a_fork_has_what_its_parent_had_then() -> None:
    async with open_desk() as desk:
        parent = await desk.filled(range(1, 10))
        early = parent.fork()
        await desk.contexts.fill(parent, [20, 21])
        assert await desk.contexts.free(parent) == 11
        answer = await desk.generate(early, [30])
        assert list(answer.token_ids) == ToyModel.continuation([*range(1, 10), 30], 3)


async def test_what_forks_have_in_common_stays_when_their_parent_is_freed() -> None:
    async with open_desk() as desk:
        parent = await desk.filled(range(1, 41))
        child = parent.fork()
        await desk.contexts.fill(child, range(41, 49))
        assert await desk.contexts.free(parent) == 40
        assert await desk.left() == (0, 12)
        before = desk.model.computed
        await desk.generate(child, [50], 1)
        assert desk.model.computed == before + 1


async def test_freeing_leaves_nothing() -> None:
    async with open_desk() as desk:
        a = await desk.filled(range(1, 41))
        await desk.generate(a, [1], 4)
        b = a.fork()
        await desk.generate(b, [2], 4)
        assert await desk.left() == (0, 12)
        assert await desk.contexts.free(a) == 45
        assert await desk.contexts.free(b) == 50
        assert await desk.contexts.free(a) == 0, "freed by now"
        assert await desk.left() == (0, 0)


async def test_without_a_prefix_cache_it_is_only_slower() -> None:
    async with open_desk(prefix_cache="off") as desk:
        context = await desk.filled(range(1, 41))
        answer = await desk.generate(context.fork(), [2], 4)
        assert list(answer.token_ids) == ToyModel.continuation([*range(1, 41), 2], 4)
        assert answer.cached_tokens == 0


async def test_tokens_after_a_stop_string_are_not_part_of_the_context() -> None:
    async with open_desk() as desk:
        context = await desk.filled(range(1, 41))
        pinned = await desk.left()
        told, stop, beyond = (TOKENIZER.encode(text) for text in ("so it", "!", "beyond"))
        desk.model.script = [*told, *stop, *beyond]
        answer = await desk.generate(context, [7], len(desk.model.script) + 30, stop="!")
        assert (answer.text, answer.stop_reason) == ("so it", "!")
        assert list(answer.token_ids) == [*told, *stop]
        said = [*range(1, 41), 7, *told, *stop]
        assert list(context.tokens) == said
        assert await desk.left() == pinned
        desk.model.script = []
        following = await desk.generate(context, [8])
        assert list(following.token_ids) == ToyModel.continuation([*said, 8], 3)
        assert following.cached_tokens >= len(said) // SIZE * SIZE
        await desk.contexts.free(context)
        assert await desk.left() == (0, 0)


async def test_a_context_has_one_job_at_a_time() -> None:
    async with open_desk() as desk:
        contexts = desk.contexts
        context, other = await desk.filled(range(1, 10)), contexts.new()
        running = asyncio.create_task(desk.generate(context, [11], 300))
        await asyncio.sleep(0)
        attempts: list[Callable[[], Coroutine[Any, Any, object]]] = [
            lambda: contexts.fill(context, [1]),
            lambda: contexts.fill(context, ()),
            lambda: desk.generate(context, [1]),
            lambda: contexts.generate([job(other, [1]), job(context, [1])]),
            lambda: contexts.free(context),
        ]
        for attempt in attempts:
            with pytest.raises(InvalidRequestError, match="A job is running"):
                await attempt()
        with pytest.raises(InvalidRequestError, match="A job is running"):
            context.fork()
        with pytest.raises(InvalidRequestError, match="two jobs at once"):
            await contexts.generate([job(other, [1]), job(other, [2])])
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert list(context.tokens) == list(range(1, 10)), "as it was"
        assert await contexts.free(context) == 9
        assert not other.busy and await contexts.free(other) == 0
        assert await desk.left() == (0, 0)


async def test_a_freed_context_says_so() -> None:
    async with open_desk() as desk:
        context = await desk.filled([1, 2])
        await desk.contexts.free(context)
        for attempt in (desk.contexts.fill(context, [1]), desk.generate(context, [1])):
            with pytest.raises(InvalidRequestError, match="has been freed"):
                await attempt
        with pytest.raises(InvalidRequestError, match="has been freed"):
            context.fork()


async def test_jobs_that_fail_leave_no_trace() -> None:
    async with open_desk() as desk:
        contexts = desk.contexts
        context = await desk.filled(range(1, 10))
        kept = await desk.left()
        for one in (context, context.fork()):
            for attempt in (contexts.fill(one, [1] * 400), desk.generate(one, [1] * 400)):
                with pytest.raises(PromptTooLongError):
                    await attempt
            with pytest.raises(InvalidRequestError, match="vocabulary"):
                await contexts.fill(one, [5000])
            for attempt in (contexts.fill(one, [2**40]), desk.generate(one, [2**40])):
                with pytest.raises(InvalidRequestError, match="integers of 32 bits"):
                    await attempt
            with pytest.raises(BrosError, match="No token could be chosen"):
                await desk.generate(one, [UNLUCKY])
            with pytest.raises(InvalidRequestError, match="n=2; fork it") as refused:
                await desk.generate(one, [4], n=2)
            assert refused.value.param == "n"
            assert list(one.tokens) == list(range(1, 10))
        assert await desk.left() == kept
        answer = await desk.generate(context, [4])
        assert list(answer.token_ids) == ToyModel.continuation([*range(1, 10), 4], 3)


async def test_of_a_batch_all_jobs_succeed_or_none() -> None:
    async with open_desk() as desk:
        context = await desk.filled(range(1, 10))
        kept = await desk.left()
        forks = [context.fork() for _ in range(3)]
        for bad in ([UNLUCKY], [1] * 400):
            with pytest.raises(BrosError):
                await desk.contexts.generate(
                    [job(forks[0], [4], 1), job(forks[1], bad), job(forks[2], [4], 200)]
                )
            assert all(list(fork.tokens) == list(range(1, 10)) for fork in forks)
            assert await desk.left() == kept
        assert await desk.contexts.generate([]) == []


async def test_of_a_failed_batch_nothing_stays_pinned_of_jobs_that_had_ended_before() -> None:
    async with open_desk() as desk:
        context = await desk.filled(range(1, 10))
        forks, kept = [context.fork(), context.fork()], await desk.left()
        desk.model.script = [5, 6, 7, UNLUCKY]  # the first job ends with the first token
        with pytest.raises(BrosError, match="No token"):
            await desk.contexts.generate([job(forks[0], [4] * 8, 1), job(forks[1], [4], 9)])
        assert not desk.model.script
        assert await desk.left() == kept


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ({"retry_after_s": 7.5}, OverloadedError),
        ({"param": "response_format"}, InvalidRequestError),
        ({}, BrosError),
    ],
)
async def test_a_job_that_the_engine_ends_says_why(
    ended: dict[str, Any], expected: type[BrosError]
) -> None:
    class Ending:
        """Ends what it has accepted."""

        async def submit(self, request: EngineRequest) -> OutputStream:
            stream = OutputStream(request.service_class)
            stream.put(
                RequestOutput(
                    request_id=request.request_id, finish_reason=FinishReason.ERROR,
                    error="It ends.", **ended,
                )
            )  # fmt: skip
            return stream

        async def abort(self, request_id: str) -> None:
            pass

        release = abort
        info = engine_info(blocks=BLOCKS, block_size=SIZE, policy="fcfs")

    ids = IdGenerator(random.Random(1))
    generator = TextGenerator(Ending(), TOKENIZER, ManualClock(), ids)  # type: ignore[arg-type]
    contexts = Contexts(Ending(), generator, ids)  # type: ignore[arg-type]
    context = contexts.new()
    for attempt in (contexts.fill(context, [1, 2]), contexts.generate([job(context, [1, 2])])):
        with pytest.raises(BrosError, match="It ends") as failed:
            await attempt
        assert type(failed.value) is expected and not context.tokens
        assert {name: getattr(failed.value, name) for name in ended} == ended


async def test_a_cancelled_fill_leaves_no_trace() -> None:
    async with open_desk(max_queue=1) as desk:
        context = desk.contexts.new()
        task = asyncio.create_task(desk.contexts.fill(context, range(1, 40)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not context.tokens and not context.busy
        assert (await desk.left())[1] == 0


async def test_contexts_survive_their_engine() -> None:
    async with open_desk() as desk:
        context = await desk.filled(range(1, 10))
        desk.model.broken = True
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await desk.contexts.fill(context, range(10, 20))
        assert list(context.tokens) == list(range(1, 10))
        assert await desk.contexts.free(context) == 9


@given(data=st.data())
@settings(max_examples=examples(20, long=150))
def test_any_tree_of_contexts_is_what_it_would_be_without_an_engine(data: st.DataObject) -> None:
    """Contexts are lists of tokens, by an oracle that copies them; small memory, so that KV goes
    and has to be computed again."""
    blocks = data.draw(st.sampled_from([24, BLOCKS]))
    most = 4 * blocks - 5
    pieces = st.lists(st.integers(1, 3), max_size=8)

    async def play() -> None:
        async with open_desk(blocks=blocks) as desk:
            pairs: list[tuple[TokenContext, list[int]]] = [(desk.contexts.new(), [])]
            for _ in range(data.draw(st.integers(0, 25))):
                kind = data.draw(
                    st.sampled_from(["fork", "fill", "fill", "generate", "free", "too long"])
                )
                place = data.draw(st.integers(0, len(pairs) - 1))
                context, known = pairs[place]
                tokens = data.draw(pieces)
                if kind == "fork":
                    pairs.append((context.fork(), list(known)))
                elif kind == "free":
                    assert await desk.contexts.free(context) == len(known)
                    pairs[place] = desk.contexts.new(), []
                elif kind == "too long" or len(known) + len(tokens) > most:
                    with pytest.raises(InvalidRequestError):
                        await desk.contexts.fill(context, [1] * 4 * blocks)
                elif kind == "fill":
                    await desk.contexts.fill(context, tokens)
                    known += tokens
                else:
                    batch = [pair for pair in pairs[place:] if len(pair[1]) + 9 < most]
                    jobs = [job(one, tokens or [1]) for one, _ in batch]
                    answers = await desk.contexts.generate(jobs)
                    for (_, before), answer in zip(batch, answers, strict=True):
                        before += tokens or [1]
                        assert list(answer.token_ids) == ToyModel.continuation(before, 3)
                        before += answer.token_ids
                assert all(list(one.tokens) == tokens for one, tokens in pairs)
            for context, _ in pairs:
                await desk.contexts.free(context)
            assert await desk.left() == (0, 0)

    asyncio.run(play())
