"""Whatever dies and whenever it does: every row is in the results once, and nothing is lost."""

from __future__ import annotations

import contextlib
import json
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from bros.batch.objects import BatchStatus, RowOutcome
from support.batch_store import NOW, PostgresServer, Store, open_store, row_refs
from support.crash import Orders, Site, runs, stop
from support.server_process import wait_until
from support.tier import by_tier, is_long, seed

pytestmark = pytest.mark.multiprocess

KILLS = by_tier(fast=3, long=50)
ROWS = by_tier(fast=48, long=1200)
# Of a process that dies at each transaction: before it is committed, or after. In the fast tier
# one and the other in turn, which begins differently on the two databases.
DEATHS = by_tier(fast=["in turn"], long=["before", "after"])
UNFINISHED = [f"row-{line}" for line in (1, 4, 5, 6, 8, 9, 10, 11, 12)]


@pytest.fixture
def site(store: Store, tmp_path: Path) -> Iterator[Site]:
    with contextlib.closing(Site(store, tmp_path / "log")) as site:
        yield site


def is_committed(site: Site, when: str, number: int) -> bool:
    """Whether the transaction of this number is committed before the process dies."""
    if when == "in turn":
        return (number + (site.store.url is None)) % 2 == 0
    return when == "after"


@pytest.mark.slow
def test_a_job_outlives_the_processes_that_work_on_it(site: Site) -> None:
    """One at a time; each next one comes when the lease of the one before is over."""
    if site.store.url is not None and not is_long():
        pytest.skip("on PostgreSQL of the long tier: runs with --long")
    rng, kills = random.Random(seed(1)), 0
    batch_id = site.submit(ROWS)
    stored: dict[str, str] = {}
    while site.open_batches():
        before = len(site.log())
        orders = Orders(seed=rng.getrandbits(32), row_s=0.4, ahead_s=20.0 * kills)
        # Some are killed before they have begun.
        worker = site.started(orders) if rng.random() < 0.8 else site.start(orders)
        worker.join(timeout=rng.uniform(0.0, 0.6))
        stop(worker, signal.SIGKILL)
        kills += 1
        assert not stored.keys() & runs(site.log()[before:]).keys()
        if site.open_batches():
            now_stored = site.stored()
            assert stored.items() <= now_stored.items()
            stored = now_stored
            assert site.batch(batch_id).completed + site.batch(batch_id).failed == len(stored)
    results = site.results(batch_id)
    assert stored.items() <= results.items()
    times = runs(site.log())
    assert times.keys() == results.keys()
    assert kills >= KILLS
    site.check_nothing_else_is_left()
    print(
        f"{kills} kills, {sum(times.values())} runs of {ROWS} rows, at most {max(times.values())}"
    )


@pytest.mark.slow
def test_several_processes_on_one_store_take_over_from_one_another(site: Site) -> None:
    """Some are killed, others sleep for longer than their lease and then go on as if nothing had
    happened. There is work, and there are kills, until a lease has been taken over."""
    rng, kills, naps = random.Random(seed(2)), 0, 0
    lease_s = by_tier(fast=0.5, long=1.0)

    def started() -> BaseProcess:
        return site.started(Orders(seed=rng.getrandbits(32), row_s=0.4, lease_s=lease_s))

    def takeovers() -> int:
        return sum(max(0, site.num_leases(batch_id) - 1) for batch_id in batches)

    workers = [started() for _ in range(3)]
    batches: list[str] = []
    while kills < KILLS or naps < KILLS / 3 or not takeovers():
        if len(site.open_batches()) < 3:
            batches.append(site.submit(rng.randint(1, 100)))
        which = rng.randrange(3)
        workers[which].join(timeout=rng.uniform(0.0, 0.6))
        if rng.random() < 0.35:
            stop(workers[which], signal.SIGSTOP)
            workers[which].join(timeout=2 * lease_s)
            stop(workers[which], signal.SIGCONT)
            naps += 1
        else:
            stop(workers[which], signal.SIGKILL)
            kills += 1
            workers[which] = started()
    site.wait_until_done()
    times = runs(site.log())
    for batch_id in batches:
        leases = site.num_leases(batch_id)
        assert all(1 <= times[name] <= leases for name in site.results(batch_id))
    site.check_nothing_else_is_left()
    rows = f"{sum(times.values())} runs of {len(times)} rows"
    print(f"{kills} kills, {naps} naps, {takeovers()} leases taken over, {rows}")


@pytest.mark.parametrize("when", DEATHS)
def test_a_crash_at_any_transaction(site: Site, when: str) -> None:
    """From the claim of a batch to its files, one after the other; in the fast tier two of four on
    each database, one before and one after it is committed."""
    number, has_died = 0, True
    skipped = by_tier(fast=(0, 1) if site.store.url is None else (2, 3), long=())
    while has_died:
        number += 1
        if number % 4 in skipped:
            continue
        batch_id = site.submit(12)
        ahead_s = 40.0 * number
        orders = Orders(seed=number, row_s=0.02, ahead_s=ahead_s, max_rows=3, poll_s=5.0)
        doomed = site.start(replace(orders, dies_at=(number, is_committed(site, when, number))))
        while doomed.is_alive() and site.open_batches():
            doomed.join(timeout=0.01)
        has_died = bool(site.open_batches())
        stop(doomed, signal.SIGKILL)
        stored = site.stored()
        heir = site.start(replace(orders, ahead_s=ahead_s + 20.0))
        site.wait_until_done()
        stop(heir, signal.SIGTERM)
        results, times = site.results(batch_id), runs(site.log())
        assert stored.items() <= results.items()
        assert all(1 <= times[name] <= 1 + has_died for name in results)
        site.check_nothing_else_is_left()
    assert number > 6  # claimed, admitted, stored at least twice, finalizing, finished


@pytest.mark.parametrize("when", DEATHS)
def test_a_crash_while_a_batch_is_cancelled(site: Site, when: str) -> None:
    """Whichever process ends it: what was answered stays so, and nothing else is run any more."""
    if site.store.url is not None and not is_long():
        pytest.skip("on PostgreSQL of the long tier: runs with --long")
    store, number, has_died = site.store.batches, 0, True
    while has_died:
        number += 1
        now = NOW + 40.0 * number
        batch_id = site.submit(12)
        ((lease, _),) = store.claim("gone", now, 15.0)
        store.admit(lease, row_refs(12), model="m", tokens=1, max_tokens=10**9, now=now)
        answered = [RowOutcome(line, line != 2, f'{{"line": {line}}}') for line in (7, 2, 3)]
        store.commit(lease, answered, None)
        store.cancel("ann", batch_id, now)
        orders = Orders(seed=1, row_s=0.0, ahead_s=40.0 * number + 15.0, poll_s=5.0)
        doomed = site.start(replace(orders, dies_at=(number, is_committed(site, when, number))))
        while doomed.is_alive() and site.open_batches():
            doomed.join(timeout=0.01)
        has_died = bool(site.open_batches())
        stop(doomed, signal.SIGKILL)
        heir = site.start(replace(orders, ahead_s=orders.ahead_s + 15.0))
        site.wait_until_done()
        stop(heir, signal.SIGTERM)
        batch = site.batch(batch_id)
        assert (batch.status, batch.completed, batch.failed) == (BatchStatus.CANCELLED, 2, 10)
        assert site.lines(batch.output_file_id) == ['{"line": 3}', '{"line": 7}']
        others = [json.loads(line) for line in site.lines(batch.error_file_id)]
        assert others.pop(1) == {"line": 2}
        assert [line["custom_id"] for line in others] == UNFINISHED
        assert {line["error"]["code"] for line in others} == {"batch_cancelled"}
        site.check_nothing_else_is_left()
    assert runs(site.log()) == {}
    # Claimed, finalizing, finished: if it dies after the last, the batch is done.
    assert number >= 3


def test_a_server_that_is_told_to_stop_leaves_its_batches_to_the_next_at_once(site: Site) -> None:
    batch_id = site.submit(200)
    orders = Orders(seed=1, row_s=0.2, lease_s=3600.0)
    first = site.start(orders)
    wait_until(lambda: len(runs(site.log())) > 10, 60, "the first has answered some")
    stop(first, signal.SIGTERM)
    assert first.exitcode == 0
    answered = runs(site.log())
    assert len(site.stored()) == len(answered) < 200  # what was answered is not lost
    second = site.start(replace(orders, seed=2))
    site.wait_until_done()
    stop(second, signal.SIGTERM)
    site.results(batch_id)
    assert set(runs(site.log()).values()) == {1}
    assert site.num_leases(batch_id) == 2
    site.check_nothing_else_is_left()


@pytest.mark.slow
def test_connections_to_the_database_may_break_at_any_time(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """No process dies, so no row is run twice."""
    rng = random.Random(seed(5))
    with (
        open_store(postgres.new_url(), tmp_path) as store,
        contextlib.closing(Site(store, tmp_path / "log")) as site,
    ):
        batch_id = site.submit(ROWS)
        worker = site.started(Orders(seed=5, row_s=0.1))
        for _ in range(KILLS):
            worker.join(timeout=rng.uniform(0.0, 0.2))
            store.query(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE pid != pg_backend_pid() AND backend_type = 'client backend'"
            )
        site.wait_until_done()
        stop(worker, signal.SIGTERM)
        assert set(runs(site.log()).values()) == {1}
        assert runs(site.log()).keys() == site.results(batch_id).keys()
        assert site.num_leases(batch_id) == 1
        site.check_nothing_else_is_left()


def test_servers_whose_clocks_differ_run_no_row_twice(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """The leases are on the clock of the database, which is one for all."""
    with (
        open_store(postgres.new_url(), tmp_path) as store,
        contextlib.closing(Site(store, tmp_path / "log")) as site,
    ):
        batches = [site.submit(20) for _ in range(3)]
        workers = [
            site.started(Orders(seed=number, row_s=0.3, skew_s=skew_s))
            for number, skew_s in enumerate((0.0, 3600.0, -3600.0))
        ]
        site.wait_until_done()
        for worker in workers:
            stop(worker, signal.SIGTERM)
        assert set(runs(site.log()).values()) == {1}
        assert [site.num_leases(batch_id) for batch_id in batches] == [1, 1, 1]
