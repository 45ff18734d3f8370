"""Requests over HTTP whose answers come in pieces, as they come from the network."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import NamedTuple, Protocol, Self

import aiohttp

KEEP_ALIVE_S = 2.0
"""Unused connections are closed after so long: before the server does it, which would break a
request that is just being sent. uvicorn, under most of the servers, waits 5 s."""


class TransportError(Exception):
    """No answer, or no further one: the connection could not be made or broke."""


class Answer(NamedTuple):
    """headers: names in lower case. pieces: the body; raises TransportError if it breaks off."""

    status: int
    headers: Mapping[str, str]
    pieces: AsyncIterator[bytes]


class Http(Protocol):
    """Sends requests."""

    def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AbstractAsyncContextManager[Answer]:
        """Entered when the head of the answer is there; leaving gives up what is still to come.

        Entering raises TransportError.
        """
        ...


class AiohttpHttp:
    """Any number of connections, kept open between requests; no timeout but to connect.

    An asynchronous context manager; usable inside it.
    """

    def __init__(self, connect_timeout_s: float = 30.0) -> None:
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s)
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            cookie_jar=aiohttp.DummyCookieJar(),
            # A gateway that compresses would hold chunks back.
            headers={"accept-encoding": "identity", "user-agent": "bros-bench"},
        )
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._session is not None
        await self._session.close()

    @asynccontextmanager
    async def post(
        self, url: str, body: bytes, headers: Mapping[str, str]
    ) -> AsyncIterator[Answer]:
        assert self._session is not None, "not entered"
        try:
            response = await self._session.post(
                url, data=body, headers=headers, allow_redirects=False
            )
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise TransportError(_describe(error)) from error
        try:
            names = {name.lower(): value for name, value in response.headers.items()}
            yield Answer(response.status, names, _Pieces(response))
        finally:
            response.release()


class _Pieces:
    """The body of a response; each piece is all that has come since the one before."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._content = response.content

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> bytes:
        try:
            piece = await self._content.readany()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise TransportError(_describe(error)) from error
        if not piece:
            raise StopAsyncIteration
        return piece


def _describe(error: Exception) -> str:
    match error:
        case aiohttp.ClientConnectorError():
            return f"cannot connect to {error.host}:{error.port}: {_reason(error.os_error)}"
        case aiohttp.ServerTimeoutError() | asyncio.TimeoutError():
            return "cannot connect: timed out"
        case aiohttp.ServerDisconnectedError():
            return "the server closed the connection without an answer"
        case aiohttp.ClientPayloadError():
            return "the connection broke in the middle of the answer"
        case aiohttp.InvalidURL():
            return f"not an address: {error}"
        case OSError():
            return f"the connection broke: {_reason(error)}"
    return f"{type(error).__name__}: {error}"


def _reason(error: OSError) -> str:
    """In the system's own words; names that are not found have numbers below 0."""
    if error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    return error.strerror or str(error)
