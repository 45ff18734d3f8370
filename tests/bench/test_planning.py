"""From options to a plan."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from bros.bench.plan import Piece, Planned, Session, SessionRequest, digest
from bros.bench.planning import (
    Case,
    Overlong,
    RequestedLoad,
    has_recorded_times,
    make_plan,
    text_seed,
)
from bros.bench.results import Scenario
from bros.core.request import ServiceClass, Slo
from support.tiny_tokenizer import tiny_tokenizer

S0, S1, S2, S3 = Scenario
WANTED = RequestedLoad(duration_s=60.0, seed=3)
TOKENIZER = tiny_tokenizer()


def test_each_scenario_has_its_parts() -> None:
    for scenario in Scenario:
        rate = None if scenario is S2 else 2.0
        plan = make_plan(WANTED, Case(scenario, rate), 2048, TOKENIZER)
        assert bool(plan.sessions) == (scenario is not S2)
        assert plan.in_flight == (0 if scenario is S0 else 16)
        assert plan.rate == rate
        if scenario is not S0:
            first = next(plan.backlog)
            assert first.service_class is ServiceClass.BE


def test_mixed_runs_send_the_same_requests_and_say_so_by_their_digest() -> None:
    one = make_plan(WANTED, Case(S1, 2.0), 2048, TOKENIZER)
    other = make_plan(WANTED, Case(S3, 2.0), 2048, TOKENIZER)
    assert one.sessions == other.sessions and one.rt_digest == other.rt_digest != ""
    assert one.be_digest == other.be_digest != ""
    assert list(itertools.islice(one.backlog, 20)) == list(itertools.islice(other.backlog, 20))
    changed = make_plan(replace(WANTED, seed=4), Case(S3, 2.0), 2048, TOKENIZER)
    assert changed.rt_digest != one.rt_digest and changed.be_digest != one.be_digest
    alone = make_plan(WANTED, Case(S0, 2.0), 2048, TOKENIZER)
    bound = make_plan(WANTED, Case(S2, None), 2048, TOKENIZER)
    assert (alone.rt_digest, alone.be_digest) == (one.rt_digest, "")
    assert (bound.rt_digest, bound.be_digest) == ("", one.be_digest)


def test_equal_requests_have_the_digests_of_earlier_versions() -> None:
    """Results of several versions are compared by them."""

    def turn(name: str, think_s: float = 0.0) -> SessionRequest:
        return SessionRequest(Planned(
            name=name, service_class=ServiceClass.RT, prompt=(Piece("a", 3), Piece("b'", 2)),
            output_tokens=4, slo=Slo(0.1, 0.2)), think_s)  # fmt: skip

    sessions = [
        Session(0.1, ()),
        Session(0.5, (turn("x"),)),
        Session(1 / 3, (turn("y", 2.5), turn("z", 1e-7))),
    ]
    assert digest(sessions, [turn("q").request]).startswith("dba1c83b4f8c631c")


def test_objectives_are_no_part_of_the_digest() -> None:
    told = make_plan(replace(WANTED, slo=Slo(0.3, 0.1)), Case(S3, 2.0), 2048, TOKENIZER)
    untold = make_plan(WANTED, Case(S3, 2.0), 2048, TOKENIZER)
    assert told.sessions != untold.sessions and told.rt_digest == untold.rt_digest


def test_words_differ_between_runs_and_not_between_repetitions() -> None:
    seeds = {text_seed(3, Case(scenario, rate)) for scenario in Scenario for rate in (1.0, 2.0)}
    assert len(seeds) == 8
    assert text_seed(3, Case(S0, 1.0)) == text_seed(3, Case(S0, 1.0)) != text_seed(4, Case(S0, 1.0))


def test_prompts_are_cut_and_objectives_asked_for() -> None:
    wanted = replace(WANTED, longest_prompt=20, slo=Slo(0.3, 0.1), forced=False)
    plan = make_plan(wanted, Case(S3, 2.0), 2048, TOKENIZER)
    requests = [turn.request for session in plan.sessions for turn in session.turns]
    assert max(request.prompt_tokens for request in requests) == 20
    assert all(request.slo == Slo(0.3, 0.1) and not request.forced for request in requests)
    assert next(plan.backlog).slo == Slo()


@pytest.mark.parametrize("overlong", Overlong)
def test_what_is_changed_to_fit_is_noted(overlong: Overlong) -> None:
    wanted = replace(WANTED, rt="sharegpt", overlong=overlong, in_flight=4)
    plan = make_plan(wanted, Case(S3, 4.0), 900, TOKENIZER)
    word = "cut to fit" if overlong is Overlong.CLIP else "left out"
    assert sum(word in note for note in plan.notes) == 2
    assert any("real-time" in note for note in plan.notes)
    requests = [turn.request for session in plan.sessions for turn in session.turns]
    requests += itertools.islice(plan.backlog, 50)
    assert all(r.prompt_tokens + r.output_tokens <= 900 for r in requests)


def test_a_trace_brings_its_own_times(tmp_path: Path) -> None:
    path = tmp_path / "chat.csv"
    rows = "\n".join(f"2023-11-16 18:15:{second:02}.5,20,5" for second in range(0, 30, 3))
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}\n")
    wanted = replace(WANTED, rt=f"azure:{path}", speed=3.0)
    plan = make_plan(wanted, Case(S0, None), 2048, TOKENIZER)
    assert [session.at_s for session in plan.sessions] == [float(k) for k in range(10)]
    assert plan.rate == pytest.approx(10 / 60, abs=1e-4)
    assert has_recorded_times(wanted.rt)
    assert not has_recorded_times("lmsys") and not has_recorded_times("sharegpt:file.json")
