"""What a server holds for all clients together, with keys or without: more gets 429, and what is
refused leaves nothing behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path

import httpx
import pytest

from bros.core.config import ServerConfig
from bros.core.tenants import ALL_TENANTS, Resource
from bros.semantic.service.live import ANSWER_CHARS, CALL_CHARS, VARIABLE_CHARS
from bros.server.limits import disk_bytes, memory_bytes, server_limits
from bros.server.tenants import Tenants
from support.batch_server import batch_server, jsonl, row
from support.scripted_server import HeldBody, Server, assert_envelope
from support.session_server import SessionClient, ok

LIMITS = ("session_chars", "input_bytes", "output_bytes", "files", "file_bytes")
KEYS = "".join(
    f"{name} {name}-key {' '.join(f'max_{each}=none' for each in LIMITS)}\n"
    for name in ("ann", "bob")
)
GIB = 2**30


@pytest.fixture(params=[False, True], ids=["no keys", "two tenants"])
def keys(tmp_path: Path, request: pytest.FixtureRequest) -> dict[str, str]:
    """Options of a server with or without tenants."""
    if not request.param:
        return {}
    path = tmp_path / "keys"
    path.write_text(KEYS)
    return {"api_keys": str(path)}


def of(name: str) -> dict[str, str]:
    """A server without keys accepts any."""
    return {"authorization": f"Bearer {name}-key"}


def refused_for_all(response: httpx.Response, option: str, retry_after: str) -> None:
    error = assert_envelope(response, 429)
    assert error["code"] == "server_limit_exceeded"
    assert error["message"].startswith("This server has ") and option in error["message"]
    assert response.headers["retry-after"] == retry_after


@pytest.mark.parametrize("memory", [GIB, 24 * GIB])
def test_the_machine_sets_the_limits(memory: int) -> None:
    limits = server_limits(ServerConfig(), memory, 100 * GIB)
    assert limits.session_chars == memory // 16
    assert limits.input_bytes == limits.output_bytes == max(64 * 2**20, memory // 64)
    assert (limits.files, limits.file_bytes) == (100_000, 50 * GIB)
    given = ServerConfig(
        max_session_chars=7, max_input_bytes="1MiB", max_files=3, max_file_bytes="2KiB"
    )
    limits = server_limits(given, memory, 100 * GIB)
    assert (limits.session_chars, limits.input_bytes) == (7, 2**20)
    assert (limits.files, limits.file_bytes) == (3, 2048)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [({}, None), ({"ann": "a"}, None), ({"ann": "a", "bob": "b"}, 4)],
)
def test_one_of_several_tenants_gets_half_at_most(
    keys: dict[str, str], expected: int | None
) -> None:
    config = ServerConfig(max_session_chars=8)
    limits = server_limits(config, GIB, GIB)
    accounts = Tenants(keys).accounts(config, max_queue=10, server_limits=limits)
    assert accounts.server_limits == limits
    assert accounts.limits("bob").session_chars == expected


def test_this_machine_has_memory_and_a_disk(tmp_path: Path) -> None:
    assert memory_bytes() > 2**28 and disk_bytes(tmp_path) > 2**20


async def test_characters_of_all_sessions_are_limited(keys: dict[str, str]) -> None:
    room = 40 * VARIABLE_CHARS
    server = Server(max_session_chars=room, **keys)
    sessions = []
    for name in ("ann", "bob"):
        opened = ok(await server.http.post("/v1/sessions", json={}, headers=of(name)))
        sessions.append(SessionClient(server.http, opened["id"], **of(name)))
    ann, bob = sessions
    large = {"name": "text", "value": "x" * (room - 4 * VARIABLE_CHARS)}
    held = ok(await ann.ask("POST", "/variables", json=large))
    for session in (ann, bob):
        refused = await session.ask("POST", "/variables", json=large)
        refused_for_all(refused, "--max-session-chars", "60")
        assert refused.headers["x-should-retry"] == "false"
    for n in range(3):  # variables without a character count, too
        ok(await bob.ask("POST", "/variables", json={"name": f"v{n}"}))
    refused_for_all(
        await bob.ask("POST", "/variables", json={"name": "v"}), "--max-session-chars", "60"
    )
    refused_for_all(await bob.submit(template="{{output:y}}"), "--max-session-chars", "60")
    over = {"name": "text", "value": "x" * room}
    error = assert_envelope(await bob.ask("POST", "/variables", json=over), 400)
    assert "The limit of this server" in error["message"]
    assert server.accounts.refused(ALL_TENANTS, Resource.SESSION_CHARS) == 4
    metrics = (await server.http.get("/metrics")).text
    assert f'bros_server_limit{{resource="session_chars"}} {float(room)}' in metrics
    assert 'bros_server_refusals_total{resource="session_chars"} 4.0' in metrics
    assert held["name"] == "text"
    await server.http.delete(f"/v1/sessions/{ann.id}", headers=ann.headers)
    ok(await bob.ask("POST", "/variables", json=large | {"value": "x" * (room // 2)}))


async def test_characters_in_the_sessions_of_a_tenant_are_limited(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("ann ann-key max_session_chars=9000\nbob bob-key\n")
    server = Server(api_keys=str(path))

    async def fill(name: str, value: str) -> httpx.Response:
        opened = ok(await server.http.post("/v1/sessions", json={}, headers=of(name)))
        body = {"name": "text", "value": value}
        url = f"/v1/sessions/{opened['id']}/variables"
        return await server.http.post(url, json=body, headers=of(name))

    for status in (200, 429):  # in two sessions
        filled = await fill("ann", "x" * 5000)
        assert filled.status_code == status
    assert "max_session_chars" in assert_envelope(filled, 429)["message"]
    assert filled.headers["retry-after"] == "60"
    assert assert_envelope(await fill("ann", "x" * 9000), 400)["code"] == "tenant_limit_exceeded"
    assert (await fill("bob", "x" * 5000)).status_code == 200
    assert server.accounts.refused(ALL_TENANTS, Resource.SESSION_CHARS) == 0


async def test_calls_count_as_long_as_they_are_kept() -> None:
    server = Server(max_session_chars=10 * CALL_CHARS)
    session = await SessionClient.open(server.http)
    calls = [{"template": "{{input:x}}{{output:y}}"}] * 3
    ok(await session.ask("POST", "/requests", json={"requests": calls}))
    used = 3 * (CALL_CHARS + 2 * VARIABLE_CHARS)
    assert server.accounts.used("", Resource.SESSION_CHARS) == used
    refused = await session.ask("POST", "/requests", json={"requests": calls * 2})
    refused_for_all(refused, "--max-session-chars", "60")
    assert server.accounts.used("", Resource.SESSION_CHARS) == used
    await session.ask("DELETE")
    assert server.accounts.held == {}


async def test_answers_that_are_remembered_count() -> None:
    per_call = CALL_CHARS + 2 * VARIABLE_CHARS
    server = Server(max_session_chars=23 * per_call + 16 * ANSWER_CHARS)
    session = await SessionClient.open(server.http)
    calls = [{"template": "{{input:x}}{{output:y}}"}] * 2
    for number in range(10):
        ok(await session.ask("POST", "/requests", json={"requests": calls, "key": f"k{number}"}))
        remembered = 2 * min(number + 1, 8)  # those of the last eight keys
        used = 2 * (number + 1) * per_call + remembered * ANSWER_CHARS
        assert server.accounts.used("", Resource.SESSION_CHARS) == used
    calls *= 2
    calls.pop()  # they fit, but no answer to them
    refused = await session.ask("POST", "/requests", json={"requests": calls, "key": "last"})
    refused_for_all(refused, "--max-session-chars", "60")
    ok(await session.ask("POST", "/requests", json={"requests": calls}))
    assert server.accounts.used("", Resource.SESSION_CHARS) == 23 * per_call + 16 * ANSWER_CHARS
    await session.ask("DELETE")
    assert server.accounts.held == {}


async def test_inputs_in_progress_are_limited(keys: dict[str, str]) -> None:
    server = Server(max_input_bytes="40KiB", **keys)
    held = HeldBody(b'{"prompt": "' + b"x" * 30_000, b'", "max_tokens": 1}')

    async def ask(name: str, content: object) -> httpx.Response:
        headers = of(name) | {"content-type": "application/json"}
        return await server.http.post("/v1/completions", content=content, headers=headers)  # type: ignore[arg-type]

    first = asyncio.ensure_future(ask("ann", held))
    await held.begun.wait()
    refused_for_all(await ask("bob", b"{%b}" % (b" " * 20_000)), "--max-input-bytes", "1")
    assert (await ask("bob", b'{"prompt": "x"}')).status_code == 200
    held.go_on.set()
    assert (await first).status_code == 400  # too long for the model
    assert server.accounts.held == {}


async def test_files_are_limited(tmp_path: Path, keys: dict[str, str]) -> None:
    content = jsonl(row(1))
    options = keys | {"key": "ann-key"} if keys else {}
    room = str(len(content) * 2)
    async with batch_server(tmp_path, idle=True, max_file_bytes=room, **options) as server:

        async def upload(name: str, content: bytes) -> httpx.Response:
            files = {"file": ("a.jsonl", content)}
            return await server.http.post(
                "/v1/files", files=files, data={"purpose": "batch"}, headers=of(name)
            )

        assert (await upload("ann", content)).status_code == 200
        kept = ok(await upload("bob", content))
        refused_for_all(await upload("bob", content), "--max-file-bytes", "60")
        assert_envelope(await upload("bob", content * 3), 429)
        assert not server.unplaced()
        gone = await server.http.delete(f"/v1/files/{kept['id']}", headers=of("bob"))
        assert gone.status_code == 200
        error = assert_envelope(await upload("ann", content * 3), 400)
        assert "The limit of this server" in error["message"]
        assert (await upload("ann", content)).status_code == 200
    async with batch_server(tmp_path / "few", idle=True, max_files=1, **options) as server:
        assert (await upload("ann", content)).status_code == 200
        refused_for_all(await upload("bob", content), "--max-files", "60")


async def test_files_count_while_they_are_received(tmp_path: Path, keys: dict[str, str]) -> None:
    """Many uploads at once cannot fill the disk before the first one is complete."""
    options = keys | {"key": "ann-key"} if keys else {}
    form = {"content-type": "multipart/form-data; boundary=x"}
    part = b'--x\r\ncontent-disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    begin = part % (b"purpose", b"", b"user_data") + part[:-2] % (b"file", b'; filename="a"', b"")
    declared = begin + b"x" * 600 * 1024 + b"\r\n--x--\r\n"
    held = HeldBody(begin + b"x" * 600 * 1024, b"\r\n--x--\r\n")
    async with batch_server(tmp_path, idle=True, max_file_bytes="1000KiB", **options) as server:
        accounts = server.live.server.accounts

        async def undeclared_body() -> AsyncIterator[bytes]:
            yield declared

        async def upload(name: str, body: AsyncIterable[bytes] | bytes) -> httpx.Response:
            return await server.http.post("/v1/files", content=body, headers=of(name) | form)

        first = asyncio.ensure_future(upload("ann", held))
        await held.begun.wait()
        while sum(accounts.held.values()) < 600 * 1024:
            await asyncio.sleep(0.001)
        refused_for_all(await upload("bob", undeclared_body()), "--max-file-bytes", "60")
        refused_for_all(await upload("bob", declared), "--max-file-bytes", "60")
        assert sum(accounts.held.values()) == 600 * 1024 and len(server.unplaced()) == 1
        held.go_on.set()
        assert (await first).status_code == 200
        assert accounts.held == {} and not server.unplaced()
        refused_for_all(await upload("bob", declared), "--max-file-bytes", "60")
        error = assert_envelope(await upload("bob", begin + b"x" * 2**21), 400)
        assert "The limit of this server" in error["message"]


BIAS = {"logit_bias": {str(token): 1 for token in range(200)}}
BIAS_BYTES = 20_000
WAITS = "{{input:x}}{{output:y}}"


def session_chars(server: Server) -> int:
    return server.accounts.used("", Resource.SESSION_CHARS)


async def test_sampling_parameters_of_sessions_count() -> None:
    """Those that calls of a program have in common once: they are in memory once."""
    server = Server(max_session_chars=150_000)
    session = await SessionClient.open(server.http, sampling={"stop": ["x" * 100]})
    assert session_chars(server) == 150
    outputs = [{"name": "x"}, {"name": "y", "sampling": BIAS}]
    for _ in range(2):
        before = session_chars(server)
        await session.call(WAITS, parameters=outputs)
        assert session_chars(server) - before > BIAS_BYTES
    before = session_chars(server)
    calls = [{"template": WAITS, "parameters": outputs}] * 3
    ok(await session.ask("POST", "/requests", json={"requests": calls}))
    added = session_chars(server) - before
    assert BIAS_BYTES < added < BIAS_BYTES + 3 * (CALL_CHARS + 2 * VARIABLE_CHARS) + 500
    for _ in range(10):
        refused = await session.submit(template=WAITS, parameters=outputs)
    refused_for_all(refused, "--max-session-chars", "60")
    too_much = {"stop": ["x" * 1_000] * 4, **BIAS}
    refused = await server.http.post("/v1/sessions", json={"sampling": too_much})
    refused_for_all(refused, "--max-session-chars", "60")
    await session.ask("DELETE")
    assert server.accounts.held == {}


async def test_prompts_count_while_their_calls_run() -> None:
    server = Server()
    server.engine.hold_after = 0
    session = await SessionClient.open(server.http)
    text = "x" * 300  # as many tokens
    made = await session.call(
        "{{input:x}}{{output:y}}", parameters=[{"name": "x", "value": text}, {"name": "y"}]
    )
    waiting = asyncio.create_task(session.value(made["y"]))
    await asyncio.wait_for(server.engine.holding.wait(), timeout=10.0)
    records = CALL_CHARS + 2 * VARIABLE_CHARS
    assert session_chars(server) == records + len(text) + 300
    server.engine.go_on.set()
    answer = await waiting
    await asyncio.sleep(0.01)
    assert session_chars(server) == records + len(text) + len(answer)
