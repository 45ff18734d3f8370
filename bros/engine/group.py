"""The ranks of an engine: how this process joins them, leads or follows, and ends."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from pathlib import Path

from bros.core.config import EngineConfig
from bros.core.errors import RanksLostError
from bros.core.interfaces import EngineInfo, Executor
from bros.core.rank_env import RankEnv
from bros.core.stop_signals import STOP_SIGNALS
from bros.engine.parent import end_with_parent
from bros.executor.encoder_runner import load_encoder
from bros.executor.loader import is_encoder, load_executor
from bros.executor.model_store import ModelFiles, resolve_model
from bros.executor.parallel.ranks import SINGLE_RANK, Ranks, TorchRanks
from bros.executor.parallel.runner import follow, lead
from bros.executor.target import device_of_rank

logger = logging.getLogger("bros.engine")

_GRACE_S = 5.0
"""After an error the other ranks wait this long, so that rank 0 can report it, and then kill it."""


class Group:
    """The ranks that run a model, seen from one of them. Use it in a `with` block.

    If the block raises, this rank kills all others: a rank that hangs ends no other way.
    """

    def __init__(self, config: EngineConfig, ranks: Ranks = SINGLE_RANK) -> None:
        """ranks: ranks that have joined; by default this process alone."""
        self._config = config
        self._ranks = ranks

    @classmethod
    def join(cls, config: EngineConfig, rank_env: RankEnv | None) -> Group:
        """Wait for all config.tp ranks to call this. rank_env: None if this is the only rank.

        Raises RanksLostError if a rank does not join in time, ConfigError if one has no device.
        """
        if rank_env is None:
            return cls(config)
        device = device_of_rank(config, rank_env.rank, rank_env.size)
        return cls(config, TorchRanks.join(device, config.tp_timeout, attempt=rank_env.attempt))

    @property
    def rank(self) -> int:
        return self._ranks.rank

    def log_to_stderr(self, level: str, replica: int | None = None) -> None:
        """Log with the replica and the rank in each line, where there are several.

        level: as in ServerConfig.
        """
        which = f"[replica {replica}] " if replica is not None else ""
        which += f"[rank {self.rank}] " if self._ranks.size > 1 else ""
        format = f"%(asctime)s %(levelname)s {which}%(name)s: %(message)s"
        logging.basicConfig(level=level.upper(), format=format)

    def lead(self, files: ModelFiles) -> tuple[Executor, EngineInfo]:
        """On rank 0: load the model together with the other ranks. Closing the executor ends them.

        Raises what load_executor raises.
        """
        if is_encoder(files):
            return load_encoder(self._config, files, self._ranks)
        runner, info = load_executor(self._config, files, self._ranks)
        return lead(runner, self._ranks), info

    def follow(self, files: ModelFiles) -> None:
        """On the other ranks: load the model and run rank 0's plans until it closes its executor.

        Raises what load_executor raises, and RanksLostError.
        """
        if is_encoder(files):
            load_encoder(self._config, files, self._ranks)  # raises: encoders run on one rank
        runner, _ = load_executor(self._config, files, self._ranks)
        follow(runner, self._ranks)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._ranks.close()
            return
        if self.rank > 0:
            threading.Event().wait(_GRACE_S)
        self.kill_others()

    def kill_others(self) -> None:
        """Kill all other ranks. Any thread may call it."""
        for pid in self._ranks.others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def run_follower(config: EngineConfig, rank_env: RankEnv, cache_dir: Path, log_level: str) -> int:
    """Run a rank other than 0 in a process that torchrun has started; returns the exit status.

    Rank 0 decides when to end: it receives the same signals. Raises ModelError or ConfigError if
    the model cannot be served, or RanksLostError.
    """
    end_with_parent()
    # Python's handler would not run while a library call blocks.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    files = resolve_model(config.model, cache_dir)
    stopping = threading.Event()
    try:
        with Group.join(config, rank_env) as group:
            group.log_to_stderr(log_level)
            for number in STOP_SIGNALS:
                signal.signal(number, lambda number, frame: stopping.set())
            group.follow(files)
    except RanksLostError:
        if not stopping.is_set():
            raise
    return 0
