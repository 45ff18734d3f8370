"""Rows of batches beside an engine that is busy, ends, or fails some of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from openai.types import Batch

from bros.batch import runner
from bros.batch import runner as job
from bros.batch.objects import DAY_S, StoreError
from bros.core.errors import OverloadedError, QueueFullError
from bros.core.interfaces import ClassStats, EngineStats
from bros.core.request import ServiceClass
from bros.server.batches.rows import ROW_CALLS, EngineRowHandler
from bros.server.openai.calls import Call
from bros.server.openai.schema import ChatMessage
from bros.server.state import ServerState
from support.batch_server import (
    ANSWER,
    ANSWER_TOKENS,
    CHAT,
    COMPLETIONS,
    BatchServer,
    batch_server,
    chat_row,
    counts,
    jsonl,
    row,
    until,
    working,
)

LEASE_S = 15.0


@pytest.fixture
async def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[BatchServer]:
    """It does not pause before it tries a row again."""
    monkeypatch.setattr(job, "_MIN_PAUSE_S", 0.0)
    async with batch_server(tmp_path) as made:
        yield made


async def test_rows_are_best_effort(server: BatchServer) -> None:
    """Batch rows run as best-effort work with a deadline; synchronous requests are not held up"""
    server.engine.held = "row"
    batch = await server.submit(*(row(i) for i in range(30)))
    await until(lambda: server.engine.waiting > 0)
    reply = await server.client.completions.create(model="scripted", prompt="now", max_tokens=50)
    assert reply.choices[0].text == ANSWER
    (direct,) = (r for r in server.engine.submitted if r.service_class is ServiceClass.RT)
    assert server.engine.tokenizer.decode(direct.prompt_token_ids) == "now"
    rows = [request for request in server.engine.submitted if request is not direct]
    assert rows and {request.service_class for request in rows} == {ServiceClass.BE}
    assert all(0 < (request.slo.deadline_s or 0) <= 16 * DAY_S for request in rows)
    assert all(request.gathered for request in rows) and not direct.gathered
    server.engine.go_on.set()
    done = await server.wait(batch)
    assert done.request_counts == counts(30, 30, 0)


async def test_rows_have_the_schedule_and_the_slowdown_of_their_batch(server: BatchServer) -> None:
    """Extension: rt_slowdown reaches the engine with each row"""
    file = await server.upload(jsonl(row(1), row(2)))
    for more in ({}, {"rt_slowdown": 3.0}):
        batch = await server.create(file.id, completion_window="10m", extra_body=more)
        await server.wait(batch)
    slos = [request.slo for request in server.engine.submitted]
    assert [slo.rt_slowdown for slo in slos] == [None, None, 3.0, 3.0]
    assert all(290.0 <= (slo.schedule_s or 0.0) <= 1200.0 for slo in slos)


@pytest.mark.parametrize(
    "refusal", [QueueFullError(8, 0.001), OverloadedError("Busy.", 0.001)], ids=["full", "busy"]
)
async def test_a_busy_engine_only_postpones_rows(server: BatchServer, refusal: Exception) -> None:
    """Rate limits are a separate pool: no row ends with 429"""
    server.engine.refusal = refusal
    batch = await server.submit(row(1), row(2))
    await server.wait(batch, "in_progress")
    with pytest.raises(openai.RateLimitError):
        await server.client.completions.create(model="scripted", prompt="now")
    server.engine.refusal = None
    done = await server.wait(batch)
    assert done.request_counts == counts(2, 2, 0)
    assert server.engine.prompts == {"row-1": 1, "row-2": 1}


async def test_bad_rows_are_not_tried_again(server: BatchServer) -> None:
    """What the client did wrong is an answer"""
    done = await server.wait(await server.submit(row(1, [2_000_000]), row(2)))
    (line,) = (await server.results(done.error_file_id)).values()
    assert (line["custom_id"], line["response"]["status_code"]) == ("row-1", 400)
    assert server.engine.prompts == {"row-2": 1}


# An engine that dies


async def test_rows_of_an_engine_that_died_run_again(server: BatchServer) -> None:
    """Nothing of it shows: every row has one result, and is counted once"""
    server.engine.held = "held"
    rows = [row(i, f"{'held' if i % 3 == 0 else 'quick'}-{i}") for i in range(12)]
    batch = await server.submit(*rows)
    await server.wait_done(batch, 8)
    await until(lambda: server.engine.waiting == 4)
    server.engine.die()
    await until(lambda: server.engine.waiting == 4 and len(server.engine.submitted) == 16)
    server.engine.go_on.set()
    done = await server.wait(batch)
    assert done.request_counts == counts(12, 12, 0)
    assert done.error_file_id is None
    results = await server.results(done.output_file_id)
    assert results.keys() == {f"row-{i}" for i in range(12)}
    assert done.usage is not None and done.usage.output_tokens == 12 * ANSWER_TOKENS
    expected = {f"held-{i}": 2 for i in range(0, 12, 3)}
    expected |= {f"quick-{i}": 1 for i in range(12) if i % 3}
    assert server.engine.prompts == expected


async def test_an_engine_that_is_not_there_is_waited_for(server: BatchServer) -> None:
    server.engine.alive = False
    batch = await server.submit(row(1), row(2))
    await server.wait(batch, "in_progress")
    with pytest.raises(openai.InternalServerError):
        await server.client.completions.create(model="scripted", prompt="now")
    assert (await server.client.batches.retrieve(batch.id)).request_counts == counts(2, 0, 0)
    server.engine.alive = True
    done = await server.wait(batch)
    assert done.request_counts == counts(2, 2, 0)
    assert server.engine.prompts == {"row-1": 1, "row-2": 1}


async def test_a_row_that_kills_the_engine_fails(server: BatchServer) -> None:
    """It ends in the error file, and everything else completes"""
    server.engine.poison = "poison"
    rows = [row(i, "poison" if i == 7 else f"fine-{i}") for i in range(30)]
    done = await server.wait(await server.submit(*rows))
    assert (done.status, done.request_counts) == ("completed", counts(30, 29, 1))
    (line,) = (await server.results(done.error_file_id)).values()
    assert (line["custom_id"], line["response"]) == ("row-7", None)
    assert line["error"].keys() == {"code", "message"}
    assert line["error"]["code"] == "engine_error"
    results = await server.results(done.output_file_id)
    assert results.keys() == {f"row-{i}" for i in range(30) if i != 7}
    assert server.engine.prompts["poison"] == server.engine.deaths <= 4


async def test_rows_beside_many_the_engine_dies_of_get_through(server: BatchServer) -> None:
    """However often it dies, no row fails that was merely running beside the cause"""
    server.engine.poison = "poison"
    poisoned = {3, 4, 5, 11, 12, 20, 29, 30}
    rows = [row(i, f"{'poison' if i in poisoned else 'fine'}-{i}") for i in range(40)]
    done = await server.wait(await server.submit(*rows))
    assert done.request_counts == counts(40, 32, 8)
    errors = await server.results(done.error_file_id)
    assert errors.keys() == {f"row-{i}" for i in poisoned}
    assert server.engine.deaths <= 4 * len(poisoned)
    fine = [times for name, times in server.engine.prompts.items() if "fine" in name]
    assert max(fine) <= 3


async def test_two_rows_the_engine_dies_of(server: BatchServer) -> None:
    """Also of two batches: they cost one another nothing"""
    server.engine.poison = "poison"
    rows = [row(i, "poison" if i == 3 else f"fine-{i}") for i in range(10)]
    first, second = await server.submit(*rows), await server.submit(*rows)
    for batch in (first, second):
        done = await server.wait(batch)
        assert done.request_counts == counts(10, 9, 1)
        assert (await server.results(done.error_file_id)).keys() == {"row-3"}


async def test_rows_that_fail_alone_are_tried_again(server: BatchServer) -> None:
    """An engine error that is not the client's fault"""
    server.engine.fail_after = 3
    batch = await server.submit(row(1), row(2))
    done = await server.wait(batch)
    errors = await server.results(done.error_file_id)
    assert {line["error"]["code"] for line in errors.values()} == {"engine_error"}
    assert all(times > 1 for times in server.engine.prompts.values())
    assert done.request_counts == counts(2, 0, 2)
    assert done.usage is not None and done.usage.total_tokens == 0


async def test_rows_that_fail_by_their_own_fault_are_not_tried_again(server: BatchServer) -> None:
    server.engine.fail_after, server.engine.to_blame = 3, "response_format"
    done = await server.wait(await server.submit(row(1), row(2)))
    errors = await server.results(done.error_file_id)
    bodies = [line["response"]["body"]["error"] for line in errors.values()]
    assert [(body["code"], body["param"]) for body in bodies] == [
        ("invalid_grammar", "response_format")
    ] * 2
    assert set(server.engine.prompts.values()) == {1}


async def test_rows_dropped_for_lack_of_capacity_are_only_postponed(server: BatchServer) -> None:
    server.engine.fail_after, server.engine.retry_after_s = 3, 0.001
    batch = await server.submit(row(1))
    await until(lambda: len(server.engine.submitted) > 20)
    server.engine.fail_after = None
    done = await server.wait(batch)
    assert done.request_counts == counts(1, 1, 0)


async def test_a_row_that_breaks_the_server_is_an_error(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What is a bug of ours costs that row, and is in the log"""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("a bug")

    server.engine.held = "row"
    batch = await server.submit(row(1))
    await until(lambda: server.engine.waiting == 1)
    monkeypatch.setattr("bros.server.openai.calls.CompletionCall.reply", broken)
    server.engine.go_on.set()
    done = await server.wait(batch)
    (line,) = (await server.results(done.error_file_id)).values()
    assert line["response"]["status_code"] == 500
    assert line["response"]["body"]["error"]["code"] == "internal_error"
    assert "a bug" not in str(line) and "a bug" in caplog.text


# Faults of ours


async def given_up(server: BatchServer, batch: Batch, faults: Callable[[], int]) -> Batch:
    """The batch, which is tried again whenever its lease has run out, but not for ever."""
    for number in (1, 2, 3):
        await until(lambda number=number: faults() == number)
        await until(lambda: not jobs_at_work())
        server.clock.advance(LEASE_S)
        server.wake()
    return await server.wait(batch, "failed")


def jobs_at_work() -> list[str]:
    names = (task.get_name() for task in asyncio.all_tasks())
    return [name for name in names if name.startswith("batch_")]


async def test_a_batch_whose_check_breaks_the_server_fails(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`failed` also means a system failure, with `errors` filled; our log says what it was"""
    checks = []

    def broken(self: EngineRowHandler, tenant: str, endpoint: str, body: dict[str, Any]) -> None:
        checks.append(body)
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(EngineRowHandler, "check", broken)
        failed = await given_up(server, await server.submit(row(1)), lambda: len(checks))
    assert failed.errors is not None and failed.errors.data is not None
    (error,) = failed.errors.data
    assert (error.code, error.line, error.param) == ("internal_error", None, None)
    assert "a bug" not in str(error.message)
    assert "RuntimeError: a bug" in caplog.text and "Traceback" in caplog.text
    assert (failed.output_file_id, failed.error_file_id) == (None, None)
    assert len(checks) == 3
    again = await server.wait(await server.submit(row(1)))  # others are none the worse
    assert again.status == "completed"


async def test_a_job_on_a_broken_store_fails(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was answered before is in the output file, the rest in the error file"""
    server.engine.held = "held"
    batch = await server.submit(*(row(i, "quick" if i < 3 else "held") for i in range(5)))
    await server.wait_done(batch, 3)
    tries = []

    def broken(*_: object) -> None:
        tries.append(1)
        raise StoreError("the store cannot be used: no such table: rows")

    monkeypatch.setattr(server.store.batches, "commit", broken)
    server.engine.go_on.set()
    failed = await given_up(server, batch, lambda: len(tries))
    assert failed.request_counts == counts(5, 3, 2)
    assert failed.errors is not None and failed.errors.data is not None
    assert [error.code for error in failed.errors.data] == ["internal_error"]
    assert (await server.results(failed.output_file_id)).keys() == {"row-0", "row-1", "row-2"}
    errors = await server.results(failed.error_file_id)
    assert errors.keys() == {"row-3", "row-4"}
    assert {line["error"]["code"] for line in errors.values()} == {"batch_failed"}
    assert "no such table" in caplog.text and "retrying in" not in caplog.text


async def test_an_engine_that_gives_no_figures_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """How many rows run follows from them"""
    monkeypatch.setattr(runner, "_ADJUST_S", 0.001)
    async with batch_server(tmp_path) as server:
        server.engine.held, server.engine.bug = "row", RuntimeError("a bug")
        await server.submit(*(row(i) for i in range(40)))
        await until(lambda: server.engine.waiting == 16 and "a bug" in caplog.text)
        server.engine.figures = EngineStats(by_class={ServiceClass.BE: ClassStats(running=16)})
        server.engine.bug = None
        await until(lambda: server.engine.waiting == 40)


async def test_files_are_swept_after_a_sweep_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_SWEEP_S", 0.001)
    async with batch_server(tmp_path, idle=True) as server:
        orphan = server.store.files.bodies.path("ab" * 32)
        orphan.parent.mkdir()
        orphan.write_bytes(b"orphan")
        with monkeypatch.context() as patch:
            patch.setattr(server.store.files, "sweep", lambda now: 1 / 0)
            async with working(server.live):
                await until(lambda: "ZeroDivisionError" in caplog.text)
                patch.undo()
                await until(lambda: not orphan.exists())


# A row of some megabytes


async def test_the_event_loop_does_not_wait_for_the_check_of_a_row(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither for that of the input nor for that of each row"""
    on_loop, make = [], ROW_CALLS[COMPLETIONS]
    loop_thread = threading.get_ident()

    def call(state: ServerState, fields: Mapping[str, Any]) -> Call:
        on_loop.append(threading.get_ident() == loop_thread)
        return make(state, fields)

    monkeypatch.setitem(cast(dict[str, Any], ROW_CALLS), COMPLETIONS, call)
    done = await server.wait(await server.submit(row(1)))
    assert done.request_counts == counts(1, 1, 0)
    assert on_loop == [False, False]


@pytest.mark.parametrize("message", [{"content": "x" * 3000}, {"content": "x", "extra": "?"}])
async def test_the_event_loop_does_not_wait_for_the_template_of_a_row(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch, message: dict[str, Any]
) -> None:
    """Neither for what is made of each message before"""
    on_loop, dump = [], ChatMessage.model_dump
    loop_thread = threading.get_ident()

    def noted(self: ChatMessage) -> dict[str, Any]:
        on_loop.append(threading.get_ident() == loop_thread)
        return dump(self)

    monkeypatch.setattr(ChatMessage, "model_dump", noted)
    line = chat_row(1, messages=[{"role": "user", **message}] * 2)
    await server.wait(await server.submit(line, endpoint=CHAT))
    assert on_loop == [False, False]


# A store without room


async def test_a_full_store_is_507(server: BatchServer) -> None:
    """The error body, and nothing half-written; with room again all goes on"""
    file = await server.upload(b"text")
    with server.full("files"), pytest.raises(openai.InternalServerError) as error:
        await server.upload(b"more")
    assert (error.value.status_code, error.value.code) == (507, "insufficient_storage")
    with server.full("batches"), pytest.raises(openai.InternalServerError) as error:
        await server.create(file.id)
    assert (error.value.status_code, error.value.code) == (507, "insufficient_storage")
    assert [found.id async for found in server.client.files.list()] == [file.id]
    assert (await server.client.batches.list()).data == []
    assert not server.unplaced()
    assert (await server.upload(b"more")).status == "processed"


async def test_a_full_store_holds_up_jobs(
    server: BatchServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch that cannot be admitted waits for room; its rows do not run before"""
    with server.full("rows"):
        batch = await server.submit(row(1))
        await until(lambda: "retrying in" in caplog.text)
        assert not server.engine.submitted
        assert (await server.client.batches.retrieve(batch.id)).status == "validating"
    assert (await server.wait(batch)).request_counts == counts(1, 1, 0)
