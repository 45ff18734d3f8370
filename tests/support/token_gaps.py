"""What other clients of a server see of an attack: the gaps between the tokens of their streams,
and how much of them the machine is to blame for."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import operator
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from support.processes import cpu_s, descendants

STREAMS = 2
"""Streams that are read at once: one of them is always between two tokens."""


TEXT_TOKEN = "66"
"""The id of "a" in the byte-level tokenizer of tiny_tokenizer.py. Streams generate nothing else: a
token without text, such as half a character, sends nothing, so that several gaps would look like
one."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Between two tokens of a stream.

    gap_s: how long it took, in seconds.
    queued_s: for how long a thread between the model and the reader could have run meanwhile, but
        others had the cores: the longest time of those that compute and send tokens, and of the
        reader itself.
    """

    gap_s: float
    queued_s: float


class TokenGaps:
    """Reads streams in a process of its own, which does nothing else."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take(self) -> list[Gap]:
        """The gaps that ended since the last call. Raises AssertionError if a stream has failed."""
        self._connection.send("take")
        found = self._connection.recv()
        assert isinstance(found, list), found
        return found


@contextmanager
def reading_streams(url: str, max_tokens: int, pids: Sequence[int]) -> Iterator[TokenGaps]:
    """Streams of so many tokens, one after the other, until the end of the block.

    pids: the processes of the server and its engine.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(url, max_tokens, pids, theirs), daemon=True)
    process.start()
    try:
        yield TokenGaps(ours)
    finally:
        process.kill()
        process.join()


class _QueuedTime:
    """How long the main threads of processes, their threads of ZeroMQ and this thread have waited
    for a core so far."""

    def __init__(self, pids: Sequence[int]) -> None:
        tasks = [Path("/proc/thread-self")]
        for pid in pids:
            for task in Path(f"/proc/{pid}/task").iterdir():
                if task.name == str(pid) or (task / "comm").read_text().startswith("ZMQ"):
                    tasks.append(task)
        self._files = [os.open(task / "schedstat", os.O_RDONLY) for task in tasks]

    def of_each_ns(self) -> list[int]:
        return [int(os.pread(file, 64, 0).split()[1]) for file in self._files]


def _read(url: str, max_tokens: int, pids: Sequence[int], connection: Connection) -> None:
    gc.disable()  # a collection would count as a gap
    asyncio.run(_read_streams(url, max_tokens, _QueuedTime(pids), connection))


async def _read_streams(
    url: str, max_tokens: int, queued: _QueuedTime, connection: Connection
) -> None:
    gaps: list[Gap] = []
    failures: list[str] = []

    def answer() -> None:
        connection.recv()
        connection.send(failures[0] if failures else gaps.copy())
        gaps.clear()

    asyncio.get_running_loop().add_reader(connection.fileno(), answer)
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body["logit_bias"] = {TEXT_TOKEN: 100}

    async def read(http: httpx.AsyncClient) -> None:
        num_chars = 0
        async with http.stream("POST", "/v1/completions", json=body) as response:
            last: tuple[float, list[int]] | None = None
            async for line in response.aiter_lines():
                if not line:
                    continue
                now = time.perf_counter(), queued.of_each_ns()
                if '"error"' in line:
                    failures.append(line)
                if last is not None:
                    queued_ns = max(map(operator.sub, now[1], last[1]))
                    gaps.append(Gap(now[0] - last[0], queued_ns / 1e9))
                last = now
                num_chars += len(line.partition('"text":"')[2].partition('"')[0])
        if response.status_code != 200:
            failures.append(f"status {response.status_code}")
        elif num_chars != max_tokens:
            failures.append(f"{num_chars} characters of {max_tokens} tokens")

    async def read_for_ever() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:
            while True:
                await read(http)

    await asyncio.gather(*(read_for_ever() for _ in range(STREAMS)))


class OtherLoad:
    """How much of the machine processes use that this one has not started."""

    def __init__(self) -> None:
        self._begun_s, self._begun = time.monotonic(), self._seconds()

    def share(self) -> float:
        """Of the time of all cores, since this was made; at least 0. Other machines on the same
        host count, too."""
        passed_s = (time.monotonic() - self._begun_s) * (os.cpu_count() or 1)
        machine_s, own_s = (
            now - before for now, before in zip(self._seconds(), self._begun, strict=True)
        )
        return max(0.0, (machine_s - own_s) / passed_s)

    @staticmethod
    def _seconds() -> tuple[float, float]:
        """Processor time so far of the machine; and of this process and its descendants."""
        fields = Path("/proc/stat").read_text().split(maxsplit=9)[1:9]
        user, nice, system, _, _, irq, softirq, steal = map(int, fields)
        busy = user + nice + system + irq + softirq + steal
        own_s = cpu_s(os.getpid())
        for pid in descendants(os.getpid()):
            try:
                own_s += cpu_s(pid)
            except OSError:
                continue  # it has ended, and counts where it was waited for
        return busy / os.sysconf("SC_CLK_TCK"), own_s
