"""Waits for a batch to end and shows how it is getting on, however long the server is away."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bros.batch.client import NoAnswerError, RemoteBatch
from bros.batch.objects import BatchStatus
from bros.batch.words import (
    counts,
    duration,
    expectation,
    moment,
    printable,
    risk,
    speed,
    status_words,
)
from bros.core.clock import Clock

T = TypeVar("T")
Pause = Callable[[float], object]
"""Lets that many seconds pass."""

FIRST_LINE_EVERY_S = 5.0
LAST_LINE_EVERY_S = 60.0
"""Between two lines where there is no terminal: a long batch does not fill a log."""

LOST_S = 900.0
"""So long a server may be away, which is enough to restart it with a large model."""

_FIRST_POLL_S = 0.2
_LAST_POLL_S = 3.0
_FIRST_RETRY_S = 0.5
_LAST_RETRY_S = 15.0
_RECENT_S = 60.0
_ENOUGH_ROWS = 5
_UNDER_WAY = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class Patience:
    """Asks again while a server does not answer, and says so once each time."""

    def __init__(self, clock: Clock, pause: Pause, say: Callable[[str], object]) -> None:
        self._clock = clock
        self._pause = pause
        self._say = say

    def get(self, ask: Callable[[], T]) -> T:
        """What `ask` returns in the end; raises NoAnswerError if the server stays away."""
        try:
            return ask()
        except NoAnswerError as error:
            self._say(f"{error}; trying again ...")
        lost_at_s, pause_s = self._clock.now(), _FIRST_RETRY_S
        while True:
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)
            try:
                answer = ask()
            except NoAnswerError as error:
                away_s = self._clock.now() - lost_at_s
                if away_s >= LOST_S:
                    raise NoAnswerError(f"{error}, for {duration(away_s)} now") from None
                continue
            away_s = self._clock.now() - lost_at_s
            self._say(f"the server answers again, after {duration(away_s)}")
            return answer


def wait_for_end(
    batch: RemoteBatch,
    ask: Callable[[], RemoteBatch],
    patience: Patience,
    clock: Clock,
    pause: Pause,
    console: Console,
) -> RemoteBatch:
    """The batch once it has ended. ask: how it is now. Raises what `patience` raises."""
    rate, poll_s = _Rate(), _FIRST_POLL_S
    with _view(console) as view:
        while not batch.has_ended:
            now = clock.now()
            rate.note(now, batch.done)
            view.show(_forecast(batch, rate, clock.unix_time()), now)
            pause(poll_s)
            poll_s = min(1.3 * poll_s, _LAST_POLL_S)
            batch = patience.get(ask)
    return batch


@dataclass(frozen=True, slots=True)
class _Forecast:
    """A batch and what may be said about its end. unix_time: when this was."""

    batch: RemoteBatch
    rows_per_s: float | None
    expected_at: float | None
    at_risk: bool
    unix_time: float


def _forecast(batch: RemoteBatch, rate: _Rate, unix_time: float) -> _Forecast:
    """The server's own, or what its recent speed says."""
    rows_per_s, expected_at = rate.rows_per_s(), batch.expected_at
    estimate: float | None = expected_at
    if estimate is None and rows_per_s:
        estimate = unix_time + (batch.total - batch.done) / rows_per_s
    at_risk = batch.at_risk
    if batch.status not in _UNDER_WAY:
        at_risk = False
    elif at_risk is None and estimate is not None and batch.expires_at is not None:
        at_risk = estimate > batch.expires_at
    return _Forecast(batch, rows_per_s, estimate, bool(at_risk), unix_time)


class _Rate:
    """Rows per second of late; over a longer time where few rows are done."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._recent: deque[tuple[float, int]] = deque()

    def note(self, now: float, done: int) -> None:
        self._first = self._first or (now, done)
        self._recent.append((now, done))
        while self._recent[0][0] < now - _RECENT_S:
            self._recent.popleft()

    def rows_per_s(self) -> float | None:
        """None before any row was seen being done."""
        if self._first is None:
            return None
        now, done = self._recent[-1]
        begin, done_before = self._recent[0]
        if done - done_before < _ENOUGH_ROWS:
            begin, done_before = self._first
        if now <= begin or done <= done_before:
            return None
        return (done - done_before) / (now - begin)


class _View(Protocol):
    def show(self, forecast: _Forecast, now: float) -> None: ...


@contextlib.contextmanager
def _view(console: Console) -> Iterator[_View]:
    if not console.is_terminal:
        yield _Lines(console)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield _Screen(live)


class _Lines:
    """A line when the status changes, and now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._every_s = FIRST_LINE_EVERY_S
        self._next_s = 0.0
        self._status: str | None = None
        self._at_risk = False

    def show(self, forecast: _Forecast, now: float) -> None:
        batch = forecast.batch
        if forecast.at_risk and not self._at_risk:
            text = risk(batch, forecast.expected_at, forecast.unix_time)
            self._say(f"{printable(batch.id)}: warning: it {text}")
        self._at_risk = forecast.at_risk
        if batch.status == self._status and now < self._next_s:
            return
        if batch.status == self._status:
            self._every_s = min(1.5 * self._every_s, LAST_LINE_EVERY_S)
        self._status, self._next_s = batch.status, now + self._every_s
        parts = [status_words(batch), _progress(forecast), _end(forecast)]
        self._say(f"{printable(batch.id)}: {', '.join(part for part in parts if part)}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Screen:
    """A few lines that are drawn over again."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def show(self, forecast: _Forecast, now: float) -> None:
        batch = forecast.batch
        bar = ProgressBar(total=batch.total or None, completed=batch.done, pulse=not batch.total)
        head = Table.grid(padding=(0, 1), expand=True)
        head.add_column(no_wrap=True)
        head.add_column(ratio=1)
        head.add_row(Text(f"{printable(batch.id)} {status_words(batch)}", style="bold"), bar)
        texts = [text for text in (_progress(forecast), _end(forecast)) if text]
        lines: list[RenderableType] = [head, *map(Text, texts)]
        if forecast.at_risk:
            text = risk(batch, forecast.expected_at, forecast.unix_time)
            lines.append(Text(f"It {text}.", style="bold yellow"))
        self._live.update(Group(*lines), refresh=True)


def _progress(forecast: _Forecast) -> str:
    facts = [counts(forecast.batch)] if forecast.batch.total else []
    if forecast.rows_per_s is not None:
        facts.append(speed(forecast.rows_per_s))
    return ", ".join(facts)


def _end(forecast: _Forecast) -> str:
    if forecast.batch.status not in _UNDER_WAY:
        return ""  # it will not be long, whatever the window is
    now, facts = forecast.unix_time, []
    if forecast.expected_at is not None:
        facts.append(f"expected to end {expectation(forecast.expected_at, now)}")
    if forecast.batch.expires_at is not None:
        facts.append(f"window ends {moment(forecast.batch.expires_at, now)}")
    return ", ".join(facts)
