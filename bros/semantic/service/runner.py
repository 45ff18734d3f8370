"""Carries out on the engine what the state machines of sessions decide.

```
 SessionStateMachine ──actions──▶ Runner ──▶ task of a turn ──▶ prompt ──▶ engine ──▶ transform ─┐
     ▲                               │                                                           │
     └── finished, failed ───────────┼───────────────────────────────────────────────────────────┘
                                     └──▶ readers: values that are settled, texts that grow
```

The task of a turn ends in one call of `finished` or `failed` of the state machine, unless the state
machine itself has ended the turn and had the task cancelled. `Joined` records in a session what
plain OpenAI clients run themselves.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Sequence
from typing import Any

from bros.core.clock import Clock
from bros.core.errors import EngineDeadError
from bros.core.interfaces import EngineClient
from bros.core.request import Hints, ServiceClass
from bros.semantic.core import objectives
from bros.semantic.core.nodes import Call, Level, OutputPiece, Turn
from bros.semantic.core.objectives import Estimates
from bros.semantic.core.prompt import PieceEncoder
from bros.semantic.core.session import Abort, Action, Prefill, Promote, Settled, Start
from bros.semantic.core.template import Text
from bros.semantic.errors import Cause, FailedStage
from bros.semantic.service.generating import Asked, Generated, Terms, TurnFailedError, TurnGenerator
from bros.semantic.service.live import ServedSession, SessionSettings, call_state, class_name
from bros.semantic.service.prompting import Prefiller, Prompter, apply
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SOONEST_S = 0.001
_CHARS_PER_TOKEN = 4
_CHORES_S = 5.0


class Runner:
    """One for all sessions of a service. ended_calls: how many, by state and service class."""

    def __init__(
        self,
        generator: TextGenerator,
        engine: EngineClient,
        tokenizer: Tokenizer,
        clock: Clock,
        settings: SessionSettings,
    ) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._clock = clock
        self._settings = settings
        self._estimates = Estimates()
        self._encoder = PieceEncoder(tokenizer)
        self._prompter = Prompter(self._encoder)
        self._turns = TurnGenerator(generator, engine, clock, settings)
        self._prefiller = Prefiller(self._prompter, engine, clock, settings)
        self._chores: set[asyncio.Task[None]] = set()
        self.ended_calls: Counter[tuple[str, str]] = Counter()

    @property
    def text_beginning(self) -> tuple[int, ...]:
        """What prompts begin with that are no conversations."""
        return self._encoder.beginning

    @property
    def num_prefills(self) -> int:
        """Beginnings of prompts that were computed ahead so far."""
        return self._prefiller.count

    def carry_out(self, session: ServedSession) -> None:
        """Do what the core of a session has decided. After every change of it."""
        while actions := session.machine.take_actions():
            for action in actions:
                try:
                    self._do(session, action)
                except Exception:  # the others must not be lost
                    logger.exception("%r in session %s failed", action, session.id)
        self._set_timer(session)

    def estimate(self, tenant: str, turn: Turn) -> float:
        """Seconds that a turn of the model takes, about."""
        prompt_tokens = sum(
            len(piece.text) // _CHARS_PER_TOKEN
            for piece in turn.call.pieces[: turn.prompt_end]
            if isinstance(piece, Text)
        )
        for variable in turn.inputs:
            if variable.text is not None:
                prompt_tokens += len(variable.text) // _CHARS_PER_TOKEN
            elif variable.producer is not None:
                prompt_tokens += self._expected_tokens(tenant, variable.producer)
        return self._estimates.seconds(prompt_tokens, self._expected_tokens(tenant, turn))

    def terms(self, session: ServedSession, turn: Turn) -> Terms:
        """How the engine is to serve a turn that has been started, as of now."""
        assert turn.ready_s is not None
        found = self._terms(session, turn, turn.ready_s)  # objectives count from there
        prompt = session.record(turn.call.id).prompt
        assert prompt is not None
        hints = Hints(
            program=session.uid,
            depth=turn.depth,
            grouped=found.grouped,
            expected_tokens=self._expected_tokens(session.tenant, turn),
            private_from=prompt.private_from,
            private_salt=session.sharing.private_salt,
            keep_s=0.0 if turn.next is None else self._settings.park_s,
        )
        return Terms(service_class=found.service_class, slo=found.slo, hints=hints)

    def promote(self, session: ServedSession, turn: Turn) -> None:
        """Have a turn that was handed over as best-effort served as real-time from now on."""
        record = session.record(turn.call.id).turn(turn.index)
        if record.request_id is not None:  # else it is on its way, see _Watcher.accepted
            record.service_class = ServiceClass.RT
            slo = self._terms(session, turn, self._clock.now()).slo
            self._in_background(self._engine.promote(record.request_id, slo))

    def plain_hints(self, session: ServedSession, call: Call) -> Hints:
        """What the engine is told of a request that a plain client makes itself."""
        return Hints(
            program=session.uid,
            depth=call.turns[0].depth,
            expected_tokens=self._expected_tokens(session.tenant, call.turns[0]),
            keep_s=self._settings.park_s,
        )

    def learn_tokens(self, session: ServedSession, call: Call, output_tokens: int) -> None:
        """A turn of a call has generated so many."""
        self._estimates.observe_tokens(_key(session.tenant, call), output_tokens)

    def release(self, request_ids: Sequence[str]) -> None:
        """What these requests of the engine have kept is not needed any more."""
        for request_id in request_ids:
            self._in_background(self._engine.release(request_id))

    async def stop(self, session: ServedSession) -> None:
        """After its core has been closed: returns once nothing is left of it with the engine."""
        if session.timer is not None:
            session.timer.cancel()
        tasks = [*session.tasks.values()]
        tasks += [record.fill for record in session.records.values() if record.fill is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for request_ids in session.last_plain.values():
            self.release(request_ids)
        session.last_plain.clear()
        if self._chores:
            await asyncio.wait(self._chores, timeout=_CHORES_S)

    def _do(self, session: ServedSession, action: Action) -> None:
        match action:
            case Start(turn):
                task = asyncio.create_task(self._run(session, turn))
                session.tasks[turn] = task
                task.add_done_callback(lambda _: self._ended(session, turn))
            case Promote(turn):
                self.promote(session, turn)
            case Abort(turn):
                if turn in session.tasks:
                    session.tasks[turn].cancel()
            case Prefill(turn):
                fill = self._prefiller.begin(session, turn)
                fill.add_done_callback(lambda _: self._tidy(session, turn.call))
            case Settled(variable, call):
                session.settled.tell(variable)
                session.streamed.tell(variable)
                if call is not None:
                    self._count(session, call)
                    self._tidy(session, call)

    def _count(self, session: ServedSession, call: Call) -> None:
        record = session.record(call.id)
        if not call.open and not record.counted:
            record.counted = True
            self.ended_calls[call_state(call).value, class_name(session, call)] += 1

    async def _run(self, session: ServedSession, turn: Turn) -> None:
        """The task of a turn."""
        try:
            await self._conclude(session, turn, await self._generate(session, turn))
        except TurnFailedError as error:
            call = turn.call
            cause = Cause(call.id, error.stage, error.message, error.variable, call.name)
            session.machine.failed(turn, cause, self._clock.now())
        except Exception:
            logger.exception("turn %d of %s failed", turn.index, turn.call.id)
            self._broken(session, turn)
        self.carry_out(session)

    def _broken(self, session: ServedSession, turn: Turn) -> None:
        message = "The server failed at this request; its log says why."
        cause = Cause(turn.call.id, FailedStage.GENERATE, message, name=turn.call.name)
        session.machine.failed(turn, cause, self._clock.now())

    def _ended(self, session: ServedSession, turn: Turn) -> None:
        del session.tasks[turn]
        session.touched_s = self._clock.now()
        if turn.open:  # cancelled, and not because the core has given it up
            logger.error("turn %d of %s was cancelled from within", turn.index, turn.call.id)
            self._broken(session, turn)
            self.carry_out(session)
        session.record(turn.call.id).turn(turn.index).text = ""
        self._tidy(session, turn.call)

    def _tidy(self, session: ServedSession, call: Call) -> None:
        """Once a call is over and its tasks have ended, nothing of it is kept: neither by the
        engine, which has heard of the end of its requests by then, nor here."""
        record = session.records.get(call.id)
        if record is None or call.open or any(turn in session.tasks for turn in call.turns):
            return
        if record.fill is not None and not record.fill.done():
            record.fill.cancel()  # and this is called again
            return
        self.release(tuple(record.kept))
        record.kept.clear()
        if record.prompt is not None:
            record.prefixes, record.prompt = record.prompt.prefixes, None

    async def _generate(self, session: ServedSession, turn: Turn) -> Generated:
        async with session.starting:
            await asyncio.sleep(0)  # others have their turn on the loop in between
        await self._prefiller.end(session, turn)
        prompt = await self._prompter.grow(session, turn)
        call, sampling = turn.call, _output_piece(turn).sampling
        token_ids = prompt.token_ids()
        session.begun.add(token_ids)
        record = session.record(call.id).turn(turn.index)
        record.prompt_tokens = len(token_ids)
        assert turn.ready_s is not None, "it has been started"
        asked = Asked(
            request_id=call.id if len(call.turns) == 1 else f"{call.id}.{turn.index}",
            token_ids=token_ids,
            sampling=sampling,
            tenant=session.tenant,
            cache_salt=session.sharing.cache_salt,
            arrival_s=turn.ready_s,
        )
        return await self._turns.run(asked, _Watcher(self, session, turn, self._clock))

    async def _conclude(self, session: ServedSession, turn: Turn, generated: Generated) -> None:
        """The value of what has been generated; then the turn is over."""
        piece, prompt = _output_piece(turn), session.record(turn.call.id).prompt
        assert prompt is not None
        # After a stop string the tokens go on, so what the text is encoded as stands for it.
        exact = not piece.sampling.stop
        sequence = generated.token_ids if exact else await self._prompter.encode(generated.text)
        text, token_ids = generated.text, None
        if piece.transforms is not None:
            text = await apply(piece.transforms, text, FailedStage.TRANSFORM, turn.output.id)
        elif exact and self._shows(generated):
            token_ids = generated.token_ids
        prompt.add(sequence, turn.output.id)
        now = self._clock.now()
        self._learn(session, turn, generated, now)
        session.machine.finished(turn, text, token_ids, now)

    def _shows(self, generated: Generated) -> bool:
        """Whether its text says all that its tokens do: special ones, say, are not shown."""
        written = self._tokenizer.decode(generated.token_ids, skip_special_tokens=False)
        return written == generated.text

    def _learn(self, session: ServedSession, turn: Turn, generated: Generated, now: float) -> None:
        self.learn_tokens(session, turn.call, generated.output_tokens)
        if turn.first_token_s is not None and turn.ready_s is not None:
            record = session.record(turn.call.id).turn(turn.index)
            computed = record.prompt_tokens - record.cached_tokens
            self._estimates.observe_prompt(computed, turn.first_token_s - turn.ready_s)
            self._estimates.observe_output(generated.output_tokens - 1, now - turn.first_token_s)

    def _terms(self, session: ServedSession, turn: Turn, now: float) -> objectives.Terms:
        expected = self._expected_tokens(session.tenant, turn)
        return objectives.terms(turn, now, expected, self._engine.info.default_slo)

    def _expected_tokens(self, tenant: str, turn: Turn) -> int:
        """How many tokens a turn is likely to generate: as others of its function and tenant."""
        most = None if turn.native else _output_piece(turn).sampling.max_tokens
        return round(self._estimates.expected_tokens(_key(tenant, turn.call), most))

    def _set_timer(self, session: ServedSession) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        due_s = None if session.machine.closed else session.machine.due()
        if due_s is not None:
            delay_s = max(due_s - self._clock.now(), _SOONEST_S)
            session.timer = asyncio.get_running_loop().call_later(delay_s, self._tick, session)

    def _tick(self, session: ServedSession) -> None:
        session.timer = None
        session.machine.tick(self._clock.now())
        self.carry_out(session)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_quietly(work))
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)


class _Watcher:
    """Keeps the record of a turn while the engine is at it."""

    def __init__(self, runner: Runner, session: ServedSession, turn: Turn, clock: Clock) -> None:
        self._runner = runner
        self._session = session
        self._turn = turn
        self._clock = clock
        self._call = session.record(turn.call.id)
        self._record = self._call.turn(turn.index)
        self._before: tuple[str, ...] = ()
        self._asked = ServiceClass.BE

    def terms(self) -> Terms:
        if self._turn.groups:
            self._record.group = next(iter(self._turn.groups)).id
        terms = self._runner.terms(self._session, self._turn)
        self._asked = terms.service_class
        return terms

    def accepted(self, request_id: str, service_class: ServiceClass) -> None:
        self._record.request_id = request_id
        self._record.service_class = service_class
        self._record.attempts += 1
        self._record.text = ""
        self._before = tuple(self._call.kept)
        if self._turn.next is not None:
            self._call.kept.add(request_id)
        if self._asked is ServiceClass.BE and self._turn.label.level is Level.RT:
            self._runner.promote(self._session, self._turn)  # it has risen while it was asked for

    def progress(self, text: str, cached_tokens: int, output_tokens: int) -> None:
        record = self._record
        record.cached_tokens, record.output_tokens = cached_tokens, output_tokens
        if output_tokens and self._turn.first_token_s is None:
            self._session.machine.first_token(self._turn, self._clock.now())
            self._runner.carry_out(self._session)
        if output_tokens and self._before:  # what they kept is now what this one has
            self._runner.release(self._before)
            self._call.kept.difference_update(self._before)
            self._before = ()
        if len(text) > len(record.text):
            record.text = text
            self._session.streamed.tell(self._turn.output)


def _key(tenant: str, call: Call) -> str:
    """Calls of one are expected to be alike in length."""
    return f"{tenant}\0{call.name}"


def _output_piece(turn: Turn) -> OutputPiece:
    piece = turn.call.pieces[turn.prompt_end]
    assert isinstance(piece, OutputPiece)
    return piece


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """For what nobody waits for."""
    try:
        await work
    except EngineDeadError:
        pass
    except Exception:
        logger.exception("a message to the engine failed")


class Joined:
    """A request that a plain client makes of the engine, recorded as a call of a session.

    One of `finished`, `failed` and `cancelled` must be called in the end; the first one counts,
    and nothing after it does. None of the methods raises, whatever has become of the session.
    """

    def __init__(self, runner: Runner, session: ServedSession, turn: Turn, clock: Clock) -> None:
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
        self._session.machine.first_token(self._turn, self._clock.now())
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
        if self._session.machine.closed:
            self._runner.release(self._engine_ids)
        else:
            self._session.last_plain[self._turn.call.name] = self._engine_ids
        self._session.machine.finished(self._turn, text, None, self._clock.now())
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
            self._session.machine.failed(self._turn, cause, self._clock.now())
            self._end()

    def _let_go(self) -> None:
        """What the request before has kept is now what this one has."""
        self._runner.release(self._session.last_plain.pop(self._turn.call.name, ()))

    def _end(self) -> None:
        self._over = True
        self._session.num_plain -= 1
        self._session.touched_s = self._clock.now()
        self._runner.carry_out(self._session)
