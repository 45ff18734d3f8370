"""Service tiers and objectives."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from bros.core.request import ServiceClass, Slo
from support.scripted_server import Server, assert_envelope, chunks


@pytest.mark.parametrize(
    ("tier", "service_class", "used"),
    [
        (None, ServiceClass.RT, "default"),
        ("auto", ServiceClass.RT, "default"),
        ("default", ServiceClass.RT, "default"),
        ("scale", ServiceClass.RT, "default"),
        ("priority", ServiceClass.RT, "priority"),
        ("fast", ServiceClass.RT, "priority"),
        ("flex", ServiceClass.BE, "flex"),
    ],
)
async def test_tiers(
    server: Server, tier: str | None, service_class: ServiceClass, used: str
) -> None:
    for response in (
        await server.chat(service_tier=tier),
        await server.complete(service_tier=tier),
    ):
        assert response.json()["service_tier"] == used
        assert server.last().service_class is service_class


@pytest.mark.parametrize("text", ["5e-324", "0.0009"])
async def test_an_objective_too_short_to_be_shown_is_refused(server: Server, text: str) -> None:
    """It would be 0 in seconds, or where it is shown, which its own schema excludes."""
    slo = {"deadline_ms": float(text)}
    chat = await server.chat(slo=slo)
    session = await server.http.post("/v1/sessions", json={"criteria": slo})
    header = await server.http.post(
        "/v1/completions", json={"prompt": "Hi"}, headers={"x-slo-deadline-ms": text}
    )
    for response in (chat, session, header):
        assert_envelope(response, 400)
    assert (await server.chat(slo={"deadline_ms": 0.001})).status_code == 200


async def test_unknown_tier_is_refused(server: Server) -> None:
    assert assert_envelope(await server.chat(service_tier="best"), 400)["param"] == "service_tier"


@pytest.mark.parametrize("asked", [None, "default", "priority"])
@pytest.mark.parametrize(
    ("fields", "relegates"),
    [({}, ""), ({"n": 3}, ""), ({"n": 3}, "-0"), ({"n": 3}, "-2")],
)
async def test_a_relegated_request_says_flex_everywhere(
    server: Server, asked: str | None, fields: dict[str, Any], relegates: str
) -> None:
    server.engine.relegates = relegates
    for create in (server.chat, server.complete):
        assert (await create(service_tier=asked, **fields)).json()["service_tier"] == "flex"
        assert server.last().service_class is ServiceClass.RT, "relegating is the engine's choice"
        stream = await create(service_tier=asked, stream=True, **fields)
        assert {chunk["service_tier"] for chunk in chunks(stream.text)} == {"flex"}


@pytest.mark.parametrize("n", [1, 2])
async def test_one_relegated_prompt_of_several_makes_the_whole_request_flex(
    server: Server, n: int
) -> None:
    server.engine.relegates = "-1" if n == 1 else "-1-1"
    fields = {"prompt": ["a", "b"], "n": n}
    assert (await server.complete(**fields)).json()["service_tier"] == "flex"
    stream = await server.complete(stream=True, **fields)
    assert {chunk["service_tier"] for chunk in chunks(stream.text)} == {"flex"}


async def slo_of(server: Server, headers: dict[str, str], **fields: Any) -> Slo:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    response = await server.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return server.last().slo


async def test_objectives_in_the_body(server: Server) -> None:
    slo = {"ttft_ms": 250, "tpot_ms": 12.5, "deadline_ms": 60_000, "gap_ms": 40, "rt_slowdown": 2}
    assert await slo_of(server, {}, slo=slo) == Slo(0.25, 0.0125, 60.0, 0.04, 2.0)


@pytest.mark.parametrize("prefix", ["x-slo", "x-llm-d-slo"])
async def test_objectives_in_headers(server: Server, prefix: str) -> None:
    headers = {f"{prefix}-ttft-ms": "300", f"{prefix}-tpot-ms": "20"}
    assert await slo_of(server, headers) == Slo(0.3, 0.02)
    headers = {f"{prefix}-gap-ms": "500"}
    assert await slo_of(server, headers) == Slo(gap_s=0.5)
    headers = {f"{prefix}-deadline-ms": "60000"}
    assert await slo_of(server, headers) == Slo(deadline_s=60.0)
    assert await slo_of(server, headers, service_tier="flex") == Slo(deadline_s=60.0)


async def test_a_misspelt_objective_is_an_error_that_names_it(server: Server) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "slo": {"ttft": 250}}
    response = await server.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "slo.ttft" and "ttft" in error["message"]


async def test_the_body_wins_over_headers_field_by_field(server: Server) -> None:
    headers = {
        "x-slo-ttft-ms": "300",
        "x-slo-tpot-ms": "20",
        "x-llm-d-slo-tpot-ms": "99",
        "x-slo-deadline-ms": "7000",
        "x-llm-d-slo-deadline-ms": "99",
    }
    assert await slo_of(server, headers, slo={"ttft_ms": 100}) == Slo(0.1, 0.02, 7.0)
    assert await slo_of(server, headers, slo={"deadline_ms": 900}) == Slo(0.3, 0.02, 0.9)


NOTHING: list[dict[str, Any]] = [{}, {"slo": None}, {"slo": {}}, {"slo": {"ttft_ms": None}}]


@pytest.mark.parametrize("tier", [None, "auto", "default", "scale", "flex"])
@pytest.mark.parametrize("fields", NOTHING)
async def test_no_objectives_leave_them_to_the_engine(
    server: Server, tier: str | None, fields: dict[str, Any]
) -> None:
    assert await slo_of(server, {}, service_tier=tier, **fields) == Slo()


@pytest.mark.parametrize("tier", ["priority", "fast"])
@pytest.mark.parametrize("fields", NOTHING)
async def test_priority_halves_the_objectives_of_the_server(
    server: Server, tier: str, fields: dict[str, Any]
) -> None:
    server.engine.info = dataclasses.replace(
        server.engine.info, default_slo=Slo(ttft_s=0.5, tpot_s=0.125, deadline_s=30.0)
    )
    assert await slo_of(server, {}, service_tier=tier, **fields) == Slo(0.25, 0.0625, 15.0)


async def test_what_a_priority_request_names_itself_is_not_halved(server: Server) -> None:
    server.engine.info = dataclasses.replace(
        server.engine.info, default_slo=Slo(ttft_s=0.5, tpot_s=0.125, deadline_s=30.0)
    )
    slo = {"ttft_ms": 2000, "deadline_ms": 9000}
    asked = await slo_of(server, {}, service_tier="priority", slo=slo)
    assert asked == Slo(2.0, 0.0625, 9.0)
    headers = {"x-slo-tpot-ms": "300", "x-slo-ttft-ms": "999"}
    asked = await slo_of(server, headers, service_tier="priority", slo=slo)
    assert asked == Slo(2.0, 0.3, 9.0)
    asked = await slo_of(server, {"x-slo-deadline-ms": "8000"}, service_tier="priority")
    assert asked == Slo(0.25, 0.0625, 8.0)


async def test_objectives_of_a_best_effort_request_are_passed_on(server: Server) -> None:
    asked = await slo_of(server, {"x-slo-ttft-ms": "5000"}, service_tier="flex")
    assert asked == Slo(ttft_s=5.0)
    assert server.last().service_class is ServiceClass.BE


async def test_every_choice_and_prompt_gets_the_objectives(server: Server) -> None:
    await server.complete(prompt=["a", "b"], n=2, slo={"tpot_ms": 50})
    assert [request.slo for request in server.engine.submitted] == [Slo(tpot_s=0.05)] * 4


@pytest.mark.parametrize("name", ["x-slo-tpot-ms", "x-slo-deadline-ms", "x-llm-d-slo-deadline-ms"])
@pytest.mark.parametrize("text", ["soon", "", "-1", "0", "nan", "inf", "1e300"])
async def test_wrong_header_is_named(server: Server, name: str, text: str) -> None:
    response = await server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}]},
        headers={name: text},
    )
    assert assert_envelope(response, 400)["param"] == name


@pytest.mark.parametrize("value", [0, -1, "100", True, 1e300])
async def test_wrong_objective_in_the_body_is_named(server: Server, value: object) -> None:
    response = await server.chat(slo={"ttft_ms": value})
    assert assert_envelope(response, 400)["param"] == "slo.ttft_ms"


async def test_the_caller_identity_reaches_the_engine(server: Server) -> None:
    await server.chat(user="u1")
    assert server.last().user == "u1"
    await server.chat(user="u1", safety_identifier="s1")
    assert server.last().user == "s1"
