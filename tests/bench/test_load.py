"""What is sent when, and what the driver says about itself, on a virtual clock."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.client import LINGER_S, Client, Outcome, Record
from bros.bench.dialects import RequestFormat, dialect_of
from bros.bench.load import (
    FIRST_BACKOFF_S,
    MAX_BACKOFF_S,
    MAX_RETRY_AFTER_S,
    PREPARE_AHEAD_S,
    LoadResult,
    OfferedLoad,
    drive,
)
from bros.bench.plan import Planned, Session, SessionRequest
from bros.core.request import ServiceClass
from bros.simulator.virtual_loop import START_S, LoopClock, VirtualLoop, run_virtual
from support.bench_server import FakeHttp, Script, Seen, answer, event, planned, render, text

BE = ServiceClass.BE
FORMAT = RequestFormat(dialect=dialect_of("plain"), model="m")  # whose prompts are the names


def run(
    load: OfferedLoad,
    script: Callable[[Seen], Script],
    *,
    http: FakeHttp | None = None,
    rendered: Callable[[Planned], tuple[Sequence[int], str]] = render,
    **options: Any,
) -> LoadResult:
    async def main() -> LoadResult:
        client = Client(http or FakeHttp(script), "http://x", FORMAT, rendered, idle_s=None)
        given = {"cpu_s": lambda: 0.0, "cores": 2} | options
        return await drive(load, client, LoopClock(), **given)

    return run_virtual(main)


def at(time_s: float, *names: str, think_s: float = 0.0) -> Session:
    return Session(time_s, tuple(SessionRequest(planned(name), think_s) for name in names))


def backlog(limit: int | None = None) -> Iterator[Planned]:
    numbers = count() if limit is None else range(limit)
    return (planned(f"be{number}", BE) for number in numbers)


def times(result: LoadResult) -> dict[str, tuple[float, float | None, float | None]]:
    """Name -> due, sent and end, to the microsecond."""
    return {
        record.planned.name: (
            round(record.due_s, 6),
            None if record.sent_s is None else round(record.sent_s, 6),
            None if record.end_s is None else round(record.end_s, 6),
        )
        for record in result.records
    }


def outcomes(result: LoadResult) -> dict[str, Outcome]:
    return {record.planned.name: record.outcome for record in result.records}


def test_sessions_come_at_their_times_whatever_the_others_do() -> None:
    load = OfferedLoad(
        duration_s=20.0, sessions=[at(0.5, "a"), at(0.5, "b"), at(3.0, "c"), at(7.0, "d")]
    )
    hung = Script(hang=True)
    result = run(load, lambda seen: hung if seen.name == "a" else answer(2, 1.0))
    assert times(result) == {
        "a": (0.5, 0.5, None),
        "b": (0.5, 0.5, 2.5),
        "c": (3.0, 3.0, 5.0),
        "d": (7.0, 7.0, 9.0),
    }
    assert outcomes(result)["a"] is Outcome.OPEN
    assert result.elapsed_s == pytest.approx(20.0)
    assert result.started_unix_s == 1_700_000_000.0 + PREPARE_AHEAD_S


def test_next_turn_comes_a_while_after_the_answer_even_a_failed_one() -> None:
    load = OfferedLoad(duration_s=20.0, sessions=[at(1.0, "a", "b", "c", think_s=2.0)])
    failing = Script(head_s=0.5, refuse="no")
    result = run(load, lambda seen: failing if seen.name == "b" else answer(2, 1.0))
    assert times(result) == {"a": (1.0, 1.0, 3.0), "b": (5.0, 5.0, 5.5), "c": (7.5, 7.5, 9.5)}
    assert outcomes(result)["b"] is Outcome.FAILED


def test_what_is_not_due_before_the_end_is_no_record() -> None:
    load = OfferedLoad(
        duration_s=10.0,
        sessions=[at(1.0, "a", "late", think_s=8.0), at(9.5, "b"), at(10.0, "c"), at(12.0, "d")],
    )
    result = run(load, lambda _: answer(3, 1.0))
    assert times(result) == {"a": (1.0, 1.0, 4.0), "b": (9.5, 9.5, None)}
    assert outcomes(result)["b"] is Outcome.OPEN


def test_open_requests_keep_what_they_have() -> None:
    result = run(OfferedLoad(duration_s=3.5, sessions=[at(1.0, "a")]), lambda _: answer(9, 1.0))
    [record] = result.records
    assert [round(s, 6) for s in record.chunk_times_s] == [2.0, 3.0]
    assert (record.outcome, record.end_s, record.status) == (Outcome.OPEN, None, 200)


def test_drain_lets_open_requests_end_and_sends_nothing_new() -> None:
    load = OfferedLoad(
        duration_s=10.0,
        drain_s=5.0,
        sessions=[at(8.0, "a", "never"), at(9.0, "long")],
        backlog=backlog(),
        in_flight=1,
    )
    lengths = {"a": 3, "long": 99, "be0": 11}
    result = run(load, lambda seen: answer(lengths[seen.name], 1.0))
    assert times(result) == {
        "be0": (0.0, 0.0, 11.0),
        "a": (8.0, 8.0, 11.0),
        "long": (9.0, 9.0, None),
    }
    assert result.elapsed_s == pytest.approx(15.0)


def test_drain_ends_with_the_last_answer() -> None:
    load = OfferedLoad(duration_s=10.0, drain_s=500.0, sessions=[at(9.0, "a")])
    assert run(load, lambda _: answer(3, 1.0)).elapsed_s == pytest.approx(12.0, abs=0.1)


def test_lane_that_rests_does_not_hold_up_the_end() -> None:
    load = OfferedLoad(duration_s=10.0, drain_s=500.0, backlog=backlog(), in_flight=1)
    result = run(load, lambda _: Script(refuse="no"))
    assert result.elapsed_s == pytest.approx(10.0, abs=1e-6)


def test_records_are_in_the_order_in_which_they_were_due() -> None:
    """The server keeps the connection of a's answer for a while after its end."""
    held = Script(pieces=[(1.0, event(text("x", "stop")) + event("[DONE]"))], end_s=9.0)
    between_s = 2.0 + LINGER_S / 2
    load = OfferedLoad(duration_s=9.0, sessions=[at(1.0, "a", "next"), at(between_s, "b")])
    result = run(load, lambda _: held)
    assert [record.planned.name for record in result.records] == ["a", "next", "b"]
    assert times(result)["next"] == (2.0, round(2.0 + LINGER_S, 6), round(3.0 + LINGER_S, 6))
    assert not result.health.fell_behind


MICROS = st.integers(0, 5_000_000)


@given(
    sessions=st.lists(
        st.tuples(MICROS, st.lists(st.tuples(MICROS, MICROS, MICROS), min_size=1, max_size=3)),
        max_size=8,
    ),
    duration=st.integers(1_000_000, 8_000_000),
)
def test_random_sessions_to_the_microsecond(
    sessions: list[tuple[int, list[tuple[int, int, int]]]], duration: int
) -> None:
    """Each turn: think time, time to the first token, time to the second and last."""
    sessions = sorted(sessions)
    scripts, expected, plans = {}, {}, []
    for number, (begin, turns) in enumerate(sessions):
        plan, due = [], begin
        for place, (think, first, second) in enumerate(turns):
            name = f"{number}.{place}"
            plan.append(SessionRequest(planned(name), think / 1e6))
            scripts[name] = Script(
                pieces=[
                    (first / 1e6, event(text("a"))),
                    (second / 1e6, event(text("b", "stop")) + event("[DONE]")),
                ]
            )
            due = due + think if place else begin
            if due < duration:
                chunks = [due + first, due + first + second]
                expected[name] = (due, [chunk for chunk in chunks if chunk < duration])
            due += first + second
        plans.append(Session(begin / 1e6, tuple(plan)))
    load = OfferedLoad(duration_s=duration / 1e6, sessions=plans)
    result = run(load, lambda seen: scripts[seen.name])
    found = {record.planned.name: record for record in result.records}
    assert found.keys() == expected.keys()
    for name, (due, chunks) in expected.items():
        record = found[name]
        assert record.due_s == pytest.approx(due / 1e6, abs=1e-7)
        assert record.sent_s == pytest.approx(record.due_s, abs=1e-7)
        seen = [s for s in record.chunk_times_s if s < duration / 1e6 - 1e-7]
        assert seen == pytest.approx([chunk / 1e6 for chunk in chunks], abs=1e-7)
        ended = record.outcome is Outcome.COMPLETED
        assert ended or (record.outcome is Outcome.OPEN and record.end_s is None)
        if ended:
            assert record.end_s == record.chunk_times_s[1]
        assert ended or len(chunks) < 2
    assert not result.health.fell_behind


@given(
    lengths=st.lists(st.integers(1, 4_000_000), min_size=60, max_size=60),
    in_flight=st.integers(1, 5),
)
def test_backlog_is_always_in_flight(lengths: list[int], in_flight: int) -> None:
    """Oracle: so many lanes, each takes the next request when it is free."""
    duration = 6_000_000
    free, expected = [0] * in_flight, []
    for number, length in enumerate(lengths):
        start = heapq.heappop(free)
        if start >= duration:
            break
        expected.append((f"be{number}", start, start + length))
        heapq.heappush(free, start + length)
    http = FakeHttp(
        lambda seen: Script(
            pieces=[(lengths[int(seen.name[2:])] / 1e6, event(text("a", "stop")) + event("[DONE]"))]
        )
    )
    load = OfferedLoad(duration_s=duration / 1e6, backlog=backlog(60), in_flight=in_flight)
    result = run(load, lambda _: Script(), http=http)
    assert [record.planned.name for record in result.records if record.sent_s is None] == []
    found = {record.planned.name: record for record in result.records}
    assert found.keys() == {name for name, *_ in expected}
    for name, start, end in expected:
        record = found[name]
        assert record.sent_s == record.due_s == pytest.approx(start / 1e6, abs=1e-7)
        if end < duration:
            assert record.end_s == pytest.approx(end / 1e6, abs=1e-7)
        elif end > duration:
            assert (record.end_s, record.outcome) == (None, Outcome.OPEN)
    assert http.most_open == in_flight
    assert http.open_now == 0


def test_backlog_beside_sessions() -> None:
    http = FakeHttp(lambda seen: answer(2, 0.5))
    load = OfferedLoad(
        duration_s=4.0, sessions=[at(0.25, "a"), at(2.5, "b")], backlog=backlog(), in_flight=2
    )
    result = run(load, lambda _: Script(), http=http)
    assert times(result) | {"a": (0.25, 0.25, 1.25), "b": (2.5, 2.5, 3.5)} == times(result)
    sent = [
        seen.at_s - START_S - PREPARE_AHEAD_S for seen in http.seen if seen.name.startswith("be")
    ]
    assert sent == pytest.approx([0, 0, 1, 1, 2, 2, 3, 3], abs=1e-6)
    assert [record.due_s for record in result.records] == sorted(
        record.due_s for record in result.records
    )


def test_dead_server_is_asked_ever_more_rarely() -> None:
    load = OfferedLoad(duration_s=60.0, backlog=backlog(), in_flight=1)
    result = run(load, lambda _: Script(refuse="no"))
    sent = [record.due_s for record in result.records]
    pauses = [b - a for a, b in zip(sent, sent[1:], strict=False)]
    expected = [min(FIRST_BACKOFF_S * 2**n, MAX_BACKOFF_S) for n in range(len(pauses))]
    assert pauses == pytest.approx(expected)
    assert pauses[-1] == MAX_BACKOFF_S
    assert set(outcomes(result).values()) == {Outcome.FAILED}


def test_lane_recovers_after_a_success() -> None:
    failing = {"be0", "be1", "be3"}
    load = OfferedLoad(duration_s=2.0, backlog=backlog(5), in_flight=1)
    result = run(load, lambda seen: Script(refuse="no") if seen.name in failing else answer(1, 0.5))
    sent = [round(record.due_s, 6) for record in result.records]
    assert sent == [0.0, 0.1, 0.3, 0.8, 0.9]  # a pause of 0.1, 0.2, none, 0.1 again


@pytest.mark.parametrize(("asked", "waited_s"), [("3", 3.0), ("900", MAX_RETRY_AFTER_S)])
def test_retry_after_is_obeyed_within_reason(asked: str, waited_s: float) -> None:
    load = OfferedLoad(duration_s=45.0, backlog=backlog(2), in_flight=1)
    refusal = Script(status=429, headers={"retry-after": asked})
    result = run(load, lambda _: refusal)
    assert [record.due_s for record in result.records] == pytest.approx([0.0, waited_s])
    assert set(outcomes(result).values()) == {Outcome.REFUSED}


def test_progress_is_reported_during_the_run_and_at_the_end() -> None:
    told: list[tuple[float, int, int]] = []

    def progress(now_s: float, records: Sequence[Record]) -> None:
        ended = sum(record.outcome is Outcome.COMPLETED for record in records)
        told.append((round(now_s, 6), len(records), ended))

    load = OfferedLoad(duration_s=5.0, sessions=[at(1.0, "a"), at(2.5, "b")])
    run(load, lambda _: answer(2, 0.25), on_progress=progress, progress_s=2.0)
    assert told == [(2.0, 1, 1), (4.0, 2, 2), (5.0, 2, 2), (5.0, 2, 2)]


def test_stop_ends_the_run_and_keeps_the_records() -> None:
    async def main() -> LoadResult:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(PREPARE_AHEAD_S + 3.25, stop.set)
        load = OfferedLoad(
            duration_s=600.0, drain_s=600.0, sessions=[at(1.0, "a"), at(3.0, "b"), at(4.0, "c")]
        )
        client = Client(FakeHttp(lambda _: answer(2, 0.5)), "http://x", FORMAT, render)
        return await drive(load, client, LoopClock(), cpu_s=lambda: 0.0, cores=2, stop=stop)

    result = run_virtual(main)
    assert times(result) == {"a": (1.0, 1.0, 2.0), "b": (3.0, 3.0, None)}
    assert result.elapsed_s == pytest.approx(3.25)


def block(seconds: float) -> None:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)
    loop.advance(seconds)


def test_request_that_fell_due_while_the_client_hung_is_a_record() -> None:
    """Nothing runs from 1 s to 6 s, when the run is stopped; the prompt had been written."""

    async def main() -> LoadResult:
        stop = asyncio.Event()

        def hang() -> None:
            block(5.0)
            stop.set()

        asyncio.get_running_loop().call_later(PREPARE_AHEAD_S + 1.0, hang)
        load = OfferedLoad(duration_s=60.0, sessions=[at(0.5, "a"), at(1.8, "b"), at(1.9, "c")])
        client = Client(FakeHttp(lambda _: answer(9, 9.0)), "http://x", FORMAT, render)
        return await drive(load, client, LoopClock(), cpu_s=lambda: 0.0, cores=2, stop=stop)

    result = run_virtual(main)
    assert times(result) == {"a": (0.5, 0.5, None), "b": (1.8, None, None), "c": (1.9, None, None)}
    assert result.health.lateness_max_s == pytest.approx(6.0 - 1.8)


def test_client_that_is_too_slow_says_so() -> None:
    """Each prompt takes 0.3 s to write, and one is wanted every 0.1 s."""

    def slowly(request: Planned) -> tuple[Sequence[int], str]:
        block(0.3)
        return render(request)

    sessions = [at(0.1 * number, f"{number}") for number in range(4)]
    load = OfferedLoad(duration_s=9.0, sessions=sessions)
    result = run(load, lambda _: answer(1, 0.1), rendered=slowly)
    late = [record.sent_s - record.due_s for record in result.records if record.sent_s is not None]
    assert len(late) == 4
    health = result.health
    assert health.lateness_max_s == pytest.approx(max(late)) == pytest.approx(health.lateness_p99_s)
    assert health.lateness_max_s > 0.1
    assert health.lateness_p50_s == pytest.approx(sorted(late)[1])
    assert health.fell_behind


def test_prompts_are_written_before_their_time() -> None:
    def slowly(request: Planned) -> tuple[Sequence[int], str]:
        block(0.3)
        return render(request)

    load = OfferedLoad(duration_s=9.0, sessions=[at(2.0, "a"), at(5.0, "b", "c", think_s=1.0)])
    health = run(load, lambda _: answer(1, 0.1), rendered=slowly).health
    assert (health.lateness_max_s, health.fell_behind) == (pytest.approx(0.0, abs=1e-7), False)


def test_requests_that_were_due_but_never_sent_are_records_and_late() -> None:
    """The client is stuck from 1 s to beyond the end."""

    def stuck(request: Planned) -> tuple[Sequence[int], str]:
        if request.name == "a":
            block(9.0)
        return render(request)

    load = OfferedLoad(
        duration_s=8.0, sessions=[at(2.0, "a"), at(5.0, "b"), at(7.0, "c"), at(8.0, "d")]
    )
    result = run(load, lambda _: answer(1, 0.1), rendered=stuck)
    assert {"a", "b", "c"} == outcomes(result).keys()
    assert set(outcomes(result).values()) == {Outcome.OPEN}
    assert result.health.fell_behind
    assert result.health.lateness_max_s >= 3.0


def test_processor_share_is_of_all_cores() -> None:
    readings = iter([7.0, 12.0])
    health = run(
        OfferedLoad(duration_s=10.0), lambda _: Script(), cpu_s=lambda: next(readings)
    ).health
    assert (health.cpu_share, health.fell_behind) == (pytest.approx(5.0 / 20.0), False)


def test_error_of_the_plan_itself_ends_the_run() -> None:
    def broken() -> Iterator[Planned]:
        yield planned("be0", BE)
        raise RuntimeError("trace cannot be read")

    load = OfferedLoad(duration_s=1e9, backlog=broken(), in_flight=1)
    with pytest.raises(ExceptionGroup) as caught:
        run(load, lambda _: answer(1, 0.1))
    assert caught.group_contains(RuntimeError, match="trace cannot be read")
