"""The replicas of one machine: as many engine processes, behind one client."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import random
from collections.abc import Callable, Sequence

from bros.core.clock import SystemClock
from bros.core.config import Config, EngineConfig
from bros.router.client import RouterClient
from bros.router.fleet import Fleet, make_fleet
from bros.router.state import RouterSettings
from bros.scheduler.profiles import available_cores
from bros.transport.process_client import ProcessEngineClient

logger = logging.getLogger("bros.server")

MakeEngine = Callable[[int, EngineConfig, Callable[[str], None]], ProcessEngineClient]
"""Of the number of a replica, what it is told, and what it does if it does not come back."""


class LocalReplicas(RouterClient):
    """Starts config.server.replicas engine processes. Create it inside a running event loop."""

    def __init__(
        self, config: Config, make_engine: MakeEngine, on_final_death: Callable[[str], None]
    ) -> None:
        server = config.server
        super().__init__(
            new_fleet(config), SystemClock(), random.Random(config.engine.seed), on_final_death
        )
        engine = with_share_of_cores(config.engine, server.replicas, available_cores())
        self._engines: Sequence[ProcessEngineClient] = [
            make_engine(number, engine, functools.partial(self.mark_gone, number))
            for number in range(server.replicas)
        ]
        for client in self._engines:
            self.add(client, restart=client.restart)

    async def start(self) -> None:
        """Start all at once and wait until every model is loaded.

        Raises EngineDeadError with the reason if one does not come up.
        """
        starts = [asyncio.create_task(engine.start()) for engine in self._engines]
        try:
            await asyncio.gather(*starts)
        except BaseException:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
            raise
        self.replicas()  # all are up from now on


def new_fleet(config: Config) -> Fleet:
    """As the options say. Without a prefix cache nothing is where it was: requests go by load."""
    server, router = config.server, config.server.router
    if router == "e2" and config.engine.prefix_cache == "off":
        router = "least"
        logger.warning("--prefix-cache off: requests go to replicas as with --router least")
    if server.router_plan != "off" and router != "e2":
        logger.warning("--router-plan has no effect with --router %s", router)
    return make_fleet(router, RouterSettings(plan=server.router_plan))


def with_share_of_cores(config: EngineConfig, replicas: int, cores: int) -> EngineConfig:
    """The threads of one of several engines on so many cores."""
    if config.threads is not None:
        return config
    return dataclasses.replace(config, threads=max(1, cores // (replicas * config.tp)))
