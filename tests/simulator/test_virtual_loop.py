"""An engine whose steps take the time of a virtual loop."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.config import EngineConfig
from bros.core.errors import EngineDeadError, InvalidRequestError
from bros.core.interfaces import EngineReport, EngineStats
from bros.core.plan import Chunk, SharedPrefix, StepPlan
from bros.core.request import EngineRequest, FinishReason, SamplingParams, ServiceClass
from bros.scheduler.cost_model import CostModel
from bros.simulator.simulation import Device
from bros.simulator.virtual_loop import (
    LoopClock,
    VirtualEngineClient,
    common_context,
    run_virtual,
    virtual_engine,
)
from support.tier import examples

STEP_S, TOKEN_S = 0.01, 0.001
MODEL = CostModel(constant_s=STEP_S, token_s=TOKEN_S, sample_s=0.0, pair_s=0.0, context_s=0.0)
READING = replace(MODEL, token_s=0.0)
DEVICE = Device(name="d", model="m", weights="w", steps=MODEL, kv_blocks=256)


def client(
    model: CostModel = MODEL, *, grouped: bool = False, reread: float = 0.0
) -> VirtualEngineClient:
    return virtual_engine(
        EngineConfig(policy="fcfs", max_batch_tokens=4096, max_num_seqs=64),
        replace(DEVICE, steps=model),
        vocab_size=1000,
        choose=lambda chunk: chunk.start % 1000,
        grouped=grouped,
        reread=reread,
    )


def request(name: str, prompt: list[int], tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=tokens, ignore_eos=True),
        service_class=ServiceClass.BE,
        arrival_s=LoopClock().now(),
    )


async def answer(
    engine: VirtualEngineClient, asked: EngineRequest
) -> tuple[list[int], list[float]]:
    """Its tokens and when each came, in seconds after it was submitted."""
    began, tokens, times = LoopClock().now(), [], []
    async for output in await engine.submit(asked):
        tokens += output.token_ids
        times += [LoopClock().now() - began] * len(output.token_ids)
    return tokens, times


@given(prompt=st.integers(1, 300), tokens=st.integers(1, 20), pause=st.floats(0, 10))
def test_a_request_takes_what_the_model_says(prompt: int, tokens: int, pause: float) -> None:
    async def main() -> tuple[list[int], list[float]]:
        engine = client()
        await asyncio.sleep(pause)
        found = await answer(engine, request("a", list(range(prompt)), tokens))
        await engine.close()
        return found

    ids, times = run_virtual(main)
    assert ids == [(prompt + k - 1) % 1000 if k else 0 for k in range(tokens)]
    steps = [STEP_S + TOKEN_S * (prompt if k == 0 else 1) for k in range(tokens)]
    assert times == pytest.approx([sum(steps[: k + 1]) for k in range(tokens)], abs=1e-6)


def test_what_arrives_during_a_step_is_in_the_next_one() -> None:
    async def main() -> list[float]:
        engine = client()

        async def later() -> list[float]:
            await asyncio.sleep(STEP_S / 2)
            return (await answer(engine, request("b", [1], 1)))[1]

        first = asyncio.create_task(answer(engine, request("a", [1, 2], 3)))
        times = await later()
        await first
        await engine.close()
        return times

    first_step, second_step = STEP_S + 2 * TOKEN_S, STEP_S + 2 * TOKEN_S
    assert run_virtual(main) == pytest.approx([first_step + second_step - STEP_S / 2], abs=1e-6)


def test_refusals_aborts_and_the_end_reach_the_client() -> None:
    async def main() -> None:
        engine = client()
        with pytest.raises(InvalidRequestError):
            await engine.submit(request("long", [5000], 1))
        stream = await engine.submit(request("a", [1], 4000))
        await engine.abort("a")
        reasons = [output.finish_reason async for output in stream]
        assert reasons[-1] is FinishReason.ABORT
        assert (await engine.stats()).steps >= 1
        open_stream = await engine.submit(request("b", [1], 4000))
        await engine.close()
        with pytest.raises(EngineDeadError):
            async for _ in open_stream:
                pass

    run_virtual(main)


def test_rows_with_a_common_prefix_read_it_once() -> None:
    context_s = 1e-4
    plain = replace(READING, context_s=context_s)
    prefix, rows, tokens = list(range(160)), 4, 50

    def total_s(grouped: bool, reread: float = 0.0) -> float:
        async def main() -> float:
            engine = client(plain, grouped=grouped, reread=reread)
            await answer(engine, request("first", prefix, 1))
            asked = [request(f"r{i}", [*prefix, 500 + i], tokens) for i in range(rows)]
            began = LoopClock().now()
            await asyncio.gather(*(answer(engine, one) for one in asked))
            took = LoopClock().now() - began
            await engine.close()
            return took

        return run_virtual(main)

    alone_s = total_s(grouped=False)
    # One token of each prompt is left to compute, so that the first step is like the others.
    reading_s = (rows - 1) * len(prefix) * context_s * tokens
    for reread in (0.0, 0.25, 1.0):
        saved_s = alone_s - total_s(grouped=True, reread=reread)
        assert saved_s == pytest.approx((1 - reread) * reading_s, abs=1e-6)


@settings(max_examples=examples(20, long=400))
@given(
    st.lists(
        st.tuples(
            st.sampled_from(ServiceClass),
            st.integers(0, 2),  # which beginning its prompt has
            st.integers(1, 90),  # and how much of that
            st.integers(0, 3),  # tokens of its own
            st.integers(1, 30),
            st.floats(0, 0.5),
        ),
        min_size=1,
        max_size=14,
    ),
    st.sampled_from([12, 40, 256]),
)
def test_what_rows_read_together_is_predicted_to_the_step(
    programs: list[tuple[ServiceClass, int, int, int, int, float]], blocks: int
) -> None:
    """The scheduler counts in the prefix cache what the executor counts in the plan."""
    model = replace(MODEL, context_s=2e-5)

    async def main() -> EngineStats:
        engine = virtual_engine(
            EngineConfig(max_batch_tokens=128, max_num_seqs=8, slo_tpot=15),
            replace(DEVICE, steps=model, kv_blocks=blocks),
            vocab_size=1000,
            choose=lambda chunk: chunk.start % 1000,
            grouped=True,
        )

        async def run(number: int) -> None:
            service_class, beginning, length, own, tokens, after_s = programs[number]
            await asyncio.sleep(after_s)
            prompt = [100 * beginning + i % 100 for i in range(length)] + [500 + number] * own
            asked = request(str(number), prompt, tokens)
            await answer(engine, replace(asked, service_class=service_class))

        await asyncio.gather(*map(run, range(len(programs))))
        stats = await engine.stats()
        await engine.close()
        return stats

    stats = run_virtual(main)
    assert stats.steps > 0
    assert stats.step_error_s == pytest.approx(0.0, abs=1e-9)


def test_rows_that_read_a_prefix_together_run_together_under_a_tight_pace() -> None:
    """Eight times its context takes longer than the interval; once does not."""
    prefix, rows, tokens, pace_s = list(range(1000)), 8, 20, 0.05
    context_s = pace_s / 4 / len(prefix)
    plain = replace(READING, context_s=context_s, token_s=1e-5)

    def seconds(grouped: bool) -> float:
        async def main() -> float:
            engine = virtual_engine(
                EngineConfig(max_batch_tokens=2048, max_num_seqs=64, slo_tpot=1e3 * pace_s),
                replace(DEVICE, steps=plain, kv_blocks=4000),
                vocab_size=1000,
                choose=lambda chunk: chunk.start % 1000,
                grouped=grouped,
            )
            await answer(engine, request("first", prefix, 1))
            asked = [request(f"r{i}", [*prefix, 500 + i], tokens) for i in range(rows)]
            began = LoopClock().now()
            real_time = [replace(one, service_class=ServiceClass.RT) for one in asked]
            await asyncio.gather(*(answer(engine, one) for one in real_time))
            took = LoopClock().now() - began
            await engine.close()
            return took

        return run_virtual(main)

    assert seconds(grouped=True) < 1.5 * tokens * pace_s
    assert seconds(grouped=False) > 2 * tokens * pace_s


def test_common_context_is_what_the_plan_says_is_read_once() -> None:
    segments = array("i", [4, 0, 16, 5, 0, 16, 6, 0, 16])
    chunks = tuple(Chunk(str(i), 48, [1], segments, array("i"), None) for i in range(3))
    shared = (SharedPrefix(array("i", [0, 1, 2]), 0, 2), SharedPrefix(array("i", [0, 2]), 2, 3))
    assert common_context(StepPlan(0, chunks, shared=shared)) == 2 * 32 + 16
    assert common_context(StepPlan(0, chunks)) == 0


def test_work_for_threads_is_done_at_once() -> None:
    async def main() -> tuple[int, float]:
        began = LoopClock().now()
        found = await asyncio.to_thread(int, "7")
        with pytest.raises(ValueError):
            await asyncio.to_thread(int, "seven")
        return found, LoopClock().now() - began

    assert run_virtual(main) == (7, 0.0)


def test_a_subscriber_gets_a_report_after_each_step() -> None:
    async def main() -> list[EngineReport]:
        engine, heard = client(), list[EngineReport]()
        await engine.submit(request("before", [1] * 40, 1))
        await asyncio.sleep(1)
        engine.subscribe(heard.append)
        stream = await engine.submit(request("a", [*[1] * 32, *[2] * 16], 1))
        async for _ in stream:
            pass
        await asyncio.sleep(1)
        await engine.close()
        return heard

    heard = run_virtual(main)
    assert [report.version for report in heard] == [1, 2]
    assert heard[0].full and heard[0].cached_prefixes == (("before", 32),)
    assert heard[1].cached_prefixes == (("a", 48),) and heard[1].cached_blocks == 3
