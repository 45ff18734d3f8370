"""Runners put together as on a GPU, on the CPU: plain weights, staged inputs, recorded steps."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bros.core.plan import Chunk, SampleSpec, StepPlan
from bros.executor.cuda.graphs import GraphSizes, StepGraphs
from bros.executor.inputs import InputUploader
from bros.executor.kv_storage import KvStorage
from bros.executor.models.build import build_decoder
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import SINGLE_RANK, Ranks
from bros.executor.parallel.sharding import shards_of
from bros.executor.runner import LaunchingRunner, ModelRunner
from bros.executor.sampler import DeviceStepSampler, HostStepSampler, NumpySampler, best_by_torch
from bros.executor.target import CPU, Target
from bros.executor.weights import RandomWeights
from bros.kernels.interface import (
    AttentionBatch,
    GraphBuffers,
    GraphLimits,
    HeadLayout,
    Kernels,
    SharedParts,
)
from bros.kernels.reference import ReferenceKernels
from bros.kernels.staging import Staging
from support.checkpoints import GREEDY

VOCAB = 96
BLOCK = 16
MAX_LEN = 512


def tiny_spec(**changes: object) -> ModelSpec:
    return ModelSpec.from_config(
        {
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": MAX_LEN,
        }
        | changes
    )


OPT = ModelSpec.from_config(
    {
        "architectures": ["OPTForCausalLM"],
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "ffn_dim": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
)
"""Learned positions, LayerNorm, biases."""


class StaticBuffers:
    """Implements GraphBuffers: numbers at fixed places, of which the first of each are meant."""

    def __init__(self, limits: GraphLimits) -> None:
        self._limits = limits
        sizes = {
            "query_start": limits.rows + 1,
            "segment_start": limits.rows + 1,
            "segments": 3 * limits.segments,
            "row_start": limits.shared_rows + 1,
            "rows": limits.shared_rows,
            "part_start": limits.shared_rows + 1,
            "parts": 3 * limits.segments,
        }
        # What was never written would be far outside of everything.
        self._numbers = {
            name: torch.full((size,), 10**6, dtype=torch.int32) for name, size in sizes.items()
        }
        self._counts = torch.zeros(len(sizes), dtype=torch.int32)

    def fits(self, batch: AttentionBatch) -> bool:
        shared = batch.shared
        segments = len(batch.segments) + (len(shared.segments) if shared is not None else 0)
        shared_rows = len(shared.rows) if shared is not None else 0
        several = batch.query_start.diff() > 1
        return (
            batch.num_rows <= self._limits.rows
            and segments <= self._limits.segments
            and shared_rows <= self._limits.shared_rows
            and int(several.sum()) <= self._limits.chunks
            and (not several.any() or batch.query_start[-1] <= self._limits.tokens)
        )

    def write(self, batch: AttentionBatch) -> None:
        assert self.fits(batch)
        tensors = [batch.query_start, batch.segment_start, batch.segments.flatten()]
        if batch.shared is not None:
            shared = batch.shared
            tensors += [shared.row_start, shared.rows]
            tensors += [shared.segment_start, shared.segments.flatten()]
        self._counts.zero_()
        for index, (tensor, place) in enumerate(zip(tensors, self._numbers.values(), strict=False)):
            place[: len(tensor)] = tensor
            self._counts[index] = len(tensor)

    def read(self) -> AttentionBatch:
        counts = self._counts.tolist()
        query, segment, segments, row_start, rows, part_start, parts = (
            place[:count] for place, count in zip(self._numbers.values(), counts, strict=True)
        )
        shared = None
        if len(row_start):
            shared = SharedParts(row_start, rows, part_start, parts.view(-1, 3))
        return AttentionBatch(query, segment, segments.view(-1, 3), shared)


@dataclass(frozen=True, slots=True)
class StaticBatch(AttentionBatch):
    buffers: StaticBuffers = field(kw_only=True)


class RecordableKernels(ReferenceKernels):
    """Reference kernels that keep to what is promised of recorded steps, and not to more.

    Attention reads the static buffers alone, and its output for padding is NaN.
    """

    def graph_buffers(
        self, limits: GraphLimits, layout: HeadLayout, device: torch.device
    ) -> GraphBuffers:
        return StaticBuffers(limits)

    def prepare(
        self,
        batch: AttentionBatch,
        layout: HeadLayout,
        device: torch.device,
        into: GraphBuffers | None = None,
        slot_positions: Tensor | None = None,
    ) -> AttentionBatch:
        if into is None:
            return batch
        assert isinstance(into, StaticBuffers)
        into.write(batch)
        nothing = torch.zeros(0, dtype=torch.int32)
        return StaticBatch(nothing, nothing, nothing, buffers=into)

    def rope_and_cache_(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        positions: Tensor,
        slots: Tensor,
        cos_sin: Tensor | None,
        k_cache: Tensor,
        v_cache: Tensor,
        q_norm: Tensor | None = None,
        k_norm: Tensor | None = None,
        eps: float = 1e-6,
    ) -> None:
        real = slots >= 0
        rows = qkv[real]
        caches = (cos_sin, k_cache, v_cache, q_norm, k_norm, eps)
        super().rope_and_cache_(rows, layout, positions[real], slots[real], *caches)
        qkv[real] = rows

    def attention(
        self,
        qkv: Tensor,
        layout: HeadLayout,
        k_cache: Tensor,
        v_cache: Tensor,
        batch: AttentionBatch,
        scale: float,
    ) -> Tensor:
        if not isinstance(batch, StaticBatch):
            return super().attention(qkv, layout, k_cache, v_cache, batch, scale)
        real = batch.buffers.read()
        out = torch.full((len(qkv), layout.q_size), float("nan"), dtype=qkv.dtype)
        tokens = int(real.query_start[-1])
        out[:tokens] = super().attention(qkv[:tokens], layout, k_cache, v_cache, real, scale)
        return out


class Replays:
    """Records by keeping the work itself. Counts how often each recording was replayed."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        index = len(self.counts)
        self.counts.append(0)
        run()

        def replay() -> None:
            self.counts[index] += 1
            run()

        return replay


@dataclass(frozen=True, slots=True)
class Assembled:
    runner: LaunchingRunner
    kv: KvStorage
    replays: Replays


def draw(logits: Tensor, specs: Sequence[SampleSpec], indexes: Sequence[int]) -> Tensor:
    """Stands in for a device's own, and is the definition."""
    requests = [("", spec, index) for spec, index in zip(specs, indexes, strict=True)]
    found = HostStepSampler(NumpySampler())(logits, requests)
    return torch.tensor([max(0, token.token_id) for token in found], dtype=torch.int32)


def assemble(
    spec: ModelSpec | None = None,
    kernels: Kernels | None = None,
    *,
    weights: str = "fp32",
    graph_rows: int | None = None,
    graph_tokens: int = 0,
    segments: int = 2**12,
    groups: bool = False,
    kv_blocks: int = 64,
    host_blocks: int = 0,
    ranks: Ranks = SINGLE_RANK,
) -> Assembled:
    """Every runner of a spec has the same model, or its part of it.

    graph_rows: record decode steps of up to so many rows.
    graph_tokens: and mixed steps of up to so many tokens.
    """
    spec = spec or tiny_spec()
    kernels = kernels or RecordableKernels()
    target = Target(CPU, weights, packed=False)
    local = shards_of(spec, ranks.size)[ranks.rank].local
    layout = HeadLayout(local.num_heads, local.num_kv_heads, local.head_dim)
    replays = Replays()
    with torch.inference_mode():
        decoder = build_decoder(spec, RandomWeights(), kernels, target, spec.max_positions, ranks)
    kv = KvStorage(local, kv_blocks, target.dtype, host_blocks)
    uploader = InputUploader(kernels, layout, CPU, Staging(CPU))
    graphs = None
    if graph_rows is not None:
        sizes = GraphSizes(graph_rows, segments, segments, groups, graph_tokens)
        graphs = StepGraphs(
            decoder,
            kv.layers,
            kernels,
            layout,
            CPU,
            spec.vocab_size,
            sizes,
            replays,
            best_by_torch,
        )
    step_sampler = DeviceStepSampler(NumpySampler(), draw)
    runner = LaunchingRunner(
        decoder, kv, uploader, step_sampler, vocab_size=spec.vocab_size, graphs=graphs
    )
    return Assembled(runner, kv, replays)


@dataclass(slots=True)
class Scripted:
    """A request whose tokens are known; its first blocks may be those of another."""

    name: str
    tokens: Sequence[int]
    blocks: Sequence[int]
    computed: int

    def chunk(self, size: int, sample: SampleSpec | None = GREEDY) -> Chunk:
        start, end = self.computed, self.computed + size
        self.computed = end
        segments = array("i")
        for index in range(-(-start // BLOCK)):
            segments.extend((self.blocks[index], 0, min(BLOCK, start - index * BLOCK)))
        slots = (self.blocks[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, end))
        tokens = list(self.tokens[start:end])
        return Chunk(self.name, start, tokens, segments, array("i", slots), sample)

    @property
    def remaining(self) -> int:
        return len(self.tokens) - self.computed


def mixed_plans(rng: random.Random, count: int, kv_blocks: int) -> list[StepPlan]:
    """Steps of decode rows and of chunks of prompts, of which only some sample."""
    free = rng.sample(range(kv_blocks), kv_blocks)
    live: list[Scripted] = []
    plans: list[StepPlan] = []
    while len(plans) < count:
        length = rng.randint(2, 90)
        if len(free) >= -(-length // BLOCK) and (not live or rng.random() < 0.5):
            tokens = [rng.randrange(VOCAB) for _ in range(length)]
            own = [free.pop() for _ in range(-(-length // BLOCK))]
            live.append(Scripted(f"{len(plans)}-{len(live)}", tokens, own, 0))
        if not live:
            break
        chunks = []
        for request in rng.sample(live, rng.randint(1, len(live))):
            size = min(request.remaining, rng.choice([1, 1, 2, 7, 40]))
            chunks.append(request.chunk(size, GREEDY if rng.random() < 0.8 else None))
        plans.append(StepPlan(len(plans), tuple(chunks)))
        for request in [each for each in live if not each.remaining]:
            live.remove(request)
    return plans


def family_plans(
    rng: random.Random, count: int, kv_blocks: int, most_decodes: int = 8
) -> list[StepPlan]:
    """Prompts, many of which begin with blocks of an earlier one, then steps of decodes."""
    free = rng.sample(range(kv_blocks), kv_blocks)
    requests: list[Scripted] = []
    plans: list[StepPlan] = []
    for index in range(count):
        shared: list[int] = []
        prefix: list[int] = []
        if requests and rng.random() < 0.8:
            parent = rng.choice(requests)
            most = parent.computed // BLOCK
            blocks = rng.randint(0, most)
            shared, prefix = list(parent.blocks[:blocks]), list(parent.tokens[: blocks * BLOCK])
        prompt = rng.randint(1, 70)
        length = len(prefix) + prompt + rng.randint(1, most_decodes)
        need = -(-length // BLOCK) - len(shared)
        if need > len(free):
            break
        own = [free.pop() for _ in range(need)]
        tokens = prefix + [rng.randrange(VOCAB) for _ in range(length - len(prefix))]
        request = Scripted(str(index), tokens, shared + own, len(prefix))
        requests.append(request)
        plans.append(StepPlan(len(plans), (request.chunk(prompt),)))
    while live := [request for request in requests if request.remaining]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        chunks = tuple(request.chunk(1) for request in chosen)
        plans.append(StepPlan(len(plans), chunks))
    return plans


def check_alike(
    one: ModelRunner,
    other: ModelRunner,
    plans: Sequence[StepPlan],
    atol: float = 1e-4,
    least_clear: float = 1.0,
) -> None:
    """Logits, and tokens where the best two are further apart than the logits of the two are.

    least_clear: in more than so many rows per plan they have to be.
    """
    compared = 0
    for plan in plans:
        left, right = one.logits(plan).cpu(), other.logits(plan).cpu()
        torch.testing.assert_close(left, right, atol=atol, rtol=0)
        best = left.topk(2).values
        clear = best[:, 0] - best[:, 1] > 3 * atol
        first, second = one.execute(plan), other.execute(plan)
        assert first is not None and second is not None
        for is_clear, a, b in zip(clear.tolist(), first.samples, second.samples, strict=True):
            assert a == b or not is_clear
            compared += is_clear
    assert compared > least_clear * len(plans)
