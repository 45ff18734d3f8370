"""A complete engine with its tokenizer, without a server.

It runs on a thread of this process, without sockets; with several ranks in one process per rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineClient
from bros.core.request import IdGenerator
from bros.engine.build import build_engine
from bros.engine.thread_client import ThreadEngineClient
from bros.executor.model_store import ModelFiles, resolve_model
from bros.profiling.profiles import profile_folders
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """What `open_local` gives."""

    files: ModelFiles
    client: EngineClient
    tokenizer: Tokenizer
    generator: TextGenerator
    ids: IdGenerator


@contextlib.asynccontextmanager
async def open_local(
    config: EngineConfig, cache_dir: Path, report: Callable[[str], None] = lambda line: None
) -> AsyncIterator[LocalEngine]:
    """Load a model and run its engine, on a thread or in its ranks, until the block ends.

    report: called with one line for each operation that takes long.
    Raises ModelError or ConfigError, or EngineDeadError if ranks fail to start.
    """
    files = await asyncio.to_thread(resolve_model, config.model, cache_dir, report)
    profiles = profile_folders(cache_dir)
    start = _on_thread if config.tp == 1 else _in_ranks
    loading = asyncio.create_task(asyncio.to_thread(Tokenizer.load, files.folder))
    try:
        client = await start(config, files, profiles, report)
    except BaseException:
        loading.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        raise
    try:
        tokenizer = await loading
        ids = IdGenerator(random.SystemRandom())
        generator = TextGenerator(client, tokenizer, SystemClock(), ids)
        yield LocalEngine(files, client, tokenizer, generator, ids)
    finally:
        await client.close()


async def _on_thread(
    config: EngineConfig,
    files: ModelFiles,
    profiles: Sequence[Path],
    report: Callable[[str], None],
) -> EngineClient:
    build = partial(build_engine, config, files, SystemClock(), profiles=profiles, report=report)
    client = ThreadEngineClient(build, hang_timeout_s=config.hang_timeout)
    try:
        await client.wait_ready()
    except BaseException:
        await client.close()
        raise
    return client


async def _in_ranks(
    config: EngineConfig,
    files: ModelFiles,
    profiles: Sequence[Path],
    report: Callable[[str], None],
) -> EngineClient:
    # Late: it imports ZeroMQ and msgspec, which a single rank does not need.
    from bros.transport.process_client import ProcessEngineClient

    client = ProcessEngineClient(
        config, files, profiles=profiles, log_level="warning", restart=False
    )
    report(f"Starting {config.tp} ranks ...")
    await client.start()
    return client
