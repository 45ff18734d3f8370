"""A bros server of our own on a free port, for as long as it is measured."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from typing import IO

from bros.core.errors import BrosError

STOP_S = 15.0
"""How long a server may take to end before it is killed."""

_READY = re.compile(r"bros is ready at (\S+)")
_LAST_LINES = 5


class ServerStartError(BrosError):
    """The server ended before it was ready; the text has its last lines."""


@contextlib.asynccontextmanager
async def local_server(arguments: Sequence[str]) -> AsyncIterator[str]:
    """Start `bros serve` with these arguments; gives its URL once it answers.

    It is told to stop when the block is left, whatever the reason. Raises ServerStartError.
    """
    command = (sys.executable, "-m", "bros", "serve", "--host", "127.0.0.1", "--port", "0")
    with tempfile.TemporaryFile() as log, tempfile.TemporaryDirectory(prefix="bros-") as folder:
        process = await asyncio.create_subprocess_exec(
            *command,
            *("--store", folder),  # not the user's, whose jobs it would run
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us, who then stop the server in order
        )
        assert process.stdout is not None
        try:
            url = await _url(process.stdout)
            if url is None:
                await process.wait()
                raise ServerStartError(f"the server did not start: {_tail(log)}")
            drain = asyncio.create_task(_drain(process.stdout))
            try:
                yield url
            finally:
                drain.cancel()
        finally:
            await _stop(process)


async def _url(lines: asyncio.StreamReader) -> str | None:
    """Where it is ready; None if its output ends before."""
    async for line in lines:
        found = _READY.search(line.decode(errors="replace"))
        if found:
            return found[1]
    return None


async def _drain(lines: asyncio.StreamReader) -> None:
    """Nobody reads what it says later, but a full pipe would stop it."""
    while await lines.read(65536):
        pass


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(asyncio.shield(process.wait()), STOP_S)
    except TimeoutError:
        process.kill()
        await process.wait()


def _tail(log: IO[bytes]) -> str:
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    return "; ".join(line.strip() for line in lines[-_LAST_LINES:]) or "it said nothing"
