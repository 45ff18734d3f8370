"""When sessions begin."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from bros.core.errors import ConfigError
from bros.simulator.workload import generator

_DIGITS = 6
"""Times are whole microseconds: the last bit of a logarithm is not the same on all machines."""


class Arrivals(Protocol):
    """A process that sends sessions off."""

    @property
    def label(self) -> str:
        """For people, e.g. `4 req/s`."""
        ...

    def times(self, duration_s: float, seed: int) -> list[float]:
        """Seconds after the start, sorted, all in [0, duration_s)."""
        ...


@dataclass(frozen=True, slots=True)
class RandomArrivals:
    """`rate` sessions per second on average; 0 is none.

    Gaps are independent and follow a gamma distribution of shape `burstiness` and mean 1 / rate:
    at 1 a Poisson process, below it bursts with long pauses, above it ever more regular. The
    gaps of a seed at another rate are the same ones, stretched. Raises ConfigError if rate is
    negative or burstiness is not positive.
    """

    rate: float
    burstiness: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.rate < float("inf"):
            raise ConfigError(f"the rate must be 0 or more requests per second, not {self.rate}")
        if not 0 < self.burstiness < float("inf"):
            raise ConfigError(f"burstiness must be more than 0, not {self.burstiness}")

    @property
    def label(self) -> str:
        rate = f"{self.rate:g} req/s"
        return rate if self.burstiness == 1.0 else f"{rate}, burstiness {self.burstiness:g}"

    def times(self, duration_s: float, seed: int) -> list[float]:
        found: list[float] = []
        if self.rate == 0:
            return found
        rng = generator(seed, "rt gaps")
        time_s = 0.0
        while True:
            if self.burstiness == 1.0:
                gap = rng.expovariate(1.0)  # as the simulator draws them
            else:
                gap = rng.gammavariate(self.burstiness, 1.0 / self.burstiness)
            time_s += gap / self.rate
            if round(time_s, _DIGITS) >= duration_s:
                return found
            found.append(round(time_s, _DIGITS))


@dataclass(frozen=True, slots=True)
class RecordedArrivals:
    """The times of a trace, played `speed` times as fast. times_s: sorted, from 0 on.

    Raises ConfigError if speed is not positive.
    """

    times_s: tuple[float, ...] = field(repr=False)
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.speed < float("inf"):
            raise ConfigError(f"a trace cannot be played {self.speed} times as fast")

    @property
    def label(self) -> str:
        return "as recorded" if self.speed == 1.0 else f"x{self.speed:g}"

    def times(self, duration_s: float, seed: int) -> list[float]:
        played = (round(time_s / self.speed, _DIGITS) for time_s in self.times_s)
        return [time_s for time_s in played if time_s < duration_s]
