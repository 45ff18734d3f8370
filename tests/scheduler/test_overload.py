"""Requests that come in when there is too much to do already."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import OVERLOAD, POLICIES
from bros.core.errors import ConfigError, OverloadedError, QueueFullError
from bros.core.request import Slo
from support.scheduling import make_scheduler
from support.virtual_time import BE, RT, VirtualRun

SLOW = Slo(2.2, 10.0)
"""Time for twenty prompts of 100 tokens, but not for 300 tokens more."""


def loaded(overload: str, **options: object) -> VirtualRun:
    """About two seconds of prompts ahead of the next request with the same objective."""
    run = VirtualRun(overload=overload, **options)  # type: ignore[arg-type]
    for number in range(20):
        assert run.submit(f"ahead{number}", 100, slo=SLOW, salt=30 * number) is RT
    return run


def test_a_request_that_cannot_be_on_time_is_refused_and_leaves_nothing_behind() -> None:
    run = loaded("reject")
    with pytest.raises(OverloadedError, match="service_tier 'flex'") as caught:
        run.submit("late", 300, slo=SLOW)
    assert caught.value.retry_after_s == 1.0
    counted = run.scheduler.stats().by_class[RT]
    assert (counted.rejected, counted.waiting) == (1, 20)
    assert run.scheduler.trace("late") is None
    assert run.scheduler.abort("late", run.now) is None
    run.scheduler.check_integrity()
    run.drain()
    assert run.submit("late", 300, slo=SLOW) is RT, "its id is free, and now there is time"
    run.drain()
    assert len(run.token_times["late"]) == 4


@pytest.mark.parametrize(
    ("slo", "reason"),
    [
        (Slo(0.1, 10.0), "300 tokens of its prompt take .* ms, and the first .* within 100 ms"),
        (Slo(20.0, 0.001), "a token takes .* ms, and one is asked for every 1 ms"),
    ],
)
def test_what_no_idle_server_can_do_is_said_to_be_that(slo: Slo, reason: str) -> None:
    for run in (VirtualRun(overload="reject"), loaded("reject")):
        with pytest.raises(OverloadedError, match=f"even if it is idle: {reason}") as caught:
            run.submit("hasty", 300, slo=slo)
        assert caught.value.retry_after_s == math.inf, "waiting does not help"


def test_or_is_served_as_best_effort() -> None:
    run = loaded("relegate")
    assert run.submit("late", 300, slo=SLOW) is BE
    by_class = run.scheduler.stats().by_class
    assert (by_class[BE].relegated, by_class[RT].relegated) == (1, 0)
    assert (by_class[BE].waiting, by_class[RT].waiting) == (1, 20)
    trace = run.scheduler.trace("late")
    assert trace is not None
    assert (trace.service_class, trace.requested_class) == (BE, RT)
    assert (trace.slo.ttft_s, trace.slo.tpot_s) == (None, None)
    run.drain()
    counted = run.scheduler.stats().by_class[BE]
    assert counted.tokens_on_time == counted.output_tokens == 4


def test_or_is_served_late() -> None:
    run = loaded("late")
    assert run.submit("late", 300, slo=SLOW) is RT
    run.drain()
    trace = run.scheduler.trace("late")
    assert trace is not None and trace.late_tokens >= 1


def test_relegated_requests_count_in_the_queue_they_go_to() -> None:
    run = loaded("relegate", max_queue=20)
    for number in range(20):
        run.submit(f"be{number}", 5, BE)
    with pytest.raises(QueueFullError):
        run.submit("late", 300, slo=SLOW)
    run.step()
    with pytest.raises(QueueFullError):
        run.submit("late", 300, slo=SLOW)
    by_class = run.scheduler.stats().by_class
    assert by_class[BE].relegated == 0 and by_class[RT].rejected == 1
    run.scheduler.check_integrity()


@pytest.mark.parametrize(
    ("waited_s", "retry_s"), [(0.39, 1.0), (2.5, 3.0), (50.0, 50.0), (5000.0, 120.0)]
)
def test_when_to_come_back(waited_s: float, retry_s: float) -> None:
    """What a request of 30 ms is short of, which spent its 400 ms before it came here."""
    run = VirtualRun(overload="reject")
    run.now = 6000.0
    with pytest.raises(OverloadedError) as caught:
        run.submit("late", 10, arrived_s=run.now - waited_s)
    assert caught.value.retry_after_s == retry_s


def test_a_pace_that_rows_in_progress_do_not_allow_is_refused() -> None:
    run = VirtualRun(overload="reject", max_num_seqs=32)
    for number in range(16):
        run.submit(f"row{number}", 5, slo=SLOW, max_tokens=90)
    run.steps(20)
    assert run.scheduler.stats().by_class[RT].waiting == 0
    assert run.submit("slow", 5, slo=Slo(10.0, 0.06)) is RT
    with pytest.raises(OverloadedError):
        run.submit("fast", 5, slo=Slo(10.0, 0.03))


@pytest.mark.parametrize(
    ("options", "rows"), [({"max_num_seqs": 8}, 8), ({"max_num_seqs": 64, "blocks": 210}, 8)]
)
def test_a_request_that_would_not_find_a_place_in_time_is_refused(
    options: dict[str, int], rows: int
) -> None:
    """All seats are taken, or all memory (840 tokens, 8 requests of 100), until answers end."""
    run = VirtualRun(overload="reject", max_batch_tokens=256, **options)
    for number in range(rows):
        slo = Slo(20.0, 5.0)
        run.submit(f"row{number}", 95, slo=slo, max_tokens=200 if number else 12, salt=100 * number)
    run.steps(6)
    assert run.scheduler.stats().by_class[RT].running == rows
    with pytest.raises(OverloadedError) as caught:
        run.submit("new", 50, slo=Slo(0.2, 5.0))
    assert caught.value.retry_after_s == 1.0
    assert run.submit("patient", 50, slo=Slo(5.0, 5.0)) is RT, "the first will have ended by then"


@pytest.mark.parametrize("max_tokens", [2, 200])
def test_who_asks_does_not_count_as_about_to_end(max_tokens: int) -> None:
    """Neither the newcomer itself, nor answers that are longer than usual already."""
    run = VirtualRun(overload="reject", max_batch_tokens=256, max_num_seqs=8)
    run.submit("first", 5, max_tokens=2)
    run.drain()
    for number in range(8):
        run.submit(f"row{number}", 5, max_tokens=400, slo=Slo(5.0, 1.0), salt=9 * number)
    run.steps(20)
    for number in range(10):
        with pytest.raises(OverloadedError):
            run.submit(f"new{number}", 5, max_tokens=max_tokens, slo=Slo(0.02, 1.0))


def test_places_of_best_effort_requests_count_as_free() -> None:
    run = VirtualRun(overload="reject", max_batch_tokens=256, max_num_seqs=4, blocks=140)
    for number in range(4):
        run.submit(f"be{number}", 95, BE, max_tokens=40, salt=100 * number)
    run.steps(6)
    assert run.scheduler.stats().by_class[BE].running == 4
    assert run.submit("new", 50) is RT
    run.drain()
    assert run.scheduler.stats().by_class[RT].both_met == 1


def test_best_effort_requests_are_never_refused_nor_in_the_way() -> None:
    run = VirtualRun(overload="reject", max_queue=1000)
    for number in range(100):
        assert run.submit(f"be{number}", 100, BE) is BE
    assert run.submit("rt", 50) is RT


@given(
    st.lists(
        st.tuples(st.integers(1, 120), st.integers(1, 10), st.floats(0.0, 0.3)),
        min_size=1,
        max_size=8,
    )
)
def test_light_load_is_never_refused(arrivals: list[tuple[int, int, float]]) -> None:
    """One request at a time, each of which is on time when alone."""
    run = VirtualRun(overload="reject", max_batch_tokens=256)
    for number, (prompt, out, pause_s) in enumerate(arrivals):
        assert run.submit(f"r{number}", prompt, max_tokens=out) is RT
        run.drain()
        run.now += pause_s
    counted = run.scheduler.stats().by_class[RT]
    assert counted.both_met == counted.finished == len(arrivals)


def test_who_is_let_in_under_overload_is_mostly_on_time() -> None:
    met = {}
    for overload in ("late", "reject"):
        run = VirtualRun(overload=overload, max_batch_tokens=256, max_num_seqs=64, max_queue=10**6)
        for number in range(200):
            try:
                run.submit(f"r{number}", 80, max_tokens=10, salt=7 * number)
            except OverloadedError as error:
                assert 1.0 <= error.retry_after_s <= 120.0
            while run.now < 0.05 * number and run.scheduler.has_work:
                run.step()
            run.now = max(run.now, 0.05 * number)
        run.drain()
        counted = run.scheduler.stats().by_class[RT]
        assert counted.finished + counted.rejected == 200
        met[overload] = (counted.both_met, counted.both_met / counted.finished)
    assert met["reject"][1] > 0.9 > met["late"][1]
    assert met["reject"][0] > met["late"][0], "and more of them in all"


@pytest.mark.parametrize("policy", [name for name in POLICIES if name != "bros"])
@pytest.mark.parametrize("overload", OVERLOAD)
def test_policies_without_predictions_cannot_tell(policy: str, overload: str) -> None:
    if overload == "late":
        make_scheduler(policy, overload=overload)
        return
    with pytest.raises(ConfigError, match=f"--overload {overload}"):
        make_scheduler(policy, overload=overload)


def test_prompts_that_are_due_later_are_not_in_the_way() -> None:
    run = VirtualRun(overload="relegate")
    for number in range(20):
        run.submit(f"patient{number}", 100, slo=Slo(1e6, 10.0), salt=30 * number)
    assert run.submit("urgent", 20) is RT
    run.drain()
    trace = run.scheduler.trace("urgent")
    assert trace is not None and trace.late_tokens == 0


def test_prompts_that_are_late_already_are_not_in_the_way() -> None:
    """They wait behind requests that can still be on time, so a newcomer need not wait for them."""
    run = loaded("reject")
    run.now += 3.0
    run.step()
    assert run.waiting(RT) == 19
    assert run.submit("on time", 300, slo=SLOW) is RT
    run.drain()
    trace = run.scheduler.trace("on time")
    assert trace is not None and trace.late_tokens == 0
