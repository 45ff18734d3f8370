"""Stored step time models: where they lie and what is written in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_CHECKOUT_FILES = ("pyproject.toml", "profiles")


def checkout_profiles() -> Path | None:
    """profiles/ of the source tree that bros runs from, None if it is installed."""
    root = _package().parent
    is_checkout = all((root / name).exists() for name in _CHECKOUT_FILES)
    return root / "profiles" if is_checkout else None


def profile_folders(data_dir: Path) -> tuple[Path, ...]:
    """Where profiles are looked for: the user's own folder, then what comes with bros."""
    return data_dir / "profiles", checkout_profiles() or _package() / "_profiles"


def _package() -> Path:
    spec = importlib.util.find_spec("bros")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent
