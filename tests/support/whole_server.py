"""A server with everything that routes are about: files, batches, sessions, traces and replicas."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx

from bros.batch.store import open_store
from bros.core.clock import SystemClock
from bros.core.interfaces import RequestTrace
from bros.core.request import ServiceClass, Slo
from bros.core.tenants import Resource
from bros.router.client import RouterClient
from bros.server.app import create_app
from bros.server.tenants import load_tenants
from support.killable_engine import KillableEngine
from support.scripted_server import Server
from support.turn_fleet import TurnFleet

NO_HEADERS: Mapping[str, str] = MappingProxyType({})

LIVE = ("sid", "rid", "vid", "ready", "file", "batch", "response", "trace", "number", "model")
"""What `populate` makes. @name in a path or body becomes its id."""

ROWS = b'{"custom_id":"%d","method":"POST","url":"/v1/completions","body":{"prompt":"Hi"}}\n'

TRACE = RequestTrace(
    request_id="traced",
    service_class=ServiceClass.RT,
    requested_class=ServiceClass.RT,
    slo=Slo(),
    prompt_tokens=3,
    output_tokens=2,
    events=((0.0, "queued"),),
    waits={},
)


@contextlib.contextmanager
def running_whole_server(
    runner: asyncio.Runner, folder: Path, **options: Any
) -> Iterator[WholeServer]:
    """A WholeServer that runs during the block. options: of WholeServer."""

    async def make() -> WholeServer:
        made = WholeServer(folder, **options)
        await made.start()
        return made

    made = runner.run(make())
    yield made
    runner.run(made.stop())


class WholeServer(Server):
    """With files, batches, sessions and replicas; something of each is there to be attacked.

    live: ids of what `populate` has made, by the names of LIVE.
    """

    def __init__(
        self,
        folder: Path,
        *,
        tenant: str = "",
        headers: Mapping[str, str] = NO_HEADERS,
        operator: Mapping[str, str] = NO_HEADERS,
        **config: Any,
    ) -> None:
        """tenant: to which belongs what `populate` makes. headers: with its key. operator: headers
        with the operator's key."""
        self.store = open_store(folder)
        super().__init__(jobs_in=self.store, **config)
        self._tenant = tenant
        self._operator = operator
        self.router = RouterClient(TurnFleet(), SystemClock(), random.Random(0))
        for _ in range(2):
            engine = KillableEngine()
            engine.start()
            self.router.add(engine, restart=functools.partial(self._restart, engine))
        self.state = dataclasses.replace(self.state, replicas=self.router)
        self.app = create_app(self.state, load_tenants(self.state.config))
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=True)
        self.http = httpx.AsyncClient(
            transport=transport, base_url="http://test", headers=dict(headers)
        )
        self.live: dict[str, str] = {}
        self._running: list[asyncio.Task[None]] = []

    async def _restart(self, engine: KillableEngine) -> None:
        engine.die()
        await asyncio.sleep(0)
        engine.start()

    async def start(self) -> None:
        assert self.state.jobs is not None and self.state.sessions is not None
        for work in (self.state.jobs.run(), self.state.sessions.run()):
            self._running.append(asyncio.create_task(work))
        await self.populate()
        await self.clear()

    async def stop(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self.http.aclose()
        await self.router.close()
        self.store.close()

    async def populate(self) -> None:
        """Make what LIVE names."""
        session = await self.ask("POST", "/v1/sessions", json={})
        path = f"/v1/sessions/{session['id']}"
        for name, value in {"v": None, "r": "text"}.items():
            body = {"id": name, "name": name, "value": value}
            await self.ask("POST", f"{path}/variables", json=body)
        output = {"name": "o", "role": "output", "variable": "made"}
        native = {"native": True, "parameters": [output]}
        call = await self.ask("POST", f"{path}/requests", json=native)
        self.live |= {"sid": session["id"], "rid": call["requests"][0]["id"]}
        self.live |= {"vid": "v", "ready": "r", "trace": "traced", "model": "scripted"}
        self.live["number"] = "1"
        self.engine.traces["traced"] = dataclasses.replace(TRACE, tenant=self._tenant)
        operator = self._operator
        for replica in (await self.ask("GET", "/admin/replicas", headers=operator))["data"]:
            if replica["state"] in ("draining", "drained"):
                path = f"/admin/replicas/{replica['number']}/resume"
                await self.ask("POST", path, headers=operator)
        if "file" not in self.live:
            await self._populate_store()

    async def _populate_store(self) -> None:
        files = {"file": ("rows.jsonl", ROWS % 1 + ROWS % 2)}
        file = await self.ask("POST", "/v1/files", files=files, data={"purpose": "batch"})
        wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
        wanted["input_file_id"] = file["id"]
        batch = await self.ask("POST", "/v1/batches", json=wanted)
        body = {"input": "Hi", "background": True}
        response = await self.ask("POST", "/v1/responses", json=body)
        self.live |= {"file": file["id"], "batch": batch["id"], "response": response["id"]}

    async def clear(self) -> None:
        """Delete the sessions, end the batches, and wait for what they ran."""
        for session in (await self.ask("GET", "/v1/sessions"))["data"]:
            await self.ask("DELETE", f"/v1/sessions/{session['id']}")
        while True:
            batches = (await self.ask("GET", "/v1/batches", params={"limit": 100}))["data"]
            running = [b for b in batches if b["status"] in ("validating", "in_progress")]
            ending = [b for b in batches if b["status"] in ("finalizing", "cancelling")]
            for batch in running:
                with contextlib.suppress(AssertionError):  # it may just have ended
                    await self.ask("POST", f"/v1/batches/{batch['id']}/cancel")
            if not running and not ending and not self._has_background():
                return
            await asyncio.sleep(0.001)

    def _has_background(self) -> bool:
        usage = self.store.responses.usage()
        return any(usage.get((tenant, Resource.BACKGROUND)) for tenant, _ in usage)

    async def ask(self, method: str, path: str, **options: Any) -> Any:
        response = await self.http.request(method, path, **options)
        assert response.status_code == 200, response.text
        return response.json()

    async def idle(self, tasks: int) -> int:
        """The number of tasks of the loop, once it is not above `tasks` or does not sink."""
        for _ in range(20 if tasks == 0 else 1000):
            if len(asyncio.all_tasks()) <= tasks:
                break
            await asyncio.sleep(0.001)
        return len(asyncio.all_tasks())
