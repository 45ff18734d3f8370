"""Work that ends early when nobody waits for it any more, or when the server stops."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from bros.server.errors import ServerStoppingError

T = TypeVar("T")


async def run_interruptible(
    work: Coroutine[Any, Any, T], receive: Receive, stopping: asyncio.Event
) -> T:
    """Run `work` until it is done, the client has left or `stopping` is set.

    The request's body must have been read before. In the two latter cases `work` is cancelled
    and waited for, then ClientDisconnect or ServerStoppingError is raised.
    """
    job = asyncio.ensure_future(work)
    left = asyncio.ensure_future(_disconnected(receive))
    stopped = asyncio.ensure_future(stopping.wait())
    watchers = (left, stopped)
    try:
        await asyncio.wait((job, *watchers), return_when=asyncio.FIRST_COMPLETED)
        if job.done():
            return job.result()
        if left.done():
            left.result()
            raise ClientDisconnect()
        raise ServerStoppingError("The server is shutting down.")
    finally:
        for task in (job, *watchers):
            task.cancel()
        await asyncio.gather(job, *watchers, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
