"""What is asked, without saying when: the seam between contents and loops."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from bros.bench.plan import Piece


class Draft(NamedTuple):
    """A request before it has a name, a class and objectives.

    think_s: seconds between the end of the answer before it and this request.
    """

    prompt: tuple[Piece, ...]
    output_tokens: int
    think_s: float = 0.0


Conversation = tuple[Draft, ...]
"""Requests that follow each other, at least one."""


class Content(Protocol):
    """Where conversations come from."""

    @property
    def label(self) -> str:
        """For people, e.g. `lmsys`."""
        ...

    def conversations(self, seed: int) -> Iterator[Conversation]:
        """At least one; the k-th is always the same for a seed. May be endless."""
        ...


@runtime_checkable
class WithTexts(Protocol):
    """A content or a loop some pieces of which are texts that people wrote."""

    @property
    def texts(self) -> Mapping[str, str]:
        """Key of a piece -> its text. Pieces with other keys are made up (prompts.py)."""
        ...


def texts_of(*sources: object) -> dict[str, str]:
    """The texts of all those that have any; what Prompts wants to know."""
    found: dict[str, str] = {}
    for source in sources:
        if isinstance(source, WithTexts):
            found.update(source.texts)
    return found


@dataclass(frozen=True, slots=True)
class Recorded:
    """Conversations read from a file, in its order whatever the seed is."""

    label: str
    recorded: tuple[Conversation, ...] = field(repr=False)
    texts: Mapping[str, str] = field(default_factory=dict, repr=False)

    def conversations(self, seed: int) -> Iterator[Conversation]:
        return iter(self.recorded)


def endless(content: Content, seed: int, owner: str) -> Iterator[Conversation]:
    """The conversations of a content; when they end, again from the first one.

    Made-up text is another one for every owner and each time, so that a server cannot know it
    from elsewhere; what the conversations of one round share, they share in every round.
    """
    texts = texts_of(content)
    for round_number in itertools.count():
        prefix = f"{owner}{round_number}/" if round_number else f"{owner}/"
        for conversation in content.conversations(seed):
            yield tuple(_owned(draft, prefix, texts) for draft in conversation)


def _owned(draft: Draft, prefix: str, texts: Mapping[str, str]) -> Draft:
    prompt = tuple(
        piece if piece.key in texts else piece._replace(key=prefix + piece.key)
        for piece in draft.prompt
    )
    return draft._replace(prompt=prompt)


def cut(prompt: tuple[Piece, ...], tokens: int) -> tuple[Piece, ...]:
    """The first `tokens` tokens of a prompt: what it shares with others at its start stays."""
    kept: list[Piece] = []
    left = tokens
    for piece in prompt:
        if left <= 0:
            break
        kept.append(piece._replace(tokens=min(piece.tokens, left)))
        left -= piece.tokens
    return tuple(kept)
