"""Divides the CPUs and GPUs of a cluster's nodes among replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NodeAllocation:
    """The resources of one replica, on one node.

    cpus: cores, for all of its ranks.
    gpus: one per rank, or 0.
    """

    cpus: int
    gpus: int

    def __str__(self) -> str:
        return f"{self.cpus} CPUs" + (f" and {self.gpus} GPUs" if self.gpus else "")


def allocation_of(
    config: EngineConfig, replicas: int, nodes: Sequence[tuple[int, int]]
) -> NodeAllocation:
    """The resources of each of `replicas` replicas. nodes: (CPUs, GPUs) of each.

    One GPU per rank if there are GPUs; otherwise the replicas divide all cores.
    """
    if config.device == "cuda" or config.device == "auto" and any(gpus for _, gpus in nodes):
        return NodeAllocation(config.tp * (config.threads or 1), config.tp)
    if config.threads is not None:
        return NodeAllocation(config.tp * config.threads, 0)
    cores = sum(cpus for cpus, _ in nodes) // replicas
    largest = max((cpus for cpus, _ in nodes), default=1)
    each = NodeAllocation(max(config.tp, min(cores, largest)), 0)
    # A replica runs on one node, so cores of a node may remain unused: shrink until all fit.
    while each.cpus > config.tp and _room(each, nodes) < replicas:
        each = NodeAllocation(each.cpus - 1, 0)
    return each


def _room(each: NodeAllocation, nodes: Sequence[tuple[int, int]]) -> int:
    """How many replicas fit on otherwise empty nodes."""
    return sum(
        min(cpus // each.cpus, gpus // each.gpus if each.gpus else cpus) for cpus, gpus in nodes
    )


def check_room(each: NodeAllocation, replicas: int, nodes: Sequence[tuple[int, int]]) -> None:
    """Raise ConfigError if the cluster is too small for `replicas` replicas."""
    room = _room(each, nodes)
    if each.gpus and not any(gpus for _, gpus in nodes):
        raise ConfigError("--device: no node of the cluster has a GPU")
    if room < replicas:
        raise ConfigError(
            f"--replicas: the cluster has room for {room} replicas with {each}, not {replicas}; "
            "--max-replicas may be larger if more nodes will join"
        )
