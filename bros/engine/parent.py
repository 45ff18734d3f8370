"""How a process follows the one that started it: it ends with it, and obeys its signals only."""

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


def end_with_server(folder: Path) -> threading.Event:
    """Exit at once when the server has closed its end of stdin, even from within a library call.

    folder: the folder of the sockets, removed here because a killed server cannot.

    Returns an event that is set when the server has written to stdin.
    """
    # Unbuffered: at exit Python would wait for a thread that blocks in a buffered reader.
    stdin = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)
    written = threading.Event()
    threading.Thread(target=_exit_at_eof, args=(stdin, folder, written), daemon=True).start()
    return written


def _exit_at_eof(stdin: FileIO, folder: Path, written: threading.Event) -> None:
    while stdin.read(1):
        written.set()
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def end_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Have the kernel signal this process when its parent ends. Linux only.

    SIGKILL also ends a process that is stopped or hangs in a library.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def obey_parent_only() -> None:
    """Exit at once on SIGTERM from the parent, even from within a library call. Ignore SIGINT and
    SIGTERM from other processes: they reach the whole process group, and the server decides.

    Call it before other threads start.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    threading.Thread(target=_exit_on_sigterm_of, args=(os.getppid(),), daemon=True).start()


def _exit_on_sigterm_of(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(1)
