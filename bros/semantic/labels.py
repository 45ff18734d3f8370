"""What is asked of a value, and what a request must achieve for it: plain data, which only rises.

Times with a deadline are absolute, in seconds of the session's clock; None is no deadline.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from bros.semantic.program import Criteria, Perf


class Level(enum.IntEnum):
    """How urgent a request is, from the least on."""

    THROUGHPUT = 0  # some time
    GROUP = 1  # when all of its group are done is what counts
    RT = 2  # somebody waits for this one


def earliest(a: float | None, b: float | None) -> float | None:
    """The smaller one, where None is no bound."""
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """What one request must achieve.

    objectives: of the values that it is for; LATENCY also stands for all of it being complete,
    which is what matters about a request between others. ttft_s, tpot_s: as in Criteria.
    deadline_s: when it must be complete at the latest.
    """

    level: Level = Level.THROUGHPUT
    objectives: frozenset[Perf] = frozenset()
    ttft_s: float | None = None
    tpot_s: float | None = None
    deadline_s: float | None = None

    def joined(self, other: Label) -> Label:
        """What meets both: the higher level, all objectives, the earlier times."""
        return Label(
            level=max(self.level, other.level),
            objectives=self.objectives | other.objectives,
            ttft_s=earliest(self.ttft_s, other.ttft_s),
            tpot_s=earliest(self.tpot_s, other.tpot_s),
            deadline_s=earliest(self.deadline_s, other.deadline_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Want:
    """All that has been asked of one variable so far.

    label: what its producer must achieve if anything but THROUGHPUT was asked for, else None.
    batch: whether THROUGHPUT was, and batch_deadline_s until when.
    """

    label: Label | None = None
    batch: bool = False
    batch_deadline_s: float | None = None

    def joined(self, criteria: Criteria, deadline_s: float | None) -> Want:
        """With one more question. deadline_s: criteria.deadline_s as a time of the clock."""
        if criteria.perf is Perf.THROUGHPUT:
            deadline_s = earliest(self.batch_deadline_s, deadline_s)
            return replace(self, batch=True, batch_deadline_s=deadline_s)
        asked = Label(
            level=Level.RT,
            objectives=frozenset({criteria.perf}),
            ttft_s=criteria.ttft_s,
            tpot_s=criteria.tpot_s,
            deadline_s=deadline_s,
        )
        return replace(self, label=asked if self.label is None else self.label.joined(asked))
