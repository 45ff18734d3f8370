"""How nodes are divided among replicas."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import EngineConfig
from bros.core.errors import ConfigError
from bros.transport.node_allocation import NodeAllocation, allocation_of, check_room


@pytest.mark.parametrize(
    ("options", "replicas", "nodes", "share"),
    [
        ({}, 2, [(16, 0)], NodeAllocation(8, 0)),
        ({}, 3, [(16, 0)], NodeAllocation(5, 0)),
        ({}, 2, [(16, 0), (16, 0)], NodeAllocation(16, 0)),
        ({}, 1, [(16, 0), (16, 0)], NodeAllocation(16, 0)),  # never more than a node has
        ({}, 4, [(2, 0)], NodeAllocation(1, 0)),  # the fourth has to wait for another node
        ({}, 1, [], NodeAllocation(1, 0)),
        ({"tp": 2}, 4, [(4, 0)], NodeAllocation(2, 0)),
        ({}, 3, [(3, 0), (3, 0)], NodeAllocation(1, 0)),  # with two cores each, one would be left
        ({}, 3, [(4, 0), (3, 0)], NodeAllocation(2, 0)),
        ({"threads": 3}, 2, [(16, 0)], NodeAllocation(3, 0)),
        ({"threads": 3, "tp": 2}, 2, [(16, 0)], NodeAllocation(6, 0)),
        ({}, 2, [(16, 4)], NodeAllocation(1, 1)),
        ({"tp": 2}, 2, [(16, 0), (16, 4)], NodeAllocation(2, 2)),
        ({"device": "cuda", "tp": 4, "threads": 2}, 2, [(16, 4)], NodeAllocation(8, 4)),
        ({"device": "cuda"}, 2, [(16, 0)], NodeAllocation(1, 1)),
        ({"device": "cpu"}, 2, [(16, 4)], NodeAllocation(8, 0)),
    ],
)
def test_share(
    options: dict[str, object], replicas: int, nodes: list[tuple[int, int]], share: NodeAllocation
) -> None:
    assert allocation_of(EngineConfig(**options), replicas, nodes) == share


@pytest.mark.parametrize(
    ("share", "replicas", "nodes", "words"),
    [
        (NodeAllocation(1, 1), 1, [(16, 0)], "no node of the cluster has a GPU"),
        (NodeAllocation(1, 2), 3, [(16, 4), (16, 1)], "room for 2 replicas"),
        (NodeAllocation(2, 0), 3, [(3, 0), (3, 8)], "room for 2 replicas"),
        (NodeAllocation(1, 0), 1, [], "room for 0 replicas"),
    ],
)
def test_what_never_fits_is_refused(
    share: NodeAllocation, replicas: int, nodes: list[tuple[int, int]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_room(share, replicas, nodes)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.just(0)), min_size=1, max_size=4), st.integers(1, 9)
)
def test_the_share_is_the_largest_that_fits(nodes: list[tuple[int, int]], replicas: int) -> None:
    share = allocation_of(EngineConfig(), replicas, nodes)
    fitting = [
        cores for cores in range(1, 10) if sum(cpus // cores for cpus, _ in nodes) >= replicas
    ]
    assert share == NodeAllocation(max(fitting, default=1), 0)
    if fitting:
        check_room(share, replicas, nodes)
