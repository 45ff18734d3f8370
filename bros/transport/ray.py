"""A Ray cluster as bros sees it: what its nodes have, and places for replicas on them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import zmq
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bros.core.config import EngineConfig
from bros.core.errors import BrosError, ConfigError, EngineDeadError
from bros.executor.model_store import cache_dir_of, resolve_model
from bros.scheduler.profiles import profile_folders
from bros.transport.ipc import Wire, heartbeats
from bros.transport.node_allocation import NodeAllocation
from bros.transport.process import HEARTBEATS, LaunchSpec
from bros.transport.process_client import HeartbeatMonitor, SupervisedClient

# ---- What a replica's Ray actor does on its node: it runs one engine, and says that it is there.
#
# server process                       node
# RayEngineClient ── run(order) ─────▶ EngineHost (actor) ──▶ engine process, or launcher of ranks
#       ▲  ▲                                │                            │
#       │  └───────── heartbeats ───────────┘                            │
#       └═══════════════════════ ZeroMQ, encrypted ══════════════════════╛


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Order:
    """What a host is told. The model and data_dir mean what they mean on its node.

    heartbeat_s: how often it says that it is there.
    """

    config: EngineConfig
    data_dir: str | None
    log_level: str
    wire: Wire
    heartbeat_s: float


class EngineHost:
    """Has one process to look after. It ends when that ends, and the other way round: the process
    reads from a pipe of this one, which closes however this one ends."""

    def pid(self) -> int:
        return os.getpid()

    def run(self, order: Order) -> int:
        """One life of an engine; the exit status of its process. Raises ModelError."""
        logging.basicConfig(level=order.log_level.upper())
        # Readable by this user only.
        with tempfile.TemporaryDirectory(prefix="bros-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            order.wire.write(folder)
            with heartbeats(folder, order.heartbeat_s, host=True):  # a model may take long to come
                launch = _launch_of(order)
                launch.write(folder)
                command = [sys.executable, "-m", launch.module, name]
                with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                    return process.wait()


def _launch_of(order: Order) -> LaunchSpec:
    cache_dir = cache_dir_of(order.data_dir)
    files = resolve_model(order.config.model, cache_dir, logger.info)
    return LaunchSpec(
        model_folder=str(files.folder),
        model_name=files.name,
        log_level=order.log_level,
        config=order.config,
        profiles=tuple(str(folder) for folder in profile_folders(cache_dir)),
        starts_ranks=order.config.tp > 1,
        sends_heartbeats=True,
    )


# ---- What is looked after around Ray's own connecting.


_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def reach(address: str, limit_s: float) -> None:
    """Raises ConfigError if nothing listens at host:port, or says so for limit_s."""
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        raise ConfigError(f"--cluster: {address!r} is not host:port, as ray start says it")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s):
            pass
    except (OSError, OverflowError, UnicodeError) as error:
        message = f"--cluster: no Ray cluster answers at {address}: {error}"
        raise ConfigError(message) from error


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Signals do after the block what they did before it, and not what was set in it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # nothing can be set there
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # set by no Python, which could not set it again
                signal.signal(number, handler)


_OBJECT_STORE_BYTES = 80 * 2**20
"""Of a cluster that is started here: no objects go through Ray."""

_REACH_S = 8.0
"""How long a cluster may take to answer: Ray itself would wait without a word."""

_PATIENCE_S = 10.0
"""After which it is said that a replica waits for a place."""


class NoRoomError(EngineDeadError):
    """No node has what a replica needs, now."""


class Placement:
    """Reserved on one node until it is given back. If the node is lost, Ray finds another."""

    def __init__(self, share: NodeAllocation, limit_s: float) -> None:
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
        # A server does not report its usage.
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


# ---- An engine in a Ray actor, on this machine or another one, watched and restarted.


_GRACE_S = 10.0
"""How long an engine may take to end after Shutdown before it is killed."""

_SILENCE_S = 0.75
"""An actor that gives no heartbeat for so long is taken for dead, and its node as well: Ray says
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
        share: NodeAllocation,
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
            rank_heartbeat_timeout_s=config.tp_timeout,
        )
        if not share.gpus:
            config = dataclasses.replace(config, threads=max(1, share.cpus // config.tp))
        self._cluster = cluster
        self._share = share
        self._config = config
        self._data_dir = data_dir
        self._log_level = log_level
        self._silence_s, self._room_s = silence_s, room_s
        self._place: Placement | None = None
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
        self._place = self._place or Placement(self._share, self._room_s)
        order = Order(
            config=self._config,
            data_dir=self._data_dir,
            log_level=self._log_level,
            wire=wire,
            heartbeat_s=self._silence_s / HEARTBEATS,
        )
        try:
            host = await self._place.host()
            stack.callback(self._forget, host)
            async with asyncio.timeout(self._room_s):  # the node may be lost meanwhile
                self.pid = await call(host.pid)
            self._host_heartbeats = HeartbeatMonitor(self._silence_s)
            words = f"The replica's node has not answered for {self._silence_s:g} s."
            self._watch(stack, self._host_heartbeats, words)
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
