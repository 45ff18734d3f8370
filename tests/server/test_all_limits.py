"""The limit of each resource of a tenant, filled over HTTP: who is refused more, who is not, what
the metrics say, and that nothing is left. A new resource needs a way to fill it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.core import grammars
from bros.core.clock import ManualClock
from bros.core.config import ServerConfig
from bros.core.tenants import Resource, TenantAccounts
from bros.server.tenants import load_tenants
from bros.text.grammar_check import GrammarChecker
from support.batch_server import RowEngine, batch_server, eventually, jsonl, row, until
from support.model_server import model_server
from support.scripted_server import JSON, HeldBody, assert_envelope
from support.session_server import SessionClient, ok
from support.tiny_tokenizer import save_chat_llama, save_tokenizer

from .test_replies import Reader

HELD = "hold"
"""A prompt that waits in the engine; all others are answered."""

OPERATOR = {"authorization": "Bearer one-key"}


@dataclass(frozen=True)
class Served:
    """A server whose tenants `ann` and `bob` have the same limit of one resource.

    engine, app, clock: None with a real engine.
    checker: None unless it is about grammars.
    """

    http: httpx.AsyncClient
    accounts: TenantAccounts
    engine: RowEngine | None = None
    app: Any = None
    clock: ManualClock | None = None
    checker: GrammarChecker | None = None

    def let_go(self) -> None:
        """Let the engine answer what it holds, and from now on everything."""
        assert self.engine is not None
        self.engine.go_on.set()

    async def until_held(self, requests: int) -> None:
        engine = self.engine
        assert engine is not None
        await until(lambda: engine.waiting == requests)


@dataclass(frozen=True)
class Tenant:
    """A client with the key of a tenant."""

    name: str
    served: Served

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.name}-key"}

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        headers = self.headers | options.pop("headers", {})
        return await self.served.http.request(method, path, headers=headers, **options)

    def used(self, resource: Resource) -> int:
        return self.served.accounts.used(self.name, resource)

    async def metric(self, name: str, resource: Resource) -> float:
        """One of the metrics of tenants."""
        text = (await self.served.http.get("/metrics", headers=OPERATOR)).text
        labels = f'{{resource="{resource}",tenant="{self.name}"}}'
        (found,) = (
            line for line in text.splitlines() if line.startswith(f"bros_tenant_{name}{labels} ")
        )
        return float(found.rpartition(" ")[2])


Ask = Callable[[Tenant], Awaitable[httpx.Response]]


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A resource of which more is refused.

    limit: as in the file of keys.
    fill: a tenant holds so much during the block that `more` exceeds the limit.
    more: asks for something, and ends what came of it.
    retry_after_s: what a refused client is told; None: until there is CPU time again.
    passes: what counts fades with time.
    is_refused: returns the message of a response with a refusal, after having checked the rest.
    """

    limit: str
    fill: Callable[[Tenant], AbstractAsyncContextManager[None]]
    more: Ask
    retry_after_s: float | None = 1.0
    passes: bool = False
    is_refused: Callable[[httpx.Response], str] | None = None

    async def check(self, ann: Tenant, bob: Tenant, resource: Resource) -> None:
        async with self.fill(ann):
            limit, held = [await ann.metric(name, resource) for name in ("limit", "held")]
            assert held >= limit / 2
            message = self._message(ann, refused := await self.more(ann))
            assert f"max_{_option(resource)}" in message
            assert ok(await self.more(bob))
            assert await ann.metric("refusals_total", resource) == 1
            assert await bob.metric("refusals_total", resource) == 0
        if self.passes:
            assert ann.served.clock is not None
            ann.served.clock.advance(float(refused.headers["retry-after"]))
        assert ok(await self.more(ann))
        await until(lambda: not ann.served.accounts.held)
        for tenant in (ann, bob):
            assert self.passes or await tenant.metric("held", resource) == 0
        assert await ann.metric("refusals_total", resource) == 1

    def _message(self, ann: Tenant, response: httpx.Response) -> str:
        if self.is_refused is not None:
            return self.is_refused(response)
        error = assert_envelope(response, 429)
        assert error["code"] == "tenant_limit_exceeded"
        if error["message"].partition("open ")[2].startswith(("real-time", "best-effort")):
            assert "retry-after" not in response.headers
        else:
            wait_s = self.retry_after_s or ann.served.accounts.cpu_wait_s(ann.name)
            assert response.headers["retry-after"] == str(math.ceil(max(wait_s, 1.0)))
        later = self.retry_after_s == LATER_S and not self.passes
        assert response.headers.get("x-should-retry") == ("false" if later else None)
        message: str = error["message"]
        return message


@dataclass(frozen=True, kw_only=True)
class MakesRoom:
    """A resource of which a tenant's oldest makes room for more.

    make: something of the same size for each number; returns how `has` finds it.
    has: whether it is still there.
    """

    limit: str
    make: Callable[[Tenant, int], Awaitable[str]]
    has: Callable[[Tenant, str], Awaitable[bool]]

    async def check(self, ann: Tenant, bob: Tenant, resource: Resource) -> None:
        theirs = await self.make(bob, 0)
        one, limit = await bob.metric("held", resource), await bob.metric("limit", resource)
        made, held = [], [0.0]
        while len(held) < 3 or held[-1] > held[-2]:
            made.append(await self.make(ann, len(made)))
            held.append(await ann.metric("held", resource))
            assert held[-1] <= limit, "the limit was exceeded"
        assert len(made) > 2 and held[-1] > limit - one
        found = [await self.has(ann, each) for each in made]
        assert found == [False] + [True] * (len(made) - 1)
        assert await self.has(bob, theirs) and await bob.metric("held", resource) == one
        assert await ann.metric("refusals_total", resource) == 0
        await until(lambda: not ann.served.accounts.held)


LATER_S = 60.0
"""What clients are told who have to end something first."""


def _option(resource: Resource) -> str:
    """Both classes have one limit."""
    classes = Resource.RT_REQUESTS, Resource.BE_REQUESTS
    return "requests" if resource in classes else resource.value


# ---- Things that are there until their tenant ends them.


def things(
    limit: str, make: Ask, end: Callable[[Tenant, str], Awaitable[None]], **options: Any
) -> Refused:
    """A limit that one of them fills. end: of the one with an id."""

    @contextlib.asynccontextmanager
    async def fill(tenant: Tenant) -> AsyncIterator[None]:
        made = ok(await make(tenant))
        yield
        await end(tenant, made["id"])

    async def more(tenant: Tenant) -> httpx.Response:
        response = await make(tenant)
        if response.status_code == 200:
            await end(tenant, response.json()["id"])
        return response

    return Refused(limit=limit, fill=fill, more=more, **{"retry_after_s": LATER_S, **options})


def deletes(path: str) -> Callable[[Tenant, str], Awaitable[None]]:
    async def delete(tenant: Tenant, thing: str) -> None:
        ok(await tenant.ask("DELETE", f"{path}/{thing}"))

    return delete


async def open_session(tenant: Tenant) -> httpx.Response:
    return await tenant.ask("POST", "/v1/sessions", json={"sampling": {"stop": ["x" * 1000] * 4}})


async def upload(tenant: Tenant, text: str = HELD * 15) -> httpx.Response:
    files = {"file": ("a.jsonl", jsonl(row(1, text)))}
    return await tenant.ask("POST", "/v1/files", files=files, data={"purpose": "batch"})


async def create_batch(tenant: Tenant) -> httpx.Response:
    file = ok(await upload(tenant))
    wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
    return await tenant.ask("POST", "/v1/batches", json={"input_file_id": file["id"], **wanted})


async def validated_batch(tenant: Tenant) -> httpx.Response:
    path = f"/v1/batches/{ok(await create_batch(tenant))['id']}"

    async def look() -> httpx.Response | None:
        found = await tenant.ask("GET", path)
        return None if ok(found)["status"] == "validating" else found

    return await eventually(look)


async def end_batch(tenant: Tenant, batch: str) -> None:
    async def look() -> bool | None:
        status = ok(await tenant.ask("GET", f"/v1/batches/{batch}"))["status"]
        return True if status in ("cancelled", "failed") else None

    await tenant.ask("POST", f"/v1/batches/{batch}/cancel")
    assert await eventually(look)


def failed_batch(response: httpx.Response) -> str:
    """The prompts of a batch are counted only when it has been created."""
    batch = ok(response)
    assert batch["status"] == "failed"
    (error,) = batch["errors"]["data"]
    assert error["code"] == "token_limit_exceeded"
    message: str = error["message"]
    return message


async def respond_later(tenant: Tenant) -> httpx.Response:
    return await tenant.ask("POST", "/v1/responses", json={"input": HELD, "background": True})


# ---- Requests that are open.


def answers(limit: str, path: str, requests: int, **body: Any) -> Refused:
    """A limit that a request fills whose prompt is held. requests: its number in the engine."""

    async def ask(tenant: Tenant, prompt: str, **more: Any) -> httpx.Response:
        asked: Mapping[str, Any] = {"prompt": prompt}
        if path == "/v1/chat/completions":
            asked = {"messages": [{"role": "user", "content": prompt}]}
        return await tenant.ask("POST", path, json={**asked, **body, **more})

    @contextlib.asynccontextmanager
    async def fill(tenant: Tenant) -> AsyncIterator[None]:
        asked = asyncio.create_task(ask(tenant, HELD, n=requests))
        await tenant.served.until_held(requests)
        yield
        tenant.served.let_go()
        ok(await asked)

    return Refused(limit=limit, fill=fill, more=lambda tenant: ask(tenant, "x"))


@contextlib.asynccontextmanager
async def waiting(tenant: Tenant) -> AsyncIterator[asyncio.Task[httpx.Response]]:
    """A client that waits for a value, which it gets at the end of the block."""
    opened = ok(await tenant.ask("POST", "/v1/sessions", json={}))
    session = SessionClient(tenant.served.http, opened["id"], **tenant.headers)
    variable = ok(await session.ask("POST", "/variables", json={"name": "v"}))["id"]
    before = tenant.used(Resource.WAITS)
    asked = asyncio.create_task(session.look(variable, wait="true"))
    await until(lambda: asked.done() or tenant.used(Resource.WAITS) > before)
    yield asked
    ok(await session.ask("PUT", f"/variables/{variable}", json={"value": "text"}))
    await asked
    ok(await session.ask("DELETE"))


@contextlib.asynccontextmanager
async def keep_waiting(tenant: Tenant) -> AsyncIterator[None]:
    async with waiting(tenant) as asked:
        yield
    ok(asked.result())


async def wait_briefly(tenant: Tenant) -> httpx.Response:
    async with waiting(tenant) as asked:
        pass
    return asked.result()


@contextlib.asynccontextmanager
async def sending(tenant: Tenant) -> AsyncIterator[None]:
    body = HeldBody(b'{"prompt": "x", "more": "' + b"x" * 30_000, b'"}')
    sent = asyncio.create_task(tenant.ask("POST", "/tokenize", content=body, headers=JSON))  # type: ignore[arg-type]
    await until(lambda: tenant.used(Resource.INPUT_BYTES) > 30_000)
    yield
    body.go_on.set()
    ok(await sent)


async def send_large(tenant: Tenant) -> httpx.Response:
    return await tenant.ask("POST", "/tokenize", json={"prompt": "x", "more": "x" * 20_000})


LARGE_REPLY = "/openapi.json"


@contextlib.asynccontextmanager
async def not_reading(tenant: Tenant) -> AsyncIterator[None]:
    """Without a socket, whose buffers would take all of the reply."""
    reader = Reader()
    scope = {
        "type": "http",
        "method": "GET",
        "path": LARGE_REPLY,
        "query_string": b"",
        "headers": [(b"host", b"test"), (b"authorization", f"Bearer {tenant.name}-key".encode())],
    }
    reader.task = asyncio.create_task(tenant.served.app(scope, reader.receive, reader.send))
    await until(lambda: tenant.used(Resource.OUTPUT_BYTES) > 0)
    yield
    assert len(await reader.body()) > 2**17


async def read_large(tenant: Tenant) -> httpx.Response:
    return await tenant.ask("GET", LARGE_REPLY)


# ---- What fades with time.


async def complete(tenant: Tenant) -> httpx.Response:
    """2 tokens, and 12 of the answer."""
    return await tenant.ask("POST", "/v1/completions", json={"prompt": "Hi", "max_tokens": 100})


@contextlib.asynccontextmanager
async def completed(tenant: Tenant) -> AsyncIterator[None]:
    ok(await complete(tenant))
    yield


async def tokenize_large(tenant: Tenant) -> httpx.Response:
    return await tenant.ask("POST", "/tokenize", json={"prompt": "some words " * 300})


@contextlib.asynccontextmanager
async def working(tenant: Tenant) -> AsyncIterator[None]:
    body = {"prompt": "some words " * 90_000}
    async with asyncio.timeout(300):
        while not tenant.served.accounts.cpu_wait_s(tenant.name):
            ok(await tenant.ask("POST", "/tokenize", json=body))
    yield


# ---- What makes room.


async def respond(tenant: Tenant, number: int) -> str:
    body = {"input": f"{number}" * 100}
    response: str = ok(await tenant.ask("POST", "/v1/responses", json=body))["id"]
    return response


def is_at(path: str) -> Callable[[Tenant, str], Awaitable[bool]]:
    async def has(tenant: Tenant, thing: str) -> bool:
        response = await tenant.ask("GET", path.format(thing))
        assert response.status_code in (200, 404)
        return response.status_code == 200

    return has


async def use_grammar(tenant: Tenant, number: int) -> str:
    body = {"prompt": "x", "guided_regex": f"a{{{number}}}"}
    ok(await tenant.ask("POST", "/v1/completions", json=body))
    return body["guided_regex"]


async def remembers(tenant: Tenant, regex: str) -> bool:
    assert tenant.served.checker is not None
    return tenant.served.checker.knows(tenant.name, grammars.regex(regex))


async def leave_trace(tenant: Tenant, number: int) -> str:
    body = {"prompt": f"{number}", "max_tokens": 1}
    request: str = ok(await tenant.ask("POST", "/v1/completions", json=body))["id"]
    return request


WAYS: Mapping[Resource, Refused | MakesRoom] = {
    Resource.RT_REQUESTS: answers("2", "/v1/completions", 2),
    Resource.BE_REQUESTS: answers("2", "/v1/completions", 2, service_tier="flex"),
    Resource.SESSIONS: things("1", open_session, deletes("/v1/sessions")),
    Resource.SESSION_CHARS: things("6000", open_session, deletes("/v1/sessions")),
    Resource.WAITS: Refused(limit="1", fill=keep_waiting, more=wait_briefly, retry_after_s=1.0),
    Resource.FILES: things("1", upload, deletes("/v1/files")),
    Resource.FILE_BYTES: things("300", upload, deletes("/v1/files")),
    Resource.BATCHES: things("1", create_batch, end_batch),
    Resource.BATCH_TOKENS: things("20", validated_batch, end_batch, is_refused=failed_batch),
    Resource.RESPONSES: MakesRoom(limit="3", make=respond, has=is_at("/v1/responses/{}")),
    Resource.RESPONSE_BYTES: MakesRoom(limit="8KiB", make=respond, has=is_at("/v1/responses/{}")),
    Resource.BACKGROUND: things("1", respond_later, deletes("/v1/responses")),
    Resource.INPUT_BYTES: Refused(limit="40KiB", fill=sending, more=send_large),
    Resource.OUTPUT_BYTES: Refused(limit="80KiB", fill=not_reading, more=read_large),
    Resource.CPU_SECONDS: Refused(
        limit="1", fill=working, more=tokenize_large, retry_after_s=None, passes=True
    ),
    Resource.REQUESTS_PER_MINUTE: Refused(
        limit="1", fill=completed, more=complete, retry_after_s=60.0, passes=True
    ),
    Resource.TOKENS_PER_MINUTE: Refused(
        limit="15", fill=completed, more=complete, retry_after_s=4.0, passes=True
    ),
    Resource.GRAMMARS: answers(
        "1", "/v1/chat/completions", 1, response_format={"type": "json_object"}
    ),
    Resource.CACHED_GRAMMARS: MakesRoom(limit="3", make=use_grammar, has=remembers),
    Resource.TRACES: MakesRoom(limit="3", make=leave_trace, has=is_at("/v1/requests/{}/trace")),
}


@contextlib.asynccontextmanager
async def serving(folder: Path, resource: Resource, limit: str) -> AsyncIterator[Served]:
    """The checks of grammars, and the engine that keeps traces, are those of a real server."""
    keys, data = folder / "keys", folder / "data"
    keys.write_text(
        "".join(f"{name} {name}-key max_{_option(resource)}={limit}\n" for name in ("ann", "bob"))
    )
    options = {"api_keys": str(keys), "api_key": "one-key", "metrics_access": "key"}
    if resource is Resource.TRACES:
        save_chat_llama(folder)
        async with model_server(folder, data, server=options) as made:
            yield Served(made.http, made.state.accounts)
        return
    checker = None
    if resource is Resource.CACHED_GRAMMARS:
        config = ServerConfig(**options)
        accounts = load_tenants(config).accounts(config, max_queue=8)
        checker = GrammarChecker(save_tokenizer(folder), 440, [1], accounts)
    try:
        async with batch_server(data, key="ann-key", grammars=checker, **options) as server:
            server.engine.held = HELD
            live, clock = server.live.server, server.clock
            yield Served(server.http, live.accounts, server.engine, live.app, clock, checker)
    finally:
        if checker is not None:
            checker.close()


@pytest.mark.parametrize("resource", Resource)
async def test_a_limit_holds_for_its_tenant_alone(tmp_path: Path, resource: Resource) -> None:
    way = WAYS[resource]
    async with serving(tmp_path, resource, way.limit) as served:
        await way.check(Tenant("ann", served), Tenant("bob", served), resource)


def test_each_resource_has_a_way_to_fill_it() -> None:
    assert set(WAYS) == set(Resource)
