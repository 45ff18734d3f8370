"""benchmarks/prefill_profile.py on a tiny model: that it runs, and where it finds time."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

from bros.executor.model_store import ModelFiles
from support.tiny_models import save_tiny_llama

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_every_part_of_a_prefill_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    profile = importlib.import_module("prefill_profile")
    save_tiny_llama(tmp_path, vocab_size=1100)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    longer = json.dumps({**config, "max_position_embeddings": 2048})
    (tmp_path / "config.json").write_text(longer, "utf-8")
    files = ModelFiles(tmp_path, "tiny")
    monkeypatch.setattr(profile, "resolve_model", lambda *_: files)
    monkeypatch.setattr(profile, "best_gflops", lambda: 100.0)
    out = tmp_path / "profile.json"
    monkeypatch.setattr(sys, "argv", ["prefill_profile", "--tokens", "20", "--json", str(out)])
    profile.main()
    parts = json.loads(out.read_text("utf-8"))["median_ms"]["20"]
    assert all(0 < parts[name] < parts["total"] for name in (*profile.OPERATIONS, "products"))
