"""Carries out on the engine what the state machines of sessions decide.

```
 SessionStateMachine ─actions─▶ Runner ─▶ task of an LLM call ─▶ prompt ─▶ engine ─▶ transform ─┐
     ▲                             │                                                            │
     └── finished, failed ─────────┼────────────────────────────────────────────────────────────┘
                                   └──▶ readers: values that are settled, texts that grow
```

The task of an LLM call ends in one call of `finished` or `failed` of the state machine, unless the
state machine itself has ended the LLM call and had the task cancelled. `Joined` records in a
session what plain OpenAI clients run themselves.
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
from bros.semantic.core.nodes import Call, Level, LlmCall, OutputPiece
from bros.semantic.core.objectives import Estimates
from bros.semantic.core.prompt import PieceEncoder
from bros.semantic.core.session import AbortCall, Action, Prefill, PromoteCall, Settled, Start
from bros.semantic.core.template import Text
from bros.semantic.errors import Cause, FailedStage
from bros.semantic.service.generating import (
    Asked,
    GenerationTerms,
    LlmAnswer,
    LlmCallFailedError,
    LlmCallGenerator,
)
from bros.semantic.service.live import ServedSession, SessionSettings, call_state, class_name
from bros.semantic.service.prompting import Prefiller, Prompter, apply
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_SOONEST_S = 0.001
_CHARS_PER_TOKEN = 4
_CHORES_S = 5.0


class ProgramRunner:
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
        self._llm_calls = LlmCallGenerator(generator, engine, clock, settings)
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

    def estimate(self, tenant: str, llm_call: LlmCall) -> float:
        """Seconds that an LLM call of the model takes, about."""
        prompt_tokens = sum(
            len(piece.text) // _CHARS_PER_TOKEN
            for piece in llm_call.call.pieces[: llm_call.prompt_end]
            if isinstance(piece, Text)
        )
        for variable in llm_call.inputs:
            if variable.text is not None:
                prompt_tokens += len(variable.text) // _CHARS_PER_TOKEN
            elif variable.producer is not None:
                prompt_tokens += self._expected_tokens(tenant, variable.producer)
        return self._estimates.seconds(prompt_tokens, self._expected_tokens(tenant, llm_call))

    def terms(self, session: ServedSession, llm_call: LlmCall) -> GenerationTerms:
        """How the engine is to serve an LLM call that has been started, as of now."""
        assert llm_call.ready_s is not None
        found = self._terms(session, llm_call, llm_call.ready_s)  # objectives count from there
        prompt = session.record(llm_call.call.id).prompt
        assert prompt is not None
        hints = Hints(
            program=session.uid,
            depth=llm_call.depth,
            grouped=found.grouped,
            expected_tokens=self._expected_tokens(session.tenant, llm_call),
            private_from=prompt.private_from,
            private_salt=session.sharing.private_salt,
            keep_s=0.0 if llm_call.next is None else self._settings.park_s,
        )
        return GenerationTerms(service_class=found.service_class, slo=found.slo, hints=hints)

    def promote(self, session: ServedSession, llm_call: LlmCall) -> None:
        """Have an LLM call that was handed over as best-effort served as real-time from now on."""
        record = session.record(llm_call.call.id).llm_call(llm_call.index)
        if record.request_id is not None:  # else it is on its way, see _Watcher.accepted
            record.service_class = ServiceClass.RT
            slo = self._terms(session, llm_call, self._clock.now()).slo
            self._in_background(self._engine.promote(record.request_id, slo))

    def plain_hints(self, session: ServedSession, call: Call) -> Hints:
        """What the engine is told of a request that a plain client makes itself."""
        return Hints(
            program=session.uid,
            depth=call.llm_calls[0].depth,
            expected_tokens=self._expected_tokens(session.tenant, call.llm_calls[0]),
            keep_s=self._settings.park_s,
        )

    def learn_tokens(self, session: ServedSession, call: Call, output_tokens: int) -> None:
        """An LLM call of a call has generated so many."""
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
        tasks += [
            record.prefill for record in session.records.values() if record.prefill is not None
        ]
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
            case Start(llm_call):
                task = asyncio.create_task(self._run(session, llm_call))
                session.tasks[llm_call] = task
                task.add_done_callback(lambda _: self._ended(session, llm_call))
            case PromoteCall(llm_call):
                self.promote(session, llm_call)
            case AbortCall(llm_call):
                if llm_call in session.tasks:
                    session.tasks[llm_call].cancel()
            case Prefill(llm_call):
                prefill = self._prefiller.begin(session, llm_call)
                prefill.add_done_callback(lambda _: self._tidy(session, llm_call.call))
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

    async def _run(self, session: ServedSession, llm_call: LlmCall) -> None:
        """The task of an LLM call."""
        try:
            await self._conclude(session, llm_call, await self._generate(session, llm_call))
        except LlmCallFailedError as error:
            call = llm_call.call
            cause = Cause(call.id, error.stage, error.message, error.variable, call.name)
            session.machine.failed(llm_call, cause, self._clock.now())
        except Exception:
            logger.exception("LLM call %d of %s failed", llm_call.index, llm_call.call.id)
            self._broken(session, llm_call)
        self.carry_out(session)

    def _broken(self, session: ServedSession, llm_call: LlmCall) -> None:
        message = "The server failed at this request; its log says why."
        cause = Cause(llm_call.call.id, FailedStage.GENERATE, message, name=llm_call.call.name)
        session.machine.failed(llm_call, cause, self._clock.now())

    def _ended(self, session: ServedSession, llm_call: LlmCall) -> None:
        del session.tasks[llm_call]
        session.touched_s = self._clock.now()
        if llm_call.open:  # cancelled, and not by the state machine
            logger.error(
                "LLM call %d of %s was cancelled from within", llm_call.index, llm_call.call.id
            )
            self._broken(session, llm_call)
            self.carry_out(session)
        session.record(llm_call.call.id).llm_call(llm_call.index).text = ""
        self._tidy(session, llm_call.call)

    def _tidy(self, session: ServedSession, call: Call) -> None:
        """Once a call is over and its tasks have ended, nothing of it is kept: neither by the
        engine, which has heard of the end of its requests by then, nor here."""
        record = session.records.get(call.id)
        if (
            record is None
            or call.open
            or any(llm_call in session.tasks for llm_call in call.llm_calls)
        ):
            return
        if record.prefill is not None and not record.prefill.done():
            record.prefill.cancel()  # and this is called again
            return
        self.release(tuple(record.kept))
        record.kept.clear()
        if record.prompt is not None:
            record.prefixes, record.prompt = record.prompt.prefixes, None

    async def _generate(self, session: ServedSession, llm_call: LlmCall) -> LlmAnswer:
        async with session.starting:
            await asyncio.sleep(0)  # other tasks run in between
        await self._prefiller.end(session, llm_call)
        prompt = await self._prompter.grow(session, llm_call)
        call, sampling = llm_call.call, _output_piece(llm_call).sampling
        token_ids = prompt.token_ids()
        session.begun.add(token_ids)
        record = session.record(call.id).llm_call(llm_call.index)
        record.prompt_tokens = len(token_ids)
        assert llm_call.ready_s is not None, "it has been started"
        asked = Asked(
            request_id=call.id if len(call.llm_calls) == 1 else f"{call.id}.{llm_call.index}",
            token_ids=token_ids,
            sampling=sampling,
            tenant=session.tenant,
            cache_salt=session.sharing.cache_salt,
            arrival_s=llm_call.ready_s,
        )
        return await self._llm_calls.run(asked, _Watcher(self, session, llm_call, self._clock))

    async def _conclude(
        self, session: ServedSession, llm_call: LlmCall, generated: LlmAnswer
    ) -> None:
        """The value of what has been generated; then the LLM call is over."""
        piece, prompt = _output_piece(llm_call), session.record(llm_call.call.id).prompt
        assert prompt is not None
        # After a stop string the tokens go on, so what the text is encoded as stands for it.
        exact = not piece.sampling.stop
        sequence = generated.token_ids if exact else await self._prompter.encode(generated.text)
        text, token_ids = generated.text, None
        if piece.transforms is not None:
            text = await apply(piece.transforms, text, FailedStage.TRANSFORM, llm_call.output.id)
        elif exact and self._shows(generated):
            token_ids = generated.token_ids
        prompt.add(sequence, llm_call.output.id)
        now = self._clock.now()
        self._learn(session, llm_call, generated, now)
        session.machine.finished(llm_call, text, token_ids, now)

    def _shows(self, generated: LlmAnswer) -> bool:
        """Whether its text says all that its tokens do: special ones, say, are not shown."""
        written = self._tokenizer.decode(generated.token_ids, skip_special_tokens=False)
        return written == generated.text

    def _learn(
        self, session: ServedSession, llm_call: LlmCall, generated: LlmAnswer, now: float
    ) -> None:
        self.learn_tokens(session, llm_call.call, generated.output_tokens)
        if llm_call.first_token_s is not None and llm_call.ready_s is not None:
            record = session.record(llm_call.call.id).llm_call(llm_call.index)
            computed = record.prompt_tokens - record.cached_tokens
            self._estimates.observe_prompt(computed, llm_call.first_token_s - llm_call.ready_s)
            self._estimates.observe_output(
                generated.output_tokens - 1, now - llm_call.first_token_s
            )

    def _terms(
        self, session: ServedSession, llm_call: LlmCall, now: float
    ) -> objectives.EngineTerms:
        expected = self._expected_tokens(session.tenant, llm_call)
        return objectives.terms(llm_call, now, expected, self._engine.info.default_slo)

    def _expected_tokens(self, tenant: str, llm_call: LlmCall) -> int:
        """Tokens that an LLM call probably generates: as many as others of its function."""
        most = None if llm_call.native else _output_piece(llm_call).sampling.max_tokens
        return round(self._estimates.expected_tokens(_key(tenant, llm_call.call), most))

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
    """Keeps the record of an LLM call while the engine is at it."""

    def __init__(
        self, runner: ProgramRunner, session: ServedSession, llm_call: LlmCall, clock: Clock
    ) -> None:
        self._runner = runner
        self._session = session
        self._llm_call = llm_call
        self._clock = clock
        self._call = session.record(llm_call.call.id)
        self._record = self._call.llm_call(llm_call.index)
        self._before: tuple[str, ...] = ()
        self._asked = ServiceClass.BE

    def terms(self) -> GenerationTerms:
        if self._llm_call.groups:
            self._record.group = next(iter(self._llm_call.groups)).id
        terms = self._runner.terms(self._session, self._llm_call)
        self._asked = terms.service_class
        return terms

    def accepted(self, request_id: str, service_class: ServiceClass) -> None:
        self._record.request_id = request_id
        self._record.service_class = service_class
        self._record.attempts += 1
        self._record.text = ""
        self._before = tuple(self._call.kept)
        if self._llm_call.next is not None:
            self._call.kept.add(request_id)
        if self._asked is ServiceClass.BE and self._llm_call.label.level is Level.RT:
            self._runner.promote(
                self._session, self._llm_call
            )  # it has risen while it was asked for

    def progress(self, text: str, cached_tokens: int, output_tokens: int) -> None:
        record = self._record
        record.cached_tokens, record.output_tokens = cached_tokens, output_tokens
        if output_tokens and self._llm_call.first_token_s is None:
            self._session.machine.first_token(self._llm_call, self._clock.now())
            self._runner.carry_out(self._session)
        if output_tokens and self._before:  # what they kept is now what this one has
            self._runner.release(self._before)
            self._call.kept.difference_update(self._before)
            self._before = ()
        if len(text) > len(record.text):
            record.text = text
            self._session.streamed.tell(self._llm_call.output)


def _key(tenant: str, call: Call) -> str:
    """Calls of one are expected to be alike in length."""
    return f"{tenant}\0{call.name}"


def _output_piece(llm_call: LlmCall) -> OutputPiece:
    piece = llm_call.call.pieces[llm_call.prompt_end]
    assert isinstance(piece, OutputPiece)
    return piece


async def _quietly(work: Coroutine[Any, Any, None]) -> None:
    """Await work whose result is not needed; log its errors."""
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

    def __init__(
        self, runner: ProgramRunner, session: ServedSession, llm_call: LlmCall, clock: Clock
    ) -> None:
        """Made by SessionService.join."""
        self.request_id = llm_call.call.id
        self.hints = runner.plain_hints(session, llm_call.call)
        self._runner = runner
        self._session = session
        self._llm_call = llm_call
        self._clock = clock
        self._record = session.record(llm_call.call.id).llm_call(0)
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
        self._session.machine.first_token(self._llm_call, self._clock.now())
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
        self._runner.learn_tokens(self._session, self._llm_call.call, output_tokens)
        self._let_go()
        if self._session.machine.closed:
            self._runner.release(self._engine_ids)
        else:
            self._session.last_plain[self._llm_call.call.name] = self._engine_ids
        self._session.machine.finished(self._llm_call, text, None, self._clock.now())
        self._end()

    def failed(self, message: str) -> None:
        """It was refused, or the engine failed."""
        self._fail(self._cause(FailedStage.GENERATE, message))

    def cancelled(self) -> None:
        """The client left."""
        self._fail(self._cause(FailedStage.CANCELLED, "The client left."))

    def _cause(self, stage: FailedStage, message: str) -> Cause:
        return Cause(self.request_id, stage, message, name=self._llm_call.call.name)

    def _fail(self, cause: Cause) -> None:
        if not self._over:
            self._runner.release(self._engine_ids)  # of several choices, some may have ended well
            self._session.machine.failed(self._llm_call, cause, self._clock.now())
            self._end()

    def _let_go(self) -> None:
        """What the request before has kept is now what this one has."""
        self._runner.release(self._session.last_plain.pop(self._llm_call.call.name, ()))

    def _end(self) -> None:
        self._over = True
        self._session.num_plain -= 1
        self._session.touched_s = self._clock.now()
        self._runner.carry_out(self._session)
