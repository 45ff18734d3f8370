"""An engine in a process of its own, or in several, watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import zmq

from bros.core.config import EngineConfig
from bros.core.errors import EngineDeadError
from bros.engine.client import MessageClient
from bros.engine.messages import Command, Failed, Heartbeat, Ready, Shutdown
from bros.executor.model_store import ModelFiles
from bros.transport.ipc import Wire, command_codec, open_socket, reply_codec
from bros.transport.process import HEARTBEATS, LaunchSpec

# ---- What clients of engines in other processes have in common: they watch them, restart them, and
# talk to them over ZeroMQ.


logger = logging.getLogger(__name__)

_MAX_FAILURES = 3
_BACK_OFF_S = 1.0
"""Starts that fail in a row, and the pause after each, longer every time."""

_DRAIN_S = 0.1
"""How long to look for messages of a process that has ended."""


class HeartbeatMonitor:
    """Counts the heartbeats that one process has missed, from the first one on."""

    def __init__(self, timeout_s: float) -> None:
        self._every_s = timeout_s / HEARTBEATS
        self._missed: int | None = None

    def seen(self) -> None:
        self._missed = 0

    async def end(self) -> None:
        """Returns once none has come for timeout_s."""
        while self._missed is None or self._missed < HEARTBEATS:
            # In turns, so that what has come while this process was stopped is read between two.
            await asyncio.sleep(self._every_s)
            if self._missed is not None:
                self._missed += 1


class SupervisedClient(MessageClient, ABC):
    """Starts, watches and talks to one engine.

    When it dies, everything open fails at once with EngineDeadError. Then it is started again if
    `restart`. Without `restart`, when it does not come up the first time, or three times in a
    row later, `on_final_death` is called with the reason. What is no fault of the engine's
    (_no_fault) does not count.
    """

    def __init__(
        self,
        *,
        restart: bool,
        on_final_death: Callable[[str], None],
        grace_s: float,
        rank_heartbeat_timeout_s: float | None = None,
    ) -> None:
        """grace_s: how long the engine may take to end after Shutdown before it is killed.
        rank_heartbeat_timeout_s: the engine, or its first rank, counts as dead after so long
            without a heartbeat; None: it sends none."""
        super().__init__(self._post)
        self._restart = restart
        self._on_final_death = on_final_death
        self._grace_s = grace_s
        self._rank_heartbeat_timeout_s = rank_heartbeat_timeout_s
        self._encoder, self._decoder = command_codec(), reply_codec()
        self._context = zmq.Context()
        self._push: zmq.Socket[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self._asked_to_end: asyncio.Future[None] | None = None
        self._new_life()

    @abstractmethod
    async def _run_once(self) -> str:
        """One life of the engine, from its start to its end; returns why it ended."""

    @abstractmethod
    def _kill(self) -> None:
        """End the engine if it runs, whatever it is doing."""

    async def start(self) -> None:
        """Start the engine and wait until the model is loaded.

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
            if self._alive and not self._supervisor.done():
                self._post(Shutdown())
                await asyncio.wait([self._supervisor], timeout=self._grace_s)
            if not self._supervisor.done():
                self._kill()
                await self._supervisor
        self.on_death("The server is shutting down.")
        self._context.destroy(linger=0)

    async def _supervise(self) -> None:
        has_been_up, failures = False, 0
        while not self._closing:
            self._new_life()
            try:
                reason = await self._run_once()
            except Exception as error:  # no folder, no socket or no process
                reason = f"The engine could not be started: {error}"
            self.on_death(reason)
            has_been_up = has_been_up or self._was_ready
            if self._asked_to_end is not None:
                asked, self._asked_to_end = self._asked_to_end, None
                asked.set_result(None)
                if not self._closing:
                    continue
            if self._closing:
                return
            logger.error("%s", reason)
            failures = 0 if self._was_ready or self._no_fault else failures + 1
            if not (self._restart and has_been_up) or failures >= _MAX_FAILURES:
                self._on_final_death(reason)
                return
            logger.warning("restarting the engine")
            await asyncio.sleep(failures * _BACK_OFF_S)

    def _new_life(self) -> None:
        self._last_words, self._was_ready, self._no_fault = "", False, False
        self._rank_heartbeats = (
            HeartbeatMonitor(self._rank_heartbeat_timeout_s)
            if self._rank_heartbeat_timeout_s
            else None
        )
        self._host_heartbeats: HeartbeatMonitor | None = None

    def _listen(self, stack: AsyncExitStack, wire: Wire, secret: bytes = b"") -> Receiver:
        """Open this end of the connection, until `stack` is closed. secret: the key that belongs to
        the wire's."""
        push = stack.enter_context(open_socket(self._context, zmq.PUSH))
        self._push = push
        stack.callback(self._hang_up)
        pull = stack.enter_context(open_socket(self._context, zmq.PULL))
        sockets = (push, pull)
        for socket, address in zip(sockets, (wire.commands, wire.replies), strict=True):
            if secret:
                socket.curve_server, socket.curve_secretkey = True, secret
            socket.bind(address)
        commands, replies = (socket.get_string(zmq.LAST_ENDPOINT) for socket in sockets)
        receiver = Receiver(pull, self._take, Wire(commands, replies, wire.server_key))
        stack.callback(receiver.close)
        if self._rank_heartbeats is not None:
            words = f"The engine has not answered for {self._rank_heartbeat_timeout_s:g} s."
            self._watch(stack, self._rank_heartbeats, words)
        return receiver

    def _watch(self, stack: AsyncExitStack, heartbeats: HeartbeatMonitor, last_words: str) -> None:
        """Kill what gives no heartbeats any more, until `stack` is closed.

        Of ranks, the others notice if the first one hangs within a step, but not between two.
        """

        async def watch() -> None:
            await heartbeats.end()
            self._last_words = last_words
            self._kill()

        stack.push_async_callback(_cancel, asyncio.create_task(watch(), name="engine-watch"))

    def _take(self, frames: list[bytes]) -> None:
        message = self._decoder.decode(frames)
        if isinstance(message, Failed):
            self._last_words = self._last_words or message.message
        if isinstance(message, Ready | Heartbeat):
            of_host = isinstance(message, Heartbeat) and message.host
            heartbeats = self._host_heartbeats if of_host else self._rank_heartbeats
            if heartbeats is not None:
                heartbeats.seen()
        self.on_reply(message)  # type: ignore[arg-type]

    def _hang_up(self) -> None:
        self._push = None

    def _post(self, command: Command) -> None:
        if self._push is None:
            raise EngineDeadError("The engine is not running.")
        # Without a peer it is dropped: the supervisor is about to fail everything that is open.
        with contextlib.suppress(zmq.ZMQError):
            self._push.send_multipart(self._encoder.encode(command), zmq.NOBLOCK)


_TURN_MESSAGES = 8
"""What has come is taken in one turn of the event loop, but no more than so many messages: those
who read the tokens are to have a turn as well."""


class Receiver:
    """Reads what an engine says, in callbacks of the event loop.

    Not with zmq.asyncio, whose futures and tasks cost more per step than all that a step says.
    """

    def __init__(
        self, pull: zmq.Socket[bytes], take: Callable[[list[bytes]], None], wire: Wire
    ) -> None:
        self.wire = wire  # with the ports that were free
        self._pull = pull
        self._take = take
        self._loop = asyncio.get_running_loop()
        self._taken = 0
        self._next_turn: asyncio.Handle | None = None
        self._descriptor: int = pull.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._descriptor, self._read)
        self._read()

    async def drain(self) -> None:
        """Take what an engine said before it ended."""
        taken = -1
        while taken < self._taken:
            taken = self._taken
            await asyncio.sleep(_DRAIN_S)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._next_turn is not None:
            self._next_turn.cancel()

    def _read(self) -> None:
        """Take what has come. ZeroMQ tells it once, whatever is left, so there is a next turn."""
        self._next_turn = None
        for _ in range(_TURN_MESSAGES):
            try:
                frames = self._pull.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._taken += 1
            try:
                self._take(frames)
            except BaseException:  # a bug, but what follows is to be read all the same
                self._next_turn = self._loop.call_soon(self._read)
                raise
        self._next_turn = self._loop.call_soon(self._read)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


_GRACE_S, _RANKS_GRACE_S = 5.0, 10.0
"""How long an engine, or a launcher with its ranks, may take to end after Shutdown before it is
killed."""


class ProcessEngineClient(SupervisedClient):
    """Starts, watches and talks to one engine process.

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
        starts_ranks = config.tp > 1 and not is_rank
        sends_heartbeats = config.tp > 1 or replica is not None
        super().__init__(
            restart=restart and not is_rank,
            on_final_death=on_final_death,
            grace_s=_RANKS_GRACE_S if starts_ranks else _GRACE_S,
            rank_heartbeat_timeout_s=config.tp_timeout if sends_heartbeats else None,
        )
        self._launch = LaunchSpec(
            model_folder=str(files.folder),
            model_name=files.name,
            log_level=log_level,
            config=config,
            profiles=tuple(str(folder) for folder in profiles),
            starts_ranks=starts_ranks,
            replica=replica,
            sends_heartbeats=sends_heartbeats,
        )
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine process or the launcher; there is one as long as the engine is alive."""
        return self._process.pid if self._process else None

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _run_once(self) -> str:
        async with contextlib.AsyncExitStack() as stack:
            # Readable by this user only.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bros-")))
            # After all that waits, so that no caller finds an engine alive that has no process.
            stack.callback(self._forget)
            receiver = self._listen(stack, Wire.of(folder))
            process = self._process = await self._spawn(folder)
            if self._closing:
                self._kill()
            code = await process.wait()
            await receiver.drain()
        return self._last_words or f"The engine process ended unexpectedly (code {code})."

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    async def _spawn(self, folder: Path) -> asyncio.subprocess.Process:
        self._launch.write(folder)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._launch.module, str(folder)),
            stdin=asyncio.subprocess.PIPE,
        )
