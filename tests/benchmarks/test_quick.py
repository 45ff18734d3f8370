"""Benchmarks that are never run break unseen: all are imported, and run once in the long tier."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
MODULES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))
SCRIPTS = {name for name in MODULES if "__main__" in (BENCHMARKS / f"{name}.py").read_text()}
NOT_QUICK = {
    "gpu_speed": "it needs a GPU; test_gpu_speed.py runs it on tiny shapes",
    "paper_report": "it writes a page from committed results, see test_paper.py",
    "session_report": "it writes a page from committed results, see test_session_report.py",
    "replicas_report": "it writes a page from committed results, see test_replicas_report.py",
}
QUICK = sorted(SCRIPTS - NOT_QUICK.keys())


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_imports_what_exists(name: str) -> None:
    importlib.import_module(name)


@pytest.mark.parametrize("name", QUICK)
def test_a_benchmark_has_a_quick_run(name: str) -> None:
    """Or a reason in NOT_QUICK."""
    source = (BENCHMARKS / f"{name}.py").read_text(encoding="utf-8")
    known = ('"--quick"', "add_quick(", "benchmark_parser(__doc__, ", "from paper_common")
    assert any(words in source for words in known)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_works(name: str, tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
