"""What several tenants share fairly: blocking work off the event loop, and what is remembered.

jobs of tenant A ─┐                 ┌─▶ slot (a thread)
jobs of tenant B ─┼─▶ FairQueue ────┤
jobs of tenant C ─┘   least used    └─▶ slot (a thread)
                      goes first
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Tenant(Generic[T]):
    """waiting: its jobs that have not started, in order of arrival.
    running: number of its jobs that run.
    used_s: seconds for which its jobs have held slots, beyond those of the tenant with the least
        when it came.
    """

    waiting: deque[T] = field(default_factory=deque)
    running: int = 0
    used_s: float = 0.0

    @property
    def active(self) -> bool:
        return bool(self.waiting or self.running)


class FairQueue(Generic[T]):
    """Decides which job starts next: the oldest one of the tenant that has used the least time.

    A tenant that has been idle is not owed the time that it has not used (start-time fair queuing).
    """

    def __init__(self, slots: int, per_tenant: int) -> None:
        """slots: most jobs that run at once. per_tenant: most of one tenant."""
        assert 1 <= per_tenant <= slots
        self._slots = slots
        self._per_tenant = per_tenant
        self._tenants: dict[str, _Tenant[T]] = {}
        self._running = 0

    def add(self, tenant: str, job: T) -> None:
        """A job of the tenant waits."""
        known = self._tenants.setdefault(tenant, _Tenant())
        if not known.active:
            others = (each.used_s for each in self._tenants.values() if each.active)
            known.used_s = max(known.used_s, min(others, default=0.0))
        known.waiting.append(job)

    def remove(self, tenant: str, job: T) -> None:
        """Remove a waiting job. A job that has started stays."""
        known = self._tenants.get(tenant)
        if known is not None and job in known.waiting:
            known.waiting.remove(job)
            self._forget_idle()

    def start(self) -> tuple[str, T] | None:
        """Start the next job; returns it with its tenant. None: none may start now."""
        if self._running == self._slots:
            return None
        ready = [
            (known.used_s, tenant)
            for tenant, known in self._tenants.items()
            if known.waiting and known.running < self._per_tenant
        ]
        if not ready:
            return None
        _, tenant = min(ready)
        known = self._tenants[tenant]
        known.running += 1
        self._running += 1
        return tenant, known.waiting.popleft()

    def end(self, tenant: str, used_s: float) -> None:
        """A job of the tenant has ended that held its slot for `used_s` seconds."""
        known = self._tenants[tenant]
        known.running -= 1
        known.used_s += used_s
        self._running -= 1
        self._forget_idle()

    def check_integrity(self) -> None:
        """Raises AssertionError if slots are lost or idle ones are not used."""
        assert self._running == sum(known.running for known in self._tenants.values())
        assert self._running <= self._slots
        assert all(0 <= known.running <= self._per_tenant for known in self._tenants.values())

    def _forget_idle(self) -> None:
        """Forget the tenants that would begin like new ones."""
        active = [known.used_s for known in self._tenants.values() if known.active]
        least_s = min(active, default=float("inf"))
        self._tenants = {
            tenant: known
            for tenant, known in self._tenants.items()
            if known.active or known.used_s > least_s
        }


class FairGate:
    """Runs blocking work on threads, as a FairQueue decides. For one event loop."""

    def __init__(self, slots: int, per_tenant: int) -> None:
        """slots: most jobs that run at once. per_tenant: most of one tenant."""
        self._queue: FairQueue[asyncio.Future[None]] = FairQueue(slots, per_tenant)

    async def run(self, tenant: str, work: Callable[[], T], executor: Executor | None = None) -> T:
        """Do `work` on a thread of `executor`, by default the loop's, when the queue admits it.

        If the caller is cancelled, waiting work is not done; work that runs cannot be stopped, and
        keeps its slot until it ends.
        """
        await self._wait(tenant)
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        try:
            job = loop.run_in_executor(executor, work)
        except BaseException:
            self._end(tenant, 0.0)
            raise
        job.add_done_callback(lambda job: self._end(tenant, loop.time() - begun_s))
        return await asyncio.shield(job)

    async def _wait(self, tenant: str) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue.add(tenant, turn)
        self._start()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._end(tenant, 0.0)
            else:
                self._queue.remove(tenant, turn)
            raise

    def _end(self, tenant: str, used_s: float) -> None:
        self._queue.end(tenant, used_s)
        self._start()

    def _start(self) -> None:
        while (found := self._queue.start()) is not None:
            tenant, turn = found
            if turn.cancelled():  # its task has not yet run since it was cancelled
                self._queue.end(tenant, 0.0)
            else:
                turn.set_result(None)


LONG_SIZE = 100_000
"""Characters or tokens from which work is long: about 0.1 s."""


class FairThreads:
    """Two threads, one for short and one for long work, each in a fair order of tenants.

    So a short job never waits for a long one, and the memory of long ones does not add up: eight
    texts of 4 MB that were tokenized at once took 1.7 GB.
    """

    def __init__(self) -> None:
        self._short = FairGate(slots=1, per_tenant=1)
        self._long = FairGate(slots=1, per_tenant=1)

    async def run(self, tenant: str, work: Callable[[], T], size: int) -> T:
        """Do blocking work of a tenant. size: characters or tokens that it processes."""
        return await (self._short if size <= LONG_SIZE else self._long).run(tenant, work)


class FairMemory(Generic[K, T]):
    """Remembers the latest values of all tenants by key; the oldest ones are forgotten.

    When it is full, the tenant that has the most values loses its oldest one, so that a tenant with
    many does not make others forget theirs.
    """

    def __init__(self, capacity: int) -> None:
        """capacity: most values of all tenants together."""
        self._capacity = capacity
        self._values: dict[K, tuple[str, T]] = {}
        self._keys: dict[str, OrderedDict[K, None]] = {}

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> T | None:
        found = self._values.get(key)
        return None if found is None else found[1]

    def count(self, tenant: str) -> int:
        """Number of values of a tenant."""
        return len(self._keys.get(tenant, ()))

    def put(self, tenant: str, key: K, value: T) -> None:
        """Remember a value, which is the tenant's latest one now."""
        self.forget(key)
        self._keys.setdefault(tenant, OrderedDict())[key] = None
        self._values[key] = tenant, value
        if len(self._values) > self._capacity:
            most = max(self._keys.values(), key=len)
            self.forget(next(iter(most)))

    def forget(self, key: K) -> None:
        """Forget a value; an unknown one is ignored."""
        found = self._values.pop(key, None)
        if found is not None:
            keys = self._keys[found[0]]
            del keys[key]
            if not keys:
                del self._keys[found[0]]

    def check_integrity(self) -> None:
        """Raises AssertionError if the order of a tenant and the values differ."""
        assert len(self._values) <= self._capacity
        assert all(self._keys.values())
        listed = {key: tenant for tenant, keys in self._keys.items() for key in keys}
        assert listed == {key: tenant for key, (tenant, _) in self._values.items()}
        assert sum(map(len, self._keys.values())) == len(self._values)
