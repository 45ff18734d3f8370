"""What becomes of a batch: rows, results and how it ends, as OpenAI's own client sees it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from bros.batch.objects import DAY_S
from support.batch_server import (
    ANSWER,
    ANSWER_TOKENS,
    CHAT,
    NOW,
    BatchServer,
    batch_server,
    chat_row,
    counts,
    row,
    until,
)
from support.scripted_server import MAX_MODEL_LEN

HTTP_ERROR_KEYS = {"message", "type", "param", "code"}


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path) as made:
        yield made


@pytest.fixture
async def half_done(server: BatchServer) -> tuple[BatchServer, Batch]:
    """Rows 0 to 2 are done, rows 3 and 4 wait in the engine."""
    server.engine.held = "held"
    prompts = ["a", "b", "c", "held", "held"]
    server.clock.advance(5)
    batch = await server.submit(*(row(i, prompt) for i, prompt in enumerate(prompts)))
    await server.wait_done(batch, 3)
    await until(lambda: server.engine.waiting == 2)
    server.clock.advance(5)
    return server, batch


# Rows


async def test_output_lines(server: BatchServer) -> None:
    """id (batch_req_...), custom_id, response {status_code, request_id, body}, error null"""
    done = await server.wait(await server.submit(row(1), row(2)))
    results = await server.results(done.output_file_id)
    assert results.keys() == {"row-1", "row-2"}
    for custom_id, line in results.items():
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["id"].startswith("batch_req_")
        assert (line["custom_id"], line["error"]) == (custom_id, None)
        assert line["response"].keys() == {"status_code", "request_id", "body"}
        assert line["response"]["status_code"] == 200
        assert line["response"]["request_id"].startswith("req")
        body = openai.types.Completion.model_validate(line["response"]["body"])
        assert body.choices[0].text == ANSWER
    ids = [line["id"] for line in results.values()]
    requests = [line["response"]["request_id"] for line in results.values()]
    assert len(set(ids)) == len(set(requests)) == 2


async def test_rows_of_chats(server: BatchServer) -> None:
    """body = the endpoint's request, with all its parameters"""
    rows = (chat_row(1), chat_row(2, n=2, logprobs=True, top_logprobs=1), chat_row(3, stop="wor"))
    done = await server.wait(await server.submit(*rows, endpoint=CHAT))
    results = await server.results(done.output_file_id)
    bodies = [
        openai.types.chat.ChatCompletion.model_validate(results[f"row-{i}"]["response"]["body"])
        for i in (1, 2, 3)
    ]
    assert [choice.message.content for body in bodies for choice in body.choices] == [
        ANSWER,
        ANSWER,
        ANSWER,
        "Hello ",
    ]
    assert bodies[1].choices[1].logprobs is not None


async def test_rows_are_answered_like_requests(server: BatchServer) -> None:
    """The same body comes to the same answer in a batch and over HTTP"""
    sent = row(1, n=2, max_tokens=5, logprobs=1, seed=3)
    direct = (await server.http.post("/v1/completions", json=sent["body"])).json()
    done = await server.wait(await server.submit(sent))
    in_batch = (await server.results(done.output_file_id))["row-1"]["response"]["body"]
    for reply in (direct, in_batch):
        for name in ("id", "service_tier"):
            del reply[name]
    assert in_batch == direct


async def test_blank_lines_and_other_line_ends(server: BatchServer) -> None:
    """skip blank lines; the last line may lack its end"""
    first, last = (json.dumps(row(i)).encode() for i in (1, 2))
    file = await server.upload(b"\xef\xbb\xbf" + first + b"\r\n \t\n\n" + last)
    done = await server.wait(await server.create(file.id))
    assert (await server.results(done.output_file_id)).keys() == {"row-1", "row-2"}


async def test_odd_custom_ids_come_back_as_they_were(server: BatchServer) -> None:
    """clients match on custom_id"""
    ids = ["\u2028", "é\U0001f600", " ", '"\\', "x" * 512, "row\n1", "NULL", "0"]
    rows = [{**row(1), "custom_id": custom_id} for custom_id in ids]
    done = await server.wait(await server.submit(*rows))
    assert (await server.results(done.output_file_id)).keys() == set(ids)


async def test_lines_end_only_where_rows_do(server: BatchServer) -> None:
    """Text with characters that some readers take for line breaks does not break a line"""
    server.engine.text = "a\u2028b\u2029c\x85d\x0be\x1cf\r\n"
    done = await server.wait(await server.submit(row(1), row(2)))
    assert done.output_file_id is not None
    content = await server.client.files.content(done.output_file_id)
    lines = [json.loads(line) for line in content.iter_lines()]
    assert [line["custom_id"] for line in lines] == ["row-1", "row-2"]
    assert lines == [json.loads(line) for line in content.text.splitlines()]
    assert lines[0]["response"]["body"]["choices"][0]["text"] == server.engine.text


async def test_usage(server: BatchServer) -> None:
    """body.usage per row; batch usage is their sum"""
    server.engine.cached_tokens = 2
    rows = [row(1), row(2, "longer prompt", n=2), row(3, max_tokens=4), row(4, "x" * MAX_MODEL_LEN)]
    done = await server.wait(await server.submit(*rows))
    results = await server.results(done.output_file_id)
    used = [line["response"]["body"]["usage"] for line in results.values()]
    assert [(u["prompt_tokens"], u["completion_tokens"]) for u in used] == [
        (5, ANSWER_TOKENS),
        (13, 2 * ANSWER_TOKENS),
        (5, 4),
    ]
    assert done.usage is not None
    assert done.usage.to_dict() == {
        "input_tokens": 23,
        "input_tokens_details": {"cached_tokens": 6},
        "output_tokens": 3 * ANSWER_TOKENS + 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 23 + 3 * ANSWER_TOKENS + 4,
    }


async def test_usage_of_reasoning(tmp_path: Path) -> None:
    """output_tokens_details.reasoning_tokens: the sum of those of the rows"""
    async with batch_server(tmp_path, reasoning_format="think") as server:
        server.engine.text = "<think>Hm, hm.</think>Yes."
        done = await server.wait(await server.submit(chat_row(1), chat_row(2), endpoint=CHAT))
        results = await server.results(done.output_file_id)
        details = [
            line["response"]["body"]["usage"]["completion_tokens_details"]["reasoning_tokens"]
            for line in results.values()
        ]
        assert done.usage is not None and min(details) > 0
        assert done.usage.output_tokens_details.reasoning_tokens == sum(details)
        assert sum(details) < done.usage.output_tokens


# How a batch goes


async def test_completed(server: BatchServer) -> None:
    """validating -> in_progress -> finalizing -> completed, with the time of each"""
    server.engine.held = "row"
    batch = await server.submit(row(1))
    server.clock.advance(10)
    assert (await server.wait(batch, "in_progress")).model == "scripted"
    await until(lambda: server.engine.waiting == 1)
    server.clock.advance(10)
    with server.full():
        server.engine.go_on.set()
        finalizing = await server.wait(batch, "finalizing")
        assert (finalizing.finalizing_at, finalizing.completed_at) == (NOW + 20, None)
        assert finalizing.output_file_id is None
        server.clock.advance(10)
    done = await server.wait(batch)
    assert done.status == "completed"
    assert NOW <= (done.in_progress_at or 0) <= NOW + 10
    assert done.finalizing_at == NOW + 20
    assert NOW + 20 <= (done.completed_at or 0) <= NOW + 30
    others = (done.failed_at, done.expired_at, done.cancelling_at, done.cancelled_at, done.errors)
    assert others == (None,) * 5
    assert (done.created_at, done.expires_at) == (NOW, NOW + DAY_S)
    assert done.request_counts == counts(1, 1, 0)


async def test_successes_and_failures_are_apart(server: BatchServer) -> None:
    """Successes only in the output file, failures only in the error file; a request that fails
    at run time does not fail the batch"""
    rows = [row(i, "x" * MAX_MODEL_LEN if i % 2 else "good") for i in range(6)]
    done = await server.wait(await server.submit(*rows))
    assert (done.status, done.errors, done.failed_at) == ("completed", None, None)
    assert done.request_counts == counts(6, 3, 3)
    good, bad = [await server.results(file) for file in (done.output_file_id, done.error_file_id)]
    assert good.keys() == {"row-0", "row-2", "row-4"}
    assert bad.keys() == {"row-1", "row-3", "row-5"}
    for line in bad.values():
        assert line["error"] is None
        assert line["response"]["status_code"] == 400
        error = line["response"]["body"]["error"]
        assert error.keys() == HTTP_ERROR_KEYS
        assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")


async def test_an_empty_file_is_none(server: BatchServer) -> None:
    """a file id stays null if its file would be empty"""
    good = await server.wait(await server.submit(row(1)))
    assert good.output_file_id is not None and good.error_file_id is None
    bad = await server.wait(await server.submit(row(1, "x" * MAX_MODEL_LEN)))
    assert bad.output_file_id is None and bad.error_file_id is not None
    assert (bad.status, bad.request_counts) == ("completed", counts(1, 0, 1))


async def test_result_files_are_files(server: BatchServer) -> None:
    """Results use purpose batch_output and are deleted after 30 days by default"""
    done = await server.wait(await server.submit(row(1), row(2, "x" * MAX_MODEL_LEN)))
    for file_id, kind in ((done.output_file_id, "output"), (done.error_file_id, "error")):
        assert file_id is not None
        file = await server.client.files.retrieve(file_id)
        assert (file.purpose, file.filename) == ("batch_output", f"{done.id}_{kind}.jsonl")
        assert file.expires_at == file.created_at + 30 * DAY_S
        assert file.bytes == len((await server.client.files.content(file_id)).content)
    listed = [file.id async for file in server.client.files.list(purpose="batch_output")]
    assert set(listed) == {done.output_file_id, done.error_file_id}
    with pytest.raises(openai.BadRequestError):
        await server.create(done.output_file_id or "")


async def test_output_expires_after(server: BatchServer) -> None:
    """The anchor of output_expires_after is the creation of the output file"""
    server.engine.held = "row"
    anchor: Any = {"anchor": "created_at", "seconds": 7200}
    batch = await server.submit(row(1), output_expires_after=anchor)
    await until(lambda: server.engine.waiting == 1)
    server.clock.advance(1000)
    server.engine.go_on.set()
    done = await server.wait(batch)
    file = await server.client.files.retrieve(done.output_file_id or "")
    assert (file.created_at, file.expires_at) == (NOW + 1000, NOW + 8200)
    server.clock.advance(7200)
    with pytest.raises(openai.NotFoundError):
        await server.client.files.content(file.id)
    assert (await server.client.batches.retrieve(batch.id)).output_file_id == file.id


async def test_input_may_be_deleted_at_once(server: BatchServer) -> None:
    """A batch goes on without its input file's record"""
    server.engine.held = "held"
    batch = await server.submit(row(1, "held"), row(2))
    await server.wait_done(batch, 1)
    await server.client.files.delete(batch.input_file_id)
    server.engine.go_on.set()
    done = await server.wait(batch)
    assert done.request_counts == counts(2, 2, 0)
    assert len(server.bodies()) == 1 + 1  # the output, and the input until it is swept


# Cancelling


async def test_cancel_gives_partial_results(half_done: tuple[BatchServer, Batch]) -> None:
    """returns the batch in cancelling, then cancelled; partial results are in the output file"""
    server, batch = half_done
    cancelling = await server.client.batches.cancel(batch.id)
    assert (cancelling.status, cancelling.cancelling_at) == ("cancelling", NOW + 10)
    done = await server.wait(batch)
    assert (done.status, done.cancelled_at, done.completed_at) == ("cancelled", NOW + 10, None)
    assert (await server.results(done.output_file_id)).keys() == {"row-0", "row-1", "row-2"}
    errors = await server.results(done.error_file_id)
    assert errors.keys() == {"row-3", "row-4"}
    assert {(e["response"], e["error"]["code"]) for e in errors.values()} == {
        (None, "batch_cancelled")
    }
    assert done.request_counts == counts(5, 3, 2)
    assert done.usage is not None and done.usage.output_tokens == 3 * ANSWER_TOKENS
    assert len(server.engine.aborted) == 2


async def test_cancel_before_it_is_checked(tmp_path: Path) -> None:
    """validating -> cancelling -> cancelled, without any row"""
    async with batch_server(tmp_path, idle=True) as server:
        batch = await server.submit(row(1))
        assert (await server.client.batches.cancel(batch.id)).status == "cancelling"
        assert (await server.client.batches.retrieve(batch.id)).status == "cancelling"
    async with batch_server(tmp_path, seed=1) as server:
        done = await server.wait(batch)
    assert (done.status, done.request_counts) == ("cancelled", counts(0, 0, 0))
    assert (done.output_file_id, done.error_file_id) == (None, None)
    assert not server.engine.submitted


async def test_cancel_twice(half_done: tuple[BatchServer, Batch]) -> None:
    """Who cancels again learns how far it is"""
    server, batch = half_done
    first, second = await asyncio.gather(
        server.client.batches.cancel(batch.id), server.client.batches.cancel(batch.id)
    )
    assert {first.status, second.status} <= {"cancelling", "cancelled"}
    await server.wait(batch)
    third = await server.client.batches.cancel(batch.id)
    assert (third.status, third.cancelling_at) == ("cancelled", NOW + 10)


async def test_cancel_when_it_is_too_late(server: BatchServer) -> None:
    """finalizing, completed and failed batches cannot be cancelled"""
    server.engine.held = "row"
    batch = await server.submit(row(1))
    with server.full():  # so that it stays where it is
        server.engine.go_on.set()
        await server.wait(batch, "finalizing")
        with pytest.raises(openai.BadRequestError, match="finalizing") as error:
            await server.client.batches.cancel(batch.id)
        assert (error.value.param, error.value.code) == ("batch_id", "invalid_batch_status")
    await server.wait(batch, "completed")
    failed = await server.wait(await server.submit(b"{"), "failed")
    for ended in (batch, failed):
        with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
            await server.client.batches.cancel(ended.id)


# The end of the window


async def test_expiry_gives_partial_results(half_done: tuple[BatchServer, Batch]) -> None:
    """Unfinished requests are cancelled and go to the error file as batch_expired, finished ones
    stay in the output file"""
    server, batch = half_done
    server.clock.advance(DAY_S)
    server.wake()
    done = await server.wait(batch)
    assert (done.status, done.expired_at) == ("expired", NOW + 10 + DAY_S)
    assert (done.completed_at, done.cancelled_at, done.failed_at) == (None, None, None)
    assert (await server.results(done.output_file_id)).keys() == {"row-0", "row-1", "row-2"}
    errors = await server.results(done.error_file_id)
    assert errors.keys() == {"row-3", "row-4"}
    for line in errors.values():
        assert line.keys() == {"id", "custom_id", "response", "error"}
        assert line["response"] is None and line["error"].keys() == {"code", "message"}
        assert line["error"]["code"] == "batch_expired"
        assert (
            "could not be executed before the completion window expired"
            in (line["error"]["message"])
        )
    assert done.request_counts == counts(5, 3, 2)
    assert len(server.engine.aborted) == 2
    with pytest.raises(openai.BadRequestError):
        await server.client.batches.cancel(batch.id)


async def test_cancel_while_it_expires(half_done: tuple[BatchServer, Batch]) -> None:
    """A client that cancels just then learns how far it is, as one that cancels twice"""
    server, batch = half_done
    with server.full():  # so that it stays where it is
        server.clock.advance(DAY_S)
        server.wake()
        await until(lambda: bool(server.store.batches.get("", batch.id).outcome))
        found = await server.client.batches.cancel(batch.id)
        assert (found.id, found.status, found.cancelling_at) == (batch.id, "in_progress", None)
    assert (await server.wait(batch)).status == "expired"


async def test_window_that_ends_while_no_server_runs(tmp_path: Path) -> None:
    """completion_window honoured as a deadline, also of a batch that has not begun"""
    async with batch_server(tmp_path, idle=True) as server:
        batch = await server.submit(row(1), row(2), completion_window="5m")
        clock = server.clock
    clock.advance(300)
    async with batch_server(tmp_path, clock=clock, seed=1) as server:
        server.engine.held = "row"
        done = await server.wait(batch)
        assert (done.status, done.expired_at) == ("expired", NOW + 300)
        errors = await server.results(done.error_file_id)
        assert {line["error"]["code"] for line in errors.values()} == {"batch_expired"}
        assert done.output_file_id is None


async def test_earlier_windows_go_first(server: BatchServer) -> None:
    """completion_window decides whose rows are next, not who came first"""
    server.engine.held = "late"
    late = await server.submit(*(row(i, "late") for i in range(100)))
    await until(lambda: server.engine.waiting == 16)
    soon = await server.submit(*(row(i, "soon") for i in range(10)), completion_window="1h")
    await until(lambda: server.runner.context.limiter.waiting == 2)  # the next row of each
    server.engine.go_on.set()
    await server.wait(soon)
    assert (await server.wait(late)).request_counts == counts(100, 100, 0)
    order = [server.engine.prompt(request) for request in server.engine.submitted]
    assert "soon" not in order[-40:]
