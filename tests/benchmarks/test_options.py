"""The options of benchmarks: scripts explain them, and answer a wrong one with one clear line."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
FILES = {path.stem: path for path in sorted(BENCHMARKS.rglob("*.py"))}
SCRIPTS = [name for name, file in FILES.items() if "__main__" in file.read_text("utf-8")]


class Status:
    """Runs a script in this process until it ends by itself; returns its exit status."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def __call__(self, name: str, *options: str) -> object:
        self._monkeypatch.syspath_prepend(str(FILES[name].parent))
        self._monkeypatch.setattr(sys, "argv", [f"{name}.py", *options])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(FILES[name]), run_name="__main__")
        return ended.value.code


@pytest.fixture
def status(monkeypatch: pytest.MonkeyPatch) -> Status:
    return Status(monkeypatch)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_explains_its_options(
    name: str, status: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not status(name, "--help")
    assert capsys.readouterr().out.startswith(f"usage: {name}.py")


@pytest.mark.parametrize(
    ("name", "option", "known"),
    [
        ("ablation", "--loads", "tight memory"),
        ("ablation", "--mechanisms", "spare blocks"),
        ("batch_jobs", "--parts", "prefixes"),
        ("gpu_hybrid", "--only", "bros, simulated"),
        ("gpu_speed", "--parts", "decode"),
        ("hybrid_load", "--only", "RT alone"),
        ("input_stalls", "--only", "idle"),
        ("paper_reproduce", "--parts", "tight"),
        ("prefix_cache", "--parts", "pollution"),
        ("replicas_sim", "--parts", "regimes"),
        ("session_paper", "--figures", "11a"),
        ("session_scale", "--only", "view as DOT"),
        ("session_speed", "--parts", "map-reduce"),
        ("structured_output", "--only", "hostile"),
        ("structured_output", "--ways", "ahead"),
    ],
)
def test_an_unknown_name_is_refused_with_the_known_ones(
    name: str, option: str, known: str, status: Status, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(name, option, "nope") == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert option in last and "'nope'" in last and known in last


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ablation", ["--stored", "{missing}"]),
        ("embeddings_speed", ["--model", "{missing}"]),
        ("fair_tenants", ["--profile", "{missing}"]),
        ("gpu_hybrid", ["--simulate", "{missing}"]),
        ("paper_report", ["{missing}"]),
        ("replicas_report", ["{missing}"]),
        ("replicas_report", ["{empty}"]),
        ("replicas_sim", ["--trace", "{missing}"]),
        ("session_report", ["{missing}"]),
        ("soak", ["--page", "{missing}"]),
        ("soak", ["--page", "{empty}"]),
        ("weights_quality", ["--text", "{missing}"]),
    ],
)
def test_what_is_not_there_is_refused_by_its_path(
    name: str,
    options: list[str],
    status: Status,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    given = [each.format(missing=tmp_path / "missing", empty=empty) for each in options]
    assert status(name, *given) == 2
    assert given[-1] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "options", "needed"),
    [
        ("replicas_sim", ["--parts", "azure"], "--azure"),
        ("replicas_sim", ["--parts", "mooncake"], "--trace"),
        ("tp_speed", ["--ranks", "0"], "2 or more"),
    ],
)
def test_what_else_is_needed_is_named(
    name: str,
    options: list[str],
    needed: str,
    status: Status,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status(name, *options) == 2
    assert needed in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpu_hybrid", ["--duration", "1"]), ("gpu_speed", ["--quick", "--parts", "tune"])],
)
def test_a_device_that_is_not_there_is_one_line(
    name: str,
    options: list[str],
    status: Status,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ended = status(name, *options)
    line = f"{capsys.readouterr().out}{ended if isinstance(ended, str) else ''}"
    assert ended != 0 and "CUDA device" in line and len(line.splitlines()) == 1
