"""The state that all routes of a server share; created in build.py."""

from __future__ import annotations

import asyncio
import hmac
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from bros.batch.files import FileStore
from bros.batch.runner import BatchRunner
from bros.batch.store import BatchStore
from bros.core.clock import Clock
from bros.core.config import ServerConfig
from bros.core.errors import ConfigError, NotFoundError
from bros.core.fair import FairThreads
from bros.core.interfaces import EngineClient
from bros.core.request import IdGenerator
from bros.router.client import RouterClient
from bros.semantic.service.service import SessionService
from bros.server.operations.metrics import ServerMetrics
from bros.text.generation import TextGenerator, choice_ids
from bros.text.tokenizer import Tokenizer

# ---- The engine's ids of the latest requests, for traces.


_CAPACITY = 4096
"""More requests than an engine keeps traces of, in less than a megabyte."""


class RecentRequests:
    """Numbers of prompts and choices of the latest requests; the oldest are dropped."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._shapes: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def note(self, request_id: str, *, prompts: int, n: int) -> None:
        """The engine has accepted a request with this many prompts and n choices each."""
        self._shapes[request_id] = (prompts, n)
        if len(self._shapes) > self._capacity:
            self._shapes.popitem(last=False)

    def parts(self, request_id: str) -> tuple[str, ...]:
        """The engine's ids of its choices, by index; the id itself if the request is unknown."""
        return choice_ids(request_id, *self._shapes.get(request_id, (1, 1)))


# ---- Files and batches.


T = TypeVar("T")


class BatchCounts:
    """Numbers of batches by status. Concurrent callers share one query, so that at most one thread
    waits for a database that hangs."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[Mapping[str, int]] | None = None

    async def by_status(self, store: BatchStore) -> Mapping[str, int]:
        """Raises StoreError."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(anyio.to_thread.run_sync(store.count_by_status))
        return await asyncio.shield(self._asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Files and batches of a server.

    max_open: most unfinished batches of a tenant.
    threads: limits the threads of `io`.
    """

    files: FileStore
    batches: BatchStore
    runner: BatchRunner
    max_open: int
    counts: BatchCounts = field(default_factory=BatchCounts)
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))

    @classmethod
    def of(cls, request: Request) -> Jobs:
        """The Jobs of the app that serves `request`."""
        jobs = request.app.state.server.jobs
        assert isinstance(jobs, cls)
        return jobs

    async def io(self, work: Callable[..., T], *args: Any) -> T:
        """Do blocking work on a thread."""
        return await anyio.to_thread.run_sync(work, *args, limiter=self.threads)


# ---- API keys: one for all, or one for each tenant.


TENANT = "bros.tenant"
"""Key in the ASGI scope of the tenant's name, which is empty if there is only one tenant."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tenants:
    """The tenants and their API keys.

    keys: name -> key. If it is empty, requests need no key.
    """

    keys: Mapping[str, str]

    def find(self, key: bytes) -> str | None:
        """Name of the tenant with a key, None if no tenant has it. The comparison takes constant
        time, so that timing does not reveal a key."""
        found = None
        for name, expected in self.keys.items():
            if hmac.compare_digest(key, expected.encode()):
                found = name
        return found


def load_tenants(config: ServerConfig) -> Tenants:
    """The tenants of --api-keys, and that of --api-key, whose name is empty. Raises ConfigError."""
    if config.metrics_access == "key" and not config.api_key:
        raise ConfigError("--metrics-access key: needs --api-key")
    keys = {"": config.api_key} if config.api_key else {}
    if config.api_keys is None:
        return Tenants(keys)
    try:
        lines = Path(config.api_keys).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-keys: cannot read {config.api_keys}: {error}") from error
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or not _NAME.fullmatch(words[0]):
            raise ConfigError(f"--api-keys: line {number} is not 'NAME KEY'")
        if words[0] in keys or words[1] in keys.values():
            raise ConfigError(f"--api-keys: the name or the key in line {number} is used twice")
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigError("--api-keys: the file has no keys; without the option none are needed")
    return Tenants(keys)


class StopSignal:
    """Set once, when the server ends open requests with an error. For one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[Callable[[], None], None] = {}
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        for listener in list(self._listeners):
            listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` when the signal is set. The signal must not be set yet."""
        self._listeners[listener] = None

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Unknown listeners are ignored."""
        self._listeners.pop(listener, None)


MAX_BODY_BYTES = 4 * 2**20
"""Larger bodies get status 413. A prompt of half a million token ids has about this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Everything that routes use.

    model_name: the model's name in the API.
    created: Unix seconds, shown in /v1/models.
    jobs: files and batches; None if the server has no store.
    sessions: None if the server has no sessions.
    replicas: `engine`, if it is a router; else None.
    stopping: set by HttpServer to end open requests with an error.
    recent: for request traces.
    threads: where `offload` runs long work.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    generator: TextGenerator
    model_name: str
    created: int
    config: ServerConfig
    clock: Clock
    ids: IdGenerator
    metrics: ServerMetrics
    jobs: Jobs | None = None
    sessions: SessionService | None = None
    replicas: RouterClient | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    stopping: StopSignal = field(default_factory=StopSignal)
    recent: RecentRequests = field(default_factory=RecentRequests)
    threads: FairThreads = field(default_factory=FairThreads)

    @classmethod
    def of(cls, request: Request) -> ServerState:
        """The state of the app that serves `request`."""
        state = request.app.state.server
        assert isinstance(state, cls)
        return state

    @staticmethod
    def tenant(request: Request) -> str:
        """Name of the request's tenant, empty if there is only one. Tenants own files, batches,
        sessions, traces and cached KV."""
        tenant: str = request.scope.get(TENANT, "")
        return tenant

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError unless `name` is the served model or None."""
        if name is None or name in (self.model_name, self.engine.info.model):
            return
        raise NotFoundError(
            f"The model {name[:200]!r} does not exist; this server serves {self.model_name!r}.",
            param="model",
            code="model_not_found",
        )
