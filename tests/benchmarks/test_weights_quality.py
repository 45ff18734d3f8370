"""How far the log-probabilities of the embedded model are from fp32's, in every format."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from bros.executor.model_store import default_cache_dir, resolve_model

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
BOUND = {"bf16": 0.03, "int8": 0.05, "int4": 0.05}
"""Mean difference of log-probabilities; docs/decisions/0004 has the measured ones."""
DENSE_BOUND = {"int8": 0.08}
"""Where the weights are not stored in 4 bits, so that int8 rounds them, too."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("weights_quality")


def test_the_measures_are_those_of_two_distributions(script: Any) -> None:
    exact = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
    found = torch.tensor([[0.25, 0.5, 0.25], [0.1, 0.1, 0.8]], dtype=torch.float64).log()
    twice = torch.tensor(2.0, dtype=torch.float64).log().item()
    measured = script.quality(found, exact, [7, 1, 2])
    assert measured.loss == pytest.approx(-(found[0, 1] + found[1, 2]).item() / 2)
    assert measured.difference == pytest.approx(2 * twice / 6)
    assert measured.best_difference == pytest.approx(twice / 2)
    assert measured.divergence == pytest.approx((0.5 * twice - 0.25 * twice) / 2)
    assert measured.same_best == 0.5


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dense", [False, True], ids=["stored in 4 bits", "dense"])
def test_every_format_is_near_fp32(script: Any, dense: bool, tmp_path: Path) -> None:
    if dense:
        script.export_model.main(tmp_path)
    files = resolve_model(str(tmp_path) if dense else None, default_cache_dir())
    text = script.TEXT.read_text("utf-8")
    tokens = AutoTokenizer.from_pretrained(files.folder).encode(text)[:200]
    bounds = BOUND | DENSE_BOUND if dense else BOUND
    found = script.compare(files, list(bounds), tokens)
    assert found["fp32"].difference == 0 and found["fp32"].same_best == 1
    for weights, most in bounds.items():
        assert 0 < found[weights].difference < most, weights
        assert abs(found[weights].loss - found["fp32"].loss) < 0.02, weights
        assert found[weights].same_best > 0.95, weights
