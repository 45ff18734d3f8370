"""Keeps web pages from using a server that only their reader's browser can reach.

A page of evil.com in a browser on this machine can send requests to http://localhost:8000. The
browser sends some of them without asking the server (hence `json_body` in http.py), and names the
page in the Origin header of all that do more than read. The page reads the answers, too, if its
name begins to resolve to 127.0.0.1 meanwhile (DNS rebinding): then it is of the same origin, but
the Host header still says evil.com. So both headers are checked.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bros.core.config import ServerConfig
from bros.core.errors import ConfigError
from bros.server.errors import INVALID_REQUEST, ApiError

ANY = "*"

_LOCAL_DOMAINS = ("localhost", "local", "internal", "home.arpa")
"""Domains that are never in the public DNS."""

_HOST = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[?[0-9a-f:.]+\]?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]*|null")

_ALLOWED_METHODS = "GET, POST, PUT, PATCH, DELETE, OPTIONS"
_EXPOSED = ", ".join(
    (
        *("x-request-id", "retry-after", "retry-after-ms", "x-should-retry"),
        *(
            f"x-ratelimit-{figure}-{unit}"
            for unit in ("requests", "tokens")
            for figure in ("limit", "remaining", "reset")
        ),
    )
)
_PREFLIGHT_S = "600"


@dataclass(frozen=True, slots=True)
class BrowserRules:
    """Which Host and Origin headers a server accepts.

    hosts: names, `*.name` for all names below one, or ANY; None: see `accepts_host`.
    origins: of pages that may use the server, besides its own, or ANY.
    own_names: what the server itself is called.
    """

    hosts: frozenset[str] | None = None
    origins: frozenset[str] = frozenset()
    own_names: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: ServerConfig, machine: str) -> BrowserRules:
        """Those of --allowed-hosts and --allowed-origins. machine: its name.

        Raises ConfigError.
        """
        hosts = None
        if config.allowed_hosts is not None:
            hosts = frozenset(_words(config.allowed_hosts))
            for host in hosts - {ANY}:
                if not _HOST.fullmatch(host):
                    raise ConfigError(f"--allowed-hosts: {host!r} is not a host name without port")
        origins = frozenset(map(_without_port, _words(config.allowed_origins or "")))
        for origin in origins - {ANY}:
            if not _ORIGIN.fullmatch(origin) or ANY in origin:
                raise ConfigError(
                    f"--allowed-origins: {origin!r} is not an origin such as https://example.com"
                )
        return cls(hosts, origins, frozenset({config.host.lower(), machine.lower()}))

    def accepts_host(self, header: str, reached: str | None) -> bool:
        """Whether a request may name this host. reached: the server's address of its connection.

        A literal address is always accepted: no name resolves to it, so nothing is rebound. Without
        --allowed-hosts, a connection from this machine must name what cannot be a name of the
        public DNS; one from another machine may name anything, because a server on a network has
        names that it does not know.
        """
        name = host_name(header)
        if name in ("", "localhost") or name in self.own_names or _is_address(name):
            return True
        if self.hosts is not None:
            return (
                ANY in self.hosts
                or name in self.hosts
                or any("*" + name[at:] in self.hosts for at in _dots(name))
            )
        if reached is None or not is_loopback(reached):
            return True
        return "." not in name or name.endswith(tuple(f".{each}" for each in _LOCAL_DOMAINS))

    def accepts_origin(self, origin: str) -> bool:
        """Whether pages of another origin may use the server."""
        return ANY in self.origins or origin.lower() in self.origins


def host_name(header: str) -> str:
    """The Host header without port, brackets and the dot at the end, in lower case."""
    header = header.strip().lower()
    if header.startswith("["):
        return header[1:].partition("]")[0]
    return header.partition(":")[0].removesuffix(".")


def _words(text: str) -> Sequence[str]:
    return [word.strip().lower().removesuffix("/") for word in text.split(",") if word.strip()]


def _without_port(origin: str) -> str:
    """The origin as browsers send it: without the default port of its scheme."""
    scheme, _, _ = origin.partition("://")
    return origin.removesuffix({"http": ":80", "https": ":443"}.get(scheme, ""))


def _dots(name: str) -> list[int]:
    return [at for at, char in enumerate(name) if char == "."]


def _is_address(name: str) -> bool:
    if not (name[-1:].isdigit() or ":" in name):  # parsing costs a name 5 us
        return False
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether a connection with this address is from the same machine."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback


class BrowserGuard:
    """Refuses requests by their Host and Origin, and answers the preflights of allowed origins."""

    def __init__(self, app: ASGIApp, rules: BrowserRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        refusal = self._refusal(host, origin, scope.get("server"))
        if refusal is not None:
            await refusal.to_response(scope["path"])(scope, receive, send)
        elif origin is None or _is_same(origin, host):
            await self._app(scope, receive, send)
        elif scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await Response(status_code=204, headers=_preflight(origin, headers))(
                scope, receive, send
            )
        else:
            await self._app(scope, receive, _with_origin(send, origin))

    def _refusal(
        self, host: str, origin: str | None, reached: tuple[str, int | None] | None
    ) -> ApiError | None:
        if not self._rules.accepts_host(host, None if reached is None else reached[0]):
            return _forbidden(
                f"This server does not answer to the host {host_name(host)[:200]!r}. The operator "
                "can allow it with --allowed-hosts.",
                "host_not_allowed",
            )
        if origin is None or _is_same(origin, host) or self._rules.accepts_origin(origin):
            return None
        return _forbidden(
            f"Web pages of {origin[:200]!r} may not use this server. The operator can allow it "
            "with --allowed-origins.",
            "origin_not_allowed",
        )


def _forbidden(message: str, code: str) -> ApiError:
    return ApiError(status=403, message=message, type=INVALID_REQUEST, code=code)


def _is_same(origin: str, host: str) -> bool:
    """Whether a page comes from this server. The scheme may differ, behind a proxy with TLS."""
    scheme, _, place = origin.lower().partition("://")
    port = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(place) and place.removesuffix(port) == host.strip().lower().removesuffix(port)


def _preflight(origin: str, headers: Headers) -> Mapping[str, str]:
    answer = {
        "access-control-allow-origin": origin,
        "access-control-allow-methods": _ALLOWED_METHODS,
        "access-control-max-age": _PREFLIGHT_S,
        "vary": "origin, access-control-request-headers",
    }
    if (wanted := headers.get("access-control-request-headers")) is not None:
        answer["access-control-allow-headers"] = wanted
    if headers.get("access-control-request-private-network") == "true":
        answer["access-control-allow-private-network"] = "true"
    return answer


def _with_origin(send: Send, origin: str) -> Send:
    async def send_with_origin(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers["access-control-expose-headers"] = _EXPOSED
            headers.add_vary_header("origin")
        await send(message)

    return send_with_origin
