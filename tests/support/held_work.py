"""Blocking work that a test holds."""

from __future__ import annotations

import asyncio
import threading


class Held:
    """Work on another thread that runs until it is let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._go = threading.Event()

    def __call__(self) -> int:
        self._loop.call_soon_threadsafe(self.begun.set)
        assert self._go.wait(60.0), "the test did not let it go"
        return threading.get_ident()

    def let_go(self) -> None:
        self._go.set()
