"""What other clients of a server see of an attack: the gaps between the tokens of their streams."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import httpx

from support.processes import cpu_s, descendants

STREAMS = 2
"""Streams that are read at once: one of them is always between two tokens."""


class TokenGaps:
    """Reads streams in a process of its own, which does nothing else."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def take(self) -> list[float]:
        """The gaps that ended since the last call, in seconds. Raises AssertionError if a stream
        has failed."""
        self._connection.send("take")
        found = self._connection.recv()
        assert isinstance(found, list), found
        return found


@contextmanager
def reading_streams(url: str, max_tokens: int) -> Iterator[TokenGaps]:
    """Streams of so many tokens, one after the other, until the end of the block."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_read, args=(url, max_tokens, theirs), daemon=True)
    process.start()
    try:
        yield TokenGaps(ours)
    finally:
        process.kill()
        process.join()


def _read(url: str, max_tokens: int, connection: Connection) -> None:
    gc.disable()  # a collection would count as a gap
    asyncio.run(_read_streams(url, max_tokens, connection))


async def _read_streams(url: str, max_tokens: int, connection: Connection) -> None:
    gaps: list[float] = []
    failures: list[str] = []

    def answer() -> None:
        connection.recv()
        connection.send(failures[0] if failures else gaps.copy())
        gaps.clear()

    asyncio.get_running_loop().add_reader(connection.fileno(), answer)
    body = {"prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}

    async def read(http: httpx.AsyncClient) -> None:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            last_s = None
            async for line in response.aiter_lines():
                if not line:
                    continue
                now_s = time.perf_counter()
                if '"error"' in line:
                    failures.append(line)
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s
        if response.status_code != 200:
            failures.append(f"status {response.status_code}")

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
