"""The runner of batches: what the batches of one tenant leave to those of others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import gc
import json
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bros.batch import runner
from bros.batch.admission import ByteBudget
from bros.batch.background import BackgroundRunner, ResponseOutcome
from bros.batch.files import Page
from bros.batch.objects import (
    Batch,
    BatchStatus,
    Lease,
    RowOutcome,
    StoreUnavailableError,
    TokenUsage,
)
from bros.batch.pacing import JobPace
from bros.batch.responses import ResponseStore, StoredResponse
from bros.batch.rows import RowFacts, RowReply, reply_line
from bros.batch.runner import BatchRunner, RunnerSettings
from bros.core.clock import SystemClock
from bros.core.interfaces import EngineStats
from bros.core.request import IdGenerator, Slo
from bros.core.tenants import NO_LIMITS, Resource, TenantLimits
from support.batch_store import NOW, Store
from support.crash import input_lines
from support.held_work import Held
from support.processes import open_files

_CHECK_S = 0.05
"""How long a row of ann takes to check."""

_ANSWER_S = 0.01


class _Clock(SystemClock):
    """Unix time begins when tests do."""

    def __init__(self) -> None:
        self._ahead_s = NOW - self.now()

    def unix_time(self) -> float:
        return self.now() + self._ahead_s


class _Rows:
    """A RowHandler. reply_bytes: of each answer."""

    def __init__(self, reply_bytes: int = 10) -> None:
        self.checked: list[str] = []
        self.answered: list[str] = []
        self._reply_bytes = reply_bytes

    def check(self, tenant: str, endpoint: str, body: dict[str, Any]) -> RowFacts:
        if tenant == "ann":
            time.sleep(_CHECK_S)
        self.checked.append(tenant)
        return RowFacts("m", body["prompt"])

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, slo: Slo
    ) -> RowReply:
        self.answered.append(body["prompt"])
        await asyncio.sleep(_ANSWER_S)
        return RowReply(200, json.dumps({"text": "x" * self._reply_bytes}))


async def _idle() -> EngineStats:
    return EngineStats()


class _NoResponses:
    """A ResponseHandler for a store without responses."""

    async def answer(self, response: StoredResponse, *, due_in_s: float) -> ResponseOutcome:
        raise AssertionError("there are no responses")


def _runner(
    store: Store,
    rows: _Rows,
    limits: TenantLimits = NO_LIMITS,
    note_refusal: Callable[[str, Resource], None] = lambda tenant, resource: None,
    server_limits: TenantLimits = NO_LIMITS,
    poll_s: float = 0.02,
    lease_s: float = 15.0,
) -> BatchRunner:
    """limits: of each tenant. server_limits: of all of them together."""
    settings = RunnerSettings(model="", lease_s=lease_s, poll_s=poll_s)
    ids = IdGenerator(random.Random(0))
    return BatchRunner(
        *(store.batches, store.files, rows, _idle, _Clock(), ids, settings, lambda tenant: limits),
        note_refusal=note_refusal,
        server_limits=server_limits,
    )


@contextlib.asynccontextmanager
async def _running(
    store: Store,
    rows: _Rows,
    limits: TenantLimits = NO_LIMITS,
    note_refusal: Callable[[str, Resource], None] = lambda tenant, resource: None,
    server_limits: TenantLimits = NO_LIMITS,
    poll_s: float = 0.02,
    lease_s: float = 15.0,
) -> AsyncIterator[BatchRunner]:
    """A runner that runs during the block."""
    runner = _runner(store, rows, limits, note_refusal, server_limits, poll_s, lease_s)
    running = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def _submit(
    store: Store, tenant: str, num_rows: int, name: str = "", window_s: int = 86_400
) -> str:
    name = name or tenant
    content = input_lines([f"{name}.{number}" for number in range(1, num_rows + 1)])
    store.put_file(content, file_id=f"file-{name}", tenant=tenant)
    batch_id, expires_at = f"batch_{name}", NOW + window_s
    return store.put_batch(batch_id, tenant=tenant, content=content, expires_at=expires_at).id


async def _until_final(store: Store, tenant: str, batch_id: str) -> Batch:
    async with asyncio.timeout(20.0):
        while True:
            batch = store.batches.get(tenant, batch_id)
            if batch.status.is_final:
                return batch
            await asyncio.sleep(0.01)


async def test_a_large_file_of_one_tenant_is_validated_in_turns_with_those_of_others(
    store: Store,
) -> None:
    slow, quick = _submit(store, "ann", 200), _submit(store, "bob", 3)
    rows = _Rows()
    async with _running(store, rows):
        found = await _until_final(store, "bob", quick)
        assert found.status is BatchStatus.COMPLETED
        assert store.batches.get("ann", slow).status is BatchStatus.VALIDATING
        assert rows.checked.count("ann") < 50


async def test_a_batch_that_waits_for_another_of_its_tenant_can_be_cancelled(store: Store) -> None:
    slow, waiting = _submit(store, "ann", 400), _submit(store, "ann", 400, "more")
    rows = _Rows()
    async with _running(store, rows):
        await asyncio.sleep(0.3)
        for batch_id in (waiting, slow):
            store.batches.cancel("ann", batch_id, NOW)
            found = await _until_final(store, "ann", batch_id)
            assert found.status is BatchStatus.CANCELLED
        assert 0 < len(rows.checked) < 200


@pytest.mark.parametrize("during", ["validation", "opening"])
async def test_the_file_of_a_batch_that_is_cancelled_is_closed_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, during: str
) -> None:
    """Else it takes its place on the disk although it was deleted, and a descriptor for ever."""
    open_input, opening = runner._Input.__init__, threading.Event()

    def open_slowly(self: runner._Input, path: Path) -> None:
        opening.set()
        time.sleep(0.3)
        open_input(self, path)

    monkeypatch.setattr(runner._Input, "__init__", open_slowly)
    rows = _Rows()
    gc.disable()
    try:
        async with _running(store, rows):
            batch_id = _submit(store, "ann", 400 if during == "validation" else 1)
            while not (rows.checked if during == "validation" else opening.is_set()):
                await asyncio.sleep(0.001)
            store.batches.cancel("ann", batch_id, NOW)
            found = await _until_final(store, "ann", batch_id)
            assert found.status is BatchStatus.CANCELLED
            path = str(store.files.bodies.path(found.input_digest))
            if during == "opening":
                await asyncio.sleep(0.5)  # the thread has opened it by now
            async with asyncio.timeout(5.0):  # the turn of a thread may last a little longer
                while path in open_files(os.getpid()):
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()


@pytest.mark.parametrize("busy", [False, True], ids=["quick store", "busy store"])
async def test_a_batch_whose_results_do_not_fit_fails_with_what_fits(
    store: Store, monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    """And its owner is told what to do; it counts as one refusal.

    busy: the store takes so long that results wait, which are stored together then.
    """
    rows, num_rows = _Rows(reply_bytes=5_000), 1_000
    commit, stored = store.batches.commit, []

    def commit_late(lease: Lease, outcomes: Sequence[RowOutcome], *args: Any) -> None:
        while busy and len(rows.answered) < 50:
            time.sleep(0.001)
        stored.append(len(outcomes))
        commit(lease, outcomes, *args)

    monkeypatch.setattr(store.batches, "commit", commit_late)
    refusals: list[tuple[str, Resource]] = []
    batch_id = _submit(store, "bob", num_rows)
    most = store.batches.usage()["bob", Resource.FILE_BYTES] + 60_000
    limits = TenantLimits(file_bytes=most)
    async with _running(store, rows, limits, lambda *refused: refusals.append(refused)):
        batch = await _until_final(store, "bob", batch_id)
    assert batch.status is BatchStatus.FAILED
    assert refusals == [("bob", Resource.FILE_BYTES)]
    (error,) = batch.errors
    assert error.code == "tenant_limit_exceeded"
    assert "max_file_bytes" in error.message
    assert "error file" in error.message
    assert not busy or max(stored) > batch.completed
    assert (batch.total, batch.failed) == (num_rows, num_rows - batch.completed)
    assert len(rows.answered) < num_rows, "no more rows are run"
    assert batch.output_file_id is not None
    output = store.files.get("bob", batch.output_file_id, NOW)
    assert output.num_bytes > 5_000 * batch.completed
    assert batch.completed == 60_000 // (output.num_bytes // batch.completed)
    of_bob = store.batches.usage()["bob", Resource.FILE_BYTES]
    assert of_bob < most + num_rows * 300  # the error file has a short line for each other row


@pytest.mark.parametrize("then", ["room", "cancelled", "expired"])
async def test_a_batch_waits_for_room_beside_the_files_of_all_unless_it_ends(
    store: Store, then: str
) -> None:
    """Until then, what fits is stored, however many results wait."""
    rows, num_rows, answered, last = _Rows(reply_bytes=5_000), 100, [], asyncio.Event()

    async def answer(*arguments: Any, **options: Any) -> RowReply:
        reply = await _Rows.answer(rows, *arguments, **options)
        if len(answered) == num_rows - 1:
            await last.wait()
        answered.append(reply)
        return reply

    rows.answer = answer  # type: ignore[method-assign]
    store.put_file(b"x" * 600_000, file_id="file-large", tenant="ann")
    batch_id = _submit(store, "bob", num_rows, window_s=8 if then == "expired" else 3600)
    used = sum(n for (_, what), n in store.batches.usage().items() if what is Resource.FILE_BYTES)
    server_limits = TenantLimits(file_bytes=used + 60_000)
    async with _running(store, rows, server_limits=server_limits):
        async with asyncio.timeout(20.0):
            while store.batches.get("bob", batch_id).completed < 11 or len(answered) < num_rows - 1:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.3)
            assert store.batches.get("bob", batch_id).completed == 11, "no more fit"
        if then == "room":
            store.files.delete("ann", "file-large", NOW)
            last.set()
        elif then == "cancelled":
            store.batches.cancel("bob", batch_id, NOW)
        batch = await _until_final(store, "bob", batch_id)
    assert batch.status is BatchStatus("completed" if then == "room" else then)
    assert batch.completed == len(answered), "what is answered is kept"


async def test_long_lines_of_results_are_made_on_a_thread(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "SHORT_BODY", 0)
    threads = set[int]()

    def watched(*arguments: Any) -> str:
        threads.add(threading.get_ident())
        return reply_line(*arguments)

    monkeypatch.setattr(runner, "reply_line", watched)
    batch_id = _submit(store, "bob", 2)
    async with _running(store, _Rows()):
        await _until_final(store, "bob", batch_id)
    assert threads and threading.get_ident() not in threads


async def test_results_count_as_bytes_of_files_before_they_are_in_one(store: Store) -> None:
    batch_id = _submit(store, "bob", 4)
    before = store.batches.usage()["bob", Resource.FILE_BYTES]
    rows = _Rows(reply_bytes=5_000)
    held = asyncio.Event()

    async def answer(*arguments: Any, **options: Any) -> RowReply:
        if len(rows.answered) == 3:
            await held.wait()
        return await _Rows.answer(rows, *arguments, **options)

    rows.answer = answer  # type: ignore[method-assign]
    async with _running(store, rows):
        async with asyncio.timeout(20.0):
            while store.batches.get("bob", batch_id).completed < 3:
                await asyncio.sleep(0.01)
        while_it_runs = store.batches.usage()["bob", Resource.FILE_BYTES] - before
        held.set()
        await _until_final(store, "bob", batch_id)
    results = store.batches.usage()["bob", Resource.FILE_BYTES] - before
    assert while_it_runs == results * 3 // 4


@pytest.mark.parametrize("kind", ["batches", "background responses"])
async def test_a_runner_that_has_ended_uses_the_store_no_more(
    store: Store, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it claims after it has released all would have no runner until the lease ends."""
    batch_runner, responses = _runner(store, _Rows()), ResponseStore(store.database)
    runs: BatchRunner | BackgroundRunner = batch_runner
    if kind == "background responses":
        runs = BackgroundRunner(batch_runner.context, responses, _NoResponses())
    claims = store.batches if kind == "batches" else responses
    calls: list[str] = []
    held, claim, release = Held(), claims.claim, claims.release

    def slow_claim(*arguments: Any) -> Sequence[object]:
        held()
        claimed = claim(*arguments)
        calls.append("claim")
        return claimed

    def noted_release(owner: str) -> None:
        calls.append("release")
        release(owner)

    monkeypatch.setattr(claims, "claim", slow_claim)
    monkeypatch.setattr(claims, "release", noted_release)
    running = asyncio.create_task(runs.run())
    await held.begun.wait()
    running.cancel()
    asyncio.get_running_loop().call_later(0.1, held.let_go)
    await asyncio.gather(running, return_exceptions=True)
    assert calls == ["claim", "release"]


async def test_what_a_late_thread_claims_is_released_once_it_has_ended(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runner itself does not wait for a thread for longer than _STOP_TIMEOUT_S."""
    monkeypatch.setattr(runner, "_STOP_TIMEOUT_S", 0.05)
    held, claim, batch_id = Held(), store.batches.claim, _submit(store, "bob", 4)

    def slow_claim(*arguments: Any) -> Sequence[object]:
        held()
        return claim(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(store.batches, "claim", slow_claim)
        running = asyncio.create_task(_runner(store, _Rows()).run())
        await held.begun.wait()
        running.cancel()
        await asyncio.wait([running])
        held.let_go()
        # Where the late one releases what it has claimed.
        await asyncio.get_running_loop().shutdown_default_executor()
    ((_, claimed),) = store.batches.claim("another", NOW, 15.0, 1, "")
    assert claimed.id == batch_id


async def test_waiting_outcomes_are_bounded_by_their_bytes_and_wait_in_order() -> None:
    budget = ByteBudget(100)
    await budget.acquire(70)
    large = asyncio.create_task(budget.acquire(500))
    small = asyncio.create_task(budget.acquire(10))
    await asyncio.sleep(0.01)
    assert (budget.used, large.done(), small.done()) == (70, False, False)
    budget.release(70)
    await large
    await asyncio.sleep(0.01)
    assert (budget.used, small.done()) == (500, False)
    budget.release(500)
    await small
    assert budget.used == 10


async def test_small_batches_follow_one_another_without_waiting_for_a_poll(store: Store) -> None:
    batches = [_submit(store, "bob", 1, f"b{number}") for number in range(6)]
    async with _running(store, _Rows(), poll_s=1_000.0), asyncio.timeout(2.0):  # polls every 3.75 s
        for batch_id in batches:
            await _until_final(store, "bob", batch_id)


@pytest.mark.parametrize("what", ["_Input", "check_input"])
async def test_no_batch_fails_because_there_are_too_many_open_files(
    store: Store, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    work, tries = getattr(runner, what), 0

    def scarce(*arguments: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 5:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return work(*arguments, **options)

    monkeypatch.setattr(runner, what, scarce)
    batch_id = _submit(store, "bob", 2)
    async with _running(store, _Rows(), lease_s=0.2):
        batch = await _until_final(store, "bob", batch_id)
    assert (batch.status, batch.completed, tries) == (BatchStatus.COMPLETED, 2, 6)


async def test_batches_that_fail_at_once_do_not_follow_one_another_without_a_pause(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = 0

    def broken(*arguments: Any, **options: Any) -> Any:
        nonlocal tries
        tries += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(runner, "check_input", broken)
    for number in range(20):
        _submit(store, "bob", 1, f"b{number}")
    async with _running(store, _Rows(), poll_s=1_000.0):  # the second poll is after 3.75 s
        await asyncio.sleep(1.0)
    assert tries == 2


class _SomeRows(_Rows):
    """Answers the first 4 rows of each batch; the others have no end."""

    async def answer(
        self, endpoint: str, body: dict[str, Any], *, request_id: str, tenant: str, slo: Slo
    ) -> RowReply:
        if int(body["prompt"].rpartition(".")[2]) > 4:
            await asyncio.Event().wait()
        reply = await super().answer(endpoint, body, request_id=request_id, tenant=tenant, slo=slo)
        return dataclasses.replace(reply, usage=TokenUsage(10, 0, 10))


async def test_batches_are_expected_to_end_in_the_order_of_their_windows(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with the same window end together. A poll looks at each batch once, however many there
    are: if each looked at all, a poll of 2,000 batches would hold the event loop for a second."""
    names = {"a": 1_000, "b": 1_000, "c": 2_000, "d": 3_000}
    for name, window_s in names.items():
        _submit(store, "bob", 400, name, window_s)
    looked_at, renew, renewed = 0, store.batches.renew, []

    class Counting(runner.Backlog):
        def add(self, job: JobPace) -> None:
            nonlocal looked_at
            looked_at += 1
            super().add(job)

    def watched(owner: str, ids: Sequence[str], *arguments: Any) -> Any:
        renewed.append((len(ids), looked_at))
        return renew(owner, ids, *arguments)

    monkeypatch.setattr(runner, "Backlog", Counting)
    monkeypatch.setattr(store.batches, "renew", watched)
    began_s = time.monotonic()
    async with _running(store, _SomeRows()), asyncio.timeout(20.0):
        found: list[Batch] = []
        while len(found) < 4 or sum(batch.completed for batch in found) < 4:
            await asyncio.sleep(0.3)
            found, _ = store.batches.page("bob", Page(limit=10, newest_first=False))
        del renewed[:]
        await asyncio.sleep(0.3)
        found, _ = store.batches.page("bob", Page(limit=10, newest_first=False))
        now = NOW + time.monotonic() - began_s
    (before, first), (after, second) = renewed[-2:]
    assert before == after == second - first == 4
    assert None not in (ends := [batch.expected_at for batch in found])
    a, b, c, d = (end - now for end in ends if end is not None)
    assert a == b
    left = 1_600 - sum(batch.completed for batch in found)
    assert c / a == pytest.approx((left - 400) / (left - 800), rel=0.1)
    assert d / a == pytest.approx(left / (left - 800), rel=0.1)


async def test_rows_and_leases_go_on_while_many_batches_are_finalized(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, finish, renew, renewed = Held(), store.batches.finish, store.batches.renew, []

    def slow_finish(*arguments: Any) -> None:
        held()
        finish(*arguments)

    def watched(*arguments: Any) -> Any:
        renewed.append(arguments)
        return renew(*arguments)

    many = [_submit(store, "bob", 2, f"b{number}") for number in range(10)]
    monkeypatch.setattr(store.batches, "finish", slow_finish)
    monkeypatch.setattr(store.batches, "renew", watched)
    rows = _Rows()
    async with _running(store, rows), asyncio.timeout(20.0):
        while len(rows.answered) < 20:
            await asyncio.sleep(0.01)
        await held.begun.wait()
        await asyncio.sleep(0.1)
        del renewed[:]
        live = _submit(store, "eve", 20)
        while store.batches.get("eve", live).completed < 20:
            await asyncio.sleep(0.01)
        assert renewed
        held.let_go()
        for tenant, batch_id in [("eve", live), *(("bob", each) for each in many)]:
            assert (await _until_final(store, tenant, batch_id)).completed


async def test_batches_that_cannot_be_written_do_not_stop_the_others(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as those whose rows a disk cannot read any more."""
    broken = {_submit(store, "bob", 1, f"b{number}", 1_000) for number in range(3)}
    finish = store.batches.finish

    def some_finish(lease: Lease, *arguments: Any) -> None:
        if lease.batch_id in broken:
            raise StoreUnavailableError("the store cannot be used: disk I/O error")
        finish(lease, *arguments)

    monkeypatch.setattr(store.batches, "finish", some_finish)
    async with _running(store, _Rows()):
        while any(store.batches.get("bob", each).status != "finalizing" for each in broken):
            await asyncio.sleep(0.01)
        live = _submit(store, "eve", 1)
        assert (await _until_final(store, "eve", live)).completed == 1
        broken.clear()
        for number in range(3):
            assert (await _until_final(store, "bob", f"batch_b{number}")).completed == 1
