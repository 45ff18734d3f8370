"""What work of batches waits for before it begins.

```
 input file ──▶ ValidationTurns ─▶ check_input
 row ─▶ RowLimiter ─▶ SuspectIsolation ─▶ engine ─▶ outcome ─▶ ByteBudget ─▶ store
```
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any
from weakref import WeakValueDictionary

from bros.batch.rows import CheckedInput, Checking
from bros.core.clock import Clock
from bros.core.fair import FairGate

# ---- How many rows the engine has at a time, and which row is next.


class RowLimiter:
    """A priority semaphore: the tenant with the fewest rows is admitted first, and of its rows
    that with the smallest key. Its limit can change.

    So every tenant has rows in the engine, which divides its time between tenants that wait.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._count = itertools.count()
        self._waiting: dict[str, list[tuple[Any, int, asyncio.Future[None]]]] = {}
        self._used: Counter[str] = Counter()
        self._admitting = False
        self.used = 0

    @property
    def limit(self) -> int:
        return self._limit

    @limit.setter
    def limit(self, value: int) -> None:
        """If more rows run than a lower limit allows, none is interrupted, and none starts until
        enough have ended."""
        self._limit = value
        self._admit()

    @property
    def waiting(self) -> int:
        """How many wait for admission: at most one row per batch, and background responses."""
        own = itertools.chain.from_iterable(self._waiting.values())
        return sum(not admitted.done() for _, _, admitted in own)

    async def acquire(self, key: Any, tenant: str = "") -> None:
        """Wait for admission. Keys must be comparable; equal keys are admitted in FIFO order."""
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        own = self._waiting.setdefault(tenant, [])
        heapq.heappush(own, (key, next(self._count), admitted))
        self._admit()
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():  # it was admitted just now
                self.release(tenant)
            raise

    def release(self, tenant: str = "") -> None:
        self.used -= 1
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]
        self._admit()

    def _place(self, tenant: str) -> tuple[int, Any, int]:
        key, number, _ = self._waiting[tenant][0]
        return self._used[tenant], key, number

    def _admit(self) -> None:
        """Admit one row per iteration of the event loop, so that the admitted task can queue its
        next row before the next place is given away."""
        if not self._admitting and self._waiting:
            self._admitting = True
            asyncio.get_running_loop().call_soon(self._admit_one)

    def _admit_one(self) -> None:
        self._admitting = False
        while self._waiting and self.used < self._limit:
            tenant = min(self._waiting, key=self._place)
            admitted = heapq.heappop(self._waiting[tenant])[2]
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not admitted.done():
                self.used += 1
                self._used[tenant] += 1
                admitted.set_result(None)
                self._admit()
                return


# ---- Finding the row that crashes the engine: suspects run with fewer and fewer other rows.


_MAX_SUSPECTS = 8
"""Rows with one interruption that run at a time."""

MAX_ATTEMPTS = 4
"""A row fails after this many interrupted attempts. The last two run alone: two, because an
unrelated engine failure may have interrupted the first of them."""


class SuspectIsolation:
    """The more often a row was running when the engine died, the fewer rows run beside it.

    | interruptions | runs beside |
    |---|---|
    | 0 | any rows |
    | 1 | any rows, at most `_MAX_SUSPECTS` - 1 of them interrupted once |
    | 2 or more | no row |

    So a row that merely ran beside the one that crashes the engine is interrupted at most twice.
    """

    def __init__(self) -> None:
        self._suspects = asyncio.Semaphore(_MAX_SUSPECTS)
        self._one_at_a_time = asyncio.Lock()
        self._num_alone = self._num_others = 0
        self._may_enter, self._is_empty = asyncio.Event(), asyncio.Event()
        self._may_enter.set()
        self._is_empty.set()

    @contextlib.asynccontextmanager
    async def admitted(self, interruptions: int) -> AsyncIterator[None]:
        """Run the block when a row with this many interruptions may run."""
        if interruptions >= 2:
            self._num_alone += 1
            self._may_enter.clear()
            try:
                async with self._one_at_a_time:
                    await self._is_empty.wait()
                    yield
            finally:
                self._num_alone -= 1
                if not self._num_alone:
                    self._may_enter.set()
            return
        async with self._suspects if interruptions else contextlib.nullcontext():
            while not self._may_enter.is_set():
                await self._may_enter.wait()
            self._num_others += 1
            self._is_empty.clear()
            try:
                yield
            finally:
                self._num_others -= 1
                if not self._num_others:
                    self._is_empty.set()


# ---- Which input file is validated next.


_TURN_S = 0.25
"""How long the file of a tenant is validated before that of another one has its turn. One row may
take longer, if it has a grammar."""


class ValidationTurns:
    """Validates input files on a thread, in turns of tenants: a file of 50,000 rows with slow
    grammars takes hours.

    Of each tenant one file is validated at a time, since what is known of a file takes memory.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._gate = FairGate(1, 1)
        self._own: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    async def run(self, tenant: str, checking: Checking) -> CheckedInput:
        """The result of `checking`. If the call is cancelled, the current turn is the last one."""
        async with self._own.setdefault(tenant, asyncio.Lock()):
            while True:
                checked = await self._gate.run(tenant, lambda: self._go_on(checking))
                if checked is not None:
                    return checked

    def _go_on(self, checking: Checking) -> CheckedInput | None:
        """Have one turn. None: it was not the last one."""
        ends_s = self._clock.now() + _TURN_S
        try:
            while self._clock.now() < ends_s:
                next(checking)
        except StopIteration as end:
            checked: CheckedInput = end.value
            return checked
        return None


# ---- How many bytes of outcomes wait to be stored.


class ByteBudget:
    """Bytes that may be held at a time; who wants more waits, in the order of arrival."""

    def __init__(self, most: int) -> None:
        self.used = 0
        self._most = most
        self._in_line = asyncio.Lock()
        self._freed = asyncio.Event()

    async def acquire(self, num_bytes: int) -> None:
        """Wait until there is room; for more than `most`, until no other bytes are held."""
        async with self._in_line:
            while self.used and self.used + num_bytes > self._most:
                self._freed.clear()
                await self._freed.wait()
            self.used += num_bytes

    def release(self, num_bytes: int) -> None:
        self.used -= num_bytes
        self._freed.set()
