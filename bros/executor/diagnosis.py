"""Checks for `bros doctor`: which devices and kernels exist, which are used, are they correct."""

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
from bros.kernels.dispatch import check_compiled, select_kernels
from bros.kernels.interface import Kernels
from bros.kernels.reference import ReferenceKernels
from bros.kernels.self_test import Check, check_kernels

_FP32, _BF16, _FP16 = torch.float32, torch.bfloat16, torch.float16
_CPU_TYPES = ((_FP32, _FP32), (_FP32, _BF16), (_FP32, _FP16))
_CUDA_TYPES = ((_FP32, _FP32), (_BF16, _BF16), (_FP16, _FP16))
_HOW_TO_BUILD = "the compiled kernels were not built; install g++ or clang++ and reinstall bros"
_HOW_TO_COPY = (
    "the package cupy, which copies KV between the GPU and the host, is not installed; install "
    "bros[cuda], or avoid these copies with --on-pressure recompute"
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
"""The config.json of a small random model, for self-tests."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A kernel backend.

    note: a description, or why the backend cannot be used.
    open: creates the kernels; None if the backend cannot be used.
    """

    name: str
    device: torch.device
    note: str
    open: Callable[[], Kernels] | None
    in_use: bool = False


@dataclass(frozen=True, slots=True)
class ChosenBackend:
    """What the engine would run on with these options.

    target: None if no device can be used.
    kernels: a value of --kernels other than auto.
    problem: why the engine would not start, None if it would.
    """

    target: Target | None
    kernels: str
    problem: str | None = None

    @property
    def on_cuda(self) -> bool:
        return self.target is not None and self.target.device.type == "cuda"


def choose_backend(config: EngineConfig) -> ChosenBackend:
    """Follows the same rules as the loader, but returns the problem instead of raising."""
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
    """(name, value) pairs about the GPU, or why it cannot be used."""
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


def backends(choice: ChosenBackend) -> list[Backend]:
    """All backends, including those that cannot be used on this machine."""
    reference = Backend(
        "reference",
        choice.target.device if choice.target and choice.kernels == "reference" else CPU,
        "plain torch, slow; the definition that other backends are tested against",
        ReferenceKernels,
        choice.kernels == "reference",
    )
    return [reference, *_cpu_backends(choice), _triton_backend(choice)]


def check_backend(backend: Backend, seed: int) -> Iterator[Check]:
    """Compare with the reference. Raises whatever the backend raises."""
    assert backend.open is not None
    types = _CUDA_TYPES if backend.device.type == "cuda" else _CPU_TYPES
    with torch.inference_mode():
        yield from check_kernels(backend.open(), backend.device, types, seed)


def check_kv_copies(target: Target) -> float:
    """Copy KV to the host and back to other slots; returns the largest error, which must be 0.

    Raises ConfigError if this machine cannot copy KV, and whatever the copies raise.
    """
    spec = ModelSpec.from_config(SMALL_MODEL)
    device, cuda = target.device, target.device.type == "cuda"
    kv: KvMemory = KvStorage(spec, _COPY_BLOCKS, _FP32, _COPY_BLOCKS)
    if cuda:
        kv = cuda_kv_storage(spec, _COPY_BLOCKS, _FP32, _COPY_BLOCKS, device)
    generator = torch.Generator().manual_seed(0)
    caches = [cache for layer in kv.layers for cache in layer]
    slots = torch.randperm(_COPY_BLOCKS * KV_BLOCK_SIZE, generator=generator)
    source, destination = slots.chunk(2)
    host = array("i", range(len(source)))
    with torch.inference_mode():
        for cache in caches:
            cache.copy_(torch.randn(cache.shape, generator=generator))
        expected = [_tokens(cache, source) for cache in caches]
        kv.copy(KvCopies(out_device=array("i", source.tolist()), out_host=host))
        for cache in caches:
            cache.zero_()  # the copy above must have read the values from before
        kv.copy(KvCopies(back_device=array("i", destination.tolist()), back_host=host))
        kv.wait_for_layer(len(kv.layers) - 1)
        found = [_tokens(cache, destination) for cache in caches]
    kv.clear()
    errors = (got - wanted for got, wanted in zip(found, expected, strict=True))
    return float(torch.stack([error.abs().max() for error in errors]).max())


def _tokens(cache: Tensor, slots: Tensor) -> Tensor:
    """K or V of these slots: [slots, kv_heads, head_dim], on the CPU."""
    at = slots.to(cache.device)
    return cache[at // KV_BLOCK_SIZE, :, at % KV_BLOCK_SIZE].cpu()


def _cpu_levels() -> Sequence[str]:
    try:
        check_compiled()
        # Imported late: the extension is optional, it is not built without a compiler.
        from bros.kernels.cpu_ops import levels
    except ImportError:
        return ()
    return levels()


def _cpu_backends(choice: ChosenBackend) -> Iterator[Backend]:
    found = _cpu_levels()
    if not found:
        yield Backend("cpu", CPU, _HOW_TO_BUILD, None, choice.kernels == "cpu")
        return
    # Imported late, as above.
    from bros.kernels.cpu_ops import CpuKernels

    for level in found:
        best = level == found[0]
        yield Backend(
            f"cpu-{level}",
            CPU,
            "compiled; the fastest that this processor can run" if best else "compiled",
            lambda level=level: CpuKernels(level),  # type: ignore[misc]
            best and choice.kernels == "cpu" and choice.problem is None,
        )


def _triton_backend(choice: ChosenBackend) -> Backend:
    cuda = find_cuda()
    device = CPU if cuda.problem is not None else torch.device("cuda", 0)
    in_use = choice.kernels == "triton" and choice.on_cuda
    try:
        select_kernels("triton", device)
    except ConfigError as error:
        note = cuda.problem if cuda.problem is not None and cuda.triton else str(error)
        return Backend("triton", device, note.removeprefix("--kernels triton: "), None, in_use)
    note = "compiled for this GPU at first use" if cuda.problem is None else "interpreted"
    return Backend("triton", device, note, lambda: select_kernels("triton", device), in_use)
