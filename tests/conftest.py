"""Set-up for all tests: repeatable property tests and quiet libraries."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

# Examples are the same in every run, so that a failure is about the code and not about luck.
settings.register_profile(
    "bros",
    derandomize=True,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bros")

# Tests start processes; tokenizers warns after a fork unless told not to use threads. The
# hub cannot be asked by accident.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run tests that are marked long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; runs with --long"))
