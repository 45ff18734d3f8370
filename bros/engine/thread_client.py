"""An engine on a thread of this process, for `bros.LLM`, tests and notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable

from bros.engine.client import MessageClient
from bros.engine.engine import Engine
from bros.engine.loop import run_engine
from bros.engine.messages import Failed, Inbox, Reply, Shutdown

logger = logging.getLogger(__name__)


class ThreadEngineClient(MessageClient):
    """Runs `engine` on a thread. Create it inside a running event loop."""

    def __init__(self, engine: Engine) -> None:
        inbox = Inbox()
        super().__init__(inbox.put)
        self._inbox = inbox
        self._engine = engine
        loop = asyncio.get_running_loop()

        def reply(message: Reply) -> None:
            loop.call_soon_threadsafe(self.on_reply, message)

        self._thread = threading.Thread(
            target=self._run, args=(_ThreadTransport(inbox, reply),), name="bros-engine"
        )
        self._thread.daemon = True  # so that the program ends even without close()
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread after its current step and close the engine."""
        if self._thread.is_alive():
            self._inbox.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self._engine.close()
        self.on_death("The engine was closed.")

    def _run(self, transport: _ThreadTransport) -> None:
        try:
            run_engine(self._engine, transport)
        except _LoopClosedError:
            logger.warning("the engine stopped: the event loop of its client was closed")
        except Exception as error:
            logger.exception("the engine stopped")
            with contextlib.suppress(_LoopClosedError):
                transport.send(Failed(f"The engine stopped: {error}"))


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
