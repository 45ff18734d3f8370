"""Texts that may not be there yet: what calls read and produce."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from bros.semantic.current import CURRENT
from bros.semantic.errors import ConflictError
from bros.semantic.program import Criteria, Perf

if TYPE_CHECKING:
    from bros.semantic.calls import Call, Program
    from bros.semantic.client_session import Session

_SHOWN_CHARS = 40


class SemanticVariable:
    """A text that calls read or produce; its value may be there already, or come later.

    value: of a constant; None for one that `set` or a call gives its value. name: for messages and
    graphs. session: that it is for, if it is not the current one.

    What waits has a form for threads (`get`) and one for coroutines (`aget`); the former raises
    RuntimeError on a running event loop, which it would block. Both raise

    - UpstreamError if the call that produces it, or one that this needs, has failed,
    - GetTimeoutError, SessionGoneError, ServerUnreachableError,
    - InvalidRequestError or ConflictError if the server refused the program,
    - RuntimeError if there is no session, ValueError if what they are given makes no sense; then
      nothing was sent.

    perf says what matters (LATENCY, THROUGHPUT, TTFT, TPOT); None: what the session says, or else
    LATENCY. ttft, tpot: objectives in seconds. deadline: seconds from now in which it should be
    complete; it is late after that but comes all the same. timeout: seconds after which to raise
    GetTimeoutError; the work goes on, and asking again is fine.
    """

    __slots__ = ("__weakref__", "_id", "_lock", "_name", "_producer", "_program", "_value")

    def __init__(
        self, value: str | None = None, name: str | None = None, session: Session | None = None
    ) -> None:
        if value is not None and not isinstance(value, str):
            raise TypeError(f"the value of a variable is a string, not {type(value).__name__}")
        self._value = value
        self._name = name or "variable"
        self._producer: Call | None = None
        self._program: Program | None = None if session is None else session.program
        self._id: str | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        if self._value is None:
            return f"<SemanticVariable {self._name}: not there yet>"
        shown = self._value[:_SHOWN_CHARS]
        more = "..." if len(self._value) > _SHOWN_CHARS else ""
        return f"<SemanticVariable {self._name}: {shown!r}{more}>"

    @property
    def name(self) -> str:
        return self._name

    @property
    def value(self) -> str | None:
        """The text, if it is known here; asks nobody."""
        return self._value

    @property
    def id(self) -> str:
        """Its id in its session. Raises RuntimeError if it has none."""
        session = self._session_now()
        if self._program is None:
            self._program = session.program
        return session.announce(self)

    @property
    def session(self) -> Session | None:
        """Whose it is; None of a constant, and of what no session has been asked for yet."""
        return None if self._program is None else self._program.session

    def set(self, text: str) -> None:
        """Give it its value. Raises ConflictError if it has one, or a call gives it one."""
        if self._take(text):
            session = self._session_now()
            session.run(session.work.send_value(self, text), "aset")

    async def aset(self, text: str) -> None:
        """`set` for coroutines."""
        if self._take(text):
            session = self._session_now()
            await session.arun(session.work.send_value(self, text))

    def get(
        self,
        perf: Perf | str | None = None,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> str:
        """Wait for the value."""
        if self._value is not None:
            return self._value
        session = self._session_now()
        criteria = session.criteria_for(perf, deadline, ttft, tpot)
        return session.run(session.work.fetch(self, criteria, timeout), "aget")

    async def aget(
        self,
        perf: Perf | str | None = None,
        *,
        timeout: float | None = None,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> str:
        """`get` for coroutines."""
        if self._value is not None:
            return self._value
        session = self._session_now()
        criteria = session.criteria_for(perf, deadline, ttft, tpot)
        return await session.arun(session.work.fetch(self, criteria, timeout))

    def want(self, perf: Perf | str | None = None, *, deadline: float | None = None) -> None:
        """Have it made, or hurry it up, without waiting for it."""
        if self._value is None:
            session = self._session_now()
            criteria = session.criteria_for(perf, deadline)
            session.run(session.work.want(self, criteria), "awant")

    async def awant(self, perf: Perf | str | None = None, *, deadline: float | None = None) -> None:
        """`want` for coroutines."""
        if self._value is None:
            session = self._session_now()
            criteria = session.criteria_for(perf, deadline)
            await session.arun(session.work.want(self, criteria))

    def stream(
        self,
        perf: Perf | str | None = None,
        *,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> Iterator[str]:
        """The value in pieces as they come: somebody reads along, so perf is TTFT if None."""
        if self._value is not None:
            yield self._value
            return
        session = self._session_now()
        pieces = session.work.stream(self, self._streaming(session, perf, deadline, ttft, tpot))
        try:
            while (piece := session.run(pieces.next(), "astream")) is not None:
                yield piece
        finally:
            if not pieces.ended:
                session.run(pieces.aclose(), "astream")

    async def astream(
        self,
        perf: Perf | str | None = None,
        *,
        deadline: float | None = None,
        ttft: float | None = None,
        tpot: float | None = None,
    ) -> AsyncIterator[str]:
        """`stream` for coroutines."""
        if self._value is not None:
            yield self._value
            return
        session = self._session_now()
        pieces = session.work.stream(self, self._streaming(session, perf, deadline, ttft, tpot))
        try:
            while (piece := await session.arun(pieces.next())) is not None:
                yield piece
        finally:
            if not pieces.ended:
                await session.arun(pieces.aclose())

    def cancel(self) -> None:
        """Stop the call that produces it; whoever needs one of its outputs gets UpstreamError."""
        if self._producer is not None:
            session = self._session_now()
            session.run(session.work.cancel(self._producer), "acancel")

    async def acancel(self) -> None:
        """`cancel` for coroutines."""
        if self._producer is not None:
            session = self._session_now()
            await session.arun(session.work.cancel(self._producer))

    @property
    def program(self) -> Program | None:
        """Among whose calls it is; None of a constant."""
        return self._program

    @property
    def producer(self) -> Call | None:
        return self._producer

    @property
    def is_open(self) -> bool:
        """A call may still be made its producer."""
        return self._value is None and self._producer is None

    def belong_to(self, program: Program) -> None:
        self._program = program

    def produced_by(self, call: Call) -> None:
        self._producer = call

    def arrive(self, value: str) -> None:
        """The value has come from the session."""
        self._value = value

    def name_in(self, session: Session) -> tuple[str, bool]:
        """Its id in the session whose it is, and whether it has only now been given one."""
        with self._lock:
            is_new = self._id is None
            if self._id is None:
                self._id = session.new_id(self._name)
            return self._id, is_new

    def name_or_value(self, session: Session) -> tuple[str | None, str | None]:
        """The id, or the value instead if the session has never heard of the variable."""
        with self._lock:
            if self._id is None and self._producer is None and self._value is not None:
                return None, self._value
        return self.name_in(session)[0], None

    def _take(self, text: str) -> bool:
        """Take the value; whether the session has to be told."""
        if not isinstance(text, str):
            raise TypeError(f"the value of a variable is a string, not {type(text).__name__}")
        with self._lock:
            if self._producer is not None:
                message = f"The variable {self._name!r} gets its value from a call."
                raise ConflictError(message, "already_produced")
            if self._value is not None:
                raise ConflictError(f"The variable {self._name!r} has a value.", "already_set")
            self._value = text
            return self._id is not None

    def _session_now(self) -> Session:
        """Its session; if it has none, that is the current one from now on."""
        session = self.session
        if session is not None:
            return session
        session = CURRENT.get()
        if session is None:
            raise RuntimeError(
                f"There is no session to make {self._name!r} in: use `with Session(...):`."
            )
        if self._program is None:
            self._program = session.program
        else:
            session.program.absorb(self._program)
        return session

    def _streaming(
        self,
        session: Session,
        perf: Perf | str | None,
        deadline: float | None,
        ttft: float | None,
        tpot: float | None,
    ) -> Criteria:
        return session.criteria_for(perf or Perf.TTFT, deadline, ttft, tpot)


def gather(
    *variables: SemanticVariable, perf: Perf | str | None = None, timeout: float | None = None
) -> list[str]:
    """The values of all, asked for at once and in one program; raises as `get` does."""
    session = _common_session(variables)
    if session is None:
        return [variable.get() for variable in variables]
    criteria = session.criteria_for(perf)
    return session.run(session.work.fetch_all(variables, criteria, timeout), "agather")


async def agather(
    *variables: SemanticVariable, perf: Perf | str | None = None, timeout: float | None = None
) -> list[str]:
    """`gather` for coroutines."""
    session = _common_session(variables)
    if session is None:
        return [await variable.aget() for variable in variables]
    criteria = session.criteria_for(perf)
    return await session.arun(session.work.fetch_all(variables, criteria, timeout))


def _common_session(variables: tuple[SemanticVariable, ...]) -> Session | None:
    """That of all whose values are not known; None if all are. Raises ValueError for several."""
    sessions = {variable._session_now() for variable in variables if variable.value is None}
    if len(sessions) > 1:
        raise ValueError("these variables belong to several sessions; get them one by one")
    return sessions.pop() if sessions else None
