"""Servers that say what a script tells them, in memory or on a socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bros.bench.client import HttpResponse, TransportError
from bros.bench.plan import Piece, Planned
from bros.core.request import ServiceClass, Slo

EVENT_STREAM = {"content-type": "text/event-stream; charset=utf-8"}


def planned(
    name: str = "r",
    service_class: ServiceClass = ServiceClass.RT,
    *,
    prompt: int = 4,
    output: int = 3,
    forced: bool = True,
    slo: Slo | None = None,
) -> Planned:
    return Planned(
        name=name,
        service_class=service_class,
        prompt=(Piece(name, prompt),),
        output_tokens=output,
        forced=forced,
        slo=slo or Slo(),
    )


def render(request: Planned) -> tuple[Sequence[int], str]:
    """The name as text, and as many ids as asked for."""
    return list(range(request.prompt_tokens)), request.name


def event(body: object, newline: bytes = b"\n") -> bytes:
    text = body if isinstance(body, str) else json.dumps(body)
    return b"data: " + text.encode() + 2 * newline


def text(content: str, reason: str | None = None) -> dict[str, Any]:
    """A chunk of a completion."""
    return {"choices": [{"index": 0, "text": content, "finish_reason": reason}], "usage": None}


def usage(prompt: int, output: int, cached: int | None = None) -> dict[str, Any]:
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": details}}


def answer(tokens: int, gap_s: float, ttft_s: float | None = None) -> Script:
    """A whole answer; ttft_s: gap_s if not given. The end comes with the last token."""
    first_s = gap_s if ttft_s is None else ttft_s
    pieces = [(gap_s if i else first_s, event(text("x"))) for i in range(tokens)]
    end = event(text("", "length")) + event(usage(1, tokens)) + event("[DONE]")
    return Script(pieces=(*pieces, (0.0, end)))


@dataclass(frozen=True)
class Script:
    """One answer. pieces: (seconds after the piece before, bytes).

    refuse: the connection cannot be made. hang: nothing follows the pieces, not even the end;
    breaks: the connection breaks after the pieces, with this message.
    """

    pieces: Sequence[tuple[float, bytes]] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=lambda: dict(EVENT_STREAM))
    head_s: float = 0.0
    end_s: float = 0.0
    refuse: str | None = None
    hang: bool = False
    breaks: str | None = None


@dataclass(frozen=True)
class Seen:
    """A request as the server got it."""

    at_s: float
    url: str
    body: dict[str, Any]
    headers: Mapping[str, str]

    @property
    def name(self) -> str:
        """As `render` and a chat or a text prompt say it."""
        body = self.body
        said = body["messages"][0]["content"] if "messages" in body else body["prompt"]
        return str(said)


class FakeHttp:
    """In memory. script: what to answer to a request. open_now/most_open: answers under way."""

    def __init__(self, script: Callable[[Seen], Script]) -> None:
        self._script = script
        self.seen: list[Seen] = []
        self.open_now = 0
        self.most_open = 0

    @asynccontextmanager
    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[HttpResponse]:
        now_s = asyncio.get_running_loop().time()
        self.seen.append(Seen(now_s, url, json.loads(body), headers))
        script = self._script(self.seen[-1])
        self.open_now += 1
        self.most_open = max(self.most_open, self.open_now)
        try:
            await asyncio.sleep(script.head_s)
            if script.refuse is not None:
                raise TransportError(script.refuse)
            yield HttpResponse(script.status, script.headers, self._pieces(script))
        finally:
            self.open_now -= 1

    async def _pieces(self, script: Script) -> AsyncIterator[bytes]:
        for delay_s, piece in script.pieces:
            if delay_s:
                await asyncio.sleep(delay_s)
            yield piece
        if script.end_s:
            await asyncio.sleep(script.end_s)
        if script.hang:
            await asyncio.Event().wait()
        if script.breaks is not None:
            raise TransportError(script.breaks)
