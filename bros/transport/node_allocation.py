"""How the nodes of a cluster are divided among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeAllocation:
    """What one replica gets of one node.

    cpus: cores, for all of its ranks.
    """

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cpus} CPUs" + (f" and {self.gpus} GPUs" if self.gpus else "")


def allocation_of(
    config: EngineConfig, replicas: int, nodes: Sequence[tuple[int, int]]
) -> NodeAllocation:
    """What each of so many replicas gets. nodes: (CPUs, GPUs) of each.

    A GPU for each rank, if there are any; else all cores are divided among the replicas.
    """
    if config.device == "cuda" or config.device == "auto" and any(gpus for _, gpus in nodes):
        return NodeAllocation(config.tp * (config.threads or 1), config.tp)
    if config.threads is not None:
        return NodeAllocation(config.tp * config.threads, 0)
    cores = sum(cpus for cpus, _ in nodes) // replicas
    most = max((cpus for cpus, _ in nodes), default=1)
    share = NodeAllocation(max(config.tp, min(cores, most)), 0)
    # Each is on one node, so that cores of a node may be left over.
    while share.cpus > config.tp and room_for(share, nodes) < replicas:
        share = NodeAllocation(share.cpus - 1, 0)
    return share


def room_for(share: NodeAllocation, nodes: Sequence[tuple[int, int]]) -> int:
    """How many replicas fit on nodes where nothing else runs."""
    return sum(
        min(cpus // share.cpus, gpus // share.gpus if share.gpus else cpus) for cpus, gpus in nodes
    )


def check_room(share: NodeAllocation, replicas: int, nodes: Sequence[tuple[int, int]]) -> None:
    """Raises ConfigError if so many will never fit."""
    room = room_for(share, nodes)
    if share.gpus and not any(gpus for _, gpus in nodes):
        raise ConfigError("--device: no node of the cluster has a GPU")
    if room < replicas:
        raise ConfigError(
            f"--replicas: the cluster has room for {room} replicas with {share}, not {replicas}; "
            f"--max-replicas may be more, if nodes are to come"
        )
