"""What a server holds for all its clients together, in proportion to its machine.

These limits do not depend on keys: they keep a server up that strangers may use without one. A
single user does not meet them.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bros.core.config import ServerConfig, parse_bytes
from bros.core.tenants import TenantLimits

_SESSION_CHARS_SHARE = 1 / 16
"""Characters in sessions per byte of memory. A character takes up to 4 bytes."""

_INPUT_SHARE = 1 / 64
_MIN_INPUT_BYTES = 64 * 2**20
"""Bodies of 4 MiB, sixteen of them on a small machine. What a large one is parsed to takes a
multiple of it, but one is parsed at a time (core/fair.py)."""

_OUTPUT_SHARE = 1 / 64
_MIN_OUTPUT_BYTES = 64 * 2**20

_FILE_SHARE = 1 / 2
"""Of the disk."""

_ASSUMED_MEMORY_BYTES = 8 * 2**30
"""Where the system does not tell."""

_CGROUP_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def server_limits(config: ServerConfig, memory_bytes: int, disk_bytes: int) -> TenantLimits:
    """Most that all tenants hold together, by options or by the machine.

    disk_bytes: size of the disk of the files.
    """

    def size(given: str | None, usual: float) -> int:
        return int(usual) if given is None else parse_bytes(given)

    usual_chars = max(1, int(memory_bytes * _SESSION_CHARS_SHARE))
    usual_input = max(_MIN_INPUT_BYTES, memory_bytes * _INPUT_SHARE)
    usual_output = max(_MIN_OUTPUT_BYTES, memory_bytes * _OUTPUT_SHARE)
    return TenantLimits(
        session_chars=config.max_session_chars or usual_chars,
        input_bytes=size(config.max_input_bytes, usual_input),
        output_bytes=size(config.max_output_bytes, usual_output),
        files=config.max_files,
        file_bytes=size(config.max_file_bytes, max(1, disk_bytes * _FILE_SHARE)),
    )


def memory_bytes() -> int:
    """Memory that this process may use: that of the machine, or of its container."""
    try:
        found = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        found = _ASSUMED_MEMORY_BYTES
    for path in _CGROUP_LIMITS:
        try:
            found = min(found, int(path.read_text()))
        except (OSError, ValueError):
            continue  # no such container, or "max"
    return found


def disk_bytes(folder: Path) -> int:
    """Size of the disk of an existing folder."""
    return shutil.disk_usage(folder).total
