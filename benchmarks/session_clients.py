"""Two ways to run a program: submitted to a session, or call by call by the client.

Both use an End, a server over HTTP or in the same process (then in simulated time), and wait
`delay_s` before each request to simulate the network latency.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import aiohttp
from session_programs import Program

from bros.core.clock import Clock
from bros.core.request import SamplingParams, ServiceClass
from bros.semantic.core.template import Text, parse_template
from bros.semantic.schema import CallSpec, Criteria, Perf, Role
from bros.semantic.service.service import SessionService
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer

RT, BE = ServiceClass.RT, ServiceClass.BE


@dataclass(slots=True)
class ChatRecord:
    """One chat completion. Times are in seconds on the client's clock."""

    asked_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    tokens: int = 0
    text: str = ""

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.asked_s

    @property
    def tpot_s(self) -> float:
        """Mean time between tokens."""
        return (self.last_s - self.first_s) / max(self.tokens - 1, 1)


class End(Protocol):
    """A server. Each method is one request."""

    async def chat(
        self, content: str, sampling: Mapping[str, Any], service_class: ServiceClass
    ) -> ChatRecord: ...

    async def open(self) -> str: ...

    async def submit(self, session: str, calls: Sequence[CallSpec]) -> None: ...

    async def get(self, session: str, variable: str, perf: Perf) -> str: ...

    async def calls_of(self, session: str) -> list[dict[str, Any]]:
        """The calls of the session, as inspection returns them."""
        ...

    async def close(self, session: str) -> None: ...


@dataclass(slots=True)
class Run:
    """The run of a program. seconds: from the first request to the last value."""

    seconds: float
    values: dict[str, str]
    answers: list[ChatRecord] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)


async def run_by_calls(
    end: End, program: Program, clock: Clock, *, delay_s: float, service_class: ServiceClass = RT
) -> Run:
    """The client renders and sends each call as soon as its inputs are available."""
    began = clock.now()
    values = {output_of(call): asyncio.get_running_loop().create_future() for call in program.calls}
    answers: list[ChatRecord] = []

    async def one(call: CallSpec) -> None:
        content = await rendered(call, values)
        await asyncio.sleep(delay_s)
        answer = await end.chat(content, call.sampling, service_class)
        answers.append(answer)
        values[output_of(call)].set_result(answer.text)

    await asyncio.gather(*(one(call) for call in program.calls))
    wanted = {name: values[name].result() for name in program.results}
    return Run(clock.now() - began, wanted, answers)


async def run_in_session(
    end: End, program: Program, clock: Clock, *, delay_s: float, perf: Perf = Perf.LATENCY
) -> Run:
    """Three round trips: open a session, submit the program, get its values."""
    began = clock.now()
    await asyncio.sleep(delay_s)
    session = await end.open()
    await asyncio.sleep(delay_s)
    await end.submit(session, program.calls)
    await asyncio.sleep(delay_s)
    found = await asyncio.gather(*(end.get(session, name, perf) for name in program.results))
    seconds = clock.now() - began
    calls = await end.calls_of(session)
    await end.close(session)
    return Run(seconds, dict(zip(program.results, found, strict=True)), [], calls)


def output_of(call: CallSpec) -> str:
    """The output variable of a call of session_programs.py."""
    (name,) = [p.variable for p in call.parameters if p.name == "answer"]
    assert name is not None
    return name


async def rendered(call: CallSpec, values: Mapping[str, asyncio.Future[str]]) -> str:
    """The prompt of a call. Waits for its inputs."""
    inputs = {p.name: p for p in call.parameters}
    pieces = []
    for piece in parse_template(call.template or ""):
        if isinstance(piece, Text):
            pieces.append(piece.text)
        elif piece.role is not Role.OUTPUT:
            given = inputs[piece.name]
            pieces.append(given.value if given.variable is None else await values[given.variable])
    return "".join(piece or "" for piece in pieces)


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
        calls: list[dict[str, Any]] = (await self._json("GET", f"/v1/sessions/{session}"))[
            "requests"
        ]
        return calls

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


class ServiceEnd:
    """A server in this process, with any engine and clock."""

    def __init__(
        self, service: SessionService, generator: TextGenerator, tokenizer: Tokenizer, clock: Clock
    ) -> None:
        self._service = service
        self._generator = generator
        self._tokenizer = tokenizer
        self._clock = clock

    async def chat(
        self, content: str, sampling: Mapping[str, Any], service_class: ServiceClass
    ) -> ChatRecord:
        answer = ChatRecord(self._clock.now())
        prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": content}])
        async with await self._generator.start(
            [prompt], SamplingParams(**sampling), service_class=service_class
        ) as generation:
            async for delta in generation:
                answer.last_s = self._clock.now()
                answer.first_s = answer.first_s or answer.last_s
                answer.tokens += len(delta.token_ids)
                answer.text += delta.text
        return answer

    async def open(self) -> str:
        return self._service.create("").id

    async def submit(self, session: str, calls: Sequence[CallSpec]) -> None:
        self._service.submit("", session, calls)

    async def get(self, session: str, variable: str, perf: Perf) -> str:
        found = await self._service.get("", session, variable, Criteria(perf=perf), 1e6)
        return found.value or ""

    async def calls_of(self, session: str) -> list[dict[str, Any]]:
        return [asdict(call) for call in self._service.inspect("", session).calls]

    async def close(self, session: str) -> None:
        await self._service.delete("", session)
