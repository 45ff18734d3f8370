"""Full blocks by what they hold, so that a prefix is computed once and held once.

    prompt    [ 16 tokens ][ 16 tokens ][ 16 tokens ][ 5 ]
    keys        k0           k1 = H(k0, tokens)  k2         (a part of a block has none)

    tree        k0 -- k1 -- k2          one node, and one block, for all who begin like this
                        \\-- k2'

A node is *private* while one request has it, whose it is like any other block of its own; *shared*
from the second one on; *idle* when nobody has it any more, until its block is needed. Whoever has
a node has all before it, so the idle ones are whole branches and are evicted from their leaves.

Rule "class-aware": what real-time requests have used is evicted for best-effort ones only beyond
a protected number of blocks, and of the others goes first what is cheap to compute and rarely
asked for (GreedyDual-Size-Frequency: Cherkasova 1998), where best-effort requests that are
waiting count as asking. Rule "lru": the least recently used, whoever used it. With both, what
is kept for somebody who will come back goes after all else, and so does all before it.
"""

from __future__ import annotations

import hashlib
import heapq
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from bros.kvcache.blocks import Node, Side

# ---- How much of each request's tokens is in the prefix cache, for whoever watches from afar.
#
#     request a    [ 0 ][ 1 ][ 2 ]            a was the first with 0 to 2: 3 blocks
#     request b    [ 0 ][ 1 ][ 2'][ 3'] ...   b found 0 and 1: 4 blocks, two of which are its own
#
# Who knows the tokens of the requests can say from this what is cached: of every block that is
# there, the request that computed it first says so, and all before it are there.
#
# An event says how far the tokens of one request are there now: to the end of a block that it has
# computed, or up to one that is gone. Blocks go from the leaves, so that is exact when it happens,
# and told in the order of the last event of each request it is exact for all of them.


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
    """Append the keys of the first `num_blocks` full blocks of tokens that are not there yet.

        tokens    [ 0 1 2 3 ][ 4 5 6 7 ][ 8 9 .. ]      private_from = 6
                  for all    [ with the same private_salt only

    salt: requests with different ones share nothing (and cannot tell what others have cached).
    private_from: position of the first token that only those share who have the same private_salt
    as well; all of its block is private then. None: nothing is.
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


_REAL_TIME, _KEPT = 1, 2
"""Idle nodes of a tier, which is a sum of these, are evicted before those of the next one. Of each
of the two a node has no more than the one before it: so whatever tier comes first has leaves."""

_NUM_TIERS = 4


class PrefixCache:
    """The nodes, and in which order the idle ones go. Blocks themselves are handed out elsewhere.

    rule: "class-aware" or "lru". protected: blocks that real-time requests have used and
    best-effort ones may not evict. cost: what computing a block again takes, by its depth, in
    any unit.
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
        self._kept: set[bytes] = set()
        self._filling: dict[bytes, int] = {}
        self._fills: dict[int, list[bytes]] = {}  # last one first
        self.origins: Origins | None = None  # nobody watches
        self.num_held = 0  # shared, and somebody has them
        self.num_idle = 0  # nobody has them

    @property
    def num_kept(self) -> int:
        """Blocks that are kept for somebody, whether they are there or not."""
        return len(self._kept)

    def num_evictable(self, real_time: bool, but: Sequence[Node] = ()) -> int:
        """Idle blocks that a request of a class may have, beside some that it takes as they are."""
        idle, spared = self.num_idle - len(but), 0
        if self._by_class and not real_time:
            spared = min(self._num_real_time - sum(map(self._group, but)), self._protected)
        return idle - spared

    def find(self, keys: Sequence[bytes], known: Sequence[Node] = ()) -> list[Node]:
        """The nodes of as many keys as there are, from the first one on.

        known: what an earlier call found for the same keys, which saves looking from the start.
        """
        nodes = list(known) if known and known[-1].alive else [n for n in known if n.alive]
        while len(nodes) < len(keys) and (node := self._nodes.get(keys[len(nodes)])):
            nodes.append(node)
        return nodes

    def get(self, key: bytes) -> Node | None:
        return self._nodes.get(key)

    def watch(self) -> None:
        """Keep account of what there is of whom from now on, in `origins`."""
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
        """A block that a request has computed, and which is its own for the time being.

        place: the block, and the side of it. origin: the request's id, holder its number.
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
        filler = self._filling.pop(key, None)
        if filler is not None and (rest := self._fills.get(filler)) and rest[-1] == key:
            rest.pop()
        return node

    def hold(self, node: Node, holder: int) -> None:
        """One more request has a shared or idle node; its parent first."""
        assert node.shared, "a private one has to be shared first"
        if not node.holders:
            self._count_idle(node, -1)
            self.num_held += 1
        node.holders.add(holder)

    def release(self, node: Node, holder: int) -> None:
        """A request does not have it any more; the last node of a prefix first."""
        node.holders.remove(holder)
        if not node.holders:
            self.num_held -= node.shared
            node.shared = True
            self._count_idle(node, 1)
            node.priority = self._priority(node)
            self._offer(node)

    def share(self, node: Node) -> None:
        """A private node belongs to the cache from now on."""
        node.shared = True
        self.num_held += 1

    def unshare(self, node: Node) -> None:
        """The opposite, for its only holder."""
        assert len(node.holders) == 1
        node.shared = False
        self.num_held -= 1

    def drop(self, node: Node) -> None:
        """The block of a private node is used for something else; nodes after it first."""
        assert not node.shared, "others may have it"
        self._forget(node)

    def evict(self, real_time: bool, *, anything: bool = False) -> Node | None:
        """Take an idle node out, for a request of a class; None if there is none for it.

        anything: what is protected as well.
        """
        spares = self._by_class and not real_time and not anything
        spared = spares and self._num_real_time <= self._protected
        for tier, count in enumerate(self._idle):
            if count and not (spared and tier & _REAL_TIME):
                node = self._first_evictable(tier)
                self._clock = max(self._clock, node.priority)
                self._count_idle(node, -1)
                self._forget(node)
                return node
        return None

    def hit(self, nodes: Iterable[Node], real_time: bool) -> None:
        """A request of a class has found them, and has them now."""
        for node in nodes:
            node.hits += 1
            if real_time and not node.real_time and (node.parent is None or node.parent.real_time):
                node.real_time = True
                node.turn = -1  # what entry it has is in the wrong heap

    def expect(self, keys: Iterable[bytes]) -> None:
        """A request that waits will ask for these."""
        for key in keys:
            self._expected[key] += 1
            node = self._nodes.get(key)
            if node is not None and not node.holders:
                node.priority = self._priority(node)

    def expect_no_more(self, keys: Iterable[bytes]) -> None:
        """It does not wait any longer."""
        for key in keys:
            self._expected[key] -= 1
            if not self._expected[key]:
                del self._expected[key]

    def keep(self, keys: Iterable[bytes]) -> None:
        """Somebody will come back for these, so they go last; each after those before it."""
        for key in keys:
            self._move(key, kept=True)

    def keep_no_more(self, keys: Iterable[bytes]) -> None:
        """Nobody will; each before those before it."""
        for key in keys:
            self._move(key, kept=False)

    def fill(self, keys: Sequence[bytes], holder: int) -> None:
        """A request has begun to compute these blocks."""
        mine = [key for key in keys if key not in self._nodes and key not in self._filling]
        self._filling.update((key, holder) for key in mine)
        self._fills[holder] = mine[::-1]

    def stop_filling(self, holder: int) -> None:
        """It will not go on, or not soon."""
        for key in self._fills.pop(holder, ()):
            if self._filling.get(key) == holder:
                del self._filling[key]

    def filling(self, keys: Sequence[bytes], first: int) -> tuple[int, int]:
        """Who computes block number `first` of a prompt, and how many of the next ones as well.

        (-1, 0) if nobody does.
        """
        holder = self._filling.get(keys[first], -1) if first < len(keys) else -1
        count = 0
        if holder >= 0:
            while first + count < len(keys) and self._filling.get(keys[first + count]) == holder:
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
                assert self._nodes[parent.key] is parent, "a node without the one before it"
                assert node.holders <= parent.holders, "held without the one before it"
                assert parent.real_time or not node.real_time
                assert parent.shared or not node.shared
                assert parent.key in self._kept or key not in self._kept
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
        assert self._filling.keys().isdisjoint(self._nodes.keys())

    def nodes(self) -> Iterable[Node]:
        """All of them, for integrity checks."""
        return self._nodes.values()

    def _group(self, node: Node) -> bool:
        """Whether it counts as real-time; nothing does under "lru"."""
        return node.real_time and self._by_class

    def _tier(self, node: Node) -> int:
        """What it is evicted with."""
        real_time = _REAL_TIME if node.real_time and self._by_class else 0
        return real_time + _KEPT if node.key in self._kept else real_time

    def _count_idle(self, node: Node, change: int) -> None:
        self._idle[self._tier(node)] += change
        self.num_idle += change

    @property
    def _num_real_time(self) -> int:
        return self._idle[_REAL_TIME] + self._idle[_REAL_TIME + _KEPT]

    def _move(self, key: bytes, kept: bool) -> None:
        """To the tier of what is kept, or back."""
        node = self._nodes.get(key)
        is_idle = node is not None and not node.holders
        if node is not None and is_idle:
            self._count_idle(node, -1)
        if kept:
            self._kept.add(key)
        else:
            self._kept.discard(key)
        if node is not None:
            node.turn = -1  # what entry it has is in the wrong heap
        if node is not None and is_idle:
            self._count_idle(node, 1)
            self._offer(node)

    def _offer(self, node: Node) -> None:
        """Put an idle node among the evictable ones, if it is a leaf.

        Where it has an entry already, its priority has only risen since, and
        `_first_evictable` moves it.
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
        assert not node.children, "nodes after it come first"
        del self._nodes[node.key]
        if self.origins is not None:
            self.origins.lost(node)
        node.alive = False
        node.turn = -1
        if node.parent:
            node.parent.children -= 1
            if not node.parent.holders:
                self._offer(node.parent)
            node.parent = None  # else whoever still knows this one would keep all before it
