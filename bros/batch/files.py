"""Files of all tenants: their records in the database, their bodies on disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from bros.batch.database import BATCHES, FILES, Database
from bros.batch.objects import OPEN_STATUSES, StoredFile, StoreFullError, is_storable
from bros.core.errors import NotFoundError

# ---- File bodies on disk: `<folder>/<first two digits>/<SHA-256>`, written once, never changed.
#
# ```
#  write ─▶ tmp/<random>  ─▶ fsync ─▶ rename to its digest ─▶ fsync of the folder
#                                     └─ within the transaction that records it ─┘
# ```
#
# The transaction excludes the one that removes unused bodies, so that neither sees half of the
# other's work. What a crash leaves is a temporary file, or a body without a record; both are
# removed by `sweep`. A temporary file is locked while a process writes it, and the lock of a
# process that has ended is released with it.


class BodyWriter:
    """A body while it is written; not part of anything until `Bodies.place`."""

    def __init__(self, folder: Path) -> None:
        with disk_full_explained():
            handle, self.path = _locked(folder)
        self._file = os.fdopen(handle, "wb")
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Raises StoreFullError."""
        with disk_full_explained():
            self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    def finish(self) -> None:
        """Everything is on the disk when this returns. Raises StoreFullError."""
        with disk_full_explained():
            self._file.flush()
            os.fsync(self._file.fileno())

    def discard(self) -> None:
        """Forget it, unless it has been placed. May be called at any time, repeatedly."""
        with contextlib.suppress(OSError):  # flushing the rest to a full disk
            self._file.close()
        self.path.unlink(missing_ok=True)


class Bodies:
    """All bodies in one folder."""

    def __init__(self, folder: Path) -> None:
        """Creates the folder."""
        self._folder = folder
        self._tmp = folder / "tmp"
        self._tmp.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def new(self) -> Iterator[BodyWriter]:
        """A writer for a new body; nothing of it stays behind unless it is placed."""
        writer = BodyWriter(self._tmp)
        try:
            yield writer
        finally:
            writer.discard()

    def path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def place(self, writer: BodyWriter) -> None:
        """Give a finished body its name; within the transaction that records it."""
        path = self.path(writer.digest)
        with disk_full_explained():
            path.parent.mkdir(exist_ok=True)
            writer.path.replace(path)
            _sync_folder(path.parent)
            _sync_folder(self._folder)

    def sweep(self, is_used: Callable[[str], bool]) -> int:
        """Remove unused bodies; returns how many. Within a transaction that excludes
        those of `place`."""
        removed = 0
        for path in self._folder.glob("[0-9a-f][0-9a-f]/*"):
            if not is_used(path.name):
                path.unlink(missing_ok=True)
                removed += 1
        for path in self._tmp.iterdir():
            # Not if it is being written, by this process or another one.
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        return removed


@contextlib.contextmanager
def disk_full_explained() -> Iterator[None]:
    """Turns the system's ways of saying that there is no room into StoreFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError("there is no room on the disk of --data-dir") from error
        raise


def _locked(folder: Path) -> tuple[int, Path]:
    """A new file, open for writing, that is locked until it is closed."""
    while True:
        handle, name = tempfile.mkstemp(dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # another process has swept it before it was locked


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list.

    after: the id that the part before ended with.
    """

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
        # Only now that the record is gone for certain; `alone` keeps others from being added.
        with self._database.write(alone=True) as connection:
            if digest not in _used(connection, digest):
                self.bodies.path(digest).unlink(missing_ok=True)

    def body(self, file: StoredFile) -> Path:
        """Where its content lies. Raises NotFoundError if it has been removed."""
        path = self.bodies.path(file.digest)
        if not path.exists():
            raise NotFoundError(
                f"The content of {file.id!r} is gone.", param="id", code="file_not_found"
            )
        return path

    def sweep(self, now: float) -> None:
        """Remove expired files and unused bodies."""
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
