"""/v1/batches: how jobs are begun, checked, shown and listed, with OpenAI's own client."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from bros.batch import rows as validation
from bros.batch.objects import DAY_S
from bros.text.grammar_check import GrammarChecker
from support.batch_server import (
    CHAT,
    COMPLETIONS,
    NOW,
    BatchServer,
    batch_server,
    chat_row,
    jsonl,
    row,
)
from support.scripted_server import JSON, assert_envelope
from support.tiny_tokenizer import save_tokenizer

TIMESTAMPS = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)
NO_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path) as made:
        yield made


@pytest.fixture
async def idle(tmp_path: Path) -> AsyncIterator[BatchServer]:
    """No runner works on its batches, so they stay as they are created."""
    async with batch_server(tmp_path, idle=True) as made:
        yield made


# POST /v1/batches


async def test_creation_returns_validating_at_once(idle: BatchServer) -> None:
    """The batch object with all its fields; unset ones are null, not absent; counts begin at 0"""
    file = await idle.upload(jsonl(row(1)))
    sent = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    reply = (await idle.http.post("/v1/batches", json=sent)).json()
    batch_id = reply.pop("id")
    assert batch_id.startswith("batch_")
    assert reply == {
        "object": "batch",
        "endpoint": COMPLETIONS,
        "model": None,
        "errors": None,
        "input_file_id": file.id,
        "completion_window": "24h",
        "status": "validating",
        "output_file_id": None,
        "error_file_id": None,
        "created_at": NOW,
        "expires_at": NOW + DAY_S,
        **dict.fromkeys(TIMESTAMPS),
        "request_counts": {"total": 0, "completed": 0, "failed": 0},
        "usage": NO_USAGE,
        "metadata": None,
        "bros": {"expected_at": None, "at_risk": False, "rt_slowdown": None},
    }
    again = (await idle.http.get(f"/v1/batches/{batch_id}")).json()
    assert again == {"id": batch_id, **reply}


async def test_a_target_slowdown_is_shown_and_checked(idle: BatchServer) -> None:
    """Extension: rt_slowdown, from 1 on"""
    file = await idle.upload(jsonl(row(1)))
    sent = {"input_file_id": file.id, "endpoint": COMPLETIONS, "completion_window": "24h"}
    made = (await idle.http.post("/v1/batches", json={**sent, "rt_slowdown": 2})).json()
    assert made["bros"]["rt_slowdown"] == 2.0
    assert (await idle.http.get(f"/v1/batches/{made['id']}")).json() == made
    for wrong in (0.9, 1001, "2"):
        reply = await idle.http.post("/v1/batches", json={**sent, "rt_slowdown": wrong})
        assert assert_envelope(reply, 400)["param"] == "rt_slowdown"


async def test_required_parameters(idle: BatchServer) -> None:
    """required input_file_id, endpoint, completion_window"""
    sent = {"input_file_id": "file-1", "endpoint": COMPLETIONS, "completion_window": "24h"}
    for name, value in itertools.product(sent, (None, 5)):
        body = {**sent, name: value}
        if value is None:
            del body[name]
        error = assert_envelope(await idle.http.post("/v1/batches", json=body), 400)
        code = "missing_required_parameter" if value is None else "invalid_type"
        assert (error["param"], error["code"]) == (name, code)


async def test_bodies_that_are_no_requests(idle: BatchServer) -> None:
    """The error body is the same for whatever is wrong"""
    for content in (b"", b"{", b"[]", b"\xff", b'{"a": NaN}'):
        assert_envelope(await idle.http.post("/v1/batches", content=content, headers=JSON), 400)


@pytest.mark.parametrize("endpoint", [CHAT, COMPLETIONS, "/v1/responses"])
async def test_served_endpoints(idle: BatchServer, endpoint: str) -> None:
    """endpoint: those that are served here"""
    assert (await idle.submit(row(1), endpoint=endpoint)).endpoint == endpoint


async def test_other_endpoints_are_refused(idle: BatchServer) -> None:
    """Reject what we do not serve with a 400"""
    file = await idle.upload(jsonl(row(1)))
    known = ("moderations", "images/generations", "images/edits")
    for path in (*known, "videos"):
        with pytest.raises(openai.BadRequestError, match="not served here") as error:
            await idle.create(file.id, endpoint=f"/v1/{path}")
        assert (error.value.param, error.value.code) == ("endpoint", "unsupported_endpoint")
    for path in ("", "/v1/chat", COMPLETIONS + "/", "http://test" + COMPLETIONS, "x" * 5000):
        with pytest.raises(openai.BadRequestError, match="does not exist") as error:
            await idle.create(file.id, endpoint=path)
        assert (error.value.param, error.value.code) == ("endpoint", "invalid_value")


async def test_windows(idle: BatchServer) -> None:
    """completion_window is 24h; extension: <n>m|h|d, up to 30d"""
    file = await idle.upload(jsonl(row(1)))
    for window, seconds in (("24h", 86_400), ("1m", 60), ("90m", 5400), ("30d", 30 * DAY_S)):
        batch = await idle.create(file.id, completion_window=window)
        assert (batch.completion_window, batch.expires_at) == (window, NOW + seconds)
    for window in ("", "0h", "24", "24H", "1s", "31d", "-1h", "1.5h", " 24h", "24h\n", "٣h"):
        with pytest.raises(openai.BadRequestError) as error:
            await idle.create(file.id, completion_window=window)
        assert (error.value.param, error.value.code) == ("completion_window", "invalid_value")


async def test_metadata(idle: BatchServer) -> None:
    """<= 16 pairs, key <= 64, value <= 512 characters, or null"""
    file = await idle.upload(jsonl(row(1)))
    full = {f"{i:064}": "é" * 512 for i in range(16)}
    odd = {"": "", "nul\0": "\0", "😀": "\u2028"}
    for metadata in (full, odd, {}, None):
        batch = await idle.create(file.id, metadata=metadata)
        assert batch.metadata == metadata
        assert (await idle.client.batches.retrieve(batch.id)).metadata == metadata


async def test_metadata_beyond_the_limits(idle: BatchServer) -> None:
    """One more of anything is a 400 that names the field"""
    file = await idle.upload(jsonl(row(1)))
    seventeen = {str(i): "" for i in range(17)}
    wrong: Any
    for wrong in (seventeen, {"k" * 65: ""}, {"k": "v" * 513}, {"k": 1}, {"k": None}, [], "k"):
        with pytest.raises(openai.BadRequestError) as error:
            await idle.create(file.id, metadata=wrong)
        assert str(error.value.param).startswith("metadata")
    assert (await idle.client.batches.list()).data == []


async def test_output_expires_after_has_limits(idle: BatchServer) -> None:
    """output_expires_after has the same shape as a file's expires_after"""
    file = await idle.upload(jsonl(row(1)))
    for seconds, anchor, param in (
        (3599, "created_at", "seconds"),
        (2_592_001, "created_at", "seconds"),
        ("3600", "created_at", "seconds"),
        (3600, "completed_at", "anchor"),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            wanted = {"anchor": anchor, "seconds": seconds}
            await idle.create(file.id, output_expires_after=wanted)
        assert error.value.param == f"output_expires_after.{param}"


async def test_input_files_that_will_not_do(idle: BatchServer) -> None:
    """The input file exists and was uploaded with the purpose `batch`"""
    file = await idle.upload(jsonl(row(1)), purpose="user_data")
    with pytest.raises(openai.BadRequestError) as error:
        await idle.create(file.id)
    assert (error.value.param, error.value.code) == ("input_file_id", "invalid_file_purpose")
    for unknown in ("file-unknown", "", "\0", "\U0010ffff"):
        with pytest.raises(openai.NotFoundError) as missing:
            await idle.create(unknown)
        assert (missing.value.param, missing.value.code) == ("input_file_id", "file_not_found")


# Quotas


async def test_most_unfinished_batches(tmp_path: Path) -> None:
    """Limits are per tenant, and a client does not retry what takes longer than it waits"""
    async with batch_server(tmp_path, batch_max_open=2) as server:
        server.engine.held = "row"
        first, _ = await server.submit(row(1)), await server.submit(row(2))
        with pytest.raises(openai.RateLimitError) as error:
            await server.submit(row(3))
        assert (error.value.code, error.value.type) == ("tenant_limit_exceeded", "rate_limit_error")
        assert error.value.response.headers["x-should-retry"] == "false"
        await server.client.batches.cancel(first.id)
        await server.wait(first)
        assert (await server.submit(row(3))).status == "validating"


async def test_quota_holds_when_many_come_at_once(tmp_path: Path) -> None:
    async with batch_server(tmp_path, batch_max_open=3, idle=True) as server:
        file = await server.upload(jsonl(row(1)))
        tries = [server.create(file.id) for _ in range(12)]
        came_to = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(result, openai.RateLimitError) for result in came_to) == 9
        assert len((await server.client.batches.list()).data) == 3


async def test_most_queued_tokens(tmp_path: Path) -> None:
    """token_limit_exceeded: enqueued prompt tokens; a batch that is done counts no more"""
    async with batch_server(tmp_path, batch_max_tokens=100) as server:
        server.engine.held = "first"
        first = await server.submit(row(1, "first" * 60))
        await server.wait(first, "in_progress")
        second = await server.wait(await server.submit(row(1, "second" * 60)))
        assert (second.status, second.failed_at) == ("failed", NOW)
        assert second.errors is not None and second.errors.data is not None
        (error,) = second.errors.data
        assert (error.code, error.line, error.param) == ("token_limit_exceeded", None, None)
        server.engine.go_on.set()
        await server.wait(first)
        third = await server.wait(await server.submit(row(1, "second" * 60)))
        assert third.status == "completed"


# Validation


def _bad(row: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {name: value for name, value in {**row, **fields}.items() if value is not ...}


BODY = row(1)["body"]
WRONG_LINES = [
    (b"{", "invalid_json_line", None),
    (b"[]", "invalid_json_line", None),
    (b"\xff\xfe", "invalid_json_line", None),
    (_bad(row(1), custom_id=...), "missing_required_parameter", "custom_id"),
    (_bad(row(1), method=...), "missing_required_parameter", "method"),
    (_bad(row(1), url=...), "missing_required_parameter", "url"),
    (_bad(row(1), body=None), "missing_required_parameter", "body"),
    (_bad(row(1), custom_id=7), "invalid_value", "custom_id"),
    (_bad(row(1), method="GET"), "invalid_method", "method"),
    (_bad(row(1), url=CHAT), "invalid_url", "url"),
    (_bad(row(1), body=[]), "invalid_type", "body"),
    (row(1, stream=True), "unsupported_parameter", "body.stream"),
    (row(1, temperature=-1), "invalid_value", "body.temperature"),
    (row(1, prompt=5), "invalid_type", "body.prompt"),
    (row(1, guided_json={"not": {}}), "invalid_json_schema", "body.guided_json"),
    (_bad(row(1), body={"model": "scripted"}), "missing_required_parameter", "body.prompt"),
    (row(1, model="gpt-4"), "model_not_found", "body.model"),
    (row(1, model="org/scripted"), "mismatched_model", "body.model"),
    (row(0), "duplicate_custom_id", "custom_id"),
]


async def test_one_wrong_line_fails_the_batch(server: BatchServer) -> None:
    """failed only for validation, with `errors` filled and `line` set; all or nothing"""
    wrong = [await server.submit(row(0), b"", line) for line, _, _ in WRONG_LINES]
    for batch, (line, code, param) in zip(wrong, WRONG_LINES, strict=True):
        failed = await server.wait(batch)
        assert failed.status == "failed", line
        assert failed.errors is not None and failed.errors.data is not None
        assert failed.errors.object == "list"
        (error,) = failed.errors.data
        assert (error.code, error.param, error.line) == (code, param, 3), line
        assert error.message
        assert (failed.failed_at, failed.in_progress_at) == (NOW, None)
        assert (failed.output_file_id, failed.error_file_id) == (None, None)
        assert failed.request_counts is not None and failed.request_counts.total == 0
    assert not server.engine.submitted


async def test_a_grammar_that_does_not_compile_fails_its_line(tmp_path: Path) -> None:
    checker = GrammarChecker(save_tokenizer(tmp_path), 440, [1])
    try:
        async with batch_server(tmp_path / "data", grammars=checker) as server:
            lines = row(0, guided_regex="a+"), row(1, guided_regex="(?=a)b")
            failed = await server.wait(await server.submit(*lines))
            assert failed.errors is not None and failed.errors.data is not None
            (error,) = failed.errors.data
            assert (error.line, error.param) == (2, "body.guided_regex")
            assert "look-ahead" in error.message and not server.engine.submitted
            done = await server.wait(await server.submit(lines[0]))
            assert done.status == "completed"
            grammar = server.engine.submitted[0].sampling.grammar
            assert grammar is not None and grammar.text == "start: /a+/"
    finally:
        checker.close()


async def test_all_wrong_lines_are_listed(server: BatchServer) -> None:
    """errors {object:"list", data:[{code, message, param|null, line|null}]}"""
    batch = await server.submit(b"{", row(1), row(1), row(2, n=-1), row(3))
    reply = await server.wait(batch)
    assert reply.errors is not None and reply.errors.data is not None
    assert [error.line for error in reply.errors.data] == [1, 3, 4]


async def test_files_without_requests(server: BatchServer) -> None:
    """empty_file"""
    for content in (b"", b"\n\n", b" \r\n"):
        file = await server.upload(content)
        failed = await server.wait(await server.create(file.id))
        assert failed.errors is not None and failed.errors.data is not None
        (error,) = failed.errors.data
        assert (failed.status, error.code, error.line) == ("failed", "empty_file", None)


async def test_most_requests(server: BatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """<= 50,000 requests"""
    assert validation.MAX_ROWS == 50_000
    monkeypatch.setattr(validation, "MAX_ROWS", 3)
    done = await server.wait(await server.submit(*(row(i) for i in range(3))))
    assert done.status == "completed"
    failed = await server.wait(await server.submit(*(row(i) for i in range(4))))
    assert failed.errors is not None and failed.errors.data is not None
    assert [(e.code, e.line) for e in failed.errors.data] == [("too_many_requests", 4)]


# GET /v1/batches


async def test_list(idle: BatchServer) -> None:
    """Newest first; {object, data, first_id, last_id, has_more}; 20 by default"""
    empty = (await idle.http.get("/v1/batches")).json()
    nothing = {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    assert empty == nothing
    file = await idle.upload(jsonl(row(1)))
    made = [(await idle.create(file.id)).id for _ in range(21)][::-1]
    page = (await idle.http.get("/v1/batches")).json()
    assert [batch["id"] for batch in page["data"]] == made[:20]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (made[0], made[19], True)
    for limit in (1, 7, 20, 21, 100):
        listed = [batch.id async for batch in idle.client.batches.list(limit=limit)]
        assert listed == made
    rest = (await idle.http.get("/v1/batches", params={"after": made[19]})).json()
    assert [batch["id"] for batch in rest["data"]] == made[20:]
    assert rest["has_more"] is False


async def test_wrong_queries_are_refused(idle: BatchServer) -> None:
    """after; limit 1..100"""
    for limit in ("0", "101", "", "x", "1.0", "%D9%A1"):
        error = assert_envelope(await idle.http.get(f"/v1/batches?limit={limit}"), 400)
        assert (error["param"], error["code"]) == ("limit", "invalid_value")
    for after in ("batch_unknown", "", "%00"):
        error = assert_envelope(await idle.http.get(f"/v1/batches?after={after}"), 404)
        assert error["param"] == "after"


async def test_unknown_batches_are_not_found(idle: BatchServer) -> None:
    """unknown id -> 404 with error body"""
    for batch_id in ("batch_unknown", "%00", "%ED%A0%80", "x" * 5000):
        path = f"/v1/batches/{batch_id}"
        for reply in (await idle.http.get(path), await idle.http.post(f"{path}/cancel")):
            error = assert_envelope(reply, 404)
            assert (error["param"], error["code"]) == ("batch_id", "batch_not_found")
            assert error["type"] == "invalid_request_error"


async def test_other_paths_and_methods(idle: BatchServer) -> None:
    """Always an error body"""
    for method, path, status in (
        ("DELETE", "/v1/batches/batch_1", 405),
        ("GET", "/v1/batches/batch_1/cancel", 405),
        ("PUT", "/v1/batches", 405),
        ("GET", "/v1/batches/", 404),
    ):
        assert_envelope(await idle.http.request(method, path), status)


async def test_the_other_endpoint(server: BatchServer) -> None:
    """url: the batch's endpoint, for chats too"""
    failed = await server.wait(await server.submit(row(1), endpoint=CHAT))
    assert failed.status == "failed"
    done = await server.wait(await server.submit(chat_row(1), endpoint=CHAT))
    assert done.status == "completed"
