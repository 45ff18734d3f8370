"""All sessions of a server: who may see them, how long they live, and waiting for their values."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bros.core.clock import Clock
from bros.core.ids import IdGenerator
from bros.core.interfaces import EngineClient
from bros.core.request import Hints, ServiceClass
from bros.engine.generation import TextGenerator
from bros.engine.tokenizer import Tokenizer
from bros.semantic.program import CallSpec, Criteria, SubmittedCall
from bros.semantic.views import SessionFigures, SessionView, VariableView


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """ttl_s: how long an idle session lives; max_ttl_s: the most that a client may ask for.
    max_sessions: of the service; max_calls: of a session, over its whole life; max_variables and
    max_chars: of a session, its texts in all. max_waiting: gets and streams that wait, of the
    service. max_wait_s: after which a get without a timeout of its own gives up.
    max_tokens: of outputs without a limit of their own. park_s: how long KV that the next turn
    of a call needs is kept. retries: how often a turn is begun anew after the engine died;
    recovery_s: how long it may take to come back. patience_s: how long a turn may be refused for
    want of capacity. max_gone: ids of past sessions that are remembered.
    """

    ttl_s: float = 600.0
    max_ttl_s: float = 86_400.0
    max_sessions: int = 1000
    max_calls: int = 10_000
    max_variables: int = 50_000
    max_chars: int = 50_000_000
    max_waiting: int = 10_000
    max_wait_s: float = 3600.0
    max_tokens: int = 256
    park_s: float = 60.0
    retries: int = 2
    recovery_s: float = 60.0
    patience_s: float = 600.0
    max_gone: int = 10_000
    default_criteria: Criteria = field(default_factory=Criteria)


class Joined:
    """A request of a plain client that is recorded as a call of a session.

    Of `finished`, `failed` and `cancelled` the first one counts; one of them must be called.
    """

    request_id: str
    hints: Hints

    def accepted(self, service_class: ServiceClass) -> None:
        """The engine has taken it."""
        raise NotImplementedError

    def first_token(self) -> None:
        """It has begun to answer."""
        raise NotImplementedError

    def finished(
        self, text: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """The whole answer is there."""
        raise NotImplementedError

    def failed(self, message: str) -> None:
        """It was refused, or the engine failed."""
        raise NotImplementedError

    def cancelled(self) -> None:
        """The client left."""
        raise NotImplementedError


class SessionService:
    """One per server. Not thread-safe: everything on one event loop.

    A session of another tenant is not there: NotFoundError (code session_not_found). One that was
    deleted or has expired: SessionGoneError, as long as its id is remembered.
    """

    def __init__(
        self,
        generator: TextGenerator,
        engine: EngineClient,
        tokenizer: Tokenizer,
        clock: Clock,
        ids: IdGenerator,
        settings: SessionSettings,
    ) -> None:
        raise NotImplementedError

    async def run(self) -> None:
        """End sessions that have expired, until cancelled; then all that are left."""
        raise NotImplementedError

    def create(
        self,
        tenant: str,
        *,
        criteria: Criteria | None = None,
        ttl_s: float | None = None,
        scope: str = "",
        session_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> SessionView:
        """Open a session.

        criteria, sampling: for what does not say otherwise. ttl_s: at most max_ttl_s. scope:
        sessions of one tenant with the same one share what is computed of values, too; without
        one they share only what templates begin with. session_id: a name of the client's; after
        the session with it has ended, it may be used for another.
        Raises ConflictError (already_exists), InvalidRequestError, SessionLimitError.
        """
        raise NotImplementedError

    def ensure(self, tenant: str, session_id: str) -> None:
        """Like `join`: what begins with "sess-" must be there, others come into being.

        Raises NotFoundError, SessionGoneError, SessionLimitError.
        """
        raise NotImplementedError

    def sessions(self, tenant: str) -> list[SessionView]:
        """Those of a tenant, oldest first, without calls and variables."""
        raise NotImplementedError

    def inspect(self, tenant: str, session_id: str) -> SessionView:
        """With its graph. Does not count as activity."""
        raise NotImplementedError

    async def delete(self, tenant: str, session_id: str) -> SessionView:
        """End it: what runs is stopped, who waits gets SessionGoneError, its KV is given back.
        Returns when all of that has happened, with what it was."""
        raise NotImplementedError

    def submit(
        self, tenant: str, session_id: str, calls: Sequence[CallSpec]
    ) -> list[SubmittedCall]:
        """Add calls, all or none. They run when a value is wanted that needs them.

        Raises InvalidRequestError (param such as "requests[2].parameters[0].name"), ConflictError
        (already_produced, already_set, cyclic), SessionLimitError.
        """
        raise NotImplementedError

    def declare(
        self,
        tenant: str,
        session_id: str,
        name: str,
        value: str | None = None,
        variable_id: str | None = None,
    ) -> VariableView:
        """A new variable, with its value if it has one. ConflictError (already_exists)."""
        raise NotImplementedError

    def set(self, tenant: str, session_id: str, variable_id: str, value: str) -> VariableView:
        """Give a variable its value, once. ConflictError (already_set, already_produced)."""
        raise NotImplementedError

    def fail(self, tenant: str, session_id: str, request_id: str, message: str) -> None:
        """A native function failed on the client. InvalidRequestError if it is no native call."""
        raise NotImplementedError

    def variable(self, tenant: str, session_id: str, variable_id: str) -> VariableView:
        """As it is now. NotFoundError (variable_not_found)."""
        raise NotImplementedError

    def variables(self, tenant: str, session_id: str) -> list[VariableView]:
        """All, in the order in which they came into being."""
        raise NotImplementedError

    def want(
        self, tenant: str, session_id: str, variable_id: str, criteria: Criteria | None = None
    ) -> VariableView:
        """Begin what it needs, or hurry it up, without waiting. None: the session's criteria."""
        raise NotImplementedError

    async def get(
        self,
        tenant: str,
        session_id: str,
        variable_id: str,
        criteria: Criteria | None = None,
        timeout_s: float | None = None,
    ) -> VariableView:
        """`want` it and wait for the value.

        Raises UpstreamError, GetTimeoutError, SessionGoneError, NotFoundError, SessionLimitError.
        """
        raise NotImplementedError

    def stream(
        self, tenant: str, session_id: str, variable_id: str, criteria: Criteria | None = None
    ) -> AsyncIterator[str]:
        """`want` it; its value in pieces as they come, or at once where it has a transform.

        Raises NotFoundError, SessionGoneError and SessionLimitError right away; UpstreamError,
        GetTimeoutError and SessionGoneError from the iterator. Leave it early with `aclose`.
        """
        raise NotImplementedError

    def cancel(self, tenant: str, session_id: str, request_id: str) -> None:
        """Stop a call; what needs its outputs fails. Nothing happens to one that has ended."""
        raise NotImplementedError

    def join(self, tenant: str, session_id: str, node_name: str = "") -> Joined:
        """Record a request that a plain client is about to make as a call of a session.

        An id that begins with "sess-" must be there, any other comes into being.
        Raises NotFoundError, SessionGoneError, SessionLimitError.
        """
        raise NotImplementedError

    def figures(self) -> SessionFigures:
        """For metrics."""
        raise NotImplementedError
