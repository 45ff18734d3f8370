"""What decode rows of a step have in common in their caches, and read once for all.

    row 0   [ a  512 ][ b  64 ] ...        pieces of prefixes, see KvCacheManager.common_parts
    row 1   [ a  512 ][ b  64 ] ...
    row 2   [ a  512 ][ c  96 ] ...        2 x 512 + 64 tokens fewer; c is only read by row 2

Kernels look for common prefixes in the step that they are given (Grouping). What is counted here
they find: pieces that are long enough by themselves, of enough rows. They find more where several
short pieces come after each other, and where prompt chunks read the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic

from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from bros.scheduler.selection import C, Reservations


class CommonContext(Generic[C]):
    """The rows of a step that is packed, and which pieces they have.

    exists: two requests have something in common, and the predictor asks what. Else nothing is
    counted.
    """

    def __init__(self, memory: Reservations[C], predictor: StepTimePredictor) -> None:
        self._memory = memory
        self._grouping = predictor.grouping
        self.exists = self._grouping is not None and memory.has_common_parts
        self._changes = memory.sharing_changes
        self._rows: dict[C, Sequence[tuple[Hashable, int]]] = {}
        self._counts: dict[Hashable, int] = {}
        if self._grouping is not None:
            self._least_tokens = self._grouping.min_blocks * self._grouping.block_size
            self._least_rows = self._grouping.min_rows

    @property
    def is_stale(self) -> bool:
        """Whether somebody has come or gone meanwhile who has something in common with others."""
        return self._grouping is not None and self._memory.sharing_changes != self._changes

    def join(self, row: C) -> int:
        """One more row; how many fewer tokens are read than if it and the others before it had
        nothing to do with each other."""
        parts = self._memory.common_parts(row) if self.exists else ()
        if not parts:
            return 0
        self._rows[row] = parts
        counts, saved = self._counts, 0
        for part, tokens in parts:
            if tokens >= self._least_tokens:
                count = counts[part] = counts.get(part, 0) + 1
                saved += self._saved(count, tokens)
        return saved

    def leave(self, row: C) -> int:
        """One of them is not in the step any more; what it would save by joining again."""
        saved = 0
        for part, tokens in self._rows.pop(row, ()):
            if tokens >= self._least_tokens:
                saved += self._saved(self._counts[part], tokens)
                self._counts[part] -= 1
        return saved

    def _saved(self, count: int, tokens: int) -> int:
        """By the last of so many rows that have a piece."""
        if count <= self._least_rows:
            return tokens * (count - 1) if count == self._least_rows else 0
        return tokens


def load_of(chosen: Sequence[tuple[C, int]], common: CommonContext[C]) -> StepLoad:
    """Of candidates and so many tokens of each; without copies to the host.

    common: without rows so far.
    """
    load = StepLoad()
    for candidate, num_tokens in chosen:
        complete = candidate.samples and num_tokens == candidate.remaining
        shared = common.join(candidate) if num_tokens == 1 else 0
        load.add(num_tokens, candidate.num_cached, complete, shared, candidate.num_missing)
    return load
