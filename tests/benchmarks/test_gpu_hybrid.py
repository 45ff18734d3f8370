"""The hybrid load of a GPU, in virtual time with the profile of one."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from bros.profiling.profiles import checkout_profiles

PROFILE = "nvidia-h100-80gb-hbm3/llama-3-8b-bf16"


def test_best_effort_work_leaves_chats_nearly_as_they_are_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(benchmarks))
    hybrid = importlib.import_module("gpu_hybrid")
    folder = checkout_profiles()
    assert folder is not None
    profile = str(folder / f"{PROFILE}.json")
    file = tmp_path / "hybrid.json"
    arguments = ["--simulate", profile, "--rate", "6", "--duration", "20", "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["gpu_hybrid.py", *arguments])
    hybrid.main()
    results = json.loads(file.read_text("utf-8"))["results"]
    alone, bound, bros = (results[f"{name}, simulated"] for name in ("alone", "bound", "bros"))
    assert alone["rt_answered"] == alone["rt_requests"] > 50
    assert bros["rt_answered"] >= alone["rt_answered"] - 1
    assert bros["gap_s"]["p99"] <= 1.1 * alone["gap_s"]["p99"]
    assert bros["gap_s"]["p99"] < bound["gap_s"]["p99"] / 1.5
    assert bros["ttft_s"]["p99"] < bound["ttft_s"]["p99"] / 5
    assert 0.8 * bound["be_per_s"] < bros["be_per_s"] <= 1.02 * bound["be_per_s"]
