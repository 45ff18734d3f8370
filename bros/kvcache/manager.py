"""The only door to KV memory: every slot that is read or written was handed out here."""

from __future__ import annotations

from array import array

from bros.kvcache.block_pool import BlockPool
from bros.kvcache.block_table import BlockTable


class KvCacheManager:
    """Paged KV memory for many requests (plain blocks; a request owns its blocks alone).

    A request exists here from its first `append` until `free`; tokens are immutable once
    written, and are only ever dropped all together (`truncate` is for those never written).
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self._tables: dict[str, BlockTable] = {}

    @property
    def block_size(self) -> int:
        return self._pool.block_size

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_used_blocks(self) -> int:
        return self._pool.num_blocks - self._pool.num_free

    def num_tokens(self, request_id: str) -> int:
        """Tokens of this request in the cache; 0 for a request that is not here."""
        table = self._tables.get(request_id)
        return table.num_tokens if table else 0

    def blocks_of(self, request_id: str) -> int:
        """Blocks held by this request; 0 for a request that is not here."""
        table = self._tables.get(request_id)
        return len(table.blocks) if table else 0

    def blocks_needed(self, request_id: str, num_tokens: int) -> int:
        """Free blocks that appending `num_tokens` tokens would take."""
        table = self._tables.get(request_id)
        if table is None:
            return -(-num_tokens // self._pool.block_size)
        return table.blocks_needed(num_tokens)

    def append(self, request_id: str, num_tokens: int) -> tuple[array[int], array[int]]:
        """Make room for the next `num_tokens` >= 1 tokens of a request.

        Returns (segments, slots): int32 (block, lo, hi) triples that cover the tokens cached
        before this call, and the int32 slots of the new ones. The caller has checked
        `blocks_needed` against `num_free_blocks`.
        """
        table = self._tables.get(request_id)
        if table is None:
            table = self._tables[request_id] = BlockTable(self._pool.block_size)
        before = table.segments[:]
        needed = table.blocks_needed(num_tokens)
        new_blocks = [self._pool.allocate() for _ in range(needed)] if needed else []
        return before, table.append(num_tokens, new_blocks)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Take back the latest appends of a request, down to its first `num_tokens` tokens.

        The slots and blocks of the others are free afterwards. Only for tokens that no step has
        computed: cached tokens are dropped by `free`, all together.
        """
        if num_tokens == 0:
            self.free(request_id)
        else:
            self._pool.release(self._tables[request_id].truncate(num_tokens))

    def free(self, request_id: str) -> int:
        """Drop everything a request has here; returns how many blocks came free."""
        table = self._tables.pop(request_id, None)
        if table is None:
            return 0
        self._pool.release(table.blocks)
        return len(table.blocks)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every block is free or owned, by exactly one request."""
        free = self._pool.free_blocks()
        owned = [block for table in self._tables.values() for block in table.blocks]
        assert len(owned) == len(set(owned)), "a block has two owners"
        assert not free.intersection(owned), "a block is both free and owned"
        assert len(free) + len(owned) == self.num_blocks, "a block is lost"
        for request_id, table in self._tables.items():
            triples = [tuple(table.segments[i : i + 3]) for i in range(0, len(table.segments), 3)]
            assert sum(hi - lo for _, lo, hi in triples) == table.num_tokens, request_id
            assert [block for block, _, _ in triples] == table.blocks, request_id
