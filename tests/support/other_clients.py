"""Client libraries of others that tests use if they are installed."""

from __future__ import annotations

import importlib
from typing import Any

import pytest


def imported(name: str) -> Any:
    """The module of another client, which need not be installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")
