"""Shared by the commands that talk to a server over HTTP: its URL, the API key, its errors."""

from __future__ import annotations

from typing import Any

import httpx

from bros.core.errors import ConfigError


def base_url(url: str, flag: str = "--url") -> str:
    """`url` without /v1. Raises ConfigError, which names the flag, if it is no http URL."""
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{flag}: {url!r} must start with http:// or https://")
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{flag}: {url!r} is not a URL: {error}") from None
    if not parsed.host:
        raise ConfigError(f"{flag}: {url!r} names no host")
    if not 0 < (parsed.port or 80) < 2**16:
        raise ConfigError(f"{flag}: {url!r} has a port that is not from 1 to 65535")
    return url.rstrip("/").removesuffix("/v1")


def auth_headers(api_key: str | None) -> dict[str, str]:
    """Raises ConfigError for a key that no header can carry."""
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key: it must be printable ASCII characters")
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def message_of(error: Any) -> str:
    """The message in the `error` of a response or an event."""
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def error_message(response: httpx.Response, otherwise: str | None = None) -> str:
    """The message of an error response that has been read.

    otherwise: the message if the body is not an error in JSON; by default the body itself.
    """
    try:
        return message_of(response.json()["error"])
    except (ValueError, KeyError, TypeError):
        return otherwise or response.text.strip()[:200] or response.reason_phrase
