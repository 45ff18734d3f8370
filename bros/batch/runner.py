"""Runs batches: claims them from the store, runs their rows, stores the outcomes.

```
          ┌──────────── every poll: renew leases, stop cancelled jobs, claim free batches
          ▼
 Runner ──▶ Job ──▶ rows in order ──▶ RowLimiter ──▶ RowHandler ──▶ engine
             │                        earliest deadline first           │
             └──◀── outcomes, several in one transaction ◀──────────────┘
```
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import functools
import itertools
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from bros.batch.admission import (
    MAX_ATTEMPTS,
    ByteBudget,
    RowLimiter,
    SuspectIsolation,
    ValidationTurns,
)
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
    StoreLimitError,
    StoreUnavailableError,
)
from bros.batch.pacing import Backlog, JobPace, RowCounts, Throughput
from bros.batch.rows import (
    BadRowError,
    RowHandler,
    RowReply,
    check_input,
    error_line,
    parse_row,
    reply_line,
)
from bros.batch.store import BatchStore
from bros.core.clock import Clock
from bros.core.errors import EngineDeadError, OverTenantLimitError, TenantLimitError
from bros.core.interfaces import EngineStats
from bros.core.request import IdGenerator, ServiceClass, Slo
from bros.core.tenants import NO_LIMITS, Resource, TenantLimits

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHORT_BODY = 1_000_000
"""Characters of a reply whose line is made on the event loop: 2 ms."""

# ---- One batch: validate its input, run its rows, write its result files.


_PAGE = 256
"""Rows read from the store at a time."""

_MAX_UNSTORED = 512
"""Most outcomes that wait to be stored. Further rows that end keep their place in the limiter, so
that fewer rows start."""

_MAX_UNSTORED_BYTES = 64 * 2**20
"""Most bytes of them, over all batches. A row with log-probabilities of its prompt may have 80 MB;
one that is larger than the bound waits until it is alone."""

_MIN_PAUSE_S, _MAX_PAUSE_S = 0.2, 2.0
"""First and longest pause before a retry; it doubles in between. A job goes on this soon after the
disk has room again: with at most 10 s it took 4.6 s after half a minute without room."""

_FLUSH_TIMEOUT_S = 3.0
"""How long a job may store outcomes when the server stops. Rows without an outcome run again."""


class StopReason(enum.Enum):
    """Why no more rows are run."""

    CANCELLED = enum.auto()
    EXPIRED = enum.auto()
    NO_ROOM = enum.auto()
    """The tenant's files and results are as large as they may be."""
    HANDOVER = enum.auto()
    """Another process continues the batch: the lease is lost, or the server stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerSettings:
    """Settings of a BatchRunner.

    model: the served model.
    group_prefixes: run rows with a common prefix next to each other.
    max_rows: most rows that the engine has at a time.
    lease_s: how long a lease lasts without a renewal.
    poll_s: how often to poll the store; shortened if leases are short.
    """

    model: str
    lease_s: float
    group_prefixes: bool = True
    max_rows: int = 256
    poll_s: float = 1.0


_RENEWALS = 4
"""Renewals per lease duration, so that a lease survives late ones."""


class StoreTrouble:
    """Logs each reason for which polls fail once, and once that they work again."""

    def __init__(self, what: str) -> None:
        """what: is polled, in the plural."""
        self._what = what
        self._reason = ""

    def note(self, error: Exception) -> None:
        """A poll has failed. Call it where the error is handled."""
        if repr(error) == self._reason:
            return
        self._reason = repr(error)
        if isinstance(error, StoreUnavailableError | StoreFullError):
            logger.warning(
                "%s pause, since they cannot be renewed or claimed: %s", self._what, error
            )
        else:
            logger.exception("cannot renew or claim %s", self._what)

    def end(self) -> None:
        """A poll has succeeded."""
        if self._reason:
            self._reason = ""
            logger.warning("%s go on: the store works again", self._what)


class PollLoop:
    """Polls the store regularly, and at once when it is woken."""

    def __init__(self, settings: RunnerSettings) -> None:
        self._every_s = min(settings.poll_s, settings.lease_s / _RENEWALS)
        self._wakeup = asyncio.Event()

    def wake(self) -> None:
        self._wakeup.set()

    async def run(self, poll: Callable[[], Awaitable[None]]) -> NoReturn:
        """Call `poll` until cancelled."""
        while True:
            self._wakeup.clear()
            await poll()
            with contextlib.suppress(TimeoutError):
                # Not wait_for: before Python 3.12 it loses a cancellation if the event is set.
                async with asyncio.timeout(self._every_s):
                    await self._wakeup.wait()


_STOP_TIMEOUT_S = 5.0
"""How long jobs may take to stop, and then their blocking work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerContext:
    """Shared by all jobs of a runner.

    threads: for blocking work on the disk and the database.
    validating: whose input file is validated when.
    limits: of a tenant.
    server_limits: of all tenants together.
    note_refusal: called when a batch fails because of a limit of its tenant.
    unstored: bytes of the outcomes of all jobs that wait to be stored.
    finalizing: held by jobs that write their result files.
    expected_at: when a job is expected to end (Unix seconds), None if unknown.
    """

    store: BatchStore
    files: FileStore
    handler: RowHandler
    clock: Clock
    ids: IdGenerator
    settings: RunnerSettings
    threads: Executor
    limiter: RowLimiter
    throughput: Throughput
    counts: RowCounts
    isolation: SuspectIsolation
    validating: ValidationTurns
    limits: Callable[[str], TenantLimits]
    server_limits: TenantLimits
    note_refusal: Callable[[str, Resource], None]
    unstored: ByteBudget
    finalizing: asyncio.Semaphore
    expected_at: Callable[[Job], int | None]

    async def io(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do blocking work on a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.threads, lambda: work(*args, **kwargs))

    async def persist(self, work: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Do blocking work on a thread, retrying while the store is unavailable or full.

        Raises StoreError for a permanent failure, and what else `work` raises, such as
        StoreLimitError.
        """
        return await self.retrying(lambda: self.io(work, *args, **kwargs))

    async def retrying(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """`persist` of work that `attempt` does."""
        for pause_s in _pauses():
            try:
                return await attempt()
            except StoreLimitError:
                raise
            except (StoreUnavailableError, StoreFullError) as error:
                if pause_s < _MAX_PAUSE_S:  # else it was said a few times
                    logger.warning("retrying in %.1f s: %s", pause_s, error)
            await asyncio.sleep(pause_s)
        raise AssertionError("pauses never end")

    async def end(self, release: Callable[[], None]) -> None:
        """End the threads, then release all leases; nothing uses the store afterwards, unless a
        thread needs more than _STOP_TIMEOUT_S.

        Work whose caller was cancelled goes on in its thread. A claim among it must not follow the
        last release: what it claims would have no runner until the lease ends.
        """

        def release_if_possible() -> None:
            with contextlib.suppress(StoreError, StoreFullError):
                release()

        def end() -> None:
            self.threads.shutdown()
            release_if_possible()

        ending = asyncio.create_task(asyncio.to_thread(end))
        ended, _ = await asyncio.wait([ending], timeout=_STOP_TIMEOUT_S)
        if not ended:
            await asyncio.to_thread(release_if_possible)


async def run_row(context: RunnerContext, answer: Callable[[], Awaitable[T]]) -> T:
    """The result of `answer`, which runs a row once: it is called again as long as the engine
    postpones the row, and, beside fewer and fewer other rows, when the engine has failed.

    Raises the RowInterruptedError of the last attempt.
    """
    for attempt, pause_s in enumerate(_pauses(), start=1):
        try:
            async with context.isolation.admitted(interruptions=attempt - 1):
                return await _once_accepted(answer)
        except RowInterruptedError:
            context.counts.interrupted += 1
            if attempt >= MAX_ATTEMPTS:
                raise
            await asyncio.sleep(pause_s)
    raise AssertionError("pauses never end")


async def _once_accepted(answer: Callable[[], Awaitable[T]]) -> T:
    for pause_s in _pauses():
        try:
            return await answer()
        except RowPostponedError as error:
            await asyncio.sleep(min(error.retry_after_s, pause_s))
    raise AssertionError("pauses never end")


class Job:
    """One batch under a lease. `run` it once: it retries interrupted rows and nothing else."""

    def __init__(self, context: RunnerContext, lease: Lease, batch: Batch) -> None:
        self.lease = lease
        self.batch = batch
        self.lease_until_s = 0.0
        self._context = context
        self._stopped: asyncio.Future[StopReason] = asyncio.get_running_loop().create_future()
        self._unstored: asyncio.Queue[RowOutcome] = asyncio.Queue(_MAX_UNSTORED)
        self._unstored_bytes = 0
        unix_ahead_s = context.clock.unix_time() - context.clock.now()
        remaining = batch.total - batch.completed - batch.failed
        self.pace = JobPace(remaining, batch.expires_at - unix_ahead_s)

    @property
    def backlog(self) -> int:
        """Rows not yet sent to the engine; 0 after `stop`."""
        return 0 if self._stopped.done() else self.pace.remaining - self.pace.in_flight

    def stop(self, reason: StopReason) -> None:
        """Run no more rows. Later calls have no effect."""
        if not self._stopped.done():
            self._stopped.set_result(reason)

    async def run(self) -> None:
        """Return when the batch has its final status, or another process must continue it."""
        with contextlib.suppress(LeaseLostError):
            outcome = self.batch.outcome or await self._process()
            if outcome is not None:
                await self._finalize(outcome)

    async def _process(self) -> BatchStatus | None:
        """Validate the input and run the rows; returns the final status.

        None if the batch already has it, or another process must continue the batch.
        """
        if (
            self.batch.served_model != self._context.settings.model
            and self._now() >= self.batch.expires_at
        ):
            return BatchStatus.EXPIRED  # this server's handler cannot check rows of another model
        if self.batch.status is BatchStatus.VALIDATING:
            await self._validate()
            if self._stopped.done() and self._stopped.result() is StopReason.HANDOVER:
                return None
        if self.batch.status is BatchStatus.CANCELLING:
            return BatchStatus.CANCELLED
        if self.batch.status is BatchStatus.FAILED:
            return None
        reason = await self._until_stopped(self._run_rows())
        if reason is StopReason.HANDOVER:
            return None
        outcomes = {
            StopReason.CANCELLED: BatchStatus.CANCELLED,
            StopReason.EXPIRED: BatchStatus.EXPIRED,
            StopReason.NO_ROOM: BatchStatus.FAILED,
        }
        return outcomes[reason] if reason else BatchStatus.COMPLETED

    async def _validate(self) -> None:
        context, batch = self._context, self.batch
        checking = check_input(
            context.files.bodies.path(batch.input_digest),
            batch.input_digest,
            batch.endpoint,
            functools.partial(context.handler.check, batch.tenant),
            group=context.settings.group_prefixes,
        )
        validating = asyncio.ensure_future(context.validating.run(batch.tenant, checking))
        try:
            ends: tuple[asyncio.Future[Any], ...] = (validating, self._stopped)
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            checked = validating.result() if validating.done() else None
        finally:
            await _cancel_all(validating)
        if checked is not None and checked.errors:
            await context.persist(context.store.fail, self.lease, checked.errors, self._now())
        elif checked is not None:
            self.batch = await context.persist(
                context.store.admit,
                self.lease,
                checked.rows,
                model=checked.model,
                tokens=checked.tokens,
                max_tokens=context.limits(batch.tenant).batch_tokens,
                now=self._now(),
            )
            self.pace.remaining = self.batch.total
            if self.batch.status is BatchStatus.FAILED:
                context.note_refusal(batch.tenant, Resource.BATCH_TOKENS)
            return
        self.batch = await context.persist(context.store.get, batch.tenant, batch.id)

    async def _until_stopped(self, work: Awaitable[None]) -> StopReason | None:
        """Do `work` until it is done (returns None), the window ends, or `stop` is called.

        Before it returns, the outcomes of rows that have ended are stored.
        """
        storing = asyncio.create_task(self._store_outcomes())
        working = asyncio.ensure_future(work)
        ends: tuple[asyncio.Future[Any], ...] = (working, storing, self._stopped)
        left_s = max(self.pace.deadline_s - self._context.clock.now(), 0.0)
        try:
            await asyncio.wait(ends, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if storing.done():
                storing.result()  # the lease is lost
            if working.done():
                working.result()
                reason = None
            else:
                self.stop(StopReason.EXPIRED)  # unless there is a reason already
                reason = self._stopped.result()
                await _cancel_all(working)
            flush_s = _FLUSH_TIMEOUT_S if reason is StopReason.HANDOVER else None
            stored = asyncio.ensure_future(self._unstored.join())
            await asyncio.wait(
                {stored, storing}, timeout=flush_s, return_when=asyncio.FIRST_COMPLETED
            )
            await _cancel_all(stored)
            if storing.done():
                storing.result()
            return reason
        finally:
            await _cancel_all(working, storing)
            self._release_bytes(self._unstored_bytes)

    async def _run_rows(self) -> None:
        context, rank = self._context, -1
        path = context.files.bodies.path(self.batch.input_digest)
        with await context.io(_Input, path) as rows:
            async with asyncio.TaskGroup() as group:
                while page := await context.persist(
                    context.store.pending, self.batch.id, rank, _PAGE
                ):
                    for ref in page:
                        await self._start_row(group, rows, ref)
                    rank = page[-1].rank

    async def _start_row(self, group: asyncio.TaskGroup, rows: _Input, ref: RowRef) -> None:
        """Run a row as a task of the group, once it may start: it is admitted by the limiter, until
        the task ends, and the lease has not run out (leases are not renewed while the store is
        unavailable)."""
        limiter, tenant = self._context.limiter, self.batch.tenant
        await limiter.acquire(_urgency(self), tenant)
        try:
            while self._now() >= self.lease_until_s:
                await asyncio.sleep(_MIN_PAUSE_S)
            running = group.create_task(self._run_row(rows, ref))
        except BaseException:
            limiter.release(tenant)
            raise
        # A callback, because a task that is cancelled before it starts runs no `finally`.
        running.add_done_callback(lambda _: limiter.release(tenant))

    async def _run_row(self, rows: _Input, ref: RowRef) -> None:
        context, began_s = self._context, self._context.clock.now()
        outcome = await self._outcome(rows, ref)
        now = context.clock.now()
        tokens = outcome.usage.prompt_tokens + outcome.usage.output_tokens
        self.pace.note(tokens, now - began_s)
        context.throughput.note(now, tokens)
        context.counts.completed += outcome.ok
        context.counts.failed += not outcome.ok
        await context.unstored.acquire(outcome.num_bytes)
        self._unstored_bytes += outcome.num_bytes
        await self._unstored.put(outcome)

    def _release_bytes(self, num_bytes: int) -> None:
        """Count that this many bytes of outcomes do not wait any more."""
        self._unstored_bytes -= num_bytes
        self._context.unstored.release(num_bytes)

    async def _outcome(self, rows: _Input, ref: RowRef) -> RowOutcome:
        context, batch = self._context, self.batch
        row_id, request_id = context.ids.new("batch_req", "_"), context.ids.new("req")
        try:
            row = await context.io(lambda: parse_row(rows.read(ref), batch.endpoint))
            if row.custom_id != ref.custom_id:
                raise BadRowError("damaged_file", "The line has another custom_id than the row.")
        except FileNotFoundError:
            message = "The content of the input file is missing on the server."
            return RowOutcome(
                ref.line, False, error_line(row_id, ref.custom_id, "missing_file", message)
            )
        except (BadRowError, OSError):
            line = error_line(row_id, ref.custom_id, "damaged_file", "The input file is damaged.")
            return RowOutcome(ref.line, False, line)
        try:
            reply = await run_row(context, lambda: self._answer(row.body, request_id))
        except RowInterruptedError as error:
            line = error_line(row_id, ref.custom_id, "engine_error", str(error))
            return RowOutcome(ref.line, False, line)
        make_line = functools.partial(reply_line, row_id, ref.custom_id, request_id, reply)
        # Without a pause if it is short: a server that stops would lose what is answered.
        line = make_line() if len(reply.body) <= SHORT_BODY else await context.io(make_line)
        return RowOutcome(ref.line, reply.status_code < 400, line, reply.usage)

    async def _answer(self, body: dict[str, Any], request_id: str) -> RowReply:
        """Run the row once."""
        context = self._context
        now, in_flight = context.clock.now(), context.limiter.used
        slo = Slo(
            deadline_s=self.pace.due_in_s(now, in_flight),
            schedule_s=self.pace.schedule_s(now, in_flight),
            rt_slowdown=self.batch.rt_slowdown,
        )
        with self.pace.running():
            return await context.handler.answer(
                self.batch.endpoint,
                body,
                request_id=request_id,
                tenant=self.batch.tenant,
                slo=slo,
            )

    async def _store_outcomes(self) -> None:
        """Store outcomes as they arrive, all that are waiting in one transaction."""
        while True:
            outcomes = [await self._unstored.get()]
            while not self._unstored.empty():
                outcomes.append(self._unstored.get_nowait())
            await self._store(outcomes)
            for _ in outcomes:
                self._unstored.task_done()
            self._release_bytes(sum(outcome.num_bytes for outcome in outcomes))

    async def _store(self, outcomes: Sequence[RowOutcome]) -> None:
        """If the outcomes exceed the limit of the tenant, the batch fails with those that fit. If
        they exceed the server's limit, it waits until files are deleted."""
        for pause_s in _pauses():
            try:
                await self._commit(outcomes)
                return
            except StoreLimitError as error:
                if len(outcomes) == 1:
                    if pause_s < _MAX_PAUSE_S:
                        logger.warning("%s waits for room: %s", self.batch.id, error)
                    await self._pause(pause_s)
                    continue
            except (TenantLimitError, OverTenantLimitError) as error:
                if len(outcomes) == 1:
                    await self._give_up(error)
                    return
            half = len(outcomes) // 2  # many wait if the store is slow; the first of them may fit
            await self._store(outcomes[:half])
            await self._store(outcomes[half:])  # stores nothing once the batch has failed
            return

    async def _commit(self, outcomes: Sequence[RowOutcome]) -> None:
        """Raises what BatchStore.commit raises. A batch that ends early stores what is answered
        without regard to the server's limit: it would not end before there is room, and these
        few answers would be lost."""
        context = self._context
        reason = self._stopped.result() if self._stopped.done() else None
        ends_early = reason in (StopReason.CANCELLED, StopReason.EXPIRED)
        await context.persist(
            context.store.commit,
            self.lease,
            outcomes,
            context.expected_at(self),
            self._now(),
            context.limits(self.batch.tenant),
            NO_LIMITS if ends_early else context.server_limits,
        )

    async def _pause(self, seconds: float) -> None:
        """Sleep, but no longer than until the batch is stopped."""
        if self._stopped.done():
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait([self._stopped], timeout=seconds)

    async def _give_up(self, error: TenantLimitError | OverTenantLimitError) -> None:
        """The batch fails, as its results do not fit beside the files of its tenant."""
        context = self._context
        message = (
            f"The results do not fit beside your files: {error} The output file has what was "
            "answered before. Delete files that you do not need, then submit the requests that "
            "the error file names again."
        )
        no_room = LineError("tenant_limit_exceeded", message)
        await context.persist(context.store.give_up, self.lease, no_room, self._now())
        if not self._stopped.done():  # else rows that had begun had no room either
            context.note_refusal(self.batch.tenant, Resource(error.resource))
        self.stop(StopReason.NO_ROOM)

    async def _finalize(self, outcome: BatchStatus) -> None:
        """Write the result files, then delete the rows. After an interruption this starts over."""
        context = self._context
        outcome = await context.persist(
            context.store.begin_finalizing, self.lease, outcome, self._now()
        )

        async def write() -> None:
            # Held for one attempt, so that batches that cannot be written do not stop the others.
            async with context.finalizing:
                await context.io(self._write_files, outcome)

        await context.retrying(write)
        logger.info("%s is %s", self.batch.id, outcome)

    def _write_files(self, outcome: BatchStatus) -> None:
        context, batch_id, now = self._context, self.batch.id, self._now()
        with context.files.bodies.new() as output, context.files.bodies.new() as errors:
            _write_lines(output, (line for _, line in context.store.results(batch_id, ok=True)))
            unfinished = _UNFINISHED.get(outcome, _UNFINISHED[BatchStatus.EXPIRED])
            _write_lines(
                errors,
                (
                    line or error_line(context.ids.new("batch_req", "_"), custom_id, *unfinished)
                    for custom_id, line in context.store.results(batch_id, ok=False)
                ),
            )
            context.store.finish(
                self.lease,
                outcome,
                (output, self._file(output, "output", now)) if output.num_bytes else None,
                (errors, self._file(errors, "error", now)) if errors.num_bytes else None,
                now,
            )

    def _file(self, body: BodyWriter, kind: str, now: float) -> StoredFile:
        return StoredFile(
            id=self._context.ids.new("file"),
            tenant=self.batch.tenant,
            digest=body.digest,
            num_bytes=body.num_bytes,
            filename=f"{self.batch.id}_{kind}.jsonl",
            purpose="batch_output",
            created_at=int(now),
            expires_at=int(now) + (self.batch.output_life_s or FILE_LIFE_S),
        )

    def _now(self) -> float:
        return self._context.clock.unix_time()


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
    """An open input file. Threads can read it at the same time (pread has no shared position).

    If a job is cancelled while a thread opens the file, no caller gets this object, and the file is
    closed with the last reference to it.
    """

    def __init__(self, path: Path) -> None:
        self._handle = -1  # every read fails, so every row gets an error
        self._path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            logger.error("the input file of a batch is missing: %s", path)

    def read(self, ref: RowRef) -> bytes:
        """One line of the file. Raises FileNotFoundError if the file was missing when it was
        opened, and OSError if it cannot be read."""
        if self._handle < 0:
            raise FileNotFoundError(self._path)
        return os.pread(self._handle, ref.length, ref.offset)

    def __enter__(self) -> _Input:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)


def _write_lines(body: BodyWriter, lines: Iterable[str]) -> None:
    for line in lines:
        body.write(line.encode("utf-8", "surrogatepass") + b"\n")
    body.finish()


def _pauses() -> Iterable[float]:
    """Seconds before each retry, doubled every time up to a maximum; never ends."""
    pause_s = _MIN_PAUSE_S
    while True:
        yield pause_s
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


async def _cancel_all(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended; their results and errors are dropped."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


_EAGER_CLAIMS = 2
"""A runner claims up to this many batches in one poll; once it has them, one more per poll."""

_INITIAL_ROWS, _MIN_SPARE_ROWS = 16, 4
_ADJUST_S = 0.5
_SWEEP_S = 600.0
_THREADS = 6

_MAX_FINALIZING = 2
"""Jobs that write their result files at a time. Each has a thread for up to some seconds, and the
others are for leases and rows: when 20 batches of 10,000 rows ended together, no row of any other
ran and no lease was renewed for 16 s."""

_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""The process, or the machine, has too many open files. That passes, so no batch fails of it."""

_MAX_FAULTS = 3
_FAULT = LineError(
    "internal_error",
    "The server failed repeatedly while it processed this batch, as far as is known not because of "
    "the batch itself. The server log has the details.",
)


class BatchRunner:
    """Runs the batches of a store; one per process. `run` it in a task, `wake` it for changes."""

    def __init__(
        self,
        store: BatchStore,
        files: FileStore,
        handler: RowHandler,
        load: Callable[[], Awaitable[EngineStats]],
        clock: Clock,
        ids: IdGenerator,
        settings: RunnerSettings,
        limits: Callable[[str], TenantLimits] = lambda tenant: NO_LIMITS,
        server_limits: TenantLimits = NO_LIMITS,
        note_refusal: Callable[[str, Resource], None] = lambda tenant, resource: None,
    ) -> None:
        """load: the engine's statistics; may raise EngineDeadError.
        limits, server_limits, note_refusal: see RunnerContext.
        """
        self._load = load
        self._settings = settings
        self._polling = PollLoop(settings)
        self._owner = ids.new("runner")
        self._jobs: dict[str, tuple[Job, asyncio.Task[None]]] = {}
        self._trouble = StoreTrouble("batches")
        self._context = RunnerContext(
            store=store,
            files=files,
            handler=handler,
            clock=clock,
            ids=ids,
            settings=settings,
            threads=ThreadPoolExecutor(_THREADS, thread_name_prefix="batch"),
            limiter=RowLimiter(min(_INITIAL_ROWS, settings.max_rows)),
            throughput=Throughput(),
            counts=RowCounts(),
            isolation=SuspectIsolation(),
            validating=ValidationTurns(clock),
            limits=limits,
            server_limits=server_limits,
            note_refusal=note_refusal,
            unstored=ByteBudget(_MAX_UNSTORED_BYTES),
            finalizing=asyncio.Semaphore(_MAX_FINALIZING),
            expected_at=self._expected_at,
        )

    @property
    def context(self) -> RunnerContext:
        """For a BackgroundRunner, whose responses take turns with the rows."""
        return self._context

    @property
    def rows_in_flight(self) -> int:
        return self._context.limiter.used

    def backlog(self) -> list[tuple[int, float]]:
        """For each batch of this runner with rows left: rows not yet sent to the engine, and
        seconds until its window ends."""
        now = self._context.clock.now()
        jobs = [job for job, _ in self._jobs.values()]
        return [(job.backlog, max(0.0, job.pace.deadline_s - now)) for job in jobs if job.backlog]

    @property
    def counts(self) -> RowCounts:
        """Not a copy; do not change it."""
        return self._context.counts

    def wake(self) -> None:
        """Poll the store at once: a batch was created or cancelled."""
        self._polling.wake()

    async def run(self) -> None:
        """Run batches until cancelled; then release them for other processes."""
        others = [asyncio.create_task(self._adjust_limit()), asyncio.create_task(self._sweep())]
        try:
            await self._polling.run(self._poll)
        finally:
            for task in others:
                task.cancel()
            await asyncio.shield(asyncio.ensure_future(self._stop_jobs()))

    async def _poll(self) -> None:
        context, began_s = self._context, self._now()
        lease_s = self._settings.lease_s
        until_s = began_s + lease_s  # not later than in the store, whose lease begins later
        for job, _ in self._jobs.values():
            # The job's own timer stands still while the machine sleeps.
            if began_s >= job.batch.expires_at:
                job.stop(StopReason.EXPIRED)
        try:
            now = await context.io(context.store.time, began_s)
            if self._jobs:
                ids, expected = list(self._jobs), self._expectations()
                held = await context.io(
                    context.store.renew, self._owner, ids, now, lease_s, expected
                )
                self._apply_leases(held, until_s)
            # Few at a time, so that servers that share a store share its batches.
            most = max(1, _EAGER_CLAIMS - len(self._jobs))
            model = self._settings.model
            claimed = await context.io(context.store.claim, self._owner, now, lease_s, most, model)
        except Exception as error:
            self._trouble.note(error)
            return
        self._trouble.end()
        for lease, batch in claimed:
            # Else the old job has to end first, and a later poll claims the batch again.
            if batch.id not in self._jobs:
                self._start_job(lease, batch, until_s)

    def _apply_leases(self, held: Mapping[Lease, BatchStatus], until_s: float) -> None:
        for job, _ in self._jobs.values():
            status = held.get(job.lease)
            if status is None:
                job.stop(StopReason.HANDOVER)
                continue
            job.lease_until_s = until_s
            if status is BatchStatus.CANCELLING:
                job.stop(StopReason.CANCELLED)

    def _start_job(self, lease: Lease, batch: Batch, until_s: float) -> None:
        if not self._jobs:
            self._context.throughput.began(self._context.clock.now())
        job = Job(self._context, lease, batch)
        job.lease_until_s = until_s
        task = asyncio.create_task(self._run_job(job), name=batch.id)
        self._jobs[batch.id] = job, task

    async def _run_job(self, job: Job) -> None:
        try:
            await job.run()
            # Else small batches would follow one another a poll apart. After an error the next one
            # has time: what let this batch fail would let all that wait fail at once.
            self._polling.wake()
        except Exception as error:
            # The lease runs out, and the process that claims the batch next tries again.
            if isinstance(error, OSError) and error.errno in _NO_DESCRIPTORS:
                logger.warning("batch %s pauses: %s", job.batch.id, error.strerror)
                return
            logger.exception("batch %s failed in this process", job.batch.id)
            await self._note_fault(job)
        finally:
            del self._jobs[job.batch.id]

    async def _note_fault(self, job: Job) -> None:
        store = self._context.store
        try:
            await self._context.io(store.note_fault, job.lease, _FAULT, _MAX_FAULTS, self._now())
        except LeaseLostError:
            pass  # the process that holds the lease now tries again
        except Exception:
            logger.exception("the failure of batch %s could not be recorded", job.batch.id)

    async def _stop_jobs(self) -> None:
        """Stop all jobs, store their outcomes, and release their leases."""
        for job, _ in self._jobs.values():
            job.stop(StopReason.HANDOVER)
        tasks = [task for _, task in self._jobs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_STOP_TIMEOUT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._context.end(functools.partial(self._context.store.release, self._owner))

    async def _adjust_limit(self) -> None:
        """Adjust the limit so that the engine never runs out of rows and few of them wait.

        The target is half as many waiting as running best-effort requests.
        """
        limiter = self._context.limiter
        while True:
            await asyncio.sleep(_ADJUST_S)
            try:
                best_effort = (await self._load()).by_class.get(ServiceClass.BE)
            except EngineDeadError:
                continue
            except Exception:
                logger.exception("cannot read the engine's statistics")
                continue
            if best_effort is not None:
                spare = max(_MIN_SPARE_ROWS, best_effort.running // 2) - best_effort.waiting
                # Never below the initial limit, even if many other requests wait.
                wanted = max(_INITIAL_ROWS, limiter.used + spare)
                limiter.limit = min(wanted, self._settings.max_rows)

    async def _sweep(self) -> None:
        """Delete expired files, and bodies that no file or batch uses."""
        while True:
            try:
                await self._context.io(self._context.files.sweep, self._now())
            except (StoreUnavailableError, StoreFullError) as error:
                logger.warning("cannot delete expired files: %s", error)
            except Exception:
                logger.exception("cannot delete expired files")
            await asyncio.sleep(_SWEEP_S)

    def _expectations(self) -> dict[str, int]:
        """Batch id -> when it is expected to end, of all jobs for which that is known."""
        jobs = sorted((job for job, _ in self._jobs.values()), key=_urgency)
        backlog, found = Backlog(), {}
        for _, equal in itertools.groupby(jobs, _urgency):
            together = list(equal)  # their rows take turns
            for job in together:
                backlog.add(job.pace)
            at = self._end_of(backlog)
            if at is not None:
                found.update(dict.fromkeys((job.batch.id for job in together), at))
        return found

    def _expected_at(self, job: Job) -> int | None:
        backlog = Backlog()
        backlog.add(job.pace)
        for other, _ in self._jobs.values():
            if other is not job and _urgency(other) <= _urgency(job):
                backlog.add(other.pace)
        return self._end_of(backlog)

    def _end_of(self, backlog: Backlog) -> int | None:
        """When all of it is expected to be done (Unix seconds), None if unknown."""
        left_s = backlog.seconds(self._context.throughput.rate(self._context.clock.now()))
        return None if left_s is None else round(self._now() + left_s)

    def _now(self) -> float:
        return self._context.clock.unix_time()


def _urgency(job: Job) -> tuple[int, int]:
    """Rows of the job with the smallest one run first."""
    return job.batch.expires_at, job.batch.created_at
