"""Garbage collection in pauses that no stream notices.

    automatic   new objects ──▶ young ──▶ old ──▶ frozen    a pause of some milliseconds: it visits
                                                            what was made since the last one
    idle        frozen ─────────────────▶ visited as a whole, then frozen again

CPython visits all objects whenever the oldest generation has grown by a quarter. With the calls of
large sessions, or tens of thousands of waiting requests, such a collection takes 0.1 to 0.4 s, in
whichever turn of the event loop or step it happens. Here what has survived one visit is frozen, so
that no automatic collection visits it again. Reference counts still free frozen objects; only
cycles of them stay until the process is idle, so what ends with each request must not be one.

`benchmarks/session_scale.py`: the longest collection among 1,000 sessions of 10 calls took 312 ms
without freezing.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

THRESHOLDS = (1400, 1, 1)
"""Of gc.set_threshold. The youngest generation is collected with 1,401 objects, the next one at
every third of these collections, and the oldest one at the first collection after two of those:
with 1,401 * (2 * 3 + 1) = 9,807 objects, which takes 1 to 4 ms. A step of 128 rows makes about
1,300 objects and frees them again: with 700 for the youngest generation it was collected in every
step, which took 10 % of the host's time (benchmarks/step_host_speed.py)."""
_DUE = 100_000
"""Objects frozen since the last full collection from which an idle process makes the next one."""
_OVERDUE = 2_000_000
"""As _DUE, for a process that is never idle; about 0.5 GB if all of them are garbage."""
_CHECK_EVERY_S = 1.0

_OLDEST = 2


class Collector:
    """The garbage collector of this process, during the block.

    In a block, objects that exist at its beginning (modules, the tokenizer, a model) are frozen,
    too.
    """

    def __init__(self, *, due: int = _DUE, overdue: int = _OVERDUE) -> None:
        """due, overdue: see _DUE and _OVERDUE."""
        self._due = due
        self._overdue = overdue
        self._frozen = 0  # since the last full collection; those freed since then count, too
        self._base = 0  # frozen objects after the last full collection
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        self._thresholds = gc.get_threshold()
        gc.set_threshold(*THRESHOLDS)
        gc.callbacks.append(self._on_collection)
        self.collect()
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

    @property
    def is_due(self) -> bool:
        """Whether an idle process should make a full collection."""
        return self._frozen >= self._due

    def collect_if_due(self, *, idle: bool) -> None:
        """Make a full collection if this is the time for one. idle: no user waits."""
        if self.is_due and (idle or self._is_overdue()):
            self.collect()

    def collect(self) -> None:
        """A full collection. It takes about 0.1 s per million objects."""
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        # Of nothing: else the next automatic one of the oldest generation would wait until a
        # quarter of the objects that this one has visited are new.
        gc.collect()
        self._frozen, self._base = 0, gc.get_freeze_count()

    async def run(self, is_idle: Callable[[], Awaitable[bool]]) -> None:
        """Make full collections when they are due, until cancelled."""
        while True:
            await asyncio.sleep(_CHECK_EVERY_S)
            if self.is_due:
                self.collect_if_due(idle=await is_idle())

    def _is_overdue(self) -> bool:
        if self._frozen < self._overdue:
            return False
        # Visits all frozen objects, so it is asked only now: most of them may have been freed.
        self._frozen = max(gc.get_freeze_count() - self._base, 0)
        return self._frozen >= self._overdue

    def _on_collection(self, phase: str, info: dict[str, int]) -> None:
        """A callback of the collector."""
        if phase == "stop" and info["generation"] == _OLDEST:
            self._frozen += len(gc.get_objects(generation=_OLDEST))
            gc.freeze()
