"""Choosing a kernel back end by name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from bros.core.config import KERNELS
from bros.core.errors import ConfigError
from bros.kernels.interface import Kernels
from bros.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from bros.kernels.cpu_ops import CpuKernels
    from bros.kernels.triton.ops import TritonKernels
    from bros.kernels.xformers_self import XformersSelf

_HOW_TO_BUILD = (
    "the compiled kernels (bros.kernels._C) are not available; install a C++ compiler "
    "(g++ or clang++) and reinstall bros to build them"
)

_HOW_TO_GET_TRITON = (
    "triton is not installed; it comes with PyTorch for CUDA, or pip install triton"
)


def select_kernels(
    name: str, device: torch.device | None = None, self_part: XformersSelf | None = None
) -> Kernels:
    """The back end called `name`: auto, reference, cpu or triton, the last one with self_part.

    Without a device, triton takes the CUDA device if there is one, all others the CPU. auto takes
    triton for CUDA; for the CPU it takes cpu if the compiled extension is there, else it warns once
    and takes reference. Raises ConfigError if the name is unknown, or if that back end is not
    there or not for this device.
    """
    if name not in KERNELS:
        raise ConfigError(f"--kernels: {name!r} is not one of {', '.join(KERNELS)}")
    cuda = device is not None and device.type == "cuda"
    if name == "reference":
        return ReferenceKernels()
    if name == "triton" or (name == "auto" and cuda):
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _load_triton_kernels(device or found, self_part)
    if cuda:
        raise ConfigError("--kernels cpu: these kernels are for the CPU, not for a CUDA device")
    try:
        return _load_cpu_kernels()
    except ImportError as error:
        if name == "cpu":
            raise ConfigError(f"--kernels cpu: {_HOW_TO_BUILD} ({error})") from error
        logging.getLogger("bros.kernels").warning(
            "Using the slow reference kernels: %s (%s)", _HOW_TO_BUILD, error
        )
        return ReferenceKernels()


def _load_cpu_kernels() -> CpuKernels:
    # Imported late because the extension is optional: without a compiler it does not exist.
    from bros.kernels.cpu_ops import CpuKernels

    return CpuKernels()


def _load_triton_kernels(device: torch.device, self_part: XformersSelf | None) -> TritonKernels:
    # Imported late because Triton is optional, and takes long to import.
    try:
        import triton

        from bros.kernels.triton.ops import TritonKernels
    except ImportError as error:
        raise ConfigError(f"--kernels triton: {_HOW_TO_GET_TRITON} ({error})") from error
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise ConfigError(
            f"--kernels triton needs a CUDA device, not {device.type} "
            "(with TRITON_INTERPRET=1 it runs there, very slowly)"
        )
    return TritonKernels(device, self_part=self_part)
