"""Memory of the host in huge pages, if the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

from bros.core.errors import ConfigError

_LINE = 64  # bytes

_HUGE_PAGE = 2 * 1024 * 1024
"""Bytes, on x86-64. Where huge pages have another size, `populate` works in these units as well."""

_MADV_POPULATE_WRITE = 23
"""Allocates pages as a write would, and leaves what is in them. Linux 5.14 or newer."""


def huge_pages(size: int) -> mmap.mmap:
    """Zeroed memory of `size` bytes, whose pages the system allocates when they are first written.

    Private, since shared memory has no huge pages by default.

    Raises OSError or OverflowError if the system has less.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):  # not every system has huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(memory: mmap.mmap, offsets: Iterable[int]) -> threading.Thread:
    """Have the system allocate the pages at these offsets, before a request has to wait for that.

    A thread does so without the interpreter's lock, and ends with the last one; it is returned.
    What is in the memory stays. On a system that cannot do this nothing is allocated.

    It is for few pages, those of the first prompt. With all pages of a cache of 1 GiB, prompts of
    the first second waited for the thread, four of them for 100 ms each.

    A huge page takes 0.1 ms to clear, and 2 ms on a virtual machine whose host has to provide it.
    The first prompt of an engine writes one for K and one for V of every layer, for which
    SmolLM2-135M took 150 ms longer than for the next one (two cores of a Zen 4).
    """
    thread = threading.Thread(
        target=_populate, args=(memory, offsets), name="populate", daemon=True
    )
    thread.start()
    return thread


def _populate(memory: mmap.mmap, offsets: Iterable[int]) -> None:
    if sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise  # the method of mmap keeps the interpreter's lock
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for offset in offsets:
        page = (start + offset) // _HUGE_PAGE * _HUGE_PAGE
        first, last = max(start, page), min(start + len(memory), page + _HUGE_PAGE)
        size = ctypes.c_size_t(last - first)
        if madvise(ctypes.c_void_p(first), size, _MADV_POPULATE_WRITE):
            return


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
