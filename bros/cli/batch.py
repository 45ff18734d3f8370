"""`bros batch`: submits batches to a running server, watches them and fetches their results."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from bros.batch.objects import MAX_LINE_BYTES, BatchStatus, parse_window
from bros.bench.report.tables import print_table
from bros.cli.batch_client import (
    BatchClient,
    BusyError,
    NoAnswerError,
    Pause,
    RefusedError,
    RemoteBatch,
    Retrier,
    batch_client,
    counts,
    duration,
    end_summary,
    expectation,
    moment,
    outcome,
    printable,
    problem,
    risk_text,
    status_words,
    wait_for_end,
)
from bros.cli.flags import DEFAULT_URL, BatchFlags, read_own, whole
from bros.core.clock import Clock
from bros.core.config import RT_SLOWDOWN
from bros.core.config_sources import URL_VARIABLE, given_flags, load_config
from bros.core.errors import BrosError, ConfigError, InvalidRequestError
from bros.core.files import as_text, expand_user, sync_folder

# ---- Writing results: to standard output, to devices, or atomically to files.


STDOUT = "-"
NOT_A_FILE = "its folder does not exist, or it is a folder"


def check_input(text: str) -> Path:
    """The file of requests, which is read more than once. Raises ConfigError if it cannot be."""
    path = expand_user(text)
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            what = "it is a folder" if stat.S_ISDIR(mode) else "it is not a file, such as a pipe"
            raise ConfigError(f"{path} cannot be read: {what}")
        path.open("rb").close()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    return path


def check_writable(flag: str, text: str | None) -> Path | str | None:
    """The path to write to, or STDOUT. Raises ConfigError before the wait, not after it."""
    if text is None or text == STDOUT:
        return text
    try:
        path = expand_user(text).resolve()
        if path.is_dir() or not path.parent.is_dir():
            raise ConfigError(f"{flag}: {text} cannot be written: {NOT_A_FILE}")
    except (OSError, RuntimeError) as error:  # a name that is too long, a symlink loop
        raise ConfigError(f"{flag}: {text} cannot be written: {error}") from None
    return path


def write_stdout(pieces: Iterable[bytes]) -> None:
    """Raises BrosError if standard output cannot be written, BrokenPipeError if it is closed."""
    try:
        sys.stdout.buffer.writelines(pieces)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise BrosError(f"standard output cannot be written: {error.strerror}") from None


def write_atomically(path: Path, pieces: Iterable[bytes]) -> None:
    """Write a temporary file and rename it to `path`; write a device or pipe directly.

    The file and its name are on the disk afterwards: what it was made from may then be removed.
    Raises BrosError if it cannot be written.
    """
    special = path.exists() and not path.is_file()
    written = path if special else path.with_name(f".bros-{os.getpid()}.part")
    try:
        with written.open("wb") as file:
            file.writelines(pieces)
            if not special:
                file.flush()
                os.fsync(file.fileno())
        if not special:
            written.replace(path)
            with contextlib.suppress(OSError):  # not every file system can
                sync_folder(path.parent)
    except OSError as error:
        raise BrosError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        if not special:
            with contextlib.suppress(OSError):  # gone after the rename
                written.unlink()


# ---- Showing one batch as a block of lines, and several as a table.


_STYLES = {"completed": "green", "failed": "red", "expired": "red", "cancelled": "yellow"}
_NOTHING = "-"
_ENDINGS = ("completed_at", "failed_at", "expired_at", "cancelled_at")


def batch_block(batch: RemoteBatch, now: float) -> Text:
    """All details of a batch. now: Unix seconds."""
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
    """(name, value) of all known details."""
    for name, words in _words(batch, now):
        if words:
            yield name, Text(printable(words))
    if batch.at_risk and not batch.has_ended:
        yield "at risk", Text(risk_text(batch, batch.expected_at, now), style="bold yellow")
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
    yield "window", _window_words(batch, now)
    if batch.expected_at is not None and not batch.has_ended:
        yield "expected", f"to end {expectation(batch.expected_at, now)}"
    for name in ("input", "output", "error"):
        yield f"{name} file", fields.get(f"{name}_file_id")
    usage = fields.get("usage") or {}
    if usage.get("total_tokens"):
        yield "tokens", _tokens(usage)


def _window_words(batch: RemoteBatch, now: float) -> str:
    window = str(batch.fields.get("completion_window", _NOTHING))
    if batch.has_ended or batch.expires_at is None:
        return window
    return f"{window}, ends {moment(batch.expires_at, now)}"


def _tokens(usage: dict[str, Any]) -> str:
    cached = (usage.get("input_tokens_details") or {}).get("cached_tokens")
    from_cache = f" ({cached:,} from the cache)" if cached else ""
    read, written = usage.get("input_tokens", 0), usage.get("output_tokens", 0)
    return f"{read:,} read{from_cache}, {written:,} written"


SOME_ROWS_FAILED = 3
NOT_COMPLETED = 4

_WIDTH = 120
"""Of tables without a terminal."""
_SHOWN_ERRORS = 10
"""Maximum errors of an input file that are shown; `status` shows all."""
_BAR_FROM_BYTES = 4 * 2**20
"""Smaller files are uploaded without a progress bar."""


def run_batch(
    args: argparse.Namespace,
    environ: Mapping[str, str],
    warn: Callable[[str], None],
    clock: Clock,
    *,
    pause: Pause | None = None,
    transport: httpx.BaseTransport | None = None,
    out: Console | None = None,
    err: Console | None = None,
) -> int:
    """Run one action; returns the exit status, see bros batch ACTION --help.

    pause: sleeps for some seconds. transport: replaces the network. out, err: standard output and
    error. Raises ConfigError for wrong usage, BrosError for other errors, KeyboardInterrupt.
    """
    config = load_config(given_flags(args), environ, warn)
    own = read_own(BatchFlags, args)
    url = own.url or environ.get(URL_VARIABLE) or DEFAULT_URL
    with batch_client(url, config.server.api_key, transport) as client:
        command = _Command(
            args.batch_action,
            own,
            client,
            clock,
            pause or threading.Event().wait,
            _wide(out or Console(highlight=False)),
            err or Console(stderr=True, highlight=False),
        )
        try:
            return command.run()
        except BrokenPipeError:
            # The reader of standard output is gone, so Python must not flush it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1


@dataclass(frozen=True, slots=True)
class _Command:
    """One action and what it works with."""

    action: str
    own: BatchFlags
    client: BatchClient
    clock: Clock
    pause: Pause
    out: Console
    err: Console

    def run(self) -> int:
        if self.action in ("status", "cancel", "results") and not self.own.id:
            raise ConfigError("ID: it is empty; did submitting the batch fail?")
        actions: dict[str, Callable[[], int]] = {
            "submit": self._submit,
            "status": self._status,
            "list": self._list,
            "cancel": self._cancel,
            "results": self._results,
        }
        return actions[self.action]()

    def _submit(self) -> int:
        own, path = self.own, check_input(self.own.file)
        window, rt_slowdown = _window(own.window), _rt_slowdown(own.rt_slowdown)
        metadata = _metadata(own.metadata)
        target = check_writable("-o", own.output)
        if target is not None and not own.wait:
            raise ConfigError("-o: requires --wait; otherwise use `bros batch results`")
        endpoint = own.endpoint or first_url(path)
        if isinstance(target, Path) and target.exists() and target.samefile(path):
            raise ConfigError("-o: this is the input; name another file")
        file_id = self._upload(path)
        try:
            batch = self.client.create(file_id, endpoint, window, metadata, rt_slowdown)
        except (RefusedError, BusyError):  # certainly no batch was created that needs the file
            with contextlib.suppress(BrosError):  # report the first error
                self.client.delete_file(file_id)
            raise
        print(printable(batch.id), file=self.out.file, flush=True)
        if not own.wait:
            self._say(f"Submitted for {endpoint}, completion window {window}.")
            self._say(f"Watch it: {self._hint('status', batch)} --wait", style="dim")
            return 0
        batch = self._wait(batch)
        if target is not None and _has_results(batch):
            self._fetch(batch.output_file_id, target, self._retrier())
            self._say_failed(batch)
        elif batch.output_file_id is not None or batch.error_file_id is not None:
            also = " --errors FILE" if batch.error_file_id else ""
            self._say(
                f"Fetch the results: {self._hint('results', batch)} -o FILE{also}", style="dim"
            )
        return _outcome(batch)

    def _status(self) -> int:
        batch = self.client.get(self.own.id)
        if self.own.wait:
            batch = self._wait(batch, summary=False)
        if self.own.json:
            self._print_json(dict(batch.fields))
        else:
            block = batch_block(batch, self.clock.unix_time())
            self.out.print(block, highlight=False, soft_wrap=True)
        return _outcome(batch) if self.own.wait else 0

    def _list(self) -> int:
        batches = self.client.newest(whole("--limit", self.own.limit, low=1))
        if self.own.json:
            self._print_json([dict(batch.fields) for batch in batches])
        elif batches:
            print_table(self.out, batch_table(batches, self.clock.unix_time()))
        else:
            self._say("There are no batches.")
        return 0

    def _cancel(self) -> int:
        batch = self.client.cancel(self.own.id)
        if self.own.wait:
            batch = self._wait(batch)
        elif batch.has_ended:
            self._say(end_summary(batch))
        else:
            what = "being cancelled" if batch.status == BatchStatus.CANCELLING else "ending already"
            self._say(f"{printable(batch.id)} is {what}: {counts(batch)}")
        if not batch.has_ended or batch.status == BatchStatus.CANCELLED:
            return 0
        return _outcome(batch)

    def _results(self) -> int:
        target = check_writable("-o", self.own.output) or STDOUT
        errors = check_writable("--errors", self.own.errors)
        if target == errors:
            raise ConfigError("--errors: the responses go there; name another file")
        batch = self.client.get(self.own.id)
        if not batch.has_ended:
            raise BrosError(
                f"{printable(batch.id)} has not ended, it is {status_words(batch)}: "
                f"{counts(batch)}. Wait for it: {self._hint('status', batch)} --wait"
            )
        if not _has_results(batch):
            self._say_ending(batch)
            return NOT_COMPLETED
        self._fetch(batch.output_file_id, target)
        if errors is not None:
            self._fetch(batch.error_file_id, errors)
        status = _outcome(batch)
        if status:
            self._say_ending(batch)
            if errors is None:
                self._say_failed(batch)
        return status

    def _wait(self, batch: RemoteBatch, *, summary: bool = True) -> RemoteBatch:
        """The batch once it has ended. summary: print how it ended."""
        try:
            ended = wait_for_end(
                batch,
                lambda: self.client.get(batch.id),
                self._retrier(),
                self.clock,
                self.pause,
                self.err,
            )
        except KeyboardInterrupt:
            cancelling = batch.status == BatchStatus.CANCELLING
            going = "is still being cancelled" if cancelling else "continues"
            self._say(f"No longer waiting; {printable(batch.id)} {going}.")
            self._say(f"  wait again: {self._hint('status', batch)} --wait", style="dim")
            if not cancelling:
                self._say(f"  cancel it:  {self._hint('cancel', batch)}", style="dim")
            raise
        except NoAnswerError as error:
            raise BrosError(
                f"{error}. The batch continues when the server is back: "
                f"{self._hint('status', batch)} --wait"
            ) from None
        if summary:
            self._say_ending(ended)
        return ended

    def _retrier(self) -> Retrier:
        return Retrier(self.clock, self.pause, lambda text: self._say(f"bros: {text}"))

    def _upload(self, path: Path) -> str:
        try:
            num_bytes = path.stat().st_size
            with self._bar(num_bytes) as on_read:
                return self.client.upload(path, on_read)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None

    @contextlib.contextmanager
    def _bar(self, num_bytes: int) -> Iterator[Callable[[int], object]]:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        hidden = not self.err.is_terminal or num_bytes < _BAR_FROM_BYTES
        with Progress(
            *columns, TransferSpeedColumn(), console=self.err, transient=True, disable=hidden
        ) as bar:
            task = bar.add_task("uploading", total=num_bytes)
            yield lambda read: bar.advance(task, read)

    def _fetch(
        self, file_id: str | None, target: Path | str, retrier: Retrier | None = None
    ) -> None:
        """Download a file of the server; None stands for an empty one, which the server omits.

        retrier: starts over if the download fails; not for standard output.
        """

        def fetch() -> None:
            with contextlib.ExitStack() as stack:
                content = self.client.content
                pieces = stack.enter_context(content(file_id)) if file_id else iter(())
                if isinstance(target, Path):
                    write_atomically(target, pieces)
                else:
                    write_stdout(pieces)

        if not isinstance(target, Path):
            fetch()
            return
        if retrier is None:
            fetch()
        else:
            retrier.call(fetch)
        self._say(f"Wrote {target}")

    def _say_ending(self, batch: RemoteBatch) -> None:
        self._say(end_summary(batch))
        for error in batch.errors[:_SHOWN_ERRORS]:
            self._say(f"  {problem(error)}")
        more = len(batch.errors) - _SHOWN_ERRORS
        if more > 0:
            self._say(f"  and {more} more: {self._hint('status', batch)}", style="dim")

    def _say_failed(self, batch: RemoteBatch) -> None:
        if batch.error_file_id is not None:
            hint = f"{self._hint('results', batch)} -o FILE --errors FILE"
            self._say(f"Fetch the errors: {hint}", style="dim")

    def _hint(self, action: str, batch: RemoteBatch) -> str:
        server = f" --url {self.own.url}" if self.own.url else ""
        return f"bros batch {action} {printable(batch.id)}{server}"

    def _print_json(self, value: object) -> None:
        print(json.dumps(value, indent=2), file=self.out.file, flush=True)

    def _say(self, text: str, style: str | None = None) -> None:
        self.err.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def _wide(console: Console) -> Console:
    if not console.is_terminal:
        console.width = _WIDTH
    return console


def _has_results(batch: RemoteBatch) -> bool:
    """Whether an ended batch has results. A failed one has some only if the server caused it."""
    has_files = batch.output_file_id is not None or batch.error_file_id is not None
    return has_files or batch.status != BatchStatus.FAILED


def _outcome(batch: RemoteBatch) -> int:
    """The exit status of a batch that has ended."""
    if batch.status != BatchStatus.COMPLETED:
        return NOT_COMPLETED
    return SOME_ROWS_FAILED if batch.failed else 0


def _rt_slowdown(text: str | None) -> float | None:
    """Raises ConfigError."""
    try:
        return None if text is None else RT_SLOWDOWN.parse(text)
    except ConfigError as error:
        raise ConfigError(f"--rt-slowdown: {error}") from None


def _window(text: str) -> str:
    """`text` if it is a valid window. Raises ConfigError now rather than after a large upload."""
    try:
        parse_window(text)
    except InvalidRequestError as error:
        raise ConfigError(f"--window: {error.message}") from None
    return text


def _metadata(pairs: list[str]) -> dict[str, str]:
    """Raises ConfigError."""
    found: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise ConfigError(f"--metadata: {pair!r} is not KEY=VALUE")
        if key in found:
            raise ConfigError(f"--metadata: {key} is given twice")
        if pair != as_text(pair):
            raise ConfigError(f"--metadata: {pair!r} is not UTF-8")
        found[key] = value
    return found


def first_url(path: Path) -> str:
    """The endpoint that the first request of a file names. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
            first = next((line for line in lines if line.strip()), None)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if first is None:
        raise ConfigError(f"{path} has no requests")
    try:
        url = json.loads(first)["url"]
    except (ValueError, KeyError, TypeError, RecursionError):
        url = None
    if not isinstance(url, str):
        raise ConfigError(
            f'{path}: its first request is not a JSON object with a "url"; correct it, or give '
            "--endpoint"
        )
    return url
