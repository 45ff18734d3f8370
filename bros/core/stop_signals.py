"""Handlers of the signals that stop a process, for the time of a block."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def signal_handlers_restored() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM after the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads cannot set handlers
        return
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python, which cannot restore it
                signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals_handled(handler: Handler) -> Iterator[None]:
    """Handle SIGINT and SIGTERM with `handler` in the block. Only in the main thread; in others
    nothing changes.

    handler: as for signal.signal. Processes that are started in the block inherit SIG_IGN.
    """
    with signal_handlers_restored():
        if threading.current_thread() is threading.main_thread():
            for number in _STOP_SIGNALS:
                signal.signal(number, handler)
        yield
