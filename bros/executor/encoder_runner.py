"""The executor of an encoder: each chunk of a plan is one whole text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.interfaces import EngineInfo
from bros.core.machine import available_cores
from bros.core.plan import StepPlan, StepResult
from bros.core.request import Pooling
from bros.executor.inputs import read_inputs
from bros.executor.kv_storage import KV_BLOCK_SIZE
from bros.executor.loader import check_max_model_len, model_settings
from bros.executor.model_store import ModelFiles
from bros.executor.models.encoder import Encoder, EncoderSpec, build_encoder
from bros.executor.models.layers import has_products
from bros.executor.models.pooling import embedding_info, longest_text
from bros.executor.parallel.ranks import SINGLE_RANK, Ranks
from bros.executor.readout import pool_hidden
from bros.executor.target import Target, choose_target, device_name, find_cuda
from bros.executor.weights import WeightSource
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import Kernels
from bros.kernels.offsets import offsets


class EncoderRunner:
    """Implements core.interfaces.Executor. The slots and segments of plans mean nothing to it."""

    def __init__(self, encoder: Encoder, device: torch.device) -> None:
        self._encoder: Encoder | None = encoder
        self._device = device

    @torch.inference_mode()
    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one step. It samples nothing: the scheduler refuses requests for tokens.

        should_abort: called before each layer.
        """
        encoder = self._encoder
        assert encoder is not None, "the executor is closed"
        lengths = [len(chunk.token_ids) for chunk in plan.chunks]
        query_start = offsets(np.array(lengths, np.int32))
        positions = np.arange(query_start[-1], dtype=np.int64)
        starts = np.array([chunk.start for chunk in plan.chunks], np.int64)
        positions += np.repeat(starts - query_start[:-1], lengths)
        token_ids = np.concatenate([np.asarray(chunk.token_ids) for chunk in plan.chunks])
        hidden = encoder(
            self._upload(token_ids.astype(np.int64)),
            self._upload(positions),
            self._upload(np.minimum(self._types(plan, query_start), len(encoder.types) - 1)),
            lengths,
            should_abort,
        )
        if hidden is None:
            return None
        requests, rows, _ = read_inputs(plan, query_start)
        read = hidden.index_select(0, rows.to(self._device))
        if encoder.head is not None and requests:
            read = encoder.head(read)
        return StepResult(plan.step, (), pool_hidden(read, requests).finish())

    @staticmethod
    def _types(plan: StepPlan, query_start: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """0 for tokens of a first text, 1 for those of a second."""
        types = np.zeros(query_start[-1], np.int64)
        for row, chunk in enumerate(plan.chunks):
            if chunk.readout is not None and chunk.readout.second_from is not None:
                types[query_start[row] + chunk.readout.second_from : query_start[row + 1]] = 1
        return types

    def _upload(self, values: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(values).to(self._device)

    def close(self) -> None:
        """Release the weights; `execute` fails afterwards. May be called twice."""
        self._encoder = None


def load_encoder(
    config: EngineConfig, files: ModelFiles, ranks: Ranks = SINGLE_RANK
) -> tuple[EncoderRunner, EngineInfo]:
    """Load an encoder. Raises ModelError and ConfigError.

    It needs no KV memory. The scheduler counts tokens in blocks all the same; there are enough for
    any step.
    """
    if ranks.size > 1:
        raise ConfigError("--tp: an encoder runs on one rank; use --replicas")
    torch.set_num_threads(config.threads_of_rank(available_cores(), 1))
    settings = model_settings(files)
    spec = EncoderSpec.from_config(settings)
    target = choose_target(config, find_cuda())
    if config.weights == "auto" and target.device.type == "cpu":
        target = replace(target, weights="fp32")  # a user asks for these numbers themselves
    check_max_model_len(config, spec.max_positions)
    longest = longest_text(files.folder) or spec.max_positions
    length = config.max_model_len or min(longest, spec.max_positions)
    default = Pooling.MEAN
    embedding = embedding_info(
        config.pooling, files.folder, settings, spec.hidden_size, default, scores=spec.scores
    )
    kernels = _kernels_with_products(config, target)
    products = None if kernels is None else kernels.products
    with WeightSource(files.folder) as source, torch.inference_mode():
        encoder = build_encoder(spec, source, target, products)
    bounds = config.step_bounds(target.device.type)
    tokens = max(bounds.tokens, length)
    info = EngineInfo(
        model=files.name,
        weights=target.weights,
        kernels="torch" if kernels is None else kernels.name,
        kv_dtype="none",
        device=device_name(target.device),
        max_model_len=length,
        vocab_size=spec.vocab_size,
        block_size=KV_BLOCK_SIZE,
        num_kv_blocks=2 * (tokens // KV_BLOCK_SIZE + 2 * bounds.rows + 1),
        policy=config.policy,
        max_queue=config.max_queue,
        generates=False,
        embedding=embedding,
        whole_prompts=True,
    )
    return EncoderRunner(encoder, target.device), info


def _kernels_with_products(config: EngineConfig, target: Target) -> Kernels | None:
    """The kernels that multiply in linear layers; None if torch does.

    Raises ConfigError if config.kernels names kernels that are not available.
    """
    if not target.packed or config.kernels not in ("auto", "cpu"):
        return None
    kernels = select_kernels(config.kernels, target.device)
    return kernels if has_products(kernels.name) else None
