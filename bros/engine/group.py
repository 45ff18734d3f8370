"""This process among the ranks of an engine: joining, leading, following, and how it all ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from pathlib import Path
from types import TracebackType

from bros.core.config import EngineConfig
from bros.core.errors import RanksLostError
from bros.core.interfaces import EngineInfo, Executor
from bros.core.rank_env import RankEnv
from bros.engine.parent import end_with_parent
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, resolve_model
from bros.executor.parallel.ranks import SINGLE_RANK, Ranks, TorchRanks
from bros.executor.parallel.runner import follow, lead
from bros.executor.target import device_of_rank

logger = logging.getLogger("bros.engine")

_GRACE_S = 5.0
"""How long rank 0 has to say what happened, before those who noticed as well end it."""


class Group:
    """The ranks that run a model, seen from one of them. Use it in a `with` block.

    If the block ends with an error, all the others are killed: one that hangs ends no other way.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks = SINGLE_RANK) -> None:
        """Of ranks that have joined, or of this process alone."""
        self._config = config
        self._ranks = ranks

    @classmethod
    def join(cls, config: EngineConfig, rank_env: RankEnv | None) -> Group:
        """All config.tp ranks call this. Without rank_env this process is the only rank.

        Raises RanksLostError if they do not all come, ConfigError if one has no device.
        """
        if rank_env is None:
            return cls(config)
        device = device_of_rank(config, rank_env.rank, rank_env.size)
        return cls(config, TorchRanks.join(device, config.tp_timeout, attempt=rank_env.attempt))

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def log_to_stderr(self, level: str, replica: int | None = None) -> None:
        """level: as in ServerConfig. Lines say which replica and which rank they are of, where
        there are several."""
        which = f"[replica {replica}] " if replica is not None else ""
        which += f"[rank {self.rank}] " if self._ranks.size > 1 else ""
        format = f"%(levelname)s {which}%(name)s: %(message)s"
        logging.basicConfig(level=level.upper(), format=format)

    def lead(self, files: ModelFiles) -> tuple[Executor, EngineInfo]:
        """On rank 0: load the model, together with the others. Closing the executor ends them.

        Raises as load_executor does.
        """
        runner, info = load_executor(self._config, files, self._ranks)
        return lead(runner, self._ranks), info

    def follow(self, files: ModelFiles) -> None:
        """On the others: load the model and do what rank 0 says, until it closes its executor.

        Raises as load_executor does, and RanksLostError.
        """
        runner, _ = load_executor(self._config, files, self._ranks)
        follow(runner, self._ranks)

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self._ranks.close()
            return
        if self.rank > 0:
            threading.Event().wait(_GRACE_S)
        for pid in self._ranks.others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_follower(config: EngineConfig, rank_env: RankEnv, cache_dir: Path, log_level: str) -> int:
    """What a process that torchrun has started does if it is not rank 0; returns an exit status.

    When to end is rank 0's business: what interrupts torchrun reaches it as well.
    Raises ModelError or ConfigError if the model cannot be served, RanksLostError.
    """
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Python's handler would wait for the library
    files = resolve_model(config.model, cache_dir)
    stopping = threading.Event()
    try:
        with Group.join(config, rank_env) as group:
            group.log_to_stderr(log_level)
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, lambda number, frame: stopping.set())
            group.follow(files)
    except RanksLostError:
        if not stopping.is_set():
            raise
    return 0
