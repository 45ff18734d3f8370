"""Which of the processes that torchrun has started this one is."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from bros.core.config import Config
from bros.core.errors import ConfigError


class Place(NamedTuple):
    """rank: 0 .. size - 1. attempt: how often torchrun has started all of them anew."""

    rank: int
    size: int
    attempt: int = 0


def torchrun_place(environ: Mapping[str, str]) -> Place | None:
    """None if this process is not one of several that torchrun has started.

    Raises ConfigError if they are on several machines.
    """
    if "TORCHELASTIC_RUN_ID" not in environ:
        return None
    rank, size, here = (int(environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if here != size:
        raise ConfigError(
            f"torchrun has started {size} ranks on several machines; a model can only be shared by "
            "ranks of one (--nnodes 1)"
        )
    attempt = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Place(rank, size, attempt) if size > 1 else None


def with_ranks(config: Config, place: Place) -> Config:
    """The same for as many ranks as there are. Raises ConfigError if --tp says something else."""
    if config.engine.tp not in (1, place.size):
        raise ConfigError(
            f"--tp: {config.engine.tp} ranks, but torchrun has started {place.size}; give the same "
            "number, or leave it out"
        )
    return dataclasses.replace(config, engine=dataclasses.replace(config.engine, tp=place.size))
