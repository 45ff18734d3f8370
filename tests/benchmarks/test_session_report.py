"""benchmarks/session_report.py: the page about sessions is what the committed results say."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DRAWN = ("sessions_cpu", "shared_prefix_cpu", "batched_tokens_cpu", "sessions_paper")
STEMS = (
    *DRAWN,
    "sessions_beside_cpu",
    "sessions_calibration_cpu",
    "sessions_replicas_cpu",
    "programs_sim",
)


@pytest.fixture(scope="module")
def report() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("session_report")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for stem in STEMS:
        results = BENCHMARKS / "results" / f"{stem}.json"
        if results.exists():
            shutil.copy(results, tmp_path)
    return tmp_path


def test_the_page_is_that_of_the_results(report: ModuleType, folder: Path) -> None:
    report.write(folder)
    written = (folder / "sessions.md").read_text()
    assert written == (BENCHMARKS / "results" / "sessions.md").read_text()
    for stem in DRAWN:
        assert (folder / f"{stem}.png").stat().st_size > 10_000


def test_ratios_are_those_of_the_results(report: ModuleType, folder: Path) -> None:
    """One cell of a table, worked out by hand."""
    path = folder / "sessions_paper.json"
    results = json.loads(path.read_text())
    ways = results["figures"]["14a"]["ways"]
    ways["session"][0]["seconds"], ways["by calls, latency"][0]["seconds"] = 2.0, 9.0
    path.write_text(json.dumps(results))
    report.write(folder)
    (line,) = [
        line
        for part in (folder / "sessions.md").read_text().split("### ")
        if part.startswith("Figure 14a")
        for line in part.splitlines()
        if line.startswith("| times ours")
    ]
    assert line.split("|")[2].strip() == "4.50"
