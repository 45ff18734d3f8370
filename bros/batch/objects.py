"""Files, batches and rows as the store keeps them, and the states of a batch.

```
 created ─▶ validating ─▶ in_progress ─▶ finalizing ─▶ completed
                │              │    └────────────────▶ expired
                │              ├──▶ cancelling ──────▶ cancelled
                │              └──▶ failed, if the server fails at it
                ├──▶ cancelling, expired
                └──▶ failed
```

A batch with rows that is cancelling, out of time or failed is wound up the same way as one that is
done: what was answered is in the output file, everything else in the error file.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bros.core.errors import BrosError, InvalidRequestError

MAX_ROWS = 50_000
MAX_INPUT_BYTES = 200 * 2**20
MAX_LINE_BYTES = 4 * 2**20
MAX_ERRORS = 100
"""Most errors that are listed of one input file."""

DAY_S = 86_400
FILE_LIFE_S = 30 * DAY_S
"""After which batch files are deleted, unless the client says otherwise."""


class BatchStatus(enum.StrEnum):
    """The values of `status` in the API."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset(
    {BatchStatus.FAILED, BatchStatus.COMPLETED, BatchStatus.EXPIRED, BatchStatus.CANCELLED}
)
OPEN_STATUSES = tuple(status for status in BatchStatus if status not in _FINAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file. Times in Unix seconds.

    digest: of its content, which names the body.
    """

    id: str
    tenant: str
    digest: str
    num_bytes: int
    filename: str
    purpose: str
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class LineError:
    """What is wrong with an input file.

    line: counted from 1; None if it is about the whole.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one row or, added up, of a batch."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One job. Fields as in the API, times in Unix seconds.

    served_model: of the servers that may run its rows.
    window: `completion_window` as the client wrote it.
    outcome: what it will end as, once it is wound up.
    expected_at: when it is likely to be done, as the runner last saw it; None before that is known.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    input_digest: str
    window: str
    status: BatchStatus
    created_at: int
    expires_at: int
    served_model: str = ""
    outcome: BatchStatus | None = None
    model: str | None = None
    metadata: Mapping[str, str] | None = None
    output_life_s: int | None = None
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    expected_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    usage: TokenUsage = field(default_factory=TokenUsage)


@dataclass(frozen=True, slots=True)
class RowRef:
    """Where one row of an input file is.

    rank: its place in the order of execution.
    """

    line: int
    custom_id: str
    offset: int
    length: int
    rank: int


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What became of a row.

    result: its line of the output or error file, without line break.
    """

    line: int
    ok: bool
    result: str
    usage: TokenUsage = TokenUsage()


@dataclass(frozen=True, slots=True)
class Lease:
    """The right to work on a batch.

    epoch: rises with every owner, so a former one can write nothing any more, whatever its clock
        says.
    """

    batch_id: str
    owner: str
    epoch: int


def is_storable(text: str) -> bool:
    """Half surrogates are not UTF-8, and databases do not take NUL."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


# ---- What can go wrong with files and batches, in the caller's terms.


class StoreFullError(BrosError):
    """There is no room for a file or a result (HTTP 507). Nothing of it was kept."""


class StoreError(BrosError):
    """The store cannot be opened or used."""


class StoreUnavailableError(StoreError):
    """It cannot be reached or is busy; what was asked of it may work later."""


class QuotaError(BrosError):
    """A tenant has as much queued as it may (HTTP 429)."""


class LeaseLostError(BrosError):
    """Another process works on this batch now; nothing was written."""


class RowPostponedError(BrosError):
    """A row cannot be taken now, through no fault of its own."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RowInterruptedError(BrosError):
    """A row has to be run again: what ran it came to an end."""


# ---- `completion_window`: 24h as OpenAI has it, and any other length of time.


_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNIT_S = (("m", 60), ("h", 3600), ("d", DAY_S))
MAX_WINDOW_S = 30 * DAY_S


def parse_window(text: str) -> int:
    """Seconds in `<n>m`, `<n>h` or `<n>d`, at most 30 days; raises InvalidRequestError."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * dict(_UNIT_S)[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequestError(
            f"{text[:50]!r} is no completion window; write 24h, or a number of minutes, hours "
            "or days up to 30d, such as 90m.",
            param="completion_window",
            code="invalid_value",
        )
    return seconds
