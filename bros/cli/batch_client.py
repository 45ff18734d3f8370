"""A client for the files and batches of any server with OpenAI's batch API."""

from __future__ import annotations

import contextlib
import io
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar
from urllib.parse import quote

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from bros.batch.objects import BatchStatus
from bros.cli.remote import auth_headers, base_url, error_message
from bros.core.clock import Clock
from bros.core.errors import BrosError, ConfigError
from bros.core.files import as_text

_CONNECT_TIMEOUT_S = 10.0
_ANSWER_TIMEOUT_S = 30.0
_UPLOAD_TIMEOUT_S = 600.0
"""Includes the server's processing of the file after it was received."""

_PAGE = 100
"""Maximum batches per page of a list."""

_FINAL = frozenset(status.value for status in BatchStatus if status.is_final)
_BUSY = frozenset({429, 503})
_RETRYABLE = frozenset({408, 425, *range(500, 600)}) - {501, 505, 507}


class RefusedError(BrosError):
    """The server refused the request; the message is the server's."""


class NoAnswerError(BrosError):
    """The server cannot be reached or fails temporarily."""


class BusyError(NoAnswerError):
    """The server is overloaded and has not acted on the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteError:
    """An error in an input file.

    line: counted from 1; None: the whole file.
    """

    line: int | None
    code: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteBatch:
    """A batch as the server last described it. Times are in Unix seconds.

    expected_at: expected end; None if the server does not report it.
    at_risk: whether it may miss its window; None if the server does not report it.
    fields: the server's JSON.
    """

    id: str
    status: str
    total: int
    completed: int
    failed: int
    created_at: int | None
    expires_at: int | None
    expected_at: int | None
    at_risk: bool | None
    output_file_id: str | None
    error_file_id: str | None
    errors: tuple[RemoteError, ...]
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> RemoteBatch:
        """Raises KeyError, TypeError, ValueError or AttributeError for an invalid batch."""
        counts = fields.get("request_counts") or {}
        extra = fields.get("bros") or {}
        errors = (fields.get("errors") or {}).get("data") or ()
        return cls(
            id=str(fields["id"]),
            status=str(fields["status"]),
            total=int(counts.get("total") or 0),
            completed=int(counts.get("completed") or 0),
            failed=int(counts.get("failed") or 0),
            created_at=_seconds(fields.get("created_at")),
            expires_at=_seconds(fields.get("expires_at")),
            expected_at=_seconds(extra.get("expected_at")),
            at_risk=extra.get("at_risk"),
            output_file_id=fields.get("output_file_id"),
            error_file_id=fields.get("error_file_id"),
            errors=tuple(
                RemoteError(
                    line=_seconds(error.get("line")),
                    code=error.get("code"),
                    message=str(error.get("message") or ""),
                )
                for error in errors
            ),
            fields=fields,
        )

    @property
    def done(self) -> int:
        """Rows with an outcome, successful or not."""
        return self.completed + self.failed

    @property
    def has_ended(self) -> bool:
        return self.status in _FINAL


class BatchClient:
    """The batch API of one server.

    Every method raises NoAnswerError if the server does not answer, RefusedError with the server's
    message if it refuses, and BrosError for an invalid response.
    """

    def __init__(self, http: httpx.Client) -> None:
        self._http = http

    def upload(self, path: Path, on_read: Callable[[int], object]) -> str:
        """Send a file, piece by piece; returns its id. Raises OSError if it cannot be read.

        on_read: called with the number of bytes of each piece.
        """
        with path.open("rb", buffering=0) as file, self._readable_errors():
            counted, name = _Counted(file, on_read), as_text(path.name)
            response = self._http.post(
                "files",
                data={"purpose": "batch"},
                files={"file": (name, io.BufferedReader(counted), "application/jsonl")},
                timeout=httpx.Timeout(_UPLOAD_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S),
            )
            return str(_body(response)["id"])

    def delete_file(self, file_id: str) -> None:
        with self._readable_errors():
            _body(self._http.delete(f"files/{quote(file_id, safe='')}"))

    def create(
        self,
        file_id: str,
        endpoint: str,
        window: str,
        metadata: Mapping[str, str],
        rt_slowdown: float | None = None,
    ) -> RemoteBatch:
        """Create a batch. window: the completion window in the API's format, such as 24h."""
        wanted: dict[str, object] = {
            "input_file_id": file_id,
            "endpoint": endpoint,
            "completion_window": window,
            "metadata": dict(metadata) or None,
        }
        if rt_slowdown is not None:  # not in OpenAI's API
            wanted["rt_slowdown"] = rt_slowdown
        with self._readable_errors():
            return RemoteBatch.read(_body(self._http.post("batches", json=wanted)))

    def get(self, batch_id: str) -> RemoteBatch:
        with self._readable_errors():
            return RemoteBatch.read(_body(self._http.get(f"batches/{quote(batch_id, safe='')}")))

    def cancel(self, batch_id: str) -> RemoteBatch:
        """Start cancelling a batch; returns it, usually as `cancelling`."""
        with self._readable_errors():
            response = self._http.post(f"batches/{quote(batch_id, safe='')}/cancel")
            return RemoteBatch.read(_body(response))

    def newest(self, limit: int) -> list[RemoteBatch]:
        """At most `limit` batches, newest first."""
        found: list[RemoteBatch] = []
        with self._readable_errors():
            while len(found) < limit:
                query = {"limit": str(min(_PAGE, limit - len(found)))}
                if found:
                    query["after"] = found[-1].id
                page = _body(self._http.get("batches", params=query))
                batches = [RemoteBatch.read(fields) for fields in page["data"]]
                found += batches
                if not batches or not page.get("has_more"):
                    break
        return found[:limit]

    @contextlib.contextmanager
    def content(self, file_id: str) -> Iterator[Iterator[bytes]]:
        """The content of a file in pieces; raises NoAnswerError if the connection breaks."""
        url = f"files/{quote(file_id, safe='')}/content"
        with contextlib.ExitStack() as stack:
            with self._readable_errors():
                response = stack.enter_context(self._http.stream("GET", url))
                if not response.is_success:
                    response.read()
                    raise _refusal(response)
            yield self._pieces(response)

    def _pieces(self, response: httpx.Response) -> Iterator[bytes]:
        with self._readable_errors():
            yield from response.iter_bytes()

    @contextlib.contextmanager
    def _readable_errors(self) -> Iterator[None]:
        server = str(self._http.base_url).removesuffix("/")
        try:
            yield
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
            raise NoAnswerError(f"{server} does not answer: {reason}") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise BrosError(f"{server} cannot be asked: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BrosError(f"{server} does not speak OpenAI's batch API: {error!r}") from error


@contextlib.contextmanager
def batch_client(
    url: str, api_key: str | None, transport: httpx.BaseTransport | None = None
) -> Iterator[BatchClient]:
    """A client of the server at `url`, with or without /v1.

    Raises ConfigError if `url` is no http URL.
    """
    base, headers = base_url(url) + "/v1/", auth_headers(api_key)
    timeout = httpx.Timeout(_ANSWER_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
    try:
        http = httpx.Client(base_url=base, headers=headers, timeout=timeout, transport=transport)
    except (httpx.InvalidURL, UnicodeEncodeError) as error:
        raise ConfigError(f"--url or --api-key: {error}") from None
    with http:
        yield BatchClient(http)


class _Counted(io.RawIOBase):
    """A file that reports how much of it was read."""

    def __init__(self, file: BinaryIO, on_read: Callable[[int], object]) -> None:
        self._file = file
        self._on_read = on_read

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._file.fileno()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._file.seek(offset, whence)

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._on_read(len(data))
        return len(data)


def _seconds(value: Any) -> int | None:
    return None if value is None else int(value)


def _body(response: httpx.Response) -> Mapping[str, Any]:
    """Raises RefusedError, NoAnswerError or ValueError."""
    if not response.is_success:
        raise _refusal(response)
    body = response.json()
    if not isinstance(body, dict):
        raise ValueError("the response is not a JSON object")
    return body


def _refusal(response: httpx.Response) -> BrosError:
    kind: type[BrosError] = RefusedError
    if response.status_code in _BUSY:
        kind = BusyError
    elif response.status_code in _RETRYABLE:
        kind = NoAnswerError
    no_api = None
    if response.status_code in (404, 405):
        no_api = f"there is no {response.url}: does this server have a batch API?"
    return kind(f"{response.status_code}: {error_message(response, no_api)}")


# ---- Batches in words: counts, times and results.


_UNPRINTABLE = {code: " " for code in (*range(0x20), *range(0x7F, 0xA0))}


def printable(text: object) -> str:
    """Text of a server without control characters, which could manipulate the terminal."""
    return str(text).translate(_UNPRINTABLE)


def status_words(batch: RemoteBatch) -> str:
    return printable(batch.status.replace("_", " "))


def plural(count: int, noun: str) -> str:
    """`1 row`, `1,200 rows`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `5 h 12 min`, `3 d 4 h`: two units at most."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if minutes < 90:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min" if minutes % 60 else f"{minutes // 60} h"
    return f"{hours // 24} d {hours % 24} h" if hours % 24 else f"{hours // 24} d"


def moment(at: float, now: float) -> str:
    """`14:05 (in 12 min)` or `2026-11-23 14:05 (3 h ago)`, local time; both in Unix seconds."""
    then, today = datetime.fromtimestamp(at), datetime.fromtimestamp(now)
    clock = then.strftime("%H:%M" if then.date() == today.date() else "%Y-%m-%d %H:%M")
    distance = f"in {duration(at - now)}" if at >= now else f"{duration(now - at)} ago"
    return f"{clock} ({distance})"


def expectation(expected_at: float, now: float) -> str:
    """The expected end of a batch in words."""
    return moment(expected_at, now) if expected_at > now else "any moment"


def speed(rows_per_s: float) -> str:
    if rows_per_s >= 1:
        return f"{rows_per_s:.1f} rows/s"
    return f"{60 * rows_per_s:.1f} rows/min"


def counts(batch: RemoteBatch) -> str:
    """`1,200 of 50,000 rows done, 2 failed`."""
    text = f"{batch.done:,} of {plural(batch.total, 'row')} done"
    return f"{text}, {batch.failed:,} failed" if batch.failed else text


def outcome(batch: RemoteBatch) -> str:
    """Of a batch that has ended: `58 of 60 rows succeeded, 2 failed`."""
    lost = batch.total - batch.completed
    if not batch.total:
        return "nothing was run"
    if not lost:
        return f"{plural(batch.total, 'row')}, all succeeded"
    what = "failed" if batch.status == BatchStatus.COMPLETED else "failed or not run"
    return f"{batch.completed:,} of {plural(batch.total, 'row')} succeeded, {lost:,} {what}"


def end_summary(batch: RemoteBatch) -> str:
    """How a batch ended: `batch_1 completed: 58 of 60 rows succeeded, 2 failed`."""
    what = outcome(batch)
    if batch.status == BatchStatus.FAILED:
        what = f"{plural(len(batch.errors), 'error')}, {what}"
    return f"{printable(batch.id)} {status_words(batch)}: {what}"


def risk_text(batch: RemoteBatch, expected_at: float | None, now: float) -> str:
    """A warning about a batch that may miss its window."""
    text = "may not be done in time"
    if expected_at is not None:
        text += f": expected to end {expectation(expected_at, now)}"
    if batch.expires_at is not None:
        late = expected_at is not None and expected_at > batch.expires_at
        joined = ", but its" if late else ", its" if expected_at is not None else ": its"
        text += f"{joined} window ends {moment(batch.expires_at, now)}"
    return f"{text}; rows not done by then expire"


def problem(error: RemoteError) -> str:
    """`line 3: invalid_json_line: This line is not JSON.`"""
    where = f"line {error.line}: " if error.line is not None else ""
    code = f"{error.code}: " if error.code else ""
    return printable(where + code + error.message)


# ---- Waiting for a batch to end, with a progress display; server outages are tolerated.


T = TypeVar("T")
Pause = Callable[[float], object]
"""Sleeps for that many seconds."""

FIRST_LINE_INTERVAL_S = 5.0
MAX_LINE_INTERVAL_S = 60.0
"""Intervals of progress lines without a terminal. They grow, so that logs stay short."""

MAX_OUTAGE_S = 900.0
"""The longest tolerated outage of a server, enough to restart it with a large model."""

_FIRST_POLL_S = 0.2
_MAX_POLL_S = 3.0
_FIRST_RETRY_S = 0.5
_MAX_RETRY_S = 15.0
_RECENT_S = 60.0
_ENOUGH_ROWS = 5
_RUNNING = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)


class Retrier:
    """Repeats requests during an outage of the server and reports its start and end."""

    def __init__(self, clock: Clock, pause: Pause, say: Callable[[str], object]) -> None:
        self._clock = clock
        self._pause = pause
        self._say = say

    def call(self, ask: Callable[[], T]) -> T:
        """The result of `ask`; raises NoAnswerError after an outage of MAX_OUTAGE_S."""
        try:
            return ask()
        except NoAnswerError as error:
            self._say(f"{error}; trying again ...")
        failed_at_s, pause_s = self._clock.now(), _FIRST_RETRY_S
        while True:
            self._pause(pause_s)
            pause_s = min(2 * pause_s, _MAX_RETRY_S)
            try:
                response = ask()
            except NoAnswerError as error:
                outage_s = self._clock.now() - failed_at_s
                if outage_s >= MAX_OUTAGE_S:
                    raise NoAnswerError(f"{error}, for {duration(outage_s)} now") from None
                continue
            outage_s = self._clock.now() - failed_at_s
            self._say(f"the server answers again, after {duration(outage_s)}")
            return response


def wait_for_end(
    batch: RemoteBatch,
    ask: Callable[[], RemoteBatch],
    retrier: Retrier,
    clock: Clock,
    pause: Pause,
    console: Console,
) -> RemoteBatch:
    """The batch once it has ended. ask: returns its current state. Raises NoAnswerError."""
    rate, poll_s = _Rate(), _FIRST_POLL_S
    with _view(console) as view:
        while not batch.has_ended:
            now = clock.now()
            rate.note(now, batch.done)
            view.show(_forecast(batch, rate, clock.unix_time()), now)
            pause(poll_s)
            poll_s = min(1.3 * poll_s, _MAX_POLL_S)
            batch = retrier.call(ask)
    return batch


@dataclass(frozen=True, slots=True)
class _Forecast:
    """A batch and its expected end. Times are in Unix seconds.

    unix_time: of the forecast.
    """

    batch: RemoteBatch
    rows_per_s: float | None
    expected_at: float | None
    at_risk: bool
    unix_time: float


def _forecast(batch: RemoteBatch, rate: _Rate, unix_time: float) -> _Forecast:
    """The server's own forecast, or an estimate from the recent speed."""
    rows_per_s, expected_at = rate.rows_per_s(), batch.expected_at
    estimate: float | None = expected_at
    if estimate is None and rows_per_s:
        estimate = unix_time + (batch.total - batch.done) / rows_per_s
    at_risk = batch.at_risk
    if batch.status not in _RUNNING:
        at_risk = False
    elif at_risk is None and estimate is not None and batch.expires_at is not None:
        at_risk = estimate > batch.expires_at
    return _Forecast(batch, rows_per_s, estimate, bool(at_risk), unix_time)


class _Rate:
    """The recent speed; averaged over a longer time if few rows were done."""

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._recent: deque[tuple[float, int]] = deque()

    def note(self, now: float, done: int) -> None:
        self._first = self._first or (now, done)
        self._recent.append((now, done))
        while self._recent[0][0] < now - _RECENT_S:
            self._recent.popleft()

    def rows_per_s(self) -> float | None:
        """None until the first row is done."""
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
    """Prints a line when the status changes, and at intervals."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._every_s = FIRST_LINE_INTERVAL_S
        self._next_s = 0.0
        self._status: str | None = None
        self._at_risk = False

    def show(self, forecast: _Forecast, now: float) -> None:
        batch = forecast.batch
        if forecast.at_risk and not self._at_risk:
            text = risk_text(batch, forecast.expected_at, forecast.unix_time)
            self._say(f"{printable(batch.id)}: warning: it {text}")
        self._at_risk = forecast.at_risk
        if batch.status == self._status and now < self._next_s:
            return
        if batch.status == self._status:
            self._every_s = min(1.5 * self._every_s, MAX_LINE_INTERVAL_S)
        self._status, self._next_s = batch.status, now + self._every_s
        parts = [status_words(batch), _progress(forecast), _end(forecast)]
        self._say(f"{printable(batch.id)}: {', '.join(part for part in parts if part)}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _Screen:
    """Redraws a few lines."""

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
            text = risk_text(batch, forecast.expected_at, forecast.unix_time)
            lines.append(Text(f"It {text}.", style="bold yellow"))
        self._live.update(Group(*lines), refresh=True)


def _progress(forecast: _Forecast) -> str:
    facts = [counts(forecast.batch)] if forecast.batch.total else []
    if forecast.rows_per_s is not None:
        facts.append(speed(forecast.rows_per_s))
    return ", ".join(facts)


def _end(forecast: _Forecast) -> str:
    if forecast.batch.status not in _RUNNING:
        return ""  # it ends soon, regardless of the window
    now, facts = forecast.unix_time, []
    if forecast.expected_at is not None:
        facts.append(f"expected to end {expectation(forecast.expected_at, now)}")
    if forecast.batch.expires_at is not None:
        facts.append(f"window ends {moment(forecast.batch.expires_at, now)}")
    return ", ".join(facts)
