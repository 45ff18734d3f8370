"""A Ray cluster as bros sees it: what its nodes have, and places for replicas on them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bros.core.errors import ConfigError, EngineDeadError
from bros.engine.ray_host import EngineHost
from bros.engine.reach import reach, signals_kept
from bros.engine.share import Share

logger = logging.getLogger(__name__)

_OBJECT_STORE_BYTES = 80 * 2**20
"""Of a cluster that is started here: no objects go through Ray."""

_REACH_S = 8.0
"""How long a cluster may take to answer: Ray itself would wait without a word."""

_PATIENCE_S = 10.0
"""After which it is said that a replica waits for a place."""


class NoRoomError(EngineDeadError):
    """No node has what a replica needs, now."""


class Place:
    """Reserved on one node until it is given back. If the node is lost, Ray finds another."""

    def __init__(self, share: Share, limit_s: float) -> None:
        """limit_s: how long to wait for a node with room."""
        # One bundle is on one node, where the replica's ranks find each other.
        bundle = {"CPU": float(share.cpus), "GPU": float(share.gpus)}
        resources = {name: amount for name, amount in bundle.items() if amount}
        self._share, self._limit_s = share, limit_s
        self._group = placement_group([resources], strategy="STRICT_PACK")

    async def host(self) -> Any:
        """An actor that is an EngineHost; waits until there is room for it. It ends with this
        process (it is not detached), and is not restarted by Ray, which would not know its order.

        Raises NoRoomError if there is none.
        """
        waiting = asyncio.wrap_future(self._group.ready().future())
        # Whoever stops to wait does not hear of it any more, whatever comes of it.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([waiting], timeout=_PATIENCE_S)
        if not waiting.done():
            logger.warning("a replica waits for a node with %s", self._share)
            await asyncio.wait([waiting], timeout=self._limit_s)
        if not waiting.done():
            waiting.cancel()
            raise NoRoomError(f"No node has room for a replica with {self._share}.")
        await waiting
        strategy = PlacementGroupSchedulingStrategy(self._group)
        actor = ray.remote(EngineHost).options(
            num_cpus=self._share.cpus,
            num_gpus=self._share.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        return actor.remote()

    def give_back(self) -> None:
        """With whatever runs there."""
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


class Cluster:
    """A connection to a cluster; one of a program."""

    def __init__(self, address: str) -> None:
        """address: of a cluster, or "auto": the one that this machine is part of, or else one that
        is started here and ends with this program.

        Raises ConfigError if none answers there.
        """
        # A server tells nobody what it is used for.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if ray.is_initialized():
            return
        named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
        if named not in ("", "auto", "local"):
            reach(named, _REACH_S)
        try:
            with signals_kept():
                _connect_or_start(address, may_start=not named)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise ConfigError(f"--cluster: no way to {named or 'start Ray'}: {error}") from error

    @property
    def address(self) -> str:
        """Of this machine, for the others of the cluster."""
        return str(get_node_ip_address())

    def nodes(self) -> list[tuple[int, int]]:
        """(CPUs, GPUs) of each node that is there."""
        found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return [(int(have.get("CPU", 0)), int(have.get("GPU", 0))) for have in found]

    def close(self) -> None:
        """All that runs there for this program ends."""
        ray.shutdown()


def _connect_or_start(address: str, *, may_start: bool) -> None:
    try:
        ray.init(address, configure_logging=False)
    except ConnectionError:
        if not may_start:
            raise
    else:
        at = ray.get_runtime_context().gcs_address
        logger.info("using the Ray cluster at %s", at)
        return
    logger.info("no Ray cluster runs here: starting one for as long as this server runs")
    ray.init(
        include_dashboard=False,
        configure_logging=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


def end(host: Any) -> None:
    """Whatever it is doing."""
    with contextlib.suppress(RayError):
        ray.kill(host, no_restart=True)


async def call(method: Any, *arguments: object) -> Any:
    """Call a method of an actor. Raises what it raises, EngineDeadError if the actor is gone."""
    try:
        return await method.remote(*arguments)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        logger.debug("an actor ended: %s", error)  # a dozen lines of advice
        raise EngineDeadError("The replica's actor ended unexpectedly.") from error
