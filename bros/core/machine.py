"""The processor of this machine."""

from __future__ import annotations

import os
import platform
from pathlib import Path


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
