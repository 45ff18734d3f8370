"""Waiting for values, whole or as they grow. Whoever waits is gone as soon as it is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator

from bros.core.clock import Clock
from bros.core.errors import InvalidRequestError
from bros.semantic.errors import GetTimeoutError, SessionLimitError, UpstreamError
from bros.semantic.live import LiveSession, Readers
from bros.semantic.nodes import CallKind, OutputPiece, Variable, open_ancestors
from bros.semantic.registry import gone
from bros.semantic.settings import SessionSettings

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
        self, session: LiveSession, variable: Variable, timeout_s: float | None
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

    async def pieces(self, session: LiveSession, variable: Variable) -> AsyncGenerator[str, None]:
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
        self, session: LiveSession, readers: Readers, variable: Variable
    ) -> Iterator[asyncio.Event]:
        self._count += 1
        try:
            with readers.reading(variable) as news:
                yield news
        finally:
            self._count -= 1
            session.touched_s = self._clock.now()


def check_settled(session: LiveSession, variable: Variable) -> None:
    """Raises SessionGoneError or UpstreamError unless the variable has its value."""
    if variable.text is not None:
        return
    if session.gone is not None:
        raise gone(session.id, session.gone)
    assert variable.cause is not None, "it is not pending"
    raise UpstreamError(variable.cause)


def _unset(variable: Variable) -> str:
    """What a value waits for that no call makes: somebody may have forgotten to set it."""
    needed = [variable, *(v for turn in open_ancestors(variable) for v in turn.inputs)]
    unset = dict.fromkeys(v.id for v in needed if v.pending and v.producer is None)
    if not unset:
        return ""
    shown = ", ".join(list(unset)[:_MAX_SHOWN]) + (", ..." if len(unset) > _MAX_SHOWN else "")
    return f" Nobody has set {shown} so far."


def _text_so_far(session: LiveSession, variable: Variable) -> str:
    """Of a value that is being generated and will be just that."""
    turn = variable.producer
    if turn is None or not turn.started or turn.call.kind is not CallKind.LLM:
        return ""
    piece = turn.call.pieces[turn.prompt_end]
    assert isinstance(piece, OutputPiece)
    if piece.transforms is not None:
        return ""
    return session.record(turn.call.id).turn(turn.index).text
