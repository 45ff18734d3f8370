"""An engine on a thread of this process, for `bros.LLM`, tests and notebooks."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
from collections.abc import Callable

from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineInfo
from bros.engine.client import MessageClient
from bros.engine.engine import Engine
from bros.engine.loop import run_engine
from bros.engine.messages import Failed, Inbox, Reply, Shutdown

logger = logging.getLogger(__name__)


class ThreadEngineClient(MessageClient):
    """Builds an engine, steps it and closes it, all on one thread.

    OpenMP keeps a team of threads for each thread that has computed, as building does. With two
    teams it counts more threads than cores, and the threads of each then sleep after every product
    instead of waiting for the next one, which is 100 microseconds away.
    """

    def __init__(self, build: Callable[[], Engine]) -> None:
        """Starts the thread. Call it inside a running event loop.

        build: called once, on the thread; `wait_ready` raises what it raises.
        """
        inbox = Inbox()
        super().__init__(inbox.put)
        self._inbox = inbox
        self._build = build
        self._build_error: BaseException | None = None
        self._built = False
        self._closing = False
        loop = asyncio.get_running_loop()

        def reply(message: Reply) -> None:
            loop.call_soon_threadsafe(self.on_reply, message)

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

    async def close(self) -> None:
        """Stop the thread after its current step and close the engine. An engine that is still
        being built is closed later; only the end of the program waits for that."""
        self._closing = True
        self._inbox.put(Shutdown())
        if self._built or not self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)
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
                run_engine(engine, transport)
        except _LoopClosedError:
            logger.warning("the engine stopped: the event loop of its client was closed")
        except Exception as error:
            logger.exception("the engine stopped")
            self._send_last(transport, Failed(f"The engine stopped: {error}"))
        finally:
            engine.close()

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
