"""KV cache memory: one K and one V tensor per layer."""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

from bros.core.errors import ConfigError
from bros.executor.models.spec import ModelSpec

KV_BLOCK_SIZE = 16
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def bytes_per_block(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Memory of one block over all layers, K and V."""
    values = 2 * spec.num_layers * spec.num_kv_heads * KV_BLOCK_SIZE * spec.head_dim
    return values * dtype.itemsize


def blocks_in(memory_bytes: int, spec: ModelSpec, dtype: torch.dtype) -> int:
    """How many blocks fit. Raises ConfigError if not even one does."""
    block_bytes = bytes_per_block(spec, dtype)
    if memory_bytes < block_bytes:
        raise ConfigError(
            f"--kv-memory: {memory_bytes} bytes hold no block; one of {KV_BLOCK_SIZE} tokens "
            f"takes {block_bytes} bytes"
        )
    return memory_bytes // block_bytes


class KvStorage:
    """layers[i] = (K, V), each [num_blocks, num_kv_heads, 16, head_dim] and zero at first.

    All of them lie in one anonymous memory map: the operating system hands out its zeroed pages
    on first write, so cache that is never used takes no memory and no time to allocate. Large
    pages, where there are any, save the attention kernel an address lookup per block.
    """

    def __init__(self, spec: ModelSpec, num_blocks: int, dtype: torch.dtype) -> None:
        size = num_blocks * bytes_per_block(spec, dtype)
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, OverflowError):
            raise ConfigError(
                f"--kv-memory, --kv-blocks: this machine has no {size / 2**30:.1f} GiB for the KV "
                "cache; ask for less"
            ) from None
        with contextlib.suppress(AttributeError, OSError):  # not every system has large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        shape = (spec.num_layers, 2, num_blocks, spec.num_kv_heads, KV_BLOCK_SIZE, spec.head_dim)
        whole = torch.frombuffer(memory, dtype=dtype).view(shape)
        self.num_blocks = num_blocks
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple(
            (whole[layer, 0], whole[layer, 1]) for layer in range(spec.num_layers)
        )

    def clear(self) -> None:
        """Give the memory back; the storage cannot be used afterwards."""
        self.layers = ()
