"""A bros server over HTTP, as the end that programs run on (bros/simulator/programs.py)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import aiohttp

from bros.core.clock import Clock
from bros.core.request import ServiceClass
from bros.semantic.schema import CallSpec, Perf
from bros.simulator.programs import BE, ChatRecord


class HttpEnd:
    """A bros server."""

    def __init__(self, http: aiohttp.ClientSession, url: str, clock: Clock) -> None:
        self._http = http
        self._url = url
        self._clock = clock

    async def chat(
        self, content: str, sampling: Mapping[str, Any], service_class: ServiceClass
    ) -> ChatRecord:
        body = {
            "messages": [{"role": "user", "content": content}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "service_tier": "flex" if service_class is BE else "default",
            **sampling,
        }
        answer = ChatRecord(self._clock.now())
        async with self._http.post(f"{self._url}/v1/chat/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                assert "error" not in event, event
                if event.get("usage"):
                    answer.tokens = event["usage"]["completion_tokens"]
                for choice in event["choices"]:
                    answer.last_s = self._clock.now()
                    answer.first_s = answer.first_s or answer.last_s
                    answer.text += choice["delta"].get("content") or ""
        return answer

    async def open(self) -> str:
        return str((await self._json("POST", "/v1/sessions", {}))["id"])

    async def submit(self, session: str, calls: Sequence[CallSpec]) -> None:
        body = {"requests": [as_json(call) for call in calls]}
        await self._json("POST", f"/v1/sessions/{session}/requests", body)

    async def get(self, session: str, variable: str, perf: Perf) -> str:
        path = f"/v1/sessions/{session}/variables/{variable}?wait=true&timeout=600&criteria={perf}"
        return str((await self._json("GET", path))["value"])

    async def calls_of(self, session: str) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = (await self.view(session))["requests"]
        return calls

    async def view(self, session: str) -> dict[str, Any]:
        """The session with its graph."""
        return await self._json("GET", f"/v1/sessions/{session}")

    async def close(self, session: str) -> None:
        await self._json("DELETE", f"/v1/sessions/{session}")

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        async with self._http.request(method, self._url + path, json=body) as reply:
            found: dict[str, Any] = await reply.json()
            assert reply.status < 300, found
            return found


def as_json(call: CallSpec) -> dict[str, Any]:
    """A call as JSON of the API."""
    fields = asdict(call)
    fields["parameters"] = [
        {key: value for key, value in parameter.items() if value is not None}
        for parameter in fields["parameters"]
    ]
    return {key: value for key, value in fields.items() if value is not None}
