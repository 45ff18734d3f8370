"""How fast rows get done, when a job will be, and how urgent its rows are."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

_WINDOW_S = 60.0
_LEAST_ROWS = 4
_PATIENCE = 2.0
"""A deadline for a row is at least so many times what rows take: a shorter one would be dropped as
hopeless."""


@dataclass(slots=True)
class RowCounts:
    """What became of rows in this process.

    interrupted: attempts that an engine's end cut short.
    """

    completed: int = 0
    failed: int = 0
    interrupted: int = 0


class Throughput:
    """Tokens per second of all rows together, over the last minute."""

    def __init__(self) -> None:
        self._done: deque[tuple[float, int]] = deque()
        self._tokens = 0
        self._since_s: float | None = None

    def began(self, now: float) -> None:
        """There is work again, after there was none: the time before does not count."""
        self._done.clear()
        self._tokens = 0
        self._since_s = now

    def note(self, now: float, tokens: int) -> None:
        """A row is done."""
        self._done.append((now, tokens))
        self._tokens += tokens
        while self._done[0][0] < now - _WINDOW_S:
            at_s, gone = self._done.popleft()
            self._tokens -= gone
            self._since_s = at_s

    def rate(self, now: float) -> float | None:
        """None until some rows are done."""
        if self._since_s is None or len(self._done) < _LEAST_ROWS:
            return None
        return self._tokens / max(now - self._since_s, 1e-9)


class JobPace:
    """What a job has learnt of its rows. deadline_s: end of its window, on the same clock as
    all `now`. remaining: rows that are not done, of which in_flight are with the engine."""

    def __init__(self, remaining: int, deadline_s: float) -> None:
        self.remaining = remaining
        self.in_flight = 0
        self.deadline_s = deadline_s
        self._rows = 0
        self._tokens = 0
        self._row_s = 0.0

    @property
    def tokens_per_row(self) -> float | None:
        """Of prompt and output, on average; None until a row is done."""
        return self._tokens / self._rows if self._rows else None

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A row is with the engine meanwhile."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def note(self, tokens: int, seconds: float) -> None:
        """A row is done, and took so long."""
        self.remaining -= 1
        self._rows += 1
        self._tokens += tokens
        self._row_s += seconds

    def due_in_s(self, now: float, in_flight: int) -> float:
        """When a row that starts now should be done for the job to be on schedule.

        Of the rest of the window each of the remaining rows has its share, and as many run at
        a time as are in flight. With time to spare that is far off; when it gets scarce it comes
        near, and the engine puts the row before others that have time.
        """
        share_s = max(self.deadline_s - now, 0.0) / max(self.remaining, 1)
        usual_s = self._row_s / self._rows if self._rows else 0.0
        return max(share_s * max(in_flight, 1), _PATIENCE * usual_s, 1.0)


def expected_end_s(
    job: JobPace, before: Iterable[JobPace], rate: float | None, now: float
) -> float | None:
    """When a job will be done if all `before` it are served first. None if nothing is known.

    rate: tokens per second of all jobs together. Rows of jobs that have not begun are taken to
    be like those that have.
    """
    jobs: Sequence[JobPace] = (job, *before)
    known = [pace.tokens_per_row for pace in jobs if pace.tokens_per_row is not None]
    if not rate or not known:
        return None
    usual = sum(known) / len(known)
    tokens = sum(pace.remaining * (pace.tokens_per_row or usual) for pace in jobs)
    return now + tokens / rate
