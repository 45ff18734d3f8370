"""Puts an engine together from its configuration. Imports torch: not for the server process."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from bros.core.clock import Clock
from bros.core.config import EngineConfig
from bros.engine.engine import Engine
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.limits import Limits
from bros.scheduler.policies import make_policy
from bros.scheduler.scheduler import Scheduler


def build_engine(
    config: EngineConfig, files: ModelFiles, clock: Clock, *, profiles: Sequence[Path] = ()
) -> Engine:
    """Load the model and set up KV memory and scheduling.

    profiles: folders with measured step times, the user's own first.

    Raises ModelError if the model cannot be served, ConfigError if an option does not fit it.
    """
    executor, info = load_executor(config, files)
    limits = Limits(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens,
        max_queue=config.max_queue,
        eos_token_ids=frozenset(info.eos_token_ids),
    )
    kv = KvCacheManager(info.num_kv_blocks, info.block_size)
    scheduler = Scheduler(make_policy(config.policy), kv, limits, random.Random(config.seed))
    return Engine(scheduler, executor, clock, info)
