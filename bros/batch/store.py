"""The store of batches and rows, and `open_store`, which adds the files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import MappingProxyType

import sqlalchemy as sa

from bros.batch.database import BATCHES, FILES, ROWS, STORES, Database, body_folder, open_database
from bros.batch.files import Bodies, BodyWriter, FileStore, Page, has_id, paged
from bros.batch.objects import (
    OPEN_STATUSES,
    Batch,
    BatchStatus,
    Lease,
    LeaseLostError,
    LineError,
    RowOutcome,
    RowRef,
    StoredFile,
    StoreError,
    TokenUsage,
)
from bros.batch.responses import ResponseStore
from bros.core.errors import ConfigError, InvalidRequestError, NotFoundError
from bros.core.files import home_folder
from bros.core.tenants import NO_LIMITS, Resource, TenantLimits, check_limit

# ---- Conversion between table rows and records.


_STORE_ONLY = (
    "seq", "enqueued_tokens", "lease_owner", "lease_epoch", "lease_until", "faults",
    "result_bytes",
)  # fmt: skip
"""Columns that `Batch` does not have."""

_TIME_COLUMNS = {
    BatchStatus.FAILED: "failed_at",
    BatchStatus.IN_PROGRESS: "in_progress_at",
    BatchStatus.FINALIZING: "finalizing_at",
    BatchStatus.COMPLETED: "completed_at",
    BatchStatus.EXPIRED: "expired_at",
    BatchStatus.CANCELLING: "cancelling_at",
    BatchStatus.CANCELLED: "cancelled_at",
}


def _errors_json(errors: Sequence[LineError]) -> str:
    return json.dumps([asdict(error) for error in errors])


def _batch_of(row: sa.Row[tuple[object, ...]]) -> Batch:
    values = dict(row._mapping)
    for name in _STORE_ONLY:
        del values[name]
    usage = TokenUsage(**{field.name: values.pop(field.name) for field in fields(TokenUsage)})
    metadata, errors = values.pop("metadata"), values.pop("errors")
    status, outcome = values.pop("status"), values.pop("outcome")
    return Batch(
        **values,
        status=BatchStatus(status),
        outcome=BatchStatus(outcome) if outcome else None,
        metadata=None if metadata is None else json.loads(metadata),
        errors=tuple(LineError(**error) for error in json.loads(errors or "[]")),
        usage=usage,
    )


def _get_batch(connection: sa.Connection, batch_id: str, tenant: str | None = None) -> Batch:
    """Raises NotFoundError."""
    query = sa.select(BATCHES).where(has_id(BATCHES, batch_id))
    if tenant is not None:
        query = query.where(BATCHES.c.tenant == tenant)
    row = connection.execute(query).first()
    if row is None:
        raise NotFoundError(
            f"There is no batch {batch_id[:100]!r}.", param="batch_id", code="batch_not_found"
        )
    return _batch_of(row)


def _update_batch(connection: sa.Connection, lease: Lease, **values: object) -> None:
    query = sa.update(BATCHES).where(BATCHES.c.id == lease.batch_id)
    connection.execute(query.values(values))


def _set_status(
    connection: sa.Connection, lease: Lease, status: BatchStatus, now: float, **values: object
) -> None:
    """Set the status, the time column of that status, and other values."""
    time = {_TIME_COLUMNS[status]: int(now)}
    _update_batch(connection, lease, **{"status": status.value, **time, **values})


def _give_up(
    connection: sa.Connection, lease: Lease, batch: Batch, error: LineError, now: float
) -> None:
    """Let a batch that is in progress be finalized as failed."""
    if batch.status is BatchStatus.IN_PROGRESS:
        final = {"outcome": BatchStatus.FAILED.value, "finalizing_at": int(now)}
        _update_batch(connection, lease, errors=_errors_json([error]), **final)


# ---- Batches and their rows: every change of state is one transaction.
#
# The process that runs a batch holds its lease and passes it to every write. Once another process
# has claimed the batch, writes under the old lease raise LeaseLostError.


_INSERT_CHUNK = 5_000
_CANCELLABLE = (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
_CANCELLED = (BatchStatus.CANCELLING, BatchStatus.CANCELLED)


class BatchStore:
    """Blocking; for worker threads. `now` is in Unix seconds."""

    def __init__(self, database: Database, files: FileStore) -> None:
        self._database = database
        self._files = files

    # Requests of clients

    def create(self, batch: Batch, limits: TenantLimits = NO_LIMITS) -> Batch:
        """Raises StoreFullError, and TenantLimitError if the tenant has too many unfinished
        batches."""
        with self._database.write(exclusive=True, grows=True) as connection:
            is_open = BATCHES.c.tenant == batch.tenant, BATCHES.c.status.in_(OPEN_STATUSES)
            count = connection.execute(sa.select(sa.func.count()).where(*is_open)).scalar_one()
            check_limit(limits, Resource.BATCHES, count)
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
                    rt_slowdown=batch.rt_slowdown,
                    created_at=batch.created_at,
                    expires_at=batch.expires_at,
                )
            )
        return batch

    def get(self, tenant: str, batch_id: str) -> Batch:
        """Raises NotFoundError."""
        with self._database.read() as connection:
            return _get_batch(connection, batch_id, tenant)

    def page(self, tenant: str, page: Page) -> tuple[list[Batch], bool]:
        """(batches, whether more follow). Raises NotFoundError for an unknown `after`."""
        query = sa.select(BATCHES).where(BATCHES.c.tenant == tenant)
        with self._database.read() as connection:
            rows = connection.execute(paged(connection, query, BATCHES, tenant, page)).all()
        return [_batch_of(row) for row in rows[: page.limit]], len(rows) > page.limit

    def cancel(self, tenant: str, batch_id: str, now: float) -> Batch:
        """Set the status cancelling; the lease owner then finalizes the batch.

        A batch that is being finalized as expired or failed stays as it is. Raises NotFoundError,
        or InvalidRequestError if the batch can no longer be cancelled.
        """
        with self._database.write() as connection:
            connection.execute(
                sa.update(BATCHES)
                .where(has_id(BATCHES, batch_id), BATCHES.c.tenant == tenant)
                .where(BATCHES.c.status.in_(_CANCELLABLE), BATCHES.c.outcome.is_(None))
                .values(status=BatchStatus.CANCELLING.value, cancelling_at=int(now))
            )
            batch = _get_batch(connection, batch_id, tenant)
        if batch.status not in (*_CANCELLABLE, *_CANCELLED):
            raise InvalidRequestError(
                f"A batch that is {batch.status} cannot be cancelled.",
                param="batch_id",
                code="invalid_batch_status",
            )
        return batch

    def usage(self) -> Mapping[tuple[str, Resource], int]:
        """What the store holds for each tenant: (tenant, resource) -> amount."""
        found: dict[tuple[str, Resource], int] = {}
        files = sa.select(FILES.c.tenant, sa.func.count(), sa.func.sum(FILES.c.num_bytes))
        tokens = sa.func.sum(sa.func.coalesce(BATCHES.c.enqueued_tokens, 0))
        results = sa.func.sum(BATCHES.c.result_bytes)
        batches = sa.select(BATCHES.c.tenant, sa.func.count(), tokens, results)
        batches = batches.where(BATCHES.c.status.in_(OPEN_STATUSES))
        with self._database.read() as connection:
            for tenant, count, size in connection.execute(files.group_by(FILES.c.tenant)):
                found[tenant, Resource.FILES] = count
                found[tenant, Resource.FILE_BYTES] = int(size)
            for tenant, count, size, result_bytes in connection.execute(
                batches.group_by(BATCHES.c.tenant)
            ):
                found[tenant, Resource.BATCHES] = count
                found[tenant, Resource.BATCH_TOKENS] = int(size)
                of_files = found.get((tenant, Resource.FILE_BYTES), 0)
                found[tenant, Resource.FILE_BYTES] = of_files + int(result_bytes)
        return found

    def count_by_status(self) -> Mapping[str, int]:
        query = sa.select(BATCHES.c.status, sa.func.count()).group_by(BATCHES.c.status)
        with self._database.read() as connection:
            return {status: count for status, count in connection.execute(query)}

    # Leases

    def time(self, now: float) -> float:
        """The time for leases; see Database.time."""
        return self._database.time(now)

    def claim(
        self,
        owner: str,
        now: float,
        lease_s: float,
        most: int | None = None,
        model: str | None = None,
    ) -> list[tuple[Lease, Batch]]:
        """Claim open batches without a valid lease, those with the earliest deadline first.

        most: at most this many, so that other servers get some, too.
        model: the model served here. Of batches for other models, only those that have no more
            rows to run (cancelling, expired or being finalized) are claimed.
        """
        is_free = self._database.is_free(BATCHES.c.lease_until, now, lease_s)
        free = [BATCHES.c.status.in_(OPEN_STATUSES), is_free]
        if model is not None:
            runs_no_rows = BATCHES.c.outcome.is_not(None) | (BATCHES.c.expires_at <= now)
            runs_no_rows |= BATCHES.c.status == BatchStatus.CANCELLING.value
            free.append((BATCHES.c.served_model == model) | runs_no_rows)
        urgent_first = (BATCHES.c.expires_at, BATCHES.c.seq)
        wanted = sa.select(BATCHES.c.id).where(*free).order_by(*urgent_first).limit(most)
        with self._database.read() as connection:
            if connection.execute(wanted.limit(1)).first() is None:
                return []
        with self._database.write() as connection:
            ids = self._database.unlocked(connection, wanted)
            rows = connection.execute(
                sa.update(BATCHES)
                .where(*free, BATCHES.c.id.in_(ids))
                .values(
                    lease_owner=owner,
                    lease_epoch=BATCHES.c.lease_epoch + 1,
                    lease_until=now + lease_s,
                )
                .returning(BATCHES)
            ).all()
        urgent = sorted(rows, key=lambda row: (row.expires_at, row.seq))
        return [(Lease(row.id, owner, row.lease_epoch), _batch_of(row)) for row in urgent]

    def renew(
        self,
        owner: str,
        batch_ids: Sequence[str],
        now: float,
        lease_s: float,
        expected_at: Mapping[str, int] = MappingProxyType({}),
    ) -> Mapping[Lease, BatchStatus]:
        """Renew an owner's leases; returns those still held, with the status of their batch.

        expected_at: new values of that column by batch id; others stay as they are.
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
        """Release the leases of `owner`; None: of all owners, only while no other process runs."""
        column = BATCHES.c.lease_owner
        held = column.is_not(None) if owner is None else column == owner
        with self._database.write() as connection:
            connection.execute(
                sa.update(BATCHES).where(held).values(lease_owner=None, lease_until=0.0)
            )

    # Writes of the runner

    def admit(
        self,
        lease: Lease,
        rows: Sequence[RowRef],
        *,
        model: str | None,
        tokens: int,
        max_tokens: int | None,
        now: float,
    ) -> Batch:
        """Store the rows of a valid input and set the status in_progress, unless the batch has
        been cancelled. Returns the batch.

        tokens: estimated prompt tokens. If they and those of the tenant's unfinished batches are
            more than `max_tokens`, the batch fails. None: no limit.
        """
        with self._database.write(exclusive=True, grows=True) as connection:
            batch = self._locked_batch(connection, lease)
            if batch.status is not BatchStatus.VALIDATING:
                return batch
            queued = connection.execute(
                sa.select(sa.func.coalesce(sa.func.sum(BATCHES.c.enqueued_tokens), 0)).where(
                    BATCHES.c.tenant == batch.tenant, BATCHES.c.status.in_(OPEN_STATUSES)
                )
            ).scalar_one()
            if max_tokens is not None and queued + tokens > max_tokens:
                message = (
                    f"The batch has about {tokens} prompt tokens; with the {queued} of your "
                    f"unfinished batches that exceeds the limit of {max_tokens} "
                    "(max_batch_tokens)."
                )
                error = LineError("token_limit_exceeded", message)
                _set_status(
                    connection, lease, BatchStatus.FAILED, now, errors=_errors_json([error])
                )
                return _get_batch(connection, lease.batch_id)
            for begin in range(0, len(rows), _INSERT_CHUNK):
                chunk = rows[begin : begin + _INSERT_CHUNK]
                values = [{"batch_id": batch.id, **asdict(row)} for row in chunk]
                connection.execute(sa.insert(ROWS), values)
            _set_status(
                connection,
                lease,
                BatchStatus.IN_PROGRESS,
                now,
                model=model,
                total=len(rows),
                enqueued_tokens=tokens,
            )
            return _get_batch(connection, lease.batch_id)

    def fail(self, lease: Lease, errors: Sequence[LineError], now: float) -> None:
        """Set the status failed because the input is not valid; no row runs."""
        with self._database.write() as connection:
            if self._locked_batch(connection, lease).status is BatchStatus.VALIDATING:
                _set_status(connection, lease, BatchStatus.FAILED, now, errors=_errors_json(errors))

    def note_fault(self, lease: Lease, error: LineError, most: int, now: float) -> None:
        """Count an unexpected failure of the runner. After `most` of them without a stored row in
        between, the batch fails with `error`.

        A batch with rows is then finalized as failed, which keeps the results so far. One that is
        already being finalized stays as it is.
        """
        with self._database.write() as connection:
            batch = self._locked_batch(connection, lease)
            faults = connection.execute(
                sa.update(BATCHES)
                .where(BATCHES.c.id == batch.id)
                .values(faults=BATCHES.c.faults + 1)
                .returning(BATCHES.c.faults)
            ).scalar_one()
            if faults < most or batch.outcome is not None:
                return
            if batch.status is BatchStatus.VALIDATING:
                errors = _errors_json([error])
                _set_status(connection, lease, BatchStatus.FAILED, now, errors=errors)
            else:
                _give_up(connection, lease, batch, error, now)

    def give_up(self, lease: Lease, error: LineError, now: float) -> None:
        """Finalize a batch that is in progress as failed, which keeps the results so far. Any other
        one stays as it is."""
        with self._database.write() as connection:
            batch = self._locked_batch(connection, lease)
            if batch.outcome is None:
                _give_up(connection, lease, batch, error, now)

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

    def commit(
        self,
        lease: Lease,
        outcomes: Sequence[RowOutcome],
        expected_at: int | None,
        now: float = 0.0,
        limits: TenantLimits = NO_LIMITS,
        server_limits: TenantLimits = NO_LIMITS,
    ) -> None:
        """Store outcomes of rows. A row keeps its first outcome; once finalizing has begun,
        nothing is stored.

        limits: of the tenant.
        server_limits: of all tenants together.
        now: needed with limits.
        Raises what FileStore.check_results raises for the bytes of the results; then nothing is
        stored.
        """
        num_bytes = sum(outcome.num_bytes for outcome in outcomes)
        with self._database.write(grows=True) as connection:
            batch = self._locked_batch(connection, lease)
            if batch.outcome is not None:
                return
            self._files.check_results(
                connection, batch.tenant, num_bytes, now, limits, server_limits
            )
            usage, ok, failed, num_bytes = TokenUsage(), 0, 0, 0
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
                    num_bytes += outcome.num_bytes
            connection.execute(
                sa.update(BATCHES)
                .where(BATCHES.c.id == lease.batch_id)
                .values(
                    result_bytes=BATCHES.c.result_bytes + num_bytes,
                    completed=BATCHES.c.completed + ok,
                    failed=BATCHES.c.failed + failed,
                    **{name: BATCHES.c[name] + added for name, added in asdict(usage).items()},
                    expected_at=expected_at,
                    faults=0,
                )
            )

    def begin_finalizing(self, lease: Lease, outcome: BatchStatus, now: float) -> BatchStatus:
        """Record that no more rows run; returns the final status that the batch will get."""
        with self._database.write() as connection:
            batch = self._locked_batch(connection, lease)
            if batch.status.is_final:
                return batch.status
            if batch.status is BatchStatus.CANCELLING:
                outcome = BatchStatus.CANCELLED
            if batch.outcome is not None:
                return batch.outcome
            if outcome is BatchStatus.COMPLETED:
                _set_status(connection, lease, BatchStatus.FINALIZING, now, outcome=outcome.value)
            else:
                _update_batch(connection, lease, outcome=outcome.value, finalizing_at=int(now))
            return outcome

    def results(self, batch_id: str, *, ok: bool, page: int = 50) -> Iterator[tuple[str, str]]:
        """(custom_id, result) of the rows that are ok, or of all others, in the order of the input.
        The result of a row without an outcome is empty."""
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
        """Store the result files, delete the rows and set the final status, in one transaction.

        The results in the files have counted for their tenant since they were stored, so there is
        room for them.
        """
        with self._database.write(exclusive=True, patient=True) as connection:
            batch = self._locked_batch(connection, lease)
            if batch.status.is_final:
                return
            for file in (output, errors):
                if file is not None:
                    self._files.insert(connection, *file)
            connection.execute(sa.delete(ROWS).where(ROWS.c.batch_id == batch.id))
            _set_status(
                connection,
                lease,
                outcome,
                now,
                output_file_id=output[1].id if output else None,
                error_file_id=errors[1].id if errors else None,
                failed=batch.total - batch.completed,
                enqueued_tokens=0,
                result_bytes=0,
                expected_at=None,
            )

    def _locked_batch(self, connection: sa.Connection, lease: Lease) -> Batch:
        """The batch, locked until the transaction ends. Raises LeaseLostError if the lease is not
        the current one."""
        row = connection.execute(
            sa.update(BATCHES)
            .where(BATCHES.c.id == lease.batch_id)
            .where(BATCHES.c.lease_owner == lease.owner, BATCHES.c.lease_epoch == lease.epoch)
            .values(lease_epoch=lease.epoch)  # locks it
            .returning(BATCHES)
        ).first()
        if row is None:
            raise LeaseLostError(f"{lease.batch_id} has another owner now")
        return _batch_of(row)


@dataclass(frozen=True, slots=True)
class Store:
    """Files, batches and responses. Made by `open_store`."""

    database: Database
    files: FileStore
    batches: BatchStore
    responses: ResponseStore

    def close(self) -> None:
        self.database.close()


def default_data_dir() -> Path:
    """The default of --data-dir. Raises ConfigError."""
    return home_folder() / ".local" / "share" / "bros"


def open_store(folder: Path, url: str | None = None, *, option: str = "--data-dir") -> Store:
    """Open the database at `url` or in `folder`, and bodies in `folder`/files/<id of the store>.

    option: names the folder in errors.

    Several stores can use one folder. Servers that share a database must share the folder, too.
    Raises ConfigError if either cannot be used.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        database = open_database(url, folder)
        try:
            bodies = Bodies(_bodies(database, folder, shared=url is not None), option)
        except BaseException:
            database.close()
            raise
    except StoreError as error:
        raise ConfigError(f"--store: {error}") from error
    except OSError as error:
        raise ConfigError(f"{option}: {folder} cannot be used: {error.strerror}") from error
    files = FileStore(database, bodies)
    return Store(database, files, BatchStore(database, files), ResponseStore(database))


def _bodies(database: Database, folder: Path, *, shared: bool) -> Path:
    """The folder of the bodies. Raises ConfigError if it does not exist: the server that creates a
    store makes it, and all servers of a shared store need the same one. A store in SQLite has one
    server, and needs it only for files."""
    with database.read() as connection:
        store_id: str = connection.execute(sa.select(STORES.c.id)).scalar_one()
        has_files = connection.execute(sa.select(FILES.c.id).limit(1)).first() is not None
    bodies = body_folder(folder, store_id)
    if (shared or has_files) and not bodies.exists():
        raise ConfigError(
            f"--data-dir: the files of this store are not in {folder}, where {bodies} is missing; "
            "servers that share a store need the same folder, which has to last. Create it if the "
            "store has never had files"
        )
    return bodies
