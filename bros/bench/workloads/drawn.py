"""Conversations of one request each, whose lengths are drawn and whose prompts share nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from bros.bench.plan import Piece
from bros.bench.workloads.content import Conversation, Draft
from bros.simulator.workload import BE_SIZES, RT_SIZES, RequestSizes, generator


@dataclass(frozen=True, slots=True)
class Drawn:
    """Prompt and output lengths from a distribution.

    purpose: names the random numbers; "rt" and "be" draw what the simulator draws for a seed.
    """

    label: str
    sizes: RequestSizes
    purpose: str = "rt"

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Endless."""
        sizes = self.sizes.stream(generator(seed, f"{self.purpose} sizes"))
        for number in itertools.count():
            prompt_tokens, output_tokens = next(sizes)
            key = f"{self.label}/{number}"
            yield (Draft((Piece(key, prompt_tokens),), output_tokens),)


def chats(name: str) -> Drawn:
    """A row of BROS Table 2: `lmsys` or `sharegpt`. Raises KeyError for others."""
    return Drawn(name, RT_SIZES[name])


def documents() -> Drawn:
    """The best-effort requests of BROS: prompts U[512, 1024], outputs U[32, 128]."""
    return Drawn("synthetic", BE_SIZES, "be")
