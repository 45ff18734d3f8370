"""Listening and shutting down."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator

import httpx
import pytest

from bros.core.errors import ConfigError
from bros.server.serve import HttpServer, bind, url_of
from support.scripted_server import (
    LiveServer,
    ScriptedEngine,
    Server,
    assert_envelope,
    events,
    live_server,
)

CHAT = "/v1/chat/completions"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_port_zero_gives_the_actual_url(live: LiveServer) -> None:
    assert live.url.startswith("http://127.0.0.1:")
    async with live.client() as client:
        assert (await client.get("/health")).status_code == 200


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with bind("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port: cannot listen on 127\.0\.0\.1:{port}"):
            bind("127.0.0.1", port)


async def test_a_port_that_another_server_listens_at_first_is_the_same_error() -> None:
    with bind("127.0.0.1", 0) as other:
        port = other.getsockname()[1]
        with bind("127.0.0.1", port) as bound:  # neither listens yet
            other.listen()
            server = HttpServer(Server().app, bound)
            with pytest.raises(ConfigError, match=rf"--port: cannot listen on .*:{port}: Addr"):
                await server.run()


def test_a_host_that_is_not_ours_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^--(host|port): "):
        bind("192.0.2.1", 0)


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_ipv6_addresses_are_bracketed() -> None:
    with bind("::1", 0) as bound:
        assert url_of(bound) == f"http://[::1]:{bound.getsockname()[1]}"


def assert_shut_down(response: httpx.Response, stream: bool, engine: ScriptedEngine) -> None:
    """The only open request was ended with the error of a server that stops."""
    if stream:
        assert response.status_code == 200
        error = json.loads(events(response.text)[-1])["error"]
    else:
        error = assert_envelope(response, 503)
    assert error["code"] == "server_shutting_down"
    assert engine.aborted == [engine.submitted[0].request_id]


async def interrupt_twice(caplog: pytest.LogCaptureFixture) -> None:
    """The second SIGINT comes once the first one is logged."""
    signal.raise_signal(signal.SIGINT)
    while not caplog.messages:
        await asyncio.sleep(0.01)
    signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("stream", [False, True])
async def test_open_requests_are_told_when_the_server_stops(stream: bool) -> None:
    async with (
        live_server(drain_timeout=0.05) as live,
        live.client() as client,
    ):
        engine = live.server.engine
        engine.hold_after = 2
        request = asyncio.ensure_future(client.post(CHAT, json={**BODY, "stream": stream}))
        await engine.holding.wait()
        live.http.stop()
        response = await request
        await live.running
    assert_shut_down(response, stream, engine)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_second_sigint_ends_open_requests_like_the_drain_timeout(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        live_server(drain_timeout=30) as live,
        live.client() as client,
    ):
        engine = live.server.engine
        engine.hold_after = 2
        request = asyncio.ensure_future(client.post(CHAT, json={**BODY, "stream": stream}))
        await engine.holding.wait()
        await interrupt_twice(caplog)
        async with asyncio.timeout(5):
            response = await request
            await live.running
    assert_shut_down(response, stream, engine)


async def test_a_second_sigint_does_not_wait_for_a_client_that_still_sends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with live_server(drain_timeout=30) as live:
        _, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(live.url).port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        await asyncio.sleep(0.2)  # until the server has its headers
        await interrupt_twice(caplog)
        async with asyncio.timeout(5):
            await live.running
        writer.close()


async def test_requests_that_end_in_time_end_well(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        live_server(drain_timeout=30) as live,
        live.client() as client,
    ):
        engine = live.server.engine
        engine.hold_after = 2
        request = asyncio.ensure_future(client.post(CHAT, json={**BODY, "stream": True}))
        await engine.holding.wait()
        live.http.stop()
        while not caplog.messages:
            await asyncio.sleep(0.01)
        assert caplog.messages == [
            "waiting up to 30 s for 1 open request; Ctrl-C again ends at once"
        ]
        engine.go_on.set()
        text = (await request).text
        await live.running
    assert events(text)[-1] == "[DONE]"
    assert engine.aborted == []


@pytest.fixture
def sighup(request: pytest.FixtureRequest) -> Iterator[None]:
    """What SIGHUP does, which depends on how the tests were started."""
    before = signal.signal(signal.SIGHUP, request.param)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("sighup", [signal.SIG_DFL], indirect=True)
async def test_a_stop_signal_drains_and_returns(number: signal.Signals, sighup: None) -> None:
    async with live_server() as live:
        signal.raise_signal(number)
        await live.running
    assert signal.getsignal(number) is signal.SIG_DFL


@pytest.mark.parametrize("sighup", [signal.SIG_IGN], indirect=True)
async def test_a_server_under_nohup_outlives_its_terminal(sighup: None) -> None:
    async with live_server() as live, live.client() as client:
        signal.raise_signal(signal.SIGHUP)
        assert (await client.get("/health")).status_code == 200
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
