"""What is going to be sent, before anything is: plain data that depends on a seed alone.

    Session      at_s |--- turn ---|  think_s  |--- turn ---| ...      comes by itself (open loop)
    Backlog      request, request, request, ...   so many are in flight (closed loop)

Most sessions have one turn. A prompt is a sequence of pieces of text that are known by a key:
requests whose prompts begin with the same pieces begin with the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from bros.core.request import ServiceClass, Slo


class Piece(NamedTuple):
    """`tokens` tokens of text; equal keys and lengths are equal text."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request.

    name: unique in a run.
    output_tokens: exactly so many if `forced`, else at most.
    slo: what to ask the server for; empty leaves it to the server's defaults.
    """

    name: str
    service_class: ServiceClass
    prompt: tuple[Piece, ...]
    output_tokens: int
    forced: bool = True
    slo: Slo = Slo()

    @property
    def prompt_tokens(self) -> int:
        return sum(piece.tokens for piece in self.prompt)


class Turn(NamedTuple):
    """A request that is sent `think_s` seconds after the answer before it has ended.

    The first turn of a session is sent when the session begins.
    """

    request: Planned
    think_s: float = 0.0


class Session(NamedTuple):
    """Requests that follow each other; begins `at_s` seconds after the start of the run."""

    at_s: float
    turns: tuple[Turn, ...]


class Workload(Protocol):
    """Sessions that come by themselves."""

    @property
    def label(self) -> str:
        """For people, e.g. `lmsys, 0.25 req/s`."""
        ...

    def sessions(self, duration_s: float, seed: int) -> Sequence[Session]:
        """All that begin before `duration_s`, sorted by time."""
        ...


class Backlog(Protocol):
    """Work of which always so much is in flight. in_flight: requests, 0 for none."""

    @property
    def label(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    def requests(self, seed: int) -> Iterator[Planned]:
        """Endless."""
        ...


def digest(sessions: Sequence[Session], backlog: Sequence[Planned]) -> str:
    """A hash of everything but objectives: equal only if plans are the same to the byte.

    Objectives do not change what there is to do, and not every server is told of them.
    """
    hashed = hashlib.sha256()
    for session in sessions:
        turns = tuple(turn._replace(request=_without_slo(turn.request)) for turn in session.turns)
        hashed.update(repr(session._replace(turns=turns)).encode())
    for request in backlog:
        hashed.update(repr(_without_slo(request)).encode())
    return hashed.hexdigest()


def _without_slo(request: Planned) -> Planned:
    return replace(request, slo=Slo())
