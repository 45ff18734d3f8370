"""Background responses: queued, run as best-effort, and found again by any server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import openai
import pytest
from openai.types.responses import Response

from bros.batch.objects import RowPostponedError, StoreUnavailableError
from bros.batch.responses import ResponseStatus
from bros.core.request import ServiceClass
from bros.server.responses.background import EngineResponseHandler
from bros.server.responses.running import Followers, RunningResponses, WatchedResponses
from support.batch_server import BatchServer, batch_server, eventually, until

from .test_responses import create, read_events

OPEN = ("queued", "in_progress")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path) as made:
        yield made


async def wait(server: BatchServer, response_id: str) -> Response:
    """As clients poll."""

    async def look() -> Response | None:
        found = await server.client.responses.retrieve(response_id)
        return None if found.status in OPEN else found

    return await eventually(look)


async def stream(server: BatchServer, response_id: str, **query: Any) -> list[dict[str, Any]]:
    reply = await server.http.get(
        f"/v1/responses/{response_id}", params={"stream": "true", **query}
    )
    assert reply.status_code == 200, reply.text
    return read_events(reply.text)


async def test_it_is_queued_and_completed(server: BatchServer) -> None:
    queued = await create(server, background=True, metadata={"a": "b"})
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    done = await wait(server, queued.id)
    assert (done.status, done.output_text) == ("completed", "Hello world")
    assert (done.id, done.created_at, done.metadata) == (queued.id, queued.created_at, {"a": "b"})
    assert done.service_tier == "flex" and done.usage is not None
    (request,) = server.engine.submitted
    assert request.service_class is ServiceClass.BE
    assert request.request_id.startswith(queued.id)
    assert request.slo.deadline_s == pytest.approx(86400, abs=60)
    again = await create(server, input="More", previous_response_id=done.id)
    assert again.status == "completed"


@pytest.mark.parametrize(
    ("fields", "deadline_s"),
    [
        ({"background_options": {"completion_window": "2h"}}, 7200),
        ({"background_options": {"completion_window": "8h"}}, 28800),
        ({"slo": {"deadline_ms": 90_000}}, 90),
    ],
)
async def test_it_has_a_deadline(
    server: BatchServer, fields: dict[str, Any], deadline_s: float
) -> None:
    body = {"input": "Hi", "background": True, **fields}
    queued = (await server.http.post("/v1/responses", json=body)).json()
    await wait(server, queued["id"])
    assert server.engine.submitted[0].slo.deadline_s == pytest.approx(deadline_s, abs=30)


async def test_after_its_deadline_it_fails(server: BatchServer) -> None:
    server.engine.held = "Hi"
    queued = await create(server, background=True, extra_body={"slo": {"deadline_ms": 60_000}})
    await until(lambda: server.engine.waiting == 1)
    assert (await server.client.responses.retrieve(queued.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError) as early:
        await create(server, previous_response_id=queued.id)
    assert early.value.code == "invalid_response_status"
    server.clock.advance(61)
    background(server).wake()
    failed = await wait(server, queued.id)
    assert failed.status == "failed" and failed.error is not None
    assert failed.error.code == "server_error"
    await until(lambda: server.engine.waiting == 0)
    assert server.engine.aborted


async def test_it_can_be_cancelled(server: BatchServer) -> None:
    server.engine.held = "Hi"
    queued = await create(server, background=True)
    await until(lambda: server.engine.waiting == 1)
    cancelled = await server.client.responses.cancel(queued.id)
    assert cancelled.status == "cancelled"
    await until(lambda: server.engine.waiting == 0)
    server.engine.go_on.set()
    assert (await server.client.responses.cancel(queued.id)).status == "cancelled"
    assert (await wait(server, queued.id)).status == "cancelled"
    assert server.live.server.state.jobs is not None
    await until(lambda: server.live.server.state.jobs.runner.rows_in_flight == 0)  # type: ignore[union-attr]
    foreground = await create(server)
    with pytest.raises(openai.BadRequestError):
        await server.client.responses.cancel(foreground.id)


async def test_deleting_it_aborts_it(server: BatchServer) -> None:
    server.engine.held = "Hi"
    queued = await create(server, background=True)
    await until(lambda: server.engine.waiting == 1)
    await server.client.responses.delete(queued.id)
    await until(lambda: server.engine.waiting == 0)
    assert server.store.responses.usage() == {}


async def test_what_is_wrong_with_it_is_said_at_once(server: BatchServer) -> None:
    with pytest.raises(openai.BadRequestError):
        await create(server, background=True, temperature=-1)
    with pytest.raises(openai.BadRequestError) as too_long:
        await create(server, background=True, input="x" * 5000)
    assert too_long.value.code == "context_length_exceeded"
    assert server.store.responses.usage() == {}


async def test_what_is_refused_only_later_is_a_failure(tmp_path: Path) -> None:
    async with batch_server(tmp_path, idle=True) as first:
        start = await create(first)
        queued = await create(first, background=True, previous_response_id=start.id)
        await first.client.responses.delete(start.id)
        clock = first.clock
    async with batch_server(tmp_path, clock=clock, seed=1) as second:
        failed = await wait(second, queued.id)
    assert failed.status == "failed" and failed.error is not None
    assert failed.error.code == "invalid_prompt" and start.id in failed.error.message
    assert second.engine.submitted == []


async def test_it_is_given_up_if_the_engine_always_dies_of_it(server: BatchServer) -> None:
    server.engine.poison = "poison"
    bad = await create(server, background=True, input="poison")
    good = await create(server, background=True, input="good")
    assert (await wait(server, good.id)).status == "completed"
    failed = await wait(server, bad.id)
    assert failed.status == "failed" and failed.error is not None
    assert failed.error.code == "server_error"


async def test_its_events_can_be_read_again_from_any_of_them(server: BatchServer) -> None:
    server.engine.held = "Hi"
    body = {"input": "Hi", "background": True, "stream": True}
    reading = asyncio.ensure_future(server.http.post("/v1/responses", json=body))
    await until(lambda: server.engine.waiting == 1)
    server.engine.go_on.set()
    events = read_events((await reading).text)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == [
        "created", "queued", "in_progress", "output_item.added", "content_part.added",
        "output_text.delta", "output_text.done", "content_part.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    numbers = [event["sequence_number"] for event in events]
    end = 5 + len("Hello world")  # each of its characters has a number
    assert numbers == [0, 1, 2, 3, 4, end - 1, end, end + 1, end + 2, end + 3]
    response_id = events[0]["response"]["id"]
    for after in (0, 1, 2, 4, end - 1, end):
        rest = [event for event in events if event["sequence_number"] > after]
        assert await stream(server, response_id, starting_after=after) == rest
    assert await stream(server, response_id) == events
    middle = await stream(server, response_id, starting_after=4 + len("Hello"))
    assert middle == [{**events[5], "delta": " world"}, *events[6:]]
    for after in (end + 3, 999):
        query = {"stream": "true", "starting_after": str(after)}
        reply = await server.http.get(f"/v1/responses/{response_id}", params=query)
        assert reply.text.startswith(":")  # a comment
    async with server.client.responses.stream(response_id=response_id) as helper:
        assert (await helper.get_final_response()).output_text == "Hello world"


async def held_after(server: BatchServer, tokens: int) -> tuple[str, list[dict[str, Any]]]:
    """A response that has written so many tokens, and the events that its reader had by then."""
    server.engine.hold_after = tokens
    events: list[dict[str, Any]] = []
    body = {"input": "Hi", "background": True, "stream": True}
    async with server.http.stream("POST", "/v1/responses", json=body) as reply:
        text = ""
        async for piece in reply.aiter_text():
            text += piece
            events = read_events(text) if text.endswith("\n\n") else events
            if text_of(events) == server.engine.text[:tokens]:
                break
    return events[0]["response"]["id"], events


def text_of(events: list[dict[str, Any]]) -> str:
    kind = "response.output_text.delta"
    return "".join(event["delta"] for event in events if event["type"] == kind)


async def test_its_output_is_streamed_as_it_comes(server: BatchServer) -> None:
    """A reader that leaves can go on from any of its events, while it runs and later."""
    response_id, events = await held_after(server, 5)
    assert text_of(events) == "Hello" and events[-1]["sequence_number"] == 4 + len("Hello")
    reading = []
    for event in events:
        after = event["sequence_number"]
        reading.append(asyncio.create_task(stream(server, response_id, starting_after=after)))
    await asyncio.sleep(0.05)
    server.engine.go_on.set()
    for known, rest in zip(range(1, len(events) + 1), await asyncio.gather(*reading), strict=True):
        found = events[:known] + rest
        assert text_of(found) == "Hello world"
        numbers = [event["sequence_number"] for event in found]
        assert numbers == sorted(set(numbers))
        assert found[-1]["type"] == "response.completed"
    whole = await server.client.responses.retrieve(response_id)
    for found in (events + rest, await stream(server, response_id)):
        ended = [event for event in found if event["type"] == "response.output_item.done"]
        assert [event["item"]["id"] for event in ended] == [item.id for item in whole.output]
    later = await server.client.responses.retrieve(
        response_id, stream=True, starting_after=events[-1]["sequence_number"]
    )
    assert text_of([event.model_dump() async for event in later]) == " world"


async def test_a_stream_of_one_that_is_cancelled_ends(server: BatchServer) -> None:
    response_id, events = await held_after(server, 5)
    after = events[-1]["sequence_number"]
    reading = asyncio.create_task(stream(server, response_id, starting_after=after))
    await asyncio.sleep(0.05)
    await server.client.responses.cancel(response_id)
    for found in (await reading, await stream(server, response_id, starting_after=after)):
        assert [event["type"] for event in found] == ["response.incomplete"]
        assert found[0]["sequence_number"] == after + 1
        assert found[0]["response"]["status"] == "cancelled"


async def test_a_stream_goes_on_when_the_next_server_runs_it_again(tmp_path: Path) -> None:
    """With the same ids, and the same random numbers."""
    async with batch_server(tmp_path) as first:
        response_id, events = await held_after(first, 5)
        (begun,) = first.engine.submitted
        clock = first.clock
    async with batch_server(tmp_path, clock=clock, seed=1) as second:
        after = events[-1]["sequence_number"]
        rest = await stream(second, response_id, starting_after=after)
        (again,) = second.engine.submitted
    assert text_of(events + rest) == "Hello world"
    assert begun.sampling.seed is not None and again.sampling.seed == begun.sampling.seed
    assert len({event["item_id"] for event in events + rest if "item_id" in event}) == 1


async def test_a_server_that_does_not_run_it_sends_its_output_at_the_end(tmp_path: Path) -> None:
    async with (
        batch_server(tmp_path) as one,
        batch_server(tmp_path, clock=one.clock, seed=1, idle=True) as other,
    ):
        response_id, _ = await held_after(one, 5)
        reading = asyncio.create_task(stream(other, response_id))
        await asyncio.sleep(0.05)
        one.engine.go_on.set()
        found = await reading
    assert [event["delta"] for event in found if "delta" in event] == ["Hello world"]
    assert found[-1]["type"] == "response.completed"


async def test_a_reader_that_leaves_does_not_end_it(server: BatchServer) -> None:
    server.engine.held = "Hi"
    body = {"input": "Hi", "background": True, "stream": True}
    async with server.http.stream("POST", "/v1/responses", json=body) as reply:
        head = await anext(reply.aiter_text())
    (event, *_) = read_events(head)
    server.engine.go_on.set()
    assert (await wait(server, event["response"]["id"])).status == "completed"


@pytest.mark.parametrize(
    "query", [{"starting_after": "1"}, {"stream": "true"}, {"stream": "maybe"}, {"other": "x"}]
)
async def test_wrong_queries_are_refused(server: BatchServer, query: dict[str, str]) -> None:
    response = await create(server)
    reply = await server.http.get(f"/v1/responses/{response.id}", params=query)
    assert reply.status_code == 400


async def test_the_next_server_completes_it(tmp_path: Path) -> None:
    """Queued or running, and continued conversations."""
    async with batch_server(tmp_path) as first:
        start = await create(first, input="Start")
        first.engine.held = "Hi"
        running = await create(first, background=True, previous_response_id=start.id)
        await until(lambda: first.engine.waiting == 1)
        clock = first.clock
    assert len(first.engine.aborted) == 1
    async with batch_server(tmp_path, clock=clock, seed=1, idle=True) as idle:
        queued = await create(idle, background=True, input="Later")
        found = await idle.client.responses.retrieve(running.id)
        assert found.status == "queued"  # a server that stops hands over what it has begun
    async with batch_server(tmp_path, clock=clock, seed=2) as last:
        for response_id in (running.id, queued.id):
            done = await wait(last, response_id)
            assert (done.status, done.output_text) == ("completed", "Hello world")
        assert sorted("Start" in prompt for prompt in last.engine.prompts) == [False, True]
        assert set(last.engine.prompts.values()) == {1}


async def test_a_server_that_hangs_loses_it(tmp_path: Path, monkeypatch: Any) -> None:
    """What the first one still says is ignored."""
    async with (
        batch_server(tmp_path, batch_lease=15.0) as one,
        batch_server(tmp_path, clock=one.clock, seed=1, batch_lease=15.0) as other,
    ):
        one.engine.held = "Hi"
        await asyncio.sleep(0)
        background(other).wake()
        queued = await create(one, background=True)
        await until(lambda: one.engine.waiting + len(other.engine.submitted) == 1)
        if other.engine.submitted:
            return  # the other one was faster
        monkeypatch.setattr(one.store.responses, "renew", lambda *_: frozenset(_held(one)))
        one.clock.advance(15)
        background(other).wake()
        done = await wait(other, queued.id)
        assert done.status == "completed" and len(other.engine.submitted) == 1
        one.engine.text = "Too late"
        one.engine.go_on.set()
        await until(lambda: background(one).in_flight == 0)
        assert (await wait(one, queued.id)).output_text == "Hello world"


def _held(server: BatchServer) -> list[tuple[str, int]]:
    return [(claim.response_id, claim.epoch) for claim, _ in background(server)._running.values()]


def background(server: BatchServer) -> Any:
    assert server.live.server.state.jobs is not None
    return server.live.server.state.jobs.background


async def test_open_ones_are_limited(tmp_path: Path) -> None:
    async with batch_server(tmp_path, idle=True, tenant_max_background=2) as server:
        for _ in range(2):
            await create(server, background=True)
        with pytest.raises(openai.RateLimitError) as refused:
            await create(server, background=True)
        assert refused.value.code == "tenant_limit_exceeded"
        assert (await create(server)).status == "completed"


async def test_the_oldest_make_room(tmp_path: Path) -> None:
    async with batch_server(tmp_path, idle=True, tenant_max_responses=3) as server:
        queued = await create(server, background=True)
        made = []
        for number in range(4):
            server.clock.advance(1)
            made.append(await create(server, input=f"{number}"))
        for response, is_there in zip(
            [queued, *made], [True, False, False, True, True], strict=True
        ):
            if is_there:
                assert (await server.client.responses.retrieve(response.id)).id == response.id
            else:
                with pytest.raises(openai.NotFoundError):
                    await server.client.responses.retrieve(response.id)


async def test_they_expire(tmp_path: Path) -> None:
    async with batch_server(tmp_path, response_ttl=100.0) as server:
        first = await create(server)
        server.clock.advance(60)
        second = await create(server, previous_response_id=first.id)
        server.clock.advance(60)  # whoever continues a conversation keeps it
        await create(server, previous_response_id=second.id)
        server.clock.advance(101)
        with pytest.raises(openai.NotFoundError):
            await server.client.responses.retrieve(second.id)
        server.store.responses.sweep(server.clock.unix_time())
        assert server.store.responses.usage() == {}


# A store that cannot be read for a moment


async def test_those_who_follow_it_wait_for_a_store_that_is_busy() -> None:
    done = SimpleNamespace(status=ResponseStatus.COMPLETED)
    answers = [StoreUnavailableError("busy"), StoreUnavailableError("busy"), done]

    async def look() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    with WatchedResponses().followed("ann", "r", look, lambda: False) as watched:
        assert await asyncio.wait_for(watched.stored(), 30) is done


async def test_what_ends_to_wait_for_changes_leaves_nothing() -> None:
    followers = Followers()
    waiting = [asyncio.ensure_future(followers.changed(0)) for _ in range(3)]
    await asyncio.sleep(0)
    for each in waiting[:2]:
        each.cancel()
    await asyncio.wait(waiting[:2])
    assert len(followers._waiting) == 1
    followers.notify()
    await waiting[2]


async def test_it_runs_later_if_its_conversation_cannot_be_read_now(server: BatchServer) -> None:
    def busy(*_: object) -> None:
        raise StoreUnavailableError("the database is busy")

    jobs = server.live.server.state.jobs
    assert jobs is not None
    handler: Any = jobs.background._handler
    handler = EngineResponseHandler(handler._runner, Mock(conversation=busy), RunningResponses())
    given = {"model": server.live.server.state.model_name, "input": []}
    items = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    stored: Any = SimpleNamespace(
        id="resp_2", previous_id="resp_1", request=json.dumps(given), input=json.dumps(items),
        tenant="", created_at=0,
    )  # fmt: skip
    with pytest.raises(RowPostponedError, match="busy"):
        await handler.answer(stored, due_in_s=60.0)
