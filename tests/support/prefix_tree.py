"""What a workload's prompts have in common, counted request by request: Preble's Table 1."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from bros.simulator.prefix_workloads import PrefixRequest

Piece = tuple[Hashable, int]
"""What it holds, and how many tokens that are."""


class Spread(NamedTuple):
    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.fmean(values), statistics.pstdev(values))


class Table(NamedTuple):
    """A row of the table. shared, key: shares of a prompt. per_key: requests that have a key
    portion in common, of those that several have."""

    prompt: Spread
    output: Spread
    shared: Spread
    key: Spread
    per_key: Spread


def table_of(requests: Sequence[PrefixRequest]) -> Table:
    """By the names of parts; tables_agree says that tokens give the same."""
    prompts: list[list[Piece]] = [list(request.parts) for request in requests]
    return _table(prompts, [request.output_tokens for request in requests])


def table_of_tokens(prompts: Sequence[Sequence[int]], outputs: Sequence[int]) -> Table:
    """The same, token by token."""
    return _table([[(token, 1) for token in prompt] for prompt in prompts], outputs)


def _table(prompts: Sequence[Sequence[Piece]], outputs: Sequence[int]) -> Table:
    tree: dict[tuple[int, Piece], int] = {}
    asked: Counter[int] = Counter()
    paths: list[list[Piece]] = []
    for prompt in prompts:
        path: list[Piece] = []
        place = -1
        for piece in prompt:
            place = tree.setdefault((place, piece), len(tree))
            asked[place] += 1
            path.append((place, piece[1]))
        paths.append(path)
    shared, keys, per_key = [], [], Counter[Hashable]()
    for path in paths:
        nodes = _merged(path, asked)
        total = sum(tokens for _, tokens in nodes)
        shared.append(sum(tokens for node, tokens in nodes if asked[node] > 1) / total)
        node, tokens = _key(nodes)
        keys.append(tokens / total)
        per_key[node] += 1
    return Table(
        prompt=Spread.of([sum(tokens for _, tokens in path) for path in paths]),
        output=Spread.of(list(outputs)),
        shared=Spread.of(shared),
        key=Spread.of(keys),
        per_key=Spread.of([count for count in per_key.values() if count > 1]),
    )


def _merged(path: Sequence[Piece], asked: Counter[int]) -> list[tuple[int, int]]:
    """What as many requests have is one node; it is called by its end."""
    nodes: list[tuple[int, int]] = []
    for place, tokens in path:
        assert isinstance(place, int)
        if nodes and asked[nodes[-1][0]] == asked[place]:
            tokens += nodes.pop()[1]
        nodes.append((place, tokens))
    return nodes


def _key(nodes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The deepest node that is longer than all before it."""
    before, found = 0, nodes[0]
    for node in nodes:
        if node[1] > before:
            found = node
        before += node[1]
    return found
