"""Which tokens of which requests run next: one packing loop for every policy.

    schedule(now) -> StepPlan -> (an executor runs it) -> apply(StepResult, now) -> outputs
                                                       -> abort_step(plan, now), if aborted

While a step runs the one after it may be scheduled (see `foresee`); then it is applied, not
aborted.

The policy says which requests may run in what order and how much a step may hold; packing.py
chooses, which takes memory (StepMemory); here the choice is committed: requests change queues and
have computed what is in the plan. What the step gets is settled when it is packed.
"""

from __future__ import annotations

import dataclasses
import random
from collections import OrderedDict
from collections.abc import Mapping, Sequence

from bros.core.errors import InvalidRequestError
from bros.core.interfaces import EngineReport, EngineStats, Grouping, RequestTrace
from bros.core.plan import PENDING, Chunk, SharedPrefix, StepPlan, StepResult
from bros.core.request import EngineRequest, FinishReason, RequestOutput, ServiceClass, Slo
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.admission import Admission, Limits, objectives, promoted_objectives
from bros.scheduler.cost_model import StepTimePredictor
from bros.scheduler.memory import StepMemory
from bros.scheduler.metrics import ClassCounters
from bros.scheduler.packing import Packing, pack, shared_prefixes
from bros.scheduler.policies import Policy, Proposal
from bros.scheduler.prefixes import Prefixes
from bros.scheduler.state import SIDES, Queues, RequestState, due_from_s
from bros.scheduler.steps import Step, StepLedger

# ---- A step that is planned while the one before it runs.
#
# Plans run in their order, so whatever the running step computes is there for the next one:
#
#     its tokens     count as computed when they were committed, and others may share them already
#     its samples    are PENDING: not known yet, but there will be one for each
#     its end        is predicted: the next step begins then, and deadlines are judged as of then
#
# What turns out otherwise (a stop token, an error, an abort) costs a row that runs for nothing.


def can_be_foreseen(step: Step) -> bool:
    """Whether the next step can do without knowing what this one samples."""
    selected = step.packing.selected
    return not any(state.needs_history and state.remaining == 0 for state, _ in selected)


def foresee(step: Step, prefixes: Prefixes, ends_s: float) -> None:
    """Let the requests of the running step go on as if it were done, which it will be at `ends_s`.

    All tokens that it computes are known by now, though some were not when it was planned: they
    were sampled by the one before it. So prefixes are published as early as if steps did not
    overlap; who finds them reads them in a later step. And before the next step takes memory,
    because from then on a request may have lost some of what it has computed here.
    """
    if not step.foreseen:
        step.foreseen = True
        prefixes.publish(step.packing, ())
        for state, _ in step.packing.selected:
            # Also if it has left meanwhile, which is all the same.
            if state.samples and state.remaining == 0:
                state.expect_output(ends_s)


def proposal_behind(proposal: Proposal) -> Proposal:
    """The same without those that only wait for their end, for a step behind another one."""
    urgent, best_effort = (
        filter(_has_more, proposal.urgent),
        filter(_has_more, proposal.best_effort),
    )
    return dataclasses.replace(proposal, urgent=urgent, best_effort=best_effort)


def _has_more(state: RequestState) -> bool:
    return len(state.token_ids) < state.max_length if state.samples else state.remaining > 0


# ---- The last outputs of requests that did not get all that they asked for.


def failed(state: RequestState, error: str) -> RequestOutput:
    """Something went wrong with it in a step."""
    return RequestOutput(request_id=state.request_id, finish_reason=FinishReason.ERROR, error=error)


def given_up(state: RequestState, retry_s: float) -> RequestOutput:
    """It could not be served in time; it may come back after `retry_s`."""
    return RequestOutput(
        request_id=state.request_id,
        finish_reason=FinishReason.ERROR,
        error="The server was too busy to answer within this request's time objective.",
        retry_after_s=retry_s,
    )


# ---- What an engine says about itself at one moment.


def take_snapshot(
    steps: StepLedger,
    policy: Policy,
    kv: KvCacheManager,
    queues: Queues,
    counters: Mapping[ServiceClass, ClassCounters],
) -> EngineStats:
    """Steps, queues, memory and counters of a scheduler."""
    running = {cls: 0 for cls in ServiceClass}
    kv_blocks = {cls: 0 for cls in ServiceClass}
    for state in queues.running:
        running[state.service_class] += 1
        kv_blocks[state.service_class] += kv.blocks_of(state.request_id)
    rows, resets = policy.batch_size
    predictor = policy.predictor
    return EngineStats(
        steps=steps.count - steps.aborted,
        step_s=steps.seconds,
        predicted_s=steps.predicted_s,
        step_error_s=steps.error_s,
        be_tax_s=steps.be_tax_s,
        abandoned_steps=steps.aborted,
        abandoned_s=steps.abandoned_s,
        safety_factor=predictor.safety_factor if predictor else 1.0,
        batch_size=rows,
        batch_resets=resets,
        kv_blocks_used=kv.num_used_blocks,
        kv_blocks_total=kv.num_blocks,
        kv_blocks_shared=kv.num_shared_blocks,
        kv_blocks_cached=kv.num_cached_blocks,
        kv_blocks_parked=kv.num_parked_blocks,
        host_kv_blocks_used=kv.num_host_blocks_used,
        host_kv_blocks_total=kv.num_host_blocks,
        by_class={
            cls: each.snapshot(
                running[cls],
                len(queues.waiting[cls]),
                kv_blocks[cls],
                kv.num_evicted_blocks(SIDES[cls]),
            )
            for cls, each in counters.items()
        },
    )


# ---- Reports for a subscriber: what is cached, and how busy the engine is.


_EVERY_S, _DIGEST_S = 0.1, 10.0
"""Least time between reports while the engine works, and most time between digests."""


class Reporter:
    """Costs nothing until a client subscribes. The first report is a digest."""

    def __init__(
        self, kv: KvCacheManager, queues: Queues, predictor: StepTimePredictor | None
    ) -> None:
        self._kv = kv
        self._queues = queues
        self._predictor = predictor
        self._subscribed = False
        self._version = 0
        self._load = (0, 0, 0, 0)
        self._next_s = self._digest_s = 0.0

    def subscribe(self) -> None:
        """Keep account of changes from now on."""
        if not self._subscribed:
            self._subscribed = True
            self._kv.subscribe()

    def take(self, now: float, full: bool) -> EngineReport | None:
        """What has changed since the last one, or everything; None if nothing has, or if no client
        watches."""
        if not self._subscribed:
            return None
        full = full or self._version == 0
        kept, load = self._kv.take_cached_lengths(full), self._load_now()
        if not (full or kept or load != self._load):
            return None
        self._version += 1
        self._load = load
        self._next_s = now + _EVERY_S
        if full:
            self._digest_s = now + _DIGEST_S
        running, waiting, used_blocks, cached_blocks = load
        return EngineReport(
            version=self._version,
            full=full,
            kept=tuple(kept.items()),
            running=running,
            waiting=waiting,
            used_blocks=used_blocks,
            cached_blocks=cached_blocks,
            slowdown=self._predictor.slowdown if self._predictor else 1.0,
        )

    def due(self, now: float, rests: bool) -> EngineReport | None:
        """The same after a step, if it is time for it. rests: there is nothing more to do."""
        if not self._subscribed:
            return None
        full = now >= self._digest_s
        return self.take(now, full) if full or rests or now >= self._next_s else None

    def _load_now(self) -> tuple[int, int, int, int]:
        waiting = sum(map(len, self._queues.waiting.values()))
        kv = self._kv
        return len(self._queues.running), waiting, kv.num_used_blocks, kv.num_cached_blocks


_MAX_TRACES = 1000


class Scheduler:
    """Owns every request from `submit` until its last output or `abort`.

    counters: by class; shared with the code that estimates from them. grouping: which prefixes the
    executor is to read once; None: none. reporter: for a subscriber.
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
        self._admission = Admission(policy, self._queues, counters, limits.max_queue, default_slo)
        self._prefixes = Prefixes(kv, counters)
        self.reporter = Reporter(kv, self._queues, policy.predictor)
        self._arrivals = 0
        self._steps = StepLedger()
        self._started: set[str] = set()  # in the step that was scheduled last
        self._shared: tuple[SharedPrefix, ...] = ()
        self._shared_by: list[tuple[RequestState, int]] = []
        self._shared_as_of = 0
        self._ended: dict[str, RequestOutput] = {}
        self._traces: OrderedDict[str, RequestTrace] = OrderedDict()

    @property
    def has_work(self) -> bool:
        return bool(self._states or self._ended)

    def submit(self, request: EngineRequest, now: float) -> ServiceClass:
        """Queue a request; returns the class it is served as.

        Raises InvalidRequestError, PromptTooLongError, QueueFullError or OverloadedError.
        """
        self._limits.check(request)
        if request.request_id in self._states or request.request_id in self._ended:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use.", "request_id")
        asked = request.service_class
        self._admission.check_queue(asked, now)
        if request.prefill_only:
            request = self._prefixes.fillable(request)
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
        if request.prefill_only and self._prefixes.has_all(state):
            self._ended[state.request_id] = self._filled(state, now)
            return asked
        self._prefixes.look_up(state)
        self._admission.classify(state, self._steps.ends_s(now), now)
        self._policy.place(state, now)
        self._arrivals += 1
        self._states[request.request_id] = state
        state.record.event(now, f"queued as {state.service_class.value}")
        self._queues.enqueue(state)
        self._prefixes.waits(state)
        return state.service_class

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """Drop a request and its memory; None if it is not (or no longer) here."""
        state = self._states.get(request_id)
        if state is not None:
            self._drop(state, FinishReason.ABORT, now)
        elif self._ended.pop(request_id, None) is None:
            return None
        return RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)

    def promote(self, request_id: str, slo: Slo, now: float) -> None:
        """Serve a best-effort request as real-time from now on; see EngineClient.promote.

        Also between a step and its result. What it has in KV memory stays where it is.
        """
        state = self._states.get(request_id)
        if state is None or state.service_class is ServiceClass.RT:
            return
        if not state.running:
            self._steps.note_promotion(state)
            self._prefixes.dequeue(state)
        self._queues.remove(state)
        state.promote(promoted_objectives(state, slo, self._default_slo, now), now)
        if not state.running:
            self._prefixes.look_up(state)
        self._policy.place(state, now)
        if state.running:  # it has lost nothing: its next token is due as for any other
            state.late, state.deadline_s = False, state.record.due_s
        self._queues.put_back(state)
        self._counters[ServiceClass.RT].promoted += 1
        state.record.event(now, "promoted")

    def release(self, request_id: str) -> None:
        """What a request has left is kept no longer, see Hints.keep_s; unknown ids are ignored."""
        self._prefixes.release(request_id)

    def schedule(self, now: float) -> StepPlan | None:
        """Choose the next step and allocate its memory; None if there is nothing to run.

        While a step runs, this is the one after it, and only if `may_run_ahead`.
        """
        self._prefixes.expire(now)
        running, begins_s = self._steps.latest, self._steps.ends_s(now)
        if running is not None:
            foresee(running, self._prefixes, begins_s)
        proposal = self._policy.propose(self._queues, begins_s)
        for state in proposal.drop:
            self._give_up(state, now)
        if running is not None:
            proposal = proposal_behind(proposal)
        predictor, sharing = self._policy.predictor, self._kv.sharing_changes
        memory = StepMemory(
            self._kv,
            self._prefixes,
            self._queues.running,
            self._states,
            begins_s,
            max_holders=self._limits.max_num_seqs,
            new_requests_preempt=self._policy.new_requests_preempt,
            expected_tokens=self._policy.expected_tokens,
            prefill_seconds=predictor.prefill_seconds if predictor else None,
        )
        packing = pack(
            proposal.urgent, proposal.best_effort, proposal.bounds, memory, predictor, begins_s,
            exclusive=proposal.exclusive,
        )  # fmt: skip
        if not packing.selected:
            return None
        self._policy.chosen(packing)
        self._rob(memory, now)
        chunks = self._commit(packing, memory, now)
        self._steps.begin(packing, predictor, self._queues, self._arrivals, now)
        shared = self._shared_prefixes(packing, chunks, sharing)
        return StepPlan(self._steps.count, chunks, self._kv.take_copies(), shared)

    def apply(self, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what a step produced; one output per sampled token, and per fill that is done."""
        step, seconds, be_waits = self._steps.end(now, self._policy.predictor, self._queues)
        assert result.step == step.number, "steps end in their order"
        self._policy.settle(step.packing, seconds, be_waits)
        if not step.foreseen:
            wrong = {sample.request_id for sample in result.samples if sample.error is not None}
            self._prefixes.publish(step.packing, wrong)
        outputs = [
            self._filled(state, now)
            for state in step.filled
            if self._states.get(state.request_id) is state
        ]
        states, take_token = self._states, self._take_token
        for sample in result.samples:
            state = states.get(sample.request_id)
            if state is None or state.arrival_index >= step.new_request:
                continue  # it has gone while the step ran, and another one may have its name
            if sample.error is not None:
                self._drop(state, FinishReason.ERROR, now)
                outputs.append(failed(state, sample.error))
                continue
            outputs.append(
                RequestOutput(
                    request_id=sample.request_id,
                    token_ids=(sample.token_id,),
                    logprobs=(sample.logprobs,) if sample.logprobs else (),
                    finish_reason=take_token(state, sample.token_id, now),
                    cached_tokens=state.num_reused or 0,
                )
            )
        return outputs

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step can be scheduled before the running one has been applied."""
        running = self._steps.latest
        return running is None or can_be_foreseen(running)

    @property
    def may_abort(self) -> bool:
        """Whether `yields` may say yes while the step runs that was scheduled last."""
        assert self._steps.latest is not None
        packing = self._steps.latest.packing
        has_best_effort = len(packing.selected) > packing.num_urgent
        return self._policy.aborts_steps and has_best_effort and not packing.owed

    def yields(self, new_request: EngineRequest, now: float) -> bool:
        """Whether the running step is to be aborted for a request that has just arrived.

        The request is not taken in by this. Only if `may_abort`.
        """
        if new_request.service_class is not ServiceClass.RT or new_request.prefill_only:
            return False
        ttft_s = objectives(new_request, ServiceClass.RT, self._default_slo, now).ttft_s
        if ttft_s is None:
            return False
        due_s = due_from_s(new_request, now) + ttft_s
        tokens = len(new_request.prompt_token_ids) - self._prefixes.cached_tokens(new_request)
        step = self._steps.latest
        assert step is not None
        return self._policy.yields(step.packing, step.began_s, tokens, due_s, now)

    def abort_step(self, plan: StepPlan, now: float) -> None:
        """Take back the step that was scheduled last: none of its tokens has been computed."""
        step, seconds = self._steps.abort_step(now, self._queues)
        self._policy.aborted(step.packing, seconds)
        for chunk in plan.chunks:
            state = self._states.get(chunk.request_id)
            if state is None or state.arrival_index >= step.new_request:
                continue  # aborted while the step ran, and another one may have its name
            state.record.wait("yielded", seconds)
            if chunk.request_id in self._started:
                self._kv.free(chunk.request_id)
                self._wait(state)
                state.record.event(now, "yielded")
            else:
                self._kv.truncate(chunk.request_id, chunk.start)
                state.num_cached = chunk.start

    def take_ended(self) -> list[RequestOutput]:
        """The last outputs of requests that ended without a step since the last call: they were
        aborted, or there was nothing to compute."""
        ended, self._ended = self._ended, {}
        return list(ended.values())

    def stats(self) -> EngineStats:
        """A snapshot of queues, memory and counters."""
        return take_snapshot(self._steps, self._policy, self._kv, self._queues, self._counters)

    def trace(self, request_id: str, now: float) -> RequestTrace | None:
        """What became of a request; None if nothing is known of it (any more)."""
        state = self._states.get(request_id)
        if state is None:
            return self._traces.get(request_id)
        blocked = None
        if not state.running:
            blocked = self._queues.blocked.so_far(state.service_class)
        return state.trace(blocked, None)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues and KV memory disagree (for tests)."""
        self._kv.check_integrity()
        self._queues.check_integrity()
        assert sorted(s.request_id for s in self._queues) == sorted(self._states)
        for state in self._queues:
            held = self._kv.num_tokens(state.request_id)
            assert held == (state.num_cached if state.running else 0)
            assert PENDING not in state.token_ids[:-1]
            assert not state.is_pending or self._steps.latest is not None, "waits for nothing"

    def _shared_prefixes(
        self, packing: Packing[RequestState], chunks: Sequence[Chunk], sharing: int
    ) -> tuple[SharedPrefix, ...]:
        """See packing.shared_prefixes. sharing: the cache's `sharing_changes` before packing.

        They are those that were found last if that was for the same chunks, and the cache has
        shared nothing anew since before those were packed: then the front of each row's segments,
        where shared blocks are, is the same, too.
        """
        grouping, common_parts = self._grouping, self._kv.common_parts
        if grouping is None or not self._kv.has_common_parts:
            return ()
        selected = packing.selected
        if self._shared_as_of == self._kv.sharing_changes and self._shared_by == selected:
            return self._shared
        rows = [
            (place, common_parts(chunk.request_id), chunk.segments)
            for place, chunk in enumerate(chunks)
            if len(chunk.token_ids) == 1
        ]
        self._shared = shared_prefixes(rows, grouping)
        self._shared_by, self._shared_as_of = selected, sharing
        return self._shared

    def _commit(
        self, packing: Packing[RequestState], memory: StepMemory, now: float
    ) -> tuple[Chunk, ...]:
        """What was packed is going to run: its requests have computed it from now on."""
        self._started.clear()
        granted, chunks = memory.granted, []
        for state, num_tokens in packing.selected:
            if not state.running:
                self._begin(state, now)
            start = state.num_cached
            state.num_cached = end = start + num_tokens
            state.num_missing = 0
            tokens, (segments, slots) = state.token_ids, granted[state.request_id]
            sample = state.sample_spec() if end == len(tokens) and state.samples else None
            chunk = Chunk(state.request_id, start, tokens[start:end], segments, slots, sample)
            chunks.append(chunk)
        return tuple(chunks)

    def _begin(self, state: RequestState, now: float) -> None:
        """A request leaves its queue for its first step."""
        self._started.add(state.request_id)
        self._steps.note_start(state)
        self._queues.start(state)
        self._prefixes.dequeue(state)
        state.record.event(now, "scheduled")

    def _take_token(self, state: RequestState, token_id: int, now: float) -> FinishReason | None:
        counters, record = self._counters[state.service_class], state.record
        if record.last_token_s is None:
            counters.prompt_tokens += state.prompt_len
        counters.note_token(record.token(now, state.slo))
        reason = state.add_output(token_id, now)
        if reason is not None:
            counters.note_finish(record, state.slo)
            self._drop(state, reason, now)
        return reason

    def _filled(self, state: RequestState, now: float) -> RequestOutput:
        """All of its prompt has been computed, which is all that was asked for."""
        self._counters[state.service_class].prompt_tokens += state.prompt_len
        self._drop(state, FinishReason.LENGTH, now)
        return RequestOutput(
            request_id=state.request_id,
            finish_reason=FinishReason.LENGTH,
            cached_tokens=state.num_reused or 0,
        )

    def _wait(self, state: RequestState) -> None:
        """A request that ran holds no memory any more."""
        state.num_cached = state.num_missing = 0
        self._queues.stop(state)
        self._prefixes.waits(state)

    def _rob(self, memory: StepMemory, now: float) -> None:
        """Victims wait for memory, or compute again what is lost."""
        for service_class, tokens in memory.restored.items():
            self._counters[service_class].kv_restored += tokens
        cuts = self._kv.take_cuts()
        for request_id, lost in memory.losses.items():
            state = self._states[request_id]
            counters = self._counters[state.service_class]
            counters.kv_taken += lost.tokens
            counters.kv_copied += lost.copied
            if state.num_missing == 0:  # else it was interrupted before
                counters.preemptions += 1
                state.record.preemptions += 1
                state.record.event(now, "preempted")
            state.num_cached = cuts.get(request_id, state.num_cached)
            state.num_missing = self._kv.num_missing(request_id)
            if state.num_cached == 0:
                self._policy.place(state, now)
                self._wait(state)
                state.record.event(now, "starts over")

    def _give_up(self, state: RequestState, now: float) -> None:
        counters = self._counters[state.service_class]
        counters.rejected += 1
        retry_s = counters.retry_after_s(now)
        self._drop(state, FinishReason.ERROR, now)
        self._ended[state.request_id] = given_up(state, retry_s)

    def _drop(self, state: RequestState, reason: FinishReason, now: float) -> None:
        if self._states.pop(state.request_id, None) is not None:  # else it ends as it comes
            self._kv.free(state.request_id, keep=reason is not FinishReason.ERROR)
            if not state.running:
                self._prefixes.dequeue(state)
            self._queues.remove(state)
        if reason.complete:
            self._prefixes.keep(state, now)
        state.record.left = True
        state.record.event(now, f"ended: {reason.value}")
        self._counters[state.service_class].note_departure(now)
        self._traces[state.request_id] = state.trace(None, reason)
        if len(self._traces) > _MAX_TRACES:
            self._traces.popitem(last=False)
