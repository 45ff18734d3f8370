"""What can go wrong with files and batches, in the caller's terms."""

from __future__ import annotations

from bros.core.errors import BrosError


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
