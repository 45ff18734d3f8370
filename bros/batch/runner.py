"""Works on all batches of a store that no other process works on.

```
          ┌──────────── every poll: renew leases, see what was cancelled, claim what is free
          ▼
 Runner ──▶ Job ──▶ rows in order ──▶ Slots, earliest window first ──▶ RowHandler ──▶ engine
             │                                                             │
             └──◀── outcomes, some at a time, one transaction ◀────────────┘
```
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from bros.batch.errors import (
    LeaseLostError,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from bros.batch.files import FileStore
from bros.batch.job import Job, StopReason, Workshop
from bros.batch.jobs import BatchStore
from bros.batch.objects import Batch, BatchStatus, Lease, LineError
from bros.batch.pacing import RowCounts, Throughput, expected_end_s
from bros.batch.rows import RowHandler
from bros.batch.slots import Slots
from bros.batch.suspects import Company
from bros.core.clock import Clock
from bros.core.errors import EngineDeadError
from bros.core.ids import IdGenerator
from bros.core.interfaces import EngineStats
from bros.core.request import ServiceClass

logger = logging.getLogger(__name__)

_RENEWALS = 4
"""Of a lease while it lasts, so that it survives late ones."""

_AT_ONCE = 2
"""Batches that are claimed without a pause; more come one with each look."""

_FIRST_ROWS, _LEAST_ROWS = 16, 4
_WATCH_S = 0.5
_SWEEP_S = 600.0
_THREADS = 6

_LEAVE_S = 5.0
"""How long jobs may take to stop."""

_MOST_FAULTS = 3
_FAULT = LineError(
    "internal_error",
    "The server failed at this batch again and again, for reasons that are in its log and, as far "
    "as is known, not in the batch.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """What a runner is told.

    model: the one that is served. max_queued_tokens: of prompts in unfinished batches of a tenant.
    group_prefixes: run rows that begin alike next to each other. max_rows: most rows with the
    engine. lease_s: how long a batch stays ours without a sign of life. poll_s: how often to
    look for what other processes have done; more often if a lease is short.
    """

    model: str
    max_queued_tokens: int
    lease_s: float
    group_prefixes: bool = True
    max_rows: int = 256
    poll_s: float = 1.0


class BatchRunner:
    """One per process. `run` it in a task, and `wake` it when there is something new."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        handler: RowHandler,
        load: Callable[[], Awaitable[EngineStats]],
        clock: Clock,
        ids: IdGenerator,
        settings: RunnerSettings,
    ) -> None:
        """load: what the engine is doing; may raise EngineDeadError."""
        self._load = load
        self._settings = settings
        self._poll_s = min(settings.poll_s, settings.lease_s / _RENEWALS)
        self._owner = ids.new("runner")
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._news = asyncio.Event()
        self._shop = Workshop(
            store=store,
            files=files,
            handler=handler,
            clock=clock,
            ids=ids,
            threads=ThreadPoolExecutor(_THREADS, thread_name_prefix="batch"),
            slots=Slots(min(_FIRST_ROWS, settings.max_rows)),
            throughput=Throughput(),
            model=settings.model,
            counts=RowCounts(),
            company=Company(),
            validating=asyncio.Lock(),
            max_queued_tokens=settings.max_queued_tokens,
            group_prefixes=settings.group_prefixes,
            expected_at=self._expected_at,
        )

    @property
    def rows_in_flight(self) -> int:
        return self._shop.slots.used

    def backlog(self) -> list[tuple[int, float]]:
        """Of each batch that is worked on here: rows that are not yet with the engine, and seconds
        until the end of its window."""
        now = self._shop.clock.now()
        jobs = [job for job, _ in self._jobs.values()]
        return [(job.backlog, max(0.0, job.pace.deadline_s - now)) for job in jobs if job.backlog]

    @property
    def counts(self) -> RowCounts:
        """Not a copy: to be read only."""
        return self._shop.counts

    def wake(self) -> None:
        """A batch was made or cancelled."""
        self._news.set()

    async def run(self) -> None:
        """Until cancelled; then the batches are left to whoever comes next."""
        others = [asyncio.create_task(self._watch_load()), asyncio.create_task(self._sweep())]
        try:
            while True:
                self._news.clear()
                await self._tend()
                with contextlib.suppress(TimeoutError):
                    # Not wait_for: before Python 3.12 it forgets a cancellation if there is news.
                    async with asyncio.timeout(self._poll_s):
                        await self._news.wait()
        finally:
            for task in others:
                task.cancel()
            await asyncio.shield(asyncio.ensure_future(self._leave()))

    async def _tend(self) -> None:
        shop, began_s = self._shop, self._now()
        lease_s = self._settings.lease_s
        until_s = began_s + lease_s  # not later than the store has it, which is asked now
        for job, _ in self._jobs.values():
            # Its own timer stands still while the machine sleeps.
            if began_s >= job.batch.expires_at:
                job.stop(StopReason.EXPIRED)
        try:
            now = await shop.io(shop.store.time, began_s)
            if self._jobs:
                ids, expected = list(self._jobs), self._expectations()
                held = await shop.io(shop.store.renew, self._owner, ids, now, lease_s, expected)
                self._look_after(held, until_s)
            # One after the other, so that servers that share a store share what is in it.
            most = max(1, _AT_ONCE - len(self._jobs))
            model = self._settings.model
            claimed = await shop.io(shop.store.claim, self._owner, now, lease_s, most, model)
        except (StoreUnavailableError, StoreFullError) as error:
            logger.warning("the batch jobs have to wait: %s", error)
            return
        except Exception:
            logger.exception("the batch jobs have to wait")
            return
        for lease, batch in claimed:
            if batch.id not in self._jobs:  # else the next claim begins when that one has ended
                self._begin(lease, batch, until_s)

    def _look_after(self, held: Mapping[Lease, BatchStatus], until_s: float) -> None:
        for job, _ in self._jobs.values():
            status = held.get(job.lease)
            if status is None:
                job.stop(StopReason.LEAVING)
                continue
            job.lease_until_s = until_s
            if status is BatchStatus.CANCELLING:
                job.stop(StopReason.CANCELLED)

    def _begin(self, lease: Lease, batch: Batch, until_s: float) -> None:
        if not self._jobs:
            self._shop.throughput.began(self._shop.clock.now())
        job = Job(self._shop, lease, batch)
        job.lease_until_s = until_s
        task = asyncio.create_task(self._guarded(job), name=batch.id)
        self._jobs[batch.id] = job, task

    async def _guarded(self, job: Job) -> None:
        try:
            await job.run()
        except Exception:
            # Its lease runs out, and whoever claims it tries again.
            logger.exception("work on %s ended unexpectedly", job.batch.id)
            await self._note_fault(job)
        finally:
            del self._jobs[job.batch.id]

    async def _note_fault(self, job: Job) -> None:
        store = self._shop.store
        try:
            await self._shop.io(store.note_fault, job.lease, _FAULT, _MOST_FAULTS, self._now())
        except LeaseLostError:
            pass  # whoever has it now tries again
        except Exception:
            logger.exception("that could not be recorded")

    async def _leave(self) -> None:
        """Stop all jobs, store what they came to, and let others take over."""
        for job, _ in self._jobs.values():
            job.stop(StopReason.LEAVING)
        tasks = [task for _, task in self._jobs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_LEAVE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        with contextlib.suppress(StoreError, StoreFullError):
            await self._shop.io(self._shop.store.release, self._owner)
        self._shop.threads.shutdown(wait=False)

    async def _watch_load(self) -> None:
        """So many rows that the engine never runs out of them, and hardly more.

        It has those that run, and half as many wait for them to end.
        """
        slots = self._shop.slots
        while True:
            await asyncio.sleep(_WATCH_S)
            try:
                best_effort = (await self._load()).by_class.get(ServiceClass.BE)
            except EngineDeadError:
                continue
            except Exception:
                logger.exception("what the engine is doing is not known")
                continue
            if best_effort is not None:
                spare = max(_LEAST_ROWS, best_effort.running // 2) - best_effort.waiting
                # Also beside many others that wait: then as many as it began with.
                wanted = max(_FIRST_ROWS, slots.used + spare)
                slots.limit = min(wanted, self._settings.max_rows)

    async def _sweep(self) -> None:
        """Delete files whose time is over, and what crashes have left."""
        while True:
            try:
                await self._shop.io(self._shop.files.sweep, self._now())
            except (StoreUnavailableError, StoreFullError) as error:
                logger.warning("old files could not be removed: %s", error)
            except Exception:
                logger.exception("old files could not be removed")
            await asyncio.sleep(_SWEEP_S)

    def _expectations(self) -> dict[str, int]:
        found = {batch_id: self._expected_at(job) for batch_id, (job, _) in self._jobs.items()}
        return {batch_id: at for batch_id, at in found.items() if at is not None}

    def _expected_at(self, job: Job) -> int | None:
        now = self._shop.clock.now()
        mine = (job.batch.expires_at, job.batch.created_at)
        before = [
            other.pace
            for other, _ in self._jobs.values()
            if other is not job and (other.batch.expires_at, other.batch.created_at) <= mine
        ]
        end_s = expected_end_s(job.pace, before, self._shop.throughput.rate(now), now)
        return None if end_s is None else round(self._now() + end_s - now)

    def _now(self) -> float:
        return self._shop.clock.unix_time()
