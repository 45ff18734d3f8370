"""Bodies that no client should send: each is refused in the envelope, and nothing breaks."""

from __future__ import annotations

import gzip
import json
import random
from typing import Any

import pytest

from support.scripted_server import JSON, Server, assert_envelope

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
REQUIRED = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/tokenize": "prompt",
    "/detokenize": "tokens",
}
OPTIONAL = (
    *("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "min_tokens"),
    *("stop_token_ids", "logit_bias", "stream", "stream_options", "slo", "service_tier"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos", "user"),
    "cache_salt",
)


def wrong_value(rng: random.Random) -> Any:
    """A value that is right for none of the OPTIONAL fields."""
    return rng.choice(
        [
            -(10 ** rng.randint(20, 400)),
            10 ** rng.randint(20, 400),
            ["x", {"y": [None]}],
            [[[]]],
            {"a": {"b": "c"}, "ttft_ms": "soon", "include_usage": "maybe"},
            [1.5, "two", None],
            {"1": [], "include_usage": {}, "ttft_ms": -1},
        ]
    )


def wrong_type(rng: random.Random, path: str) -> bytes:
    body = dict(GOOD[path])
    if path.startswith("/v1/") and rng.random() < 0.7:
        body[rng.choice(OPTIONAL)] = wrong_value(rng)
    else:
        wrong: list[Any] = [5, True, {"a": 1}, [None], [[None]], [{"role": 1}], 1e300, [-1]]
        body[REQUIRED[path]] = rng.choice(wrong)
    return json.dumps(body).encode()


def truncated(rng: random.Random, path: str) -> bytes:
    text = json.dumps(GOOD[path]).encode()
    return text[: rng.randrange(len(text))]


def bad_utf8(rng: random.Random, path: str) -> bytes:
    text = json.dumps(GOOD[path]).encode()
    middle = text.index(b'"') + 1 + rng.randrange(3)
    return text[:middle] + rng.choice([b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\xf5"]) + text[middle:]


def lone_surrogate(rng: random.Random, path: str) -> bytes:
    return b'{"%s": "\\ud8%02x"}' % (REQUIRED[path].encode(), rng.randrange(256))


def deep(rng: random.Random, path: str) -> bytes:
    depth = rng.choice([300, 5_000, 200_000])
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    closed = rng.random() < 0.5
    inner = opening * depth + b"1" + (closing * depth if closed else b"")
    return b'{"messages": ' + inner + b', "prompt": "x"}'


def not_finite(rng: random.Random, path: str) -> bytes:
    text = json.dumps({**GOOD[path], "temperature": 0.123})
    number = rng.choice(["NaN", "Infinity", "-Infinity", "nan", "01", "1.", "+1", "0x10", "1e"])
    return text.replace("0.123", number).encode()


def not_an_object(rng: random.Random, path: str) -> bytes:
    return rng.choice([b"", b"[]", b"3", b'"x"', b"null", b"true", b"[{}]", b"\x00", b"{}{}"])


def noise(rng: random.Random, path: str) -> bytes:
    return rng.randbytes(rng.randint(1, 200))


def endless_number(rng: random.Random, path: str) -> bytes:
    digits = b"9" * rng.choice([4_000, 4_400, 100_000])
    field = REQUIRED[path].encode()
    return b'{"%s": %s}' % (field, digits)


KINDS = (
    *(wrong_type, wrong_type, truncated, bad_utf8, lone_surrogate, deep),
    *(not_finite, not_an_object, noise, endless_number),
)


async def test_a_thousand_malformed_requests(server: Server) -> None:
    rng = random.Random(20_261_121)
    for i in range(1000):
        path = PATHS[i % len(PATHS)]
        kind = rng.choice(KINDS)
        body = kind(rng, path)
        response = await server.http.post(path, content=body, headers=JSON)
        assert 400 <= response.status_code < 500, (kind.__name__, path, body[:200], response.text)
        assert_envelope(response, response.status_code)
    assert server.engine.submitted == []
    assert (await server.http.get("/health")).status_code == 200
    assert (await server.chat()).json()["choices"][0]["message"]["content"] == "Hello world"


@pytest.mark.parametrize("path", PATHS)
async def test_the_requests_that_were_spoilt_are_good(server: Server, path: str) -> None:
    assert (await server.http.post(path, json=GOOD[path])).status_code == 200


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
async def test_not_a_number_is_refused_even_in_unread_fields(server: Server, value: float) -> None:
    body = json.dumps({**GOOD["/v1/completions"], "whatever": [value]}).encode()
    error = assert_envelope(
        await server.http.post("/v1/completions", content=body, headers=JSON), 400
    )
    assert error["code"] == "invalid_json"


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"messages": ["a"]}, "messages[0]", "must be an object"),
        ({"messages": {"role": "user"}}, "messages", "must be a list"),
        ({"response_format": "json"}, "response_format", "must be an object"),
        ({"logit_bias": [1]}, "logit_bias", "must be an object"),
        ({"slo": 1}, "slo", "must be an object"),
    ],
)
async def test_objects_and_lists_have_the_names_of_json(
    server: Server, fields: dict[str, Any], param: str, reason: str
) -> None:
    body = {**GOOD["/v1/chat/completions"], **fields}
    error = assert_envelope(await server.http.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == (param, "invalid_type")
    assert error["message"] == f"Invalid value for '{param}': {reason}."


async def test_a_compressed_body_is_refused_as_such(server: Server) -> None:
    body = gzip.compress(json.dumps(GOOD["/v1/completions"]).encode())
    headers = {**JSON, "content-encoding": "gzip"}
    reply = await server.http.post("/v1/completions", content=body, headers=headers)
    error = assert_envelope(reply, 415)
    assert error["message"].startswith("Content-Encoding 'gzip' is not supported")
    plain = {**JSON, "content-encoding": "identity"}
    reply = await server.http.post("/v1/completions", json=GOOD["/v1/completions"], headers=plain)
    assert reply.status_code == 200
