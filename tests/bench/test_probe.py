"""What a server is asked besides the load."""

from __future__ import annotations

import pytest
from aiohttp import web

from bros.bench.probe import Probe
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
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=body, status=status)

    app = web.Application()
    app.router.add_get("/version", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        async with Probe(f"http://127.0.0.1:{runner.addresses[0][1]}/v1", SystemClock()) as probe:
            assert await probe.version() == version
    finally:
        await runner.cleanup()


async def test_a_server_that_does_not_answer_has_no_version() -> None:
    async with Probe("http://127.0.0.1:9", SystemClock()) as probe:
        assert await probe.version() is None
