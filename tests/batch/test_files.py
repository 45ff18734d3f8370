"""Files: who sees them, for how long, and when their content goes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from bros.batch.files import Page
from bros.batch.objects import BatchStatus, Lease, LineError, StoreError
from bros.core.errors import NotFoundError
from support.batch_store import NOW, Store

STRANGE_IDS = ["", "file-2", "\0", "\ud800", "x" * 10_000, "'; DROP TABLE files; --", "%"]


def is_there(store: Store, file_id: str = "file-1", tenant: str = "ann", now: float = NOW) -> bool:
    try:
        store.files.get(tenant, file_id, now)
    except NotFoundError:
        return False
    return True


def test_a_file_can_be_read_once_it_is_added(store: Store) -> None:
    file = store.put_file(b"hello", expires_at=NOW + 10)
    assert store.files.get("ann", "file-1", NOW) == file
    assert store.files.body(file).read_bytes() == b"hello"


@pytest.mark.parametrize("file_id", STRANGE_IDS)
def test_there_is_no_other_file(store: Store, file_id: str) -> None:
    store.put_file()
    calls: list[Callable[[], object]] = [
        lambda: store.files.get("ann", file_id, NOW),
        lambda: store.files.delete("ann", file_id, NOW),
    ]
    for call in calls:
        with pytest.raises(NotFoundError) as unknown:
            call()
        assert (unknown.value.param, unknown.value.code) == ("id", "file_not_found")
        assert len(str(unknown.value)) < 200
    with pytest.raises(NotFoundError) as unknown:
        store.files.page("ann", Page(10, after=file_id), NOW)
    assert (unknown.value.param, unknown.value.code) == ("after", "not_found")


def test_nobody_sees_the_files_of_others(store: Store) -> None:
    store.put_file(tenant="ann")
    assert not is_there(store, tenant="bob")
    assert store.files.page("bob", Page(10), NOW) == ([], False)
    with pytest.raises(NotFoundError):
        store.files.page("bob", Page(10, after="file-1"), NOW)
    with pytest.raises(NotFoundError):
        store.files.delete("bob", "file-1", NOW)
    assert is_there(store, tenant="ann")


def test_a_file_is_gone_at_the_second_it_expires(store: Store) -> None:
    file = store.put_file(expires_at=NOW + 10)
    assert is_there(store, now=NOW + 9.999)
    assert not is_there(store, now=NOW + 10)
    assert store.files.page("ann", Page(10), NOW + 10) == ([], False)
    with pytest.raises(NotFoundError):
        store.files.delete("ann", file.id, NOW + 10)


@pytest.mark.parametrize("newest_first", [True, False])
@pytest.mark.parametrize("limit", [1, 2, 3, 7, 8])
def test_pages_together_are_the_whole_list_in_order(
    store: Store, limit: int, newest_first: bool
) -> None:
    for i in range(7):
        store.put_file(file_id=f"file-{i}")
        store.put_file(file_id=f"file-bob-{i}", tenant="bob")
    seen: list[str] = []
    has_more = True
    while has_more:
        page = Page(limit, seen[-1] if seen else None, newest_first)
        files, has_more = store.files.page("ann", page, NOW)
        assert len(files) == limit or not has_more
        seen += [file.id for file in files]
    expected = [f"file-{i}" for i in range(7)]
    assert seen == (expected[::-1] if newest_first else expected)


def test_pages_of_one_purpose(store: Store) -> None:
    for i, purpose in enumerate(["batch", "batch_output", "batch"]):
        store.put_file(file_id=f"file-{i}", purpose=purpose)
    files, has_more = store.files.page("ann", Page(1), NOW, "batch")
    assert ([file.id for file in files], has_more) == (["file-2"], True)
    files, has_more = store.files.page("ann", Page(1, after="file-2"), NOW, "batch")
    assert ([file.id for file in files], has_more) == (["file-0"], False)


def test_a_deleted_file_is_gone_with_its_content(store: Store) -> None:
    file = store.put_file()
    store.files.delete("ann", "file-1", NOW)
    assert not is_there(store)
    assert store.bodies() == set()
    with pytest.raises(NotFoundError):
        store.files.body(file)
    with pytest.raises(NotFoundError):
        store.files.delete("ann", "file-1", NOW)


def test_content_stays_as_long_as_another_file_has_the_same(store: Store) -> None:
    first = store.put_file(file_id="file-1")
    second = store.put_file(file_id="file-2", tenant="bob")
    assert first.digest == second.digest
    store.files.delete("ann", "file-1", NOW)
    assert store.files.body(second).read_bytes() == b"content"
    store.files.delete("bob", "file-2", NOW)
    assert store.bodies() == set()


def test_content_stays_as_long_as_an_open_batch_reads_it(store: Store) -> None:
    file = store.put_file()
    batch = store.put_batch()
    store.files.delete("ann", file.id, NOW)
    store.files.sweep(NOW)
    assert store.bodies() == {file.digest}
    store.batches.cancel("ann", batch.id, NOW)
    store.files.sweep(NOW)
    assert store.bodies() == {file.digest}
    lease = claim_one(store)
    outcome = store.batches.begin_finalizing(lease, BatchStatus.CANCELLED, NOW)
    store.batches.finish(lease, outcome, None, None, NOW)
    store.files.sweep(NOW)
    assert store.bodies() == set()


def test_a_failed_batch_needs_no_content(store: Store) -> None:
    store.put_file(expires_at=NOW + 1)
    store.put_batch()
    lease = claim_one(store)
    store.files.sweep(NOW + 1)
    assert len(store.bodies()) == 1
    store.batches.fail(lease, [LineError("empty_file", "No.")], NOW)
    store.files.sweep(NOW + 1)
    assert store.bodies() == set()


def test_a_sweep_forgets_what_is_over_and_what_crashes_have_left(store: Store) -> None:
    kept = store.put_file(b"kept", file_id="file-1", expires_at=NOW + 11)
    store.put_file(b"over", file_id="file-2", expires_at=NOW + 10)
    store.put_file(b"kept", file_id="file-3", expires_at=NOW + 10)
    bodies = store.files.bodies
    with bodies.new() as orphan, bodies.new() as written:
        orphan.write(b"orphan")
        orphan.finish()
        bodies.place(orphan)
        written.path.with_name("left").write_bytes(b"by a process that was killed")
        store.files.sweep(NOW + 10)
        assert store.bodies() == {kept.digest}
        assert store.unplaced() == [written.path]
    assert store.query("SELECT id FROM files") == [("file-1",)]


@contextlib.contextmanager
def broken_at_commit() -> Iterator[None]:
    """The disk of the store breaks when a transaction that has written ends."""
    writers = set[sa.Connection]()

    def note(connection: sa.Connection, _: object, statement: str, *__: object) -> None:
        if statement.startswith(("INSERT", "DELETE")):
            writers.add(connection)

    def fail(connection: sa.Connection) -> None:
        if connection in writers:
            raise sa.exc.OperationalError("COMMIT", {}, OSError("broken"))

    sa.event.listen(sa.Engine, "before_cursor_execute", note)
    sa.event.listen(sa.Engine, "commit", fail)
    try:
        yield
    finally:
        sa.event.remove(sa.Engine, "commit", fail)
        sa.event.remove(sa.Engine, "before_cursor_execute", note)


def test_a_file_that_could_not_be_deleted_is_still_whole(store: Store) -> None:
    file = store.put_file()
    with broken_at_commit(), pytest.raises(StoreError):
        store.files.delete("ann", "file-1", NOW)
    assert is_there(store)
    assert store.files.body(file).read_bytes() == b"content"


def test_a_file_that_could_not_be_added_leaves_nothing_that_a_sweep_does_not_find(
    store: Store,
) -> None:
    with broken_at_commit(), pytest.raises(StoreError):
        store.put_file()
    assert not is_there(store)
    assert store.unplaced() == []
    store.files.sweep(NOW)
    assert store.bodies() == set()


def test_two_files_cannot_have_one_id(store: Store) -> None:
    store.put_file(b"first")
    with pytest.raises(StoreError):
        store.put_file(b"second", tenant="bob")
    assert store.files.body(store.files.get("ann", "file-1", NOW)).read_bytes() == b"first"
    assert not is_there(store, tenant="bob")


def test_every_file_has_its_content_whatever_is_deleted_and_swept_meanwhile(store: Store) -> None:
    """All have the same content, which makes them get in each other's way."""

    def add_and_delete(name: int) -> None:
        with store.again() as own:
            for i in range(8):
                file = own.put_file(b"same", file_id=f"file-{name}-{i}")
                assert own.files.body(file).read_bytes() == b"same"
                own.files.delete("ann", file.id, NOW)

    def sweep(_: int) -> None:
        with store.again() as own:
            for _ in range(16):
                own.files.sweep(NOW)

    with ThreadPoolExecutor(4) as threads:
        work = [threads.submit(add_and_delete, name) for name in range(3)]
        work.append(threads.submit(sweep, 0))
        for done in work:
            done.result()
    assert store.bodies() == set()
    assert store.unplaced() == []


def claim_one(store: Store) -> Lease:
    ((lease, _),) = store.batches.claim("runner", NOW, 10.0)
    return lease
