"""From a configuration and a model folder to a running executor."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bros.core.config import EngineConfig, parse_bytes
from bros.core.errors import ConfigError, ModelError
from bros.core.interfaces import EngineInfo
from bros.executor.kv_storage import (
    DTYPES,
    KV_BLOCK_SIZE,
    KvStorage,
    blocks_in,
    bytes_per_block,
)
from bros.executor.model_store import ModelFiles
from bros.executor.models.build import build_decoder
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner
from bros.executor.sampler import Sampler
from bros.executor.weights import WeightSource
from bros.kernels.dispatch import select_kernels


def load_executor(config: EngineConfig, files: ModelFiles) -> tuple[ModelRunner, EngineInfo]:
    """Load the weights, allocate the KV cache and say what came of it.

    Also sets the number of threads torch uses in this process (config.threads, or as many as
    this process may run on).

    weights auto is fp32, at which greedy output does not depend on how the work was cut into
    iterations; bf16 is 1.3 to 1.8 times as fast and rounds every linear layer's input to 8 bits.
    kv_dtype auto is fp32 as well.

    Raises ModelError if the model cannot be read or is not supported, ConfigError if an option
    asks for what the model or the KV cache cannot give.
    """
    torch.set_num_threads(config.threads or len(os.sched_getaffinity(0)))
    settings = _read_json(files.folder / "config.json")
    spec = ModelSpec.from_config(settings)
    kernels = select_kernels(config.kernels)
    weights = "fp32" if config.weights == "auto" else config.weights
    kv_dtype = "fp32" if config.kv_dtype == "auto" else config.kv_dtype
    num_blocks = config.kv_blocks or blocks_in(
        parse_bytes(config.kv_memory), spec, DTYPES[kv_dtype]
    )
    max_model_len = _max_model_len(config, spec, num_blocks)
    with torch.inference_mode(), WeightSource(files.folder) as source:
        decoder = build_decoder(spec, source, kernels, weights, max_model_len)
    num_host_blocks = _num_host_blocks(config, spec, DTYPES[kv_dtype])
    kv = KvStorage(spec, num_blocks, DTYPES[kv_dtype], num_host_blocks)
    info = EngineInfo(
        model=files.name,
        weights=weights,
        kernels=kernels.name,
        kv_dtype=kv_dtype,
        device="cpu",
        max_model_len=max_model_len,
        vocab_size=spec.vocab_size,
        block_size=KV_BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        num_host_kv_blocks=num_host_blocks,
        policy=config.policy,
        eos_token_ids=_eos_token_ids(files.folder, settings, spec.vocab_size),
        max_queue=config.max_queue,
    )
    return ModelRunner(decoder, kv, Sampler()), info


def _num_host_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """How many blocks of KV may be kept on the host; memory for less than one is none."""
    if config.on_pressure != "checkpoint":
        return 0
    if config.host_kv_blocks is not None:
        return config.host_kv_blocks
    return parse_bytes(config.host_kv_memory) // bytes_per_block(spec, dtype)


def _max_model_len(config: EngineConfig, spec: ModelSpec, num_blocks: int) -> int:
    """The longest prompt + output: the least of what was asked, the model and the KV cache."""
    asked = config.max_model_len
    if asked is not None and asked > spec.max_positions:
        raise ConfigError(
            f"--max-model-len: {asked} is more than the {spec.max_positions} tokens this model "
            f"was made for"
        )
    if asked is not None and asked > num_blocks * KV_BLOCK_SIZE:
        raise ConfigError(
            f"--max-model-len: {asked} tokens do not fit the KV cache of "
            f"{num_blocks * KV_BLOCK_SIZE}; give more --kv-memory or --kv-blocks"
        )
    length = min(asked or spec.max_positions, spec.max_positions, num_blocks * KV_BLOCK_SIZE)
    if spec.sliding_window is not None and length > spec.sliding_window:
        raise ModelError(
            f"this model attends to the last {spec.sliding_window} tokens only, which is not "
            f"supported for longer contexts; start it with --max-model-len {spec.sliding_window}"
        )
    return length


def _eos_token_ids(folder: Path, settings: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Tokens that end an answer: generation_config.json's if it names any, else config.json's.

    Ids outside the vocabulary, which some checkpoints carry, can never be sampled and are left out.
    """
    generation = folder / "generation_config.json"
    eos = _read_json(generation).get("eos_token_id") if generation.exists() else None
    if eos is None:
        eos = settings.get("eos_token_id")
    if eos is None:
        return ()
    ids = eos if isinstance(eos, list) else [eos]
    return tuple(int(token_id) for token_id in ids if 0 <= int(token_id) < vocab_size)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return content
