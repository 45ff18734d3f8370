"""All that is known of the replicas, and the one place where it changes. Pure: no time, no tasks.

route(requests) -> decisions -> begun -> ended        one request
take(notice)                                          what replicas say of their caches
add, remove, set_draining                             which replicas there are
"""

from __future__ import annotations

from collections.abc import Sequence

from bros.core.interfaces import Notice
from bros.core.request import EngineRequest
from bros.router.settings import Decision, ReplicaFacts


class Fleet:
    """Times are seconds of one clock that never goes back."""

    def add(self, facts: ReplicaFacts, now: float) -> int:
        """One more replica, with an empty cache; its number, which is never used again."""
        raise NotImplementedError

    def remove(self, replica: int) -> list[str]:
        """A replica is lost, with all that it had; the ids of requests that were open there."""
        raise NotImplementedError

    def set_draining(self, replica: int, draining: bool) -> None:
        """Nothing new goes there, or it does again."""
        raise NotImplementedError

    def route(
        self, requests: Sequence[EngineRequest], now: float, avoid: frozenset[int] = frozenset()
    ) -> list[Decision]:
        """Where requests that have come at once go, one decision each, in their order.

        avoid: replicas that have just refused them. Raises EngineDeadError if there is no replica.
        """
        raise NotImplementedError

    def begun(self, request_id: str, cached_tokens: int, now: float) -> None:
        """Its first token has come: its prompt is cached where it runs."""
        raise NotImplementedError

    def ended(
        self, request_id: str, output_ids: Sequence[int], now: float, *, cached: bool = True
    ) -> None:
        """It is over. cached: prompt and answer stay where it ran (it was not aborted)."""
        raise NotImplementedError

    def take(self, replica: int, notice: Notice, now: float) -> None:
        """What a replica says. In any order, twice, or not at all: a digest puts it right."""
        raise NotImplementedError
