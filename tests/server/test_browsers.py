"""What a web page in a browser on the server's machine can do: nothing, unless it is allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.core.config import ServerConfig
from bros.core.errors import ConfigError
from bros.server.browsers import BrowserRules, host_name
from support.scripted_server import Server, assert_envelope
from support.whole_server import WholeServer, running_whole_server

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}
HERE, LAN = ("127.0.0.1", 8000), ("192.168.1.5", 8000)


async def send(
    method: str = "POST",
    path: str = CHAT,
    *,
    host: str = "localhost:8000",
    reached: tuple[str, int] = HERE,
    headers: Mapping[str, str] | None = None,
    content: Any = None,
    **config: Any,
) -> httpx.Response:
    """The answer of a server to a request on a connection to the address `reached`."""
    server = Server(**config)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await server.app({**scope, "server": reached}, receive, send)

    async with server.http, httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        sent = {"json": BODY} if content is None and method == "POST" else {"content": content}
        url = f"http://{reached[0]}:{reached[1]}{path}"
        answer = await client.request(
            method, url, headers={"host": host, **(headers or {})}, **sent
        )
        if answer.status_code == 403:
            assert server.engine.submitted == []
        return answer


# ---- Content types.


OTHER_KINDS = (
    *("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""),
)
"""What a page may send without asking; empty: no content type."""

PAIR = {"query": "a river", "documents": ["the loire", "a cat"]}
PAPER = {"session_id": "@sid", "semantic_var_id": "@ready"}
BODIES: Mapping[str, dict[str, Any]] = {
    "post /v1/chat/completions": BODY,
    "post /v1/completions": {"prompt": "Hi"},
    "post /tokenize": {"prompt": "Hi"},
    "post /detokenize": {"tokens": [1]},
    "post /v1/messages": {**BODY, "max_tokens": 1},
    "post /v1/messages/count_tokens": BODY,
    "post /v1/embeddings": {"input": "Hi"},
    "post /v1/score": {"text_1": "a", "text_2": "b"},
    "post /score": {"text_1": "a", "text_2": "b"},
    "post /v1/rerank": PAIR,
    "post /rerank": PAIR,
    "post /v2/rerank": PAIR,
    "post /v1/batches": {
        "input_file_id": "@file",
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    },
    "post /v1/responses": {"input": "Hi"},
    "post /v1/responses/input_tokens": {"input": "Hi"},
    "post /v1/sessions": {},
    "post /v1/sessions/{sid}/requests": {"template": "Say {{output:new}}"},
    "post /v1/sessions/{sid}/requests/{rid}/fail": {"message": "No."},
    "post /v1/sessions/{sid}/variables": {"name": "other"},
    "put /v1/sessions/{sid}/variables/{vid}": {"value": "text"},
    "patch /v1/sessions/{sid}/variables/{vid}": {"criteria": {}},
    "post /v1/submit": {
        "session_id": "@sid",
        "prompt": "Say {{output:o}}",
        "placeholders": [{"name": "o", "in_out": True, "semantic_var_id": "new"}],
    },
    "post /v1/get": PAPER,
    "post /admin/replicas/{number}/drain": {},
}
"""Each operation with a JSON body -> a good one. @name as in a path: what WholeServer.live has."""


async def state_of(server: WholeServer) -> object:
    """Whatever a request can change."""
    views = [
        await server.ask("GET", path)
        for path in ("/v1/sessions", f"/v1/sessions/{server.live['sid']}", "/admin/replicas")
    ]
    stored = dict(server.store.batches.usage()), dict(server.store.responses.usage())
    return dict(server.accounts.held), stored, views, len(server.engine.submitted)


def test_every_body_that_does_not_say_that_it_is_json_is_a_415_and_does_nothing(
    tmp_path: Path,
) -> None:
    """Said to be JSON, the same bodies are good."""
    with asyncio.Runner() as runner, running_whole_server(runner, tmp_path) as server:

        async def send(operation: str, kind: str) -> httpx.Response:
            method, _, path = operation.partition(" ")
            body = json.dumps(BODIES[operation])
            for name, value in server.live.items():
                path, body = path.replace(f"{{{name}}}", value), body.replace(f"@{name}", value)
            headers = {"content-type": kind} if kind else {}
            return await server.http.request(method, path, content=body, headers=headers)

        async def send_all() -> None:
            document = await server.ask("GET", "/openapi.json")
            assert BODIES.keys() == {
                f"{method} {path}"
                for path, operations in document["paths"].items()
                for method, operation in operations.items()
                if "application/json" in operation.get("requestBody", {}).get("content", {})
            }
            await server.populate()
            before = await state_of(server)
            for operation in BODIES:
                for kind in OTHER_KINDS:
                    error = assert_envelope(await send(operation, kind), 415)
                    assert error["code"] == "unsupported_media_type"
                    assert "Content-Type: application/json" in error["message"]
            assert await state_of(server) == before
            for operation in BODIES:
                response = await send(operation, "application/json")
                assert response.status_code == 200, (operation, response.text)
            await server.clear()
            assert not server.accounts.held

        runner.run(send_all())


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=utf-8"])
async def test_json_is_accepted_with_its_parameters(kind: str) -> None:
    response = await send(
        path="/tokenize", content=b'{"prompt": "Hi"}', headers={"content-type": kind}
    )
    assert response.status_code == 200


async def test_an_empty_body_needs_no_content_type() -> None:
    error = assert_envelope(await send(content=b""), 400)
    assert error["code"] == "invalid_json"


# ---- Host.


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:8000", "[::1]:8000", "10.0.0.3"),
        *("gpu-box", "gpu-box.local:8000", "app.localhost", "host.docker.internal", ""),
    ],
)
async def test_local_names_are_accepted_on_a_local_connection(host: str) -> None:
    assert (await send(host=host)).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.com",
        "evil.com:8000",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "1.evil",
        "e.localhos",
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/metrics"), ("GET", "/")])
async def test_a_name_of_the_public_dns_is_refused_on_a_local_connection(
    host: str, method: str, path: str
) -> None:
    error = assert_envelope(await send(method, path, host=host), 403)
    assert error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in error["message"]


@pytest.mark.parametrize("reached", [("::1", 80), ("127.0.1.1", 80), ("::ffff:127.0.0.1", 80)])
async def test_every_loopback_address_is_local(reached: tuple[str, int]) -> None:
    rules = BrowserRules()
    assert not rules.accepts_host("evil.com", reached[0])


async def test_any_name_is_accepted_from_another_machine() -> None:
    assert (await send(host="llm.example.com", reached=LAN)).status_code == 200


@pytest.mark.parametrize("reached", [HERE, LAN])
@pytest.mark.parametrize(
    ("host", "status"),
    [
        *(("llm.example.com", 200), ("a.b.example.org", 200), ("127.0.0.1", 200)),
        *(("example.com", 403), ("example.org", 403), ("xexample.org", 403), ("gpu-box", 403)),
    ],
)
async def test_allowed_hosts_are_all_that_is_accepted(
    host: str, status: int, reached: tuple[str, int]
) -> None:
    allowed = "LLM.example.com, *.example.org"
    response = await send(host=host, reached=reached, allowed_hosts=allowed)
    assert response.status_code == status


async def test_a_star_allows_any_host() -> None:
    assert (await send(host="evil.com", allowed_hosts="*")).status_code == 200


def test_the_names_of_the_server_are_accepted() -> None:
    rules = BrowserRules.of(ServerConfig(host="llm.example.com"), "Box.example.com")
    assert rules.accepts_host("llm.example.com:8000", "127.0.0.1")
    assert rules.accepts_host("box.example.com", "127.0.0.1")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("allowed_hosts", "https://a.com"),
        ("allowed_hosts", "a.com:80"),
        ("allowed_origins", "example.com"),
        ("allowed_origins", "https://example.com/page"),
        ("allowed_origins", "https://*.example.com"),
    ],
)
def test_a_wrong_rule_names_its_flag(flag: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')}: '"):
        BrowserRules.of(ServerConfig(**{flag: value}), "box")


@pytest.mark.parametrize(
    ("header", "name"),
    [("A.com.:80", "a.com"), ("[::1]:80", "::1"), (" a ", "a"), ("a:b:c", "a"), ("[", "")],
)
def test_host_names(header: str, name: str) -> None:
    assert host_name(header) == name


# ---- Origin.


EVIL = {"origin": "https://evil.com"}


@pytest.mark.parametrize("origin", ["https://evil.com", "null", "http://localhost:3000", "file://"])
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models"), ("GET", "/")])
async def test_pages_of_other_origins_are_refused(origin: str, method: str, path: str) -> None:
    error = assert_envelope(await send(method, path, headers={"origin": origin}), 403)
    assert error["code"] == "origin_not_allowed"
    assert "--allowed-origins" in error["message"]


async def test_a_preflight_of_another_origin_is_refused() -> None:
    wanted = {**EVIL, "access-control-request-method": "POST"}
    response = await send("OPTIONS", headers=wanted)
    assert_envelope(response, 403)
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://localhost", "localhost:80"),
        ("https://box.local", "box.local"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
async def test_the_pages_of_the_server_may_use_it(origin: str, host: str) -> None:
    response = await send(host=host, headers={"origin": origin})
    assert response.status_code == 200
    assert "access-control-allow-origin" not in response.headers


ALLOWED = {"allowed_origins": "https://app.example.com:443, http://localhost:3000/", "api_key": "k"}
APP = {"origin": "https://app.example.com"}


async def test_a_preflight_of_an_allowed_origin_is_answered_without_a_key() -> None:
    response = await send(
        "OPTIONS",
        headers={
            **APP,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
            "access-control-request-private-network": "true",
        },
        **ALLOWED,
    )
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == "https://app.example.com"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == "authorization,content-type"
    assert response.headers["access-control-allow-private-network"] == "true"


@pytest.mark.parametrize(("key", "status"), [("k", 200), ("wrong", 401)])
async def test_an_allowed_page_can_read_answers_and_errors(key: str, status: int) -> None:
    response = await send(headers={**APP, "authorization": f"Bearer {key}"}, **ALLOWED)
    assert response.status_code == status
    assert response.headers["access-control-allow-origin"] == "https://app.example.com"
    assert "x-request-id" in response.headers["access-control-expose-headers"]
    assert response.headers["vary"] == "origin"


async def test_other_pages_stay_refused() -> None:
    assert (await send(headers=EVIL, **ALLOWED)).status_code == 403


async def test_a_star_allows_every_origin() -> None:
    response = await send(headers=EVIL, allowed_origins="*")
    assert response.headers["access-control-allow-origin"] == "https://evil.com"


# ---- Metrics.


@pytest.mark.parametrize(
    ("access", "key", "status"),
    [("open", "", 200), ("key", "", 401), ("key", "k", 200), ("off", "k", 404)],
)
async def test_access_to_metrics(access: str, key: str, status: int) -> None:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    response = await send("GET", "/metrics", headers=headers, metrics_access=access, api_key="k")
    assert response.status_code == status


def test_metrics_by_key_need_one() -> None:
    with pytest.raises(ConfigError, match="--metrics-access key: needs --api-key"):
        Server(metrics_access="key")
