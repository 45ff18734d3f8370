"""Batches that outlive their server, and servers that share a store."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bros.batch.objects import StoreError, StoreUnavailableError
from support.batch_server import (
    ANSWER_TOKENS,
    NOW,
    BatchServer,
    batch_server,
    counts,
    row,
    until,
    working,
)

LEASE_S = 15.0


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[tuple[BatchServer, BatchServer]]:
    """Two servers with one store and one clock."""
    async with batch_server(tmp_path, batch_lease=LEASE_S) as one:
        async with batch_server(tmp_path, clock=one.clock, seed=1, batch_lease=LEASE_S) as other:
            yield one, other


def rows(count: int, prefix: str = "row") -> list[dict[str, Any]]:
    return [row(i, f"{prefix}-{i}") for i in range(count)]


def in_flight(server: BatchServer) -> int:
    assert server.live.server.state.jobs is not None
    return server.live.server.state.jobs.runner.rows_in_flight


async def all_results(server: BatchServer, batch_id: str) -> list[str]:
    """The custom_ids in both files of a batch, which has ended."""
    done = await server.wait(batch_id)
    files = (done.output_file_id, done.error_file_id)
    return [name for file in files for name in await server.results(file)]


# One after the other


async def test_the_next_server_finishes_what_one_has_begun(tmp_path: Path) -> None:
    """Rows that are done stay done, the others run again; counts and usage go on"""
    async with batch_server(tmp_path) as first:
        first.engine.held = "held"
        sent = rows(6, "quick") + [row(i, f"held-{i}") for i in range(6, 10)]
        batch = await first.submit(*sent, metadata={"a": "b"})
        await first.wait_done(batch, 6)
        await until(lambda: first.engine.waiting == 4)
        clock = first.clock
    assert len(first.engine.aborted) == 4
    clock.advance(5)
    async with batch_server(tmp_path, clock=clock, seed=1) as second:
        done = await second.wait(batch)
        results = await second.results(done.output_file_id)
    assert second.engine.prompts == {f"held-{i}": 1 for i in range(6, 10)}
    assert results.keys() == {f"row-{i}" for i in range(10)}
    assert done.request_counts == counts(10, 10, 0)
    assert done.usage is not None and done.usage.output_tokens == 10 * ANSWER_TOKENS
    assert (done.in_progress_at, done.completed_at) == (NOW, NOW + 5)
    assert done.metadata == {"a": "b"}


async def test_batches_begin_when_a_server_comes(tmp_path: Path) -> None:
    """What was accepted is kept, whatever happens next"""
    async with batch_server(tmp_path, idle=True) as first:
        batches = [await first.submit(*rows(2)) for _ in range(3)]
        clock = first.clock
    async with batch_server(tmp_path, clock=clock, seed=1) as second:
        for batch in batches:
            assert (await second.wait(batch)).request_counts == counts(2, 2, 0)
        assert (await second.client.files.content(batches[0].input_file_id)).content


async def test_work_stops_and_goes_on_in_one_server(tmp_path: Path) -> None:
    """Several times in the middle of a batch"""
    async with batch_server(tmp_path, idle=True) as server:
        batch = await server.submit(*rows(40))
        async with working(server.live):
            await server.wait_done(batch, 1)
        between = await server.client.batches.retrieve(batch.id)
    assert between.request_counts is not None and between.request_counts.completed >= 1
    submitted = server.engine.prompts
    async with batch_server(tmp_path, clock=server.clock, seed=1) as server:
        done = await server.wait(batch)
        assert done.request_counts == counts(40, 40, 0)
        assert len(await server.results(done.output_file_id)) == 40
        again = Counter(server.engine.prompts.keys() & submitted.keys())
    # Only those run twice that had no result when the first server ended.
    assert len(again) <= submitted.total() - between.request_counts.completed


async def test_a_batch_that_was_cancelled_while_no_server_worked(tmp_path: Path) -> None:
    async with batch_server(tmp_path) as first:
        first.engine.held = "held"
        batch = await first.submit(row(1, "quick"), row(2, "held"))
        await first.wait_done(batch, 1)
        clock = first.clock
    async with batch_server(tmp_path, clock=clock, seed=1, idle=True) as second:
        assert (await second.client.batches.cancel(batch.id)).status == "cancelling"
    async with batch_server(tmp_path, clock=clock, seed=2) as third:
        done = await third.wait(batch)
        assert (done.status, done.request_counts) == ("cancelled", counts(2, 1, 1))
        assert (await third.results(done.output_file_id)).keys() == {"row-1"}
        assert (await third.results(done.error_file_id)).keys() == {"row-2"}
        assert not third.engine.submitted


async def test_what_is_left_of_batches_can_be_foreseen(tmp_path: Path) -> None:
    """Rows that are not with the engine, and how long there is for them"""
    async with batch_server(tmp_path) as server:
        assert server.live.server.state.jobs is not None
        runner = server.live.server.state.jobs.runner
        assert runner.backlog() == []
        server.engine.held = "held"
        long = await server.submit(*rows(40, "held"))
        await until(lambda: server.engine.waiting == in_flight(server) >= 16)
        running = in_flight(server)
        short = await server.submit(*rows(5, "held"), completion_window="90m")
        server.clock.advance(60)
        await until(lambda: len(runner.backlog()) == 2 and runner.backlog()[1][0] == 5)
        assert runner.backlog() == [(40 - running, 86_400 - 60), (5, 90 * 60 - 60)]
        await server.client.batches.cancel(short.id)
        server.wake()
        await until(lambda: runner.backlog() == [(40 - running, 86_400 - 60)])
        server.engine.go_on.set()
        await server.wait(long)
        await until(lambda: runner.backlog() == [])


async def test_rows_that_are_done_are_neither_left_nor_with_the_engine(tmp_path: Path) -> None:
    async with batch_server(tmp_path) as server:
        assert server.live.server.state.jobs is not None
        runner = server.live.server.state.jobs.runner
        server.engine.held = "held"
        quick = [row(i, f"quick-{i}") for i in range(10)]
        batch = await server.submit(*quick, *[row(i, f"held-{i}") for i in range(10, 22)])
        await server.wait_done(batch, 10)
        await until(lambda: server.engine.waiting == in_flight(server) == 12)
        assert runner.backlog() == []


# At the same time


async def test_two_servers_share_batches(pair: tuple[BatchServer, BatchServer]) -> None:
    """No row runs twice, and each batch can be asked for anywhere"""
    one, other = pair
    made = [await pair[i % 2].submit(*rows(8, f"batch{i}")) for i in range(6)]
    for i, batch in enumerate(made):
        done = await pair[1 - i % 2].wait(batch)
        assert done.request_counts == counts(8, 8, 0)
        assert len(await all_results(pair[1 - i % 2], batch.id)) == 8
    submitted = one.engine.prompts + other.engine.prompts
    assert submitted == {f"batch{i}-{j}": 1 for i in range(6) for j in range(8)}
    listed = [[b.id async for b in server.client.batches.list()] for server in pair]
    assert listed == [[batch.id for batch in made[::-1]]] * 2


async def test_any_server_can_cancel(pair: tuple[BatchServer, BatchServer]) -> None:
    """Its owner winds it up"""
    one, other = pair
    one.engine.held = "held"
    batch = await one.submit(row(1, "quick"), row(2, "held"))
    await other.wait_done(batch, 1)
    assert (await other.client.batches.cancel(batch.id)).status == "cancelling"
    one.wake()
    done = await other.wait(batch)
    assert (done.status, done.request_counts) == ("cancelled", counts(2, 1, 1))
    assert not other.engine.submitted


async def test_a_server_that_hangs_loses_its_batches(
    pair: tuple[BatchServer, BatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one takes over when the lease has run out; what the first still says is ignored"""
    one, other = pair
    one.engine.held = "held"
    sent = [row(i, "quick" if i < 3 else "held") for i in range(5)]
    batch = await one.submit(*sent)
    await one.wait_done(batch, 3)
    await until(lambda: one.engine.waiting == 2)

    def unreachable(*_: object) -> None:
        raise StoreError("the store cannot be reached")

    monkeypatch.setattr(one.store.batches, "renew", unreachable)
    one.clock.advance(LEASE_S - 1)
    other.wake()
    await other.client.batches.retrieve(batch.id)
    assert not other.engine.submitted
    one.clock.advance(1)
    other.wake()
    done = await other.wait(batch)
    one.engine.go_on.set()
    assert done.request_counts == counts(5, 5, 0)
    assert done.usage is not None and done.usage.output_tokens == 5 * ANSWER_TOKENS
    assert other.engine.prompts == {"held": 2}
    assert len(await all_results(other, batch.id)) == 5
    monkeypatch.undo()
    again = await one.wait(await one.submit(row(1)))  # it has not come to harm
    assert again.status == "completed"
    assert await one.wait(batch) == done


async def test_rows_that_could_not_begin_hold_no_place(
    pair: tuple[BatchServer, BatchServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing begins while the lease has run out, and nothing is left of it afterwards"""
    one, other = pair
    one.engine.held = "row"
    batch = await one.submit(*rows(20))
    await until(lambda: one.engine.waiting == in_flight(one) == 16)

    def unreachable(*_: object) -> None:
        raise StoreError("the store cannot be reached")

    monkeypatch.setattr(one.store.batches, "renew", unreachable)
    one.clock.advance(LEASE_S)
    one.engine.go_on.set()
    await one.wait_done(batch, 16)
    await until(lambda: in_flight(one) == 1)  # one more, which waits for the lease
    other.wake()
    assert (await other.wait(batch)).request_counts == counts(20, 20, 0)
    monkeypatch.undo()
    one.wake()
    await until(lambda: in_flight(one) == 0)
    assert one.engine.prompts + other.engine.prompts == {f"row-{i}": 1 for i in range(20)}


async def test_quotas_hold_for_all_servers_together(tmp_path: Path) -> None:
    async with batch_server(tmp_path, batch_max_open=2, idle=True) as one:
        async with batch_server(tmp_path, batch_max_open=2, seed=1, idle=True) as other:
            tries = [server.submit(row(1)) for server in (one, other) for _ in range(4)]
            came_to = await asyncio.gather(*tries, return_exceptions=True)
            assert sum(not isinstance(result, Exception) for result in came_to) == 2


# What is left of files


async def test_old_files_are_swept_by_the_next_server(tmp_path: Path) -> None:
    """Results are deleted 30 days after they were made, and their content with them"""
    async with batch_server(tmp_path) as first:
        done = await first.wait(await first.submit(row(1)))
        assert len(first.bodies()) == 2
        clock = first.clock
    clock.advance(30 * 86_400)
    async with batch_server(tmp_path, clock=clock, seed=1) as second:
        await until(lambda: not second.bodies())
        assert [file async for file in second.client.files.list()] == []
        kept = await second.client.batches.retrieve(done.id)
        assert kept.output_file_id == done.output_file_id


async def test_a_cancelled_batch_has_no_backlog_while_the_store_is_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with batch_server(tmp_path) as server:
        assert server.live.server.state.jobs is not None
        runner, commit = server.live.server.state.jobs.runner, server.store.batches.commit
        out_of_reach = threading.Event()
        out_of_reach.set()

        def unreachable(*args: Any) -> Any:
            if out_of_reach.is_set():
                raise StoreUnavailableError("the store cannot be reached")
            return commit(*args)

        monkeypatch.setattr(server.store.batches, "commit", unreachable)
        server.engine.held = "held"
        batch = await server.submit(row(40, "quick"), *rows(40, "held"))
        await until(lambda: server.engine.waiting == in_flight(server) >= 15)
        ((left, _),) = runner.backlog()
        assert left > 0
        await server.client.batches.cancel(batch.id)
        server.wake()
        await until(lambda: in_flight(server) == 0)
        assert runner.backlog() == []
        out_of_reach.clear()
        assert (await server.wait(batch)).status == "cancelled"
