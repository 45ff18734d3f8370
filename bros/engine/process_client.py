"""An engine in a process of its own, or in several, watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
import zmq.asyncio

from bros.core.config import EngineConfig
from bros.core.errors import EngineDeadError
from bros.engine.client import MessageClient
from bros.engine.ipc import (
    command_address,
    command_codec,
    open_socket,
    reply_address,
    reply_codec,
)
from bros.engine.launch import SIGNS, Launch
from bros.engine.messages import Alive, Command, Failed, Ready, Shutdown
from bros.executor.model_store import ModelFiles

logger = logging.getLogger(__name__)

_GRACE_S, _RANKS_GRACE_S = 5.0, 10.0
"""How long an engine, or a launcher with its ranks, may take to end after Shutdown before it is
killed."""

_MAX_FAILURES = 3
_BACK_OFF_S = 1.0
"""Starts that fail in a row, and the pause after each, longer every time."""

_DRAIN_MS = 100
"""How long to look for messages of a process that has ended."""


class ProcessEngineClient(MessageClient):
    """Starts, watches and talks to one engine process.

    When the process dies, everything open fails at once with EngineDeadError. Then it is
    started again if `restart`. Without `restart`, when it does not come up the first time, or
    three times in a row later, `on_final_death` is called with the reason.

    With config.tp > 1 the process is the launcher of as many ranks, which end with it and it with
    them. Unless this one is a rank itself (`is_rank`), which torchrun has started with the others:
    then the process takes its place, as rank 0, and cannot be restarted without the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        *,
        profiles: Sequence[Path] = (),
        log_level: str = "info",
        restart: bool = True,
        is_rank: bool = False,
        replica: int | None = None,
        on_final_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """replica: which of several engines on this machine it is; see Launch."""
        super().__init__(self._post)
        self._config = config
        self._files = files
        self._profiles = tuple(str(folder) for folder in profiles)
        self._log_level = log_level
        self._restart = restart and not is_rank
        self._starts_ranks = config.tp > 1 and not is_rank
        self._replica = replica
        self._on_final_death = on_final_death
        self._encoder, self._decoder = command_codec(), reply_codec()
        self._context = zmq.Context()
        self._push: zmq.Socket[bytes] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self._asked_to_end: asyncio.Future[None] | None = None
        self._last_words, self._came_up = "", False
        self._missed_signs: int | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine process or the launcher, while there is one."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process and wait until the model is loaded.

        Raises EngineDeadError with the reason if it does not come up.
        """
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        try:
            await self.wait_ready()
        except BaseException:
            await self.close()
            raise

    async def restart(self) -> None:
        """End the engine, on which nothing should be open, and wait until the next one is up.

        Raises EngineDeadError if that does not come up.
        """
        if self._alive and self._asked_to_end is None:
            self._asked_to_end = asyncio.get_running_loop().create_future()
            self._post(Shutdown())
            await asyncio.wait([self._asked_to_end], timeout=self._grace_s)
            if self._asked_to_end is not None:
                self._kill()
                await self._asked_to_end
        await self.wait_ready()

    async def close(self) -> None:
        """Ask the engine to end, kill it if it does not within seconds, and clean up."""
        self._closing = True
        if self._supervisor is not None:
            if self._alive:
                self._post(Shutdown())
                await asyncio.wait([self._supervisor], timeout=self._grace_s)
            if not self._supervisor.done():
                self._kill()
                await self._supervisor
        self.on_death("The server is shutting down.")
        self._context.destroy(linger=0)

    @property
    def _grace_s(self) -> float:
        return _RANKS_GRACE_S if self._starts_ranks else _GRACE_S

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _supervise(self) -> None:
        has_been_up, failures = False, 0
        while not self._closing:
            try:
                reason, came_up = await self._run_once()
            except Exception as error:  # no folder, no socket or no process
                reason, came_up = f"The engine could not be started: {error}", False
            self.on_death(reason)
            has_been_up = has_been_up or came_up
            if self._asked_to_end is not None:
                asked, self._asked_to_end = self._asked_to_end, None
                asked.set_result(None)
                if not self._closing:
                    continue
            if self._closing:
                return
            logger.error("%s", reason)
            failures = 0 if came_up else failures + 1
            if not (self._restart and has_been_up) or failures >= _MAX_FAILURES:
                self._on_final_death(reason)
                return
            logger.warning("restarting the engine")
            await asyncio.sleep(failures * _BACK_OFF_S)

    async def _run_once(self) -> tuple[str, bool]:
        """One life of the process: (why it ended, whether it had come up)."""
        self._last_words, self._came_up = "", False
        self._missed_signs = None
        async with contextlib.AsyncExitStack() as stack:
            # Readable by this user only.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bros-")))
            self._push = stack.enter_context(open_socket(self._context, zmq.PUSH))
            self._push.bind(command_address(folder))
            pull = zmq.asyncio.Context(self._context).socket(zmq.PULL)
            stack.callback(pull.close, linger=0)
            pull.set_hwm(0)
            pull.bind(reply_address(folder))
            receiver = asyncio.create_task(self._receive(pull), name="engine-replies")
            stack.push_async_callback(_cancel, receiver)
            process = self._process = await self._spawn(folder)
            stack.callback(self._forget, process)
            if self._config.tp > 1:
                watch = asyncio.create_task(self._watch(), name="engine-watch")
                stack.push_async_callback(_cancel, watch)
            if self._closing:
                self._kill()
            code = await process.wait()
            receiver.cancel()
            while await pull.poll(_DRAIN_MS):  # what it said before it ended
                self._take(await pull.recv_multipart())
        reason = self._last_words or f"The engine process ended unexpectedly (code {code})."
        return reason, self._came_up

    def _forget(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        process.stdin.close()
        self._process = None

    async def _spawn(self, folder: Path) -> asyncio.subprocess.Process:
        launch = Launch(
            model_folder=str(self._files.folder),
            model_name=self._files.name,
            log_level=self._log_level,
            config=self._config,
            profiles=self._profiles,
            starts_ranks=self._starts_ranks,
            replica=self._replica,
        )
        launch.write(folder)
        module = "bros.engine.launcher" if self._starts_ranks else "bros.engine.process"
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", module, str(folder), stdin=asyncio.subprocess.PIPE
        )

    async def _receive(self, pull: zmq.asyncio.Socket) -> None:
        while True:
            self._take(await pull.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        message = self._decoder.decode(frames)
        if isinstance(message, Ready):
            self._came_up, self._missed_signs = True, 0
        elif isinstance(message, Failed):
            self._last_words = self._last_words or message.message
        elif isinstance(message, Alive):
            self._missed_signs = 0
        self.on_reply(message)  # type: ignore[arg-type]

    async def _watch(self) -> None:
        """Kill ranks of which the first one gives no sign of life any more.

        The others notice if it hangs within a step, but not between two.
        """
        timeout_s = self._config.tp_timeout
        while self._missed_signs is None or self._missed_signs < SIGNS:
            # In turns, so that what has come while this process was stopped is read between two.
            await asyncio.sleep(timeout_s / SIGNS)
            if self._missed_signs is not None:
                self._missed_signs += 1
        self._last_words = f"Rank 0 has not answered for {timeout_s:g} s."
        self._kill()

    def _post(self, command: Command) -> None:
        if self._push is None:
            raise EngineDeadError("The engine has not been started.")
        # Without a peer it is dropped: the supervisor is about to fail everything that is open.
        with contextlib.suppress(zmq.Again):
            self._push.send_multipart(self._encoder.encode(command), zmq.NOBLOCK)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
