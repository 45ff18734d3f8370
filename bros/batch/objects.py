"""Records of files, batches and rows, the states of a batch, and the errors of batches.

```
 created ─▶ validating ─▶ in_progress ─▶ finalizing ─▶ completed
                │              │    └────────────────▶ expired
                │              ├──▶ cancelling ──────▶ cancelled
                │              └──▶ failed, after repeated failures of the server
                ├──▶ cancelling, expired
                └──▶ failed
```

A cancelled, expired or failed batch with rows is finalized like a completed one: answered rows go
to the output file, all others to the error file.
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
"""Most errors reported for one input file."""

DAY_S = 86_400
FILE_LIFE_S = 30 * DAY_S
"""Default lifetime of a batch's files."""


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
    """The record of a file. Times in Unix seconds.

    digest: SHA-256 of the content, and the name of the body on disk.
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
    """An error in an input file.

    line: counted from 1; None for the whole file.
    """

    code: str
    message: str
    param: str | None = None
    line: int | None = None


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Tokens of one row, or the sum over a batch.

    prompt_tokens: of prompts, cached ones included.
    cached_tokens: prompt tokens that were cached.
    output_tokens: generated tokens, reasoning included.
    reasoning_tokens: generated tokens that are reasoning.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: TokenUsage) -> TokenUsage:
        return TokenUsage(
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One batch. Fields as in the API, times in Unix seconds.

    served_model: only servers of this model run its rows.
    window: `completion_window` as the client wrote it.
    outcome: the final status, once finalizing has begun.
    rt_slowdown: see Slo.
    expected_at: when the runner last expected it to end; None if unknown.
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
    rt_slowdown: float | None = None
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
    """A row's place in the input file: bytes [offset, offset + length).

    line: counted from 1.
    rank: its position in the order of execution.
    """

    line: int
    custom_id: str
    offset: int
    length: int
    rank: int


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """The result of a row.

    ok: whether the result belongs in the output file, else in the error file.
    result: the line for that file, without a line break.
    """

    line: int
    ok: bool
    result: str
    usage: TokenUsage = TokenUsage()

    @property
    def num_bytes(self) -> int:
        """Of the line in the file, its line break included."""
        result = self.result
        size = len(result) if result.isascii() else len(result.encode("utf-8", "surrogatepass"))
        return size + 1


@dataclass(frozen=True, slots=True)
class Lease:
    """The right of one process to run a batch.

    epoch: rises with every claim, so writes under an older lease fail whatever the owner's clock
        says.
    """

    batch_id: str
    owner: str
    epoch: int


def is_storable(text: str) -> bool:
    """Whether a database can store it: lone surrogates are not UTF-8, PostgreSQL takes no NUL."""
    return "\0" not in text and not any("\ud800" <= char <= "\udfff" for char in text)


# ---- Errors.


class StoreFullError(BrosError):
    """The disk is full (HTTP 507). Nothing was stored."""


class StoreLimitError(StoreFullError):
    """The files and results of all tenants leave no room for more results (--max-file-bytes)."""


class StoreError(BrosError):
    """The store cannot be opened or used.

    for_clients: what is wrong, in words for clients; the message is for the log.
    """

    def __init__(self, message: str, for_clients: str | None = None) -> None:
        super().__init__(message)
        self.for_clients = for_clients or message


class StoreUnavailableError(StoreError):
    """The store cannot be reached or is busy; a retry may succeed."""


class LeaseLostError(BrosError):
    """Another process holds the lease of this batch; nothing was written."""


class RowPostponedError(BrosError):
    """The engine cannot accept a row now; try it again after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RowInterruptedError(BrosError):
    """The engine died or failed while it ran a row, which must run again."""


# ---- `completion_window`: OpenAI's 24h, and any other number of minutes, hours or days.


_WINDOW = re.compile(r"([1-9][0-9]{0,5})([mhd])")
_UNIT_S = (("m", 60), ("h", 3600), ("d", DAY_S))
MAX_WINDOW_S = 30 * DAY_S


def parse_window(text: str) -> int:
    """Seconds in `<n>m`, `<n>h` or `<n>d`, at most 30 days; raises InvalidRequestError."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * dict(_UNIT_S)[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequestError(
            f"{text[:50]!r} is not a completion window; use 24h, or a number of minutes, hours "
            "or days up to 30d, such as 90m.",
            param="completion_window",
            code="invalid_value",
        )
    return seconds
