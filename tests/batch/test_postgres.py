"""PostgreSQL as operators have it: behind a pooler, with frozen peers, and in other encodings."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa

from bros.batch import database as module
from bros.batch.database import FILES, RESPONSES, STORES, open_database
from bros.batch.objects import StoreUnavailableError
from bros.batch.responses import ResponseStatus, ResponseStore
from bros.batch.store import open_store as open_whole_store
from bros.core.errors import ConfigError, TenantLimitError
from bros.core.tenants import TenantLimits
from support.batch_store import NOW, PostgresServer, Store, open_store

from .test_responses import made

pytestmark = pytest.mark.multiprocess

LEASE_S = 10.0
WAIT_S = 10.0


@pytest.fixture
def shared(postgres: PostgresServer, tmp_path: Path) -> Iterator[Store]:
    """A store in PostgreSQL."""
    with open_store(postgres.new_url(), tmp_path) as store:
        yield store


@pytest.fixture
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_TIMEOUTS", "_LONG_TIMEOUTS"):
        timeouts = module._timeouts(lock="1500ms", statement="10s", idle="500ms")
        monkeypatch.setattr(module, name, timeouts)


@pytest.mark.usefixtures("short_timeouts")
def test_a_server_that_stands_still_in_a_transaction_holds_up_no_other(shared: Store) -> None:
    """As one does whose machine is paused. The other one gets its batches in time."""
    for batch_id in ("held", "free"):
        shared.put_batch(batch_id)
    ((lease, _),) = shared.batches.claim("still", NOW, LEASE_S, most=1)
    later = NOW + LEASE_S
    with (
        pytest.raises(StoreUnavailableError, match="idle-in-transaction timeout"),
        shared.database.write(exclusive=True) as still,
    ):
        shared.batches._locked_batch(still, lease)
        with shared.again() as other:
            claimed = [batch.id for _, batch in other.batches.claim("other", later, LEASE_S)]
            assert set(claimed) == {"held", "free"} - {lease.batch_id}, "it waits for no row"
            with other.database.write(exclusive=True):
                pass  # behind the lock of the one that stands still
            ((_, batch),) = other.batches.claim("other", later, LEASE_S)
            assert batch.id == lease.batch_id
        shared.batches._locked_batch(still, lease)


@pytest.mark.usefixtures("short_timeouts")
def test_a_server_that_was_paused_in_a_cleanup_removes_nothing_more(shared: Store) -> None:
    """Another one may have stored the same content meanwhile."""
    content = b"the same"
    shared.put_file(content, file_id="file-old")
    with shared.database.write() as connection:
        connection.execute(sa.delete(FILES))  # its body is unused now
    with shared.again() as other:
        sweep = shared.files.bodies.sweep

        def paused_sweep(used: Callable[[str], bool], check_alive: Callable[[], None]) -> int:
            # This waits for the lock, until PostgreSQL has ended the transaction that has it.
            other.put_file(content, file_id="file-new")
            return sweep(used, check_alive)

        shared.files.bodies.sweep = paused_sweep  # type: ignore[method-assign]
        with pytest.raises(StoreUnavailableError):
            shared.files.sweep(NOW)
        new = other.files.get("ann", "file-new", NOW)
        assert other.files.body(new).read_bytes() == content


@pytest.mark.usefixtures("short_timeouts")
def test_a_lock_is_not_waited_for_for_ever(shared: Store) -> None:
    with (
        shared.again() as other,
        shared.database.write() as holder,
    ):
        holder.exec_driver_sql("SET LOCAL idle_in_transaction_session_timeout = 0")
        holder.exec_driver_sql("LOCK TABLE batches IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(StoreUnavailableError, match="lock timeout") as error:
            other.batches.get("ann", "batch_1")
    assert error.value.for_clients == "The store cannot be used now; the server log has more."


def test_servers_of_one_store_need_the_same_folder(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    """Also before there are files: a failover would lose those that are stored later."""
    url = postgres.new_url()
    for _ in range(2):
        open_whole_store(tmp_path / "one", url).close()
    for _ in range(2):
        with pytest.raises(ConfigError, match="servers that share a store need the same folder"):
            open_whole_store(tmp_path / "other", url)


def test_no_statement_is_prepared(shared: Store) -> None:
    """A pooler gives each transaction another session, which has others of the same names."""
    with shared.database.read() as connection:
        for _ in range(20):
            connection.execute(sa.select(RESPONSES.c.id)).all()
        prepared = connection.exec_driver_sql("SELECT count(*) FROM pg_prepared_statements")
        assert prepared.scalar_one() == 0


@pytest.mark.parametrize(("encoding", "works"), [("SQL_ASCII", True), ("LATIN1", False)])
def test_encodings(postgres: PostgresServer, tmp_path: Path, encoding: str, works: bool) -> None:
    url = postgres.new_url().partition("&options")[0]
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.exec_driver_sql(
            f"CREATE DATABASE {encoding.lower()} ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C' "
            "TEMPLATE template0"
        )
    engine.dispose()
    url = url.replace("/postgres?", f"/{encoding.lower()}?")
    if not works:
        with pytest.raises(ConfigError, match="its encoding is LATIN1"):
            open_database(url, tmp_path)
        return
    with open_store(url, tmp_path) as store, store.database.write() as connection:
        connection.execute(sa.insert(STORES).values(id="日本"))
        assert "日本" in connection.execute(sa.select(STORES.c.id)).scalars().all()


def test_no_more_background_responses_than_allowed_whoever_asks_at_once(shared: Store) -> None:
    limits = TenantLimits(background=5)
    together = threading.Barrier(12)

    def put(number: int) -> bool:
        with shared.again() as own:
            together.wait(WAIT_S)
            response = made(f"r{number}", status=ResponseStatus.QUEUED)
            try:
                ResponseStore(own.database).put(response, limits)
            except TenantLimitError:
                return False
            return True

    with ThreadPoolExecutor(12) as threads:
        assert sum(threads.map(put, range(12))) == 5


def test_responses_that_make_room_and_go_on_at_once_do_not_lock_each_other(shared: Store) -> None:
    limits = TenantLimits(responses=20)

    def put(worker: int) -> None:
        with shared.again() as own:
            store = ResponseStore(own.database)
            previous = None
            for number in range(30):
                response = made(f"r{worker}-{number}", previous, expires_at=NOW + 100 + number)
                store.put(response, limits)
                previous = response.id

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(put, range(6)))
    assert shared.query("SELECT count(*) FROM responses")[0][0] == 20


def test_what_tenants_wrote_is_not_in_errors_and_its_reason_is_logged_once(
    shared: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with shared.database.write() as connection:
        connection.exec_driver_sql(
            "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION 'permission denied' USING ERRCODE = '42501'; END $$; "
            "CREATE TRIGGER refused BEFORE INSERT ON responses EXECUTE FUNCTION refuse()"
        )
    store = ResponseStore(shared.database)
    caplog.set_level(logging.WARNING)
    for _ in range(3):
        with pytest.raises(Exception, match="permission denied") as error:
            store.put(made("one", text="a secret"))
        assert "a secret" not in repr(error.value.__cause__)
        assert "a secret" not in str(error.value.__cause__)
    assert caplog.text.count("permission denied") == 1


def test_a_database_that_became_read_only_is_tried_again(shared: Store) -> None:
    """After a failover the connections of the pool lead to a standby."""
    store = ResponseStore(shared.database)
    with pytest.raises(StoreUnavailableError, match="read-only"), shared.database.write() as held:
        held.exec_driver_sql("SET TRANSACTION READ ONLY")
        held.execute(sa.insert(RESPONSES).values(id="x"))
    store.put(made("one"))
    assert store.get("ann", "one", NOW).id == "one"
