"""How many rows may be with the engine, and which waits next."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import Any


class Slots:
    """A semaphore whose size may change, and that lets the smallest key in first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = itertools.count()
        self._waiting: list[tuple[Any, int, asyncio.Future[None]]] = []
        self._admitting = False
        self.used = 0

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        """Who is in stays in; with a lower limit nobody follows until enough have left."""
        self._limit = value
        self._admit()

    async def acquire(self, key: Any) -> None:
        """Wait for a place. Keys are compared with one another; equal ones go in turn."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (key, next(self._count), turn))
        self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was let in just now
                self.release()
            raise

    def release(self) -> None:
        self.used -= 1
        self._admit()

    def _admit(self) -> None:
        """One in each turn of the event loop, so that who comes in may queue for another place
        before the next one is given away."""
        if not self._admitting and self._waiting:
            self._admitting = True
            asyncio.get_running_loop().call_soon(self._admit_one)

    def _admit_one(self) -> None:
        self._admitting = False
        while self._waiting and self.used < self._limit:
            turn = heapq.heappop(self._waiting)[2]
            if not turn.done():
                self.used += 1
                turn.set_result(None)
                self._admit()
                return
