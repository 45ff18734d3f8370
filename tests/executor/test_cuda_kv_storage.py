"""Copies beside the computation: every order that streams and events allow gives the same.

CudaKvStorage's copies and the reads and writes of steps are put on streams that move as they like
(support/kv_streams.py). What steps read, and what is left at the end, must be what KvStorage gives,
which does one after the other. Leaving out any of the waits must show.
"""

from __future__ import annotations

import dataclasses
import random
from array import array
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.core.plan import KvCopies
from bros.executor.cuda.kv_storage import CopyBuffers, CudaKvStorage, cuda_kv_storage
from bros.executor.kv_storage import KV_BLOCK_SIZE, KvMemory, KvStorage, bytes_per_block
from bros.executor.models.spec import ModelSpec
from support.kv_streams import DelayedStreams, TorchCopier
from support.tier import examples

SPEC = ModelSpec(
    architecture="tiny", family="llama", vocab_size=10, hidden_size=4, intermediate_size=8,
    num_layers=3, num_heads=1, num_kv_heads=1, head_dim=2, max_positions=100, norm_eps=1e-5,
    activation="silu", tied=True,
)  # fmt: skip
DTYPE = torch.float32
TOKEN_BYTES = bytes_per_block(SPEC, DTYPE) // KV_BLOCK_SIZE
SMALL = CopyBuffers(
    count=2, size=3 * TOKEN_BYTES, group_bytes=1, row_bytes=1, run_bytes=1, groups=3
)
STEPS = 12
CPU = torch.device("cpu")


@dataclass
class Step:
    """copies, then on each layer: write to `written`, read `read`.

    layers: after how many it is aborted. whole: runs all at once, like a CUDA graph.
    """

    copies: KvCopies
    written: list[int]
    read: list[int]
    layers: int = SPEC.num_layers
    whole: bool = False


def make_steps(rng: random.Random, num_slots: int = KV_BLOCK_SIZE) -> list[Step]:
    """Any that keep what KvCopies promises; at the end everything on the host comes back.

    num_slots: as many on the device as on the host.
    """
    known: set[int] = set()
    steps, slots, many = [], range(num_slots), num_slots // 2
    for _ in range(STEPS):
        copies = KvCopies()
        if rng.random() < 0.8:
            back = rng.sample(sorted(known), min(len(known), rng.choice((0, 1, many))))
            free = sorted(set(slots).difference(back))
            count = min(len(free), rng.choice((0, 1, many)))
            copies.out_host.extend(rng.sample(free, count))
            copies.out_device.extend(rng.sample(slots, count))
            copies.back_host.extend(back)
            copies.back_device.extend(rng.sample(slots, len(back)))
            known.update(copies.out_host)
        written = set(rng.sample(slots, rng.randrange(6))).difference(copies.back_device)
        preempted = set(copies.out_device).difference(copies.back_device)
        read = set(slots).difference(written, preempted)
        layers = rng.choice((0, 1, SPEC.num_layers, SPEC.num_layers))
        whole = layers == SPEC.num_layers and rng.random() < 0.3
        steps.append(Step(copies, sorted(written), sorted(read), layers, whole))
    last = sorted(known)
    copies = KvCopies(back_host=array("i", last), back_device=array("i", range(len(last))))
    return [*steps, Step(copies, [], list(slots))]


@dataclass
class Model:
    """Stands in for a decoder; puts its work on the storage's compute stream."""

    storage: KvMemory
    streams: DelayedStreams | None = None
    seen: list[Tensor] = field(default_factory=list)

    def run(self, steps: list[Step]) -> list[Tensor]:
        """All that was read, in order."""
        for number, step in enumerate(steps):
            if self.streams is not None:
                self.streams.change_speeds()
                self.streams.copying = True
            self.storage.copy(step.copies)
            if self.streams is not None:
                self.streams.copying = False
            if step.whole:
                self.storage.wait_for_layer(SPEC.num_layers - 1)
            for layer in range(step.layers):
                if not step.whole:
                    self.storage.wait_for_layer(layer)
                self._compute(number, step, layer)
        if self.streams is not None:
            self.streams.synchronize()
        return self.seen

    def _compute(self, number: int, step: Step, layer: int) -> None:
        """There is one head, so a slot is a row."""
        keys, values = (kv.flatten(0, 2) for kv in self.storage.layers[layer])
        written = torch.tensor(step.written, dtype=torch.int64)

        def work() -> None:
            new = (1000 * number + 10 * written + layer).to(keys.dtype)[:, None]
            keys[step.written] = new.expand(-1, keys.shape[1]).to(keys.device)
            values[step.written] = -keys[step.written]
            self.seen.append(torch.cat([keys[step.read], values[step.read]]))

        if self.streams is None:
            work()
        else:
            self.streams.put(self.streams.compute(), work)


def storage_on(streams: DelayedStreams, buffers: CopyBuffers = SMALL) -> KvMemory:
    return CudaKvStorage(
        SPEC, 1, DTYPE, 1,
        streams=streams, copier=TorchCopier(streams), device=CPU, buffers=buffers,
    )  # fmt: skip


def differs(seed: int, buffers: CopyBuffers = SMALL, **mutation: object) -> bool:
    """Whether anything is read that is not what it would be with one thing after the other."""
    steps = make_steps(random.Random(seed))
    expected = Model(KvStorage(SPEC, 1, DTYPE, 1)).run(steps)
    streams = DelayedStreams(random.Random(seed), **mutation)
    found = Model(storage_on(streams, buffers), streams).run(steps)
    return any(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@given(
    seed=st.integers(0, 2**32),
    buffers=st.sampled_from([SMALL, CopyBuffers(), CopyBuffers(count=1)]),
)
@settings(max_examples=examples(25, long=500))
def test_every_order_gives_the_same(seed: int, buffers: CopyBuffers) -> None:
    assert not differs(seed, buffers)


@pytest.mark.parametrize(
    "mutation",
    [
        {"without": [("compute", "copied out")]},
        {"without": [("to host", "gathered")]},
        {"without": [("from host", "copied out")]},
        {"without": [("scatter", "ready")]},
        {"without": [("from host", "scattered")]},
        {"without": [("scatter", "copied in")]},
        {"without": [("compute", "restored")]},
        {"careless": True},
        {"forgetful": True},
        {"unordered": "to host"},
        {"unordered": "from host"},
        {"unordered": "scatter"},
    ],
    ids=str,
)
def test_each_wait_is_needed(mutation: dict[str, object]) -> None:
    assert any(differs(seed, **mutation) for seed in range(300))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(20))
def test_a_device_gives_the_same(seed: int) -> None:
    """With copies of up to 12 MiB, which take longer than what is computed beside them."""
    pytest.importorskip("cupy")
    spec = dataclasses.replace(SPEC, head_dim=1024)
    blocks = 64
    steps = make_steps(random.Random(seed), blocks * KV_BLOCK_SIZE)
    expected = Model(KvStorage(spec, blocks, DTYPE, blocks)).run(steps)
    buffers = CopyBuffers(count=2, size=2**21, group_bytes=2**16, row_bytes=1, run_bytes=1)
    device = torch.device("cuda", 0)
    storage = cuda_kv_storage(spec, blocks, DTYPE, blocks, device, buffers)
    found = Model(storage).run(steps)
    for there, here in zip(found, expected, strict=True):
        assert torch.equal(there.cpu(), here)
    storage.clear()


def test_a_step_never_waits_for_the_device() -> None:
    """However slow it is: here nothing at all is done before the end."""
    streams = DelayedStreams(StandStill())
    storage = storage_on(streams)
    steps = make_steps(random.Random(3))
    for step in steps:
        storage.copy(step.copies)
    assert streams.synchronized == 0
    storage.clear()
    assert streams.synchronized == 1
    storage.clear()


class StandStill(random.Random):
    """Lets streams do nothing unless they have to."""

    def choice(self, seq):  # type: ignore[no-untyped-def]
        return seq[0]


def test_layers_are_waited_for_once_and_only_if_something_comes_back() -> None:
    streams = Counting(random.Random(0))
    storage = storage_on(streams)
    storage.wait_for_layer(2)
    storage.copy(KvCopies(out_device=array("i", [1, 2]), out_host=array("i", [0, 1])))
    streams.waits.clear()
    for layer in range(SPEC.num_layers):
        storage.wait_for_layer(layer)
    assert streams.waits == []
    storage.copy(KvCopies(back_host=array("i", [0, 1]), back_device=array("i", [5, 4])))
    streams.waits.clear()
    for _ in range(2):
        for layer in range(SPEC.num_layers):
            storage.wait_for_layer(layer)
    assert streams.waits == [("compute", "restored")] * SPEC.num_layers
    storage.copy(KvCopies(back_host=array("i", [0]), back_device=array("i", [5])))
    streams.waits.clear()
    storage.wait_for_layer(SPEC.num_layers - 1)
    assert streams.waits == [("compute", "restored")], "the last of a stream is enough"


class Counting(DelayedStreams):
    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.waits: list[tuple[str, str]] = []

    def wait(self, stream, event) -> None:  # type: ignore[no-untyped-def]
        self.waits.append((stream.name, event.name))
        super().wait(stream, event)


@pytest.mark.parametrize(
    ("tokens", "scattered", "groups"),
    [(16, False, 1), (32, False, 1), (64, False, 2), (256, False, 2), (256, True, 1)],
)
def test_what_comes_back_is_cut_by_layers_when_that_is_worth_it(
    tokens: int, scattered: bool, groups: int
) -> None:
    """With as much per token as Llama-3-8B has in bf16: 128 KiB."""
    spec = dataclasses.replace(SPEC, num_layers=8, head_dim=4096)
    streams = Counting(StandStill())
    storage = CudaKvStorage(
        spec, 1, torch.bfloat16, 32,
        streams=streams, copier=TorchCopier(streams), device=CPU,
        buffers=CopyBuffers(count=1),
    )  # fmt: skip
    hosts = array("i", range(0, 2 * tokens, 2) if scattered else range(tokens))
    device = array("i", range(tokens))
    storage.copy(KvCopies(back_host=hosts, back_device=device))
    streams.waits.clear()
    for layer in range(spec.num_layers):
        storage.wait_for_layer(layer)
    assert streams.waits == [("compute", "restored")] * groups


def test_memory_beside_the_cache_is_bounded_by_what_the_host_has_room_for() -> None:
    buffers = CopyBuffers(count=4, size=10 * TOKEN_BYTES)
    assert buffers.total_bytes(SPEC, DTYPE, 1000) == 2 * 4 * 10 * TOKEN_BYTES
    assert buffers.total_bytes(SPEC, DTYPE, 2) == 2 * 4 * 8 * TOKEN_BYTES
    assert buffers.total_bytes(SPEC, DTYPE, 0) == 0
    assert CopyBuffers(size=1).tokens(SPEC, DTYPE, 1000) == 1, "a token always fits"
