"""Best-effort work as a batch job instead of requests that are kept in flight.

The server decides how many rows run at a time, and in which order. From outside only sums are seen:
the counts and the usage of the batch, asked for once a second.

```
 tokens ^            ______ what the batch had used, at each look
        |       ____/
        |   ___/   throughput = (at the end of the window - at its beginning) / its length
        |__/   |   |
        +------[---]--------> s
```
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple

import aiohttp

from bros.bench.metrics import ClassMetrics, Window
from bros.bench.plan import Planned
from bros.bench.records import Outcome
from bros.core.errors import BrosError

MAX_ROWS = 50_000
_ROWS_PER_S = 16
"""Rows for so much throughput are submitted; a batch that ends before the run is an error."""

_LEAST_ROWS = 500
_LOOK_S = 1.0
_TIMEOUT_S = 120.0
_RUNNING = ("validating", "in_progress")
_OPEN = (*_RUNNING, "cancelling", "finalizing")
_NOT_FOR_ROWS = ("stream", "stream_options", "service_tier", "slo", "priority")


class BatchJobError(BrosError):
    """The server does not take the batch, or the batch came to an end before the run did."""


class Look(NamedTuple):
    """The batch at a time after the start of the run. Rows and tokens add up."""

    at_s: float
    completed: float
    failed: float
    prompt_tokens: float
    output_tokens: float
    cached_tokens: float


@dataclass(frozen=True, slots=True)
class JobSums:
    """What was seen of a batch in a run, in order."""

    looks: tuple[Look, ...]

    def within(self, window: Window) -> Look:
        """What was added in the window; at_s is its length."""
        begin, end = self._at(window.start_s), self._at(window.end_s)
        return Look(*(late - early for early, late in zip(begin, end, strict=True)))

    def _at(self, at_s: float) -> Look:
        """On the line between the looks before and after."""
        before = max((x for x in self.looks if x.at_s <= at_s), default=self.looks[0])
        after = min((x for x in self.looks if x.at_s >= at_s), default=self.looks[-1])
        span_s = after.at_s - before.at_s
        part = (at_s - before.at_s) / span_s if span_s > 0 else 0.0
        between = (a + part * (b - a) for a, b in zip(before[1:], after[1:], strict=True))
        return Look(at_s, *between)


class BatchJob:
    """One batch on one server, while a run lasts."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, batch_id: str) -> None:
        self._session = session
        self._base = base_url
        self.id = batch_id
        self._looks: list[Look] = []

    @property
    def sums(self) -> JobSums:
        return JobSums(tuple(self._looks))

    async def watch(self, now: Callable[[], float]) -> None:
        """Until cancelled. now: seconds since the start of the run."""
        while True:
            await self.look(now)
            await asyncio.sleep(_LOOK_S)

    async def look(self, now: Callable[[], float]) -> None:
        """Raises BatchJobError if the batch has ended."""
        batch = await _ask(self._session, "GET", f"{self._base}/v1/batches/{self.id}")
        if batch["status"] not in _RUNNING:
            raise BatchJobError(f"the batch is {batch['status']} before the run is over")
        counts, usage = batch["request_counts"], batch["usage"]
        self._looks.append(
            Look(
                now(),
                counts["completed"],
                counts["failed"],
                usage["input_tokens"],
                usage["output_tokens"],
                usage["input_tokens_details"]["cached_tokens"],
            )
        )

    async def cancel(self) -> None:
        """Returns when nothing of it runs any more, which may be so already."""
        url = f"{self._base}/v1/batches/{self.id}"
        while (batch := await _ask(self._session, "GET", url))["status"] in _OPEN:
            if batch["status"] in _RUNNING:
                with contextlib.suppress(BatchJobError):  # it has ended just now
                    await _ask(self._session, "POST", f"{url}/cancel")
            await asyncio.sleep(_LOOK_S / 5)


def rows_of(
    backlog: Iterator[Planned], body: Callable[[Planned], bytes], path: str, duration_s: float
) -> Iterator[bytes]:
    """Lines of an input file, enough for a run."""
    count = min(max(_LEAST_ROWS, round(_ROWS_PER_S * duration_s)), MAX_ROWS)
    for planned in islice(backlog, count):
        fields = json.loads(body(planned))
        for name in _NOT_FOR_ROWS:
            fields.pop(name, None)
        row = {"custom_id": planned.name, "method": "POST", "url": path, "body": fields}
        yield json.dumps(row, separators=(",", ":")).encode("ascii") + b"\n"


@asynccontextmanager
async def batch_job(
    base_url: str, api_key: str | None, path: str, lines: Sequence[bytes]
) -> AsyncIterator[BatchJob]:
    """A batch of these lines that has been checked and runs; it is cancelled with the block.

    Raises BatchJobError.
    """
    base = base_url.rstrip("/").removesuffix("/v1")
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, headers=headers) as session:
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"".join(lines), filename="load.jsonl")
        file = await _ask(session, "POST", f"{base}/v1/files", data=form)
        wanted = {"input_file_id": file["id"], "endpoint": path, "completion_window": "24h"}
        batch = await _ask(session, "POST", f"{base}/v1/batches", json=wanted)
        job = BatchJob(session, base, batch["id"])
        try:
            while batch["status"] == "validating":
                await asyncio.sleep(_LOOK_S / 5)
                batch = await _ask(session, "GET", f"{base}/v1/batches/{job.id}")
            if batch["status"] == "failed":
                raise BatchJobError(f"the batch is {batch['status']}: {batch['errors']}")
            yield job
        finally:
            await job.cancel()


def as_metrics(seen: JobSums, window: Window, like: ClassMetrics) -> ClassMetrics:
    """Throughput of a batch in the place of that of requests. like: that of no requests."""
    added = seen.within(window)
    completed, failed = round(added.completed), round(added.failed)
    outcomes = {**like.outcomes, Outcome.COMPLETED: completed, Outcome.FAILED: failed}
    return replace(
        like,
        requests=completed + failed,
        outcomes=outcomes,
        reasons={"rows in the error file": failed} if failed else {},
        requests_per_s=added.completed / window.seconds,
        prompt_tokens_per_s=added.prompt_tokens / window.seconds,
        output_tokens_per_s=added.output_tokens / window.seconds,
        prompt_tokens=round(added.prompt_tokens),
        output_tokens=round(added.output_tokens),
        cached_tokens=round(added.cached_tokens),
    )


async def _ask(session: aiohttp.ClientSession, method: str, url: str, **body: Any) -> Any:
    try:
        async with session.request(method, url, **body) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise BatchJobError(f"{url} answers with status {answer.status}: {text[:300]}")
            return json.loads(text)
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        raise BatchJobError(f"{url} gives no answer: {error!r}") from error
