"""The value of a semantic variable as server-sent events, while it is being made."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

from starlette.types import Send

from bros.semantic.errors import GetTimeoutError
from bros.semantic.views import VariableView
from bros.server.sse import EventStream

HEARTBEAT_S = 15.0
"""Proxies close connections that are silent for a minute or so."""

_HEARTBEAT = b": waiting\n\n"

# Non-ASCII stays escaped: some clients split lines at U+0085 and U+2028, which JSON allows.
_to_json = json.JSONEncoder(separators=(",", ":")).encode


class ValueStream(EventStream):
    """{"delta"} for each piece, then {"value", "state"}; comments while nothing comes."""

    def __init__(
        self,
        pieces: AsyncGenerator[str, None],
        result: Callable[[], VariableView],
        stopping: asyncio.Event,
        *,
        timeout_s: float,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """result: the variable, once all pieces have come. timeout_s: longest wait for a piece,
        GetTimeoutError after that."""
        super().__init__(stopping)
        self._pieces = pieces
        self._result = result
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s

    async def send_all(self, send: Send) -> None:
        while (piece := await self._next(send)) is not None:
            await self.send_events(send, _event({"delta": piece}))
        view = self._result()
        await self.send_events(send, _event({"value": view.value, "state": view.state.value}))

    async def close(self) -> None:
        await self._pieces.aclose()

    async def _next(self, send: Send) -> str | None:
        """The next piece, None after the last one. Sends comments until then."""
        asking = asyncio.ensure_future(anext(self._pieces, None))
        left_s = self._timeout_s
        try:
            while True:
                pause_s = min(left_s, self._heartbeat_s)
                await asyncio.wait((asking,), timeout=pause_s)
                if asking.done():
                    return asking.result()
                left_s -= pause_s
                if left_s <= 0:
                    raise GetTimeoutError(
                        f"Nothing came within {self._timeout_s:g} s; asking again is fine."
                    )
                await self.send_events(send, _HEARTBEAT)
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)


def _event(fields: dict[str, object]) -> bytes:
    return f"data: {_to_json(fields)}\n\n".encode("ascii")
