"""What the routes share; built by the composition root, one per server."""

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
from bros.core.interfaces import EngineClient
from bros.core.request import IdGenerator
from bros.router.client import RouterClient
from bros.semantic.service.service import SessionService
from bros.server.operations.metrics import ServerMetrics
from bros.text.generation import TextGenerator, choice_ids
from bros.text.tokenizer import Tokenizer

# ---- Under which ids the engine knows the latest requests.


_CAPACITY = 4096
"""More than engines keep traces of, and less than a megabyte."""


class RecentRequests:
    """The prompts and choices of the latest requests, the oldest forgotten first."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._capacity = capacity
        self._shapes: OrderedDict[str, tuple[int, int]] = OrderedDict()

    def note(self, request_id: str, *, prompts: int, n: int) -> None:
        """A request of so many prompts with n choices each was accepted by the engine."""
        self._shapes[request_id] = (prompts, n)
        if len(self._shapes) > self._capacity:
            self._shapes.popitem(last=False)

    def parts(self, request_id: str) -> tuple[str, ...]:
        """What its choices are called in the engine, by index; the id itself if it is unknown."""
        return choice_ids(request_id, *self._shapes.get(request_id, (1, 1)))


# ---- What the routes for files and batches work with; built by the composition root.


T = TypeVar("T")


class BatchCounts:
    """How many batches there are. While the database hangs, one thread waits for it, however often
    a client asks and stops waiting."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[Mapping[str, int]] | None = None

    async def by_status(self, store: BatchStore) -> Mapping[str, int]:
        """Raises StoreError."""
        if self._asked is None or self._asked.done():
            self._asked = asyncio.ensure_future(anyio.to_thread.run_sync(store.count_by_status))
        return await asyncio.shield(self._asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """max_open: unfinished batches that one tenant may have."""

    files: FileStore
    batches: BatchStore
    runner: BatchRunner
    max_open: int
    counts: BatchCounts = field(default_factory=BatchCounts)
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(4))

    @classmethod
    def of(cls, request: Request) -> Jobs:
        """Those of the app that serves `request`."""
        jobs = request.app.state.server.jobs
        assert isinstance(jobs, cls)
        return jobs

    async def io(self, work: Callable[..., T], *args: Any) -> T:
        """Something that waits for the disk, on a thread."""
        return await anyio.to_thread.run_sync(work, *args, limiter=self.threads)


# ---- Who may use the server: one key for all, or one for each tenant.


TENANT = "bros.tenant"
"""Where a request's ASGI scope has the name of its tenant, empty if there is only one."""

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True, slots=True)
class Tenants:
    """keys: name -> key. Nobody needs one if there are none."""

    keys: Mapping[str, str]

    def find(self, key: bytes) -> str | None:
        """Whose key that is. Takes the same time whether it is nearly right or not."""
        found = None
        for name, expected in self.keys.items():
            if hmac.compare_digest(key, expected.encode()):
                found = name
        return found


def load_tenants(config: ServerConfig) -> Tenants:
    """--api-key, which belongs to the tenant without a name, and the lines of --api-keys.

    Raises ConfigError.
    """
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
            raise ConfigError(f"--api-keys: line {number} is not a NAME and a KEY")
        if words[0] in keys or words[1] in keys.values():
            raise ConfigError(f"--api-keys: the name or the key in line {number} is used twice")
        keys[words[0]] = words[1]
    if not keys:
        raise ConfigError("--api-keys: the file has no keys; leave it out for a server without")
    return Tenants(keys)


class StopSignal:
    """Given once, when the server ends open requests with an error. For one event loop."""

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
        """Have `listener` called once the signal is given; it must not have been."""
        self._listeners[listener] = None

    def unsubscribe(self, listener: Callable[[], None]) -> None:
        """Unknown ones are ignored."""
        self._listeners.pop(listener, None)


MAX_BODY_BYTES = 4 * 2**20
"""Larger requests get 413; a prompt of half a million token ids takes about that much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Everything the HTTP layer works with.

    model_name: the name in the API.
    created: Unix seconds, shown in /v1/models.
    jobs: files and batches, if the server has a place to keep them.
    sessions: programs of many calls, if the server takes them.
    replicas: the engine, if it is several.
    stopping: set it to end open requests with an error (see HttpServer).
    recent: which parts the latest requests have, for those who ask what became of them.
    threads: bounds work done beside the event loop, and with it memory.
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
    threads: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(2))

    @classmethod
    def of(cls, request: Request) -> ServerState:
        """The state of the app that serves `request`."""
        state = request.app.state.server
        assert isinstance(state, cls)
        return state

    @staticmethod
    def tenant(request: Request) -> str:
        """On whose behalf a request came; see Tenants. Files and batches belong to tenants."""
        tenant: str = request.scope.get(TENANT, "")
        return tenant

    def check_model(self, name: str | None) -> None:
        """Raise NotFoundError unless `name` is the served model; None means the served one."""
        if name is None or name in (self.model_name, self.engine.info.model):
            return
        raise NotFoundError(
            f"The model {name[:200]!r} does not exist; this server has {self.model_name!r}.",
            param="model",
            code="model_not_found",
        )
