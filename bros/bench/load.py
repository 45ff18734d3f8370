"""Sends a load at its times and keeps a backlog in flight, for as long as the run lasts.

sessions   ---s1-----------s2--s3------------>   open loop: whatever the others do
lane 1     [be1      ][be3   ][be4        ][be    }  cancelled, recorded as open
lane 2     [be2              ][be5  ][be6         }
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

# ---- Whether a client disturbed what it measured.


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHealth:
    """Whether the client kept its own schedule.

    lateness: sent minus due, of the requests of sessions (0 without any); None if not known.

    cpu_share: of all cores, used by the client's process.
    fell_behind: p99 was too late.
    """

    lateness_p50_s: float | None
    lateness_p99_s: float | None
    lateness_max_s: float | None
    cpu_share: float
    fell_behind: bool


PREPARE_AHEAD_S = 1.0
"""Prompts of sessions are written so long before they are due, out of the way of the sending. The
run begins so long after `drive` is called, for the sake of the first ones."""

MAX_LATE_P99_S = 0.010
"""A client that sends later than this has not sent the load that was asked for."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""After each failure in a row a lane of the backlog rests twice as long as before."""

LONGEST_OBEYED_S = 30.0
"""A longer Retry-After is shortened to this."""


_RESOLUTION_S = 1e-9  # of the loop's clock: no use in waiting for less


class LoadSender(Protocol):
    """What client.Client does."""

    def prepare(self, planned: Planned) -> Prepared: ...

    async def send(self, record: Record, prepared: Prepared, now: Now) -> float | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedLoad:
    """What one run sends.

    sessions: sorted by time.
    backlog: taken from as needed, `in_flight` at a time; its end ends the backlog.
    drain_s: how long after `duration_s` open requests may go on while nothing new is sent; those
        that are still open then are cancelled.
    """

    duration_s: float
    sessions: Sequence[Session] = ()
    backlog: Iterator[Planned] = field(default_factory=lambda: iter(()))
    in_flight: int = 0
    drain_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """records: of all requests that were due, in the order they were.
    elapsed_s: of the run, with what was drained; less than planned if it was stopped.
    """

    records: list[Record]
    started_unix_s: float
    elapsed_s: float
    health: ClientHealth


Work = Coroutine[Any, Any, None]

OnProgress = Callable[[float, Sequence[Record]], None]
"""Told the seconds since the start and the records so far, which are still being filled in."""


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
    """Run `load` to its end. Requests that fail are records; nothing is raised for them.

    cpu_s: processor seconds used by this process so far. stop: ends the run at once when set.
    An error of the plan itself (its iterator, `on_progress`) ends the run in an ExceptionGroup.
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
    """One run. records: of what was due so far."""

    def __init__(self, load: OfferedLoad, sender: LoadSender, clock: Clock) -> None:
        self._load = load
        self._sender = sender
        self._clock = clock
        self._start_s = clock.now() + PREPARE_AHEAD_S
        self._end_s = load.duration_s  # when sending ends
        self._opened = 0  # sessions that have a task
        self._waiting: dict[str, Record] = {}  # prepared, not yet sent
        self._open_loop: list[Record] = []
        self.records: list[Record] = []

    def now(self) -> float:
        return self._clock.now() - self._start_s

    def lateness_s(self) -> list[float]:
        """Of the requests of sessions; one that was never sent is late until the end."""
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
                spawn(self._lane())
            spawn(self._open_sessions(spawn))
            await self._watch(on_progress, progress_s, stop)
            if stop.is_set():
                self._end_s = min(self._end_s, self.now())
            elif tasks and self._load.drain_s > 0:
                await asyncio.wait(tasks, timeout=self._load.drain_s)
            for task in tasks:
                task.cancel()
        self._add_unsent()
        if on_progress is not None:
            on_progress(self.now(), self.records)

    async def _watch(
        self, on_progress: OnProgress | None, progress_s: float, stop: asyncio.Event
    ) -> None:
        await self._until(0.0)
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
            await self._until(session.at_s - PREPARE_AHEAD_S)
            spawn(self._converse(session))
            self._opened += 1

    async def _converse(self, session: Session) -> None:
        """A failed turn is an answered one: what is sent does not depend on what comes back."""
        due_s = ended_s = session.at_s
        for number, turn in enumerate(session.turns):
            if number:
                due_s = ended_s + turn.think_s
            if due_s >= self._end_s:
                return
            ended_s = await self._send_at(turn.request, due_s)

    async def _send_at(self, planned: Planned, due_s: float) -> float:
        """When the answer had ended."""
        record = self._waiting[planned.name] = Record(planned=planned, due_s=due_s)
        prepared = self._sender.prepare(planned)
        await self._until(due_s)
        del self._waiting[planned.name]
        self.records.append(record)
        self._open_loop.append(record)
        await self._sender.send(record, prepared, self.now)
        return self.now() if record.end_s is None else record.end_s

    async def _lane(self) -> None:
        """One request after the other; a server that fails is not hammered."""
        failures = 0
        while self.now() < self._end_s:
            planned = next(self._load.backlog, None)
            if planned is None:
                return
            prepared = self._sender.prepare(planned)
            await self._until(0.0)
            record = Record(planned=planned, due_s=self.now())
            self.records.append(record)
            asked_s = await self._sender.send(record, prepared, self.now)
            if record.outcome is Outcome.COMPLETED:
                failures = 0
                continue
            failures += 1
            pause_s = min(FIRST_PAUSE_S * 2 ** min(failures - 1, 30), LONGEST_PAUSE_S)
            pause_s = max(pause_s, min(asked_s or 0.0, LONGEST_OBEYED_S))
            if self.now() + pause_s >= self._end_s:
                return
            await asyncio.sleep(pause_s)

    async def _until(self, time_s: float) -> None:
        while (wait_s := time_s - self.now()) > _RESOLUTION_S:
            await asyncio.sleep(wait_s)

    def _add_unsent(self) -> None:
        """What was due before the end but never sent, because the client was too slow."""
        late = [record for record in self._waiting.values() if record.due_s < self._end_s]
        for session in self._load.sessions[self._opened :]:
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
