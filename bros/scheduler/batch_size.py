"""How many rows the next step may have: TCP's congestion control, with steps for round trips.

    rows
      |               x          x  violation: a decode row is late because of the others.
      |             _/|        _/|  The batch is halved (multiplicative decrease).
      |           _/  |      _/  |
      |         _/    |    _/    |  congestion avoidance: one more row per step
      |        | first|___/      |_
      |       _| violation
      |     _|    slow start: doubling until the first violation
   B0 |____|
      +------------------------------- steps that were full

Source: BROS section 3.4, where growth is one row per step throughout and a violation starts over
at B0 ("additive"). B grows only when it was what ended the batch, else it would drift up while
there is little to do. What a step can hold is first of all decided by its predicted time; B
bounds the damage where the prediction is off. Starting over at B0 does more harm than that: with
260 requests running it makes most of them late, which is the next violation.
"""

from __future__ import annotations


class AdaptiveBatchSize:
    """`rows` is what the next step may hold: B0 <= rows <= most."""

    def __init__(self, initial: int, most: int, growth: str = "tcp") -> None:
        """initial: B0. growth: "tcp" or "additive"."""
        self._initial = min(initial, most)
        self._most = most
        self._halves = growth == "tcp"
        self._slow_start = growth == "tcp"
        self.rows = self._initial
        self.resets = 0

    def settle(self, *, violated: bool, was_full: bool) -> None:
        """Take in what became of a step."""
        if violated:
            self._slow_start = False
            self.rows = max(self.rows // 2, self._initial) if self._halves else self._initial
            self.resets += 1
        elif was_full:
            self.rows = min(self.rows * 2 if self._slow_start else self.rows + 1, self._most)
