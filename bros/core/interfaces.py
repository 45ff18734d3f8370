"""The seams: what one layer promises another. Implementations are chosen in server/build.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from bros.core.errors import EngineDeadError
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, FinishReason, RequestOutput, ServiceClass, Slo


@dataclass(frozen=True, slots=True)
class Grouping:
    """Which prefixes of a step's rows are read once: at least min_blocks full blocks of block_size
    slots that at least min_rows rows, two or more, have in common.

    Less stays with the rows, as it costs each row a merge.
    """

    block_size: int
    min_blocks: int
    min_rows: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What work costs an engine beside other work, in seconds, by its cost model.

    constant_s: per step.
    token_s: per prompt token.
    pair_s: per prompt token and token before it.
    row_s: per output token.
    context_s: per output token and token before it.
    """

    constant_s: float = 0.0
    token_s: float = 1e-4
    pair_s: float = 0.0
    row_s: float = 1e-3
    context_s: float = 0.0

    def prefill_s(self, tokens: int, context: int = 0) -> float:
        """`tokens` of a prompt, after `context` that are cached."""
        return tokens * (self.token_s + self.pair_s * (context + tokens / 2))

    def decode_s(self, tokens: float, context: int, rows: float = 1.0) -> float:
        """`tokens` of an answer after `context`, in steps of so many rows."""
        each = self.constant_s / max(1.0, rows) + self.row_s
        return tokens * (each + self.context_s * context)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about an engine that do not change while it runs.

    default_slo: objectives of real-time requests that name none.
    grouping: which prefixes the rows of a step read together; None if each row reads its own.
    tp: how many ranks share the model.
    prices: what work costs; None if the engine has no cost model.
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
    grouping: Grouping | None = None
    tp: int = 1
    prices: Prices | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What an engine reports to its subscriber: which prefixes it has cached, and how busy it is.

    A report is state, not change: reports that are applied twice, out of order or not at all lead
    to the same view once the next digest is in. The tokens of an answer may be cached a little
    before a report says so.

    version: one more with each report.
    full: this is a digest: `kept` lists every request that has cached blocks.
    kept: (request id, tokens) of requests whose cached prefix has changed: so many of the first
        tokens of prompt and answer are cached, up to the last block that this request was the
        first to compute. Blocks that it found in the cache belong to the request that computed
        them. A later pair overrides an earlier one. A request that has no block of its own any
        more is listed once more, with the tokens before its first own block.
    running: requests that hold KV memory.
    waiting: requests in the queues.
    used_blocks: KV blocks that requests hold.
    cached_blocks: idle KV blocks of the prefix cache.
    slowdown: measured step time over predicted step time.
    """

    version: int
    full: bool = False
    kept: tuple[tuple[str, int], ...] = ()
    running: int = 0
    waiting: int = 0
    used_blocks: int = 0
    cached_blocks: int = 0
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True)
class Buckets:
    """A histogram: counts[i] values were at most bounds[i], and above bounds[i - 1].

    The last count, which has no bound, is of everything above; `total` is the sum of values.
    """

    bounds: tuple[float, ...] = ()
    counts: tuple[int, ...] = (0,)
    total: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassStats:
    """Counters and gauges of one service class.

    Objectives are counted over finished requests and their tokens, at the time when the engine
    committed the tokens.

    running: requests that hold KV memory.
    waiting: requests in the queue.
    prompt_tokens: computed prompt tokens.
    output_tokens: generated tokens.
    finished: requests.
    preemptions: how often a request lost KV memory to another request.
    kv_taken: tokens of KV that were preempted.
    kv_copied: preempted tokens that were copied to the host.
    kv_restored: tokens of KV that were copied back.
    prefix_tokens: prompt tokens that were cached when their request began.
    prefix_evicted: cached blocks that were evicted for requests of this class.
    kv_blocks: blocks with tokens that one request has to itself; a block that requests of both
        classes hold counts for both.
    ttft_met: finished requests whose first token was in time.
    tpot_met: finished requests whose mean time per token kept the objective.
    both_met: finished requests that met both objectives.
    deadlines: finished requests that had a deadline for the whole answer.
    deadlines_met: those of them that met it.
    tokens_on_time: output tokens that met their own deadlines.
    relegated: requests that asked for the other class and are served in this one.
    promoted: best-effort requests that became requests of this class later.
    rejected: requests that were refused.
    slack: deadline minus commit of tokens, in seconds.
    """

    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    finished: int = 0
    preemptions: int = 0
    kv_taken: int = 0
    kv_copied: int = 0
    kv_restored: int = 0
    prefix_tokens: int = 0
    prefix_evicted: int = 0
    kv_blocks: int = 0
    ttft_met: int = 0
    tpot_met: int = 0
    both_met: int = 0
    deadlines: int = 0
    deadlines_met: int = 0
    tokens_on_time: int = 0
    relegated: int = 0
    promoted: int = 0
    rejected: int = 0
    slack: Buckets = Buckets()


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot. Counters count since the engine started, all times are seconds.

    steps: completed steps.
    step_s: time that completed steps took.
    predicted_s: time that the cost model had predicted for them.
    step_error_s: sum of the absolute differences of these two, step by step.
    be_tax_s: how much shorter the steps with real-time work would have been without the
        best-effort work in them, by the cost model.
    abandoned_steps: steps that were aborted for a real-time request that arrived while they ran;
        they are in no other figure.
    abandoned_s: time that aborted steps took.
    safety_factor: predictions are multiplied by it.
    batch_size: rows that the policy allows in the next step.
    batch_resets: how often the batch size fell back.
    kv_blocks_used: blocks that requests hold.
    kv_blocks_total: blocks of the KV cache.
    kv_blocks_shared: used blocks that several requests may hold.
    kv_blocks_cached: idle blocks of the prefix cache.
    kv_blocks_parked: pinned blocks (Hints.keep_s), whether in use, idle, or evicted since.
    host_kv_blocks_used: host blocks with copies of KV.
    host_kv_blocks_total: host blocks for copies of preempted KV.
    by_class: of each service class.
    """

    steps: int = 0
    step_s: float = 0.0
    predicted_s: float = 0.0
    step_error_s: float = 0.0
    be_tax_s: float = 0.0
    abandoned_steps: int = 0
    abandoned_s: float = 0.0
    safety_factor: float = 1.0
    batch_size: int = 0
    batch_resets: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    kv_blocks_shared: int = 0
    kv_blocks_cached: int = 0
    kv_blocks_parked: int = 0
    host_kv_blocks_used: int = 0
    host_kv_blocks_total: int = 0
    by_class: Mapping[ServiceClass, ClassStats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTrace:
    """What became of one request and why it waited. Times in seconds after its arrival.

    events: (time, what) in order: queued, scheduled, first token, preempted, finished, ...
    waits: reason -> seconds in which the request could have run and did not:
        "time"      the step had no time left for it
        "rows"      the batch was full
        "tokens"    the token budget of the step was used up
        "memory"    there were no KV blocks
        "turn"      the policy served other requests first
        "prefix"    another request was computing the beginning of its prompt
        "early"     it is an early prefill, which would have cost others more than it saves
        "yielded"   it ran, but the step was aborted for the first token of another request
    ttft_s: None until there is a first token.
    tpot_s: None until there is a second token.
    late_tokens: output tokens after their deadlines.
    preemptions: how often it lost KV memory.
    """

    request_id: str
    service_class: ServiceClass
    requested_class: ServiceClass
    slo: Slo
    prompt_tokens: int
    output_tokens: int
    events: tuple[tuple[float, str], ...]
    waits: Mapping[str, float]
    ttft_s: float | None = None
    tpot_s: float | None = None
    late_tokens: int = 0
    preemptions: int = 0
    finish_reason: FinishReason | None = None


class Executor(Protocol):
    """Runs plans on a device. Holds the weights and the KV memory, decides nothing."""

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one iteration and return one sample per chunk that asked for one, in order.

        should_abort: asked at safepoints (between layers, say). Once it says yes the step may be
        aborted: then nothing is sampled, what was written to the plan's slots does not count,
        and None is returned. An executor without safepoints need not ask.
        """
        ...

    def close(self) -> None:
        """Release memory and worker processes. Calling it twice is fine."""
        ...


class Running(Protocol):
    """A step that was launched."""

    def result(self) -> StepResult:
        """Wait for its end. Asked for once, in the order of launches."""
        ...


@runtime_checkable
class LaunchingExecutor(Executor, Protocol):
    """An executor that only enqueues work on its device, so that the host can plan meanwhile.

        host     launch 1 | schedule 2 | launch 2 | wait for 1 | apply 1, schedule 3 | launch 3 ...
        device            [ step 1 ................. ][ step 2 ............................. ][ ...

    An executor should only have `launch` if that is better than `execute`: it is used then.
    """

    def launch(self, plan: StepPlan) -> Running:
        """Begin an iteration as soon as the one before is done; does not wait for that.

        Of at most two steps at a time the result has not been asked for. The plan may have
        chunks of PENDING. `close` may be called with steps in flight.
        """
        ...


OutputSink = Callable[[RequestOutput | EngineDeadError], None]
"""Takes the outputs of one request, one after the other: the last one has a finish_reason, or is
the error that the engine died."""


class RequestStream(Protocol):
    """The outputs of one accepted request, for one taker: `connect` it, or iterate over it."""

    @property
    def service_class(self) -> ServiceClass:
        """What the engine accepted it as; BE for a real-time request that was relegated."""
        ...

    def connect(self, sink: OutputSink) -> None:
        """Have `sink` called with each output when it comes, in the event loop. What has come
        before is handed over at once, merged into one output. The sink must not raise."""
        ...

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        """Ends after the output that has a finish_reason. What comes while the reader is busy is
        merged into one output. Raises EngineDeadError if the engine dies first."""
        ...


class EngineClient(Protocol):
    """An engine somewhere: in this process, in another, or several behind a router."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def alive(self) -> bool:
        """False once the engine has died and until it has been restarted."""
        ...

    async def submit(self, request: EngineRequest) -> RequestStream:
        """Hand over a request; returns once the engine has accepted it.

        Cancelling the call withdraws the request. Raises PromptTooLongError,
        InvalidRequestError, QueueFullError, OverloadedError or EngineDeadError.
        """
        ...

    async def abort(self, request_id: str) -> None:
        """Stop a request and free its KV at the next iteration. Unknown ids are ignored."""
        ...

    async def promote(self, request_id: str, slo: Slo) -> None:
        """Serve a best-effort request as real-time from now on; its first token is due slo.ttft_s
        from now if it has none yet. None takes the default. Real-time ones and unknown ids are
        ignored."""
        ...

    async def release(self, request_id: str) -> None:
        """Unpin the KV that an ended request has left (Hints.keep_s). Unknown ids are ignored."""
        ...

    async def stats(self) -> EngineStats:
        """Raises EngineDeadError if there is no engine to ask."""
        ...

    async def trace(self, request_id: str) -> RequestTrace | None:
        """What is known of a running or recent request; None if nothing is.

        Raises EngineDeadError if there is no engine to ask.
        """
        ...

    async def close(self) -> None: ...


class ReportingClient(EngineClient, Protocol):
    """A client that reports what its engine has cached, for a router that chooses among several."""

    def subscribe(self, listener: Callable[[EngineReport], None]) -> None:
        """Have `listener` told every report from now on, and from every engine that comes up
        later: its versions begin at 1 again, with a digest. Call it in the event loop, once."""
        ...
