"""benchmarks/ablation.py: what is left out, what is compared, and the committed report."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture(scope="module")
def ablation() -> ModuleType:
    """It imports its neighbours by name, as scripts in one folder do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("ablation")


def test_a_mechanism_is_left_out_within_its_context_only(ablation: ModuleType) -> None:
    for mechanism in ablation.MECHANISMS.values():
        assert mechanism.patches or mechanism.options, mechanism.name
        before = [getattr(owner, name) for owner, name, _ in mechanism.patches]
        with mechanism.left_out():
            for (owner, name, _), known in zip(mechanism.patches, before, strict=True):
                assert getattr(owner, name) != known
        assert [getattr(owner, name) for owner, name, _ in mechanism.patches] == before


def test_every_load_runs_and_every_mechanism_can_be_left_out(ablation: ModuleType) -> None:
    for load in ablation.LOADS:
        (figures,) = ablation.run(ablation.Task(None, load, (1,), 0.5), lambda share: None)
        assert figures["be_tokens_per_s"] >= 0.0
    for name in ablation.MECHANISMS:
        task = ablation.Task(name, "tight memory", (1,), 0.5)
        assert ablation.run(task, lambda share: None)[0]["rt_requests"] > 0


def test_two_runs_are_equal_and_one_without_a_bound_differs(ablation: ModuleType) -> None:
    def digest(mechanism: str | None) -> str:
        (found,) = ablation.run(ablation.Task(mechanism, "tight", (3,), 4.0), lambda share: None)
        return str(found["digest"])

    assert digest(None) == digest(None) != digest("bound on best-effort steps")


def test_an_interval_is_that_of_student(ablation: ModuleType) -> None:
    change = ablation.Change.of([1.0, 2.0, 3.0])
    assert (change.mean, change.low) == (2.0, pytest.approx(2.0 - 4.303 / math.sqrt(3)))
    assert ablation.Change.of([5.0]).low == -math.inf
    assert ablation.Change.of([-1.0, -1.1, -0.9]).is_loss(0.5)
    assert not ablation.Change.of([-1.0, -3.0, 1.0]).is_loss(0.5), "0 is within the interval"


def run(mechanism: str | None, attainment: list[float], **changes: Any) -> dict[str, Any]:
    count = len(attainment)
    return {
        "mechanism": mechanism,
        "load": "tight",
        "attainment": attainment,
        "be_tokens_per_s": [1000.0] * count,
        "ttft_p99_s": [0.2] * count,
        "gap_p99_s": [0.1] * count,
        "be_wait_p99_s": [3.0] * count,
        "program_s": [None] * count,
        "be_deadlines": [None] * count,
        "digest": [str(mechanism)] * count,
    } | changes


def test_a_mechanism_is_needed_by_the_load_that_loses_without_it(ablation: ModuleType) -> None:
    results = {
        "loads": {"tight": ""},
        "mechanisms": dict.fromkeys("abcde", ["policy", ""]),
        "runs": [
            run(None, [99.0, 98.0, 97.0]),
            run("a", [97.0, 96.1, 95.1]),
            run("b", [98.9, 97.9, 96.9]),
            run("c", [99.0, 98.0, 97.0], gap_p99_s=[0.12, 0.13, 0.125]),
            {"mechanism": "d", "load": "tight", "digest": ["None"]},
            run("e", [99.0, 80.0, 97.0]),
        ],
    }
    found = {name: ablation.judge_mechanism(results, name) for name in "abcde"}
    assert found["a"].needed == ["tight: attainment -1.9 points"]
    assert found["b"].needed == [], "a tenth of a point is too little"
    assert found["c"].needed == ["tight: p99 gap +25.0 %"]
    assert found["d"].same == {"tight"} and not found["d"].changes
    assert found["e"].needed == [] and found["e"].unsure == {"tight"}, "it may be chance"
    assert ablation._undecided(results) == {("e", "tight")}


def test_the_committed_report_is_that_of_the_committed_figures(ablation: ModuleType) -> None:
    """It is about all loads and mechanisms, and says why those stay that no load needs."""
    results = json.loads((RESULTS / "ablation.json").read_text())
    assert list(results["loads"]) == list(ablation.LOADS)
    assert results["mechanisms"].keys() == ablation.MECHANISMS.keys()
    for name, mechanism in ablation.MECHANISMS.items():
        assert ablation.judge_mechanism(results, name).needed or mechanism.kept, name
    text = "\n".join(ablation.report(results)) + "\n"
    assert text == (RESULTS / "ablation.md").read_text()
