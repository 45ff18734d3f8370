"""What several tenants share fairly: blocking work off the event loop, and what is remembered.

jobs of tenant A ─┐                 ┌─▶ slot (a thread)
jobs of tenant B ─┼─▶ FairQueue ────┤
jobs of tenant C ─┘   least used    └─▶ slot (a thread)
                      goes first
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from bros.core.clock import thread_cpu_s

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")


@dataclass(slots=True)
class _Tenant(Generic[T]):
    """urgent, waiting: its jobs that have not started, in order of arrival: urgent and other ones.
    running: number of its jobs that run.
    running_urgent: how many of them are urgent.
    used_s: seconds for which its jobs have held slots, beyond those of the tenant with the least
        when it came.
    """

    urgent: deque[T] = field(default_factory=deque)
    waiting: deque[T] = field(default_factory=deque)
    running: int = 0
    running_urgent: int = 0
    used_s: float = 0.0

    @property
    def active(self) -> bool:
        return bool(self.urgent or self.waiting or self.running)


class FairQueue(Generic[T]):
    """Decides which job starts next: the oldest one of the tenant that has used the least time,
    urgent ones first.

    A tenant that has been idle is not owed the time that it has not used (start-time fair queuing).
    """

    def __init__(self, slots: int, per_tenant: int) -> None:
        """slots: most jobs that run at once.
        per_tenant: most of one tenant. An urgent one starts if fewer urgent ones than that run, so
            that it does not wait for others; a tenant may then have up to twice as many.
        """
        assert 1 <= per_tenant <= slots
        self._slots = slots
        self._per_tenant = per_tenant
        self._tenants: dict[str, _Tenant[T]] = {}
        self._running = 0

    def add(self, tenant: str, job: T, *, urgent: bool = False) -> None:
        """A job of the tenant waits. urgent: it goes before others of this tenant."""
        known = self._tenants.setdefault(tenant, _Tenant())
        if not known.active:
            others = (each.used_s for each in self._tenants.values() if each.active)
            known.used_s = max(known.used_s, min(others, default=0.0))
        (known.urgent if urgent else known.waiting).append(job)

    def remove(self, tenant: str, job: T) -> None:
        """Remove a waiting job. A job that has started stays."""
        known = self._tenants.get(tenant)
        for line in (known.urgent, known.waiting) if known is not None else ():
            if job in line:
                line.remove(job)
                self._forget_idle()
                return

    def waiting(self) -> list[str]:
        """The tenants that have waiting jobs."""
        return [tenant for tenant, known in self._tenants.items() if known.urgent or known.waiting]

    def start(self, may_start: Callable[[str], bool] = lambda tenant: True) -> tuple[str, T] | None:
        """Start the next job; returns it with its tenant. None: none may start now.

        may_start: whether a tenant may start a job now, apart from slots.
        """
        if self._running == self._slots:
            return None
        ready = [
            (known.used_s, tenant)
            for tenant, known in self._tenants.items()
            if (self._has_urgent(known) or self._has_other(known)) and may_start(tenant)
        ]
        if not ready:
            return None
        _, tenant = min(ready)
        known = self._tenants[tenant]
        urgent = self._has_urgent(known)
        known.running += 1
        known.running_urgent += urgent
        self._running += 1
        return tenant, (known.urgent if urgent else known.waiting).popleft()

    def _has_urgent(self, known: _Tenant[T]) -> bool:
        """Whether an urgent job of a tenant may start, apart from slots."""
        return bool(known.urgent) and known.running_urgent < self._per_tenant

    def _has_other(self, known: _Tenant[T]) -> bool:
        return bool(known.waiting) and known.running < self._per_tenant

    def end(self, tenant: str, used_s: float, *, urgent: bool = False) -> None:
        """A job of the tenant has ended that held its slot for `used_s` seconds. urgent: as it was
        added."""
        known = self._tenants[tenant]
        known.running -= 1
        known.running_urgent -= urgent
        known.used_s += used_s
        self._running -= 1
        self._forget_idle()

    def check_integrity(self) -> None:
        """Raises AssertionError if slots are lost or idle ones are not used."""
        assert self._running == sum(known.running for known in self._tenants.values())
        assert self._running <= self._slots
        for known in self._tenants.values():
            assert 0 <= known.running_urgent <= self._per_tenant
            assert 0 <= known.running - known.running_urgent <= self._per_tenant

    def _forget_idle(self) -> None:
        """Forget the tenants that would begin like new ones."""
        active = [known.used_s for known in self._tenants.values() if known.active]
        least_s = min(active, default=float("inf"))
        self._tenants = {
            tenant: known
            for tenant, known in self._tenants.items()
            if known.active or known.used_s > least_s
        }


class CpuBudget(Protocol):
    """CPU time that tenants may use off the event loop."""

    def spend(self, tenant: str, cpu_s: float) -> None:
        """Count CPU time in seconds that work of the tenant has used."""
        ...

    def cpu_wait_s(self, tenant: str) -> float:
        """Seconds until the tenant may begin new work; 0: now."""
        ...


@dataclass(slots=True)
class CpuUse:
    """CPU time of other processes that a job has used, in seconds. The job sets it."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class _Turn:
    """Work that waits for its start.

    started: done when it may start.
    urgent: it goes before other work of its tenant.
    """

    started: asyncio.Future[None]
    urgent: bool


class FairGate:
    """Runs blocking work on its own threads, as a FairQueue decides. For one event loop.

    The threads are its own so that what it has admitted never waits for the work of other gates:
    the loop's default executor has few threads where there are few cores.

    Work of a tenant that has used up its CPU time waits until it has some again.
    """

    def __init__(
        self,
        slots: int,
        per_tenant: int,
        budget: CpuBudget | None = None,
        *,
        limited: bool = True,
        name: str = "work",
    ) -> None:
        """slots: most jobs that run at once. per_tenant: most of one tenant, see FairQueue.
        budget: None: CPU time is not counted. limited: whether work waits for CPU time.
        name: of the threads.
        """
        self._threads = ThreadPoolExecutor(slots, thread_name_prefix=name)
        self._queue: FairQueue[_Turn] = FairQueue(slots, per_tenant)
        self._budget = budget
        self._limited = limited
        self._retry: asyncio.TimerHandle | None = None

    async def run(
        self,
        tenant: str,
        work: Callable[[], T],
        process_cpu: CpuUse | None = None,
        *,
        urgent: bool = False,
    ) -> T:
        """Do `work` on a thread, when the queue admits it.

        process_cpu: CPU time that `work` has used in other processes; `work` sets it.
        urgent: it goes before other work of this tenant.

        If the caller is cancelled, waiting work is not done; work that runs cannot be stopped, and
        keeps its slot until it ends.
        """
        await self._wait(tenant, urgent)
        loop = asyncio.get_running_loop()
        begun_s, cpu = loop.time(), CpuUse()

        def measured() -> T:
            cpu_s = thread_cpu_s()
            try:
                return work()
            finally:
                cpu.seconds = thread_cpu_s() - cpu_s

        def end(job: asyncio.Future[T]) -> None:
            if not job.cancelled():
                job.exception()  # else it is logged if the caller was cancelled meanwhile
            used_s = cpu.seconds + (process_cpu.seconds if process_cpu is not None else 0.0)
            if self._budget is not None:
                self._budget.spend(tenant, used_s)
            self._end(tenant, loop.time() - begun_s, urgent)

        try:
            job = loop.run_in_executor(self._threads, measured)
        except BaseException:
            self._end(tenant, 0.0, urgent)
            raise
        job.add_done_callback(end)
        return await asyncio.shield(job)

    async def end(self, within_s: float) -> None:
        """Wait until the work that runs has ended, but not longer. None may come any more."""
        ending = asyncio.create_task(asyncio.to_thread(self._threads.shutdown))
        await asyncio.wait([ending], timeout=within_s)

    async def _wait(self, tenant: str, urgent: bool) -> None:
        turn = _Turn(asyncio.get_running_loop().create_future(), urgent)
        self._queue.add(tenant, turn, urgent=urgent)
        self._start()
        try:
            await turn.started
        except asyncio.CancelledError:
            if turn.started.done() and not turn.started.cancelled():
                self._end(tenant, 0.0, urgent)
            else:
                self._queue.remove(tenant, turn)
            raise

    def _end(self, tenant: str, used_s: float, urgent: bool) -> None:
        self._queue.end(tenant, used_s, urgent=urgent)
        self._start()

    def _start(self) -> None:
        while (found := self._queue.start(self._may_start)) is not None:
            tenant, turn = found
            if turn.started.cancelled():  # its task has not yet run since it was cancelled
                self._queue.end(tenant, 0.0, urgent=turn.urgent)
            else:
                turn.started.set_result(None)
        self._retry_later()

    def _may_start(self, tenant: str) -> bool:
        return self._cpu_wait_s(tenant) <= 0

    def _cpu_wait_s(self, tenant: str) -> float:
        if self._budget is None or not self._limited:
            return 0.0
        return self._budget.cpu_wait_s(tenant)

    def _retry_later(self) -> None:
        """Start waiting work when the first tenant without CPU time has some again."""
        waits = map(self._cpu_wait_s, self._queue.waiting())
        wait_s = min((wait_s for wait_s in waits if wait_s > 0), default=0.0)
        if wait_s <= 0:
            return
        loop = asyncio.get_running_loop()
        at_s = loop.time() + max(wait_s, _MIN_RETRY_S)
        if self._retry is not None:
            if self._retry.when() <= at_s:
                return
            self._retry.cancel()
        self._retry = loop.call_at(at_s, self._start_again)

    def _start_again(self) -> None:
        self._retry = None
        self._start()


_MIN_RETRY_S = 0.05


LONG_SIZE = 100_000
"""Characters or tokens from which work is long: about 0.1 s."""


class FairThreads:
    """Three threads, each in a fair order of tenants: for short and long inputs, and for replies.

    So a short job never waits for a long one, and the memory of long ones does not add up: eight
    texts of 4 MB that were tokenized at once took 1.7 GB. Replies count as CPU time of their tenant
    and never wait for it: their requests were accepted.
    """

    def __init__(self, budget: CpuBudget | None = None) -> None:
        """budget: None: CPU time is not limited."""
        self._short = FairGate(1, 1, budget, name="short inputs")
        self._long = FairGate(1, 1, budget, name="long inputs")
        self._replies = FairGate(1, 1, budget, limited=False, name="replies")

    async def run(self, tenant: str, work: Callable[[], T], size: int) -> T:
        """Do blocking work on an input. size: characters or tokens that it processes."""
        return await (self._short if size <= LONG_SIZE else self._long).run(tenant, work)

    async def write(self, tenant: str, work: Callable[[], T]) -> T:
        """Do blocking work on a reply."""
        return await self._replies.run(tenant, work)


class FairMemory(Generic[K, T]):
    """Remembers the latest values of all tenants by key; the oldest ones are forgotten.

    When it is full, the tenant that has the most values loses its oldest one, so that a tenant with
    many does not make others forget theirs. If the sizes exceed their bound, the tenant whose
    values are the largest together does.
    """

    def __init__(self, capacity: int, max_size: int | None = None) -> None:
        """capacity: most values of all tenants together. max_size: bound on the sum of their sizes;
        None: none."""
        self._capacity = capacity
        self._max_size = max_size
        self._values: dict[K, tuple[str, T]] = {}
        self._keys: dict[str, OrderedDict[K, int]] = {}  # of each tenant, with their sizes
        self._sizes: Counter[str] = Counter()  # by tenant

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> T | None:
        found = self._values.get(key)
        return None if found is None else found[1]

    def count(self, tenant: str) -> int:
        """Number of values of a tenant."""
        return len(self._keys.get(tenant, ()))

    def counts(self) -> dict[str, int]:
        """Tenant -> number of its values, which is above 0."""
        return {tenant: len(keys) for tenant, keys in self._keys.items()}

    def use(self, key: K) -> T | None:
        """Like `get`, and the value is its tenant's latest one now."""
        found = self._values.get(key)
        if found is None:
            return None
        self._keys[found[0]].move_to_end(key)
        return found[1]

    def put(self, tenant: str, key: K, value: T, *, size: int = 0, most: int | None = None) -> None:
        """Remember a value, which is the tenant's latest one now.

        most: values of this tenant, whose oldest ones are forgotten for it; None: any number.
        """
        self.forget(key)
        self._keys.setdefault(tenant, OrderedDict())[key] = size
        self._sizes[tenant] += size
        self._values[key] = tenant, value
        while most is not None and self.count(tenant) > most:
            self._forget_oldest(tenant)
        while len(self._values) > self._capacity:
            self._forget_oldest(max(self._keys, key=self.count))
        while self._max_size is not None and self._sizes.total() > self._max_size:
            self._forget_oldest(max(self._sizes, key=self._sizes.__getitem__))

    def forget(self, key: K) -> None:
        """Forget a value; an unknown one is ignored."""
        found = self._values.pop(key, None)
        if found is not None:
            tenant, _ = found
            self._sizes[tenant] -= self._keys[tenant].pop(key)
            if not self._keys[tenant]:
                del self._keys[tenant], self._sizes[tenant]

    def check_integrity(self) -> None:
        """Raises AssertionError if the order of a tenant and the values differ."""
        assert len(self._values) <= self._capacity
        assert all(self._keys.values())
        listed = {key: tenant for tenant, keys in self._keys.items() for key in keys}
        assert listed == {key: tenant for key, (tenant, _) in self._values.items()}
        assert sum(map(len, self._keys.values())) == len(self._values)
        assert self._sizes == {tenant: sum(keys.values()) for tenant, keys in self._keys.items()}
        assert self._max_size is None or self._sizes.total() <= self._max_size

    def _forget_oldest(self, tenant: str) -> None:
        self.forget(next(iter(self._keys[tenant])))
