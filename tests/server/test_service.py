"""Models, tokens, health, the API description and the page."""

from __future__ import annotations

import re
from typing import Any

import pytest
from starlette.routing import Route

import bros
from support.scripted_server import Server, assert_envelope


async def test_models(server: Server) -> None:
    card = {
        "id": "scripted",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "bros",
        "root": "org/scripted",
        "max_model_len": 500,
        "type": "model",
        "display_name": "scripted",
        "created_at": "2023-11-14T22:13:20Z",
        "lifecycle": "active",
    }
    assert (await server.http.get("/v1/models")).json() == {
        "object": "list",
        "data": [card],
        "has_more": False,
        "first_id": "scripted",
        "last_id": "scripted",
    }
    assert (await server.http.get("/v1/models/scripted")).json() == card
    assert (await server.http.get("/v1/models/org/scripted")).json() == card
    error = assert_envelope(await server.http.get("/v1/models/other"), 404)
    assert error["code"] == "model_not_found"


async def test_tokenize_and_back(server: Server) -> None:
    reply = await server.http.post("/tokenize", json={"prompt": "né", "return_token_strs": True})
    body = reply.json()
    assert body["tokens"] == server.tokenizer.encode("né")
    assert (body["count"], body["max_model_len"]) == (3, 500)
    assert body["token_strs"] == ["n", "\ufffd", "\ufffd"]
    back = await server.http.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "né"}


async def test_tokenize_messages_as_chat_does(server: Server) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = (await server.http.post("/tokenize", json={"messages": messages})).json()
    await server.chat(messages=messages)
    assert body["tokens"] == list(server.last().prompt_token_ids)
    text = (await server.http.post("/detokenize", json={"tokens": body["tokens"]})).json()
    assert text["prompt"].startswith("<|im_start|>user\nHi<|im_end|>")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user"}]}, "prompt"),
        ("/tokenize", {"prompt": 3}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, "2"]}, "tokens[1]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
    ],
)
async def test_wrong_tokens_requests(
    server: Server, path: str, body: dict[str, Any], param: str
) -> None:
    assert assert_envelope(await server.http.post(path, json=body), 400)["param"] == param


@pytest.mark.parametrize("path", ["/health", "/health/ready"])
async def test_health_follows_the_engine(server: Server, path: str) -> None:
    response = await server.http.get(path)
    assert (response.status_code, response.json()) == (200, {"status": "ok"})
    server.engine.alive = False
    response = await server.http.get(path)
    assert (response.status_code, response.json()) == (503, {"status": "engine down"})


async def test_a_server_is_live_while_its_engine_is_not(server: Server) -> None:
    for server.engine.alive in (True, False):
        response = await server.http.get("/health/live")
        assert (response.status_code, response.json()) == (200, {"status": "ok"})


async def test_version(server: Server) -> None:
    assert (await server.http.get("/version")).json() == {"version": bros.__version__}


async def test_api_description_covers_every_route_and_resolves(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    routes: dict[str, set[str]] = {}
    for route in server.app.routes:
        assert isinstance(route, Route)
        routes.setdefault(re.sub(r":\w+}", "}", route.path), set()).update(route.methods or ())
    assert document["paths"].keys() == routes.keys()
    for path, methods in document["paths"].items():
        assert {method.upper() for method in methods} == routes[path] - {"HEAD"}
        assert all(operation["summary"] for operation in methods.values())
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', str(document).replace("'", '"')))
    assert references
    assert references <= document["components"]["schemas"].keys()
    chat = document["components"]["schemas"]["ChatCompletionRequest"]
    assert chat["required"] == ["messages"]
    assert {"slo", "service_tier", "top_k", "stop"} <= chat["properties"].keys()
    fields = document["components"]["schemas"]["SloFields"]["properties"]
    assert all(field["description"] for field in fields.values())
    for path in ("/v1/chat/completions", "/v1/completions"):
        busy = document["paths"][path]["post"]["responses"]["429"]
        assert busy["headers"].keys() == {"Retry-After"}
        headers = {each["name"] for each in document["paths"][path]["post"]["parameters"]}
        objectives = {f"x-slo-{name}-ms" for name in ("ttft", "tpot", "gap", "deadline")}
        assert headers == objectives | {"x-bros-session", "x-bros-node", "x-bros-inputs"}
    trace = document["paths"]["/v1/requests/{id}/trace"]["get"]
    assert [parameter["name"] for parameter in trace["parameters"]] == ["id"]


async def test_every_reason_to_wait_is_described(server: Server) -> None:
    document = (await server.http.get("/openapi.json")).json()
    waits = document["components"]["schemas"]["ChoiceTrace"]["properties"]["waits_ms"]
    for reason in ("time", "rows", "tokens", "memory", "turn", "grammar", "yielded"):
        assert f"{reason} (" in waits["description"]


async def test_page_is_self_contained(server: Server) -> None:
    response = await server.http.get("/")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", response.text)
    assert "/v1/chat/completions" in response.text
