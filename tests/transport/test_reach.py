"""No command waits for a cluster that is not there."""

from __future__ import annotations

import importlib.util
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from bros.core.errors import ConfigError
from bros.core.stop_signals import signal_handlers_restored
from bros.transport.ray import check_reachable


@pytest.fixture
def full() -> Iterator[str]:
    """The address of a socket that accepts no connection, like a machine that is not there."""
    with socket.socket() as bound, socket.socket() as first, socket.socket() as second:
        bound.bind(("127.0.0.1", 0))
        bound.listen(0)
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(bound.getsockname())
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
    return port


def test_who_listens_is_reached() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.listen()
        check_reachable(f"127.0.0.1:{bound.getsockname()[1]}", 5)


def test_who_does_not_listen_is_not() -> None:
    with pytest.raises(ConfigError, match="no Ray cluster answers at 127"):
        check_reachable(f"127.0.0.1:{free_port()}", 5)


def test_silence_has_a_limit(full: str) -> None:
    with pytest.raises(ConfigError, match="timed out"):
        check_reachable(full, 0.1)


@pytest.mark.parametrize(
    "address", ["foo", "", ":1", "host:", "ray://host:1", "host:x", "h" * 70 + ":1"]
)
def test_what_is_no_address_is_said_to_be_none(address: str) -> None:
    with pytest.raises(ConfigError, match="--cluster"):
        check_reachable(address, 0.1)


def test_signals_are_what_they_were() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyError), signal_handlers_restored():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyError
    assert signal.getsignal(signal.SIGTERM) is before


_CONNECT = """
import signal, sys
import ray
from bros.core.errors import ConfigError
from bros.transport.ray import Cluster

def init(*arguments, **options):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise RuntimeError("other version")

if sys.argv[2:]:
    ray.init = init
try:
    Cluster(sys.argv[1])
except ConfigError as error:
    print(error)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.parametrize(
    ("listens", "words"), [(False, "no Ray cluster answers"), (True, "other version")]
)
def test_connecting_says_why_it_cannot(listens: bool, words: str) -> None:
    """In a process of its own, as Ray looks at the environment when it is imported."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        if listens:
            bound.listen()
        address = f"127.0.0.1:{bound.getsockname()[1]}"
        command = [sys.executable, "-c", _CONNECT, address, *(["fails"] if listens else [])]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert words in ended.stdout and address in ended.stdout
