"""Benchmarks that are never run break unseen: all are imported, and run once in the long tier."""

from __future__ import annotations

import importlib
import os
import pstats
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = {path.stem: path for path in sorted(BENCHMARKS.rglob("*.py"))}
SCRIPTS = {name for name, file in FILES.items() if "__main__" in file.read_text()}
NOT_QUICK = {
    "engine_worker": "compare_engines runs it",
    "export_model": "compare_clients runs it",
    "paper_report": "it writes a page from committed results, see test_paper.py",
    "session_report": "it writes a page from committed results, see test_session_report.py",
    "replicas_report": "it writes a page from committed results, see test_replicas_report.py",
}
QUICK = sorted(SCRIPTS - NOT_QUICK.keys())


def run(name: str, *options: str) -> str:
    """What a quick run prints."""
    done = subprocess.run(
        [sys.executable, str(FILES[name]), "--quick", *options],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", FILES)
def test_a_benchmark_imports_what_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FILES[name].parent)
    importlib.import_module(name)


@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_has_a_quick_run(name: str) -> None:
    """Or a reason in NOT_QUICK."""
    source = FILES[name].read_text(encoding="utf-8")
    known = ('"--quick"', "add_quick(", "benchmark_parser(__doc__, ", "from paper_common")
    assert any(words in source for words in known)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_works(name: str) -> None:
    assert run(name).strip()


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
def test_everything_holds_in_a_soak_of_minutes() -> None:
    """The quick run has one killed engine; this one has two, and one that is stopped."""
    duration = ("--duration", "180", "--kill-every", "60", "--stop-every", "120")
    shown = run("soak", *duration, "--sample-every", "5")
    assert "Everything held" in shown and "stop of engine" in shown, shown


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_files_and_the_profile_of_a_stream_are_recorded(tmp_path: Path) -> None:
    files = run("stream_speed", "--files")
    assert "bros/server/openai/stream.py" in files and "bros/cli/" not in files
    run("stream_speed", "--profile", str(tmp_path / "profile"))
    called = {file for file, _, _ in pstats.Stats(str(tmp_path / "profile")).stats}
    assert any(file.endswith("bros/server/openai/stream.py") for file in called)
