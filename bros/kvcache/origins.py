"""How much of each request's tokens is in the prefix cache, for whoever watches from afar.

    request a    [ 0 ][ 1 ][ 2 ]            a was the first with 0 to 2: 3 blocks
    request b    [ 0 ][ 1 ][ 2'][ 3'] ...   b found 0 and 1: 4 blocks, two of which are its own

Who knows the tokens of the requests can say from this what is cached: of every block that is
there, the request that computed it first says so, and all before it are there.

An event says how far the tokens of one request are there now: to the end of a block that it has
computed, or up to one that is gone. Blocks go from the leaves, so that is exact when it happens,
and told in the order of the last event of each request it is exact for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from bros.kvcache.node import Node


class Origins:
    """Of each request the last block, and how many there are. Ids are those of one prompt each; of
    an id that comes back with another one, what is left of the first is not told any more.

    nodes: those that are there, each after its parent.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._last: dict[str, tuple[Node, int]] = {}
        self._changed: dict[str, int] = {}
        for node in nodes:
            self.added(node)
        self._changed.clear()

    def added(self, node: Node) -> None:
        """A request has computed a block that nobody had."""
        origin = node.origin
        known = self._last.get(origin)
        self._last[origin] = (node, known[1] + 1 if known else 1)
        self._change(origin, node.depth + 1)

    def lost(self, node: Node) -> None:
        """A block is gone; its parent is still there."""
        origin = node.origin
        known = self._last.get(origin)
        if known is None:
            return
        last, count = known[0], known[1] - 1
        if last is node:
            self._change(origin, node.depth)
            before = node.parent if count else None
            while before is not None and before.origin != origin:
                before = before.parent
            if before is None:
                del self._last[origin]
                return
            last = before
        self._last[origin] = (last, count)

    def take_changes(self) -> dict[str, int]:
        """Request -> how many of its first blocks are there, where that has changed since the last
        call; in the order of the last change."""
        changed, self._changed = self._changed, {}
        return changed

    def everything(self) -> dict[str, int]:
        """Request -> how many blocks there are to the end of the last one that it computed first.
        Changes so far are part of it."""
        self._changed.clear()
        return {origin: node.depth + 1 for origin, (node, _) in self._last.items()}

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError unless these nodes are what is counted; for ids of one prompt."""
        counts: dict[str, int] = {}
        depths: dict[str, int] = {}
        for node in nodes:
            counts[node.origin] = counts.get(node.origin, 0) + 1
            depths[node.origin] = max(depths.get(node.origin, 0), node.depth)
        assert counts == {origin: count for origin, (_, count) in self._last.items()}
        assert depths == {origin: node.depth for origin, (node, _) in self._last.items()}
        assert all(node.alive for node, _ in self._last.values())

    def _change(self, origin: str, blocks: int) -> None:
        self._changed.pop(origin, None)
        self._changed[origin] = blocks
