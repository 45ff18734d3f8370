"""The embedded model, converted once per machine."""

from __future__ import annotations

import pytest

from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model


@pytest.fixture(scope="session")
def embedded_model() -> ModelFiles:
    return resolve_model(None, default_cache_dir())
