"""What this machine has to compute with, which of it would be used, and whether it is right."""

from __future__ import annotations

import importlib.util
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.plan import KvCopies
from bros.executor.cuda.kv_storage import cuda_kv_storage
from bros.executor.kv_storage import KV_BLOCK_SIZE, KvMemory, KvStorage
from bros.executor.models.spec import ModelSpec
from bros.executor.target import CPU, Target, choose_target, find_cuda, kernels_for
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import Kernels
from bros.kernels.reference import ReferenceKernels
from bros.kernels.self_test import Check, check_kernels

_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_CPU_TYPES = ((_FP32, _FP32), (_FP32, _BF16), (_FP32, _FP16))
_CUDA_TYPES = ((_FP32, _FP32), (_BF16, _BF16), (_FP16, _FP16))
_HOW_TO_BUILD = "the compiled kernels were not built; install g++ or clang++ and reinstall bros"
_HOW_TO_COPY = (
    "the package cupy, which copies KV between the GPU and the host, is not installed; install "
    "bros[cuda], or do without copies by --on-pressure recompute"
)
_MIB = 2**20
_COPY_BLOCKS = 6

SMALL_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
}
"""As in a config.json; for trying what there is on it."""


@dataclass(frozen=True, slots=True)
class BackEnd:
    """A kernel back end.

    note: what it is, or why it cannot be used.
    open: None then.
    """

    name: str
    device: torch.device
    note: str
    open: Callable[[], Kernels] | None
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """What the engine would run on with these options.

    problem: why it would not start.

    kernels: as in --kernels, but never auto.
    """

    target: Target | None
    kernels: str
    problem: str | None = None

    @property
    def on_cuda(self) -> bool:
        return self.target is not None and self.target.device.type == "cuda"


def choose(config: EngineConfig) -> ChosenBackend:
    """Follows the same rules as the loader, but reports instead of raising."""
    cuda = find_cuda()
    try:
        target = choose_target(config, cuda, size=config.tp)
        name = kernels_for(config, target, cuda)
    except ConfigError as error:
        return ChosenBackend(None, config.kernels, str(error))
    if target.device.type == "cuda":
        copies = config.on_pressure == "checkpoint"
        missing = copies and importlib.util.find_spec("cupy") is None
        return ChosenBackend(target, name, _HOW_TO_COPY if missing else None)
    compiled = _cpu_levels()
    if name == "cpu" and not compiled:
        return ChosenBackend(target, name, f"--kernels cpu: {_HOW_TO_BUILD}")
    return ChosenBackend(target, ("cpu" if compiled else "reference") if name == "auto" else name)


def gpu_facts() -> list[tuple[str, str]]:
    """(what, value) pairs about the GPU, or why there is none."""
    cuda = find_cuda()
    if cuda.problem is not None:
        return [("GPU", f"not used: {cuda.problem}")]
    device = torch.cuda.get_device_properties(0)
    free, total = torch.cuda.mem_get_info(0)
    return [
        ("GPU", f"{device.name}, compute capability {device.major}.{device.minor}"),
        ("GPU memory", f"{free // _MIB:,} MiB free of {total // _MIB:,} MiB"),
        ("CUDA of torch", str(torch.version.cuda)),
    ]


def back_ends(choice: ChosenBackend) -> list[BackEnd]:
    """All there are, whether usable here or not."""
    reference = BackEnd(
        "reference",
        choice.target.device if choice.target and choice.kernels == "reference" else CPU,
        "plain torch; defines what is right, slow",
        ReferenceKernels,
        choice.kernels == "reference",
    )
    return [reference, *_cpu_back_ends(choice), _triton_back_end(choice)]


def check(back_end: BackEnd, seed: int) -> Iterator[Check]:
    """Against the reference. Raises whatever the back end raises."""
    assert back_end.open is not None
    types = _CUDA_TYPES if back_end.device.type == "cuda" else _CPU_TYPES
    with torch.inference_mode():
        yield from check_kernels(back_end.open(), back_end.device, types, seed)


def check_copies(target: Target) -> float:
    """The largest error of KV that went to the host and came back to other slots; 0 is right.

    Raises ConfigError if copies cannot be made, or whatever making them raises.
    """
    spec = ModelSpec.from_config(SMALL_MODEL)
    device, cuda = target.device, target.device.type == "cuda"
    kv: KvMemory = KvStorage(spec, _COPY_BLOCKS, _FP32, _COPY_BLOCKS)
    if cuda:
        kv = cuda_kv_storage(spec, _COPY_BLOCKS, _FP32, _COPY_BLOCKS, device)
    generator = torch.Generator().manual_seed(0)
    caches = [cache for layer in kv.layers for cache in layer]
    slots = torch.randperm(_COPY_BLOCKS * KV_BLOCK_SIZE, generator=generator)
    there, elsewhere = slots.chunk(2)
    host = array("i", range(len(there)))
    with torch.inference_mode():
        for cache in caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))
        expected = [_tokens(cache, there) for cache in caches]
        kv.copy(KvCopies(out_device=array("i", there.tolist()), out_host=host))
        for cache in caches:
            cache.zero_()  # what is copied has to be what was there before
        kv.copy(KvCopies(back_device=array("i", elsewhere.tolist()), back_host=host))
        kv.wait_for_layer(len(kv.layers) - 1)
        found = [_tokens(cache, elsewhere) for cache in caches]
    kv.clear()
    errors = (got - wanted for got, wanted in zip(found, expected, strict=True))
    return float(torch.stack([error.abs().max() for error in errors]).max())


def _tokens(cache: Tensor, slots: Tensor) -> Tensor:
    """[slots, kv_heads, head_dim], on the CPU."""
    at = slots.to(cache.device)
    return cache[at // KV_BLOCK_SIZE, :, at % KV_BLOCK_SIZE].cpu()


def _cpu_levels() -> Sequence[str]:
    try:
        # Optional: without a compiler it does not exist.
        from bros.kernels.cpu_ops import levels
    except ImportError:
        return ()
    return levels()


def _cpu_back_ends(choice: ChosenBackend) -> Iterator[BackEnd]:
    found = _cpu_levels()
    if not found:
        yield BackEnd("cpu", CPU, _HOW_TO_BUILD, None, choice.kernels == "cpu")
        return
    # Optional, as above; here it is there.
    from bros.kernels.cpu_ops import CpuKernels

    for level in found:
        best = level == found[0]
        yield BackEnd(
            f"cpu-{level}",
            CPU,
            "compiled; the best this processor can run" if best else "compiled",
            lambda level=level: CpuKernels(level),  # type: ignore[misc]
            best and choice.kernels == "cpu" and choice.problem is None,
        )


def _triton_back_end(choice: ChosenBackend) -> BackEnd:
    cuda = find_cuda()
    device = CPU if cuda.problem is not None else torch.device("cuda", 0)
    in_use = choice.kernels == "triton" and choice.on_cuda
    try:
        select_kernels("triton", device)
    except ConfigError as error:
        note = cuda.problem if cuda.problem is not None and cuda.triton else str(error)
        return BackEnd("triton", device, note.removeprefix("--kernels triton: "), None, in_use)
    note = "compiled for this GPU at first use" if cuda.problem is None else "interpreted"
    return BackEnd("triton", device, note, lambda: select_kernels("triton", device), in_use)
