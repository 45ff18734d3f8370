"""Chats of several turns: every prompt is the one before, an answer and what the user says next.

    turn 0   | system | user 0 |
    turn 1   | system | user 0 | answer 0 | user 1 |
    turn 2   | system | user 0 | answer 0 | user 1 | answer 1 | user 2 |

The answers in the prompts are stand-ins as long as the real ones, because a plan is made before
anything is answered: a server finds in its cache what it has read before, not what it wrote.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass

from bros.bench.plan import Piece
from bros.bench.workloads.content import Conversation, Draft
from bros.core.errors import ConfigError
from bros.simulator.lengths import Lengths
from bros.simulator.workload import generator

_DIGITS = 6


@dataclass(frozen=True, slots=True)
class Chats:
    """Conversations of `turns` turns.

    user, answer: tokens of what the user says in a turn and of the answer. system_tokens: of a
    text at the start that all conversations share. think_s: mean of the exponentially
    distributed time between an answer and the next turn. Raises ConfigError if system_tokens or
    think_s is negative.
    """

    label: str
    turns: Lengths
    user: Lengths
    answer: Lengths
    system_tokens: int = 0
    think_s: float = 0.0

    def __post_init__(self) -> None:
        if self.system_tokens < 0 or self.think_s < 0:
            raise ConfigError(f"{self.label}: system_tokens and think_s must not be negative")

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """Endless."""
        rng = generator(seed, f"{self.label} chats")
        for number in itertools.count():
            yield tuple(self._drafts(f"{self.label}/{number}", rng))

    def _drafts(self, key: str, rng: random.Random) -> Iterator[Draft]:
        prompt: tuple[Piece, ...] = ()
        if self.system_tokens:
            prompt = (Piece(f"{self.label}/system", self.system_tokens),)
        for turn in range(max(1, self.turns.draw(rng))):
            prompt = (*prompt, Piece(f"{key}/user {turn}", self.user.draw(rng)))
            answer_tokens = self.answer.draw(rng)
            yield Draft(prompt, answer_tokens, self._pause(rng) if turn else 0.0)
            prompt = (*prompt, Piece(f"{key}/answer {turn}", answer_tokens))

    def _pause(self, rng: random.Random) -> float:
        return round(rng.expovariate(1.0) * self.think_s, _DIGITS)
