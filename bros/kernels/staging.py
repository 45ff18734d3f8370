"""Host memory from which inputs are copied to a device while the host goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

_SMALLEST = 1024


class CopyEvent(Protocol):
    """The part of torch.cuda.Event that is used."""

    def record(self) -> None:
        """Happens once all that is in the stream now is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it has happened; at once if it was never recorded."""
        ...


class Staging:
    """Two page-locked int32 buffers in turn: one is copied from while the other is written.

    Never is one handed out again before its last copy is done. With one step after the other it
    always is by then, so there is no wait.
    """

    def __init__(
        self, device: torch.device, new_event: Callable[[], CopyEvent] | None = None
    ) -> None:
        """new_event: torch.cuda.Event unless given; on the CPU none is needed."""
        self._pinned = device.type == "cuda"
        if new_event is None and self._pinned:
            new_event = torch.cuda.Event
        self._events = None if new_event is None else (new_event(), new_event())
        self._buffers = [self._buffer(_SMALLEST), self._buffer(_SMALLEST)]
        self._turn = 0

    def take(self, size: int) -> Tensor:
        """int32 [size] with any contents, until `sent`."""
        self._turn = 1 - self._turn
        if self._events is not None:
            self._events[self._turn].synchronize()
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = self._buffer(size * 3 // 2)
        return self._buffers[self._turn][:size]

    def sent(self) -> None:
        """The copy from what was taken last is in the stream."""
        if self._events is not None:
            self._events[self._turn].record()

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.int32, pin_memory=self._pinned)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """For small things: the host does not wait, and may forget the values at once."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
