"""Sharing of blocks: connects holdings with the nodes of the prefix cache.

private (one holder, may be preempted token by token)  <->  shared  ->  idle  ->  evicted
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bros.kvcache.blocks import CACHE, Node, Side, Stacks
from bros.kvcache.holding import Holding
from bros.kvcache.prefix_cache import PrefixCache

_MIN_PRODUCED = 4
"""Fewest blocks of its prompt for which a request waits for their producer."""


@dataclass(frozen=True, slots=True)
class Match:
    """The cached prefix of a prompt.

    keys: of the prompt's full blocks.
    nodes: the cached ones, a prefix of `keys`.
    num_tokens: in these nodes.
    producer: id of the request that is computing the next tokens of the prompt; None if none is.
    num_producing: how many tokens the producer is going to add.
    """

    keys: Sequence[bytes]
    nodes: Sequence[Node]
    num_tokens: int
    producer: str | None = None
    num_producing: int = 0

    @property
    def idle_nodes(self) -> Sequence[Node]:
        """Matched nodes without a holder: they count as available until the request holds them."""
        first = len(self.nodes)
        while first and not self.nodes[first - 1].holders:
            first -= 1
        return self.nodes[first:]


NO_MATCH = Match((), (), 0)

CommonPart = tuple[Node, int]
"""(last block, tokens) of a piece of a prefix that the same two or more requests hold."""


class Sharing:
    """Moves blocks between requests and the cache; never pushes or pops a token.

    holdings: of all requests, by number.
    num_common: blocks that two or more requests hold.
    changes: a version that rises whenever a request starts or stops holding such a block.
    """

    def __init__(self, stacks: Stacks, cache: PrefixCache, holdings: Mapping[int, Holding]) -> None:
        self._stacks = stacks
        self._cache = cache
        self._holdings = holdings
        self._size = stacks.block_size
        self.num_common = 0
        self.changes = 0

    def match(self, keys: Sequence[bytes], earlier: Match) -> Match:
        """See KvCacheManager.match."""
        nodes = self._cache.find(keys, earlier.nodes)
        number, blocks = self._cache.producer(keys, len(nodes))
        num_tokens = len(nodes) * self._size
        if blocks < _MIN_PRODUCED:
            return Match(keys, nodes, num_tokens)
        producer = self._holdings[number].request_id
        return Match(keys, nodes, num_tokens, producer, blocks * self._size)

    def join(self, holding: Holding, match: Match) -> None:
        """A new request holds the cached prefix of its prompt."""
        for node in match.nodes:
            self._hold(holding, node)
            holding.num_tokens += self._size

    def begin(self, holding: Holding, match: Match, side: Side) -> None:
        """Count the cache hits of a new request, and announce it as producer of the rest."""
        self._cache.hit(match.nodes, side is Side.LEFT)
        rest = match.keys[len(match.nodes) :]
        if len(rest) >= _MIN_PRODUCED:
            self._cache.begin_producing(rest, holding.number)

    def publish(
        self,
        holding: Holding,
        keys: Sequence[bytes],
        side: Side,
        pop: Callable[[Holding, int, int], object],
    ) -> None:
        """See KvCacheManager.computed. pop: Allocator.pop."""
        size = self._size
        for block, _ in holding.pushed_last:
            index = len(holding.chain)
            if index >= len(keys) or holding.runs.get(block) != [[index * size, size]]:
                return
            node = self._cache.get(keys[index])
            if node is None:
                parent = holding.chain[-1] if holding.chain else None
                node = self._cache.add(
                    keys[index], parent, (block, holding.side),
                    holding.number, holding.request_id, real_time=side is Side.LEFT,
                )  # fmt: skip
                holding.chain.append(node)
            elif index == holding.num_shared:
                # Another request has computed the same tokens first: both use its block.
                pop(holding, block, size)
                self._hold(holding, node)
                self._cache.hit([node], side is Side.LEFT)
            else:
                return

    def end(self, holding: Holding, keep: bool) -> None:
        """Make the private nodes of an ending request idle (`keep`), or drop them."""
        for node in reversed(holding.chain[holding.num_shared :]):
            if keep:
                self._stacks.hand_over(node.block, node.side, CACHE)
                del holding.runs[node.block]
                self._cache.release(node, holding.number)
            else:
                self._cache.drop(node)
        del holding.chain[holding.num_shared :]

    def leave(self, holding: Holding) -> None:
        """Release all shared nodes of a request.

        A node with one holder left becomes private again, so that it can be preempted token by
        token. It must be on the holder's side, and its only child, if any, must be the holder's.
        """
        unshared: dict[int, int] = {}  # holder -> nodes that become private
        for node in reversed(holding.chain):
            self._cache.release(node, holding.number)
            count = len(node.holders)
            self.changes += count > 0
            if count != 1:
                continue
            self.num_common -= 1
            (number,) = node.holders
            owner, count = self._holdings[number], unshared.get(number, 0)
            last = owner.num_shared - 1 - count
            has_next = len(owner.chain) > node.depth + 1
            is_last = owner.chain[last] is node and node.children == has_next
            if is_last and node.side is owner.side:
                unshared[number] = count + 1
        holding.drop_shared()
        for number, count in unshared.items():
            owner = self._holdings[number]
            for node in owner.unshare(count, self._size):
                self._stacks.hand_over(node.block, node.side, owner.number)
                self._cache.unshare(node)
            owner.num_exclusive += count

    def _hold(self, holding: Holding, node: Node) -> None:
        """Make a request hold a node, which is shared from now on."""
        if not node.shared:
            owner = self._holdings[next(iter(node.holders))]
            assert owner.share() is node, "shared nodes come before private ones"
            owner.num_exclusive -= 1
            self._stacks.hand_over(node.block, node.side, CACHE)
            self._cache.share(node)
        self._cache.hold(node, holding.number)
        count = len(node.holders)
        self.num_common += count == 2
        self.changes += count > 1
        holding.join(node, self._size)

    def common_parts(self, holding: Holding) -> Sequence[CommonPart]:
        """See KvCacheManager.common_parts."""
        if holding.common_as_of != self.changes:
            holding.common = self._common_parts(holding)
            holding.common_as_of = self.changes
        return holding.common

    def _common_parts(self, holding: Holding) -> Sequence[CommonPart]:
        """Pieces of the prefix by their number of holders.

        Holders of a node hold all nodes before it, so nodes with equally many holders have the
        same ones.
        """
        chain, end = holding.chain, holding.num_shared
        parts: list[CommonPart] = []
        first = 0
        while first < end and (count := len(chain[first].holders)) > 1:
            if len(chain[end - 1].holders) == count:  # the most frequent case
                last = end
            else:
                last = bisect_left(chain, 1 - count, first, end, key=_rising)
            parts.append((chain[last - 1], (last - first) * self._size))
            first = last
        return parts

    def check_integrity(self) -> int:
        """Raise AssertionError unless nodes and chains agree; returns the slots of shared nodes."""
        slots = 0
        common = sum(len(node.holders) > 1 for node in self._cache.nodes())
        assert common == self.num_common, f"{common} of {self.num_common} blocks are common"
        for node in self._cache.nodes():
            assert self._stacks.height(node.block, node.side) == self._size
            if node.shared:
                assert self._stacks.owner(node.block, node.side) == CACHE
                slots += self._size
            for number in node.holders:
                assert self._holdings[number].chain[node.depth] is node
        return slots


def _rising(node: Node) -> int:
    """A key for bisection that never falls along a chain."""
    return -len(node.holders)
