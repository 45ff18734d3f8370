"""Several engines behind one router: a fixed number of processes on this machine, a number that
follows the load, or actors on a Ray cluster."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import importlib.util
import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from bros.core.clock import Clock, SystemClock
from bros.core.config import Config, EngineConfig, ServerConfig
from bros.core.errors import ConfigError
from bros.core.machine import available_cores
from bros.router.client import RouterClient
from bros.router.elastic import ElasticReplicas, ElasticSettings, StartableClient
from bros.router.fleet import Fleet, make_fleet
from bros.router.state import RouterSettings
from bros.transport.node_allocation import allocation_of, check_room
from bros.transport.process_client import ProcessEngineClient

if TYPE_CHECKING:
    from bros.transport.ray import Cluster

logger = logging.getLogger("bros.server")

MakeEngine = Callable[[int, EngineConfig, Callable[[str], None]], ProcessEngineClient]
"""(replica number, its options, callback for its final death with the reason) -> client."""


# ---- Replicas on this machine.


class LocalReplicas(RouterClient):
    """Starts config.server.replicas engine processes. Create it inside a running event loop."""

    def __init__(
        self, config: Config, make_engine: MakeEngine, on_final_death: Callable[[str], None]
    ) -> None:
        super().__init__(*_router_parts(config), on_final_death)
        count = config.server.replicas
        engine = with_share_of_cores(config.engine, count, available_cores())
        self._engines: Sequence[ProcessEngineClient] = [
            make_engine(number, engine, functools.partial(self.mark_gone, number))
            for number in range(count)
        ]
        for client in self._engines:
            self.add(client, restart=client.restart)

    async def start(self) -> None:
        """Start all engines concurrently and wait until every model is loaded.

        Raises EngineDeadError with the reason if one fails to start.
        """
        starts = [asyncio.create_task(engine.start()) for engine in self._engines]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        self.replicas()  # refreshes their states: all are up now


def local_elastic_replicas(
    config: Config, make_engine: MakeEngine, on_final_death: Callable[[str], None]
) -> ElasticReplicas:
    """Engine processes on this machine whose number follows the load."""
    settings = _elastic_settings(config.server)
    engine = with_share_of_cores(config.engine, settings.max_replicas, available_cores())

    def make(number: int, on_death: Callable[[str], None]) -> StartableClient:
        return make_engine(number, engine, on_death)

    return ElasticReplicas(
        *_router_parts(config),
        make,
        settings,
        config.server.replicas,
        on_final_death,
        replaces=config.server.on_engine_death == "restart",
    )


def with_share_of_cores(config: EngineConfig, replicas: int, cores: int) -> EngineConfig:
    """Options of one of `replicas` engines that share `cores`: sets `threads` if not given."""
    if config.threads is not None:
        return config
    return dataclasses.replace(config, threads=max(1, cores // (replicas * config.tp)))


def new_fleet(config: Config) -> Fleet:
    """The router's policy from the options. Without a prefix cache, e2 is replaced by least."""
    server, router = config.server, config.server.router
    if router == "e2" and config.engine.prefix_cache == "off":
        router = "least"
        logger.warning("--prefix-cache off: requests go to replicas as with --router least")
    if server.router_plan != "off" and router != "e2":
        logger.warning("--router-plan has no effect with --router %s", router)
    return make_fleet(router, RouterSettings(plan=server.router_plan))


def _router_parts(config: Config) -> tuple[Fleet, Clock, random.Random]:
    return new_fleet(config), SystemClock(), random.Random(config.engine.seed)


# ---- The number of replicas.


def replica_bounds(config: ServerConfig) -> tuple[int, int]:
    """(fewest, most) replicas. Raises ConfigError if --replicas is not between them."""
    least = config.replicas if config.min_replicas is None else config.min_replicas
    most = config.replicas if config.max_replicas is None else config.max_replicas
    if config.min_replicas is not None and config.max_replicas is not None and least > most:
        raise ConfigError(f"--min-replicas: {least} is more than --max-replicas {most}")
    if least > config.replicas:
        raise ConfigError(f"--min-replicas: {least} is more than --replicas {config.replicas}")
    if most < config.replicas:
        raise ConfigError(f"--max-replicas: {most} is less than --replicas {config.replicas}")
    return least, most


def is_elastic(config: ServerConfig) -> bool:
    """Whether the number of replicas follows the load."""
    least, most = replica_bounds(config)
    return least < most


def describe_replicas(config: ServerConfig) -> str:
    """Such as "2 to 4 replicas on a Ray cluster"."""
    least, most = replica_bounds(config)
    number = f"{least} to {most}" if least < most else f"{most}"
    where = " on a Ray cluster" if config.cluster is not None else ""
    return f"{number} replicas{where}"


def _elastic_settings(config: ServerConfig) -> ElasticSettings:
    least, most = replica_bounds(config)
    return ElasticSettings(min_replicas=least, max_replicas=most)


# ---- Replicas on a Ray cluster. Ray is optional, so it is imported only when it is used.


class ClusterReplicas(ElasticReplicas):
    """Replicas on a Ray cluster. `close` also closes the connection to the cluster."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        on_final_death: Callable[[str], None],
        settings: ElasticSettings | None = None,
    ) -> None:
        from bros.transport.ray import RayEngineClient

        server = config.server
        settings = settings or _elastic_settings(server)
        nodes = cluster.nodes()
        allocation = allocation_of(config.engine, settings.max_replicas, nodes)
        check_room(allocation, server.replicas, nodes)

        def make(number: int, on_death: Callable[[str], None]) -> StartableClient:
            return RayEngineClient(
                cluster,
                allocation,
                config.engine,
                data_dir=server.data_dir,
                log_level=server.log_level,
                restart=server.on_engine_death == "restart",
                on_final_death=on_death,
            )

        super().__init__(
            *_router_parts(config),
            make,
            settings,
            server.replicas,
            on_final_death,
            replaces=server.on_engine_death == "restart",
        )
        self._cluster = cluster

    async def close(self) -> None:
        await super().close()
        self._cluster.close()


def connect_cluster(address: str) -> Cluster:
    """Raises ConfigError if Ray is not installed, cannot be loaded, or no cluster answers."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--cluster: Ray is not installed; try pip install 'bros[ray]'")
    try:
        from bros.transport.ray import Cluster
    except ImportError as error:
        raise ConfigError(f"--cluster: Ray cannot be loaded: {error}") from error
    return Cluster(address)
