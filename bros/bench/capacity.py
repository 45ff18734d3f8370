"""The highest rate that a server carries within its objectives."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from bros.bench.results import Tried
from bros.simulator.metrics import Share

Attempt = Callable[[float], Awaitable[Share]]
"""Requests per second in; out, how many of them met both objectives."""


@dataclass(frozen=True, slots=True)
class Range:
    """Rates low, low + step, ... up to high, in requests per second. step > 0."""

    low: float
    high: float
    step: float

    @property
    def count(self) -> int:
        return int((self.high - self.low) / self.step + 1e-9) + 1

    def rate(self, index: int) -> float:
        return round(self.low + index * self.step, 9)


class Capacity(NamedTuple):
    """rate: None if not even the lowest was good enough. tried: in the order they were."""

    rate: float | None
    tried: tuple[Tried, ...]


async def find_capacity(attempt: Attempt, rates: Range, asked: float) -> Capacity:
    """Bisection; takes for granted that what is too much stays too much at higher rates.

    asked: least share of real-time requests within both objectives.
    """
    tried: list[Tried] = []
    verdicts: dict[int, bool] = {}
    while (index := next_index(verdicts, rates.count)) is not None:
        rate = rates.rate(index)
        tried.append(Tried(rate=rate, both_met=await attempt(rate)))
        verdicts[index] = tried[-1].keeps(asked)
    passed = [index for index, good in verdicts.items() if good]
    return Capacity(rates.rate(max(passed)) if passed else None, tuple(tried))


def next_index(verdicts: Mapping[int, bool], count: int) -> int | None:
    """Which of 0 .. count - 1 to try next; None once the border between good and bad is known.

    The lowest first: where that fails there is nothing to look for. Then the highest.
    """
    if not verdicts:
        return 0
    passed = max((index for index, good in verdicts.items() if good), default=-1)
    failed = min((index for index, good in verdicts.items() if not good), default=count)
    if failed == count and count - 1 not in verdicts:
        return count - 1
    return None if failed <= passed + 1 else (passed + failed) // 2
