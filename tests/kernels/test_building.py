"""What setup.py leaves of earlier builds, when compiling the kernels fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXTENSION = f"bros/kernels/_C{sysconfig.get_config_var('EXT_SUFFIX')}"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree without sources of the extension, so that compiling it fails."""
    pytest.importorskip("setuptools")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for package in ("bros", "bros/kernels"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("")
    return tmp_path


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("of an earlier build")
    return path


def build(tree: Path, *arguments: str) -> str:
    command = [sys.executable, "setup.py", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_an_old_extension_is_not_packed(tree: Path) -> None:
    old, beside = put(tree / "out" / EXTENSION), put(tree / EXTENSION)
    said = build(tree, "build", "--build-lib", "out")
    assert 'building extension "bros.kernels._C" failed' in said
    assert not old.exists()
    assert (tree / "out/bros/kernels/__init__.py").exists()
    assert beside.exists()  # of the source tree, which this build is not for


def test_an_old_extension_beside_the_package_is_removed(tree: Path) -> None:
    old, built = put(tree / EXTENSION), put(tree / "out" / EXTENSION)
    build(tree, "build_ext", "--inplace", "--build-lib", "out")
    assert not old.exists() and not built.exists()


def test_modules_that_are_gone_from_the_sources_are_not_packed(tree: Path) -> None:
    gone = put(tree / "out" / "bros" / "gone.py")
    build(tree, "build", "--build-lib", "out")
    assert not gone.exists()


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_what_the_same_command_has_compiled_is_packed(tree: Path) -> None:
    """Packagers run `build_ext`, with options of theirs, before what packs."""
    (tree / "csrc").mkdir()
    for source in (ROOT / "csrc").glob("*.cpp"):
        (tree / "csrc" / source.name).write_text("")
    where = ("--build-lib", "out")
    build(tree, "build_ext", *where, "build", *where)
    assert (tree / "out" / EXTENSION).exists()
