"""Throughput of rows, when a job is expected to end, and the deadlines of its rows."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

_WINDOW_S = 60.0
_MIN_ROWS = 4
_MIN_DEADLINE_FACTOR = 2.0
"""A row's deadline is at least this many times the mean duration of a row: the scheduler ignores
deadlines that cannot be met."""


@dataclass(slots=True)
class RowCounts:
    """Rows that this process has run.

    completed: rows with a response below status 400.
    failed: all other rows with an outcome.
    interrupted: attempts that ended because the engine died.
    """

    completed: int = 0
    failed: int = 0
    interrupted: int = 0


class Throughput:
    """Tokens per second of all jobs together, over the last minute."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self._since_s: float | None = None

    def began(self, now: float) -> None:
        """The first job starts after an idle period, which does not count."""
        self._done.clear()
        self._tokens = 0
        self._since_s = now

    def note(self, now: float, tokens: int) -> None:
        """A row has ended, with this many prompt and output tokens."""
        self._done.append((now, tokens))
        self._tokens += tokens
        while self._done[0][0] < now - _WINDOW_S:
            self._since_s, old_tokens = self._done.popleft()
            self._tokens -= old_tokens

    def rate(self, now: float) -> float | None:
        """Tokens per second; None until `_MIN_ROWS` rows have ended."""
        if self._since_s is None or len(self._done) < _MIN_ROWS:
            return None
        return self._tokens / max(now - self._since_s, 1e-9)


class JobPace:
    """Progress of one job, and what its rows cost.

    deadline_s: end of the batch's window, on the same clock as all `now`.
    remaining: rows without an outcome, those in flight included.
    in_flight: rows that the engine has.
    """

    def __init__(self, remaining: int, deadline_s: float) -> None:
        self.remaining = remaining
        self.in_flight = 0
        self.deadline_s = deadline_s
        self._rows = 0
        self._tokens = 0
        self._row_s = 0.0

    @property
    def tokens_per_row(self) -> float | None:
        """Mean of prompt and output tokens; None until a row has ended."""
        return self._tokens / self._rows if self._rows else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """The engine has one more row during the block."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def note(self, tokens: int, seconds: float) -> None:
        """Count a row that has ended: its tokens, and the seconds that it took."""
        self.remaining -= 1
        self._rows += 1
        self._tokens += tokens
        self._row_s += seconds

    def schedule_s(self, now: float, in_flight: int) -> float:
        """Seconds within which a row that starts now keeps the job on schedule:

            rest of the window / remaining rows * in_flight

        in_flight: rows of all jobs.
        """
        share_s = max(self.deadline_s - now, 0.0) / max(self.remaining, 1)
        return share_s * max(in_flight, 1)

    def due_in_s(self, now: float, in_flight: int) -> float:
        """Deadline of a row that starts now, in seconds from now: `schedule_s`, at least 1 s and
        _MIN_DEADLINE_FACTOR * mean duration of a row.

        It gets closer as time gets short, and the scheduler then puts the row before rows with more
        time.
        """
        mean_s = self._row_s / self._rows if self._rows else 0.0
        return max(self.schedule_s(now, in_flight), _MIN_DEADLINE_FACTOR * mean_s, 1.0)


class Backlog:
    """What some jobs have left to do.

    A job without finished rows is assumed to have the other jobs' mean tokens per row.
    """

    def __init__(self) -> None:
        self._tokens = 0.0  # of jobs with finished rows
        self._tokens_per_row = 0.0  # their sum
        self._known = 0
        self._other_rows = 0

    def add(self, job: JobPace) -> None:
        """Count what one more job has left."""
        per_row = job.tokens_per_row
        if per_row is None:
            self._other_rows += job.remaining
            return
        self._tokens += job.remaining * per_row
        self._tokens_per_row += per_row
        self._known += 1

    def seconds(self, rate: float | None) -> float | None:
        """How long all of it takes at this many tokens per second; None if the rate, or what a row
        takes, is unknown."""
        if not rate or not self._known:
            return None
        return (self._tokens + self._other_rows * self._tokens_per_row / self._known) / rate
