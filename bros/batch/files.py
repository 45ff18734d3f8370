"""Files of all tenants: their records in the database, their bodies on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from bros.batch.bodies import Bodies, BodyWriter
from bros.batch.database import Database
from bros.batch.objects import OPEN_STATUSES, StoredFile, is_storable
from bros.batch.schema import BATCHES, FILES
from bros.core.errors import NotFoundError


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list. after: the id that the part before ended with."""

    limit: int
    after: str | None = None
    newest_first: bool = True


class FileStore:
    """Blocking; to be used from worker threads. `now` is the time in Unix seconds.

    Who may see a file is decided by `tenant`; everybody else gets NotFoundError.
    """

    def __init__(self, database: Database, bodies: Bodies) -> None:
        self._database = database
        self.bodies = bodies

    def add(self, writer: BodyWriter, file: StoredFile) -> StoredFile:
        """Keep a finished body under a new record, or nothing of the two."""
        with self._database.write(alone=True) as connection:
            self.insert(connection, writer, file)
        return file

    def insert(self, connection: sa.Connection, writer: BodyWriter, file: StoredFile) -> None:
        """The same within a transaction of the caller's, one that runs `alone`."""
        self.bodies.place(writer)
        connection.execute(
            sa.insert(FILES).values(
                id=file.id,
                tenant=file.tenant,
                digest=file.digest,
                num_bytes=file.num_bytes,
                filename=file.filename,
                purpose=file.purpose,
                created_at=file.created_at,
                expires_at=file.expires_at,
            )
        )

    def get(self, tenant: str, file_id: str, now: float) -> StoredFile:
        with self._database.read() as connection:
            row = connection.execute(
                sa.select(FILES).where(has_id(FILES, file_id), *_visible(tenant, now))
            ).first()
        if row is None:
            raise NotFoundError(
                f"There is no file {file_id[:100]!r}.", param="id", code="file_not_found"
            )
        return _file(row)

    def page(
        self, tenant: str, page: Page, now: float, purpose: str | None = None
    ) -> tuple[list[StoredFile], bool]:
        """(files, whether there are more). Raises NotFoundError for an unknown `after`."""
        query = sa.select(FILES).where(*_visible(tenant, now))
        if purpose is not None:
            if not is_storable(purpose):
                return [], False
            query = query.where(FILES.c.purpose == purpose)
        with self._database.read() as connection:
            rows = connection.execute(paged(connection, query, FILES, tenant, page)).all()
        return [_file(row) for row in rows[: page.limit]], len(rows) > page.limit

    def delete(self, tenant: str, file_id: str, now: float) -> None:
        """A batch that reads it goes on: the body is kept as long as anything needs it."""
        self.get(tenant, file_id, now)
        with self._database.write(alone=True) as connection:
            digest = connection.execute(
                sa.delete(FILES)
                .where(FILES.c.id == file_id, FILES.c.tenant == tenant)
                .returning(FILES.c.digest)
            ).scalar()
        if digest is None:
            return
        # Only now that the record is gone for certain, and nobody adds another one meanwhile.
        with self._database.write(alone=True) as connection:
            if digest not in _used(connection, digest):
                self.bodies.path(digest).unlink(missing_ok=True)

    def body(self, file: StoredFile) -> Path:
        """Where its content lies. Raises NotFoundError if somebody has removed it."""
        path = self.bodies.path(file.digest)
        if not path.exists():
            raise NotFoundError(
                f"The content of {file.id!r} is gone.", param="id", code="file_not_found"
            )
        return path

    def sweep(self, now: float) -> None:
        """Forget files whose time is over, and bodies that nobody needs."""
        with self._database.write(alone=True) as connection:
            connection.execute(sa.delete(FILES).where(FILES.c.expires_at <= int(now)))
            used = _used(connection)
            self.bodies.sweep(used.__contains__)


def has_id(table: sa.Table, value: str) -> sa.ColumnElement[bool]:
    """Nothing has an id that no database can hold."""
    return table.c.id == value if is_storable(value) else sa.false()


def paged(
    connection: sa.Connection,
    query: sa.Select[tuple[object, ...]],
    table: sa.Table,
    tenant: str,
    page: Page,
) -> sa.Select[tuple[object, ...]]:
    """`query` in order, from where the page begins, and one row more than it has.

    Raises NotFoundError if there is nothing with the id to begin after.
    """
    if page.after is not None:
        seq = connection.execute(
            sa.select(table.c.seq).where(has_id(table, page.after), table.c.tenant == tenant)
        ).scalar()
        if seq is None:
            raise NotFoundError(
                f"There is no {page.after[:100]!r} to begin after.", param="after", code="not_found"
            )
        query = query.where(table.c.seq < seq if page.newest_first else table.c.seq > seq)
    order = table.c.seq.desc() if page.newest_first else table.c.seq.asc()
    return query.order_by(order).limit(page.limit + 1)


def _visible(tenant: str, now: float) -> tuple[sa.ColumnElement[bool], ...]:
    lives = sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > int(now))
    return FILES.c.tenant == tenant, lives


def _used(connection: sa.Connection, digest: str | None = None) -> set[str]:
    """Bodies that a file or an open batch needs, of all or of one digest."""
    files = sa.select(FILES.c.digest)
    batches = sa.select(BATCHES.c.input_digest).where(BATCHES.c.status.in_(OPEN_STATUSES))
    if digest is not None:
        files = files.where(FILES.c.digest == digest)
        batches = batches.where(BATCHES.c.input_digest == digest)
    return set(connection.execute(sa.union(files, batches)).scalars())


def _file(row: sa.Row[tuple[object, ...]]) -> StoredFile:
    fields = dict(row._mapping)
    del fields["seq"]
    return StoredFile(**fields)
