"""Spreads the work of many requests over turns of the event loop.

    400 requests at once    without    |turn: all of them, 130 ms .................. |turn
                            with       |1 ms|1 ms|1 ms|1 ms|1 ms| ...

asyncio runs everything that is ready in one turn, and between two turns it looks for what has
arrived. Each request is small work; many that arrive, end or lose their client in one turn are long
work, and on a busy machine they take several times as long. So what a request does without waiting
begins with `LoopTurns.begin`. What has arrived on connections is parsed by `SpreadCalls`, since it
is not known yet whose it is.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Hashable

from bros.core.clock import thread_cpu_s

MAX_TURN_S = 0.001
"""CPU time of a turn after which no more work begins in it."""

MAX_CALLS_S = 0.004
"""The same of `SpreadCalls`. A flood whose parsing takes 1 s keeps others of the same owner waiting
for it, and all the longer the more else there is to do in a turn."""

_MAX_WOKEN = 8
"""Work that begins in one turn of that which has waited. How long it takes is not known before."""


class LoopTurns:
    """Decides when small work of the event loop may begin. For one event loop.

    Work begins at once if its turn has time left and no other work of its owner waits. The owners
    that wait begin one after the other, and each of them with what has waited longest.
    """

    def __init__(self, cpu_s: Callable[[], float] = thread_cpu_s) -> None:
        """cpu_s: CPU time of the loop's thread, in seconds. It and not the time counts, because a
        loop that waits for a core or for the interpreter has done nothing meanwhile."""
        self._cpu_s = cpu_s
        self._begun_s: float | None = None  # when work first began in this turn
        self._count = 0  # work that has begun in it
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def begin(self, owner: Hashable) -> None:
        """Wait until work of an owner may begin, which then runs until it waits for something."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            assert self._loop is None or self._loop.is_closed(), "it is for one event loop"
            self._loop, self._begun_s = loop, None
            self._waiting.clear()
        if owner not in self._waiting:
            if self._begun_s is None:
                self._begun_s, self._count = self._cpu_s(), 1
                loop.call_soon(self._new_turn)
                return
            if self._cpu_s() - self._begun_s < MAX_TURN_S:
                self._count += 1
                return
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _new_turn(self) -> None:
        """Let as much work begin as would have taken MAX_TURN_S in the last turn; at least one."""
        if not self._waiting:
            self._begun_s = None
            return
        assert self._begun_s is not None
        now_s = self._cpu_s()
        used_s = now_s - self._begun_s
        most = int(self._count * MAX_TURN_S / used_s) if used_s > 0 else _MAX_WOKEN
        self._begun_s, self._count = now_s, 0
        while self._waiting and self._count < min(max(most, 1), _MAX_WOKEN):
            self._count += self._wake()
        # After those it has woken, so that it sees what they took.
        asyncio.get_running_loop().call_soon(self._new_turn)

    def _wake(self) -> bool:
        """Let the work begin whose turn it is. Returns whether any of its owner still waited."""
        owner = next(iter(self._waiting))
        turns = self._waiting.pop(owner)
        while turns:
            turn = turns.popleft()
            if not turn.done():  # else its caller was cancelled
                turn.set_result(None)
                if turns:
                    self._waiting[owner] = turns  # behind the others
                return True
        return False


class SpreadCalls:
    """Makes calls, such as those that parse what clients have sent: at once while the turn of the
    event loop has time left for them, else in later turns. Those of one owner are made in order;
    the owners take turns. For one event loop."""

    def __init__(self, cpu_s: Callable[[], float] = thread_cpu_s) -> None:
        """cpu_s: as for LoopTurns."""
        self._cpu_s = cpu_s
        self._begun_s: float | None = None  # when the first call of this turn began
        self._waiting: dict[Hashable, deque[Callable[[], None]]] = {}
        # Else calls would see the context variables of the client whose call was the first.
        self._context = contextvars.copy_context()

    def make(self, owner: Hashable, call: Callable[[], None]) -> None:
        """Make a call now or later. It must not wait."""
        if self._begun_s is None:
            self._begun_s = self._cpu_s()
            self._call_soon()
        elif owner in self._waiting or self._cpu_s() - self._begun_s >= MAX_CALLS_S:
            self._waiting.setdefault(owner, deque()).append(call)
            return
        call()

    def _call_soon(self) -> None:
        asyncio.get_running_loop().call_soon(self._new_turn, context=self._context)

    def _new_turn(self) -> None:
        """Make as many calls as take MAX_CALLS_S; at least one."""
        if not self._waiting:
            self._begun_s = None
            return
        self._call_soon()  # first, as a call may fail
        self._begun_s = self._cpu_s()
        while self._waiting:
            owner = next(iter(self._waiting))
            calls = self._waiting.pop(owner)
            call = calls.popleft()
            if calls:
                self._waiting[owner] = calls  # behind the others
            call()
            if self._cpu_s() - self._begun_s >= MAX_CALLS_S:
                return
