"""Groups by when their deadlines are at risk, so that nobody has to look at all of them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from bros.semantic.nodes import TaskGroup

COMPACT_FROM = 64


class Watch:
    """A heap whose entries are skipped once their group is not active any more."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, TaskGroup]] = []
        self._added = 0
        self._compact_at = COMPACT_FROM

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, group: TaskGroup, at_risk_s: float) -> None:
        heapq.heappush(self._heap, (at_risk_s, self._added, group))
        self._added += 1
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].active]
            heapq.heapify(self._heap)
            self._compact_at = max(COMPACT_FROM, 2 * len(self._heap))

    def next_s(self) -> float | None:
        """When the first deadline is at risk; None if none will be."""
        while self._heap and not self._heap[0][2].active:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Iterator[TaskGroup]:
        """Those at risk by now, which are watched no longer."""
        while (at_s := self.next_s()) is not None and at_s <= now:
            yield heapq.heappop(self._heap)[2]
