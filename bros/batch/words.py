"""How batches are described to people: counts, times and what came of them."""

from __future__ import annotations

from datetime import datetime

from bros.batch.client import RemoteBatch, RemoteError
from bros.batch.objects import BatchStatus

_UNPRINTABLE = {code: " " for code in (*range(0x20), *range(0x7F, 0xA0))}


def printable(text: object) -> str:
    """Text of a server, which must not be able to steer the terminal."""
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
    """When a batch will have ended, if all goes on as it does."""
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


def ending(batch: RemoteBatch) -> str:
    """What came of a batch that has ended."""
    what = outcome(batch)
    if batch.status == BatchStatus.FAILED:
        what = f"{plural(len(batch.errors), 'error')}, {what}"
    return f"{printable(batch.id)} {status_words(batch)}: {what}"


def risk(batch: RemoteBatch, expected_at: float | None, now: float) -> str:
    """What a batch that may miss its window is in for."""
    text = "may not be done in time"
    if expected_at is not None:
        text += f": expected to end {expectation(expected_at, now)}"
    if batch.expires_at is not None:
        late = expected_at is not None and expected_at > batch.expires_at
        joined = ", but its" if late else ", its" if expected_at is not None else ": its"
        text += f"{joined} window ends {moment(batch.expires_at, now)}"
    return f"{text}; rows not done by then are given up"


def problem(error: RemoteError) -> str:
    """`line 3: invalid_json_line: This line is not JSON.`"""
    where = f"line {error.line}: " if error.line is not None else ""
    code = f"{error.code}: " if error.code else ""
    return printable(where + code + error.message)
