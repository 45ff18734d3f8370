"""Copies KV between a CUDA device and pinned host memory, with csrc/kv_copy.cu and copy engines.

    cache  --gather-->  pieces on the device  --copy engine-->  pinned host memory
    cache  <-scatter--  pieces on the device  <-copy engine---

A piece is the K and V of one token in a contiguous staging buffer. Kernels that access pinned
memory directly would need no pieces, but would occupy their multiprocessors while the bus transfers
(38 us for a block of 16 tokens), and a matrix product sized for one wave on all multiprocessors
then takes two. Copy engines occupy no multiprocessor and use the full bus; the kernels here only
move bytes within the device. Llama-3-8B in bf16 (128 KiB per token) on an H200: 60 ns per token
for a kernel, 2.4 us for the bus, calculated from 4.3 TB/s and 55 GB/s.

CuPy compiles the kernels at first use, so that the installation needs no CUDA toolkit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from bros.core.errors import ConfigError

THREADS = 256
LOADS = 4
"""Each thread moves this many vectors at a time, see kv_copy.cu."""

GATHER_BLOCKS_PER_PROCESSOR = 8
"""The model's computation waits for a gather, so a gather uses the whole device."""

SCATTER_BLOCKS = 32
"""A scatter runs beside other kernels and only has to keep up with the bus. With four loads of 16
bytes per thread, 32 blocks have 512 KiB in flight, ten times as much as necessary."""

WIDTHS = (16, 8, 4, 2)
_MAX_VECTORS = 2**31 - 1


class StreamHandle(Protocol):
    """The part of torch.cuda.Stream that is used here."""

    @property
    def cuda_stream(self) -> int: ...


class CopyRun(NamedTuple):
    """Pieces [piece, piece + length) belong to host slots [host, host + length)."""

    host: int
    piece: int
    length: int


class Driver(Protocol):
    """Enqueues work on streams. Streams and memory are passed as addresses."""

    @property
    def num_processors(self) -> int: ...

    def launch(
        self, kernel: str, grid: tuple[int, int], args: tuple[np.generic, ...], stream: int
    ) -> None:
        """Run a kernel of kv_copy.cu in blocks of THREADS."""
        ...

    def copy(
        self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        """Copy rows of `width` bytes; a pitch is the distance in bytes from one row to the next."""
        ...

    def pinned(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], uninitialized. Raises RuntimeError if there is too little memory."""
        ...


class CudaKvCopier:
    """Enqueues copies of KV on streams. It neither waits nor synchronizes streams.

    cache:  [layers, 2, num_blocks, kv_heads, 16, head_dim], contiguous
    pieces: [tokens, layers, 2, kv_heads, head_dim], contiguous, on the device
    host:   [host slots, layers, 2, kv_heads, head_dim], or a slice of its layers; pinned
    slots:  int32 [tokens], on the device
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._gather_blocks = GATHER_BLOCKS_PER_PROCESSOR * driver.num_processors

    def gather(self, cache: Tensor, slots: Tensor, pieces: Tensor, stream: StreamHandle) -> None:
        self._move("gather", cache, slots, pieces, self._gather_blocks, stream)

    def scatter(self, cache: Tensor, slots: Tensor, pieces: Tensor, stream: StreamHandle) -> None:
        self._move("scatter", cache, slots, pieces, SCATTER_BLOCKS, stream)

    def to_host(
        self, pieces: Tensor, host: Tensor, runs: Sequence[CopyRun], stream: StreamHandle
    ) -> None:
        (piece, width), (first, pitch) = _rows(pieces), _rows(host)
        copy, handle = self._driver.copy, stream.cuda_stream
        for run in runs:
            to, of = first + run.host * pitch, piece + run.piece * width
            copy(to, pitch, of, width, width, run.length, handle)

    def from_host(
        self, host: Tensor, pieces: Tensor, runs: Sequence[CopyRun], stream: StreamHandle
    ) -> None:
        (piece, width), (first, pitch) = _rows(pieces), _rows(host)
        copy, handle = self._driver.copy, stream.cuda_stream
        for run in runs:
            to, of = piece + run.piece * width, first + run.host * pitch
            copy(to, width, of, pitch, width, run.length, handle)

    def upload(self, numbers: Tensor, pinned: Tensor, stream: StreamHandle) -> None:
        """Copy int32 [n] in pinned memory to int32 [n] on the device."""
        size = numbers.numel() * numbers.itemsize
        to, of = numbers.data_ptr(), pinned.data_ptr()
        self._driver.copy(to, size, of, size, size, 1, stream.cuda_stream)

    def pinned(self, num_bytes: int) -> Tensor:
        """See Driver."""
        return self._driver.pinned(num_bytes)

    def _move(
        self, kernel: str, cache: Tensor, slots: Tensor, pieces: Tensor, blocks: int,
        stream: StreamHandle,
    ) -> None:  # fmt: skip
        assert cache.is_contiguous() and pieces.is_contiguous() and slots.is_contiguous()
        tokens, layers, _, heads, head_dim = pieces.shape
        head_bytes = head_dim * pieces.itemsize
        width = next(width for width in WIDTHS if head_bytes % width == 0)
        row_vectors = tokens * heads * head_bytes // width
        assert row_vectors <= _MAX_VECTORS, "too many tokens for one kernel"
        rows = 2 * layers
        args = (
            np.uintp(cache.data_ptr()),
            np.int64(cache.stride(1) * cache.itemsize),
            np.uintp(pieces.data_ptr()),
            np.uintp(slots.data_ptr()),
            np.int32(tokens),
            np.int32(rows),
            np.int32(heads),
            np.int32(head_bytes // width),
        )
        high = min(rows, blocks)
        wide = min(-(-row_vectors // (THREADS * LOADS)), max(1, blocks // high))
        self._driver.launch(f"{kernel}_{width}", (wide, high), args, stream.cuda_stream)


def _rows(tokens: Tensor) -> tuple[int, int]:
    """The address of the first token of pieces or of host memory, and the pitch of tokens."""
    return tokens.data_ptr(), tokens.stride(0) * tokens.itemsize


class CupyDriver:
    """A Driver for one device, through CuPy.

    Raises ConfigError if CuPy, the CUDA driver or the run-time compiler is missing.
    """

    def __init__(self, device: torch.device) -> None:
        self._cupy = cupy = _import_cupy()
        self._runtime = runtime = cupy.cuda.runtime
        try:
            runtime.getDeviceCount()
            self._device = cupy.cuda.Device(device.index or 0)
            self.num_processors: int = self._device.attributes["MultiProcessorCount"]
            module = cupy.RawModule(code=kernel_source("kv_copy.cu"), options=("-std=c++17",))
            with self._device:
                module.compile()
        # A missing CUDA library raises RuntimeError, a source that does not compile does not.
        except (RuntimeError, cupy.cuda.compiler.CompileException) as error:
            raise ConfigError(f"--device cuda: CuPy cannot use this device: {error}") from error
        self._kernels: dict[str, Any] = {
            f"{name}_{width}": module.get_function(f"{name}_{width}")
            for name in ("gather", "scatter")
            for width in WIDTHS
        }

    def launch(
        self, kernel: str, grid: tuple[int, int], args: tuple[np.generic, ...], stream: int
    ) -> None:
        with self._device:
            self._kernels[kernel](grid, (THREADS,), args, stream=_Stream(stream))

    def copy(
        self, to: int, to_pitch: int, of: int, of_pitch: int, width: int, rows: int, stream: int
    ) -> None:
        runtime = self._runtime
        kind = runtime.memcpyDefault  # CUDA derives the direction from the addresses
        if width == to_pitch == of_pitch:
            runtime.memcpyAsync(to, of, width * rows, kind, stream)
        else:
            runtime.memcpy2DAsync(to, to_pitch, of, of_pitch, width, rows, kind, stream)

    def pinned(self, num_bytes: int) -> Tensor:
        """Exactly num_bytes: torch rounds pinned memory up to powers of two."""
        cuda = self._cupy.cuda
        with self._device:
            memory = cuda.PinnedMemoryPointer(cuda.PinnedMemory(num_bytes), 0)
        return torch.from_numpy(np.frombuffer(memory, dtype=np.uint8, count=num_bytes))


class _Stream(NamedTuple):
    """The attributes of a stream that CuPy uses in a launch."""

    ptr: int


def kernel_source(name: str) -> str:
    """The text of a file of csrc/; an installed bros has a copy beside this module."""
    here = Path(__file__).resolve().parent
    folders = (here / "_cuda", here.parents[1] / "csrc")
    path = next(path for path in (folder / name for folder in folders) if path.exists())
    return path.read_text(encoding="utf-8")


def _import_cupy() -> Any:
    # Imported late: only machines with a GPU have it.
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            "--device cuda: KV is copied to the host with CuPy, which is missing or broken "
            f"({error}); pip install cupy-cuda13x, or use --on-pressure recompute"
        ) from error
    return cupy
