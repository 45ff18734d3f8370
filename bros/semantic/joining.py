"""Requests of plain clients, which know nothing of variables, as calls of a session."""

from __future__ import annotations

from collections.abc import Sequence

from bros.core.clock import Clock
from bros.core.request import ServiceClass
from bros.semantic.errors import Cause, FailedStage
from bros.semantic.live import LiveSession
from bros.semantic.nodes import Turn
from bros.semantic.runner import Runner


class Joined:
    """A request that a plain client makes of the engine, recorded as a call of a session.

    One of `finished`, `failed` and `cancelled` must be called in the end; the first one counts,
    and nothing after it does. None of the methods raises, whatever has become of the session.
    """

    def __init__(self, runner: Runner, session: LiveSession, turn: Turn, clock: Clock) -> None:
        """Made by SessionService.join."""
        self.request_id = turn.call.id
        self.hints = runner.plain_hints(session, turn.call)
        self._runner = runner
        self._session = session
        self._turn = turn
        self._clock = clock
        self._record = session.record(turn.call.id).turn(0)
        self._engine_ids: tuple[str, ...] = ()
        self._over = False
        session.num_plain += 1

    def accepted(self, service_class: ServiceClass, engine_ids: Sequence[str] = ()) -> None:
        """The engine has taken it. engine_ids: of its requests, whose KV is then kept for the next
        one of this name, and no longer than the session is there."""
        self._record.service_class = service_class
        self._record.attempts = 1
        self._engine_ids = tuple(engine_ids)

    def first_token(self) -> None:
        """It has begun to answer."""
        self._session.core.first_token(self._turn, self._clock.now())
        self._let_go()
        self._runner.carry_out(self._session)

    def finished(
        self, text: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """The whole answer is there."""
        if self._over:
            return
        record = self._record
        record.prompt_tokens, record.cached_tokens = prompt_tokens, cached_tokens
        record.output_tokens = output_tokens
        self._runner.learn_tokens(self._session, self._turn.call, output_tokens)
        self._let_go()
        if self._session.core.closed:
            self._runner.release(self._engine_ids)
        else:
            self._session.last_plain[self._turn.call.name] = self._engine_ids
        self._session.core.finished(self._turn, text, None, self._clock.now())
        self._end()

    def failed(self, message: str) -> None:
        """It was refused, or the engine failed."""
        self._fail(self._cause(FailedStage.GENERATE, message))

    def cancelled(self) -> None:
        """The client left."""
        self._fail(self._cause(FailedStage.CANCELLED, "The client left."))

    def _cause(self, stage: FailedStage, message: str) -> Cause:
        return Cause(self.request_id, stage, message, name=self._turn.call.name)

    def _fail(self, cause: Cause) -> None:
        if not self._over:
            self._runner.release(self._engine_ids)  # of several choices, some may have ended well
            self._session.core.failed(self._turn, cause, self._clock.now())
            self._end()

    def _let_go(self) -> None:
        """What the request before has kept is now what this one has."""
        self._runner.release(self._session.last_plain.pop(self._turn.call.name, ()))

    def _end(self) -> None:
        self._over = True
        self._session.num_plain -= 1
        self._session.touched_s = self._clock.now()
        self._runner.carry_out(self._session)
