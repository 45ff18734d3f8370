"""Which sessions there are, whose they are, and which there have been."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from bros.core.errors import NotFoundError
from bros.semantic.errors import SessionGoneError
from bros.semantic.live import LiveSession

GENERATED_PREFIX = "sess-"
"""What ids begin with that the service makes up itself; they are never used again."""


class SessionRegistry:
    """Open sessions by tenant and id; of past ones the ids, the latest."""

    def __init__(self, max_gone: int) -> None:
        self._max_gone = max_gone
        self._open: dict[tuple[str, str], LiveSession] = {}
        self._gone: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[LiveSession]:
        return iter(tuple(self._open.values()))

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._open

    def of_tenant(self, tenant: str) -> Sequence[LiveSession]:
        """In the order in which they came into being."""
        return [session for (owner, _), session in self._open.items() if owner == tenant]

    def dispensable(self, tenant: str) -> LiveSession | None:
        """The longest idle of those that plain clients alone have used: of this tenant, or, if it
        has none, of anybody."""
        idle = [session for session in self if session.only_plain and not session.busy]
        own = [session for session in idle if session.tenant == tenant]
        return min(own or idle, key=lambda session: session.touched_s, default=None)

    def add(self, session: LiveSession) -> None:
        key = session.tenant, session.id
        assert key not in self._open
        self._open[key] = session
        self._gone.pop(key, None)

    def remove(self, session: LiveSession, why: str) -> None:
        """It is no longer there, as whoever asks for it is told."""
        key = session.tenant, session.id
        session.gone = why
        del self._open[key]
        self._gone[key] = why
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def find(self, tenant: str, session_id: str) -> LiveSession:
        """Raises NotFoundError or SessionGoneError."""
        session = self._open.get((tenant, session_id))
        if session is not None:
            return session
        why = self._gone.get((tenant, session_id))
        if why is not None:
            raise gone(session_id, why)
        raise NotFoundError(
            f"There is no session {session_id[:200]!r}.", "session_id", "session_not_found"
        )


def gone(session_id: str, why: str) -> SessionGoneError:
    """What to tell who asks for a past session. why: a sentence about it."""
    return SessionGoneError(f"The session {session_id!r} is gone: {why}")
