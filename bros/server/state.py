"""The state that all routes of a server share; created in build.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from bros.batch.background import BackgroundRunner
from bros.batch.files import FileStore
from bros.batch.responses import ResponseStore
from bros.batch.runner import BatchRunner
from bros.batch.store import BatchStore
from bros.core.clock import Clock
from bros.core.config import ServerConfig
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.fair import FairGate, FairMemory, FairThreads
from bros.core.interfaces import EngineClient
from bros.core.request import Grammar, IdGenerator, ServiceClass
from bros.core.tenants import HeldElsewhere, Resource, TenantAccounts
from bros.router.client import RouterClient
from bros.semantic.service.service import SessionService
from bros.server.operations.metrics import ServerMetrics
from bros.server.responses.running import RunningResponses, WatchedResponses
from bros.server.tenants import TENANT
from bros.server.turns import LoopTurns
from bros.text.chat_format import ChatFormat
from bros.text.generation import TextGenerator, choice_ids
from bros.text.grammar_check import GrammarChecker
from bros.text.tokenizer import Tokenizer

# ---- The engine's ids of the latest requests, for traces.


_CAPACITY = 4096
"""More requests than an engine keeps traces of, in less than a megabyte."""

_SINGLE = (1, 1)
"""One prompt with one choice, as nearly all requests have; not remembered."""


class RecentRequests:
    """Numbers of prompts and choices of the latest requests that have several; the oldest are
    dropped."""

    def __init__(self, capacity: int = _CAPACITY) -> None:
        self._shapes: FairMemory[str, tuple[int, int]] = FairMemory(capacity)

    def note(self, tenant: str, request_id: str, *, prompts: int, n: int) -> None:
        """The engine has accepted a request with this many prompts and n choices each."""
        if (prompts, n) != _SINGLE:
            self._shapes.put(tenant, request_id, (prompts, n))

    def parts(self, request_id: str) -> tuple[str, ...]:
        """The engine's ids of its choices, by index; the id itself if the request is unknown."""
        return choice_ids(request_id, *(self._shapes.get(request_id) or _SINGLE))


# ---- Files and batches.


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoredFigures:
    """by_status: numbers of batches by status.
    usage: what the store holds for each tenant.
    is_full: whether its disk has no room for more.
    """

    by_status: Mapping[str, int]
    usage: Mapping[tuple[str, Resource], int]
    is_full: bool

    @classmethod
    def read(cls, batches: BatchStore, responses: ResponseStore) -> StoredFigures:
        """Blocking. Raises StoreError."""
        usage = {**batches.usage(), **responses.usage()}
        return cls(batches.count_by_status(), usage, responses.is_full)


class StoreQuery:
    """The figures of a store. Concurrent callers share one query, so that at most one thread waits
    for a database that hangs."""

    def __init__(self) -> None:
        self._asked: asyncio.Future[StoredFigures] | None = None

    async def figures(self, batches: BatchStore, responses: ResponseStore) -> StoredFigures:
        """Raises StoreError."""
        if self._asked is None or self._asked.done():
            reading = anyio.to_thread.run_sync(StoredFigures.read, batches, responses)
            self._asked = asyncio.ensure_future(reading)
        return await asyncio.shield(self._asked)


class StoredBytes:
    """Bytes of the files in a store: as last read, and what this server has added since.

    Uploads look here while they are received; reading the store for each piece would take long.
    """

    def __init__(self) -> None:
        self._of_tenants: dict[str, int] = {}
        self._of_all = 0

    def read(self, tenant: str, found: HeldElsewhere) -> None:
        """The store had these bytes."""
        self._of_tenants[tenant], self._of_all = found

    def add(self, tenant: str, num_bytes: int) -> None:
        """A file of the tenant, for which the store was read, is in the store now."""
        self._of_tenants[tenant] += num_bytes
        self._of_all += num_bytes

    def elsewhere(self, tenant: str) -> HeldElsewhere:
        """These bytes, for the accounts. tenant: one for which the store was read."""
        return HeldElsewhere(self._of_tenants[tenant], self._of_all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Jobs:
    """Files, batches and responses of a server.

    running: the background responses that run.
    watched: those that clients follow.
    threads: where `io` works.
    readers: where `read` works.
    """

    files: FileStore
    batches: BatchStore
    responses: ResponseStore
    runner: BatchRunner
    background: BackgroundRunner
    running: RunningResponses
    threads: FairGate
    readers: FairGate
    watched: WatchedResponses = field(default_factory=WatchedResponses)
    query: StoreQuery = field(default_factory=StoreQuery)
    stored_bytes: StoredBytes = field(default_factory=StoredBytes)

    @classmethod
    def of(cls, request: Request) -> Jobs:
        """The Jobs of the app that serves `request`."""
        jobs = request.app.state.server.jobs
        assert isinstance(jobs, cls)
        return jobs

    async def io(self, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """Do blocking work for a tenant on a thread, in turns with other tenants. Its CPU time
        counts; what may take long checks first whether the tenant has any."""
        return await self.threads.run(tenant, partial(work, *args))

    async def read(self, tenant: str, work: Callable[..., T], *args: Any) -> T:
        """Like `io`, of what only reads: it does not wait for those that write. Each of them waits
        for up to half a minute where another process has locked the store."""
        return await self.readers.run(tenant, partial(work, *args))

    async def run(self) -> None:
        """Run batches and background responses until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self.runner.run())
            group.create_task(self.background.run())


STORE_THREADS, STORE_THREADS_PER_TENANT = 4, 2
"""Threads that write the store for requests, and most of them for one tenant; as many read it."""


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


ARRIVAL_S = "bros.arrival_s"
"""Place in the scope of a request: when it arrived, before it waited for its turn."""

MAX_BODY_BYTES = 4 * 2**20
"""Larger bodies get status 413. A prompt of half a million token ids has about this size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Everything that routes use.

    chat_format: how the model writes tool calls and reasoning.
    model_name: the model's name in the API.
    created: Unix seconds, shown in /v1/models.
    jobs: files and batches; None if the server has no store.
    sessions: None if the server has no sessions.
    replicas: `engine`, if it is a router; else None.
    stopping: set by HttpServer to end open requests with an error.
    recent: for request traces.
    threads: where `offload` runs long work.
    turns: spreads short work over turns of the event loop.
    for_rows: whether this is the state of rows of batches, which begin beside the requests of
        their tenant and not before them.
    accounts: what is held for each tenant, and its limits.
    grammars: checks grammars of requests; None: only the engine does.
    """

    engine: EngineClient
    tokenizer: Tokenizer
    chat_format: ChatFormat
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
    turns: LoopTurns = field(default_factory=LoopTurns)
    for_rows: bool = False
    accounts: TenantAccounts = field(default_factory=TenantAccounts)
    grammars: GrammarChecker | None = None

    @classmethod
    def of(cls, request: Request) -> ServerState:
        """The state of the app that serves `request`."""
        state = request.app.state.server
        assert isinstance(state, cls)
        return state

    @staticmethod
    def arrival_s(request: Request) -> float:
        """When the request arrived, by the clock of the server."""
        arrival_s: float = request.scope[ARRIVAL_S]
        return arrival_s

    async def begin_work(self, tenant: str) -> None:
        """Wait until short work on an input of a tenant may begin, see LoopTurns."""
        await self.turns.begin((tenant, self.for_rows))

    async def begin_reply(self, tenant: str) -> None:
        """Wait until short work on a reply to a tenant may begin: the last tokens of a stream do
        not wait for hundreds of requests that arrive."""
        await self.turns.begin((tenant, self.for_rows, "reply"))

    @staticmethod
    def tenant(request: Request) -> str:
        """Name of the request's tenant, empty if there is only one. Tenants own files, batches,
        sessions, traces and cached KV."""
        tenant: str = request.scope.get(TENANT, "")
        return tenant

    async def check_grammar(
        self,
        tenant: str,
        grammar: Grammar | None,
        service_class: ServiceClass = ServiceClass.RT,
    ) -> float:
        """Check whether an engine can compile the grammar of an output; returns the seconds that
        this has taken.

        service_class: of its request; real-time ones go first.

        Raises InvalidRequestError if it cannot, and TenantLimitError if the tenant has too many or
        no CPU time for it.
        """
        if grammar is None or self.grammars is None or self.grammars.knows(tenant, grammar):
            return 0.0
        began_s = self.clock.now()
        self.accounts.check_cpu(tenant)
        with (
            self.accounts.hold(tenant, Resource.GRAMMARS),
            self.accounts.hold(tenant, Resource.INPUT_BYTES, len(grammar.text)),
        ):
            urgent = service_class is ServiceClass.RT
            await self.grammars.check(tenant, grammar, urgent=urgent)
        return self.clock.now() - began_s

    def check_generates(self) -> None:
        """Raises InvalidRequestError if the model generates no text."""
        if not self.engine.info.generates:
            raise InvalidRequestError(
                f"The model {self.model_name!r} generates no text; it serves /v1/embeddings, "
                "/v1/score and /v1/rerank.",
                param="model",
                code="model_not_supported",
            )

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError unless `name` is the served model or None."""
        if name is None or name in (self.model_name, self.engine.info.model):
            return
        raise NotFoundError(
            f"The model {name[:200]!r} does not exist; this server serves {self.model_name!r}.",
            param="model",
            code="model_not_found",
        )
