"""Runners of the kernels that sum in one order, so that results are compared bit by bit."""

from __future__ import annotations

from typing import Any

import pytest

from bros.core.config import EngineConfig
from bros.executor.loader import load_executor, random_executor
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.executor.models.layers import has_products
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
        runner, info = load_executor(config, resolve_model(None, default_cache_dir()))
    else:
        runner, info = random_executor(spec, config)
    if not has_products(info.kernels, info.weights):
        pytest.skip(f"linear layers of {weights} are oneDNN's on this CPU, which has AMX")
    return runner
