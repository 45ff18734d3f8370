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
import enum
import heapq
import itertools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bros.batch.files import BodyWriter, FileStore
from bros.batch.objects import (
    FILE_LIFE_S,
    Batch,
    BatchStatus,
    Lease,
    LeaseLostError,
    LineError,
    RowInterruptedError,
    RowOutcome,
    RowPostponedError,
    RowRef,
    StoredFile,
    StoreError,
    StoreFullError,
    StoreUnavailableError,
)
from bros.batch.pacing import JobPace, RowCounts, Throughput, expected_end_s
from bros.batch.rows import BadRowError, RowHandler, check_input, error_line, parse_row, reply_line
from bros.batch.store import BatchStore
from bros.core.clock import Clock
from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineStats
from bros.core.request import IdGenerator, ServiceClass

# ---- How many rows may be with the engine, and which waits next.


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
        """Rows that run go on; with a lower limit no further row starts until enough have ended."""
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


# ---- Which rows are with the engine together, so that it shows which one it dies of.


_FEW = 8

MOST_INTERRUPTIONS = 4
"""After so many attempts without an answer a row has failed. In the last two attempts it ran alone:
two, because the engine may once have died of something else just then."""


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


# ---- One batch on its way from a file of rows to files of results.


logger = logging.getLogger(__name__)

T = TypeVar("T")

_PAGE = 256
"""Rows that are read from the store at a time."""

_UNSTORED = 512
"""Outcomes that may wait to be stored before no more rows begin."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.2, 10.0
"""Before something is tried again: at first, and after it has failed again and again."""

_LAST_WORDS_S = 3.0
"""How long outcomes may still be stored when the server ends; the rows would be run again."""


class StopReason(enum.Enum):
    """Why no more rows are run."""

    CANCELLED = enum.auto()
    EXPIRED = enum.auto()
    LEAVING = enum.auto()
    """Another process continues the batch: the lease is lost, or the server ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What all jobs of a runner share."""

    store: BatchStore
    files: FileStore
    handler: RowHandler
    clock: Clock
    ids: IdGenerator
    threads: Executor
    slots: Slots
    throughput: Throughput
    model: str
    counts: RowCounts
    company: Company
    validating: asyncio.Lock
    max_queued_tokens: int
    group_prefixes: bool = True
    expected_at: Callable[[Job], int | None] = lambda job: None

    async def io(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Something that waits for the disk, on a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, lambda: work(*args, **kwargs))

    async def persist(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """The same, for what must not be lost: until the store can take it.

        Raises StoreError if it never will, and what else `work` raises.
        """
        for pause_s in _pauses():
            try:
                return await self.io(work, *args, **kwargs)
            except (StoreUnavailableError, StoreFullError) as error:
                logger.warning("will be tried again in %.1f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses never end")


class Job:
    """Runs once, with `run`. Rows that are interrupted start over; nothing else is repeated."""

    def __init__(self, shop: Workshop, lease: Lease, batch: Batch) -> None:
        self.lease = lease
        self.batch = batch
        self.lease_until_s = 0.0
        self._shop = shop
        self._stopped: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._unstored: asyncio.Queue[RowOutcome] = asyncio.Queue(_UNSTORED)
        unix_ahead_s = shop.clock.unix_time() - shop.clock.now()
        self._deadline_s = batch.expires_at - unix_ahead_s
        self.pace = JobPace(batch.total - batch.completed - batch.failed, self._deadline_s)

    @property
    def backlog(self) -> int:
        """Rows that are not yet with the engine; none once no more rows are run."""
        return 0 if self._stopped.done() else self.pace.remaining - self.pace.in_flight

    def stop(self, reason: StopReason) -> None:
        """Run no more rows. The first reason counts."""
        if not self._stopped.done():
            self._stopped.set_result(reason)

    async def run(self) -> None:
        """Until the batch has its final status, or another process is to continue it."""
        with contextlib.suppress(LeaseLostError):
            outcome = self.batch.outcome or await self._work()
            if outcome is not None:
                await self._wind_up(outcome)

    async def _work(self) -> BatchStatus | None:
        """What the batch ends as; None if that is not for us to say."""
        if self.batch.served_model != self._shop.model and self._now() >= self.batch.expires_at:
            return BatchStatus.EXPIRED  # there is no handler here that could check its rows
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate()
            if self._stopped.done() and self._stopped.result() is StopReason.LEAVING:
                return None
        if self.batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        if self.batch.status is BatchStatus.FAILED:
            return None
        reason = await self._until_stopped(self._run_rows())
        if reason is StopReason.LEAVING:
            return None
        outcomes = {
            StopReason.CANCELLED: BatchStatus.CANCELLED,
            StopReason.EXPIRED: BatchStatus.EXPIRED,
        }
        return outcomes[reason] if reason else BatchStatus.COMPLETED

    async def _validate(self) -> None:
        shop, batch = self._shop, self.batch
        async with shop.validating:
            checked = await shop.io(
                check_input,
                shop.files.bodies.path(batch.input_digest),
                batch.input_digest,
                batch.endpoint,
                shop.handler,
                group=shop.group_prefixes,
                is_wanted=lambda: not self._stopped.done(),
            )
        if checked.errors:
            await shop.persist(shop.store.fail, self.lease, checked.errors, self._now())
        elif checked.rows:
            self.batch = await shop.persist(
                shop.store.admit,
                self.lease,
                checked.rows,
                model=checked.model,
                tokens=checked.tokens,
                max_tokens=shop.max_queued_tokens,
                now=self._now(),
            )
            self.pace.remaining = self.batch.total
            return
        self.batch = await shop.persist(shop.store.get, batch.tenant, batch.id)

    async def _until_stopped(self, work: Awaitable[None]) -> StopReason | None:
        """Do `work` until it is done (None), the window is over, or `stop` is called.

        What rows have come to by then is stored.
        """
        storing = asyncio.create_task(self._store_outcomes())
        working = asyncio.ensure_future(work)
        ends: tuple[asyncio.Future[Any], ...] = (working, storing, self._stopped)
        left_s = max(self._deadline_s - self._shop.clock.now(), 0.0)
        try:
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if storing.done():
                storing.result()  # the lease is lost
            if working.done():
                working.result()
                reason = None
            else:
                reason = self._stopped.result() if self._stopped.done() else StopReason.EXPIRED
                await _cancelled(working)
            patience_s = _LAST_WORDS_S if reason is StopReason.LEAVING else None
            stored = asyncio.ensure_future(self._unstored.join())
            await asyncio.wait(
                {stored, storing}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED
            )
            await _cancelled(stored)
            if storing.done():
                storing.result()
            return reason
        finally:
            await _cancelled(working, storing)

    async def _run_rows(self) -> None:
        shop, rank = self._shop, -1
        path = shop.files.bodies.path(self.batch.input_digest)
        with await shop.io(_Input, path) as rows:
            async with asyncio.TaskGroup() as group:
                while page := await shop.persist(shop.store.pending, self.batch.id, rank, _PAGE):
                    for ref in page:
                        await self._acquire_slot()
                        running = group.create_task(self._run_row(rows, ref))
                        # Not in the row, which may be cancelled before it begins.
                        running.add_done_callback(lambda _: shop.slots.release())
                    rank = page[-1].rank

    async def _acquire_slot(self) -> None:
        """For a row. Nothing begins while the lease has run out as the store cannot be reached."""
        slots = self._shop.slots
        await slots.acquire((self.batch.expires_at, self.batch.created_at))
        try:
            while self._now() >= self.lease_until_s:
                await asyncio.sleep(_FIRST_PAUSE_S)
        except asyncio.CancelledError:
            slots.release()
            raise

    async def _run_row(self, rows: _Input, ref: RowRef) -> None:
        shop, began_s = self._shop, self._shop.clock.now()
        outcome = await self._outcome(rows, ref)
        now = shop.clock.now()
        tokens = outcome.usage.prompt_tokens + outcome.usage.output_tokens
        self.pace.note(tokens, now - began_s)
        shop.throughput.note(now, tokens)
        shop.counts.completed += outcome.ok
        shop.counts.failed += not outcome.ok
        await self._unstored.put(outcome)

    async def _outcome(self, rows: _Input, ref: RowRef) -> RowOutcome:
        shop, batch = self._shop, self.batch
        row_id, request_id = shop.ids.new("batch_req", "_"), shop.ids.new("req")
        try:
            row = await shop.io(lambda: parse_row(rows.read(ref), batch.endpoint))
            if row.custom_id != ref.custom_id:
                raise BadRowError("damaged_file", "This is another row.")
        except (BadRowError, OSError):
            line = error_line(row_id, ref.custom_id, "damaged_file", "The input file is damaged.")
            return RowOutcome(ref.line, False, line)
        for attempt, pause_s in enumerate(_pauses(), start=1):
            try:
                async with shop.company.admitted(interruptions=attempt - 1):
                    reply = await self._answer(row.body, request_id)
            except RowInterruptedError as error:
                shop.counts.interrupted += 1
                if attempt >= MOST_INTERRUPTIONS:
                    line = error_line(row_id, ref.custom_id, "engine_error", str(error))
                    return RowOutcome(ref.line, False, line)
                await asyncio.sleep(pause_s)
                continue
            line = reply_line(row_id, ref.custom_id, request_id, reply)
            return RowOutcome(ref.line, reply.status_code < 400, line, reply.usage)
        raise AssertionError("pauses never end")

    async def _answer(self, body: dict[str, Any], request_id: str) -> Any:
        shop, endpoint = self._shop, self.batch.endpoint
        ours = {"request_id": request_id, "tenant": self.batch.tenant}
        for pause_s in _pauses():
            due_in_s = self.pace.due_in_s(shop.clock.now(), shop.slots.used)
            try:
                with self.pace.running():
                    return await shop.handler.answer(endpoint, body, **ours, due_in_s=due_in_s)
            except RowPostponedError as error:
                await asyncio.sleep(min(error.retry_after_s, pause_s))
        raise AssertionError("pauses never end")

    async def _store_outcomes(self) -> None:
        """Several at a time, as they come."""
        while True:
            outcomes = [await self._unstored.get()]
            while not self._unstored.empty():
                outcomes.append(self._unstored.get_nowait())
            expected_at = self._shop.expected_at(self)
            await self._shop.persist(self._shop.store.commit, self.lease, outcomes, expected_at)
            for _ in outcomes:
                self._unstored.task_done()

    async def _wind_up(self, outcome: BatchStatus) -> None:
        """Make the files; from the beginning if it is interrupted, for the rows stay until then."""
        shop = self._shop
        outcome = await shop.persist(shop.store.wind_up, self.lease, outcome, self._now())
        await shop.persist(self._write_files, outcome)
        logger.info("%s is %s", self.batch.id, outcome)

    def _write_files(self, outcome: BatchStatus) -> None:
        shop, batch_id, now = self._shop, self.batch.id, self._now()
        with shop.files.bodies.new() as output, shop.files.bodies.new() as errors:
            _write_lines(output, (line for _, line in shop.store.results(batch_id, ok=True)))
            unfinished = _UNFINISHED.get(outcome, _UNFINISHED[BatchStatus.EXPIRED])
            _write_lines(
                errors,
                (
                    line or error_line(shop.ids.new("batch_req", "_"), custom_id, *unfinished)
                    for custom_id, line in shop.store.results(batch_id, ok=False)
                ),
            )
            shop.store.finish(
                self.lease,
                outcome,
                (output, self._file(output, "output", now)) if output.num_bytes else None,
                (errors, self._file(errors, "error", now)) if errors.num_bytes else None,
                now,
            )

    def _file(self, body: BodyWriter, kind: str, now: float) -> StoredFile:
        return StoredFile(
            id=self._shop.ids.new("file"),
            tenant=self.batch.tenant,
            digest=body.digest,
            num_bytes=body.num_bytes,
            filename=f"{self.batch.id}_{kind}.jsonl",
            purpose="batch_output",
            created_at=int(now),
            expires_at=int(now) + (self.batch.output_life_s or FILE_LIFE_S),
        )

    def _now(self) -> float:
        return self._shop.clock.unix_time()


_UNFINISHED = {
    BatchStatus.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    BatchStatus.CANCELLED: (
        "batch_cancelled",
        "This request was not executed because the batch was cancelled.",
    ),
    BatchStatus.FAILED: (
        "batch_failed",
        "This request was not executed because the batch failed.",
    ),
}


class _Input:
    """An open input file. Reads of several threads do not disturb one another."""

    def __init__(self, path: Path) -> None:
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            self._handle = -1  # every row says so

    def read(self, ref: RowRef) -> bytes:
        """Raises OSError if the file is gone."""
        return os.pread(self._handle, ref.length, ref.offset)

    def __enter__(self) -> _Input:
        return self

    def __exit__(self, *_: object) -> None:
        if self._handle >= 0:
            os.close(self._handle)


def _write_lines(body: BodyWriter, lines: Iterable[str]) -> None:
    for line in lines:
        body.write(line.encode("utf-8", "surrogatepass") + b"\n")
    body.finish()


def _pauses() -> Iterable[float]:
    """Longer and longer."""
    pause_s = _FIRST_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _LAST_PAUSE_S)


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """End tasks, whatever they come to."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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

    model: the one that is served.
    max_queued_tokens: of prompts in unfinished batches of a tenant.
    group_prefixes: run rows that begin alike next to each other.
    max_rows: most rows with the engine.
    lease_s: how long a batch stays ours without a sign of life.
    poll_s: how often to look for what other processes have done; more often if a lease is short.
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
        """Until cancelled; then the batches are left to the next process."""
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
            # Its lease runs out, and the process that claims it tries again.
            logger.exception("work on %s ended unexpectedly", job.batch.id)
            await self._note_fault(job)
        finally:
            del self._jobs[job.batch.id]

    async def _note_fault(self, job: Job) -> None:
        store = self._shop.store
        try:
            await self._shop.io(store.note_fault, job.lease, _FAULT, _MOST_FAULTS, self._now())
        except LeaseLostError:
            pass  # the process that has it now tries again
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
