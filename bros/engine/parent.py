"""What the process that started this one may do with it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
from io import FileIO
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def end_with_server(folder: Path) -> None:
    """End this process once no process holds the other end of stdin, whatever it is doing then.

    folder: of the sockets, which a server that was killed had no time to remove.
    """
    # Unbuffered: a thread that waits in a buffered reader cannot be left behind at exit.
    stdin = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    threading.Thread(target=_wait_for_end, args=(stdin, folder), daemon=True).start()


def _wait_for_end(stdin: FileIO, folder: Path) -> None:
    while stdin.read(1):
        pass  # nothing is said there
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel send this process a signal when its parent ends. Linux only.

    That reaches a process that is stopped, or that hangs in a library, if it is SIGKILL.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def obey_parent_only() -> None:
    """SIGTERM of the parent ends this process at once, also within a library. From other processes
    SIGTERM and SIGINT do nothing: they reach whole groups of processes, and the server decides.

    To be called before there are other threads.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_wait_for_order, args=(os.getppid(),), daemon=True).start()


def _wait_for_order(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(1)
