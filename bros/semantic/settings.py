"""What a service of sessions is told."""

from __future__ import annotations

from dataclasses import dataclass

from bros.semantic.program import Criteria
from bros.semantic.retention import SessionLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """Limits and times, all in seconds.

    ttl_s: how long an idle session lives; max_ttl_s: the most that a client may ask for.
    max_sessions: of the service. max_calls: of a session that are not over; kept_calls: that are,
    and are remembered. max_variables and max_chars: of a session, the latter of all values, and of
    all templates.
    max_labels: of a session, see SessionLimits; that many take a second or two of the processor,
    in slices.
    max_waiting: gets and streams that wait, of the service. max_wait_s: after which a get without
    a timeout of its own gives up.
    criteria: of sessions that do not say. max_tokens: of outputs without a limit of their own; a
    program does not look at what it gets, so it should not go on to the end of the context.
    park_s: how long KV is kept for a later turn of a call, or for a value that is on its way.
    retries: how often a turn is begun anew after the engine died, if it gives the same again;
    recovery_s: how long the engine may take to come back. patience_s: how long a turn waits
    for room in an engine that refuses it.
    max_gone: ids of past sessions that are remembered.
    """

    ttl_s: float = 600.0
    max_ttl_s: float = 86_400.0
    max_sessions: int = 1000
    max_calls: int = 10_000
    kept_calls: int = 2_000
    max_variables: int = 50_000
    max_chars: int = 50_000_000
    max_labels: int = 100_000
    max_waiting: int = 10_000
    max_wait_s: float = 3600.0
    criteria: Criteria = Criteria()
    max_tokens: int = 256
    park_s: float = 60.0
    retries: int = 2
    recovery_s: float = 60.0
    patience_s: float = 600.0
    max_gone: int = 10_000

    def limits(self) -> SessionLimits:
        """Those of one session."""
        return SessionLimits(
            max_calls=self.max_calls,
            kept_calls=self.kept_calls,
            max_variables=self.max_variables,
            max_value_chars=self.max_chars,
            max_labels=self.max_labels,
        )
