"""Work in slices: whatever takes longer than an event loop may be held pauses in between.

def counted(calls: Sequence[Call]) -> Slices[int]:
    for call in calls:
        ...
        yield                               other work may run
    return count

whole(counted(calls))                       all slices at once
await in_slices(counted(calls))             other tasks of the event loop run between them
count = yield from counted(calls)           as part of other work in slices
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Generator, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

Slices = Generator[None, None, T]
"""Work that yields where other work may run, and returns its result."""


class _Pauses(Generic[T]):
    """The pauses of work in slices, to iterate over; then `result` is set."""

    result: T

    def __init__(self, slices: Slices[T]) -> None:
        self._slices = slices

    def __iter__(self) -> Iterator[None]:
        self.result = yield from self._slices


def whole(slices: Slices[T]) -> T:
    """The result of work in slices, without pauses."""
    pauses = _Pauses(slices)
    for _ in pauses:
        pass
    return pauses.result


async def in_slices(slices: Slices[T]) -> T:
    """The result of work in slices; other tasks of the event loop run between them.

    If it is cancelled, the work ends at once, in its `finally` clauses.
    """
    pauses = _Pauses(slices)
    with contextlib.closing(slices):
        for _ in pauses:
            await asyncio.sleep(0)
    return pauses.result
