"""Choosing a kernel back end by name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from bros.core.config import KERNELS
from bros.core.errors import ConfigError
from bros.kernels.interface import Kernels
from bros.kernels.reference import ReferenceKernels

if TYPE_CHECKING:
    from bros.kernels.cpu_ops import CpuKernels

_HOW_TO_BUILD = (
    "the compiled kernels (bros.kernels._C) are not available; install a C++ compiler "
    "(g++ or clang++) and reinstall bros to build them"
)


def select_kernels(name: str) -> Kernels:
    """The back end called `name`: auto, reference or cpu.

    auto takes cpu if the compiled extension is there, else warns once and takes reference.
    Raises ConfigError if the name is unknown, or if cpu is asked for and was not built.
    """
    if name not in KERNELS:
        raise ConfigError(f"--kernels: {name!r} is not one of {', '.join(KERNELS)}")
    if name == "reference":
        return ReferenceKernels()
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
