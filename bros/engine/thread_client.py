"""An engine on a thread of this process, for `bros.LLM`, tests and notebooks."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineInfo
from bros.core.loop_thread import call_after
from bros.engine.client import MessageClient
from bros.engine.engine import Engine
from bros.engine.loop import run_engine
from bros.engine.messages import Failed, Inbox, Reply, Shutdown
from bros.engine.watchdog import CHECKS_PER_TIMEOUT, Progress, Watchdog

logger = logging.getLogger(__name__)


class ThreadEngineClient(MessageClient):
    """Builds an engine, steps it and closes it, all on one thread.

    Kernels, and OpenMP in torch, keep a team of threads for each thread that has computed, as
    building does. With two teams OpenMP counts more threads than cores, and those of each then
    sleep at once instead of waiting for the next operation.

    If a step hangs, everything open fails with EngineDeadError. Python cannot end a thread, so no
    other engine takes its place, unlike that of a process: the thread keeps its memory, and ends if
    its step does.
    """

    def __init__(self, build: Callable[[], Engine], *, hang_timeout_s: float = 0.0) -> None:
        """Starts the thread. Call it inside a running event loop.

        build: called once, on the thread; `wait_ready` raises what it raises.
        hang_timeout_s: EngineConfig.hang_timeout; 0: steps may take any time.
        """
        inbox = Inbox()
        super().__init__(inbox.put)
        self._inbox = inbox
        self._build = build
        self._build_error: BaseException | None = None
        self._built = False
        self._closing = False
        self._hung = False
        self._hang_timeout_s = hang_timeout_s
        self._has_ended = asyncio.Event()  # the thread, or it hangs
        loop = asyncio.get_running_loop()

        def reply(message: Reply) -> None:
            loop.call_soon_threadsafe(self._on_reply_of_thread, message)

        def on_hang(reason: str) -> None:
            loop.call_soon_threadsafe(self._on_hang, reason)

        self._tell_hang = on_hang
        self._thread = threading.Thread(
            target=self._run, args=(_ThreadTransport(inbox, reply),), name="bros-engine"
        )
        self._thread.daemon = True  # so that the program ends even without close()
        self._thread.start()

    async def wait_ready(self) -> EngineInfo:
        """Wait until the engine is ready. Raises what `build` has raised, or EngineDeadError."""
        try:
            return await super().wait_ready()
        except EngineDeadError:
            if self._build_error is not None:
                raise self._build_error from None
            raise

    @property
    def num_lost(self) -> int:
        return self.num_hung

    @property
    def num_hung(self) -> int:
        return int(self._hung)

    @property
    def hung(self) -> bool:
        return self._hung

    async def close(self) -> None:
        """Stop the thread after its current step and close the engine. An engine that is still
        being built is closed later; only the end of the program waits for that. Nothing waits for
        an engine that hangs."""
        self._closing = True
        self._inbox.put(Shutdown())
        if self._hung:
            pass
        elif self._built or not self._thread.is_alive():
            call_after(self._thread.join, self._has_ended.set, "bros-engine-end")
            await self._has_ended.wait()
        else:
            atexit.register(self._thread.join)
        self.on_death("The engine was closed.")

    def _run(self, transport: _ThreadTransport) -> None:
        try:
            engine = self._build()
        except BaseException as error:
            self._build_error = error
            self._send_last(transport, Failed(f"The engine did not start: {error}"))
            return
        self._built = True  # from now on `close` waits for this thread, unless it came before
        try:
            if not self._closing:
                progress = Progress()
                with self._watched(engine, progress):
                    run_engine(engine, transport, progress)
        except _LoopClosedError:
            logger.warning("the engine stopped: the event loop of its client was closed")
        except Exception as error:
            logger.exception("the engine stopped")
            self._send_last(transport, Failed(f"The engine stopped: {error}"))
        finally:
            engine.close()

    @contextlib.contextmanager
    def _watched(self, engine: Engine, progress: Progress) -> Iterator[None]:
        """Watch this thread during the block, from another one."""
        if not self._hang_timeout_s:
            yield
            return
        watchdog = Watchdog.of_engine(
            progress,
            engine.expected,
            self._hang_timeout_s,
            compiles=engine.info.device != "cpu",
        )
        watched, done = threading.get_ident(), threading.Event()

        def watch() -> None:
            while not done.wait(self._hang_timeout_s / CHECKS_PER_TIMEOUT):
                reason = watchdog.check()
                if reason is None:
                    continue
                with contextlib.suppress(RuntimeError):  # the loop of the client is closed
                    self._tell_hang(reason)  # first: logging may wait for a lock of that thread
                    frame = sys._current_frames().get(watched)
                    logger.error(
                        "%s It is here:\n%s", reason, "".join(traceback.format_stack(frame))
                    )
                return

        thread = threading.Thread(target=watch, name="bros-engine-watch", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            # Else it may be the last one that refers to the engine, and free its tensors while the
            # program ends: torch then calls std::terminate.
            thread.join()

    def _on_hang(self, reason: str) -> None:
        self._hung = True
        self._has_ended.set()
        self._inbox.put(Shutdown())  # it ends if its step does
        self.on_death(
            f"{reason} An engine on a thread cannot be replaced; its memory is free when this "
            "process ends."
        )

    def _on_reply_of_thread(self, reply: Reply) -> None:
        if not self._hung:  # else all that it answers has failed
            self.on_reply(reply)

    def _send_last(self, transport: _ThreadTransport, message: Failed) -> None:
        with contextlib.suppress(_LoopClosedError):
            transport.send(message)


class _LoopClosedError(Exception):
    """The event loop of the client is closed."""


class _ThreadTransport:
    def __init__(self, inbox: Inbox, reply: Callable[[Reply], None]) -> None:
        self._inbox = inbox
        self._reply = reply
        self.receive, self.put = inbox.receive, inbox.put

    @property
    def has_arrivals(self) -> bool:
        return self._inbox.has_arrivals

    def send(self, reply: Reply) -> None:
        try:
            self._reply(reply)
        except RuntimeError as error:
            raise _LoopClosedError from error
