"""Sends the sessions of a run at their arrival times and keeps a backlog in flight beside them.

sessions   ---s1-----------s2--s3------------>   open loop: arrivals wait for nothing
worker 1   [be1      ][be3   ][be4        ][be    }  closed loop; cancelled at the end and
worker 2   [be2              ][be5  ][be6         }  recorded as OPEN
           0                              duration_s
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from bros.bench.client import Now, Outcome, Prepared, Record
from bros.bench.plan import Planned, Session
from bros.core.clock import Clock

# ---- Whether the client kept up.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHealth:
    """Whether the client kept its own schedule.

    lateness_*_s: send time minus due time of the open-loop requests (0 without any); None if
        unknown.
    cpu_share: share of all cores that the client's process used.
    fell_behind: whether lateness_p99_s exceeds MAX_LATE_P99_S.
    """

    lateness_p50_s: float | None
    lateness_p99_s: float | None
    lateness_max_s: float | None
    cpu_share: float
    fell_behind: bool


PREPARE_AHEAD_S = 1.0
"""How long before its due time the client builds a request of a session. The run begins this long
after `drive` is called, so that the first requests are built in time as well."""

MAX_LATE_P99_S = 0.010
"""With a later p99 the client has not sent the requested load."""

FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
"""The backoff of a backlog worker doubles with each consecutive failure."""

MAX_RETRY_AFTER_S = 30.0
"""Limit on the Retry-After that a worker respects."""


_RESOLUTION_S = 1e-9  # of the event loop's clock


class LoadSender(Protocol):
    """The part of client.Client that `drive` uses."""

    def prepare(self, planned: Planned) -> Prepared: ...

    async def send(self, record: Record, prepared: Prepared, now: Now) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """The requests of one run.

    sessions: the open loop, sorted by time.
    backlog: the closed loop, of which `in_flight` requests run at a time until it is exhausted.
    drain_s: how long after `duration_s` open requests may continue; no request is sent then, and
        the rest is cancelled afterwards.
    """

    duration_s: float
    sessions: Sequence[Session] = ()
    backlog: Iterator[Planned] = field(default_factory=lambda: iter(()))
    in_flight: int = 0
    drain_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """records: of all requests that came due, by due time.
    elapsed_s: duration of the run including the drain; shorter if the run was stopped.
    """

    records: list[Record]
    started_unix_s: float
    elapsed_s: float
    health: ClientHealth


Work = Coroutine[Any, Any, None]

OnProgress = Callable[[float, Sequence[Record]], None]
"""Called with the seconds since the start and the records so far, which still change."""


async def drive(
    load: OfferedLoad,
    sender: LoadSender,
    clock: Clock,
    *,
    cpu_s: Callable[[], float],
    cores: int,
    on_progress: OnProgress | None = None,
    progress_s: float = 0.5,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Run `load` to its end. A failed request is recorded and raises nothing.

    cpu_s: returns the processor seconds used by this process so far.
    stop: setting it ends the run at once.
    Raises ExceptionGroup if the backlog's iterator or `on_progress` raises.
    """
    started_unix_s, started_cpu_s = clock.unix_time() + PREPARE_AHEAD_S, cpu_s()
    run = _Run(load, sender, clock)
    await run.execute(on_progress, progress_s, stop or asyncio.Event())
    elapsed_s = max(0.0, run.now())
    share = (cpu_s() - started_cpu_s) / (elapsed_s * cores) if elapsed_s > 0 else 0.0
    return LoadResult(
        records=sorted(run.records, key=lambda record: record.due_s),
        started_unix_s=started_unix_s,
        elapsed_s=elapsed_s,
        health=_health(run.lateness_s(), share),
    )


class _Run:
    """One run.

    records: of the requests that have come due so far.
    """

    def __init__(self, load: OfferedLoad, sender: LoadSender, clock: Clock) -> None:
        self._load = load
        self._sender = sender
        self._clock = clock
        self._start_s = clock.now() + PREPARE_AHEAD_S
        self._end_s = load.duration_s  # when sending ends
        self._num_opened = 0  # sessions that have a task
        self._waiting: dict[str, Record] = {}  # prepared, not yet sent
        self._open_loop: list[Record] = []
        self.records: list[Record] = []

    def now(self) -> float:
        return self._clock.now() - self._start_s

    def lateness_s(self) -> list[float]:
        """Of the open-loop requests; an unsent request counts as late until the end of the run."""
        return [
            max(0.0, (self._end_s if record.sent_s is None else record.sent_s) - record.due_s)
            for record in self._open_loop
        ]

    async def execute(
        self, on_progress: OnProgress | None, progress_s: float, stop: asyncio.Event
    ) -> None:
        tasks: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as group:

            def spawn(coroutine: Work) -> None:
                task = group.create_task(coroutine)
                tasks.add(task)
                task.add_done_callback(tasks.discard)

            for _ in range(self._load.in_flight):
                spawn(self._run_worker())
            spawn(self._open_sessions(spawn))
            await self._report_until_end(on_progress, progress_s, stop)
            if stop.is_set():
                self._end_s = min(self._end_s, self.now())
            elif tasks and self._load.drain_s > 0:
                await asyncio.wait(tasks, timeout=self._load.drain_s)
            for task in tasks:
                task.cancel()
        self._add_unsent()
        if on_progress is not None:
            on_progress(self.now(), self.records)

    async def _report_until_end(
        self, on_progress: OnProgress | None, progress_s: float, stop: asyncio.Event
    ) -> None:
        await self._sleep_until(0.0)
        while not stop.is_set() and (left_s := self._load.duration_s - self.now()) > _RESOLUTION_S:
            try:
                async with asyncio.timeout(min(left_s, progress_s)):
                    await stop.wait()
            except TimeoutError:
                if on_progress is not None:
                    on_progress(self.now(), self.records)

    async def _open_sessions(self, spawn: Callable[[Work], None]) -> None:
        for session in self._load.sessions:
            if session.at_s >= self._end_s:
                return
            await self._sleep_until(session.at_s - PREPARE_AHEAD_S)
            spawn(self._run_session(session))
            self._num_opened += 1

    async def _run_session(self, session: Session) -> None:
        """Send all turns, also after a failed one: the load must not depend on the responses."""
        due_s = ended_s = session.at_s
        for number, turn in enumerate(session.turns):
            if number:
                due_s = ended_s + turn.think_s
            if due_s >= self._end_s:
                return
            ended_s = await self._send_at(turn.request, due_s)

    async def _send_at(self, planned: Planned, due_s: float) -> float:
        """Returns the time at which the response ended."""
        record = self._waiting[planned.name] = Record(planned=planned, due_s=due_s)
        prepared = self._sender.prepare(planned)
        await self._sleep_until(due_s)
        del self._waiting[planned.name]
        self.records.append(record)
        self._open_loop.append(record)
        await self._sender.send(record, prepared, self.now)
        return self.now() if record.end_s is None else record.end_s

    async def _run_worker(self) -> None:
        """Send one request after the other, with a backoff after failures."""
        failures = 0
        while self.now() < self._end_s:
            planned = next(self._load.backlog, None)
            if planned is None:
                return
            prepared = self._sender.prepare(planned)
            await self._sleep_until(0.0)
            record = Record(planned=planned, due_s=self.now())
            self.records.append(record)
            retry_after_s = await self._sender.send(record, prepared, self.now)
            if record.outcome is Outcome.COMPLETED:
                failures = 0
                continue
            failures += 1
            backoff_s = min(FIRST_BACKOFF_S * 2 ** min(failures - 1, 30), MAX_BACKOFF_S)
            backoff_s = max(backoff_s, min(retry_after_s or 0.0, MAX_RETRY_AFTER_S))
            if self.now() + backoff_s >= self._end_s:
                return
            await asyncio.sleep(backoff_s)

    async def _sleep_until(self, time_s: float) -> None:
        while (wait_s := time_s - self.now()) > _RESOLUTION_S:
            await asyncio.sleep(wait_s)

    def _add_unsent(self) -> None:
        """Record the requests that came due but were not sent because the client was too slow."""
        late = [record for record in self._waiting.values() if record.due_s < self._end_s]
        for session in self._load.sessions[self._num_opened :]:
            if session.turns and session.at_s < self._end_s:
                late.append(Record(planned=session.turns[0].request, due_s=session.at_s))
        self.records += late
        self._open_loop += late


def _health(lateness_s: list[float], share: float) -> ClientHealth:
    lateness_s = sorted(lateness_s) or [0.0]
    p50, p99 = (lateness_s[math.ceil(q * len(lateness_s)) - 1] for q in (0.5, 0.99))
    return ClientHealth(
        lateness_p50_s=p50,
        lateness_p99_s=p99,
        lateness_max_s=lateness_s[-1],
        cpu_share=share,
        fell_behind=p99 > MAX_LATE_P99_S,
    )
