"""Between event loops and threads: a loop on a thread of its own, for synchronous callers, and
blocking work that a loop hears of, or waits for, when it is done."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bros.core.errors import EngineDeadError

T = TypeVar("T")

_INTERRUPT_S = 2.0
"""After Ctrl-C, the longest wait for what was cancelled: a task may be in the middle of a call that
cannot be cancelled, such as loading a model."""


class LoopThread:
    """An event loop on its own thread. The caller may run a loop itself, as notebooks do.

    A child process that is forked has none of its parent's threads: there nothing runs, and what
    waited for the loop would wait forever.
    """

    def __init__(self, name: str) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closing = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made it."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raises EngineDeadError in a forked child."""
        if self.is_forked:
            raise EngineDeadError(
                f"This LLM or connection belongs to process {self._pid}, and a forked child cannot "
                "use it. Open one in the child, or start processes by spawn instead of fork."
            )

    def start(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine without waiting for it. Cancelling the future cancels it. Once `close`
        was called, the coroutine does not run, and the future is cancelled. Raises
        EngineDeadError in a forked child."""
        try:
            self.check_process()  # first: a thread of the parent may have held the lock
        except EngineDeadError:
            coroutine.close()
            raise
        with self._lock:
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        future.cancel()
        return future

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and wait for its result. KeyboardInterrupt cancels it, and is raised when
        its task has ended, or after `_INTERRUPT_S`."""
        try:
            return self.start(coroutine).result()
        except KeyboardInterrupt:  # which may come before `start` has returned
            ended = self.start(_cancel(coroutine))
            with contextlib.suppress(TimeoutError, concurrent.futures.CancelledError):
                ended.result(_INTERRUPT_S)
            ended.cancel()
            raise

    def close(self) -> None:
        """Cancel all tasks and end the thread; only the first call does. Callers that are blocked
        in `run`, or call it from now on, get CancelledError. In a forked child it ends nothing."""
        if self.is_forked:
            self._closing = True
            return
        with self._lock:
            if self._closing:
                return
            self._closing = True  # what others have started is a task before the last one is
            last = asyncio.run_coroutine_threadsafe(self._cancel_all(), self._loop)
        last.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _cancel_all(self) -> None:
        # What is cancelled may start other tasks as it ends.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)


async def _cancel(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Cancel the task of a coroutine, if it has one, and wait until that has ended."""
    tasks = [task for task in asyncio.all_tasks() if task.get_coro() is coroutine]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)


def call_after(work: Callable[[], object], then: Callable[[], object], name: str) -> None:
    """Do blocking `work` on a thread of its own, and call `then` on the running loop after it, if
    that is not closed by then.

    The threads of asyncio.to_thread are few, and the end of the program waits for them.
    name: of the thread.
    """
    loop = asyncio.get_running_loop()

    def run() -> None:
        work()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(then)

    threading.Thread(target=run, name=name, daemon=True).start()


async def run_on_thread(work: Callable[[], T], name: str) -> T:
    """Do blocking `work` on a thread of its own, in a copy of the current context, and wait for it.

    Unlike asyncio.to_thread, it neither shares a few threads with look-ups of host names, nor does
    the end of the program wait for it. Cancelling it leaves the thread running.
    name: of the thread. Raises what `work` raises, and RuntimeError if no thread can be started.
    """
    context, done = contextvars.copy_context(), asyncio.Event()
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(context.run(work))
        except BaseException as error:
            raised.append(error)

    call_after(run, done.set, name)
    await done.wait()
    if raised:
        raise raised.pop()
    return returned.pop()
