"""Processes that do work whose time or memory cannot be bounded from within, one job at a time."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection


class WorkerEndedError(Exception):
    """The process ended without an answer, for example because the kernel ended it."""


class WorkerClosedError(Exception):
    """The worker was closed, because the server stops."""


class WorkerProcess:
    """Runs `python -m MODULE FD ARGUMENTS...`, which answers on the connection of descriptor FD.

    It is started when it is needed, and again after it has ended. `ask` may be called from any
    thread, by one at a time.
    """

    def __init__(self, module: str, arguments: Sequence[str] = ()) -> None:
        self._module = module
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False

    def ask(self, *parts: bytes) -> bytes:
        """Send the parts of a job, one message each; returns the answer. Raises WorkerEndedError
        or WorkerClosedError."""
        connection = self._connect()
        try:
            for part in parts:
                connection.send_bytes(part)
            return connection.recv_bytes()
        except (EOFError, OSError) as error:
            self._end()
            raise WorkerEndedError("the process ended") from error

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
            with theirs:
                number = theirs.fileno()
                command = [sys.executable, "-m", self._module, str(number), *self._arguments]
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
