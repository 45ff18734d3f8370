"""The runner of batches: what the batches of one tenant leave to those of others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from typing import Any

from bros.batch.objects import Batch, BatchStatus
from bros.batch.rows import RowFacts, RowReply
from bros.batch.runner import BatchRunner, RunnerSettings
from bros.core.clock import SystemClock
from bros.core.interfaces import EngineStats
from bros.core.request import IdGenerator, Slo
from bros.core.tenants import NO_LIMITS, TenantLimits
from support.batch_store import NOW, Store
from support.crash import input_lines

_CHECK_S = 0.05
"""How long a row of ann takes to check."""


class _Clock(SystemClock):
    """Unix time begins when tests do."""

    def __init__(self) -> None:
        self._ahead_s = NOW - self.now()

    def unix_time(self) -> float:
        return self.now() + self._ahead_s


class _Rows:
    """A RowHandler. reply_bytes: of each answer."""

    def __init__(self, reply_bytes: int = 10) -> None:
        self.checked: list[str] = []
        self.answered: list[str] = []
        self._reply_bytes = reply_bytes

    def check(self, tenant: str, endpoint: str, body: dict[str, Any]) -> RowFacts:
        if tenant == "ann":
            time.sleep(_CHECK_S)
        self.checked.append(tenant)
        return RowFacts("m", body["prompt"])

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, slo: Slo
    ) -> RowReply:
        self.answered.append(body["prompt"])
        await asyncio.sleep(0)
        return RowReply(200, json.dumps({"text": "x" * self._reply_bytes}))


async def _idle() -> EngineStats:
    return EngineStats()


@contextlib.asynccontextmanager
async def _running(
    store: Store, rows: _Rows, limits: TenantLimits = NO_LIMITS
) -> AsyncIterator[BatchRunner]:
    """A runner that runs during the block. limits: of each tenant."""
    settings = RunnerSettings(model="", lease_s=15.0, poll_s=0.02)
    ids = IdGenerator(random.Random(0))
    runner = BatchRunner(
        store.batches, store.files, rows, _idle, _Clock(), ids, settings, lambda tenant: limits
    )
    running = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _submit(store: Store, tenant: str, num_rows: int) -> str:
    content = input_lines([f"{tenant}.{number}" for number in range(1, num_rows + 1)])
    store.put_file(content, file_id=f"file-{tenant}", tenant=tenant)
    return store.put_batch(f"batch_{tenant}", tenant=tenant, content=content).id


async def _until_final(store: Store, tenant: str, batch_id: str) -> Batch:
    async with asyncio.timeout(20.0):
        while True:
            batch = store.batches.get(tenant, batch_id)
            if batch.status.is_final:
                return batch
            await asyncio.sleep(0.01)


async def test_a_large_file_of_one_tenant_is_validated_in_turns_with_those_of_others(
    store: Store,
) -> None:
    slow, quick = _submit(store, "ann", 200), _submit(store, "bob", 3)
    rows = _Rows()
    async with _running(store, rows):
        found = await _until_final(store, "bob", quick)
        assert found.status is BatchStatus.COMPLETED
        assert store.batches.get("ann", slow).status is BatchStatus.VALIDATING
        assert rows.checked.count("ann") < 50
