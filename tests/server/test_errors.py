"""Every refusal in OpenAI's envelope, with the status and the field that say what is wrong."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from bros.core.errors import EngineDeadError, QueueFullError
from support.scripted_server import JSON, Server, assert_envelope

HI = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [3]}, "messages[0]"),
        ({"messages": [{"content": "Hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "robot", "content": "Hi"}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": "user", "content": 3}]}, "messages[1].content"),
        ({"messages": [{"role": "user", "content": ["Hi"]}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
        ({"model": 7}, "model"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": 1.5}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": "1"}, "seed"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_completion_tokens": -5}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": 3}, "stop"),
        ({"stop": ["a", None]}, "stop"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [1, "2"]}, "stop_token_ids[1]"),
        ({"stop_token_ids": [99_999]}, "stop_token_ids"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias.5"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"slo": 5}, "slo"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ],
)
async def test_wrong_field_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    error = assert_envelope(await server.chat(**fields), 400)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert server.engine.submitted == []


@pytest.mark.parametrize("kind", ["image_url", "input_text"])
async def test_the_type_of_parts_that_are_taken_is_named(server: Server, kind: str) -> None:
    """`input_text` is text, but of /v1/responses."""
    content = [{"type": "text", "text": "Hi"}, {"type": kind, kind: "x", "text": "x"}]
    error = assert_envelope(await server.chat(messages=[{"role": "user", "content": content}]), 400)
    assert f"part 1 is '{kind}'; use parts of the type 'text'" in error["message"]


async def test_missing_field_is_named(server: Server) -> None:
    for path, param in (("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")):
        error = assert_envelope(await server.http.post(path, json={}), 400)
        assert (error["param"], error["code"]) == (param, "missing_required_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"documents": [{"text": "a"}]}, "documents"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"return_token_ids": True}, "return_token_ids"),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    error = assert_envelope(await server.chat(**fields), 400)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [], "tool_choice": "auto"},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"response_format": {"type": "text"}, "modalities": ["text"]},
        {"skip_special_tokens": True, "use_beam_search": False},
        {"add_generation_prompt": True, "return_token_ids": False, "allowed_token_ids": None},
        {"top_p": 0, "allow_special_tokens": None},
        {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": []}, *HI]},
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
                *HI,
            ]
        },
    ],  # fmt: skip
)
async def test_harmless_values_of_the_same_fields_are_fine(
    server: Server, fields: dict[str, Any]
) -> None:
    assert (await server.chat(**fields)).status_code == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"prompt": [[-1]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
    ],
)
async def test_wrong_field_of_a_completion_is_named(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    assert assert_envelope(await server.complete(**fields), 400)["param"] == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("retry_after_s", "seconds", "milliseconds"),
    [(7.2, "8", "7200"), (0.1, "1", "1000"), (900.0, "120", "120000")],
)
async def test_full_queue_says_when_to_come_back(
    server: Server, stream: bool, retry_after_s: float, seconds: str, milliseconds: str
) -> None:
    server.engine.refusal = QueueFullError(8, retry_after_s)
    response = await server.chat(stream=stream)
    error = assert_envelope(response, 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert response.headers["retry-after"] == seconds
    assert response.headers["retry-after-ms"] == milliseconds


@pytest.mark.parametrize(
    ("retry_after_s", "header"), [(None, "5"), (0.2, "1"), (7.2, "8"), (900.0, "120")]
)
async def test_dead_engine_is_503(
    server: Server, retry_after_s: float | None, header: str | None
) -> None:
    server.engine.refusal = EngineDeadError("The engine died.", retry_after_s)
    response = await server.chat()
    error = assert_envelope(response, 503)
    assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
    assert response.headers.get("retry-after") == header


@pytest.mark.parametrize(("trouble", "status"), [("die_after", 503), ("fail_after", 500)])
async def test_failure_on_the_way_fails_a_whole_answer(
    server: Server, trouble: str, status: int
) -> None:
    setattr(server.engine, trouble, 2)
    assert assert_envelope(await server.chat(), status)["type"] == "server_error"


async def test_a_grammar_that_cannot_go_on_is_an_error_of_its_request(server: Server) -> None:
    """Clients try again after a 500, and here would fail again."""
    server.engine.fail_after, server.engine.to_blame = 2, "response_format"
    error = assert_envelope(await server.chat(), 400)
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_grammar")
    assert (error["param"], error["message"]) == ("response_format", "The numbers overflowed.")


async def test_one_failing_choice_stops_the_others(server: Server) -> None:
    server.engine.text = "x" * 90
    server.engine.fail_after, server.engine.fails = 2, "-0"
    assert_envelope(await server.complete(prompt=["a", "b"]), 500)
    _, other = server.engine.submitted
    assert server.engine.aborted == [other.request_id]


async def test_bug_of_ours_is_a_500_without_details(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    server.engine.refusal = ZeroDivisionError("secret detail")
    error = assert_envelope(await server.chat(), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert "ZeroDivisionError: secret detail" in caplog.text
    assert (await server.http.get("/health")).status_code == 200


async def test_unknown_path_and_method(server: Server) -> None:
    for path in ("/nope", "/v1/models/", "/v1/chat/completions/"):
        assert_envelope(await server.http.get(path), 404)
    response = await server.http.get("/v1/chat/completions")
    assert_envelope(response, 405)
    assert response.headers["allow"] == "POST"


async def test_large_body_is_413_whether_declared_or_not(server: Server) -> None:
    size = server.state.max_body_bytes + 1
    declared = await server.http.post("/v1/completions", content=b" " * size, headers=JSON)
    assert assert_envelope(declared, 413)["code"] == "request_too_large"

    async def pieces() -> Any:
        for _ in range(size // 2**20 + 1):
            yield b" " * 2**20

    assert_envelope(await server.http.post("/v1/completions", content=pieces(), headers=JSON), 413)


async def test_key_is_asked_for_except_on_open_paths(locked_server: Server) -> None:
    http = locked_server.http
    for path in ("/", "/health", "/metrics"):
        assert (await http.get(path)).status_code == 200
    for headers in (
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "secret"},
        {"authorization": "Basic secret"},
        {"authorization": "Bearer secret2"},
        {"authorization": b"Bearer \xff\xfe"},
    ):
        for path in ("/v1/models", "/version", "/openapi.json", "/nope"):
            response = await http.get(path, headers=httpx.Headers(headers))
            error = assert_envelope(response, 401)
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
    for scheme in ("Bearer", "bearer"):
        response = await http.get("/v1/models", headers={"authorization": f"{scheme} secret"})
        assert response.status_code == 200


async def test_without_a_key_everything_is_open(server: Server) -> None:
    assert (await server.http.get("/v1/models")).status_code == 200


@pytest.mark.parametrize("given", ["abc-1", "x" * 128])
async def test_request_id_is_echoed(server: Server, given: str) -> None:
    response = await server.http.get("/nope", headers={"x-request-id": given})
    assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b"])
async def test_unusable_request_id_is_replaced(server: Server, given: str) -> None:
    response = await server.http.get("/health", headers={"x-request-id": given})
    assert response.headers["x-request-id"].startswith("req-")


async def test_access_log_has_one_line_per_request_and_no_line_breaks(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="bros.access"):
        await server.http.get("/no%0Apath", headers={"x-request-id": "id-1"})
    (message,) = caplog.messages
    assert message == "GET /no%0Apath 404 0.0 ms id-1 from 127.0.0.1"


async def test_the_log_shows_the_beginning_of_a_path(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="bros.access"):
        await server.http.get(f"/{'x' * 60_000}", headers={"x-request-id": "id-1"})
    assert caplog.messages == [f"GET /{'x' * 199}... 404 0.0 ms id-1 from 127.0.0.1"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/models", b"", 401),
        ("GET", "/health", b"", 200),
        ("GET", "/nothing", b"", 404),
        ("DELETE", "/v1/models", b"", 405),
        ("POST", "/tokenize", b"{", 400),
        ("POST", "/tokenize", b"{}", 415),
    ],
)
async def test_requests_that_cost_nothing_cannot_flood_the_log(
    caplog: pytest.LogCaptureFixture, method: str, path: str, body: bytes, status: int
) -> None:
    """Others have their line, and what had none is counted a minute later."""
    server = Server(api_key="secret")
    key = {"authorization": "Bearer secret"}
    headers = {"content-type": "text/plain" if status == 415 else "application/json"}
    headers |= {} if status in (200, 401) else key

    async def send() -> None:
        answer = await server.http.request(method, path, content=body, headers=headers)
        assert answer.status_code == status

    with caplog.at_level(logging.INFO, logger="bros.access"):
        for _ in range(100):
            await send()
        assert len(caplog.messages) == 30
        assert (await server.http.get("/v1/models", headers=key)).status_code == 200
        assert len(caplog.messages) == 31
        server.clock.advance(60.0)
        await send()
    assert caplog.messages[31] == f"requests without a line: 70 with {status}"


async def test_probes_do_not_hide_refusals_in_the_log(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="bros.access"):
        for _ in range(40):
            await server.http.get("/health")
        await server.http.get("/nothing")
    assert caplog.messages[-1].startswith("GET /nothing 404")
