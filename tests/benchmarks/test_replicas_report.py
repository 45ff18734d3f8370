"""benchmarks/replicas_report.py: the page about replicas is what the committed results say."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(scope="module")
def modules() -> tuple[ModuleType, ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("replicas_sim"), importlib.import_module("replicas_report")


def test_the_page_is_that_of_the_results(
    modules: tuple[ModuleType, ModuleType], tmp_path: Path
) -> None:
    _, report = modules
    shutil.copy(RESULTS / "replicas_sim.json", tmp_path)
    report.write(tmp_path)
    assert (tmp_path / "replicas.md").read_text() == (RESULTS / "replicas.md").read_text()
    if "workloads" in (RESULTS / "replicas_sim.json").read_text():
        assert (tmp_path / "replicas_sim.png").stat().st_size > 10_000


def test_every_part_has_cases_that_can_be_run_and_a_page(
    modules: tuple[ModuleType, ModuleType],
) -> None:
    sim, report = modules
    for name, cases in sim.PARTS.items():
        found = list(cases())
        assert {case.scenario().router for case in found} >= {"rr", "oracle", "e2"}
        assert len({(case.group, case.way) for case in found}) == len(found)
        assert name in report.PAGES
