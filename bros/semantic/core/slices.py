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
from collections.abc import Generator
from typing import TypeVar

T = TypeVar("T")

Slices = Generator[None, None, T]
"""Work that yields where other work may run, and returns its result."""


def whole(slices: Slices[T]) -> T:
    """The result of work in slices, without pauses."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: T = end.value
            return result


async def in_slices(slices: Slices[T]) -> T:
    """The result of work in slices; other tasks of the event loop run between them.

    If it is cancelled, the work ends at once, in its `finally` clauses.
    """
    with contextlib.closing(slices):
        while True:
            try:
                next(slices)
            except StopIteration as end:
                result: T = end.value
                return result
            await asyncio.sleep(0)
