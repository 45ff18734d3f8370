"""Where and with what a measurement was made."""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from bros import __version__
from bros.bench.results import Environment
from bros.core.clock import Clock
from bros.scheduler.profiles import available_cores, cpu_name

_PACKAGES = ("aiohttp", "numpy", "tokenizers", "torch", "transformers")
"""What the time of servers and of the client depends on."""

_SOURCE = Path(__file__).resolve().parents[2]


def environment(clock: Clock) -> Environment:
    """Of this machine, now."""
    now = datetime.datetime.fromtimestamp(clock.unix_time(), datetime.UTC)
    return Environment(
        cpu=cpu_name(),
        cores=available_cores(),
        memory_bytes=_memory_bytes(),
        python=platform.python_version(),
        bros=__version__,
        date=now.isoformat(timespec="seconds"),
        commit=_commit(),
        packages=dict(_packages()),
    )


def _packages() -> Iterator[tuple[str, str]]:
    """Those that are there, read without importing them."""
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            yield name, metadata.version(name)


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def _commit() -> str | None:
    """Of the source tree that bros runs from, with a plus if it was changed; None without one."""
    if not (_SOURCE / ".git").exists():
        return None
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--", "bros") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(_SOURCE), *words], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()
