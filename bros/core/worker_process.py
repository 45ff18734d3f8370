"""Processes that do work whose time or memory cannot be bounded from within, one job at a time."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import struct
import subprocess
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

from bros.core.clock import SystemClock
from bros.core.machine import module_command

_NICE = 5
"""Lower priority than the engine's, which may use all cores."""

_CPU_S = struct.Struct("=d")
"""Before each answer: the CPU time that it took."""


ANSWER_S = 30.0
"""Longest time for which a process may neither answer nor read what is sent to it. Its jobs have
bounds of their own, so after that it was stopped or hangs; a busy machine may make those of seconds
take several times as long."""

_TIMEVAL = struct.Struct("@ll")

logger = logging.getLogger(__name__)


class WorkerEndedError(Exception):
    """The process ended without an answer, for example because the kernel ended it."""


class WorkerHungError(WorkerEndedError):
    """The process gave no sign for ANSWER_S, and was ended. Its job may be no reason for that."""


class WorkerClosedError(Exception):
    """The worker was closed, because the server stops."""


class WorkerProcess:
    """Runs `python -m MODULE FD ARGUMENTS...`, which answers on the connection of descriptor FD.

    It is started when it is needed, and again after it has ended or was ended because it hung.
    `ask` and `start` may be called from any thread, by one at a time.

    cpu_s: CPU time that the last `ask` took, that of children of the process included; if the
        process ended without an answer, the time until then, or 0 if it hung.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str] = (),
        *,
        on_hung: Callable[[], None] = lambda: None,
        answer_s: float = ANSWER_S,
    ) -> None:
        """on_hung: called on the thread of `ask` when the process hung. answer_s: see ANSWER_S."""
        self._module = module
        self._on_hung = on_hung
        self._answer_s = answer_s
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._clock = SystemClock()
        self.cpu_s = 0.0

    def ask(self, *parts: bytes) -> bytes:
        """Send the parts of a job, one message each; returns the answer. Raises WorkerEndedError,
        WorkerHungError or WorkerClosedError."""
        self.cpu_s = 0.0
        connection = self._connect()
        begun_s = self._clock.now()
        try:
            for part in parts:
                connection.send_bytes(part)
            answer = connection.recv_bytes()
        except BlockingIOError as error:
            logger.error("%s gave no sign for %g s; it is ended", self._module, self._answer_s)
            self._end()
            self._on_hung()
            raise WorkerHungError(f"the process gave no sign for {self._answer_s:g} s") from error
        except (EOFError, OSError) as error:
            self.cpu_s = self._clock.now() - begun_s
            self._end()
            raise WorkerEndedError("the process ended") from error
        (self.cpu_s,) = _CPU_S.unpack_from(answer)
        return answer[_CPU_S.size :]

    def start(self) -> None:
        """Start the process if it does not run, so that the next `ask` need not. Does not wait for
        it to be ready."""
        with contextlib.suppress(WorkerClosedError, OSError):  # `ask` will say so
            self._connect()

    def close(self) -> None:
        """End the process, and with it a running `ask`."""
        self._closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _connect(self) -> Connection:
        """The connection to the process, which is started if it does not run."""
        if self._closed:
            raise WorkerClosedError("the server stops")
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._connection is None:
            ours, theirs = multiprocessing.Pipe()
            _set_timeout(ours, self._answer_s)
            with theirs:
                number = theirs.fileno()
                command = module_command(self._module, str(number), *self._arguments)
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, pass_fds=(number,)
                )
            self._connection = ours
        return self._connection

    def _end(self) -> None:
        assert self._process is not None and self._connection is not None
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._process = self._connection = None


def _set_timeout(connection: Connection, seconds: float) -> None:
    """Let reads and writes that make no progress for `seconds` fail with BlockingIOError."""
    value = _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            same.setsockopt(socket.SOL_SOCKET, option, value)


# ---- In the process.


def settle(descriptor: int) -> Connection:
    """What a worker process does first; returns its connection to the server."""
    import resource  # late: not on every system, and only needed here

    # Both reach the whole process group of a terminal; the server decides when to end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.nice(_NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    return Connection(descriptor)


def answer_jobs(connection: Connection, parts: int, answer: Callable[..., bytes]) -> None:
    """Answer until the server closes its end. parts: of each job, the arguments of `answer`."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            job = [connection.recv_bytes() for _ in range(parts)]
            before_s = cpu_used_s()
            content = answer(*job)
            connection.send_bytes(_CPU_S.pack(cpu_used_s() - before_s) + content)


def cpu_used_s() -> float:
    """CPU time that this process and its ended children have used."""
    import resource

    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(used.ru_utime + used.ru_stime for used in both)
