"""Where a model runs, in which precision, with which kernels: options turned into facts."""

from __future__ import annotations

import importlib.util
from collections.abc import MutableMapping
from dataclasses import dataclass

import torch

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.core.interfaces import Grouping
from bros.executor.kv_storage import DTYPES
from bros.kernels.interface import HeadLayout
from bros.kernels.xformers_self import XformersSelf, open_xformers

CPU = torch.device("cpu")

_NATIVE_BF16 = (8, 0)
"""The first compute capability that multiplies bf16."""


@dataclass(frozen=True, slots=True)
class Target:
    """What a decoder is built for.

    weights: "fp32", "bf16", "fp16" or "int4".
    packed: linear layers in the formats that are fast on a CPU, with fp32 activations between
    them. Otherwise weights are plain matrices on `device`, and activations have their dtype.
    """

    device: torch.device
    weights: str
    packed: bool

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return torch.float32 if self.packed else DTYPES[self.weights]


@dataclass(frozen=True, slots=True)
class Cuda:
    """What this process finds of CUDA. `problem` says why it cannot be used, None if it can."""

    problem: str | None
    triton: bool
    capability: tuple[int, int] = (0, 0)
    num_devices: int = 1


def find_cuda() -> Cuda:
    """Ask torch. Starts CUDA only if there is a device."""
    triton = importlib.util.find_spec("triton") is not None
    if torch.version.cuda is None:
        return Cuda(
            f"this torch ({torch.__version__}) is a build without CUDA; install one with it as "
            "https://pytorch.org/get-started describes, and then bros[cuda]",
            triton,
        )
    if not torch.cuda.is_available():
        return Cuda(f"torch finds no GPU that it can use: {_why_unavailable()}", triton)
    return Cuda(None, triton, torch.cuda.get_device_capability(0), torch.cuda.device_count())


def _why_unavailable() -> str:
    try:
        # Says what is_available only turns into False.
        torch.cuda.init()  # type: ignore[no-untyped-call]
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0].rstrip(".")
        return f"{reason}; is the driver installed and recent enough (nvidia-smi)?"
    return "no device is visible to this process; see CUDA_VISIBLE_DEVICES"


def device_of_rank(config: EngineConfig, rank: int, size: int) -> torch.device:
    """Where one of `size` ranks computes: every one has a GPU of its own, or all have the CPU.

    Raises ConfigError if there is no such device for each.
    """
    return choose_target(config, find_cuda(), rank, size).device


def choose_target(config: EngineConfig, cuda: Cuda, rank: int = 0, size: int = 1) -> Target:
    """The device and precision that config.device and config.weights stand for, on one of `size`
    ranks.

    weights auto is fp32 on a CPU, at which greedy output does not depend on how the work was cut
    into iterations; bf16 is 1.3 to 1.8 times as fast there and rounds every linear layer's input
    to 8 bits. On a GPU it is bf16, and fp16 where bf16 is not native.
    Raises ConfigError if there is no such device, or not with these weights.
    """
    if config.device == "cuda" and cuda.problem is not None:
        raise ConfigError(f"--device cuda: {cuda.problem}")
    if config.device == "cpu" or cuda.problem is not None:
        if config.weights == "fp16":
            raise ConfigError("--weights fp16: only on a GPU; on a CPU use bf16 or fp32")
        return Target(CPU, "fp32" if config.weights == "auto" else config.weights, packed=True)
    if config.weights == "int4":
        raise ConfigError(
            "--weights int4: only on a CPU; use bf16, fp16 or fp32 on the GPU, or --device cpu"
        )
    if size > cuda.num_devices:
        raise ConfigError(
            f"--tp: {size} ranks take a GPU each, and torch finds {cuda.num_devices} on this "
            "machine; give less, or --device cpu"
        )
    auto = "bf16" if cuda.capability >= _NATIVE_BF16 else "fp16"
    weights = auto if config.weights == "auto" else config.weights
    return Target(torch.device("cuda", rank), weights, packed=False)


def kernels_for(config: EngineConfig, target: Target, cuda: Cuda) -> str:
    """The name of a kernel back end that runs there. Raises ConfigError if there is none."""
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


def self_part_for(
    config: EngineConfig, target: Target, kernels: str, layout: HeadLayout
) -> XformersSelf | None:
    """What config.self_attention stands for beside these kernels; None: they do all.

    auto is none, until xformers has been measured to be faster on some device.
    Raises ConfigError if xformers cannot be used.
    """
    if config.self_attention != "xformers":
        return None
    if target.device.type != "cuda" or kernels != "triton":
        raise ConfigError("--self-attention xformers: only on a GPU, beside --kernels triton")
    return open_xformers(target.device, layout, target.dtype)


def kv_dtype_for(config: EngineConfig, target: Target) -> str:
    """auto is what activations are, so that nothing more is rounded: fp32 on a CPU."""
    if config.kv_dtype != "auto":
        return config.kv_dtype
    return "fp32" if target.packed else target.weights


def device_name(device: torch.device) -> str:
    """As in EngineInfo: "cpu", or what the GPU calls itself."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def grouping_for(kernels: str, block_size: int) -> Grouping | None:
    """What pays with the kernels of this name (Kernels.name); None: nothing does.

    On the CPU much is won where the lanes of all rows fill the vectors of a tile. Times that a
    decode step's attention took with each row reading for itself, in those with the prefix read
    once, which include finding it; benchmarks/kernels_speed.py, SmolLM2-135M (3 lanes per row), two
    cores with AVX2, fp32 and bf16 KV:

        rows          2          4          8         16         32
        64 tokens   .72 .72    .74 .83               .90 .95
        256         .77 .79                         1.05 1.29
        1,500       .75 1.0   1.20 1.20  1.80 1.68  1.87 1.88  1.79 2.19
    """
    if kernels.startswith("triton"):
        return Grouping(block_size, min_blocks=4)
    if kernels.startswith("cpu"):
        return Grouping(block_size, min_blocks=16, min_rows=4)
    return None


# ---- Which GPUs an engine finds, where there are several engines on a machine.


_SHOWN = "CUDA_VISIBLE_DEVICES"


def show_devices_of(replica: int, ranks: int, environ: MutableMapping[str, str]) -> None:
    """Let this process find the devices of one replica only. Before CUDA is used for anything.

    environ: of this process.
    """
    # Asks the driver's library, and does not start CUDA.
    devices = devices_of(replica, ranks, environ.get(_SHOWN), torch.cuda.device_count())
    if devices:
        environ[_SHOWN] = ",".join(devices)


def devices_of(replica: int, ranks: int, shown: str | None, count: int) -> tuple[str, ...]:
    """The names of a device for each rank, as CUDA_VISIBLE_DEVICES has them.

    shown: what it says now. count: devices there are of those. If that is not enough for all
    replicas, they share.
    """
    names = shown.split(",")[:count] if shown else [str(number) for number in range(count)]
    mine = [names[(replica * ranks + rank) % count] for rank in range(ranks if count else 0)]
    return tuple(dict.fromkeys(mine))
