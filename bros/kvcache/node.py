"""A full block of the prefix cache; the tree that these form is in prefix_cache.py."""

from __future__ import annotations

from dataclasses import dataclass, field

from bros.kvcache.stacks import Side


@dataclass(slots=True, eq=False)
class Node:
    """A full block. depth: blocks before it. holders: numbers of the requests that have it.

    origin: id of the request that computed it first. shared: the block belongs to the cache and
    not to its only holder. real_time: a real-time request has used it. priority: the lowest is
    evicted first. turn: of its valid entry in the heap of evictable nodes, -1 if it has none;
    entries are not removed while somebody has it.
    """

    key: bytes
    parent: Node | None
    block: int
    side: Side
    depth: int
    real_time: bool
    origin: str
    shared: bool = False
    alive: bool = True
    children: int = 0
    hits: int = 0
    priority: float = 0.0
    turn: int = -1
    holders: set[int] = field(default_factory=set)
