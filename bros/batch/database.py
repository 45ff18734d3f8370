"""The database of the store, SQLite or PostgreSQL: connection, transactions, tables."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry

from bros.batch.objects import StoreError, StoreFullError, StoreUnavailableError
from bros.core.clock import SystemClock
from bros.core.errors import ConfigError

logger = logging.getLogger(__name__)

_BUSY_S = 30
"""How long a SQLite transaction waits for the lock of another one."""

_LATE_S = 600.0
"""By how much a lease may end later than if it were taken now: another server may have renewed it
while this one waited for the lock, and may have a longer --batch-lease."""

_POSTGRES_SETTINGS: Mapping[str, Any] = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "tcp_user_timeout": 30_000,
    "client_encoding": "utf8",
    # Names of prepared statements belong to a session, and a pooler gives each transaction another.
    "prepare_threshold": None,
}
"""Parameters of a connection. Those that a URL has as well are the URL's."""


def _timeouts(lock: str, statement: str, idle: str) -> str:
    return (
        f"SELECT set_config('lock_timeout', '{lock}', true), "
        f"set_config('statement_timeout', '{statement}', true), "
        f"set_config('idle_in_transaction_session_timeout', '{idle}', true)"
    )


_TIMEOUTS = _timeouts(lock="15s", statement="30s", idle="10s")
"""Sent with each transaction, because a pooler may give it any session. The last one is for servers
that are paused in a transaction, as virtual machines can be: PostgreSQL ends it, and others get the
rows and locks that it holds. A lock is waited for longer than that."""

_LONG_TIMEOUTS = _timeouts(lock="0", statement="0", idle="60s")
"""Of migrations, and of what deletes many files within its transaction."""

_READ_ONLY = "25006"  # SQLSTATE: the server of this connection has become a standby

_ADVISORY_LOCK_KEY = 0x62726F73  # any number, the same in all servers of a store
_ANOTHER_FILE = (
    "bros begins with an empty store if you move the file away or name another folder by --store"
)

_DISK_FULL = "53100"  # PostgreSQL's SQLSTATE

_RETRYABLE_SQLITE_CODES = frozenset(
    {
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_PROTOCOL,  # many processes open it at the same time
        sqlite3.SQLITE_CANTOPEN,  # too many open files
        sqlite3.SQLITE_IOERR,  # also raised for a full disk
        sqlite3.SQLITE_NOMEM,
        sqlite3.SQLITE_INTERRUPT,
    }
)
"""Needed because sqlite3 raises OperationalError also for permanent errors like a missing table."""


_KEPT_FREE_BYTES = 64 * 2**20
_KEPT_FREE_SHARE = 16
"""Of a small disk a 16th is kept free."""


class DiskRoom:
    """Whether a disk has room for what makes a store grow, which is refused when little is left:
    SQLite writes to its log to delete as well, so on a full disk nothing could be deleted.

    is_low: as it was last seen.

        free on the disk       0 .... half ............ 64 MiB ..........
        new things             no     in pages that     yes
                                      deletions have
                                      left
    """

    def __init__(self, folder: Path, name: str) -> None:
        """folder: on the disk. name: of the disk in errors."""
        self._folder = folder
        self._name = name
        self.is_low = False

    def check(self, reusable: Callable[[], int] = lambda: 0) -> None:
        """Look at the disk. Raises StoreFullError if too little is left.

        reusable: bytes within the store's file that hold nothing any more.
        """
        disk = os.statvfs(self._folder)
        free, size = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
        kept = min(_KEPT_FREE_BYTES, size // _KEPT_FREE_SHARE)
        self.is_low = free < kept and (free < kept // 2 or free + reusable() < kept)
        if self.is_low:
            left = f"{free / 2**20:.1f} MiB are left, which deletions need"
            raise StoreFullError(f"the disk of {self._name} is full: {left}")


class Database:
    """Transactions. Made by `open_database`. Every call blocks, so use it from worker threads.

    is_open: whether it has worked, so that the log has to tell what it suffers from.
    """

    is_open = False

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = self._reader = engine
        self._is_sqlite = engine.dialect.name == "sqlite"
        self._file: tuple[int, int] | None = None  # of SQLite, once it exists
        self._is_file_lost = False
        self._clock = SystemClock()
        self._reason, self._said_s = "", float("-inf")
        self._room = None
        if self._is_sqlite:
            self._room = DiskRoom(Path(engine.url.database or "").parent, "the store")
        else:
            # By default each statement of a transaction sees what others have committed by then.
            self._reader = engine.execution_options(
                isolation_level="REPEATABLE READ", postgresql_readonly=True
            )

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A read-only transaction on one snapshot of the data. Raises StoreError."""
        self._check_file()
        with self._translated(), self._reader.connect() as connection, connection.begin():
            self._set_timeouts(connection, _TIMEOUTS)
            yield connection

    @contextlib.contextmanager
    def write(
        self, *, exclusive: bool = False, grows: bool = False, patient: bool = False
    ) -> Iterator[sa.Connection]:
        """A transaction: committed when the block ends, rolled back if it raises.

        exclusive: no other exclusive block runs at the same time, in any process.
        grows: the store has more in it afterwards.
        patient: it may take long, and wait long for other servers.

        Raises StoreFullError, StoreUnavailableError if a retry may succeed, else StoreError.
        """
        self._check_file()
        if grows:
            self.check_room()
        with self._translated(), self._engine.connect() as connection:
            writing = connection.execution_options(writes=True)
            with writing.begin():
                self._set_timeouts(writing, _LONG_TIMEOUTS if patient else _TIMEOUTS)
                if exclusive and not self._is_sqlite:
                    lock = sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK_KEY)
                    writing.execute(sa.select(lock))
                yield writing

    def check_room(self) -> None:
        """Raises StoreFullError if SQLite's disk has no room for more. PostgreSQL knows its own."""
        if self._room is not None:
            self._room.check(self._free_page_bytes)

    def _free_page_bytes(self) -> int:
        """Of SQLite's file: it does not shrink when something is deleted."""
        with self.read() as connection:
            pages = connection.exec_driver_sql("PRAGMA freelist_count").scalar_one()
            return int(pages) * int(connection.exec_driver_sql("PRAGMA page_size").scalar_one())

    @property
    def is_full(self) -> bool:
        """Whether there was no room when it was last looked for."""
        return self._room is not None and self._room.is_low

    def lock_tenant(self, connection: sa.Connection, tenant: str) -> None:
        """Let no other transaction that has called this for the tenant run beside this one. In
        SQLite none does."""
        if not self._is_sqlite:
            key = sa.func.hashtext(tenant)
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_ADVISORY_LOCK_KEY, key)))

    def unlocked(self, connection: sa.Connection, ids: sa.Select[Any]) -> Sequence[str]:
        """What the query for ids of rows to be changed finds; of them without those that other
        transactions change now, for which the caller would have to wait."""
        query = ids if self._is_sqlite else ids.with_for_update(skip_locked=True)
        return connection.execute(query).scalars().all()

    def check_alive(self, connection: sa.Connection) -> None:
        """Raises StoreUnavailableError if the transaction, and its locks, have ended: PostgreSQL
        ends that of a server which was paused."""
        if not self._is_sqlite:
            connection.exec_driver_sql("SELECT 1")

    def _set_timeouts(self, connection: sa.Connection, timeouts: str) -> None:
        if not self._is_sqlite:
            connection.exec_driver_sql(timeouts)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise StoreFullError, StoreUnavailableError or StoreError instead of SQLAlchemy's errors.

        Logs a reason when it is another one than before, and once a minute: clients get the error,
        but what the database says is not for them.
        """
        try:
            with _translate_errors():
                yield
        except StoreError as error:
            now = self._clock.now()
            is_new = str(error) != self._reason or now - self._said_s > _SAY_AGAIN_S
            if self.is_open and is_new:
                self._reason, self._said_s = str(error), now
                logger.warning("%s", error)
            raise

    def time(self, now: float) -> float:
        """Unix seconds: PostgreSQL's clock, so that the clocks of servers that share a database may
        differ; `now` for SQLite, whose file belongs to one machine."""
        if self._is_sqlite:
            return now
        clock = sa.extract("epoch", sa.func.clock_timestamp())
        with self.read() as connection:
            return float(connection.execute(sa.select(clock)).scalar_one())

    def is_free(
        self, lease_until: sa.Column[float], now: float, lease_s: float
    ) -> sa.ColumnElement[bool]:
        """Whether a lease has ended.

        lease_s: how long leases last. In SQLite, where all have the clock of this machine, one that
            ends much later is of a server that died before the clock went back.
        """
        has_ended = lease_until <= now
        if not self._is_sqlite:
            return has_ended
        return has_ended | (lease_until > now + lease_s + _LATE_S)

    def close(self) -> None:
        self._engine.dispose()

    def _check_file(self) -> None:
        """Raises StoreUnavailableError if the file of SQLite is not the one that was opened: SQLite
        would go on with the removed file, and what it stores there is lost. Clients get the error,
        so only the log names the path."""
        if not self._is_sqlite:
            return
        path = Path(self._engine.url.database or "")
        try:
            stat = path.stat()
        except FileNotFoundError:
            found = None
        else:
            found = stat.st_dev, stat.st_ino
        if self._file is None:
            self._file = found
        was_lost, self._is_file_lost = self._is_file_lost, found != self._file
        if self._is_file_lost:
            lost = "was removed or replaced while it was in use"
            if not was_lost:
                logger.error("%s %s; put the file back, or restart", path, lost)
            raise StoreUnavailableError(f"the file of the store {lost}; the server log has more")


_SAY_AGAIN_S = 60.0


def body_folder(folder: Path, store_id: str) -> Path:
    """Where the bodies of files of a store are, in the folder of its server."""
    return folder / "files" / store_id


def open_database(url: str | None, folder: Path) -> Database:
    """The database at a URL (`postgresql://...`), else `jobs.db` in `folder`.

    Creates and migrates the tables. The server that creates them makes the folder of bodies. Raises
    ConfigError if the database cannot be used.
    """
    engine = _engine(url, folder)
    try:
        database = Database(engine)
        with _creation_lock(folder) if url is None else contextlib.nullcontext():
            _bring_to_this_version(database, folder)
        database.is_open = True
        return database
    except (StoreError, StoreFullError) as error:
        place = engine.url.database if url is None else _place(engine.url)
        engine.dispose()
        broken = url is None and type(error) is StoreError
        hint = f"; {_ANOTHER_FILE}" if broken else ""
        raise ConfigError(f"--store: {place}: {error}{hint}") from error


def _engine(url: str | None, folder: Path) -> sa.Engine:
    """Raises ConfigError."""
    if url is None:
        engine = _pooled(f"sqlite:///{folder / 'jobs.db'}")
        _set_up_sqlite(engine)
        return engine
    scheme, _, address = url.partition("://")
    if scheme not in ("postgresql", "postgres"):
        raise ConfigError("--store: give a URL that begins with postgresql://")
    try:
        engine = _pooled(f"postgresql+psycopg://{_hosts_in_query(address)}")
    except ImportError as error:
        raise ConfigError(
            f"--store: PostgreSQL needs more packages; install bros[postgres] ({error})"
        ) from error
    except (sa.exc.ArgumentError, ValueError) as error:  # ValueError: the port is not a number
        raise ConfigError("--store: not a URL such as postgresql://user@host/name") from error
    if re.search("[@/]", engine.url.database or ""):
        raise ConfigError("--store: @ and / of a password are %40 and %2F in a URL")

    def on_error(context: sa.engine.ExceptionContext) -> None:
        if getattr(context.original_exception, "sqlstate", None) == _READ_ONLY:
            context.is_disconnect = True  # the pool connects again, to the server that writes now

    sa.event.listen(engine, "handle_error", on_error)
    return engine


def _hosts_in_query(address: str) -> str:
    """An address with several hosts, which libpq tries in turn, as SQLAlchemy reads it. Only a
    server that writes will do."""
    place = re.split("[/?]", address, maxsplit=1)[0]
    rest = address[len(place) :]
    login, at, hosts = place.rpartition("@")
    if "," not in hosts:
        return address
    path, _, query = rest.partition("?")
    given = [f"host={host}" for host in hosts.split(",")] + ([query] if query else [])
    if "target_session_attrs=" not in query:
        given.append("target_session_attrs=read-write")
    return f"{login}{at}{path or '/'}?{'&'.join(given)}"


def _pooled(url: str) -> sa.Engine:
    # Timeouts, so that a server that does not answer does not block a thread for ever.
    settings: dict[str, Any] = {}
    if not url.startswith("sqlite"):
        given = sa.make_url(url).query
        settings = {name: each for name, each in _POSTGRES_SETTINGS.items() if name not in given}
    return sa.create_engine(
        url,
        pool_size=4,
        # With SQLite as many as there are threads: those that wait for its lock keep no others.
        max_overflow=-1 if url.startswith("sqlite") else 4,
        pool_pre_ping=True,
        connect_args=settings,
        hide_parameters=True,  # they are what tenants have written, and would be in the log
    )


def _place(url: sa.URL) -> str:
    """Where a database is, without any password, which may be in the query as well."""
    shown = url.set(drivername="postgresql", query={})._replace(password=None)
    hosts = url.query.get("host")
    if not isinstance(hosts, tuple):
        return shown.render_as_string()
    return shown.set(host="...").render_as_string().replace("...", ",".join(hosts), 1)


def _set_up_sqlite(engine: sa.Engine) -> None:
    def on_connect(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
        connection.isolation_level = None  # no implicit BEGIN; on_begin sends it
        cursor = connection.cursor()
        cursor.execute(f"PRAGMA busy_timeout = {1000 * _BUSY_S}")
        cursor.execute("PRAGMA journal_mode = WAL")
        cursor.execute("PRAGMA synchronous = FULL")  # commits survive a power failure
        cursor.close()

    def on_begin(connection: sa.Connection) -> None:
        # A writer takes the write lock at once: upgrading a read transaction later can fail.
        writes = connection.get_execution_options().get("writes", False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    sa.event.listen(engine, "connect", on_connect)
    sa.event.listen(engine, "begin", on_begin)


@contextlib.contextmanager
def _creation_lock(folder: Path) -> Iterator[None]:
    """Only one process at a time creates or migrates the database in `folder`. busy_timeout does
    not cover the switch of a new SQLite database to WAL."""
    with (folder / "jobs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path = folder / "jobs.db"
        if not path.exists():  # else it has the permissions that its owner wants
            path.touch(mode=0o600)  # as has what SQLite puts beside it
        yield


_ENCODINGS = ("UTF8", "SQL_ASCII")


def _bring_to_this_version(database: Database, folder: Path) -> None:
    """Create the tables in an empty database, and migrate older ones. Raises StoreError."""
    before: str | None = NEWEST
    with database.write(exclusive=True, patient=True) as connection:
        if connection.dialect.name == "postgresql":
            encoding = connection.exec_driver_sql("SHOW server_encoding").scalar_one()
            if encoding not in _ENCODINGS:
                raise StoreError(
                    f"its encoding is {encoding}, which has no letters for most languages; create "
                    "the database with ENCODING 'UTF8'"
                )
        if not sa.inspect(connection).has_table(_VERSION.name):
            METADATA.create_all(connection, checkfirst=False)
            new_id = sa.text(_NEW_ID[connection.dialect.name])
            connection.execute(sa.insert(STORES).from_select(["id"], sa.select(new_id)))
            store_id = connection.execute(sa.select(STORES.c.id)).scalar_one()
            body_folder(folder, store_id).mkdir(parents=True, mode=0o700)
            _VERSION.create(connection)
            connection.execute(sa.insert(_VERSION).values(version_num=NEWEST))
        else:
            before = connection.execute(sa.select(_VERSION.c.version_num)).scalar()
            if before != NEWEST:
                migrate(connection)
    if before != NEWEST:
        logger.info(
            "the store was migrated from version %s to %s; older versions of bros cannot open it "
            "any more",
            before,
            NEWEST,
        )


def migrate(connection: sa.Connection) -> None:
    """Run the migrations that the database still lacks, all of them in an empty one.

    Raises StoreError if it was made by a newer version of bros.
    """
    # Imported late: most stores are new or of this version, and Alembic takes a tenth of the start
    # of a server. It logs as soon as it is imported.
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import alembic.command
    import alembic.config
    import alembic.util

    config = alembic.config.Config()
    config.set_main_option("script_location", "bros.batch:migrations")
    config.attributes["connection"] = connection
    try:
        alembic.command.upgrade(config, "head")
    except alembic.util.CommandError as error:
        raise StoreError(
            f"it was made by another version of bros, which this one cannot read ({error})"
        ) from error


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    """Raise StoreFullError, StoreUnavailableError or StoreError instead of SQLAlchemy's errors."""
    try:
        yield
    except sa.exc.DBAPIError as error:
        reason = str(error.orig).strip().splitlines()[0] if error.orig else str(error)
        full = getattr(error.orig, "sqlstate", None) == _DISK_FULL or "disk is full" in reason
        if full:
            raise StoreFullError("the disk of the store is full") from error
        kind = StoreUnavailableError if _is_retryable(error) else StoreError
        raise kind(f"the store cannot be used: {reason}", for_clients=_FOR_CLIENTS) from error
    except sa.exc.TimeoutError as error:
        busy = "the store cannot be used: all connections to it are busy"
        raise StoreUnavailableError(busy) from error


_FOR_CLIENTS = "The store cannot be used now; the server log has more."


def _is_retryable(error: sa.exc.DBAPIError) -> bool:
    """Whether the same transaction may succeed later."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None:
        return code & 0xFF in _RETRYABLE_SQLITE_CODES  # the low byte is the primary code
    # PostgreSQL: lost connections, deadlocks, timeouts; a server that starts, stops or is full.
    return error.connection_invalidated or isinstance(error, sa.exc.OperationalError)


# ---- Tables, as the migrations leave them; a test compares the two.


_BIG = sa.BigInteger().with_variant(sa.Integer, "sqlite")  # only INTEGER autoincrements in SQLite

METADATA = sa.MetaData()

NEWEST = "0006"
"""The newest migration, which leaves these tables."""

# Alembic's own table, with one row.
_VERSION = sa.Table(
    "alembic_version",
    sa.MetaData(),
    sa.Column("version_num", sa.String(32), nullable=False),
    sa.PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)

_NEW_ID = {
    "sqlite": "lower(hex(randomblob(8)))",
    "postgresql": "substr(md5(random()::text || clock_timestamp()::text), 1, 16)",
}

# One row: the id of this store.
STORES = sa.Table("stores", METADATA, sa.Column("id", sa.Text, primary_key=True))

# seq: order of creation, for pagination.
FILES = sa.Table(
    "files",
    METADATA,
    sa.Column("seq", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False, index=True),
    sa.Column("num_bytes", _BIG, nullable=False),
    sa.Column("filename", sa.Text, nullable=False),
    sa.Column("purpose", sa.Text, nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_at", _BIG),
)

# served_model: only servers of this model run its rows.
# outcome: the final status, once finalizing has begun.
# enqueued_tokens: what the batch counts for in its tenant's quota.
# lease_*: see Lease; lease_until is a Unix time.
# faults: unexpected failures of the runner since a row was last stored.
# result_bytes: size of the results of its rows, until they are in files.
BATCHES = sa.Table(
    "batches",
    METADATA,
    sa.Column("seq", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("served_model", sa.Text, nullable=False),
    sa.Column("endpoint", sa.Text, nullable=False),
    sa.Column("input_file_id", sa.Text, nullable=False),
    sa.Column("input_digest", sa.Text, nullable=False),
    sa.Column("window", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False, index=True),
    sa.Column("outcome", sa.Text),
    sa.Column("model", sa.Text),
    sa.Column("metadata", sa.Text),
    sa.Column("output_life_s", _BIG),
    sa.Column("errors", sa.Text),
    sa.Column("output_file_id", sa.Text),
    sa.Column("error_file_id", sa.Text),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_at", _BIG, nullable=False),
    sa.Column("in_progress_at", _BIG),
    sa.Column("finalizing_at", _BIG),
    sa.Column("completed_at", _BIG),
    sa.Column("failed_at", _BIG),
    sa.Column("expired_at", _BIG),
    sa.Column("cancelling_at", _BIG),
    sa.Column("cancelled_at", _BIG),
    sa.Column("expected_at", _BIG),
    sa.Column("total", _BIG, nullable=False, server_default="0"),
    sa.Column("completed", _BIG, nullable=False, server_default="0"),
    sa.Column("failed", _BIG, nullable=False, server_default="0"),
    sa.Column("prompt_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("cached_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("output_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("enqueued_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("lease_owner", sa.Text),
    sa.Column("lease_epoch", _BIG, nullable=False, server_default="0"),
    sa.Column("lease_until", sa.Float, nullable=False, server_default="0"),
    sa.Column("faults", _BIG, nullable=False, server_default="0"),
    sa.Column("reasoning_tokens", _BIG, nullable=False, server_default="0"),
    sa.Column("rt_slowdown", sa.Float),
    sa.Column("result_bytes", _BIG, nullable=False, server_default="0"),
)

# Only while a batch is open: finalizing replaces its rows by the result files.
ROWS = sa.Table(
    "rows",
    METADATA,
    sa.Column("batch_id", sa.Text, primary_key=True),
    sa.Column("line", _BIG, primary_key=True, autoincrement=False),
    sa.Column("custom_id", sa.Text, nullable=False),
    sa.Column("offset", _BIG, nullable=False),
    sa.Column("length", _BIG, nullable=False),
    sa.Column("rank", _BIG, nullable=False),
    sa.Column("ok", sa.Boolean),
    sa.Column("result", sa.Text),
    sa.UniqueConstraint("batch_id", "custom_id", name="uq_rows_custom_id"),
    sa.Index("ix_rows_rank", "batch_id", "rank"),
)

# Responses of /v1/responses that are stored or run in the background.
# previous_id: the response whose conversation it continues.
# deadline_at: a background response that has not ended by then fails; a Unix time.
# num_bytes: what it counts for in its tenant's limit.
# input: its own input items; body: the response object; error: why it failed. All are JSON.
# request: the body of the request, as JSON, until a background response has ended.
# lease_*: as in BATCHES.
RESPONSES = sa.Table(
    "responses",
    METADATA,
    sa.Column("seq", _BIG, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("served_model", sa.Text, nullable=False),
    sa.Column("previous_id", sa.Text),
    sa.Column("status", sa.Text, nullable=False, index=True),
    sa.Column("background", sa.Boolean, nullable=False),
    sa.Column("created_at", _BIG, nullable=False),
    sa.Column("expires_at", _BIG, nullable=False, index=True),
    sa.Column("deadline_at", sa.Float),
    sa.Column("num_bytes", _BIG, nullable=False),
    sa.Column("input", sa.Text, nullable=False),
    sa.Column("body", sa.Text, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("request", sa.Text),
    sa.Column("lease_owner", sa.Text),
    sa.Column("lease_epoch", _BIG, nullable=False, server_default="0"),
    sa.Column("lease_until", sa.Float, nullable=False, server_default="0"),
    sa.Index("ix_responses_room", "tenant", "expires_at", "num_bytes"),
)
