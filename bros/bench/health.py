"""Whether a client disturbed what it measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientHealth:
    """Whether the client kept its own schedule.

    lateness: sent minus due, of the requests of sessions (0 without any); None if not known.
    cpu_share: of all cores, used by the client's process. fell_behind: p99 was too late.
    """

    lateness_p50_s: float | None
    lateness_p99_s: float | None
    lateness_max_s: float | None
    cpu_share: float
    fell_behind: bool
