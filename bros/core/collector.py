"""Garbage collection in pauses that no stream notices.

    automatic   new objects ──▶ young ──▶ old    a pause of some milliseconds: it visits what was
                                                 made since the last one, and never the old ones
    full        young and old                    while the process is idle, and the pause is short
                frozen: what was there at the start is never visited

CPython visits all objects whenever the oldest generation has grown by a quarter. With the calls of
large sessions, or tens of thousands of waiting requests, such a collection takes 0.1 to 0.4 s, in
whichever turn of the event loop or step it happens. Here an object that has survived one or two
collections is left alone. Reference counts still free it; only cycles of such objects stay until a
full collection, so what ends with each request or session must not be one.

CPython counts the objects that were made since the last collection less those that were freed, also
old ones. While as many old objects end as new ones are made, for instance the calls of a program,
it makes no collection, and the next one visits all that are young by then: among 10,000 calls
36,000 objects in 25 ms, and 50,000 in 46 ms. So the server also looks how many there are.

How long a full collection takes depends on what is alive, so it is not made while much is: what a
session of 10,000 calls keeps is no garbage. What reference counts have freed is not suspected
either: blocks of memory tell how much is left, and asking for their number takes 0.1 ms.

`benchmarks/session_scale.py`: the longest collection among 1,000 sessions of 10 calls took 312 ms
without all this. After a session of 10,000 calls a full one took 1.9 s while it visited everything.
"""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

_NEVER = 2**31 - 1
THRESHOLDS = (2800, 2, _NEVER)
"""Of gc.set_threshold. The youngest generation is collected with 2,801 objects, and every fourth
time the next one with it: 2,801 * 4 = 11,204 objects, which takes 1 to 5 ms. The oldest one never
is. A step of 256 rows makes about 2,600 objects and frees them again: with 1400 for the youngest
generation it was collected in every step, which took 5 % of the host's time
(benchmarks/step_host_speed.py)."""
_DUE = 100_000
"""Blocks of memory kept since the last full collection from which an idle process makes the next
one. An object of the collector has one block or more."""
_MAX_KEPT = 150_000
"""Blocks kept since the start up to which it does so: about 60,000 objects of the collector, which
take 6 to 35 ms. With 250,000 it took 57 ms on a Zen 3, when 1,000 sessions were opened
(benchmarks/input_stalls.py). If there are more, most are alive."""
_OVERDUE = 5_000_000
"""Blocks kept since the last full collection from which the next one is made in any case; about
0.5 GB if all of them are garbage."""
_LOOKS_PER_CHECK = 20
_CHECK_EVERY_S = 1.0

_YOUNG, _MIDDLE = 0, 1


class Collector:
    """The garbage collector of this process, during the block.

    Objects that exist at the beginning of the block (modules, the tokenizer, a model) are frozen
    until its end.
    """

    def __init__(
        self, *, due: int = _DUE, max_kept: int = _MAX_KEPT, overdue: int = _OVERDUE
    ) -> None:
        """due, max_kept, overdue: see _DUE, _MAX_KEPT and _OVERDUE."""
        self._due = due
        self._max_kept = max_kept
        self._overdue = overdue
        self._aged = 0  # objects that have become old since the last full collection or count
        self._count_at = due  # of these: when a process that is not idle counts blocks again
        self._start = self._base = 0  # blocks at the start, and after the last full collection
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*THRESHOLDS)
        gc.collect()
        gc.freeze()
        gc.callbacks.append(self._on_collection)
        self.collect()
        self._start = self._base
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._on_collection)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def collect_if_due(self, *, idle: bool) -> None:
        """Make a full collection if this is the time for one. idle: no user waits."""
        if self._aged < (self._due if idle else self._count_at):
            return
        blocks = sys.getallocatedblocks()
        kept = blocks - self._base
        if kept >= self._overdue or (
            idle and kept >= self._due and blocks - self._start <= self._max_kept
        ):
            self.collect()
            return
        if kept < self._due:
            self._aged = max(kept, 0)  # reference counts have freed the others
        self._count_at = self._aged + self._due

    def collect(self) -> None:
        """A full collection of all that is not frozen."""
        gc.collect()
        self._aged, self._count_at = 0, self._due
        self._base = sys.getallocatedblocks()

    @property
    def may_be_due(self) -> bool:
        """Whether `collect_if_due` has something to decide."""
        return self._aged >= self._due

    def collect_young_if_due(self) -> None:
        """Collect the young objects if there are more than THRESHOLDS, which CPython may not have
        noticed. Looking takes 0.01 ms per 1,000 objects."""
        if _count(_YOUNG) > THRESHOLDS[_YOUNG]:
            gc.collect(_MIDDLE if gc.get_count()[_MIDDLE] > THRESHOLDS[_MIDDLE] else _YOUNG)

    async def run(self, is_idle: Callable[[], Awaitable[bool]]) -> None:
        """Make the collections that are due, until cancelled."""
        while True:
            for _ in range(_LOOKS_PER_CHECK):
                await asyncio.sleep(_CHECK_EVERY_S / _LOOKS_PER_CHECK)
                self.collect_young_if_due()
            if self.may_be_due:
                self.collect_if_due(idle=await is_idle())

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """A callback of the collector."""
        if info["generation"] != _MIDDLE:
            return
        if phase == "start":
            self._aged += _count(_YOUNG, _MIDDLE)
        else:
            self._aged -= info["collected"]


def _count(*generations: int) -> int:
    """How many objects these generations have. The lists of them are gone before another thread can
    run: while they know a tuple that a thread makes from a generator, that fails there."""
    return sum(map(len, map(gc.get_objects, generations)))
