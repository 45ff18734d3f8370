"""What a server is asked besides the load."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from bros.bench.running import NoServerError, Probe
from bros.core.clock import SystemClock


@pytest.mark.parametrize(
    ("body", "status", "version"),
    [
        ('{"version": "0.32.0"}', 200, "0.32.0"),
        ('{"version": "0.32.0"}', 404, None),
        ('{"version": 32}', 200, None),
        ('{"name": "x"}', 200, None),
        ('["version"]', 200, None),
        ("0.32.0", 200, None),
    ],
)
async def test_the_version_is_asked_for(body: str, status: int, version: str | None) -> None:
    async with _server("/version", body, status) as url, Probe(url, SystemClock()) as probe:
        assert await probe.version() == version


async def test_a_server_that_does_not_answer_has_no_version() -> None:
    async with Probe("http://127.0.0.1:9", SystemClock()) as probe:
        assert await probe.version() is None


async def test_a_model_that_is_not_there_is_an_error_that_names_those_that_are() -> None:
    async with _server("/v1/models", '{"data": [{"id": "a"}, {"id": "b"}]}') as url:
        async with Probe(url, SystemClock()) as probe:
            assert (await probe.model("b")).name == "b"
            assert (await probe.model()).name == "a"
            with pytest.raises(NoServerError, match="'c'; it serves a, b"):
                await probe.model("c")


async def test_a_server_that_lists_nothing_is_believed_to_have_what_is_wanted() -> None:
    async with _server("/v1/models", '{"data": []}') as url:
        async with Probe(url, SystemClock()) as probe:
            assert (await probe.model("c")).name == "c"
            with pytest.raises(NoServerError, match="any model; it serves nothing"):
                await probe.model()


@contextlib.asynccontextmanager
async def _server(path: str, body: str, status: int = 200) -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    app = web.Application()
    app.router.add_get(path, answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()
