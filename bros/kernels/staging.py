"""Pinned host buffers from which inputs are copied to a device asynchronously."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_SMALLEST = 1024


class CopyEvent(Protocol):
    """The part of torch.cuda.Event that is used here."""

    def record(self) -> None:
        """The event is done once all work that is on the stream now is done."""
        ...

    def synchronize(self) -> None:
        """Wait until the event is done; returns at once if it was never recorded."""
        ...


class Staging:
    """Two pinned int32 buffers, used in turn: the host writes one while the other is being copied.

    `take` waits for the last copy from its buffer. If steps run one after the other it is done.
    """

    def __init__(
        self, device: torch.device, new_event: Callable[[], CopyEvent] | None = None
    ) -> None:
        """new_event: by default torch.cuda.Event on CUDA, and no events on the CPU."""
        self._pinned = device.type == "cuda"
        if new_event is None and self._pinned:
            new_event = torch.cuda.Event
        self._events = None if new_event is None else (new_event(), new_event())
        self._buffers = [self._buffer(_SMALLEST), self._buffer(_SMALLEST)]
        self._current = 0

    def take(self, size: int) -> Tensor:
        """A buffer int32 [size] with undefined content, to be written until `sent`."""
        self._current = 1 - self._current
        if self._events is not None:
            self._events[self._current].synchronize()
        if len(self._buffers[self._current]) < size:
            self._buffers[self._current] = self._buffer(size * 3 // 2)
        return self._buffers[self._current][:size]

    def sent(self) -> None:
        """Call this after enqueueing the copy from the last taken buffer."""
        if self._events is not None:
            self._events[self._current].record()

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor; the host does not wait and may release it at once."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def copy_to_host(values: Tensor) -> Tensor:
    """Start a copy to pinned memory; an event on the stream tells when it is complete."""
    if not values.is_cuda:
        return values.clone()
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    return host
