"""One batch as a block of lines, and many as a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from bros.batch.client import RemoteBatch
from bros.batch.words import (
    counts,
    duration,
    expectation,
    moment,
    outcome,
    printable,
    problem,
    risk,
    status_words,
)

_STYLES = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow"}
_NOTHING = "-"
_ENDINGS = ("completed_at", "failed_at", "expired_at", "cancelled_at")


def batch_block(batch: RemoteBatch, now: float) -> Text:
    """All there is to say about a batch. now: Unix seconds."""
    title = Text.assemble((printable(batch.id), "bold"), "  ", _status(batch))
    facts = [Text.assemble((f"  {name:<12}", "dim"), value) for name, value in _facts(batch, now)]
    problems = [Text(f"  {problem(error)}", style="red") for error in batch.errors]
    return Text("\n").join([title, *facts, *problems])


def batch_table(batches: Sequence[RemoteBatch], now: float) -> Table:
    """One line per batch, in their order. now: Unix seconds."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("batch", no_wrap=True)
    table.add_column("status")
    for column in ("succeeded", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in ("created", "expected end"):
        table.add_column(column)
    for batch in batches:
        created = _NOTHING
        if batch.created_at is not None:
            created = f"{duration(max(0.0, now - batch.created_at))} ago"
        table.add_row(
            Text(printable(batch.id)),
            _status(batch),
            f"{batch.completed:,}/{batch.total:,}",
            f"{batch.failed:,}",
            created,
            _expected_end(batch, now),
        )
    return table


def _status(batch: RemoteBatch) -> Text:
    return Text(status_words(batch), style=_STYLES.get(batch.status, ""))


def _expected_end(batch: RemoteBatch, now: float) -> Text:
    if batch.has_ended or batch.expected_at is None:
        return Text(_NOTHING)
    left_s = batch.expected_at - now
    words = f"in {duration(left_s)}" if left_s > 0 else "any moment"
    return Text(f"{words}, at risk", style="bold yellow") if batch.at_risk else Text(words)


def _facts(batch: RemoteBatch, now: float) -> Iterator[tuple[str, Text]]:
    """(name, value) of what is known."""
    for name, words in _words(batch, now):
        if words:
            yield name, Text(printable(words))
    if batch.at_risk and not batch.has_ended:
        yield "at risk", Text(risk(batch, batch.expected_at, now), style="bold yellow")
    for key, value in (batch.fields.get("metadata") or {}).items():
        yield "metadata", Text(printable(f"{key}={value}"))


def _words(batch: RemoteBatch, now: float) -> Iterator[tuple[str, str | None]]:
    fields = batch.fields
    if batch.total:
        yield "requests", outcome(batch) if batch.has_ended else counts(batch)
    yield "endpoint", fields.get("endpoint")
    yield "model", fields.get("model")
    if batch.created_at is not None:
        yield "created", moment(batch.created_at, now)
    ended_at = next((fields[key] for key in _ENDINGS if fields.get(key)), None)
    if ended_at is not None:
        yield "ended", moment(ended_at, now)
    yield "window", _window(batch, now)
    if batch.expected_at is not None and not batch.has_ended:
        yield "expected", f"to end {expectation(batch.expected_at, now)}"
    for name in ("input", "output", "error"):
        yield f"{name} file", fields.get(f"{name}_file_id")
    usage = fields.get("usage") or {}
    if usage.get("total_tokens"):
        yield "tokens", _tokens(usage)


def _window(batch: RemoteBatch, now: float) -> str:
    window = str(batch.fields.get("completion_window", _NOTHING))
    if batch.has_ended or batch.expires_at is None:
        return window
    return f"{window}, ends {moment(batch.expires_at, now)}"


def _tokens(usage: dict[str, Any]) -> str:
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
    from_cache = f" ({cached:,} from the cache)" if cached else ""
    read, written = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    return f"{read:,} read{from_cache}, {written:,} written"
