"""Plans made for larger models, fitted to the context of the one at hand; every change counted.

First all lengths are multiplied by one factor (1 leaves them), then what is still too long is
cut or left out:

    factor   the end of every piece moves from token n of its prompt to floor(n x factor), an
             answer becomes floor(tokens x factor); the last piece and the answer keep 1 at
             least. Prompts that began with the same pieces still do, and differ after them
    CLIP     the longer of prompt and answer gives way until both fit, at most down to half the
             limit, then the other one too; prompts lose their end, which is where requests with
             a common prefix differ: scale those
    SKIP     the request is left out; of a session, also all that come after it
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from bros.bench.plan import Backlog, Piece, Planned, Session, Turn
from bros.bench.workloads.contents import cut, texts_of
from bros.core.errors import ConfigError

_MOST_IN_VAIN = 10_000


class Overlong(StrEnum):
    """What becomes of a request whose prompt and answer exceed the limit together."""

    CLIP = "clip"
    SKIP = "skip"


@dataclass(slots=True)
class FitCounts:
    """requests: seen. scaled: shorter because of the factor. clipped, skipped: too long (after
    scaling); skipped includes the later turns of their sessions. sessions: left out entirely."""

    requests: int = 0
    scaled: int = 0
    clipped: int = 0
    skipped: int = 0
    sessions: int = 0


class Fitted(NamedTuple):
    sessions: list[Session]
    counts: FitCounts


class Fitter:
    """Fits one request after the other and counts.

    limit: tokens of prompt and answer together, at least 2. factor: in (0, 1]. Raises ConfigError
    for others.
    """

    def __init__(self, limit: int, overlong: Overlong, factor: float = 1.0) -> None:
        if limit < 2:
            raise ConfigError(f"no request fits a limit of {limit} tokens")
        if not 0 < factor <= 1:
            raise ConfigError(f"lengths can be scaled by more than 0 and at most 1, not {factor}")
        self.limit = limit
        self._overlong = overlong
        self._factor = factor
        self.counts = FitCounts()

    def request(self, planned: Planned) -> Planned | None:
        """As it fits; None if it is skipped."""
        self.counts.requests += 1
        fitted = self._scale(planned)
        if fitted != planned:
            self.counts.scaled += 1
        if _total(fitted) <= self.limit:
            return fitted
        if self._overlong is Overlong.SKIP:
            self.counts.skipped += 1
            return None
        self.counts.clipped += 1
        return self._clip(fitted)

    def session(self, session: Session) -> Session | None:
        """With the turns that fit; None if not even the first does."""
        turns: list[Turn] = []
        for turn in session.turns:
            request = self.request(turn.request)
            if request is None:
                left_out = len(session.turns) - len(turns) - 1
                self.counts.requests += left_out
                self.counts.skipped += left_out
                break
            turns.append(turn._replace(request=request))
        if not turns:
            self.counts.sessions += 1
            return None
        return session._replace(turns=tuple(turns))

    def _scale(self, planned: Planned) -> Planned:
        if self._factor == 1.0:
            return planned
        pieces: list[Piece] = []
        whole, end, scaled_end = planned.prompt_tokens, 0, 0
        for piece in planned.prompt:
            end += piece.tokens
            start, scaled_end = scaled_end, self._scaled(end)
            if end == whole:  # the last one
                scaled_end = max(scaled_end, start + 1)
            if scaled_end > start:
                pieces.append(piece._replace(tokens=scaled_end - start))
        return dataclasses.replace(
            planned,
            prompt=tuple(pieces),
            output_tokens=max(1, self._scaled(planned.output_tokens)),
        )

    def _scaled(self, tokens: int) -> int:
        return math.floor(tokens * self._factor)

    def _clip(self, planned: Planned) -> Planned:
        half = self.limit // 2
        output_tokens = min(planned.output_tokens, max(half, self.limit - planned.prompt_tokens))
        return dataclasses.replace(
            planned,
            prompt=cut(planned.prompt, self.limit - output_tokens),
            output_tokens=output_tokens,
        )


def fit(sessions: Iterable[Session], limit: int, overlong: Overlong, factor: float = 1.0) -> Fitted:
    """Sessions none of whose requests has more than `limit` tokens in prompt and answer.

    What the server adds to a prompt (a chat template, a first token) is not counted here: take it
    off the limit (Prompts.added_tokens). Raises ConfigError if limit or factor is impossible.
    """
    fitter = Fitter(limit, overlong, factor)
    fitted = [fitter.session(session) for session in sessions]
    return Fitted([session for session in fitted if session is not None], fitter.counts)


def factor_for(sessions: Sequence[Session], limit: int) -> float:
    """A factor (at most 1) with which all requests fit `limit` tokens; 1 if they do anyway."""
    totals = (_total(turn.request) for session in sessions for turn in session.turns)
    longest = max(totals, default=0)
    # One token less, because a last piece keeps one where it would have none.
    return 1.0 if longest <= limit else (limit - 1) / longest


@dataclass(frozen=True, slots=True)
class FittedBacklog:
    """A plan.Backlog whose requests are all fitted.

    counts: of all requests that have been taken so far.
    """

    backlog: Backlog
    fitter: Fitter

    @property
    def label(self) -> str:
        return self.backlog.label

    @property
    def in_flight(self) -> int:
        return self.backlog.in_flight

    @property
    def counts(self) -> FitCounts:
        return self.fitter.counts

    @property
    def texts(self) -> Mapping[str, str]:
        return texts_of(self.backlog)

    def requests(self, seed: int) -> Iterator[Planned]:
        """Endless; raises ConfigError when next to nothing of the backlog fits."""
        in_vain = 0
        for planned in self.backlog.requests(seed):
            fitted = self.fitter.request(planned)
            if fitted is not None:
                in_vain = 0
                yield fitted
                continue
            in_vain += 1
            if in_vain == _MOST_IN_VAIN:
                raise ConfigError(
                    f"{self.label}: {in_vain} requests after each other are too long for "
                    f"{self.fitter.limit} tokens; clip or scale them"
                )


def _total(planned: Planned) -> int:
    return planned.prompt_tokens + planned.output_tokens
