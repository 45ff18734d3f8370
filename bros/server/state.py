"""What the routes share; built by the composition root, one per server."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import anyio
from starlette.requests import Request

from bros.core.clock import Clock
from bros.core.config import ServerConfig
from bros.core.errors import NotFoundError
from bros.core.ids import IdGenerator
from bros.core.interfaces import EngineClient
from bros.engine.generation import TextGenerator
from bros.engine.tokenizer import Tokenizer
from bros.router.client import RouterClient
from bros.semantic.service import SessionService
from bros.server.jobs import Jobs
from bros.server.metrics import ServerMetrics
from bros.server.recent import RecentRequests
from bros.server.tenants import TENANT

MAX_BODY_BYTES = 4 * 2**20
"""Larger requests get 413; a prompt of half a million token ids takes about that much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerState:
    """Everything the HTTP layer works with.

    model_name: the name in the API. created: Unix seconds, shown in /v1/models.
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
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
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
