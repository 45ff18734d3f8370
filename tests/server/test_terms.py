"""Service tiers and objectives."""

from __future__ import annotations

from typing import Any

import pytest

from bros.core.request import ServiceClass, Slo
from support.scripted_server import Server, assert_envelope


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


async def test_unknown_tier_is_refused(server: Server) -> None:
    assert assert_envelope(await server.chat(service_tier="best"), 400)["param"] == "service_tier"


async def slo_of(server: Server, headers: dict[str, str], **fields: Any) -> Slo:
    body = {"messages": [{"role": "user", "content": "Hi"}], **fields}
    response = await server.http.post("/v1/chat/completions", json=body, headers=headers)
    assert response.status_code == 200, response.text
    return server.last().slo


async def test_objectives_in_the_body(server: Server) -> None:
    slo = {"ttft_ms": 250, "tpot_ms": 12.5, "deadline_ms": 60_000}
    assert await slo_of(server, {}, slo=slo) == Slo(0.25, 0.0125, 60.0)


@pytest.mark.parametrize("prefix", ["x-slo", "x-llm-d-slo"])
async def test_objectives_in_headers(server: Server, prefix: str) -> None:
    headers = {f"{prefix}-ttft-ms": "300", f"{prefix}-tpot-ms": "20"}
    assert await slo_of(server, headers) == Slo(0.3, 0.02)


async def test_the_body_wins_over_headers_field_by_field(server: Server) -> None:
    headers = {
        "x-slo-ttft-ms": "300",
        "x-slo-tpot-ms": "20",
        "x-llm-d-slo-tpot-ms": "99",
    }
    assert await slo_of(server, headers, slo={"ttft_ms": 100}) == Slo(0.1, 0.02)


async def test_no_objectives_leave_them_to_the_server(server: Server) -> None:
    assert await slo_of(server, {}) == Slo()


@pytest.mark.parametrize("text", ["soon", "", "-1", "0", "nan", "inf", "1e300"])
async def test_wrong_header_is_named(server: Server, text: str) -> None:
    response = await server.http.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "Hi"}]},
        headers={"x-slo-tpot-ms": text},
    )
    assert assert_envelope(response, 400)["param"] == "x-slo-tpot-ms"


@pytest.mark.parametrize("value", [0, -1, "100", True, 1e300])
async def test_wrong_objective_in_the_body_is_named(server: Server, value: object) -> None:
    response = await server.chat(slo={"ttft_ms": value})
    assert assert_envelope(response, 400)["param"] == "slo.ttft_ms"


async def test_the_caller_identity_reaches_the_engine(server: Server) -> None:
    await server.chat(user="u1")
    assert server.last().tenant == "u1"
    await server.chat(user="u1", safety_identifier="s1")
    assert server.last().tenant == "s1"
