"""The background responses that this process runs, for those who stream them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports the state, of which these are a part
    from bros.server.responses.events import LiveResponse


class RunningResponse:
    """What a response that this process runs has written.

    over: it runs no longer.
    """

    def __init__(self, so_far: Callable[[], LiveResponse]) -> None:
        """so_far: the response with its output until now."""
        self.so_far = so_far
        self._waiting: list[asyncio.Future[None]] = []
        self.over = False

    async def changed(self) -> None:
        """Wait for more output, or the end."""
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        await waiting

    def notify(self) -> None:
        """There is more output, or it is over."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            if not each.done():
                each.set_result(None)


class RunningResponses:
    """The background responses that this process runs, by id."""

    def __init__(self) -> None:
        self._running: dict[str, RunningResponse] = {}

    def get(self, response_id: str) -> RunningResponse | None:
        return self._running.get(response_id)

    @contextlib.contextmanager
    def shown(
        self, response_id: str, so_far: Callable[[], LiveResponse]
    ) -> Iterator[RunningResponse]:
        """Let others read what a response has written while the block lasts."""
        running = self._running[response_id] = RunningResponse(so_far)
        try:
            yield running
        finally:
            del self._running[response_id]
            running.over = True
            running.notify()
