from __future__ import annotations

import os
import random
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.clock import Clock, ManualClock, SystemClock, thread_queued_s
from bros.core.request import IdGenerator


@pytest.mark.parametrize("clock", [SystemClock(), ManualClock()], ids=["system", "manual"])
def test_clocks_never_go_back(clock: Clock) -> None:
    readings = [clock.now() for _ in range(100)]
    assert readings == sorted(readings)
    assert clock.unix_time() >= 1_700_000_000  # of the machine: it is later than November 2023


@given(st.lists(st.floats(0, 1e6)), st.floats(0, 1e6))
def test_manual_clock_moves_both_clocks_by_the_given_time(
    steps: list[float], start_s: float
) -> None:
    clock = ManualClock(start_s, epoch_s=1e9)
    assert (clock.now(), clock.unix_time()) == (start_s, 1e9)
    for step in steps:
        clock.advance(step)
    assert clock.now() == pytest.approx(start_s + sum(steps))
    assert clock.unix_time() - 1e9 == pytest.approx(sum(steps), abs=1e-3)


def test_manual_clock_refuses_to_go_back() -> None:
    clock = ManualClock(5.0)
    with pytest.raises(ValueError, match="cannot advance by -1"):
        clock.advance(-1)
    assert clock.now() == 5.0


@pytest.mark.skipif(thread_queued_s() is None, reason="the kernel does not count it")
def test_time_in_which_another_process_had_the_core_is_queued() -> None:
    before_s, cores = thread_queued_s(), os.sched_getaffinity(0)
    assert before_s is not None
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of the process that it starts
    other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        end_s = time.monotonic() + 60
        while (thread_queued_s() or 0.0) - before_s < 0.02:
            assert time.monotonic() < end_s, "no time was counted"
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)


def test_ids_carry_their_prefix_and_repeat_with_the_seed() -> None:
    ids = IdGenerator(random.Random(1))
    first = [ids.new("chatcmpl") for _ in range(1000)]
    again = IdGenerator(random.Random(1))
    assert first == [again.new("chatcmpl") for _ in range(1000)]
    assert len(set(first)) == 1000
    for name in first:
        prefix, _, rest = name.partition("-")
        assert prefix == "chatcmpl"
        assert len(rest) == 24
        assert rest.isascii() and rest.isalnum()
