"""Programs on a whole engine: what they say, what is shared, and that no KV is left behind."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.request import ServiceClass
from bros.engine.engine import Engine
from bros.engine.thread_client import ThreadEngineClient
from bros.scheduler.build import build_scheduler
from bros.semantic.errors import SessionGoneError, UpstreamError
from bros.semantic.schema import SharingMode
from bros.simulator.virtual_loop import run_virtual
from support.program_engine import BLOCK, TOKENIZER
from support.programs import TENANT, THROUGHPUT, Desk, call, virtually
from support.scheduling import READING, engine_info
from support.tier import examples
from support.toy_model import ToyModel
from support.toy_programs import answer, toy_engine

SYSTEM = "You are a careful reviewer; the quick brown fox is over there. "
GREEDY = {"temperature": 0.0, "max_tokens": 12}


def encoded(text: str) -> list[int]:
    return TOKENIZER.encode(text)


@pytest.mark.parametrize("cache", ["off", "class-aware"])
@virtually
async def test_values_are_what_the_model_says_to_the_tokens_before(cache: str) -> None:
    """Whatever is shared, prefilled, kept or computed again."""
    async with toy_engine(prefix_cache=cache) as engine:
        desk = Desk(engine)
        desk.submit(
            call("Say {{output:a}} and {{output:b}}", sampling=GREEDY),
            call(SYSTEM + "{{a}} or {{b}}: {{output:c}}", sampling=GREEDY),
            call(SYSTEM + "{{c}}{{output:d}}", sampling=GREEDY),
        )
        values = {name: await desk.value(name) for name in "dcba"}
        a = answer(encoded("Say "), 12)
        b = answer([*encoded("Say "), *a, *encoded(" and ")], 12)
        c = answer([*encoded(SYSTEM), *a, *encoded(" or "), *b, *encoded(": ")], 12)
        d = answer([*encoded(SYSTEM), *c], 12)
        expected = {"a": a, "b": b, "c": c, "d": d}
        assert values == {name: TOKENIZER.decode(ids) for name, ids in expected.items()}
        await desk.close()
        await engine.check_empty()


@virtually
async def test_later_llm_calls_find_all_of_the_llm_calls_before() -> None:
    async with toy_engine() as engine:
        desk = Desk(engine)
        (request,) = desk.submit(
            call(SYSTEM + "{{output:a}} and then more {{output:b}}", sampling=GREEDY)
        )
        await desk.value("a")
        await asyncio.sleep(1.0)
        await desk.value("b")
        first, second = desk.view(request).llm_calls
        before = first.prompt_tokens + first.output_tokens
        assert second.cached_tokens >= before - 2 * BLOCK  # the last token and half a block
        await desk.close()
        await engine.check_empty()


@virtually
async def test_the_beginning_was_computed_while_the_value_was_made() -> None:
    async with toy_engine(model=READING) as engine:
        desk = Desk(engine)
        *_, request = desk.submit(
            call("Say {{output:a}}", sampling={"max_tokens": 60, "ignore_eos": True}),
            call(SYSTEM + "{{a}}{{output:b}}", sampling=GREEDY),
        )
        await desk.value("b")
        view = desk.view(request)
        known = len(encoded(SYSTEM)) // BLOCK * BLOCK
        assert view.llm_calls[0].prefilled_tokens == known
        assert view.cached_tokens >= known
        await desk.close()
        await engine.check_empty()


@virtually
async def test_it_is_there_when_the_last_input_comes() -> None:
    async with toy_engine() as engine:
        desk = Desk(engine)
        *_, request = desk.submit(
            call("Say {{output:a}}", sampling={"max_tokens": 60, "ignore_eos": True}),
            call(SYSTEM + "{{a}} {{x}}{{output:b}}", sampling=GREEDY),
        )
        wanted = asyncio.ensure_future(desk.value("b"))
        await desk.value("a")
        await asyncio.sleep(1.0)
        known = desk.view(request).llm_calls[0].prefilled_tokens
        assert known >= len(encoded(SYSTEM)) // BLOCK * BLOCK
        desk.set("x", "here")
        await wanted
        assert desk.view(request).cached_tokens >= known
        await desk.close()
        await engine.check_empty()


@virtually
async def test_what_sessions_find_of_each_other() -> None:
    """All within a tenant, only constants of private sessions, and nothing of another tenant."""
    long = "something long that another session may find here, or may not. "
    constant, all_of_it = (
        len(TOKENIZER.encode(text)) // BLOCK * BLOCK for text in (SYSTEM, SYSTEM + long)
    )
    async with toy_engine(blocks=256) as engine:
        desk, names = Desk(engine), iter("abcdefgh")

        async def cached(tenant: str, session: str = "", **fields: object) -> int:
            """How much of the prompt is cached for a session, a new one of these fields."""
            session = session or desk.service.create(tenant, **fields).id  # type: ignore[arg-type]
            name = next(names)
            spec = call(
                SYSTEM + f"{{{{x}}}}{{{{output:{name}}}}}", values={"x": long}, sampling=GREEDY
            )
            (submitted,) = desk.service.submit(tenant, session, [spec])
            await desk.service.get(tenant, session, submitted.variables[name])
            return desk.service.inspect(tenant, session).calls[-1].cached_tokens

        private = {"sharing": SharingMode.SESSION}
        alone = desk.service.create(TENANT, sharing=SharingMode.SESSION).id
        assert await cached(TENANT, alone) == 0
        assert constant - BLOCK <= await cached(TENANT) <= constant
        assert await cached(TENANT) >= all_of_it - BLOCK
        assert constant - BLOCK <= await cached(TENANT, **private) <= constant
        assert constant - BLOCK <= await cached(TENANT, scope="team") <= constant
        assert await cached(TENANT, scope="team") >= all_of_it - BLOCK
        assert await cached(TENANT, alone) >= all_of_it - BLOCK
        assert await cached("stranger") == 0
        for tenant in (TENANT, "stranger"):
            for shown in desk.service.sessions(tenant):
                await desk.service.delete(tenant, shown.id)
        await engine.check_empty()


@virtually
async def test_a_wide_map_reduce_in_little_memory() -> None:
    """Far more than the KV cache holds at once, and a queue that is too short for it."""
    async with toy_engine(blocks=24, max_queue=4, max_num_seqs=4) as engine:
        desk = Desk(engine)
        maps = [call(f"Part {i} of it {{{{output:m{i}}}}}", sampling=GREEDY) for i in range(20)]
        some = "".join(f"{{{{m{i}}}}}" for i in range(3))
        desk.submit(*maps, call(some + "{{output:r}}", sampling=GREEDY))
        for i in range(20):
            desk.want(f"m{i}", THROUGHPUT)
        parts = [answer(encoded(f"Part {i} of it "), 12) for i in range(3)]
        assert await desk.value("r") == TOKENIZER.decode(answer(sum(parts, []), 12))
        for i in range(20):
            await desk.value(f"m{i}")
        await desk.close()
        await engine.check_empty()


@virtually
async def test_promotion_reaches_the_engine() -> None:
    async with toy_engine() as engine:
        desk = Desk(engine)
        (request,) = desk.submit(
            call("Say {{output:a}}", sampling={"max_tokens": 100, "ignore_eos": True})
        )
        desk.want("a", THROUGHPUT)
        await asyncio.sleep(0.05)
        assert desk.view(request).service_class is ServiceClass.BE
        await desk.value("a")
        trace = await engine.trace(request)
        assert trace is not None
        assert trace.service_class is ServiceClass.RT
        await desk.close()


specs = st.lists(
    st.tuples(
        st.lists(st.integers(0, 5), max_size=3),  # of earlier outputs
        st.integers(1, 2),
        st.sampled_from(["", SYSTEM]),
        st.sampled_from([None, "upper", "json"]),
    ),
    min_size=1,
    max_size=5,
)
happenings = st.lists(
    st.tuples(
        st.integers(0, 30), st.sampled_from(["want", "cancel", "get", "leave"]), st.integers(0, 9)
    ),
    max_size=8,
)


@settings(max_examples=examples(30, long=600), deadline=None)
@given(specs=specs, happenings=happenings, ends=st.booleans())
def test_no_kv_is_left_when_a_session_ends(
    specs: list[tuple[list[int], int, str, str | None]],
    happenings: list[tuple[int, str, int]],
    ends: bool,
) -> None:
    """However its program went, and whether it had ended."""

    async def main() -> None:
        async with toy_engine(blocks=48, max_queue=4, max_num_seqs=4) as engine:
            desk = Desk(engine)
            made = 0
            program = []
            for inputs, outputs, begins, transform in specs:
                text = begins + "".join(f"{{{{v{i % made}}}}} " for i in inputs if made)
                names = [f"v{made + i}" for i in range(outputs)]
                text += "".join(f" so {{{{output:{name}}}}}" for name in names)
                transforms = {name: transform for name in names}
                program.append(call(text, transforms=transforms, sampling=GREEDY))
                made += outputs
            requests = desk.submit(*program)
            gets: list[asyncio.Task[str]] = []
            passed = 0
            for at, what, which in sorted(happenings):
                await asyncio.sleep((at - passed) / 100)
                passed = at
                name = f"v{which % made}"
                if what == "want":
                    desk.want(name, THROUGHPUT)
                elif what == "cancel":
                    desk.service.cancel(TENANT, desk.session, requests[which % len(requests)])
                elif what == "get":
                    gets.append(asyncio.create_task(desk.value(name)))
                elif gets:
                    gets[which % len(gets)].cancel()
            if ends:
                gets += [asyncio.create_task(desk.value(f"v{i}")) for i in range(made)]
                async with asyncio.timeout(1000.0):
                    await asyncio.gather(*gets, return_exceptions=True)
                await asyncio.sleep(1.0)
                assert (await engine.stats()).kv_blocks_pinned == 0
            await desk.close()
            for result in await asyncio.gather(*gets, return_exceptions=True):
                expected = str | UpstreamError | SessionGoneError | asyncio.CancelledError
                assert isinstance(result, expected)
            await engine.check_empty()

    run_virtual(main)


async def test_on_a_thread_as_in_one_process() -> None:
    """The same over the client that is used in one process, in real time."""
    info = engine_info(blocks=64, policy="fcfs")
    config = EngineConfig(policy="fcfs", max_num_seqs=8, max_batch_tokens=32)
    client = ThreadEngineClient(
        lambda: Engine(build_scheduler(config, info, None), ToyModel(), SystemClock(), info)
    )
    await client.wait_ready()
    try:
        desk = Desk(client)
        desk.submit(
            call("Say {{output:a}} and {{output:b}}", sampling=GREEDY),
            call(SYSTEM + "{{a}} or {{b}}: {{output:c}}", sampling=GREEDY),
        )
        await desk.value("c")
        desk.submit(call("More {{output:d}}", sampling={"max_tokens": 100}))
        waiting = asyncio.create_task(desk.value("d"))
        await asyncio.sleep(0)
        await desk.close()
        with pytest.raises(SessionGoneError):
            await waiting
        stats = await client.stats()
        while stats.kv_blocks_used:
            stats = await client.stats()
        assert stats.kv_blocks_pinned == 0
    finally:
        await client.close()
