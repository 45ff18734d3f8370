"""Performs the actions of the sessions' state machines on the engine.

```
 SessionStateMachine ─actions─▶ Runner ─▶ task of an LLM call ─▶ prompt ─▶ engine ─▶ transform ─┐
     ▲                             │                                                            │
     └── finished, failed ─────────┼────────────────────────────────────────────────────────────┘
                                   └──▶ subscribers: settled values, streamed text
```

The task of an LLM call ends with one call of `finished` or `failed` of the state machine, unless
the state machine has ended the LLM call and its AbortCall has cancelled the task. `PlainCall`
records a request of a plain OpenAI client in a session.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Protocol

from bros.core.clock import Clock
from bros.core.errors import EngineDeadError
from bros.core.fair import FairThreads
from bros.core.interfaces import EngineClient, Placement, Prices
from bros.core.request import Hints, ServiceClass
from bros.core.tenants import TenantAccounts
from bros.semantic.core import objectives
from bros.semantic.core.estimates import (
    CallWork,
    Estimates,
    Function,
    ObservedCall,
    model_prefill_s,
)
from bros.semantic.core.matching import PlainPrompt
from bros.semantic.core.nodes import Call, Level, LlmCall, OutputPiece, Piece, TaskGroup
from bros.semantic.core.prompt import PieceEncoder, Prompt, SubmittedPieces, piece_keys
from bros.semantic.core.session import (
    AbortCall,
    Action,
    DemoteCall,
    Prefill,
    PromoteCall,
    Settled,
    Start,
)
from bros.semantic.core.template import Text
from bros.semantic.errors import Cause, FailedStage
from bros.semantic.schema import CallState
from bros.semantic.service.generating import (
    GenerationTerms,
    LlmAnswer,
    LlmCallFailedError,
    LlmCallGenerator,
    LlmRequest,
)
from bros.semantic.service.live import (
    CallRecord,
    GroupStart,
    LlmCallRecord,
    LoadMark,
    ServedSession,
    SessionSettings,
    class_name,
    request_group,
)
from bros.semantic.service.prompting import Prefiller, Prompter
from bros.semantic.transforms.process import TransformRunner
from bros.text.chat_format import ChatFormat
from bros.text.generation import TextGenerator
from bros.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_MIN_TIMER_S = 0.001
_BACKGROUND_TIMEOUT_S = 5.0


class Router(Protocol):
    """What sessions need to know of the router of several engines: a RouterClient."""

    @property
    def num_alive(self) -> int:
        """Number of engines that run."""
        ...

    @property
    def places_groups(self) -> bool:
        """Whether it places the members of a task group that arrive together as one now."""
        ...

    def placement(self, request_id: str) -> Placement | None:
        """Where an engine request is, and why; None if it is unknown or not placed yet."""
        ...


class ProgramRunner:
    """Runs the LLM calls of all sessions of a service.

    ended_calls: number of ended calls by (state, service class or "").
    """

    def __init__(
        self,
        generator: TextGenerator,
        engine: EngineClient,
        tokenizer: Tokenizer,
        clock: Clock,
        settings: SessionSettings,
        threads: FairThreads,
        transforms: TransformRunner,
        router: Router | None,
        accounts: TenantAccounts,
        chat: ChatFormat,
    ) -> None:
        self._engine = engine
        self._router = router
        self._tokenizer = tokenizer
        self._chat = chat
        self._clock = clock
        self._settings = settings
        self._estimates = Estimates()
        self._submitted = SubmittedPieces()
        self._encoder = PieceEncoder(tokenizer, chat.escape)
        self._prompter = Prompter(self._encoder, threads, transforms, engine, accounts)
        self._llm_calls = LlmCallGenerator(generator, engine, clock, settings)
        self._open = generator.open
        self._prefiller = Prefiller(
            self._prompter, engine, clock, settings, accounts, generator.public
        )
        self._background_tasks: set[asyncio.Task[None]] = set()
        self.ended_calls: Counter[tuple[str, str]] = Counter()

    @property
    def text_beginning(self) -> tuple[int, ...]:
        """The tokens before the first piece of a plain-text prompt."""
        return self._encoder.beginning

    @property
    def num_prefills(self) -> int:
        """Number of prefill-only requests that the engine has accepted so far."""
        return self._prefiller.count

    def close(self) -> None:
        """End running transforms."""
        self._prompter.close()

    def carry_out(self, session: ServedSession) -> None:
        """Perform the actions of a session's state machine, in order; callers do this after every
        change of it. If there are many, the rest is performed in the next turns of the event loop,
        so that one value which thousands of calls wait for does not block it."""
        session.count_chars()
        while actions := session.machine.take_actions():
            places_groups = self._router is not None and self._router.places_groups
            together = _group_starts(actions) if places_groups else {}
            first = not session.pending
            session.pending += [(action, together) for action in actions]
            if first:
                self._perform(session)
        if session.machine.informs and not session.informing:
            session.informing = True
            asyncio.get_running_loop().call_soon(self._inform, session)
        self._set_timer(session)

    def _inform(self, session: ServedSession) -> None:
        session.informing = False
        session.machine.inform(self._clock.now())
        self.carry_out(session)

    def _perform(self, session: ServedSession) -> None:
        for _ in range(min(ACTIONS_PER_TURN, len(session.pending))):
            # It is pending while it is performed: actions that follow from it come later.
            action, together = session.pending[0]
            try:
                self._do(session, action, together)
            except Exception:  # the other actions must still be performed
                logger.exception("%r in session %s failed", action, session.id)
            session.pending.popleft()
        if session.pending:
            asyncio.get_running_loop().call_soon(self._perform, session)

    def estimate(self, session: ServedSession, llm_call: LlmCall) -> float:
        """Predicted seconds of an LLM call that has become real-time."""
        work = self._work(session, llm_call)
        return self._estimates.seconds(work, self._prices, self._clock.now())

    def _per_engine(self, requests: float) -> float:
        engines = 1 if self._router is None else self._router.num_alive
        return max(0.0, requests) / max(1, engines)

    def load(self, session: ServedSession) -> LoadMark:
        """The load of the engine at the present time."""
        return session.load.at(self._clock.now(), self._open)

    # Insight for views

    def rest_s(self, session: ServedSession, llm_call: LlmCall, beside: float | None) -> float:
        """Predicted seconds that an open LLM call takes in its present class, see
        explanation.Rest."""
        work, prices, now = self._work(session, llm_call), self._prices, self._clock.now()
        if beside is not None:
            work = dataclasses.replace(work, members=beside)
        call_record = session.records.get(llm_call.call.id) or CallRecord()
        record = call_record.llm_calls.get(llm_call.index, LlmCallRecord())
        real_time = llm_call.label.level is Level.RT
        service_class = record.service_class or (ServiceClass.RT if real_time else ServiceClass.BE)
        started = llm_call.first_token_s is not None
        left = work.output_tokens - record.output_tokens if started else work.output_tokens
        context = work.prompt_tokens + record.output_tokens
        decode_s = self._estimates.decode_s(
            max(1.0, left), context, prices, service_class, work.members, work.others
        )
        if started:
            return decode_s
        waited_s = 0.0  # in the engine
        if record.attempts and record.submitted_s is not None:
            waited_s = now - record.submitted_s
        return max(decode_s, self._estimates.seconds(work, prices, now, service_class) - waited_s)

    def prefill_s(self, record: LlmCallRecord) -> float:
        """Predicted seconds of the prefill of a submitted LLM call."""
        return self._estimates.prefill_s(
            record.prompt_tokens,
            record.cached_tokens,
            self._prices,
            record.service_class or ServiceClass.RT,
        )

    def model_prefill_s(self, record: LlmCallRecord) -> float:
        """Seconds of this prefill by the engine's cost model alone."""
        return model_prefill_s(record.prompt_tokens, record.cached_tokens, self._prices)

    def placement(self, request_id: str) -> Placement | None:
        """Where an engine request is; None without a router, or if it does not know it any more."""
        return None if self._router is None else self._router.placement(request_id)

    def terms(self, session: ServedSession, llm_call: LlmCall) -> GenerationTerms:
        """The current scheduling parameters of a started LLM call."""
        assert llm_call.ready_s is not None
        found = self._terms(session, llm_call, llm_call.ready_s)  # its arrival in the engine
        prompt = session.record(llm_call.call.id).prompt
        assert prompt is not None
        hints = Hints(
            program=session.uid,
            depth=llm_call.depth,
            group=request_group(session, llm_call),
            expected_tokens=self._expected_tokens(session.tenant, llm_call),
            private_from=prompt.private_from,
            private_salt=session.sharing.private_salt or "",
            keep_s=0.0 if llm_call.next is None else self._settings.pin_s,
        )
        return GenerationTerms(service_class=found.service_class, slo=found.slo, hints=hints)

    def follow_label(self, session: ServedSession, llm_call: LlmCall) -> None:
        """The label of an LLM call may have changed since it was submitted: promote or demote it,
        or tell the engine that its terms have become stricter."""
        record = session.record(llm_call.call.id).llm_call(llm_call.index)
        if llm_call.label.level is Level.RT:
            self._promote(session, llm_call, record)
        elif record.service_class is ServiceClass.RT:
            _demote(llm_call, record)

    def _promote(self, session: ServedSession, llm_call: LlmCall, record: LlmCallRecord) -> None:
        needs, told = objectives.needs(llm_call), record.needs
        if record.request_id is None or told is None:
            return  # `_Watcher.accepted` comes back to it
        best_effort = record.service_class is ServiceClass.BE
        relegated = best_effort and told.label.level is Level.RT
        # The engine is overloaded then, which an earlier deadline is no reason to ignore.
        if needs == told or (relegated and needs.undated == told.undated):
            return
        record.needs = needs
        if best_effort:
            record.service_class = ServiceClass.RT
            record.promoted = True
        slo = self._terms(session, llm_call, self._clock.now()).slo
        self._in_background(self._engine.promote(record.request_id, slo, needs.awaited))

    def plain_hints(self, session: ServedSession, call: Call) -> Hints:
        """Engine hints for a request of a plain client. In a session with private content all of
        it is private, because nothing says which part is constant."""
        private_salt = session.sharing.private_salt
        return Hints(
            program=session.uid,
            depth=call.llm_calls[0].depth,
            expected_tokens=self._expected_tokens(session.tenant, call.llm_calls[0]),
            private_from=None if private_salt is None else 0,
            private_salt=private_salt or "",
            keep_s=self._settings.pin_s,
        )

    def learn_tokens(self, session: ServedSession, call: Call, output_tokens: int) -> None:
        """Count the tokens that an LLM call of this call has generated."""
        self._estimates.observe_tokens(_function(session.tenant, call), output_tokens)

    def release(self, request_ids: Sequence[str]) -> None:
        """Unpin the KV of these engine requests."""
        for request_id in request_ids:
            self._in_background(self._engine.release(request_id))

    async def stop(self, session: ServedSession, closing: Iterator[None]) -> None:
        """Close a session, cancel all its tasks, unpin its KV and wait until that is done. Then let
        go of what it had.

        closing: the slices of `SessionStateMachine.closing` that are left.
        """
        for _ in closing:
            self.carry_out(session)
            await asyncio.sleep(0)
        self.carry_out(session)
        while session.pending:
            await asyncio.sleep(0)
        if session.timer is not None:
            session.timer.cancel()
        tasks = [*session.tasks.values()]
        tasks += [
            record.prefill for record in session.records.values() if record.prefill is not None
        ]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for record in session.records.values():
            record.prefill = None
        for request_ids in session.last_plain.values():
            self.release(request_ids)
        session.last_plain.clear()
        if self._background_tasks:
            await asyncio.wait(self._background_tasks, timeout=_BACKGROUND_TIMEOUT_S)
        for _ in session.dismantling():
            await asyncio.sleep(0)

    def _do(
        self, session: ServedSession, action: Action, together: Mapping[LlmCall, GroupStart]
    ) -> None:
        match action:
            case Start(llm_call):
                start = together.get(llm_call)
                if not llm_call.started:  # it has ended since
                    if start is not None:
                        start.leave(llm_call)
                    return
                record = session.record(llm_call.call.id)
                record.running += 1
                task = asyncio.create_task(self._run(session, llm_call, start))
                session.tasks[llm_call] = task
                if start is not None:
                    task.add_done_callback(lambda _: start.leave(llm_call))
                task.add_done_callback(lambda _: self._on_task_done(session, llm_call))
            case PromoteCall(llm_call) | DemoteCall(llm_call):
                self.follow_label(session, llm_call)
            case AbortCall(llm_call):
                if llm_call in session.tasks:
                    session.tasks[llm_call].cancel()
            case Prefill(llm_call):
                prefill = self._prefiller.start(session, llm_call)
                if prefill is not None:
                    prefill.add_done_callback(
                        lambda _: self._release_if_over(session, llm_call.call)
                    )
            case Settled(variable, call):
                session.settled.notify(variable)
                session.streamed.notify(variable)
                if call is not None:
                    self._count(session, call)
                    self._release_if_over(session, call)

    def _count(self, session: ServedSession, call: Call) -> None:
        record = session.record(call.id)
        if not call.open and not record.counted:
            record.counted = True
            self.ended_calls[call.state.value, class_name(session, call)] += 1

    async def _run(
        self, session: ServedSession, llm_call: LlmCall, start: GroupStart | None
    ) -> None:
        """The body of an LLM call's task.

        start: of the members of its task group that start together with it.
        """
        try:
            request = await self._prepare(session, llm_call)
            if start is not None:
                await start.ready(llm_call)
            watcher = _Watcher(self, session, llm_call, self._clock)
            answer = await self._llm_calls.run(request, watcher)
            await self._finish(session, llm_call, answer)
        except LlmCallFailedError as error:
            call = llm_call.call
            cause = Cause(call.id, error.stage, error.message, error.variable, call.name)
            session.machine.failed(llm_call, cause, self._clock.now())
        except Exception:
            logger.exception("LLM call %d of %s failed", llm_call.index, llm_call.call.id)
            self._fail_internally(session, llm_call)
        self.carry_out(session)

    def _fail_internally(self, session: ServedSession, llm_call: LlmCall) -> None:
        message = "An internal error occurred; see the server's log."
        cause = Cause(llm_call.call.id, FailedStage.GENERATE, message, name=llm_call.call.name)
        session.machine.failed(llm_call, cause, self._clock.now())

    def _on_task_done(self, session: ServedSession, llm_call: LlmCall) -> None:
        del session.tasks[llm_call]
        session.last_activity_s = self._clock.now()
        if llm_call.open:  # the task was cancelled, but not by the state machine
            logger.error(
                "LLM call %d of %s was cancelled unexpectedly", llm_call.index, llm_call.call.id
            )
            self._fail_internally(session, llm_call)
            self.carry_out(session)
        call_record = session.record(llm_call.call.id)
        call_record.running -= 1
        record = call_record.llm_call(llm_call.index)
        record.text = ""
        if record.decoding is not None:
            session.load.decoding.change(-1, self._clock.now())
            record.decoding = None
        if record.request_id is not None:  # while the router remembers it
            record.placement = self.placement(record.request_id)
        self._release_if_over(session, llm_call.call)

    def _release_if_over(self, session: ServedSession, call: Call) -> None:
        """If a call and its tasks have ended, unpin its KV and drop its prompt.

        The engine has seen the end of the call's requests by then.
        """
        record = session.records.get(call.id)
        if record is None or call.open or record.running:
            return
        if record.prefill is not None and not record.prefill.done():
            record.prefill.cancel()  # its done callback calls this method again
            return
        record.prefill = None
        self.release(tuple(record.pinned))
        record.pinned.clear()
        if record.prompt is not None:
            record.prefixes, record.prompt = record.prompt.prefixes, None
            session.count_prompt(record)

    async def _prepare(self, session: ServedSession, llm_call: LlmCall) -> LlmRequest:
        """Complete the prompt of an LLM call."""
        async with session.starting:
            await asyncio.sleep(0)  # let other tasks run between bursts of starts
        await self._prefiller.stop(session, llm_call)
        prompt = await self._prompter.extend(session, llm_call)
        call, piece = llm_call.call, _output_piece(llm_call)
        token_ids = prompt.token_ids()
        record = session.record(call.id).llm_call(llm_call.index)
        record.prompt_tokens = len(token_ids)
        pieces = call.pieces[: llm_call.prompt_end]
        chars, _ = _known_chars(session, pieces)
        function = _function(session.tenant, call)
        self._estimates.observe_prompt(function, chars, len(token_ids))
        record.requested_tokens = max(
            session.requested_prefixes.num_tokens(token_ids),
            self._submitted_tokens(session, pieces),
        )
        session.requested_prefixes.add(token_ids)
        self._note_submitted(session, pieces, prompt)
        assert llm_call.ready_s is not None, "the LLM call has been started"
        return LlmRequest(
            request_id=call.id if len(call.llm_calls) == 1 else f"{call.id}.{llm_call.index}",
            prompt=prompt,
            sampling=piece.sampling,
            grammar=piece.grammar,
            parsing=piece.parsing,
            tenant=session.tenant,
            arrival_s=llm_call.ready_s,
        )

    async def _finish(
        self, session: ServedSession, llm_call: LlmCall, generated: LlmAnswer
    ) -> None:
        """Transform the generated text, extend the prompt by it, and finish the LLM call."""
        piece, record = _output_piece(llm_call), session.record(llm_call.call.id)
        prompt = record.prompt
        assert prompt is not None
        no_stop = not piece.sampling.stop
        sequence = generated.token_ids
        if not no_stop:
            # The generated tokens may extend beyond the text, so it is encoded anew.
            reasoning = generated.token_ids[: generated.reasoning_tokens]
            sequence = reasoning + await self._prompter.encode(session.tenant, generated.text)
        text, token_ids = generated.text, None
        if piece.transforms is not None:
            text = await self._prompter.transform(
                session.tenant, piece.transforms, text, FailedStage.TRANSFORM, llm_call.output.id
            )
        elif no_stop and self._is_exact(generated, continued=piece.parsing is None):
            token_ids = generated.token_ids
        prompt.add(sequence, llm_call.output.id)
        session.count_prompt(record)
        now = self._clock.now()
        self._learn(session, llm_call, generated, now)
        session.machine.finished(llm_call, text, token_ids, now)

    def _is_exact(self, generated: LlmAnswer, *, continued: bool) -> bool:
        """Whether the tokens are those of the text as a value: they decode to exactly that, which
        omits special tokens, and none of it reads like a marker, such as that of a tool call.

        continued: the text goes on where its prompt ends, see IncrementalDetokenizer.
        """
        text = generated.text
        written = self._tokenizer.decode(
            generated.token_ids, skip_special_tokens=False, continued=continued
        )
        return written == text and self._chat.escape(text) == text

    def _learn(
        self, session: ServedSession, llm_call: LlmCall, generated: LlmAnswer, now: float
    ) -> None:
        record = session.record(llm_call.call.id).llm_call(llm_call.index)
        assert record.submitted_s is not None, "the engine has answered"
        first_s = now if llm_call.first_token_s is None else llm_call.first_token_s
        alike = record.attempts == 1 and not record.promoted
        load = self.load(session)
        first = record.decoding or load
        decoded_s = max(now - first_s, 1e-9)
        own_s = 0.0 if record.decoding is None else self.model_prefill_s(record)
        observed = ObservedCall(
            service_class=record.service_class if alike else None,
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens,
            output_tokens=generated.output_tokens,
            ttft_s=first_s - record.submitted_s,
            decode_s=now - first_s,
            rows=(load.decoded_s - first.decoded_s) / decoded_s,
            others=self._per_engine((load.others_s - first.others_s) / decoded_s),
            prefilled_before_s=first.prefilled_s - record.started.prefilled_s - own_s,
            prefilled_after_s=load.prefilled_s - first.prefilled_s,
        )
        function = _function(session.tenant, llm_call.call)
        self._estimates.observe(function, observed, self._prices, now)

    def _terms(
        self, session: ServedSession, llm_call: LlmCall, now: float
    ) -> objectives.EngineTerms:
        expected = self._expected_tokens(session.tenant, llm_call)
        return objectives.terms(llm_call, now, expected, self._engine.info.default_slo)

    def _work(self, session: ServedSession, llm_call: LlmCall) -> CallWork:
        """What the engine is expected to do for an LLM call.

        The prompt of an LLM call that has not been submitted consists of values that may not be
        known yet. What is cached of it when it starts is what earlier LLM calls of its call
        compute, what an earlier call of the session begins with too, what is known before a value
        that is still to be generated, or what was submitted before.
        """
        call, members = llm_call.call, max((len(g.members) for g in llm_call.groups), default=1)
        output = self._expected_tokens(session.tenant, llm_call, members)
        others = self._per_engine(self._open.count - session.load.open.count)
        call_record = session.records.get(call.id) or CallRecord()
        record = call_record.llm_calls.get(llm_call.index, LlmCallRecord())
        if record.prompt_tokens:
            return CallWork(
                prompt_tokens=record.prompt_tokens,
                cached_tokens=self._expected_cached(llm_call, record),
                output_tokens=output,
                members=members,
                others=others,
            )
        pieces, previous = call.pieces[: llm_call.prompt_end], llm_call.previous
        own_from = 0 if previous is None else previous.prompt_end + 1
        own_from = max(own_from, call_record.shared.earlier, _prefilled_ahead(session, pieces))
        beside_from = max(own_from, call_record.shared.any)
        cached = self._piece_tokens(session, call, pieces[:own_from])
        beside = cached + self._piece_tokens(session, call, pieces[own_from:beside_from])
        prompt = beside + self._piece_tokens(session, call, pieces[beside_from:])
        submitted = max(record.prefilled_tokens, self._submitted_tokens(session, pieces))
        cached = min(max(cached, submitted), prompt)
        return CallWork(
            prompt_tokens=prompt,
            cached_tokens=cached,
            cached_beside=max(cached, beside),
            output_tokens=output,
            members=members,
            others=others,
        )

    def _expected_cached(self, llm_call: LlmCall, record: LlmCallRecord) -> int:
        """Prompt tokens of a submitted LLM call that are cached, as far as is known: by the engine
        once it has its first token, before that by the router, or by what was submitted before."""
        if llm_call.first_token_s is not None:
            return record.cached_tokens
        placed = None if record.request_id is None else self.placement(record.request_id)
        return record.requested_tokens if placed is None else placed.expected_tokens

    def _submitted_tokens(self, session: ServedSession, pieces: Sequence[Piece]) -> int:
        """Prompt tokens of whole pieces that were submitted before."""
        keys = piece_keys(session.sharing, pieces, session.machine.graph.variables)
        return self._submitted.num_tokens(keys)

    def _note_submitted(
        self, session: ServedSession, pieces: Sequence[Piece], prompt: Prompt
    ) -> None:
        keys = piece_keys(session.sharing, pieces, session.machine.graph.variables)
        info = self._engine.info
        capacity = info.num_kv_blocks * info.block_size
        self._submitted.add(keys, (prefix.offset for prefix in prompt.prefixes), capacity)

    def _piece_tokens(self, session: ServedSession, call: Call, pieces: Sequence[Piece]) -> float:
        """About how many tokens these pieces of the call's prompt have."""
        chars, coming = _known_chars(session, pieces)
        function = _function(session.tenant, call)
        return self._estimates.prompt_tokens(function, chars) + sum(
            self._expected_tokens(session.tenant, producer) for producer in coming
        )

    @property
    def _prices(self) -> Prices | None:
        """None if the engine has no cost model, or no engine is up yet."""
        try:
            return self._engine.info.prices
        except EngineDeadError:
            return None

    def _expected_tokens(self, tenant: str, llm_call: LlmCall, calls: int = 1) -> int:
        """Expected output tokens of the longest of this many calls like this one, from earlier
        calls of its function."""
        most = None if llm_call.native else _output_piece(llm_call).sampling.max_tokens
        return round(self._estimates.longest_tokens(_function(tenant, llm_call.call), most, calls))

    def _set_timer(self, session: ServedSession) -> None:
        if session.timer is not None:
            session.timer.cancel()
            session.timer = None
        due_s = None if session.machine.closed else session.machine.due()
        if due_s is not None:
            delay_s = max(due_s - self._clock.now(), _MIN_TIMER_S)
            session.timer = asyncio.get_running_loop().call_later(delay_s, self._tick, session)

    def _tick(self, session: ServedSession) -> None:
        session.timer = None
        session.machine.tick(self._clock.now())
        self.carry_out(session)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(_log_errors(work))
        self._background_tasks.add(task)
        task.add_done_callback(self._background_tasks.discard)


ACTIONS_PER_TURN = 100
"""Actions of a session that are performed in one turn of the event loop. A call that starts takes
about 0.05 ms of it, and the turn of 10,000 starts took 50 to 90 ms."""


def _group_starts(actions: Sequence[Action]) -> dict[LlmCall, GroupStart]:
    """The group starts of LLM calls that these actions start, by LLM call."""
    by_group: dict[TaskGroup, list[LlmCall]] = {}
    for action in actions:
        if isinstance(action, Start) and (group := action.llm_call.group) is not None:
            by_group.setdefault(group, []).append(action.llm_call)
    found: dict[LlmCall, GroupStart] = {}
    for members in by_group.values():
        if len(members) > 1:
            found |= dict.fromkeys(members, GroupStart(members))
    return found


def _demote(llm_call: LlmCall, record: LlmCallRecord) -> None:
    """Have an LLM call that waits in the engine as real-time submitted again as best-effort. One
    that has its first token goes on: it would lose what it has generated."""
    if llm_call.state is CallState.READY and record.withdraw is not None:
        record.withdraw()
        record.withdraw = record.request_id = record.service_class = None


class _Watcher:
    """Updates the record of an LLM call while it runs on the engine."""

    def __init__(
        self, runner: ProgramRunner, session: ServedSession, llm_call: LlmCall, clock: Clock
    ) -> None:
        self._runner = runner
        self._session = session
        self._llm_call = llm_call
        self._clock = clock
        self._call = session.record(llm_call.call.id)
        self._record = self._call.llm_call(llm_call.index)
        self._superseded: tuple[str, ...] = ()
        self._submitted_class = ServiceClass.BE
        self._submitted_needs: objectives.Needs | None = None

    def terms(self) -> GenerationTerms:
        if self._llm_call.group is not None:
            self._record.group = self._llm_call.group.id
        self._record.submitted_s = self._clock.now()
        self._record.started = self._runner.load(self._session)
        self._submitted_needs = objectives.needs(self._llm_call)
        terms = self._runner.terms(self._session, self._llm_call)
        self._submitted_class = terms.service_class
        return terms

    @property
    def service_class(self) -> ServiceClass:
        is_real_time = self._llm_call.label.level is Level.RT
        return ServiceClass.RT if is_real_time else ServiceClass.BE

    def accepted(
        self, request_id: str, service_class: ServiceClass, withdraw: Callable[[], None]
    ) -> None:
        self._record.request_id = request_id
        self._record.service_class = service_class
        self._record.needs = self._submitted_needs
        self._record.attempts += 1
        self._record.text = ""
        self._superseded = tuple(self._call.pinned)
        if self._llm_call.next is not None:
            self._call.pinned.add(request_id)
        if self._submitted_class is ServiceClass.RT:
            self._session.load.open.change(1, self._clock.now())
        self._record.withdraw = withdraw
        # If its label has changed since `terms`, the engine had no request to promote or withdraw.
        self._runner.follow_label(self._session, self._llm_call)

    def progress(self, text: str, cached_tokens: int, output_tokens: int) -> None:
        record = self._record
        record.cached_tokens, record.output_tokens = cached_tokens, output_tokens
        if output_tokens and self._llm_call.first_token_s is None:
            now = self._clock.now()
            self._session.load.prefilled_s += self._runner.model_prefill_s(record)
            self._session.load.decoding.change(1, now)
            record.decoding = self._runner.load(self._session)
            self._session.machine.first_token(self._llm_call, now)
            self._runner.carry_out(self._session)
        if output_tokens and self._superseded:  # this request now holds the KV that they pinned
            self._runner.release(self._superseded)
            self._call.pinned.difference_update(self._superseded)
            self._superseded = ()
        if len(text) > len(record.text):
            record.text = text
            self._session.streamed.notify(self._llm_call.output)

    def ended(self) -> None:
        self._record.withdraw = None
        if self._submitted_class is ServiceClass.RT:
            self._session.load.open.change(-1, self._clock.now())


def _prefilled_ahead(session: ServedSession, pieces: Sequence[Piece]) -> int:
    """Number of leading pieces with known values before the first one that an LLM call is still to
    generate, during which they are prefilled."""
    for number, piece in enumerate(pieces):
        if isinstance(piece, Text):
            continue
        variable = session.machine.graph.variables.get(piece.variable_id)
        if variable is not None and variable.text is None:
            producer = variable.producer
            return 0 if producer is None or producer.native else number
    return 0


def _known_chars(session: ServedSession, pieces: Sequence[Piece]) -> tuple[int, list[LlmCall]]:
    """Characters of the known texts of these pieces, and the producers of those not known yet."""
    chars, coming = 0, []
    for piece in pieces:
        if isinstance(piece, Text):
            chars += len(piece.text)
            continue
        variable = session.machine.graph.variables.get(piece.variable_id)
        if variable is None:
            continue
        if variable.text is not None:
            chars += len(variable.text)
        elif variable.producer is not None:
            coming.append(variable.producer)
    return chars, coming


def _function(tenant: str, call: Call) -> Function:
    return tenant, call.name


def _output_piece(llm_call: LlmCall) -> OutputPiece:
    piece = llm_call.call.pieces[llm_call.prompt_end]
    assert isinstance(piece, OutputPiece)
    return piece


async def _log_errors(work: Coroutine[Any, Any, None]) -> None:
    """Await background work and log its errors."""
    try:
        await work
    except EngineDeadError:
        pass
    except Exception:
        logger.exception("a message to the engine failed")


class PlainCall:
    """A request of a plain OpenAI client, recorded as a call of a session.

    The server must call `finished`, `failed` or `cancelled` in the end; only the first call
    counts. No method raises, even after the session has ended.
    """

    def __init__(
        self,
        runner: ProgramRunner,
        session: ServedSession,
        llm_call: LlmCall,
        prompt: PlainPrompt,
        clock: Clock,
    ) -> None:
        """Only SessionService.join creates it."""
        self.request_id = llm_call.call.id
        self.hints = runner.plain_hints(session, llm_call.call)
        self._runner = runner
        self._session = session
        self._llm_call = llm_call
        self._prompt = prompt
        self._clock = clock
        self._record = session.record(llm_call.call.id).llm_call(0)
        self._engine_ids: tuple[str, ...] = ()
        self._over = False
        session.num_plain += 1

    def accepted(self, service_class: ServiceClass, engine_ids: Sequence[str] = ()) -> None:
        """The engine has accepted the request.

        engine_ids: its engine requests, whose KV stays pinned for the next request of this name,
        at most until the session ends.
        """
        self._record.service_class = service_class
        self._record.attempts = 1
        self._engine_ids = tuple(engine_ids)
        self._record.request_id = next(iter(engine_ids), None)

    def first_token(self) -> None:
        """The engine has generated the first token."""
        self._session.machine.first_token(self._llm_call, self._clock.now())
        self._release_previous()
        self._runner.carry_out(self._session)

    def finished(
        self, text: str, *, prompt_tokens: int, cached_tokens: int, output_tokens: int
    ) -> None:
        """The answer is complete."""
        if self._over:
            return
        record = self._record
        record.prompt_tokens, record.cached_tokens = prompt_tokens, cached_tokens
        record.output_tokens = output_tokens
        self._runner.learn_tokens(self._session, self._llm_call.call, output_tokens)
        self._release_previous()
        if self._session.machine.closed:
            self._runner.release(self._engine_ids)
        else:
            name = self._llm_call.call.name
            self._runner.release(self._session.keep_plain(name, self._engine_ids))
        self._llm_call.output.quotation = self._prompt.contains(text)
        self._session.machine.finished(self._llm_call, text, None, self._clock.now())
        self._end()

    def failed(self, message: str) -> None:
        """The engine rejected the request, or failed."""
        self._fail(self._cause(FailedStage.GENERATE, message))

    def cancelled(self) -> None:
        """The client disconnected."""
        self._fail(self._cause(FailedStage.CANCELLED, "The client disconnected."))

    def _cause(self, stage: FailedStage, message: str) -> Cause:
        return Cause(self.request_id, stage, message, name=self._llm_call.call.name)

    def _fail(self, cause: Cause) -> None:
        if not self._over:
            self._runner.release(self._engine_ids)  # some of several choices may have finished
            self._session.machine.failed(self._llm_call, cause, self._clock.now())
            self._end()

    def _release_previous(self) -> None:
        """Unpin the KV of the previous request of this name; this request now holds it."""
        self._runner.release(self._session.last_plain.pop(self._llm_call.call.name, ()))

    def _end(self) -> None:
        self._over = True
        if self._record.request_id is not None:
            self._record.placement = self._runner.placement(self._record.request_id)
        self._session.num_plain -= 1
        self._session.last_activity_s = self._clock.now()
        self._runner.carry_out(self._session)
