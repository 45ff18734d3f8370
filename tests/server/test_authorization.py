"""Which role may use which route: a matrix of every route of the server and every role.

A new route fails this test until it has a rule here.
"""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import httpx
import pytest

from bros.server.operations.openapi import ApiRoute
from support.scripted_server import assert_envelope
from support.whole_server import ROWS, WholeServer, running_whole_server

SECRET = "mine-only"
"""In the owner's session: no other role may see it."""


class Role(enum.Enum):
    """The value is the key that it sends."""

    NO_KEY = None
    WRONG_KEY = "wrong-key"
    OTHER = "bob-key"
    OPERATOR = "one-key"
    OWNER = "ann-key"  # the last one: it may end what the request is about

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.value is None else {"authorization": f"Bearer {self.value}"}


class Rule(enum.Enum):
    """Who may use a route.

    ALL: everybody, without a key.
    KEY: each role with a key; the reply is about nothing that tenants own.
    LIST: each role with a key sees what is its own.
    OWN: the owner of what it is about; for all others it does not exist.
    OPERATOR: the operator.
    """

    ALL = "all"
    KEY = "key"
    LIST = "list"
    OWN = "own"
    OPERATOR = "operator"


class Use(NamedTuple):
    """A request that the route answers with 200 to a role that may use it. @name: see LIVE."""

    rule: Rule
    body: Any = None
    form: bool = False
    query: str = ""


CHAT = {"messages": [{"role": "user", "content": "Hi"}]}
BATCH = {"input_file_id": "@file", "endpoint": "/v1/completions", "completion_window": "24h"}
CALL = {"template": "Say {{output:o}}", "parameters": [{"name": "o", "variable": "said"}]}
SUBMIT = {
    "session_id": "@sid",
    "prompt": "Say {{x}}",
    "placeholders": [{"name": "x", "in_out": True, "semantic_var_id": "new"}],
}

RULES: Mapping[str, Use] = {
    "get /": Use(Rule.ALL),
    "get /health": Use(Rule.ALL),
    "get /health/live": Use(Rule.ALL),
    "get /health/ready": Use(Rule.ALL),
    "get /metrics": Use(Rule.OPERATOR),
    "get /version": Use(Rule.KEY),
    "get /openapi.json": Use(Rule.KEY),
    "post /v1/chat/completions": Use(Rule.KEY, CHAT),
    "post /v1/completions": Use(Rule.KEY, {"prompt": "Hi"}),
    "post /v1/embeddings": Use(Rule.KEY, {"input": "Hi"}),
    "post /v1/score": Use(Rule.KEY, {"text_1": "Hi", "text_2": ["Hello"]}),
    "post /score": Use(Rule.KEY, {"text_1": "Hi", "text_2": ["Hello"]}),
    "post /v1/rerank": Use(Rule.KEY, {"query": "Hi", "documents": ["Hello"]}),
    "post /rerank": Use(Rule.KEY, {"query": "Hi", "documents": ["Hello"]}),
    "post /v2/rerank": Use(Rule.KEY, {"query": "Hi", "documents": ["Hello"]}),
    "get /v1/models": Use(Rule.KEY),
    "get /v1/models/{model}": Use(Rule.KEY),
    "post /tokenize": Use(Rule.KEY, {"prompt": "Hi"}),
    "post /detokenize": Use(Rule.KEY, {"tokens": [1]}),
    "get /v1/requests/{id}/trace": Use(Rule.OWN),
    "post /v1/files": Use(Rule.KEY, form=True),
    "get /v1/files": Use(Rule.LIST),
    "get /v1/files/{id}": Use(Rule.OWN),
    "delete /v1/files/{id}": Use(Rule.OWN),
    "get /v1/files/{id}/content": Use(Rule.OWN),
    "post /v1/batches": Use(Rule.OWN, BATCH),
    "get /v1/batches": Use(Rule.LIST),
    "get /v1/batches/{id}": Use(Rule.OWN),
    "post /v1/batches/{id}/cancel": Use(Rule.OWN),
    "post /v1/messages": Use(Rule.KEY, {**CHAT, "max_tokens": 5}),
    "post /v1/messages/count_tokens": Use(Rule.KEY, CHAT),
    "post /v1/responses": Use(Rule.KEY, {"input": "Hi"}),
    "post /v1/responses/input_tokens": Use(Rule.KEY, {"input": "Hi"}),
    "get /v1/responses/{id}": Use(Rule.OWN),
    "delete /v1/responses/{id}": Use(Rule.OWN),
    "post /v1/responses/{id}/cancel": Use(Rule.OWN),
    "get /v1/responses/{id}/input_items": Use(Rule.OWN),
    "post /v1/sessions": Use(Rule.KEY, {}),
    "get /v1/sessions": Use(Rule.LIST),
    "get /v1/sessions/{sid}": Use(Rule.OWN),
    "delete /v1/sessions/{sid}": Use(Rule.OWN),
    "get /v1/sessions/{sid}/graph": Use(Rule.OWN),
    "get /v1/sessions/{sid}/graph.mmd": Use(Rule.OWN),
    "get /v1/sessions/{sid}/graph.dot": Use(Rule.OWN),
    "post /v1/sessions/{sid}/requests": Use(Rule.OWN, CALL),
    "delete /v1/sessions/{sid}/requests/{rid}": Use(Rule.OWN),
    "post /v1/sessions/{sid}/requests/{rid}/fail": Use(Rule.OWN, {"message": "It failed."}),
    "post /v1/sessions/{sid}/variables": Use(Rule.OWN, {"name": "new"}),
    "get /v1/sessions/{sid}/variables": Use(Rule.OWN),
    "get /v1/sessions/{sid}/variables/{vid}": Use(Rule.OWN, query="wait=false"),
    "put /v1/sessions/{sid}/variables/{vid}": Use(Rule.OWN, {"value": "text"}),
    "patch /v1/sessions/{sid}/variables/{vid}": Use(Rule.OWN, {"criteria": "latency"}),
    "post /v1/submit": Use(Rule.OWN, SUBMIT),
    "post /v1/get": Use(Rule.OWN, {"session_id": "@sid", "semantic_var_id": "@ready"}),
    "get /admin/tenants": Use(Rule.OPERATOR),
    "get /admin/replicas": Use(Rule.OPERATOR),
    "post /admin/replicas/{number}/drain": Use(Rule.OPERATOR),
    "post /admin/replicas/{number}/resume": Use(Rule.OPERATOR),
}
"""Every route of a server that has all of them."""


def expected(rule: Rule, role: Role) -> int:
    if rule is Rule.ALL:
        return 200
    if role in (Role.NO_KEY, Role.WRONG_KEY):
        return 401
    if rule is Rule.OPERATOR:
        return 200 if role is Role.OPERATOR else 403
    if rule is Rule.OWN:
        return 200 if role is Role.OWNER else 404
    return 200


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def server(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WholeServer]:
    """What it has belongs to ann."""
    folder = tmp_path_factory.mktemp("store")
    keys = folder / "keys"
    keys.write_text("ann ann-key\nbob bob-key\n")
    options = {"api_key": "one-key", "api_keys": str(keys), "metrics_access": "key"}
    with running_whole_server(
        runner,
        folder,
        tenant="ann",
        headers=Role.OWNER.headers,
        operator=Role.OPERATOR.headers,
        **options,
    ) as made:
        yield made


def test_every_route_has_a_rule(server: WholeServer) -> None:
    routes = server.app.routes
    assert all(isinstance(route, ApiRoute) for route in routes)
    assert {f"{route.method} {route.path_format}" for route in routes} == RULES.keys()  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RULES)
def test_a_route_is_for_the_roles_of_its_rule(
    runner: asyncio.Runner, server: WholeServer, name: str
) -> None:
    runner.run(check(server, name))


async def check(server: WholeServer, name: str) -> None:
    use = RULES[name]
    server.engine.go_on.clear()
    server.engine.hold_after = 0 if "cancel" in name else None  # the batch would end by itself
    server.live.clear()
    await server.populate()
    session = f"/v1/sessions/{server.live['sid']}"
    secret = {"id": SECRET, "name": SECRET, "value": SECRET}
    await server.ask("POST", f"{session}/variables", json=secret)
    method, path = name.split(" ")
    words = {"files": "file", "batches": "batch", "requests": "trace", "responses": "response"}
    for word, live in words.items():
        path = path.replace(f"/v1/{word}/{{id}}", f"/v1/{word}/@{live}")
    path = alive(path.replace("{", "@").replace("}", ""), server.live)
    options: dict[str, Any] = {}
    if use.body is not None:
        options["json"] = alive(use.body, server.live)
    if use.form:
        options |= {"files": {"file": ("rows.jsonl", ROWS % 1)}, "data": {"purpose": "batch"}}
    for role in Role:
        request = server.http.build_request(
            method.upper(), f"{path}?{use.query}" if use.query else path, **options
        )
        del request.headers["authorization"]
        request.headers.update(role.headers)
        response = await server.http.send(request)
        wanted = expected(use.rule, role)
        assert response.status_code == wanted, (role, response.text)
        if wanted != 200:
            assert_envelope(response, wanted)
        if role is not Role.OWNER:
            asked = path + json.dumps(options.get("json"))
            check_nothing_is_told(response.text, asked, server.live)
    server.engine.go_on.set()


LOCAL, REMOTE = ("127.0.0.1", 50_000), ("203.0.113.5", 50_000)


@pytest.fixture(scope="module")
def keyless(
    runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WholeServer]:
    with running_whole_server(runner, tmp_path_factory.mktemp("keyless")) as made:
        yield made


@pytest.mark.parametrize("name", [name for name, use in RULES.items() if use.rule is Rule.OPERATOR])
def test_without_keys_the_operator_is_on_the_same_machine(
    runner: asyncio.Runner, keyless: WholeServer, name: str
) -> None:
    """Whoever only reaches the server cannot drain its replicas."""
    method, path = name.replace("{number}", "1").split(" ")

    async def status(client: tuple[str, int], **headers: str) -> int:
        transport = httpx.ASGITransport(keyless.app, client=client)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return (await http.request(method.upper(), path, headers=headers)).status_code

    for_all = path == "/metrics"
    assert runner.run(status(LOCAL)) == 200
    assert runner.run(status(("::1", 50_000))) == 200
    assert runner.run(status(REMOTE)) == (200 if for_all else 403)
    proxied = {"x-forwarded-for": "203.0.113.5"}
    assert runner.run(status(LOCAL, **proxied)) == (200 if for_all else 403)


def check_nothing_is_told(text: str, asked: str, live: Mapping[str, str]) -> None:
    """Errors may repeat what was asked for."""
    hidden = {SECRET} | {live[name] for name in ("sid", "rid", "file", "batch", "response")}
    assert not [each for each in hidden if each in text and each not in asked]


def alive(value: Any, live: Mapping[str, str]) -> Any:
    """`value` with the ids of what exists in place of @name."""
    if isinstance(value, str):
        for name, found in live.items():
            value = value.replace(f"@{name}", found)
        return value
    if isinstance(value, dict):
        return {key: alive(each, live) for key, each in value.items()}
    return value
