"""Loads a model and sizes its KV cache: from an EngineConfig and a model folder to an executor."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bros.core.config import EngineConfig, parse_bytes
from bros.core.errors import ConfigError, ModelError
from bros.core.files import read_model_json_object, read_special_tokens, read_templates
from bros.core.interfaces import EngineInfo
from bros.core.machine import available_cores
from bros.core.plan import Chunk, SampleSpec, StepPlan
from bros.core.request import Pooling, SamplingParams
from bros.executor.cuda.graphs import CudaGraphCapture, GraphSizes, StepGraphs, capture_or_warn
from bros.executor.cuda.kv_storage import CopyBuffers, cuda_kv_storage
from bros.executor.inputs import InputUploader
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
from bros.executor.models.encoder import ENCODERS
from bros.executor.models.pooling import embedding_info
from bros.executor.models.spec import ModelSpec
from bros.executor.parallel.ranks import SINGLE_RANK, Ranks
from bros.executor.parallel.sharding import shards_of
from bros.executor.runner import LaunchingRunner, ModelRunner
from bros.executor.sampler import (
    Best,
    DeviceStepSampler,
    HostStepSampler,
    NoStepSampler,
    NumpySampler,
    RowSampler,
    best_by_torch,
)
from bros.executor.target import (
    choose_target,
    device_name,
    find_cuda,
    grouping_for,
    kernels_for,
    kv_dtype_for,
    xformers_for,
)
from bros.executor.weights import RandomWeights, Weights, WeightSource
from bros.kernels.dispatch import compiled_kernels, select_kernels
from bros.kernels.interface import HeadLayout
from bros.kernels.staging import Staging

logger = logging.getLogger(__name__)

# ---- GPU memory for the KV cache: what the model and its largest step leave.


_GIB = 2**30
_MAX_CONTEXT_BLOCKS = 2**16
"""Context of all rows in the measured step. Only the lists of segments take memory, not the
attention that reads them."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """GPU memory in bytes.

    total: of the device.
    used_by_others: by other processes and by CUDA itself.
    peak: the most that this process needs beside the KV cache, weights included.

    CUDA graphs need some hundred MiB more, from the share that --gpu-memory-utilization leaves.
    """

    total: int
    used_by_others: int
    peak: int

    def kv_cache_bytes(self, utilization: float) -> int:
        """What is left for the KV cache of `utilization` of the device; may be negative."""
        return int(self.total * utilization) - self.used_by_others - self.peak

    def no_room_error(self, utilization: float) -> ConfigError:
        """The error if kv_cache_bytes are too few for one block."""
        return ConfigError(
            f"--gpu-memory-utilization: {utilization:g} of {self.total / _GIB:.1f} GiB leave no "
            f"room for a KV cache; the model and its largest step take {self.peak / _GIB:.1f} GiB "
            f"and other processes {self.used_by_others / _GIB:.1f} GiB. Raise it, or lower "
            "--max-batch-tokens or --max-num-seqs"
        )


def measure_memory(
    runner: ModelRunner, plan: StepPlan, device: torch.device, later: int
) -> MemoryUse:
    """Run the plan once and measure the memory that it took. CUDA only.

    later: bytes of buffers that are allocated later; they count as used.
    """
    torch.cuda.empty_cache()  # releases temporary memory of loading
    torch.cuda.reset_peak_memory_stats(device)
    runner.execute(plan)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    used_by_others = total - free - torch.cuda.memory_reserved(device)
    torch.cuda.empty_cache()
    return MemoryUse(total, used_by_others, peak + later)


def largest_step(rows: int, tokens: int, max_length: int, block_size: int) -> StepPlan:
    """A dummy step of `tokens` tokens in `rows` rows, all sampled, with the longest context.

    All slots and context lie in block 0: only the memory that the step takes matters.
    """
    rows = min(rows, tokens)
    lengths = [min(tokens // rows + (row < tokens % rows), max_length) for row in range(rows)]
    spec = SampleSpec(SamplingParams(temperature=1.0, top_p=0.9, top_k=50), seed=0)
    chunks = []
    for row, length in enumerate(lengths):
        context = min((max_length - length) // block_size, _MAX_CONTEXT_BLOCKS // rows)
        chunks.append(dummy_chunk(str(row), length, context, block_size, spec))
    return StepPlan(0, tuple(chunks))


def dummy_chunk(
    request_id: str, size: int, context: int, block_size: int, sample: SampleSpec
) -> Chunk:
    """`size` tokens after `context` blocks, all of them in block 0; its output is meaningless."""
    return Chunk(
        request_id=request_id,
        start=context * block_size,
        token_ids=[0] * size,
        segments=array("i", (0, 0, block_size) * context),
        slots=array("i", [0] * size),
        sample=sample,
    )


# ---- Warm-up: steps that run once before serving, so that no request waits for a compiler.
#
# Triton compiles a kernel when it is first launched with a new tile size, which takes a second or
# more; libraries initialize themselves on first use too. Capturing CUDA graphs compiles only the
# kernels of decode steps.


_MAX_CHUNK = 128
"""A tile of queries has 16 to 128 rows, at least one for each token."""

_CONTEXT_BLOCKS = 64  # long enough that the attention is split into parts and merged

_GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0)
_DRAWN = replace(_GREEDY, params=SamplingParams(temperature=1.0, top_p=0.9, top_k=50))


def warm_up(runner: ModelRunner, max_length: int, block_size: int) -> None:
    """Launch every kernel that serving may launch. Overwrites block 0 of the KV cache.

    Steps that may be suspended run without the graphs of mixed steps, which have other kernels.
    """
    for plan in warm_up_plans(max_length, block_size):
        runner.execute(plan, lambda: False)


def warm_up_plans(max_length: int, block_size: int) -> list[StepPlan]:
    """Steps of a decode row and a chunk of 2, 4, 8, ... tokens, up to max_length: they cover every
    tile size for any number of heads. The first step samples both rows at random; in the others the
    decode row is greedy, so that a step mixes both kinds of sampling."""
    plans: list[StepPlan] = []
    size = 2
    while size <= min(_MAX_CHUNK, max_length):
        context = min((max_length - size) // block_size, _CONTEXT_BLOCKS)
        chunks = (
            dummy_chunk("chunk", size, context, block_size, _DRAWN),
            dummy_chunk("decode", 1, context, block_size, _GREEDY if plans else _DRAWN),
        )
        plans.append(StepPlan(len(plans), chunks))
        size *= 2
    return plans


_CPU_KV_MEMORY = "1GiB"


def load_executor(
    config: EngineConfig, files: ModelFiles, ranks: Ranks = SINGLE_RANK
) -> tuple[ModelRunner, EngineInfo]:
    """Load the weights and allocate the KV cache; returns the runner and the facts about it.

    Also sets the number of torch threads in this process (config.threads, or this rank's share of
    the cores that the process may run on).

    ranks: the ranks that run the model together. All of them call this; each loads its part of the
        weights and of the KV cache and gets the same EngineInfo. Only the runner of rank 0 samples;
        parallel/runner.py drives the others.

    target.py resolves the option value auto. On a GPU the KV cache gets what is left of
    config.gpu_memory_utilization, unless config sets its size.

    Raises ModelError if the model cannot be read or is not supported, ConfigError if the machine,
    the model or the KV cache cannot satisfy an option, and RanksLostError.
    """
    settings = model_settings(files)
    spec = ModelSpec.from_config(settings)
    eos = _eos_token_ids(files.folder, settings, spec.vocab_size)
    default = Pooling.LAST
    embedding = embedding_info(config.pooling, files.folder, settings, spec.hidden_size, default)
    if embedding.pooling is Pooling.FIRST:
        raise ConfigError("--pooling first: the first token of a decoder knows no other token")
    with WeightSource(files.folder) as source:
        runner, info = _Loader(config, spec, source, ranks).load(files.name, eos)
    return runner, replace(info, embedding=embedding)


def is_encoder(files: ModelFiles) -> bool:
    """Whether `encoder_runner.load_encoder` loads this model, and not `load_executor`."""
    names = model_settings(files).get("architectures") or [""]
    return names[0] in ENCODERS


def model_settings(files: ModelFiles) -> dict[str, Any]:
    """The model's config.json. Raises ModelError."""
    path = files.folder / "config.json"
    if not path.exists():
        raise ModelError(f"{path} cannot be read: there is no such file")
    return read_model_json_object(path)


def random_executor(
    spec: ModelSpec,
    config: EngineConfig,
    *,
    rng_device: str | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> tuple[ModelRunner, EngineInfo]:
    """Like load_executor, with random weights for a model of this shape. Reads no file.

    rng_device: "cpu" or "cuda", the device that generates the weights (see RandomWeights). "cpu"
        gives the same model on every device; the default, the device of each tensor, is fast.
    """
    source = RandomWeights(rng_device=None if rng_device is None else torch.device(rng_device))
    return _Loader(config, spec, source, ranks).load(f"random-{spec.architecture}", ())


class _Loader:
    """The steps from a configuration to a runner.

    All ranks take the same steps, so that they call the collectives of `ranks` in the same order.
    """

    def __init__(
        self, config: EngineConfig, spec: ModelSpec, source: Weights, ranks: Ranks
    ) -> None:
        torch.set_num_threads(config.threads_of_rank(available_cores(), ranks.size))
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
        chunk_attention = xformers_for(config, self._target, self._kernels_name, self._layout)
        # Chunks are computed by xformers only in steps that are not recorded.
        self._records_chunks = chunk_attention is None
        self._kernels = select_kernels(self._kernels_name, self._device, chunk_attention)
        self._kv_dtype = kv_dtype_for(config, self._target, self._kernels.name)
        self._share_prefixes = config.shared_attention == "on"
        self._grouping = (
            grouping_for(self._kernels.name, KV_BLOCK_SIZE) if self._share_prefixes else None
        )
        staging = None if self._device.type == "cpu" else Staging(self._device)
        self._uploader = InputUploader(self._kernels, self._layout, self._device, staging)

    def load(self, name: str, eos_token_ids: tuple[int, ...]) -> tuple[ModelRunner, EngineInfo]:
        """name: of the model, for EngineInfo."""
        config, spec, ranks = self._config, self._spec, self._ranks
        num_host_blocks = ranks.minimum(
            _num_host_blocks(config, self._local, DTYPES[self._kv_dtype])
        )
        num_blocks = self._configured_blocks()
        max_positions = _max_model_len(config, spec, num_blocks)
        decoder = self._decoder(max_positions)
        if num_blocks is None:
            num_blocks = ranks.minimum(self._blocks_left(decoder, max_positions, num_host_blocks))
        max_model_len = _max_model_len(config, spec, num_blocks)
        is_cut = max_model_len < spec.max_positions and max_model_len == spec.sliding_window
        if is_cut and config.max_model_len is None:
            logger.warning(_attends_to(max_model_len))
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

    def _configured_blocks(self) -> int | None:
        """None if the options do not say: then as many as fit the GPU's memory."""
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
        """How many blocks fit into the GPU memory that the largest step leaves."""
        config, dtype = self._config, DTYPES[self._kv_dtype]
        plan = largest_step(*self._bounds, max_length, KV_BLOCK_SIZE)
        runner = self._runner(decoder, self._kv(1, 0), None)
        later = CopyBuffers().total_bytes(self._local, dtype, num_host_blocks)
        try:
            use = measure_memory(runner, plan, self._device, later)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"--max-batch-tokens: a step of {self._bounds.tokens} tokens does not fit the "
                "GPU beside the model; give less, or fewer --max-num-seqs"
            ) from error
        size = use.kv_cache_bytes(config.gpu_memory_utilization)
        if size < bytes_per_block(self._local, dtype):
            raise use.no_room_error(config.gpu_memory_utilization)
        return blocks_in(size, self._local, dtype)

    def _kv(self, num_blocks: int, num_host_blocks: int) -> KvMemory:
        sizes = (self._local, num_blocks, DTYPES[self._kv_dtype], num_host_blocks)
        if self._device.type == "cpu":
            return KvStorage(*sizes)
        return cuda_kv_storage(*sizes, self._device)

    def _runner(self, decoder: Decoder, kv: KvMemory, graphs: StepGraphs | None) -> ModelRunner:
        parts, vocab_size = (decoder, kv, self._uploader), self._spec.vocab_size
        if self._ranks.rank > 0:
            return ModelRunner(*parts, NoStepSampler(), vocab_size=vocab_size, graphs=graphs)
        if self._device.type == "cpu":
            step_sampler = HostStepSampler(self._row_sampler())
            return ModelRunner(*parts, step_sampler, vocab_size=vocab_size)
        device_sampler = self._device_sampler()
        return LaunchingRunner(*parts, device_sampler, vocab_size=vocab_size, graphs=graphs)

    def _row_sampler(self) -> RowSampler:
        kernels = None if self._kernels_name == "reference" else compiled_kernels()
        if kernels is None:
            return NumpySampler()
        # Imported late: the extension is optional.
        from bros.executor.native_sampler import NativeSampler

        return NativeSampler(kernels)

    def _device_sampler(self) -> DeviceStepSampler:
        if self._kernels_name != "triton":
            return DeviceStepSampler(self._row_sampler())
        # Imported late: Triton is optional.
        from bros.executor.cuda.device_sampler import draw

        return DeviceStepSampler(self._row_sampler(), draw, self._best)

    @property
    def _best(self) -> Best:
        if self._kernels_name != "triton":
            return best_by_torch
        # Imported late: Triton is optional.
        from bros.executor.cuda.device_sampler import best

        return best

    def _graphs(
        self, decoder: Decoder, kv: KvMemory, max_model_len: int, num_blocks: int
    ) -> StepGraphs | None:
        if self._config.cuda_graphs == "off" or self._device.type != "cuda":
            return None
        shape = (self._bounds.rows, max_model_len, num_blocks, KV_BLOCK_SIZE, self._share_prefixes)

        def capture(tokens: int) -> StepGraphs:
            return StepGraphs(
                decoder,
                kv.layers,
                self._kernels,
                self._layout,
                self._device,
                self._spec.vocab_size,
                GraphSizes.of(*shape, tokens),
                CudaGraphCapture(),
                self._best,
            )

        graphs, tokens = None, self._bounds.tokens if self._records_chunks else 0
        if tokens:
            graphs = capture_or_warn(lambda: capture(tokens), "Steps with chunks of prompts")
        if graphs is None:
            graphs = capture_or_warn(lambda: capture(0))
        torch.cuda.empty_cache()  # releases what warming up took
        return self._agreed(graphs)

    def _agreed(self, graphs: StepGraphs | None) -> StepGraphs | None:
        """The graphs that all ranks have: padded steps of one would not match those of another."""
        kinds = self._ranks.minimum(0 if graphs is None else 1 + graphs.has_mixed)
        if graphs is None or not kinds:
            return None
        if kinds == 1:
            graphs.drop_mixed()
        return graphs


def _num_host_blocks(config: EngineConfig, spec: ModelSpec, dtype: torch.dtype) -> int:
    """The size of the host pool in blocks; 0 if the memory is too little for one."""
    if config.on_pressure != "checkpoint":
        return 0
    if config.host_kv_blocks is not None:
        return config.host_kv_blocks
    return parse_bytes(config.host_kv_memory) // bytes_per_block(spec, dtype)


def check_max_model_len(config: EngineConfig, max_positions: int) -> None:
    """Raise ConfigError if --max-model-len is more than the `max_positions` tokens of the model."""
    if config.max_model_len is not None and config.max_model_len > max_positions:
        raise ConfigError(
            f"--max-model-len: {config.max_model_len} is more than the {max_positions} tokens this "
            "model supports"
        )


def _max_model_len(config: EngineConfig, spec: ModelSpec, num_blocks: int | None) -> int:
    """The longest prompt + output in tokens that the options, the model and the KV cache allow.

    num_blocks: None while the size of the KV cache is unknown.
    """
    check_max_model_len(config, spec.max_positions)
    asked = config.max_model_len
    cached = spec.max_positions if num_blocks is None else num_blocks * KV_BLOCK_SIZE
    if asked is not None and asked > cached:
        raise ConfigError(
            f"--max-model-len: {asked} tokens do not fit the KV cache of {cached}; give more "
            "--kv-memory or --kv-blocks"
        )
    longest = min(spec.max_positions, spec.sliding_window or spec.max_positions)
    if asked is not None and asked > longest:
        raise ConfigError(f"--max-model-len: {asked} is too long: {_attends_to(longest)}")
    return min(asked or longest, cached)


def _attends_to(num_tokens: int) -> str:
    return f"this model attends to the last {num_tokens} tokens only; it serves no longer contexts"


_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")
"""Tokens with which models end a turn."""


def _eos_token_ids(folder: Path, settings: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence tokens of generation_config.json if it has any, else of config.json; and
    those of the tokenizer.

    Drops ids outside the vocabulary, which some checkpoints have: they can never be sampled.
    """
    eos = read_model_json_object(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = settings.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token_id) is int for token_id in ids):
        raise ModelError(
            f"the eos_token_id of {folder} is not a token id or a list of them: {eos!r}"
        )
    try:
        found = dict.fromkeys((*ids, *_tokenizer_ends(folder)))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder}: the tokens in tokenizer_config.json or tokenizer.json, or a chat template, "
            f"cannot be read ({type(error).__name__}: {error})"
        ) from error
    return tuple(token_id for token_id in found if 0 <= token_id < vocab_size)


def _tokenizer_ends(folder: Path) -> Iterator[int]:
    """The end-of-sequence token of the tokenizer, and the ends of turns in the chat template: some
    checkpoints, mostly fine-tuned ones, name them nowhere else, and would write without an end."""
    config = read_model_json_object(folder / "tokenizer_config.json")
    eos = read_special_tokens(folder, config).get("eos_token")
    template = "".join(read_templates(folder, config).values())
    ends = {end for end in _TURN_ENDS if end in template}
    if "<|channel|>" in template:
        ends.discard("<|end|>")  # of one message there, which another one follows
    if eos is not None:
        ends.add(eos)
    decoder = config.get("added_tokens_decoder")
    if decoder:
        yield from (int(number) for number, added in decoder.items() if added["content"] in ends)
        return
    for added in read_model_json_object(folder / "tokenizer.json").get("added_tokens") or ():
        if added["content"] in ends:
            yield int(added["id"])
