"""Where the tokens of one request lie.

tokens    0 .............. 15 16 ............. 31 32 .. 36
blocks    [ block 7          ][ block 3          ][ block 9, 5 of 16 slots used ]
segments  (7, 0, 16)          (3, 0, 16)          (9, 0, 5)
"""

from __future__ import annotations

from array import array

from bros.core.plan import SEGMENT_WIDTH


class BlockTable:
    """Blocks of one request, in token order, kept ready in the form that kernels read."""

    __slots__ = ("_block_size", "blocks", "num_tokens", "segments")

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.blocks: list[int] = []
        self.segments = array("i")
        self.num_tokens = 0

    def blocks_needed(self, num_tokens: int) -> int:
        """New blocks needed before `num_tokens` more tokens fit."""
        total = -(-(self.num_tokens + num_tokens) // self._block_size)
        return total - len(self.blocks)

    def append(self, num_tokens: int, new_blocks: list[int]) -> array[int]:
        """Grow by `num_tokens`, using exactly `new_blocks`; returns int32 slots, one per token."""
        size = self._block_size
        if num_tokens == 1 and not new_blocks:  # most decode steps
            used = self.segments[-1]
            assert used < size
            self.num_tokens += 1
            self.segments[-1] = used + 1
            return array("i", (self.blocks[-1] * size + used,))
        assert len(new_blocks) == self.blocks_needed(num_tokens)
        self.blocks.extend(new_blocks)
        slots = array("i")
        token, end = self.num_tokens, self.num_tokens + num_tokens
        while token < end:
            index, low = divmod(token, size)
            high = min(size, low + end - token)
            block = self.blocks[index]
            slots.extend(range(block * size + low, block * size + high))
            if low == 0:
                self.segments.extend((block, 0, high))
            else:
                self.segments[-1] = high
            token += high - low
        self.num_tokens = end
        return slots

    def truncate(self, num_tokens: int) -> list[int]:
        """Keep the first `num_tokens` >= 1; returns the blocks that are not needed for them."""
        assert 1 <= num_tokens <= self.num_tokens
        kept = -(-num_tokens // self._block_size)
        freed = self.blocks[kept:]
        del self.blocks[kept:]
        del self.segments[SEGMENT_WIDTH * kept :]
        self.segments[-1] = num_tokens - (kept - 1) * self._block_size
        self.num_tokens = num_tokens
        return freed
