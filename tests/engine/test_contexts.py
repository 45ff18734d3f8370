"""Contexts against plain requests: the same tokens, computed once, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence

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
from bros.engine.contexts import Contexts
from bros.engine.engine import Engine
from bros.engine.thread_client import ThreadEngineClient
from support.scheduling import engine_info, make_scheduler
from support.tier import examples
from support.toy_model import ToyModel

SIZE, BLOCKS = 4, 100
UNLUCKY = 777
"""A prompt that ends with this gets no token."""


class CountingModel(ToyModel):
    """computed: tokens so far. broken: it fails as a whole."""

    def __init__(self) -> None:
        super().__init__(SIZE)
        self.computed = 0
        self.broken = False

    def execute(self, plan: StepPlan, should_abort: object = None) -> StepResult | None:
        if self.broken:
            raise RuntimeError("device on fire")
        self.computed += plan.num_tokens
        return super().execute(plan)

    def choose(self, chunk: Chunk, tokens: Sequence[int]) -> SampledToken:
        if tokens[-1] == UNLUCKY:
            return SampledToken(chunk.request_id, -1, error="No token could be chosen.")
        return super().choose(chunk, tokens)


class Desk:
    """Contexts of a toy engine on a thread, and what a test asks them."""

    def __init__(self, model: CountingModel, client: ThreadEngineClient) -> None:
        self.model, self.client = model, client
        self.contexts = Contexts(client, IdGenerator(random.Random(1)))

    async def generate(
        self, context_id: str, parent_id: str | None, tokens: Sequence[int], count: int = 3
    ) -> list[int]:
        sampling = SamplingParams(max_tokens=count, ignore_eos=True)
        found: list[int] = []
        async for output in self.contexts.generate(context_id, parent_id, tokens, sampling):
            found += output.token_ids
        return found

    async def left(self) -> tuple[int, int]:
        """(blocks that are in use, blocks that are kept)"""
        stats = await self.client.stats()
        return stats.kv_blocks_used, stats.kv_blocks_parked


@contextlib.asynccontextmanager
async def open_desk(**options: object) -> AsyncIterator[Desk]:
    model = CountingModel()
    chosen = {"blocks": BLOCKS, "prefix_cache": "class-aware", **options}
    scheduler = make_scheduler("fcfs", block_size=SIZE, **chosen)  # type: ignore[arg-type]
    info = engine_info(blocks=BLOCKS, block_size=SIZE, policy="fcfs")
    client = ThreadEngineClient(Engine(scheduler, model, ManualClock(), info))
    await client.wait_ready()
    try:
        yield Desk(model, client)
    finally:
        await client.close()


async def test_what_is_generated_is_what_one_plain_request_would_get() -> None:
    async with open_desk() as desk:
        assert await desk.contexts.fill("c", None, range(1, 10)) == 9
        first = await desk.generate("c", None, [50, 51], 5)
        assert first == ToyModel.continuation([*range(1, 10), 50, 51], 5)
        second = await desk.generate("c", None, [60], 2)
        said = [*range(1, 10), 50, 51, *first, 60]
        assert second == ToyModel.continuation(said, 2)
        assert list(desk.contexts.token_ids("c")) == [*said, *second]


async def test_contexts_that_begin_alike_are_computed_once() -> None:
    """40 tokens of 10 blocks, and for each fork those of its own that come before the last one."""
    async with open_desk() as desk:
        await desk.contexts.fill("system", None, range(1, 41))
        assert desk.model.computed == 40
        for number in range(5):
            await desk.generate(f"chat {number}", "system", [100 + number, 101], 3)
        assert desk.model.computed == 40 + 5 * (2 + 2)


async def test_a_fork_has_what_its_parent_had_then() -> None:
    async with open_desk() as desk:
        await desk.contexts.fill("parent", None, range(1, 10))
        assert await desk.contexts.fill("early", "parent", ()) == 0
        await desk.contexts.fill("parent", None, [20, 21])
        assert await desk.contexts.free("parent") == 11
        assert await desk.generate("early", "parent", [30]) == ToyModel.continuation(
            [*range(1, 10), 30], 3
        )


async def test_what_forks_have_in_common_stays_when_their_parent_is_freed() -> None:
    async with open_desk() as desk:
        await desk.contexts.fill("parent", None, range(1, 41))
        await desk.contexts.fill("child", "parent", range(41, 49))
        assert await desk.contexts.free("parent") == 40
        assert await desk.left() == (0, 12)
        before = desk.model.computed
        await desk.generate("child", "parent", [50], 1)
        assert desk.model.computed == before + 1


async def test_freeing_leaves_nothing() -> None:
    async with open_desk() as desk:
        await desk.contexts.fill("a", None, range(1, 41))
        await desk.generate("a", None, [1], 4)
        await desk.generate("b", "a", [2], 4)
        assert await desk.left() == (0, 12)
        assert await desk.contexts.free("a") == 45
        assert await desk.contexts.free("b") == 50
        assert await desk.contexts.free("a") == 0, "unknown by now"
        assert await desk.left() == (0, 0)
        assert len(desk.contexts) == 0 and not desk.contexts.token_ids("a")


async def test_without_a_prefix_cache_it_is_only_slower() -> None:
    async with open_desk(prefix_cache="off") as desk:
        assert await desk.contexts.fill("a", None, range(1, 41)) == 40
        found = await desk.generate("b", "a", [2], 4)
        assert found == ToyModel.continuation([*range(1, 41), 2], 4)


async def test_a_context_has_one_job_at_a_time() -> None:
    async with open_desk() as desk:
        contexts = desk.contexts
        await contexts.fill("c", None, range(1, 10))
        outputs = contexts.generate("c", None, [11], SamplingParams(max_tokens=300))
        await anext(outputs)
        for job in (
            contexts.fill("c", None, [1]),
            desk.generate("c", None, [1]),
            desk.generate("fork", "c", [1]),
            contexts.fill("fork", "c", ()),
            contexts.free("c"),
        ):
            with pytest.raises(InvalidRequestError, match="a job runs"):
                await job
        assert len(contexts) == 1
        await outputs.aclose()
        assert list(contexts.token_ids("c")) == list(range(1, 10)), "as it was"
        assert await contexts.free("c") == 9
        assert await desk.left() == (0, 0)


async def test_a_job_that_ended_unseen_leaves_nothing() -> None:
    async with open_desk() as desk:
        outputs = desk.contexts.generate("c", None, [11], SamplingParams(max_tokens=200))
        assert (await anext(outputs)).finish_reason is None
        while (await desk.client.stats()).kv_blocks_parked == 0:
            pass  # its last output has not been read yet
        await outputs.aclose()
        assert await desk.left() == (0, 0)


async def test_the_next_job_may_begin_with_the_last_output_of_the_one_before() -> None:
    """And is not ended by it."""
    async with open_desk() as desk:
        outputs = desk.contexts.generate("c", None, [11], SamplingParams(max_tokens=1))
        await anext(outputs)
        following = desk.contexts.generate("c", None, [12], SamplingParams(max_tokens=300))
        await anext(following)
        with pytest.raises(StopAsyncIteration):
            await anext(outputs)
        with pytest.raises(InvalidRequestError, match="a job runs"):
            await desk.contexts.free("c")
        await following.aclose()
        assert await desk.contexts.free("c") == 2


async def test_jobs_that_fail_leave_no_trace() -> None:
    async with open_desk() as desk:
        contexts = desk.contexts
        await contexts.fill("c", None, range(1, 10))
        kept = await desk.left()
        for name, parent in (("c", None), ("new", "c")):
            with pytest.raises(PromptTooLongError):
                await contexts.fill(name, parent, [1] * 400)
            with pytest.raises(InvalidRequestError, match="vocabulary"):
                await contexts.fill(name, parent, [5000])
            with pytest.raises(BrosError, match="No token could be chosen"):
                await desk.generate(name, parent, [UNLUCKY])
        assert len(contexts) == 1
        assert list(contexts.token_ids("c")) == list(range(1, 10))
        assert await desk.left() == kept
        assert await desk.generate("c", None, [4]) == ToyModel.continuation([*range(1, 10), 4], 3)


async def test_a_job_that_is_given_up_for_want_of_capacity_says_when_to_come_back() -> None:
    class Busy:
        """Gives up what it has accepted."""

        async def submit(self, request: EngineRequest) -> OutputStream:
            stream = OutputStream(request.service_class)
            stream.put(
                RequestOutput(
                    request_id=request.request_id, finish_reason=FinishReason.ERROR,
                    error="Too busy.", retry_after_s=7.5,
                )
            )  # fmt: skip
            return stream

        async def abort(self, request_id: str) -> None:
            pass

        release = abort

    contexts = Contexts(Busy(), IdGenerator(random.Random(1)))  # type: ignore[arg-type]
    with pytest.raises(OverloadedError, match="Too busy") as refused:
        await contexts.fill("c", None, [1, 2])
    assert refused.value.retry_after_s == 7.5 and len(contexts) == 0


async def test_a_cancelled_fill_leaves_no_trace() -> None:
    async with open_desk(max_queue=1) as desk:
        task = asyncio.create_task(desk.contexts.fill("c", None, range(1, 40)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert len(desk.contexts) == 0
        assert (await desk.left())[1] == 0


async def test_contexts_survive_their_engine() -> None:
    async with open_desk() as desk:
        await desk.contexts.fill("c", None, range(1, 10))
        desk.model.broken = True
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await desk.contexts.fill("c", None, range(10, 20))
        assert list(desk.contexts.token_ids("c")) == list(range(1, 10))
        assert await desk.contexts.free("c") == 9


async def test_parents_have_to_be_there_and_the_right_ones() -> None:
    async with open_desk() as desk:
        await desk.contexts.fill("a", None, [1, 2])
        await desk.contexts.fill("b", None, [3])
        with pytest.raises(InvalidRequestError, match="no context 'x'"):
            await desk.contexts.fill("c", "x", [1])
        with pytest.raises(InvalidRequestError, match="not forked from 'b'"):
            await desk.contexts.fill("a", "b", [1])
        assert await desk.contexts.fill("c", "a", [5]) == 1
        assert await desk.contexts.fill("c", "a", [6]) == 1
        assert list(desk.contexts.token_ids("c")) == [1, 2, 5, 6]


@given(data=st.data())
@settings(max_examples=examples(40))
def test_any_tree_of_contexts_is_what_it_would_be_without_an_engine(data: st.DataObject) -> None:
    """Contexts are lists of tokens, by an oracle that copies them; small memory, so that KV goes
    and has to be computed again."""
    names = ["a", "b", "c", "d"]
    blocks = data.draw(st.sampled_from([24, BLOCKS]))
    steps = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from(["fill", "fill", "generate", "free", "too long"]),
                st.sampled_from(names),
                st.none() | st.sampled_from(names),
                st.lists(st.integers(1, 3), max_size=8),
            ),
            max_size=25,
        )
    )

    async def play() -> None:
        known: dict[str, list[int]] = {}
        parents: dict[str, str | None] = {}
        async with open_desk(blocks=blocks) as desk:
            for what, name, parent, tokens in steps:
                if what == "free":
                    assert await desk.contexts.free(name) == len(known.pop(name, []))
                    parents.pop(name, None)
                    continue
                usable = parent is None or parent in (
                    known if name not in known else [parents[name]]
                )
                before = known.get(name, known.get(parent or "", []))
                most = 4 * blocks - 5 - len(before)
                if not usable or what == "too long" or len(tokens) > most:
                    many = tokens if not usable and tokens else [1] * 4 * blocks
                    with pytest.raises(InvalidRequestError):
                        await desk.contexts.fill(name, parent, many)
                elif what == "fill":
                    assert await desk.contexts.fill(name, parent, tokens) == len(tokens)
                    known[name] = [*before, *tokens]
                else:
                    tokens = tokens or [1]
                    found = await desk.generate(name, parent, tokens)
                    assert found == ToyModel.continuation([*before, *tokens], 3)
                    known[name] = [*before, *tokens, *found]
                if name in known:
                    parents.setdefault(name, parent)
                for each in names:
                    assert list(desk.contexts.token_ids(each)) == known.get(each, [])
            for name in names:
                await desk.contexts.free(name)
            assert await desk.left() == (0, 0)
            assert len(desk.contexts) == 0

    asyncio.run(play())
