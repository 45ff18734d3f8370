"""The requests of a run as plain data, which depends on a seed alone.

    Session      at_s |--- turn ---|  think_s  |--- turn ---| ...      open loop
    Backlog      request, request, request, ...   `in_flight` at a time: closed loop

Most sessions have one turn. A prompt is a sequence of pieces of text, each identified by a key:
prompts that begin with the same pieces share a prefix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from bros.core.request import ServiceClass, Slo


class Piece(NamedTuple):
    """`tokens` tokens of text. Equal keys mean equal text, up to the shorter length."""

    key: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One request.

    name: unique in a run.
    output_tokens: the exact output length if `forced`, else the maximum.
    slo: objectives to send to the server; empty: the server's defaults apply.
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


@dataclass(frozen=True, slots=True)
class BenchTenants:
    """Tenants that share the load of a run.

    shares: name -> its part of the requests of each class; of any sum.
    keys: name -> its API key.
    """

    shares: Mapping[str, float]
    keys: Mapping[str, str]

    def tenant_of(self, request: Planned) -> str:
        """Whose request it is: by its name, so that each run has the same requests of a tenant."""
        number = int.from_bytes(hashlib.sha256(request.name.encode()).digest()[:8], "big")
        left = number / 2**64 * sum(self.shares.values())
        for name, share in self.shares.items():
            left -= share
            if left < 0.0:
                return name
        return name


class SessionRequest(NamedTuple):
    """One turn of a session.

    request: what the turn sends.
    think_s: seconds between the end of the previous response and this request; the first turn is
        sent when the session begins.
    """

    request: Planned
    think_s: float = 0.0


class Session(NamedTuple):
    """Consecutive requests of one user.

    at_s: begin, in seconds after the start of the run.
    """

    at_s: float
    turns: tuple[SessionRequest, ...]


class Backlog(Protocol):
    """Closed-loop load: `in_flight` requests at a time, 0 for none."""

    @property
    def label(self) -> str: ...

    @property
    def in_flight(self) -> int: ...

    def requests(self, seed: int) -> Iterator[Planned]:
        """Endless."""
        ...


def digest(sessions: Sequence[Session], backlog: Sequence[Planned]) -> str:
    """A hash of everything but the objectives: equal hashes mean equal requests.

    Objectives do not change the work, and not every server takes them.
    """
    hashed = hashlib.sha256()
    for session in sessions:
        # The form of earlier versions, so that equal requests have equal digests in old results.
        turns = "".join(
            f"Turn(request={_without_slo(turn.request)}, think_s={turn.think_s!r}), "
            for turn in session.turns
        )
        ends = 1 if len(session.turns) == 1 else 2  # as in the repr of a tuple
        hashed.update(f"Session(at_s={session.at_s!r}, turns=({turns[:-ends]}))".encode())
    for request in backlog:
        hashed.update(_without_slo(request).encode())
    return hashed.hexdigest()


def _without_slo(request: Planned) -> str:
    """Its repr as in earlier versions, whose Slo had three fields."""
    return repr(replace(request, slo=Slo())).replace(f"slo={Slo()}", _EMPTY_SLO)


_EMPTY_SLO = "slo=Slo(ttft_s=None, tpot_s=None, deadline_s=None)"
