"""Puts a router together."""

from __future__ import annotations

from collections.abc import Callable

from bros.core.errors import ConfigError
from bros.core.request import EngineRequest
from bros.router.e2 import E2
from bros.router.fleet import Fleet
from bros.router.policies import LeastLoaded, OraclePartition, RoundRobin
from bros.router.settings import ROUTERS, RouterSettings
from bros.router.state import RoutingPolicy


def make_fleet(
    policy: str,
    settings: RouterSettings | None = None,
    block_size: int = 16,
    oracle: Callable[[EngineRequest], int] | None = None,
) -> Fleet:
    """A fleet without replicas. oracle: see OraclePartition, for policy "oracle".

    Raises ConfigError if there is no such policy.
    """
    settings = settings or RouterSettings()
    return Fleet(_policy(policy, oracle), settings, block_size, balances=policy == "e2")


def _policy(name: str, oracle: Callable[[EngineRequest], int] | None) -> RoutingPolicy:
    if name == "e2":
        return E2()
    if name == "rr":
        return RoundRobin()
    if name == "least":
        return LeastLoaded()
    if name == "oracle" and oracle is not None:
        return OraclePartition(oracle)
    raise ConfigError(f"--router: {name!r} is not one of {', '.join(ROUTERS)}")
