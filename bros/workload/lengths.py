"""Distributions of token counts."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Protocol

_MAX_SIGMA = 8.0
"""A log-normal with a larger sigma puts nearly all values at the two ends of the range."""


class Lengths(Protocol):
    """A distribution of token counts."""

    @property
    def high(self) -> int:
        """The largest possible count."""
        ...

    def draw(self, rng: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Uniform:
    """Integers in [low, high], uniformly."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class ClippedLogNormal:
    """A log-normal distribution, clipped to [low, high].

    mean, std: of the clipped values.
    Raises ValueError if no clipped log-normal has this mean and std.
    """

    mean: float
    std: float
    low: int
    high: int
    _mu: float = field(init=False, repr=False, default=0.0)
    _sigma: float = field(init=False, repr=False, default=0.0)

    def __post_init__(self) -> None:
        mu, sigma = _fit_clipped(self.mean, self.std, self.low, self.high)
        object.__setattr__(self, "_mu", mu)
        object.__setattr__(self, "_sigma", sigma)

    def draw(self, rng: random.Random) -> int:
        value = math.exp(rng.gauss(self._mu, self._sigma))
        return round(min(max(value, self.low), self.high))


def _fit_clipped(mean: float, std: float, low: int, high: int) -> tuple[float, float]:
    """Mu and sigma of the log-normal that has this mean and standard deviation after clipping.

    Scales the moments before clipping until those after it match.
    """
    raw_mean, raw_std = mean, std
    for _ in range(1000):
        sigma = math.sqrt(math.log1p((raw_std / raw_mean) ** 2))
        if sigma > _MAX_SIGMA:
            break
        mu = math.log(raw_mean) - sigma**2 / 2
        got_mean, got_std = _clipped_moments(mu, sigma, low, high)
        if abs(got_mean / mean - 1) < 1e-9 and abs(got_std / std - 1) < 1e-9:
            return mu, sigma
        raw_mean *= mean / got_mean
        raw_std *= std / got_std
    raise ValueError(f"no log-normal clipped to [{low}, {high}] has mean {mean} and std {std}")


def _clipped_moments(mu: float, sigma: float, low: int, high: int) -> tuple[float, float]:
    normal = NormalDist(mu, sigma)
    log_low, log_high = math.log(low), math.log(high)
    below, above = normal.cdf(log_low), 1.0 - normal.cdf(log_high)
    moments = []
    for k in (1, 2):  # E[x^k; low < x < high] is a normal integral with a shifted mean
        shifted = NormalDist(mu + k * sigma**2, sigma)
        inside = shifted.cdf(log_high) - shifted.cdf(log_low)
        scale = math.exp(k * mu + (k * sigma) ** 2 / 2)
        moments.append(low**k * below + high**k * above + scale * inside)
    return moments[0], math.sqrt(max(moments[1] - moments[0] ** 2, 1e-12))
