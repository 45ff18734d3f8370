"""https by --tls-cert and --tls-key, and the clients that talk to it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.cli.chat import remote_chat
from bros.core.config import ServerConfig
from bros.core.errors import BrosError, ConfigError
from bros.server.serve import load_tls
from support.scripted_server import LiveServer, chunks, live_server

CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate for localhost and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", str(key)]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True)
    return str(cert), str(key)


@contextlib.asynccontextmanager
async def secure_server(
    certificate: tuple[str, str], **config: Any
) -> AsyncIterator[tuple[LiveServer, ssl.SSLContext]]:
    """A server with https, and what its clients trust."""
    cert, key = certificate
    tls = load_tls(ServerConfig(tls_cert=cert, tls_key=key))
    async with live_server(tls=tls, **config) as live:
        yield live, ssl.create_default_context(cafile=cert)


async def test_requests_and_streams_over_https(certificate: tuple[str, str]) -> None:
    async with secure_server(certificate) as (live, trust):
        assert live.url.startswith("https://127.0.0.1:")
        async with live.client(verify=trust) as client:
            assert (await client.post(CHAT, json=BODY)).status_code == 200
            streamed = await client.post(CHAT, json={**BODY, "stream": True})
            assert len(chunks(streamed.text)) > 2


async def test_bros_chat_trusts_what_ssl_cert_file_says(
    certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with secure_server(certificate) as (live, _):
        with pytest.raises(BrosError, match="certificate"):
            async with remote_chat(live.url, None, None):
                pass
        monkeypatch.setenv("SSL_CERT_FILE", certificate[0])
        async with remote_chat(live.url, None, None) as chat:
            said = [piece async for piece in chat.stream(BODY["messages"])]
        assert "".join(said) == "Hello world"


async def test_a_silent_handshake_is_closed(certificate: tuple[str, str]) -> None:
    async with secure_server(certificate, header_timeout=0.1) as (live, _):
        url = httpx.URL(live.url)
        reader, writer = await asyncio.open_connection(url.host, url.port)
        with contextlib.suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), timeout=5) == b""
        writer.close()
        metrics = live.server.state.metrics.render(None, None, None, None).decode()
        assert "bros_http_connections 0.0" in metrics
        assert 'bros_http_connections_closed_total{reason="handshake"} 1.0' in metrics


async def test_silent_handshakes_make_room_for_new_connections(
    certificate: tuple[str, str],
) -> None:
    async with secure_server(certificate, max_connections=3) as (live, trust):
        url = httpx.URL(live.url)
        silent = [await asyncio.open_connection(url.host, url.port) for _ in range(12)]
        async with live.client(verify=trust) as client:
            assert (await client.get("/health")).status_code == 200
        for _, writer in silent:
            writer.close()


async def test_http_on_the_port_of_https_ends_the_connection(certificate: tuple[str, str]) -> None:
    async with secure_server(certificate) as (live, trust):
        async with httpx.AsyncClient() as plain:
            with pytest.raises(httpx.TransportError):
                await plain.get(live.url.replace("https", "http") + "/health")
        async with live.client(verify=trust) as client:
            assert (await client.get("/health")).status_code == 200


def test_files_that_are_no_certificate_are_named(
    tmp_path: Path, certificate: tuple[str, str]
) -> None:
    wrong = tmp_path / "wrong.pem"
    wrong.write_text("no certificate")
    for config in (
        ServerConfig(tls_cert=str(wrong)),
        ServerConfig(tls_cert=certificate[0]),
        ServerConfig(tls_cert=certificate[0], tls_key=str(wrong)),
    ):
        with pytest.raises(ConfigError, match="--tls-cert, --tls-key: they are not a certificate"):
            load_tls(config)
    with pytest.raises(ConfigError, match="--tls-key: needs --tls-cert"):
        load_tls(ServerConfig(tls_key=certificate[1]))


def test_a_file_that_is_missing_is_named(tmp_path: Path, certificate: tuple[str, str]) -> None:
    missing = str(tmp_path / "missing.pem")
    for flag, config in (
        ("--tls-cert", ServerConfig(tls_cert=missing, tls_key=certificate[1])),
        ("--tls-key", ServerConfig(tls_cert=certificate[0], tls_key=missing)),
    ):
        with pytest.raises(ConfigError, match=f"^{flag}: there is no file {missing}$"):
            load_tls(config)
