"""How the nodes of a cluster are divided among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bros.core.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Share:
    """What one replica gets of one node. cpus: cores, for all of its ranks."""

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cpus} CPUs" + (f" and {self.gpus} GPUs" if self.gpus else "")


def share_of(config: EngineConfig, replicas: int, nodes: Sequence[tuple[int, int]]) -> Share:
    """What each of so many replicas gets. nodes: (CPUs, GPUs) of each.

    A GPU for each rank, if there are any; else all cores are divided among the replicas.
    """
    if config.device == "cuda" or config.device == "auto" and any(gpus for _, gpus in nodes):
        return Share(config.tp * (config.threads or 1), config.tp)
    if config.threads is not None:
        return Share(config.tp * config.threads, 0)
    cores = sum(cpus for cpus, _ in nodes) // replicas
    most = max((cpus for cpus, _ in nodes), default=1)
    return Share(max(config.tp, min(cores, most)), 0)
