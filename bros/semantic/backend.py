"""What the front end talks to: a server over HTTP, or an engine in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Protocol

from bros.semantic.program import CallSpec, Criteria, SubmittedCall


class Backend(Protocol):
    """The operations of SessionService, which says what they mean, for one tenant.

    All raise what it raises, and ServerUnreachableError.
    """

    async def create(
        self,
        criteria: Criteria | None,
        ttl_s: float | None,
        tenant: str,
        metadata: Mapping[str, str],
    ) -> str:
        """Returns the id of the session."""
        ...

    async def submit(
        self, session_id: str, calls: Sequence[CallSpec], key: str
    ) -> Sequence[SubmittedCall]: ...

    async def declare(
        self, session_id: str, variable_id: str, name: str, value: str | None
    ) -> None: ...

    async def set(self, session_id: str, variable_id: str, value: str) -> None: ...

    async def fail(self, session_id: str, request_id: str, message: str) -> None: ...

    async def want(self, session_id: str, variable_id: str, criteria: Criteria) -> None: ...

    async def get(
        self, session_id: str, variable_id: str, criteria: Criteria, timeout_s: float
    ) -> str: ...

    def stream(
        self, session_id: str, variable_id: str, criteria: Criteria
    ) -> AsyncGenerator[str, None]: ...

    async def cancel(self, session_id: str, request_id: str) -> None: ...

    async def inspect(self, session_id: str) -> Mapping[str, Any]:
        """The session with its calls and variables, as GET /v1/sessions/{id} answers."""
        ...

    async def delete(self, session_id: str) -> None: ...
