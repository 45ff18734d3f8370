"""How far a share of few requests can be trusted."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from bros.simulator.metrics import Share

_Z = NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """Shares, 0 <= low <= high <= 1."""

    low: float
    high: float


def likely(share: Share) -> Interval | None:
    """Wilson's 95 % interval; None if nothing was decided.

    It holds every share p of which `share` is not further away than chance takes it in 95 % of
    samples: |met/n - p| <= z sqrt(p (1 - p) / n). For requests that are late independently of
    each other; those that come in bursts are late together, and the truth is wider.
    """
    if share.value is None:
        return None
    count, weight = share.decided, _Z * _Z / share.decided
    middle = share.value + weight / 2
    half = _Z * math.sqrt(share.value * (1 - share.value) / count + weight / (4 * count))
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    # Exactly 0 and 1 where none or all were met, whatever rounding says.
    return Interval(low if share.met else 0.0, high if share.met < count else 1.0)
