"""How nodes are divided among replicas."""

from __future__ import annotations

import pytest

from bros.core.config import EngineConfig
from bros.engine.share import Share, share_of


@pytest.mark.parametrize(
    ("options", "replicas", "nodes", "share"),
    [
        ({}, 2, [(16, 0)], Share(8, 0)),
        ({}, 3, [(16, 0)], Share(5, 0)),
        ({}, 2, [(16, 0), (16, 0)], Share(16, 0)),
        ({}, 1, [(16, 0), (16, 0)], Share(16, 0)),  # never more than a node has
        ({}, 4, [(2, 0)], Share(1, 0)),  # the fourth has to wait for another node
        ({}, 1, [], Share(1, 0)),
        ({"tp": 2}, 4, [(4, 0)], Share(2, 0)),
        ({"threads": 3}, 2, [(16, 0)], Share(3, 0)),
        ({"threads": 3, "tp": 2}, 2, [(16, 0)], Share(6, 0)),
        ({}, 2, [(16, 4)], Share(1, 1)),
        ({"tp": 2}, 2, [(16, 0), (16, 4)], Share(2, 2)),
        ({"device": "cuda", "tp": 4, "threads": 2}, 2, [(16, 4)], Share(8, 4)),
        ({"device": "cuda"}, 2, [(16, 0)], Share(1, 1)),  # a node with one may yet come
        ({"device": "cpu"}, 2, [(16, 4)], Share(8, 0)),
    ],
)
def test_share(
    options: dict[str, object], replicas: int, nodes: list[tuple[int, int]], share: Share
) -> None:
    assert share_of(EngineConfig(**options), replicas, nodes) == share
