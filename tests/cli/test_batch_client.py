"""`bros batch ... --wait`: what is shown meanwhile, and what a wait survives."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.cli.batch import NOT_COMPLETED, SOME_ROWS_FAILED
from bros.cli.batch_client import FIRST_LINE_INTERVAL_S, MAX_LINE_INTERVAL_S, MAX_OUTAGE_S
from bros.core.errors import BrosError
from support.batch_desk import (
    CANCELLED,
    COMPLETED,
    EXPIRED,
    INVALID,
    OUTPUT,
    ROW,
    RUNNING,
    SOME_FAILED,
    Desk,
    write_rows,
)
from support.fake_batches import CREATED_AT, counts, refusal


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "rows.jsonl", ROW))


@pytest.mark.parametrize(
    ("end", "status", "words"),
    [
        (COMPLETED, 0, "batch_1 completed: 2 rows, all succeeded"),
        (SOME_FAILED, SOME_ROWS_FAILED, "batch_1 completed: 2 of 3 rows succeeded, 1 failed"),
        (EXPIRED, NOT_COMPLETED, "batch_1 expired: 2 of 3 rows succeeded, 1 failed or not run"),
        (CANCELLED, NOT_COMPLETED, "batch_1 cancelled: 2 of 3 rows succeeded, 1 failed or not"),
        (INVALID, NOT_COMPLETED, "batch_1 failed: 2 errors, nothing was run"),
    ],
)
def test_exit_status_says_how_the_batch_ended(
    desk: Desk, rows: str, tmp_path: Path, end: dict[str, Any], status: int, words: str
) -> None:
    desk.fake.script = [RUNNING, {}, end]
    target = tmp_path / "out.jsonl"
    ran = desk.run("submit", rows, "--wait", "-o", str(target))
    assert (ran.status, ran.out) == (status, "batch_1\n")
    assert words in ran.err
    assert target.exists() == (end is not INVALID)
    if end is not INVALID:
        assert target.read_bytes() == OUTPUT
    assert ("--errors FILE" in ran.err) == ("error_file_id" in end)

    desk.fake.batches["batch_1"] |= RUNNING
    desk.fake.script = [{}, end]
    assert desk.run("status", "batch_1", "--wait").status == status


def test_errors_of_the_input_file_have_their_lines(desk: Desk, rows: str) -> None:
    desk.fake.script = [INVALID]
    ran = desk.run("submit", rows, "--wait")
    assert "  line 3: invalid_json_line: Not JSON.\n  empty_file: All wrong.\n" in ran.err
    shown = desk.run("status", "batch_1").out
    assert "  line 3: invalid_json_line: Not JSON.\n  empty_file: All wrong.\n" in shown


def test_of_many_errors_the_first_are_shown_and_all_by_status(desk: Desk, rows: str) -> None:
    data = [{"code": "c", "message": "m", "line": n} for n in range(1, 31)]
    desk.fake.script = [{"status": "failed", "errors": {"data": data}}]
    ran = desk.run("submit", rows, "--wait")
    assert "line 10: c: m\n  and 20 more: bros batch status batch_1\n" in ran.err
    assert "line 11:" not in ran.err
    assert "line 30: c: m\n" in desk.run("status", "batch_1").out


def test_without_a_terminal_there_are_few_lines(desk: Desk) -> None:
    desk.fake.add(status="in_progress", request_counts=counts(4000))
    desk.fake.script = [{"request_counts": counts(4000, n)} for n in range(4000)]
    desk.fake.script.append(COMPLETED)
    desk.run("status", "batch_1", "--wait")
    *times, _ = desk.err.times
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert desk.clock.now() > 10_000
    assert min(gaps) >= FIRST_LINE_INTERVAL_S
    assert gaps[-2] >= MAX_LINE_INTERVAL_S
    assert "\x1b" not in desk.err.getvalue()


def test_line_says_how_far_how_fast_and_until_when(desk: Desk) -> None:
    desk.fake.add(status="validating")
    looks = [RUNNING | {"request_counts": counts(2000, 10 * n, n)} for n in range(20)]
    desk.fake.script = [{}, *looks, COMPLETED]
    ran = desk.run("status", "batch_1", "--wait")
    first, *later = ran.err.splitlines()
    assert re.fullmatch(r"batch_1: validating, window ends .* \(in 24 h\)", first)
    assert re.search(
        r"batch_1: in progress, [\d,]+ of 2,000 rows done, \d+ failed, \d\.\d rows/s, "
        r"expected to end .* \(in \d+ min\), window ends",
        later[-1],
    )
    assert "batch_1  completed" in ran.out


def test_batch_that_is_wound_up_has_no_more_forecast(desk: Desk) -> None:
    outlook = {"expected_at": CREATED_AT + 90_000, "at_risk": True}
    desk.fake.add(status="cancelling", request_counts=counts(3, 1), bros=outlook)
    desk.fake.script = [{}, {"status": "finalizing"}, CANCELLED]
    lines = desk.run("status", "batch_1", "--wait").err.splitlines()
    assert lines == [f"batch_1: {word}, 1 of 3 rows done" for word in ("cancelling", "finalizing")]


def test_slow_batch_is_measured_in_rows_per_minute(desk: Desk) -> None:
    desk.fake.add(status="in_progress", request_counts=counts(100))
    desk.fake.script = [{"request_counts": counts(100, n // 10)} for n in range(60)]
    desk.fake.script.append(COMPLETED)
    ran = desk.run("status", "batch_1", "--wait")
    assert re.search(r"4 of 100 rows done, 2\.\d rows/min, ", ran.err)


def test_speed_of_a_very_slow_batch_does_not_jump(desk: Desk) -> None:
    desk.fake.add(status="in_progress", request_counts=counts(100))
    looks = [{"request_counts": counts(100, n // 17)} for n in range(200)]  # one in about 50 s
    desk.fake.script = [{}, *looks, COMPLETED]
    ran = desk.run("status", "batch_1", "--wait")
    speeds = [float(shown) for shown in re.findall(r"([\d.]+) rows/min", ran.err)]
    assert len(speeds) > 5
    assert all(1.0 < speed < 1.4 for speed in speeds[-4:]), speeds


def test_terminal_shows_a_bar_and_leaves_only_what_came_of_it(desk: Desk, rows: str) -> None:
    desk.fake.script = [RUNNING | {"request_counts": counts(50, 20, 2)}, SOME_FAILED]
    ran = desk.run("submit", rows, "--wait", terminal=True)
    assert ran.out == "batch_1\n"
    assert "batch_1 in progress" in ran.err and "━" in ran.err
    assert "22 of 50 rows done, 2 failed" in ran.err
    left = ran.err[ran.err.rindex("\x1b[2K") :]
    assert "batch_1 completed: 2 of 3 rows succeeded" in left and "━" not in left


@pytest.mark.parametrize("terminal", [False, True])
def test_server_says_when_it_ends_and_that_it_is_at_risk(desk: Desk, terminal: bool) -> None:
    at_risk = {"expected_at": CREATED_AT + 90_000, "at_risk": True}
    desk.fake.add(**RUNNING, bros=at_risk)
    desk.fake.script = [{}, {}, {"bros": at_risk | {"at_risk": False}}, {}, COMPLETED]
    ran = desk.run("status", "batch_1", "--wait", terminal=terminal)
    err = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;]*m", "", ran.err))
    assert re.search(
        r"may not be done in time: expected to end [^()]* \(in 25 h\), but its window ends "
        r"[^()]* \(in 24 h\); rows not done by then expire",
        err,
    )
    if not terminal:
        assert err.count("warning") == 1


def test_risk_is_worked_out_where_the_server_says_nothing(desk: Desk) -> None:
    desk.fake.add(status="in_progress", request_counts=counts(1000), expires_at=CREATED_AT + 60)
    desk.fake.script = [{"request_counts": counts(1000, n)} for n in range(10)] + [EXPIRED]
    ran = desk.run("status", "batch_1", "--wait")
    assert ran.err.count("batch_1: warning: it may not be done in time: expected to end") == 1


def test_lost_connection_is_said_once_and_survived(desk: Desk, rows: str) -> None:
    gone = [httpx.ConnectError("refused"), httpx.ReadTimeout("timed out"), refusal(503, "Loading.")]
    desk.fake.script = [RUNNING, *gone * 3, RUNNING, COMPLETED]
    ran = desk.run("submit", rows, "--wait")
    assert ran.status == 0
    assert ran.err.count("does not answer: refused; trying again ...") == 1
    assert ran.err.count("trying again") == ran.err.count("the server answers again, after ") == 1
    waits = desk.pauses[2 : 2 + len(gone) * 3]
    assert waits == sorted(waits) and waits[0] < 1 < waits[-1]


def test_server_that_stays_away_ends_the_wait(desk: Desk, rows: str) -> None:
    desk.fake.script = [RUNNING] + [httpx.ConnectError("refused") for _ in range(1000)]
    with pytest.raises(BrosError, match="for 15 min now. The batch continues when the server is"):
        desk.run("submit", rows, "--wait")
    assert MAX_OUTAGE_S <= desk.clock.now() < 1.1 * MAX_OUTAGE_S


def test_batch_that_is_gone_ends_the_wait(desk: Desk, rows: str) -> None:
    desk.fake.script = [RUNNING, refusal(404, "No batch found.")]
    with pytest.raises(BrosError, match="^404: No batch found.$"):
        desk.run("submit", rows, "--wait")


def test_first_question_is_asked_once(desk: Desk) -> None:
    desk.fake.add()
    desk.fake.script = [httpx.ConnectError("refused")]
    with pytest.raises(BrosError, match="http://127.0.0.1:8000/v1 does not answer: refused"):
        desk.run("status", "batch_1", "--wait")
    assert desk.pauses == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["status", "batch_1"], "continues"), (["cancel", "batch_1"], "is still being cancelled")],
)
def test_interruption_says_that_the_batch_goes_on(
    desk: Desk, arguments: list[str], words: str
) -> None:
    desk.fake.add(**RUNNING)
    desk.interrupt_after = 3
    with pytest.raises(KeyboardInterrupt):
        desk.run(*arguments, "--wait")
    assert f"No longer waiting; batch_1 {words}." in desk.err.getvalue()
    assert "wait again: bros batch status batch_1 --wait" in desk.err.getvalue()
