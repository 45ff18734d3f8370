"""An engine in a Ray actor, on this machine or another one, watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import zmq

from bros.core.config import EngineConfig
from bros.core.errors import BrosError
from bros.engine.ipc import Wire
from bros.engine.launch import SIGNS
from bros.engine.ray_cluster import Cluster, NoRoomError, Place, call, end
from bros.engine.ray_host import Order
from bros.engine.share import Share
from bros.engine.supervised_client import Signs, SupervisedClient

logger = logging.getLogger(__name__)

_GRACE_S = 10.0
"""How long an engine may take to end after Shutdown before it is killed."""

_SILENCE_S = 0.75
"""An actor that gives no sign of life for so long is taken for dead, and its node as well: Ray says
at once that a process has ended, but of a node only after many seconds."""

_ROOM_S = 300.0
"""Clusters may have to start a node first."""


class RayEngineClient(SupervisedClient):
    """Starts, watches and talks to one engine on a Ray cluster.

    Ray finds a node, starts an actor there and says when it has ended. Requests and tokens do not
    go through it: the engine connects to this process.
    """

    def __init__(
        self,
        cluster: Cluster,
        share: Share,
        config: EngineConfig,
        *,
        data_dir: str | None = None,
        log_level: str = "info",
        restart: bool = True,
        on_final_death: Callable[[str], None] = lambda reason: None,
        silence_s: float = _SILENCE_S,
        room_s: float = _ROOM_S,
    ) -> None:
        """silence_s: see above. room_s: how long to wait for a node with room."""
        super().__init__(
            restart=restart,
            on_final_death=on_final_death,
            grace_s=_GRACE_S,
            rank_signs_s=config.tp_timeout,
        )
        if not share.gpus:
            config = dataclasses.replace(config, threads=max(1, share.cpus // config.tp))
        self._cluster = cluster
        self._share = share
        self._config = config
        self._data_dir = data_dir
        self._log_level = log_level
        self._silence_s, self._room_s = silence_s, room_s
        self._place: Place | None = None
        self._killed = asyncio.Event()
        self.pid: int | None = None  # of the actor, while there is one

    async def close(self) -> None:
        await super().close()
        if self._place is not None:
            self._place.give_back()
            self._place = None

    def _kill(self) -> None:
        self._killed.set()

    async def _run_once(self) -> str:
        self._killed.clear()
        async with contextlib.AsyncExitStack() as stack:
            public, secret = zmq.curve_keypair()
            address = f"tcp://{self._cluster.address}:*"
            receiver = self._listen(stack, Wire(address, address, public.decode()), secret)
            life = asyncio.create_task(self._live(stack, receiver.wire), name="engine-host")
            killed = asyncio.create_task(self._killed.wait())
            if self._closing:
                self._kill()
            await asyncio.wait([life, killed], return_when=asyncio.FIRST_COMPLETED)
            reason = life.result() if life.done() else "The replica was ended."
            for task in (life, killed):
                task.cancel()
            await asyncio.gather(life, killed, return_exceptions=True)
            await receiver.drain()
        return self._last_words or reason

    async def _live(self, stack: contextlib.AsyncExitStack, wire: Wire) -> str:
        self._place = self._place or Place(self._share, self._room_s)
        order = Order(
            config=self._config,
            data_dir=self._data_dir,
            log_level=self._log_level,
            wire=wire,
            signs_s=self._silence_s / SIGNS,
        )
        try:
            host = await self._place.host()
            stack.callback(self._forget, host)
            async with asyncio.timeout(self._room_s):  # the node may be lost meanwhile
                self.pid = await call(host.pid)
            self._host_signs = Signs(self._silence_s)
            words = f"The replica's node has not answered for {self._silence_s:g} s."
            self._watch(stack, self._host_signs, words)
            code = await call(host.run, order)
        except NoRoomError as error:
            self._no_fault = True
            return str(error)
        except TimeoutError:
            self._no_fault = True
            return f"The replica's actor has not come up for {self._room_s:g} s."
        except BrosError as error:
            return str(error)
        return f"The replica's engine ended unexpectedly (code {code})."

    def _forget(self, host: Any) -> None:
        end(host)
        self.pid = None
