"""Which blocks are free. A block is `block_size` slots; slot s lies in block s // block_size."""

from __future__ import annotations


class BlockPool:
    """Hands out block numbers 0 .. num_blocks - 1, most recently freed first (warm in cache)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"need at least one block of one slot: {num_blocks=}, {block_size=}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """One free block. Raises IndexError if there is none: callers ask num_free first."""
        return self._free.pop()

    def release(self, blocks: list[int]) -> None:
        """Give blocks back; the caller must own every one of them."""
        self._free.extend(reversed(blocks))

    def free_blocks(self) -> frozenset[int]:
        """For integrity checks. Raises AssertionError if a block is listed twice."""
        free = frozenset(self._free)
        assert len(free) == len(self._free), "a block is in the free list twice"
        return free
