"""Engines on a Ray cluster: its nodes, placement of replicas, and the client of such an engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import zmq
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.errors import BrosError, ConfigError, EngineDeadError
from bros.core.machine import module_command
from bros.core.stop_signals import signal_handlers_restored
from bros.engine.messages import Command, Submit
from bros.executor.model_store import cache_dir_of, resolve_model
from bros.profiling.profiles import profile_folders
from bros.transport.ipc import Endpoints, heartbeats
from bros.transport.node_allocation import NodeAllocation
from bros.transport.process import HEARTBEATS_PER_TIMEOUT, LaunchSpec
from bros.transport.process_client import HeartbeatMonitor, SupervisedClient

# ---- The actor of a replica on its node. It runs one engine and sends heartbeats.
#
# server process                       node
# RayEngineClient ── run(spec) ──────▶ EngineHost (actor) ──▶ engine process, or launcher of ranks
#       ▲  ▲                                │                            │
#       │  └───────── heartbeats ───────────┘                            │
#       └═══════════════════════ ZeroMQ, encrypted ══════════════════════╛


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What a host needs to start an engine.

    config: config.model may be a path on the host's node.
    data_dir: a path on the host's node.
    heartbeat_s: interval of the host's heartbeats.
    profile_before: see build_engine.
    """

    config: EngineConfig
    data_dir: str | None
    log_level: str
    endpoints: Endpoints
    heartbeat_s: float
    profile_before: str = ""


class EngineHost:
    """A Ray actor that runs one engine process.

    If the actor ends for any reason, the pipe to the process's stdin closes and the process exits.
    """

    def pid(self) -> int:
        return os.getpid()

    def run(self, spec: HostSpec) -> int:
        """Run an engine process until it ends; returns its exit status. Raises ModelError."""
        logging.basicConfig(level=spec.log_level.upper())
        # Readable by this user only.
        with tempfile.TemporaryDirectory(prefix="bros-", ignore_cleanup_errors=True) as name:
            folder = Path(name)
            spec.endpoints.write(folder)
            with heartbeats(folder, spec.heartbeat_s, host=True):  # a download may take long
                launch = _launch_of(spec)
                launch.write(folder)
                command = module_command(launch.module, name)
                with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
                    return process.wait()


def _launch_of(spec: HostSpec) -> LaunchSpec:
    cache_dir = cache_dir_of(spec.data_dir)
    files = resolve_model(spec.config.model, cache_dir, logger.info)
    return LaunchSpec(
        model_folder=str(files.folder),
        model_name=files.name,
        log_level=spec.log_level,
        config=spec.config,
        profiles=tuple(str(folder) for folder in profile_folders(cache_dir)),
        profile_before=spec.profile_before,
        starts_ranks=spec.config.tp > 1,
    )


# ---- The connection to a cluster.


def check_reachable(address: str, timeout_s: float) -> None:
    """Raise ConfigError if `address` is not host:port or nothing accepts a connection there."""
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        raise ConfigError(f"--cluster: {address!r} is not host:port, as `ray start` prints it")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s):
            pass
    except (OSError, OverflowError, UnicodeError) as error:
        message = f"--cluster: no Ray cluster answers at {address}: {error}"
        raise ConfigError(message) from error


_OBJECT_STORE_BYTES = 80 * 2**20
"""Object store of a cluster that this process starts: bros sends no objects through Ray."""

_CONNECT_TIMEOUT_S = 8.0
"""How long a cluster may take to accept a connection; Ray itself would wait silently."""

_WARN_AFTER_S = 10.0
"""Log a warning if a replica waits this long for a node."""


class NoRoomError(EngineDeadError):
    """No node has enough free resources for a replica."""


class RayPlacement:
    """Resources reserved on one node until `release`. If the node is lost, Ray finds another."""

    def __init__(self, allocation: NodeAllocation, timeout_s: float) -> None:
        """timeout_s: how long to wait for a node with room, after _WARN_AFTER_S."""
        # A single bundle is on one node, so the replica's ranks share a machine.
        bundle = {"CPU": float(allocation.cpus), "GPU": float(allocation.gpus)}
        resources = {name: amount for name, amount in bundle.items() if amount}
        self._allocation, self._timeout_s = allocation, timeout_s
        self._group = placement_group([resources], strategy="STRICT_PACK")

    async def start_host(self) -> Any:
        """Wait for a node and start an EngineHost actor there.

        The actor ends with this process (it is not detached). Ray does not restart it, because a
        new actor would have no HostSpec. Raises NoRoomError if no node has room in time.
        """
        waiting = asyncio.wrap_future(self._group.ready().future())
        # Retrieves the exception, so that asyncio does not log it if this call is cancelled.
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([waiting], timeout=_WARN_AFTER_S)
        if not waiting.done():
            logger.warning("a replica waits for a node with %s", self._allocation)
            await asyncio.wait([waiting], timeout=self._timeout_s)
        if not waiting.done():
            waiting.cancel()
            raise NoRoomError(f"No node has room for a replica with {self._allocation}.")
        await waiting
        strategy = PlacementGroupSchedulingStrategy(self._group)
        actor = ray.remote(EngineHost).options(
            num_cpus=self._allocation.cpus,
            num_gpus=self._allocation.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=strategy,
        )
        return actor.remote()

    def release(self) -> None:
        """Free the resources; Ray kills what runs there."""
        with contextlib.suppress(RayError):
            remove_placement_group(self._group)


class Cluster:
    """The connection to a Ray cluster; a process can have one."""

    def __init__(self, address: str) -> None:
        """address: of a cluster. "auto": the cluster of this machine, or else a new one that ends
        with this process.

        Raises ConfigError if no cluster answers there.
        """
        # A server must not send usage statistics to Ray.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if ray.is_initialized():
            return
        named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address
        if named not in ("", "auto", "local"):
            check_reachable(named, _CONNECT_TIMEOUT_S)
        try:
            with signal_handlers_restored():
                _connect_or_start(address, may_start=not named)
        except (OSError, RuntimeError, ValueError, RayError) as error:
            action = f"connect to {named}" if named else "start Ray"
            raise ConfigError(f"--cluster: cannot {action}: {error}") from error

    @property
    def address(self) -> str:
        """This machine's IP address within the cluster."""
        return str(get_node_ip_address())

    def nodes(self) -> list[tuple[int, int]]:
        """(CPUs, GPUs) of each node that is alive."""
        found = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        return [(int(have.get("CPU", 0)), int(have.get("GPU", 0))) for have in found]

    def close(self) -> None:
        """Disconnect. The actors of this process end."""
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
    logger.info("no Ray cluster is running: starting one that ends with this server")
    ray.init(
        include_dashboard=False,
        configure_logging=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


async def _call(method: Any, *arguments: object) -> Any:
    """Call a method of an actor. Raises what it raises, or EngineDeadError if the actor is dead."""
    try:
        return await method.remote(*arguments)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        logger.debug("an actor ended: %s", error)  # not raised: Ray adds a dozen lines of advice
        raise EngineDeadError("The replica's actor ended unexpectedly.") from error


# ---- The client of an engine on a cluster.


def _absolute(path: str) -> str:
    """The same path in another working directory. A ~ is for each node to expand."""
    return path if path.startswith("~") else os.path.abspath(path)


_GRACE_S = 10.0
"""How long an engine may take to end after Shutdown before it is killed."""

_HEARTBEAT_TIMEOUT_S = 0.75
"""After this time without a heartbeat, an actor and its node count as dead. Ray reports a dead
process at once, but a dead node only after many seconds."""

_PLACEMENT_TIMEOUT_S = 300.0
"""How long to wait for a node: an autoscaling cluster may have to start one first."""


class RayEngineClient(SupervisedClient):
    """Starts, watches and talks to one engine on a Ray cluster.

    Ray finds a node, starts an actor there and reports when it has ended. Requests and tokens do
    not pass through Ray: the engine connects to this process over ZeroMQ.
    """

    def __init__(
        self,
        cluster: Cluster,
        allocation: NodeAllocation,
        config: EngineConfig,
        *,
        data_dir: str | None = None,
        log_level: str = "info",
        restart: bool = True,
        on_final_death: Callable[[str], None] = lambda reason: None,
        heartbeat_timeout_s: float = _HEARTBEAT_TIMEOUT_S,
    ) -> None:
        """heartbeat_timeout_s: of the actor."""
        super().__init__(
            restart=restart,
            on_final_death=on_final_death,
            grace_s=_GRACE_S,
            rank_heartbeat_timeout_s=config.hang_timeout,
        )
        if config.model is not None and os.path.exists(config.model):  # else it is a hub id
            config = dataclasses.replace(config, model=_absolute(config.model))
        if not allocation.gpus:
            config = dataclasses.replace(config, threads=max(1, allocation.cpus // config.tp))
        self._cluster = cluster
        self._allocation = allocation
        self._config = config
        self._data_dir = None if data_dir is None else _absolute(data_dir)
        self._log_level = log_level
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._placement: RayPlacement | None = None
        self._killed = asyncio.Event()
        self.pid: int | None = None  # of the actor, while it runs

    def _send_command(self, command: Command) -> None:
        if isinstance(command, Submit):
            command = Submit(command.request, sent_s=SystemClock().now())
        super()._send_command(command)

    async def close(self) -> None:
        await super().close()
        if self._placement is not None:
            self._placement.release()
            self._placement = None

    def _kill(self) -> None:
        self._killed.set()

    async def _run_once(self) -> str:
        self._killed.clear()
        async with contextlib.AsyncExitStack() as stack:
            public, secret = zmq.curve_keypair()
            address = f"tcp://{self._cluster.address}:*"
            receiver = self._listen(stack, Endpoints(address, address, public.decode()), secret)
            running = asyncio.create_task(
                self._run_host(stack, receiver.endpoints), name="engine-host"
            )
            killed = asyncio.create_task(self._killed.wait())
            if self._closing:
                self._kill()
            try:
                await asyncio.wait([running, killed], return_when=asyncio.FIRST_COMPLETED)
                reason = running.result() if running.done() else "The replica was killed."
            finally:
                for task in (running, killed):
                    task.cancel()
                await asyncio.gather(running, killed, return_exceptions=True)
            await receiver.drain()
        return self._failure or reason

    async def _run_host(self, stack: contextlib.AsyncExitStack, endpoints: Endpoints) -> str:
        """Run an engine on a node until it ends; returns the reason."""
        self._placement = self._placement or RayPlacement(self._allocation, _PLACEMENT_TIMEOUT_S)
        spec = HostSpec(
            config=self._config,
            data_dir=self._data_dir,
            log_level=self._log_level,
            endpoints=endpoints,
            heartbeat_s=self._heartbeat_timeout_s / HEARTBEATS_PER_TIMEOUT,
            profile_before=self._profile,
        )
        try:
            host = await self._placement.start_host()
            stack.callback(self._kill_host, host)
            async with asyncio.timeout(_PLACEMENT_TIMEOUT_S):  # the node may be lost meanwhile
                self.pid = await _call(host.pid)
            self._host_heartbeats = HeartbeatMonitor(self._heartbeat_timeout_s)
            failure = f"The replica's node has not answered for {self._heartbeat_timeout_s:g} s."
            self._kill_on_timeout(stack, self._host_heartbeats, failure)
            code = await _call(host.run, spec)
        except NoRoomError as error:
            self._host_unavailable = True
            return str(error)
        except TimeoutError:
            self._host_unavailable = True
            return f"The replica's actor has not started for {_PLACEMENT_TIMEOUT_S:g} s."
        except BrosError as error:
            return str(error)
        return f"The replica's engine ended unexpectedly (code {code})."

    def _kill_host(self, host: Any) -> None:
        with contextlib.suppress(RayError):
            ray.kill(host, no_restart=True)
        self.pid = None
