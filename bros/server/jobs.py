"""What the routes for files and batches work with; built by the composition root."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request

from bros.batch.files import FileStore
from bros.batch.jobs import BatchStore
from bros.batch.runner import BatchRunner

T = TypeVar("T")


class BatchCounts:
    """How many batches there are. While the database hangs, one thread waits for it, however often
    somebody asks and gives up."""

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
