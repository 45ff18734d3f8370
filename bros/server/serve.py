"""Serves an app on a socket and shuts it down gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette

from bros.core.config import ServerConfig
from bros.core.errors import ConfigError
from bros.core.files import expand_user
from bros.core.stop_signals import stop_signals_handled
from bros.server.connections import ConnectionLimits, Connections
from bros.server.state import ServerState

logger = logging.getLogger(__name__)

T = TypeVar("T")

_ERROR_S = 5.0
"""How long open requests that outlast the drain timeout have to send their error
before uvicorn cancels their tasks."""

_FORCED_S = 1.0
"""The same after a second SIGINT."""


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address but not listening; port 0 takes a free port.

    Called before the model is loaded, so that a port in use is reported at once. Raises
    ConfigError.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host: cannot listen on {host}: {error.strerror}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _keep_alive(bound)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {error.strerror}") from error
    return bound


_KEEP_ALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4}
"""Seconds and probes after which the kernel ends a connection whose peer has vanished."""


def _keep_alive(bound: socket.socket) -> None:
    # Linux gives the options of a listening socket to the connections that it accepts.
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEP_ALIVE.items():
        if hasattr(socket, name):
            bound.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def url_of(bound: socket.socket, scheme: str = "http") -> str:
    """The URL of a bound socket, with its actual port."""
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def load_tls(config: ServerConfig) -> ssl.SSLContext | None:
    """The certificate of --tls-cert and its key; None without the options. Raises ConfigError."""
    if config.tls_cert is None:
        if config.tls_key is not None:
            raise ConfigError("--tls-key: needs --tls-cert")
        return None
    certificate = expand_user(config.tls_cert)
    key = None if config.tls_key is None else expand_user(config.tls_key)
    for flag, path in (("--tls-cert", certificate), ("--tls-key", key)):
        if path is not None and not path.exists():  # ssl does not say which one
            raise ConfigError(f"{flag}: there is no file {path}")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # A function for the password, because the default asks for it on the terminal.
        context.load_cert_chain(certificate, key, password=lambda: "")
    except OSError as error:
        raise ConfigError(
            "--tls-cert, --tls-key: they are not a certificate and its key, without a password, as "
            f"PEM: {error}"
        ) from error
    return context


def run(work: Coroutine[Any, Any, T]) -> T:
    """asyncio.run on uvloop, if it is installed. uvloop and httptools, which uvicorn uses by
    itself, lower the CPU time of a stream (benchmarks/stream_speed.py)."""
    try:
        import uvloop
    except ImportError:  # as on Windows
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class HttpServer:
    """Serves an app of `create_app` on a bound socket until it is stopped."""

    def __init__(
        self,
        app: Starlette,
        bound: socket.socket,
        *,
        on_listening: Callable[[str], None] = lambda url: None,
        log_level: str = "info",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """on_listening: called with the URL once the server accepts connections.
        tls: the certificate, to serve https.
        """
        state: ServerState = app.state.server
        config = uvicorn.Config(
            app,
            log_config=None,
            # uvicorn's info lines repeat what bros prints.
            log_level="debug" if log_level == "debug" else "warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=state.config.idle_timeout,  # type: ignore[arg-type]  # any number
            timeout_graceful_shutdown=math.ceil(state.config.drain_timeout + _ERROR_S),
        )
        self._bound = bound
        url = url_of(bound, "http" if tls is None else "https")
        self._server = _Server(config, state, tls, lambda: on_listening(url))

    async def run(self) -> None:
        """Serve until `stop` or one of STOP_SIGNALS; then let open requests continue for
        `drain_timeout`.

        Requests that are still open then end with an error. After a second SIGINT they end with
        it at once, and whatever takes longer than _FORCED_S is cut. A third one waits for nothing.
        Signals are handled only if this runs in the main thread.
        """
        await self._server.serve(sockets=[self._bound])

    def stop(self) -> None:
        """Begin to shut down. May be called from any thread, repeatedly."""
        self._server.should_exit = True


class _Server(uvicorn.Server):
    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        tls: ssl.SSLContext | None,
        on_listening: Callable[[], None],
    ) -> None:
        super().__init__(config)
        self._state = state
        self._tls = tls
        self._on_listening = on_listening
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ending = False

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn's own method raises the signals again at the end. SIGTERM would then kill the
        # process before the engine is closed.
        self._loop = asyncio.get_running_loop()
        with stop_signals_handled(self.handle_exit):
            yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        second = sig == signal.SIGINT and self.should_exit and not self._ending
        if second and self._loop is not None:
            self._ending = True
            self._loop.call_soon_threadsafe(self._end_requests)
        else:
            super().handle_exit(sig, frame)

    def _end_requests(self) -> None:
        # uvicorn's forced exit leaves open requests to the closing of the engine, which they would
        # report as its unexpected end.
        self._state.stopping.set()
        asyncio.get_running_loop().call_later(_FORCED_S, setattr, self, "force_exit", True)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets is not None
        state = self._state
        self._connections = Connections(
            ConnectionLimits.of(state.config),
            self.config,
            self.server_state,
            state.clock,
            state.metrics.connection_closed,
            self._tls,
        )
        state.metrics.count_connections(self._connections.__len__)
        self.servers = []  # what uvicorn itself listens on
        for bound in sockets:
            try:
                self._connections.listen(bound)
            except OSError as error:  # another server has bound it as well, and listens
                host, port = bound.getsockname()[:2]
                message = f"--port: cannot listen on {host}:{port}: {error.strerror}"
                raise ConfigError(message) from error
        self.started = True
        self._on_listening()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        drain_s = self._state.config.drain_timeout
        timer = asyncio.get_running_loop().call_later(drain_s, self._state.stopping.set)
        await self._connections.stop_accepting()
        if count := len(self.server_state.tasks):
            logger.warning(
                "waiting up to %g s for %d open request%s; Ctrl-C again ends at once",
                drain_s,
                count,
                "" if count == 1 else "s",
            )
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
            await self._connections.close()
