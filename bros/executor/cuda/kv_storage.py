"""KV cache memory on a CUDA device, with checkpoints and restores that overlap with computation.

    compute    [upload][gather 1][   chunks 1   ][gather 2][ chunks 2 ...
    to host              '->[    out 1     ]        '->[ out 2 ]
    from host  [ in, layers 0-3 ][ in, layers 4-7 ]
    scatter              '->[ 0-3 ]  '->[ 4-7 ]           chunks wait for these, layer by layer

A checkpoint first gathers its tokens into a staging buffer, on the compute stream and at the speed
of device memory. After that the tokens' slots may be overwritten, however long the bus takes.
A restore scatters tokens into their slots on a separate stream, a few layers at a time, so that the
first layers are computed while later ones are still being copied.

A comment at each wait names the rule that it enforces; core.plan.KvCopies lists these rules.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bros.core.errors import ConfigError
from bros.core.plan import KvCopies
from bros.executor.kv_storage import KV_BLOCK_SIZE, bytes_per_block
from bros.executor.models.spec import ModelSpec
from bros.kernels.cuda_ops import CopyRun, CudaKvCopier, CupyDriver

# ---- Streams and events of a CUDA device, as an interface with a fake in tests.


StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")


class Streams(Protocol[StreamT, EventT]):
    """Orders work on a device. Names are only for traces and tests.

    Waiting for an event waits for the work that its stream held when the event was last recorded.
    An event that was never recorded counts as done.
    """

    def compute(self) -> StreamT:
        """The stream on which the model runs; always the same one."""
        ...

    def stream(self, name: str) -> StreamT: ...

    def event(self, name: str) -> EventT: ...

    def record(self, event: EventT, stream: StreamT) -> None: ...

    def wait(self, stream: StreamT, event: EventT) -> None: ...

    def is_done(self, event: EventT) -> bool:
        """Whether the event is done; does not wait."""
        ...

    def synchronize(self) -> None:
        """Block until all work on the device is done. Not for use in a step."""
        ...


class CudaStreams:
    """Streams of one device, from torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def stream(self, name: str) -> torch.cuda.Stream:
        # High priority: the few kernels on these streams are what the compute stream waits for.
        return torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]

    def event(self, name: str) -> torch.cuda.Event:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        event.record(stream)

    def wait(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        stream.wait_event(event)

    def is_done(self, event: torch.cuda.Event) -> bool:
        return bool(event.query())  # type: ignore[no-untyped-call]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)


StreamT_contra = TypeVar("StreamT_contra", contravariant=True)
Ints = npt.NDArray[np.int32]


class KvCopier(Protocol[StreamT_contra]):
    """Enqueues copies on streams; kernels.cuda_ops.CudaKvCopier documents methods and shapes."""

    def gather(
        self, cache: Tensor, slots: Tensor, pieces: Tensor, stream: StreamT_contra
    ) -> None: ...

    def scatter(
        self, cache: Tensor, slots: Tensor, pieces: Tensor, stream: StreamT_contra
    ) -> None: ...

    def to_host(
        self, pieces: Tensor, host: Tensor, runs: Sequence[CopyRun], stream: StreamT_contra
    ) -> None: ...

    def from_host(
        self, host: Tensor, pieces: Tensor, runs: Sequence[CopyRun], stream: StreamT_contra
    ) -> None: ...

    def upload(self, numbers: Tensor, pinned: Tensor, stream: StreamT_contra) -> None: ...

    def pinned(self, num_bytes: int) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class CopyBuffers:
    """Sizes of the staging buffers, and how copies are split.

    count: staging buffers for each direction.
    size: bytes of a buffer. 8 x 32 MiB take the bus 5 ms; only a step that checkpoints more (2,048
        tokens of Llama-3-8B) waits for a free buffer.
    groups: a restore is split into at most this many groups of layers.
    group_bytes: the least bytes of a group (75 us of the bus), because each costs a launch.
    row_bytes: the least bytes of a token in a group. A copy engine reads shorter rows of host
        memory more slowly: 4,096 tokens of Llama-3-8B came back in 17.5 ms in rows of 16 KiB, 12.1
        in rows of 32, 10.8 in rows of 64 or 128; the bus takes 9.8 (H100).
    run_bytes: the least bytes of a copy from consecutive host slots, on average (9 us of the bus;
        the host needs a third of that to launch a copy).
    """

    count: int = 8
    size: int = 32 * 2**20
    group_bytes: int = 4 * 2**20
    row_bytes: int = 64 * 2**10
    groups: int = 8
    run_bytes: int = 512 * 2**10

    def tokens(self, spec: ModelSpec, dtype: torch.dtype, num_host_blocks: int) -> int:
        """Tokens per buffer. All buffers together never hold more tokens than the host pool."""
        token_bytes = bytes_per_block(spec, dtype) // KV_BLOCK_SIZE
        most = -(-num_host_blocks * KV_BLOCK_SIZE // self.count)
        return min(most, max(1, self.size // token_bytes))

    def total_bytes(self, spec: ModelSpec, dtype: torch.dtype, num_host_blocks: int) -> int:
        """Device memory of all buffers, in addition to the KV cache."""
        tokens = 2 * self.count * self.tokens(spec, dtype, num_host_blocks)
        return tokens * bytes_per_block(spec, dtype) // KV_BLOCK_SIZE


class _Buffer(NamedTuple, Generic[EventT]):
    """A staging buffer on the device.

    values: K and V of some tokens, flat.
    filled: recorded by the stream that writes the buffer.
    emptied: recorded by the stream that reads it.
    """

    values: Tensor
    filled: EventT
    emptied: EventT


class _TokenCopies(NamedTuple):
    """Tokens to copy, in the order of their host slots.

    slots: their slots on the device.
    host: their slots on the host.
    runs: the runs of consecutive host slots.
    """

    slots: Ints
    host: Ints
    runs: list[CopyRun]

    @classmethod
    def of(cls, slots: array[int], host_slots: array[int]) -> _TokenCopies:
        host = np.array(host_slots, dtype=np.int32)
        if not len(host):
            return cls(host, host, [])
        order = np.argsort(host)
        host = host[order]
        starts = [0, *(np.flatnonzero(host[1:] != host[:-1] + 1) + 1).tolist()]
        ends = [*starts[1:], len(host)]
        runs = [
            CopyRun(int(host[low]), low, high - low) for low, high in zip(starts, ends, strict=True)
        ]
        return cls(np.array(slots, dtype=np.int32)[order], host, runs)

    def runs_of(self, low: int, high: int) -> list[CopyRun]:
        """The runs of tokens [low, high), with `piece` counted from low."""
        found, number = [], bisect_right(self.runs, low, key=attrgetter("piece")) - 1
        while number < len(self.runs) and self.runs[number].piece < high:
            host, piece, length = self.runs[number]
            begin, end = max(piece, low), min(piece + length, high)
            found.append(CopyRun(host + begin - piece, begin - low, end - begin))
            number += 1
        return found


class _SlotLists(Generic[StreamT, EventT]):
    """Uploads slots to the device, through memory that is reused once no copy reads it any more.

    If more than `ahead` copies are pending, it allocates more memory, so the host never waits.
    """

    def __init__(
        self, streams: Streams[StreamT, EventT], copier: KvCopier[StreamT], size: int,
        device: torch.device, ahead: int = 4,
    ) -> None:  # fmt: skip
        self._streams = streams
        self._copier = copier
        self._size = size
        self._device = device
        self._lists = deque(self._make() for _ in range(ahead))

    def upload(self, out: Ints, back: Ints, stream: StreamT) -> tuple[Tensor, Tensor, EventT]:
        """Both lists on the device, and an event to record after their last use."""
        used = self._lists[0][2]
        if self._streams.is_done(used):
            self._lists.rotate(-1)
        else:
            self._lists.append(self._make())
        pinned, numbers, used = self._lists[-1]
        middle, end = len(out), len(out) + len(back)
        pinned[:end] = torch.from_numpy(np.concatenate((out, back)))
        self._copier.upload(numbers[:end], pinned[:end], stream)
        return numbers[:middle], numbers[middle:end], used

    def _make(self) -> tuple[Tensor, Tensor, EventT]:
        pinned = self._copier.pinned(4 * self._size).view(torch.int32)
        numbers = torch.empty(self._size, dtype=torch.int32, device=self._device)
        return pinned, numbers, self._streams.event("slots used")


class _Mover(Generic[StreamT, EventT]):
    """Copies tokens between the cache and host memory.

    cache: [layers, 2, num_blocks, kv_heads, 16, head_dim]
    host: [host slots, layers, 2, kv_heads, head_dim]. A token is contiguous, so a range of host
        slots is one copy; the scheduler allocates host slots by the block, so ranges are long.
    pieces: [2, number of buffers, values], staging buffers for checkpoints and for restores
    """

    def __init__(
        self, cache: Tensor, host: Tensor, pieces: Tensor, sizes: CopyBuffers,
        streams: Streams[StreamT, EventT], copier: KvCopier[StreamT],
    ) -> None:  # fmt: skip
        self._cache, self._host = cache, host
        self._sizes = sizes
        self._streams = streams
        self._copier = copier
        self._num_layers = len(cache)
        self._tokens = pieces.shape[2] // host[0].numel()
        """Tokens that fit into a buffer."""
        self._slot_lists = _SlotLists(streams, copier, 2 * len(host), cache.device)
        self._to_host = streams.stream("to host")
        self._from_host = streams.stream("from host")
        self._scatter = streams.stream("scatter")
        self._ready = streams.event("ready")
        self._restored = [streams.event("restored") for _ in range(sizes.groups)]
        self._pending_restores: deque[tuple[int, EventT]] = deque()
        """(first layer, event) of the groups that the compute stream has not waited for."""
        self._out, self._back = (
            [_Buffer(row, streams.event(filled), streams.event(emptied)) for row in rows]
            for rows, filled, emptied in (
                (pieces[0], "gathered", "copied out"),
                (pieces[1], "copied in", "scattered"),
            )
        )
        self._num_out = self._num_back = 0
        self._last_out = np.full(len(host), -1, np.int64)
        """The number of the last checkpoint copy to each host slot, -1 if there was none."""

    def copy(self, copies: KvCopies) -> None:
        streams, compute = self._streams, self._streams.compute()
        # An aborted step may not have waited for all layers. Their slots may be preempted now,
        # and their host slots overwritten after the gather.
        self.wait_for_layer(self._num_layers)
        out = _TokenCopies.of(copies.out_device, copies.out_host)
        back = _TokenCopies.of(copies.back_device, copies.back_host)
        out_slots, back_slots, used = self._slot_lists.upload(out.slots, back.slots, compute)
        if len(out.slots):
            self._copy_out(out, out_slots, compute)
        if len(back.slots):
            # Steps in order, and writes after gather: `compute` holds all of these already.
            streams.record(self._ready, compute)
            streams.wait(self._scatter, self._ready)
            self._copy_back(back, back_slots)
        streams.record(used, self._scatter if len(back.slots) else compute)

    def wait_for_layer(self, layer: int) -> None:
        """Enforces the rule "reads after scatter"."""
        restored = None
        while self._pending_restores and self._pending_restores[0][0] <= layer:
            restored = self._pending_restores.popleft()[1]
        if restored is not None:  # the stream is in order, so waiting for the last is enough
            self._streams.wait(self._streams.compute(), restored)

    def _copy_out(self, out: _TokenCopies, slots: Tensor, compute: StreamT) -> None:
        """Gather on `compute`, so that nothing later on that stream overwrites the tokens first."""
        streams = self._streams
        for low in range(0, len(out.host), self._tokens):
            high = min(low + self._tokens, len(out.host))
            buffer = self._out[self._num_out % len(self._out)]
            pieces = self._view(buffer, high - low, range(self._num_layers))
            streams.wait(compute, buffer.emptied)  # a buffer is refilled after its last copy
            self._copier.gather(self._cache, slots[low:high], pieces, compute)
            streams.record(buffer.filled, compute)
            streams.wait(self._to_host, buffer.filled)  # out after gather
            # Out after out: all of them are on one stream.
            self._copier.to_host(pieces, self._host, out.runs_of(low, high), self._to_host)
            streams.record(buffer.emptied, self._to_host)
            self._last_out[out.host[low:high]] = self._num_out
            self._num_out += 1

    def _copy_back(self, back: _TokenCopies, slots: Tensor) -> None:
        streams = self._streams
        last = int(self._last_out[back.host].max())
        # In after out. If the buffer was reused since, its event is later on the same stream, so
        # this waits for more than necessary, never for less.
        streams.wait(self._from_host, self._out[last % len(self._out)].emptied)
        for layers, restored in zip(self._groups(back), self._restored, strict=False):
            cache = self._cache[layers.start : layers.stop]
            host = self._host[:, layers.start : layers.stop]
            step = self._tokens * self._num_layers // len(layers)
            for low in range(0, len(back.host), step):
                high = min(low + step, len(back.host))
                buffer = self._back[self._num_back % len(self._back)]
                pieces = self._view(buffer, high - low, layers)
                streams.wait(self._from_host, buffer.emptied)  # refilled after its last scatter
                self._copier.from_host(host, pieces, back.runs_of(low, high), self._from_host)
                streams.record(buffer.filled, self._from_host)
                streams.wait(self._scatter, buffer.filled)  # scatter after in
                self._copier.scatter(cache, slots[low:high], pieces, self._scatter)
                streams.record(buffer.emptied, self._scatter)
                self._num_back += 1
            streams.record(restored, self._scatter)
            self._pending_restores.append((layers.start, restored))

    def _groups(self, back: _TokenCopies) -> list[range]:
        """All layers, in groups large enough to be worth their kernel and a copy for each run."""
        sizes, num_layers = self._sizes, self._num_layers
        token_bytes = self._host.stride(0) * self._host.itemsize
        size = len(back.host) * token_bytes
        worth = min(
            size // sizes.group_bytes,
            size // (len(back.runs) * sizes.run_bytes),
            token_bytes // sizes.row_bytes,
        )
        count = max(1, min(sizes.groups, num_layers, worth))
        bounds = [number * num_layers // count for number in range(count + 1)]
        return [range(low, high) for low, high in zip(bounds, bounds[1:], strict=False)]

    def _view(self, buffer: _Buffer[EventT], tokens: int, layers: range) -> Tensor:
        """A buffer as pieces [tokens, layers, 2, kv_heads, head_dim]."""
        shape = torch.Size((tokens, len(layers), *self._host.shape[2:]))
        return buffer.values[: shape.numel()].view(shape)


class CudaKvStorage(Generic[StreamT, EventT]):
    """KvMemory on a CUDA device. Only `clear` waits for the device.

    All computation must be on one stream, Streams.compute(). A plan may restore only tokens that
    an earlier plan checkpointed.

    All host memory is pinned when the server starts. Pinning on demand would stop the device for
    tens of milliseconds per 100 MiB, in the very step in which an urgent request needs the slots;
    pinning early also reports missing memory at once.

    Raises ConfigError if device or host have less memory than requested.
    """

    def __init__(
        self, spec: ModelSpec, num_blocks: int, dtype: torch.dtype, num_host_blocks: int = 0, *,
        streams: Streams[StreamT, EventT], copier: KvCopier[StreamT] | None, device: torch.device,
        buffers: CopyBuffers | None = None,
    ) -> None:  # fmt: skip
        """copier: may be None if num_host_blocks is 0."""
        self._streams = streams
        layers, heads, head_dim = spec.num_layers, spec.num_kv_heads, spec.head_dim
        shape = (layers, 2, num_blocks, heads, KV_BLOCK_SIZE, head_dim)
        cache = _allocated(
            lambda: torch.zeros(shape, dtype=dtype, device=device),
            "--kv-memory, --kv-blocks",
            "this device",
            num_blocks * bytes_per_block(spec, dtype),
        )
        self.layers: tuple[tuple[Tensor, Tensor], ...] = tuple((kv[0], kv[1]) for kv in cache)
        self._mover: _Mover[StreamT, EventT] | None = None
        if not num_host_blocks:
            return
        assert copier is not None
        size = num_host_blocks * bytes_per_block(spec, dtype)
        host = _allocated(
            lambda: copier.pinned(size),
            "--host-kv-memory, --host-kv-blocks",
            "this machine",
            size,
        )
        host = host.view(dtype).view(-1, layers, 2, heads, head_dim)
        buffers = buffers or CopyBuffers()
        values = buffers.tokens(spec, dtype, num_host_blocks) * host[0].numel()
        pieces = _allocated(
            lambda: torch.empty(2, buffers.count, values, dtype=dtype, device=device),
            "--host-kv-memory",
            "beside the KV cache this device",
            buffers.total_bytes(spec, dtype, num_host_blocks),
        )
        self._mover = _Mover(cache, host, pieces, buffers, streams, copier)

    @property
    def positions(self) -> None:
        """None: kernels of a GPU read keys in any order."""
        return None

    def note(self, slots: Tensor, positions: Tensor) -> None:
        """Nothing is noted."""

    def copy(self, copies: KvCopies) -> None:
        """See KvMemory."""
        if len(copies):
            assert self._mover is not None, "there is no memory for copies"
            self._mover.copy(copies)

    @property
    def copies_in_background(self) -> bool:
        """Whether there is memory for copies."""
        return self._mover is not None

    def wait_for_layer(self, layer: int) -> None:
        """See KvMemory."""
        if self._mover is not None:
            self._mover.wait_for_layer(layer)

    def clear(self) -> None:
        """Wait for pending copies, then release the memory."""
        self._streams.synchronize()
        self.layers = ()
        self._mover = None


def cuda_kv_storage(
    spec: ModelSpec,
    num_blocks: int,
    dtype: torch.dtype,
    num_host_blocks: int,
    device: torch.device,
    buffers: CopyBuffers | None = None,
) -> CudaKvStorage[torch.cuda.Stream, torch.cuda.Event]:
    """KV memory on a CUDA device, with CuPy for the copies.

    Raises ConfigError if there is too little memory, or if num_host_blocks > 0 and CuPy cannot use
    the device.
    """
    copier = CudaKvCopier(CupyDriver(device)) if num_host_blocks else None
    return CudaKvStorage(
        spec, num_blocks, dtype, num_host_blocks,
        streams=CudaStreams(device), copier=copier, device=device, buffers=buffers,
    )  # fmt: skip


def _allocated(allocate: Callable[[], Tensor], flags: str, where: str, size: int) -> Tensor:
    try:
        return allocate()
    except RuntimeError:  # the base class of CuPy's and torch's out-of-memory errors
        raise ConfigError(
            f"{flags}: {where} cannot allocate {size / 2**30:.1f} GiB; ask for less"
        ) from None
