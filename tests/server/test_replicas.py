"""What operators see of replicas and do with them."""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import io
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from bros.cli.admin import run_admin
from bros.cli.flags import add_arguments
from bros.cli.main import main
from bros.core.clock import SystemClock
from bros.core.config import Config, EngineConfig, ServerConfig
from bros.core.errors import BrosError, ConfigError, EngineDeadError
from bros.core.request import EngineRequest, SamplingParams
from bros.router.balance import PlanReport
from bros.router.client import RouterClient
from bros.router.e2 import E2, LeastLoaded, RoundRobin
from bros.server.app import create_app
from bros.server.build import most_queued
from bros.server.errors import describe
from bros.server.operations.metrics import ReplicaCollector
from bros.server.replicas import new_fleet, with_share_of_cores
from bros.server.tenants import load_tenants
from support.killable_engine import INFO, KillableEngine
from support.scripted_server import Server, assert_envelope
from support.turn_fleet import TurnFleet

ADMIN = "/admin/replicas"


class Replicated(Server):
    """A server whose engine is two of them, the second without a way to restart it."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.engines = [KillableEngine(), KillableEngine()]
        self.fleet = TurnFleet()
        self.router = RouterClient(self.fleet, SystemClock(), random.Random(0))
        for engine, restart in zip(self.engines, (self._restart, None), strict=True):
            engine.start()
            self.router.add(engine, restart=restart)
        state = dataclasses.replace(self.state, engine=self.router, replicas=self.router)
        app = create_app(state, load_tenants(state.config))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://test")

    async def _restart(self) -> None:
        self.engines[0].die()
        await asyncio.sleep(0)
        self.engines[0].start()

    async def states(self) -> list[str]:
        return [replica["state"] for replica in (await self.http.get(ADMIN)).json()["data"]]


@pytest.fixture
async def server() -> AsyncIterator[Replicated]:
    made = Replicated()
    async with made.http:
        yield made
    await made.router.close()


async def serve_one(server: Replicated, request_id: str) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=2, min_tokens=2)
    asked = EngineRequest(request_id=request_id, prompt_token_ids=[1] * 8, sampling=sampling)
    async for _ in await server.router.submit(asked):
        pass


@pytest.mark.parametrize(
    ("router", "cache", "expected"),
    [("e2", "class-aware", E2), ("e2", "off", LeastLoaded), ("rr", "off", RoundRobin)],
)
def test_without_a_prefix_cache_requests_go_by_load(
    router: str, cache: str, expected: type, caplog: pytest.LogCaptureFixture
) -> None:
    server = ServerConfig(router=router, replicas=2)
    fleet = new_fleet(Config(engine=EngineConfig(prefix_cache=cache), server=server))
    assert isinstance(fleet.policy, expected)
    assert ("--prefix-cache off" in caplog.text) == (expected is LeastLoaded)


def test_shares_of_the_queues_are_those_of_as_many_replicas_as_there_may_be() -> None:
    """The server begins with two, of which each has a queue for 10 requests."""
    info = dataclasses.replace(INFO, max_queue=20)
    assert most_queued(info, ServerConfig(replicas=2)) == 20
    assert most_queued(info, ServerConfig(replicas=2, min_replicas=1, max_replicas=8)) == 80


# HTTP


async def test_operators_see_all_replicas(server: Replicated) -> None:
    await serve_one(server, "a")
    body = (await server.http.get(ADMIN)).json()
    assert (body["router"], body["continued"], body["moved"]) == ("e2", 0, 0)
    (served,) = [replica for replica in body["data"] if replica["routed"]]
    assert served == {
        "number": served["number"],
        "name": f"replica-{served['number']}",
        "state": "up",
        **dict.fromkeys(("open", "running", "waiting", "used_blocks", "cached_blocks", "lost"), 0),
        "total_blocks": 100,
        "prompt_tokens": 8,
        "cached_tokens": 8,
        "routed": {"turn": 1},
    }


async def test_operators_see_what_a_plan_gains(server: Replicated) -> None:
    assert (await server.http.get(ADMIN)).json()["plan"] is None
    server.fleet.plan_report = PlanReport(
        requests=3, prefill_s=4.5, planned_s=1.5, balance=2.0, planned_balance=1.25
    )
    assert (await server.http.get(ADMIN)).json()["plan"] == {
        **{"requests": 3, "prefill_s": 4.5, "planned_s": 1.5},
        **{"balance": 2.0, "planned_balance": 1.25},
    }
    collector = ReplicaCollector()
    collector.router = server.router
    values = {s.name: s.value for metric in collector.collect() for s in metric.samples}
    assert values["bros_router_plan_prefill_seconds_total"] == 4.5
    assert values["bros_router_plan_planned_seconds_total"] == 1.5


async def test_a_replica_is_drained_and_used_again(server: Replicated) -> None:
    assert (await server.http.post(f"{ADMIN}/0/drain")).json()["data"][0]["state"] == "drained"
    error = assert_envelope(await server.http.post(f"{ADMIN}/1/drain"), 400)
    assert error["code"] == "last_replica"
    for n in range(3):
        await serve_one(server, str(n))
    assert len(server.engines[1].submitted) == 3
    assert await server.http.post(f"{ADMIN}/0/resume") and await server.states() == ["up", "up"]
    assert (await server.http.post(f"{ADMIN}/0/drain", json={"restart": True})).status_code == 200
    async with asyncio.timeout(60):
        while await server.states() != ["up", "up"]:
            await asyncio.sleep(0)
    assert server.engines[0].deaths == 1


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        ("7/drain", {}, 404, "replica_not_found"),
        ("7/resume", {}, 404, "replica_not_found"),
        ("x/drain", {}, 404, "not_found"),
        ("0/drain", {"move": "maybe"}, 400, None),
        ("0/drain", {"restrat": True}, 400, None),
        ("1/drain", {"restart": True}, 400, None),
    ],
)
async def test_wrong_wishes_are_refused(
    server: Replicated, path: str, body: dict[str, Any], status: int, code: str | None
) -> None:
    error = assert_envelope(await server.http.post(f"{ADMIN}/{path}", json=body), status)
    assert code is None or error["code"] == code
    assert await server.states() == ["up", "up"]


async def test_only_the_operator_may(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("ann ann-key\n", encoding="utf-8")
    server = Replicated(api_key="operator-key", api_keys=str(keys))
    async with server.http as http:
        for key, status in (("ann-key", 403), ("other", 401), ("operator-key", 200)):
            headers = {"authorization": f"Bearer {key}"}
            for method, path in (("GET", ""), ("POST", "/0/drain"), ("POST", "/0/resume")):
                reply = await http.request(method, ADMIN + path, headers=headers)
                assert reply.status_code == status
    await server.router.close()


async def test_a_server_with_one_engine_has_no_such_paths() -> None:
    server = Server()
    async with server.http as http:
        assert_envelope(await http.get(ADMIN), 404)
        assert ADMIN not in (await http.get("/openapi.json")).json()["paths"]
        assert (await http.get("/health")).json() == {"status": "ok"}


async def test_health_metrics_and_description_tell_of_replicas(server: Replicated) -> None:
    await serve_one(server, "a")
    server.engines[0].die()
    health = await server.http.get("/health")
    assert health.json() == {"status": "ok", "replicas_up": 1, "replicas": 2}
    text = (await server.http.get("/metrics")).text
    assert 'bros_replica_up{replica="0"} 0.0' in text
    assert 'bros_replica_up{replica="1"} 1.0' in text
    assert 'bros_replica_lost_total{replica="0"} 1.0' in text
    assert 'reason="turn"' in text and "bros_engine_up 1.0" in text
    assert "bros_kv_blocks 100.0" in text, "of the one that is left"
    server.engines[1].die()
    assert (await server.http.get("/health")).status_code == 503
    assert ADMIN in (await server.http.get("/openapi.json")).json()["paths"]


async def test_a_drained_replica_serves_when_the_other_is_lost(
    server: Replicated, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await server.http.post(f"{ADMIN}/0/drain")
    server.engines[1].die()
    await serve_one(server, "a")
    assert "a" in server.engines[0].submitted
    assert (await server.http.get("/health")).json()["status"] == "ok"
    assert await server.states() == ["drained", "down"]
    await server.http.post(f"{ADMIN}/0/resume")
    said = [record.getMessage() for record in caplog.records]
    assert "replica-0 is draining: move=False, restart=False" in said
    assert "replica-0 takes requests again" in said


async def test_who_comes_while_no_replica_is_up_is_told_when_one_may_be(
    server: Replicated,
) -> None:
    for engine in server.engines:
        engine.die()
    with pytest.raises(EngineDeadError) as refused:
        await serve_one(server, "a")
    reply = describe(refused.value).to_response()
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "5")
    assert (await server.http.get("/health")).status_code == 503


# bros admin


def replica(number: int, state: str, **fields: Any) -> dict[str, Any]:
    return {
        "number": number, "name": f"replica-{number}", "state": state, "open": 0, "running": 0,
        "waiting": 0, "used_blocks": 0, "cached_blocks": 25, "total_blocks": 100, "lost": 0,
        "prompt_tokens": 0, "cached_tokens": 0, "routed": {}, **fields,
    }  # fmt: skip


class Desk:
    """A server that answers what it is told to, and `bros admin` in front of it. An answer that is
    None, and each one after the last, is a 404."""

    def __init__(self, *answers: list[dict[str, Any]] | None) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str, bytes]] = []
        self.keys: list[str | None] = []
        self.plan: dict[str, float] | None = None

    def run(self, *arguments: str, environ: dict[str, str] | None = None) -> str:
        out = io.StringIO()
        parser = argparse.ArgumentParser()
        add_arguments("admin", parser)
        args = parser.parse_args(arguments)
        status = run_admin(
            args,
            environ or {},
            lambda line: None,
            pause=lambda seconds: None,
            transport=httpx.MockTransport(self._answer),
            console=Console(file=out, highlight=False),
        )
        assert status == 0
        return out.getvalue()

    def _answer(self, request: httpx.Request) -> httpx.Response:
        self.asked.append((request.method, str(request.url), request.content))
        self.keys.append(request.headers.get("authorization"))
        data = self.answers.pop(0) if self.answers else None
        if data is None:
            return httpx.Response(404, json={"error": {"message": "There is nothing."}})
        body = {"router": "e2", "continued": 3, "moved": 1, "plan": self.plan, "data": data}
        return httpx.Response(200, json=body)


def test_a_table_says_what_replicas_do() -> None:
    busy = replica(0, "up", open=4, prompt_tokens=200, cached_tokens=100,
                   routed={"exploit": 2, "explore": 30})  # fmt: skip
    lines = Desk([busy, replica(1, "down", lost=2)]).run("replicas").splitlines()
    assert lines[1].split() == [
        *("0", "up", "4", "0", "0", "%", "25", "%", "50", "%", "0"),
        *("explore", "30,", "exploit", "2"),
    ]
    assert lines[2].split()[:2] == ["1", "down"] and lines[2].split()[-2:] == ["-", "2"]
    assert "3 after a failure, 1 after a drain or to rebalance" in lines[3]
    assert len(lines) == 4
    desk = Desk([busy])
    desk.plan = {"requests": 7, "prefill_s": 4.0, "planned_s": 1.2, "balance": 2.0,
                 "planned_balance": 1.3}  # fmt: skip
    assert desk.run("replicas").splitlines()[-1] == (
        "plan: 7 requests, 4.0 s of prefill, 1.2 s as planned; busiest replica 2.00 times the "
        "mean, 1.30 as planned"
    )


def test_draining_waits_until_nothing_is_open() -> None:
    def one(state: str, **fields: Any) -> list[dict[str, Any]]:
        return [replica(0, state, **fields)]

    desk = Desk(one("draining", open=3), one("draining", open=3), one("drained"))
    assert desk.run("drain", "0", "--url", "http://there/v1/") == (
        "replica-0 is draining: 3 open\nreplica-0 is drained\n"
    )
    first, *others = desk.asked
    assert first[:2] == ("POST", "http://there/admin/replicas/0/drain")
    assert others == [("GET", "http://there/admin/replicas", b"")] * 2
    desk = Desk(one("drained"), one("restarting"), one("up"))
    said = desk.run("drain", "0", "--restart", "--move", environ={"BROS_API_KEY": "k"})
    assert said.splitlines()[-1] == "replica-0 is up"
    assert b'"move":true,"restart":true' in desk.asked[0][2].replace(b" ", b"")
    assert desk.keys == ["Bearer k"] * 3
    desk = Desk(one("draining", open=3))
    assert desk.run("drain", "0", "--no-wait") == ""
    assert "gone" in Desk(one("gone")).run("drain", "0")
    with pytest.raises(BrosError, match="replica-0 did not come back"):
        Desk(one("draining"), one("gone")).run("drain", "0", "--restart")


def test_wrong_usage_is_explained() -> None:
    for action in (("replicas",), ("drain", "0"), ("resume", "0")):
        with pytest.raises(BrosError, match="one engine"):
            Desk().run(*action)
    with pytest.raises(BrosError, match="404: There is nothing"):
        Desk(None, [replica(0, "up")]).run("resume", "3")
    with pytest.raises(ConfigError, match="whole number"):
        Desk().run("drain", "all")
    for url in ("there", "http://", "http://[::1", "http://there:99999"):
        with pytest.raises(ConfigError, match="--url: "):
            Desk().run("replicas", "--url", url)
    desk = Desk([{"number": 0}])
    with pytest.raises(BrosError, match="does not speak bros' admin API"):
        desk.run("replicas")


def test_flags_that_do_not_exist_have_near_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admin", "drain", "1", "--moev"], {}) == 2
    assert "did you mean --move?" in capsys.readouterr().err


# What each engine is given


@pytest.mark.parametrize(
    ("threads", "tp", "cores", "expected"),
    [(None, 1, 16, 4), (None, 2, 16, 2), (None, 1, 2, 1), (3, 1, 16, 3)],
)
def test_replicas_divide_the_cores(threads: int | None, tp: int, cores: int, expected: int) -> None:
    config = EngineConfig(threads=threads, tp=tp)
    assert with_share_of_cores(config, 4, cores).threads == expected


def test_a_table_says_what_tenants_hold() -> None:
    def use(resource: str, used: int, limit: int | None, refused: int = 0) -> dict[str, Any]:
        return {
            "resource": resource, "used": used, "limit": limit, "option": f"max_{resource}",
            "refused": refused,
        }  # fmt: skip

    ann = [use("sessions", 3, 500, 2), use("file_bytes", 3 * 2**30, 16 * 2**30)]
    operator = [use("sessions", 0, None), use("file_bytes", 700, 2**20)]
    desk = Desk([{"name": "ann", "uses": ann}, {"name": "", "uses": operator}])
    lines = desk.run("tenants").splitlines()
    assert [line.split() for line in lines] == [
        ["tenant", "resource", "used", "limit", "refused", "option"],
        ["ann", "sessions", "3", "500", "2", "max_sessions"],
        ["ann", "file_bytes", "3GiB", "16GiB", "0", "max_file_bytes"],
        ["(operator)", "sessions", "0", "none", "0", "max_sessions"],
        ["(operator)", "file_bytes", "700", "1MiB", "0", "max_file_bytes"],
    ]
    assert desk.asked[0][:2] == ("GET", "http://127.0.0.1:8000/admin/tenants")
