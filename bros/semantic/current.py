"""The session that a `with` block is for."""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bros.semantic.client_session import Session

CURRENT: ContextVar[Session | None] = ContextVar("bros_semantic_session", default=None)
"""The only state outside objects: values are asked for without naming a session, as in the
Parrot paper's example. Each thread and task has its own; only `Session` changes it."""
