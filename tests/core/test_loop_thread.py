"""An event loop on a thread of its own: nobody waits for it for ever."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
import signal
import threading
import time
from collections.abc import Callable

import pytest

from bros.core import loop_thread
from bros.core.errors import EngineDeadError
from bros.core.loop_thread import LoopThread, run_on_thread


def in_thread(work: Callable[[], object]) -> concurrent.futures.Future[object]:
    """The outcome of `work` on a thread that the end of the program does not wait for."""
    future: concurrent.futures.Future[object] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def test_a_caller_gets_the_result_of_a_coroutine_or_what_it_raises() -> None:
    async def fail() -> None:
        raise ValueError("no")

    loop = LoopThread("test")
    assert loop.run(asyncio.sleep(0, "done")) == "done"
    with pytest.raises(ValueError, match="no"):
        loop.run(fail())
    assert not loop.closed
    loop.close()
    loop.close()
    assert loop.closed


def test_callers_are_freed_when_it_closes_whenever_they_have_called() -> None:
    """One caller is blocked when it closes, another one calls while a task takes long to end, and
    one when it is closed."""
    loop, ending, may_end = LoopThread("test"), threading.Event(), threading.Event()

    async def ends_late() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ending.set()
            await asyncio.to_thread(may_end.wait, 20)

    before = in_thread(lambda: loop.run(ends_late()))
    while loop.run(_count_tasks()) < 2:
        pass
    closing = in_thread(loop.close)
    assert ending.wait(20)
    during = in_thread(lambda: loop.run(asyncio.sleep(60)))
    with pytest.raises(concurrent.futures.CancelledError):
        during.result(20)
    may_end.set()
    closing.result(20)
    with pytest.raises(concurrent.futures.CancelledError):
        before.result(20)
    after = in_thread(lambda: loop.run(asyncio.sleep(60)))
    with pytest.raises(concurrent.futures.CancelledError):
        after.result(20)


def test_what_a_task_starts_as_it_is_cancelled_ends_as_well() -> None:
    loop = LoopThread("test")
    started: list[asyncio.Task[None]] = []

    async def starts_another() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            started.append(asyncio.create_task(asyncio.sleep(60)))

    future = loop.start(starts_another())
    while loop.run(_count_tasks()) < 2:
        pass
    loop.close()
    assert future.cancelled() and started[0].cancelled()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_is_raised_when_the_task_has_cleaned_up() -> None:
    loop, ended = LoopThread("test"), threading.Event()

    async def cleans_up() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.2)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        loop.run(cleans_up())
    assert ended.is_set()
    loop.close()


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_does_not_wait_for_what_cannot_be_cancelled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loop_thread, "_INTERRUPT_S", 0.1)
    loop, may_end = LoopThread("test"), asyncio.Event()

    async def goes_on() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while not may_end.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await may_end.wait()

    with pytest.raises(KeyboardInterrupt):
        loop.run(goes_on())
    assert loop.run(_count_tasks()) == 2
    loop.start(_set(may_end)).result(20)
    loop.close()


async def _set(event: asyncio.Event) -> None:
    event.set()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_child_it_refuses_at_once_and_closes_without_waiting() -> None:
    loop = LoopThread("test")
    child = os.fork()
    if child == 0:
        try:
            assert loop.is_forked
            for ask in (loop.run, loop.start):
                with pytest.raises(EngineDeadError, match=f"belongs to process {os.getppid()}"):
                    ask(asyncio.sleep(0))
            loop.close()
            assert loop.closed
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert _status_of(child) == 0
    assert not loop.is_forked and loop.run(asyncio.sleep(0, "goes on")) == "goes on"
    loop.close()


def _status_of(child: int) -> int | None:
    """The exit status of a child; None if it had to be killed after 20 s."""
    for _ in range(2000):
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


async def _count_tasks() -> int:
    return len(asyncio.all_tasks())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
async def test_what_work_on_a_thread_raises_reaches_its_caller(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    # A coroutine cannot raise StopIteration.
    with pytest.raises(RuntimeError if error is StopIteration else error):
        await run_on_thread(fail, "test")


async def test_work_on_a_thread_sees_the_context_and_no_other_work_waits_for_it() -> None:
    place: contextvars.ContextVar[str] = contextvars.ContextVar("place")
    place.set("here")
    all_run = threading.Barrier(40)

    def work() -> str:
        all_run.wait(timeout=20)
        return place.get()

    found = await asyncio.gather(*(run_on_thread(work, "test") for _ in range(40)))
    assert found == 40 * ["here"]
