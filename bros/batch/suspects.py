"""Which rows are with the engine together, so that it shows which one it dies of."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

_FEW = 8

MOST_INTERRUPTIONS = 4
"""A row that has come to no answer so many times is given up. The last two times it was alone, for
once the engine may end of something else just then."""


class Company:
    """The more often a row was there when the engine died, the fewer others run beside it.

    After the first time it runs with few other suspects, after the second one alone. Of those that
    were merely beside the culprit, however many it has made suspects, none is there a third time.
    """

    def __init__(self) -> None:
        self._few = asyncio.Semaphore(_FEW)
        self._turn = asyncio.Lock()
        self._loners = self._others = 0
        self._may_enter, self._is_empty = asyncio.Event(), asyncio.Event()
        self._may_enter.set()
        self._is_empty.set()

    @contextlib.asynccontextmanager
    async def admitted(self, interruptions: int) -> AsyncIterator[None]:
        """Wait until a row that was interrupted so many times may run; it does in the block."""
        if interruptions >= 2:
            self._loners += 1
            self._may_enter.clear()
            try:
                async with self._turn:
                    await self._is_empty.wait()
                    yield
            finally:
                self._loners -= 1
                if not self._loners:
                    self._may_enter.set()
            return
        async with self._few if interruptions else contextlib.nullcontext():
            while not self._may_enter.is_set():
                await self._may_enter.wait()
            self._others += 1
            self._is_empty.clear()
            try:
                yield
            finally:
                self._others -= 1
                if not self._others:
                    self._is_empty.set()
