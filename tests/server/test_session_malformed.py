"""Requests about sessions that no client should send: refused in the envelope, nothing breaks."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.scripted_server import JSON, Server, assert_envelope
from support.session_server import SessionClient, keeping, ok

CALL: dict[str, Any] = {
    "name": "f",
    "template": "A {{input:x}} B {{output:y}}",
    "parameters": [
        {"name": "x", "role": "input", "variable": "in"},
        {
            "name": "y",
            "variable": "out",
            "transforms": "strip",
            "sampling": {"temperature": 0, "stop": ["x"]},
            "criteria": {"perf": "latency", "deadline_ms": 1000},
        },
    ],
    "sampling": {"max_tokens": 3, "logit_bias": {"1": 2.0}},
}
GOOD: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", ""): {"criteria": "latency", "ttl_s": 60, "tenant": "t", "metadata": {"a": "b"}},
    ("POST", "/s/requests"): CALL,
    ("POST", "/s/requests "): {"requests": [CALL, {"messages": [{"role": "user", "content": ""}]}]},
    ("POST", "/s/variables"): {"name": "v", "id": "v", "value": "text"},
    ("PUT", "/s/variables/free"): {"value": "text"},
    ("PATCH", "/s/variables/free"): {"criteria": "tpot"},
    ("POST", "/s/requests/none/fail"): {"message": "no"},
    ("POST", "paper submit"): {
        "prompt": "{{output:y}}",
        "placeholders": [{"name": "y", "in_out": True, "semantic_var_id": "p", "transforms": ""}],
        "session_id": "s",
    },
    ("POST", "paper get"): {"semantic_var_id": "free", "criteria": "latency", "session_id": "s"},
}
WRONG: tuple[Any, ...] = (
    *(5, -1, 1e300, True, [], [None], [[]], {}, {"a": {"b": "c"}}, [1.5, "two", None]),
    *("x" * 200_000, "\x00", "../..", "{{", "{{output:y}} {{output:y}}", 10**400),
)


@pytest.fixture
async def kept(server: Server) -> AsyncIterator[Server]:
    async with keeping(server):
        session = SessionClient(server.http, "s")
        ok(await server.http.post("/v1/sessions", json={"id": "s"}))
        ok(await session.ask("POST", "/variables", json={"id": "free"}))
        yield server


def url_of(path: str) -> str:
    paper = {"paper submit": "/v1/submit", "paper get": "/v1/get"}
    return paper.get(path) or f"/v1/sessions{path.strip()}"


def places(value: Any) -> list[list[str | int]]:
    """Where the values of a body are."""
    found: list[list[str | int]] = []
    items: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        items = list(value.items())
    elif isinstance(value, list):
        items = list(enumerate(value))
    for key, inner in items:
        found += [[key], *([key, *rest] for rest in places(inner))]
    return found


def spoilt(rng: random.Random, body: dict[str, Any]) -> bytes:
    """With a wrong value somewhere, with an unknown field, or not JSON."""
    kind = rng.random()
    changed = copy.deepcopy(body)
    if kind < 0.7:
        *path, last = rng.choice(places(changed))
        inner: Any = changed
        for step in path:
            inner = inner[step]
        inner[last] = rng.choice(WRONG)
    elif kind < 0.85:
        changed[rng.choice(["extra", "Template", "session", ""])] = 1
    else:
        text = json.dumps(changed).encode()
        return rng.choice([text[: rng.randrange(1, len(text))], b"[]", b"", b"\xff", b"NaN"])
    return json.dumps(changed).encode()


async def test_a_thousand_malformed_requests(kept: Server) -> None:
    """What is taken in spite of it is harmless; nothing is a failure of the server."""
    rng = random.Random(20_261_122)
    refused = 0
    for _ in range(1000):
        (method, path), body = rng.choice(list(GOOD.items()))
        content = spoilt(rng, body)
        if (method, path) == ("POST", "paper get"):
            content = content.replace(b'"free"', b'"nobody"')
        response = await kept.http.request(method, url_of(path), content=content, headers=JSON)
        assert response.status_code in (200, 400, 404, 409, 424), (content[:300], response.text)
        if response.status_code == 400:
            assert_envelope(response, 400)
            refused += 1
    assert refused > 500
    assert (await kept.http.get("/health")).status_code == 200
    ok(await kept.http.get("/v1/sessions/s"))


async def test_the_requests_that_were_spoilt_are_good(kept: Server) -> None:
    for (method, path), body in GOOD.items():
        response = await kept.http.request(method, url_of(path), json=body)
        expected = {200}
        if path.endswith("/fail"):
            expected = {404}
        elif path.endswith("requests "):
            expected = {409}  # the same outputs again
        assert response.status_code in expected, (path, response.text)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"template": "{{output:y}}", "messages": [{"role": "user", "content": ""}]}, "messages"),
        ({}, "template"),
        ({"template": "{{output:y}}", "native": True}, "native"),
        ({"template": "{{output:y}}", "sampling": {"temperature": -1}}, "sampling.temperature"),
        ({"template": "{{output:y}}", "sampling": {"n": 2}}, "sampling.n"),
        ({"template": "{{output:y}}", "parameters": [{"name": "z"}]}, "parameters[0].name"),
        (
            {
                "template": "{{output:y}}",
                "parameters": [{"name": "y", "sampling": {"top_p": 2}}],
            },
            "parameters[0].sampling.top_p",
        ),
        ({"template": "{{output:y"}, "template"),
        (
            {"template": "{{output:y}}", "parameters": [{"name": "y", "transforms": "spin"}]},
            "parameters[0].transforms",
        ),
        (
            {"template": "{{output:y}}", "parameters": [{"name": "y", "criteria": "soon"}]},
            "parameters[0].criteria",
        ),
        ({"template": "{{output:y}}", "timeout_s": 601, "wait": True}, "timeout_s"),
    ],
)
async def test_the_place_of_a_mistake_is_named(
    kept: Server, body: dict[str, Any], param: str
) -> None:
    path = "/v1/sessions/s/requests"
    error = assert_envelope(await kept.http.post(path, json=body), 400)
    assert error["param"] == param
    if "timeout_s" not in body:
        good = {"template": "{{output:y}}"}
        error = assert_envelope(await kept.http.post(path, json={"requests": [good, body]}), 400)
        assert error["param"] == f"requests[1].{param}"
    assert ok(await kept.http.get("/v1/sessions/s"))["requests"] == []


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"wait": "yes"}, "wait"),
        ({"wait": "true", "timeout": "0"}, "timeout"),
        ({"wait": "true", "timeout": "601"}, "timeout"),
        ({"wait": "true", "timeout": "nan"}, "timeout"),
        ({"stream": "1"}, "stream"),
        ({"wait": "true", "criteria": "soon"}, "criteria"),
        ({"wait": "true", "deadline_ms": "-5"}, "deadline_ms"),
        ({"stream": "true", "tpot_ms": "x"}, "tpot_ms"),
        ({"criteria": "latency"}, "criteria"),
        ({"timeout": "5"}, "timeout"),
        ({"wait": "true", "timeout_s": "5"}, "timeout_s"),
        ({"wiat": "true"}, "wiat"),
    ],
)
async def test_queries_are_checked(kept: Server, query: dict[str, str], param: str) -> None:
    response = await kept.http.get("/v1/sessions/s/variables/free", params=query)
    assert assert_envelope(response, 400)["param"] == param


ODD_IDS = (
    "nothing",
    "x" * 5000,
    "a%20b",
    "%00",
    "%E2%82%AC",
    "..%5C",
    "%3Cscript%3E",
    "%25",
    "'--",
)


@pytest.mark.parametrize("odd", ODD_IDS)
async def test_ids_that_are_not_there(kept: Server, odd: str) -> None:
    """Whatever they are made of: 404 with a message of bounded length."""
    asked = [
        ("GET", f"/{odd}"),
        ("DELETE", f"/{odd}"),
        ("GET", f"/{odd}/graph"),
        ("GET", f"/{odd}/graph.mmd"),
        ("GET", f"/{odd}/graph.dot"),
        ("GET", f"/{odd}/variables"),
        ("GET", f"/s/variables/{odd}"),
        ("GET", f"/s/variables/{odd}?wait=true"),
        ("GET", f"/s/variables/{odd}?stream=true"),
        ("DELETE", f"/s/requests/{odd}"),
    ]
    bodies = [
        ("POST", f"/{odd}/requests", {"template": "{{output:y}}"}),
        ("POST", f"/{odd}/variables", {}),
        ("PUT", f"/s/variables/{odd}", {"value": "v"}),
        ("PATCH", f"/s/variables/{odd}", {"criteria": "latency"}),
        ("POST", f"/s/requests/{odd}/fail", {}),
    ]
    responses = [await kept.http.request(method, f"/v1/sessions{path}") for method, path in asked]
    responses += [
        await kept.http.request(method, f"/v1/sessions{path}", json=body)
        for method, path, body in bodies
    ]
    for response in responses:
        error = assert_envelope(response, 404)
        assert error["code"] in ("session_not_found", "variable_not_found", "request_not_found")
        assert len(error["message"]) < 1000


@pytest.mark.parametrize("wrong", ["", ".", "..", "a/b", "a b", "é", "-x", "x" * 129, "a\n", "a?"])
async def test_ids_that_cannot_be(kept: Server, wrong: str) -> None:
    call = {"template": "{{output:y}}", "parameters": [{"name": "y", "variable": wrong}]}
    for path, body, param in (
        ("", {"id": wrong}, "id"),
        ("/s/variables", {"id": wrong}, "id"),
        ("/s/requests", call, "parameters[0].variable"),
    ):
        error = assert_envelope(await kept.http.post(f"/v1/sessions{path}", json=body), 400)
        assert error["param"] == param
    error = assert_envelope(await kept.http.post("/v1/sessions", json={"id": "sess-1"}), 400)
    assert error["param"] == "id"


async def test_other_methods_are_not_allowed(kept: Server) -> None:
    for method, path in (
        *(("PUT", ""), ("PATCH", "/s"), ("POST", "/s"), ("GET", "/s/requests")),
        *(("DELETE", "/s/variables/free"), ("GET", "/s/requests/r/fail"), ("POST", "/s/graph")),
    ):
        assert_envelope(await kept.http.request(method, f"/v1/sessions{path}"), 405)
    for path in ("/v1/submit", "/v1/get"):
        assert_envelope(await kept.http.get(path), 405)
