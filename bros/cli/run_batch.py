"""`bros run-batch`: processes a file of requests in this process, without a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from bros.batch.files import Page
from bros.batch.objects import DAY_S, MAX_WINDOW_S, Batch, BatchStatus, StoredFile
from bros.batch.rows import BadRowError, check_endpoint, parse_row
from bros.batch.store import Store, open_store
from bros.cli.batch import (
    NOT_COMPLETED,
    SOME_ROWS_FAILED,
    check_input,
    check_writable,
    first_url,
    write_atomically,
)
from bros.cli.batch_client import RemoteBatch, Retrier, counts, end_summary, problem, wait_for_end
from bros.cli.flags import RunBatchFlags, read_own
from bros.core.clock import Clock
from bros.core.config import Config
from bros.core.errors import BrosError, ConfigError, EngineDeadError, InvalidRequestError
from bros.core.files import as_text, expand_user
from bros.core.tenants import TenantLimits
from bros.server.batches.schema import BatchObject
from bros.server.build import local_jobs, served_name
from bros.server.state import ServerState

_TENANT = ""
_LOCK, _WRITTEN = "lock", "written"
"""Files of the folder of a run: which process has it; whether the output has been written."""

_COPY_BYTES = 2**20


class _StoppedError(Exception):
    """The user has interrupted the batch."""


def run_batch_here(
    args: argparse.Namespace, config: Config, clock: Clock, console: Console | None = None
) -> int:
    """Process a file; returns the exit status.

    Raises ConfigError for unusable files, ModelError, or KeyboardInterrupt.
    """
    console = console or Console(stderr=True)
    own = read_own(RunBatchFlags, args)
    source, target = check_input(own.input), expand_user(own.target)
    checked = check_writable("OUTPUT", own.target)
    if not isinstance(checked, Path):
        raise ConfigError(f"OUTPUT: {own.target!r} is not the name of a file")
    if target.is_symlink():
        target = checked  # what it points to is replaced, and not the link
    endpoint = own.endpoint or first_url(source)
    try:
        check_endpoint(endpoint)
    except InvalidRequestError as error:
        where = source if own.endpoint is None else "--endpoint"
        raise ConfigError(f"{where}: {error.message}") from None
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the input; name another file")
    partial = _partial(target)
    if target.exists() and not own.overwrite:
        status = _existing(target, source, endpoint, console)
        if (partial / _WRITTEN).exists():  # of the run that has written it, which was killed then
            with _locked(partial):
                shutil.rmtree(partial, ignore_errors=True)
        return status
    with _locked(partial):
        wanted = RequestedRun(source, endpoint, served_name(config))
        return _run_to_end(config, wanted, target, clock, console)


def _partial(target: Path) -> Path:
    """The folder of the intermediate state."""
    return target.with_name(f"{target.name}.partial")


def _existing(target: Path, source: Path, endpoint: str, console: Console) -> int:
    """The exit status if the target has the responses to all requests of the source already.

    Raises ConfigError if it is anything else, which must not be lost.
    """
    num_rows = num_failed = 0
    try:
        with target.open("rb") as responses, source.open("rb") as requests:
            # One line of each at a time: the parts of all take ten times the memory of the files.
            rows = (parse_row(line, endpoint) for line in requests if line.strip())
            for row, line in zip(rows, map(json.loads, responses), strict=True):
                if row.custom_id != line["custom_id"]:
                    raise ValueError("the response is to another request")
                num_rows += 1
                num_failed += line["error"] is not None or line["response"]["status_code"] != 200
    except (BadRowError, ValueError, LookupError, TypeError):
        raise ConfigError(
            f"{target} exists and is not the output for {source}; "
            "name another file, or replace it with --overwrite"
        ) from None
    console.print(
        f"{target} has the responses to all {num_rows} requests; --overwrite processes them again",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )
    return SOME_ROWS_FAILED if num_failed else 0


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Holds the lock of the folder. Raises ConfigError if another process has it, or if it cannot
    be made."""
    with contextlib.ExitStack() as stack:
        try:
            partial.mkdir(exist_ok=True, mode=0o700)
            names = {path.name for path in partial.iterdir()}
            if names and _LOCK not in names:
                raise ConfigError(f"OUTPUT: {partial} is not of a batch; name another file")
            lock = stack.enter_context((partial / _LOCK).open("w"))
        except OSError as error:
            message = f"OUTPUT: {partial} cannot be written: {error.strerror}"
            raise ConfigError(message) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another process is using {partial}") from None
        yield


@dataclass(frozen=True, slots=True)
class RequestedRun:
    """The file to process, the endpoint, and the served name of the model."""

    source: Path
    endpoint: str
    model: str


def _run_to_end(
    config: Config, wanted: RequestedRun, target: Path, clock: Clock, console: Console
) -> int:
    partial = _partial(target)
    store = open_store(partial, option="the output file")
    if (partial / _WRITTEN).exists() or _has_no_answers(store):
        store.close()
        _clear(partial)
        store = open_store(partial, option="the output file")
    is_done = False
    try:
        store.batches.release()  # of a run that was killed
        batch = _resumable(store, wanted, partial) or begin(store, wanted, clock)
        if not batch.status.is_final:
            asyncio.run(_run(config, store, batch, clock, console))
            batch = store.batches.get(_TENANT, batch.id)
        status = _conclude(store, batch, target, console)
        (partial / _WRITTEN).touch()  # if this is killed before the folder is removed
        is_done = True
        return status
    except KeyboardInterrupt:
        console.print("Interrupted; run the same command to continue.", highlight=False)
        raise
    finally:
        # What has no answers yet is made again by the next run, with whatever options that has.
        is_done = is_done or _has_no_answers(store)
        store.close()
        if is_done:
            shutil.rmtree(partial, ignore_errors=True)


def _clear(partial: Path) -> None:
    """Remove everything but the lock."""
    for path in partial.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != _LOCK:
            path.unlink()


def _has_no_answers(store: Store) -> bool:
    """False also if the store cannot be read now."""
    try:
        batches, _ = store.batches.page(_TENANT, Page(limit=1))
    except BrosError:
        return False
    return not any(batch.completed or batch.failed for batch in batches)


def _resumable(store: Store, wanted: RequestedRun, partial: Path) -> Batch | None:
    """The batch of an interrupted run of the same command; None without one."""
    batches, _ = store.batches.page(_TENANT, Page(limit=1))
    if not batches:
        return None
    with wanted.source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    resumed = batches[0]
    for what, before, now in (
        ("input", resumed.input_digest, digest),
        ("endpoint", resumed.endpoint, wanted.endpoint),
        ("model", resumed.served_model, wanted.model),
    ):
        if before != now:
            raise ConfigError(f"{partial} is of another {what}; remove it to start over")
    return resumed


def begin(store: Store, wanted: RequestedRun, clock: Clock) -> Batch:
    """Create the batch of a file."""
    now, stamp = clock.unix_time(), clock.now()
    with store.files.bodies.new() as body, wanted.source.open("rb") as file:
        while piece := file.read(_COPY_BYTES):
            body.write(piece)
        body.finish()
        kept = StoredFile(
            id=f"file-{stamp}",
            tenant=_TENANT,
            digest=body.digest,
            num_bytes=body.num_bytes,
            filename=as_text(wanted.source.name),
            purpose="batch",
            created_at=int(now),
        )
        store.files.add(body, kept)
    batch = Batch(
        id=as_text(wanted.source.name),
        tenant=_TENANT,
        served_model=wanted.model,
        endpoint=wanted.endpoint,
        input_file_id=kept.id,
        input_digest=kept.digest,
        window=f"{MAX_WINDOW_S // DAY_S}d",
        status=BatchStatus.VALIDATING,
        created_at=int(now),
        expires_at=int(now) + MAX_WINDOW_S,
    )
    return store.batches.create(batch, TenantLimits(batches=1))


async def _run(config: Config, store: Store, batch: Batch, clock: Clock, console: Console) -> None:
    """Run the batch to its end, or until Ctrl-C."""
    stopped = threading.Event()

    def pause(seconds: float) -> None:
        if stopped.wait(seconds):
            raise _StoppedError

    def ask() -> RemoteBatch:
        if not state.engine.alive:
            raise EngineDeadError("The engine has died; run the same command to continue.")
        return _as_remote(store.batches.get(_TENANT, batch.id))

    def watch() -> None:
        retrier = Retrier(clock, pause, lambda text: console.print(text, highlight=False))
        wait_for_end(ask(), ask, retrier, clock, pause, console)

    state: ServerState
    async with local_jobs(config, store) as state:
        assert state.jobs is not None
        try:
            await asyncio.to_thread(watch)
        except _StoppedError:
            return
        finally:
            stopped.set()


def _conclude(store: Store, batch: Batch, target: Path, console: Console) -> int:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    shown = _as_remote(batch)
    if batch.status is not BatchStatus.COMPLETED:
        say(end_summary(shown))
        for error in shown.errors:
            say(f"  {problem(error)}")
    if batch.total:
        write_atomically(target, _lines_in_input_order(store, batch))
        say(f"{counts(shown)}; wrote {target}")
    if batch.status is not BatchStatus.COMPLETED:
        return NOT_COMPLETED
    return SOME_ROWS_FAILED if batch.failed else 0


def _as_remote(batch: Batch) -> RemoteBatch:
    """The batch as a server would describe it, but without a completion window."""
    fields = json.loads(BatchObject.of(batch).model_dump_json())
    return RemoteBatch.read({**fields, "expires_at": None})


def _lines_in_input_order(store: Store, batch: Batch) -> Iterator[bytes]:
    """The lines of the output and the error file, in the order of the input."""
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            kept = store.files.get(_TENANT, file_id, batch.created_at)
            file = stack.enter_context(store.files.body(kept).open("rb"))
            offset = 0
            for line in file:
                places[json.loads(line)["custom_id"]] = file, offset
                offset += len(line)
        source = store.files.bodies.path(batch.input_digest)  # the user's file may have changed
        for request in stack.enter_context(source.open("rb")):
            if request.strip():
                where, offset = places[parse_row(request, batch.endpoint).custom_id]
                where.seek(offset)
                yield where.readline()
