"""Connections that a client holds open without ever sending a whole request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"

SLOW_HEADERS = (_HEAD, b"X: 1\r\n")
SLOW_BODY = (_HEAD + b"Content-Length: 100000\r\n\r\n", b" ")
"""What such a client sends first, and then again and again."""


@dataclass(frozen=True, slots=True)
class Held:
    """count: number of connections. first: what each sends first. more: what it sends again and
    again."""

    count: int
    first: bytes = b""
    more: bytes = b""


@contextlib.asynccontextmanager
async def holding(url: httpx.URL, held: Held, every_s: float) -> AsyncIterator[None]:
    """Hold connections until the end of the block, which begins when all were opened.

    every_s: seconds after which each sends more, and after which those are opened again that the
        server has closed.
    """
    transports: list[asyncio.Transport] = []

    async def open_missing(within_s: float) -> None:
        transports[:] = [each for each in transports if not each.is_closing()]
        while len(transports) < held.count:
            try:
                async with asyncio.timeout(within_s):
                    transport, _ = await asyncio.get_running_loop().create_connection(
                        asyncio.Protocol, url.host, url.port
                    )
            except (OSError, TimeoutError):
                return
            transport.write(held.first)
            transports.append(transport)

    async def keep() -> None:
        while True:
            await asyncio.sleep(every_s)
            for transport in transports:
                transport.write(held.more)
            await open_missing(1.0)

    await open_missing(30.0)  # on a busy machine this process, a nice one, gets little time
    assert len(transports) == held.count, f"only {len(transports)} connections could be opened"
    keeping = asyncio.create_task(keep())
    try:
        yield
    finally:
        keeping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await keeping
        for transport in transports:
            transport.abort()
