"""All that is kept of files and batches, in one folder and one database."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bros.batch.bodies import Bodies
from bros.batch.database import Database, open_database
from bros.batch.files import FileStore
from bros.batch.jobs import BatchStore
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
    """Bodies of files go to `folder`/files; the rest to the database at `url`, or to `folder`.

    Servers that share a database must share the folder too. Raises ConfigError.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        bodies = Bodies(folder / "files")
    except OSError as error:
        raise ConfigError(f"--data-dir: {folder} cannot be used: {error.strerror}") from error
    database = open_database(url, folder)
    files = FileStore(database, bodies)
    return Store(database, files, BatchStore(database, files))
