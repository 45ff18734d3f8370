"""Replicas whose number changes, and replicas on a Ray cluster."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from bros.core.clock import Clock, SystemClock
from bros.core.config import Config, ServerConfig
from bros.core.errors import ConfigError
from bros.router.elastic import ElasticReplicas, ElasticSettings, MakeClient, StartableClient
from bros.router.fleet import Fleet
from bros.scheduler.profiles import available_cores
from bros.server.replicas import MakeEngine, new_fleet, with_share_of_cores
from bros.transport.node_allocation import allocation_of, check_room

if TYPE_CHECKING:
    from bros.transport.ray import Cluster


def bounds_of(config: ServerConfig) -> tuple[int, int]:
    """The fewest and the most replicas. Raises ConfigError if --replicas is not between them."""
    least = config.replicas if config.min_replicas is None else config.min_replicas
    most = config.replicas if config.max_replicas is None else config.max_replicas
    if config.min_replicas is not None and config.max_replicas is not None and least > most:
        raise ConfigError(f"--min-replicas: {least} are more than --max-replicas {most}")
    if least > config.replicas:
        raise ConfigError(f"--min-replicas: {least} are more than --replicas {config.replicas}")
    if most < config.replicas:
        raise ConfigError(f"--max-replicas: {most} are fewer than --replicas {config.replicas}")
    return least, most


def is_elastic(config: ServerConfig) -> bool:
    least, most = bounds_of(config)
    return least < most


def many(config: ServerConfig) -> str:
    """How many there are, in words."""
    least, most = bounds_of(config)
    number = f"{least} to {most}" if least < most else f"{most}"
    where = " on a Ray cluster" if config.cluster is not None else ""
    return f"{number} replicas{where}"


class ClusterReplicas(ElasticReplicas):
    """Replicas on a Ray cluster. The connection ends with them."""

    def __init__(
        self,
        config: Config,
        cluster: Cluster,
        on_final_death: Callable[[str], None],
        settings: ElasticSettings | None = None,
    ) -> None:
        # Late: Ray need not be there.
        from bros.transport.ray import RayEngineClient

        server = config.server
        settings = settings or settings_of(server)
        nodes = cluster.nodes()
        share = allocation_of(config.engine, settings.max_replicas, nodes)
        check_room(share, server.replicas, nodes)

        def make(place: int, on_death: Callable[[str], None]) -> StartableClient:
            return RayEngineClient(
                cluster,
                share,
                config.engine,
                data_dir=server.data_dir,
                log_level=server.log_level,
                restart=server.on_engine_death == "restart",
                on_final_death=on_death,
            )

        super().__init__(
            *_parts(config),
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


def connect(address: str) -> Cluster:
    """Raises ConfigError if Ray is not installed or does not work, or no cluster answers."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--cluster: Ray is not installed; try pip install 'bros[ray]'")
    try:
        # Late: Ray need not be there.
        from bros.transport.ray import Cluster
    except ImportError as error:
        raise ConfigError(f"--cluster: Ray cannot be loaded: {error}") from error
    return Cluster(address)


def elastic_here(
    config: Config, make_engine: MakeEngine, on_final_death: Callable[[str], None]
) -> ElasticReplicas:
    """Processes of this machine, as many as it takes."""
    settings = settings_of(config.server)
    engine = with_share_of_cores(config.engine, settings.max_replicas, available_cores())

    def make(place: int, on_death: Callable[[str], None]) -> StartableClient:
        return make_engine(place, engine, on_death)

    make_client: MakeClient = make
    first = config.server.replicas
    replaces = config.server.on_engine_death == "restart"
    parts = _parts(config)
    return ElasticReplicas(*parts, make_client, settings, first, on_final_death, replaces=replaces)


def settings_of(config: ServerConfig) -> ElasticSettings:
    least, most = bounds_of(config)
    return ElasticSettings(min_replicas=least, max_replicas=most)


def _parts(config: Config) -> tuple[Fleet, Clock, random.Random]:
    return new_fleet(config), SystemClock(), random.Random(config.engine.seed)
