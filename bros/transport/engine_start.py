"""Starts engine processes. Imports little: `bros serve` starts the first one before all else."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

from bros.core.errors import ConfigError
from bros.core.loop_thread import call_after
from bros.core.machine import module_command

_DISCARD_S = 1.0
"""How long `discard` waits for a process that it has killed: the kernel may free much memory."""


_LONGEST_SOCKET, _MAX_PATH_BYTES = "/commands", 107 if sys.platform == "linux" else 103


# ---- The folders of servers that were killed, which the next one removes.


_PREFIX = "bros-"


def _lock_name() -> str:
    """Name of the lock of a folder. It names this machine since its start: a file system that
    several machines share may not show one of them the locks of the others. So may a sandbox that
    hides the id of its kernel: there this raises OSError, and no server removes a folder."""
    if sys.platform != "linux":
        return "owner"
    return f"owner-{Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _take_lock(folder: Path) -> BinaryIO:
    """Lock a new folder until the file is closed or this process ends, however it ends."""
    new = folder / "owner.new"
    lock = new.open("xb")
    with contextlib.suppress(OSError):  # without locks or names no server removes the folder
        fcntl.flock(lock, fcntl.LOCK_EX)
        new.rename(folder / _lock_name())  # no server finds the lock before it is held
    return lock


def _remove_left_folders() -> None:
    """Remove the folders of this user whose locks are free."""
    try:
        found = list(Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{_lock_name()}"))
    except OSError:
        return
    for path in found:
        with contextlib.suppress(OSError):
            folder = path.parent.lstat()
            if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.getuid():
                continue
            with path.open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # an OSError if it is held
                shutil.rmtree(path.parent)


class EngineProcess:
    """An engine process, or the launcher of its ranks, and the folder of its launch.json and its
    sockets, which only this user can read. At the end of the block the process is told to exit, and
    the folder is removed; if this process is killed, by the next server that starts.

    A process that is started early imports torch, which takes a second, while this process imports
    a server; docs/decisions/0004 has what that gains:

        bros serve    options | start | import the server | launch.json, launch | ...
        engine                        | import torch      | wait                | load the model
    """

    def __init__(self, *command: str) -> None:
        """Make the folder. command: what runs, before the folder as its last argument; the default
        is the module bros.transport.process. Raises ConfigError if TMPDIR is too long for sockets.
        """
        self._command = command or module_command("bros.transport.process")
        _remove_left_folders()
        self._folder = tempfile.TemporaryDirectory(prefix=_PREFIX)
        if len(os.fsencode(self._folder.name)) + len(_LONGEST_SOCKET) > _MAX_PATH_BYTES:
            where = tempfile.gettempdir()
            self._folder.cleanup()
            raise ConfigError(f"TMPDIR: {where} is too long for the sockets of an engine")
        self._lock = _take_lock(self.folder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return Path(self._folder.name)

    @property
    def pid(self) -> int:
        """Of a process that was started."""
        return self._started.pid

    def start(self) -> None:
        """Start the process early: without a launch.json it waits for `launch`."""
        command = [*self._command, str(self.folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)

    def launch(self) -> None:
        """Tell the process that launch.json is written; start it, if it was not started early."""
        if self._process is None:
            self.start()
            return
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has ended, as `wait` will find
            self._process.stdin.write(b"\n")

    async def wait(self) -> int:
        """Until the process ends; returns its exit code."""
        process, ended = self._started, asyncio.Event()
        call_after(process.wait, ended.set, "engine-wait")
        await ended.wait()
        return process.wait()

    def send_signal(self, number: int) -> None:
        """Nothing happens if the process has ended."""
        self._started.send_signal(number)

    def kill(self) -> None:
        """Nothing happens if the process has ended."""
        self._started.kill()

    def discard(self) -> None:
        """Kill the process, if it was started and still runs, wait for it, and `close`."""
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_DISCARD_S)
        self.close()

    def close(self) -> None:
        """Close the stdin of the process, which exits at once for that, and remove the folder."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._folder.cleanup()
        self._lock.close()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
