"""All sessions of a server: their registry, their expiry, and waiting for values."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import weakref
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    Callable,
    Collection,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any, NamedTuple

from bros.core.clock import Clock
from bros.core.errors import InvalidRequestError, NotFoundError
from bros.core.fair import FairMemory, FairThreads
from bros.core.interfaces import EngineClient
from bros.core.request import IdGenerator
from bros.core.slices import Slices, in_slices, whole
from bros.core.tenants import Resource, TenantAccounts
from bros.semantic.core.matching import EMPTY_PROMPT, PlainPrompt, find_inputs
from bros.semantic.core.nodes import (
    InputPiece,
    LlmCall,
    NewCall,
    OutputPiece,
    Variable,
    open_ancestors,
)
from bros.semantic.core.prompt import Prompt, PromptSharing, RequestedPrefixes
from bros.semantic.core.session import SessionStateMachine
from bros.semantic.core.submission import (
    LONG_CHARS,
    Submission,
    SubmissionReader,
    check_sampling,
    counted_chars,
    size_of,
)
from bros.semantic.errors import (
    NO_CLIENT_HAS_SET,
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
    SharingMode,
    SubmittedCall,
    VariableView,
)
from bros.semantic.service.live import (
    ANSWER_CHARS,
    CALL_CHARS,
    VARIABLE_CHARS,
    CallRecord,
    ServedSession,
    SessionSettings,
    Subscribers,
    Subscription,
)
from bros.semantic.service.runner import PlainCall, ProgramRunner, Router
from bros.semantic.service.views import (
    view_session,
    view_summary,
    view_variable,
    view_variables,
)
from bros.semantic.transforms.process import TransformRunner, TransformThreads
from bros.text.chat_format import ChatFormat
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer

GENERATED_PREFIX = "sess-"
"""Prefix of the session ids that the service generates; they are unique for all time."""


class SessionRegistry:
    """Open sessions by tenant and id, and the ids of the latest ended ones."""

    def __init__(self, max_gone: int) -> None:
        self._open: dict[tuple[str, str], ServedSession] = {}
        self._gone: FairMemory[tuple[str, str], str] = FairMemory(max_gone)

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[ServedSession]:
        return iter(tuple(self._open.values()))

    def of_tenant(self, tenant: str) -> Sequence[ServedSession]:
        """Sessions of the tenant in order of creation."""
        return [session for (owner, _), session in self._open.items() if owner == tenant]

    def eviction_candidate(self, tenant: str) -> ServedSession | None:
        """The longest idle session of this tenant that only plain clients have used."""
        return _longest_idle(self.of_tenant(tenant))

    def crowding_candidate(self, tenant: str) -> ServedSession | None:
        """The longest idle such session of the tenants that have more sessions than this one."""
        counts = Counter(owner for owner, _ in self._open)
        return _longest_idle(s for s in self if counts[s.tenant] > counts[tenant])

    def next_end_s(self) -> float:
        """When the first session expires that is idle now; infinite without one."""
        ends = (session.expires_s() for session in self)
        return min((end_s for end_s in ends if end_s is not None), default=math.inf)

    def add(self, session: ServedSession) -> None:
        key = session.tenant, session.id
        assert key not in self._open
        self._open[key] = session
        self._gone.forget(key)

    def remove(self, session: ServedSession, why: str) -> None:
        """Remove the session; later requests for it get `why`."""
        key = session.tenant, session.id
        session.end_reason = why
        session.held.release()
        session.held_chars.release()
        del self._open[key]
        self._gone.put(session.tenant, key, why)

    def find(self, tenant: str, session_id: str) -> ServedSession:
        """Raises NotFoundError or SessionGoneError."""
        session = self._open.get((tenant, session_id))
        if session is not None:
            return session
        why = self._gone.get((tenant, session_id))
        if why is not None:
            raise session_gone_error(session_id, why)
        raise NotFoundError(
            f"There is no session {session_id[:200]!r}.", "session_id", "session_not_found"
        )


def _longest_idle(sessions: Iterable[ServedSession]) -> ServedSession | None:
    """The longest idle one that only plain clients have used."""
    idle = (session for session in sessions if session.only_plain and not session.busy)
    return min(idle, key=lambda session: session.last_activity_s, default=None)


def session_gone_error(session_id: str, why: str) -> SessionGoneError:
    """The error for an ended session. why: the reason, such as "it was deleted."."""
    return SessionGoneError(f"The session {session_id!r} is gone: {why}")


_MAX_SHOWN = 5


class ValueWaiter:
    """Waits for values on behalf of clients, and limits how many of them wait."""

    def __init__(
        self,
        clock: Clock,
        settings: SessionSettings,
        accounts: TenantAccounts,
        abandoned: Callable[[ServedSession, Sequence[Variable]], None],
    ) -> None:
        """abandoned: called with variables whose last waiting client has gone before they were
        settled, and before its time was over."""
        self._abandoned = abandoned
        self._clock = clock
        self._settings = settings
        self._accounts = accounts
        self._count = 0

    def check(self, tenant: str) -> None:
        """Raises SessionLimitError or TenantLimitError if no further client may wait."""
        self._accounts.check(tenant, Resource.WAITS)
        if self._count >= self._settings.max_waiting:
            requests = "request already waits" if self._count == 1 else "requests already wait"
            raise SessionLimitError(f"{self._count} {requests} for values.", 1.0)

    async def values(
        self, session: ServedSession, variables: Iterable[Variable], timeout_s: float | None
    ) -> None:
        """Wait until all variables have their values, or one cannot have any more.

        One task waits for all: if each had its own, those of 10,000 would end in the same turn of
        the event loop. Raises UpstreamError, GetTimeoutError, SessionGoneError, and
        InvalidRequestError for a negative timeout.
        """
        timeout_s = self._bounded(timeout_s)
        pending = dict.fromkeys(variables)
        with self._subscribed(session, session.settled, pending) as settled:
            for variable in tuple(pending):
                if not variable.pending:
                    check_settled(session, variable)
                    del pending[variable]
            try:
                async with asyncio.timeout(timeout_s):
                    while pending:
                        await settled.changed.wait()
                        settled.changed.clear()
                        for variable in settled.which:
                            check_settled(session, variable)
                            pending.pop(variable, None)
                        settled.which.clear()
            except TimeoutError:
                variable = next(iter(pending))
                message = f"{_subject(variable)} had no value within {timeout_s:g} s."
                raise GetTimeoutError(message + _unset(variable)) from None

    async def pieces(self, session: ServedSession, variable: Variable) -> AsyncGenerator[str, None]:
        """Stream the value in pieces. Raises UpstreamError, GetTimeoutError, SessionGoneError."""
        sent = 0
        end_s = self._clock.now() + self._settings.max_wait_s
        with self._subscribed(session, session.streamed, [variable]) as streamed:
            while variable.pending:
                text = _text_so_far(session, variable)
                if len(text) > sent:
                    piece, sent = text[sent:], len(text)
                    yield piece
                    continue
                try:
                    async with asyncio.timeout(end_s - self._clock.now()):
                        await streamed.changed.wait()
                except TimeoutError:
                    message = f"{_subject(variable)} had no value in time."
                    raise GetTimeoutError(message + _unset(variable)) from None
                streamed.changed.clear()
                streamed.which.clear()
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
    def _subscribed(
        self, session: ServedSession, subscribers: Subscribers, variables: Collection[Variable]
    ) -> Iterator[Subscription]:
        """Subscribe to the variables, of which the caller may remove those that are settled."""
        # Since the caller's check others may have come: of those whose programs are read in slices,
        # and of those whose streams are not read yet.
        self.check(session.tenant)
        self._count += 1
        try:
            with (
                self._accounts.count(session.tenant, Resource.WAITS),
                subscribers.subscribe(variables) as made,
            ):
                yield made
        except (asyncio.CancelledError, GeneratorExit):
            self._abandoned(session, [v for v in variables if not session.awaits(v)])
            raise
        finally:
            self._count -= 1
            session.last_activity_s = self._clock.now()


def check_settled(session: ServedSession, variable: Variable) -> None:
    """Raises SessionGoneError or UpstreamError unless the variable has its value."""
    if variable.text is not None:
        return
    if session.end_reason is not None:
        raise session_gone_error(session.id, session.end_reason)
    assert variable.cause is not None, "it is not pending"
    raise UpstreamError(variable.cause)


def _unset(variable: Variable) -> str:
    """The part of a timeout message that lists unset variables which no call produces."""
    needed = [variable, *(v for llm_call in open_ancestors(variable) for v in llm_call.inputs)]
    unset = dict.fromkeys(_described(v) for v in needed if v.pending and v.producer is None)
    if not unset:
        return ""
    shown = ", ".join(list(unset)[:_MAX_SHOWN]) + (", ..." if len(unset) > _MAX_SHOWN else "")
    return f" {NO_CLIENT_HAS_SET}{shown} so far."


def _described(variable: Variable) -> str:
    """A variable in the words of its client, who may not have chosen its id."""
    if variable.name in ("", variable.id):
        return variable.id
    producer = variable.producer
    llm_calls = variable.consumers if producer is None else (producer,)
    names = dict.fromkeys(llm_call.call.name for llm_call in llm_calls if llm_call.call.name)
    of_calls = f" of {', '.join(list(names)[:_MAX_SHOWN])}" if names else ""
    return f"{variable.name}{of_calls} (variable {variable.id})"


def _subject(variable: Variable) -> str:
    """A variable in the words of its client, as the beginning of a sentence."""
    described = _described(variable)
    if described == variable.id:
        return f"The variable {variable.id!r}"
    return f"The {'input' if variable.producer is None else 'output'} {described}"


def _text_so_far(session: ServedSession, variable: Variable) -> str:
    """The generated text of a running LLM call; empty if the output has a transform."""
    llm_call = variable.producer
    if llm_call is None or not llm_call.started or llm_call.call.kind is not CallKind.LLM:
        return ""
    piece = llm_call.call.pieces[llm_call.prompt_end]
    assert isinstance(piece, OutputPiece)
    if piece.transforms is not None:
        return ""
    return session.record(llm_call.call.id).llm_call(llm_call.index).text


def _private_salt(uid: str, scope: str, shared_with: SharingMode) -> str | None:
    """The PromptSharing.private_salt of a session. Neither form is ever one of the other kind."""
    if shared_with is SharingMode.SESSION:
        return f"session:{uid}"
    return f"scope:{scope}" if scope else None


class _Keyed(NamedTuple):
    """A program with an idempotency key.

    fingerprint: equal for equal calls only. The calls themselves would take 3 KB each.
    """

    key: str
    fingerprint: bytes


def _fingerprinting(calls: Sequence[CallSpec]) -> Slices[bytes]:
    """The fingerprint of the calls of a program, in slices."""
    found, since_pause = hashlib.sha256(), 0
    for spec in calls:
        texts = [spec.template, *(each.content for each in spec.messages or ())]
        texts += [each.value for each in spec.parameters]
        is_short = sum(len(text or "") for text in texts) <= _PIECE
        for piece in [repr(spec)] if is_short else _pieces(spec):
            found.update(piece.encode("utf-8", "surrogatepass"))
            since_pause += _PIECE_COST + len(piece)
            if since_pause >= _HASHED_TOGETHER:
                since_pause = 0
                yield
    return found.digest()


def _pieces(value: object) -> Iterator[str]:
    """The text of a call or of a part of it, other texts for other ones, in pieces that are not
    much longer than _PIECE."""
    if isinstance(value, str):
        yield f"{len(value)}:"
        for begin in range(0, len(value), _PIECE):
            yield value[begin : begin + _PIECE]
    elif is_dataclass(value):
        yield type(value).__name__
        for part in fields(value):
            yield from _pieces(getattr(value, part.name))
    elif isinstance(value, list | tuple):
        yield f"{len(value)}["
        for part in value:
            yield from _pieces(part)
    else:
        yield repr(value) + ","


_PIECE = 50_000
_PIECE_COST, _HASHED_TOGETHER = 2_000, 500_000
"""About 1 ms: what pieces and characters of calls count for, and are hashed between two pauses."""


def _answered(session: ServedSession, keyed: _Keyed | None) -> Sequence[SubmittedCall] | None:
    """The answer to the same calls, if they were sent with this key before. Raises ConflictError
    if other calls were."""
    if keyed is None or keyed.key not in session.answers:
        return None
    fingerprint, answer = session.answers[keyed.key]
    if fingerprint != keyed.fingerprint:
        message = f"The key {keyed.key!r} was used with other calls."
        raise ConflictError(message, "key_reused", "key")
    return answer


_SLICE = 100
"""Calls whose records are made between two pauses."""

_WANT_SLICE = 20
"""Values that are requested between two pauses; it takes 0.1 ms for each."""

_EXPIRY_CHECK_S = 1.0
_DELETED = "it was deleted."
_EXPIRED = "it was idle for too long."
_STOPPED = "the server stops."
_EVICTED = "it was idle, and there was no room for another one."


class SessionService:
    """The sessions of one server. Not thread-safe: it lives on one event loop.

    Methods that take a session raise NotFoundError (code session_not_found) if the tenant has no
    such session, and SessionGoneError if it was deleted or has expired, as long as its id is
    remembered. They raise NotFoundError for unknown ids of variables and calls.
    """

    def __init__(
        self,
        generator: TextGenerator,
        engine: EngineClient,
        tokenizer: Tokenizer,
        clock: Clock,
        ids: IdGenerator,
        settings: SessionSettings,
        router: Router | None = None,
        threads: FairThreads | None = None,
        transforms: TransformRunner | None = None,
        accounts: TenantAccounts | None = None,
        chat: ChatFormat | None = None,
    ) -> None:
        """router: shares the requests among several engines; None: there is one engine.
        threads: for work on long texts; None: threads of its own.
        transforms: runs transforms that may take long, closed at the end of `run`; None: `threads`.
        accounts: count what the service holds for each tenant; None: there are no limits.
        chat: how the model writes conversations and reasoning; None: as its chat template does.
        """
        self._threads = threads = threads or FairThreads()
        chat = chat or ChatFormat(tokenizer)
        self._accounts = accounts or TenantAccounts()
        self._engine = engine
        self._clock = clock
        self._ids = ids
        self._settings = settings
        self._runner = ProgramRunner(
            generator,
            engine,
            tokenizer,
            clock,
            settings,
            threads,
            transforms or TransformThreads(threads),
            router,
            self._accounts,
            chat,
        )
        self._vocab_size = engine.info.vocab_size
        self._reader = SubmissionReader(chat, ids.new, settings.max_tokens, self._vocab_size)
        self._registry = SessionRegistry(settings.max_gone)
        self._stopping: set[asyncio.Task[None]] = set()
        self._waiting = ValueWaiter(clock, settings, self._accounts, self._abandon)

    async def run(self) -> None:
        """End expired sessions until cancelled, then end all sessions."""
        try:
            while True:
                await asyncio.sleep(_EXPIRY_CHECK_S)
                for session in self._registry:
                    # It may have ended while others were closed.
                    if session.end_reason is None and self._has_expired(session):
                        self._close(session, _EXPIRED)
                        await asyncio.sleep(0)  # thousands may expire at the same time
        finally:
            try:
                await asyncio.shield(asyncio.ensure_future(self._end_all()))
            finally:
                self._runner.close()

    def create(
        self,
        tenant: str,
        *,
        criteria: Criteria | None = None,
        ttl_s: float | None = None,
        scope: str = "",
        sharing: SharingMode = SharingMode.TENANT,
        session_id: str | None = None,
        metadata: Mapping[str, str] | None = None,
        sampling: Mapping[str, Any] | None = None,
    ) -> SessionSummary:
        """Open a session. At max_sessions, or at the tenant's limit, its longest idle plain session
        (see `join`) is ended.

        criteria: default criteria of requested values.
        ttl_s: idle time after which the session expires; capped at max_ttl_s.
        scope: only sessions of the same scope share the KV of what comes after the constant prefix
            of a prompt. Empty: as `sharing` says.
        sharing: who shares that KV: the whole tenant, or this session alone whatever its scope is.
        session_id: an id that the client chooses, reusable after that session has ended.
        sampling: default sampling parameters of outputs.
        Raises ConflictError (already_exists), InvalidRequestError, SessionLimitError,
        TenantLimitError.
        """
        if ttl_s is not None and not 0.0 < ttl_s < math.inf:
            raise InvalidRequestError(f"ttl_s must be more than 0, got {ttl_s!r}.", "ttl_s")
        sampling_bytes = check_sampling(sampling or {}, self._vocab_size)
        self._accounts.check(tenant, Resource.SESSION_CHARS, sampling_bytes)
        if session_id is not None:
            self._check_new_id(tenant, session_id)
        session = self._open(
            tenant,
            session_id,
            criteria=criteria or self._settings.criteria,
            ttl_s=min(ttl_s or self._settings.ttl_s, self._settings.max_ttl_s),
            scope=scope,
            shared_with=sharing,
            metadata=dict(metadata or {}),
            sampling=dict(sampling or {}),
            sampling_bytes=sampling_bytes,
        )
        session.count_chars()
        return view_summary(session, self._clock.now())

    def ensure(self, tenant: str, session_id: str) -> None:
        """Find or open a session by the rules of `join`, without recording a call.

        Raises NotFoundError, SessionGoneError, SessionLimitError.
        """
        self._found_or_opened(tenant, session_id)

    def sessions(self, tenant: str) -> list[SessionSummary]:
        """Summaries of the tenant's sessions, oldest first."""
        now = self._clock.now()
        return [
            view_summary(session, now)
            for session in self._registry.of_tenant(tenant)
            if not self._has_expired(session)
        ]

    def inspect(self, tenant: str, session_id: str) -> SessionView:
        """A session with its graph. This does not count as activity."""
        return whole(self._viewing(tenant, session_id))

    async def view(self, tenant: str, session_id: str) -> SessionView:
        """As `inspect`. The event loop is free meanwhile: each call is shown as it is when its turn
        comes."""
        return await in_slices(self._viewing(tenant, session_id))

    def _viewing(self, tenant: str, session_id: str) -> Slices[SessionView]:
        return view_session(self._find(tenant, session_id), self._runner, self._clock.now())

    async def delete(self, tenant: str, session_id: str) -> SessionSummary:
        """End a session: abort its running calls, fail waiting clients with SessionGoneError, and
        unpin its KV. Returns its final summary when all of that is done."""
        session = self._find(tenant, session_id)
        await asyncio.shield(self._close(session, _DELETED))
        return view_summary(session, self._clock.now())

    def submit(
        self, tenant: str, session_id: str, calls: Sequence[CallSpec], key: str | None = None
    ) -> Sequence[SubmittedCall]:
        """Add calls, all or none. A call runs once a requested value depends on it.

        key: idempotency key. Calls sent again with one of the session's latest keys are not added
        again, and the answer is the same.
        Raises InvalidRequestError (param such as "requests[2].parameters[0].name"), ConflictError
        (already_produced, already_set, cyclic, key_reused), SessionLimitError.
        """
        session = self._used(tenant, session_id)
        keyed = None if key is None else _Keyed(key, whole(_fingerprinting(calls)))
        answer = _answered(session, keyed)
        if answer is None:
            found = self._reader.read(calls, session.sampling)
            answer = whole(self._submitting(session, keyed, found))
        return answer

    async def accept(
        self, tenant: str, session_id: str, calls: Sequence[CallSpec], key: str | None = None
    ) -> Sequence[SubmittedCall]:
        """As `submit`. The event loop is free meanwhile, and the next program of the session waits;
        nothing of the program is visible before all of it is.

        Raises SessionGoneError also if the session ends meanwhile.
        """
        session = self._used(tenant, session_id)
        async with session.submitting:
            keyed = None if key is None else _Keyed(key, await in_slices(_fingerprinting(calls)))
            answer = _answered(session, keyed)
            if answer is None:
                found = await self._read(session, calls)
                answer = await in_slices(self._submitting(session, keyed, found))
            return answer

    async def _read(
        self, session: ServedSession, calls: Sequence[CallSpec]
    ) -> Sequence[Submission]:
        """Read calls in slices; on a thread if a single one takes long."""
        sizes = list(map(size_of, calls))
        if max(sizes, default=0) <= LONG_CHARS:
            return await in_slices(self._reader.reading(calls, session.sampling))
        read = partial(self._reader.read, calls, session.sampling)
        return await self._threads.run(session.tenant, read, sum(sizes))

    def _submitting(
        self,
        session: ServedSession,
        keyed: _Keyed | None,
        found: Sequence[Submission],
    ) -> Slices[Sequence[SubmittedCall]]:
        chars = yield from counted_chars(found)
        text_chars = sum(chars)
        if session.text_chars + text_chars > self._settings.max_chars:
            session.forget_records(few=True)
        if session.text_chars + text_chars > self._settings.max_chars:
            raise SessionLimitError(
                "The templates and sampling parameters of the session would have more than "
                f"{self._settings.max_chars} characters."
            )
        value_chars = sum(len(value) for each in found for value in each.call.values.values())
        names = {each for submission in found for each in submission.variables.values()}
        variables = len(names - session.machine.graph.variables.keys())
        self._check_chars(
            session,
            text_chars
            + value_chars
            + (CALL_CHARS if keyed is None else CALL_CHARS + ANSWER_CHARS) * len(found)
            + VARIABLE_CHARS * variables,
        )
        records: dict[str, CallRecord] = {}
        answer, since_pause = [], 0
        for submission, num_chars in zip(found, chars, strict=True):
            records[submission.call.id] = self._new_record(session, submission, num_chars)
            answer.append(
                SubmittedCall(request_id=submission.call.id, variables=dict(submission.variables))
            )
            since_pause += submission.call.weight
            if since_pause >= _SLICE:
                since_pause = 0
                yield
        now = self._clock.now()
        new = [submission.call for submission in found]
        yield from session.machine.submitting(new, now)
        # There is no pause before this: the calls are in the graph.
        session.records.update(records)
        session.text_chars += text_chars
        if keyed is not None:
            session.remember_answer(*keyed, answer)
        yield from self._want_outputs(session, found, now)
        return answer

    def _want_outputs(
        self, session: ServedSession, found: Sequence[Submission], now: float
    ) -> Slices[None]:
        """Request the outputs of calls that have just been added, in slices.

        Calls start when all of it is done, because the task groups that they are submitted in are
        not known before. If the caller has gone, the rest is done at once: the calls are accepted.
        """
        wanted = iter([item for submission in found for item in submission.wanted.items()])

        def want(variable_id: str, criteria: Criteria) -> None:
            # Since they were added, the session may have ended, or have dropped an old variable.
            if session.end_reason is None and variable_id in session.machine.graph.variables:
                session.machine.want(variable_id, criteria, now)

        try:
            for number, item in enumerate(wanted, start=1):
                want(*item)
                if not number % _WANT_SLICE:
                    yield
        finally:
            for item in wanted:
                want(*item)
            session.forget_records()
            self._runner.carry_out(session)
        if session.end_reason is not None:
            raise session_gone_error(session.id, session.end_reason)

    def declare(
        self,
        tenant: str,
        session_id: str,
        name: str,
        value: str | None = None,
        variable_id: str | None = None,
    ) -> VariableView:
        """Create a variable, and set its value if one is given.

        Raises ConflictError (already_exists) or SessionLimitError without creating it.
        """
        session = self._used(tenant, session_id)
        self._check_chars(session, len(value or "") + VARIABLE_CHARS)
        variable_id = variable_id or self._ids.new("var")
        variable = session.machine.declare(variable_id, name, len(value or ""))
        if value is not None:
            session.machine.set(variable.id, value, self._clock.now())
        self._runner.carry_out(session)
        return view_variable(variable)

    def set(self, tenant: str, session_id: str, variable_id: str, value: str) -> VariableView:
        """Set a variable once. Raises ConflictError (already_set, already_produced) and
        SessionLimitError."""
        session = self._touched(tenant, session_id)
        self._check_chars(session, len(value))
        variable = session.machine.set(variable_id, value, self._clock.now())
        self._runner.carry_out(session)
        return view_variable(variable)

    def fail(self, tenant: str, session_id: str, request_id: str, message: str) -> None:
        """Record that a native function failed on the client. Raises InvalidRequestError if the
        call is not native, ConflictError if it has ended."""
        session = self._touched(tenant, session_id)
        session.machine.native_failed(request_id, message, self._clock.now())
        self._runner.carry_out(session)

    def variable(self, tenant: str, session_id: str, variable_id: str) -> VariableView:
        """The current state of a variable."""
        return view_variable(self._touched(tenant, session_id).machine.variable(variable_id))

    async def variables(self, tenant: str, session_id: str) -> list[VariableView]:
        """All variables in order of creation. The event loop is free meanwhile: each is shown as it
        is when its turn comes."""
        graph = self._touched(tenant, session_id).machine.graph
        return await in_slices(view_variables(graph.variables.values()))

    def want(
        self, tenant: str, session_id: str, variable_id: str, criteria: Criteria | None = None
    ) -> VariableView:
        """Request a value without waiting for it. criteria: None means the session's."""
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
        """Request a value and wait for it.

        Raises UpstreamError, GetTimeoutError, SessionGoneError, NotFoundError, SessionLimitError.
        """
        session = self._touched(tenant, session_id)
        self._waiting.check(tenant)
        variable = self._want(session, variable_id, criteria)
        await self._waiting.values(session, [variable], timeout_s)
        return view_variable(variable)

    async def get_all(
        self,
        tenant: str,
        session_id: str,
        wanted: Sequence[tuple[str, Criteria | None]],
        timeout_s: float | None = None,
    ) -> list[VariableView]:
        """Request the values of variables with these criteria, and wait for all of them, or until
        the first one cannot be had. The event loop is free meanwhile. Raises what `get` raises.
        """
        session = self._touched(tenant, session_id)
        self._waiting.check(tenant)
        variables = await in_slices(self._wanting(session, wanted))
        await self._waiting.values(session, variables, timeout_s)
        return await in_slices(view_variables(variables))

    def stream(
        self, tenant: str, session_id: str, variable_id: str, criteria: Criteria | None = None
    ) -> AsyncGenerator[str, None]:
        """Request a value and stream it in pieces. An output with a transform is a single piece.

        The concatenated pieces are the value, unless the engine died and generated another text
        when the LLM call was restarted. Raises NotFoundError, SessionGoneError and
        SessionLimitError at once; the iterator raises UpstreamError, GetTimeoutError,
        SessionGoneError and SessionLimitError. A caller that stops early calls `aclose`.
        """
        session = self._touched(tenant, session_id)
        self._waiting.check(tenant)
        return self._waiting.pieces(session, self._want(session, variable_id, criteria))

    def cancel(self, tenant: str, session_id: str, request_id: str) -> None:
        """Cancel a call and its dependents. A call that has ended is left as it is.

        Raises InvalidRequestError for an open call of a plain client, see `join`.
        """
        session = self._touched(tenant, session_id)
        session.machine.cancel(request_id, self._clock.now())
        self._runner.carry_out(session)

    def join(
        self,
        tenant: str,
        session_id: str,
        node_name: str = "",
        *,
        id_prefix: str = "req-",
        prompt: PlainPrompt = EMPTY_PROMPT,
    ) -> PlainCall:
        """Record a request of a plain OpenAI client as a call of a session.

        The answers of the session that the prompt contains are its inputs, see `find_inputs`.
        id_prefix: beginning of the call's id, which is also the id of the response.

        A session whose id begins with "sess-" must exist; any other id opens a new session. As
        long as only plain clients use such a session, `create` and `join` may end it while it is
        idle to make room for another one.
        Raises NotFoundError, SessionGoneError, SessionLimitError.
        """
        session = self._found_or_opened(tenant, session_id, only_plain=True)
        inputs = [
            InputPiece(variable.name, variable.id)
            for variable in find_inputs(session.machine.graph, prompt)
        ]
        answer = OutputPiece(node_name or "output", self._ids.new("var"))
        new = NewCall(
            id=self._ids.new(id_prefix, ""),
            name=node_name,
            kind=CallKind.PLAIN,
            pieces=(*inputs, answer),
        )
        (call,) = session.machine.submit([new], self._clock.now())
        session.forget_records()
        self._runner.carry_out(session)
        return PlainCall(self._runner, session, call.llm_calls[0], prompt, self._clock)

    def figures(self) -> SessionFigures:
        """For metrics."""
        return SessionFigures(
            sessions=len(self._registry),
            calls=dict(self._runner.ended_calls),
            prefills=self._runner.num_prefills,
        )

    def _abandon(self, session: ServedSession, variables: Sequence[Variable]) -> None:
        # Together with others: the work grows with all calls that read the same values.
        if not session.abandoned:
            asyncio.get_running_loop().call_soon(self._abandon_all, session)
        session.abandoned.update(dict.fromkeys(variables))

    def _abandon_all(self, session: ServedSession) -> None:
        gone = [variable for variable in session.abandoned if not session.awaits(variable)]
        session.abandoned.clear()
        session.machine.abandon(gone, self._clock.now())
        self._runner.carry_out(session)

    def _want(
        self, session: ServedSession, variable_id: str, criteria: Criteria | None
    ) -> Variable:
        variable = session.machine.want(
            variable_id, criteria or session.criteria, self._clock.now()
        )
        self._runner.carry_out(session)
        return variable

    def _wanting(
        self, session: ServedSession, wanted: Sequence[tuple[str, Criteria | None]]
    ) -> Slices[list[Variable]]:
        found = []
        for number, (variable_id, criteria) in enumerate(wanted, start=1):
            found.append(self._want(session, variable_id, criteria))
            if not number % _WANT_SLICE:
                yield
                if session.end_reason is not None:
                    raise session_gone_error(session.id, session.end_reason)
        return found

    def _open(
        self,
        tenant: str,
        session_id: str | None,
        *,
        scope: str = "",
        shared_with: SharingMode = SharingMode.TENANT,
        **fields: Any,
    ) -> ServedSession:
        """Open a session with this id, or with a generated one.

        scope, shared_with: see `create`. fields: further fields of ServedSession.
        Raises SessionLimitError or TenantLimitError.
        """
        self._make_room(tenant)
        uid, now = self._ids.new("sess"), self._clock.now()
        sharing = PromptSharing(
            model=self._engine.info.model,
            tenant=tenant,
            private_salt=_private_salt(uid, scope, shared_with),
        )

        def estimate(llm_call: LlmCall) -> float:
            session = opened()
            assert session is not None, "its state machine asks"
            return self._runner.estimate(session, llm_call)

        session = ServedSession(
            id=session_id or uid,
            uid=uid,
            tenant=tenant,
            scope=scope,
            shared_with=shared_with,
            created_s=now,
            created_unix_s=self._clock.unix_time(),
            last_activity_s=now,
            machine=SessionStateMachine(uid, estimate=estimate, limits=self._settings.limits()),
            sharing=sharing,
            requested_prefixes=RequestedPrefixes(self._engine.info.block_size),
            held=self._accounts.count(tenant, Resource.SESSIONS),
            held_chars=self._accounts.count(tenant, Resource.SESSION_CHARS, 0),
            **fields,
        )
        # Weak, so that no cycle keeps an ended session until the garbage collector finds it.
        opened = weakref.ref(session)
        self._registry.add(session)
        return session

    def _make_room(self, tenant: str) -> None:
        """Make room for one more session. Raises SessionLimitError or TenantLimitError."""
        limit = self._accounts.limits(tenant).sessions
        used = self._accounts.used(tenant, Resource.SESSIONS)
        full = len(self._registry) >= self._settings.max_sessions
        if full or (limit is not None and used >= limit):
            session = self._registry.eviction_candidate(tenant)
            if session is not None:
                self._close(session, _EVICTED)
                return
        self._accounts.check(tenant, Resource.SESSIONS)
        if full:
            session = self._registry.crowding_candidate(tenant)
            if session is not None:
                self._close(session, _EVICTED)
                return
            message = f"The server has {len(self._registry)} sessions, which is its limit."
            raise SessionLimitError(message, self._registry.next_end_s() - self._clock.now())

    def _check_chars(self, session: ServedSession, more: int) -> None:
        """Raises TenantLimitError or InvalidRequestError if the session may not have `more` more
        characters."""
        self._accounts.check(session.tenant, Resource.SESSION_CHARS, more)

    def _check_new_id(self, tenant: str, session_id: str) -> None:
        if session_id.startswith(GENERATED_PREFIX):
            message = f"Ids that begin with {GENERATED_PREFIX!r} are reserved for the server."
            raise InvalidRequestError(message, "id")
        with contextlib.suppress(NotFoundError, SessionGoneError):
            self._find(tenant, session_id)
            raise ConflictError(f"There is a session {session_id!r} already.", "already_exists")

    def _new_record(self, session: ServedSession, submission: Submission, chars: int) -> CallRecord:
        if submission.call.kind is CallKind.NATIVE:
            return CallRecord()
        beginning = self._runner.text_beginning if submission.is_text else ()
        prompt = Prompt(session.sharing, beginning)
        return CallRecord(
            prompt=prompt,
            text_chars=chars,
            shared=session.planned.add(submission.call.pieces, submission.call.values),
        )

    def _find(self, tenant: str, session_id: str) -> ServedSession:
        session = self._registry.find(tenant, session_id)
        if self._has_expired(session):
            self._close(session, _EXPIRED)
            raise session_gone_error(session_id, _EXPIRED)
        return session

    def _touched(self, tenant: str, session_id: str) -> ServedSession:
        session = self._find(tenant, session_id)
        session.last_activity_s = self._clock.now()
        return session

    def _used(self, tenant: str, session_id: str) -> ServedSession:
        """Like `_touched`; the session is not one of plain clients only any more."""
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
            metadata={},
            sampling={},
            only_plain=only_plain,
        )

    def _has_expired(self, session: ServedSession) -> bool:
        expires_s = session.expires_s()
        return expires_s is not None and expires_s <= self._clock.now()

    def _close(self, session: ServedSession, why: str) -> asyncio.Task[None]:
        """End a session at once. The task ends when the engine runs and pins nothing of it."""
        self._registry.remove(session, why)
        closing = session.machine.closing(f"The session has ended: {why}", self._clock.now())
        next(closing, None)
        self._runner.carry_out(session)
        stopping = asyncio.create_task(self._runner.stop(session, closing))
        self._stopping.add(stopping)
        stopping.add_done_callback(self._stopping.discard)
        return stopping

    async def _end_all(self) -> None:
        for session in self._registry:
            self._close(session, _STOPPED)
        await asyncio.gather(*self._stopping, return_exceptions=True)
