"""The seam between the packing loop and a policy."""

from __future__ import annotations

from typing import Protocol

from bros.scheduler.state import Rank, RequestState


class Policy(Protocol):
    """Decides who goes first. Must not depend on anything that changes while a request waits."""

    @property
    def name(self) -> str: ...

    def rank(self, state: RequestState) -> Rank:
        """Lower runs first, higher is preempted first; no two requests share a rank."""
        ...
