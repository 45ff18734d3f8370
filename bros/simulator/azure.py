"""Tools and videos at recorded times (Preble's mixed workload, figure 8).

    code             |  |    | ||      toolbench      at the times of the Azure traces of 2023, all
    conversations     | |||  |   |     video          nearer together or further apart

What people asked has not been published, so prompts are drawn as for these two workloads.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from bros.simulator.prefix_requests import PrefixRequest, at_rate, classes
from bros.simulator.prefix_workloads import published
from bros.simulator.traces import read_azure_trace
from bros.simulator.workload import generator

CODE, CONVERSATIONS = "toolbench", "video"

AzureTimes = tuple[tuple[float, str], ...]
"""(seconds after the start of its file, workload), sorted."""


def read_azure_times(code: Path, conversations: Path) -> AzureTimes:
    """Of both files. Raises ConfigError naming the file and the line that is wrong."""
    times = [(row.time_s, CODE) for row in read_azure_trace(code)]
    times += [(row.time_s, CONVERSATIONS) for row in read_azure_trace(conversations)]
    return tuple(sorted(times))


@dataclass(frozen=True, slots=True, kw_only=True)
class AzureLoad:
    """The first `count` recorded times, at `rate` per second on average instead of their own."""

    recorded: AzureTimes = field(repr=False)
    rate: float
    count: int
    be_share: float = 0.0

    @property
    def label(self) -> str:
        return f"azure, {self.rate:g} req/s"

    def requests(self, seed: int) -> list[PrefixRequest]:
        recorded = self.recorded[: self.count]
        times = at_rate([time_s for time_s, _ in recorded], self.rate)
        served = classes(len(recorded), self.be_share, generator(seed, "classes"))
        made = {
            name: iter(published(name, 1, count=count).requests(seed))
            for name, count in Counter(name for _, name in recorded).items()
        }
        return [
            dataclasses.replace(
                request := next(made[name]),
                time_s=time_s,
                family=2 * request.family + (name == CODE),
                service_class=service_class,
            )
            for time_s, (_, name), service_class in zip(times, recorded, served, strict=True)
        ]
