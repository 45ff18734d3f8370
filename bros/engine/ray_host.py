"""What a replica's Ray actor does on its node: it runs one engine, and says that it is there.

server process                       node
RayEngineClient ── run(order) ─────▶ EngineHost (actor) ──▶ engine process, or launcher of ranks
      ▲  ▲                                │                            │
      │  └─────── signs of life ──────────┘                            │
      └═══════════════════════ ZeroMQ, encrypted ══════════════════════╛
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bros.core.config import EngineConfig
from bros.engine.ipc import Wire, signs_of_life
from bros.engine.launch import Launch
from bros.executor.model_store import cache_dir_of, resolve_model
from bros.scheduler.profiles import profile_folders

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What a host is told. The model and data_dir mean what they mean on its node.

    signs_s: how often it says that it is there.
    """

    config: EngineConfig
    data_dir: str | None
    log_level: str
    wire: Wire
    signs_s: float


class EngineHost:
    """Has one process to look after. It ends when that ends, and the other way round: the process
    reads from a pipe of this one, which closes however this one ends."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, order: Order) -> int:
        """One life of an engine; the exit status of its process. Raises ModelError."""
        logging.basicConfig(level=order.log_level.upper())
        # Readable by this user only.
        with tempfile.TemporaryDirectory(prefix="bros-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            order.wire.write(folder)
            with signs_of_life(folder, order.signs_s, host=True):  # a model may take long to come
                launch = _launch_of(order)
                launch.write(folder)
                command = [sys.executable, "-m", launch.module, name]
                with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                    return process.wait()


def _launch_of(order: Order) -> Launch:
    cache_dir = cache_dir_of(order.data_dir)
    files = resolve_model(order.config.model, cache_dir, logger.info)
    return Launch(
        model_folder=str(files.folder),
        model_name=files.name,
        log_level=order.log_level,
        config=order.config,
        profiles=tuple(str(folder) for folder in profile_folders(cache_dir)),
        starts_ranks=order.config.tp > 1,
        gives_signs=True,
    )
