"""All sessions of a server: which there are, how long they live, and waiting for their values."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any

from bros.core.clock import Clock
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.interfaces import EngineClient
from bros.core.request import IdGenerator
from bros.semantic.core.nodes import LlmCall, NewCall, OutputPiece, Variable, open_ancestors
from bros.semantic.core.prompt import Begun, Prompt, PromptSharing
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.core.submission import Submission, Submitter, check_sampling
from bros.semantic.errors import (
    ConflictError,
    GetTimeoutError,
    SessionGoneError,
    SessionLimitError,
    UpstreamError,
)
from bros.semantic.schema import (
    CallKind,
    CallSpec,
    Criteria,
    SessionFigures,
    SessionSummary,
    SessionView,
    SubmittedCall,
    VariableView,
)
from bros.semantic.service.live import (
    CallRecord,
    Readers,
    ServedSession,
    SessionSettings,
    view_session,
    view_summary,
    view_variable,
)
from bros.semantic.service.runner import Joined, ProgramRunner
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer

GENERATED_PREFIX = "sess-"
"""What ids begin with that the service makes up itself; they are never used again."""


class SessionRegistry:
    """Open sessions by tenant and id; of past ones the ids, the latest."""

    def __init__(self, max_gone: int) -> None:
        self._max_gone = max_gone
        self._open: dict[tuple[str, str], ServedSession] = {}
        self._gone: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ServedSession]:
        return iter(tuple(self._open.values()))

    def __contains__(self, key: tuple[str, str]) -> bool:
        return key in self._open

    def of_tenant(self, tenant: str) -> Sequence[ServedSession]:
        """In the order in which they came into being."""
        return [session for (owner, _), session in self._open.items() if owner == tenant]

    def dispensable(self, tenant: str) -> ServedSession | None:
        """The longest idle of those that plain clients alone have used: of this tenant, or, if it
        has none, of any tenant."""
        idle = [session for session in self if session.only_plain and not session.busy]
        own = [session for session in idle if session.tenant == tenant]
        return min(own or idle, key=lambda session: session.touched_s, default=None)

    def add(self, session: ServedSession) -> None:
        key = session.tenant, session.id
        assert key not in self._open
        self._open[key] = session
        self._gone.pop(key, None)

    def remove(self, session: ServedSession, why: str) -> None:
        """Remove it; `why` is told to clients that ask for it."""
        key = session.tenant, session.id
        session.gone = why
        del self._open[key]
        self._gone[key] = why
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)

    def find(self, tenant: str, session_id: str) -> ServedSession:
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
    """The error for a past session. why: a sentence about it."""
    return SessionGoneError(f"The session {session_id!r} is gone: {why}")


class Opener:
    """Makes sessions; keeps none of them."""

    def __init__(
        self,
        engine: EngineClient,
        clock: Clock,
        ids: IdGenerator,
        settings: SessionSettings,
        estimate: Callable[[str, LlmCall], float],
    ) -> None:
        """estimate: seconds that an LLM call of a tenant will take."""
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._estimate = estimate

    def open(
        self, tenant: str, session_id: str | None, *, scope: str, **fields: Any
    ) -> ServedSession:
        """A session under an id that never was there before, or under `session_id`.

        scope: see SessionService.create. fields: the others of ServedSession.
        """
        uid, now = self._ids.new("sess"), self._clock.now()
        sharing = PromptSharing(
            model=self._engine.info.model,
            cache_salt=tenant,
            private_salt=f"scope:{scope}" if scope else uid,
        )
        estimate = functools.partial(self._estimate, tenant)
        return ServedSession(
            id=session_id or uid,
            uid=uid,
            tenant=tenant,
            scope=scope,
            created_s=now,
            created_unix_s=self._clock.unix_time(),
            touched_s=now,
            machine=SessionStateMachine(uid, estimate=estimate, limits=self._settings.limits()),
            sharing=sharing,
            begun=Begun(self._engine.info.block_size),
            **fields,
        )


_MAX_SHOWN = 5


class WaitingRoom:
    """All who wait for variables, in any session of a service."""

    def __init__(self, clock: Clock, settings: SessionSettings) -> None:
        self._clock = clock
        self._settings = settings
        self._count = 0

    def check(self) -> None:
        """Raises SessionLimitError if there is no room for one more."""
        if self._count >= self._settings.max_waiting:
            raise SessionLimitError(f"{self._count} requests already wait for values.")

    async def value(
        self, session: ServedSession, variable: Variable, timeout_s: float | None
    ) -> None:
        """Returns when the variable has its value.

        Raises UpstreamError, GetTimeoutError, SessionGoneError.
        """
        timeout_s = self._bounded(timeout_s)
        with self._reading(session, session.settled, variable) as news:
            try:
                async with asyncio.timeout(timeout_s):
                    while variable.pending:
                        await news.wait()
                        news.clear()
            except TimeoutError:
                message = f"The variable {variable.id!r} had no value within {timeout_s:g} s."
                raise GetTimeoutError(message + _unset(variable)) from None
        check_settled(session, variable)

    async def pieces(self, session: ServedSession, variable: Variable) -> AsyncGenerator[str, None]:
        """The value in pieces, as they come. Raises what `value` does."""
        sent = 0
        give_up_s = self._clock.now() + self._settings.max_wait_s
        with self._reading(session, session.streamed, variable) as news:
            while variable.pending:
                text = _text_so_far(session, variable)
                if len(text) > sent:
                    piece, sent = text[sent:], len(text)
                    yield piece
                    continue
                try:
                    async with asyncio.timeout(give_up_s - self._clock.now()):
                        await news.wait()
                except TimeoutError:
                    message = f"The variable {variable.id!r} had no value in time."
                    raise GetTimeoutError(message + _unset(variable)) from None
                news.clear()
            check_settled(session, variable)
        assert variable.text is not None
        if len(variable.text) > sent:
            yield variable.text[sent:]

    def _bounded(self, timeout_s: float | None) -> float:
        most = self._settings.max_wait_s
        if timeout_s is None:
            return most
        if not timeout_s >= 0.0:
            raise InvalidRequestError(f"timeout must be at least 0, got {timeout_s!r}.", "timeout")
        return min(timeout_s, most)

    @contextlib.contextmanager
    def _reading(
        self, session: ServedSession, readers: Readers, variable: Variable
    ) -> Iterator[asyncio.Event]:
        self._count += 1
        try:
            with readers.reading(variable) as news:
                yield news
        finally:
            self._count -= 1
            session.touched_s = self._clock.now()


def check_settled(session: ServedSession, variable: Variable) -> None:
    """Raises SessionGoneError or UpstreamError unless the variable has its value."""
    if variable.text is not None:
        return
    if session.gone is not None:
        raise gone(session.id, session.gone)
    assert variable.cause is not None, "it is not pending"
    raise UpstreamError(variable.cause)


def _unset(variable: Variable) -> str:
    """Variables that a value waits for and no call produces; a client may have forgotten them."""
    needed = [variable, *(v for llm_call in open_ancestors(variable) for v in llm_call.inputs)]
    unset = dict.fromkeys(v.id for v in needed if v.pending and v.producer is None)
    if not unset:
        return ""
    shown = ", ".join(list(unset)[:_MAX_SHOWN]) + (", ..." if len(unset) > _MAX_SHOWN else "")
    return f" No client has set {shown} so far."


def _text_so_far(session: ServedSession, variable: Variable) -> str:
    """Of a value that is being generated and will be just that."""
    llm_call = variable.producer
    if llm_call is None or not llm_call.started or llm_call.call.kind is not CallKind.LLM:
        return ""
    piece = llm_call.call.pieces[llm_call.prompt_end]
    assert isinstance(piece, OutputPiece)
    if piece.transforms is not None:
        return ""
    return session.record(llm_call.call.id).llm_call(llm_call.index).text


_LOOK_S = 1.0
_DELETED = "it was deleted."
_EXPIRED = "it was idle for too long."
_STOPPED = "the server stops."
_CROWDED_OUT = "it was idle, and there was no room for another one."


class SessionService:
    """One per server. Not thread-safe: everything on one event loop.

    A session of another tenant is not there: NotFoundError (code session_not_found). One that was
    deleted or has expired: SessionGoneError, as long as its id is remembered. Methods that take a
    session raise these two; the ids of variables and calls, NotFoundError.
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
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._runner = ProgramRunner(generator, engine, tokenizer, clock, settings)
        self._opener = Opener(engine, clock, ids, settings, self._runner.estimate)
        self._submitter = Submitter(tokenizer, ids.new, settings.max_tokens)
        self._registry = SessionRegistry(settings.max_gone)
        self._stopping: set[asyncio.Task[None]] = set()
        self._waiting = WaitingRoom(clock, settings)

    async def run(self) -> None:
        """End sessions that have expired, until cancelled; then all that are left."""
        try:
            while True:
                await asyncio.sleep(_LOOK_S)
                for session in self._registry:
                    if self._has_expired(session):
                        self._close(session, _EXPIRED)
        finally:
            await asyncio.shield(asyncio.ensure_future(self._end_all()))

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
    ) -> SessionSummary:
        """Open a session.

        Where there is no room, the longest idle session of plain clients (see `join`) is ended.
        criteria, sampling: for what does not say otherwise. ttl_s: at most max_ttl_s. scope:
        sessions of one tenant with the same one share what is computed of values, too; without
        one they share only what templates begin with. session_id: a name of the client's; after
        the session with it has ended, it may be used for another.
        Raises ConflictError (already_exists), InvalidRequestError, SessionLimitError.
        """
        if ttl_s is not None and not 0.0 < ttl_s < math.inf:
            raise InvalidRequestError(f"ttl_s must be more than 0, got {ttl_s!r}.", "ttl_s")
        check_sampling(sampling or {})
        if session_id is not None:
            self._check_new_id(tenant, session_id)
        session = self._open(
            tenant,
            session_id,
            criteria=criteria or self._settings.criteria,
            ttl_s=min(ttl_s or self._settings.ttl_s, self._settings.max_ttl_s),
            scope=scope,
            metadata=dict(metadata or {}),
            sampling=dict(sampling or {}),
        )
        return view_summary(session, self._clock.now())

    def ensure(self, tenant: str, session_id: str) -> None:
        """Like `join`: what begins with "sess-" must be there, others come into being.

        Raises NotFoundError, SessionGoneError, SessionLimitError.
        """
        self._found_or_opened(tenant, session_id)

    def sessions(self, tenant: str) -> list[SessionSummary]:
        """Those of a tenant, oldest first, without calls and variables."""
        now = self._clock.now()
        return [
            view_summary(session, now)
            for session in self._registry.of_tenant(tenant)
            if not self._has_expired(session)
        ]

    def inspect(self, tenant: str, session_id: str) -> SessionView:
        """With its graph. Does not count as activity."""
        return view_session(self._find(tenant, session_id), self._clock.now())

    async def delete(self, tenant: str, session_id: str) -> SessionSummary:
        """End it: running calls are aborted, waiting clients get SessionGoneError, and its KV is
        released. Returns what it was when all of that has happened."""
        session = self._find(tenant, session_id)
        await asyncio.shield(self._close(session, _DELETED))
        return view_summary(session, self._clock.now())

    def submit(
        self, tenant: str, session_id: str, calls: Sequence[CallSpec], key: str | None = None
    ) -> Sequence[SubmittedCall]:
        """Add calls, all or none. They run when a value is wanted that needs them.

        key: a name of the client's for these calls. Sent again under one of the latest keys of
        the session, they are not added again, and the answer is the same.
        Raises InvalidRequestError (param such as "requests[2].parameters[0].name"), ConflictError
        (already_produced, already_set, cyclic, key_reused), SessionLimitError.
        """
        session = self._used(tenant, session_id)
        if key is not None and key in session.answers:
            known, answer = session.answers[key]
            if list(known) != list(calls):
                message = f"Other calls have come with the key {key!r}."
                raise ConflictError(message, "key_reused", "key")
            return answer
        found = self._submitter.read(calls, session.sampling)
        text_chars = sum(submission.text_chars for submission in found)
        if session.text_chars + text_chars > self._settings.max_chars:
            raise SessionLimitError(
                f"The templates of the session would have more than {self._settings.max_chars} "
                "characters."
            )
        now = self._clock.now()
        session.machine.submit([submission.call for submission in found], now)
        for submission in found:
            session.records[submission.call.id] = self._new_record(session, submission)
        session.text_chars += text_chars
        try:
            for submission in found:
                for variable_id, criteria in submission.wanted.items():
                    session.machine.want(variable_id, criteria, now)
        finally:
            session.forget_records()
            self._runner.carry_out(session)
        answer = [
            SubmittedCall(request_id=submission.call.id, variables=dict(submission.variables))
            for submission in found
        ]
        if key is not None:
            session.remember_answer(key, calls, answer)
        return answer

    def declare(
        self,
        tenant: str,
        session_id: str,
        name: str,
        value: str | None = None,
        variable_id: str | None = None,
    ) -> VariableView:
        """A new variable, with its value if it has one.

        Raises ConflictError (already_exists) and SessionLimitError; then there is none.
        """
        session = self._used(tenant, session_id)
        variable_id = variable_id or self._ids.new("var")
        variable = session.machine.declare(variable_id, name, len(value or ""))
        if value is not None:
            session.machine.set(variable.id, value, self._clock.now())
        self._runner.carry_out(session)
        return view_variable(variable)

    def set(self, tenant: str, session_id: str, variable_id: str, value: str) -> VariableView:
        """Give a variable its value, once. ConflictError (already_set, already_produced)."""
        session = self._touched(tenant, session_id)
        variable = session.machine.set(variable_id, value, self._clock.now())
        self._runner.carry_out(session)
        return view_variable(variable)

    def fail(self, tenant: str, session_id: str, request_id: str, message: str) -> None:
        """A native function failed on the client. InvalidRequestError if it is no native call,
        ConflictError if it is over."""
        session = self._touched(tenant, session_id)
        session.machine.native_failed(request_id, message, self._clock.now())
        self._runner.carry_out(session)

    def variable(self, tenant: str, session_id: str, variable_id: str) -> VariableView:
        """As it is now."""
        return view_variable(self._touched(tenant, session_id).machine.variable(variable_id))

    def variables(self, tenant: str, session_id: str) -> list[VariableView]:
        """All, in the order in which they came into being."""
        graph = self._touched(tenant, session_id).machine.graph
        return [view_variable(variable) for variable in graph.variables.values()]

    def want(
        self, tenant: str, session_id: str, variable_id: str, criteria: Criteria | None = None
    ) -> VariableView:
        """Begin what it needs, or hurry it up, without waiting. None: the session's criteria."""
        session = self._touched(tenant, session_id)
        return view_variable(self._want(session, variable_id, criteria))

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
        session = self._touched(tenant, session_id)
        self._waiting.check()
        variable = self._want(session, variable_id, criteria)
        await self._waiting.value(session, variable, timeout_s)
        return view_variable(variable)

    def stream(
        self, tenant: str, session_id: str, variable_id: str, criteria: Criteria | None = None
    ) -> AsyncGenerator[str, None]:
        """`want` it; its value in pieces as they come, or at once where it has a transform.

        The pieces make up the value, unless the engine died on the way and said something else
        when it was asked again. Raises NotFoundError, SessionGoneError and SessionLimitError right
        away; UpstreamError, GetTimeoutError and SessionGoneError from the iterator. Leave it early
        with `aclose`.
        """
        session = self._touched(tenant, session_id)
        self._waiting.check()
        return self._waiting.pieces(session, self._want(session, variable_id, criteria))

    def cancel(self, tenant: str, session_id: str, request_id: str) -> None:
        """Stop a call; what needs its outputs fails. Nothing happens to one that is over.

        Raises InvalidRequestError for one that a plain client makes itself, see `join`.
        """
        session = self._touched(tenant, session_id)
        session.machine.cancel(request_id, self._clock.now())
        self._runner.carry_out(session)

    def join(self, tenant: str, session_id: str, node_name: str = "") -> Joined:
        """Record a request that a plain client is about to make as a call of a session.

        An id that begins with "sess-" must be there, any other comes into being; as long as
        nothing else is done in such a session, it is ended when it is idle and room is needed.
        Raises NotFoundError, SessionGoneError, SessionLimitError.
        """
        session = self._found_or_opened(tenant, session_id, only_plain=True)
        answer = OutputPiece(node_name or "output", self._ids.new("var"))
        new = NewCall(
            id=self._ids.new("req"), name=node_name, kind=CallKind.PLAIN, pieces=(answer,)
        )
        (call,) = session.machine.submit([new], self._clock.now())
        session.forget_records()
        self._runner.carry_out(session)
        return Joined(self._runner, session, call.llm_calls[0], self._clock)

    def figures(self) -> SessionFigures:
        """For metrics."""
        return SessionFigures(
            sessions=len(self._registry),
            calls=dict(self._runner.ended_calls),
            prefills=self._runner.num_prefills,
        )

    def _want(
        self, session: ServedSession, variable_id: str, criteria: Criteria | None
    ) -> Variable:
        variable = session.machine.want(
            variable_id, criteria or session.criteria, self._clock.now()
        )
        self._runner.carry_out(session)
        return variable

    def _open(self, tenant: str, session_id: str | None, **fields: Any) -> ServedSession:
        self._make_room(tenant)
        session = self._opener.open(tenant, session_id, **fields)
        self._registry.add(session)
        return session

    def _make_room(self, tenant: str) -> None:
        """For one more session. Raises SessionLimitError."""
        if len(self._registry) < self._settings.max_sessions:
            return
        session = self._registry.dispensable(tenant)
        if session is None:
            message = f"There are {len(self._registry)} sessions, which is the most of this server."
            raise SessionLimitError(message)
        self._close(session, _CROWDED_OUT)

    def _check_new_id(self, tenant: str, session_id: str) -> None:
        if session_id.startswith(GENERATED_PREFIX):
            message = f"Ids that begin with {GENERATED_PREFIX!r} are made up by the server."
            raise InvalidRequestError(message, "id")
        with contextlib.suppress(NotFoundError, SessionGoneError):
            self._find(tenant, session_id)
            raise ConflictError(f"There is a session {session_id!r} already.", "already_exists")

    def _new_record(self, session: ServedSession, submission: Submission) -> CallRecord:
        if submission.call.kind is CallKind.NATIVE:
            return CallRecord()
        beginning = self._runner.text_beginning if submission.is_text else ()
        prompt = Prompt(session.sharing, beginning)
        return CallRecord(prompt=prompt, text_chars=submission.text_chars)

    def _find(self, tenant: str, session_id: str) -> ServedSession:
        session = self._registry.find(tenant, session_id)
        if self._has_expired(session):
            self._close(session, _EXPIRED)
            raise gone(session_id, _EXPIRED)
        return session

    def _touched(self, tenant: str, session_id: str) -> ServedSession:
        session = self._find(tenant, session_id)
        session.touched_s = self._clock.now()
        return session

    def _used(self, tenant: str, session_id: str) -> ServedSession:
        """It holds from now on what its clients count on."""
        session = self._touched(tenant, session_id)
        session.only_plain = False
        return session

    def _found_or_opened(
        self, tenant: str, session_id: str, *, only_plain: bool = False
    ) -> ServedSession:
        try:
            return self._touched(tenant, session_id)
        except (NotFoundError, SessionGoneError):
            if session_id.startswith(GENERATED_PREFIX):
                raise
        return self._open(
            tenant,
            session_id,
            criteria=self._settings.criteria,
            ttl_s=self._settings.ttl_s,
            scope="",
            metadata={},
            sampling={},
            only_plain=only_plain,
        )

    def _has_expired(self, session: ServedSession) -> bool:
        expires_s = session.expires_s()
        return expires_s is not None and expires_s <= self._clock.now()

    def _close(self, session: ServedSession, why: str) -> asyncio.Task[None]:
        """It is gone from here on; the task ends when nothing is left of it with the engine."""
        self._registry.remove(session, why)
        session.machine.close(f"The session has ended: {why}", self._clock.now())
        self._runner.carry_out(session)
        stopping = asyncio.create_task(self._runner.stop(session))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        return stopping

    async def _end_all(self) -> None:
        for session in self._registry:
            self._close(session, _STOPPED)
        await asyncio.gather(*self._stopping, return_exceptions=True)
