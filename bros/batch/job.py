"""One batch on its way from a file of rows to files of results."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import os
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from bros.batch.bodies import BodyWriter
from bros.batch.errors import (
    LeaseLostError,
    RowInterruptedError,
    RowPostponedError,
    StoreFullError,
    StoreUnavailableError,
)
from bros.batch.files import FileStore
from bros.batch.jobs import BatchStore
from bros.batch.objects import (
    FILE_LIFE_S,
    Batch,
    BatchStatus,
    Lease,
    RowOutcome,
    RowRef,
    StoredFile,
)
from bros.batch.pacing import JobPace, RowCounts, Throughput
from bros.batch.rows import BadRowError, RowHandler, error_line, parse_row, reply_line
from bros.batch.slots import Slots
from bros.batch.suspects import MOST_INTERRUPTIONS, Company
from bros.batch.validation import check_input
from bros.core.clock import Clock
from bros.core.ids import IdGenerator

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
    """Somebody else goes on with it: the lease is lost, or the server ends."""


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
        """Until the batch has its final status, or somebody else is to go on with it."""
        with contextlib.suppress(LeaseLostError):
            outcome = self.batch.outcome or await self._work()
            if outcome is not None:
                await self._wind_up(outcome)

    async def _work(self) -> BatchStatus | None:
        """What the batch ends as; None if that is not for us to say."""
        if self.batch.served_model != self._shop.model and self._now() >= self.batch.expires_at:
            return BatchStatus.EXPIRED  # nobody here can check its rows
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
