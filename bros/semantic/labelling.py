"""Labels for what wanted values need: a bounded part of it at once, the rest a little later.

Each value that somebody waits for has all the calls behind it labelled. If every value of a long
chain is waited for, that is a lot of work, which must not hold up everybody else in the process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from bros.semantic.labels import earliest
from bros.semantic.laxity import Watch
from bros.semantic.nodes import TaskGroup, Turn, Variable
from bros.semantic.objectives import Estimate, at_risk_s, deduce, drop_groups, label_producer

LABEL_EVERY_S = 0.1
"""How often there are steps for labelling again."""


class Labeller:
    """Knows which values are to be labelled for, and whose deadlines are watched.

    max_steps: turns, and inputs of them, that are looked at every LABEL_EVERY_S; the last value
    that is begun with is finished. max_labels: turns behind each value that is waited for, summed
    over those values; beyond that the others have their turn when some of them are settled.
    labels: how many there are.
    """

    def __init__(self, estimate: Estimate, max_steps: int, max_labels: int) -> None:
        self._estimate = estimate
        self._max_steps = max_steps
        self._max_labels = max_labels
        self._steps = max_steps
        self._more_s = -math.inf
        self._waiting: dict[Variable, None] = {}
        self._watch = Watch()
        self.labels = 0

    def add(self, sinks: Iterable[Variable]) -> list[Turn]:
        """More is asked of these, or they need more. Returns turns with a new label: only those
        that make them; see `run` for what is behind."""
        changed: list[Turn] = []
        for sink in sinks:
            self._waiting[sink] = None
            changed += label_producer(sink)
        return changed

    def run(self, now: float) -> list[Turn]:
        """Label as much as may be done by now. Returns turns with a new label."""
        if now >= self._more_s:
            self._steps = self._max_steps
            self._more_s = now + LABEL_EVERY_S
        changed: list[Turn] = []
        while self._can_go_on and self._steps > 0:
            sink = next(iter(self._waiting))
            del self._waiting[sink]
            self.labels -= sink.region
            deduced = deduce(sink, self._estimate)
            self.labels += sink.region
            self._steps -= deduced.steps
            for group in deduced.watched:
                self._watch.add(group, at_risk_s(group, self._estimate))
            changed += deduced.changed
        return changed

    def at_risk(self, now: float) -> Iterator[TaskGroup]:
        """Whose deadline would be missed otherwise. Each is told once."""
        return self._watch.take(now)

    def due(self) -> float | None:
        """When there is something to do for `run`, or `at_risk` of something."""
        return earliest(self._watch.next_s(), self._more_s if self._can_go_on else None)

    def settled(self, variable: Variable) -> None:
        """Nobody waits for it any more."""
        self._waiting.pop(variable, None)
        drop_groups(variable)
        self.labels -= variable.region
        variable.region = 0

    @property
    def _can_go_on(self) -> bool:
        return bool(self._waiting) and self.labels < self._max_labels
