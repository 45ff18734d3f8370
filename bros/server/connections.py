"""Connections: how many there may be, and how long a client may take to send and to read.

uvicorn has a time limit for idle connections only, and none of asyncio's servers survives a lack of
descriptors quietly. So connections are accepted here, and uvicorn's protocol is told what it lacks:

    accept ─▶ HEADERS ─▶ BODY ─▶ RESPONSE ─▶ IDLE ─▶ HEADERS ...
              waits ............ in use ...  waits

A connection that waits has no request of its client in progress. When there are too many
connections, a new one takes the place of the one that has waited longest. Only when all of them are
in use is a new one refused. A response in progress is never cut, however long it takes, unless its
client reads nothing at all, or less than _MIN_READ_RATE of what waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import httptools
import uvicorn
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from bros.core.clock import Clock
from bros.core.config import ServerConfig
from bros.server.errors import INVALID_REQUEST, SERVER_ERROR, ApiError
from bros.server.turns import SpreadCalls

try:
    import resource
except ImportError:  # as on Windows, which has no such limit
    resource = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

_BACKLOG = 2048
_RETRY_AFTER_S = 2
_CLOSING_S, _ACCEPT_RETRY_S = 0.01, 0.2
"""Pauses without descriptors, if a connection is being closed for the next one and if not."""

_LINGER_S = 1.0
"""A connection stays open for this long after an error, unless its client closes it: closing one
whose client still sends would destroy the answer."""

_TLS_SHUTDOWN_S = 5.0

_MIN_BODY_RATE = 1024
"""Bytes per second that the body of a request must have on average."""

_READ_STALL_S = 300.0
"""How long a client may read nothing while bytes wait for it."""

_READ_WINDOW_S = 300.0
_MIN_READ_RATE = 1024
"""Bytes per second that a client must read on average in each such window, of the time in which it
has not kept up. The window is long because the kernel's buffers empty in large steps."""

_MAX_HEADER_BYTES = 65536
_MAX_HEADERS = 128

_MAX_PIPELINED = 8
"""Most requests that may wait for the response to the one before them. A read of 256 KiB can hold
7,000, each of which would take memory and time of the event loop before any is answered."""

_FREE_CHUNKS, _BYTES_PER_CHUNK = 4096, 16
"""A body may arrive in so many chunks, and in one more for each so many bytes: a chunk costs the
event loop as much as some hundred bytes."""

_LOG_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of a server's connections.

    total: most open connections.
    per_address: most from one address, or from one network of 64 bits with IPv6.
    limits_own: whether `per_address` also holds for connections from this machine.
    header_s: seconds for a request's headers, from its first byte or the beginning of a connection.
    body_s: seconds in which a body must be complete, or bring body_s * _MIN_BODY_RATE bytes.
    """

    total: int = 2048
    per_address: int = 1024
    limits_own: bool = False
    header_s: float = 15.0
    body_s: float = 30.0

    @classmethod
    def of(cls, config: ServerConfig) -> ConnectionLimits:
        """Those of a server, as far as the process has descriptors for them. Call it when the
        server has opened its files."""
        total = min(config.max_connections, _free_descriptors())
        if total < config.max_connections:
            logger.warning(
                "at most %d connections instead of --max-connections %d: the process may have no "
                "more descriptors (ulimit -n)",
                total,
                config.max_connections,
            )
        given = config.max_connections_per_address
        return cls(
            total=total,
            per_address=given or max(total // 2, 1),
            limits_own=given is not None,
            header_s=config.header_timeout,
            body_s=config.body_timeout,
        )


_MIN_CONNECTIONS = 8
_UNLIMITED = 2**20


def _free_descriptors() -> int:
    """Descriptors that connections may take; some stay free for files, engines and batches."""
    if resource is None:
        return _UNLIMITED
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _UNLIMITED
    try:
        used = len(os.listdir("/dev/fd"))
    except OSError:
        used = 64
    return max(soft - used - max(soft // 8, 32), _MIN_CONNECTIONS)


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as it may."""
    if resource is None:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses what it reports as unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Closed(Enum):
    """Why the server has closed or refused a connection before its client did."""

    TOO_MANY = "too_many"
    TOO_MANY_OF_ADDRESS = "too_many_of_address"
    REPLACED = "replaced"
    HANDSHAKE = "handshake"
    HEADER_TIMEOUT = "header_timeout"
    BODY_TIMEOUT = "body_timeout"
    READ_TIMEOUT = "read_timeout"
    PIPELINE = "pipeline"
    INVALID = "invalid"


class Connections:
    """All connections of one server."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: uvicorn.Config,
        state: ServerState,
        clock: Clock,
        count: Callable[[str], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """state: uvicorn's. count: called with the reason of each connection closed early."""
        self.limits = limits
        self.spread = SpreadCalls()
        self._config = config
        self._state = state
        self._clock = clock
        self._count = count
        self._tls = tls
        self._open: dict[Connection, None] = {}
        self._by_address: Counter[str] = Counter()
        self._waiting: dict[Connection, None] = {}  # since the longest time first
        self._lingering: dict[socket.socket, asyncio.TimerHandle] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._checking: asyncio.Task[None] | None = None
        self._unlogged: Counter[str] = Counter()
        self._next_log_s = float("-inf")

    def __len__(self) -> int:
        return len(self._open)

    @property
    def has_tls(self) -> bool:
        return self._tls is not None

    def listen(self, bound: socket.socket) -> None:
        """Accept connections until `stop_accepting`."""
        bound.setblocking(False)
        bound.listen(_BACKLOG)
        self._accepting = asyncio.create_task(self._accept(bound), name="accept")
        self._checking = asyncio.create_task(self._check(), name="connections")

    async def stop_accepting(self) -> None:
        """The limits still hold for the connections that are open."""
        await _cancelled(self._accepting)
        for connection in [each for each in self._open if each.handshake is not None]:
            connection.end()
        for refused in list(self._lingering):
            self._stop_lingering(refused)

    async def close(self) -> None:
        """Call it when the last connection has been closed."""
        await _cancelled(self._checking)

    # ---- What connections report.

    def waits(self, connection: Connection, *, waits: bool) -> None:
        """A connection has no request in progress, or has one again."""
        if waits:
            self._waiting[connection] = None
        else:
            self._waiting.pop(connection, None)

    def remove(self, connection: Connection) -> None:
        """A connection has been closed. Repeated calls do nothing."""
        if connection not in self._open:
            return
        del self._open[connection]
        self._waiting.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def note(self, why: Closed) -> None:
        """Count a connection that the server closes early, and log a summary now and then: a line
        per connection would let clients fill a disk."""
        self._count(why.value)
        self._log(why.value)

    def _log(self, what: str) -> None:
        self._unlogged[what] += 1
        now = self._clock.now()
        if now < self._next_log_s:
            return
        self._next_log_s = now + _LOG_EVERY_S
        counts = ", ".join(f"{count} {name}" for name, count in self._unlogged.items())
        self._unlogged.clear()
        logger.warning(
            "connections closed or refused since the last such line: %s (%d open, at most %d)",
            counts,
            len(self._open),
            self.limits.total,
        )

    # ---- Accepting.

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, address = await loop.sock_accept(bound)
            except OSError as error:
                if error.errno in _NO_RESOURCES:
                    self._log(f"not accepted ({error.strerror})")
                    await asyncio.sleep(_CLOSING_S if self._replace(None) else _ACCEPT_RETRY_S)
                continue  # else the client has left again
            try:
                self._admit(accepted, _network(address))
            except OSError:
                accepted.close()
            await asyncio.sleep(0)  # a flood of connections must not keep other tasks from running

    def _admit(self, accepted: socket.socket, address: str) -> None:
        limits = self.limits
        limited = limits.limits_own or address != _OWN
        if limited and self._by_address[address] >= limits.per_address:
            if not self._replace(address):
                self._refuse(accepted, Closed.TOO_MANY_OF_ADDRESS)
                return
        elif len(self._open) >= limits.total and not self._replace(None):
            self._refuse(accepted, Closed.TOO_MANY)
            return
        connection = Connection(self._config, self._state, self, address)
        self._open[connection] = None
        self._by_address[address] += 1
        self._waiting[connection] = None
        connection.handshake = asyncio.create_task(self._connect(connection, accepted))
        connection.handshake.add_done_callback(
            lambda task: self._connected(connection, accepted, task)
        )

    async def _connect(self, connection: Connection, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        if self._tls is None:
            await loop.connect_accepted_socket(lambda: connection, accepted)
            return
        await loop.connect_accepted_socket(
            lambda: connection,
            accepted,
            ssl=self._tls,
            ssl_handshake_timeout=self.limits.header_s,
            ssl_shutdown_timeout=_TLS_SHUTDOWN_S,
        )

    def _connected(
        self, connection: Connection, accepted: socket.socket, task: asyncio.Task[None]
    ) -> None:
        connection.handshake = None
        if connection.transport is None:  # the handshake has failed, or was cancelled
            self.remove(connection)
            accepted.close()
            if not task.cancelled():
                self.note(Closed.HANDSHAKE)
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, OSError):
            logger.error("a connection failed", exc_info=error)

    def _replace(self, address: str | None) -> bool:
        """End the connection that has waited longest, of an address or of any; whether one has."""
        for connection in self._waiting:
            replaceable = connection.unsent == 0 and not connection.has_unread_request
            if replaceable and address in (None, connection.address):
                self.note(Closed.REPLACED)
                connection.end()
                return True
        return False

    def _refuse(self, accepted: socket.socket, why: Closed) -> None:
        self.note(why)
        # The answer needs some time to arrive, see _LINGER_S, for which descriptors are scarce.
        if self._tls is not None or len(self._lingering) > self.limits.total // 8:
            accepted.close()
            return
        with contextlib.suppress(OSError):
            accepted.send(_BUSY[why])
            accepted.shutdown(socket.SHUT_WR)
        loop = asyncio.get_running_loop()
        self._lingering[accepted] = loop.call_later(_LINGER_S, self._stop_lingering, accepted)

    def _stop_lingering(self, refused: socket.socket) -> None:
        self._lingering.pop(refused).cancel()
        refused.close()

    async def _check(self) -> None:
        limits = self.limits
        every_s = min(limits.header_s, limits.body_s, 4.0) / 4
        while True:
            await asyncio.sleep(every_s)
            for connection in list(self._open):
                connection.check(every_s)


async def _cancelled(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


_NO_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

_OWN = "this machine"


def _network(address: tuple[Any, ...]) -> str:
    """What connections are counted by: an IPv4 address, the first 64 bits of an IPv6 address, of
    which one client has all the others, or _OWN."""
    if address[0] == "127.0.0.1":
        return _OWN
    ip = ipaddress.ip_address(address[0])
    if isinstance(ip, ipaddress.IPv6Address):
        ip = ip.ipv4_mapped or ip
    if ip.is_loopback:
        return _OWN
    if isinstance(ip, ipaddress.IPv4Address):
        return str(ip)
    return str(ipaddress.IPv6Address(int(ip) >> 64 << 64))


def _answer(status: str, error: ApiError) -> bytes:
    """A whole response that ends its connection."""
    body = error.to_json().encode()
    lines = [
        f"HTTP/1.1 {status}",
        "content-type: application/json",
        f"content-length: {len(body)}",
        "connection: close",
        *(f"{name}: {value}" for name, value in error.headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body


def _busy(message: str, code: str) -> bytes:
    error = ApiError(
        status=503,
        message=message,
        type=SERVER_ERROR,
        code=code,
        headers={"retry-after": str(_RETRY_AFTER_S)},
    )
    return _answer("503 Service Unavailable", error)


_BUSY = {
    Closed.TOO_MANY: _busy("The server has too many connections.", "too_many_connections"),
    Closed.TOO_MANY_OF_ADDRESS: _busy(
        "The server has too many connections from your address.", "too_many_connections"
    ),
}


def _invalid(status: str, message: str, code: str) -> bytes:
    number = int(status.split()[0])
    return _answer(
        status, ApiError(status=number, message=message, type=INVALID_REQUEST, code=code)
    )


_TIMEOUT = "408 Request Timeout"


class _Stage(Enum):
    HEADERS = auto()
    BODY = auto()
    RESPONSE = auto()
    IDLE = auto()
    CLOSING = auto()


class _InvalidRequest(Exception):
    """What is wrong with the headers of a request."""


class _HeadersTooLarge(Exception):
    """The headers of a request have more than _MAX_HEADER_BYTES."""


class _PipelineFull(Exception):
    """_MAX_PIPELINED requests wait already."""


class Connection(HttpToolsProtocol):
    """One connection: uvicorn's protocol with limits.

    address: what it is counted by.
    handshake: accepts it, with the handshake of TLS; None afterwards.
    """

    def __init__(
        self, config: uvicorn.Config, state: ServerState, connections: Connections, address: str
    ) -> None:
        super().__init__(config, state, {}, asyncio.get_running_loop())
        self.address = address
        self.handshake: asyncio.Task[None] | None = None
        self._connections = connections
        self._limits = connections.limits
        self._stage = _Stage.HEADERS
        self._waited_s = 0.0  # since the stage began; a body waits only while the server reads
        self._received = 0
        # What was read, until its turn. Reading is paused then, unless flow control resumes it.
        self._unparsed: list[bytes] = []
        self._undigested = 0  # bytes since headers, a part of a body or the end of a request
        self._parts: list[bytes] = []  # of a body, in one read
        self._plain_head = b""  # of a request with a body whose upgrade is ignored
        self._chunk_allowance = 0
        self._is_last = False  # whether what else arrives is dropped
        self._unsent = 0  # at the last check
        self._stalled_s = 0.0
        # Since the beginning of the window: for how long writing was paused, and what was read
        # meanwhile. While it is paused nothing is written.
        self._slow_s = 0.0
        self._slow_bytes = 0
        self._unsent_when_paused = 0

    def end(self) -> None:
        """Close it at once."""
        if self.transport is not None:
            self.transport.abort()
        elif self.handshake is not None:
            self.handshake.cancel()
        self._connections.remove(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    # ---- Time limits.

    @property
    def unsent(self) -> int:
        """Bytes that its client has not read yet, apart from those in the kernel's buffers."""
        return 0 if self.transport is None else self.transport.get_write_buffer_size()

    @property
    def has_unread_request(self) -> bool:
        """Whether the first part of a request has arrived and waits for its turn."""
        return bool(self._unparsed) and not self._received

    def check(self, elapsed_s: float) -> None:
        """Apply the time limits. elapsed_s: since the last call."""
        if self.transport is None:
            return  # a TLS handshake has its own time limit
        unsent = self.unsent
        self._stalled_s = self._stalled_s + elapsed_s if 0 < self._unsent <= unsent else 0.0
        self._unsent = unsent
        if self._stalled_s >= _READ_STALL_S or self._reads_too_slowly(elapsed_s):
            self._connections.note(Closed.READ_TIMEOUT)
            self.transport.abort()
        elif self._stage is _Stage.CLOSING:
            self._waited_s += elapsed_s
            if self._waited_s >= _LINGER_S:
                self.transport.abort()
        elif self._unparsed:
            return  # it is the server that makes it wait
        elif self._stage is _Stage.HEADERS:
            self._waited_s += elapsed_s
            if self._waited_s >= self._limits.header_s:
                self._on_header_timeout()
        elif self._stage is _Stage.BODY and not self.flow.read_paused:
            self._waited_s += elapsed_s
            if self._waited_s >= self._limits.body_s:
                self._on_body_window()

    def pause_writing(self) -> None:
        self._unsent_when_paused = self.unsent
        super().pause_writing()

    def resume_writing(self) -> None:
        if self.flow.write_paused:
            self._count_slow_bytes()
            self._unsent = 0  # it has read, even if as much waits again at the next check
        super().resume_writing()

    def _count_slow_bytes(self) -> None:
        unsent = self.unsent
        self._slow_bytes += max(0, self._unsent_when_paused - unsent)
        self._unsent_when_paused = unsent

    def _reads_too_slowly(self, elapsed_s: float) -> bool:
        if not self.flow.write_paused:
            return False
        self._slow_s += elapsed_s
        if self._slow_s < _READ_WINDOW_S:
            return False
        self._count_slow_bytes()
        is_slow = self._slow_bytes < _MIN_READ_RATE * self._slow_s
        self._slow_s, self._slow_bytes = 0.0, 0
        return is_slow

    def _on_header_timeout(self) -> None:
        if not self._received:  # browsers open connections in advance
            self._connections.note(Closed.HEADER_TIMEOUT)
            self.transport.abort()
            return
        message = f"The headers did not arrive within {self._limits.header_s:g} seconds."
        self._fail(Closed.HEADER_TIMEOUT, _invalid(_TIMEOUT, message, "request_timeout"))

    def _on_body_window(self) -> None:
        # A body that has already been refused gets no second window.
        enough = self._received >= self._limits.body_s * _MIN_BODY_RATE
        if enough and not self.cycle.response_complete:
            self._waited_s, self._received = 0.0, 0
            return
        message = (
            f"The body arrived too slowly: {self._received} byte"
            f"{'' if self._received == 1 else 's'} in {self._limits.body_s:g} seconds."
        )
        self._fail(Closed.BODY_TIMEOUT, _invalid(_TIMEOUT, message, "request_timeout"))

    def _enter(self, stage: _Stage) -> None:
        self._stage = stage
        self._waited_s, self._received = 0.0, 0

    # ---- What arrives.

    def data_received(self, data: bytes) -> None:
        """Parse it, in a later turn of the event loop if many clients have sent something in this
        one: 1,200 small requests that are parsed in one turn take 50 ms."""
        if self._stage is _Stage.IDLE:  # its time limits end now, however long that takes
            self._unset_keepalive_if_required()
            self._enter(_Stage.HEADERS)
        self._unparsed.append(data)
        if len(self._unparsed) == 1:
            self._connections.spread.make(self.address, self._parse_unparsed)
        if self._unparsed:
            self.transport.pause_reading()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Close the connection, in a later turn if many clients have closed theirs in this one."""
        if self._connections.has_tls:
            return None  # with TLS it is closed at once
        self._connections.spread.make(self.address, self.transport.close)
        return True

    def _parse_unparsed(self) -> None:
        parts = self._unparsed
        self._unparsed = []
        for data in parts:
            if self.transport.is_closing():
                return
            try:
                self._parse(data)
            except BaseException:
                self.transport.abort()  # as the event loop does if it calls data_received itself
                raise
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _parse(self, data: bytes) -> None:
        if self._stage is _Stage.CLOSING or self._is_last:
            return
        if self._stage is _Stage.IDLE:  # a request behind another one that has been answered
            self._unset_keepalive_if_required()
            self._enter(_Stage.HEADERS)
        self._undigested += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._plain_head:  # the parser leaves the body of a request that asks for an upgrade
                head, self._plain_head = self._plain_head, b""
                self._undigested = 0
                self._parse(head + data[upgrade.args[0] :])
                return
            self.cycle.keep_alive = False  # the request is answered without the upgrade
        except httptools.HttpParserError as error:
            if isinstance(error.__context__, _HeadersTooLarge):
                self._fail_too_large()
                return
            if isinstance(error.__context__, _PipelineFull):
                self._end_after_pipeline()
                return
            reason = error.__context__ if isinstance(error.__context__, _InvalidRequest) else error
            message = f"Invalid HTTP request: {reason}."
            self._fail(
                Closed.INVALID, _invalid("400 Bad Request", message[:300], "invalid_http_request")
            )
            return
        self._hand_over()
        if self._stage is _Stage.HEADERS:
            self._received += len(data)
        if self._undigested > _MAX_HEADER_BYTES:
            self._fail_too_large()

    def _end_after_pipeline(self) -> None:
        """Close the connection after the responses to the requests that wait; the last one says so.
        The client has to send the others again."""
        self._connections.note(Closed.PIPELINE)
        self._is_last = True
        self.cycle.keep_alive = False

    def _fail_too_large(self) -> None:
        message = f"The headers are longer than {_MAX_HEADER_BYTES} bytes."
        status = "431 Request Header Fields Too Large"
        self._fail(Closed.INVALID, _invalid(status, message, "headers_too_large"))

    def _fail(self, why: Closed, answer: bytes) -> None:
        """Answer, unless a response is in progress, and close the connection."""
        if self.transport.is_closing() or self._stage is _Stage.CLOSING:
            return
        self._connections.note(why)
        cycle = self.cycle
        answering = cycle is not None and cycle.response_started and not cycle.response_complete
        if answering or self.pipeline or self._stage is _Stage.RESPONSE:
            self.transport.abort()
            return
        if self._stage is _Stage.BODY:
            cycle.disconnected = True  # the application's own answer is dropped
            cycle.message_event.set()
        self.transport.write(answer)
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._enter(_Stage.CLOSING)
            self._connections.waits(self, waits=True)
        else:
            self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self.headers) >= _MAX_HEADERS:
            raise _InvalidRequest(f"it has more than {_MAX_HEADERS} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= _MAX_PIPELINED:
            raise _PipelineFull
        # What arrives in one read, with a body behind it, is measured here.
        if len(self.url) + sum(map(_line_bytes, self.headers)) > _MAX_HEADER_BYTES:
            raise _HeadersTooLarge
        version = self.parser.get_http_version()
        _check_framing(self.headers, version, self.url)
        upgrades = self.parser.should_upgrade() and _names_upgrade(self.headers)  # else CONNECT
        if upgrades and _has_body(self.headers):
            start = b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version.encode())
            self._plain_head = _head(start, _without_upgrade(self.headers))
            return
        super().on_headers_complete()
        self._connections.waits(self, waits=False)
        self._enter(_Stage.BODY)
        self._undigested = 0
        self._chunk_allowance = _FREE_CHUNKS * _BYTES_PER_CHUNK

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        """Answer a request. Clients of HTTP/1.0 know no chunks."""
        if cycle.scope["http_version"] == "1.0":
            app = _without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._received += len(body)
        self._undigested = 0
        self._chunk_allowance += len(body) - _BYTES_PER_CHUNK
        if self._chunk_allowance < 0:
            raise _InvalidRequest(
                f"its body has more than {_FREE_CHUNKS} chunks, and more than one in "
                f"{_BYTES_PER_CHUNK} bytes"
            )
        self._parts.append(body)

    def _hand_over(self) -> None:
        """Give the application what has arrived of a body: once per read, not per chunk."""
        if self._parts:
            super().on_body(b"".join(self._parts))
            self._parts.clear()

    def on_message_complete(self) -> None:
        if self._plain_head:  # it begins again
            return
        self._undigested = 0
        self._hand_over()
        super().on_message_complete()
        if self._stage is _Stage.BODY:
            self._enter(_Stage.RESPONSE)
            if self.cycle.response_complete:
                self._wait()

    def on_response_complete(self) -> None:
        last = not self.pipeline
        super().on_response_complete()
        if self.pipeline:
            self.flow.pause_reading()  # until the last of them has begun
        if last and self._stage is _Stage.RESPONSE:
            self._wait()

    def _wait(self) -> None:
        self._enter(_Stage.IDLE)
        self._connections.waits(self, waits=True)


def _without_chunks(app: ASGI3Application, cycle: RequestResponseCycle) -> ASGI3Application:
    """The application, whose bodies without a Content-Length end with the connection, which uvicorn
    closes after each response of HTTP/1.0."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        is_endless = False

        async def send_plain(message: Any) -> None:
            nonlocal is_endless
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                is_endless = b"content-length" not in names
                if is_endless:
                    cycle.chunked_encoding = False
            elif is_endless:  # uvicorn counts down to 0 at the end
                more = message.get("more_body", False)
                cycle.expected_content_length = len(message.get("body", b"")) + more
            await send(message)

        await app(scope, receive, send_plain)

    return answer


def _names_upgrade(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(name == b"upgrade" for name, _ in headers)


def _has_body(headers: list[tuple[bytes, bytes]]) -> bool:
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value.strip(b"0"))
        for name, value in headers
    )


def _without_upgrade(headers: list[tuple[bytes, bytes]]) -> Iterator[tuple[bytes, bytes]]:
    """The headers of the request without the upgrade, such as that of Java's client to HTTP/2."""
    for name, value in headers:
        if name == b"connection":
            options = (option.strip() for option in value.split(b","))
            yield name, b", ".join(o for o in options if o.lower() not in _UPGRADE_OPTIONS)
        elif name not in _UPGRADE_OPTIONS:
            yield name, value


def _head(start: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    lines = (b"%b: %b\r\n" % header for header in headers)
    return b"%b\r\n%b\r\n" % (start, b"".join(lines))


_UPGRADE_OPTIONS = (b"upgrade", b"http2-settings")


def _line_bytes(header: tuple[bytes, bytes]) -> int:
    """Bytes of a header's line, as most clients write it: `name: value` and a line break."""
    name, value = header
    return len(name) + len(value) + 4


def _check_framing(headers: list[tuple[bytes, bytes]], version: str, url: bytes) -> None:
    """Raises _InvalidRequest if another server could see other requests in the same bytes, or
    another host. Most of it httptools refuses, too, but not each of its versions."""
    lengths = [value for name, value in headers if name == b"content-length"]
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    hosts = [value for name, value in headers if name == b"host"]
    if len(lengths) + len(codings) > 1:
        raise _InvalidRequest("it has more than one Content-Length or Transfer-Encoding")
    if codings and (codings[0].strip().lower() != b"chunked" or version == "1.0"):
        raise _InvalidRequest("its Transfer-Encoding is not chunked, or it is HTTP/1.0")
    if lengths and not (lengths[0].isdigit() and len(lengths[0]) < 19):
        raise _InvalidRequest("its Content-Length is not a number")
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _InvalidRequest("it has no Host header, or more than one")
    if not url.startswith(b"/") and hosts:
        _, _, rest = url.partition(b"://")
        if rest.partition(b"/")[0].lower() != hosts[0].lower():
            raise _InvalidRequest("its target names another host than its Host header")
