"""When an iteration of the engine's loop counts as hung, and when it is only long."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import math
import operator
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.plan import StepPlan
from bros.core.request import ServiceClass
from bros.engine.watchdog import (
    Activity,
    LoadWatch,
    Progress,
    StarvationClock,
    Watchdog,
    is_traced,
)
from bros.scheduler.steps import ExpectedTime
from support.tier import examples
from support.virtual_time import VirtualRun, plan_seconds

LEAST_S, EVERY_S = 8.0, 1.0
USUAL = ExpectedTime(0.0)
FACTOR, START_S, COMPILING_S = 20.0, 300.0, 60.0


def make(
    progress: Progress,
    expected: Callable[[], ExpectedTime] = lambda: USUAL,
    starved_s: Callable[[], float] = lambda: 0.0,
    compiles: bool = False,
) -> Watchdog:
    return Watchdog(
        progress,
        expected,
        least_s=LEAST_S,
        every_s=EVERY_S,
        starved_s=starved_s,
        compiles=compiles,
    )


def checks_until_hung(watchdog: Watchdog, most: int = 100_000) -> int:
    return next(n for n in range(most) if watchdog.check() is not None)


@settings(max_examples=examples(25, long=500))
@given(st.floats(0, 20), st.booleans(), st.booleans(), st.booleans())
def test_an_iteration_hangs_once_it_has_taken_much_longer_than_expected(
    seconds: float, is_start: bool, has_new_size: bool, compiles: bool
) -> None:
    watchdog = make(
        Progress(iterations=1, idle=False),
        lambda: ExpectedTime(seconds, is_start, has_new_size),
        compiles=compiles,
    )
    least_s = COMPILING_S if has_new_size and compiles else LEAST_S
    limit_s = max(START_S if is_start else least_s, FACTOR * seconds)
    # The first check sees an iteration that has lasted for half a second; each later one adds a
    # second.
    assert checks_until_hung(watchdog) == math.ceil(limit_s / EVERY_S - 0.5 - 1e-9)


@pytest.mark.parametrize("lasting", [ExpectedTime(0.0, is_start=True), ExpectedTime(10.0)])
def test_the_end_of_a_long_step_is_no_hang(lasting: ExpectedTime) -> None:
    """A check that falls between the end of the step and the next iteration sees the time that the
    step has taken, and no step that would be expected to take it."""
    progress = Progress(iterations=1, idle=False)
    running = [lasting]
    watchdog = make(progress, lambda: running[0])
    for _ in range(100):
        assert watchdog.check() is None
    running[0] = USUAL
    assert watchdog.check() is None
    progress.iterations += 1
    assert checks_until_hung(watchdog) == LEAST_S / EVERY_S


def test_the_reason_says_what_was_expected() -> None:
    watchdog = make(Progress(iterations=1, idle=False), lambda: ExpectedTime(0.5))
    for _ in range(10):
        assert watchdog.check() is None
    assert watchdog.check() == (
        "A step of the engine has not ended after 10.5 s; 0.5 s were expected."
    )


@settings(max_examples=examples(25, long=500))
@given(st.lists(st.tuples(st.integers(0, 7), st.booleans()), max_size=50))
def test_iterations_that_end_and_idle_times_never_hang(iterations: list[tuple[int, bool]]) -> None:
    """Each iteration sees fewer checks than would be too many, an idle loop any number."""
    progress = Progress()
    watchdog = make(progress)
    for checks, idle in iterations:
        progress.iterations += 1
        progress.idle = False
        assert all(watchdog.check() is None for _ in range(checks))
        if idle:
            progress.idle = True
            assert all(watchdog.check() is None for _ in range(100))


@settings(max_examples=examples(25, long=500))
@given(st.lists(st.floats(0, 5), max_size=200))
def test_time_in_which_the_process_could_not_run_does_not_count(starved: list[float]) -> None:
    """As on a machine that is busy with other processes. Afterwards a hang is noticed as usual."""
    progress = Progress(iterations=1, idle=False)
    left = iter(starved)
    watchdog = make(progress, starved_s=lambda: next(left, 0.0))
    own_s = [max(0.0, EVERY_S - starved_s) for starved_s in (starved + [0.0] * 20)[1:]]
    found = checks_until_hung(watchdog)
    assert sum(own_s[:found]) >= LEAST_S - EVERY_S / 2 > sum(own_s[: found - 1])


def test_a_process_in_a_debugger_does_not_hang() -> None:
    held = [math.inf] * 1000
    starved_s = lambda: held.pop() if held else 0.0  # noqa: E731
    watchdog = make(Progress(iterations=1, idle=False), starved_s=starved_s)
    assert checks_until_hung(watchdog) == 1000 + LEAST_S / EVERY_S - 1


# ---- With the times that a scheduler expects.


class WatchedRun(VirtualRun):
    """Steps take `slower` times what the cost model says. A watchdog checks every second."""

    def __init__(self, policy: str, slower: float) -> None:
        super().__init__(policy, max_batch_tokens=32)
        self.slower = slower
        self._progress = Progress(idle=False)
        self.watchdog = make(self._progress, self.scheduler.expected)
        self._next_check_s = 0.0

    def step(self) -> StepPlan | None:
        self._progress.iterations += 1
        plan = self.scheduler.schedule(self.now)
        if plan is None:
            return None
        ends_s = self.now + self.slower * plan_seconds(plan)
        while self._next_check_s < ends_s:
            assert self.watchdog.check() is None, f"killed {self.slower} times slower"
            self._next_check_s += EVERY_S
        self.now = ends_s
        self.scheduler.apply(self._executor.execute(plan), self.now)
        return plan

    def work(self, name: str, prompt: int) -> None:
        self.submit(name, prompt, ServiceClass.BE, salt=len(name) * 7, max_tokens=6)
        while self.scheduler.has_work:
            self.step()


@pytest.mark.parametrize("policy", ["fcfs", "bros"])
@pytest.mark.parametrize("seconds", [0.01, 0.3, 2.0, 30.0])
def test_a_slow_machine_is_not_a_hang(policy: str, seconds: float) -> None:
    """Steps of all lengths, and ten times as long from one step to the next."""
    run = WatchedRun(policy, 1.0)
    # Times the cost model's step so that a step takes `seconds`, if that is longer.
    base = max(1.0, seconds / plan_seconds(_a_plan()))
    run.slower = base
    for n in range(3):
        run.work(f"usual{n}", 40)
    run.slower = 10 * base
    for n in range(3):
        run.work(f"slow{n}", 40)


@pytest.mark.parametrize("policy", ["fcfs", "bros"])
def test_a_step_that_never_ends_is_noticed_within_ten_seconds(policy: str) -> None:
    run = WatchedRun(policy, 1.0)
    for n in range(3):
        run.work(f"usual{n}", 40)
    run.submit("hangs", 40, ServiceClass.BE, salt=3, max_tokens=6)
    run._progress.iterations += 1
    assert run.scheduler.schedule(run.now) is not None
    assert checks_until_hung(run.watchdog) <= 9


def test_the_first_steps_of_an_engine_may_take_minutes() -> None:
    run = WatchedRun("fcfs", 1.0)
    run.submit("first", 40, ServiceClass.BE, max_tokens=6)
    run._progress.iterations += 1
    assert run.scheduler.schedule(run.now) is not None
    assert checks_until_hung(run.watchdog) == START_S / EVERY_S


def _a_plan() -> StepPlan:
    run = VirtualRun("fcfs", max_batch_tokens=32)
    run.submit("r", 40, ServiceClass.BE, max_tokens=6)
    plan = run.scheduler.schedule(0.0)
    assert plan is not None
    return plan


# ---- What the kernel tells.


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_threads_that_wait_for_a_core_hold_a_process_up() -> None:
    """Two threads on one core wait for each other."""
    starved_s, ended = StarvationClock(os.getpid(), 0.01), threading.Event()
    core = min(os.sched_getaffinity(0))

    def burn() -> None:
        os.sched_setaffinity(threading.get_native_id(), {core})
        while not ended.is_set():
            hashlib.sha256(bytes(100_000)).digest()  # releases the interpreter

    threads = [threading.Thread(target=burn) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        starved_s()
        while not starved_s() > 0:
            threads[0].join(0.01)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


_BURN = """
import hashlib, os, sys
core, policy = int(sys.argv[1]), int(sys.argv[2])
os.sched_setaffinity(0, {core})
os.sched_setscheduler(0, policy, os.sched_param(0))
print("begins", flush=True)
while True:
    hashlib.sha256(bytes(100_000)).digest()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_wait_for_a_core_counts_while_it_lasts() -> None:
    """A process that gets a core only if no other wants it waits for minutes beside one that
    does."""
    core = str(min(os.sched_getaffinity(0)))
    every_s, total_s, checks = 0.1, 0.0, 20
    with contextlib.ExitStack() as stack:
        started: list[int] = []
        for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
            command = [sys.executable, "-c", _BURN, core, str(policy)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"begins\n"
            started.append(process.pid)
        starved_s = StarvationClock(started[0], every_s)
        starved_s()
        for _ in range(checks):
            time.sleep(every_s)
            total_s += starved_s()
    assert total_s > checks * every_s / 2


_LAUNCHER = """
import subprocess, sys
rank = subprocess.Popen([sys.executable, "-c", *sys.argv[1:]])
sys.stdin.read()
rank.kill()
rank.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_load_whose_ranks_wait_for_a_core_does_not_hang() -> None:
    """The launcher waits for its rank, which gets a core only if no other process wants it."""
    core = str(min(os.sched_getaffinity(0)))
    idle, other = str(os.SCHED_IDLE), str(os.SCHED_OTHER)
    timeout_s, checks = 0.8, 30
    with contextlib.ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        started: list[int] = []
        for command in (["-c", _LAUNCHER, _BURN, core, idle], ["-c", _BURN, core, other]):
            process = subprocess.Popen([sys.executable, *command], **pipes)
            stack.enter_context(process)
            if started:
                stack.callback(process.kill)
            assert process.stdout is not None and process.stdout.readline() == b"begins\n"
            started.append(process.pid)
        alone_s = StarvationClock(started[0], timeout_s / 8)
        watch = LoadWatch.of_process(started[0], timeout_s)
        alone_s()
        for _ in range(checks):
            time.sleep(watch.every_s)
            assert watch.check() is None
        assert alone_s() < timeout_s, "the launcher itself does not wait for a core"
        os.kill(started[1], signal.SIGKILL)


_PTRACE_SEIZE, _PTRACE_DETACH = 0x4206, 17


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_debugger_is_seen() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            assert not is_traced(process.pid)
            if libc.ptrace(_PTRACE_SEIZE, process.pid, None, None):
                pytest.skip(f"no ptrace here: {os.strerror(ctypes.get_errno())}")
            assert is_traced(process.pid)
        finally:
            process.kill()
    assert not is_traced(process.pid)


# ---- While it loads.

LOAD_S = 80.0  # checked every 10 s
IDLE, COMPUTES, READS = Activity(0.1, 100), Activity(5.0, 100), Activity(0.1, 5000)
"""What a process does between two checks."""


def load_watch(steps: Sequence[Activity], starved_s: float = 0.0) -> LoadWatch:
    """Of a process that does this, one after the other, and then the last one for ever."""
    rest = itertools.chain([Activity(0.0, 0)], steps, itertools.repeat(steps[-1]))
    sums = itertools.accumulate(rest, lambda a, b: Activity(*map(operator.add, a, b)))
    return LoadWatch(lambda: next(sums), LOAD_S, lambda: starved_s)


def seconds_until_hung(watch: LoadWatch, most: int = 1000) -> float | None:
    checks = (n for n in range(1, most + 1) if watch.check() is not None)
    found = next(checks, None)
    return None if found is None else found * watch.every_s


@pytest.mark.parametrize(
    ("steps", "seconds"),
    [
        ([IDLE], 80.0),
        ([READS], None),
        ([COMPUTES], 800.0),
        ([READS] * 50 + [IDLE], 580.0),
        ([COMPUTES] * 40 + [IDLE], 440.0),
        ([IDLE] * 7 + [READS] + [IDLE], 160.0),
        ([*[IDLE] * 7, READS] * 20 + [COMPUTES] * 70 + [READS], None),
    ],
)
def test_an_engine_that_loads_hangs_if_it_neither_reads_nor_computes_for_long(
    steps: Sequence[Activity], seconds: float | None
) -> None:
    assert seconds_until_hung(load_watch(steps)) == seconds


def test_time_in_which_loading_waits_for_a_core_does_not_count() -> None:
    assert seconds_until_hung(load_watch([IDLE], starved_s=5.0)) == 160.0
    assert seconds_until_hung(load_watch([IDLE], starved_s=math.inf)) is None


def test_it_says_what_an_engine_does_that_does_not_load() -> None:
    idle, computing = load_watch([IDLE]), load_watch([COMPUTES])
    reasons = [next(r for _ in range(100) if (r := each.check())) for each in (idle, computing)]
    begin = "The engine has not loaded its model: it has read and written nothing for"
    assert reasons == [
        f"{begin} 80 s, and does not compute either.",
        f"{begin} 800 s, and only computes.",
    ]


def test_where_the_kernel_tells_nothing_no_load_hangs() -> None:
    assert seconds_until_hung(LoadWatch(lambda: None, LOAD_S, lambda: 0.0)) is None


_FAMILY = """
import os, subprocess, sys
code = "import hashlib, sys; [hashlib.sha256(bytes(10**6)) for _ in range(200)]; sys.stdin.read()"
child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
sys.stdin.readline()
open("/dev/zero", "rb", buffering=0).read(10**6)
print("read", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")
def test_activity_is_that_of_a_process_and_of_those_that_it_has_started() -> None:
    command = [sys.executable, "-c", _FAMILY]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        end_s = time.monotonic() + 60.0
        while (found := Activity.of(process.pid)) is None or found.cpu_s < 0.1:
            assert time.monotonic() < end_s
            time.sleep(0.02)
        before = found
        process.stdin.write(b"\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"read\n"
        after = Activity.of(process.pid)
        assert after is not None and after.io_bytes - before.io_bytes >= 10**6
    assert Activity.of(process.pid) is None, "it has ended"
