"""The backend for an engine in this process, without a server."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.executor.model_store import cache_dir_of
from bros.semantic.client.connection import Backend
from bros.semantic.schema import CallSpec, Criteria, SharingMode, SubmittedCall, to_json
from bros.semantic.service.live import SessionSettings
from bros.semantic.service.service import SessionService
from bros.transport.local import open_local

_TENANT = ""


class LocalBackend:
    """A Backend over a service on the same event loop."""

    def __init__(self, service: SessionService) -> None:
        self._service = service

    async def create(
        self,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        sharing: SharingMode,
        metadata: Mapping[str, str],
    ) -> str:
        view = self._service.create(
            _TENANT,
            criteria=criteria,
            ttl_s=ttl_s,
            scope=tenant,
            sharing=sharing,
            metadata=metadata,
        )
        return view.id

    async def submit(
        self, session_id: str, calls: Sequence[CallSpec], key: str
    ) -> Sequence[SubmittedCall]:
        return await self._service.accept(_TENANT, session_id, calls, key)

    async def declare(
        self, session_id: str, variable_id: str, name: str, value: str | None
    ) -> None:
        self._service.declare(_TENANT, session_id, name, value, variable_id)

    async def set(self, session_id: str, variable_id: str, value: str) -> None:
        self._service.set(_TENANT, session_id, variable_id, value)

    async def fail(self, session_id: str, request_id: str, message: str) -> None:
        self._service.fail(_TENANT, session_id, request_id, message)

    async def want(self, session_id: str, variable_id: str, criteria: Criteria) -> None:
        self._service.want(_TENANT, session_id, variable_id, criteria)

    async def get(
        self, session_id: str, variable_id: str, criteria: Criteria, timeout_s: float
    ) -> str:
        view = await self._service.get(_TENANT, session_id, variable_id, criteria, timeout_s)
        assert view.value is not None
        return view.value

    async def stream(
        self, session_id: str, variable_id: str, criteria: Criteria
    ) -> AsyncGenerator[str, None]:
        pieces = self._service.stream(_TENANT, session_id, variable_id, criteria)
        try:
            async for piece in pieces:
                yield piece
        finally:
            if isinstance(pieces, AsyncGenerator):
                await pieces.aclose()

    async def cancel(self, session_id: str, request_id: str) -> None:
        self._service.cancel(_TENANT, session_id, request_id)

    async def inspect(self, session_id: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = to_json(await self._service.view(_TENANT, session_id))
        return found

    async def delete(self, session_id: str) -> None:
        await self._service.delete(_TENANT, session_id)


@contextlib.asynccontextmanager
async def serve_locally(service: SessionService) -> AsyncIterator[Backend]:
    """A backend of this service, which runs until the block ends."""
    running = asyncio.create_task(service.run())
    try:
        yield LocalBackend(service)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def open_engine(
    model: str | None, data_dir: str | Path | None, options: Mapping[str, Any]
) -> Callable[[], AbstractAsyncContextManager[Backend]]:
    """A factory of context managers that load a model and run its engine.

    options: fields of EngineConfig. Raises ConfigError for wrong values, TypeError for unknown
    names.
    """
    config = EngineConfig(model=model, **options)
    cache_dir = cache_dir_of(data_dir)

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[Backend]:
        async with open_local(config, cache_dir) as engine:
            service = SessionService(
                engine.generator,
                engine.client,
                engine.tokenizer,
                SystemClock(),
                engine.ids,
                SessionSettings(),
            )
            async with serve_locally(service) as backend:
                yield backend

    return opening
