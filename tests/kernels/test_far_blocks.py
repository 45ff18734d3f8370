"""KV caches of more than 2^31 elements, of which only the last blocks are used."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bros.kernels.cuda_ops import CudaKvCopier, CupyDriver
from bros.kernels.interface import AttentionBatch
from support.kernel_cases import (
    BLOCK_SIZE,
    AttentionCase,
    attend,
    make_case,
    needs_triton,
    triton_backend,
)

BACKEND = triton_backend()
FAR = 140_000  # blocks, each with 8 heads x 16 slots x 128: 4.6 GB of K and as much of V
HEADS, HEAD_DIM = 8, 128
NEEDED = 16 * 10**9  # bytes


@pytest.fixture(
    scope="module",
    params=[40, pytest.param(FAR, marks=pytest.mark.gpu, id="more than 2^31")],
)
def cache(request: pytest.FixtureRequest) -> Iterator[Tensor]:
    """bf16 [layers, 2, blocks, heads, 16, head_dim], with anything in it."""
    blocks: int = request.param
    if blocks == FAR:
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        if free < NEEDED:
            pytest.skip(f"only {free / 1e9:.1f} GB of the GPU are free, not {NEEDED / 1e9:.0f}")
    shape = (1, 2, blocks, HEADS, BLOCK_SIZE, HEAD_DIM)
    yield torch.empty(shape, dtype=torch.bfloat16, device=BACKEND.device)
    if BACKEND.device.type == "cuda":
        torch.cuda.empty_cache()


def moved_to_the_end(case: AttentionCase, cache: Tensor) -> AttentionCase:
    """The same attention, with its blocks in the last ones of a cache."""
    keys, values = cache[0]
    blocks = len(case.k_cache)
    keys[-blocks:], values[-blocks:] = case.k_cache.to(keys.device), case.v_cache.to(keys.device)
    offset = torch.tensor([len(keys) - blocks, 0, 0], dtype=torch.int32)
    batch = case.batch
    shared = batch.shared
    assert shared is not None
    shared = replace(shared, segments=shared.segments + offset)
    batch = AttentionBatch(batch.query_start, batch.segment_start, batch.segments + offset, shared)
    return replace(case, k_cache=keys, v_cache=values, batch=batch)


@needs_triton
def test_attention_reads_the_last_blocks(cache: Tensor) -> None:
    rows = [(1, 40), (5, 60), (1, 30)]
    case = make_case(rows, HEADS, 1, HEAD_DIM, torch.bfloat16, parts=[((0, 2), 100)])
    there = moved_to_the_end(case, cache)
    kernels = BACKEND.kernels()
    expected = attend(kernels, case, BACKEND.device)
    assert torch.equal(attend(kernels, there, BACKEND.device), expected)


@needs_triton
def test_keys_and_values_go_to_the_last_blocks(cache: Tensor) -> None:
    keys, values = cache[0]
    layout = make_case([], HEADS, 1, HEAD_DIM).layout
    last = cache[0, :, -2:]
    last.zero_()
    slots = torch.tensor([0, 15, 17, 31], dtype=torch.int32, device=cache.device)
    qkv = torch.randn(4, layout.qkv_size, device=cache.device).to(torch.bfloat16)
    first = (len(keys) - 2) * BLOCK_SIZE
    arguments = (qkv, layout, slots, slots + first, None, keys, values)
    BACKEND.kernels().rope_and_cache_(*arguments)
    _, *expected = qkv.split([layout.q_size, layout.kv_size, layout.kv_size], dim=1)
    places = slots.long()
    for stored, new in zip(last, expected, strict=True):
        found = stored[places // BLOCK_SIZE, :, places % BLOCK_SIZE]
        assert torch.equal(found.flatten(1), new)
    assert int(last.count_nonzero()) <= 2 * len(slots) * layout.kv_size


@pytest.mark.gpu
def test_copies_take_and_bring_the_last_blocks(cache: Tensor) -> None:
    pytest.importorskip("cupy")
    copier = CudaKvCopier(CupyDriver(cache.device))
    stream = torch.cuda.current_stream()
    last = cache[:, :, -2:]
    last.copy_(torch.randn(last.shape, device=cache.device))
    near = torch.randperm(2 * BLOCK_SIZE, device=cache.device).int()
    slots = near + (cache.shape[2] - 2) * BLOCK_SIZE
    pieces = torch.zeros(len(slots), 1, 2, HEADS, HEAD_DIM, dtype=cache.dtype, device=cache.device)
    copier.gather(cache, slots, pieces, stream)
    by_slot = last.transpose(3, 4).flatten(2, 3)  # [layers, 2, slots, heads, head_dim]
    assert torch.equal(pieces, by_slot[:, :, near.long()].permute(2, 0, 1, 3, 4))
    expected = -last
    copier.scatter(cache, slots, -pieces, stream)
    assert torch.equal(last, expected)
