"""Memory of the host in huge pages, if the system has them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import threading
import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

from bros.core.errors import ConfigError

_LINE = 64  # bytes

HUGE_PAGE = 2 * 1024 * 1024
"""Bytes, on x86-64. Where huge pages have another size, `populate` works in these steps as well."""

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


def populate(memory: mmap.mmap, offsets: Iterable[int]) -> None:
    """Have the system allocate memory that will be written, before that waits for it.

    A thread does so while a core is idle, HUGE_PAGE bytes at each of the offsets in turn, until the
    memory is freed. What is there already stays. On systems that cannot, nothing happens.

    A huge page takes 0.1 ms to clear, and 2 ms on a virtual machine whose host has to provide it.
    The first prompt of an engine writes one for K and one for V of every layer: SmolLM2-135M took
    150 ms longer for it than for the next one (two cores of a Zen 4). With a thread of the lowest
    nice value, which a step has to wait for, it was the first four that took 100 ms longer each.
    """
    if sys.platform != "linux":
        return
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    arguments = (weakref.ref(memory), start, len(memory), offsets)
    threading.Thread(target=_populate, args=arguments, name="populate", daemon=True).start()


def _populate(
    memory: weakref.ref[mmap.mmap], start: int, size: int, offsets: Iterable[int]
) -> None:
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(threading.get_native_id(), os.SCHED_IDLE, os.sched_param(0))
    madvise = ctypes.CDLL(None).madvise  # that of mmap would hold the interpreter
    for offset in offsets:
        kept = memory()
        if kept is None:
            return
        first = max(start, (start + offset) // HUGE_PAGE * HUGE_PAGE)
        last = min(start + size, first // HUGE_PAGE * HUGE_PAGE + HUGE_PAGE)
        length = ctypes.c_size_t(last - first)
        failed = madvise(ctypes.c_void_p(first), length, _MADV_POPULATE_WRITE)
        del kept  # so that the memory can be freed
        if failed:
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
