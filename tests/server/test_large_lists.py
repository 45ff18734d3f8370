"""Lists and vectors that are large: made and written on a thread, a part at a time."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from bros.batch.store import open_store
from bros.server.http import chunked
from support.scripted_server import Server
from support.session_server import SessionClient, keeping


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Threads that make large replies."""
    found = set[int]()

    def watched(make: Any) -> Any:
        for chunk in chunked(make):
            found.add(threading.get_ident())
            yield chunk

    monkeypatch.setattr("bros.server.http.chunked", watched)
    return found


async def test_lists_are_written_on_a_thread(tmp_path: Path, threads: set[int]) -> None:
    store = open_store(tmp_path)
    server = Server(jobs_in=store)
    async with server.http, keeping(server):
        for number in range(30):
            file = {"file": (f"{number}.jsonl", b"{}\n")}
            made = await server.http.post("/v1/files", files=file, data={"purpose": "batch"})
            batch = {"input_file_id": made.json()["id"], "endpoint": "/v1/completions"}
            await server.http.post("/v1/batches", json={**batch, "completion_window": "24h"})
            await SessionClient.open(server.http)
        for path in ("/v1/files", "/v1/batches?limit=100", "/v1/sessions"):
            reply = (await server.http.get(path)).json()
            assert len(reply["data"]) == 30 and reply["data"][0]["id"]
            assert threads and threading.get_ident() not in threads
            threads.clear()
    store.close()


async def test_traces_of_many_choices_are_asked_for_some_at_a_time(
    server: Server, threads: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = most = 0
    trace = server.engine.trace

    async def watched(request_id: str) -> Any:
        nonlocal asked, most
        asked += 1
        most = max(most, asked)
        try:
            return await trace(request_id)
        finally:
            asked -= 1

    monkeypatch.setattr(server.engine, "trace", watched)
    reply = (await server.complete(n=60, max_tokens=1)).json()
    await server.http.get(f"/v1/requests/{reply['id']}/trace")
    assert 0 < most <= 50


@pytest.mark.parametrize("part", ["items", "content parts"])
async def test_responses_have_as_many_parts_as_chats_may(tmp_path: Path, part: str) -> None:
    store = open_store(tmp_path)
    server = Server(jobs_in=store)
    text = {"type": "reasoning_text", "text": ""}
    items: list[Any] = [{"type": "reasoning", "content": [text] * 10_001}]
    if part == "items":
        items = [{"type": "reasoning", "content": []}] * 10_001
    body = {"input": [*items, {"role": "user", "content": "x"}]}
    async with server.http:
        refused = await server.http.post("/v1/responses", json=body)
    store.close()
    assert refused.status_code == 400
    assert part in refused.json()["error"]["message"]
    assert refused.json()["error"]["param"] == "input"


async def test_a_tenant_does_not_wait_for_what_others_read_of_the_store(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    server = Server(jobs_in=store)
    jobs, goes_on = server.state.jobs, threading.Event()
    assert jobs is not None

    slow = [asyncio.ensure_future(jobs.io("ann", goes_on.wait)) for _ in range(20)]
    try:
        async with asyncio.timeout(20):
            assert await jobs.io("bob", lambda: "read") == "read"
    finally:
        goes_on.set()
    await asyncio.gather(*slow)
    store.close()


async def test_reads_of_the_store_do_not_wait_for_writes(tmp_path: Path) -> None:
    """Not even those of the same tenant: each write waits long where another process has locked the
    store, and all clients without keys are one tenant."""
    store = open_store(tmp_path)
    server = Server(jobs_in=store)
    jobs, goes_on = server.state.jobs, threading.Event()
    assert jobs is not None
    async with server.http:
        made = await server.http.post("/v1/responses", json={"input": "x"})
        writes = [asyncio.ensure_future(jobs.io("", goes_on.wait)) for _ in range(20)]
        await asyncio.sleep(0)
        path = f"/v1/responses/{made.json()['id']}"
        try:
            async with asyncio.timeout(20):
                for read in (path, f"{path}/input_items", "/v1/batches", "/v1/files"):
                    assert (await server.http.get(read)).status_code == 200
        finally:
            goes_on.set()
        await asyncio.gather(*writes)
    store.close()


async def test_conversations_are_read_within_the_cpu_time_of_their_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key max_cpu_seconds=1\nbob bob-key")
    store = open_store(tmp_path / "store")
    server = Server(jobs_in=store, api_keys=str(keys))
    statuses = {}
    async with server.http:
        for tenant in ("ann", "bob"):
            headers = {"authorization": f"Bearer {tenant}-key"}
            made = await server.http.post("/v1/responses", json={"input": "x"}, headers=headers)
            server.accounts.spend(tenant, 20.0)
            path = f"/v1/responses/{made.json()['id']}"
            follows = {"input": "y", "previous_response_id": made.json()["id"]}
            statuses[tenant] = [
                (await server.http.get(f"{path}/input_items", headers=headers)).status_code,
                (
                    await server.http.post("/v1/responses", json=follows, headers=headers)
                ).status_code,
                (await server.http.get(path, headers=headers)).status_code,
            ]
    store.close()
    assert statuses == {"ann": [429, 429, 200], "bob": [200, 200, 200]}
