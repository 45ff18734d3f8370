"""A Ray instance of this machine for tests."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from support.processes import descendants, wait_until_gone

if TYPE_CHECKING:
    from bros.transport.ray import Cluster

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's next default, which it warns of.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""Ray reads these when it is imported, whichever test does that first: conftest.py sets them."""


_INSTANCE = """
import sys
import ray

context = ray.init(
    num_cpus=int(sys.argv[1]),
    include_dashboard=False,
    log_to_driver=False,
    configure_logging=False,
    object_store_memory=80 * 2**20,
    _temp_dir=sys.argv[2],
)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
ray.shutdown()
"""


@contextlib.contextmanager
def local_ray(num_cpus: int = 2) -> Iterator[str]:
    """Its address. All its processes have ended after the block."""
    # Short, as there are sockets in it.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", _INSTANCE, str(num_cpus), folder]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as instance:
            assert instance.stdout is not None
            address = instance.stdout.readline().strip()
            started = descendants(instance.pid)
            assert address and started
            yield address
        wait_until_gone(started, 20)


@contextlib.contextmanager
def connected(address: str) -> Iterator[Cluster]:
    """This process as one that uses the instance."""
    # Late: it imports Ray.
    from bros.transport.ray import Cluster

    cluster = Cluster(address)
    yield cluster
    cluster.close()


def actors() -> list[int]:
    """The processes of all that run engines on the instance."""
    return [
        pid
        for pid in descendants(os.getpid())
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::EngineHost")
    ]
