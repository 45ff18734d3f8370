"""GET /v1/requests/{id}/trace"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bros.core.interfaces import GroupCosts, Placement, RequestTrace
from bros.core.request import FinishReason, ServiceClass, Slo
from bros.server.state import RecentRequests
from support.scripted_server import Server, assert_envelope


def make_trace(request_id: str) -> RequestTrace:
    return RequestTrace(
        request_id=request_id,
        service_class=ServiceClass.BE,
        requested_class=ServiceClass.RT,
        slo=Slo(ttft_s=0.4, tpot_s=0.2, gap_s=0.3),
        prompt_tokens=21,
        output_tokens=12,
        events=((0.0, "queued"), (0.0304, "scheduled"), (1.0006, "finished")),
        waits={"rows": 0.0304, "time": 0.25},
        ttft_s=0.51,
        tpot_s=0.0445,
        longest_gap_s=0.09,
        slowdown=1.4567,
        late_tokens=3,
        preemptions=1,
        finish_reason=FinishReason.STOP,
        placement=Placement(
            replica=2, reason="group", expected_tokens=16, group=GroupCosts(1.5, 2.25, replicas=2)
        ),
    )


async def get(server: Server, request_id: str) -> dict[str, Any]:
    response = await server.http.get(f"/v1/requests/{request_id}/trace")
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


async def test_a_trace_tells_everything_in_milliseconds(server: Server) -> None:
    request_id = (await server.chat()).json()["id"]
    server.engine.traces = {request_id: make_trace(request_id)}
    assert await get(server, request_id) == {
        "id": request_id,
        "object": "request.trace",
        "choices": [
            {
                "index": 0,
                "request_id": request_id,
                "service_class": "be",
                "requested_class": "rt",
                "slo": {"ttft_ms": 400.0, "tpot_ms": 200.0, "gap_ms": 300.0, "deadline_ms": None},
                "prompt_tokens": 21,
                "output_tokens": 12,
                "late_tokens": 3,
                "preemptions": 1,
                "ttft_ms": 510.0,
                "tpot_ms": 44.5,
                "longest_gap_ms": 90.0,
                "slowdown": 1.457,
                "waits_ms": {"rows": 30.4, "time": 250.0},
                "events": [
                    {"at_ms": 0.0, "event": "queued"},
                    {"at_ms": 30.4, "event": "scheduled"},
                    {"at_ms": 1000.6, "event": "finished"},
                ],
                "finish_reason": "stop",
                "placement": {
                    "replica": 2,
                    "reason": "group",
                    "expected_tokens": 16,
                    "group": {"cost_s": 1.5, "alternative_s": 2.25, "replicas": 2},
                },
            }
        ],
    }


async def test_what_is_not_known_yet_is_null(server: Server) -> None:
    server.engine.traces["r"] = RequestTrace(
        request_id="r", service_class=ServiceClass.RT, requested_class=ServiceClass.RT,
        slo=Slo(), prompt_tokens=3, output_tokens=0, events=(), waits={},
    )  # fmt: skip
    (choice,) = (await server.http.get("/v1/requests/r/trace")).json()["choices"]
    assert not any(choice["slo"].values())
    for name in ("ttft_ms", "tpot_ms", "longest_gap_ms", "slowdown", "finish_reason"):
        assert choice[name] is None


@pytest.mark.parametrize(("prompts", "n"), [(1, 1), (1, 3), (2, 1), (2, 3)])
async def test_all_choices_of_all_prompts_are_found_under_the_clients_id(
    server: Server, prompts: int, n: int
) -> None:
    reply = (await server.complete(prompt=["a", "b"][:prompts], n=n)).json()
    submitted = [request.request_id for request in server.engine.submitted]
    assert len(set(submitted)) == prompts * n
    server.engine.traces = {name: make_trace(name) for name in submitted}
    choices = (await get(server, reply["id"]))["choices"]
    assert [(c["index"], c["request_id"]) for c in choices] == list(enumerate(submitted))


async def test_choices_the_engine_has_forgotten_are_left_out(server: Server) -> None:
    reply = (await server.chat(n=3)).json()
    last = server.last().request_id
    server.engine.traces = {last: make_trace(last)}
    choices = (await get(server, reply["id"]))["choices"]
    assert [choice["index"] for choice in choices] == [2]


async def test_a_running_request_has_a_trace(server: Server) -> None:
    server.engine.hold_after = 2
    running = asyncio.ensure_future(server.chat(n=2))
    await server.engine.holding.wait()
    base_id = server.last().request_id.removesuffix("-1")
    server.engine.traces = {f"{base_id}-0": make_trace(f"{base_id}-0")}
    assert (await get(server, base_id))["id"] == base_id
    server.engine.go_on.set()
    assert (await running).json()["id"] == base_id


@pytest.mark.parametrize("request_id", ["chatcmpl-nobody", "x" * 3000, "%FF%00%0A", "a%20b", "-0"])
async def test_an_unknown_request_is_404(server: Server, request_id: str) -> None:
    error = assert_envelope(await server.http.get(f"/v1/requests/{request_id}/trace"), 404)
    assert (error["param"], error["code"]) == ("id", "request_not_found")
    assert len(error["message"]) < 400


async def test_a_finished_request_that_the_engine_has_forgotten_is_404(server: Server) -> None:
    reply = (await server.chat(n=2)).json()
    assert_envelope(await server.http.get(f"/v1/requests/{reply['id']}/trace"), 404)


async def test_without_an_engine_it_is_503(server: Server) -> None:
    reply = (await server.chat(n=2)).json()
    server.engine.alive = False
    response = await server.http.get(f"/v1/requests/{reply['id']}/trace")
    assert assert_envelope(response, 503)["code"] == "engine_unavailable"


async def test_traces_are_not_for_everybody(locked_server: Server) -> None:
    locked_server.engine.traces = {"r": make_trace("r")}
    path = "/v1/requests/r/trace"
    assert_envelope(await locked_server.http.get(path), 401)
    headers = {"authorization": "Bearer secret"}
    assert (await locked_server.http.get(path, headers=headers)).status_code == 200


def test_only_so_many_requests_are_remembered() -> None:
    recent = RecentRequests(capacity=2)
    for name in ("a", "b", "c"):
        recent.note("", name, prompts=2, n=2)
    assert recent.parts("a") == ("a",)
    assert recent.parts("c") == ("c-0-0", "c-0-1", "c-1-0", "c-1-1")
