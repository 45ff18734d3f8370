"""How many rows the next step may have: TCP's congestion control, with steps for round trips.

    rows
      |              x             x  violation: a real-time token cannot be on time. The
      |            _/|           _/|  threshold becomes half of what failed, and B starts over.
      |          _/  |         _/  |
      |        _/    |       _/    |  congestion avoidance: one more row per step
      |       | threshold   |      |
      |      _|      |     _|      |  slow start: doubling up to the threshold
   B0 |_____|        |____|        |__
      +------------------------------- steps that were full

Source: BROS section 3.4, where growth is one row per step throughout ("additive"). B grows only
when it was what ended the batch, else it would drift up while there is little to do. What a
step can hold is first of all decided by its predicted time; B bounds the damage where the
prediction is off.
"""

from __future__ import annotations


class AdaptiveBatchSize:
    """`rows` is what the next step may hold: B0 <= rows <= most."""

    def __init__(self, initial: int, most: int, growth: str = "tcp") -> None:
        """initial: B0, also after a reset. growth: "tcp" or "additive"."""
        self._initial = min(initial, most)
        self._most = most
        self._threshold = most if growth == "tcp" else 0
        self._grows_by_doubling = growth == "tcp"
        self.rows = self._initial
        self.resets = 0

    def settle(self, *, violated: bool, was_full: bool) -> None:
        """Take in what became of a step."""
        if violated:
            if self._grows_by_doubling:
                self._threshold = max(self._initial, self.rows // 2)
            self.rows = self._initial
            self.resets += 1
        elif was_full and self.rows < self._threshold:
            self.rows = min(self.rows * 2, self._threshold)
        elif was_full:
            self.rows = min(self.rows + 1, self._most)
