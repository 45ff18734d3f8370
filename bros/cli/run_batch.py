"""`bros run-batch`: a file of requests answered here, without a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import hashlib
import json
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from rich.console import Console

from bros.batch.files import Page
from bros.batch.objects import DAY_S, MAX_WINDOW_S, Batch, BatchStatus, StoredFile
from bros.batch.rows import parse_row
from bros.batch.store import Store, open_store
from bros.cli.batch import NOT_COMPLETED, SOME_ROWS_FAILED, first_url
from bros.cli.batch_client import Patience, RemoteBatch, counts, ending, problem, wait_for_end
from bros.cli.flags import RunBatchFlags, read_own
from bros.core.clock import Clock
from bros.core.config import Config
from bros.core.errors import BrosError, ConfigError, EngineDeadError
from bros.server.batches.schema import BatchObject
from bros.server.build import local_jobs, served_name
from bros.server.state import ServerState

_TENANT = ""
_COPIED_AT_ONCE = 2**20


class _StoppedError(Exception):
    """The user has stopped waiting for the batch."""


def run_batch_here(
    args: argparse.Namespace, config: Config, clock: Clock, console: Console | None = None
) -> int:
    """Answer a file; returns the exit status.

    Raises ConfigError for files that cannot be used, ModelError, or KeyboardInterrupt.
    """
    console = console or Console(stderr=True)
    own = read_own(RunBatchFlags, args)
    source, target = Path(own.input).expanduser(), Path(own.target).expanduser()
    endpoint = own.endpoint or first_url(source)
    if target.is_dir() or not target.absolute().parent.is_dir():
        raise ConfigError(f"{target} cannot be written: no such folder, or it is one")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} is the input; the answers need another file")
    with _alone(_partial(target)):
        wanted = RequestedRun(source, endpoint, served_name(config))
        return _run_to_end(config, wanted, target, clock, console)


def _partial(target: Path) -> Path:
    """The folder of what is done, until all of it is."""
    return target.with_name(f"{target.name}.partial")


@contextlib.contextmanager
def _alone(partial: Path) -> Iterator[None]:
    """Raises ConfigError if another process works in the folder."""
    partial.mkdir(exist_ok=True, mode=0o700)
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"another run is at work in {partial}") from None
        yield


@dataclass(frozen=True, slots=True)
class RequestedRun:
    """What is to be run, and by which model."""

    source: Path
    endpoint: str
    model: str


def _run_to_end(
    config: Config, wanted: RequestedRun, target: Path, clock: Clock, console: Console
) -> int:
    partial = _partial(target)
    store = open_store(partial)
    try:
        store.batches.release()  # of a run that was killed
        batch = _begun(store, wanted, partial) or begin(store, wanted, clock)
        if not batch.status.is_final:
            asyncio.run(_run(config, store, batch, clock, console))
            batch = store.batches.get(_TENANT, batch.id)
        status = _conclude(store, batch, target, console)
        shutil.rmtree(partial)
        return status
    except KeyboardInterrupt:
        console.print("Interrupted; the same command goes on where it was.", highlight=False)
        raise
    finally:
        store.close()


def _begun(store: Store, wanted: RequestedRun, partial: Path) -> Batch | None:
    """What an interrupted run of the same command was doing."""
    batches, _ = store.batches.page(_TENANT, Page(limit=1))
    if not batches:
        return None
    with wanted.source.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    begun = batches[0]
    for what, before, now in (
        ("input", begun.input_digest, digest),
        ("endpoint", begun.endpoint, wanted.endpoint),
        ("model", begun.served_model, wanted.model),
    ):
        if before != now:
            raise ConfigError(f"{partial} is of another {what}; remove it to begin anew")
    return begun


def begin(store: Store, wanted: RequestedRun, clock: Clock) -> Batch:
    """A batch of a file, which no runner has claimed yet."""
    now, stamp = clock.unix_time(), clock.now()
    with store.files.bodies.new() as body, wanted.source.open("rb") as file:
        while piece := file.read(_COPIED_AT_ONCE):
            body.write(piece)
        body.finish()
        kept = StoredFile(
            id=f"file-{stamp}",
            tenant=_TENANT,
            digest=body.digest,
            num_bytes=body.num_bytes,
            filename=wanted.source.name,
            purpose="batch",
            created_at=int(now),
        )
        store.files.add(body, kept)
    batch = Batch(
        id=wanted.source.name,
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
    return store.batches.create(batch, max_open=1)


async def _run(config: Config, store: Store, batch: Batch, clock: Clock, console: Console) -> None:
    """Until the batch has ended."""
    stopped = threading.Event()

    def pause(seconds: float) -> None:
        if stopped.wait(seconds):
            raise _StoppedError

    def ask() -> RemoteBatch:
        if not state.engine.alive:
            raise EngineDeadError("The engine has ended; the same command goes on where it was.")
        return _shown(store.batches.get(_TENANT, batch.id))

    def watch() -> None:
        patience = Patience(clock, pause, lambda text: console.print(text, highlight=False))
        wait_for_end(ask(), ask, patience, clock, pause, console)

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

    shown = _shown(batch)
    if batch.status is not BatchStatus.COMPLETED:
        say(ending(shown))
        for error in shown.errors:
            say(f"  {problem(error)}")
    if batch.total:
        _write(target, _in_order(store, batch))
        say(f"{counts(shown)}; wrote {target}")
    if batch.status is not BatchStatus.COMPLETED:
        return NOT_COMPLETED
    return SOME_ROWS_FAILED if batch.failed else 0


def _shown(batch: Batch) -> RemoteBatch:
    """As the client of a server sees it, but without a window: there is none here."""
    fields = json.loads(BatchObject.of(batch).model_dump_json())
    return RemoteBatch.read({**fields, "expires_at": None})


def _in_order(store: Store, batch: Batch) -> Iterator[bytes]:
    """The lines of both files, as the requests come in the input."""
    with contextlib.ExitStack() as stack:
        places: dict[str, tuple[BinaryIO, int]] = {}
        for file_id in filter(None, (batch.output_file_id, batch.error_file_id)):
            kept = store.files.get(_TENANT, file_id, batch.created_at)
            file = stack.enter_context(store.files.body(kept).open("rb"))
            offset = 0
            for line in file:
                places[json.loads(line)["custom_id"]] = file, offset
                offset += len(line)
        source = store.files.bodies.path(batch.input_digest)  # the user's file may be another now
        for request in stack.enter_context(source.open("rb")):
            if request.strip():
                where, offset = places[parse_row(request, batch.endpoint).custom_id]
                where.seek(offset)
                yield where.readline()


def _write(target: Path, lines: Iterable[bytes]) -> None:
    """Under another name until it is whole. Raises BrosError."""
    written = target.with_name(f".{target.name}.part")
    try:
        with written.open("wb") as file:
            file.writelines(lines)
        written.replace(target)
    except OSError as error:
        raise BrosError(f"{target} cannot be written: {error.strerror}") from None
    finally:
        written.unlink(missing_ok=True)
