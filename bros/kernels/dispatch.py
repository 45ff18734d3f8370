"""Selects a kernel backend by name."""

from __future__ import annotations

import logging
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from bros.core.config import KERNELS
from bros.core.errors import ConfigError
from bros.kernels.interface import Kernels
from bros.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from bros.kernels.cpu_ops import CpuKernels
    from bros.kernels.triton.ops import TritonKernels
    from bros.kernels.xformers_attention import XformersAttention

_HOW_TO_BUILD = (
    "the compiled kernels (bros.kernels._C) are not available; install a C++ compiler "
    "(g++ or clang++) and reinstall bros to build them"
)

_HOW_TO_GET_TRITON = (
    "triton is not installed; it comes with PyTorch for CUDA, or pip install triton"
)


def select_kernels(
    name: str, device: torch.device | None = None, chunk_attention: XformersAttention | None = None
) -> Kernels:
    """The backend `name`: auto, reference, cpu or triton.

    device: by default, a CUDA device for triton if there is one, else the CPU.
    chunk_attention: for triton, see TritonKernels.

    auto selects triton for CUDA. For the CPU it selects cpu if the extension was compiled, else it
    logs a warning and selects reference. Raises ConfigError if the name is unknown, or if the
    backend is not available or does not support the device.
    """
    if name not in KERNELS:
        raise ConfigError(f"--kernels: {name!r} is not one of {', '.join(KERNELS)}")
    cuda = device is not None and device.type == "cuda"
    if name == "reference":
        return ReferenceKernels()
    if name == "triton" or (name == "auto" and cuda):
        found = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return _load_triton_kernels(device or found, chunk_attention)
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


def compiled_kernels() -> CpuKernels | None:
    """The compiled CPU kernels; None if they were not built."""
    try:
        return _load_cpu_kernels()
    except ImportError:
        return None


def compiled_digest() -> str:
    """Digest of the sources of the compiled kernels, which tells versions apart; empty if there are
    none."""
    try:
        from bros.kernels import _C
    except ImportError:
        return ""
    return getattr(_C, "SOURCES", "")


def _load_cpu_kernels() -> CpuKernels:
    """Raises what check_compiled raises."""
    check_compiled()
    # Imported late: the extension is optional, it is not built without a compiler.
    from bros.kernels.cpu_ops import CpuKernels

    return CpuKernels()


def check_compiled() -> None:
    """Raises ImportError if the compiled kernels were not built, ConfigError if they were built
    from sources that have changed since: Python and C++ may not agree on what they share."""
    from bros.kernels import _C

    built_from = getattr(_C, "SOURCES", "")  # older ones do not say
    if built_from != sources_digest(_SOURCES, default=built_from):
        raise ConfigError(
            f"the compiled kernels were built from other sources than those in {_SOURCES}; "
            "reinstall bros to build them (make install, or pip install -e .)"
        )


_SOURCES = Path(__file__).parents[2] / "csrc"
"""The sources of the compiled kernels, if bros runs from a source tree."""


def sources_digest(folder: Path, default: str) -> str:
    """Digest of the sources in `folder`, as setup.py has it compiled in; `default` if there are
    none."""
    paths = sorted([*folder.glob("*.cpp"), *folder.glob("*.h")])
    digest = 0
    for path in paths:
        digest = zlib.crc32(path.read_bytes(), digest)
    return f"{digest:08x}" if paths else default


def _load_triton_kernels(
    device: torch.device, chunk_attention: XformersAttention | None
) -> TritonKernels:
    # Imported late: Triton is optional and slow to import.
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
    return TritonKernels(device, chunk_attention=chunk_attention)
