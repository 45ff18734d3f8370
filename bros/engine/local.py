"""A complete engine with its tokenizer in this process: no sockets, no server libraries."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.ids import IdGenerator
from bros.engine.build import build_engine
from bros.engine.generation import TextGenerator
from bros.engine.thread_client import ThreadEngineClient
from bros.engine.tokenizer import Tokenizer
from bros.executor.model_store import ModelFiles, resolve_model
from bros.scheduler.profiles import profile_folders


@dataclass(frozen=True, slots=True)
class LocalEngine:
    """What `open_local` gives."""

    files: ModelFiles
    client: ThreadEngineClient
    tokenizer: Tokenizer
    generator: TextGenerator
    ids: IdGenerator


@contextlib.asynccontextmanager
async def open_local(
    config: EngineConfig, cache_dir: Path, report: Callable[[str], None] = lambda line: None
) -> AsyncIterator[LocalEngine]:
    """Load a model and run its engine on a thread until the block is left.

    `report` is told in one line each what takes long. Raises ModelError or ConfigError.
    """
    files = await asyncio.to_thread(resolve_model, config.model, cache_dir, report)
    clock = SystemClock()
    profiles = profile_folders(cache_dir)
    engine, tokenizer = await asyncio.gather(
        asyncio.to_thread(build_engine, config, files, clock, profiles=profiles, report=report),
        asyncio.to_thread(Tokenizer.load, files.folder),
    )
    client = ThreadEngineClient(engine)
    try:
        await client.wait_ready()
        ids = IdGenerator(random.SystemRandom())
        generator = TextGenerator(client, tokenizer, clock, ids)
        yield LocalEngine(files, client, tokenizer, generator, ids)
    finally:
        await client.close()
