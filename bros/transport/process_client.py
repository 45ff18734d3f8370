"""Clients of engines in other processes: they start, watch and restart them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import zmq

from bros.core.config import EngineConfig
from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineInfo
from bros.core.machine import module_command
from bros.engine.client import MessageClient
from bros.engine.messages import Command, Failed, Heartbeat, Ready, Shutdown
from bros.engine.watchdog import LoadWatch, StarvationClock
from bros.executor.model_store import ModelFiles
from bros.transport.engine_start import EngineProcess
from bros.transport.ipc import Endpoints, command_codec, open_socket, reply_codec
from bros.transport.process import HEARTBEATS_PER_TIMEOUT, SHOW_STACKS, LaunchSpec

logger = logging.getLogger(__name__)

# ---- What all of these clients share.

_MAX_FAILURES = 3
"""Failed starts in a row after which the client stops restarting the engine."""

_BACK_OFF_S = 1.0
"""Pause after the first failed start; after the n-th it is n times as long."""

_SLOW_START_S = 600.0
"""Time after which the log says, again and again, that an engine is not ready. That alone is no
reason to kill it: reading a large model from a network takes as long, and so do kernels that are
compiled."""

_KILLED_S = 30.0
"""How long `close` waits for an engine that it has killed: the kernel may free much memory."""

_DRAIN_S = 0.1
"""Interval without messages after which the client stops reading from an ended process."""


class HeartbeatMonitor:
    """Detects that a process sends no heartbeats any more."""

    def __init__(self, timeout_s: float, starved_s: Callable[[], float] = lambda: 0.0) -> None:
        """starved_s: for how long the process could not make progress since the last call, because
        it waited for a core or a debugger held it; called HEARTBEATS_PER_TIMEOUT times per timeout.
        This time does not count."""
        self._timeout_s = timeout_s
        self._every_s = timeout_s / HEARTBEATS_PER_TIMEOUT
        self._starved_s = starved_s
        self._silent_s: float | None = None  # None before the first heartbeat

    def seen(self) -> None:
        """A heartbeat has arrived."""
        self._silent_s = 0.0

    async def timed_out(self) -> None:
        """Wait until no heartbeat has arrived for timeout_s, counted from the first one on."""
        while self._silent_s is None or self._silent_s < self._timeout_s:
            # Short sleeps: if this process was stopped or suspended with its machine, it reads
            # waiting heartbeats in between.
            await asyncio.sleep(self._every_s)
            if self._silent_s is not None:
                self._silent_s += max(0.0, self._every_s - self._starved_s())


class SupervisedClient(MessageClient, ABC):
    """Starts, watches and talks to one engine.

    When the engine dies, all open requests fail at once with EngineDeadError. With `restart` the
    client starts it again. Without `restart`, or if the first start fails, or if three later starts
    in a row fail, the client calls `on_final_death` with the reason. A start that fails because no
    host was available (_host_unavailable) does not count.
    """

    def __init__(
        self,
        *,
        restart: bool,
        on_final_death: Callable[[str], None],
        grace_s: float,
        rank_heartbeat_timeout_s: float | None = None,
    ) -> None:
        """grace_s: seconds that the engine may take to end after Shutdown before it is killed.
        rank_heartbeat_timeout_s: seconds without a heartbeat of the engine (its rank 0) after which
            it counts as dead; None or 0: it sends none."""
        super().__init__(self._send_command)
        self._restart = restart
        self._on_final_death = on_final_death
        self._grace_s = grace_s
        self._rank_heartbeat_timeout_s = rank_heartbeat_timeout_s
        self._encoder, self._decoder = command_codec(), reply_codec()
        self._context = zmq.Context()
        self._push: zmq.Socket[bytes] | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._closing = False
        self._restarting: asyncio.Future[None] | None = None  # done once the engine has ended
        self._is_final = False  # the engine is not started again
        self._num_lost = self._num_hung = 0
        self._hung = False
        self._profile = ""  # of the latest engine that was ready
        self._began_s = self._start_s = 0.0  # when the last start began, and how long it took
        self._reset()

    @property
    def num_lost(self) -> int:
        return self._num_lost

    @property
    def num_hung(self) -> int:
        return self._num_hung

    @property
    def hung(self) -> bool:
        return self._hung

    @property
    def retry_after_s(self) -> float | None:
        """As long as the last start took, if the engine is started again."""
        if self._is_final or self._closing or not self._start_s:
            return None
        return self._start_s if self._restart or self._restarting is not None else None

    @abstractmethod
    async def _run_once(self) -> str:
        """Start the engine and wait until it ends; returns the reason."""

    @abstractmethod
    def _kill(self) -> None:
        """Kill the engine if it is running."""

    def _why_alive(self) -> str:
        """What is known of an engine that a kill did not end, for the log."""
        return "the machine on which it runs does not answer"

    async def start(self) -> None:
        """Start the engine and wait until the model is loaded.

        Raises EngineDeadError with the reason if it fails to start.
        """
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        try:
            await self.wait_ready()
        except BaseException:
            await self.close()
            raise

    async def restart(self) -> None:
        """Shut the engine down and wait until the next one is ready. Open requests fail.

        Raises EngineDeadError if the next one fails to start.
        """
        if self._alive and self._restarting is None:
            ended = self._restarting = asyncio.get_running_loop().create_future()
            self._send_command(Shutdown())
            try:
                await asyncio.wait([ended], timeout=self._grace_s)
            finally:
                # Even if this call is cancelled: nothing else would end an engine that hangs.
                if not ended.done():
                    self._kill()
            await asyncio.wait([ended])  # which, unlike `await ended`, never cancels it
        await self.wait_ready()

    async def close(self) -> None:
        """Shut the engine down, kill it if it does not end within grace_s, and clean up.

        A killed process that waits in the kernel, for instance for a file server that is gone, ends
        only when that does. This does not wait for it for longer than _KILLED_S.
        """
        self._closing = True
        if self._supervisor is not None:
            if self._alive and not self._supervisor.done():
                self._send_command(Shutdown())
                await asyncio.wait([self._supervisor], timeout=self._grace_s)
            if not self._supervisor.done():
                self._kill()
                await asyncio.wait([self._supervisor], timeout=_KILLED_S)
                if self._supervisor.done():
                    self._supervisor.result()
                else:
                    logger.error(
                        "the engine has not ended %g s after it was killed: %s",
                        _KILLED_S,
                        self._why_alive(),
                    )
                    self._supervisor.cancel()
                    await asyncio.wait([self._supervisor])
        self.on_death("The server is shutting down.")
        self._context.destroy(linger=0)

    async def _supervise(self) -> None:
        has_been_up, failures = False, 0
        while not self._closing:
            self._reset()
            self._began_s = asyncio.get_running_loop().time()
            slow = asyncio.create_task(self._report_slow_start(), name="engine-slow-start")
            try:
                reason = await self._run_once()
            except Exception as error:  # no folder, no socket or no process
                reason = f"The engine could not be started: {error}"
            finally:
                slow.cancel()
            if not self._failure:
                self._hung = False  # it exited without reporting why
            self._num_hung += self._hung
            self.on_death(reason)
            has_been_up = has_been_up or self._was_ready
            if self._restarting is not None:
                restarting, self._restarting = self._restarting, None
                restarting.set_result(None)
                if not self._closing:
                    continue
            if self._closing:
                return
            logger.error("%s", reason)
            self._num_lost += 1
            failures = 0 if self._was_ready or self._host_unavailable else failures + 1
            if not (self._restart and has_been_up) or failures >= _MAX_FAILURES:
                self._is_final = True
                self._on_final_death(reason)
                return
            logger.warning("restarting the engine")
            await asyncio.sleep(failures * _BACK_OFF_S)

    async def _report_slow_start(self) -> None:
        """Log that the engine is not ready, until it is."""
        minutes = 0.0
        while True:
            await asyncio.sleep(_SLOW_START_S)
            if self._was_ready:
                return
            minutes += _SLOW_START_S / 60
            logger.warning(
                "the engine is not ready %.0f minutes after its start; large models load for long, "
                "but if it neither computes nor reads, it hangs",
                minutes,
            )

    def _reset(self) -> None:
        """Clear what is known of the last engine."""
        self._failure = ""  # why the engine failed, if the engine or this client has said so
        self._was_ready = self._host_unavailable = False
        # Of the pid of its first heartbeat.
        self._rank_starvation: Callable[[], float] | None = None
        self._rank_heartbeats = (
            HeartbeatMonitor(self._rank_heartbeat_timeout_s, self._rank_starved_s)
            if self._rank_heartbeat_timeout_s
            else None
        )
        self._host_heartbeats: HeartbeatMonitor | None = None

    def _listen(self, stack: AsyncExitStack, endpoints: Endpoints, secret: bytes = b"") -> Receiver:
        """Open the server's end of the connection, until `stack` is closed.

        secret: the secret key of endpoints.server_key.
        """
        push = stack.enter_context(open_socket(self._context, zmq.PUSH))
        self._push = push
        stack.callback(self._disconnect)
        pull = stack.enter_context(open_socket(self._context, zmq.PULL))
        sockets = (push, pull)
        addresses = (endpoints.commands, endpoints.replies)
        for socket, address in zip(sockets, addresses, strict=True):
            if secret:
                socket.curve_server, socket.curve_secretkey = True, secret
            socket.bind(address)
        commands, replies = (socket.get_string(zmq.LAST_ENDPOINT) for socket in sockets)
        bound = Endpoints(commands, replies, endpoints.server_key)
        receiver = Receiver(pull, self._on_frames, bound)
        stack.callback(receiver.close)
        if self._rank_heartbeats is not None:
            failure = f"The engine has not answered for {self._rank_heartbeat_timeout_s:g} s."
            self._kill_on_timeout(stack, self._rank_heartbeats, failure)
        return receiver

    def _kill_on_timeout(
        self, stack: AsyncExitStack, heartbeats: HeartbeatMonitor, failure: str
    ) -> None:
        """Kill the engine when its heartbeats time out, until `stack` is closed.

        Its watchdog ends an engine that hangs; this is for a process whose threads do not run.
        """

        async def watch() -> None:
            await heartbeats.timed_out()
            self._note_failure(failure, hung=True)
            self.on_death(self._failure)  # now: a process with much memory takes long to end
            self._kill()

        stack.push_async_callback(_cancel, asyncio.create_task(watch(), name="engine-watch"))

    def _note_failure(self, reason: str, *, hung: bool) -> None:
        """The first one counts."""
        if not self._failure:
            self._failure, self._hung = reason, hung

    def _rank_starved_s(self) -> float:
        return self._rank_starvation() if self._rank_starvation is not None else 0.0

    def _starvation_clock(self, pid: int, every_s: float) -> Callable[[], float] | None:
        """How to find out for how long the engine could not make progress (StarvationClock); None
        if it is not on this machine.

        pid: on its machine.
        """
        return None

    def _on_frames(self, frames: list[bytes]) -> None:
        message = self._decoder.decode(frames)
        if isinstance(message, Failed):
            self._note_failure(message.message, hung=message.hung)
        if isinstance(message, Ready | Heartbeat):
            of_host = isinstance(message, Heartbeat) and message.host
            if isinstance(message, Heartbeat) and not of_host and self._rank_starvation is None:
                every_s = (self._rank_heartbeat_timeout_s or 0.0) / HEARTBEATS_PER_TIMEOUT
                self._rank_starvation = self._starvation_clock(message.pid, every_s)
            heartbeats = self._host_heartbeats if of_host else self._rank_heartbeats
            if heartbeats is not None:
                heartbeats.seen()
        self.on_reply(message)  # type: ignore[arg-type]

    def _on_ready(self, info: EngineInfo) -> None:
        super()._on_ready(info)
        self._profile = info.profile
        self._start_s = asyncio.get_running_loop().time() - self._began_s

    def _disconnect(self) -> None:
        self._push = None

    def _send_command(self, command: Command) -> None:
        if self._push is None:
            raise EngineDeadError("The engine is not running.")
        # Without a peer ZeroMQ drops the command; the supervisor will soon fail all open requests.
        with contextlib.suppress(zmq.ZMQError):
            self._push.send_multipart(self._encoder.encode(command), zmq.NOBLOCK)


_READABLE = int(zmq.POLLIN)  # without the Python code of a flag's operators
_MESSAGES_PER_CALLBACK = 8
"""Maximum messages to read in one callback, so that the readers of the tokens run in between."""


class Receiver:
    """Reads the messages of an engine, in callbacks of the event loop.

    It does not use zmq.asyncio, whose futures and tasks cost more per step than its messages.
    """

    def __init__(
        self,
        pull: zmq.Socket[bytes],
        on_frames: Callable[[list[bytes]], None],
        endpoints: Endpoints,
    ) -> None:
        """endpoints: as bound, with the actual ports."""
        self.endpoints = endpoints
        self._pull = pull
        self._on_frames = on_frames
        self._loop = asyncio.get_running_loop()
        self._num_read = 0
        self._next_read: asyncio.Handle | None = None
        self._descriptor: int = pull.getsockopt(zmq.FD)  # type: ignore[assignment]
        self._loop.add_reader(self._descriptor, self._read)
        self._read()

    async def drain(self) -> None:
        """Read what an engine sent before it ended."""
        before = -1
        while before < self._num_read:
            before = self._num_read
            await asyncio.sleep(_DRAIN_S)

    def close(self) -> None:
        self._loop.remove_reader(self._descriptor)
        if self._next_read is not None:
            self._next_read.cancel()

    def _read(self) -> None:
        """Read until the socket is empty. ZeroMQ's descriptor becomes readable only once for all
        waiting messages, so this schedules itself while there may be more."""
        self._next_read = None
        for _ in range(_MESSAGES_PER_CALLBACK):
            # Asking costs less than zmq.Again, which would be raised in every step.
            if not int(self._pull.get(zmq.EVENTS)) & _READABLE:
                return
            frames = self._pull.recv_multipart(zmq.NOBLOCK)
            self._num_read += 1
            try:
                self._on_frames(frames)
            except BaseException:  # a bug; later messages are read nevertheless
                self._next_read = self._loop.call_soon(self._read)
                raise
        self._next_read = self._loop.call_soon(self._read)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


_SHOW_S = 0.2
"""How long an engine that hangs while it loads has to say where."""

_GRACE_S, _RANKS_GRACE_S = 5.0, 10.0
"""grace_s of an engine process, and of a launcher with its ranks."""


class ProcessEngineClient(SupervisedClient):
    """Starts, watches and talks to one engine process.

    With config.tp > 1 that process is a launcher, which ends together with its ranks. If torchrun
    has started the ranks, of which the server process is one (`is_rank`), the engine process takes
    its place as rank 0 and cannot be restarted without the others. It may wait for them as long as
    they load, so whether it makes progress is not watched then.
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
        first: EngineProcess | None = None,
    ) -> None:
        """replica: see LaunchSpec.
        first: the first process, started early, of an engine that starts no ranks.
        """
        starts_ranks = config.tp > 1 and not is_rank
        super().__init__(
            restart=restart and not is_rank,
            on_final_death=on_final_death,
            grace_s=_RANKS_GRACE_S if starts_ranks else _GRACE_S,
            rank_heartbeat_timeout_s=config.hang_timeout,
        )
        self._launch = LaunchSpec(
            model_folder=str(files.folder),
            model_name=files.name,
            log_level=log_level,
            config=config,
            profiles=tuple(str(folder) for folder in profiles),
            starts_ranks=starts_ranks,
            replica=replica,
        )
        self._load_timeout_s = 0.0 if is_rank else config.load_timeout
        self._first = first
        self._process: EngineProcess | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine process or the launcher; not None while the engine is alive."""
        return self._process.pid if self._process else None

    def _starvation_clock(self, pid: int, every_s: float) -> Callable[[], float] | None:
        return StarvationClock(pid, every_s)

    def _kill(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _why_alive(self) -> str:
        pid = self.pid
        where = "" if pid is None else _kernel_function(pid)
        return (
            f"process {pid} waits in the kernel{where}. It keeps its memory and its devices until "
            "that ends."
        )

    async def _run_once(self) -> str:
        async with contextlib.AsyncExitStack() as stack:
            process = stack.enter_context(self._next_process())
            # Runs after the callbacks of _listen, so that an engine that is alive has a process.
            stack.callback(setattr, self, "_process", None)
            receiver = self._listen(stack, Endpoints.of(process.folder))
            launch = dataclasses.replace(self._launch, profile_before=self._profile)
            launch.write(process.folder)
            process.launch()
            self._process = process
            if self._load_timeout_s:
                watch = asyncio.create_task(self._watch_load(process.pid), name="engine-load-watch")
                stack.push_async_callback(_cancel, watch)
            if self._closing:
                self._kill()
            code = await process.wait()
            await receiver.drain()
        return self._failure or f"The engine process ended unexpectedly (code {code})."

    def _next_process(self) -> EngineProcess:
        first, self._first = self._first, None
        return first or EngineProcess(*module_command(self._launch.module))

    async def _watch_load(self, pid: int) -> None:
        """Kill an engine that makes no progress before it is ready."""
        watch = LoadWatch.of_process(pid, self._load_timeout_s)
        reason = None
        while reason is None:
            await asyncio.sleep(watch.every_s)
            if self._was_ready:
                return
            # It reads files of each thread of each rank, while other replicas have streams.
            reason = await asyncio.to_thread(watch.check)
        # First, as the signal ends a process that has not got as far as to handle it.
        self._note_failure(reason, hung=True)
        if not self._launch.starts_ranks and self._process is not None:
            self._process.send_signal(SHOW_STACKS)
            await asyncio.sleep(_SHOW_S)
        if self._was_ready:  # the signal has interrupted what it waited for
            self._failure, self._hung = "", False
            return
        self.on_death(self._failure)
        self._kill()


def _kernel_function(pid: int) -> str:
    """ " in NAME", if the kernel tells in which of its functions the process waits."""
    try:
        name = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""
    return f" in {name}" if name.strip("0") else ""
