"""A database and the folder of its files belong together."""

from __future__ import annotations

import contextlib
import stat
from pathlib import Path

import pytest

from bros.batch.objects import StoredFile
from bros.batch.store import open_store
from bros.core.errors import ConfigError
from support.batch_store import NOW


def keep(folder: Path, content: bytes) -> Path:
    """Put a file into the store in a folder; returns where its body is."""
    store = open_store(folder)
    with contextlib.closing(store), store.files.bodies.new() as writer:
        writer.write(content)
        writer.finish()
        file = StoredFile(
            id="file-1",
            tenant="",
            digest=writer.digest,
            num_bytes=len(content),
            filename="rows.jsonl",
            purpose="batch",
            created_at=NOW,
        )
        return store.files.body(store.files.add(writer, file))


def test_two_stores_in_one_folder_leave_each_others_files_alone(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    kept = [keep(one, b"ours"), keep(other, b"theirs")]
    # As with two databases on one --data-dir: the files of both lie under one folder.
    (theirs,) = (other / "files").iterdir()
    theirs.rename(one / "files" / theirs.name)
    store = open_store(one)
    store.files.sweep(NOW)
    store.close()
    assert kept[0].read_bytes() == b"ours"
    assert (one / "files" / theirs.name).joinpath(*kept[1].parts[-2:]).read_bytes() == b"theirs"


def test_a_database_without_the_folder_of_its_files_is_refused(tmp_path: Path) -> None:
    keep(tmp_path / "here", b"content")
    (tmp_path / "there").mkdir()
    (tmp_path / "here" / "jobs.db").rename(tmp_path / "there" / "jobs.db")
    with pytest.raises(ConfigError, match="--data-dir: the files of this store are not in .*there"):
        open_store(tmp_path / "there")


def test_only_its_owner_may_look_into_a_store(tmp_path: Path) -> None:
    open_store(tmp_path / "store").close()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    (tmp_path / "shared").mkdir(mode=0o755)
    store = open_store(tmp_path / "shared")
    keep(tmp_path / "shared", b"content")
    modes = {
        path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "shared").iterdir()
    }
    store.close()
    del modes["jobs.lock"], modes["files"]
    assert set(modes) == {"jobs.db", "jobs.db-wal", "jobs.db-shm"} and set(modes.values()) == {
        0o600
    }
