"""The watch of the event loop: which lags it logs, and what it says ran."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import threading
import time
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import Clock, ManualClock, SystemClock
from bros.server.operations.loop_lag import LAG_LIMIT_S, LagLog, LagWatch, what_runs
from bros.server.operations.metrics import ServerMetrics


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 8))))
def test_every_long_lag_is_in_a_line_or_counted_by_the_next(
    lags: list[tuple[float, float]],
) -> None:
    log, now = LagLog(), 0.0
    silent: list[float] = []
    last_s = float("-inf")
    for lag_s, pause_s in lags:
        now += pause_s
        line = log.line(lag_s, now, 0.02, 0.03, "work")
        if lag_s < LAG_LIMIT_S:
            assert line is None
        elif now - last_s < 10.0:
            assert line is None
            silent.append(lag_s)
        else:
            assert line is not None and f"{lag_s:.2f} s late" in line and "it ran work" in line
            assert "it computed for 0.02 s and waited for a core for 0.03 s" in line
            more = f"({len(silent)} more since the last line, up to {max(silent, default=0):.2f} s)"
            assert (more in line) == bool(silent)
            last_s, silent = now, []


@contextlib.asynccontextmanager
async def watching(clock: Clock, observed: list[float]) -> AsyncIterator[LagWatch]:
    watch = LagWatch(clock, observed.append)
    running = asyncio.create_task(watch.run())
    try:
        yield watch
        count = len(observed)
        while len(observed) == count:
            await asyncio.sleep(0.01)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


async def test_what_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The function returns only when the watch has looked, however slow the machine is."""
    observed: list[float] = []

    def a_function_that_blocks(watch: LagWatch) -> None:
        watch.seen = None
        while watch.seen is None:
            pass

    with caplog.at_level(logging.WARNING, "bros.server.operations.loop_lag"):
        async with watching(SystemClock(), observed) as watch:
            await asyncio.sleep(0)
            a_function_that_blocks(watch)
    assert max(observed) >= LAG_LIMIT_S
    assert "a_function_that_blocks" in caplog.text


async def test_time_is_that_of_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    clock, observed = ManualClock(), list[float]()
    with caplog.at_level(logging.WARNING, "bros.server.operations.loop_lag"):
        async with watching(clock, observed):
            await asyncio.sleep(0)
            clock.advance(0.55)
    assert max(observed) == pytest.approx(0.5)
    assert "the event loop was 0.50 s late" in caplog.text


async def test_a_loop_that_does_not_come_back_is_logged_meanwhile(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, observed = ManualClock(), list[float]()

    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "has not come back" in record.getMessage():
                lines.append(record.getMessage())

    def a_function_that_hangs() -> None:
        """It returns only when the watch has logged it twice, however slow the machine is."""
        clock.advance(4.0)
        while len(lines) < 1:
            pass
        clock.advance(2.0)  # not twice as long yet
        time.sleep(0.2)
        assert len(lines) == 1
        clock.advance(4.0)
        while len(lines) < 2:
            pass

    watch = logging.getLogger("bros.server.operations.loop_lag")
    handler = Lines()
    watch.addHandler(handler)
    try:
        with caplog.at_level(logging.WARNING, watch.name):
            async with watching(clock, observed):
                await asyncio.sleep(0)
                a_function_that_hangs()
    finally:
        watch.removeHandler(handler)
    assert len(lines) == 2 and all("a_function_that_hangs" in line for line in lines)
    assert "the event loop was" in caplog.text, "when it has ended"


def test_busy_threads_are_named_and_waiting_ones_are_not() -> None:
    begun, end, ended = threading.Event(), threading.Event(), list[bool]()

    def works_hard() -> None:
        begun.set()
        while not ended:
            pass

    threads = [
        threading.Thread(target=works_hard, name="busy one"),
        threading.Thread(target=end.wait, name="waiting one"),
    ]
    for thread in threads:
        thread.start()
    begun.wait()
    try:
        said = what_runs(sys._current_frames(), threading.get_ident())
    finally:
        ended.append(True)
        end.set()
        for thread in threads:
            thread.join()
    assert "busy one" in said and "waiting one" not in said
    assert "test_busy_threads_are_named" in said


def test_lag_is_a_histogram_with_help() -> None:
    metrics = ServerMetrics(ManualClock())
    for lag_s in (0.0, 0.3, 0.3):
        metrics.loop_lag(lag_s)
    page = metrics.render(None).decode()
    assert "# HELP bros_event_loop_lag_seconds How late" in page
    assert 'bros_event_loop_lag_seconds_bucket{le="0.25"} 1.0' in page
    assert "bros_event_loop_lag_seconds_count 3.0" in page
