"""Streams for CudaKvStorage without a GPU: some do everything at once, others when they like to."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bros.executor.kv_storage import KV_BLOCK_SIZE
from bros.kernels.cuda_ops import CopyRun


@dataclass(eq=False)
class Stream:
    """name: what the storage called it. queue: what has still to be done."""

    name: str
    cuda_stream: int = 0
    queue: deque[Callable[[], bool]] = field(default_factory=deque)


@dataclass(eq=False)
class Event:
    """ticket: of what has to be done before it has happened; None if it was never recorded."""

    name: str
    ticket: list[bool] | None = None


class EagerStreams:
    """Everything is done when it is asked for, so there is nothing to wait for."""

    def compute(self) -> Stream:
        return Stream("compute")

    def stream(self, name: str) -> Stream:
        return Stream(name)

    def event(self, name: str) -> Event:
        return Event(name)

    def record(self, event: Event, stream: Stream) -> None:
        pass

    def wait(self, stream: Stream, event: Event) -> None:
        pass

    def is_done(self, event: Event) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class DelayedStreams:
    """Each stream is in order, and that and the waits are all that holds anything back.

    What runs next is drawn at random; for some time a stream may be so slow that it only moves
    when all others stand still.

    without: waits that are left out, as (stream, event). unordered: streams on which nothing waits
    for what came before the last wait. forgetful: every event is said to be done.
    careless: `compute` does not wait while `copying` is set.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        without: Collection[tuple[str, str]] = (),
        unordered: str | None = None,
        forgetful: bool = False,
        careless: bool = False,
    ) -> None:
        self._rng = rng
        self._without = without
        self._unordered = unordered
        self._forgetful = forgetful
        self._careless = careless
        self._compute = Stream("compute")
        self._streams = [self._compute]
        self._weights: dict[str, int] = {}
        self.copying = False
        self.synchronized = 0

    def compute(self) -> Stream:
        return self._compute

    def stream(self, name: str) -> Stream:
        self._streams.append(Stream(name))
        return self._streams[-1]

    def event(self, name: str) -> Event:
        return Event(name)

    def record(self, event: Event, stream: Stream) -> None:
        ticket = event.ticket = [False]

        def happen() -> bool:
            ticket[0] = True
            return True

        stream.queue.append(happen)

    def wait(self, stream: Stream, event: Event) -> None:
        if stream.name == self._unordered:
            self._streams.append(Stream(stream.name, queue=stream.queue))
            stream.queue = deque()
        ticket = event.ticket
        if ticket is None or (stream.name, event.name) in self._without:
            return
        if self._careless and self.copying and event.name == "restored":
            return
        stream.queue.append(lambda: ticket[0])

    def is_done(self, event: Event) -> bool:
        return self._forgetful or event.ticket is None or event.ticket[0]

    def put(self, stream: Stream, work: Callable[[], object]) -> None:
        """Have something done; some of what was put earlier is done meanwhile."""

        def do() -> bool:
            work()
            return True

        stream.queue.append(do)
        for _ in range(self._rng.choice((0, 0, 1, 4))):
            self._advance()

    def change_speeds(self) -> None:
        self._weights = {stream.name: self._rng.choice((0, 1, 5)) for stream in self._streams}

    def synchronize(self) -> None:
        self.synchronized += 1
        while any(stream.queue for stream in self._streams):
            assert self._advance(), "streams wait for each other"

    def _advance(self) -> bool:
        """Do one thing, if anything can be done."""
        weighed = [
            (self._rng.random() * self._weights.get(stream.name, 1), number)
            for number, stream in enumerate(self._streams)
            if stream.queue
        ]
        for _, number in sorted(weighed, reverse=True):
            queue = self._streams[number].queue
            if queue[0]():
                queue.popleft()
                return True
        return False


class TorchCopier:
    """What CudaKvCopier does, in torch on the CPU, at the time that streams choose."""

    def __init__(self, streams: DelayedStreams) -> None:
        self._streams = streams

    def gather(self, cache: Tensor, slots: Tensor, pieces: Tensor, stream: Stream) -> None:
        def work() -> None:
            pieces.copy_(cache[_at(cache, slots)])

        self._streams.put(stream, work)

    def scatter(self, cache: Tensor, slots: Tensor, pieces: Tensor, stream: Stream) -> None:
        def work() -> None:
            cache[_at(cache, slots)] = pieces

        self._streams.put(stream, work)

    def to_host(
        self, pieces: Tensor, host: Tensor, runs: Sequence[CopyRun], stream: Stream
    ) -> None:
        def work(run: CopyRun) -> None:
            part = pieces[run.piece : run.piece + run.length]
            host[run.host : run.host + run.length] = part

        for run in runs:
            self._streams.put(stream, lambda run=run: work(run))

    def from_host(
        self, host: Tensor, pieces: Tensor, runs: Sequence[CopyRun], stream: Stream
    ) -> None:
        def work(run: CopyRun) -> None:
            part = host[run.host : run.host + run.length]
            pieces[run.piece : run.piece + run.length] = part

        for run in runs:
            self._streams.put(stream, lambda run=run: work(run))

    def upload(self, numbers: Tensor, pinned: Tensor, stream: Stream) -> None:
        self._streams.put(stream, lambda: numbers.copy_(pinned))

    def pinned(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


def _at(cache: Tensor, slots: Tensor) -> tuple[slice | Tensor, ...]:
    """An index of [tokens, layers, 2, kv_heads, head_dim]; of any tokens if `slots` are none."""
    indexes = slots.long() % (cache.shape[2] * KV_BLOCK_SIZE)
    every = slice(None)
    return every, every, indexes // KV_BLOCK_SIZE, every, indexes % KV_BLOCK_SIZE
