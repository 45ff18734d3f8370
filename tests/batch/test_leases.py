"""One owner at a time, and a former one writes nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from bros.batch.objects import Batch, BatchStatus, Lease, LeaseLostError, LineError, RowOutcome
from support.batch_store import NOW, Store, row_refs
from support.tier import by_tier

LEASE_S = 10.0


def claim(store: Store, owner: str = "old", now: float = NOW) -> Lease:
    """The lease of the only batch that is free."""
    ((lease, _),) = store.batches.claim(owner, now, LEASE_S)
    return lease


def claimed(store: Store, owner: str, now: float) -> list[str]:
    return [batch.id for _, batch in store.batches.claim(owner, now, LEASE_S)]


def admit(store: Store, lease: Lease, num_rows: int = 3) -> object:
    return store.batches.admit(
        lease, row_refs(num_rows), model="m", tokens=1, max_tokens=100, now=NOW
    )


def test_the_most_urgent_batch_comes_first_and_then_the_oldest(store: Store) -> None:
    for batch_id, expires_in_s in (("a", 300), ("b", 100), ("c", 200), ("d", 100)):
        store.put_batch(batch_id, expires_at=NOW + expires_in_s)
    assert claimed(store, "runner", NOW) == ["b", "d", "c", "a"]


def test_who_wants_few_gets_the_most_urgent_ones(store: Store) -> None:
    for batch_id, expires_in_s in (("a", 300), ("b", 100), ("c", 200), ("d", 100)):
        store.put_batch(batch_id, expires_at=NOW + expires_in_s)

    def two(owner: str) -> list[str]:
        return [batch.id for _, batch in store.batches.claim(owner, NOW, LEASE_S, most=2)]

    assert (two("one"), two("other"), two("third")) == (["b", "d"], ["c", "a"], [])


def test_a_batch_is_for_servers_of_its_model_until_it_is_over(store: Store) -> None:
    for batch_id in ("a", "b", "c"):
        store.put_batch(batch_id, served_model="ours", expires_at=NOW + 100)

    def claimed_by(model: str, now: float) -> list[str]:
        found = store.batches.claim("runner", now, LEASE_S, model=model)
        return [batch.id for _, batch in found]

    assert claimed_by("theirs", NOW) == []
    store.batches.cancel("ann", "b", NOW)
    assert claimed_by("theirs", NOW) == ["b"]
    assert claimed_by("ours", NOW) == ["a", "c"]
    assert claimed_by("theirs", NOW + 99) == ["b"]
    assert claimed_by("theirs", NOW + 100) == ["a", "c"]


def test_what_is_expected_is_kept_with_the_lease(store: Store) -> None:
    store.put_batch("a", expires_at=NOW + 100)
    store.put_batch("b", expires_at=NOW + 200)
    store.batches.claim("old", NOW, LEASE_S)
    store.batches.renew("old", ["a", "b"], NOW, LEASE_S, {"b": NOW + 50})
    assert store.batches.get("ann", "a").expected_at is None
    assert store.batches.get("ann", "b").expected_at == NOW + 50


def test_what_is_claimed_is_told_as_it_is(store: Store) -> None:
    batch = store.put_batch()
    assert store.batches.claim("old", NOW, LEASE_S) == [(Lease("batch_1", "old", 1), batch)]


def test_a_batch_is_free_again_once_its_lease_has_run_out(store: Store) -> None:
    store.put_batch()
    first = claim(store, "old", NOW)
    for owner in ("old", "new"):
        assert claimed(store, owner, NOW + LEASE_S - 0.001) == []
    second = claim(store, "new", NOW + LEASE_S)
    assert (second.owner, second.epoch) == ("new", first.epoch + 1)
    assert claimed(store, "old", NOW + LEASE_S) == []


def test_a_lease_of_before_the_clock_went_back_is_not_believed(store: Store) -> None:
    """In PostgreSQL it is: it has one clock, which is not that of a server."""
    store.put_batch()
    first = claim(store, "dead", NOW + 3600)
    assert claimed(store, "new", NOW + 3600 - 30) == []  # the other server may be that much ahead
    assert claimed(store, "new", NOW) == (["batch_1"] if store.url is None else [])
    if store.url is None:
        assert claimed(store, "dead", NOW + LEASE_S - 1) == []
        with pytest.raises(LeaseLostError):
            admit(store, first)


def test_a_renewed_lease_lasts_longer(store: Store) -> None:
    store.put_batch()
    lease = claim(store)
    held = store.batches.renew("old", ["batch_1"], NOW + 9, LEASE_S)
    assert held == {lease: BatchStatus.VALIDATING}
    assert claimed(store, "new", NOW + 18) == []
    store.batches.cancel("ann", "batch_1", NOW)
    # Late, but no other process has claimed it in between.
    assert store.batches.renew("old", ["batch_1"], NOW + 50, LEASE_S) == {
        lease: BatchStatus.CANCELLING
    }
    assert claimed(store, "new", NOW + 59) == []


def test_only_what_is_still_ones_own_is_renewed(store: Store) -> None:
    for batch_id in ("lost", "over", "forgotten", "kept"):
        store.put_batch(batch_id)
    leases = {batch.id: lease for lease, batch in store.batches.claim("old", NOW, LEASE_S)}
    store.batches.fail(leases["over"], [LineError("empty_file", "No.")], NOW)
    store.batches.renew("old", ["kept", "forgotten"], NOW + 5, LEASE_S)
    assert claimed(store, "new", NOW + LEASE_S) == ["lost"]
    held = store.batches.renew("old", ["lost", "over", "kept", "unknown"], NOW + 12, LEASE_S)
    assert held == {leases["kept"]: BatchStatus.VALIDATING}
    assert store.batches.renew("old", [], NOW, LEASE_S) == {}
    assert claimed(store, "third", NOW + 16) == ["forgotten"]


def test_what_is_released_is_free_at_once_and_lost_to_its_owner(store: Store) -> None:
    store.put_batch("batch_1")
    lease = claim(store, "old")
    store.put_batch("batch_2")
    claim(store, "other")
    store.batches.release("old")
    with pytest.raises(LeaseLostError):
        admit(store, lease)
    assert store.batches.renew("old", ["batch_1"], NOW, LEASE_S) == {}
    assert claimed(store, "new", NOW) == ["batch_1"]


@pytest.mark.parametrize("outcome", [BatchStatus.COMPLETED, BatchStatus.CANCELLED, None])
def test_a_batch_that_is_over_cannot_be_claimed(store: Store, outcome: BatchStatus | None) -> None:
    store.put_batch()
    lease = claim(store)
    if outcome is None:
        store.batches.fail(lease, [LineError("empty_file", "No.")], NOW)
    else:
        admit(store, lease)
        store.batches.begin_finalizing(lease, outcome, NOW)
        assert claimed(store, "new", NOW + 100) == ["batch_1"]  # the files are still to be made
        lease = claim(store, "last", NOW + 200)
        store.batches.finish(lease, outcome, None, None, NOW + 200)
    assert claimed(store, "new", NOW + 1e9) == []


# Everything that is written on behalf of the work.
WRITES: dict[str, Callable[[Store, Lease], object]] = {
    "admit": admit,
    "fail": lambda store, lease: store.batches.fail(lease, [LineError("x", "y")], NOW),
    "note_fault": lambda store, lease: store.batches.note_fault(lease, LineError("x", "y"), 1, NOW),
    "commit": lambda store, lease: store.batches.commit(
        lease, [RowOutcome(2, True, "{}")], NOW + 5
    ),
    "begin_finalizing": lambda store, lease: store.batches.begin_finalizing(
        lease, BatchStatus.EXPIRED, NOW
    ),
    "finish": lambda store, lease: finish(store, lease),
}


def finish(store: Store, lease: Lease) -> None:
    with store.new_file("file-out") as output:
        store.batches.finish(lease, BatchStatus.COMPLETED, output, None, NOW)


def snapshot(store: Store) -> list[object]:
    """All there is."""
    tables = (f"SELECT * FROM {name} ORDER BY 1, 2" for name in ("files", "batches", "rows"))
    return [*map(store.query, tables), store.bodies(), store.unplaced()]


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("new_owner", by_tier(fast=["new"], long=["new", "old"]))
@pytest.mark.parametrize("stage", ["validating", "in_progress", "cancelling", "finalizing"])
def test_a_former_owner_writes_nothing(
    store: Store, write: str, new_owner: str, stage: str
) -> None:
    """Even if it is the same process, which has slept too long."""
    store.put_batch()
    former = claim(store, "old", NOW)
    if stage != "validating":
        admit(store, former)
        store.batches.commit(former, [RowOutcome(1, True, "{}")], None)
    if stage == "cancelling":
        store.batches.cancel("ann", "batch_1", NOW)
    if stage == "finalizing":
        store.batches.begin_finalizing(former, BatchStatus.COMPLETED, NOW)
    claim(store, new_owner, NOW + LEASE_S)
    before = snapshot(store)
    with pytest.raises(LeaseLostError, match="batch_1"):
        WRITES[write](store, former)
    assert snapshot(store) == before


def test_a_lease_of_one_batch_is_none_of_another(store: Store) -> None:
    store.put_batch("batch_1")
    lease = claim(store, "old")
    store.put_batch("batch_2")
    claim(store, "new")
    before = snapshot(store)
    for forged in (Lease("batch_2", "old", lease.epoch), Lease("batch_3", "old", lease.epoch)):
        for write in WRITES.values():
            with pytest.raises(LeaseLostError):
                write(store, forged)
    assert snapshot(store) == before


def test_no_batch_is_given_to_two_owners_at_once(store: Store) -> None:
    for i in range(20):
        store.put_batch(f"batch_{i}")
    start = threading.Barrier(4)

    def run(name: int) -> list[list[tuple[str, int]]]:
        """What this owner got in each round; between rounds all leases run out."""
        rounds = []
        with store.again() as own:
            for number in range(5):
                start.wait()
                got = own.batches.claim(f"runner-{name}", NOW + number * LEASE_S, LEASE_S)
                rounds.append([(lease.batch_id, lease.epoch) for lease, _ in got])
        return rounds

    with ThreadPoolExecutor(4) as threads:
        by_runner = list(threads.map(run, range(4)))
    for number in range(5):
        got = [one for rounds in by_runner for one in rounds[number]]
        assert sorted(got) == sorted((f"batch_{i}", number + 1) for i in range(20))


def test_nothing_is_written_after_another_has_taken_over(store: Store) -> None:
    """The former owner goes on writing while that happens; what the new one sees is final."""
    num_rows = 60
    store.put_batch()
    former = claim(store, "old", NOW)
    admit(store, former, num_rows)
    half_way = threading.Event()

    def write() -> int:
        """How many rows were stored before the lease was lost."""
        with store.again() as own:
            for line in range(1, num_rows + 1):
                try:
                    own.batches.commit(former, [RowOutcome(line, True, "{}")], None)
                except LeaseLostError:
                    return line - 1
                if line == num_rows // 4:
                    half_way.set()
        return num_rows

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        assert half_way.wait(timeout=60)
        claimed: Sequence[tuple[Lease, Batch]] = ()
        while not claimed:  # a row that is being written is passed over
            claimed = store.batches.claim("new", NOW + LEASE_S, LEASE_S)
        ((_, batch),) = claimed
        stored = writing.result()
    assert batch.completed == stored == store.batches.get("ann", "batch_1").completed
    assert len(store.batches.pending("batch_1", -1, 1_000)) == num_rows - stored
