"""The processor of this machine, and how a module runs in a process of its own."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

import bros


def available_cores() -> int:
    """How many hardware threads this process may run on."""
    return len(os.sched_getaffinity(0))


def cpu_name() -> str:
    """Model name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1] for line in lines if line.startswith("model name")]
    return names[0].strip() if names else platform.processor() or platform.machine()


def module_command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module of bros. It imports no files of the working directory, such as
    a user's queue.py, unless bros itself is there."""
    is_here = Path(bros.__file__).parents[1] == Path.cwd()
    return [sys.executable, *([] if is_here else ["-P"]), "-m", module, *arguments]
