"""Memory in huge pages: weights, and memory that is allocated before it is written."""

from __future__ import annotations

import ctypes
import gc
import mmap
import platform
import re
import sys
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.core.errors import ConfigError
from bros.kernels import host_memory, panels
from bros.kernels.host_memory import WeightMemory, huge_pages, populate

PAGE = 2 * 1024 * 1024


def numbers(size: int, seed: int) -> torch.Tensor:
    return torch.arange(size, dtype=torch.int32).mul_(seed).to(torch.uint8)


class SmallChunks(WeightMemory):
    CHUNK = 4096


@given(sizes=st.lists(st.integers(0, 9000), max_size=20))
def test_weights_are_kept_as_they_are_apart_from_each_other(sizes: list[int]) -> None:
    memory = SmallChunks()
    sources = [numbers(size, seed) for seed, size in enumerate(sizes, 3)]
    kept = [memory.keep(data) for data in sources]
    ranges = sorted((each.data_ptr(), each.data_ptr() + len(each)) for each in kept if len(each))
    for before, after in zip(ranges, ranges[1:], strict=False):
        assert before[1] <= after[0]
    for data, copy in zip(sources, kept, strict=True):
        assert torch.equal(data, copy)
        assert len(copy) == 0 or copy.data_ptr() % 64 == 0


def test_a_chunk_is_freed_with_the_last_tensor_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks: list[weakref.ref[mmap.mmap]] = []

    def recorded(size: int) -> mmap.mmap:
        memory = huge_pages(size)
        chunks.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(host_memory, "huge_pages", recorded)
    memory = SmallChunks()
    first, second = memory.keep(numbers(1000, 3)), memory.keep(numbers(1000, 5))
    assert second.data_ptr() - first.data_ptr() == 1024
    memory.keep(numbers(5000, 7))  # memory of its own, freed at once
    assert len(chunks) == 2 and chunks[1]() is None
    third = memory.keep(numbers(1000, 9))
    assert third.data_ptr() - second.data_ptr() == 1024
    fourth = memory.keep(numbers(1000, 11))
    assert len(chunks) == 2
    memory.keep(numbers(100, 13))  # more than is left: the next chunk
    assert len(chunks) == 3
    del first, third, fourth
    gc.collect()
    assert chunks[0]() is not None and torch.equal(second, numbers(1000, 5))
    del second
    gc.collect()
    assert chunks[0]() is None


def test_a_chunk_that_was_begun_while_a_model_was_loaded_takes_other_weights() -> None:
    memory = SmallChunks()
    with torch.inference_mode():
        loaded = memory.keep(numbers(100, 3))
    assert torch.equal(memory.keep(numbers(100, 5)), numbers(100, 5))
    assert torch.equal(loaded, numbers(100, 3))


def test_panels_are_kept_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SmallChunks()
    monkeypatch.setattr(panels, "_MEMORY", memory)
    first, second = (
        panels.Panels.fp32(torch.ones(32, 4), panels.PanelLayout(32)).data for _ in range(2)
    )
    assert second.data_ptr() - first.data_ptr() == 512


def test_too_large_weights_are_refused() -> None:
    class Endless(torch.Tensor):
        def __len__(self) -> int:
            return 1 << 60

    with pytest.raises(ConfigError, match="cannot allocate 1099511627776 MiB for weights"):
        WeightMemory().keep(torch.empty(0, dtype=torch.uint8).as_subclass(Endless))


def resident_bytes(memory: mmap.mmap) -> int:
    """How much of it, which begins at a page, has been allocated."""
    pages = -(-len(memory) // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    start = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    assert ctypes.CDLL(None).mincore(start, ctypes.c_size_t(len(memory)), found) == 0
    return sum(page & 1 for page in found) * mmap.PAGESIZE


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux allocates memory ahead")
def test_pages_are_allocated_before_they_are_written_and_keep_what_is_in_them() -> None:
    release = tuple(int(n) for n in re.findall(r"\d+", platform.release())[:2])
    if release < (5, 14):
        pytest.skip("this Linux does not allocate memory ahead")
    memory = huge_pages(7 * PAGE + 12345)
    memory[7] = 77
    assert resident_bytes(memory) <= PAGE
    populate(memory, [0, 3 * PAGE, len(memory) - 1]).join(60)
    # The last page may hold as little as the last byte.
    assert 2 * PAGE - mmap.PAGESIZE <= resident_bytes(memory) <= 3 * PAGE
    populate(memory, range(0, len(memory), PAGE)).join(60)
    assert resident_bytes(memory) >= 7 * PAGE
    assert memory[7] == 77 and not any(memory[8:])


def test_memory_can_be_freed_once_it_is_allocated() -> None:
    memory = huge_pages(PAGE)
    gone = weakref.ref(memory)
    populate(memory, [0]).join(60)
    del memory
    assert gone() is None
