"""Waiting for a dead engine to come back."""

from __future__ import annotations

import asyncio
import itertools

from bros.core.clock import Clock
from bros.core.interfaces import EngineClient

_LOOK_S = 0.05


class Revival:
    """All who wait for one engine: however many they are, it is looked at as often."""

    def __init__(self, engine: EngineClient, clock: Clock, patience_s: float) -> None:
        """patience_s: how long each of them waits."""
        self._engine = engine
        self._clock = clock
        self._patience_s = patience_s
        self._waiting: dict[asyncio.Future[bool], float] = {}  # until when; all wait equally long
        self._timer: asyncio.TimerHandle | None = None

    async def comes(self) -> bool:
        """True as soon as the engine is alive; False if it does not come back in time."""
        if self._engine.alive:
            return True
        waiter: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._waiting[waiter] = self._clock.now() + self._patience_s
        self._look_later()
        try:
            return await waiter
        finally:
            self._waiting.pop(waiter, None)

    def _look_later(self) -> None:
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look(self) -> None:
        self._timer = None
        alive, now = self._engine.alive, self._clock.now()
        told = [
            waiter
            for waiter, _ in itertools.takewhile(
                lambda item: alive or item[1] <= now, self._waiting.items()
            )
        ]
        for waiter in told:
            del self._waiting[waiter]
            if not waiter.done():
                waiter.set_result(alive)
        self._look_later()
