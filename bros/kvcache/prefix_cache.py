"""The prefix cache: finds full blocks by the hash of their tokens.

    prompt    [ 16 tokens ][ 16 tokens ][ 16 tokens ][ 5 ]
    keys        k0           k1 = H(k0, tokens)  k2         (a partial block has no key)

    tree        k0 -- k1 -- k2          one node, and one block, for all prompts with this prefix
                        \\-- k2'

A node is *private* while one request holds it, whose tokens can be preempted one by one; *shared*
once a second request holds it; *idle* when no request holds it, until it is evicted. A request that
holds a node holds all nodes before it, so idle nodes form whole branches, and leaves are evicted
first.

Rule "class-aware": a best-effort request may evict blocks that real-time requests have used only if
more than a protected number of these are idle. Among the others, the block is evicted first that is
cheapest to recompute and least often looked up (GreedyDual-Size-Frequency: Cherkasova 1998);
best-effort requests in the waiting queue count as look-ups. Rule "lru": the least recently used
block is evicted first, whatever its class. Under both rules, pinned blocks and the blocks before
them are evicted last.
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
    or up to one that was evicted. Leaves are evicted first, so a change is exact when it happens.
    Only the latest change of each request is kept, in the order in which they happened: applied in
    this order, they give the exact tree.

    nodes: the cached ones, each after its parent. A request id must stand for one prompt; once an
        id is used again for another prompt, changes of the first prompt's blocks are not reported.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._last: dict[str, tuple[Node, int]] = {}
        self._changed: dict[str, int] = {}
        for node in nodes:
            self.added(node)
        self._changed.clear()

    def added(self, node: Node) -> None:
        """Record a block that a request has computed and that was not cached."""
        origin = node.origin
        known = self._last.get(origin)
        self._last[origin] = (node, known[1] + 1 if known else 1)
        self._change(origin, node.depth + 1)

    def lost(self, node: Node) -> None:
        """Record that a block was evicted or dropped; its parent is still cached."""
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
        """Request -> its cached blocks, for changes since the last call, in their order."""
        changed, self._changed = self._changed, {}
        return changed

    def everything(self) -> dict[str, int]:
        """Request -> its cached blocks, for all requests; forgets the changes so far."""
        self._changed.clear()
        return {origin: node.depth + 1 for origin, (node, _) in self._last.items()}

    def check_integrity(self, nodes: Iterable[Node]) -> None:
        """Raise AssertionError unless exactly these nodes are counted; if no id was used again."""
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
_PUBLIC, _OWN, _PRIVATE = b"public", b"own", b"private"
_MANY_STALE = 64


def extend_keys(
    keys: list[bytes],
    token_ids: array[int],
    block_size: int,
    num_blocks: int,
    salt: str = "",
    private_from: int | None = None,
    private_salt: str = "",
    public_tokens: int = 0,
) -> None:
    """Append the missing ones of the keys of the first `num_blocks` full blocks to `keys`.

        tokens    [ 0 1 2 3 ][ 4 5 6 7 ][ 8 9 .. ]      block_size = 4
                  public     [ same salt [ same salt and private_salt
                  public_tokens = 6, private_from = 9

    salt: requests with different salts share only public blocks, and cannot find out what else
        others have cached.
    private_from: first token that only requests with the same `private_salt` share, together with
        its whole block. None: there is none.
    public_tokens: the whole blocks among the first `public_tokens` are shared whatever the salt.
    """
    first_private = None if private_from is None else private_from // block_size
    first_own = public_tokens // block_size
    if first_private is not None:
        first_own = min(first_own, first_private)
    if keys:
        parent = keys[-1]
    else:
        parent = _key(b"", kind=_PUBLIC) if first_own else _key(salt.encode())
    for index in range(len(keys), num_blocks):
        if first_own and index == first_own:
            parent = _key(salt.encode(), parent, _OWN)
        if index == first_private:
            parent = _key(private_salt.encode(), parent, _PRIVATE)
        tokens = token_ids[index * block_size : (index + 1) * block_size]
        parent = _key(tokens.tobytes(), parent)
        keys.append(parent)


def _key(content: bytes, parent: bytes = b"", kind: bytes = b"") -> bytes:
    """kind: what `content` is, so that a salt never has the key of a block of tokens."""
    return hashlib.blake2b(content, digest_size=_KEY_BYTES, key=parent, person=kind).digest()


_REAL_TIME, _PINNED = 1, 2
"""Bits of a node's tier; idle nodes of a lower tier are evicted first. A node has no bit that its
parent lacks, so the lowest tier that is not empty contains leaves."""

_NUM_TIERS = 4


class PrefixCache:
    """The nodes, and the order in which idle ones are evicted. allocator.py allocates the blocks.

    rule: "class-aware" or "lru".
    protected: number of idle blocks used by real-time requests that best-effort ones may not evict.
    cost: cost of recomputing a block, by its depth, in any unit.

    origins: None without a subscriber.
    num_held: shared nodes with a holder.
    num_idle: nodes without a holder.
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
        self._last_entry_id = 0
        self._clock = 0.0
        self._uses = 0
        self._expected: Counter[bytes] = Counter()
        self._pinned: set[bytes] = set()
        self._producing: dict[bytes, int] = {}
        self._announced: dict[int, list[bytes]] = {}  # by holder, last key first
        self.origins: Origins | None = None
        self.num_held = 0
        self.num_idle = 0

    @property
    def num_pinned(self) -> int:
        """Pinned keys, whether their blocks are cached or not."""
        return len(self._pinned)

    def num_evictable(self, real_time: bool, excluding: Sequence[Node] = ()) -> int:
        """Idle blocks that a request of a class may evict, without `excluding`."""
        idle, protected = self.num_idle - len(excluding), 0
        if self._by_class and not real_time:
            used = self._num_real_time - sum(node.real_time for node in excluding)
            protected = min(used, self._protected)
        return idle - protected

    def find(self, keys: Sequence[bytes], known: Sequence[Node] = ()) -> list[Node]:
        """The nodes of the longest cached prefix of `keys`.

        known: the result of an earlier call with the same keys, from which the search continues.
        """
        nodes = list(known) if known and known[-1].alive else [n for n in known if n.alive]
        while len(nodes) < len(keys) and (node := self._nodes.get(keys[len(nodes)])):
            nodes.append(node)
        return nodes

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def subscribe(self) -> None:
        """Record in `origins` from now on how many blocks of each request are cached."""
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
        """Add a block that a request has just computed, as a private node.

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
        """Add a holder to a shared or idle node; a parent is held before its children."""
        assert node.shared, "a private node has to be shared first"
        if not node.holders:
            self._count_idle(node, -1)
            self.num_held += 1
        node.holders.add(holder)

    def release(self, node: Node, holder: int) -> None:
        """Remove a holder from a node; children are released before their parent."""
        node.holders.remove(holder)
        if not node.holders:
            self.num_held -= node.shared
            node.shared = True
            self._count_idle(node, 1)
            node.priority = self._priority(node)
            self._push_if_leaf(node)

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
        """Remove a private node whose block gets other content; children are dropped first."""
        assert not node.shared, "others may hold it"
        self._remove(node)

    def evict(self, real_time: bool, *, protected_too: bool = False) -> Node | None:
        """Remove and return the idle node to evict for a request of a class; None if there is none.

        protected_too: protected nodes may be evicted as well.
        """
        spares_protected = self._by_class and not real_time and not protected_too
        spares_real_time = spares_protected and self._num_real_time <= self._protected
        for tier, count in enumerate(self._idle):
            if count and not (spares_real_time and tier & _REAL_TIME):
                node = self._first_evictable(tier)
                self._clock = max(self._clock, node.priority)
                self._count_idle(node, -1)
                self._remove(node)
                return node
        return None

    def hit(self, nodes: Iterable[Node], real_time: bool) -> None:
        """Record that a request of a class has found these nodes, which it holds now."""
        for node in nodes:
            node.hits += 1
            if real_time and not node.real_time and (node.parent is None or node.parent.real_time):
                node.real_time = True
                node.entry_id = -1  # its entry, if any, is in the wrong heap

    def expect(self, keys: Iterable[bytes]) -> None:
        """Record that a request in the waiting queue will look these keys up."""
        for key in keys:
            self._expected[key] += 1
            node = self._nodes.get(key)
            if node is not None and not node.holders:
                node.priority = self._priority(node)

    def unexpect(self, keys: Iterable[bytes]) -> None:
        """Record that such a request has left the waiting queue."""
        for key in keys:
            self._expected[key] -= 1
            if not self._expected[key]:
                del self._expected[key]

    def pin(self, keys: Iterable[bytes]) -> None:
        """Evict these blocks last; a parent is pinned before its children."""
        for key in keys:
            self._set_pinned(key, pinned=True)

    def unpin(self, keys: Iterable[bytes]) -> None:
        """Evict these blocks like others again; children are unpinned before their parent."""
        for key in keys:
            self._set_pinned(key, pinned=False)

    def begin_producing(self, keys: Sequence[bytes], holder: int) -> None:
        """Announce that a request is computing these blocks, so that others may wait for them."""
        mine = [key for key in keys if key not in self._nodes and key not in self._producing]
        self._producing.update((key, holder) for key in mine)
        self._announced[holder] = mine[::-1]

    def stop_producing(self, holder: int) -> None:
        """Withdraw the announcement of a request that has ended or was preempted."""
        for key in self._announced.pop(holder, ()):
            if self._producing.get(key) == holder:
                del self._producing[key]

    def producer(self, keys: Sequence[bytes], first: int) -> tuple[int, int]:
        """(number of the request that is computing block `first` of a prompt, how many blocks it
        computes from there on); (-1, 0) if no request is."""
        holder = self._producing.get(keys[first], -1) if first < len(keys) else -1
        count = 0
        if holder >= 0:
            while first + count < len(keys) and self._producing.get(keys[first + count]) == holder:
                count += 1
        return holder, count

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts agree with the nodes, which must form a tree."""
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
            valid = {node.key for _, entry_id, node in heap if node.entry_id == entry_id}
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

    def _tier(self, node: Node) -> int:
        real_time = _REAL_TIME if node.real_time and self._by_class else 0
        return real_time + _PINNED if node.key in self._pinned else real_time

    def _count_idle(self, node: Node, change: int) -> None:
        self._idle[self._tier(node)] += change
        self.num_idle += change

    @property
    def _num_real_time(self) -> int:
        return self._idle[_REAL_TIME] + self._idle[_REAL_TIME + _PINNED]

    def _set_pinned(self, key: bytes, pinned: bool) -> None:
        """Pin or unpin a key."""
        node = self._nodes.get(key)
        is_idle = node is not None and not node.holders
        if node is not None and is_idle:
            self._count_idle(node, -1)
        if pinned:
            self._pinned.add(key)
        else:
            self._pinned.discard(key)
        if node is not None:
            node.entry_id = -1  # its entry, if any, is in the wrong heap
        if node is not None and is_idle:
            self._count_idle(node, 1)
            self._push_if_leaf(node)

    def _push_if_leaf(self, node: Node) -> None:
        """Push an idle node on its tier's heap, if it is a leaf without an entry.

        The priority of a node with an entry has only risen since; `_first_evictable` corrects it.
        """
        if not node.children and node.entry_id < 0:
            self._push(node)

    def _push(self, node: Node) -> None:
        self._last_entry_id += 1
        node.entry_id = self._last_entry_id
        heap = self._evictable[self._tier(node)]
        if len(heap) > 2 * len(self._nodes) + _MANY_STALE:
            heap[:] = [entry for entry in heap if entry[2].entry_id == entry[1]]
            heapq.heapify(heap)
        heapq.heappush(heap, (node.priority, node.entry_id, node))

    def _priority(self, node: Node) -> float:
        if not self._by_class:
            self._uses += 1
            return self._uses
        look_ups = 1 + node.hits + self._expected.get(node.key, 0)
        return self._clock + look_ups * self._cost(node.depth)

    def _first_evictable(self, tier: int) -> Node:
        heap = self._evictable[tier]
        while True:
            priority, entry_id, node = heapq.heappop(heap)
            if node.entry_id != entry_id:
                continue
            node.entry_id = -1
            if node.holders or node.children:
                continue
            if node.priority <= priority:
                return node
            self._push(node)

    def _remove(self, node: Node) -> None:
        assert not node.children, "children are removed first"
        del self._nodes[node.key]
        if self.origins is not None:
            self.origins.lost(node)
        node.alive = False
        node.entry_id = -1
        if node.parent:
            node.parent.children -= 1
            if not node.parent.holders:
                self._push_if_leaf(node.parent)
            node.parent = None  # else a reference to this node would keep all its ancestors alive
