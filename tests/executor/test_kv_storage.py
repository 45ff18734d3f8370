"""Copies of KV between the cache and host memory; one suite for every KvMemory."""

from __future__ import annotations

import shutil
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.core.errors import ConfigError
from bros.core.plan import KvCopies
from bros.executor.cuda.kv_storage import CopyBuffers, CudaKvStorage, cuda_kv_storage
from bros.executor.kv_storage import (
    DTYPES,
    KV_BLOCK_SIZE,
    KvMemory,
    KvStorage,
    bytes_per_block,
)
from bros.executor.models.spec import ModelSpec
from bros.kernels.cuda_ops import CudaKvCopier
from support.cuda_on_cpu import CpuDriver, compile_kernels
from support.kv_streams import EagerStreams

SPEC = ModelSpec(
    architecture="tiny", family="llama", vocab_size=10, hidden_size=12, intermediate_size=8,
    num_layers=2, num_heads=3, num_kv_heads=3, head_dim=4, max_positions=100, norm_eps=1e-5,
    activation="silu", tied=True,
)  # fmt: skip
BLOCKS, HOST_BLOCKS = 5, 3
SLOTS, HOST_SLOTS = BLOCKS * KV_BLOCK_SIZE, HOST_BLOCKS * KV_BLOCK_SIZE
SMALL = CopyBuffers(count=2, size=5 * 2 * 2 * 3 * 4 * 2, group_bytes=1, row_bytes=1, run_bytes=1)
"""CopyBuffers of 5 tokens of 16 bits, and every layer by itself."""

Make = Callable[[torch.dtype, int, int], KvMemory]


@pytest.fixture(
    scope="module",
    params=["cpu", "cuda kernels on the cpu", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def make(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes storage of a type, with so many blocks on the device and on the host."""
    if request.param == "cpu":
        return lambda dtype, blocks, host: KvStorage(SPEC, blocks, dtype, host)
    if request.param == "cuda":
        if not torch.cuda.is_available():
            pytest.skip("there is no CUDA device")
        pytest.importorskip("cupy")
        device = torch.device("cuda", 0)
        return lambda dtype, blocks, host: cuda_kv_storage(SPEC, blocks, dtype, host, device, SMALL)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    library = compile_kernels(compiler, tmp_path_factory.mktemp("kernels"))
    return lambda dtype, blocks, host: CudaKvStorage(
        SPEC, blocks, dtype, host,
        streams=EagerStreams(), copier=CudaKvCopier(CpuDriver(library)),
        device=torch.device("cpu"), buffers=SMALL,
    )  # fmt: skip


def copy(storage: KvMemory, copies: KvCopies) -> None:
    """So that what comes next sees what came back."""
    storage.copy(copies)
    storage.wait_for_layer(SPEC.num_layers - 1)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@given(data=st.data())
def test_copies_move_what_a_token_by_token_loop_moves(
    make: Make, dtype: torch.dtype, data: st.DataObject
) -> None:
    storage = make(dtype, BLOCKS, HOST_BLOCKS)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    for keys, values in storage.layers:
        keys.copy_(torch.randn(keys.shape, generator=generator))
        values.copy_(torch.randn(values.shape, generator=generator))
    expected = [[tensor.cpu().clone() for tensor in pair] for pair in storage.layers]
    host: dict[int, list[torch.Tensor]] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        copies = KvCopies()
        out = data.draw(slots(SLOTS, HOST_SLOTS))
        for slot, host_slot in out:
            copies.out_device.append(slot)
            copies.out_host.append(host_slot)
        for slot, host_slot in out:
            host[host_slot] = [tensor[at(slot)].clone() for pair in expected for tensor in pair]
        known = sorted(host)
        back = data.draw(slots(SLOTS, len(known))) if known else []
        for slot, index in back:
            copies.back_device.append(slot)
            copies.back_host.append(known[index])
            tensors = [tensor for pair in expected for tensor in pair]
            for tensor, kept in zip(tensors, host[known[index]], strict=True):
                tensor[at(slot)] = kept
        copy(storage, copies)
        for found, wanted in zip(storage.layers, expected, strict=True):
            assert torch.equal(found[0].cpu(), wanted[0])
            assert torch.equal(found[1].cpu(), wanted[1])


def at(slot: int) -> tuple[int, slice, int]:
    return slot // KV_BLOCK_SIZE, slice(None), slot % KV_BLOCK_SIZE


def slots(left: int, right: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Pairs; no number twice on either side."""
    pairs = st.tuples(st.integers(0, left - 1), st.integers(0, right - 1))
    return st.lists(pairs, max_size=12, unique_by=(lambda p: p[0], lambda p: p[1]))


def test_no_copies_need_no_host_memory(make: Make) -> None:
    storage = make(torch.float32, 1, 0)
    copy(storage, KvCopies(array("i"), array("i"), array("i"), array("i")))
    assert not any(kv.any() for layer in storage.layers for kv in layer)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_bit_comes_back_from_the_host_to_other_blocks(make: Make, dtype: torch.dtype) -> None:
    """Also of numbers that are none, of minus zero, and of the first and the last block."""
    storage = make(dtype, BLOCKS, HOST_BLOCKS)
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(bits)
    generator = torch.Generator().manual_seed(0)
    for tensor in (tensor for pair in storage.layers for tensor in pair):
        shape = tensor.shape
        tensor.view(bits).copy_(
            torch.randint(limits.min, limits.max, shape, generator=generator, dtype=bits)
        )
    before = [tensor.cpu().clone().view(bits) for pair in storage.layers for tensor in pair]
    last = (BLOCKS - 1) * KV_BLOCK_SIZE
    taken = [*range(KV_BLOCK_SIZE), *range(last, last + KV_BLOCK_SIZE)]
    host = list(range(HOST_SLOTS))[-len(taken) :]
    copy(storage, KvCopies(out_device=array("i", taken), out_host=array("i", host)))
    # The two blocks change places, each from its end.
    copy(storage, KvCopies(back_host=array("i", host), back_device=array("i", taken[::-1])))
    after = [tensor.cpu().view(bits) for pair in storage.layers for tensor in pair]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[0], old[-1].flip(1)) and torch.equal(new[-1], old[0].flip(1))
        assert torch.equal(new[1:-1], old[1:-1])


def test_a_slot_can_be_read_from_copied_to_and_read_again_in_one_call(make: Make) -> None:
    storage = make(torch.float32, BLOCKS, HOST_BLOCKS)
    keys, values = storage.layers[1]
    keys[0, :, 3], keys[2, :, 5] = 1.0, 2.0
    values[0, :, 3], values[2, :, 5] = 3.0, 4.0
    first, second = 3, 2 * KV_BLOCK_SIZE + 5
    copy(
        storage,
        KvCopies(
            out_device=array("i", [first, second]),
            out_host=array("i", [7, 0]),
            back_host=array("i", [0, 7]),
            back_device=array("i", [first, second]),
        ),
    )
    assert (keys[0, :, 3] == 2).all() and (keys[2, :, 5] == 1).all()
    assert (values[0, :, 3] == 4).all() and (values[2, :, 5] == 3).all()
    assert not storage.layers[0][0].any(), "other layers are as they were"


def test_a_copy_stays_valid_when_it_was_read(make: Make) -> None:
    storage = make(torch.float32, BLOCKS, HOST_BLOCKS)
    keys, _ = storage.layers[0]
    keys[1, :, 0] = 5.0
    copy(storage, KvCopies(out_device=array("i", [16]), out_host=array("i", [9])))
    for slot in (0, 40, 79):
        copy(storage, KvCopies(back_host=array("i", [9]), back_device=array("i", [slot])))
        assert (keys[at(slot)] == 5).all()


def test_more_memory_than_there_is_names_the_option(make: Make) -> None:
    too_many = 2**62 // bytes_per_block(SPEC, torch.float32)
    with pytest.raises(
        ConfigError, match="--host-kv-memory, --host-kv-blocks: this machine cannot allocate"
    ):
        make(torch.float32, 1, too_many)
    with pytest.raises(
        ConfigError, match="--kv-memory, --kv-blocks: this (machine|device) cannot allocate"
    ):
        make(torch.float32, too_many, 0)


def test_memory_is_given_back_twice(make: Make) -> None:
    storage = make(torch.float32, 1, 1)
    storage.clear()
    storage.clear()
    assert storage.layers == ()


def test_memory_may_have_huge_pages() -> None:
    """Shared memory has none unless the administrator of the machine says so."""
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        pytest.skip("needs /proc/self/smaps")
    storage = KvStorage(SPEC, 4096, torch.float32)
    begin = storage.layers[0][0].data_ptr()
    flags: list[str] | None = None
    inside = False
    for line in smaps.read_text().splitlines():
        first, *rest = line.split()
        if "-" in first and ":" not in first:
            low, high = (int(end, 16) for end in first.split("-"))
            inside = low <= begin < high
        elif inside and first == "VmFlags:":
            flags = rest
    assert flags is not None and "sh" not in flags
