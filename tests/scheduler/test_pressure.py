"""How much best-effort work may slow down streams: how much it needs, and what becomes of that."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.request import Hints, Slo
from bros.scheduler.policies.pressure import Pressure
from bros.scheduler.state import RequestState
from support.scheduling import request
from support.virtual_time import BE, RT, VirtualRun, plan_seconds

TARGET = 1.5
FAR = Slo(schedule_s=1e6)


def state(
    slo: Slo = FAR, *, arrival_s: float = 0.0, tenant: str = "", hints: Hints | None = None
) -> RequestState:
    asked = request("r", 5, BE, arrival_s=arrival_s)
    asked = replace(asked, tenant=tenant, hints=hints or asked.hints, prefill_only=bool(hints))
    return RequestState(
        asked, service_class=BE, slo=slo, now=arrival_s, arrival_index=0, seed=0, max_length=100,
        eos_token_ids=frozenset(),
    )  # fmt: skip


def pressure(
    work_s: float = 1.0, share: float = 0.0, tenants: Mapping[str, float] | None = None
) -> Pressure:
    """Each request needs the same time."""
    return Pressure(TARGET, tenants or {}, share, lambda state: work_s)


def stretch(found: Pressure, *states: RequestState, now: float = 0.0) -> float:
    """After these requests have arrived."""
    for each in states:
        found.add(each, each.record.arrival_s)
    return found.stretch(now)


def test_work_that_has_time_keeps_to_the_target() -> None:
    assert stretch(pressure(), state()) == TARGET
    assert stretch(pressure(), state(Slo(deadline_s=100.0))) == TARGET
    assert stretch(pressure(), state(Slo(deadline_s=2.5, schedule_s=100.0))) == TARGET
    assert stretch(pressure(), state(Slo())) == TARGET


def test_work_gets_the_share_that_it_needs() -> None:
    assert stretch(pressure(), state(Slo(schedule_s=2.0))) == pytest.approx(2.0)
    assert stretch(pressure(), *(state(Slo(schedule_s=4.0)) for _ in range(3))) == pytest.approx(4)
    assert stretch(pressure(), state(Slo(deadline_s=4.0))) == pytest.approx(2.0), "half of it"
    assert stretch(pressure(share=0.75), state()) == pytest.approx(4.0)
    assert stretch(pressure(), state(Slo(schedule_s=1.0))) == math.inf
    assert stretch(pressure(), state(Slo(schedule_s=0.0))) == math.inf


def test_a_row_on_schedule_needs_as_much_as_the_next_one() -> None:
    """Half done after half the time: rows after it need the other half."""
    left = [4.0]
    found = Pressure(1.0, {}, 0.0, lambda state: left[0])
    assert stretch(found, state(Slo(schedule_s=8.0))) == pytest.approx(2.0)
    left[0] = 1.0
    assert found.stretch(4.0) == pytest.approx(2.0)
    left[0] = 3.0
    assert found.stretch(6.0) == math.inf


def test_work_without_a_deadline_presses_as_long_as_there_is_some() -> None:
    found = pressure(6.0)
    first, second = state(Slo()), state(Slo(), arrival_s=10.0)
    assert stretch(found, first) == TARGET
    assert stretch(found, second, now=10.0) == pytest.approx(1 / (1 - 12 / 20))
    found.remove(first)
    assert found.stretch(20.0) == pytest.approx(1 / (1 - 6 / 10))
    assert found.stretch(30.0) == math.inf
    found.remove(second)
    assert stretch(found, state(Slo(), arrival_s=40.0), now=40.0) == TARGET, "it was done"


def test_whoever_asks_for_most_sets_the_target() -> None:
    """Own wish, key, server, in this order."""
    asked = state(replace(FAR, rt_slowdown=1.2), tenant="ann")
    found = pressure(tenants={"ann": 3.0, "bob": 1.1})
    assert stretch(found, asked) == 1.2
    assert stretch(found, state(tenant="bob"), now=1.0) == 1.2
    assert stretch(found, state(), now=2.0) == TARGET
    assert stretch(found, state(tenant="ann"), now=3.0) == 3.0
    greedy = state(replace(FAR, rt_slowdown=1000.0), tenant="bob")
    assert stretch(found, greedy, now=3.5) == 3.0, "a key is also a bound"
    assert stretch(found, state(replace(FAR, rt_slowdown=1000.0)), now=4.0) == math.inf


def test_nothing_is_bounded_without_such_work() -> None:
    """Early prefills have a rule of their own."""
    assert pressure().stretch(0.0) == math.inf
    early = state(hints=Hints(early=True))
    found = pressure()
    assert stretch(found, early) == math.inf
    found.remove(early)
    assert stretch(found, state(), now=1.0) == TARGET


def test_the_first_such_work_is_bounded_at_once() -> None:
    found = pressure()
    assert found.stretch(0.0) == math.inf
    assert stretch(found, state(arrival_s=0.1), now=0.1) == TARGET


def test_a_request_that_starts_over_counts_once() -> None:
    found, again = pressure(20.0), state(Slo())
    assert stretch(found, again, again) == pytest.approx(3.0)
    found.remove(again)
    found.remove(again)
    assert stretch(found, state(Slo(), arrival_s=40.0), now=40.0) == pytest.approx(3.0)


@given(
    st.lists(st.tuples(st.floats(0.1, 50.0), st.none() | st.floats(1.0, 500.0)), max_size=6),
    st.floats(0.0, 20.0),
    st.floats(1.0, 3.0),
    st.floats(0.0, 0.8),
)
def test_the_more_it_needs_the_less_it_waits(
    works: list[tuple[float, float | None]], later_s: float, more: float, share: float
) -> None:
    """Never less with more work, with less time, with more requests or with a larger share; never
    less than the target."""

    def found(count: int, factor: float, now: float, share: float) -> float:
        open_, scale = {}, [1.0]
        made = Pressure(TARGET, {}, share, lambda state: scale[0] * open_[state])
        for work_s, due_s in works[:count]:
            each = state(Slo(schedule_s=due_s))
            open_[each] = work_s
            made.add(each, 0.0)
        scale[0] = factor
        return made.stretch(now)

    count = len(works)
    usual = found(count, 1.0, 0.0, share)
    assert usual >= TARGET
    assert found(count, more, 0.0, share) >= usual
    assert found(count, 1.0, later_s, share) >= usual
    assert found(count, 1.0, 0.0, share / 2) <= usual
    if count:
        assert found(count - 1, 1.0, 0.0, share) <= usual or count == 1


# What streams and best-effort work get


def beside_streams(
    steps: int,
    slo: Slo | None = FAR,
    *,
    streams: int = 4,
    prompt: int = 200,
    tokens: int = 40,
    **options: object,
) -> VirtualRun:
    """Four streams without an end beside eight best-effort requests."""
    run = VirtualRun(max_num_seqs=64, max_batch_tokens=256, **options)
    for number in range(streams):
        run.submit(f"rt{number}", 5, max_tokens=2000, salt=9 * number)
    for number in range(8):
        run.submit(f"be{number}", prompt, BE, slo=slo, max_tokens=tokens, salt=90 * number)
    run.steps(steps)
    return run


def slowdowns(run: VirtualRun) -> list[float]:
    traces = [run.scheduler.trace(name) for name in run.requests if name.startswith("rt")]
    return [trace.slowdown for trace in traces if trace is not None and trace.slowdown is not None]


@pytest.mark.parametrize("target", [1.2, 1.5, 3.0])
def test_streams_keep_the_pace_that_they_have_alone(target: float) -> None:
    """The smallest chunk of a prompt takes longer than what one step allows."""
    run = beside_streams(60, prompt=800, rt_slowdown=target)
    assert statistics.mean(slowdowns(run)) == pytest.approx(target, rel=0.06)


def test_work_in_a_hurry_may_slow_them_down_up_to_their_objectives() -> None:
    free = beside_streams(30, prompt=800, rt_slowdown=1000.0)
    hurried = beside_streams(30, Slo(schedule_s=0.1), prompt=800)
    assert hurried.seconds == free.seconds
    assert statistics.mean(slowdowns(free)) > 4.0


def test_without_streams_best_effort_steps_are_as_long_as_without_a_target() -> None:
    runs = [beside_streams(20, streams=0, rt_slowdown=target) for target in (1.0, 1000.0)]
    assert runs[0].seconds == runs[1].seconds


def test_first_tokens_come_as_without_a_target() -> None:
    """Prompts of real-time requests have no streams beside them here."""
    times = []
    for target in (1.0, 1000.0):
        run = VirtualRun(rt_slowdown=target, max_batch_tokens=64)
        run.submit("be", 200, BE, slo=FAR, max_tokens=4)
        run.submit("rt", 300, max_tokens=1, salt=500)
        run.drain()
        times.append(run.token_times["rt"])
    assert times[0] == times[1]


@pytest.mark.parametrize("slo", [FAR, Slo()])
@pytest.mark.parametrize("target", [1.0, 1.5])
def test_best_effort_work_never_starves(target: float, slo: Slo) -> None:
    """Beside streams that never end, with the least target: its share remains."""
    run = beside_streams(300, slo, streams=2, prompt=20, tokens=3, rt_slowdown=target)
    done = [name for name, times in run.token_times.items() if name[0] == "b" and len(times) == 3]
    assert len(done) >= (4 if target == 1.0 else 8)


def test_a_promoted_request_is_a_stream_from_then_on() -> None:
    run = beside_streams(20, tokens=400)
    run.scheduler.promote("be0", Slo(), run.now)
    run.steps(40)
    trace = run.scheduler.trace("be0")
    assert trace is not None and trace.service_class is RT
    assert trace.slowdown is not None and 1.0 <= trace.slowdown < 2.0


def test_an_aborted_step_uses_up_nothing_that_was_saved() -> None:
    """The next one has the same chunk of a best-effort prompt."""
    run = beside_streams(3, prompt=800)
    for _ in range(20):
        plan = run.scheduler.schedule(run.now)
        assert plan is not None
        chunks = [(c.request_id, c.start, len(c.token_ids)) for c in plan.chunks]
        if any(tokens > 1 for _, _, tokens in chunks) and run.scheduler.may_abort:
            break
        run.scheduler.abort_step(plan, run.now)
        run.step()
    else:
        raise AssertionError("no prompt was computed")
    run.scheduler.abort_step(plan, run.now)
    again = run.scheduler.schedule(run.now)
    assert again is not None
    assert [(c.request_id, c.start, len(c.token_ids)) for c in again.chunks] == chunks


def test_the_slowdown_is_that_of_an_observer() -> None:
    """Time from the first to the last token, over that of the same steps without best-effort."""
    run = beside_streams(40, tokens=20, prompt=60)
    times = run.token_times["rt0"]
    streams = {name for name in run.requests if name.startswith("rt")}
    ends = list(itertools.accumulate(run.seconds))
    alone_s = sum(
        plan_seconds(plan, only=streams)
        for plan, end_s in zip(run.plans, ends, strict=True)
        if times[0] + 1e-9 < end_s <= times[-1] + 1e-9
    )
    trace = run.scheduler.trace("rt0")
    assert trace is not None and trace.slowdown == pytest.approx((times[-1] - times[0]) / alone_s)
    best_effort = run.scheduler.trace("be0")
    assert best_effort is not None and best_effort.slowdown is None


def test_finished_streams_are_counted_by_their_slowdown() -> None:
    run = beside_streams(2)
    run.submit("rt-short", 5, max_tokens=10, salt=700)
    run.submit("rt-one-token", 5, max_tokens=1, salt=800)
    run.steps(30)
    found = run.scheduler.stats().by_class[RT].slowdown
    assert sum(found.counts) == 1
    trace = run.scheduler.trace("rt-short")
    assert trace is not None and found.total == trace.slowdown
    assert sum(run.scheduler.stats().by_class[BE].slowdown.counts) == 0
