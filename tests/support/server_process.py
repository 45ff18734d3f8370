"""`bros serve` as users run it: a process of its own, on a free port."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

READY = re.compile(r"bros is ready at (http://\S+)")

HTTP = httpx.Client(verify=False, timeout=60, limits=httpx.Limits(max_keepalive_connections=0))
"""For requests in a loop: httpx.get would read the certificates of the system for each one, which
takes 25 ms. It keeps no connections, because servers come and go, and waits for as long as other
tests may keep the cores busy."""


class ServerProcess:
    """A running server; everything it printed is in `output`."""

    def __init__(self, *arguments: str, launcher: Sequence[str] = ()) -> None:
        """launcher: arguments of Python that come before `-m bros`."""
        command = [sys.executable, *launcher, "-m", "bros", "serve", "--port", "0", *arguments]
        self._store = tempfile.TemporaryDirectory(prefix="bros-")
        if "--data-dir" not in arguments and "--store" not in arguments:
            command += ["--store", self._store.name]  # not the user's, whose jobs it would run
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.output = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        """Waits until the server is ready; raises AssertionError with its output if it ends."""
        assert self._ready.wait(timeout=240), f"not ready after four minutes:\n{self.output}"
        found = READY.search(self.output)
        assert found, f"the server did not start:\n{self.output}"
        return found[1]

    @property
    def engine_pid(self) -> int:
        """The process id of its only child."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        (pid,) = children.read_text().split()
        return int(pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> int:
        """Its exit status."""
        return self._process.wait(timeout=timeout_s)

    def stop(self) -> int:
        """Ctrl-C, and wait; returns the exit status."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
        try:
            return self._process.wait(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._reader.join()
            if self._process.stdout:
                self._process.stdout.close()
            self._store.cleanup()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.output += line
            if READY.search(line):
                self._ready.set()
        self._ready.set()


@contextlib.contextmanager
def running_server(*arguments: str, launcher: Sequence[str] = ()) -> Iterator[ServerProcess]:
    """A server that is stopped at the end of the block."""
    server = ServerProcess(*arguments, launcher=launcher)
    try:
        yield server
    finally:
        server.stop()


_FEW_DESCRIPTORS = """
import resource, runpy, sys
number = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))
assert sys.argv[2:4] == ["-m", "bros"]
sys.argv = ["bros", *sys.argv[4:]]
runpy.run_module("bros", run_name="__main__", alter_sys=True)
"""


def few_descriptors(number: int) -> list[str]:
    """The launcher of a server that may have so many descriptors."""
    return ["-c", _FEW_DESCRIPTORS, str(number)]


def rss_mib(pid: int) -> float:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found
    return int(found[1]) / 1024


def wait_until(condition: object, timeout_s: float, what: str) -> float:
    """Poll `condition()` until it is true; returns the seconds it took."""
    assert callable(condition)
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - began
