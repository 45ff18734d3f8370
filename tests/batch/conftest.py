"""Every test of a store runs on both databases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.batch_store import PostgresServer, Store, find_postgres, open_store

NewUrl = Callable[[], str | None]


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A server for the whole run."""
    programs = find_postgres()
    if programs is None:
        pytest.skip("PostgreSQL's server programs are not installed")
    server = PostgresServer(programs)
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.multiprocess)])
def new_url(request: pytest.FixtureRequest) -> NewUrl:
    """Makes the value of `--store` for an empty store; None for SQLite."""
    if request.param == "sqlite":
        return lambda: None
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_url


@pytest.fixture
def store(new_url: NewUrl, tmp_path: Path) -> Iterator[Store]:
    """An empty store."""
    with open_store(new_url(), tmp_path) as store:
        yield store
