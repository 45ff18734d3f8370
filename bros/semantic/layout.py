"""Where the boxes of a picture of a graph go: in columns from left to right, few lines crossing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_GAP = 18.0
_LANE_HEIGHT = 12.0
_SWEEPS = 4


class Flow(NamedTuple):
    """Something that goes from one box to others."""

    source: int
    targets: Sequence[int]


@dataclass(frozen=True, slots=True)
class Layout:
    """columns, tops: of each box. lanes: (flow, column) -> the height at which it passes by the
    boxes of a column. height: of all."""

    columns: Sequence[int]
    tops: Sequence[float]
    lanes: Mapping[tuple[int, int], float]
    height: float

    @property
    def num_columns(self) -> int:
        return 1 + max(self.columns, default=-1)


def arrange(heights: Sequence[float], flows: Sequence[Flow]) -> Layout:
    """Boxes of these heights: each to the right of all that flow to it, but for one of each cycle.

    Sugiyama's method: longest paths give the columns, a flow that goes further than the next
    column takes up room in those between, and boxes are ordered by where their neighbours are.
    """
    columns = _columns(len(heights), flows)
    grid = _Grid(heights, flows, columns)
    for sweep in range(_SWEEPS):
        grid.sweep(backwards=sweep % 2 == 1)
    return grid.place()


def _columns(count: int, flows: Sequence[Flow]) -> list[int]:
    """Longest distance from the left. In a cycle, the first box that is left goes first."""
    targets: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for flow in flows:
        for target in flow.targets:
            targets[flow.source].append(target)
            missing[target] += 1
    columns, placed = [0] * count, [False] * count
    ready = deque(box for box in range(count) if not missing[box])
    left = iter(range(count))
    while True:
        box = ready.popleft() if ready else next((b for b in left if not placed[b]), None)
        if box is None:
            return columns
        if placed[box]:
            continue
        placed[box] = True
        for target in targets[box]:
            if not placed[target]:
                columns[target] = max(columns[target], columns[box] + 1)
                missing[target] -= 1
                if not missing[target]:
                    ready.append(target)


@dataclass(eq=False, slots=True)
class _Item:
    """A box, or the lane of a flow that passes by."""

    height: float
    before: list[_Item] = field(default_factory=list)
    after: list[_Item] = field(default_factory=list)
    position: float = 0.0
    top: float = 0.0


class _Grid:
    def __init__(
        self, heights: Sequence[float], flows: Sequence[Flow], columns: Sequence[int]
    ) -> None:
        self._columns = columns
        self._boxes = [_Item(height) for height in heights]
        self._lanes: dict[tuple[int, int], _Item] = {}
        self._grid: list[list[_Item]] = [[] for _ in range(1 + max(columns, default=-1))]
        for box, column in zip(self._boxes, columns, strict=True):
            self._grid[column].append(box)
        for number, flow in enumerate(flows):
            self._lead(number, flow)
        for items in self._grid:
            _number(items)

    def sweep(self, *, backwards: bool) -> None:
        """Order each column by the mean position of the neighbours on one side."""
        for items in reversed(self._grid) if backwards else self._grid:
            for item in items:
                neighbours = item.after if backwards else item.before
                if neighbours:
                    total = sum(neighbour.position for neighbour in neighbours)
                    item.position = total / len(neighbours)
            items.sort(key=lambda item: item.position)
            _number(items)

    def place(self) -> Layout:
        sizes = [sum(item.height + _GAP for item in items) - _GAP for items in self._grid]
        height = max(sizes, default=0.0)
        for items, size in zip(self._grid, sizes, strict=True):
            top = (height - size) / 2
            for item in items:
                item.top = top
                top += item.height + _GAP
        lanes = {key: lane.top + lane.height / 2 for key, lane in self._lanes.items()}
        return Layout(self._columns, [box.top for box in self._boxes], lanes, height)

    def _lead(self, number: int, flow: Flow) -> None:
        """Lanes for a flow through all columns between its source and its furthest target."""
        source = self._columns[flow.source]
        last = max((self._columns[target] for target in flow.targets), default=source)
        through = {source: self._boxes[flow.source]}
        for column in range(source + 1, last):
            lane = through[column] = self._lanes[number, column] = _Item(_LANE_HEIGHT)
            self._grid[column].append(lane)
            _join(through[column - 1], lane)
        for target in flow.targets:
            column = self._columns[target]
            if column > source:
                _join(through[column - 1], self._boxes[target])


def _join(before: _Item, after: _Item) -> None:
    before.after.append(after)
    after.before.append(before)


def _number(items: Sequence[_Item]) -> None:
    """Positions from 0 to 1, so that columns of different lengths compare."""
    for index, item in enumerate(items):
        item.position = (index + 0.5) / len(items)
