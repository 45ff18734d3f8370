"""The rank that torchrun gave this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from bros.core.config import Config
from bros.core.errors import ConfigError


class RankEnv(NamedTuple):
    """What torchrun sets in the environment of a process.

    rank: 0 .. size - 1.
    size: how many processes run the model together.
    attempt: how often torchrun has restarted the ranks.
    """

    rank: int
    size: int
    attempt: int = 0


def torchrun_rank_env(environ: Mapping[str, str]) -> RankEnv | None:
    """The rank of this process; None if torchrun has not started it as one of several.

    Raises ConfigError if the ranks are on several machines.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    rank, size, here = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if here != size:
        raise ConfigError(
            f"torchrun has started {size} ranks on several machines; all ranks of a model must "
            "be on one machine (--nnodes 1)"
        )
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return RankEnv(rank, size, attempt) if size > 1 else None


def with_ranks(config: Config, env: RankEnv) -> Config:
    """The configuration with `tp` = the number of ranks. Raises ConfigError if --tp differs."""
    if config.engine.tp not in (1, env.size):
        raise ConfigError(
            f"--tp: {config.engine.tp} ranks, but torchrun has started {env.size}; set --tp to "
            f"{env.size} or omit it"
        )
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, tp=env.size))
