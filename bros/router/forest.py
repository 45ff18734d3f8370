"""Recent prompts as a forest of token sequences, and which replica has what cached (Preble 3.2).

    root -- [ system prompt, 480 tokens ] -- [ question A, 32 ]       asked {0: 2, 1: 1}
                cached {0: 480, 1: 480}   \\- [ question B, 48 ]       cached {1: 16}

Whole blocks only: replicas share nothing smaller. A node is split where a prompt leaves it, so the
same requests asked for all of a node. It is removed once no replica has it cached, no request asked
for it within the window, and no running request has it. There is a root for each salt, and what is
private from some position on begins a node of its own there.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bros.core.request import EngineRequest

_BYTES = 4
"""Of a token."""

_PRIVATE = b"\0private:"
"""Begins the key of a child that only requests with the same private salt have."""

_MOST_PASSED = 64
"""Nodes in use that are looked at in search of one that is not."""

Pieces = Sequence[tuple[bytes, bytes]]
"""(what the key of its first child begins with, tokens): what is for all, and what is not."""


class PrefixNode:
    """A run of whole blocks.

    start: tokens before it.
    end: tokens up to its end.
    cached: replica -> how many of its tokens are cached there, at least one.
    asked: replica -> requests of the window that went there.
    num_asked: requests of the window.
    active: running requests that have it.
    homes: the replicas that it was assigned to; None: all that have it cached.
    load: replica -> seconds of the window's requests that have it as their key.
    """

    __slots__ = (
        "active", "alive", "asked", "cached", "children", "end", "homes", "key", "load",
        "num_asked", "parent", "start", "tokens",
    )  # fmt: skip

    def __init__(self, key: bytes, tokens: bytes, parent: PrefixNode | None, start: int) -> None:
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.start = start
        self.end = start + len(tokens) // _BYTES
        self.children: dict[bytes, PrefixNode] = {}
        self.cached: dict[int, int] = {}
        self.asked: dict[int, int] = {}
        self.num_asked = 0
        self.active = 0
        self.homes: tuple[int, ...] | None = None
        self.load: dict[int, float] = {}
        self.alive = True

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def unwanted(self) -> bool:
        """Nobody would miss it."""
        return not (self.children or self.cached or self.num_asked or self.active)

    def __repr__(self) -> str:
        return f"<Node {self.start}:{self.end} cached {self.cached} asked {self.asked}>"


@dataclass(slots=True)
class Path:
    """How far a prompt is known.

    nodes: from the first one on, of which the last one may go on otherwise.
    end: tokens that are known.
    piece, offset: where that is in the pieces, in bytes.
    """

    nodes: list[PrefixNode]
    end: int = 0
    piece: int = 0
    offset: int = 0


class ReplicaCache:
    """What one replica has. nodes: least recently used first, and each after those below it."""

    __slots__ = ("nodes", "num_tokens")

    def __init__(self) -> None:
        self.nodes: OrderedDict[PrefixNode, None] = OrderedDict()
        self.num_tokens = 0


class Forest:
    """The nodes, and the caches of all replicas.

    block_size: tokens of a block. max_tokens: most that all nodes should have together; beyond it
    goes what was asked for longest ago, unless it is in use.
    """

    def __init__(self, block_size: int, max_tokens: int) -> None:
        self._size = block_size
        self._block = block_size * _BYTES
        self.max_tokens = max_tokens
        self._roots: dict[str, PrefixNode] = {}
        self._by_age: OrderedDict[PrefixNode, str] = OrderedDict()  # with the salt
        self.num_tokens = 0
        self.caches: dict[int, ReplicaCache] = {}

    @property
    def num_nodes(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes: what was asked for longest ago first."""
        return iter(self._by_age)

    def pieces(
        self, request: EngineRequest, output_ids: Sequence[int] = (), start: int = 0
    ) -> Pieces:
        """Whole blocks of prompt and answer from a node's end on, but for the last token: that has
        to be computed to choose the next one, or is the last one that was chosen. Of a fill
        nothing is chosen."""
        data = _to_bytes(request.prompt_token_ids[start:] if start else request.prompt_token_ids)
        data += _to_bytes(output_ids)
        whole = (len(data) // _BYTES - (not request.prefill_only)) // self._size * self._block
        private_from = request.hints.private_from
        if private_from is None or private_from // self._size * self._size < start:
            return ((b"", data[:whole]),)
        border = min((private_from // self._size * self._size - start) * _BYTES, whole)
        salt = _PRIVATE + request.hints.private_salt.encode()
        return ((b"", data[:border]), (salt, data[border:whole]))

    def walk(self, salt: str, pieces: Pieces, after: PrefixNode | None = None) -> Path:
        """As far as the forest knows a prompt, or what comes after a node."""
        node = after or self._roots.get(salt)
        path = Path([], 0 if node is None else node.end)
        for number, (prefix, data) in enumerate(pieces):
            path.piece, path.offset, offset = number, 0, 0
            while offset < len(data):
                key = data[offset : offset + self._block]
                node = node and node.children.get(prefix + key)
                if node is None:
                    return path
                path.nodes.append(node)
                if not data.startswith(node.tokens, offset):
                    common = self._common(node.tokens, data, offset)
                    path.offset, path.end = offset + common, node.start + common // _BYTES
                    return path
                offset += len(node.tokens)
                path.offset, path.end, prefix = offset, node.end, b""
        return path

    def common(self, prompts: Sequence[Pieces]) -> int:
        """Tokens that all of these begin with; private ones do not count."""
        first, last = min(p[0][1] for p in prompts), max(p[0][1] for p in prompts)
        return self._common(first, last, 0) // _BYTES

    def insert(
        self, salt: str, pieces: Pieces, path: Path, after: PrefixNode | None = None
    ) -> PrefixNode:
        """The last node of what `walk` has just looked for, which is known from now on. Of a prompt
        without a block that is a root, or `after`."""
        if path.nodes and path.end < path.nodes[-1].end:
            rest = path.nodes[-1]
            path.nodes[-1] = self._split(rest, path.end)
            if rest.unwanted:  # of what was cached nothing was in there
                self._remove(rest)
        node = path.nodes[-1] if path.nodes else after or self._roots.get(salt)
        if node is None:
            node = PrefixNode(salt.encode(), b"", None, 0)
            if any(data for _, data in pieces):
                self._roots[salt] = node
        offset = path.offset
        for prefix, data in pieces[path.piece :]:
            if offset < len(data):
                key = (b"" if offset else prefix) + data[offset : offset + self._block]
                child = PrefixNode(key, data[offset:] if offset else data, node, node.end)
                node.children[key] = child
                path.nodes.append(child)
                path.end = child.end
                self._by_age[child] = salt
                self.num_tokens += child.num_tokens
                node = child
            offset = 0
        self._touch(node)
        return node

    def mark(self, node: PrefixNode, replica: int, tokens: int) -> None:
        """A replica has the first so many tokens of a node, or none of it."""
        cache = self.caches[replica]
        before = node.cached.get(replica, 0)
        cache.num_tokens += tokens - before
        if tokens:
            node.cached[replica] = tokens
            if not before:
                cache.nodes[node] = None
                self._move_up(node, replica)
        elif before:
            del node.cached[replica]
            del cache.nodes[node]
            self.prune(node)

    def use(self, leaf: PrefixNode, replica: int) -> None:
        """A replica has all up to a node, and uses it now."""
        cache, node = self.caches[replica], leaf
        while node.parent is not None:
            size = node.end - node.start
            if node.cached.get(replica) != size:
                self.mark(node, replica, size)
            cache.nodes.move_to_end(node)
            node = node.parent

    def prune(self, node: PrefixNode) -> None:
        """Remove a node, and those before it that are not used any more."""
        while node.parent is not None and node.alive and node.unwanted:
            parent = self._remove(node)
            if parent is None:
                return
            node = parent

    def shrink(self) -> None:
        """Forget what was asked for longest ago, until no more than max_tokens are left.

        Not what requests that run have, nor what is before it.
        """
        passed = 0
        while self.num_tokens > self.max_tokens and passed < _MOST_PASSED:
            node = next(iter(self._by_age))
            if node.children or node.active:
                self._touch(node)
                passed += 1
                continue
            for replica in list(node.cached):
                self.caches[replica].num_tokens -= node.cached[replica]
                del self.caches[replica].nodes[node]
            node.cached.clear()
            self._remove(node)

    def make_room(self, replica: int, capacity_tokens: int) -> None:
        """No cache has more than its size: what was used longest ago goes, as it will there."""
        cache, passed = self.caches[replica], 0
        while cache.num_tokens > capacity_tokens and passed < _MOST_PASSED:
            node = next(iter(cache.nodes))
            if node.active:
                self._move_up(node, replica)
                passed += 1
            else:
                self.mark(node, replica, 0)

    def revive(self, leaf: PrefixNode) -> PrefixNode:
        """The same node, or one that holds the same, if it was forgotten meanwhile."""
        gone, node = [], leaf
        while not node.alive:
            gone.append(node)
            assert node.parent is not None, "roots are never forgotten by those who know them"
            node = node.parent
        if not gone:
            return leaf
        pieces: list[tuple[bytes, bytes]] = []
        for lost in reversed(gone):
            prefix = lost.key[: -self._block]
            if prefix or not pieces:
                pieces.append((prefix, b""))
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + lost.tokens)
        after = node if node.parent is not None else None
        salt = _root_of(node).key.decode()
        return self.insert(salt, pieces, self.walk(salt, pieces, after), after)

    def drop_cache(self, replica: int) -> None:
        """A replica has nothing any more, and is gone."""
        cache = self.caches[replica]
        for node in list(cache.nodes):
            self.mark(node, replica, 0)
        for node in self._by_age:
            node.load.pop(replica, None)
            if node.homes is not None and replica in node.homes:
                node.homes = tuple(home for home in node.homes if home != replica) or None
        del self.caches[replica]

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts agree with nodes, and these form a forest."""
        assert self.num_tokens == sum(node.num_tokens for node in self._by_age)
        for node in self._by_age:
            assert node.alive and node.num_tokens > 0 and node.parent is not None
            assert node.parent.children[node.key] is node and node.start == node.parent.end
            assert len(node.tokens) == node.num_tokens * _BYTES and not node.unwanted
            assert node.num_asked == sum(node.asked.values()) >= 0
            assert all(0 < kept <= node.num_tokens for kept in node.cached.values())
            for replica in node.cached:
                assert node in self.caches[replica].nodes
            for replica in node.cached:
                if node.parent.parent is not None:
                    order = list(self.caches[replica].nodes)
                    whole = node.parent.cached.get(replica) == node.parent.num_tokens
                    assert not whole or order.index(node.parent) > order.index(node)
        for replica, cache in self.caches.items():
            assert cache.num_tokens == sum(node.cached[replica] for node in cache.nodes)

    def _touch(self, node: PrefixNode) -> None:
        """It was asked for now: each node after those below it."""
        while node.parent is not None:
            self._by_age.move_to_end(node)
            node = node.parent

    def _move_up(self, node: PrefixNode, replica: int) -> None:
        """In a cache, each after those below it."""
        nodes = self.caches[replica].nodes
        while node.parent is not None:
            if replica in node.cached:
                nodes.move_to_end(node)
            node = node.parent

    def _remove(self, node: PrefixNode) -> PrefixNode | None:
        """Take a leaf out; the node before it, None if that is a root."""
        parent = node.parent
        assert parent is not None
        node.alive = False
        salt = self._by_age.pop(node)
        self.num_tokens -= node.num_tokens
        del parent.children[node.key]
        if parent.parent is not None:
            return parent
        if not parent.children:
            del self._roots[salt]
        return None

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Its part before a position, as a new node. Whoever knows the node knows its end, which
        stays the same."""
        parent, size = node.parent, at - node.start
        assert parent is not None
        cut = size * _BYTES
        upper = PrefixNode(node.key, node.tokens[:cut], parent, node.start)
        upper.asked, upper.num_asked = dict(node.asked), node.num_asked
        upper.active, upper.homes = node.active, node.homes
        parent.children[node.key] = upper
        node.key = node.tokens[cut : cut + self._block]
        node.tokens, node.start, node.parent = node.tokens[cut:], at, upper
        upper.children[node.key] = node
        self._by_age[upper] = self._by_age[node]
        for replica, kept in list(node.cached.items()):
            cache = self.caches[replica]
            upper.cached[replica] = min(kept, size)
            cache.nodes[upper] = None
            self._move_up(upper, replica)
            if kept > size:
                node.cached[replica] = kept - size
            else:
                del node.cached[replica]
                del cache.nodes[node]
        return upper

    def _common(self, tokens: bytes, data: bytes, offset: int) -> int:
        """Bytes of the whole blocks with which both begin."""
        low, high = 0, min(len(tokens), len(data) - offset) // self._block
        while low < high:
            middle = (low + high + 1) // 2
            at, to = low * self._block, middle * self._block
            if tokens[at:to] == data[offset + at : offset + to]:
                low = middle
            else:
                high = middle - 1
        return low * self._block


def _root_of(node: PrefixNode) -> PrefixNode:
    while node.parent is not None:
        node = node.parent
    return node


def _to_bytes(token_ids: Sequence[int]) -> bytes:
    if isinstance(token_ids, array) and token_ids.itemsize == _BYTES:
        return token_ids.tobytes()
    return struct.pack(f"{len(token_ids)}i", *token_ids)
