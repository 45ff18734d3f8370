"""Boxes of a picture: to the right of what they need, none over another."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bros.semantic.layout import Flow, arrange


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[float], list[Flow]]:
    """Any graph, with cycles and flows to nobody."""
    count = draw(st.integers(1, 12))
    heights = draw(st.lists(st.floats(10, 200), min_size=count, max_size=count))
    boxes = st.integers(0, count - 1)
    flows = st.builds(Flow, boxes, st.lists(boxes, max_size=4, unique=True))
    return heights, draw(st.lists(flows, max_size=20))


@st.composite
def acyclic(draw: st.DrawFn) -> tuple[list[float], list[Flow]]:
    """Numbered so that what comes first needs nothing that comes later, then mixed."""
    heights, flows = draw(graphs())
    order = draw(st.permutations(range(len(heights))))
    return heights, [
        Flow(order[flow.source], [order[t] for t in flow.targets if t > flow.source])
        for flow in flows
    ]


def longest_paths(count: int, flows: list[Flow]) -> list[int]:
    columns = [0] * count
    for _ in range(count):
        for flow in flows:
            for target in flow.targets:
                columns[target] = max(columns[target], columns[flow.source] + 1)
    return columns


@given(acyclic())
def test_columns_are_longest_paths(graph: tuple[list[float], list[Flow]]) -> None:
    heights, flows = graph
    assert list(arrange(heights, flows).columns) == longest_paths(len(heights), flows)


@given(graphs())
def test_nothing_overlaps(graph: tuple[list[float], list[Flow]]) -> None:
    heights, flows = graph
    layout = arrange(heights, flows)
    for column in range(layout.num_columns):
        spans = [
            (top, top + height)
            for top, height, at in zip(layout.tops, heights, layout.columns, strict=True)
            if at == column
        ]
        spans += [(y, y) for (_, at), y in layout.lanes.items() if at == column]
        assert spans
        assert all(-1e-6 <= top and end <= layout.height + 1e-6 for top, end in spans)
        for (_, end), (top, _) in itertools.pairwise(sorted(spans)):
            assert end < top


@given(graphs())
def test_flows_have_a_lane_in_every_column_they_pass(
    graph: tuple[list[float], list[Flow]],
) -> None:
    heights, flows = graph
    layout = arrange(heights, flows)
    expected = set()
    for number, flow in enumerate(flows):
        start = layout.columns[flow.source]
        last = max((layout.columns[target] for target in flow.targets), default=start)
        expected |= {(number, column) for column in range(start + 1, last)}
    assert layout.lanes.keys() == expected


def test_lines_do_not_cross_without_need() -> None:
    """Three boxes to three others the other way round: the second column is turned over."""
    layout = arrange([50.0] * 6, [Flow(0, [5]), Flow(1, [4]), Flow(2, [3])])
    tops = layout.tops
    assert [tops[5], tops[4], tops[3]] == sorted([tops[3], tops[4], tops[5]])


def test_nothing_takes_no_room() -> None:
    layout = arrange([], [])
    assert (layout.num_columns, layout.height) == (0, 0.0)
