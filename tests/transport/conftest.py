"""The model of the engines that the tests of this folder start."""

from __future__ import annotations

import pytest

from bros.executor.model_store import ModelFiles
from support.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder)
    return ModelFiles(folder=folder, name="tiny")
