"""The global prefix forest: recent prompts, and which replica has cached which part (Preble 3.2).

    root -- [ system prompt, 480 tokens ] -- [ question A, 32 ]       requests {0: 2, 1: 1}
                cached {0: 480, 1: 480}   \\- [ question B, 48 ]       cached {1: 16}

Nodes hold whole blocks, because replicas share nothing smaller. A node is split where a prompt
diverges from it, so all tokens of a node belong to the same requests. The forest removes a node
once no replica has it cached and no request of the window and no open request has it. Each
EngineRequest.kv_salt has its own root, and public tokens have one. Where tokens of a tenant follow
public ones, and where private ones begin, a new node starts.
"""

from __future__ import annotations

import struct
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bros.core.request import EngineRequest

_TOKEN_BYTES = 4
"""Size of a token id."""

_PUBLIC = "public"
"""Root of public tokens; no kv_salt is like this."""

_OWN, _PRIVATE = b"\0own:", b"\0private:"
"""Prefixes of the key of a child that only requests with the same kv_salt, or private salt, share.
"""

_MAX_SKIPPED = 64
"""Most nodes in use that one eviction skips."""

Pieces = Sequence[tuple[bytes, bytes]]
"""(key prefix of the first node, tokens): what all requests with the root share, then what only
those with the same kv_salt or private salt share."""


class PrefixNode:
    """A run of whole blocks: tokens [start, end) of the prompts that have it.

    cached: replica -> how many of its first tokens are cached there, at least one.
    requests: replica -> requests of the window that went there.
    num_requests: requests of the window.
    active: open requests that have it.
    homes: replicas that it was assigned to; None: all that have it cached.
    load: replica -> seconds of work of the window's requests that have it as their key.
    alive: it is in the forest.
    """

    __slots__ = (
        "active", "alive", "cached", "children", "end", "homes", "key", "load",
        "num_requests", "parent", "requests", "start", "tokens",
    )  # fmt: skip

    def __init__(self, key: bytes, tokens: bytes, parent: PrefixNode | None, start: int) -> None:
        self.key = key
        self.tokens = tokens
        self.parent = parent
        self.start = start
        self.end = start + len(tokens) // _TOKEN_BYTES
        self.children: dict[bytes, PrefixNode] = {}
        self.cached: dict[int, int] = {}
        self.requests: dict[int, int] = {}
        self.num_requests = 0
        self.active = 0
        self.homes: tuple[int, ...] | None = None
        self.load: dict[int, float] = {}
        self.alive = True

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def unused(self) -> bool:
        """Whether the forest can remove it."""
        return not (self.children or self.cached or self.num_requests or self.active)

    def __repr__(self) -> str:
        return f"<Node {self.start}:{self.end} cached {self.cached} requests {self.requests}>"


@dataclass(slots=True)
class Path:
    """The longest prefix of a prompt that is in the forest.

    nodes: its nodes from the root on, without the root; the prompt may diverge within the last one.
    end: length of the prefix in tokens.
    piece, offset: where the prefix ends: index of the piece, and bytes into it.
    """

    nodes: list[PrefixNode]
    end: int = 0
    piece: int = 0
    offset: int = 0


class ReplicaCache:
    """What one replica has cached.

    nodes: least recently used first, and children before parents -> what `digests` was when the
        router last learnt that the node is cached.
    digests: the number of digests of the replica that have begun to be applied.
    """

    __slots__ = ("digests", "nodes", "num_tokens")

    def __init__(self) -> None:
        self.nodes: OrderedDict[PrefixNode, int] = OrderedDict()
        self.num_tokens = 0
        self.digests = 0


class Forest:
    """The nodes, and the caches of all replicas.

    block_size: in tokens.
    max_tokens: tokens of all nodes together; `shrink` removes the least recently requested nodes
        beyond it, unless they are in use.
    """

    def __init__(self, block_size: int, max_tokens: int) -> None:
        self._size = block_size
        self._block = block_size * _TOKEN_BYTES
        self.max_tokens = max_tokens
        self._roots: dict[str, PrefixNode] = {}
        self._by_age: OrderedDict[PrefixNode, str] = OrderedDict()  # with the salt
        self.num_tokens = 0
        self.caches: dict[int, ReplicaCache] = {}

    @property
    def num_nodes(self) -> int:
        return len(self._by_age)

    def __iter__(self) -> Iterator[PrefixNode]:
        """All nodes, least recently requested first."""
        return iter(self._by_age)

    def pieces(
        self, request: EngineRequest, output_ids: Sequence[int] = (), start: int = 0
    ) -> Pieces:
        """Whole blocks of prompt and output from token `start` on, without the last token: its KV
        is not reusable, as it has to be computed to sample from, or was just sampled. A
        prefill-only request samples nothing, so its last token counts."""
        data = _to_bytes(request.prompt_token_ids[start:] if start else request.prompt_token_ids)
        data += _to_bytes(output_ids)
        whole = (len(data) // _TOKEN_BYTES - (not request.prefill_only)) // self._size * self._block
        pieces, begin, salt = [], 0, b""
        for block, next_salt in self._borders(request):
            if block * self._size < start:
                continue
            end = min(block * self._block - start * _TOKEN_BYTES, whole)
            pieces.append((salt, data[begin:end]))
            begin, salt = end, next_salt
        return (*pieces, (salt, data[begin:whole]))

    def _borders(self, request: EngineRequest) -> Iterator[tuple[int, bytes]]:
        """(block, key prefix of the node there) where others share less than before it."""
        private_from, own = request.hints.private_from, self._first_own(request)
        salt = request.kv_salt.encode()
        own_salt = _OWN + len(salt).to_bytes(4, "big") + salt if own else b""
        private = None if private_from is None else private_from // self._size
        if own and own != private:
            yield own, own_salt
        if private is not None:
            private_salt = _PRIVATE + request.hints.private_salt.encode()
            yield private, (own_salt if own == private else b"") + private_salt

    def _first_own(self, request: EngineRequest) -> int:
        """The first block that not all tenants share."""
        own, private_from = request.public_tokens, request.hints.private_from
        return (own if private_from is None else min(own, private_from)) // self._size

    def root(self, request: EngineRequest) -> str:
        """The root of a request's tokens, for `walk` and `insert`."""
        return _PUBLIC if self._first_own(request) else request.kv_salt

    def walk(self, salt: str, pieces: Pieces, after: PrefixNode | None = None) -> Path:
        """Find the longest known prefix of a prompt, or of the tokens that follow a node."""
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
                    path.offset, path.end = offset + common, node.start + common // _TOKEN_BYTES
                    return path
                offset += len(node.tokens)
                path.offset, path.end, prefix = offset, node.end, b""
        return path

    def common(self, prompts: Sequence[Pieces]) -> int:
        """Length of the common prefix of prompts of one tenant in tokens, without their private
        parts."""
        shared = [
            b"".join(data for salt, data in prompt if _PRIVATE not in salt) for prompt in prompts
        ]
        first, last = min(shared), max(shared)
        return self._common(first, last, 0) // _TOKEN_BYTES

    def insert(
        self, salt: str, pieces: Pieces, path: Path, after: PrefixNode | None = None
    ) -> PrefixNode:
        """Add the prompt that `walk` has just looked up, and return its last node. For a prompt
        without a whole block that is a root, or `after`. Completes `path`."""
        if path.nodes and path.end < path.nodes[-1].end:
            rest = path.nodes[-1]
            path.nodes[-1] = self._split(rest, path.end)
            if rest.unused:  # all that was cached of the node is in its upper part
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

    def set_cached(self, node: PrefixNode, replica: int, tokens: int) -> None:
        """Set how many of a node's first tokens a replica has cached; 0 for none."""
        cache = self.caches[replica]
        before = node.cached.get(replica, 0)
        cache.num_tokens += tokens - before
        if tokens:
            node.cached[replica] = tokens
            cache.nodes[node] = cache.digests
            if not before:
                self._touch_cached(node, replica)
        elif before:
            del node.cached[replica]
            del cache.nodes[node]
            self.prune(node)

    def mark_used(self, leaf: PrefixNode, replica: int) -> None:
        """A replica has the whole path up to a node cached, and uses it now."""
        cache, node = self.caches[replica], leaf
        while node.parent is not None:
            size = node.end - node.start
            if node.cached.get(replica) != size:
                self.set_cached(node, replica, size)
            cache.nodes[node] = cache.digests
            cache.nodes.move_to_end(node)
            node = node.parent

    def confirm_cached(self, leaf: PrefixNode, replica: int, tokens: int) -> None:
        """A digest says that a replica has the first tokens of the path to a node cached. It may
        have more of it by what has come since the digest began."""
        cache, node = self.caches[replica], leaf
        while node.parent is not None:
            here = min(tokens, node.end) - node.start
            if here > 0:
                before = node.cached.get(replica, 0)
                if cache.nodes.get(node) == cache.digests:
                    if before == node.num_tokens:
                        return  # then so are its ancestors
                    here = max(here, before)
                self.set_cached(node, replica, here)
            node = node.parent

    def evict_unconfirmed(self, node: PrefixNode, replica: int) -> None:
        """Unless something has said since the digest began that a node is cached, it is not."""
        cache = self.caches[replica]
        if cache.nodes.get(node, cache.digests) != cache.digests:
            self.set_cached(node, replica, 0)

    def prune(self, node: PrefixNode) -> None:
        """Remove a node if it is unused, and then its unused ancestors. `shrink` may have removed
        the node itself already."""
        while not node.alive and node.parent is not None:
            node = node.parent
        while node.parent is not None and node.alive and node.unused:
            parent = self._remove(node)
            if parent is None:
                return
            node = parent

    def shrink(self) -> None:
        """Remove the least recently requested nodes until max_tokens are left.

        Nodes of open requests stay, and so do their ancestors.
        """
        skipped = 0
        while self.num_tokens > self.max_tokens and skipped < _MAX_SKIPPED:
            node = next(iter(self._by_age))
            if node.children or node.active:
                self._touch(node)
                skipped += 1
                continue
            for replica in list(node.cached):
                self.caches[replica].num_tokens -= node.cached[replica]
                del self.caches[replica].nodes[node]
            node.cached.clear()
            self._remove(node)

    def evict(self, replica: int, capacity_tokens: int) -> None:
        """Evict the least recently used nodes of a cache down to its capacity, as the replica's
        own cache will."""
        cache, skipped = self.caches[replica], 0
        while cache.num_tokens > capacity_tokens and skipped < _MAX_SKIPPED:
            node = next(iter(cache.nodes))
            if node.active:
                self._touch_cached(node, replica)
                skipped += 1
            else:
                self.set_cached(node, replica, 0)

    def revive(self, leaf: PrefixNode) -> PrefixNode:
        """The same node, or a new one with the same path if it has been removed meanwhile."""
        removed, node = [], leaf
        while not node.alive:
            removed.append(node)
            assert node.parent is not None, "roots are always alive"
            node = node.parent
        if not removed:
            return leaf
        pieces: list[tuple[bytes, bytes]] = []
        for lost in reversed(removed):
            prefix = lost.key[: -self._block]
            if prefix or not pieces:
                pieces.append((prefix, b""))
            pieces[-1] = (pieces[-1][0], pieces[-1][1] + lost.tokens)
        after = node if node.parent is not None else None
        salt = _root_of(node).key.decode()
        return self.insert(salt, pieces, self.walk(salt, pieces, after), after)

    def drop_cache(self, replica: int) -> None:
        """Remove a replica and all that it has cached."""
        cache = self.caches[replica]
        for node in list(cache.nodes):
            self.set_cached(node, replica, 0)
        for node in self._by_age:
            node.load.pop(replica, None)
            if node.homes is not None and replica in node.homes:
                node.homes = tuple(home for home in node.homes if home != replica) or None
        del self.caches[replica]

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts agree with the nodes, and the nodes form a forest."""
        assert self.num_tokens == sum(node.num_tokens for node in self._by_age)
        for node in self._by_age:
            assert node.alive and node.num_tokens > 0 and node.parent is not None
            assert node.parent.children[node.key] is node and node.start == node.parent.end
            assert len(node.tokens) == node.num_tokens * _TOKEN_BYTES and not node.unused
            assert node.num_requests == sum(node.requests.values()) >= 0
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
        """Move a node and its ancestors to the recent end, children before parents."""
        while node.parent is not None:
            self._by_age.move_to_end(node)
            node = node.parent

    def _touch_cached(self, node: PrefixNode, replica: int) -> None:
        """Move a node and its ancestors to the recent end of a replica's cache, children first."""
        nodes = self.caches[replica].nodes
        while node.parent is not None:
            if replica in node.cached:
                nodes.move_to_end(node)
            node = node.parent

    def _remove(self, node: PrefixNode) -> PrefixNode | None:
        """Remove a leaf; return its parent, None if that is a root."""
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
        """Split off the part before a position as a new parent, and return that. The node itself
        keeps its end, which is what the holders of a leaf rely on.

            [ start ........ end )   ->   [ start .. at ) - [ at .. end )
                    node                       new             node
        """
        parent, size = node.parent, at - node.start
        assert parent is not None
        cut = size * _TOKEN_BYTES
        upper = PrefixNode(node.key, node.tokens[:cut], parent, node.start)
        upper.requests, upper.num_requests = dict(node.requests), node.num_requests
        upper.active, upper.homes = node.active, node.homes
        parent.children[node.key] = upper
        node.key = node.tokens[cut : cut + self._block]
        node.tokens, node.start, node.parent = node.tokens[cut:], at, upper
        upper.children[node.key] = node
        self._by_age[upper] = self._by_age[node]
        for replica, kept in list(node.cached.items()):
            cache = self.caches[replica]
            upper.cached[replica] = min(kept, size)
            cache.nodes[upper] = cache.nodes[node]
            self._touch_cached(upper, replica)
            if kept > size:
                node.cached[replica] = kept - size
            else:
                del node.cached[replica]
                del cache.nodes[node]
        return upper

    def _common(self, tokens: bytes, data: bytes, offset: int) -> int:
        """Length in bytes of the common prefix of `tokens` and data[offset:], in whole blocks."""
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
    if isinstance(token_ids, array) and token_ids.itemsize == _TOKEN_BYTES:
        return token_ids.tobytes()
    return struct.pack(f"{len(token_ids)}i", *token_ids)
