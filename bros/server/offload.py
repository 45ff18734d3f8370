"""Work that would hold up every stream is done on a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

from bros.server.state import ServerState

T = TypeVar("T")

_INLINE_SIZE = 2000
"""Less takes under a millisecond or so, which is less than going to a thread is worth."""


async def run(state: ServerState, work: Callable[[], T], size: int) -> T:
    """Do `work`, on a thread if it is large. size: characters or tokens it goes through."""
    if size <= _INLINE_SIZE:
        return work()
    return await anyio.to_thread.run_sync(work, abandon_on_cancel=True, limiter=state.threads)
