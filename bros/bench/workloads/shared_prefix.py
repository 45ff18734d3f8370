"""Prompts that begin alike: the workloads of Preble (Table 1), made up from its statistics.

    | common to all |  of the group (key portion)  |  of this request  |
    |<-------------- shared prefix -------------->|

Preble gives the mean and deviation of prompt and output lengths, the share of the prompt that
other requests share, the share of the key portion (the node of the prefix tree that is longer
than all before it), and how many requests share one. The key portion's share is read as one of
the shared prefix: of the prompt it would exceed the shared part in two of the five rows. What
stands before it is common to all requests, like the instructions of an application.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from bros.bench.plan import Piece
from bros.bench.workloads.content import Conversation, Draft
from bros.core.errors import ConfigError
from bros.simulator.lengths import ClippedLogNormal
from bros.simulator.workload import generator

_TAIL = 8.0
"""Lengths are clipped so many deviations above their mean."""


class Moments(NamedTuple):
    """Mean and standard deviation in tokens."""

    mean: float
    std: float

    def at_least(self, low: int) -> ClippedLogNormal:
        """Lengths with these moments."""
        return ClippedLogNormal(self.mean, self.std, low, round(self.mean + _TAIL * self.std))


class Row(NamedTuple):
    """shared: of the prompt, with other requests. key: of that, the key portion."""

    prompt: Moments
    output: Moments
    shared: float
    key: float
    requests_per_key: float


TABLE_1 = {
    "toolbench": Row(Moments(1835, 742), Moments(43, 16), 0.85, 0.76, 39),
    "embodied": Row(Moments(2285, 471), Moments(16, 13), 0.97, 0.76, 48),
    "programming": Row(Moments(3871, 1656), Moments(190, 343), 0.97, 0.78, 126),
    "video": Row(Moments(9865, 5976), Moments(4, 1.5), 0.88, 0.99, 8.6),
    "loogle": Row(Moments(23474, 6105), Moments(16, 9.9), 0.91, 0.94, 18),
}


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Requests of `groups` groups; those of one group begin with the same text.

    zipf: group k (from 1) is chosen with a probability that is proportional to k ** -zipf;
    0 makes all equally popular. The lengths of the shared part belong to the group, so a sample
    of few groups may be far from the row's mean. Raises ConfigError if there is no group or
    zipf is negative.
    """

    label: str
    row: Row
    groups: int
    zipf: float = 0.0

    def __post_init__(self) -> None:
        if self.groups < 1:
            raise ConfigError(f"{self.label} needs at least 1 group, not {self.groups}")
        if not 0 <= self.zipf < float("inf"):
            raise ConfigError(f"the exponent of a Zipf distribution cannot be {self.zipf}")

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Endless."""
        common = Piece(f"{self.label}/common", self._common_tokens)
        keys = self._key_portions(seed)
        weights = [(k + 1) ** -self.zipf for k in range(self.groups)]
        picks = list(itertools.accumulate(weights))
        rng = generator(seed, f"{self.label} requests")
        rests = self._rest.at_least(1)
        outputs = self.row.output.at_least(1)
        for number in itertools.count():
            [key] = rng.choices(keys, cum_weights=picks)
            rest = Piece(f"{self.label}/{number}", rests.draw(rng))
            yield (Draft((common, key, rest), outputs.draw(rng)),)

    def _key_portions(self, seed: int) -> list[Piece]:
        rng = generator(seed, f"{self.label} groups")
        common = self._common_tokens
        # More than all before it, which is what makes it the key portion.
        lengths = self._prefix.at_least(2 * common + 1)
        return [
            Piece(f"{self.label}/group {k}", lengths.draw(rng) - common) for k in range(self.groups)
        ]

    @property
    def _common_tokens(self) -> int:
        return max(1, round(self.row.prompt.mean * self.row.shared * (1 - self.row.key)))

    @property
    def _rest(self) -> Moments:
        """Of the part of the prompt that nobody shares."""
        alone = 1 - self.row.shared
        return Moments(alone * self.row.prompt.mean, alone * self.row.prompt.std)

    @property
    def _prefix(self) -> Moments:
        """Of the shared part, so that it and the rest together have the prompt's moments."""
        variance = self.row.prompt.std**2 - self._rest.std**2
        return Moments(self.row.shared * self.row.prompt.mean, math.sqrt(variance))


def preble(name: str, requests: float, zipf: float = 0.0) -> SharedPrefix:
    """A row of TABLE_1 with as many groups as `requests` requests have at its requests per key.

    Raises KeyError for other names.
    """
    row = TABLE_1[name]
    return SharedPrefix(name, row, max(1, round(requests / row.requests_per_key)), zipf)
