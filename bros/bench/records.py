"""What became of one request, by the client's own clock.

    due_s          sent_s       chunks                            end_s
      |--- lag ------|--- ttft ---|-- gap --|-- gap --| ... --------|

All times are seconds after the start of the run. Requests that fail are records like others.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from bros.bench.plan import Planned


class Outcome(StrEnum):
    """How a request ended.

    COMPLETED: with a finish reason and all its tokens. CUT: the stream ended, or the answer has
    fewer tokens than were forced. REFUSED: 429 or 503. FAILED: another status, an error event,
    something that is no answer, or a broken connection. OPEN: still running at the end.
    """

    COMPLETED = "completed"
    CUT = "cut"
    REFUSED = "refused"
    FAILED = "failed"
    OPEN = "open"


@dataclass(slots=True)
class Record:
    """One request.

    due_s: when it was to be sent; sent_s: when it was (None: never). chunk_times_s: when each
    piece of text (or, without text, each token) came. prompt_tokens, output_tokens,
    cached_tokens: as the server counts them in `usage`; None if it does not say.
    tier: the service tier that the answer names. detail: why it was not completed, for people.
    """

    planned: Planned
    due_s: float
    sent_s: float | None = None
    chunk_times_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: float | None = None
    outcome: Outcome = Outcome.OPEN
    status: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    tier: str | None = None
    detail: str | None = None
