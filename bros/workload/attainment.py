"""Attainment of latency objectives and summaries of durations.

The simulator, `bros bench` and the benchmarks share these definitions, so that simulated and
measured figures are comparable. Percentiles are interpolated linearly, as in numpy and vLLM's
benchmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

TOLERANCE_S = 1e-9
"""For rounding errors in differences of times: a token that comes when it is due is on time."""


def within(seconds: float, limit_s: float) -> bool:
    """Whether a duration meets an objective."""
    return seconds <= limit_s + TOLERANCE_S


@dataclass(frozen=True, slots=True)
class Attainment:
    """The share of requests, or of tokens, that met their objectives.

    met: number that met their objectives.
    decided: number that certainly met or missed them.
    """

    met: int
    decided: int

    @property
    def value(self) -> float | None:
        """met / decided; None if nothing was decided."""
        return self.met / self.decided if self.decided else None

    @classmethod
    def of(cls, verdicts: Sequence[bool | None]) -> Attainment:
        """verdicts: True: met; False: missed; None: undecided."""
        decided = [verdict for verdict in verdicts if verdict is not None]
        return cls(sum(decided), len(decided))


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, population standard deviation and percentiles in seconds; None if count is 0."""

    count: int
    mean: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values_s: ArrayLike) -> Summary:
        """values_s: durations, a sequence or a one-dimensional array."""
        found = np.asarray(values_s, dtype=np.float64)
        if not found.size:
            return cls(0)
        percentiles = np.percentile(found, (50, 90, 95, 99)).tolist()
        return cls(found.size, float(found.mean()), float(found.std()), *percentiles)
