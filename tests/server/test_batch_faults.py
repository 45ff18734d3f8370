"""Batches on a disk that is full, and with damaged input files."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.batch.objects import StoreFullError, StoreUnavailableError
from bros.batch.responses import ResponseStatus, StoredResponse
from bros.batch.store import open_store
from bros.server.operations import routes as service
from support.batch_server import BatchServer, batch_server, jsonl, row, until
from support.scripted_server import assert_envelope
from support.tier import by_tier

DISK_BYTES = 2**21
NOW = 1_700_000_000
ROWS = 60


@pytest.fixture
def disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A small disk of its own; its parameter is its size."""
    size = getattr(request, "param", DISK_BYTES)
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no disk can be mounted: {error}")
    if done.returncode:
        pytest.skip(f"no disk can be mounted: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def filled(disk: Path, spare: int) -> Iterator[None]:
    """There are only `spare` bytes left while the block lasts."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)) == 4096:
                pass
        file.truncate(max(0, file.tell() // 4096 * 4096 - spare))
    try:
        yield
    finally:
        filler.unlink()


# Too little for the first result, for all of them, or for the files.
@pytest.mark.multiprocess
@pytest.mark.parametrize("spare", by_tier(fast=[2**17], long=[0, 2**16, 2**17, 3 * 2**16]))
async def test_a_job_on_a_full_disk_waits_for_room(
    disk: Path, spare: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with batch_server(disk) as server:
        server.engine.text, server.engine.held = "x" * 400, "row"
        batch = await server.submit(*(row(number, max_tokens=450) for number in range(ROWS)))
        await until(lambda: server.engine.waiting > 0)
        with filled(disk, spare):
            server.engine.go_on.set()
            await until(lambda: "no room" in caplog.text or "disk of the store" in caplog.text)
            server.clock.advance(100.0)  # the lease runs out and cannot be renewed
            held = server.bodies(), len(server.unplaced())
            reply = await server.http.post(
                "/v1/files",
                files={"file": ("more.jsonl", bytes(2**18))},
                data={"purpose": "batch"},
            )
            error = assert_envelope(reply, 507)
            assert (error["type"], error["code"]) == ("server_error", "insufficient_storage")
            assert (server.bodies(), len(server.unplaced())) == held
            assert [file.id async for file in server.client.files.list()] == [batch.input_file_id]
            assert (await server.live.server.complete()).status_code == 200
            assert (await server.http.get("/health")).status_code == 200
            assert (await server.client.batches.retrieve(batch.id)).status != "completed"
        more = await server.client.files.create(file=("more.jsonl", b"{}"), purpose="batch")
        assert more.bytes == 2
        batch = await server.wait(batch, "completed")
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (ROWS, 0)
        results = await server.results(batch.output_file_id)
        assert list(results) == [f"row-{number}" for number in range(ROWS)]
        # Nothing was lost and done again.
        assert all(server.engine.prompts[name] == 1 for name in results)
        assert server.unplaced() == []


# The log of SQLite may grow to 4 MiB before it is begun again.
@pytest.mark.multiprocess
@pytest.mark.parametrize("disk", [2**27], indirect=True)
async def test_a_disk_with_little_left_takes_nothing_more_but_lets_all_be_deleted(
    disk: Path,
) -> None:
    async def metrics() -> list[str]:
        return (await server.http.get("/metrics")).text.splitlines()

    async def respond(**fields: Any) -> httpx.Response:
        body = {"model": "scripted", "input": "Hi", **fields}
        return await server.http.post("/v1/responses", json=body)

    async with batch_server(disk) as server:
        assert server.live.server.state.jobs is not None
        background = server.live.server.state.jobs.background
        files = [await server.upload(bytes([65 + i]) * 20_000) for i in range(5)]
        responses = [(await respond()).json()["id"] for _ in range(30)]
        batch = await server.submit(row(0))
        await server.wait(batch, "completed")
        with filled(disk, 7 * 2**20):
            background.wake()
            await until(lambda: server.store.responses.is_full)
            generated, num_bodies = len(server.engine.submitted), len(server.bodies())
            refused = [
                await respond(),
                await respond(stream=True),
                await respond(background=True),
                await server.http.post(
                    "/v1/files", files={"file": ("a.jsonl", b"{}")}, data={"purpose": "batch"}
                ),
                await server.http.post(
                    "/v1/batches",
                    json={
                        "input_file_id": batch.input_file_id,
                        "endpoint": "/v1/chat/completions",
                        "completion_window": "24h",
                    },
                ),
            ]
            for reply in refused:
                assert assert_envelope(reply, 507)["code"] == "insufficient_storage"
            assert len(server.engine.submitted) == generated, "nothing is generated in vain"
            assert (await respond(store=False)).status_code == 200
            assert {"bros_batch_store_up 1.0", "bros_batch_store_full 1.0"} <= {*await metrics()}
            for response_id in responses:
                assert (await server.http.delete(f"/v1/responses/{response_id}")).status_code == 200
            for file in files:
                assert (await server.client.files.delete(file.id)).deleted
            assert len(server.bodies()) == num_bodies - len(files)
        background.wake()
        await until(lambda: not server.store.responses.is_full)
        assert (await respond()).status_code == 200
        assert "bros_batch_store_full 0.0" in await metrics()


@pytest.mark.multiprocess
@pytest.mark.parametrize("disk", [2**27], indirect=True)
def test_what_was_deleted_makes_room_though_the_file_of_the_store_stays_as_large(
    disk: Path,
) -> None:
    with contextlib.closing(open_store(disk)) as store:
        names = [f"resp_{number}" for number in range(200)]

        def fill() -> int:
            """How many fit."""
            for number, name in enumerate(names):
                try:
                    store.responses.put(stored_response(name, "x" * 2**20))
                except StoreFullError:
                    return number
            raise AssertionError("the disk is not full")

        count = fill()
        assert count > 80 and store.responses.is_full
        for name in names[:count]:
            store.responses.delete("ann", name, NOW)
        store.responses.look_for_room()
        assert not store.responses.is_full
        assert abs(fill() - count) < 8


def stored_response(name: str, text: str) -> StoredResponse:
    return StoredResponse(
        id=name,
        tenant="ann",
        served_model="m",
        previous_id=None,
        status=ResponseStatus.COMPLETED,
        background=False,
        created_at=NOW,
        expires_at=NOW + 100,
        input="[]",
        body=text,
    )


async def test_a_store_whose_file_is_gone_is_said_to_be_and_all_else_goes_on(
    tmp_path: Path,
) -> None:
    async with batch_server(tmp_path) as server:
        file, away = tmp_path / "jobs.db", tmp_path / "away.db"
        kept = await server.upload(b"{}")
        file.rename(away)
        for path in ("/v1/files", "/v1/batches", f"/v1/files/{kept.id}"):
            error = assert_envelope(await server.http.get(path), 503)
            assert (error["type"], error["code"]) == ("server_error", "store_unavailable")
        assert (await server.live.server.complete()).status_code == 200
        away.rename(file)
        assert [file.id async for file in server.client.files.list()] == [kept.id]


@contextlib.contextmanager
def out_of_reach(server: BatchServer, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The store can be neither read nor written for the sake of rows while the block lasts."""
    is_back = threading.Event()

    def unreachable(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if not is_back.is_set():
                raise StoreUnavailableError("the store cannot be reached")
            return work(*args)

        return call

    for name in ("pending", "commit"):
        patch.setattr(server.store.batches, name, unreachable(getattr(server.store.batches, name)))
    yield
    is_back.set()


@pytest.mark.slow
async def test_a_job_waits_for_a_store_that_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when it is about to read more rows from it."""
    rows_at_once, num_rows = 256, 300
    async with batch_server(tmp_path) as server:
        server.engine.held = "row"
        batch = await server.submit(*map(row, range(num_rows)))
        await until(lambda: server.engine.waiting > 0)
        with out_of_reach(server, monkeypatch):
            server.engine.go_on.set()
            await until(lambda: len(server.engine.submitted) == rows_at_once)
            tried = caplog.text.count("retrying in")
            # It says so for the outcomes and, then at the latest, for the rows.
            await until(lambda: caplog.text.count("retrying in") >= tried + 2)
        batch = await server.wait(batch, "completed")
        assert len(await server.results(batch.output_file_id)) == num_rows
        assert set(server.engine.prompts.values()) == {1}


async def test_no_row_begins_after_the_lease_has_run_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be renewed, so another server may have taken the job over."""
    num_rows = 20
    async with batch_server(tmp_path) as server:
        assert server.live.server.state.jobs is not None
        runner, renew = server.live.server.state.jobs.runner, server.store.batches.renew
        server.engine.held = "row"
        batch = await server.submit(*map(row, range(num_rows)))
        await until(lambda: 0 < server.engine.waiting == runner.rows_in_flight)
        begun = len(server.engine.submitted)
        out_of_reach = threading.Event()

        def unreachable(*args: Any) -> Any:
            if out_of_reach.is_set():
                raise StoreUnavailableError("the store cannot be reached")
            return renew(*args)

        out_of_reach.set()
        monkeypatch.setattr(server.store.batches, "renew", unreachable)
        server.clock.advance(100.0)
        server.engine.go_on.set()
        await server.wait_done(batch, begun)
        assert len(server.engine.submitted) == begun < num_rows
        out_of_reach.clear()
        server.wake()
        await server.wait(batch, "completed")
        assert set(server.engine.prompts.values()) == {1}


async def test_metrics_do_not_wait_for_a_database_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They say so; and however often they are asked for, one thread waits"""
    monkeypatch.setattr(service, "_STATS_TIMEOUT_S", 0.05)
    goes_on, asked = threading.Event(), []
    async with batch_server(tmp_path, idle=True) as server:
        count = server.store.batches.count_by_status

        def hangs() -> Mapping[str, int]:
            asked.append(1)
            goes_on.wait(60)
            return count()

        monkeypatch.setattr(server.store.batches, "count_by_status", hangs)
        try:
            for _ in range(3):
                lines = (await server.http.get("/metrics")).text.splitlines()
                assert "bros_batch_store_up 0.0" in lines
                assert "bros_batch_rows_in_flight 0.0" in lines
                assert not any(line.startswith("bros_batches{") for line in lines)
            assert len(asked) == 1
        finally:
            goes_on.set()
        await server.submit(row(1))
        lines = (await server.http.get("/metrics")).text.splitlines()
        assert "bros_batch_store_up 1.0" in lines
        assert 'bros_batches{status="validating"} 1.0' in lines


def body_of(server: BatchServer, content: bytes) -> Path:
    (digest,) = server.bodies()
    path = server.store.files.bodies.path(digest)
    assert path.read_bytes() == content
    return path


INPUT = jsonl(*(row(number) for number in range(ROWS)))


@pytest.mark.parametrize(
    ("damage", "code"),
    [
        (lambda path: path.write_bytes(INPUT.replace(b'"row-30"', b'"row-3O"')), "damaged_file"),
        (lambda path: path.write_bytes(INPUT[:-1] + b" "), "damaged_file"),
        (lambda path: path.write_bytes(INPUT[:1000] + b"\0" + INPUT[1001:]), "damaged_file"),
        (lambda path: path.write_bytes(INPUT[: len(INPUT) // 2]), "damaged_file"),
        (lambda path: path.write_bytes(b""), "damaged_file"),
        (lambda path: path.unlink(), "missing_file"),
    ],
    ids=["changed", "last byte", "not JSON", "cut", "empty", "removed"],
)
async def test_input_that_is_damaged_before_it_is_checked_is_not_run(
    tmp_path: Path, damage: Callable[[Path], object], code: str
) -> None:
    async with batch_server(tmp_path) as server:
        file = await server.upload(INPUT)
        damage(body_of(server, INPUT))
        batch = await server.wait(await server.create(file.id), "failed")
        assert batch.errors is not None and batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == [code]
        assert server.engine.submitted == []
        assert (batch.output_file_id, batch.error_file_id) == (None, None)


def overwrite(path: Path, old: bytes, new: bytes) -> None:
    """In the file itself, which is open."""
    content = path.read_bytes()
    assert content.count(old) == 1 and len(old) == len(new)
    with path.open("r+b") as file:
        file.seek(content.index(old))
        file.write(new)


def line_of(number: int) -> int:
    """Where a row begins."""
    return sum(map(len, INPUT.splitlines(keepends=True)[:number]))


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (lambda path: overwrite(path, b'{"custom_id": "row-30"', b"\0" * 22), {30}),
        (lambda path: overwrite(path, b'"custom_id": "row-30"', b'"custom_id": "row-31"'), {30}),
        (lambda path: overwrite(path, b'd": "row-30"', b'd": "row-3\xff"'), {30}),
        (lambda path: os.truncate(path, line_of(50) + 10), set(range(50, ROWS))),
        (lambda path: path.unlink(), set()),
    ],
    ids=["zeros", "another id", "not UTF-8", "cut", "removed"],
)
async def test_rows_that_are_damaged_after_they_were_checked_cost_no_others(
    tmp_path: Path, damage: Callable[[Path], object], lost: set[int]
) -> None:
    async with batch_server(tmp_path, batch_order="file") as server:
        batch = await begun(server)
        damage(body_of(server, INPUT))
        server.engine.go_on.set()
        await check_ended(server, batch, lost)


async def test_rows_of_input_that_is_gone_for_the_next_server_are_errors(tmp_path: Path) -> None:
    async with batch_server(tmp_path, batch_order="file") as first:
        batch_id = await begun(first)
        body_of(first, INPUT).unlink()
    async with batch_server(tmp_path, seed=1) as second:
        await check_ended(second, batch_id, set(range(ROWS)), "missing_file")
        assert second.engine.submitted == []


async def begun(server: BatchServer) -> str:
    """The id of a batch that was found to be valid, and whose first rows run."""
    server.engine.held = "row"
    file = await server.upload(INPUT)
    batch = await server.create(file.id)
    await until(lambda: server.engine.waiting > 0)
    return batch.id


async def check_ended(
    server: BatchServer, batch_id: str, lost: set[int], code: str = "damaged_file"
) -> None:
    """All rows have an answer but those that are lost, with this code."""
    batch = await server.wait(batch_id, "completed")
    output, errors = map(server.results, (batch.output_file_id, batch.error_file_id))
    answered, damaged = await output, await errors
    assert list(answered) == [f"row-{n}" for n in range(ROWS) if n not in lost]
    assert list(damaged) == [f"row-{n}" for n in sorted(lost)]
    assert {line["error"]["code"] for line in damaged.values()} <= {code}
    assert batch.request_counts is not None
    counts = (batch.request_counts.completed, batch.request_counts.failed)
    assert counts == (ROWS - len(lost), len(lost))


async def test_a_row_that_is_stopped_while_it_waits_for_a_valid_lease_releases_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lease has run out; then the batch expires."""

    def unreachable(*args: Any) -> Any:
        raise StoreUnavailableError("the store cannot be reached")

    async with batch_server(tmp_path) as server:
        assert server.live.server.state.jobs is not None
        runner = server.live.server.state.jobs.runner
        server.engine.held = "row"
        batch = await server.submit(*map(row, range(20)))
        await until(lambda: 0 < server.engine.waiting == runner.rows_in_flight)
        begun = len(server.engine.submitted)
        with monkeypatch.context() as patch:
            patch.setattr(server.store.batches, "renew", unreachable)
            server.clock.advance(100.0)
            server.engine.go_on.set()
            await server.wait_done(batch, begun)
            await until(lambda: runner.rows_in_flight == 1)
            server.clock.advance(24 * 3600.0)
            server.wake()
            await server.wait(batch, "expired")
        assert len(server.engine.submitted) == begun < 20
        await until(lambda: runner.rows_in_flight == 0)
