"""Best-effort work as a batch: what is submitted, what is seen of it, and what is made of that."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench import running
from bros.bench.client import Outcome
from bros.bench.metrics import Window, measure
from bros.bench.plan import Piece, Planned
from bros.bench.running import (
    BatchJobError,
    BatchSample,
    BatchSamples,
    batch_input_lines,
    batch_job,
    batch_metrics,
    batch_notes,
)
from bros.core.request import ServiceClass, Slo
from support.batch_server import BatchServer, batch_server, jsonl, row

PATH = "/v1/completions"
BE = ServiceClass.BE


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[BatchServer]:
    async with batch_server(tmp_path) as made:
        yield made


def sample(at_s: float, tokens: float) -> BatchSample:
    return BatchSample(at_s, tokens / 10, 0.0, tokens, 2 * tokens, tokens / 2)


@given(
    rate=st.floats(0, 1000),
    times=st.lists(st.floats(-5, 100), min_size=2, max_size=20, unique=True),
    ends=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
def test_of_a_steady_batch_the_throughput_is_its_rate_wherever_one_looks(
    rate: float, times: list[float], ends: tuple[float, float]
) -> None:
    times = sorted(times)
    samples = BatchSamples(tuple(sample(at_s, rate * at_s) for at_s in times))
    first, last = times[0], times[-1]
    begin, end = (first + part * (last - first) for part in sorted(ends))
    if not 0 <= begin < end:
        return
    added = samples.within(Window(begin, end))
    assert added.prompt_tokens == pytest.approx(rate * (end - begin), abs=1e-6 * (1 + rate))
    assert added.output_tokens == pytest.approx(2 * added.prompt_tokens, abs=1e-6 * (1 + rate))


def test_what_was_done_outside_the_window_does_not_count() -> None:
    samples = BatchSamples((sample(0, 0), sample(10, 100), sample(20, 160), sample(30, 960)))
    window = Window(10.0, 20.0)
    metrics = batch_metrics(samples, 500, window, measure([], Slo(0.4, 0.2), window).by_class[BE])
    assert metrics.prompt_tokens_per_s == 6.0 and metrics.output_tokens_per_s == 12.0
    assert metrics.requests_per_s == 0.6
    assert (metrics.prompt_tokens, metrics.output_tokens, metrics.cached_tokens) == (60, 120, 30)
    assert metrics.outcomes[Outcome.COMPLETED] == metrics.requests == 6
    assert metrics.errors == 0


def test_a_batch_of_which_no_row_has_ended_took_part() -> None:
    """Its throughput is 0, and not one that nobody asked for."""
    samples = BatchSamples((BatchSample(0, 0, 0, 0, 0, 0), BatchSample(10, 0, 0, 0, 0, 0)))
    window = Window(0.0, 10.0)
    metrics = batch_metrics(samples, 500, window, measure([], Slo(0.4, 0.2), window).by_class[BE])
    assert (metrics.requests, metrics.outside, metrics.tokens_per_s) == (0, 500, 0.0)
    assert metrics.took_part
    (note,) = batch_notes(metrics)
    assert note.startswith("no row of the batch ended")


def test_failed_rows_are_errors() -> None:
    samples = BatchSamples((BatchSample(0, 0, 0, 0, 0, 0), BatchSample(10, 3, 2, 30, 60, 0)))
    window = Window(0.0, 10.0)
    metrics = batch_metrics(samples, 500, window, measure([], Slo(0.4, 0.2), window).by_class[BE])
    assert metrics.errors == 2 and metrics.requests == 5
    assert metrics.reasons == {"rows in the error file": 2}


def test_a_batch_whose_rows_all_failed_has_rows_that_ended() -> None:
    samples = BatchSamples((BatchSample(0, 0, 0, 0, 0, 0), BatchSample(10, 0, 5, 0, 0, 0)))
    window = Window(0.0, 10.0)
    metrics = batch_metrics(samples, 500, window, measure([], Slo(0.4, 0.2), window).by_class[BE])
    assert (metrics.errors, metrics.tokens_per_s) == (5, 0.0)
    assert batch_notes(metrics) == ()


def test_rows_are_requests_without_what_rows_cannot_have() -> None:
    def body(planned: Planned) -> bytes:
        fields = {"prompt": planned.name, "stream": True, "stream_options": {}, "max_tokens": 3}
        return json.dumps({**fields, "service_tier": "flex", "ignore_eos": True}).encode()

    backlog = (
        Planned(name=f"be-{i}", service_class=BE, prompt=(Piece(f"{i}", 3),), output_tokens=3)
        for i in itertools.count()
    )
    lines = [json.loads(line) for line in batch_input_lines(backlog, body, PATH, 100.0)]
    assert len(lines) == 1600
    assert lines[7] == {
        "custom_id": "be-7",
        "method": "POST",
        "url": PATH,
        "body": {"prompt": "be-7", "max_tokens": 3, "ignore_eos": True},
    }


async def test_a_batch_is_watched_and_cancelled_with_the_block(server: BatchServer) -> None:
    server.engine.held = "row-3"
    lines = [jsonl(row(number)) for number in range(5)]
    async with batch_job(f"{server.live.url}/v1", None, PATH, lines) as job:
        found = await server.client.batches.retrieve(job.id)
        await server.wait_done(found, 4)
        await job.sample(lambda: 12.5)
    (seen,) = job.samples.samples
    assert (seen.at_s, seen.completed, seen.failed) == (12.5, 4, 0)
    assert seen.output_tokens == 4 * len("Hello world ")
    assert (await server.client.batches.retrieve(job.id)).status == "cancelled"
    assert not (await server.client.files.list()).data


async def test_a_server_whose_batches_have_no_usage_is_named(
    server: BatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenAI's have it once they have ended."""
    request_json = running._request_json

    async def without_usage(*args: Any, **options: Any) -> Any:
        return {**await request_json(*args, **options), "usage": None}

    monkeypatch.setattr(running, "_request_json", without_usage)
    with pytest.raises(BatchJobError, match="no `usage` while they run"):
        async with batch_job(server.live.url, None, PATH, [jsonl(row(1))]):
            raise AssertionError("not reached")
    assert not (await server.client.files.list()).data


async def test_a_batch_that_ends_too_early_is_an_error(server: BatchServer) -> None:
    async with batch_job(server.live.url, None, PATH, [jsonl(row(1))]) as job:
        await server.wait(job.id)
        with pytest.raises(BatchJobError, match="completed before the run is over"):
            await job.sample(lambda: 1.0)


async def test_a_batch_that_is_refused_says_why(server: BatchServer) -> None:
    with pytest.raises(BatchJobError, match="invalid_json_line"):
        async with batch_job(server.live.url, None, PATH, [b"no row\n"]):
            raise AssertionError("not reached")
    with pytest.raises(BatchJobError, match="status 400.*images"):
        async with batch_job(server.live.url, None, "/v1/images", [jsonl(row(1))]):
            raise AssertionError("not reached")
    assert not (await server.client.files.list()).data


async def test_a_server_without_batches_is_an_error() -> None:
    with pytest.raises(BatchJobError, match="does not respond"):
        async with batch_job("http://127.0.0.1:9", None, PATH, [b"{}"]):
            raise AssertionError("not reached")
