"""Memory of the host in huge pages, if the system has them."""

from __future__ import annotations

import contextlib
import mmap
import threading

import torch
from torch import Tensor

from bros.core.errors import ConfigError

_LINE = 64  # bytes


def huge_pages(size: int) -> mmap.mmap:
    """Zeroed memory of `size` bytes, whose pages the system allocates when they are first written.

    Private, since shared memory has no huge pages by default.

    Raises OSError or OverflowError if the system has less.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not every system has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class WeightMemory:
    """Weights in huge pages, one after the other in the order in which they come.

        | q, k, v | out | gate, up | down | q, k, v | ...   |        | q, k, v | out | ...
        |<------------------- chunk --------------------->|        |<--- next chunk

    A step reads all weights, each once. In pages of 4 KB it translates an address for every 64
    lines, and a matrix of a small model is too small to have a huge page of its own. With huge
    pages decode steps of 1 and 8 rows take 5 and 2 % less time in int4, 8 and 6 % in bf16
    (SmolLM2-135M, two cores of a Zen 4).

    Large matrices have memory of their own. A chunk is freed with the last tensor in it, but for
    the one that is not yet full.
    """

    CHUNK = 32 * 1024 * 1024

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._lock = threading.Lock()

    def keep(self, data: Tensor) -> Tensor:
        """A copy of `data`, uint8 [n], that begins at a cache line. Thread-safe.

        Raises ConfigError if there is not enough memory.
        """
        if len(data) > self.CHUNK // 4:  # so that little of a chunk is left over
            return _bytes(len(data)).copy_(data)
        with self._lock:
            if self._used + len(data) > len(self._chunk):
                self._chunk = _bytes(self.CHUNK)
                self._used = 0
            kept = self._chunk[self._used : self._used + len(data)]
            self._used += -(-len(data) // _LINE) * _LINE
        return kept.copy_(data)


def _bytes(size: int) -> Tensor:
    try:
        # Else what is made while a model is loaded could not be written to elsewhere.
        with torch.inference_mode(False):
            return torch.frombuffer(huge_pages(size), dtype=torch.uint8)
    except (OSError, OverflowError):
        raise ConfigError(
            f"--model, --weights: this machine cannot allocate {size / 2**20:.0f} MiB for weights"
        ) from None
