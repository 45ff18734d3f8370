"""Sends planned requests and writes down what came back, and when."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import NamedTuple

from bros.bench.answers import AnswerReader, Failure, describe_body
from bros.bench.dialects import Wording
from bros.bench.http import Answer, Http, TransportError
from bros.bench.plan import Planned
from bros.bench.records import Outcome, Record
from bros.bench.sse import EventReader, EventTooLongError

logger = logging.getLogger(__name__)

IDLE_S = 300.0
"""How long a server may be silent by default: best-effort work can wait that long for its turn."""

LINGER_S = 0.005
"""How long the end of a body is waited for after [DONE], so that the connection can be reused. It
comes with it or right after; what follows an answer must not be late for it."""

_REFUSALS = frozenset({429, 503})
_EXPLAIN_S = 5.0
_EXPLAIN_BYTES = 1 << 16

Now = Callable[[], float]
"""Seconds since the start of the run."""

Render = Callable[[Planned], tuple[Sequence[int], str]]
"""The prompt of a request as token ids and as text."""


class Prepared(NamedTuple):
    """The body of a request, or why there is none."""

    body: bytes
    problem: str | None = None


class Client:
    """One server, spoken to in one wording.

    base_url: scheme, host and port, with or without `/v1`. idle_s: a server that sends nothing
    for so long has stalled and the request has failed; None waits for ever.
    """

    def __init__(
        self,
        http: Http,
        base_url: str,
        wording: Wording,
        render: Render,
        *,
        api_key: str | None = None,
        idle_s: float | None = IDLE_S,
    ) -> None:
        self._http = http
        self._url = base_url.rstrip("/").removesuffix("/v1") + wording.path
        self._wording = wording
        self._render = render
        self._idle_s = idle_s
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"

    def prepare(self, planned: Planned) -> Prepared:
        """What can be done before the time to send has come. Raises nothing."""
        try:
            token_ids, text = self._render(planned)
            return Prepared(self._wording.body(planned, token_ids, text))
        except Exception as error:
            logger.exception("%s cannot be written", planned.name)
            return Prepared(b"", f"the request cannot be written: {_name(error)}")

    async def send(self, record: Record, prepared: Prepared, now: Now) -> float | None:
        """Send now and fill in `record` until the answer has ended, however it ends.

        Cancelled, it leaves the record open with what has come. Returns for how many seconds a
        server that refused wants to be left alone, if it says so.
        """
        if prepared.problem is not None:
            record.end_s = now()
            record.outcome, record.detail = Outcome.FAILED, prepared.problem
            return None
        record.sent_s = now()
        try:
            async with asyncio.timeout(self._idle_s) as patience:
                async with self._http.post(self._url, prepared.body, self._headers) as answer:
                    record.status = answer.status
                    return await self._receive(record, answer, now, patience)
        except Failure as failure:
            outcome, detail = failure.outcome, failure.detail
        except (TransportError, EventTooLongError) as error:
            outcome, detail = Outcome.FAILED, str(error)
        except TimeoutError:
            outcome, detail = Outcome.FAILED, f"stalled: nothing came for {self._idle_s:g} s"
        except Exception as error:
            logger.exception("%s failed in the client", record.planned.name)
            outcome, detail = Outcome.FAILED, f"the client failed: {_name(error)}"
        if record.outcome is Outcome.OPEN:  # else it had ended before the connection did
            record.end_s = now()
            record.outcome = outcome
            record.detail = detail + _progress(record)
        return None

    async def _receive(
        self, record: Record, answer: Answer, now: Now, patience: asyncio.Timeout
    ) -> float | None:
        kind = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        if answer.status == 200 and kind == "text/event-stream":
            await self._read(record, answer.pieces, now, patience)
            return None
        arrived_s = now()
        patience.reschedule(None)
        what = describe_body(kind, await _beginning(answer.pieces))
        record.end_s = arrived_s
        record.outcome = Outcome.REFUSED if answer.status in _REFUSALS else Outcome.FAILED
        if answer.status == 200:
            what = f"not an event stream: {what}"
        record.detail = f"{answer.status}: {what}"
        return _retry_after_s(answer.headers)

    async def _read(
        self,
        record: Record,
        pieces: AsyncIterator[bytes],
        now: Now,
        patience: asyncio.Timeout,
    ) -> None:
        events, reader = EventReader(), AnswerReader(record)
        loop_time = asyncio.get_running_loop().time
        expected = record.planned.output_tokens if self._wording.forces(record.planned) else None
        idle_s = self._idle_s
        at_s = now()
        async for piece in pieces:
            at_s = now()
            if idle_s is not None:
                patience.reschedule(loop_time() + idle_s)
            for event in events.feed(piece):
                reader.take(event, at_s)
            if reader.done:
                break
        else:
            at_s = now()
        reader.end(at_s, expected)
        if reader.done:
            with contextlib.suppress(TransportError, TimeoutError):
                async with asyncio.timeout(LINGER_S):
                    async for _ in pieces:
                        pass


async def _beginning(pieces: AsyncIterator[bytes]) -> bytes:
    """What explains a failure; what does not come soon is not waited for."""
    body = b""
    with contextlib.suppress(TransportError, TimeoutError):
        async with asyncio.timeout(_EXPLAIN_S):
            async for piece in pieces:
                body += piece
                if len(body) >= _EXPLAIN_BYTES:
                    break
    return body[:_EXPLAIN_BYTES]


def _retry_after_s(headers: Mapping[str, str]) -> float | None:
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        with contextlib.suppress(KeyError, ValueError):
            return max(0.0, float(headers[name]) * unit_s)
    return None


def _name(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _progress(record: Record) -> str:
    if record.sent_s is None or not record.chunk_times_s:
        return ""
    count = len(record.chunk_times_s)
    last_s = record.chunk_times_s[-1] - record.sent_s
    return f" (after {count} chunks, the last {last_s:.3f} s after the request)"
