"""Resolves the options --device, --weights, --kernels and --kv-dtype, including their auto."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.interfaces import Grouping
from bros.executor.kv_storage import DTYPES
from bros.kernels.dispatch import compiled_kernels
from bros.kernels.interface import TILE_KEYS, HeadLayout
from bros.kernels.xformers_attention import XformersAttention, load_xformers

CPU = torch.device("cpu")

_NATIVE_BF16 = (8, 0)
"""The first compute capability with bf16 products."""

_BF16_KERNELS = ("cpu-avx512-bf16", "cpu-avx512-amx")
"""The CPU kernels that multiply bf16 without widening it (Kernels.name)."""


@dataclass(frozen=True, slots=True)
class Target:
    """The device and precision that a decoder is built for.

    weights: "fp32", "bf16", "fp16", "int8" or "int4".
    packed: True on a CPU: weights are packed where the kernels have products, and activations are
        fp32. Otherwise weights are plain matrices, and activations have their dtype.
    """

    device: torch.device
    weights: str
    packed: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations."""
        return torch.float32 if self.packed else DTYPES[self.weights]


@dataclass(frozen=True, slots=True)
class Cuda:
    """What this process can use of CUDA.

    problem: why CUDA cannot be used, None if it can.
    triton: whether the package triton is installed.
    capability: compute capability of device 0.
    """

    problem: str | None
    triton: bool
    capability: tuple[int, int] = (0, 0)
    num_devices: int = 1


def find_cuda() -> Cuda:
    """Query torch. Initializes CUDA only if there is a device."""
    triton = importlib.util.find_spec("triton") is not None
    if torch.version.cuda is None:
        return Cuda(
            f"this torch ({torch.__version__}) is a build without CUDA; install one with CUDA as "
            "https://pytorch.org/get-started describes, and then bros[cuda]",
            triton,
        )
    if not torch.cuda.is_available():
        return Cuda(f"torch finds no usable GPU: {_why_unavailable()}", triton)
    return Cuda(None, triton, torch.cuda.get_device_capability(0), torch.cuda.device_count())


def _why_unavailable() -> str:
    try:
        # Raises the reason that is_available hides.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        return f"{reason}; is the driver installed and recent enough (nvidia-smi)?"
    return "no device is visible to this process; see CUDA_VISIBLE_DEVICES"


def device_of_rank(config: EngineConfig, rank: int, size: int) -> torch.device:
    """The device of one of `size` ranks: each has its own GPU, or all use the CPU.

    Raises ConfigError if there are too few devices.
    """
    return choose_target(config, find_cuda(), rank, size).device


def choose_target(config: EngineConfig, cuda: Cuda, rank: int = 0, size: int = 1) -> Target:
    """Resolve config.device and config.weights for one of `size` ranks.

    weights=auto is bf16 where the device multiplies it natively: it is 1.5 times as fast as fp32 on
    a CPU with AVX-512 BF16. On other CPUs it is fp32, on other GPUs fp16. Without the compiled
    kernels it is fp32 as well: a CPU then holds weights of bf16 in fp32, see `dense_linear`.
    Raises ConfigError if the device does not exist or does not support the weights.
    """
    if config.device == "cuda" and cuda.problem is not None:
        raise ConfigError(f"--device cuda: {cuda.problem}")
    if config.device == "cpu" or cuda.problem is not None:
        if config.weights == "fp16":
            raise ConfigError("--weights fp16: only on a GPU; on a CPU use bf16 or fp32")
        weights = config.weights
        if weights == "auto":
            weights = "bf16" if multiplies_bf16(config.kernels) else "fp32"
        return Target(CPU, weights, packed=True)
    if config.weights in ("int8", "int4"):
        raise ConfigError(
            f"--weights {config.weights}: only on a CPU; use bf16, fp16 or fp32 on the GPU, or "
            "--device cpu"
        )
    if size > cuda.num_devices:
        raise ConfigError(
            f"--tp: {size} ranks need a GPU each, but torch finds {cuda.num_devices} on this "
            "machine; give less, or --device cpu"
        )
    auto = "bf16" if cuda.capability >= _NATIVE_BF16 else "fp16"
    weights = auto if config.weights == "auto" else config.weights
    return Target(torch.device("cuda", rank), weights, packed=False)


def multiplies_bf16(kernels: str = "auto") -> bool:
    """Whether the CPU multiplies bf16 natively, by the kernels that --kernels chooses; elsewhere
    bf16 is slower than fp32."""
    compiled = compiled_kernels() if kernels in ("auto", "cpu") else None
    return compiled is not None and compiled.name in _BF16_KERNELS


def kernels_for(config: EngineConfig, target: Target, cuda: Cuda) -> str:
    """The name of the kernel backend for `target`. Raises ConfigError if there is none."""
    if target.device.type == "cpu":
        return config.kernels
    if config.kernels == "cpu":
        raise ConfigError("--kernels cpu: these run on a CPU only; use triton, or --device cpu")
    if config.kernels != "reference" and not cuda.triton:
        raise ConfigError(
            "--kernels triton: the package triton, which the GPU needs, is not installed; install "
            "bros[cuda], or use --device cpu"
        )
    return "triton" if config.kernels == "auto" else config.kernels


def xformers_for(
    config: EngineConfig, target: Target, kernels: str, layout: HeadLayout
) -> XformersAttention | None:
    """xformers for the attention within prompt chunks, None if `kernels` compute all attention.

    config.self_attention=auto gives None, until a measurement shows that xformers is faster on
    some device. Raises ConfigError if xformers was requested and cannot be used.
    """
    if config.self_attention != "xformers":
        return None
    if target.device.type != "cuda" or kernels != "triton":
        raise ConfigError("--self-attention xformers: only on a GPU, beside --kernels triton")
    return load_xformers(target.device, layout, target.dtype)


def kv_dtype_for(config: EngineConfig, target: Target, kernels: str) -> str:
    """Resolve config.kv_dtype. kernels: as in Kernels.name.

    auto is the dtype of activations on a GPU, so that caching rounds nothing, and fp32 with fp32
    weights, without AVX2 and with the reference kernels. Otherwise a CPU has 16 bits, since
    attention of decode rows is bound by reading the cache, which also has room for twice as many
    tokens. The differences below are means of log-probabilities from fp32 (SmolLM2-135M).

    bf16, where the CPU multiplies pairs of it: attention in a prefill of 1,024 tokens takes 235
    instead of 391 ms (one thread of a Zen 4), and the difference is 0.026 instead of 0.025 with
    bf16 weights, 0.009 instead of 0.001 with int4 weights whose activations have 16 bits.

    fp16, where it only converts 16 bits (F16C, which comes with AVX2): decode steps of int4 with
    300 tokens per row take 30.8 instead of 39.0 ms with 8 rows, 59.2 instead of 69.5 with 16 (two
    cores of a Zen 3, median of seven in turns), and the difference is 0.029 instead of 0.028. bf16
    takes as long, and its difference is 0.030. AVX-512 without BF16 was not measured.
    """
    if config.kv_dtype != "auto":
        return config.kv_dtype
    if not target.packed or target.weights == "fp32":
        return target.weights
    if kernels in _BF16_KERNELS:
        return "bf16"
    return "fp16" if kernels.startswith("cpu-avx") else "fp32"


def device_name(device: torch.device) -> str:
    """As in EngineInfo: "cpu", or the name of the GPU."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def grouping_for(kernels: str, block_size: int) -> Grouping | None:
    """Which shared prefixes are worth reading once with these kernels (Kernels.name), if any.

    On a CPU this pays off if the lanes of all rows fill the vectors of a tile. Speedup of a decode
    step's attention by reading the prefix once (finding it included) over each row reading it:
    benchmarks/kernels_speed.py, SmolLM2-135M (3 lanes per row), two cores of a Zen 3 (AVX2), fp32
    and fp16 KV:

        rows           2           4          8          16         32
        64 tokens    .87  .78    .89  .76             1.01  .93
        256          .92  .86                         1.24 1.31
        1,500       1.13 1.09   1.50 1.25  1.85 1.80  2.22 2.06  2.31 2.20
    """
    if kernels.startswith("triton"):
        return Grouping(block_size, min_blocks=4)
    if kernels.startswith("cpu"):
        step = math.lcm(TILE_KEYS, block_size) // block_size
        return Grouping(block_size, min_blocks=16, min_rows=4, step_blocks=step)
    return None


# ---- Distributing the GPUs of a machine over several engines.


_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def set_visible_devices(replica: int, ranks: int, environ: MutableMapping[str, str]) -> None:
    """Restrict this process to the devices of one replica. Call this before CUDA is initialized.

    environ: of this process.
    """
    # device_count does not initialize CUDA.
    count = torch.cuda.device_count()
    devices = visible_devices(replica, ranks, environ.get(_VISIBLE_DEVICES), count)
    if devices:
        environ[_VISIBLE_DEVICES] = ",".join(devices)


def visible_devices(replica: int, ranks: int, visible: str | None, count: int) -> tuple[str, ...]:
    """The devices of the ranks of one replica, as names for CUDA_VISIBLE_DEVICES.

    visible: the current value of CUDA_VISIBLE_DEVICES.
    count: the number of visible devices. If there are too few, replicas share them.
    """
    names = visible.split(",")[:count] if visible else [str(number) for number in range(count)]
    mine = [names[(replica * ranks + rank) % count] for rank in range(ranks if count else 0)]
    return tuple(dict.fromkeys(mine))
