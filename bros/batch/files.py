"""Files of all tenants: records in the database, bodies on disk."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import sqlalchemy as sa

from bros.batch.database import BATCHES, FILES, Database, DiskRoom
from bros.batch.objects import (
    OPEN_STATUSES,
    StoredFile,
    StoreFullError,
    StoreLimitError,
    is_storable,
)
from bros.core.errors import NotFoundError
from bros.core.files import sync_folder
from bros.core.tenants import NO_LIMITS, HeldElsewhere, Resource, TenantLimits, check_limit

# ---- File bodies on disk: `<folder>/<first two digits>/<SHA-256>`, written once, never modified.
#
# ```
#  write ─▶ tmp/<random>  ─▶ fsync ─▶ rename to its digest ─▶ fsync of the folder
#                                     └─ within the transaction that records it ─┘
# ```
#
# The transaction is exclusive, like the one that deletes unused bodies, so neither sees the other
# half done. A crash leaves a temporary file or a body without a record; `sweep` deletes both.
# A process locks its temporary files (flock), and the kernel releases the locks when it ends.


class BodyWriter:
    """A body being written to a temporary file; `Bodies.place` makes it permanent."""

    def __init__(self, folder: Path, option: str) -> None:
        self._option = option
        with translate_disk_full(option):
            handle, self.path = _locked(folder)
        self._file = os.fdopen(handle, "wb")
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    def write(self, data: bytes) -> None:
        """Raises StoreFullError."""
        with translate_disk_full(self._option):
            self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    def finish(self) -> None:
        """Flush everything to the disk. Raises StoreFullError."""
        with translate_disk_full(self._option):
            self._file.flush()
            os.fsync(self._file.fileno())

    def discard(self) -> None:
        """Delete it, unless it has been placed. May be called at any time, repeatedly."""
        with contextlib.suppress(OSError):  # close flushes, which fails on a full disk
            self._file.close()
        self.path.unlink(missing_ok=True)


class Bodies:
    """All bodies in one folder."""

    def __init__(self, folder: Path, option: str = "--data-dir") -> None:
        """Creates the folder. option: names its disk in errors."""
        self._folder = folder
        self._option = option
        self._tmp = folder / "tmp"
        self._tmp.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._room = DiskRoom(folder, option)

    @contextlib.contextmanager
    def new(self) -> Iterator[BodyWriter]:
        """A writer for a new body, which is deleted at the end unless it is placed.

        Raises StoreFullError.
        """
        self._room.check()
        writer = BodyWriter(self._tmp, self._option)
        try:
            yield writer
        finally:
            writer.discard()

    def path(self, digest: str) -> Path:
        return self._folder / digest[:2] / digest

    def place(self, writer: BodyWriter) -> None:
        """Move a finished body to its permanent path. Call it within the exclusive transaction
        that inserts its record."""
        path = self.path(writer.digest)
        with translate_disk_full(self._option):
            path.parent.mkdir(exist_ok=True, mode=0o700)
            writer.path.replace(path)
            sync_folder(path.parent)
            sync_folder(self._folder)

    def sweep(
        self, is_used: Callable[[str], bool], check_alive: Callable[[], None] = lambda: None
    ) -> int:
        """Delete unused bodies and abandoned temporary files; returns the number of bodies.
        Call it within an exclusive transaction.

        check_alive: raises if that has ended; another server may use a body again from then on.
        """
        removed = 0
        for path in self._folder.glob("[0-9a-f][0-9a-f]/*"):
            if not is_used(path.name):
                check_alive()
                path.unlink(missing_ok=True)
                removed += 1
        for path in self._tmp.iterdir():
            # A locked file is being written, by this process or another.
            with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("r+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
        return removed


@contextlib.contextmanager
def translate_disk_full(option: str) -> Iterator[None]:
    """Raise StoreFullError instead of an OSError for a full disk or quota. option: of that disk."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StoreFullError(f"the disk of {option} is full") from error
        raise


def _locked(folder: Path) -> tuple[int, Path]:
    """(handle, path) of a new file, open for writing and locked until it is closed."""
    while True:
        handle, name = tempfile.mkstemp(dir=folder)
        fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)  # another process deleted it in `sweep` before it was locked


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a list.

    after: the last id of the previous page; None for the first page.
    """

    limit: int
    after: str | None = None
    newest_first: bool = True


class FileStore:
    """Blocking; for worker threads. `now` is in Unix seconds.

    A tenant sees its own files only; for files of others it gets NotFoundError.
    """

    def __init__(self, database: Database, bodies: Bodies) -> None:
        self._database = database
        self.bodies = bodies

    def add(
        self,
        writer: BodyWriter,
        file: StoredFile,
        limits: TenantLimits = NO_LIMITS,
        server_limits: TenantLimits = NO_LIMITS,
    ) -> StoredFile:
        """Store a finished body and its record, or neither.

        limits: of the tenant.
        server_limits: of all tenants together.
        Raises StoreFullError, and TenantLimitError or InvalidRequestError if a limit is exceeded.
        """
        with self._database.write(exclusive=True, grows=True) as connection:
            size, now = file.num_bytes, file.created_at
            self._check_room(connection, file.tenant, size, now, limits, server_limits)
            self.insert(connection, writer, file)
        return file

    def insert(self, connection: sa.Connection, writer: BodyWriter, file: StoredFile) -> None:
        """Store a finished body and its record within the caller's exclusive transaction."""
        self.bodies.place(writer)
        connection.execute(sa.insert(FILES).values(asdict(file)))

    def check_room(
        self, tenant: str, now: float, limits: TenantLimits, server_limits: TenantLimits
    ) -> HeldElsewhere:
        """Bytes of the tenant's files and of all, each 0 if nothing limits them.

        Raises TenantLimitError if the tenant may not have another file of one byte.
        """
        with self._database.read() as connection:
            return self._check_room(connection, tenant, 1, now, limits, server_limits)

    def _check_room(
        self,
        connection: sa.Connection,
        tenant: str,
        num_bytes: int,
        now: float,
        limits: TenantLimits,
        server_limits: TenantLimits,
    ) -> HeldElsewhere:
        found = [0, 0]
        for index, (each, owner) in enumerate(((limits, tenant), (server_limits, None))):
            if each.files is None and each.file_bytes is None:
                continue
            files, used_bytes = _held(connection, owner, now)
            of_server = owner is None
            check_limit(each, Resource.FILES, files, of_server=of_server)
            check_limit(each, Resource.FILE_BYTES, used_bytes, num_bytes, of_server=of_server)
            found[index] = used_bytes
        return HeldElsewhere(*found)

    def check_results(
        self,
        connection: sa.Connection,
        tenant: str,
        num_bytes: int,
        now: float,
        limits: TenantLimits,
        server_limits: TenantLimits,
    ) -> None:
        """Raises TenantLimitError or OverTenantLimitError if `num_bytes` more of results of its
        batches exceed the limit of a tenant, and StoreLimitError if they exceed the server's."""
        if limits.file_bytes is not None:
            _, used_bytes = _held(connection, tenant, now)
            check_limit(limits, Resource.FILE_BYTES, used_bytes, num_bytes)
        if server_limits.file_bytes is not None:
            _, used_bytes = _held(connection, None, now)
            if used_bytes + num_bytes > server_limits.file_bytes:
                raise StoreLimitError(
                    f"files and results of batches have {used_bytes} bytes, and the server's limit "
                    f"is {server_limits.file_bytes} (--max-file-bytes)"
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
        """(files, whether more follow). Raises NotFoundError for an unknown `after`."""
        query = sa.select(FILES).where(*_visible(tenant, now))
        if purpose is not None:
            if not is_storable(purpose):
                return [], False
            query = query.where(FILES.c.purpose == purpose)
        with self._database.read() as connection:
            rows = connection.execute(paged(connection, query, FILES, tenant, page)).all()
        return [_file(row) for row in rows[: page.limit]], len(rows) > page.limit

    def delete(self, tenant: str, file_id: str, now: float) -> None:
        """Delete the record, and the body unless another file or an open batch uses it."""
        self.get(tenant, file_id, now)
        with self._database.write(exclusive=True) as connection:
            digest = connection.execute(
                sa.delete(FILES)
                .where(FILES.c.id == file_id, FILES.c.tenant == tenant)
                .returning(FILES.c.digest)
            ).scalar()
        if digest is None:
            return
        # In a second transaction: if the first one failed to commit, the record needs its body.
        with self._database.write(exclusive=True) as connection:
            if digest not in _used(connection, digest):
                self.bodies.path(digest).unlink(missing_ok=True)

    def body(self, file: StoredFile) -> Path:
        """Path of its content. Raises NotFoundError if it has been deleted."""
        path = self.bodies.path(file.digest)
        if not path.exists():
            message = f"The content of {file.id!r} has been deleted."
            raise NotFoundError(message, param="id", code="file_not_found")
        return path

    def sweep(self, now: float) -> None:
        """Delete expired files and unused bodies."""
        with self._database.write(exclusive=True, patient=True) as connection:
            connection.execute(sa.delete(FILES).where(FILES.c.expires_at <= int(now)))
            used = _used(connection)
            self.bodies.sweep(used.__contains__, partial(self._database.check_alive, connection))


def has_id(table: sa.Table, value: str) -> sa.ColumnElement[bool]:
    """Condition on the id; false for an id that the database could not store."""
    return table.c.id == value if is_storable(value) else sa.false()


def paged(
    connection: sa.Connection,
    query: sa.Select[tuple[object, ...]],
    table: sa.Table,
    tenant: str,
    page: Page,
) -> sa.Select[tuple[object, ...]]:
    """`query` with the order and range of a page, and one row more, which tells if more follow.

    Raises NotFoundError if no row has the id `page.after`.
    """
    if page.after is not None:
        seq = connection.execute(
            sa.select(table.c.seq).where(has_id(table, page.after), table.c.tenant == tenant)
        ).scalar()
        if seq is None:
            message = f"'after': there is no {page.after[:100]!r}."
            raise NotFoundError(message, param="after", code="not_found")
        query = query.where(table.c.seq < seq if page.newest_first else table.c.seq > seq)
    order = table.c.seq.desc() if page.newest_first else table.c.seq.asc()
    return query.order_by(order).limit(page.limit + 1)


def _visible(tenant: str, now: float) -> tuple[sa.ColumnElement[bool], ...]:
    return FILES.c.tenant == tenant, _unexpired(now)


def _held(connection: sa.Connection, tenant: str | None, now: float) -> tuple[int, int]:
    """Number of files and bytes of a tenant or, with None, of all: the bytes of files, and of the
    results of unfinished batches, which are in files later."""
    files: list[sa.ColumnElement[bool]] = [_unexpired(now)]
    batches: list[sa.ColumnElement[bool]] = [BATCHES.c.status.in_(OPEN_STATUSES)]
    if tenant is not None:
        files.append(FILES.c.tenant == tenant)
        batches.append(BATCHES.c.tenant == tenant)
    size = sa.func.coalesce(sa.func.sum(FILES.c.num_bytes), 0)
    count, of_files = connection.execute(sa.select(sa.func.count(), size).where(*files)).one()
    size = sa.func.coalesce(sa.func.sum(BATCHES.c.result_bytes), 0)
    of_results = connection.execute(sa.select(size).where(*batches)).scalar_one()
    return count, int(of_files) + int(of_results)


def _unexpired(now: float) -> sa.ColumnElement[bool]:
    return sa.or_(FILES.c.expires_at.is_(None), FILES.c.expires_at > int(now))


def _used(connection: sa.Connection, digest: str | None = None) -> set[str]:
    """Digests that a file or an open batch uses; with `digest`, that one if it is used."""
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
