"""Programs on simulated engines: what they are, and how they run in sessions and by calls."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.cli.flags import PROGRAM_NAMES, PROGRAM_WAYS
from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.scheduler.cost_model import CostModel
from bros.simulator.fleet import fleet_config
from bros.simulator.program_simulation import (
    WAYS,
    Answers,
    ProgramScenario,
    byte_tokenizer,
    program_server,
    program_times,
    run_program,
    run_programs,
)
from bros.simulator.programs import (
    PROGRAMS,
    ChatRecord,
    Program,
    Texts,
    call,
    chain_summary,
    map_reduce_summary,
    output_of,
    programs_of,
)
from bros.simulator.simulation import Device
from bros.simulator.virtual_loop import run_virtual
from bros.workload.arrivals import PoissonLoad
from support.tier import by_tier

STEPS = CostModel(constant_s=0.005, token_s=2e-5, sample_s=0.0, pair_s=0.0, context_s=1e-7)
DEVICE = Device(name="d", model="m", weights="w", steps=STEPS, kv_blocks=4096)
CONFIG = fleet_config(EngineConfig(policy="bros", max_batch_tokens=2048))
TOKENIZER = byte_tokenizer()
DELAY_S = 0.25


def scenario(**changes: object) -> ProgramScenario:
    made = ProgramScenario(
        program="gpts",
        way="session",
        config=CONFIG,
        device=DEVICE,
        replicas=1,
        router="e2",
        rate=4.0,
        count=4,
        chats=PoissonLoad(4.0, "lmsys"),
        seed=3,
        delay_s=DELAY_S,
    )
    return dataclasses.replace(made, **changes)  # type: ignore[arg-type]


def seconds(program: Program, way: str, replicas: int = 1) -> float:
    """The latency of a program alone on an idle server."""

    async def main() -> float:
        async with program_server(
            CONFIG, DEVICE, TOKENIZER, Answers(TOKENIZER), replicas=replicas
        ) as server:
            return (await run_program(server.end, program, way, DELAY_S)).seconds

    return run_virtual(main)


def test_the_command_line_has_the_same_names() -> None:
    assert PROGRAM_NAMES == tuple(PROGRAMS)
    assert PROGRAM_WAYS == WAYS


@pytest.mark.parametrize("name", PROGRAMS)
def test_calls_come_after_those_that_they_read_from(name: str) -> None:
    for program in programs_of(name, 2, TOKENIZER, seed=1):
        known: set[str | None] = set()
        for spec in program.calls:
            inputs = {p.variable for p in spec.parameters if p.name != "answer"} - {None}
            assert inputs <= known
            assert output_of(spec) not in known
            known.add(output_of(spec))
        assert known.issuperset(program.results)


@pytest.mark.parametrize("name", by_tier(fast=["coding", "map-reduce"], long=list(PROGRAMS)))
def test_programs_depend_on_the_seed_only(name: str) -> None:
    first, again, other = (programs_of(name, 2, TOKENIZER, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert first[0] != first[1]


@given(st.text(), st.text())
def test_a_text_has_the_same_tokens_in_any_context(text: str, after: str) -> None:
    first, then = (TOKENIZER.encode(part, add_special_tokens=False) for part in (text, after))
    assert TOKENIZER.encode(text + after, add_special_tokens=False) == first + then
    assert len(first) == len(text.encode())
    assert TOKENIZER.decode(first) == text


def test_a_session_saves_the_round_trips_of_a_chain() -> None:
    """A session has three, and a client one per call. What it prefills ahead costs it little."""
    parts = 8
    program = chain_summary(Texts(TOKENIZER, 0), chunks=parts, chunk_tokens=200, output_tokens=10)
    saved = seconds(program, "calls") - seconds(program, "session")
    assert saved >= (parts - 4) * DELAY_S
    assert saved <= parts * DELAY_S


@pytest.mark.parametrize("way", WAYS)
def test_parts_at_once_are_spread_over_replicas(way: str) -> None:
    program = map_reduce_summary(
        Texts(TOKENIZER, 0), chunks=16, chunk_tokens=3000, output_tokens=20
    )
    assert seconds(program, way, replicas=4) < 0.75 * seconds(program, way)


@pytest.mark.parametrize(
    ("way", "replicas"),
    [
        ("session", 3),
        pytest.param("calls", 1, marks=pytest.mark.long),
        pytest.param("session", 1, marks=pytest.mark.long),
        pytest.param("calls", 3, marks=pytest.mark.long),
    ],
)
def test_the_same_seed_gives_the_same_result(way: str, replicas: int) -> None:
    asked = scenario(way=way, replicas=replicas)
    report = run_programs(asked)
    assert run_programs(asked) == report
    assert run_programs(dataclasses.replace(asked, seed=4)).digest != report.digest


@pytest.mark.parametrize("way", by_tier(fast=["session"], long=WAYS))
def test_every_token_is_counted_on_one_engine_and_on_several(way: str) -> None:
    asked = scenario(way=way)
    arrivals = asked.chats.arrivals(asked.count / asked.rate, asked.seed)
    programs = programs_of(asked.program, asked.count, TOKENIZER, asked.seed)
    expected = sum(program.num_output_tokens for program in programs) + sum(
        arrival.size.output_tokens for arrival in arrivals
    )
    for replicas in (1, 3):
        report = run_programs(dataclasses.replace(asked, replicas=replicas))
        assert round(report.output_tokens_per_s * report.end_s) == expected
        assert (report.programs, report.chats) == (len(programs), len(arrivals))
        assert report.latency_s.count == len(programs)
        assert report.chats_met.decided == len(arrivals)
        assert 0 < report.cached < 1
        if replicas == 1:
            assert report.reasons == {}
        else:
            assert sum(report.reasons.values()) >= len(programs) + len(arrivals)


def test_a_common_system_prompt_is_computed_once_per_engine() -> None:
    """Nearly all of a prompt is one of four common ones, and requests arrive seconds apart."""
    asked = scenario(count=8, rate=0.3, chats=PoissonLoad(0.0, "lmsys"))
    programs = programs_of("gpts", asked.count, TOKENIZER, asked.seed)
    distinct = len({program.calls[0].template for program in programs})
    report = run_programs(asked)
    assert report.cached == pytest.approx(1 - distinct / asked.count, abs=0.03)
    assert report.chats_met.value is None


def test_requests_that_do_not_fit_are_refused_by_the_name_of_the_option() -> None:
    with pytest.raises(ConfigError, match="^--programs: gpts cannot be served: "):
        run_programs(scenario(device=dataclasses.replace(DEVICE, kv_blocks=128)))


@given(
    rate=st.floats(0.01, 100),
    factor=st.floats(0.1, 10),
    count=st.integers(1, 20),
    seed=st.integers(0, 9),
)
def test_another_rate_only_stretches_the_gaps(
    rate: float, factor: float, count: int, seed: int
) -> None:
    times = program_times(rate, count, seed)
    assert len(times) == count and times[0] == 0.0 and sorted(times) == list(times)
    stretched = program_times(rate / factor, count, seed)
    assert stretched == pytest.approx([time_s * factor for time_s in times])


def test_a_chat_of_one_token_has_a_first_token_only() -> None:
    slo = CONFIG.default_slo
    assert slo.ttft_s is not None and slo.tpot_s is not None
    on_time = ChatRecord(0.0, slo.ttft_s, slo.ttft_s, 1)
    assert on_time.met(slo)
    late = slo.ttft_s + 0.01
    assert not ChatRecord(0.0, late, late, 1).met(slo)
    assert ChatRecord(0.0, 0.0, 4 * slo.tpot_s, 5).met(slo)
    assert not ChatRecord(0.0, 0.0, 5 * slo.tpot_s, 5).met(slo)


def test_call_takes_texts_and_variables() -> None:
    spec = call("f", "{{input:a}} {{input:b}}", "out", 7, a="=text", b="name")
    given_inputs = {p.name: (p.value, p.variable) for p in spec.parameters}
    assert given_inputs == {"a": ("text", None), "b": (None, "name"), "answer": (None, "out")}
    assert spec.sampling["max_tokens"] == spec.sampling["min_tokens"] == 7
