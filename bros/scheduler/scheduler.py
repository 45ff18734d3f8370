"""The scheduler: plans steps, applies their results, and owns the requests.

    schedule(now) -> StepPlan -> (an executor runs it) -> apply(StepResult, now) -> outputs
                                                       -> suspend_step(plan, SuspendedStep, now)
                                                       -> abort_step(plan, now), if aborted

The policy orders the candidates and bounds the step. `pack` chooses the chunks and allocates their
KV memory (StepMemory). The scheduler commits the choice: requests move to the running queue, and
the tokens of the plan count as computed. While a step runs, the scheduler may plan the next one
(see `assume_done`); a running step is never suspended or aborted once the next one has been
planned.
"""

from __future__ import annotations

import bisect
import dataclasses
import random
from collections.abc import Callable, Container, Iterable, Sequence
from operator import itemgetter

from bros.core.errors import InvalidRequestError, OverloadedError, QueueFullError
from bros.core.fair import FairMemory
from bros.core.interfaces import (
    MAX_TRACES,
    EngineReport,
    EngineStats,
    GrammarState,
    Grouping,
    RequestTrace,
    StopRule,
)
from bros.core.plan import (
    PENDING,
    Chunk,
    Kept,
    ReadPositions,
    SampledToken,
    SharedPrefix,
    StepPlan,
    StepResult,
    SuspendedStep,
)
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Output,
    RequestOutput,
    ServiceClass,
    Slo,
    shortened,
)
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.admission import (
    Limits,
    check_queue,
    objectives,
    promoted_objectives,
    tightened_objectives,
)
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.memory import StepMemory
from bros.scheduler.metrics import ClassCounters
from bros.scheduler.packing import Packing, pack, shared_prefixes
from bros.scheduler.policies import Policy, Proposal
from bros.scheduler.prefixes import Prefixes, look_up
from bros.scheduler.state import SIDES, Queues, RequestState, arrival_s
from bros.scheduler.steps import ExpectedTime, Gains, Newcomer, Step, StepLedger
from bros.scheduler.suspended import SuspendedWork, share_done

# ---- Async scheduling: planning a step while the one before it runs.
#
# Plans run in order, so the next step can use whatever the running step computes:
#
#     its tokens     count as computed since its commit; other requests may share them already
#     its samples    are PENDING: unknown, but each chunk that asks for one will get one
#     its end        is predicted: the next step begins then, and deadlines are judged as of then
#
# If a request turns out to have ended (a stop token, an error, an abort), its row in the next step
# runs for nothing.


def assume_done(step: Step, prefixes: Prefixes, ends_s: float) -> None:
    """Update the requests of a running step as if it had ended at `ends_s`, its predicted end.

    Its full blocks enter the prefix cache now: all token ids that it computes are known by now,
    and a request that finds the blocks reads them in a later step. This must precede the packing
    of the next step, which may preempt tokens that this step computes.
    """
    if not step.assumed_done:
        step.assumed_done = True
        prefixes.publish(step.gains.filled, ())
        step.ends_requests = bool(step.gains.prefilled)
        for state, _ in step.packing.selected:
            # For a request that has ended meanwhile this has no effect.
            if state.samples and state.remaining == 0:
                state.expect_output(ends_s)
                if len(state.token_ids) >= state.max_length:
                    step.ends_requests = True


def without_finishing(proposal: Proposal) -> Proposal:
    """The proposal without requests that have nothing left to compute after the running step."""
    return dataclasses.replace(
        proposal,
        urgent=filter(_has_tokens_left, proposal.urgent),
        best_effort=filter(_has_tokens_left, proposal.best_effort),
    )


def _has_tokens_left(state: RequestState) -> bool:
    return len(state.token_ids) < state.max_length if state.samples else state.remaining > 0


_REPORT_INTERVAL_S, _DIGEST_INTERVAL_S = 0.1, 10.0
"""Shortest time between two reports of a busy engine; longest time between two digests."""


class Reporter:
    """Makes EngineReports for a subscriber. The first one is a digest.

    Until a client subscribes, the cache records no changes, so that this costs nothing.
    """

    def __init__(
        self, kv: KvCacheManager, queues: Queues, predictor: StepTimePredictor | None
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._predictor = predictor
        self._subscribed = False
        self._version = 0
        self._load = (0, 0, 0, 0)
        self._next_report_s = self._next_digest_s = 0.0

    def subscribe(self) -> None:
        """Record changes of the prefix cache from now on."""
        if not self._subscribed:
            self._subscribed = True
            self._kv.subscribe()

    def take(self, now: float, full: bool) -> EngineReport | None:
        """What has changed since the last report; None without changes or without a subscriber.

        full: return a digest in any case.
        """
        if not self._subscribed:
            return None
        full = full or self._version == 0
        kept, load = self._kv.take_cached_lengths(full), self._load_now()
        if not (full or kept or load != self._load):
            return None
        self._version += 1
        self._load = load
        self._next_report_s = now + _REPORT_INTERVAL_S
        if full:
            self._next_digest_s = now + _DIGEST_INTERVAL_S
        running, waiting, used_blocks, cached_blocks = load
        return EngineReport(
            version=self._version,
            full=full,
            cached_prefixes=tuple(kept.items()),
            running=running,
            waiting=waiting,
            used_blocks=used_blocks,
            cached_blocks=cached_blocks,
            slowdown=self._predictor.slowdown if self._predictor else 1.0,
        )

    def due(self, now: float, idle: bool) -> EngineReport | None:
        """`take` after a step, at most once per interval. idle: no work is left; report at once."""
        if not self._subscribed:
            return None
        full = now >= self._next_digest_s
        return self.take(now, full) if full or idle or now >= self._next_report_s else None

    def _load_now(self) -> tuple[int, int, int, int]:
        waiting = sum(map(len, self._queues.waiting.values()))
        kv = self._kv
        return len(self._queues.running), waiting, kv.num_used_blocks, kv.num_cached_blocks


StartGrammar = Callable[[EngineRequest, StopRule], GrammarState]
"""The state of a new output in the grammar of its request. Raises InvalidRequestError."""


def _start_grammar(state: RequestState, start: StartGrammar) -> None:
    """Raises InvalidRequestError if the model or the resumed tokens do not allow the grammar."""
    request = state.request
    grammar = request.sampling.grammar
    assert grammar is not None
    if state.stop_rule is None:
        raise InvalidRequestError(
            "The model has no end-of-sequence token, which grammars need.", grammar.param
        )
    try:
        state.follow(start(request, state.stop_rule))
    except InvalidRequestError:
        raise
    except ValueError as error:
        raise InvalidRequestError(
            f"The output cannot follow the grammar: {error}.", grammar.param, "invalid_grammar"
        ) from error


class Scheduler:
    """Owns every request from `submit` until its last output or `abort`.

    counters: by class; the policy reads them for its estimates.
    grouping: which shared prefixes the executor reads once for all their rows; None: none of them.
    max_kept_tokens: most tokens that are suspended at once.
    reporter: makes the reports of this engine.
    """

    def __init__(
        self,
        policy: Policy,
        kv: KvCacheManager,
        limits: Limits,
        default_slo: Slo,
        counters: dict[ServiceClass, ClassCounters],
        rng: random.Random,
        grouping: Grouping | None = None,
        *,
        max_kept_tokens: int,
    ) -> None:
        self._policy = policy
        self._kv = kv
        self._limits = limits
        self._default_slo = default_slo
        self._counters = counters
        self._rng = rng
        self._grouping = grouping
        self._states: dict[str, RequestState] = {}
        self._queues = Queues()
        self._prefixes = Prefixes(kv, counters)
        self.reporter = Reporter(kv, self._queues, policy.predictor)
        self._arrivals = 0
        self._steps = StepLedger()
        self._suspended = SuspendedWork(kv, max_kept_tokens, policy.on_work_lost)
        self._started: set[str] = set()  # requests whose first step is the latest one
        # The shared prefixes of the latest step: for which chunks, at which version of the cache.
        self._shared: tuple[SharedPrefix, ...] = ()
        self._shared_by: list[tuple[RequestState, int]] = []
        self._shared_as_of = 0
        self._ended: dict[str, RequestOutput] = {}  # ended without a step, not yet taken
        self._traces: FairMemory[str, RequestTrace] = FairMemory(MAX_TRACES)

    @property
    def has_work(self) -> bool:
        return bool(self._states or self._ended)

    def submit(
        self,
        request: EngineRequest,
        now: float,
        start_grammar: StartGrammar | None = None,
        compiled_s: float = 0.0,
    ) -> ServiceClass:
        """Enqueue a request; returns the class that it is served as.

        start_grammar: only if its output has to match a grammar.
        compiled_s: for how long it has waited for that grammar to be compiled.

        Raises InvalidRequestError, PromptTooLongError, QueueFullError or OverloadedError.
        """
        self._limits.check(request)
        if request.request_id in self._states or request.request_id in self._ended:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use.", "request_id")
        asked = request.service_class
        self._check_queue(asked, request.tenant, now)
        if request.prefill_only:
            request = self._prefixes.whole_blocks_of(request)
        seed = request.sampling.seed
        state = RequestState(
            request,
            service_class=asked,
            slo=objectives(request, asked, self._default_slo, now),
            now=now,
            arrival_index=self._arrivals,
            seed=self._rng.getrandbits(63) if seed is None else seed,
            max_length=self._limits.max_model_len,
            eos_token_ids=self._limits.eos_token_ids,
        )
        if request.prefill_only and self._prefixes.has_cached(state):
            self._ended[state.request_id] = self._finish_without_token(state, now)
            return asked
        if start_grammar is not None:
            _start_grammar(state, start_grammar)
            waited_s = request.checked_s + compiled_s
            if waited_s:
                state.record.wait("grammar", waited_s)
        look_up(self._kv, state)
        self._classify(state, now)
        self._policy.assign_rank(state, now)
        self._arrivals += 1
        self._states[request.request_id] = state
        state.record.event(now, f"queued as {state.service_class.value}")
        self._queues.enqueue(state)
        self._prefixes.enqueue(state)
        return state.service_class

    def _check_queue(self, service_class: ServiceClass, tenant: str, now: float) -> None:
        waiting, counters = self._queues.waiting[service_class], self._counters[service_class]
        check_queue(waiting, self._limits.max_queue, tenant, counters, now)

    def _classify(self, state: RequestState, now: float) -> None:
        """Serve a new request as the class that the policy chooses under the present load.

        Raises OverloadedError or QueueFullError.
        """
        asked, counters = state.service_class, self._counters
        try:
            used = self._policy.classify(state, self._queues, self._steps.ends_s(now))
            if used is not asked:
                self._check_queue(used, state.request.tenant, now)
        except (OverloadedError, QueueFullError):
            counters[asked].rejected += 1
            raise
        if used is not asked:
            counters[used].relegated += 1
            slo = objectives(state.request, used, self._default_slo, now)
            state.serve_as(used, slo, state.record.arrival_s)

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """End a request and free its memory; returns its last output, or None if the scheduler does
        not have it (any more).

        A request that has ended without a step (`take_ended`) is not aborted any more: counters,
        trace and pins say how it ended, so its output must say the same.
        """
        state = self._states.get(request_id)
        if state is None:
            return self._ended.pop(request_id, None)
        self._finish(state, FinishReason.ABORT, now)
        return RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)

    def promote(self, request_id: str, slo: Slo, now: float, awaited: bool = True) -> None:
        """Serve a best-effort request as real-time from now on, or a real-time one with stricter
        objectives; see EngineClient.promote.

        Its KV stays where it is. This may be called while a step runs.
        """
        state = self._states.get(request_id)
        if state is None:
            return
        if awaited:
            state.patient = False
        if state.service_class is ServiceClass.RT:
            self._tighten(state, slo, now)
            return
        if not state.running:
            self._steps.note_promotion(state)
            self._prefixes.dequeue(state)
        self._queues.remove(state)
        promoted = promoted_objectives(state, slo, self._default_slo, now)
        state.serve_as(ServiceClass.RT, promoted, now)
        if not state.running:
            look_up(self._kv, state)
        self._policy.assign_rank(state, now)
        if state.running:  # it need not recompute anything, so the usual deadline holds
            state.late, state.deadline_s = False, state.record.due_s
        self._queues.put_back(state)
        self._counters[ServiceClass.RT].promoted += 1
        state.record.event(now, "promoted")

    def _tighten(self, state: RequestState, asked: Slo, now: float) -> None:
        """Hold a real-time request to the stricter ones of its objectives and these."""
        slo = tightened_objectives(state, asked, self._default_slo, now)
        if slo == state.slo:
            return
        waits_on_time = not (state.running or state.late)
        if waits_on_time:
            self._queues.remove(state)
        state.tighten(slo, now)
        if waits_on_time:
            self._policy.assign_rank(state, now)
            self._queues.put_back(state)

    def release(self, request_id: str) -> None:
        """Unpin the blocks of an ended request, see Hints.keep_s; unknown ids are ignored."""
        self._prefixes.pins.release(request_id)

    def schedule(self, now: float) -> StepPlan | None:
        """Plan the next step and allocate its memory; None if there is nothing to run.

        While a step runs, this plans the step after it; only if `may_run_ahead`.
        """
        self._prefixes.pins.expire(now)
        self._suspended.begin_step()
        running, begins_s = self._steps.latest, self._steps.ends_s(now)
        if running is not None:
            assume_done(running, self._prefixes, begins_s)
        proposal = self._policy.propose(self._queues, begins_s)
        for state in proposal.shed:
            self._shed(state, now)
        if running is not None and running.ends_requests:  # else all candidates have tokens left
            proposal = without_finishing(proposal)
        predictor, sharing = self._policy.predictor, self._kv.sharing_changes
        memory = StepMemory(
            self._kv,
            self._queues.running,
            self._states,
            begins_s,
            drop=self._suspended.drop,
            max_holders=self._limits.max_num_seqs,
            new_requests_preempt=self._policy.new_requests_preempt,
            expected_tokens=self._policy.expected_tokens,
            prefill_seconds=predictor.prefill_seconds if predictor else None,
            behind=proposal.behind.get(ServiceClass.RT, ()),
            owes_best_effort=proposal.bounds.best_effort_credit_s > 0.0,
        )
        packing = pack(
            proposal.urgent, proposal.best_effort, proposal.bounds, memory, predictor, begins_s,
            exclusive=proposal.exclusive,
        )  # fmt: skip
        if not packing.selected:
            self._requeue_emptied(memory.granted, now)
            return None
        self._policy.on_step_committed(packing, self._queues)
        self._preempt_victims(memory, now)
        self._requeue_emptied(memory.granted, now)
        gains = Gains()
        chunks = self._commit(packing, memory, gains, now)
        self._steps.begin(
            packing, gains, predictor, self._queues, proposal.behind, self._arrivals, now
        )
        shared = self._shared_prefixes(packing, chunks, sharing)
        return StepPlan(
            self._steps.count,
            chunks,
            self._kv.take_copies(),
            shared,
            self._suspended.take_dropped(),
        )

    def apply(self, result: StepResult, now: float) -> list[Output]:
        """Apply the result of the oldest running step.

        Returns one output for each sampled token, for each request that is done without one, and
        for each chunk of which positions were read. An output is a TokenOutput if that says all.
        """
        step, seconds, be_waits = self._steps.end(now, self._policy.predictor, self._queues)
        assert result.step == step.number, "steps end in their order"
        self._policy.on_step_done(step.packing, seconds, be_waits)
        if not step.assumed_done:
            wrong = {sample.request_id for sample in result.samples if sample.error is not None}
            wrong.update(read.request_id for read in result.readouts if read.error is not None)
            self._prefixes.publish(step.gains.filled, wrong)
        outputs: list[Output] = []
        if result.readouts:
            outputs += self._take_readouts(step, result.readouts, now)
        outputs += [
            self._finish_without_token(state, now)
            for state in step.gains.prefilled
            if self._states.get(state.request_id) is state
        ]
        states, new_request = self._states, step.new_request
        counters, alone_s = self._counters, self._steps.alone_s
        slacks: dict[ServiceClass, list[float]] = {cls: [] for cls in counters}
        for sample in result.samples:
            state = states.get(sample.request_id)
            if state is None or state.arrival_index >= new_request:
                continue  # it ended while the step ran; a new request may have its id
            if state.grammar is not None:
                outputs += self._take_constrained(state, sample, step.number, now)
                continue
            if sample.error is not None:
                self._finish(state, FinishReason.ERROR, now)
                outputs.append(_error_output(state, sample.error))
                continue
            record, cached_tokens = state.record, 0
            if record.last_token_s is None:
                counters[state.service_class].prompt_tokens += state.prompt_len
                cached_tokens = state.num_reused or 0
            slacks[state.service_class].append(record.token(now, state.slo, alone_s))
            reason = state.add_output(sample.token_id)
            if reason is None and sample.logprobs is None and not cached_tokens:
                # `shortened` without the output that it shortens, as for nearly every token.
                outputs.append((sample.request_id, sample.token_id))
                continue
            if reason is not None:
                self._complete(state, reason, now)
            outputs.append(_output(sample, (sample.token_id,), reason, cached_tokens))
        for service_class, found in slacks.items():
            counters[service_class].note_tokens(found)
        return outputs

    def _take_readouts(
        self, step: Step, readouts: Sequence[ReadPositions], now: float
    ) -> list[RequestOutput]:
        outputs = []
        for read in readouts:
            state = self._states.get(read.request_id)
            if state is None or state.arrival_index >= step.new_request:
                continue  # it ended while the step ran; a new request may have its id
            if read.error is not None:
                self._finish(state, FinishReason.ERROR, now)
                outputs.append(_error_output(state, read.error))
                continue
            state.num_read = read.end
            logprobs, pooled = read.prompt_logprobs, read.pooled
            outputs.append(
                RequestOutput(
                    request_id=read.request_id,
                    prompt_logprobs=() if logprobs is None else (logprobs,),
                    pooled=() if pooled is None else (pooled,),
                )
            )
        return outputs

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step can be scheduled before the running one is applied.

        Not if it would sample by tokens that the running step samples.
        """
        running = self._steps.latest
        return running is None or not running.gains.in_histories

    @property
    def may_abort(self) -> bool:
        """Whether `yields` may return True for the step that was scheduled last."""
        assert self._steps.latest is not None
        packing = self._steps.latest.packing
        yields = packing.has_best_effort and not packing.spends_credit
        return self._policy.aborts_steps and yields

    def yields(
        self, new_requests: Iterable[EngineRequest], now: float, *, suspends: bool = False
    ) -> bool:
        """Whether the running step should be stopped for requests that have arrived since the last
        call, together with those of the calls before in the same step.

        Only if `may_abort`. This does not submit the requests. What becomes of them before the step
        ends does not matter: one that is aborted still counts.

        suspends: the executor would keep what the step has computed.
        """
        step = self._steps.latest
        assert step is not None
        came_s = now
        for request in new_requests:
            if (newcomer := self._newcomer(request, now)) is not None:
                bisect.insort(step.newcomers, newcomer)
                came_s = min(came_s, arrival_s(request, now))
        if not step.newcomers:
            return False
        # Hidden states are read after the last layer, where a step can only be aborted.
        selected = step.packing.selected
        may_lose = not suspends or any(state.num_read < state.read_end for state, _ in selected)
        lost_s = now - step.began_s if may_lose else 0.0
        if not self._policy.yields(step.packing, step.began_s, step.newcomers, now, lost_s):
            return False
        self._steps.yield_to(came_s)
        return True

    def _newcomer(self, request: EngineRequest, now: float) -> Newcomer | None:
        """None if no step yields to it."""
        if request.service_class is not ServiceClass.RT or request.prefill_only or request.patient:
            return None
        try:
            self._limits.check(request)
        except InvalidRequestError:  # it will be refused
            return None
        ttft_s = objectives(request, ServiceClass.RT, self._default_slo, now).ttft_s
        if ttft_s is None:
            return None
        tokens = len(request.prompt_token_ids) - self._prefixes.cached_tokens(request)
        # The objective of a resumed request counts from now on.
        since_s = now if request.resumed else arrival_s(request, now)
        return Newcomer(since_s + ttft_s, tokens)

    def suspend_step(self, plan: StepPlan, stopped: SuspendedStep, now: float) -> None:
        """Suspend the step that was scheduled last: none of its tokens counts as computed, but the
        next chunk of each request continues where this one has stopped, see Kept."""
        assert stopped.step == plan.step
        step, seconds = self._steps.stop(now, self._queues, suspended=True)
        layer, done = stopped.layer, share_done(stopped.layer, stopped.num_layers)
        self._policy.on_step_suspended(step.packing, seconds)
        each_s = seconds / plan.num_tokens
        for row, chunk in enumerate(plan.chunks):
            at = Kept(plan.step, row, layer)
            state = self._states.get(chunk.request_id)
            if state is None or state.arrival_index >= step.new_request:
                self._suspended.discard(chunk, at)
                continue
            spent_s = each_s * len(chunk.token_ids)
            if self._suspended.suspend(state, chunk, at, done, spent_s):
                state.num_computed_tokens = chunk.start
                state.record.event(now, "suspended")
            else:
                self._undo(state, chunk, now)
        self._suspended.limit()
        self._requeue_emptied((), now)

    def abort_step(self, plan: StepPlan, now: float) -> None:
        """Undo the step that was scheduled last: none of its tokens counts as computed."""
        step, seconds = self._steps.stop(now, self._queues, suspended=False)
        self._policy.on_step_aborted(step.packing, seconds)
        for chunk in plan.chunks:
            self._suspended.abort(chunk)
            state = self._states.get(chunk.request_id)
            if state is None or state.arrival_index >= step.new_request:
                continue  # it was aborted while the step ran; a new request may have its id
            state.record.wait("yielded", seconds)
            self._undo(state, chunk, now)

    def _undo(self, state: RequestState, chunk: Chunk, now: float) -> None:
        """Undo a chunk of the step that was scheduled last, and what is suspended behind it."""
        state.num_computed_tokens = chunk.start
        if state.suspended is not None:
            self._suspended.drop(state)
        if chunk.request_id in self._started or chunk.start == 0:
            self._kv.free(chunk.request_id)
            self._wait(state, "yielded", now)
        else:
            self._kv.truncate(chunk.request_id, chunk.start)

    def _requeue_emptied(self, granted: Container[str], now: float) -> None:
        """Let requests wait that hold nothing any more, since all that they had was dropped.

        granted: ids of those that got another chunk at once.
        """
        for state in self._suspended.take_emptied():
            holds = state.num_computed_tokens or state.suspended or state.request_id in granted
            if state.running and not holds:
                self._kv.free(state.request_id)
                self._wait(state, "starts over", now)

    def take_ended(self) -> list[RequestOutput]:
        """The last outputs of requests that ended without a step since the last call: the policy
        shed them, or their whole prompt was cached."""
        ended, self._ended = self._ended, {}
        return list(ended.values())

    def expected(self) -> ExpectedTime:
        """See StepLedger."""
        return self._steps.expected()

    def stats(self) -> EngineStats:
        """A snapshot of steps, queues, KV memory and counters."""
        steps, kv = self._steps, self._kv
        running_of, waiting = self._queues.running_of, self._queues.waiting
        rows, resets = self._policy.batch_size
        predictor = self._policy.predictor
        return EngineStats(
            steps=steps.count - steps.aborted - steps.suspended,
            step_s=steps.seconds,
            predicted_s=steps.predicted_s,
            step_error_s=steps.error_s,
            be_added_s=steps.be_added_s,
            aborted_steps=steps.aborted,
            aborted_s=steps.aborted_s,
            suspended_steps=steps.suspended,
            suspended_s=steps.suspended_s,
            lost_s=steps.aborted_s + self._suspended.lost_s,
            yielding=steps.yielding,
            safety_factor=predictor.safety_factor if predictor else 1.0,
            rare_factor=predictor.rare_factor if predictor else 1.0,
            batch_size=rows,
            batch_resets=resets,
            kv_blocks_used=kv.num_used_blocks,
            kv_blocks_total=kv.num_blocks,
            kv_blocks_shared=kv.num_shared_blocks,
            kv_blocks_cached=kv.num_cached_blocks,
            kv_blocks_pinned=kv.num_pinned_blocks,
            host_kv_blocks_used=kv.num_host_blocks_used,
            host_kv_blocks_total=kv.num_host_blocks,
            traces=self._traces.counts(),
            by_class={
                cls: each.snapshot(
                    len(running_of[cls]),
                    len(waiting[cls]),
                    sum([kv.blocks_of(state.request_id) for state in running_of[cls]]),
                    kv.num_evicted_blocks(SIDES[cls]),
                    self._policy.device_seconds(cls),
                )
                for cls, each in self._counters.items()
            },
        )

    def trace(self, request_id: str) -> RequestTrace | None:
        """The trace of a running, waiting or recent request; None for an unknown id."""
        state = self._states.get(request_id)
        if state is None:
            return self._traces.get(request_id)
        blocked = None
        if not state.running:
            blocked = self._queues.blocked.so_far(state.service_class, state.request.tenant)
        return state.trace(blocked, None)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues and KV memory disagree (for tests)."""
        self._kv.check_integrity()
        self._queues.check_integrity()
        self._suspended.check_integrity()
        assert sorted(s.request_id for s in self._queues) == sorted(self._states)
        for state in self._queues:
            held, computed = self._kv.num_tokens(state.request_id), state.num_computed_tokens
            if state.suspended is not None:
                computed += state.suspended.total_tokens
            assert held == (computed if state.running else 0)
            assert PENDING not in state.token_ids[:-1]
            assert not state.is_pending or self._steps.latest is not None, "waits for nothing"

    def _shared_prefixes(
        self, packing: Packing, chunks: Sequence[Chunk], sharing: int
    ) -> tuple[SharedPrefix, ...]:
        """See packing.shared_prefixes. sharing: the cache's `sharing_changes` before packing.

        The result of the last call still holds for the same chunks if no block became shared or
        private since those were packed: then the shared blocks at the front of each row's segments
        are the same.
        """
        grouping, common_parts = self._grouping, self._kv.common_parts
        if grouping is None or not self._kv.has_common_parts:
            return ()
        selected, continues = packing.selected, chunks[-1].kept is not None
        unchanged = self._shared_as_of == self._kv.sharing_changes
        if unchanged and self._shared_by == selected and not continues:
            return self._shared
        rows = [
            (place, common_parts(chunk.request_id), chunk.segments)
            for place, chunk in enumerate(chunks)
            if len(chunk.token_ids) == 1 and chunk.kept is None
        ]
        self._shared = shared_prefixes(rows, grouping)
        self._shared_by, self._shared_as_of = [] if continues else selected, sharing
        return self._shared

    def _commit(
        self, packing: Packing, memory: StepMemory, gains: Gains, now: float
    ) -> tuple[Chunk, ...]:
        """Make the plan's chunks; their tokens count as computed from now on. Adds to `gains`."""
        self._started.clear()
        granted, chunks = memory.granted, []
        block_size, publishes = self._kv.block_size, self._kv.finds_prefixes
        new_tokens = context = 0
        continuing: list[tuple[int, Chunk]] = []  # with the layer
        for state, num_tokens in packing.selected:
            if not state.running:
                self._begin(state, now)
            request_id, tokens, start = state.request_id, state.token_ids, state.num_computed_tokens
            state.num_computed_tokens = end = start + num_tokens
            state.num_missing = 0
            new_tokens += num_tokens
            context += end
            # A block is filled if the tokens beyond the last boundary are fewer than the new ones.
            if publishes and (end % block_size < num_tokens or state.num_reused is None):
                gains.filled.append((state, num_tokens))
            segments, slots = granted[request_id]
            sample = None
            if end == len(tokens):
                if state.plain_spec is not None:
                    sample = state.plain_spec
                elif state.samples:
                    sample = state.sample_spec()
                    gains.in_histories |= state.needs_history
                else:
                    gains.prefilled.append(state)
            chunk = Chunk(request_id, start, tokens[start:end], segments, slots, sample)
            if state.num_read < state.read_end:
                chunk.readout = state.readout(start, end)
            if state.suspended is None:
                chunks.append(chunk)
            else:
                chunk.kept = self._suspended.take(state, num_tokens)
                continuing.append((chunk.kept.layer, chunk))
        gains.tokens, gains.context = new_tokens, context
        chunks += [chunk for _, chunk in sorted(continuing, key=itemgetter(0))]
        return tuple(chunks)

    def _begin(self, state: RequestState, now: float) -> None:
        """Move a request from its queue to the running requests."""
        self._started.add(state.request_id)
        self._steps.note_start(state)
        self._queues.start(state)
        self._prefixes.dequeue(state)
        state.record.event(now, "scheduled")

    def _count_tokens(self, state: RequestState, count: int, now: float) -> None:
        record, alone_s = state.record, self._steps.alone_s
        slacks = [record.token(now, state.slo, alone_s) for _ in range(count)]
        self._counters[state.service_class].note_tokens(slacks)

    def _complete(self, state: RequestState, reason: FinishReason, now: float) -> None:
        """End a request that has got its last token."""
        self._counters[state.service_class].note_finish(state.record, state.slo)
        self._finish(state, reason, now)

    def _take_constrained(
        self, state: RequestState, sample: SampledToken, step: int, now: float
    ) -> list[Output]:
        """Take a token of an output with a grammar, and the tokens that the grammar forces around
        it. Returns no output if it forced another token in the place of this one."""
        if step == state.ignored_step:
            return []
        reason, error, of_grammar = None, sample.error, sample.of_grammar
        first, unsent = state.record.last_token_s is None, state.unsent
        forced: Sequence[int] = ()
        if error is None:
            state.unsent = ()
            if first:
                self._counters[state.service_class].prompt_tokens += state.prompt_len
            self._count_tokens(state, len(unsent) + 1, now)
            reason = state.add_output(sample.token_id)
            if reason is None:
                latest = self._steps.latest
                try:
                    forced, reason = state.advance(
                        sample.token_id, 0 if latest is None else latest.number
                    )
                except ValueError as failure:
                    error, of_grammar = str(failure), True
                self._count_tokens(state, len(forced), now)
        if error is not None:
            self._finish(state, FinishReason.ERROR, now)
            return [_grammar_error(state, error) if of_grammar else _error_output(state, error)]
        if reason is not None:
            self._complete(state, reason, now)
        cached_tokens = state.num_reused or 0 if first else 0
        token_ids = (*unsent, sample.token_id, *forced)
        return [shortened(_output(sample, token_ids, reason, cached_tokens))]

    def _finish_without_token(self, state: RequestState, now: float) -> RequestOutput:
        """End a request that generates no token, and whose prompt is computed."""
        counters, record = self._counters[state.service_class], state.record
        counters.prompt_tokens += state.prompt_len
        if not state.request.prefill_only:  # its client waits for this as for a first token
            record.complete(now)
            counters.note_finish(record, state.slo)
        self._finish(state, FinishReason.LENGTH, now)
        return RequestOutput(
            request_id=state.request_id,
            finish_reason=FinishReason.LENGTH,
            cached_tokens=state.num_reused or 0,
        )

    def _wait(self, state: RequestState, why: str, now: float) -> None:
        """Move a request that holds no memory any more back to its queue, to the place that it has
        by now: it may have become late."""
        state.num_computed_tokens = state.num_missing = 0
        self._policy.assign_rank(state, now)
        self._queues.stop(state)
        self._prefixes.enqueue(state)
        state.record.event(now, why)

    def _preempt_victims(self, memory: StepMemory, now: float) -> None:
        """Update the victims: they wait for memory, and recompute what has no checkpoint."""
        for service_class, tokens in memory.restored.items():
            self._counters[service_class].kv_restored += tokens
        cuts = self._kv.take_cuts()
        for request_id, lost in memory.losses.items():
            state = self._states[request_id]
            counters = self._counters[state.service_class]
            counters.kv_preempted += lost.tokens
            counters.kv_copied += lost.copied
            if state.num_missing == 0:  # else it was preempted before and not restored since
                counters.preemptions += 1
                state.record.preemptions += 1
                state.record.event(now, "preempted")
            state.num_computed_tokens = cuts.get(request_id, state.num_computed_tokens)
            state.num_missing = self._kv.num_missing(request_id)
            if state.num_computed_tokens == 0:
                self._wait(state, "starts over", now)

    def _shed(self, state: RequestState, now: float) -> None:
        counters = self._counters[state.service_class]
        counters.rejected += 1
        retry_s = counters.retry_after_s(now)
        self._finish(state, FinishReason.ERROR, now)
        error = "The server was too busy to answer within this request's time objective."
        self._ended[state.request_id] = _error_output(state, error, retry_s)

    def _finish(self, state: RequestState, reason: FinishReason, now: float) -> None:
        if self._states.pop(state.request_id, None) is not None:  # else it was never enqueued
            self._suspended.end(state)
            self._kv.free(state.request_id, keep=reason is not FinishReason.ERROR)
            if not state.running:
                self._prefixes.dequeue(state)
            self._queues.remove(state)
        if reason.complete:
            self._prefixes.keep(state, now)
        self._policy.on_request_ended(state, now)
        state.record.left = True
        state.record.event(now, f"ended: {reason.value}")
        self._counters[state.service_class].note_departure(now)
        trace, request = state.trace(None, reason), state.request
        self._traces.put(request.tenant, request.request_id, trace, most=request.max_traces)


def _output(
    sample: SampledToken,
    token_ids: tuple[int, ...],
    reason: FinishReason | None,
    cached_tokens: int,
) -> RequestOutput:
    """The output of a sampled token, and of the tokens that are sent with it."""
    return RequestOutput(
        request_id=sample.request_id,
        token_ids=token_ids,
        logprobs=(sample.logprobs,) if sample.logprobs else (),
        finish_reason=reason,
        cached_tokens=cached_tokens,
    )


def _error_output(
    state: RequestState,
    error: str,
    retry_after_s: float | None = None,
    param: str | None = None,
) -> RequestOutput:
    return RequestOutput(
        request_id=state.request_id,
        finish_reason=FinishReason.ERROR,
        error=error,
        retry_after_s=retry_after_s,
        param=param,
    )


def _grammar_error(state: RequestState, error: str) -> RequestOutput:
    """The output of a request that ends because its grammar cannot go on."""
    grammar = state.request.sampling.grammar
    assert grammar is not None
    message = f"The output cannot follow the grammar in '{grammar.param}' any further: {error}."
    return _error_output(state, message, param=grammar.param)
