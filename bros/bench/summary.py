"""Many durations in a few figures."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True, slots=True)
class Summary:
    """Mean, standard deviation (of the population) and percentiles in seconds; None of nothing."""

    count: int
    mean: float | None = None
    std: float | None = None
    p50: float | None = None
    p90: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, values: ArrayLike) -> Summary:
        found = np.asarray(values, dtype=np.float64)
        if not found.size:
            return cls(0)
        percentiles = np.percentile(found, (50, 90, 95, 99)).tolist()
        return cls(found.size, float(found.mean()), float(found.std()), *percentiles)
