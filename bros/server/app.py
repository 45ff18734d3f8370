"""The ASGI application: routes, middleware and error handlers around a ServerState."""

from __future__ import annotations

import logging
import math
import re
import socket
from collections import Counter
from collections.abc import Callable, Sequence

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bros.core.clock import Clock
from bros.core.errors import AuthenticationError, BrosError
from bros.core.tenants import TenantAccounts
from bros.server.batches import routes as batches
from bros.server.browsers import BrowserGuard, BrowserRules
from bros.server.embeddings import routes as embeddings
from bros.server.errors import describe, handle_expected, handle_http
from bros.server.http import HELD
from bros.server.messages import routes as messages
from bros.server.openai import routes as openai
from bros.server.openai.stream import DIRECT_SEND
from bros.server.operations import routes as operations
from bros.server.replies import PIECE_BYTES, refusal, send_large
from bros.server.responses import routes as responses
from bros.server.sessions import routes as sessions
from bros.server.state import ARRIVAL_S, ServerState
from bros.server.tenants import TENANT, LiveTenants, Tenants

# ---- Pure ASGI middleware, which passes streams and disconnects through unchanged.


logger = logging.getLogger(__name__)
access_logger = logging.getLogger("bros.access")

METRICS_PATH = "/metrics"

OPEN_PATHS = frozenset({"/", "/health", "/health/live", "/health/ready", METRICS_PATH})
"""Paths that need no key: the web page, which asks for one, and those of probes and scrapers."""

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_CLIENT_CLOSED_REQUEST = 499  # as nginx logs it

_SHOWN_PATH = 200
_CHEAP_LINES, _CHEAP_WINDOW_S = 30, 60.0


class _CheapRequestLog:
    """Bounds the lines about requests that cost a client nothing, not even a key: those to open
    paths, and refused ones. With a line for each, clients could fill a disk.

    Probes do not use up the lines of refusals: each kind has its own.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._window_ends_s = float("-inf")
        self._lines: Counter[bool] = Counter()
        self._silent: Counter[int] = Counter()

    def note(self, path: str, status: int) -> bool:
        """Whether to log this request. Logs how many of the minute before were not."""
        is_open = path in OPEN_PATHS
        if not is_open and not 400 <= status < 500:
            return True
        now = self._clock.now()
        if now >= self._window_ends_s:
            self._window_ends_s = now + _CHEAP_WINDOW_S
            self._lines.clear()
            if self._silent:
                counts = (f"{count} with {code}" for code, count in sorted(self._silent.items()))
                access_logger.warning("requests without a line: %s", ", ".join(counts))
                self._silent.clear()
        self._lines[is_open] += 1
        if self._lines[is_open] > _CHEAP_LINES:
            self._silent[status] += 1
            return False
        return True


def _shown_path(scope: Scope) -> str:
    """The beginning of the raw path; the decoded one could contain line breaks."""
    path: str = scope.get("raw_path", b"").decode("latin-1")
    return path if len(path) <= _SHOWN_PATH else f"{path[:_SHOWN_PATH]}..."


class RequestLog:
    """Sets x-request-id on every response, counts the response and logs one line; of refused
    requests and of those to open paths at most 30 each in a minute.

    A client's own x-request-id is kept if it is printable ASCII of at most 128 characters.
    """

    def __init__(self, app: ASGIApp, state: ServerState, routes: Sequence[Route]) -> None:
        """routes: their path templates label the metrics; all other paths count as "other"."""
        self._app = app
        self._state = state
        self._paths = frozenset(route.path for route in routes)
        self._templates = [route for route in routes if route.param_convertors]
        self._cheap = _CheapRequestLog(state.clock)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else self._state.ids.new("req")
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["path"].startswith("/v1/messages"):  # where Anthropic's clients read it
                    headers["request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            status = _CLIENT_CLOSED_REQUEST
        finally:
            self._state.metrics.http_request(self._label(scope["path"]), status)
            if self._cheap.note(scope["path"], status):
                client = scope.get("client")
                access_logger.info(
                    "%s %s %d %.1f ms %s from %s%s",
                    scope["method"],
                    _shown_path(scope),
                    status,
                    (self._state.clock.now() - scope[ARRIVAL_S]) * 1000,
                    request_id,
                    client[0] if client else "a socket",
                    f" as {scope[TENANT]}" if scope.get(TENANT) else "",
                )

    def _label(self, path: str) -> str:
        if path in self._paths:
            return path
        matches = (route.path for route in self._templates if route.path_regex.match(path))
        return next(matches, "other")


class ErrorBarrier:
    """Turns an unexpected exception into a 500 response and logs its traceback."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def watch(message: Message) -> None:
            nonlocal started
            started = started or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watch)
        except ClientDisconnect:
            raise
        except Exception as error:
            if started or scope["type"] != "http":
                raise  # uvicorn closes the connection and logs the error
            logger.exception("%s failed", _shown_path(scope))
            await describe(error).to_response(scope["path"])(scope, receive, send)


class BearerAuth:
    """Requires a key on all paths but `open_paths`, and puts its tenant into the scope.

    Anthropic's clients send it in the header x-api-key.
    """

    def __init__(
        self,
        app: ASGIApp,
        find: Callable[[bytes], str | None],
        open_paths: frozenset[str],
    ) -> None:
        """find: returns the tenant of a key."""
        self._app = app
        self._find = find
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            headers = dict(scope["headers"])
            scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
            if scheme.lower() != b"bearer":
                key = headers.get(b"x-api-key", b"")
            tenant = self._find(key.strip())
            if tenant is None:
                error = AuthenticationError(
                    "The API key is missing or wrong; send it as 'Authorization: Bearer KEY'."
                )
                await describe(error).to_response(scope["path"])(scope, receive, send)
                return
            scope[TENANT] = tenant
        await self._app(scope, receive, send)


class RateHeaders:
    """Adds OpenAI's x-ratelimit headers to the responses of tenants with limits per minute."""

    def __init__(self, app: ASGIApp, accounts: TenantAccounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_rates(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for resource, rate in self._accounts.rates(scope.get(TENANT, "")).items():
                    name = resource.value.removesuffix("_per_minute")
                    headers[f"x-ratelimit-limit-{name}"] = str(rate.limit)
                    headers[f"x-ratelimit-remaining-{name}"] = str(rate.remaining)
                    headers[f"x-ratelimit-reset-{name}"] = duration(rate.reset_s)
            await send(message)

        await self._app(scope, receive, send_with_rates)


def duration(seconds: float) -> str:
    """A time as OpenAI's headers write it, rounded up: 120ms, 1s, 6m0s."""
    if seconds < 1.0:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


class PacedReplies:
    """Sends large bodies as clients read them. One for which its tenant, or all together, have no
    room is replaced by an error of status 429, but no part of a streamed one is."""

    def __init__(self, app: ASGIApp, accounts: TenantAccounts) -> None:
        self._app = app
        self._accounts = accounts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begin: Message | None = None  # that of a large response waits for the body
        is_refused = False

        async def paced_send(message: Message) -> None:
            nonlocal begin, is_refused
            if message["type"] == "http.response.start" and _num_bytes(message) > PIECE_BYTES:
                begin = message
                return
            body: bytes = message.get("body", b"")
            is_large = len(body) > PIECE_BYTES  # else it is a part of a file
            if begin is not None:
                error = refusal(self._accounts, scope, len(body)) if is_large else None
                if error is None:
                    await send(begin)
                else:
                    is_refused = True
                    response = await handle_expected(Request(scope), error)
                    await response(scope, receive, send)
                begin = None
            if is_refused:
                return
            if is_large:
                more = message.get("more_body", False)
                await send_large(self._accounts, scope, send, body, more=more)
            else:
                await send(message)

        await self._app(scope, receive, paced_send)


def _num_bytes(begin: Message) -> int:
    """Size of the body of a response; 0 if it is not known."""
    length = Headers(raw=begin["headers"]).get("content-length", "")
    return int(length) if length.isdecimal() else 0


_ARRIVING, _LEAVING = "arriving", "leaving"  # owners of turns


class App(Starlette):
    """Lets requests begin, and learn that their client has left, in turns of the event loop.

    Puts the server's `send` into the scope. Streams send their body with it, past the middleware,
    which only looks at the start of a response. At the end it releases what the request holds."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        server: ServerState = self.state.server
        turns = server.turns
        scope[ARRIVAL_S] = server.clock.now()

        async def receive_in_turn() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect":
                await turns.begin(_LEAVING)
            return message

        # The key of a request has not been read, so that all but probes have one queue.
        path = scope.get("path")
        await turns.begin(path if path in OPEN_PATHS else _ARRIVING)
        scope[DIRECT_SEND] = send
        try:
            await super().__call__(scope, receive_in_turn, send)
        finally:
            # `send` belongs to an object that has the scope: a cycle for the garbage collector.
            del scope[DIRECT_SEND]
            if (held := scope.pop(HELD, None)) is not None:
                held.release()


def create_app(state: ServerState, tenants: Tenants | LiveTenants) -> Starlette:
    """The app for one server. The caller closes the engine afterwards."""
    api = [
        *openai.ROUTES,
        *messages.ROUTES,
        *embeddings.ROUTES,
        *operations.TRACE_ROUTES,
        *operations.TENANT_ROUTES,
    ]
    if state.jobs is not None:
        api += [*batches.ROUTES, *responses.ROUTES]
    if state.sessions is not None:
        api += sessions.ROUTES
    if state.replicas is not None:
        api += operations.ADMIN_ROUTES
    access = state.config.metrics_access
    routes = operations.service_routes(api, with_metrics=access != "off")
    middleware = [
        Middleware(RequestLog, state=state, routes=routes),
        Middleware(ErrorBarrier),
        Middleware(BrowserGuard, rules=BrowserRules.of(state.config, socket.gethostname())),
    ]
    if tenants.keys:
        open_paths = OPEN_PATHS - {METRICS_PATH} if access == "key" else OPEN_PATHS
        middleware.append(Middleware(BearerAuth, find=tenants.find, open_paths=open_paths))
    if state.accounts.have_rates or state.config.api_keys is not None:  # whose limits may change
        middleware.append(Middleware(RateHeaders, accounts=state.accounts))
    middleware.append(Middleware(PacedReplies, accounts=state.accounts))
    app = App(
        routes=routes,
        middleware=middleware,
        exception_handlers={BrosError: handle_expected, HTTPException: handle_http},
    )
    app.router.redirect_slashes = False  # /v1/models/ is a 404, not a redirect
    app.state.server = state
    return app
