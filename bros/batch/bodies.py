"""File bodies on disk: `<folder>/<first two digits>/<SHA-256>`, written once, never changed.

```
 write ─▶ tmp/<random>  ─▶ fsync ─▶ rename to its digest ─▶ fsync of the folder
                                    └─ within the transaction that records it ─┘
```

The transaction excludes the one that removes bodies nobody refers to, so that neither sees half
of the other's work. What a crash leaves is a temporary file, or a body without a record; both are
removed by `sweep`. A temporary file is locked for as long as somebody works on it, and the lock of
a process that is gone is gone with it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from bros.batch.errors import StoreFullError


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
        """Remove bodies that nobody uses; returns how many. Within a transaction that excludes
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
        os.close(handle)  # somebody has swept it before it was locked


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
