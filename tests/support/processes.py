"""Processes that others have started, as the system sees them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

from support.server_process import wait_until

LOOPBACK = "0100007F"
_LISTEN = "0A"


def exists(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def stop(pid: int) -> None:
    """Suspend a process; returns when none of its threads runs any more."""
    os.kill(pid, signal.SIGSTOP)
    states = [f"/proc/{pid}/task/{task.name}/stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    wait_until(
        lambda: all(Path(s).read_text().rsplit(")", 1)[1].split()[0] == "T" for s in states),
        5.0,
        f"{pid} is stopped",
    )


def children(pid: int) -> list[int]:
    """Those that it has started, and that run."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            found += [int(child) for child in task.read_text().split()]
    return [child for child in found if exists(child)]


def cpu_s(pid: int) -> float:
    """Processor time so far of a process and of those of its descendants that were waited for."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int]:
    """Its children, and theirs."""
    found = []
    for child in children(pid):
        found += [child, *descendants(child)]
    return found


def ranks_below(pid: int) -> dict[int, int]:
    """rank -> process id, of the engine's ranks that a launcher below `pid` has started."""
    found = {}
    for child in descendants(pid):
        environment = Path(f"/proc/{child}/environ").read_bytes().decode()
        command = Path(f"/proc/{child}/cmdline").read_bytes().decode()
        rank = re.search(r"(?:^|\0)RANK=(\d+)", environment)
        if rank and "bros.transport.process" in command:
            found[int(rank[1])] = child
    return dict(sorted(found.items()))


def engine_of_replica(server: int, number: int) -> int:
    """The engine process of a replica of a server, as it was told when it was started."""
    for pid in children(server):
        launch = Path(Path(f"/proc/{pid}/cmdline").read_text().split("\0")[-2]) / "launch.json"
        # A server has other processes, too.
        if launch.exists() and json.loads(launch.read_text())["replica"] == number:
            return pid
    raise AssertionError(f"replica {number} does not run")


def open_files(pid: int) -> Counter[str]:
    """What each descriptor of a process is of -> how many there are of it."""
    found: Counter[str] = Counter()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, as that of the folder itself
            found[os.readlink(descriptor)] += 1
    return found


def listening_at(pids: list[int]) -> set[str]:
    """The addresses at which they take TCP connections, as the system writes them."""
    sockets = set(itertools.chain.from_iterable(map(open_files, pids)))
    found = set()
    for line in [
        line
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for line in Path(table).read_text().splitlines()[1:]
    ]:
        fields = line.split()
        if fields[3] == _LISTEN and f"socket:[{fields[9]}]" in sockets:
            found.add(fields[1].split(":")[0])
    return found


def wait_until_gone(pids: list[int], timeout_s: float) -> None:
    """Raises AssertionError naming those that are left."""
    wait_until(
        lambda: not any(map(exists, pids)),
        timeout_s,
        f"all of {pids} have ended; {[pid for pid in pids if exists(pid)]} are left",
    )
