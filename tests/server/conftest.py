"""Servers around a scripted engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from support.scripted_server import LiveServer, Server, live_server


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    async with made.http:
        yield made


@pytest.fixture
async def locked_server() -> AsyncIterator[Server]:
    made = Server(api_key="secret")
    async with made.http:
        yield made


@pytest.fixture
async def live() -> AsyncIterator[LiveServer]:
    async with live_server() as made:
        yield made
