"""What is looked after around Ray's own connecting."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Iterator

from bros.core.errors import ConfigError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def reach(address: str, limit_s: float) -> None:
    """Raises ConfigError if nothing listens at host:port, or says so for limit_s."""
    host, _, port = address.rpartition(":")
    if "//" in address or not host or not port.isdigit():
        raise ConfigError(f"--cluster: {address!r} is not host:port, as ray start says it")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=limit_s):
            pass
    except (OSError, OverflowError, UnicodeError) as error:
        message = f"--cluster: no Ray cluster answers at {address}: {error}"
        raise ConfigError(message) from error


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Signals do after the block what they did before it, and not what was set in it."""
    if threading.current_thread() is not threading.main_thread():
        yield  # nothing can be set there
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # set by no Python, which could not set it again
                signal.signal(number, handler)
