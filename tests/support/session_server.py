"""Sessions over HTTP for tests: a scripted server, and requests in few words."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from bros.semantic.service.service import SessionService
from support.scripted_server import LiveServer, Server, events

SOON_S = 5.0


class SessionClient:
    """One session, by its URLs. Requests return the response; `ok` checks it."""

    def __init__(self, http: httpx.AsyncClient, session_id: str, **headers: str) -> None:
        self.http = http
        self.id = session_id
        self.headers = headers

    @classmethod
    async def open(cls, http: httpx.AsyncClient, **fields: Any) -> SessionClient:
        return cls(http, ok(await http.post("/v1/sessions", json=fields))["id"])

    async def ask(self, method: str, path: str = "", **options: Any) -> httpx.Response:
        url = f"/v1/sessions/{self.id}{path}"
        headers = {**self.headers, **options.pop("headers", {})}
        return await self.http.request(method, url, headers=headers, **options)

    async def submit(self, **body: Any) -> httpx.Response:
        return await self.ask("POST", "/requests", json=body)

    async def call(self, template: str, **body: Any) -> dict[str, str]:
        """Submit one call; placeholder -> id of its variable."""
        reply = ok(await self.submit(template=template, **body))
        variables: dict[str, str] = reply["requests"][0]["variables"]
        return variables

    async def look(self, variable: str, **query: Any) -> httpx.Response:
        return await self.ask("GET", f"/variables/{variable}", params=query)

    async def value(self, variable: str, **query: Any) -> str:
        """Wait for a value."""
        found = ok(await self.look(variable, wait="true", timeout=SOON_S, **query))
        assert found["state"] == "ready"
        return str(found["value"])

    async def graph(self) -> dict[str, Any]:
        return ok(await self.ask("GET"))


def ok(response: httpx.Response) -> dict[str, Any]:
    """The body of a response that is as it should be."""
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def stream_events(text: str) -> list[Any]:
    """The data of each event but comments; [DONE] as it is."""
    blocks = [block for block in text.split("\n\n") if not block.startswith(":")]
    data = events("\n\n".join(blocks))
    return [each if each == "[DONE]" else json.loads(each) for each in data]


@contextlib.asynccontextmanager
async def keeping(server: Server) -> AsyncIterator[SessionService]:
    """Look after the sessions of a server meanwhile, as a running one does."""
    service = server.state.sessions
    assert service is not None
    running = asyncio.create_task(service.run())
    try:
        yield service
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@contextlib.asynccontextmanager
async def openai_client(live: LiveServer) -> AsyncIterator[Any]:
    import openai

    async with openai.AsyncOpenAI(
        base_url=f"{live.url}/v1", api_key="unused", max_retries=0
    ) as client:
        yield client
