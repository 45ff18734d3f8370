"""Keys and tenants: which clients may use the server, and that none sees what belongs to others."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from bros.batch.store import open_store
from bros.core.config import RT_SLOWDOWN, WEIGHT, EngineConfig, ServerConfig
from bros.core.errors import ConfigError
from bros.core.interfaces import ClassStats, EngineStats, RequestTrace
from bros.core.request import ServiceClass, Slo
from bros.core.tenants import Resource
from bros.server.app import duration
from bros.server.tenants import Tenants, load_tenants, public_texts
from support.batch_server import BatchServer, batch_server, jsonl, openai_client, row, until
from support.scripted_server import HeldBody, Server, assert_envelope

_UNKNOWN = (
    "The request 'unknown' is unknown; the server keeps traces of running and recent requests only."
)

KEYS = """
# name  key
ann     ann-key
bob\tbob-key

  cid  \u00e9-key
"""


@pytest.fixture
def keys(tmp_path: Path) -> str:
    path = tmp_path / "keys"
    path.write_text(KEYS, encoding="utf-8")
    return str(path)


@pytest.fixture
async def server(tmp_path: Path, keys: str) -> AsyncIterator[BatchServer]:
    """Its own client is ann's."""
    async with batch_server(tmp_path, key="ann-key", api_keys=keys, batch_max_open=2) as made:
        yield made


@pytest.fixture
async def bob(server: BatchServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(server.live.url, "bob-key") as client:
        yield client


# --api-key and --api-keys


def load(tmp_path: Path, content: str | bytes, api_key: str | None = None) -> Tenants:
    path = tmp_path / "keys"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return load_tenants(ServerConfig(api_keys=str(path), api_key=api_key))


def test_each_key_has_a_name(tmp_path: Path) -> None:
    tenants = load(tmp_path, KEYS, api_key="one-key")
    found = {key: tenants.find(key.encode()) for key in ("ann-key", "bob-key", "é-key", "one-key")}
    assert found == {"ann-key": "ann", "bob-key": "bob", "é-key": "cid", "one-key": ""}
    for wrong in (b"", b"ann", b"ann-ke", b"ann-key ", b"ANN-KEY", b"\xff"):
        assert tenants.find(wrong) is None


def test_a_tenant_may_have_several_keys(tmp_path: Path) -> None:
    tenants = load(tmp_path, "ann old weight=3 max_files=2\nbob other\nann new")
    assert [tenants.find(key) for key in (b"old", b"new", b"other")] == ["ann", "ann", "bob"]
    assert (tenants.weights, tenants.limits["ann"]) == ({"ann": 3.0}, {"files": 2})


def test_weights_and_slowdowns_of_keys_are_the_engine_s_and_options_change_those_they_name(
    tmp_path: Path,
) -> None:
    tenants = load(
        tmp_path, "ann key weight=3 max_files=2\nbob other rt_slowdown=2\ncid third weight=0.25"
    )
    assert tenants.limits["ann"] == {"files": 2}
    config = tenants.with_numbers(EngineConfig())
    assert WEIGHT.parse_all(config.tenant_weights) == {"ann": 3.0, "cid": 0.25}
    assert RT_SLOWDOWN.parse_all(config.tenant_rt_slowdowns) == {"bob": 2.0}
    given = EngineConfig(tenant_weights="bob=2,cid=1", tenant_rt_slowdowns="bob=3")
    config = tenants.with_numbers(given)
    assert WEIGHT.parse_all(config.tenant_weights) == {"ann": 3.0, "bob": 2.0, "cid": 1.0}
    assert RT_SLOWDOWN.parse_all(config.tenant_rt_slowdowns) == {"bob": 3.0}
    for unknown in ({"tenant_weights": "anna=2"}, {"tenant_rt_slowdowns": "ann=2,anna=2"}):
        with pytest.raises(ConfigError, match="^--tenant-.*: --api-keys has no tenant 'anna'"):
            tenants.with_numbers(EngineConfig(**unknown))
    with pytest.raises(ConfigError, match="--api-keys has no tenant 'ann'"):
        Tenants({}).with_numbers(EngineConfig(tenant_weights="ann=2"))
    with pytest.raises(ConfigError, match="--tenant-weights: 'ann' is not NAME=N, with a weight"):
        EngineConfig(tenant_weights="ann")
    assert Tenants({}).with_numbers(EngineConfig()) == EngineConfig()
    with pytest.raises(ConfigError, match="--tenant-weights: 'x' is not a weight"):
        EngineConfig(tenant_weights="bob=x")


def test_without_keys_there_is_one_tenant() -> None:
    assert not load_tenants(ServerConfig()).keys
    assert load_tenants(ServerConfig(api_key="one")).keys == {"": ["one"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("ann", r"line 1 is not 'NAME KEY \[weight=N\] \[rt_slowdown=N\] \[LIMIT=N ...\]'"),
        (
            "ann key more",
            "line 1: 'more' is not weight=N, rt_slowdown=N or LIMIT=N with a limit of max_requests",
        ),
        (
            "# well\nann key sessions=3",
            "line 2: 'sessions=3' is not weight=N, rt_slowdown=N or LIMIT=N",
        ),
        (
            "ann key max_session=3",
            "line 1: 'max_session=3' is not weight=N, rt_slowdown=N or LIMIT=N",
        ),
        ("ann key max_files=3 max_files=4", "line 1: max_files is given twice"),
        ("ann key weight=3 weight=4", "line 1: weight is given twice"),
        ("ann key weight=0", "line 1: '0' is not a weight from 0.01 to 100"),
        ("ann key weight=nan", "line 1: 'nan' is not a weight"),
        ("ann key rt_slowdown=0.5", "line 1: '0.5' is not a slowdown from 1 to 1000"),
        ("ann key rt_slowdown=2 rt_slowdown=3", "line 1: rt_slowdown is given twice"),
        (
            "ann key max_files=0",
            "line 1: max_files must be a whole number from 1, or none; got '0'",
        ),
        ("ann key max_files=2GiB", "line 1: max_files must be a whole number"),
        ("ann key max_files", "line 1: max_files must be a whole number"),
        ("ann key max_file_bytes=2Gulps", "line 1: max_file_bytes: '2Gulps' is not a size"),
        ("# well\n\na/b key", "line 3 is not"),
        (f"{'a' * 65} key", "line 1 is not"),
        ("ann weight=3", "line 1 has 'weight=3' in the place of a key"),
        ("ann max_requests=5", "line 1 has 'max_requests=5' in the place of a key"),
        ("ann #key", "line 1 has '#key' in the place of a key"),
        ("ann key\u200b", "line 1 has invisible characters"),
        ("ann key\0", "line 1 has invisible characters"),
        ("ann key\nann key", "line 2 is used twice"),
        ("ann key\nann other max_files=1", "line 2 has options; those of ann are in its first"),
        ("ann key\nbob key", "line 2 is used twice"),
        ("", "no keys"),
        ("# ann key\n", "no keys"),
        (b"ann \xff", "cannot read"),
    ],
)
def test_wrong_files_are_explained(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        load(tmp_path, content)
    assert str(error.value).startswith("--api-keys: ")


def test_the_one_key_is_no_other_tenants(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="twice"):
        load(tmp_path, "ann key", api_key="key")


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match="cannot read"):
            load_tenants(ServerConfig(api_keys=str(path)))


# The file changes


LOOK_S = 0.02


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("bros.server.tenants._LOOK_S", LOOK_S)
    caplog.set_level(logging.INFO, logger="bros.server.tenants")


@contextlib.asynccontextmanager
async def looked_after(server: Server) -> AsyncIterator[None]:
    """The server looks whether its file of keys has changed, as a running one does."""
    task = asyncio.create_task(server.tenants.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def status_of(server: Server, key: str) -> int:
    headers = {"authorization": f"Bearer {key}"}
    return (await server.http.get("/v1/models", headers=headers)).status_code


@pytest.mark.usefixtures("looking")
async def test_keys_and_limits_of_a_running_server_change(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    path.write_text("ann old max_files=5\nbob bob-key\n")
    server = Server(api_keys=str(path))
    async with looked_after(server):
        assert [await status_of(server, key) for key in ("old", "new", "bob-key")] == [
            200,
            401,
            200,
        ]
        path.write_text("ann new max_files=7\nann old\ncid cid-key weight=2\n")
        await until(lambda: server.tenants.find(b"new") == "ann")
        found = [await status_of(server, key) for key in ("old", "new", "bob-key", "cid-key")]
        assert found == [200, 200, 401, 200]
        assert server.accounts.limits("ann").files == 7
        assert server.accounts.names == ("ann", "cid")
        said = "cid new; bob gone; ann with other keys; ann with other limits"
        assert f"--api-keys was read again: {said}" in caplog.text
        assert "weights and slowdowns change when the server is restarted" in caplog.text


@pytest.mark.usefixtures("looking")
@pytest.mark.parametrize("content", ["", "ann", "ann key\nbob key", None])
async def test_a_file_with_a_mistake_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    path = tmp_path / "keys"
    path.write_text("ann key\n")
    server = Server(api_keys=str(path))
    async with looked_after(server):
        if content is None:
            path.unlink()
        else:
            path.write_text(content)
        await until(lambda: "the keys stay as they were" in caplog.text)
        assert await status_of(server, "key") == 200
        path.write_text("ann other\n")
        await until(lambda: server.tenants.find(b"other") == "ann")
        assert await status_of(server, "key") == 401
    assert caplog.text.count("the keys stay as they were") == 1


@pytest.mark.usefixtures("looking")
async def test_a_file_that_is_being_written_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one that has been the same for two looks."""
    path = tmp_path / "keys"
    path.write_text("ann key\nbob bob-key\n")
    server = Server(api_keys=str(path))
    versions = iter([(1, 1, 1), (1, 1, 1), (1, 2, 2), (1, 3, 3), (1, 4, 4), (1, 4, 4)])
    looks, reads = [], []

    def version_of(path: Path) -> tuple[int, int, int]:
        looks.append(next(versions, (1, 4, 4)))
        return looks[-1]

    def load(config: ServerConfig) -> Tenants:
        reads.append(len(looks))
        return load_tenants(config)

    monkeypatch.setattr("bros.server.tenants._version_of", version_of)
    monkeypatch.setattr("bros.server.tenants.load_tenants", load)
    async with looked_after(server):
        await until(lambda: len(looks) == 9)
    assert reads == [2, 6]


async def test_a_pipe_is_not_read_again(tmp_path: Path) -> None:
    """As of a shell's <(...). It would block, or look empty."""
    path = tmp_path / "keys"
    os.mkfifo(path)
    writing = asyncio.ensure_future(asyncio.to_thread(path.write_text, "ann key\n"))
    server = await asyncio.to_thread(Server, api_keys=str(path))
    await writing
    await asyncio.wait_for(server.tenants.run(), 5.0)
    assert await status_of(server, "key") == 200


# On the wire


async def test_keys_are_asked_for(server: BatchServer) -> None:
    for header in ("", "Bearer", "Bearer wrong", "Basic ann-key", "ann-key", "Bearer \xff"):
        for method, path in (
            ("GET", "/v1/files"),
            ("POST", "/v1/files"),
            ("GET", "/v1/files/file-1/content"),
            ("GET", "/v1/batches"),
            ("POST", "/v1/batches"),
            ("POST", "/v1/batches/batch_1/cancel"),
        ):
            sent = [(b"authorization", header.encode("latin-1"))]
            error = assert_envelope(await server.http.request(method, path, headers=sent), 401)
            assert error["code"] == "invalid_api_key"
    assert not server.unplaced()


async def test_files_are_their_tenants_only(server: BatchServer, bob: openai.AsyncOpenAI) -> None:
    mine = await server.upload(jsonl(row(1)))
    theirs = await bob.files.create(file=("b.jsonl", jsonl(row(1))), purpose="batch")
    assert [file.id async for file in server.client.files.list()] == [mine.id]
    assert [file.id async for file in bob.files.list()] == [theirs.id]
    for ask in (
        bob.files.retrieve(mine.id),
        bob.files.content(mine.id),
        bob.files.delete(mine.id),
        bob.files.list(after=mine.id),
        bob.batches.create(
            input_file_id=mine.id, endpoint="/v1/completions", completion_window="24h"
        ),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    assert len(server.bodies()) == 1  # the same content is kept once
    await bob.files.delete(theirs.id)
    assert (await server.client.files.content(mine.id)).content == jsonl(row(1))


async def test_batches_are_their_tenants_only(server: BatchServer, bob: openai.AsyncOpenAI) -> None:
    server.engine.held = "row"
    batch = await server.submit(row(1))
    await until(lambda: server.engine.waiting == 1)
    for ask in (
        bob.batches.retrieve(batch.id),
        bob.batches.cancel(batch.id),
        bob.batches.list(after=batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await ask
    assert (await bob.batches.list()).data == []
    server.engine.go_on.set()
    done = await server.wait(batch)
    assert done.status == "completed"
    with pytest.raises(openai.NotFoundError):
        await bob.files.content(done.output_file_id or "")
    assert [file async for file in bob.files.list()] == []


async def test_pages_of_a_tenant_skip_those_of_others(
    server: BatchServer, bob: openai.AsyncOpenAI
) -> None:
    made = []
    for _ in range(3):
        made.append((await server.upload(b"text")).id)
        await bob.files.create(file=b"text", purpose="batch")
    page = await server.client.files.list(limit=2, order="asc")
    assert [file.id for file in page.data] == made[:2] and page.has_more
    page = await page.get_next_page()
    assert [file.id for file in page.data] == made[2:] and not page.has_more


async def test_rows_run_on_behalf_of_their_tenant(
    server: BatchServer, bob: openai.AsyncOpenAI
) -> None:
    """Whatever user a row names."""
    rows = [row(1), row(2, user="eve"), row(3, safety_identifier="eve", user="bob")]
    await server.wait(await server.submit(*rows))
    sent = {server.engine.prompt(sent): sent for sent in server.engine.submitted}
    assert {name: each.tenant for name, each in sent.items()} == dict.fromkeys(sent, "ann")
    assert {name: each.user for name, each in sent.items()} == {
        "row-1": "", "row-2": "eve", "row-3": "eve",
    }  # fmt: skip


async def test_a_small_batch_does_not_wait_for_a_large_one_of_another_tenant(
    server: BatchServer, bob: openai.AsyncOpenAI
) -> None:
    """Its rows get every free place until both have as many."""
    server.engine.held = "row"
    large = await server.submit(*(row(i) for i in range(120)))
    await until(lambda: server.engine.waiting > 0)
    lines = jsonl(*(row(1000 + i) for i in range(5)))
    file = await bob.files.create(file=("b.jsonl", lines), purpose="batch")
    small = await bob.batches.create(
        input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
    )
    limiter = server.runner.context.limiter
    await until(lambda: limiter.waiting == 2)  # the next row of each
    assert (await bob.batches.retrieve(small.id)).status == "in_progress"
    before = len(server.engine.submitted)
    assert before < 60
    for _ in range(5):  # one place at a time, as the next row is checked in a thread
        await until(lambda: limiter.waiting == 2 and server.engine.waiting == limiter.limit)
        limiter.limit += 1
    await until(lambda: server.engine.waiting == limiter.limit)
    server.engine.go_on.set()
    await server.wait(large)
    tenants = [request.tenant for request in server.engine.submitted]
    assert tenants.count("bob") == 5 and tenants.index("bob") >= before
    last = len(tenants) - 1 - tenants[::-1].index("bob")
    assert last - before <= 12
    assert tenants[before : before + 5] == 5 * ["bob"], "not in turns"


async def test_the_key_is_the_tenant_of_each_request(
    server: BatchServer, bob: openai.AsyncOpenAI
) -> None:
    salts = set()
    for client, name in ((server.client, "ann"), (bob, "bob")):
        for user in ("ann", "bob"):
            await client.completions.create(model="scripted", prompt="x", user=user)
            last = server.engine.submitted[-1]
            assert (last.tenant, last.user) == (name, user)
            salts.add((name, last.kv_salt))
    assert len(salts) == len({salt for _, salt in salts}) == 2


async def test_traces_are_their_tenants_only(server: BatchServer, bob: openai.AsyncOpenAI) -> None:
    """The answer of another tenant's request is that of an unknown one."""
    server.engine.traces = {
        f"{name}s": RequestTrace(
            request_id=f"{name}s", tenant=name, service_class=ServiceClass.RT,
            requested_class=ServiceClass.RT, slo=Slo(), prompt_tokens=3, output_tokens=0,
            events=(), waits={},
        )
        for name in ("ann", "bob", "")
    }  # fmt: skip
    found = {}
    for name in ("ann", "bob"):
        for request_id in ("anns", "bobs", "s", "unknown"):
            response = await server.http.get(
                f"/v1/requests/{request_id}/trace", headers={"authorization": f"Bearer {name}-key"}
            )
            if response.status_code != 200:
                error = assert_envelope(response, 404)
                assert error["code"] == "request_not_found"
                assert error["message"].replace(repr(request_id), "'unknown'") == _UNKNOWN
            found[name, request_id] = response.status_code
    assert {key for key, status in found.items() if status == 200} == {
        ("ann", "anns"),
        ("bob", "bobs"),
    }


async def test_tenants_outlive_the_server(tmp_path: Path, keys: str) -> None:
    async with batch_server(tmp_path, key="ann-key", api_keys=keys, idle=True) as server:
        batch = await server.submit(row(1))
    async with contextlib.AsyncExitStack() as stack:
        new = batch_server(tmp_path, key="bob-key", api_keys=keys, seed=1)
        server = await stack.enter_async_context(new)
        ann = await stack.enter_async_context(openai_client(server.live.url, "ann-key"))
        async with asyncio.timeout(60):
            while (done := await ann.batches.retrieve(batch.id)).status != "completed":
                await asyncio.sleep(0)
        assert (await ann.files.content(done.output_file_id or "")).content
        with pytest.raises(openai.NotFoundError):
            await server.client.batches.retrieve(batch.id)


LIMITED = """
ann  ann-key  max_requests=2 max_sessions=1
bob  bob-key
"""


@pytest.fixture
def limited(tmp_path: Path) -> Server:
    keys = tmp_path / "keys"
    keys.write_text(LIMITED)
    return Server(api_keys=str(keys))


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}-key"}


@pytest.mark.parametrize("tier", ["default", "flex"])
async def test_open_requests_are_limited_by_tenant_and_class(limited: Server, tier: str) -> None:
    limited.engine.hold_after = 1
    body = {"prompt": "one", "service_tier": tier}

    async def ask(name: str, **fields: object) -> httpx.Response:
        return await limited.http.post("/v1/completions", json=body | fields, headers=of(name))

    both = asyncio.ensure_future(ask("ann", n=2))
    await limited.engine.holding.wait()
    refused = await ask("ann")
    error = assert_envelope(refused, 429)
    assert error["code"] == "tenant_limit_exceeded" and "max_requests" in error["message"]
    # Each client waits for a time of its own.
    assert not {"retry-after", "retry-after-ms", "x-should-retry"} & set(refused.headers)
    over = assert_envelope(await ask("ann", n=3), 400)
    assert over["code"] == "tenant_limit_exceeded"
    resource = Resource.RT_REQUESTS if tier == "default" else Resource.BE_REQUESTS
    assert limited.accounts.refused("ann", resource) == 2, "those with 400 count, too"
    other = asyncio.ensure_future(ask("bob"))
    limited.engine.go_on.set()
    assert {(await both).status_code, (await other).status_code} == {200}
    assert limited.accounts.held == {}
    assert (await ask("ann", n=2)).status_code == 200


async def test_a_client_that_leaves_holds_nothing_any_more(limited: Server) -> None:
    limited.engine.hold_after = 1
    body = {"prompt": "one", "n": 2, "stream": True}
    asked = limited.http.post("/v1/completions", json=body, headers=of("ann"))
    leaving = asyncio.ensure_future(asked)
    await limited.engine.holding.wait()
    assert limited.accounts.used("ann", Resource.RT_REQUESTS) == 2
    leaving.cancel()
    await asyncio.wait([leaving])
    await until(lambda: not limited.accounts.held)


@pytest.mark.parametrize(("share", "expected"), [("own", 0), ("all", 2**31 - 1)])
async def test_what_tenants_share_is_the_operators_choice(
    tmp_path: Path, share: str, expected: int
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(LIMITED)
    server = Server(api_keys=str(keys), share_prefix=share)
    await server.http.post("/v1/completions", json={"prompt": "x"}, headers=of("ann"))
    assert server.last().public_tokens == expected


def test_a_public_prefix_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    config = ServerConfig(public_prefix=f" {tmp_path / 'none'}")
    with pytest.raises(ConfigError, match="--public-prefix: cannot read .*none"):
        public_texts(config)


WORKING = """
ann  ann-key  max_cpu_seconds=2 max_input_bytes=40KiB max_grammars=1
bob  bob-key
"""


@pytest.fixture
def working(tmp_path: Path) -> Server:
    keys = tmp_path / "keys"
    keys.write_text(WORKING)
    return Server(api_keys=str(keys))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x " * 4000, "max_tokens": 1}),
        ("/tokenize", {"prompt": "x " * 4000}),
        ("/v1/sessions", {"note": "x " * 4000}),
    ],
)
async def test_without_cpu_time_only_short_requests_are_served(
    working: Server, path: str, body: dict[str, object]
) -> None:
    async def ask(name: str, path: str, body: object) -> httpx.Response:
        return await working.http.post(path, json=body, headers=of(name))

    working.accounts.spend("ann", 4.0)
    refused = await ask("ann", path, body)
    error = assert_envelope(refused, 429)
    assert error["code"] == "tenant_limit_exceeded" and "max_cpu_seconds" in error["message"]
    assert 40 <= int(refused.headers["retry-after"]) <= 42  # a minute's logarithm of 2
    assert working.accounts.refused("ann", Resource.CPU_SECONDS) == 1
    short = {"prompt": "x", "max_tokens": 1}
    assert (await ask("ann", "/v1/completions", short)).status_code == 200
    assert (await ask("bob", path, body)).status_code != 429


async def test_short_texts_of_sessions_use_cpu_time_and_wait_without_any(working: Server) -> None:
    """A body of 4 MB has 1,000 of them, which take seconds."""

    async def ask(name: str) -> None:
        url, headers = "/v1/sessions", of(name)
        opened = (await working.http.post(url, json={}, headers=headers)).json()["id"]
        body: dict[str, Any] = {
            "template": "Say {{input:x}}: {{output:y}}",
            "parameters": [{"name": "x", "value": "a" * 300}, {"name": "y", "criteria": {}}],
        }
        url = f"{url}/{opened}/requests"
        assert (await working.http.post(url, json=body, headers=headers)).status_code == 200

    spent: Counter[str] = Counter()
    spend = working.accounts.spend

    def noted(tenant: str, cpu_s: float) -> None:
        spent[tenant] += 1
        spend(tenant, cpu_s)

    working.accounts.spend = noted  # type: ignore[method-assign]
    spend("ann", 4.0)
    await ask("ann")
    await ask("bob")
    await until(lambda: "bob" in {each.tenant for each in working.engine.submitted})
    assert spent["bob"] > 0
    await asyncio.sleep(0.2)
    assert {each.tenant for each in working.engine.submitted} == {"bob"}


async def test_stored_responses_use_cpu_time(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    server = Server(jobs_in=store)
    spent: list[float] = []
    server.accounts.spend = lambda tenant, cpu_s: spent.append(cpu_s)  # type: ignore[method-assign]
    made = (await server.http.post("/v1/responses", json={"input": "Hi"})).json()
    spent.clear()
    for path in ("", "/input_items"):
        answer = await server.http.get(f"/v1/responses/{made['id']}{path}")
        assert answer.status_code == 200
        assert sum(spent) > 0
        spent.clear()
    store.close()


async def test_bodies_that_are_received_are_limited_by_tenant(working: Server) -> None:
    held = HeldBody(b'{"prompt": "' + b"x" * 30_000, b'", "max_tokens": 1}')

    async def ask(name: str, content: object) -> httpx.Response:
        headers = of(name) | {"content-type": "application/json"}
        return await working.http.post("/v1/completions", content=content, headers=headers)  # type: ignore[arg-type]

    first = asyncio.ensure_future(ask("ann", held))
    await held.begun.wait()
    assert working.accounts.used("ann", Resource.INPUT_BYTES) > 30_000
    body = b'{"prompt": "%b"}' % (b"y" * 20_000)
    refused = await ask("ann", body)
    assert "max_input_bytes" in assert_envelope(refused, 429)["message"]
    assert refused.headers["retry-after"] == "1"
    assert "max_input_bytes" in assert_envelope(await ask("ann", body * 3), 400)["message"]
    assert (await ask("bob", body)).status_code == 400  # too long for the model
    held.go_on.set()
    assert (await first).status_code == 400
    assert working.accounts.held == {}


async def test_outputs_with_a_grammar_are_limited_by_tenant(working: Server) -> None:
    working.engine.hold_after = 1

    async def ask(name: str, **fields: object) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": "x"}]} | fields
        return await working.http.post("/v1/chat/completions", json=body, headers=of(name))

    json_object = {"response_format": {"type": "json_object"}}
    first = asyncio.ensure_future(ask("ann", **json_object))
    await working.engine.holding.wait()
    refused = await ask("ann", **json_object)
    assert "max_grammars" in assert_envelope(refused, 429)["message"]
    assert refused.headers["retry-after"] == "1"
    others = [asyncio.ensure_future(ask("ann")), asyncio.ensure_future(ask("bob", **json_object))]
    working.engine.go_on.set()
    assert {(await each).status_code for each in (first, *others)} == {200}
    assert working.accounts.held == {}


async def test_rows_of_batches_need_no_cpu_time(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key max_cpu_seconds=1 max_requests=1")
    async with batch_server(
        tmp_path, key="ann-key", api_keys=str(keys), max_model_len=9000
    ) as server:
        server.live.server.accounts.spend("ann", 100.0)
        done = await server.wait(await server.submit(*(row(i, prompt="x " * 3000) for i in (1, 2))))
        assert done.request_counts is not None and done.request_counts.completed == 2


# What the operator sees


async def figures(
    server: BatchServer | Server, headers: dict[str, str]
) -> dict[str, dict[str, dict[str, object]]]:
    """Tenant -> resource -> its figures."""
    response = await server.http.get("/admin/tenants", headers=headers)
    assert response.status_code == 200, response.text
    return {
        tenant["name"]: {use["resource"]: use for use in tenant["uses"]}
        for tenant in response.json()["data"]
    }


async def test_the_operator_sees_what_tenants_hold(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(LIMITED)
    operator = {"authorization": "Bearer one-key"}
    options = {"key": "ann-key", "api_key": "one-key", "api_keys": str(keys)}
    async with batch_server(tmp_path, idle=True, **options) as server:
        for _ in range(2):
            await server.http.post("/v1/sessions", json={}, headers=of("ann"))
        await server.submit(row(1))
        found = await figures(server, operator)
        assert found.keys() == {"", "ann", "bob", "*"}
        together = {name: (use["used"], use["option"]) for name, use in found["*"].items()}
        assert together["files"] == (1, "--max-files") and found["*"]["files"]["limit"] == 100_000
        ann = {name: (use["used"], use["limit"]) for name, use in found["ann"].items()}
        assert ann["sessions"] == (1, 1) and ann["files"] == (1, 10_000)
        assert ann["batches"] == (1, 100) and ann["rt_requests"] == (0, 2)
        assert {name: use["refused"] for name, use in found["ann"].items() if use["refused"]} == {
            "sessions": 1
        }
        assert not any(use["used"] or use["refused"] for use in found["bob"].values())
        server.engine.figures = EngineStats(traces={"bob": 7})
        server.live.server.accounts.spend("bob", 12.3)
        bob = (await figures(server, operator))["bob"]
        assert (bob["traces"]["used"], bob["traces"]["limit"]) == (7, 500)
        assert (bob["cpu_seconds"]["used"], bob["cpu_seconds"]["limit"]) == (12, 30)
        assert bob["input_bytes"]["limit"] == 64 * 2**20
        assert bob["cached_grammars"]["limit"] == 512
        for name in ("ann", "bob"):
            assert_envelope(await server.http.get("/admin/tenants", headers=of(name)), 403)


@pytest.mark.parametrize("access", ["open", "key"])
async def test_only_metrics_with_a_key_name_tenants(tmp_path: Path, access: str) -> None:
    keys = tmp_path / "keys"
    keys.write_text(LIMITED)
    server = Server(api_keys=str(keys), api_key="one-key", metrics_access=access)
    for _ in range(2):
        await server.http.post("/v1/sessions", json={}, headers=of("ann"))
    await server.http.post("/v1/sessions", json={}, headers=of("bob"))
    text = (await server.http.get("/metrics", headers={"authorization": "Bearer one-key"})).text
    found = [line for line in text.splitlines() if 'resource="sessions"' in line]
    if access == "open":
        assert found == [
            'bros_tenant_held{resource="sessions",tenant="*"} 2.0',
            'bros_tenant_refusals_total{resource="sessions",tenant="*"} 1.0',
        ]
        assert '"ann"' not in text and '"bob"' not in text
    else:
        assert 'bros_tenant_held{resource="sessions",tenant="ann"} 1.0' in found
        assert 'bros_tenant_limit{resource="sessions",tenant="ann"} 1.0' in found
        assert 'bros_tenant_refusals_total{resource="sessions",tenant="ann"} 1.0' in found
        assert 'bros_tenant_held{resource="sessions",tenant="bob"} 1.0' in found


async def test_open_metrics_do_not_name_the_only_tenant(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key\n")
    server = Server(api_keys=str(keys), metrics_access="open")
    await server.http.post("/v1/sessions", json={}, headers=of("ann"))
    text = (await server.http.get("/metrics")).text
    assert 'bros_tenant_held{resource="sessions",tenant="*"} 1.0' in text
    assert '"ann"' not in text


@pytest.mark.parametrize("access", ["open", "key"])
async def test_metrics_say_what_each_tenant_has_used_of_the_device(
    tmp_path: Path, access: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(LIMITED)
    server = Server(api_keys=str(keys), api_key="one-key", metrics_access=access)
    server.engine.figures = EngineStats(
        by_class={
            ServiceClass.RT: ClassStats(device_s={"ann": 2.0, "bob": 1.0}),
            ServiceClass.BE: ClassStats(device_s={"bob": 0.5}),
        }
    )
    text = (await server.http.get("/metrics", headers={"authorization": "Bearer one-key"})).text
    found = {
        line.removeprefix("bros_tenant_device_seconds_total")
        for line in text.splitlines()
        if line.startswith("bros_tenant_device_seconds_total")
    }
    if access == "open":
        assert found == {'{class="rt",tenant="*"} 3.0', '{class="be",tenant="*"} 0.5'}
    else:
        assert found == {
            '{class="rt",tenant="ann"} 2.0',
            '{class="rt",tenant="bob"} 1.0',
            '{class="be",tenant="bob"} 0.5',
        }


async def test_a_long_answer_is_waited_for_as_long_as_the_limit_needs(tmp_path: Path) -> None:
    """A shorter time would make clients come back in vain."""
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key max_tokens_per_minute=100")
    server = Server(api_keys=str(keys))
    server.accounts.count_tokens("ann", 1100)
    body = {"prompt": "one", "max_tokens": 3}
    refused = await server.http.post("/v1/completions", json=body, headers=of("ann"))
    assert assert_envelope(refused, 429)["code"] == "tenant_limit_exceeded"
    assert 590 <= int(refused.headers["retry-after"]) <= 610
    assert refused.headers["x-should-retry"] == "false"


async def test_limits_per_minute_answer_429_with_the_headers_of_openai(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key max_requests_per_minute=2 max_tokens_per_minute=1000\nbob bob-key")
    server = Server(api_keys=str(keys))

    async def ask(name: str, **fields: object) -> httpx.Response:
        body = {"prompt": "one", "max_tokens": 3}
        return await server.http.post("/v1/completions", json=body | fields, headers=of(name))

    first = await ask("ann")
    usage = first.json()["usage"]
    limits = {name: value for name, value in first.headers.items() if "ratelimit" in name}
    assert limits["x-ratelimit-limit-requests"] == "2"
    assert limits["x-ratelimit-remaining-requests"] == "1"
    assert limits["x-ratelimit-reset-requests"] == "30s"
    assert limits["x-ratelimit-limit-tokens"] == "1000"
    assert int(limits["x-ratelimit-remaining-tokens"]) == 1000 - usage["total_tokens"]
    assert limits["x-ratelimit-reset-tokens"].endswith("ms")
    streamed = await ask("ann", stream=True)
    assert streamed.headers["x-ratelimit-remaining-requests"] == "0"
    refused = await ask("ann")
    error = assert_envelope(refused, 429)
    assert error["code"] == "tenant_limit_exceeded"
    assert error["message"].endswith("limit of 2 requests per minute (max_requests_per_minute).")
    assert 25 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    assert server.accounts.refused("ann", Resource.REQUESTS_PER_MINUTE) == 1
    other = await ask("bob")
    assert other.status_code == 200
    assert not any("ratelimit" in name for name in other.headers)
    embedded = await server.http.post("/v1/chat/completions", json={}, headers=of("ann"))
    assert embedded.status_code == 400, "a wrong request is told what is wrong with it"
    assert embedded.headers["x-ratelimit-limit-requests"] == "2"


async def test_background_responses_count_for_the_limits_per_minute(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key max_requests_per_minute=3 max_tokens_per_minute=1000\n")
    async with batch_server(tmp_path, key="ann-key", api_keys=str(keys)) as server:
        given = {"input": "one", "background": True, "max_output_tokens": 4}

        async def ask() -> httpx.Response:
            return await server.http.post("/v1/responses", json=given)

        first = await ask()
        assert first.status_code == 200
        response_id, path = first.json()["id"], f"/v1/responses/{first.json()['id']}"
        while (shown := (await server.http.get(path)).json())["status"] in (
            "queued",
            "in_progress",
        ):
            await asyncio.sleep(0.01)
        assert shown["id"] == response_id and shown["usage"]["output_tokens"] > 0
        second = await ask()
        used = 1000 - int(second.headers["x-ratelimit-remaining-tokens"])
        assert used >= shown["usage"]["total_tokens"] + shown["usage"]["input_tokens"]
        assert second.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await ask()).status_code == 200
        assert assert_envelope(await ask(), 429)["code"] == "tenant_limit_exceeded"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.0201, "21ms"), (1.0, "1s"), (59.5, "1m0s"), (360.0, "6m0s")],
)
def test_times_in_headers_are_written_as_openai_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


async def test_without_keys_the_options_limit_all_requests_per_minute() -> None:
    server = Server(tenant_max_requests_per_minute=1)
    for status in (200, 429):
        response = await server.http.post("/v1/completions", json={"prompt": "one"})
        assert response.status_code == status
        assert response.headers["x-ratelimit-remaining-requests"] == "0"
