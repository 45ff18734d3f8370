"""Handlers of the signals that stop a process, for the time of a block."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP comes when a terminal is closed."""

Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextlib.contextmanager
def signal_handlers_restored() -> Iterator[None]:
    """Restore the handlers of STOP_SIGNALS after the block."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads cannot set handlers
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not set by Python, which cannot restore it
                signal.signal(number, handler)


@contextlib.contextmanager
def stop_signals_handled(handler: Handler) -> Iterator[None]:
    """Handle STOP_SIGNALS with `handler` in the block. Only in the main thread; in others nothing
    changes.

    handler: as for signal.signal. Processes that are started in the block inherit SIG_IGN.
    """
    with _handled(STOP_SIGNALS, handler):
        yield


@contextlib.contextmanager
def exit_on_stop_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end this process in the block, also if it is the first one of a
    container: the kernel drops signals for which that one has no handler."""
    if os.getpid() != 1:
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        os._exit(128 + number)  # the status that shells give to a process that a signal has ended

    with _handled((signal.SIGTERM, signal.SIGHUP), leave):
        yield


@contextlib.contextmanager
def _handled(numbers: Sequence[signal.Signals], handler: Handler) -> Iterator[None]:
    with signal_handlers_restored():
        if threading.current_thread() is threading.main_thread():
            for number in numbers:
                # nohup lets a process ignore SIGHUP, so that it outlives its terminal.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    signal.signal(number, handler)
        yield
