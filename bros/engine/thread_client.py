"""An engine on a thread of this process, for `bros.LLM`, tests and notebooks."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Iterable

from bros.core.errors import EngineDeadError
from bros.engine.client import MessageClient
from bros.engine.engine import Engine
from bros.engine.loop import run_engine
from bros.engine.messages import Command, Failed, Reply, Shutdown

logger = logging.getLogger(__name__)


class ThreadEngineClient(MessageClient):
    """Runs `engine` on its own thread; create it inside a running event loop."""

    def __init__(self, engine: Engine) -> None:
        commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        super().__init__(commands.put)
        self._commands = commands
        self._engine = engine
        loop = asyncio.get_running_loop()

        def reply(message: Reply) -> None:
            loop.call_soon_threadsafe(self.on_reply, message)

        self._thread = threading.Thread(
            target=self._run, args=(_QueueTransport(commands, reply),), name="bros-engine"
        )
        self._thread.daemon = True  # a forgotten close() must not keep the program from ending
        self._thread.start()

    async def close(self) -> None:
        """Stop the thread after its current step and release the engine."""
        if self._thread.is_alive():
            self._commands.put(Shutdown())
            await asyncio.to_thread(self._thread.join)
        self._engine.close()
        self.on_death("The engine was closed.")

    def _run(self, transport: _QueueTransport) -> None:
        try:
            run_engine(self._engine, transport)
        except Exception as error:
            logger.exception("the engine stopped")
            transport.send(Failed(f"The engine stopped: {error}"))


class _QueueTransport:
    def __init__(
        self, commands: queue.SimpleQueue[Command], reply: Callable[[Reply], None]
    ) -> None:
        self._commands = commands
        self._reply = reply

    def receive(self, *, wait: bool) -> Iterable[Command]:
        if wait:
            yield self._commands.get()
        while not self._commands.empty():
            yield self._commands.get_nowait()

    def send(self, reply: Reply) -> None:
        try:
            self._reply(reply)
        except RuntimeError as error:  # the event loop was closed before the engine
            raise EngineDeadError("The program that used this engine has ended.") from error
