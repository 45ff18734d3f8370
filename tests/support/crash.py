"""Processes that work on batches and may be killed at any moment, and what is left of that.

Every worker is a process of its own with a real store and runner; only the rows are scripted.
Whenever it has answered a row, it says so in a log outside the store, which shows how often rows
were really run.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import sqlalchemy as sa

from bros.batch.database import Database
from bros.batch.files import Bodies, FileStore
from bros.batch.objects import (
    DAY_S,
    Batch,
    BatchStatus,
    RowInterruptedError,
    RowPostponedError,
    TokenUsage,
)
from bros.batch.rows import RowFacts, RowReply
from bros.batch.runner import BatchRunner, RunnerSettings
from bros.batch.store import BatchStore
from bros.core.clock import SystemClock
from bros.core.interfaces import EngineStats
from bros.core.request import IdGenerator, Slo
from support.batch_store import NOW, Store, open_store
from support.forking import forkserver
from support.server_process import wait_until

COMPLETIONS = "/v1/completions"
UP = "up"
_PATIENCE_S = 60.0
_REFUSED_EVERY, _TROUBLE = 10, 0.02


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What a worker is told. row_s: longest time of a row. ahead_s: how much later it is for this
    worker, and its database, than for one without. skew_s: how wrong its own clock is beside the
    real one of its database. max_rows: most rows at a time. dies_at: it kills itself at this
    transaction, counted from 1, before or after it is committed."""

    seed: int
    row_s: float
    ahead_s: float = 0.0
    skew_s: float | None = None
    lease_s: float = 15.0
    poll_s: float = 0.05
    max_rows: int = 16
    dies_at: tuple[int, bool] | None = None


def input_lines(names: list[str]) -> bytes:
    """An input file with a row of each name."""
    rows = (
        {"custom_id": name, "method": "POST", "url": COMPLETIONS, "body": {"prompt": name}}
        for name in names
    )
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def is_refused(name: str) -> bool:
    """Whether a row, `<batch>.<number>`, gets an error."""
    return _number(name) % _REFUSED_EVERY == 0


def usage_of(name: str) -> TokenUsage:
    """Different for each row; none for an error."""
    number = _number(name)
    return TokenUsage() if is_refused(name) else TokenUsage(number, number // 2, 3 * number)


def _number(name: str) -> int:
    return int(name.rpartition(".")[2])


class ScriptedRows:
    """A RowHandler: takes random times, and now and then has the troubles an engine has."""

    def __init__(self, log: Path, orders: Orders) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._rng = random.Random(orders.seed)
        self._row_s = orders.row_s
        self.note(UP)

    def note(self, what: str) -> None:
        os.write(self._log, f"{os.getpid()} {what}\n".encode())

    def check(self, tenant: str, endpoint: str, body: dict[str, Any]) -> RowFacts:
        return RowFacts("scripted", body["prompt"])

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, slo: Slo
    ) -> RowReply:
        name: str = body["prompt"]
        await asyncio.sleep(self._rng.uniform(0.0, self._row_s))
        trouble = self._rng.random()
        if trouble < _TROUBLE:
            raise RowInterruptedError("The engine died.")
        if trouble < 2 * _TROUBLE:
            raise RowPostponedError("The engine is busy.", retry_after_s=0.01)
        self.note(name)
        reply = json.dumps({"echo": name, "by": os.getpid()})
        return RowReply(400 if is_refused(name) else 200, reply, usage_of(name))


class _DoomedDatabase:
    """Kills its process around one of its transactions."""

    def __init__(self, database: Database, dies_at: int, committed: bool) -> None:
        self._database = database
        self._numbers = itertools.count(1)
        self._dies_at = dies_at
        self._committed = committed

    def read(self) -> contextlib.AbstractContextManager[sa.Connection]:
        return self._database.read()

    def unlocked(self, connection: sa.Connection, ids: sa.Select[Any]) -> Sequence[str]:
        return self._database.unlocked(connection, ids)

    def is_free(
        self, lease_until: sa.Column[float], now: float, lease_s: float
    ) -> sa.ColumnElement[bool]:
        return self._database.is_free(lease_until, now, lease_s)

    @contextlib.contextmanager
    def write(self, **options: bool) -> Iterator[sa.Connection]:
        with self._database.write(**options) as connection:
            yield connection
            dies = next(self._numbers) == self._dies_at
            if dies and not self._committed:
                os.kill(os.getpid(), signal.SIGKILL)
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)


class _LaterStore(BatchStore):
    """The clock of its database is that of the calling process."""

    def time(self, now: float) -> float:
        return now


class _Later(SystemClock):
    """Unix time begins when tests do, and is further on for some."""

    def __init__(self, began_s: float, ahead_s: float) -> None:
        self._unix_ahead_s = NOW + ahead_s - began_s

    def unix_time(self) -> float:
        return self.now() + self._unix_ahead_s


def _work(url: str | None, folder: Path, log: Path, began_s: float, orders: Orders) -> None:
    """What a worker's process does, until it is told to end."""
    with open_store(url, folder) as store:
        asyncio.run(_run(store, ScriptedRows(log, orders), began_s, orders))


async def _run(store: Store, handler: ScriptedRows, began_s: float, orders: Orders) -> None:
    database, files = store.database, store.files
    if orders.dies_at is not None:
        database = cast(Database, _DoomedDatabase(store.database, *orders.dies_at))
        files = FileStore(database, Bodies(store.folder / "bodies"))
    batches = _LaterStore(database, files) if orders.skew_s is None else store.batches
    settings = RunnerSettings(
        model="",
        lease_s=orders.lease_s,
        max_rows=orders.max_rows,
        poll_s=orders.poll_s,
    )
    clock = _Later(began_s, orders.ahead_s + (orders.skew_s or 0.0))
    ids = IdGenerator(random.SystemRandom())
    runner = BatchRunner(batches, files, handler, _idle, clock, ids, settings)
    running = asyncio.ensure_future(runner.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def _idle() -> EngineStats:
    return EngineStats()


class Site:
    """A store that workers work on, seen from outside."""

    def __init__(self, store: Store, log: Path) -> None:
        self.store = store
        self._log = log
        self._log.touch()
        self._began_s = SystemClock().now()
        self._batches: dict[str, list[str]] = {}
        self._workers: list[BaseProcess] = []
        self._processes = forkserver()

    def submit(self, num_rows: int) -> str:
        """A batch whose rows are called `<batch>.<number>`, numbered from 1."""
        batch_id = f"batch_{len(self._batches)}"
        names = [f"{batch_id}.{number}" for number in range(1, num_rows + 1)]
        content = input_lines(names)
        self.store.put_file(content, file_id=f"file-{batch_id}")
        self.store.put_batch(batch_id, content=content, expires_at=NOW + 30 * DAY_S)
        self._batches[batch_id] = names
        return batch_id

    def start(self, orders: Orders) -> BaseProcess:
        """A worker; it may not have begun to work when this returns."""
        where = self.store.url, self.store.folder, self._log, self._began_s
        process = self._processes.Process(target=_work, args=(*where, orders))
        process.start()
        self._workers.append(process)
        return process

    def started(self, orders: Orders) -> BaseProcess:
        """A worker that has opened the store."""
        process = self.start(orders)
        wait_until(
            lambda: not process.is_alive() or (process.pid, UP) in self.log(),
            _PATIENCE_S,
            "a worker is up",
        )
        return process

    def log(self) -> list[tuple[int, str]]:
        """(process, row), in the order in which rows were answered."""
        lines = (line.split() for line in self._log.read_text().splitlines())
        return [(int(pid), what) for pid, what in lines]

    def batch(self, batch_id: str) -> Batch:
        return self.store.batches.get("ann", batch_id)

    def open_batches(self) -> list[str]:
        return [name for name in self._batches if not self.batch(name).status.is_final]

    def wait_until_done(self, patience_s: float = _PATIENCE_S) -> None:
        wait_until(lambda: not self.open_batches(), patience_s, "all batches are done")

    def stored(self) -> dict[str, str]:
        """Results of rows that are in the store but not in files yet."""
        rows = self.store.query("SELECT custom_id, result FROM rows WHERE ok IS NOT NULL")
        return dict(cast(list[tuple[str, str]], rows))

    def num_leases(self, batch_id: str) -> int:
        """How often a worker has taken the lease of a batch."""
        sql = "SELECT lease_epoch FROM batches WHERE id = :id"
        ((epoch,),) = self.store.query(sql, id=batch_id)
        return cast(int, epoch)

    def results(self, batch_id: str) -> dict[str, str]:
        """Lines of both files of a batch by row, after everything about them was checked."""
        batch, names = self.batch(batch_id), self._batches[batch_id]
        refused = [name for name in names if is_refused(name)]
        answered = [name for name in names if not is_refused(name)]
        assert batch.status is BatchStatus.COMPLETED
        counts = (batch.total, batch.completed, batch.failed)
        assert counts == (len(names), len(answered), len(refused))
        assert batch.usage == sum(map(usage_of, names), TokenUsage())
        found: dict[str, str] = {}
        for file_id, expected, status in (
            (batch.output_file_id, answered, 200),
            (batch.error_file_id, refused, 400),
        ):
            lines = self.lines(file_id)
            rows = [json.loads(line) for line in lines]
            assert [row["custom_id"] for row in rows] == expected
            assert [row["response"]["status_code"] for row in rows] == [status] * len(rows)
            assert [row["response"]["body"]["echo"] for row in rows] == expected
            found |= zip(expected, lines, strict=True)
        return found

    def lines(self, file_id: str | None) -> list[str]:
        """Of an output or error file; none without a file."""
        if file_id is None:
            return []
        content = self.store.files.body(self.store.files.get("ann", file_id, NOW)).read_bytes()
        assert content.endswith(b"\n")
        return content.decode().splitlines()

    def check_nothing_else_is_left(self) -> None:
        """No rows, and of files those that batches name."""
        assert self.store.query("SELECT count(*) FROM rows") == [(0,)]
        expected = {f"file-{name}" for name in self._batches}
        for batch in map(self.batch, self._batches):
            expected |= {i for i in (batch.output_file_id, batch.error_file_id) if i is not None}
        assert {row[0] for row in self.store.query("SELECT id FROM files")} == expected
        self.store.files.sweep(NOW)
        digests = {row[0] for row in self.store.query("SELECT digest FROM files")}
        assert self.store.bodies() == digests

    def close(self) -> None:
        for process in self._workers:
            process.kill()
            process.join()
            process.close()


def runs(log: list[tuple[int, str]]) -> Counter[str]:
    """How often each row was answered."""
    return Counter(what for _, what in log if what != UP)


def stop(process: BaseProcess, number: signal.Signals) -> None:
    """Send a signal, and wait for the end unless it only stops the process or lets it go on."""
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        if process.is_alive():
            os.kill(process.pid, number)
    if number not in (signal.SIGSTOP, signal.SIGCONT):
        process.join(_PATIENCE_S)
        assert process.exitcode is not None
