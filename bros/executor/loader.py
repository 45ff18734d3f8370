"""From a configuration and a model folder to a running executor."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bros.core.config import EngineConfig, parse_bytes
from bros.core.errors import ConfigError, ModelError
from bros.core.interfaces import EngineInfo
from bros.core.plan import Chunk, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.cuda.graphs import CudaRecorder, GraphSizes, StepGraphs, recorded_or_warn
from bros.executor.cuda.kv_storage import Buffers, cuda_kv_storage
from bros.executor.feed import InputFeed
from bros.executor.kv_storage import (
    DTYPES,
    KV_BLOCK_SIZE,
    KvMemory,
    KvStorage,
    blocks_in,
    bytes_per_block,
)
from bros.executor.model_store import ModelFiles
from bros.executor.models.build import build_decoder
from bros.executor.models.decoder import Decoder
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import ALONE, Ranks
from bros.executor.parallel.sharding import shards_of
from bros.executor.runner import LaunchingRunner, ModelRunner
from bros.executor.sampler import DeviceStepSampler, Draw, HostStepSampler, NoStepSampler, Sampler
from bros.executor.target import (
    choose_target,
    device_name,
    find_cuda,
    grouping_for,
    kernels_for,
    kv_dtype_for,
    self_part_for,
)
from bros.executor.weights import RandomWeights, Weights, WeightSource
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import HeadLayout
from bros.kernels.staging import Staging

# ---- How much GPU memory is left for the KV cache once the model and its largest step have theirs.


_GIB = 2**30
_MOST_CONTEXT_BLOCKS = 2**16
"""In the step that is measured, over all rows; reading them takes no memory, listing them does."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes.

    total: of the device.
    elsewhere: other processes, and what CUDA keeps for itself.
    peak: the most that this process needs beside the KV cache, weights included.

    Recorded steps take some hundred MiB more, out of what `utilization` leaves.
    """

    total: int
    elsewhere: int
    peak: int

    def room(self, utilization: float) -> int:
        """What is left of `utilization` of the device; less than nothing if it is overdrawn."""
        return int(self.total * utilization) - self.elsewhere - self.peak

    def explain(self, utilization: float) -> ConfigError:
        """For a room in which not even one block fits."""
        return ConfigError(
            f"--gpu-memory-utilization: {utilization:g} of {self.total / _GIB:.1f} GiB leave no "
            f"room for a KV cache; the model and its largest step take {self.peak / _GIB:.1f} GiB "
            f"and others {self.elsewhere / _GIB:.1f} GiB. Raise it, or lower --max-batch-tokens or "
            "--max-num-seqs"
        )


def measure_use(runner: ModelRunner, plan: StepPlan, device: torch.device, later: int) -> MemoryUse:
    """Run the plan once and see what it took. CUDA only.

    later: bytes of buffers that are not there yet.
    """
    torch.cuda.empty_cache()  # of what loading left
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    elsewhere = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return MemoryUse(total, elsewhere, peak + later)


def largest_step(rows: int, tokens: int, max_length: int, block_size: int) -> StepPlan:
    """A step of `tokens` tokens in `rows` rows, all sampled, with as much context as there may be.

    All of it lies in block 0. Its numbers mean nothing; what it takes is what counts.
    """
    rows = min(rows, tokens)
    lengths = [min(tokens // rows + (row < tokens % rows), max_length) for row in range(rows)]
    spec = SampleSpec(SamplingParams(temperature=1.0, top_p=0.9, top_k=50), seed=0, output_index=0)
    chunks = []
    for row, length in enumerate(lengths):
        context = min((max_length - length) // block_size, _MOST_CONTEXT_BLOCKS // rows)
        chunks.append(chunk_in_block_0(str(row), length, context, block_size, spec))
    return StepPlan(0, tuple(chunks))


def chunk_in_block_0(
    request_id: str, size: int, context: int, block_size: int, sample: SampleSpec
) -> Chunk:
    """`size` tokens after `context` blocks: what running it takes counts, not what comes of it."""
    return Chunk(
        request_id=request_id,
        start=context * block_size,
        token_ids=[0] * size,
        segments=array("i", (0, 0, block_size) * context),
        slots=array("i", [0] * size),
        sample=sample,
    )


# ---- Steps that are run once before serving, so that no request waits for what comes only once.
#
# Triton compiles a kernel when it is first launched with a new size, which takes a second or more;
# recorded steps launch those of decoding only. Libraries set themselves up in the same way.


_LONGEST_CHUNK = 128
"""Tiles of queries have 16 to 128 rows, of which a token has one at least."""

_CONTEXT_BLOCKS = 64  # enough for a context in several parts that are merged

_GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0, output_index=0)
_DRAWN = replace(_GREEDY, params=SamplingParams(temperature=1.0, top_p=0.9, top_k=50))


def warm_up(runner: ModelRunner, max_length: int, block_size: int) -> None:
    """Run what serving may launch. Only for a runner whose KV cache holds nothing yet: this leaves
    numbers in block 0 that mean nothing."""
    for plan in warm_up_plans(max_length, block_size):
        runner.execute(plan)


def warm_up_plans(max_length: int, block_size: int) -> list[StepPlan]:
    """Steps with a chunk of 2, 4, 8, ... tokens beside a row that decodes, as far as max_length
    tokens go: whatever the number of heads, one for each size of a tile. In the first one both
    rows are drawn; then one is greedy, so that both ways of choosing meet in a step."""
    plans: list[StepPlan] = []
    size = 2
    while size <= min(_LONGEST_CHUNK, max_length):
        context = min((max_length - size) // block_size, _CONTEXT_BLOCKS)
        chunks = (
            chunk_in_block_0("chunk", size, context, block_size, _DRAWN),
            chunk_in_block_0("decode", 1, context, block_size, _GREEDY if plans else _DRAWN),
        )
        plans.append(StepPlan(len(plans), chunks))
        size *= 2
    return plans


_CPU_KV_MEMORY = "1GiB"


def load_executor(
    config: EngineConfig, files: ModelFiles, ranks: Ranks = ALONE
) -> tuple[ModelRunner, EngineInfo]:
    """Load the weights, allocate the KV cache and say what came of it.

    Also sets the number of threads torch uses in this process (config.threads, or its share of
    the cores that this process may run on).

    ranks: that run the model together. All of them call this, each loads its part of the weights
    and of the KV cache, and their infos are the same. The runners of all but the first choose no
    tokens; for what they are given see parallel/runner.py.

    What auto stands for is said in target.py. On a GPU the KV cache gets what is left of
    config.gpu_memory_utilization, unless config says how much.

    Raises ModelError if the model cannot be read or is not supported, ConfigError if an option
    asks for what the machine, the model or the KV cache cannot give, and RanksLostError.
    """
    settings = _read_json(files.folder / "config.json")
    spec = ModelSpec.from_config(settings)
    eos = _eos_token_ids(files.folder, settings, spec.vocab_size)
    with WeightSource(files.folder) as source:
        return _Loader(config, spec, source, ranks).load(files.name, eos)


def random_executor(
    spec: ModelSpec,
    config: EngineConfig,
    seed: int = 0,
    *,
    drawn_on: str | None = None,
    ranks: Ranks = ALONE,
) -> tuple[ModelRunner, EngineInfo]:
    """Like load_executor, for a model of this shape that was never trained. Reads no file.

    drawn_on: "cpu" or "cuda", whose random numbers to take (see RandomWeights); "cpu" gives the
    same model on every device, by default they are drawn where they are needed, which is fast.
    """
    source = RandomWeights(seed, None if drawn_on is None else torch.device(drawn_on))
    return _Loader(config, spec, source, ranks).load(f"random-{spec.architecture}", ())


class _Loader:
    """The steps from a configuration to a runner.

    Ranks take them together: what is asked of `ranks` is asked by all in the same order.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, source: Weights, ranks: Ranks
    ) -> None:
        cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(config.threads_of_rank(cores, ranks.size))
        cuda = find_cuda()
        self._config = config
        self._spec = spec
        self._local = shards_of(spec, ranks.size)[ranks.rank].local
        self._source = source
        self._ranks = ranks
        self._target = choose_target(config, cuda, ranks.rank, ranks.size)
        self._device = self._target.device
        self._bounds = config.step_bounds(self._device.type)
        self._kernels_name = kernels_for(config, self._target, cuda)
        local = self._local
        self._layout = HeadLayout(local.num_heads, local.num_kv_heads, local.head_dim)
        self_part = self_part_for(config, self._target, self._kernels_name, self._layout)
        self._kernels = select_kernels(self._kernels_name, self._device, self_part)
        self._kv_dtype = kv_dtype_for(config, self._target)
        self._shares = config.shared_attention == "on"
        self._grouping = grouping_for(self._kernels.name, KV_BLOCK_SIZE) if self._shares else None
        staging = None if self._device.type == "cpu" else Staging(self._device)
        self._feed = InputFeed(self._kernels, self._layout, self._device, staging)

    def load(self, name: str, eos_token_ids: tuple[int, ...]) -> tuple[ModelRunner, EngineInfo]:
        """name: what the model is called."""
        config, spec, ranks = self._config, self._spec, self._ranks
        num_host_blocks = ranks.minimum(
            _num_host_blocks(config, self._local, DTYPES[self._kv_dtype])
        )
        num_blocks = self._asked_blocks()
        reach = _max_model_len(config, spec, num_blocks)
        decoder = self._decoder(reach)
        if num_blocks is None:
            num_blocks = ranks.minimum(self._blocks_left(decoder, reach, num_host_blocks))
        max_model_len = _max_model_len(config, spec, num_blocks)
        kv = self._kv(num_blocks, num_host_blocks)
        runner = self._runner(decoder, kv, self._graphs(decoder, kv, max_model_len, num_blocks))
        if self._device.type != "cpu":
            warm_up(runner, max_model_len, KV_BLOCK_SIZE)
        info = EngineInfo(
            model=name,
            weights=self._target.weights,
            kernels=self._kernels.name,
            kv_dtype=self._kv_dtype,
            device=device_name(self._device),
            max_model_len=max_model_len,
            vocab_size=spec.vocab_size,
            block_size=KV_BLOCK_SIZE,
            num_kv_blocks=num_blocks,
            num_host_kv_blocks=num_host_blocks,
            policy=config.policy,
            eos_token_ids=eos_token_ids,
            max_queue=config.max_queue,
            grouping=self._grouping,
            tp=ranks.size,
        )
        return runner, info

    def _asked_blocks(self) -> int | None:
        """None: as many as fit the GPU."""
        config, memory = self._config, self._config.kv_memory
        if config.kv_blocks is not None:
            return config.kv_blocks
        if memory is None and self._device.type != "cpu":
            return None
        fitting = blocks_in(
            parse_bytes(memory or _CPU_KV_MEMORY), self._local, DTYPES[self._kv_dtype]
        )
        return self._ranks.minimum(fitting)

    @torch.inference_mode()
    def _decoder(self, max_positions: int) -> Decoder:
        try:
            return build_decoder(
                self._spec,
                self._source,
                self._kernels,
                self._target,
                max_positions,
                self._ranks,
            )
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the model's weights in {self._target.weights} do not fit the memory of the GPU"
            ) from error

    def _blocks_left(self, decoder: Decoder, max_length: int, num_host_blocks: int) -> int:
        """How many blocks fit what the largest step leaves of the GPU's memory."""
        config, dtype = self._config, DTYPES[self._kv_dtype]
        plan = largest_step(*self._bounds, max_length, KV_BLOCK_SIZE)
        runner = self._runner(decoder, self._kv(1, 0), None)
        later = Buffers().total_bytes(self._local, dtype, num_host_blocks)
        try:
            use = measure_use(runner, plan, self._device, later)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"--max-batch-tokens: a step of {self._bounds.tokens} tokens does not fit the "
                "GPU beside the model; give less, or fewer --max-num-seqs"
            ) from error
        room = use.room(config.gpu_memory_utilization)
        if room < bytes_per_block(self._local, dtype):
            raise use.explain(config.gpu_memory_utilization)
        return blocks_in(room, self._local, dtype)

    def _kv(self, num_blocks: int, num_host_blocks: int) -> KvMemory:
        sizes = (self._local, num_blocks, DTYPES[self._kv_dtype], num_host_blocks)
        if self._device.type == "cpu":
            return KvStorage(*sizes)
        return cuda_kv_storage(*sizes, self._device)

    def _runner(self, decoder: Decoder, kv: KvMemory, graphs: StepGraphs | None) -> ModelRunner:
        if self._ranks.rank > 0:
            return ModelRunner(decoder, kv, self._feed, NoStepSampler(), graphs=graphs)
        if self._device.type == "cpu":
            return ModelRunner(decoder, kv, self._feed, HostStepSampler(Sampler()))
        step_sampler = DeviceStepSampler(Sampler(), self._draw())
        return LaunchingRunner(decoder, kv, self._feed, step_sampler, graphs=graphs)

    def _draw(self) -> Draw | None:
        if self._kernels_name != "triton":
            return None
        # Late, because Triton need not be installed.
        from bros.executor.cuda.device_sampler import draw

        return draw

    def _graphs(
        self, decoder: Decoder, kv: KvMemory, max_model_len: int, num_blocks: int
    ) -> StepGraphs | None:
        if self._config.cuda_graphs == "off" or self._device.type != "cuda":
            return None
        sizes = GraphSizes.of(
            self._bounds.rows, max_model_len, num_blocks, KV_BLOCK_SIZE, self._shares
        )
        return recorded_or_warn(
            lambda: StepGraphs(
                decoder,
                kv.layers,
                self._kernels,
                self._layout,
                self._device,
                self._spec.vocab_size,
                sizes,
                CudaRecorder(),
            )
        )


def _num_host_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """How many blocks of KV may be kept on the host; memory for less than one is none."""
    if config.on_pressure != "checkpoint":
        return 0
    if config.host_kv_blocks is not None:
        return config.host_kv_blocks
    return parse_bytes(config.host_kv_memory) // bytes_per_block(spec, dtype)


def _max_model_len(config: EngineConfig, spec: ModelSpec, num_blocks: int | None) -> int:
    """The longest prompt + output: the least of what was asked, the model and the KV cache.

    num_blocks: None while it is unknown.
    """
    asked = config.max_model_len
    cached = spec.max_positions if num_blocks is None else num_blocks * KV_BLOCK_SIZE
    if asked is not None and asked > spec.max_positions:
        raise ConfigError(
            f"--max-model-len: {asked} is more than the {spec.max_positions} tokens this model "
            f"was made for"
        )
    if asked is not None and asked > cached:
        raise ConfigError(
            f"--max-model-len: {asked} tokens do not fit the KV cache of {cached}; give more "
            "--kv-memory or --kv-blocks"
        )
    length = min(asked or spec.max_positions, spec.max_positions, cached)
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
