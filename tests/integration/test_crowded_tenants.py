"""One key takes what it can get, in the sizes of attack 7: what is left to another one.

How fast the machine is does not matter: another key's work is done long before that of the first.
The fast tier has smaller ones in tests/server/test_tenants.py and test_all_limits.py, and in
tests/scheduler/test_tenants.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence

import httpx
import pytest

from support.scripted_server import assert_envelope
from support.server_process import ServerProcess, running_server
from support.session_server import ok
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.long, pytest.mark.slow, pytest.mark.multiprocess]

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": "Say", "max_tokens": 16, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tiny")
    save_chat_llama(folder)
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ann ann-key\nbob bob-key\n")
    options = ("--threads", "1", "--kv-blocks", "512", "--api-keys", str(keys))
    with running_server(str(folder), *options) as server:
        yield server


@contextlib.asynccontextmanager
async def clients(server: ServerProcess) -> AsyncIterator[list[httpx.AsyncClient]]:
    """Of ann, and of bob."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                httpx.AsyncClient(
                    base_url=server.url,
                    headers={"authorization": f"Bearer {name}-key"},
                    timeout=300,
                    limits=httpx.Limits(max_connections=None),
                )
            )
            for name in ("ann", "bob")
        ]


async def submit(client: httpx.AsyncClient, rows: int) -> str:
    """The path of a new batch with so many rows."""
    # So long that a batch takes longer than its way into the engine.
    row = {"method": "POST", "url": COMPLETIONS, "body": {**SHORT, "max_tokens": 150}}
    lines = [json.dumps({"custom_id": f"{number}", **row}) for number in range(rows)]
    files = {"file": ("rows.jsonl", "\n".join(lines).encode())}
    file = ok(await client.post("/v1/files", files=files, data={"purpose": "batch"}))
    wanted = {"endpoint": COMPLETIONS, "completion_window": "24h", "input_file_id": file["id"]}
    return f"/v1/batches/{ok(await client.post('/v1/batches', json=wanted))['id']}"


async def completed(client: httpx.AsyncClient, batch: str) -> tuple[str, int]:
    """Status and number of completed rows."""
    found = ok(await client.get(batch))
    return found["status"], found["request_counts"]["completed"]


async def until_rows(client: httpx.AsyncClient, batch: str, rows: int) -> None:
    async with asyncio.timeout(300):
        while (await completed(client, batch))[1] < rows:
            await asyncio.sleep(0.01)


def unfinished(tasks: Sequence[asyncio.Task[httpx.Response]]) -> int:
    return sum(not task.done() for task in tasks)


async def test_a_batch_of_5_rows_does_not_wait_for_600_of_another_key(
    server: ServerProcess,
) -> None:
    async with clients(server) as (ann, bob):
        large = await submit(ann, 600)
        await until_rows(ann, large, 1)
        before = (await completed(ann, large))[1]
        await until_rows(bob, await submit(bob, 5), 5)
        assert (await completed(ann, large))[1] - before < 300
        await until_rows(ann, large, 600)


async def test_a_best_effort_request_does_not_wait_for_100_of_another_key(
    server: ServerProcess,
) -> None:
    async with clients(server) as (ann, bob):
        body = {"prompt": "Say", "max_tokens": 400, "ignore_eos": True, "service_tier": "flex"}
        many = [asyncio.create_task(ann.post(COMPLETIONS, json=body)) for _ in range(100)]
        await asyncio.wait(many, return_when=asyncio.FIRST_COMPLETED)
        before = unfinished(many)
        ok(await bob.post(COMPLETIONS, json={**SHORT, "service_tier": "flex"}))
        assert unfinished(many) > before / 2
        assert Counter(each.status_code for each in await asyncio.gather(*many)) == {200: 100}


async def test_600_real_time_requests_of_a_key_leave_places_to_another_one(
    server: ServerProcess,
) -> None:
    async with clients(server) as (ann, bob):
        body = {**SHORT, "max_tokens": 200}
        many = [asyncio.create_task(ann.post(COMPLETIONS, json=body)) for _ in range(600)]
        refused = None
        for task in asyncio.as_completed(many):
            if (response := await task).status_code != 200:
                refused = response
                break
        assert refused is not None
        ok(await bob.post(COMPLETIONS, json=SHORT))
        assert unfinished(many) > 0
        assert assert_envelope(refused, 429)["code"] == "tenant_limit_exceeded"
        assert refused.headers["retry-after"] == "1"
        statuses = Counter(each.status_code for each in await asyncio.gather(*many))
        assert statuses.keys() == {200, 429} and statuses[200] >= 256


async def test_all_sessions_that_a_key_may_open_leave_as_many_to_another_one(
    server: ServerProcess,
) -> None:
    async with clients(server) as (ann, bob):
        answers = [await ann.post("/v1/sessions", json={}) for _ in range(501)]
        opened = [ok(each)["id"] for each in answers[:500]]
        assert assert_envelope(answers[-1], 429)["code"] == "tenant_limit_exceeded"
        assert answers[-1].headers["retry-after"] == "60"
        for _ in range(500):
            ok(await bob.post("/v1/sessions", json={}))
        ok(await ann.delete(f"/v1/sessions/{opened[0]}"))
        ok(await ann.post("/v1/sessions", json={}))
