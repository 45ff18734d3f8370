"""Interfaces between layers and the records that pass through them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from bros.core.errors import ConfigError, EngineDeadError
from bros.core.plan import StepPlan, StepResult, SuspendedStep, TokenConstraint
from bros.core.request import (
    EngineRequest,
    FinishReason,
    Output,
    Pooling,
    RequestOutput,
    ServiceClass,
    Slo,
)

K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which shared prefixes a kernel reads once per step: at least min_blocks full blocks of
    block_size slots that at least min_rows rows have in common.

    Every row reads a smaller shared prefix itself, because merging costs each row more.

    step_blocks: pieces begin and end at multiples of this number of blocks. Kernels whose sums are
        in one order, no matter how many rows read the context, have tiles of this length.
    """

    block_size: int
    min_blocks: int
    min_rows: int = 2
    step_blocks: int = 1

    def cut(self, parts: Iterable[tuple[K, int]]) -> list[tuple[K, int, int]]:
        """The pieces that a row can read together with others: (key, first block, end).

        parts: (key, tokens) of what the row shares with some others, from its first token on. A
            row that has a part has all before it, too. So a piece that is too short becomes the
            beginning of the next one, and so does what is left behind a multiple of step_blocks.
        """
        pieces = []
        first = end = 0
        for key, tokens in parts:
            end += tokens // self.block_size
            last = end - end % self.step_blocks
            if last - first >= self.min_blocks:
                pieces.append((key, first, last))
                first = last
        return pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Seconds that work adds to an engine's steps, by its cost model.

    constant_s: per step.
    token_s: per prompt token.
    pair_s: per pair of a prompt token and a token before it.
    row_s: per output token.
    context_s: per pair of an output token and a token before it.
    hinges: (knot, slope) pairs, each adding slope seconds for every output token of a step above
        knot: the price of a row depends on how many there are.
    """

    constant_s: float = 0.0
    token_s: float = 1e-4
    pair_s: float = 0.0
    row_s: float = 1e-3
    context_s: float = 0.0
    hinges: tuple[tuple[int, float], ...] = ()

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """Seconds to prefill `tokens` prompt tokens after `context` cached ones."""
        return tokens * (self.token_s + self.pair_s * (context + tokens / 2))

    def decode_s(self, tokens: float, context: int, rows: float = 1.0) -> float:
        """Seconds to decode `tokens` output tokens after `context`, in steps of `rows` rows."""
        rows = max(1.0, rows)
        each_s = (self.constant_s + self._bent_s(rows)) / rows + self.row_s
        return tokens * (each_s + self.context_s * context)

    def step_s(self, rows: float, context: float) -> float:
        """Seconds of a step of `rows` output tokens with `context` tokens before them, together."""
        fixed_s = self.constant_s + self._bent_s(rows)
        return fixed_s + self.row_s * rows + self.context_s * context

    def _bent_s(self, rows: float) -> float:
        return sum(slope * (rows - knot) for knot, slope in self.hinges if rows > knot)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingInfo:
    """What a model computes of texts beside generating.

    pooling: which hidden states become the embedding.
    normalized: embeddings have length 1.
    size: numbers of an embedding.
    dimensions: sizes to which embeddings may be cut; empty: any; None: none.
    scores: it has a head that scores a text, or a pair of texts.
    """

    pooling: Pooling
    normalized: bool
    size: int
    dimensions: tuple[int, ...] | None = None
    scores: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about an engine that do not change while it runs.

    default_slo: objectives of real-time requests that name none.
    yields: best-effort work yields to real-time requests: it gets only the time and memory that
        they leave. That follows from the policy.
    grouping: which shared prefixes kernels read once; None if each row reads its own.
    tp: number of ranks.
    prices: None if the engine has no cost model.
    profile: the profile that the cost model is from, as JSON; empty without one.
    generates: whether the model generates text.
    embedding: None if the engine computes none, as in simulations.
    whole_prompts: a prompt is computed in one step, and its KV is not kept (encoders).
    """

    model: str
    weights: str
    kernels: str
    kv_dtype: str
    device: str
    max_model_len: int
    vocab_size: int
    block_size: int
    num_kv_blocks: int
    policy: str
    num_host_kv_blocks: int = 0
    max_queue: int = 2**31 - 1
    eos_token_ids: tuple[int, ...] = ()
    default_slo: Slo = Slo(ttft_s=0.4, tpot_s=0.2)
    yields: bool = False
    grouping: Grouping | None = None
    tp: int = 1
    prices: Prices | None = None
    profile: str = ""
    generates: bool = True
    embedding: EmbeddingInfo | None = None
    whole_prompts: bool = False

    @property
    def poolings(self) -> frozenset[Pooling]:
        """What it can compute of a text."""
        found = self.embedding
        if found is None:
            return frozenset()
        if self.generates:
            return frozenset({Pooling.LAST, Pooling.MEAN})
        return frozenset({Pooling.SCORE} if found.scores else set(Pooling) - {Pooling.SCORE})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """An engine's cached prefixes and load, for its subscriber.

    A report holds states, not changes: after the next digest the subscriber's view is the same even
    if reports were applied twice, out of order or not at all. A report about output tokens may come
    a little after they are cached.

    version: increases by one with each report.
    full: this report is a digest: `cached_prefixes` lists every request that has cached blocks.
    cached_prefixes: (request id, tokens) of requests whose cached prefix has changed: that many of
        the first tokens of prompt and output are cached, up to the last block that this request was
        the first to compute. Blocks that it found in the cache belong to the request that computed
        them. A later pair overrides an earlier one. A request whose last own block was evicted is
        listed once more, with the tokens before its first own block.
    running: requests that hold KV memory.
    waiting: requests in the queues.
    used_blocks: KV blocks that requests hold.
    cached_blocks: idle KV blocks of the prefix cache.
    slowdown: measured step time over predicted step time.
    """

    version: int
    full: bool = False
    cached_prefixes: tuple[tuple[str, int], ...] = ()
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Buckets:
    """counts[i] values v had bounds[i - 1] < v <= bounds[i]; the last count has no upper bound.

    total: sum of all values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStats:
    """Counters and gauges of one service class.

    Objectives count finished requests and their tokens, at the times when the engine committed
    the tokens.

    running: requests that hold KV memory.
    waiting: requests in the queue.
    prompt_tokens: prompt tokens of requests whose prompt is computed, cached ones included.
    output_tokens: generated tokens.
    finished: finished requests.
    preemptions: number of times a request lost KV memory to another request.
    kv_preempted: tokens whose KV was preempted.
    kv_copied: preempted tokens that were checkpointed to the host.
    kv_restored: tokens that were restored from the host.
    prefix_tokens: prompt tokens that were cached when their request began.
    prefix_evicted: cached blocks that were evicted for requests of this class.
    kv_blocks: blocks with private tokens of this class; a block with tokens of both classes counts
        for both.
    ttft_met: finished requests that met their TTFT objective.
    tpot_met: finished requests that met their TPOT objective.
    both_met: finished requests that met both objectives.
    gap_met: finished requests without a longer time between two tokens than their objective.
    deadlines: finished requests that had a deadline for the whole answer.
    deadlines_met: finished requests that met such a deadline.
    tokens_on_time: output tokens that met their own deadlines.
    relegated: requests that asked for the other class and are served in this one.
    promoted: best-effort requests that were promoted to this class.
    rejected: requests that the engine refused.
    device_s: predicted device time of its steps by tenant, in seconds; only under `bros`.
    slack: deadline minus commit time of tokens, in seconds.
    slowdown: of finished real-time streams, see RequestTrace.
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    kv_preempted: int = 0
    kv_copied: int = 0
    kv_restored: int = 0
    prefix_tokens: int = 0
    prefix_evicted: int = 0
    kv_blocks: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    both_met: int = 0
    gap_met: int = 0
    deadlines: int = 0
    deadlines_met: int = 0
    tokens_on_time: int = 0
    relegated: int = 0
    promoted: int = 0
    rejected: int = 0
    device_s: Mapping[str, float] = field(default_factory=dict)
    slack: Buckets = Buckets()
    slowdown: Buckets = Buckets()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine. Counters count since the engine started; times are in seconds.

    steps: completed steps.
    step_s: duration of completed steps.
    predicted_s: duration that the cost model predicted for them.
    step_error_s: sum over steps of abs(duration - prediction).
    be_added_s: how much shorter the steps with real-time work would have been without their
        best-effort work, by the cost model.
    aborted_steps: steps that were aborted for a real-time arrival; no other field counts them.
    aborted_s: duration of aborted steps.
    suspended_steps: steps that were suspended for a real-time arrival; `steps` and `step_s` do not
        count them.
    suspended_s: duration of suspended steps until then.
    lost_s: time whose work was lost: of aborted steps, and of what was dropped of suspended steps,
        for example because its request was preempted.
    yielding: time from the arrival of a request until a step was suspended or aborted for it.
    safety_factor: factor on the predictions of the cost model.
    rare_factor: the factor that 1 of 1,000 steps exceeds; the margin before first tokens.
    batch_size: maximum rows that the policy allows in the next step.
    batch_resets: number of times the policy reset the batch size.
    kv_blocks_used: blocks that requests hold.
    kv_blocks_total: blocks of the KV cache.
    kv_blocks_shared: used blocks that several requests may hold.
    kv_blocks_cached: idle blocks of the prefix cache.
    kv_blocks_pinned: pinned blocks (Hints.keep_s), whether in use, idle, or evicted since.
    host_kv_blocks_used: host blocks with copies of KV.
    host_kv_blocks_total: host blocks for copies of preempted KV.
    forced_tokens: output tokens that a grammar forced, so that they were not sampled.
    grammars_compiled: grammars that were compiled.
    grammar_compile_s: time that this took, on threads.
    mask_wait_s: time for which sampling waited for masks of grammars.
    traces: tenant -> number of traces of its ended requests that are kept. With several engines,
        of the one that has the most.
    """

    steps: int = 0
    step_s: float = 0.0
    predicted_s: float = 0.0
    step_error_s: float = 0.0
    be_added_s: float = 0.0
    aborted_steps: int = 0
    aborted_s: float = 0.0
    suspended_steps: int = 0
    suspended_s: float = 0.0
    lost_s: float = 0.0
    yielding: Buckets = Buckets()
    safety_factor: float = 1.0
    rare_factor: float = 1.0
    batch_size: int = 0
    batch_resets: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_shared: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_pinned: int = 0
    host_kv_blocks_used: int = 0
    host_kv_blocks_total: int = 0
    forced_tokens: int = 0
    grammars_compiled: int = 0
    grammar_compile_s: float = 0.0
    mask_wait_s: float = 0.0
    traces: Mapping[str, int] = field(default_factory=dict)
    by_class: Mapping[ServiceClass, ClassStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """What a router expected the placement of a task group to cost, or of those members of it that
    it placed together.

    cost_s: seconds until its last member is done, plus weighted seconds in which other requests
        wait because its common prefix is computed on more than one replica.
    alternative_s: the same of the cheapest other placement that was considered: on one replica if
        the group is split, else split or on another replica. It may be the lower one if the group
        does not fit there, or if several groups arrived together, whose sum counts. None: there was
        no other one.
    replicas: number of replicas that the members went to.
    """

    cost_s: float
    alternative_s: float | None
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a router has placed a request, and why.

    replica: number of the replica for operators.
    reason: what decided, see `Decision` of the router.
    expected_tokens: prompt tokens that the router expected to be cached there.
    group: what the placement of its task group costs; None if it was not placed with one.
    """

    replica: int
    reason: str
    expected_tokens: int
    group: GroupCosts | None = None


MAX_TRACES = 1000
"""Most traces of ended requests that an engine keeps. When there are more, the tenant with the most
loses its oldest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """The history of one request. Times are in seconds after its arrival.

    tenant: whose request it is, see EngineRequest.
    placement: its replica; None without a router.
    events: (time, event) in order: queued, scheduled, first token, preempted, finished, ...
    waits: reason -> seconds in which the request could have run and did not:
        "time"      the step had no time left for it
        "rows"      the batch was full
        "tokens"    the token budget of the step was used up
        "memory"    there were no KV blocks
        "turn"      the policy served other requests first
        "share"     its tenant has used more of the device, so that requests of others came first
        "prefix"    another request (the producer) was computing its prefix
        "grammar"   its grammar was being checked and compiled, before it was queued
        "early"     it is an early prefill, for which others left no time
        "yielded"   it ran, but the step was aborted for another request's first token (one that
                    was suspended is an event: nothing of it is lost)
    ttft_s: None until there is a first token.
    tpot_s: None until there is a second token.
    longest_gap_s: longest time between two tokens; None until there is a second one.
    slowdown: of a real-time stream, time since the first token over what the steps since then would
        have taken without best-effort work, by the cost model; None if that is not known.
    late_tokens: output tokens that missed their deadlines.
    preemptions: number of times it lost KV memory to another request.
    """

    request_id: str
    service_class: ServiceClass
    requested_class: ServiceClass
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    events: tuple[tuple[float, str], ...]
    waits: Mapping[str, float]
    tenant: str = ""
    ttft_s: float | None = None
    tpot_s: float | None = None
    longest_gap_s: float | None = None
    slowdown: float | None = None
    late_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    placement: Placement | None = None


@dataclass(frozen=True, slots=True)
class StopRule:
    """Where an output with a grammar may end.

    token_ids: tokens that end it. They are allowed only where the grammar is complete.
    min_tokens: it has at least this many tokens, unless nothing can follow before.
    end: the token that ends it where nothing can follow; one of the model's end-of-sequence tokens.
    """

    token_ids: frozenset[int]
    min_tokens: int
    end: int


class GrammarState(Protocol):
    """How far the output of one request has got in its grammar.

        output   [ advanced over ........... ][ forced ... ]
                                                            next: constraint()

    Only the scheduler advances it; stop tokens are not part of what it advances over.
    """

    def advance(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        """Advance over new tokens of the output, and over those that the grammar forces after them.

        Returns the forced tokens, at most `most`. If nothing can follow, the last of them is a stop
        token, and the output ends. Raises ValueError if the grammar does not allow a token, or
        cannot say because it has become too complex.
        """
        ...

    def constraint(self, ahead: int = 0) -> TokenConstraint:
        """What may come after the tokens so far, and `ahead` further ones that are not known yet.
        It is asked once the state has advanced over these."""
        ...


class Executor(Protocol):
    """Runs plans on a device. Holds the weights and the KV memory; makes no decisions."""

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | SuspendedStep | None:
        """Run one step and return one sample per chunk with a sample spec, in plan order.

        should_abort: called at safepoints, such as between layers. Once it returns True the
        executor may suspend the step, if it can, or abort it: it samples nothing and returns None,
        keeps nothing of the plan's chunks, and the contents of their slots are undefined. An
        executor without safepoints does not call it.
        """
        ...

    def close(self) -> None:
        """Release memory and worker processes. May be called twice."""
        ...


@runtime_checkable
class SuspendingExecutor(Executor, Protocol):
    """An executor that suspends steps rather than abort them, so that hardly any work is lost.

    Some steps may still be aborted: those that it runs as a whole, and what comes after the layers.
    """

    @property
    def num_layers(self) -> int:
        """The layers before which a step can be suspended."""
        ...


class StepHandle(Protocol):
    """Gives the result of a launched step."""

    def result(self) -> StepResult:
        """Wait until the step has ended. The engine calls it once per step, in launch order."""
        ...


@runtime_checkable
class LaunchingExecutor(Executor, Protocol):
    """An executor that enqueues a step on its device, so that the host can plan the next one.

        host     launch 1 | schedule 2 | launch 2 | wait for 1 | apply 1, schedule 3 | launch 3 ...
        device            [ step 1 ................. ][ step 2 ............................. ][ ...

    The engine prefers `launch` to `execute`, so an executor should have it only if it is faster.
    """

    def launch(self, plan: StepPlan) -> StepHandle:
        """Enqueue a step behind the one before, without waiting.

        At most two steps are in flight (launched, `result` not called). The plan may have PENDING
        tokens. `close` may be called with steps in flight.
        """
        ...


def find_launcher(executor: Executor, async_scheduling: str) -> LaunchingExecutor | None:
    """The executor, if it can launch steps and asynchronous scheduling is not "off"; else None.
    Raises ConfigError for "on" if it cannot launch."""
    if async_scheduling != "off" and isinstance(executor, LaunchingExecutor):
        return executor
    if async_scheduling == "on":
        raise ConfigError("--async-scheduling on: needs a GPU; elsewhere steps occupy the host")
    return None


OutputSink = Callable[[Output | EngineDeadError], None]
"""Receives the outputs of one request in order. The last one has a finish_reason or is an
EngineDeadError."""


class RequestStream(Protocol):
    """The outputs of one accepted request, for one consumer: `connect` a sink, or iterate."""

    @property
    def service_class(self) -> ServiceClass:
        """The class the engine serves it as; BE for a relegated real-time request."""
        ...

    def connect(self, sink: OutputSink) -> None:
        """Call `sink` in the event loop with each output as it arrives. Earlier outputs are merged
        into one and delivered at once. The sink must not raise."""
        ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Ends after the output that has a finish_reason. Outputs that arrive while the reader is
        busy are merged into one. Raises EngineDeadError if the engine dies first."""
        ...


class EngineClient(Protocol):
    """Access to an engine: in this process, in another one, or several behind a router."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """False from the engine's death until it has been restarted."""
        ...

    @property
    def num_lost(self) -> int:
        """How often an engine was lost: it ended without having been told to, or hung."""
        ...

    @property
    def num_hung(self) -> int:
        """How often of `num_lost` it hung."""
        ...

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Submit a request; returns once the engine has accepted it.

        Cancelling the call aborts the request. Raises PromptTooLongError,
        InvalidRequestError, QueueFullError, OverloadedError or EngineDeadError.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Abort a request and free its KV before the next step. Unknown ids are ignored."""
        ...

    async def promote(self, request_id: str, slo: Slo, awaited: bool = True) -> None:
        """Serve a best-effort request as real-time from now on. Its first token, if it has none
        yet, is due slo.ttft_s from now (None: the default). Of a real-time request, the objectives
        that are stricter count from now on, too. Unknown ids are ignored.

        awaited: something waits for it alone, see RequestGroup; False: no more than before.
        """
        ...

    async def release(self, request_id: str) -> None:
        """Unpin the KV of an ended request (Hints.keep_s). Unknown ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError if the engine is not running."""
        ...

    async def trace(self, request_id: str) -> RequestTrace | None:
        """The history of a running or recent request; None if the engine has none.

        Raises EngineDeadError if the engine is not running.
        """
        ...

    async def close(self) -> None: ...


class ReportingClient(EngineClient, Protocol):
    """A client that delivers the reports of its engine, for the router."""

    @property
    def hung(self) -> bool:
        """Whether its engine hung when it was lost the last time."""
        ...

    def subscribe(self, listener: Callable[[EngineReport], None]) -> None:
        """Call `listener` with every report from now on, also after a restart of the engine, whose
        versions start at 1 again with a digest. Call it once, in the event loop."""
        ...
