"""Batches: what clients may do, and how the work on them is recorded."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from bros.batch.files import Page
from bros.batch.objects import (
    Batch,
    BatchStatus,
    Lease,
    LineError,
    RowOutcome,
    StoreFullError,
    TokenUsage,
)
from bros.core.errors import InvalidRequestError, NotFoundError, TenantLimitError
from support.batch_store import NOW, Store, full_disk, row_refs

LEASE_S = 10.0


def claim(store: Store, owner: str = "runner", now: float = NOW) -> Lease:
    """The lease of the only batch that is free."""
    ((lease, _),) = store.batches.claim(owner, now, LEASE_S)
    return lease


def admit(store: Store, lease: Lease, num_rows: int = 3, **options: Any) -> Batch:
    settings = {"model": "m", "tokens": 10, "max_tokens": 1_000, "now": NOW + 1, **options}
    return store.batches.admit(lease, row_refs(num_rows), **settings)


def started(store: Store, num_rows: int = 3) -> Lease:
    """A batch that is in progress."""
    store.put_batch()
    lease = claim(store)
    admit(store, lease, num_rows)
    return lease


def ended(store: Store, outcome: BatchStatus, lease: Lease | None = None) -> Batch:
    """A batch that was finalized without files."""
    lease = lease or started(store)
    outcome = store.batches.begin_finalizing(lease, outcome, NOW + 2)
    store.batches.finish(lease, outcome, None, None, NOW + 3)
    return store.batches.get("ann", lease.batch_id)


def outcome(line: int, ok: bool = True, tokens: int = 1) -> RowOutcome:
    usage = TokenUsage(10 * tokens, 5 * tokens, 2 * tokens, tokens)
    return RowOutcome(line, ok, f'{{"line": {line}}}', usage)


def counts(batch: Batch) -> tuple[int, int, int]:
    return batch.total, batch.completed, batch.failed


# What clients ask for


@pytest.mark.parametrize("metadata", [None, {}, {"name": "ünï 😀 \0 \ud800"}])
def test_a_batch_is_as_it_was_made(store: Store, metadata: dict[str, str] | None) -> None:
    batch = store.put_batch(metadata=metadata, output_life_s=3_600)
    assert store.batches.get("ann", batch.id) == batch
    assert batch.status is BatchStatus.VALIDATING
    assert counts(batch) == (0, 0, 0)


@pytest.mark.parametrize("batch_id", ["", "batch_2", "\0", "\ud800", "x" * 10_000])
def test_there_is_no_other_batch(store: Store, batch_id: str) -> None:
    store.put_batch()
    calls: list[Callable[[], object]] = [
        lambda: store.batches.get("ann", batch_id),
        lambda: store.batches.cancel("ann", batch_id, NOW),
    ]
    for call in calls:
        with pytest.raises(NotFoundError) as unknown:
            call()
        assert (unknown.value.param, unknown.value.code) == ("batch_id", "batch_not_found")
        assert len(str(unknown.value)) < 200
    with pytest.raises(NotFoundError):
        store.batches.page("ann", Page(10, after=batch_id))


def test_nobody_sees_the_batches_of_others(store: Store) -> None:
    batch = store.put_batch()
    for call in (
        lambda: store.batches.get("bob", batch.id),
        lambda: store.batches.cancel("bob", batch.id, NOW),
        lambda: store.batches.page("bob", Page(10, after=batch.id)),
    ):
        with pytest.raises(NotFoundError):
            call()
    assert store.batches.page("bob", Page(10)) == ([], False)
    assert store.batches.get("ann", batch.id) == batch


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_pages_together_are_the_whole_list_newest_first(store: Store, limit: int) -> None:
    for i in range(5):
        store.put_batch(f"batch_{i}")
        store.put_batch(f"batch_bob_{i}", tenant="bob")
    seen: list[str] = []
    has_more = True
    while has_more:
        batches, has_more = store.batches.page("ann", Page(limit, seen[-1] if seen else None))
        seen += [batch.id for batch in batches]
    assert seen == [f"batch_{i}" for i in (4, 3, 2, 1, 0)]


def test_a_tenant_has_so_many_unfinished_batches_and_no_more(store: Store) -> None:
    for i in range(2):
        store.put_batch(f"batch_{i}", max_open=2)
    with pytest.raises(TenantLimitError, match="2 unfinished"):
        store.put_batch("batch_2", max_open=2)
    store.put_batch("batch_bob", tenant="bob", max_open=2)
    leases = {lease.batch_id: lease for lease, _ in store.batches.claim("runner", NOW, LEASE_S)}
    store.batches.cancel("ann", "batch_0", NOW)
    with pytest.raises(TenantLimitError):
        store.put_batch("batch_2", max_open=2)
    ended(store, BatchStatus.CANCELLED, leases["batch_0"])
    store.put_batch("batch_2", max_open=2)


def test_the_quota_holds_for_requests_at_the_same_time(store: Store) -> None:
    def create(name: int) -> int:
        with store.again() as own:
            try:
                own.put_batch(f"batch_{name}", max_open=3)
            except TenantLimitError:
                return 0
            return 1

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(create, range(12))) == 3
    assert len(store.batches.page("ann", Page(100))[0]) == 3


def test_a_batch_can_be_cancelled_until_it_is_wound_up(store: Store) -> None:
    store.put_batch()
    first = store.batches.cancel("ann", "batch_1", NOW + 1)
    assert (first.status, first.cancelling_at) == (BatchStatus.CANCELLING, NOW + 1)
    assert store.batches.cancel("ann", "batch_1", NOW + 5) == first
    lease = claim(store)
    assert (
        store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW) is BatchStatus.CANCELLED
    )
    done = ended(store, BatchStatus.CANCELLED, lease)
    assert (done.status, done.cancelled_at) == (BatchStatus.CANCELLED, NOW + 3)
    assert store.batches.cancel("ann", "batch_1", NOW + 5) == done


def refused_to_cancel(store: Store) -> str:
    before = store.batches.get("ann", "batch_1")
    with pytest.raises(InvalidRequestError) as refused:
        store.batches.cancel("ann", "batch_1", NOW + 5)
    assert (refused.value.param, refused.value.code) == ("batch_id", "invalid_batch_status")
    assert store.batches.get("ann", "batch_1") == before
    return str(refused.value)


@pytest.mark.parametrize("has_rows", [True, False])
def test_who_cancels_a_batch_that_expires_just_now_is_told_how_far_it_is(
    store: Store, has_rows: bool
) -> None:
    store.put_batch()
    lease = claim(store)
    if has_rows:
        admit(store, lease)
    store.batches.begin_finalizing(lease, BatchStatus.EXPIRED, NOW + 2)
    before = store.batches.get("ann", "batch_1")
    assert before.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
    assert store.batches.cancel("ann", "batch_1", NOW + 3) == before
    store.batches.finish(lease, BatchStatus.EXPIRED, None, None, NOW + 4)
    assert "expired" in refused_to_cancel(store)


def test_it_is_too_late_to_cancel_what_is_done(store: Store) -> None:
    lease = started(store)
    store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW + 2)
    assert "finalizing" in refused_to_cancel(store)
    store.batches.finish(lease, BatchStatus.COMPLETED, None, None, NOW + 3)
    assert "completed" in refused_to_cancel(store)


def test_a_failed_batch_cannot_be_cancelled(store: Store) -> None:
    store.put_batch()
    store.batches.fail(claim(store), [LineError("empty_file", "No.")], NOW)
    assert "failed" in refused_to_cancel(store)


def test_batches_are_counted_by_status(store: Store) -> None:
    assert store.batches.count_by_status() == {}
    ended(store, BatchStatus.EXPIRED)
    store.put_batch("batch_2")
    store.put_batch("batch_3", tenant="bob")
    assert store.batches.count_by_status() == {"expired": 1, "validating": 2}


# Validation


def test_a_valid_input_is_in_progress_with_all_its_rows(store: Store) -> None:
    store.put_batch()
    batch = admit(store, claim(store), 3)
    assert batch == store.batches.get("ann", "batch_1")
    assert (batch.status, batch.model, batch.in_progress_at) == ("in_progress", "m", NOW + 1)
    assert counts(batch) == (3, 0, 0)
    assert store.batches.pending("batch_1", -1, 10) == row_refs(3)


def test_rows_are_pending_in_the_order_of_execution_a_page_at_a_time(store: Store) -> None:
    store.put_batch()
    rows = row_refs(30, [(7 * line) % 30 for line in range(30)])
    lease = claim(store)
    store.batches.admit(lease, rows, model=None, tokens=0, max_tokens=0, now=NOW)
    by_rank = sorted(rows, key=lambda row: row.rank)
    assert store.batches.pending("batch_1", -1, 7) == by_rank[:7]
    assert store.batches.pending("batch_1", by_rank[6].rank, 100) == by_rank[7:]
    store.batches.commit(lease, [outcome(by_rank[0].line), outcome(by_rank[9].line)], None)
    left = [row for row in by_rank if row not in (by_rank[0], by_rank[9])]
    assert store.batches.pending("batch_1", -1, 100) == left


def test_more_rows_than_are_stored_at_a_time(store: Store) -> None:
    batch = admit(store, started(store, 0), 0)
    assert batch.total == 0
    store.put_batch("batch_2")
    (lease,) = (lease for lease, _ in store.batches.claim("runner", NOW, LEASE_S))
    assert admit(store, lease, 10_001).total == 10_001
    assert store.query("SELECT count(*) FROM rows WHERE batch_id = 'batch_2'") == [(10_001,)]


def test_a_second_time_an_input_is_not_admitted(store: Store) -> None:
    lease = started(store, 3)
    store.batches.commit(lease, [outcome(1)], None)
    before = store.batches.get("ann", "batch_1")
    assert admit(store, lease, 5, now=NOW + 9) == before
    assert len(store.batches.pending("batch_1", -1, 10)) == 2


def test_an_input_that_was_cancelled_meanwhile_is_not_admitted(store: Store) -> None:
    store.put_batch()
    lease = claim(store)
    cancelled = store.batches.cancel("ann", "batch_1", NOW)
    assert admit(store, lease) == cancelled
    store.batches.fail(lease, [LineError("empty_file", "No.")], NOW)
    assert store.batches.get("ann", "batch_1") == cancelled
    assert store.batches.pending("batch_1", -1, 10) == []


def test_a_tenant_has_so_many_tokens_queued_and_no_more(store: Store) -> None:
    for batch_id, tenant in (("batch_1", "ann"), ("batch_2", "ann"), ("batch_3", "bob")):
        store.put_batch(batch_id, tenant=tenant)
    first, second, other = (lease for lease, _ in store.batches.claim("r", NOW, LEASE_S))
    assert admit(store, first, tokens=60, max_tokens=60).status is BatchStatus.IN_PROGRESS
    assert admit(store, other, tokens=60, max_tokens=60).status is BatchStatus.IN_PROGRESS
    refused = admit(store, second, tokens=1, max_tokens=60)
    assert (refused.status, refused.failed_at) == (BatchStatus.FAILED, NOW + 1)
    ((code, line),) = ((error.code, error.line) for error in refused.errors)
    assert (code, line) == ("token_limit_exceeded", None)
    assert counts(refused) == (0, 0, 0)
    assert store.batches.pending("batch_2", -1, 10) == []
    ended(store, BatchStatus.COMPLETED, first)
    store.put_batch("batch_4")
    ((fourth, _),) = store.batches.claim("r", NOW, LEASE_S)
    assert admit(store, fourth, tokens=60, max_tokens=60).status is BatchStatus.IN_PROGRESS


def test_a_batch_that_is_not_valid_fails_with_its_mistakes(store: Store) -> None:
    store.put_batch()
    lease = claim(store)
    errors = (
        LineError("invalid_url", "Wrong \ud800 \0.", "url", 3),
        LineError("empty_file", "Nothing."),
    )
    store.batches.fail(lease, errors, NOW + 4.7)
    batch = store.batches.get("ann", "batch_1")
    assert (batch.status, batch.errors, batch.failed_at) == ("failed", errors, NOW + 4)
    store.batches.fail(lease, errors[:1], NOW + 9)
    assert store.batches.get("ann", "batch_1") == batch


def test_a_batch_in_progress_cannot_fail(store: Store) -> None:
    lease = started(store)
    before = store.batches.get("ann", "batch_1")
    store.batches.fail(lease, [LineError("empty_file", "No.")], NOW)
    assert store.batches.get("ann", "batch_1") == before


# Faults

FAULT = LineError("internal_error", "The server failed.")


def note_faults(store: Store, lease: Lease, times: int) -> Batch:
    for _ in range(times):
        store.batches.note_fault(lease, FAULT, 3, NOW + 5)
    return store.batches.get("ann", "batch_1")


def test_an_input_that_cannot_be_checked_fails_in_the_end(store: Store) -> None:
    before = store.put_batch()
    lease = claim(store)
    assert note_faults(store, lease, 2) == before
    failed = note_faults(store, lease, 1)
    assert (failed.status, failed.failed_at) == (BatchStatus.FAILED, NOW + 5)
    assert failed.errors == (FAULT,)
    assert note_faults(store, lease, 1) == failed


def test_a_batch_that_cannot_be_run_is_wound_up_as_failed(store: Store) -> None:
    lease = started(store)
    store.batches.commit(lease, [outcome(1)], None)
    before = store.batches.get("ann", "batch_1")
    assert note_faults(store, lease, 2) == before
    failing = note_faults(store, lease, 1)
    assert (failing.status, failing.outcome) == (BatchStatus.IN_PROGRESS, BatchStatus.FAILED)
    assert store.batches.cancel("ann", "batch_1", NOW + 6) == failing
    failed = ended(store, BatchStatus.EXPIRED, lease)  # it is too late for that
    assert (failed.status, failed.errors, failed.failed_at) == ("failed", (FAULT,), NOW + 3)
    assert counts(failed) == (3, 1, 2)


def test_a_row_that_was_stored_shows_that_it_goes_on(store: Store) -> None:
    lease = started(store)
    for line in (1, 2):
        assert note_faults(store, lease, 2).outcome is None
        store.batches.commit(lease, [outcome(line)], None)
    assert note_faults(store, lease, 2).outcome is None


@pytest.mark.parametrize("status", [BatchStatus.COMPLETED, BatchStatus.CANCELLED])
def test_what_is_wound_up_or_cancelled_does_not_fail(store: Store, status: BatchStatus) -> None:
    lease = started(store)
    if status is BatchStatus.CANCELLED:
        store.batches.cancel("ann", "batch_1", NOW + 1)
    else:
        store.batches.begin_finalizing(lease, status, NOW + 1)
    before = store.batches.get("ann", "batch_1")
    assert note_faults(store, lease, 5) == before
    assert ended(store, status, lease).status is status


# Outcomes


def test_outcomes_are_counted_and_added_up(store: Store) -> None:
    lease = started(store, 4)
    store.batches.commit(lease, [outcome(1, tokens=1), outcome(2, ok=False, tokens=2)], NOW + 60)
    store.batches.commit(lease, [outcome(4, tokens=4)], NOW + 50)
    batch = store.batches.get("ann", "batch_1")
    assert counts(batch) == (4, 2, 1)
    assert batch.usage == TokenUsage(70, 35, 14, 7)
    assert batch.expected_at == NOW + 50
    assert [row.line for row in store.batches.pending("batch_1", -1, 10)] == [3]


def test_the_first_outcome_of_a_row_counts(store: Store) -> None:
    lease = started(store, 3)
    store.batches.commit(lease, [outcome(1), outcome(1, ok=False), outcome(99)], None)
    for _ in range(2):
        store.batches.commit(lease, [outcome(1, ok=False), outcome(2)], None)
    batch = store.batches.get("ann", "batch_1")
    assert counts(batch) == (3, 2, 0)
    assert batch.usage == TokenUsage(20, 10, 4, 2)
    assert list(store.batches.results("batch_1", ok=True)) == [
        ("row-1", outcome(1).result),
        ("row-2", outcome(2).result),
    ]


def test_outcomes_of_one_batch_leave_others_alone(store: Store) -> None:
    first = started(store, 2)
    store.put_batch("batch_2")
    second = claim(store)
    admit(store, second, 2)
    store.batches.commit(first, [outcome(1)], None)
    assert len(store.batches.pending("batch_2", -1, 10)) == 2
    assert counts(store.batches.get("ann", "batch_2")) == (2, 0, 0)


@pytest.mark.parametrize("page", [1, 2, 3, 500])
def test_results_are_in_the_order_of_the_input_and_all_there(store: Store, page: int) -> None:
    lease = started(store, 7)
    store.batches.commit(lease, [outcome(line, line % 3 != 0) for line in (6, 2, 3, 5, 1)], None)
    good = list(store.batches.results("batch_1", ok=True, page=page))
    rest = list(store.batches.results("batch_1", ok=False, page=page))
    assert good == [(f"row-{line}", outcome(line).result) for line in (1, 2, 5)]
    assert rest == [
        ("row-3", outcome(3).result),
        ("row-4", ""),
        ("row-6", outcome(6).result),
        ("row-7", ""),
    ]


# The end


def test_a_completed_batch_is_finalizing_first(store: Store) -> None:
    lease = started(store)
    assert (
        store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW + 7)
        == BatchStatus.COMPLETED
    )
    batch = store.batches.get("ann", "batch_1")
    assert (batch.status, batch.outcome) == (BatchStatus.FINALIZING, BatchStatus.COMPLETED)
    assert batch.finalizing_at == NOW + 7


def test_a_batch_that_is_out_of_time_keeps_its_status_until_it_has_expired(store: Store) -> None:
    lease = started(store)
    assert (
        store.batches.begin_finalizing(lease, BatchStatus.EXPIRED, NOW + 7) == BatchStatus.EXPIRED
    )
    batch = store.batches.get("ann", "batch_1")
    assert (batch.status, batch.outcome) == (BatchStatus.IN_PROGRESS, BatchStatus.EXPIRED)
    assert ended(store, BatchStatus.EXPIRED, lease).status is BatchStatus.EXPIRED


def test_what_a_batch_ends_as_is_decided_once(store: Store) -> None:
    lease = started(store)
    store.batches.begin_finalizing(lease, BatchStatus.EXPIRED, NOW + 7)
    before = store.batches.get("ann", "batch_1")
    assert (
        store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW + 9) == BatchStatus.EXPIRED
    )
    assert store.batches.get("ann", "batch_1") == before


@pytest.mark.parametrize("outcome", [BatchStatus.COMPLETED, BatchStatus.EXPIRED])
def test_a_failed_batch_is_not_wound_up(store: Store, outcome: BatchStatus) -> None:
    store.put_batch()
    lease = claim(store)
    store.batches.fail(lease, [LineError("empty_file", "No.")], NOW)
    before = store.batches.get("ann", "batch_1")
    assert store.batches.begin_finalizing(lease, outcome, NOW) is BatchStatus.FAILED
    store.batches.finish(lease, outcome, None, None, NOW)
    assert store.batches.get("ann", "batch_1") == before


def finish_with_files(store: Store, lease: Lease, ids: tuple[str, str], now: float) -> None:
    with store.new_file(ids[0]) as output, store.new_file(ids[1]) as errors:
        store.batches.finish(lease, BatchStatus.COMPLETED, output, errors, now)


def test_files_take_over_from_the_rows(store: Store) -> None:
    lease = started(store, 5)
    store.batches.commit(lease, [outcome(1), outcome(2), outcome(3, ok=False)], NOW + 99)
    store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW + 7)
    finish_with_files(store, lease, ("file-out", "file-err"), NOW + 8)
    batch = store.batches.get("ann", "batch_1")
    assert (batch.status, batch.completed_at) == (BatchStatus.COMPLETED, NOW + 8)
    assert (batch.output_file_id, batch.error_file_id) == ("file-out", "file-err")
    assert counts(batch) == (5, 2, 3)  # what was never run has failed
    assert batch.usage == TokenUsage(30, 15, 6, 3)
    assert batch.expected_at is None
    for file_id in ("file-out", "file-err"):
        file = store.files.get("ann", file_id, NOW)
        assert store.files.body(file).read_text() == file_id
    assert store.query("SELECT * FROM rows") == []
    assert store.unplaced() == []
    assert store.batches.claim("other", NOW + 1e6, LEASE_S) == []


def test_a_batch_without_results_has_no_files(store: Store) -> None:
    batch = ended(store, BatchStatus.EXPIRED)
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    assert (batch.expired_at, counts(batch)) == (NOW + 3, (3, 0, 3))


def test_a_batch_is_finished_once(store: Store) -> None:
    """A process that does not hear of it tries again, and finds no rows any more."""
    lease = started(store)
    store.batches.commit(lease, [outcome(1)], None)
    store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW + 7)
    finish_with_files(store, lease, ("file-out", "file-err"), NOW + 8)
    before = store.batches.get("ann", "batch_1")
    store.batches.finish(lease, BatchStatus.COMPLETED, None, None, NOW + 9)
    finish_with_files(store, lease, ("file-out-2", "file-err-2"), NOW + 9)
    store.batches.commit(lease, [outcome(2)], NOW + 99)
    store.batches.begin_finalizing(lease, BatchStatus.EXPIRED, NOW + 9)
    assert store.batches.get("ann", "batch_1") == before
    assert len(store.files.page("ann", Page(10), NOW)[0]) == 2


def test_outcomes_that_come_too_late_are_not_counted(store: Store) -> None:
    """The files may have been made without them."""
    lease = started(store, 3)
    store.batches.commit(lease, [outcome(1)], NOW + 99)
    store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW + 7)
    before = store.batches.get("ann", "batch_1")
    store.batches.commit(lease, [outcome(2)], NOW + 100)
    assert store.batches.get("ann", "batch_1") == before
    assert [custom_id for custom_id, _ in store.batches.results("batch_1", ok=True)] == ["row-1"]


def test_a_batch_that_could_not_be_finished_for_lack_of_room_is_as_before(store: Store) -> None:
    lease = started(store)
    store.batches.commit(lease, [outcome(1)], None)
    store.batches.begin_finalizing(lease, BatchStatus.COMPLETED, NOW + 7)
    before = store.batches.get("ann", "batch_1")
    with full_disk(store), pytest.raises(StoreFullError):
        finish_with_files(store, lease, ("file-out", "file-err"), NOW + 8)
    assert store.batches.get("ann", "batch_1") == before
    assert len(list(store.batches.results("batch_1", ok=False))) == 2
    assert store.files.page("ann", Page(10), NOW) == ([], False)
    assert store.unplaced() == []
    finish_with_files(store, lease, ("file-out", "file-err"), NOW + 9)
    assert store.batches.get("ann", "batch_1").status is BatchStatus.COMPLETED


def test_faults_do_not_fail_a_batch_that_is_about_to_expire(store: Store) -> None:
    lease = started(store)
    store.batches.begin_finalizing(lease, BatchStatus.EXPIRED, NOW + 1)
    before = store.batches.get("ann", "batch_1")
    assert note_faults(store, lease, 5) == before
    assert ended(store, BatchStatus.EXPIRED, lease).status is BatchStatus.EXPIRED
