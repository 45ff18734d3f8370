"""Streams and events of a CUDA device, as an interface that tests can stand in for."""

from __future__ import annotations

from typing import Protocol, TypeVar

import torch

StreamT = TypeVar("StreamT")
EventT = TypeVar("EventT")


class Streams(Protocol[StreamT, EventT]):
    """Orders work on a device. Names are for people who read traces, and for tests.

    Waiting for an event means: for what had been put on its stream when it was recorded last. One
    that was never recorded has happened.
    """

    def compute(self) -> StreamT:
        """Where the model runs; always the same one."""
        ...

    def stream(self, name: str) -> StreamT: ...

    def event(self, name: str) -> EventT: ...

    def record(self, event: EventT, stream: StreamT) -> None: ...

    def wait(self, stream: StreamT, event: EventT) -> None: ...

    def is_done(self, event: EventT) -> bool:
        """Without waiting."""
        ...

    def synchronize(self) -> None:
        """Block until everything is done. Not for use in a step."""
        ...


class CudaStreams:
    """Streams of one device, by torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def stream(self, name: str) -> torch.cuda.Stream:
        # The little there is of kernels on these is what compute waits for, so it goes first.
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
