"""Full blocks found by the hash of their tokens, so that a prefix is computed and stored once.

    prompt    [ 16 tokens ][ 16 tokens ][ 16 tokens ][ 5 ]
    keys        k0           k1 = H(k0, tokens)  k2         (a partial block has no key)

    tree        k0 -- k1 -- k2          one node, and one block, for all prompts that begin so
                        \\-- k2'

A node is *private* while one request holds it, which can be preempted from it token by token;
*shared* once a second request holds it; *idle* when no request holds it, until it is evicted. A
request that holds a node holds all nodes before it, so idle nodes form whole branches, which are
evicted from their leaves.

Rule "class-aware": best-effort requests evict blocks that real-time requests have used only beyond
a protected number of them. Among the others, the block that is cheapest to recompute and rarest
looked up is evicted first (GreedyDual-Size-Frequency: Cherkasova 1998); best-effort requests in
the waiting queue count as look-ups. Rule "lru": the least recently used block is evicted first,
of whatever class. With both rules, pinned blocks and the blocks before them are evicted last.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bros.kvcache.blocks import Node, Side


class Origins:
    """How many of each request's first blocks are cached, for a router that knows its tokens.

        request a    [ 0 ][ 1 ][ 2 ]            a computed 0 to 2 first: 3 blocks
        request b    [ 0 ][ 1 ][ 2'][ 3'] ...   b found 0 and 1: 4 blocks, two of its own

    Every cached block has an origin, the request that computed it first, and all blocks before it
    are cached, too. So a router can derive the whole tree from (request, number of blocks).

    A change says how many blocks of one request are cached now: up to a block that it has computed,
    or up to one that was evicted. Blocks are evicted from the leaves, so a change is exact when it
    happens, and changes told in the order of each request's last one are exact together.

    nodes: the cached ones, each after its parent. A request id must stand for one prompt; if an id
    is used again for another prompt, blocks of the first one are not told any more.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._last: dict[str, tuple[Node, int]] = {}
        self._changed: dict[str, int] = {}
        for node in nodes:
            self.added(node)
        self._changed.clear()

    def added(self, node: Node) -> None:
        """A request has computed a block that was not cached."""
        origin = node.origin
        known = self._last.get(origin)
        self._last[origin] = (node, known[1] + 1 if known else 1)
        self._change(origin, node.depth + 1)

    def lost(self, node: Node) -> None:
        """A block was evicted or dropped; its parent is still cached."""
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
        """Request -> its cached blocks, for changes since the last call; last change last."""
        changed, self._changed = self._changed, {}
        return changed

    def everything(self) -> dict[str, int]:
        """Request -> its cached blocks, for all requests; forgets the changes so far."""
        self._changed.clear()
        return {origin: node.depth + 1 for origin, (node, _) in self._last.items()}

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError unless exactly these nodes are counted; for ids of one prompt."""
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


_KEY_BYTES = 16
_PRIVATE = b"private"
_MANY_STALE = 64


def extend_keys(
    keys: list[bytes],
    token_ids: array[int],
    block_size: int,
    num_blocks: int,
    salt: str = "",
    private_from: int | None = None,
    private_salt: str = "",
) -> None:
    """Append to `keys` those of the first `num_blocks` full blocks that it lacks.

        tokens    [ 0 1 2 3 ][ 4 5 6 7 ][ 8 9 .. ]      private_from = 6
                  any scope  [ the same private_salt only

    salt: requests with different salts share nothing, and cannot find out what others have cached.
    private_from: first token that only requests with the same `private_salt` share; its whole block
        is private then. None: no token is.
    """
    parent = keys[-1] if keys else _key(salt.encode())
    first_private = None if private_from is None else private_from // block_size
    for index in range(len(keys), num_blocks):
        if index == first_private:
            parent = _key(private_salt.encode(), parent, _PRIVATE)
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        parent = _key(tokens.tobytes(), parent)
        keys.append(parent)


def _key(content: bytes, parent: bytes = b"", kind: bytes = b"") -> bytes:
    """kind: what `content` is, so that no salt can pass for tokens."""
    return hashlib.blake2b(content, digest_size=_KEY_BYTES, key=parent, person=kind).digest()


_REAL_TIME, _PINNED = 1, 2
"""A tier is a sum of these; idle nodes of a lower tier are evicted first. A node's tier is at most
its parent's in both, so the lowest tier that is not empty has leaves."""

_NUM_TIERS = 4


class PrefixCache:
    """The nodes, and the order in which idle ones are evicted. allocator.py hands out the blocks.

    rule: "class-aware" or "lru".
    protected: number of idle blocks used by real-time requests that best-effort ones may not evict.
    cost: of recomputing a block, by its depth, in any unit.
    """

    def __init__(
        self,
        rule: str = "class-aware",
        protected: int = 0,
        cost: Callable[[int], float] = lambda depth: 1.0,
    ) -> None:
        self._by_class = rule == "class-aware"
        self._protected = protected
        self._cost = cost
        self._nodes: dict[bytes, Node] = {}
        self._idle = [0] * _NUM_TIERS
        self._evictable: list[list[tuple[float, int, Node]]] = [[] for _ in range(_NUM_TIERS)]
        self._turn = 0
        self._clock = 0.0
        self._uses = 0
        self._expected: Counter[bytes] = Counter()
        self._pinned: set[bytes] = set()
        self._producing: dict[bytes, int] = {}
        self._announced: dict[int, list[bytes]] = {}  # by holder, last key first
        self.origins: Origins | None = None  # None without a subscriber
        self.num_held = 0  # shared nodes with a holder
        self.num_idle = 0  # nodes without a holder

    @property
    def num_pinned(self) -> int:
        """Pinned keys, whether their blocks are cached or not."""
        return len(self._pinned)

    def num_evictable(self, real_time: bool, but: Sequence[Node] = ()) -> int:
        """Idle blocks that a request of a class may evict, less `but`, which it will hold."""
        idle, protected = self.num_idle - len(but), 0
        if self._by_class and not real_time:
            protected = min(self._num_real_time - sum(map(self._group, but)), self._protected)
        return idle - protected

    def find(self, keys: Sequence[bytes], known: Sequence[Node] = ()) -> list[Node]:
        """The nodes of the longest cached prefix of `keys`.

        known: the result of an earlier call with the same keys, from which the search goes on.
        """
        nodes = list(known) if known and known[-1].alive else [n for n in known if n.alive]
        while len(nodes) < len(keys) and (node := self._nodes.get(keys[len(nodes)])):
            nodes.append(node)
        return nodes

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def subscribe(self) -> None:
        """Record in `origins` from now on what is cached of which request."""
        self.origins = Origins(sorted(self._nodes.values(), key=lambda node: node.depth))

    def add(
        self,
        key: bytes,
        parent: Node | None,
        place: tuple[int, Side],
        holder: int,
        origin: str,
        real_time: bool,
    ) -> Node:
        """Enter a block that a request has just computed, as a private node.

        place: the block and its side.
        holder, origin: number and id of the request.
        """
        depth = parent.depth + 1 if parent else 0
        # A request may have been of another class when it began: ancestors decide.
        real_time &= parent is None or parent.real_time
        node = Node(key, parent, *place, depth, real_time, origin, holders={holder})
        assert key not in self._nodes, "one node per key"
        self._nodes[key] = node
        if self.origins is not None:
            self.origins.added(node)
        if parent:
            parent.children += 1
        producer = self._producing.pop(key, None)
        if producer is not None and (rest := self._announced.get(producer)) and rest[-1] == key:
            rest.pop()
        return node

    def hold(self, node: Node, holder: int) -> None:
        """One more request holds a shared or idle node; parents are held first."""
        assert node.shared, "a private node has to be shared first"
        if not node.holders:
            self._count_idle(node, -1)
            self.num_held += 1
        node.holders.add(holder)

    def release(self, node: Node, holder: int) -> None:
        """A request does not hold a node any more; the last node of a prefix is released first."""
        node.holders.remove(holder)
        if not node.holders:
            self.num_held -= node.shared
            node.shared = True
            self._count_idle(node, 1)
            node.priority = self._priority(node)
            self._offer(node)

    def share(self, node: Node) -> None:
        """Make a private node shared: its block belongs to the cache from now on."""
        node.shared = True
        self.num_held += 1

    def unshare(self, node: Node) -> None:
        """Make a shared node with one holder private."""
        assert len(node.holders) == 1
        node.shared = False
        self.num_held -= 1

    def drop(self, node: Node) -> None:
        """Remove a private node whose block gets other content; nodes after it go first."""
        assert not node.shared, "others may hold it"
        self._forget(node)

    def evict(self, real_time: bool, *, anything: bool = False) -> Node | None:
        """Remove and return the idle node to evict for a request of a class; None if none may go.

        anything: protected nodes may go as well.
        """
        respects = self._by_class and not real_time and not anything
        protected = respects and self._num_real_time <= self._protected
        for tier, count in enumerate(self._idle):
            if count and not (protected and tier & _REAL_TIME):
                node = self._first_evictable(tier)
                self._clock = max(self._clock, node.priority)
                self._count_idle(node, -1)
                self._forget(node)
                return node
        return None

    def hit(self, nodes: Iterable[Node], real_time: bool) -> None:
        """A request of a class has found these nodes and holds them now."""
        for node in nodes:
            node.hits += 1
            if real_time and not node.real_time and (node.parent is None or node.parent.real_time):
                node.real_time = True
                node.turn = -1  # its entry, if any, is in the wrong heap

    def expect(self, keys: Iterable[bytes]) -> None:
        """A request in the waiting queue will look these keys up."""
        for key in keys:
            self._expected[key] += 1
            node = self._nodes.get(key)
            if node is not None and not node.holders:
                node.priority = self._priority(node)

    def unexpect(self, keys: Iterable[bytes]) -> None:
        """That request has left the waiting queue."""
        for key in keys:
            self._expected[key] -= 1
            if not self._expected[key]:
                del self._expected[key]

    def pin(self, keys: Iterable[bytes]) -> None:
        """Evict these blocks last; a prefix is pinned in its order."""
        for key in keys:
            self._move(key, pinned=True)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Evict these blocks like others again; a prefix is unpinned from its end."""
        for key in keys:
            self._move(key, pinned=False)

    def begin_producing(self, keys: Sequence[bytes], holder: int) -> None:
        """A request has begun to compute these blocks, so that others may wait for them."""
        mine = [key for key in keys if key not in self._nodes and key not in self._producing]
        self._producing.update((key, holder) for key in mine)
        self._announced[holder] = mine[::-1]

    def stop_producing(self, holder: int) -> None:
        """A request has ended or was preempted, and will not compute its announced blocks soon."""
        for key in self._announced.pop(holder, ()):
            if self._producing.get(key) == holder:
                del self._producing[key]

    def producer(self, keys: Sequence[bytes], first: int) -> tuple[int, int]:
        """(holder, blocks): the request that is computing block `first` of a prompt, and how many
        blocks from there on; (-1, 0) if no request is.
        """
        holder = self._producing.get(keys[first], -1) if first < len(keys) else -1
        count = 0
        if holder >= 0:
            while first + count < len(keys) and self._producing.get(keys[first + count]) == holder:
                count += 1
        return holder, count

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts agree with the nodes, and these form a tree."""
        children: Counter[Node] = Counter()
        idle = [0] * _NUM_TIERS
        for key, node in self._nodes.items():
            assert node.key == key and node.alive
            if node.parent:
                parent = node.parent
                children[parent] += 1
                assert self._nodes[parent.key] is parent, "a node without its parent"
                assert node.holders <= parent.holders, "held without its parent"
                assert parent.real_time or not node.real_time
                assert parent.shared or not node.shared
                assert parent.key in self._pinned or key not in self._pinned
            idle[self._tier(node)] += not node.holders
            assert node.shared or len(node.holders) == 1
        for node in self._nodes.values():
            assert children[node] == node.children
        assert idle == self._idle and sum(idle) == self.num_idle
        held = sum(node.shared and bool(node.holders) for node in self._nodes.values())
        assert held == self.num_held
        for tier, heap in enumerate(self._evictable):
            valid = {node.key for _, turn, node in heap if node.turn == turn}
            leaves = {
                node.key
                for node in self._nodes.values()
                if not node.holders and not node.children and self._tier(node) == tier
            }
            assert leaves <= valid, "an idle leaf that cannot be evicted"
        assert self._producing.keys().isdisjoint(self._nodes.keys())

    def nodes(self) -> Iterable[Node]:
        """All nodes, for integrity checks."""
        return self._nodes.values()

    def _group(self, node: Node) -> bool:
        """Whether a node counts as real-time; no node does under "lru"."""
        return node.real_time and self._by_class

    def _tier(self, node: Node) -> int:
        """The tier that a node is evicted with."""
        real_time = _REAL_TIME if node.real_time and self._by_class else 0
        return real_time + _PINNED if node.key in self._pinned else real_time

    def _count_idle(self, node: Node, change: int) -> None:
        self._idle[self._tier(node)] += change
        self.num_idle += change

    @property
    def _num_real_time(self) -> int:
        return self._idle[_REAL_TIME] + self._idle[_REAL_TIME + _PINNED]

    def _move(self, key: bytes, pinned: bool) -> None:
        """Move a key to the pinned tier, or back."""
        node = self._nodes.get(key)
        is_idle = node is not None and not node.holders
        if node is not None and is_idle:
            self._count_idle(node, -1)
        if pinned:
            self._pinned.add(key)
        else:
            self._pinned.discard(key)
        if node is not None:
            node.turn = -1  # its entry, if any, is in the wrong heap
        if node is not None and is_idle:
            self._count_idle(node, 1)
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Enter an idle node in its tier's heap, if it is a leaf.

        If it has an entry already, its priority has only risen since, and `_first_evictable`
        moves it.
        """
        if not node.children and node.turn < 0:
            self._push(node)

    def _push(self, node: Node) -> None:
        self._turn += 1
        node.turn = self._turn
        heap = self._evictable[self._tier(node)]
        if len(heap) > 2 * len(self._nodes) + _MANY_STALE:
            heap[:] = [entry for entry in heap if entry[2].turn == entry[1]]
            heapq.heapify(heap)
        heapq.heappush(heap, (node.priority, node.turn, node))

    def _priority(self, node: Node) -> float:
        if not self._by_class:
            self._uses += 1
            return self._uses
        asked = 1 + node.hits + self._expected.get(node.key, 0)
        return self._clock + asked * self._cost(node.depth)

    def _first_evictable(self, tier: int) -> Node:
        heap = self._evictable[tier]
        while True:
            priority, turn, node = heapq.heappop(heap)
            if node.turn != turn:
                continue
            node.turn = -1
            if node.holders or node.children:
                continue
            if node.priority <= priority:
                return node
            self._push(node)

    def _forget(self, node: Node) -> None:
        assert not node.children, "children are forgotten first"
        del self._nodes[node.key]
        if self.origins is not None:
            self.origins.lost(node)
        node.alive = False
        node.turn = -1
        if node.parent:
            node.parent.children -= 1
            if not node.parent.holders:
                self._offer(node.parent)
            node.parent = None  # else a reference to this node would keep all its ancestors alive
