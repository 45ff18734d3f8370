"""An engine in a process of its own, or in several, watched and restarted."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from bros.core.config import EngineConfig
from bros.engine.ipc import Wire
from bros.engine.launch import Launch
from bros.engine.supervised_client import SupervisedClient
from bros.executor.model_store import ModelFiles

_GRACE_S, _RANKS_GRACE_S = 5.0, 10.0
"""How long an engine, or a launcher with its ranks, may take to end after Shutdown before it is
killed."""


class ProcessEngineClient(SupervisedClient):
    """Starts, watches and talks to one engine process.

    With config.tp > 1 the process is the launcher of as many ranks, which end with it and it with
    them. Unless this one is a rank itself (`is_rank`), which torchrun has started with the others:
    then the process takes its place, as rank 0, and cannot be restarted without the others.
    """

    def __init__(
        self,
        config: EngineConfig,
        files: ModelFiles,
        *,
        profiles: Sequence[Path] = (),
        log_level: str = "info",
        restart: bool = True,
        is_rank: bool = False,
        replica: int | None = None,
        on_final_death: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """replica: which of several engines on this machine it is; see Launch."""
        starts_ranks = config.tp > 1 and not is_rank
        gives_signs = config.tp > 1 or replica is not None
        super().__init__(
            restart=restart and not is_rank,
            on_final_death=on_final_death,
            grace_s=_RANKS_GRACE_S if starts_ranks else _GRACE_S,
            rank_signs_s=config.tp_timeout if gives_signs else None,
        )
        self._launch = Launch(
            model_folder=str(files.folder),
            model_name=files.name,
            log_level=log_level,
            config=config,
            profiles=tuple(str(folder) for folder in profiles),
            starts_ranks=starts_ranks,
            replica=replica,
            gives_signs=gives_signs,
        )
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int | None:
        """Of the engine process or the launcher; there is one as long as the engine is alive."""
        return self._process.pid if self._process else None

    def _kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _run_once(self) -> str:
        async with contextlib.AsyncExitStack() as stack:
            # Readable by this user only.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bros-")))
            # After all that waits, so that nobody finds an engine alive that has no process.
            stack.callback(self._forget)
            receiver = self._listen(stack, Wire.of(folder))
            process = self._process = await self._spawn(folder)
            if self._closing:
                self._kill()
            code = await process.wait()
            await receiver.drain()
        return self._last_words or f"The engine process ended unexpectedly (code {code})."

    def _forget(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None

    async def _spawn(self, folder: Path) -> asyncio.subprocess.Process:
        self._launch.write(folder)
        return await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", self._launch.module, str(folder)),
            stdin=asyncio.subprocess.PIPE,
        )
