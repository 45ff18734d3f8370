"""A random-weight model on a device, plans for it, and their minimum of bytes and operations.

For gpu_speed.py. Nothing is downloaded: speed does not depend on the values of the weights, as long
as they differ.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from gpu_timing import Ceilings, Run, Timer, Timing
from torch import Tensor

from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo
from bros.core.plan import Chunk, SampleSpec, SharedPrefix, StepPlan
from bros.core.request import SamplingParams
from bros.executor.loader import random_executor
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner
from bros.kernels.interface import AttentionBatch, HeadLayout, Kernels, SharedParts

BLOCK = 16
GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0)

LLAMA_3_8B = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5,
}
TINY = {
    **LLAMA_3_8B,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The measured shapes: real ones, or tiny ones that only test the program.

    sharers: numbers of rows with a shared prefix.
    few_sharers: likewise, so few that their tiles are smaller.
    mixed: decode rows, and the tokens of a chunk in the same step.
    """

    model: dict[str, object]
    kv_blocks: int
    host_blocks: int
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    prompts: tuple[int, ...]
    attention: tuple[int, int]
    layout: tuple[int, int]
    prefix: int
    sharers: tuple[int, ...]
    few_sharers: tuple[int, ...]
    suffix: int
    copied: int
    copied_beside: tuple[int, ...]
    beside: tuple[int, int]
    engine_rows: int
    engine_steps: int
    sampled: tuple[int, ...]
    layer_rows: tuple[int, ...]
    mixed: tuple[tuple[int, int], ...]


REAL = Sizes(
    model=LLAMA_3_8B,
    # 44 GiB, so that the model and a peer's fit an 80-GB device; longer contexts read blocks again.
    kv_blocks=22_528,
    host_blocks=512,
    batches=(1, 8, 32, 128, 256),
    contexts=(512, 4096),
    prompts=(512, 1024, 2048, 4096, 8192),
    attention=(256, 4096),
    layout=(64, 4096),
    prefix=6000,
    sharers=(32, 64),
    few_sharers=(4, 8, 16),
    suffix=128,
    copied=4096,
    copied_beside=(256, 1024),
    beside=(32, 512),
    engine_rows=256,
    engine_steps=60,
    sampled=(1, 32, 256),
    layer_rows=(1, 32, 256),
    mixed=((8, 64), (32, 256), (32, 1024), (255, 512)),
)
SMALL = Sizes(
    model=TINY,
    kv_blocks=96,
    host_blocks=8,
    batches=(1, 4),
    contexts=(32, 64),
    prompts=(32, 64),
    attention=(4, 64),
    layout=(4, 64),
    prefix=150,
    sharers=(2, 4),
    few_sharers=(),
    suffix=16,
    copied=64,
    copied_beside=(16,),
    beside=(2, 32),
    engine_rows=4,
    engine_steps=6,
    sampled=(1, 3),
    layer_rows=(1, 4),
    mixed=((2, 16),),
)


class Model:
    """The runner of a random model, whose KV memory holds random numbers."""

    def __init__(self, sizes: Sizes, device: torch.device, kernels: str) -> None:
        self.sizes = sizes
        self.device = device
        self.spec = ModelSpec.from_config(sizes.model)
        self.config = EngineConfig(
            device=device.type,
            kernels=kernels,
            weights="bf16" if device.type == "cuda" else "fp32",
            kv_blocks=sizes.kv_blocks,
            host_kv_blocks=sizes.host_blocks,
            max_num_seqs=max(sizes.batches),
            max_batch_tokens=max(sizes.prompts),
            max_model_len=min(sizes.kv_blocks * BLOCK, 8192 + BLOCK),
            policy="fcfs",
        )
        self.runner: ModelRunner
        self.info: EngineInfo
        self.runner, self.info = random_executor(self.spec, self.config)
        self._rng = np.random.default_rng(0)
        with torch.inference_mode():
            for layer in self.layers:
                for cache in layer:
                    cache.normal_()

    # Internals of the runner that only this benchmark needs.

    @property
    def kernels(self) -> Kernels:
        return self.runner._uploader._kernels

    @property
    def layers(self) -> Sequence[tuple[Tensor, Tensor]]:
        return self.runner._kv.layers

    @property
    def layout(self) -> HeadLayout:
        return HeadLayout(self.spec.num_heads, self.spec.num_kv_heads, self.spec.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The data type of activations."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    @property
    def has_graphs(self) -> bool:
        return self.runner._graphs is not None

    def without_graphs(self) -> Switched:
        return Switched(self.runner, "_graphs", None)

    # Minimum of bytes and operations.

    @property
    def layer_weights(self) -> int:
        """The number of weights in the matrices of all layers."""
        spec, layout = self.spec, self.layout
        attention = spec.hidden_size * (layout.qkv_size + layout.q_size)
        return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.spec.hidden_size * self.spec.vocab_size

    @property
    def kv_token_bytes(self) -> int:
        """The size of K and V of one token in all layers."""
        return 2 * self.spec.num_layers * self.layout.kv_size * self.layers[0][0].element_size()

    def bytes_of(self, contexts: Sequence[int], new_tokens: int) -> float:
        """Bytes of a step: weights, cached KV, new KV, and logits written and read."""
        weights = (self.layer_weights + self.head_weights) * self.dtype.itemsize
        kv = (sum(contexts) + new_tokens) * self.kv_token_bytes
        return weights + kv + 2 * 4 * len(contexts) * self.spec.vocab_size

    def flops_of(self, contexts: Sequence[int], chunks: Sequence[int]) -> float:
        """Operations of a step: matrix products and attention; one row of logits per chunk."""
        pairs = sum(n * (c + (n + 1) / 2) for c, n in zip(contexts, chunks, strict=True))
        attention = 4 * pairs * self.layout.q_size * self.spec.num_layers
        head = 2 * self.head_weights * len(chunks)
        return 2 * self.layer_weights * sum(chunks) + head + attention

    # Plans. Steps write to the first few blocks.

    def blocks_for(self, counts: Sequence[int]) -> list[np.ndarray]:
        """`counts` blocks for each row, scattered over the memory.

        If there are too few blocks for all rows, blocks repeat in another order; the memory read is
        still far larger than the device's cache.
        """
        first = -(-max(self.config.max_num_seqs, self.config.max_batch_tokens) // BLOCK)
        usable = self.sizes.kv_blocks - first
        need = sum(counts)
        drawn = [self._rng.permutation(usable) for _ in range(-(-need // usable))]
        blocks = first + np.concatenate([*drawn, np.empty(0, np.int64)])[:need]
        return np.split(blocks.astype(np.int32), np.cumsum(counts)[:-1])

    def decode_plan(self, rows: int, context: int) -> StepPlan:
        """One new token for each row."""
        owned = self.blocks_for([-(-context // BLOCK)] * rows)
        return self.plan_of([full_segments(blocks, context) for blocks in owned], context)

    def plan_of(self, segments: Sequence[np.ndarray], context: int, shared: int = 0) -> StepPlan:
        """One new token for each row. All rows share their first `shared` segments, which the step
        reads once."""
        chunks = [
            self._chunk(row, context, [7 + row], listed, row) for row, listed in enumerate(segments)
        ]
        rows = array("i", range(len(chunks)))
        common = (SharedPrefix(rows, 0, shared),) if shared and len(rows) > 1 else ()
        return StepPlan(0, tuple(chunks), shared=common)

    def prefill_plan(self, tokens: int) -> StepPlan:
        return StepPlan(0, (self._prompt(0, tokens, 0),))

    def mixed_plan(self, rows: int, context: int, tokens: int) -> StepPlan:
        """One new token for each of `rows` rows, and a prompt of `tokens` tokens."""
        decoding = self.decode_plan(rows, context)
        return StepPlan(0, (*decoding.chunks, self._prompt(rows, tokens, rows)))

    def _prompt(self, row: int, tokens: int, slot: int) -> Chunk:
        rng = random.Random(tokens)
        ids = [rng.randrange(self.spec.vocab_size) for _ in range(tokens)]
        return self._chunk(row, 0, ids, np.empty((0, 3), np.int32), slot)

    def _chunk(
        self, row: int, start: int, ids: Sequence[int], segments: np.ndarray, slot: int
    ) -> Chunk:
        return Chunk(
            request_id=str(row),
            start=start,
            token_ids=ids,
            segments=array("i", segments.astype(np.int32).tobytes()),
            slots=array("i", range(slot, slot + len(ids))),
            sample=GREEDY,
        )

    # Attention alone.

    def prepared(self, batch: AttentionBatch) -> AttentionBatch:
        return self.kernels.prepare(batch, self.layout, self.device)

    def qkv(self, tokens: int) -> Tensor:
        return torch.randn(tokens, self.layout.qkv_size, device=self.device).to(self.dtype)

    def attend(self, qkv: Tensor, batch: AttentionBatch, layer: int) -> Tensor:
        """Run attention of a prepared batch; alternate `layer`, so that KV is not in the cache."""
        k_cache, v_cache = self.layers[layer % len(self.layers)]
        scale = self.layout.head_dim**-0.5
        return self.kernels.attention(qkv, self.layout, k_cache, v_cache, batch, scale)

    def attention_bytes(self, contexts: Sequence[int]) -> float:
        """Bytes of KV of the contexts, and of Q and the output of one token per row."""
        kv = 2 * sum(contexts) * self.layout.kv_size * self.layers[0][0].element_size()
        return kv + 2 * len(contexts) * self.layout.q_size * self.dtype.itemsize


class Switched:
    """Sets an attribute within a `with` block."""

    def __init__(self, owner: object, name: str, value: object) -> None:
        self._owner, self._name, self._value = owner, name, value

    def __enter__(self) -> None:
        self._before = getattr(self._owner, self._name)
        setattr(self._owner, self._name, self._value)

    def __exit__(self, *_: object) -> None:
        setattr(self._owner, self._name, self._before)


def full_segments(blocks: np.ndarray, context: int) -> np.ndarray:
    """Segments [n, 3] of full blocks, the last one possibly partial."""
    segments = np.stack([blocks, np.zeros_like(blocks), np.full_like(blocks, BLOCK)], axis=1)
    if len(blocks):
        segments[-1, 2] = context - BLOCK * (len(blocks) - 1)
    return segments


def batch_of(segments: Sequence[np.ndarray], shared: SharedParts | None = None) -> AttentionBatch:
    """A batch with one new token per row."""
    lengths = np.array([len(each) for each in segments], np.int32)
    start = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    listed = np.concatenate([*segments, np.empty((0, 3), np.int32)]).astype(np.int32)
    return AttentionBatch(
        query_start=torch.arange(len(segments) + 1, dtype=torch.int32),
        segment_start=torch.from_numpy(start),
        segments=torch.from_numpy(listed),
        shared=shared,
    )


def shared_by_all(blocks: np.ndarray, rows: int) -> SharedParts:
    """A prefix that all rows share."""
    return SharedParts(
        row_start=torch.tensor([0, rows], dtype=torch.int32),
        rows=torch.arange(rows, dtype=torch.int32),
        segment_start=torch.tensor([0, len(blocks)], dtype=torch.int32),
        segments=torch.from_numpy(full_segments(blocks, BLOCK * len(blocks))),
    )


# ---- Pipelined steps of a model.

VARIANTS = 3
"""Plans of one shape that read different blocks; they alternate."""

PIPELINED = 12
"""Consecutive steps, each launched while the previous one runs."""


@dataclass(frozen=True, slots=True)
class Bench:
    """The model and the timer of a part."""

    model: Model
    timer: Timer
    ceilings: Ceilings

    def step(self, plans: list[StepPlan]) -> Timing:
        """The time of one step, from the plan to the tokens on the host."""
        runner = self.model.runner
        return self.timer.by_the_clock(lambda i: runner.execute(plans[i % len(plans)]))

    def steps_in_a_row(self, plans: list[StepPlan]) -> Timing:
        """Time per step when the host launches the next step meanwhile, as the engine does."""
        return self.rows_of_steps([plans])[0]

    def rows_of_steps(self, series: Sequence[list[StepPlan]]) -> list[Timing]:
        """Likewise for several lists of plans that are compared; they alternate."""
        launch = getattr(self.model.runner, "launch", None)
        if launch is None:
            execute = self.model.runner.execute
            return self.timer.by_the_clock_in_turn(
                [lambda i, plans=plans: execute(plans[i % len(plans)]) for plans in series]
            )

        def run(plans: list[StepPlan]) -> None:
            running = None
            for number in range(PIPELINED):
                launched = launch(plans[number % len(plans)])
                if running is not None:
                    running.result()
                running = launched
            running.result()

        runs = [lambda _, plans=plans: run(plans) for plans in series]
        return [whole.over(PIPELINED) for whole in self.timer.by_the_clock_in_turn(runs)]

    def kernels(self, runs: Sequence[Run]) -> list[Timing]:
        """Times of kernels that launch work and never wait for it; they alternate."""
        return self.timer.alternating(runs, recorded=self.model.has_graphs)
