"""Bodies on disk: whole under their digest, or not there at all."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bros.batch.files import Bodies, translate_disk_full
from bros.batch.objects import StoreFullError


def files_under(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}


def place(bodies: Bodies, content: bytes) -> str:
    """Its digest."""
    with bodies.new() as writer:
        writer.write(content)
        writer.finish()
        bodies.place(writer)
        return writer.digest


def test_a_body_lies_under_its_digest(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path / "new" / "bodies")
    with bodies.new() as writer:
        writer.write(b"one ")
        writer.write(b"two")
        writer.finish()
        assert writer.num_bytes == 7
        assert writer.digest == hashlib.sha256(b"one two").hexdigest()
        bodies.place(writer)
    path = bodies.path(writer.digest)
    assert path.read_bytes() == b"one two"
    assert files_under(tmp_path / "new" / "bodies") == {
        Path(writer.digest[:2]) / writer.digest,
    }


def test_the_same_content_twice_is_one_body(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path)
    assert place(bodies, b"same") == place(bodies, b"same")
    assert len(files_under(tmp_path)) == 1


def test_what_is_not_placed_leaves_nothing(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path)
    with bodies.new() as writer:
        writer.write(b"content")
    with bodies.new() as finished:
        finished.write(b"content")
        finished.finish()
    with pytest.raises(KeyError), bodies.new() as interrupted:
        interrupted.write(b"content")
        raise KeyError
    writer.discard()
    assert files_under(tmp_path) == set()


def test_a_sweep_removes_unused_content_and_nothing_else(tmp_path: Path) -> None:
    bodies = Bodies(tmp_path)
    used, unused = place(bodies, b"used"), place(bodies, b"unused")
    other = tmp_path / "README"
    other.write_text("not ours")
    assert bodies.sweep({used}.__contains__) == 1
    assert files_under(tmp_path) == {
        bodies.path(used).relative_to(tmp_path),
        other.relative_to(tmp_path),
    }
    assert not bodies.path(unused).exists()


@pytest.mark.multiprocess
def test_what_a_killed_process_was_writing_is_swept_by_the_next(tmp_path: Path) -> None:
    write = f"""
import os, signal
from pathlib import Path
from bros.batch.files import Bodies
with Bodies(Path({str(tmp_path)!r})).new() as writer:
    writer.write(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", write]).returncode == -signal.SIGKILL
    assert len(files_under(tmp_path)) == 1
    Bodies(tmp_path).sweep(lambda digest: True)
    assert files_under(tmp_path) == set()


def test_what_is_being_written_stays_until_it_is_placed(tmp_path: Path) -> None:
    bodies, of_another_server = Bodies(tmp_path), Bodies(tmp_path)

    def sweep() -> None:
        of_another_server.sweep(lambda digest: True)

    with bodies.new() as writer:
        sweep()
        writer.write(b"content")
        sweep()
        writer.finish()
        sweep()
        bodies.place(writer)
        sweep()
    assert bodies.path(writer.digest).read_bytes() == b"content"


def test_a_file_that_is_swept_before_it_is_locked_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bodies, make, swept = Bodies(tmp_path), tempfile.mkstemp, list[str]()

    def make_and_sweep(*args: Any, **kwargs: Any) -> tuple[int, str]:
        made = make(*args, **kwargs)
        if not swept:
            swept.append(made[1])
            bodies.sweep(lambda digest: True)
        return made

    monkeypatch.setattr(tempfile, "mkstemp", make_and_sweep)
    digest = place(bodies, b"content")
    assert not Path(swept[0]).exists()
    assert bodies.path(digest).read_bytes() == b"content"


def fail_with(number: int) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise OSError(number, os.strerror(number))

    return fail


STEPS = {
    "begin": (tempfile, "mkstemp"),
    "sync": (os, "fsync"),
    "make its folder": (Path, "mkdir"),
    "rename": (Path, "replace"),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_no_room_at_any_step_says_so_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
) -> None:
    bodies = Bodies(tmp_path)
    monkeypatch.setattr(*STEPS[step], fail_with(number))
    with pytest.raises(StoreFullError):
        place(bodies, b"content")
    assert files_under(tmp_path) == set()
    monkeypatch.undo()
    assert bodies.path(place(bodies, b"content")).read_bytes() == b"content"


@pytest.mark.parametrize("step", STEPS)
def test_other_faults_of_the_disk_are_not_called_a_lack_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    bodies = Bodies(tmp_path)
    monkeypatch.setattr(*STEPS[step], fail_with(errno.EIO))
    with pytest.raises(OSError, match="Input/output"):
        place(bodies, b"content")
    assert files_under(tmp_path) == set()


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process grows beyond 64 KiB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65_536, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.usefixtures("small_files")
@pytest.mark.parametrize("num_bytes", [65_537, 10_000_000])
def test_a_write_that_does_not_fit_leaves_nothing(tmp_path: Path, num_bytes: int) -> None:
    """Seen at once or only when the buffer is written."""
    bodies = Bodies(tmp_path)
    with pytest.raises(StoreFullError), bodies.new() as writer:
        for begin in range(0, num_bytes, 1_000):
            writer.write(bytes(min(1_000, num_bytes - begin)))
        writer.finish()
    assert files_under(tmp_path) == set()
    assert place(bodies, bytes(65_536)) in {path.name for path in files_under(tmp_path)}


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.multiprocess
def test_a_full_disk_keeps_what_it_has_and_nothing_half_written(tiny_disk: Path) -> None:
    bodies = Bodies(tiny_disk / "bodies")
    kept = place(bodies, b"k" * 100_000)
    with pytest.raises(StoreFullError):
        place(bodies, b"x" * 200_000)
    assert {path.name for path in files_under(tiny_disk)} == {kept}
    assert bodies.path(kept).read_bytes() == b"k" * 100_000
    assert bodies.path(place(bodies, b"y" * 100_000)).stat().st_size == 100_000


def test_no_room_is_told_with_the_option_to_look_at() -> None:
    full = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(StoreFullError, match="the disk of --store is full"):
        with translate_disk_full("--store"):
            raise full
