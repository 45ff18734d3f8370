"""Requests whose prompts have beginnings in common: recipes now, tokens when they are needed.

parts     [ system ][ tool 17 ][ question 4711 ]       parts of one name hold the same tokens
tokens    [ 160    ][ 1400    ][ 275           ]
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from bros.core.request import ServiceClass
from bros.simulator.sim_executor import TOKEN

VOCAB = 1 << 16


class Part(NamedTuple):
    """A piece of a prompt. name: what it holds; None is an answer that has been given before."""

    name: str | None
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixRequest:
    """One request, yet without tokens.

    time_s: when it comes, in seconds after the start, or when it would if `follows`, the number
    of a request before it, has not ended by then: it comes after that. family: what a partition
    that knows the workload goes by.
    """

    time_s: float
    parts: tuple[Part, ...]
    output_tokens: int
    family: int
    follows: int | None = None
    service_class: ServiceClass = ServiceClass.RT

    @property
    def prompt_tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


class PrefixLoad(Protocol):
    """Where such requests come from."""

    @property
    def label(self) -> str:
        """For people, e.g. `toolbench, 9 req/s`."""
        ...

    def requests(self, seed: int) -> Sequence[PrefixRequest]:
        """All of them, sorted by time; `follows` are places in this order."""
        ...


def prompt_of(request: PrefixRequest, seed: int) -> array[int]:
    """Its tokens, below VOCAB; the same in every process."""
    prompt = array("i")
    drawn = b"".join(_drawn(part, seed) for part in request.parts)
    prompt.frombytes(np.frombuffer(drawn, dtype="<u2").astype(np.int32).tobytes())
    return prompt


def _drawn(part: Part, seed: int) -> bytes:
    if part.name is None:
        return TOKEN.to_bytes(2, "little") * part.tokens
    return hashlib.shake_128(f"{seed}/{part.name}".encode()).digest(2 * part.tokens)


def at_rate(times: Sequence[float], rate: float) -> list[float]:
    """Recorded times, of which the first is 0, so that on average so many come per second; their
    own rate is taken to be 1 if they came all at once."""
    own_rate = len(times) / times[-1] if times[-1] else 1.0
    return [time_s / (rate / own_rate) for time_s in times]


def classes(count: int, be_share: float, rng: random.Random) -> list[ServiceClass]:
    """Of so many requests, in their order; each is best-effort with that probability."""
    return [ServiceClass.BE if rng.random() < be_share else ServiceClass.RT for _ in range(count)]


def poisson_times(count: int, rate: float, rng: random.Random) -> list[float]:
    """So many arrivals; at another rate their gaps are stretched."""
    times, time_s = [], 0.0
    for _ in range(count):
        time_s += rng.expovariate(1.0) / rate
        times.append(time_s)
    return times
