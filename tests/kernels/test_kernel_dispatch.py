"""Choosing kernels by name, with and without the compiled extension."""

from __future__ import annotations

import logging
import shutil
import sys
from pathlib import Path

import pytest

from bros.core.errors import ConfigError
from bros.kernels import dispatch
from bros.kernels.dispatch import compiled_kernels, select_kernels


@pytest.fixture
def no_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes importing the compiled kernels fail, as where they were not built."""
    monkeypatch.setitem(sys.modules, "bros.kernels.cpu_ops", None)


def test_reference_is_always_there(no_extension: None, caplog: pytest.LogCaptureFixture) -> None:
    assert select_kernels("reference").name == "reference"
    assert not caplog.records


def test_where_the_extension_is_missing_nothing_is_compiled(no_extension: None) -> None:
    assert compiled_kernels() is None


@pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler"
)
def test_kernels_are_built_where_there_is_a_compiler() -> None:
    """The extension is optional: a source that does not compile fails no installation, and without
    this test it would only skip tests."""
    assert compiled_kernels() is not None


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_compiled_kernels_are_chosen(name: str, caplog: pytest.LogCaptureFixture) -> None:
    cpu_ops = pytest.importorskip("bros.kernels.cpu_ops", exc_type=ImportError)
    assert select_kernels(name).name == f"cpu-{cpu_ops.levels()[0]}"
    assert not caplog.records


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_kernels_that_were_built_from_other_sources_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python and C++ agree on the layout of what they exchange, but only within one version."""
    pytest.importorskip("bros.kernels.cpu_ops", exc_type=ImportError)
    monkeypatch.setattr(dispatch, "_SOURCES", tmp_path)
    assert select_kernels(name).name.startswith("cpu-"), "an installed package has no sources"
    (tmp_path / "module.cpp").write_text("int main() { return 0; }")
    with pytest.raises(ConfigError, match="built from other sources than those in .*make install"):
        select_kernels(name)


def test_auto_falls_back_with_one_warning(
    no_extension: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert select_kernels("auto").name == "reference"
    [record] = caplog.records
    assert (record.name, record.levelno) == ("bros.kernels", logging.WARNING)
    assert "install a C++ compiler" in record.getMessage()


def test_cpu_without_the_extension_is_an_error(no_extension: None) -> None:
    with pytest.raises(ConfigError, match=r"--kernels cpu: .*install a C\+\+ compiler"):
        select_kernels("cpu")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match="--kernels: 'cuda' is not one of auto, reference, cpu, t"
    ):
        select_kernels("cuda")


def test_a_level_the_machine_lacks_is_refused() -> None:
    cpu_ops = pytest.importorskip("bros.kernels.cpu_ops", exc_type=ImportError)
    with pytest.raises(ConfigError, match="level 'mmx' is not one of"):
        cpu_ops.CpuKernels("mmx")
    assert cpu_ops.levels()[-1] == "generic"
    assert "amx-emulated" not in cpu_ops.levels()
    assert cpu_ops.CpuKernels("amx-emulated").name == "cpu-amx-emulated"
    assert cpu_ops.CpuKernels("generic").name == "cpu-generic"
