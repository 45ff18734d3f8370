"""An engine on a thread, and everything a client does with the messages of one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

import pytest

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.errors import (
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)
from bros.core.interfaces import EngineClient, EngineInfo
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, FinishReason, SamplingParams, ServiceClass
from bros.engine.engine import Engine
from bros.engine.thread_client import ThreadEngineClient
from bros.engine.watchdog import Watchdog
from bros.scheduler.build import build_scheduler
from support.toy_model import VOCAB, ToyModel

MAX_LEN = 200


class GatedModel(ToyModel):
    """A toy model whose steps can be held up or made to fail from the test."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()
        self.gate.set()
        self.waiting = False  # a step, for the gate
        self.broken = False
        self.steps = 0
        self.hold_after = -1  # steps, after which the gate closes by itself
        self.closed = False

    def execute(self, plan: StepPlan) -> StepResult:
        self.waiting = not self.gate.is_set()
        assert self.gate.wait(timeout=30), "the test forgot to open the gate"
        self.waiting = False
        if self.broken:
            raise RuntimeError("device on fire")
        self.steps += 1
        if self.steps == self.hold_after:
            self.gate.clear()
        return super().execute(plan)

    def close(self) -> None:
        self.closed = True


def make_engine(model: ToyModel, *, max_queue: int = 100) -> Engine:
    info = EngineInfo(
        model="toy", weights="none", kernels="none", kv_dtype="none", device="cpu",
        max_model_len=MAX_LEN, vocab_size=VOCAB, block_size=4, num_kv_blocks=64,
        policy="fcfs",
    )  # fmt: skip
    scheduler = build_scheduler(
        EngineConfig(policy="fcfs", max_num_seqs=8, max_batch_tokens=32, max_queue=max_queue),
        info,
        None,
    )
    return Engine(scheduler, model, ManualClock(), info)


@pytest.fixture
def model() -> GatedModel:
    return GatedModel()


@pytest.fixture
async def client(model: GatedModel) -> AsyncIterator[ThreadEngineClient]:
    client = ThreadEngineClient(lambda: make_engine(model, max_queue=3))
    await client.wait_ready()
    yield client
    model.gate.set()
    await client.close()


def ask(name: str, length: int = 5, max_tokens: int = 6) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=list(range(1, length + 1)),
        sampling=SamplingParams(max_tokens=max_tokens),
    )


async def tokens_of(client: EngineClient, request: EngineRequest) -> list[int]:
    stream = await client.submit(request)
    return [token async for output in stream for token in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_many_requests_at_once_each_get_their_own_tokens(client: ThreadEngineClient) -> None:
    requests = [ask(f"r{n}", length=3 + n, max_tokens=1 + n) for n in range(3)]
    answers = await asyncio.gather(*(tokens_of(client, request) for request in requests))
    for request, answer in zip(requests, answers, strict=True):
        assert request.sampling.max_tokens is not None
        expected = ToyModel.continuation(request.prompt_token_ids, request.sampling.max_tokens)
        assert answer == expected
    assert client.num_open == 0


async def test_info_and_stats(client: ThreadEngineClient) -> None:
    assert client.alive and client.info.max_model_len == MAX_LEN
    await tokens_of(client, ask("a"))
    stats, trace = await asyncio.gather(client.stats(), client.trace("never heard of"))
    assert stats.by_class[ServiceClass.RT].finished == 1 and trace is None
    assert stats.kv_blocks_used == 0 and stats.kv_blocks_total == 64


async def test_refusals_reach_the_caller_as_they_were_raised(
    client: ThreadEngineClient, model: GatedModel
) -> None:
    with pytest.raises(PromptTooLongError) as too_long:
        await client.submit(ask("long", length=MAX_LEN))
    assert (too_long.value.prompt_tokens, too_long.value.max_model_len) == (MAX_LEN, MAX_LEN)
    with pytest.raises(InvalidRequestError) as invalid:
        await client.submit(
            EngineRequest(request_id="v", prompt_token_ids=[VOCAB], sampling=SamplingParams())
        )
    assert invalid.value.param == "prompt"
    model.gate.clear()
    await client.submit(ask("running"))
    submissions = [asyncio.create_task(client.submit(ask(f"q{n}"))) for n in range(4)]
    await asyncio.sleep(0)  # all four are sent while the first request's step is held up
    model.gate.set()
    results = await asyncio.gather(*submissions, return_exceptions=True)
    assert [isinstance(result, QueueFullError) for result in results] == [False] * 3 + [True]
    assert isinstance(results[3], QueueFullError) and results[3].waiting == 3


async def test_an_id_in_use_is_refused_and_its_owner_is_not_disturbed(
    client: ThreadEngineClient, model: GatedModel
) -> None:
    model.gate.clear()
    stream = await client.submit(ask("same", max_tokens=3))
    with pytest.raises(InvalidRequestError, match="in use"):
        await client.submit(ask("same"))
    model.gate.set()
    assert len([token async for output in stream for token in output.token_ids]) == 3


async def test_abort_frees_memory_after_the_step_that_is_running(
    client: ThreadEngineClient, model: GatedModel
) -> None:
    model.hold_after = 2
    stream = aiter(await client.submit(ask("a", max_tokens=150)))
    read = 0
    while read < 2:  # in one output or two
        output = await anext(stream)
        assert output.finish_reason is None
        read += len(output.token_ids)
    await client.abort("a")
    await client.abort("unknown")
    model.gate.set()
    rest = [output async for output in stream]
    assert [output.finish_reason for output in rest[-1:]] == [FinishReason.ABORT]
    assert model.steps <= 3, "the step that may have begun before the abort, and no other"
    assert (await client.stats()).kv_blocks_used == 0 and client.num_open == 0


async def test_a_caller_cancelled_during_submission_leaves_nothing_behind(
    client: ThreadEngineClient, model: GatedModel
) -> None:
    model.gate.clear()
    await client.submit(ask("first", max_tokens=2))
    waiting = asyncio.create_task(client.submit(ask("second", max_tokens=100)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    model.gate.set()
    await until(lambda: client.num_open == 0)
    stats = await client.stats()
    assert stats.kv_blocks_used == 0 and stats.by_class[ServiceClass.RT].waiting == 0


async def test_when_a_step_fails_everything_open_fails_at_once_and_later_calls_too(
    client: ThreadEngineClient, model: GatedModel
) -> None:
    model.gate.clear()
    streams = [await client.submit(ask("a"))]
    asked = asyncio.create_task(client.stats())
    submitted = asyncio.create_task(client.submit(ask("b")))
    await asyncio.sleep(0)
    model.broken = True
    model.gate.set()
    for stream in streams:
        with pytest.raises(EngineDeadError, match="device on fire"):
            async for _ in stream:
                pass
    for task in (asked, submitted):
        with pytest.raises(EngineDeadError):
            await task
    assert not client.alive and client.num_open == 0
    for call in (client.submit(ask("c")), client.stats(), client.trace("a")):
        with pytest.raises(EngineDeadError, match="device on fire"):
            await call
    await client.abort("a")


@pytest.fixture
async def watched(model: GatedModel) -> AsyncIterator[ThreadEngineClient]:
    """A step of it hangs after 0.3 s, once its first steps have ended."""
    client = ThreadEngineClient(lambda: make_engine(model), hang_timeout_s=0.4)
    await client.wait_ready()
    for n in range(3):
        await tokens_of(client, ask(f"warm{n}"))
    yield client
    model.gate.set()
    await client.close()


async def test_when_a_step_hangs_everything_open_fails_and_nothing_waits_for_it(
    watched: ThreadEngineClient, model: GatedModel, caplog: pytest.LogCaptureFixture
) -> None:
    model.gate.clear()
    stream = await watched.submit(ask("a"))
    asked = asyncio.create_task(watched.stats())
    submitted = asyncio.create_task(watched.submit(ask("b")))
    async with asyncio.timeout(30):
        with pytest.raises(EngineDeadError, match="has not ended after .* cannot be replaced"):
            async for _ in stream:
                pass
        for task in (asked, submitted):
            with pytest.raises(EngineDeadError, match="has not ended"):
                await task
        assert not watched.alive and watched.hung and watched.num_open == 0
        assert (watched.num_lost, watched.num_hung) == (1, 1)
        with pytest.raises(EngineDeadError, match="has not ended"):
            await watched.submit(ask("c"))
        await watched.close()
        await until(lambda: "in execute" in caplog.text)  # where it hangs
    assert not model.closed
    model.gate.set()  # the step ends after all: its results are of no use, and the engine is closed
    await until(lambda: model.closed)
    await asyncio.sleep(0.05)
    assert not watched.alive


async def test_closing_does_not_wait_for_a_step_that_turns_out_to_hang(
    watched: ThreadEngineClient, model: GatedModel
) -> None:
    model.gate.clear()
    await watched.submit(ask("a"))
    await until(lambda: model.waiting)
    async with asyncio.timeout(20):
        closing = asyncio.create_task(watched.close())
        await asyncio.sleep(0)
        assert not watched.hung
        await closing
    assert watched.hung and not model.closed
    model.gate.set()
    await until(lambda: model.closed)


async def test_an_idle_engine_and_slow_steps_do_not_hang(
    watched: ThreadEngineClient, model: GatedModel
) -> None:
    await asyncio.sleep(1.0)
    model.gate.clear()
    answer = asyncio.create_task(tokens_of(watched, ask("a")))
    await asyncio.sleep(0.1)
    model.gate.set()
    assert len(await answer) == 6 and not watched.hung


def names_of_threads_since(before: set[threading.Thread]) -> set[str]:
    """Without the threads of engines of earlier tests, which may still end."""
    return {thread.name for thread in set(threading.enumerate()) - before}


@pytest.mark.parametrize("timeout_s", [0.0, 0.4])
async def test_steps_may_take_any_time_unless_they_are_watched_and_not_the_first(
    model: GatedModel, timeout_s: float
) -> None:
    before = set(threading.enumerate())
    client = ThreadEngineClient(lambda: make_engine(model), hang_timeout_s=timeout_s)
    await client.wait_ready()
    model.gate.clear()
    answer = asyncio.create_task(tokens_of(client, ask("a")))
    await asyncio.sleep(1.0)
    assert client.alive
    model.gate.set()
    assert len(await answer) == 6
    await client.close()
    assert "bros-engine-watch" not in names_of_threads_since(before)


async def test_close_after_a_failure_releases_the_executor_too(model: GatedModel) -> None:
    client = ThreadEngineClient(lambda: make_engine(model))
    await client.wait_ready()
    model.broken = True
    with pytest.raises(EngineDeadError, match="device on fire"):
        await tokens_of(client, ask("a"))
    await client.close()
    assert model.closed


async def test_close_ends_the_thread_and_releases_the_executor(model: GatedModel) -> None:
    client = ThreadEngineClient(lambda: make_engine(model))
    await client.wait_ready()
    model.hold_after = 1
    stream = await client.submit(ask("a", max_tokens=150))
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    model.gate.set()
    await closing
    assert model.closed and not client.alive
    with pytest.raises(EngineDeadError, match="closed"):
        async for _ in stream:
            pass
    await client.close()


async def test_close_waits_for_the_thread_that_watches(
    model: GatedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It refers to the engine. When it freed the tensors of the engine while the program ended,
    torch aborted the program."""
    begun, go_on = threading.Event(), threading.Event()

    def check(watchdog: Watchdog) -> None:
        begun.set()
        go_on.wait(timeout=30)

    monkeypatch.setattr(Watchdog, "check", check)
    before = set(threading.enumerate())
    client = ThreadEngineClient(lambda: make_engine(model), hang_timeout_s=0.01)
    await client.wait_ready()
    assert await asyncio.to_thread(begun.wait, 30)
    closing = asyncio.create_task(client.close())
    await asyncio.wait([closing], timeout=0.2)
    assert not closing.done()
    go_on.set()
    await closing
    assert "bros-engine-watch" not in names_of_threads_since(before)


async def test_one_thread_builds_steps_and_closes() -> None:
    """There is a team of threads for each thread that computes."""
    threads: list[int] = []

    class Watched(ToyModel):
        def execute(self, plan: StepPlan) -> StepResult:
            threads.append(threading.get_ident())
            return super().execute(plan)

        def close(self) -> None:
            threads.append(threading.get_ident())

    def build() -> Engine:
        threads.append(threading.get_ident())
        return make_engine(Watched())

    client = ThreadEngineClient(build)
    await client.wait_ready()
    await tokens_of(client, ask("a"))
    await client.close()
    assert len(threads) == 1 + 6 + 1 and len(set(threads)) == 1
    assert threads[0] != threading.get_ident()


async def test_an_error_of_building_reaches_the_caller_as_it_was_raised() -> None:
    def build() -> Engine:
        raise ConfigError("--kv-blocks: too few")

    client = ThreadEngineClient(build)
    with pytest.raises(ConfigError, match="--kv-blocks: too few"):
        await client.wait_ready()
    assert not client.alive
    with pytest.raises(EngineDeadError, match="did not start: --kv-blocks: too few"):
        await client.submit(ask("a"))
    await client.close()


async def test_close_does_not_wait_for_an_engine_that_is_being_built(model: GatedModel) -> None:
    may_build, thread = threading.Event(), threading.Thread()

    def build() -> Engine:
        nonlocal thread
        thread = threading.current_thread()
        assert may_build.wait(timeout=30)
        return make_engine(model)

    client = ThreadEngineClient(build)
    waiting = asyncio.create_task(client.wait_ready())
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(EngineDeadError, match="closed"):
        await waiting
    may_build.set()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive() and model.closed and not client.alive


@pytest.mark.parametrize("broken", [False, True])
def test_the_thread_ends_if_the_event_loop_is_closed_before_the_client(
    model: GatedModel, broken: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """broken: its last step fails, which it can only log."""

    async def forget_to_close() -> None:
        client = ThreadEngineClient(lambda: make_engine(model))
        await client.wait_ready()
        model.hold_after = 1
        await client.submit(ask("a", max_tokens=150))

    before = set(threading.enumerate())
    asyncio.run(forget_to_close())
    (thread,) = [t for t in set(threading.enumerate()) - before if t.name == "bros-engine"]
    model.broken = broken
    model.gate.set()
    thread.join(timeout=10)
    assert not thread.is_alive() and model.steps < 150
    reason = "the engine stopped" if broken else "the event loop of its client was closed"
    assert reason in caplog.messages[-1]
