"""Stores of batch jobs for tests: in SQLite, and in a PostgreSQL server of our own."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import sqlalchemy as sa

from bros.batch.database import Database, open_database
from bros.batch.files import Bodies, BodyWriter, FileStore
from bros.batch.objects import DAY_S, Batch, BatchStatus, RowRef, StoredFile
from bros.batch.store import BatchStore
from bros.core.tenants import TenantLimits

NOW = 1_700_000_000
"""When tests begin, in Unix seconds."""


class PostgresServer:
    """A server on a Unix socket in a folder of its own, gone with all its data after `stop`.

    It keeps nothing safe from power cuts, which makes it fast.
    """

    def __init__(self, programs: Path) -> None:
        self._programs = programs
        self._folder = Path(tempfile.mkdtemp(prefix="bros-pg-"))
        self._data = self._folder / "data"
        # The server refuses to run as root.
        self._user = _other_user() if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(self._folder, self._user.pw_uid, self._user.pw_gid)
        self._names = itertools.count()
        try:
            self._run("initdb", "-D", self._data, "-U", "bros", "-A", "trust", "--no-sync")
            settings = f"-k {self._folder} -c listen_addresses= -c fsync=off"
            log = self._folder / "log"
            self._run("pg_ctl", "-D", self._data, "-w", "-o", settings, "-l", log, "start")
        except BaseException:
            shutil.rmtree(self._folder)
            raise
        # Whatever ends this process closes the pipe, and that ends the server.
        end = 'cat; "$1" -D "$2/data" -m immediate -s stop; rm -rf "$2"'
        command = ["sh", "-c", end, "sh", programs / "pg_ctl", self._folder]
        self._guard = self._popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def new_url(self) -> str:
        """Where a store can be opened that is still empty."""
        url = f"postgresql://bros@/postgres?host={quote(str(self._folder), safe='')}"
        name = f"store{next(self._names)}"
        engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
        with engine.begin() as connection:
            connection.execute(sa.schema.CreateSchema(name))
        engine.dispose()
        return f"{url}&options={quote(f'-csearch_path={name}')}"

    def stop(self) -> None:
        self._guard.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)  # only its owner may remove it

    def _run(self, program: str, *arguments: str | Path) -> None:
        if self._popen([self._programs / program, *arguments]).wait():
            log = self._folder / "log"
            raise RuntimeError(f"{program} failed: {log.read_text() if log.exists() else ''}")

    def _popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        """As the server's user. No pipes for output: the server would keep them open."""
        if self._user is not None:
            identity = {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": ()}
            options |= identity
        output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, cwd=self._folder, **output, **options)


def find_postgres() -> Path | None:
    """The folder of the server's programs, if they are installed."""
    found = shutil.which("initdb")
    folders = [Path(found).parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    names = ("initdb", "pg_ctl", "postgres")
    return next((f for f in folders if all((f / name).exists() for name in names)), None)


def _other_user() -> pwd.struct_passwd:
    for name in ("postgres", "nobody"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise RuntimeError("there is no user to run PostgreSQL as")


@dataclass(frozen=True)
class Store:
    """One process's view of a store. `again` opens it once more, as another process would."""

    url: str | None
    folder: Path
    database: Database
    files: FileStore
    batches: BatchStore

    @contextlib.contextmanager
    def again(self) -> Iterator[Store]:
        with open_store(self.url, self.folder) as other:
            yield other

    def bodies(self) -> set[str]:
        """Digests of all bodies on disk."""
        return {path.name for path in (self.folder / "bodies").glob("??/*")}

    def unplaced(self) -> list[Path]:
        """Temporary files."""
        return sorted((self.folder / "bodies" / "tmp").iterdir())

    def query(self, sql: str, **values: object) -> list[tuple[object, ...]]:
        with self.database.read() as connection:
            return [tuple(row) for row in connection.execute(sa.text(sql), values)]

    @contextlib.contextmanager
    def new_file(
        self,
        file_id: str,
        content: bytes | None = None,
        *,
        tenant: str = "ann",
        purpose: str = "batch_output",
        expires_at: int | None = None,
    ) -> Iterator[tuple[BodyWriter, StoredFile]]:
        """A body that is written, and its record; not stored yet. content: else the id."""
        with self.files.bodies.new() as writer:
            writer.write(file_id.encode() if content is None else content)
            writer.finish()
            yield (
                writer,
                StoredFile(
                    id=file_id,
                    tenant=tenant,
                    digest=writer.digest,
                    num_bytes=writer.num_bytes,
                    filename=f"{file_id}.jsonl",
                    purpose=purpose,
                    created_at=NOW,
                    expires_at=expires_at,
                ),
            )

    def put_file(
        self,
        content: bytes = b"content",
        *,
        file_id: str = "file-1",
        tenant: str = "ann",
        purpose: str = "batch",
        expires_at: int | None = None,
    ) -> StoredFile:
        with self.new_file(
            file_id, content, tenant=tenant, purpose=purpose, expires_at=expires_at
        ) as (writer, file):
            return self.files.add(writer, file)

    def put_batch(
        self,
        batch_id: str = "batch_1",
        *,
        tenant: str = "ann",
        content: bytes = b"content",
        expires_at: int = NOW + DAY_S,
        max_open: int = 1_000,
        **fields: object,
    ) -> Batch:
        """A batch that reads `content`, which need not exist."""
        batch = Batch(
            id=batch_id,
            tenant=tenant,
            endpoint="/v1/completions",
            input_file_id="file-1",
            input_digest=hashlib.sha256(content).hexdigest(),
            window="24h",
            status=BatchStatus.VALIDATING,
            created_at=NOW,
            expires_at=expires_at,
            **fields,  # type: ignore[arg-type]
        )
        return self.batches.create(batch, TenantLimits(batches=max_open))


@contextlib.contextmanager
def open_store(url: str | None, folder: Path) -> Iterator[Store]:
    database = open_database(url, folder)
    try:
        files = FileStore(database, Bodies(folder / "bodies"))
        yield Store(url, folder, database, files, BatchStore(database, files))
    finally:
        database.close()


@contextlib.contextmanager
def full_disk(store: Store) -> Iterator[None]:
    """The database says that its disk is full when a file is recorded."""
    on_postgres = """
        CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$;
        CREATE TRIGGER full_disk BEFORE INSERT ON files EXECUTE FUNCTION refuse();
    """
    on_sqlite = """
        CREATE TRIGGER full_disk BEFORE INSERT ON files
        BEGIN SELECT RAISE(FAIL, 'database or disk is full'); END;
    """
    with store.database.write() as connection:
        connection.exec_driver_sql(on_sqlite if store.url is None else on_postgres)
    try:
        yield
    finally:
        with store.database.write() as connection:
            drop = "DROP TRIGGER full_disk" + ("" if store.url is None else " ON files")
            connection.exec_driver_sql(drop)


def row_refs(count: int, ranks: Sequence[int] | None = None) -> list[RowRef]:
    """Rows on the lines from 1 on, called `row-<line>`."""
    ranks = range(count) if ranks is None else ranks
    return [
        RowRef(line, f"row-{line}", 100 * (line - 1), 100, rank)
        for line, rank in enumerate(ranks, start=1)
    ]
