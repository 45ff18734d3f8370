"""All that is kept of files and batches, in one folder and one database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import sqlalchemy as sa

from bros.batch.bodies import Bodies
from bros.batch.database import Database, open_database
from bros.batch.files import FileStore
from bros.batch.jobs import BatchStore
from bros.batch.schema import FILES, STORES
from bros.core.errors import ConfigError


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
