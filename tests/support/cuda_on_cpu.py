"""The kernels of csrc/kv_copy.cu as plain C++, and a driver that runs them on the CPU."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bros.kernels.cuda_ops import THREADS, kernel_source

# What a CUDA compiler knows by itself; then the kernels; then a loop over the grid.
_BEFORE = """
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads)
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Place { unsigned x, y; };
static Place threadIdx, blockIdx, blockDim, gridDim;
"""
_AFTER = """
using Kernel = void (*)(char*, long long, char*, const int*, int, int, int, int);
extern "C" void run(Kernel kernel, unsigned wide, unsigned high, unsigned threads, char* cache,
                    long long row_bytes, char* pieces, const int* slots, int tokens, int rows,
                    int heads, int head_vectors) {
  gridDim = {wide, high};
  blockDim = {threads, 1};
  for (blockIdx.y = 0; blockIdx.y < high; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < wide; ++blockIdx.x)
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
        kernel(cache, row_bytes, pieces, slots, tokens, rows, heads, head_vectors);
}
"""


def compile_kernels(compiler: str, folder: Path) -> ctypes.CDLL:
    source, library = folder / "kv_copy.cpp", folder / "kv_copy.so"
    source.write_text(_BEFORE + kernel_source("kv_copy.cu") + _AFTER, encoding="utf-8")
    flags = ["-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Werror", "-Wno-unknown-pragmas"]
    subprocess.run([compiler, *flags, "-o", str(library), str(source)], check=True)
    return ctypes.CDLL(str(library))


class CpuDriver:
    """A cuda_ops.Driver that does everything at once, whatever the stream.

    num_processors: as if there were so many. launched: kernel, grid.
    """

    def __init__(self, library: ctypes.CDLL, num_processors: int = 2) -> None:
        self._library = library
        self.num_processors = num_processors
        self.launched: list[tuple[str, tuple[int, int]]] = []

    def launch(
        self, kernel: str, grid: tuple[int, int], args: tuple[np.generic, ...], stream: int
    ) -> None:
        self.launched.append((kernel, grid))
        cache, row_bytes, pieces, slots, *shape = (arg.item() for arg in args)
        self._library.run(
            getattr(self._library, kernel),
            *(ctypes.c_uint(number) for number in (*grid, THREADS)),
            *(ctypes.c_void_p(cache), ctypes.c_longlong(row_bytes)),
            *(ctypes.c_void_p(pieces), ctypes.c_void_p(slots)),
            *(ctypes.c_int(number) for number in shape),
        )

    def copy(
        self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        for row in range(rows):
            ctypes.memmove(to + row * to_pitch, of + row * of_pitch, width)

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)
