"""Which tokens of which requests run next: one packing loop for every policy.

    schedule() -> StepPlan -> (an executor runs it) -> apply(StepResult) -> outputs

Requests are looked at in the order of their rank. One that holds KV memory runs if it can
grow; one that holds none is admitted if everything it has to compute fits. Either may take
memory from requests of higher rank number, which then start over (recompute). The request of
lowest rank can take everything, and fits alone (checked on submission), so there is always
progress and never a deadlock.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections.abc import Iterator

from bros.core.errors import InvalidRequestError, QueueFullError
from bros.core.interfaces import EngineStats, RequestTrace
from bros.core.plan import Chunk, StepPlan, StepResult
from bros.core.request import EngineRequest, FinishReason, RequestOutput, ServiceClass
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.counters import ClassCounters
from bros.scheduler.limits import Limits
from bros.scheduler.policies import Policy
from bros.scheduler.state import Rank, RequestState


class Scheduler:
    """Owns every request from `submit` until its last output or `abort`."""

    def __init__(
        self, policy: Policy, kv: KvCacheManager, limits: Limits, rng: random.Random
    ) -> None:
        self._policy = policy
        self._kv = kv
        self._limits = limits
        self._rng = rng
        self._states: dict[str, RequestState] = {}
        self._running: list[RequestState] = []  # hold KV memory; sorted by rank
        self._waiting: list[RequestState] = []  # hold none; sorted by rank
        self._arrivals = 0
        self._steps = 0
        self._counters = {cls: ClassCounters() for cls in ServiceClass}

    @property
    def has_work(self) -> bool:
        return bool(self._states)

    def submit(self, request: EngineRequest, now: float) -> ServiceClass:
        """Queue a request; returns the class it is served as.

        Raises InvalidRequestError, PromptTooLongError or QueueFullError.
        """
        self._limits.check(request)
        if request.request_id in self._states:
            raise InvalidRequestError(f"request id {request.request_id!r} is in use.", "request_id")
        counters = self._counters[request.service_class]
        if counters.waiting >= self._limits.max_queue:
            raise QueueFullError(counters.waiting, counters.retry_after_s(now))
        seed = request.sampling.seed
        state = RequestState(
            request,
            arrival_index=self._arrivals,
            seed=self._rng.getrandbits(63) if seed is None else seed,
            max_length=self._limits.max_model_len,
            eos_token_ids=self._limits.eos_token_ids,
        )
        state.rank = self._policy.rank(state)
        self._arrivals += 1
        self._states[request.request_id] = state
        self._enqueue(self._waiting, state)
        return request.service_class

    def abort(self, request_id: str, now: float) -> RequestOutput | None:
        """Drop a request and its memory; None if it is not (or no longer) here."""
        state = self._states.get(request_id)
        if state is None:
            return None
        self._drop(state, now)
        return RequestOutput(request_id=request_id, finish_reason=FinishReason.ABORT)

    def schedule(self) -> StepPlan | None:
        """Choose the next step and allocate its memory; None if there is nothing to run."""
        limits = self._limits
        budget = limits.max_batch_tokens
        chunks: list[Chunk] = []
        admitting = True
        for state in self._candidates():
            if budget == 0 or len(chunks) == limits.max_num_seqs:
                break
            holds_kv = state.num_cached > 0
            if not (holds_kv or admitting):
                continue
            num_tokens = min(state.remaining, budget)
            if self._make_room(state, num_tokens):
                chunks.append(self._append(state, num_tokens))
                budget -= num_tokens
            elif not holds_kv:
                admitting = False  # nobody overtakes a request that waits for memory
        if not chunks:
            return None
        self._steps += 1
        return StepPlan(step=self._steps, chunks=tuple(chunks))

    def apply(self, result: StepResult, now: float) -> list[RequestOutput]:
        """Take in what a step produced; returns one output per sampled token."""
        outputs: list[RequestOutput] = []
        for sample in result.samples:
            state = self._states.get(sample.request_id)
            if state is None:
                continue  # aborted while the step ran
            if sample.error is not None:
                self._drop(state, now)
                outputs.append(_failed(state, sample.error))
                continue
            counters = self._counters[state.request.service_class]
            if state.num_outputs == 0:
                counters.prompt_tokens += state.prompt_len
            counters.output_tokens += 1
            reason = state.add_output(sample.token_id)
            if reason is not None:
                counters.finished += 1
                self._drop(state, now)
            outputs.append(
                RequestOutput(
                    request_id=state.request_id,
                    token_ids=(sample.token_id,),
                    logprobs=(sample.logprobs,) if sample.logprobs else (),
                    finish_reason=reason,
                )
            )
        return outputs

    def stats(self) -> EngineStats:
        """A snapshot of queues, memory and counters."""
        running = {cls: 0 for cls in ServiceClass}
        kv_blocks = {cls: 0 for cls in ServiceClass}
        for state in self._running:
            running[state.request.service_class] += 1
            kv_blocks[state.request.service_class] += self._kv.blocks_of(state.request_id)
        return EngineStats(
            steps=self._steps,
            kv_blocks_used=self._kv.num_used_blocks,
            kv_blocks_total=self._kv.num_blocks,
            by_class={
                cls: counters.snapshot(running[cls], kv_blocks[cls])
                for cls, counters in self._counters.items()
            },
        )

    def trace(self, request_id: str, now: float) -> RequestTrace | None:
        """What became of a request; None if nothing is known of it."""
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError if queues and KV memory disagree (for tests)."""
        self._kv.check_integrity()
        everyone = self._running + self._waiting
        assert len(everyone) == len(self._states), "a request is lost or queued twice"
        for queue in (self._running, self._waiting):
            assert all(a.rank < b.rank for a, b in itertools.pairwise(queue)), "not sorted"
        for state in everyone:
            assert self._kv.num_tokens(state.request_id) == state.num_cached
            assert (state.num_cached > 0) == (state in self._running)
        waiting = sum(counters.waiting for counters in self._counters.values())
        assert waiting == len(self._waiting), "waiting counters are off"

    def _candidates(self) -> Iterator[RequestState]:
        # Copies, because preemption and admission move requests between the lists.
        waiting = self._waiting[: self._limits.max_num_seqs]
        return heapq.merge(self._running[:], waiting, key=_rank)

    def _make_room(self, state: RequestState, num_tokens: int) -> bool:
        """True if the next `num_tokens` tokens fit now, preempting requests behind this one.

        A newcomer must fit with all it has to compute, and the last in line must leave every
        holder one block to grow into, so that it is not admitted only to be thrown out.
        """
        kv = self._kv
        if state.num_cached > 0:
            needed = kv.blocks_needed(state.request_id, num_tokens)
        else:
            needed = kv.blocks_needed(state.request_id, state.remaining)
            if self._running and state.rank > self._running[-1].rank:
                needed += len(self._running)
        shortfall = needed - kv.num_free_blocks
        victims: list[RequestState] = []
        while shortfall > 0:
            index = len(self._running) - 1 - len(victims)
            if index < 0 or self._running[index].rank <= state.rank:
                return False
            victims.append(self._running[index])
            shortfall -= kv.blocks_of(victims[-1].request_id)
        for victim in victims:
            self._preempt(victim)
        return True

    def _preempt(self, state: RequestState) -> None:
        """Drop the request's memory; it computes everything again once it is admitted."""
        self._kv.free(state.request_id)
        state.num_cached = 0
        self._dequeue(self._running, state)
        self._enqueue(self._waiting, state)
        self._counters[state.request.service_class].preemptions += 1

    def _append(self, state: RequestState, num_tokens: int) -> Chunk:
        start, end = state.num_cached, state.num_cached + num_tokens
        if start == 0:
            self._dequeue(self._waiting, state)
            self._enqueue(self._running, state)
        segments, slots = self._kv.append(state.request_id, num_tokens)
        last = num_tokens == state.remaining
        state.num_cached = end
        return Chunk(
            request_id=state.request_id,
            start=start,
            token_ids=state.token_ids[start:end],
            segments=segments,
            slots=slots,
            sample=state.sample_spec() if last else None,
        )

    def _drop(self, state: RequestState, now: float) -> None:
        del self._states[state.request_id]
        self._kv.free(state.request_id)
        self._dequeue(self._running if state.num_cached else self._waiting, state)
        self._counters[state.request.service_class].note_departure(now)

    def _enqueue(self, queue: list[RequestState], state: RequestState) -> None:
        bisect.insort(queue, state, key=_rank)
        if queue is self._waiting:
            self._counters[state.request.service_class].waiting += 1

    def _dequeue(self, queue: list[RequestState], state: RequestState) -> None:
        index = bisect.bisect_left(queue, state.rank, key=_rank)
        assert queue[index] is state
        del queue[index]
        if queue is self._waiting:
            self._counters[state.request.service_class].waiting -= 1


def _failed(state: RequestState, error: str) -> RequestOutput:
    return RequestOutput(request_id=state.request_id, finish_reason=FinishReason.ERROR, error=error)


def _rank(state: RequestState) -> Rank:
    return state.rank
