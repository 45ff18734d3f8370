"""The store is opened, brought to this version, and nothing is stored by halves."""

from __future__ import annotations

import contextlib
import re
import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import parse_qs, quote, urlsplit

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from bros.batch.database import METADATA, NEWEST, STORES, Database, migrate, open_database
from bros.batch.objects import StoreError, StoreFullError, StoreUnavailableError
from bros.core.errors import ConfigError
from support.batch_store import NOW, PostgresServer, Store, full_disk, open_store

from .conftest import NewUrl


def count_files(store: Store) -> object:
    return store.query("SELECT count(*) FROM files")[0][0]


def all_tables(connection: sa.Connection) -> dict[str, sa.Table]:
    found = sa.MetaData()
    found.reflect(connection)
    return dict(found.tables)


def test_migrations_make_exactly_the_tables_of_the_schema(store: Store) -> None:
    """A new store gets its tables without them, an older one by them."""
    with store.database.write() as connection:
        begun = all_tables(connection)
        rows = connection.execute(sa.select(begun["alembic_version"])).all()
        ids = [connection.execute(sa.select(STORES.c.id)).scalar_one()]
        for table in begun.values():
            table.drop(connection)
        migrate(connection)
        assert connection.execute(sa.select(begun["alembic_version"])).all() == rows == [(NEWEST,)]
        assert all_tables(connection).keys() == begun.keys()
        ids.append(connection.execute(sa.select(STORES.c.id)).scalar_one())
        assert ids[0] != ids[1] and all(re.fullmatch("[0-9a-f]{16}", each) for each in ids)
        for made in (METADATA, next(iter(begun.values())).metadata):
            options = {"compare_server_default": True}
            context = MigrationContext.configure(connection, opts=options)
            assert compare_metadata(context, made) == []
        found = sa.inspect(connection)
        for table in METADATA.sorted_tables:
            key = found.get_pk_constraint(table.name)["constrained_columns"]
            assert key == [column.name for column in table.primary_key]


def test_a_new_store_does_not_need_what_migrates_older_ones(tmp_path: Path) -> None:
    """Alembic takes a tenth of the time in which a server starts."""
    program = (
        "import sys; from pathlib import Path; from bros.batch.database import open_database\n"
        "for _ in range(2): open_database(None, Path(sys.argv[1])).close()\n"
        "assert not any(name.partition('.')[0] in ('alembic', 'mako') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True)


def test_tables_of_something_else_are_left_alone(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "jobs.db") as foreign:
        foreign.execute("CREATE TABLE files (name TEXT)")
    with pytest.raises(ConfigError, match="files already exists"):
        open_database(None, tmp_path)
    with sqlite3.connect(tmp_path / "jobs.db") as foreign:
        assert foreign.execute("SELECT name FROM sqlite_master").fetchall() == [("files",)]


def test_a_store_that_is_opened_again_has_what_was_stored(store: Store) -> None:
    file = store.put_file()
    with store.again() as other:
        assert other.files.get("ann", file.id, NOW) == file


def test_a_file_that_was_removed_or_replaced_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, away = tmp_path / "jobs.db", tmp_path / "away.db"
    (tmp_path / "other").mkdir()
    with open_store(None, tmp_path) as store, open_store(None, tmp_path / "other") as other:
        kept = store.put_file()
        foreign = other.put_file(file_id="file-foreign")
        file.rename(away)
        for _ in range(2):
            with pytest.raises(
                StoreUnavailableError, match="^the file of the store was removed or replaced"
            ):
                store.put_file(file_id="file-lost")
        assert not file.exists()  # nothing new was begun in its place
        lost = f"{file} was removed or replaced while it was in use; put the file back, or restart"
        assert caplog.messages == [lost]  # once, and with the path that clients do not get
        shutil.copy(tmp_path / "other" / "jobs.db", file)
        with pytest.raises(StoreUnavailableError, match="the server log has more$"):
            store.files.get("ann", foreign.id, NOW)
        away.replace(file)
        assert store.files.get("ann", kept.id, NOW) == kept
        store.put_file(file_id="file-after")
        assert count_files(store) == 2


def test_many_processes_may_open_a_new_store_at_once(new_url: NewUrl, tmp_path: Path) -> None:
    url, ready = new_url(), threading.Barrier(6)

    def open_and_use(name: int) -> None:
        ready.wait()
        with open_store(url, tmp_path) as store:
            store.put_file(file_id=f"file-{name}")

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(open_and_use, range(6)))
    with open_store(url, tmp_path) as store:
        assert count_files(store) == 6


def make_first_version(store: Store) -> None:
    with store.database.write() as connection:
        connection.execute(sa.text("DROP TABLE responses"))
        for column in ("faults", "reasoning_tokens", "rt_slowdown", "result_bytes"):
            connection.execute(sa.text(f"ALTER TABLE batches DROP COLUMN {column}"))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '0001'"))


def test_a_store_of_the_first_version_is_brought_to_this_one(store: Store) -> None:
    batch = store.put_batch()
    make_first_version(store)
    with store.again() as other:
        assert other.batches.get("ann", batch.id) == batch
        assert other.query("SELECT faults FROM batches") == [(0,)]
        assert other.query("SELECT count(*) FROM responses") == [(0,)]


def test_one_line_of_the_log_says_that_a_store_was_migrated(tmp_path: Path) -> None:
    with open_store(None, tmp_path) as store:
        make_first_version(store)
    program = (
        "import logging, sys; from pathlib import Path; logging.basicConfig(level='INFO')\n"
        "from bros.batch.database import open_database\n"
        "for _ in range(2): open_database(None, Path(sys.argv[1])).close()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stderr == (
        f"INFO:bros.batch.database:the store was migrated from version 0001 to {NEWEST}; "
        "older versions of bros cannot open it any more\n"
    )


def test_a_store_of_a_newer_version_is_refused_and_left_alone(store: Store) -> None:
    store.put_file()
    with store.database.write() as connection:
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(ConfigError, match="--store: .*another version of bros"), store.again():
        pass
    assert store.query("SELECT version_num FROM alembic_version") == [("9999",)]
    assert count_files(store) == 1


def test_the_short_form_of_a_url_is_taken_too(new_url: NewUrl, tmp_path: Path) -> None:
    url = new_url()
    short = None if url is None else re.sub("^postgresql:", "postgres:", url)
    with open_store(short, tmp_path) as store:
        assert count_files(store) == 0


@pytest.mark.multiprocess
def test_of_several_hosts_the_one_that_writes_is_used(
    postgres: PostgresServer, tmp_path: Path
) -> None:
    query = parse_qs(urlsplit(postgres.new_url()).query)
    [folder], [options] = query["host"], query["options"]
    several = f"postgresql://bros@127.0.0.1:1,{quote(folder, safe='')}/postgres?options="
    with open_store(several + quote(options), tmp_path) as store:
        store.put_file()
        assert count_files(store) == 1
    reads_only = quote(f"{options} -cdefault_transaction_read_only=on")
    with pytest.raises(ConfigError, match="session is read-only"):
        open_database(several + reads_only, tmp_path)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "postgresql://"),
        ("mysql://host/name", "postgresql://"),
        ("oracle://host/name", "postgresql://"),
        ("sqlite:////nowhere/at/all.db", "postgresql://"),
        ("postgresql://user@host:port/name", "postgresql://"),
        ("postgresql://user@127.0.0.1:1/name", "cannot be used"),
        ("postgresql://user@/name?host=/nowhere", "cannot be used"),
        (
            "postgresql://user@127.0.0.1:1,127.0.0.2:1/name",
            r"@127\.0\.0\.1:1,127\.0\.0\.2:1/name: ",
        ),
        ("postgresql://user@127.0.0.1:one,127.0.0.2:two/name", "postgresql://"),
    ],
)
def test_a_store_that_cannot_be_reached_is_a_wrong_option(
    tmp_path: Path, url: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=f"^--store: .*{message}") as refused:
        open_database(url, tmp_path)
    assert "\n" not in str(refused.value)


def test_without_its_packages_postgresql_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=r"^--store: .*bros\[postgres\]"):
        open_database("postgresql://user@host/name", tmp_path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").write_bytes(b"This is not a database. " * 100)
    with pytest.raises(ConfigError) as refused:
        open_database(None, tmp_path)
    assert str(refused.value).startswith(f"--store: {tmp_path / 'jobs.db'}: ")
    assert "not a database" in str(refused.value) and "move the file away" in str(refused.value)


def test_a_database_of_something_else_is_refused_with_its_path(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "jobs.db")) as foreign:
        foreign.execute("CREATE TABLE batches (id TEXT)")
    with pytest.raises(ConfigError) as refused:
        open_database(None, tmp_path)
    assert str(tmp_path / "jobs.db") in str(refused.value)
    assert "already exists" in str(refused.value) and "move the file away" in str(refused.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:secret-word@127.0.0.1:1/name", "user"),
        ("postgresql://user@127.0.0.1:1/name?password=secret-word", "user"),
        ("postgresql://user:secret-word@127.0.0.1:1,127.0.0.1:2/name", "user"),
        ("postgresql://user:with@secret/word@127.0.0.1:1/name", "%40"),
    ],
)
def test_a_password_of_the_store_is_not_shown(url: str, shown: str) -> None:
    with pytest.raises(ConfigError) as refused:
        open_database(url, Path())
    assert shown in str(refused.value) and "secret" not in str(refused.value)


def test_a_block_that_raises_stores_nothing(store: Store) -> None:
    with pytest.raises(KeyError), store.database.write() as connection:
        connection.execute(sa.delete(METADATA.tables["files"]))
        connection.execute(sa.text("UPDATE alembic_version SET version_num = '9999'"))
        raise KeyError
    assert store.query("SELECT version_num FROM alembic_version") == [(NEWEST,)]


def test_a_faulty_statement_is_a_store_error_on_one_line(store: Store) -> None:
    with pytest.raises(StoreError) as failed:
        store.query("SELECT * FROM nothing")
    assert "\n" not in str(failed.value)


@pytest.mark.parametrize(
    "statement",
    [
        "SELECT * FROM nothing",
        "SELEKT 1",
        "INSERT INTO stores (id) SELECT id FROM stores",
        "INSERT INTO stores (id) VALUES (NULL)",
    ],
)
def test_what_stays_wrong_is_told_from_what_may_pass(store: Store, statement: str) -> None:
    with pytest.raises(StoreError) as failed, store.database.write() as connection:
        connection.exec_driver_sql(statement)
    assert not isinstance(failed.value, StoreUnavailableError)


def test_a_damaged_database_stays_wrong(tmp_path: Path) -> None:
    with open_store(None, tmp_path) as store:
        store.put_file()
    path = tmp_path / "jobs.db"
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes(len(content) - 100))
    database = Database(sa.create_engine(f"sqlite:///{path}"))
    with pytest.raises(StoreError) as failed, database.read() as connection:
        connection.exec_driver_sql("SELECT * FROM files")
    assert not isinstance(failed.value, StoreUnavailableError)
    database.close()


def test_a_lock_of_somebody_else_may_pass(tmp_path: Path) -> None:
    with open_store(None, tmp_path) as store, store.database.write():
        impatient = Database(
            sa.create_engine(f"sqlite:///{tmp_path / 'jobs.db'}", connect_args={"timeout": 0})
        )
        with pytest.raises(StoreUnavailableError), impatient.write() as connection:
            connection.execute(sa.delete(METADATA.tables["files"]))
        impatient.close()


def test_time_is_the_one_of_the_server_of_the_database_if_it_has_one(store: Store) -> None:
    if store.url is None:
        assert store.batches.time(NOW) == NOW
        return
    ((before,),) = store.query("SELECT extract(epoch FROM clock_timestamp())::float")
    assert isinstance(before, float)
    assert before <= store.batches.time(NOW) < before + 60


def test_a_reader_sees_one_moment(store: Store) -> None:
    count = sa.text("SELECT count(*) FROM files")
    with store.database.read() as connection:
        assert connection.execute(count).scalar_one() == 0
        with store.again() as other:
            other.put_file()
        assert connection.execute(count).scalar_one() == 0
    assert count_files(store) == 1


def test_blocks_that_run_alone_do_not_overlap(store: Store) -> None:
    """What they read is still so when they write."""
    store.put_file(file_id="file-0")
    size = sa.text("SELECT num_bytes FROM files")

    def add_ten(_: int) -> None:
        with store.again() as own:
            for _ in range(10):
                with own.database.write(exclusive=True) as connection:
                    value = connection.execute(size).scalar_one()
                    connection.execute(
                        sa.text("UPDATE files SET num_bytes = :value"), {"value": value + 1}
                    )

    before = store.query("SELECT num_bytes FROM files")[0][0]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(add_ten, range(4)))
    assert store.query("SELECT num_bytes FROM files") == [(before + 40,)]  # type: ignore[operator]


def test_too_few_connections_are_a_store_error(tmp_path: Path) -> None:
    url, pool = f"sqlite:///{tmp_path / 'jobs.db'}", {"pool_size": 1, "max_overflow": 0}
    engine = sa.create_engine(url, pool_timeout=0.01, **pool)  # type: ignore[arg-type]
    database = Database(engine)
    with database.read(), pytest.raises(StoreUnavailableError), database.read():
        pass
    database.close()


def test_reads_of_sqlite_do_not_wait_for_writes(tmp_path: Path) -> None:
    """However many of them wait for the lock."""
    database = open_database(None, tmp_path)
    begun = threading.Barrier(21)

    def write() -> None:
        begun.wait()
        with database.write() as connection:
            connection.execute(sa.text("DELETE FROM files"))

    with ThreadPoolExecutor(20) as threads:
        with database.write():
            writes = [threads.submit(write) for _ in range(20)]
            begun.wait()
            time.sleep(0.2)
            began_s = time.monotonic()
            with database.read() as connection:
                assert connection.execute(sa.text("SELECT count(*) FROM files")).scalar() == 0
            assert time.monotonic() - began_s < 5
        for each in writes:
            each.result()
    database.close()


def test_a_full_database_keeps_nothing_of_a_file(store: Store) -> None:
    with full_disk(store), pytest.raises(StoreFullError):
        store.put_file()
    assert count_files(store) == 0
    assert store.unplaced() == []
    store.files.sweep(NOW)
    assert store.bodies() == set()


ON_POSTGRES = pytest.param("postgres", marks=pytest.mark.multiprocess)


@pytest.mark.parametrize("new_url", [ON_POSTGRES], indirect=True)
def test_a_lost_connection_is_replaced(store: Store) -> None:
    file = store.put_file()
    with store.again() as other:
        other.query(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
            " AND backend_type = 'client backend'"
        )
    assert store.files.get("ann", file.id, NOW) == file


@pytest.mark.parametrize("new_url", [ON_POSTGRES], indirect=True)
@pytest.mark.parametrize(
    ("statement", "may_pass"),
    [
        ("SELECT pg_terminate_backend(pg_backend_pid())", True),
        ("DO $$ BEGIN RAISE 'deadlock' USING ERRCODE = '40P01'; END $$", True),
        ("DO $$ BEGIN RAISE 'too many connections' USING ERRCODE = '53300'; END $$", True),
        ("DO $$ BEGIN RAISE 'canceled' USING ERRCODE = '57014'; END $$", True),
        ("DO $$ BEGIN RAISE 'corrupted' USING ERRCODE = 'XX001'; END $$", False),
        ("DO $$ BEGIN RAISE 'not allowed' USING ERRCODE = '42501'; END $$", False),
    ],
)
def test_what_may_pass_on_postgresql(store: Store, statement: str, may_pass: bool) -> None:
    with pytest.raises(StoreError) as failed, store.database.write() as connection:
        connection.exec_driver_sql(statement)
    assert isinstance(failed.value, StoreUnavailableError) is may_pass


def test_a_server_that_is_not_there_may_come(tmp_path: Path) -> None:
    database = Database(sa.create_engine("postgresql+psycopg://user@/name?host=/nowhere"))
    with pytest.raises(StoreUnavailableError), database.read():
        pass
    database.close()
