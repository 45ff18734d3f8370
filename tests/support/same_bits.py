"""Runners of the kernels that sum in one order, so that results are compared bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from bros.core.config import EngineConfig
from bros.executor.loader import load_executor, random_executor
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner
from support.kernel_cases import compiled_levels

needs_one_order = pytest.mark.skipif(
    compiled_levels() in ([], ["generic"]),
    reason="products and attention in one order are those of AVX2 and later",
)


def runner_of(spec: ModelSpec | None, weights: str, **options: Any) -> ModelRunner:
    """spec: None for the embedded model. options: of EngineConfig."""
    config = EngineConfig(device="cpu", weights=weights, **options)
    if spec is None:
        runner, _ = load_executor(config, resolve_model(None, default_cache_dir()))
    else:
        runner, _ = random_executor(spec, config)
    return runner
