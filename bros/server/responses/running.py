"""Background responses, for those who stream them: those that this process runs, and others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TYPE_CHECKING

from bros.batch.objects import StoreUnavailableError
from bros.batch.responses import StoredResponse

if TYPE_CHECKING:  # it imports the state, of which these are a part
    from bros.server.responses.events import Events

    EventsAfter = Callable[[int], Events]


logger = logging.getLogger(__name__)

_WOKEN = 100
"""Followers that go on in one turn of the event loop: each sends something."""


class Followers:
    """Those who wait for changes. They go on some at a time, so that others have turns between.

    version: how many changes there have been.
    """

    def __init__(self) -> None:
        self.version = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def changed(self, since: int) -> None:
        """Wait for a change after the version `since`."""
        if self.version != since:
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            raise

    def notify(self) -> None:
        """There is a change."""
        self.version += 1
        waiting, self._waiting = self._waiting, []
        if waiting:
            self._wake(waiting, 0)

    def _wake(self, waiting: list[asyncio.Future[None]], begin: int) -> None:
        end = begin + _WOKEN
        for each in waiting[begin:end]:
            if not each.done():
                each.set_result(None)
        if end < len(waiting):
            asyncio.get_running_loop().call_soon(self._wake, waiting, end)


class RunningResponse(Followers):
    """What a response that this process runs has written.

    over: it runs no longer.
    """

    def __init__(self, make: EventsAfter) -> None:
        """make: makes the events of its output until now."""
        super().__init__()
        self._make = make
        self._shared: dict[int, Events] = {}
        self.over = False

    def events(self, after: int) -> Events:
        """Those from the one after `after` on. Followers that are equally far share them."""
        found = self._shared.get(after)
        if found is None:
            found = self._make(after)
            if found.large is None:  # else each reads the pieces for itself
                self._shared[after] = found
        return found

    def notify(self) -> None:
        """There is more output, or it is over."""
        self._shared.clear()
        super().notify()


class RunningResponses:
    """The background responses that this process runs, by id."""

    def __init__(self) -> None:
        self._running: dict[str, RunningResponse] = {}

    def get(self, response_id: str) -> RunningResponse | None:
        return self._running.get(response_id)

    @contextlib.contextmanager
    def shown(self, response_id: str, make: EventsAfter) -> Iterator[RunningResponse]:
        """Let others read what a response has written while the block lasts. make: as of
        RunningResponse."""
        running = self._running[response_id] = RunningResponse(make)
        try:
            yield running
        finally:
            del self._running[response_id]
            running.over = True
            running.notify()


LOOK_EVERY_S = 0.25
"""How often a response that another process may run is looked for in the store."""

Look = Callable[[], Awaitable[StoredResponse]]


class WatchedResponse(Followers):
    """A stored response that some follow, which is read for all of them together."""

    def __init__(self) -> None:
        super().__init__()
        self.num_followers = 0
        self._found: StoredResponse | None = None
        self._failure: Exception | None = None

    async def stored(self) -> StoredResponse:
        """The response as it was read last. Raises what reading it has raised."""
        while self._failure is None and self._found is None:
            await self.changed(self.version)
        if self._failure is not None:
            raise self._failure
        assert self._found is not None
        return self._found

    async def watch(self, look: Look, runs_here: Callable[[], bool]) -> None:
        """Read it until it has ended. runs_here: whether this process runs it."""
        try:
            while True:
                try:
                    found = await look()
                except StoreUnavailableError as error:
                    logger.warning("a followed response is read again: %s", error)
                    await asyncio.sleep(LOOK_EVERY_S)
                    continue
                before, self._found = self._found, found
                if before is None or found.status is not before.status or runs_here():
                    self.notify()
                if found.status.is_final:
                    return
                await asyncio.sleep(LOOK_EVERY_S)
        except Exception as error:
            self._failure = error
            self.notify()


class WatchedResponses:
    """The stored responses that some follow, by tenant and id."""

    def __init__(self) -> None:
        self._watched: dict[tuple[str, str], tuple[WatchedResponse, asyncio.Task[None]]] = {}

    @contextlib.contextmanager
    def followed(
        self, tenant: str, response_id: str, look: Look, runs_here: Callable[[], bool]
    ) -> Iterator[WatchedResponse]:
        """Follow a response while the block lasts. look, runs_here: see WatchedResponse.watch."""
        key = tenant, response_id
        if key not in self._watched:
            new = WatchedResponse()
            self._watched[key] = new, asyncio.ensure_future(new.watch(look, runs_here))
        watched, task = self._watched[key]
        watched.num_followers += 1
        try:
            yield watched
        finally:
            watched.num_followers -= 1
            if not watched.num_followers:
                del self._watched[key]
                task.cancel()
