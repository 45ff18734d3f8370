"""All that is kept of files and batches, in one folder and one database."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

import sqlalchemy as sa

from bros.batch.database import BATCHES, FILES, ROWS, STORES, Database, open_database
from bros.batch.files import Bodies, BodyWriter, FileStore, Page, has_id, paged
from bros.batch.objects import (
    OPEN_STATUSES,
    Batch,
    BatchStatus,
    Lease,
    LeaseLostError,
    LineError,
    QuotaError,
    RowOutcome,
    RowRef,
    StoredFile,
    TokenUsage,
)
from bros.core.errors import ConfigError, InvalidRequestError, NotFoundError

# ---- Between rows of the database and objects.


_OURS = ("seq", "enqueued_tokens", "lease_owner", "lease_epoch", "lease_until", "faults")
"""Columns that only the store needs."""

_STAMPS = {
    BatchStatus.FAILED: "failed_at",
    BatchStatus.IN_PROGRESS: "in_progress_at",
    BatchStatus.FINALIZING: "finalizing_at",
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLING: "cancelling_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


def errors_json(errors: Sequence[LineError]) -> str:
    return json.dumps([asdict(error) for error in errors])


def batch_of(row: sa.Row[tuple[object, ...]]) -> Batch:
    fields = dict(row._mapping)
    for name in _OURS:
        del fields[name]
    tokens = [fields.pop(name) for name in ("prompt_tokens", "cached_tokens", "output_tokens")]
    metadata, errors = fields.pop("metadata"), fields.pop("errors")
    status, outcome = fields.pop("status"), fields.pop("outcome")
    return Batch(
        **fields,
        status=BatchStatus(status),
        outcome=BatchStatus(outcome) if outcome else None,
        metadata=None if metadata is None else json.loads(metadata),
        errors=tuple(LineError(**error) for error in json.loads(errors or "[]")),
        usage=TokenUsage(*tokens),
    )


def get_batch(connection: sa.Connection, batch_id: str, tenant: str | None = None) -> Batch:
    """Raises NotFoundError."""
    query = sa.select(BATCHES).where(has_id(BATCHES, batch_id))
    if tenant is not None:
        query = query.where(BATCHES.c.tenant == tenant)
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(
            f"There is no batch {batch_id[:100]!r}.", param="batch_id", code="batch_not_found"
        )
    return batch_of(row)


def set_batch(connection: sa.Connection, lease: Lease, **values: object) -> None:
    of_batch = BATCHES.c.id == lease.batch_id
    connection.execute(sa.update(BATCHES).where(of_batch).values(values))


def move_batch(
    connection: sa.Connection, lease: Lease, status: BatchStatus, now: float, **values: object
) -> None:
    """To another status, at a time that the batch remembers."""
    stamp = {_STAMPS[status]: int(now)}
    set_batch(connection, lease, **{"status": status.value, **stamp, **values})


# ---- Batches and their rows: every change of state is one transaction.
#
# Who works on a batch holds its lease, and everything that is written on behalf of the work names
# it: once the batch has a new owner, the former one's transactions fail with LeaseLostError.


_INSERTED_AT_ONCE = 5_000
_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


class BatchStore:
    """Blocking; to be used from worker threads. `now` is the time in Unix seconds."""

    def __init__(self, database: Database, files: FileStore) -> None:
        self._database = database
        self._files = files

    # What clients ask for

    def create(self, batch: Batch, max_open: int) -> Batch:
        """Raises QuotaError if its tenant has `max_open` unfinished ones already."""
        with self._database.write(alone=True) as connection:
            is_open = BATCHES.c.tenant == batch.tenant, BATCHES.c.status.in_(OPEN_STATUSES)
            count = connection.execute(sa.select(sa.func.count()).where(*is_open)).scalar_one()
            if count >= max_open:
                raise QuotaError(f"You have {count} unfinished batches, which is the most allowed.")
            metadata = None if batch.metadata is None else json.dumps(dict(batch.metadata))
            connection.execute(
                sa.insert(BATCHES).values(
                    id=batch.id,
                    tenant=batch.tenant,
                    served_model=batch.served_model,
                    endpoint=batch.endpoint,
                    input_file_id=batch.input_file_id,
                    input_digest=batch.input_digest,
                    window=batch.window,
                    status=batch.status.value,
                    metadata=metadata,
                    output_life_s=batch.output_life_s,
                    created_at=batch.created_at,
                    expires_at=batch.expires_at,
                )
            )
        return batch

    def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return get_batch(connection, batch_id, tenant)

    def page(self, tenant: str, page: Page) -> tuple[list[Batch], bool]:
        """(batches, whether there are more). Raises NotFoundError for an unknown `after`."""
        query = sa.select(BATCHES).where(BATCHES.c.tenant == tenant)
        with self._database.read() as connection:
            rows = connection.execute(paged(connection, query, BATCHES, tenant, page)).all()
        return [batch_of(row) for row in rows[: page.limit]], len(rows) > page.limit

    def cancel(self, tenant: str, batch_id: str, now: float) -> Batch:
        """Its owner winds it up; one that is being wound up as expired or failed stays as it is.

        Raises NotFoundError, InvalidRequestError if it is too late.
        """
        with self._database.write() as connection:
            connection.execute(
                sa.update(BATCHES)
                .where(has_id(BATCHES, batch_id), BATCHES.c.tenant == tenant)
                .where(BATCHES.c.status.in_(_CANCELLABLE), BATCHES.c.outcome.is_(None))
                .values(status=BatchStatus.CANCELLING.value, cancelling_at=int(now))
            )
            batch = get_batch(connection, batch_id, tenant)
        if batch.status not in (*_CANCELLABLE, *_CANCELLED):
            raise InvalidRequestError(
                f"A batch that is {batch.status} cannot be cancelled.",
                param="batch_id",
                code="invalid_batch_status",
            )
        return batch

    def count_by_status(self) -> Mapping[str, int]:
        query = sa.select(BATCHES.c.status, sa.func.count()).group_by(BATCHES.c.status)
        with self._database.read() as connection:
            return {status: count for status, count in connection.execute(query)}

    # Leases

    def time(self, now: float) -> float:
        """What time it is for leases, in Unix seconds: the database's, so that the clocks of
        servers that share it may differ. A file is of one machine, which has one clock: `now`."""
        return self._database.time(now)

    def claim(
        self,
        owner: str,
        now: float,
        lease_s: float,
        most: int | None = None,
        model: str | None = None,
    ) -> list[tuple[Lease, Batch]]:
        """Claim batches that no process works on, the most urgent first.

        most: leave others to others. model: the one that is served here; what is for others is
        only taken if no more rows of it are to be run.
        """
        free = [BATCHES.c.status.in_(OPEN_STATUSES), BATCHES.c.lease_until <= now]
        if model is not None:
            over = BATCHES.c.outcome.is_not(None) | (BATCHES.c.expires_at <= now)
            over |= BATCHES.c.status == BatchStatus.CANCELLING.value
            free.append((BATCHES.c.served_model == model) | over)
        urgent_first = (BATCHES.c.expires_at, BATCHES.c.seq)
        wanted = sa.select(BATCHES.c.id).where(*free).order_by(*urgent_first).limit(most)
        with self._database.read() as connection:
            if connection.execute(wanted.limit(1)).first() is None:
                return []
        with self._database.write() as connection:
            rows = connection.execute(
                sa.update(BATCHES)
                .where(*free, BATCHES.c.id.in_(wanted))
                .values(
                    lease_owner=owner,
                    lease_epoch=BATCHES.c.lease_epoch + 1,
                    lease_until=now + lease_s,
                )
                .returning(BATCHES)
            ).all()
        urgent = sorted(rows, key=lambda row: (row.expires_at, row.seq))
        return [(Lease(row.id, owner, row.lease_epoch), batch_of(row)) for row in urgent]

    def renew(
        self,
        owner: str,
        batch_ids: Sequence[str],
        now: float,
        lease_s: float,
        expected_at: Mapping[str, int] = MappingProxyType({}),
    ) -> Mapping[Lease, BatchStatus]:
        """Renew leases of an owner that no other process has taken over; returns these batches.

        expected_at: by id, for those of which it is known.
        """
        values: dict[str, object] = {"lease_until": now + lease_s}
        if expected_at:
            by_id = sa.case(expected_at, value=BATCHES.c.id, else_=BATCHES.c.expected_at)
            values["expected_at"] = by_id
        with self._database.write() as connection:
            rows = connection.execute(
                sa.update(BATCHES)
                .where(BATCHES.c.lease_owner == owner, BATCHES.c.id.in_(batch_ids))
                .where(BATCHES.c.status.in_(OPEN_STATUSES))
                .values(values)
                .returning(BATCHES.c.id, BATCHES.c.lease_epoch, BATCHES.c.status)
            ).all()
        return {Lease(row.id, owner, row.lease_epoch): BatchStatus(row.status) for row in rows}

    def release(self, owner: str | None = None) -> None:
        """Let others take over at once, from one owner or, if there can be no other, from all."""
        held = BATCHES.c.lease_owner.is_not(None) if owner is None else _of(owner)
        with self._database.write() as connection:
            connection.execute(
                sa.update(BATCHES).where(held).values(lease_owner=None, lease_until=0.0)
            )

    # Work on a batch

    def admit(
        self,
        lease: Lease,
        rows: Sequence[RowRef],
        *,
        model: str | None,
        tokens: int,
        max_tokens: int,
        now: float,
    ) -> Batch:
        """A valid input: the batch is in progress when this returns, unless it has been cancelled.

        tokens: what it adds to its tenant's unfinished batches; beyond `max_tokens` it fails.
        """
        with self._database.write(alone=True) as connection:
            batch = self._held(connection, lease)
            if batch.status is not BatchStatus.VALIDATING:
                return batch
            queued = connection.execute(
                sa.select(sa.func.coalesce(sa.func.sum(BATCHES.c.enqueued_tokens), 0)).where(
                    BATCHES.c.tenant == batch.tenant, BATCHES.c.status.in_(OPEN_STATUSES)
                )
            ).scalar_one()
            if queued + tokens > max_tokens:
                message = (
                    f"The batch has about {tokens} prompt tokens; with {queued} of your unfinished "
                    f"batches that is more than the {max_tokens} that may be queued."
                )
                error = LineError("token_limit_exceeded", message)
                move_batch(connection, lease, BatchStatus.FAILED, now, errors=errors_json([error]))
                return get_batch(connection, lease.batch_id)
            for begin in range(0, len(rows), _INSERTED_AT_ONCE):
                chunk = rows[begin : begin + _INSERTED_AT_ONCE]
                values = [{"batch_id": batch.id, **asdict(row)} for row in chunk]
                connection.execute(sa.insert(ROWS), values)
            move_batch(
                connection,
                lease,
                BatchStatus.IN_PROGRESS,
                now,
                model=model,
                total=len(rows),
                enqueued_tokens=tokens,
            )
            return get_batch(connection, lease.batch_id)

    def fail(self, lease: Lease, errors: Sequence[LineError], now: float) -> None:
        """The input is not valid; none of it is run."""
        with self._database.write() as connection:
            if self._held(connection, lease).status is BatchStatus.VALIDATING:
                move_batch(connection, lease, BatchStatus.FAILED, now, errors=errors_json(errors))

    def note_fault(self, lease: Lease, error: LineError, most: int, now: float) -> None:
        """Work on the batch ended unexpectedly; after `most` times without a stored row in between
        the batch fails.

        If it has rows it is wound up first, so that what is done is kept. One that is being wound
        up already stays as it is: there is nothing that could take the place of its files.
        """
        with self._database.write() as connection:
            batch = self._held(connection, lease)
            faults = connection.execute(
                sa.update(BATCHES)
                .where(BATCHES.c.id == batch.id)
                .values(faults=BATCHES.c.faults + 1)
                .returning(BATCHES.c.faults)
            ).scalar_one()
            if faults < most or batch.outcome is not None:
                return
            failed, errors = BatchStatus.FAILED, errors_json([error])
            if batch.status is BatchStatus.VALIDATING:
                move_batch(connection, lease, failed, now, errors=errors)
            elif batch.status is BatchStatus.IN_PROGRESS:
                wound_up = {"outcome": failed.value, "finalizing_at": int(now)}
                set_batch(connection, lease, errors=errors, **wound_up)

    def pending(self, batch_id: str, after_rank: int, limit: int) -> list[RowRef]:
        """Rows without an outcome, in the order of execution."""
        columns = (ROWS.c.line, ROWS.c.custom_id, ROWS.c.offset, ROWS.c.length, ROWS.c.rank)
        query = (
            sa.select(*columns)
            .where(ROWS.c.batch_id == batch_id, ROWS.c.rank > after_rank, ROWS.c.ok.is_(None))
            .order_by(ROWS.c.rank)
            .limit(limit)
        )
        with self._database.read() as connection:
            return [RowRef(*row) for row in connection.execute(query)]

    def commit(self, lease: Lease, outcomes: Sequence[RowOutcome], expected_at: int | None) -> None:
        """Store what became of rows. One that has an outcome keeps it, and once the batch is
        wound up it is too late."""
        with self._database.write() as connection:
            if self._held(connection, lease).outcome is not None:
                return
            usage, ok, failed = TokenUsage(), 0, 0
            for outcome in outcomes:
                stored = connection.execute(
                    sa.update(ROWS)
                    .where(ROWS.c.batch_id == lease.batch_id, ROWS.c.line == outcome.line)
                    .where(ROWS.c.ok.is_(None))
                    .values(ok=outcome.ok, result=outcome.result)
                )
                if stored.rowcount:
                    usage += outcome.usage
                    ok += outcome.ok
                    failed += not outcome.ok
            connection.execute(
                sa.update(BATCHES)
                .where(BATCHES.c.id == lease.batch_id)
                .values(
                    completed=BATCHES.c.completed + ok,
                    failed=BATCHES.c.failed + failed,
                    prompt_tokens=BATCHES.c.prompt_tokens + usage.prompt_tokens,
                    cached_tokens=BATCHES.c.cached_tokens + usage.cached_tokens,
                    output_tokens=BATCHES.c.output_tokens + usage.output_tokens,
                    expected_at=expected_at,
                    faults=0,
                )
            )

    def wind_up(self, lease: Lease, outcome: BatchStatus, now: float) -> BatchStatus:
        """No more rows are run; returns the final status that the batch will get."""
        with self._database.write() as connection:
            batch = self._held(connection, lease)
            if batch.status.is_final:
                return batch.status
            if batch.status is BatchStatus.CANCELLING:
                outcome = BatchStatus.CANCELLED
            if batch.outcome is not None:
                return batch.outcome
            if outcome is BatchStatus.COMPLETED:
                move_batch(connection, lease, BatchStatus.FINALIZING, now, outcome=outcome.value)
            else:
                set_batch(connection, lease, outcome=outcome.value, finalizing_at=int(now))
            return outcome

    def results(self, batch_id: str, *, ok: bool, page: int = 50) -> Iterator[tuple[str, str]]:
        """(custom_id, result) of rows that went well or, else, of all others, in the order of the
        input. The result of a row that was never finished is empty."""
        wanted = ROWS.c.ok.is_(True) if ok else ROWS.c.ok.is_not(True)
        line = -1
        while True:
            query = (
                sa.select(ROWS.c.line, ROWS.c.custom_id, ROWS.c.result)
                .where(ROWS.c.batch_id == batch_id, ROWS.c.line > line, wanted)
                .order_by(ROWS.c.line)
                .limit(page)
            )
            with self._database.read() as connection:
                rows = connection.execute(query).all()
            yield from ((row.custom_id, row.result or "") for row in rows)
            if len(rows) < page:
                return
            line = rows[-1].line

    def finish(
        self,
        lease: Lease,
        outcome: BatchStatus,
        output: tuple[BodyWriter, StoredFile] | None,
        errors: tuple[BodyWriter, StoredFile] | None,
        now: float,
    ) -> None:
        """The files take over from the rows; once, for then there are none any more."""
        with self._database.write(alone=True) as connection:
            batch = self._held(connection, lease)
            if batch.status.is_final:
                return
            for made in (output, errors):
                if made is not None:
                    self._files.insert(connection, *made)
            connection.execute(sa.delete(ROWS).where(ROWS.c.batch_id == batch.id))
            move_batch(
                connection,
                lease,
                outcome,
                now,
                output_file_id=output[1].id if output else None,
                error_file_id=errors[1].id if errors else None,
                failed=batch.total - batch.completed,
                enqueued_tokens=0,
                expected_at=None,
            )

    def _held(self, connection: sa.Connection, lease: Lease) -> Batch:
        """The batch, which stays the owner's until the transaction ends. Raises LeaseLostError."""
        row = connection.execute(
            sa.update(BATCHES)
            .where(BATCHES.c.id == lease.batch_id)
            .where(BATCHES.c.lease_owner == lease.owner, BATCHES.c.lease_epoch == lease.epoch)
            .values(lease_epoch=lease.epoch)  # locks it
            .returning(BATCHES)
        ).first()
        if row is None:
            raise LeaseLostError(f"{lease.batch_id} has another owner now")
        return batch_of(row)


def _of(owner: str) -> sa.ColumnElement[bool]:
    return BATCHES.c.lease_owner == owner


@dataclass(frozen=True, slots=True)
class Store:
    """Made by `open_store`."""

    database: Database
    files: FileStore
    batches: BatchStore

    def close(self) -> None:
        self.database.close()


def default_data_dir() -> Path:
    """Where jobs are kept unless the user says otherwise."""
    return Path.home() / ".local" / "share" / "bros"


def open_store(folder: Path, url: str | None = None) -> Store:
    """The database at `url` or in `folder`; bodies of files in `folder`/files/<id of the store>.

    Several stores may have one folder; servers that share a database must share the folder too.
    Raises ConfigError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = open_database(url, folder)
        try:
            bodies = Bodies(_body_folder(database, folder))
        except BaseException:
            database.close()
            raise
    except OSError as error:
        raise ConfigError(f"--data-dir: {folder} cannot be used: {error.strerror}") from error
    files = FileStore(database, bodies)
    return Store(database, files, BatchStore(database, files))


def _body_folder(database: Database, folder: Path) -> Path:
    """Raises ConfigError if the database has files and they are elsewhere."""
    with database.read() as connection:
        store_id: str = connection.execute(sa.select(STORES.c.id)).scalar_one()
        has_files = connection.execute(sa.select(FILES.c.id).limit(1)).first() is not None
    bodies = folder / "files" / store_id
    if has_files and not bodies.exists():
        raise ConfigError(
            f"--data-dir: the files of this store are not in {folder}; servers that share a store "
            "need the same folder"
        )
    return bodies
