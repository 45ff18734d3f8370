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

    constant_s: of a step. token_s: of a token of a prompt. pair_s: of a token of a prompt for each
    token before it. row_s, context_s: of a token of an answer, and for each token before it.
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
    """Facts about a running engine that never change while it runs.

    default_slo: what real-time requests without objectives of their own are held to. grouping:
    which prefixes its rows read together; None if each row reads for itself. tp: how many ranks
    share the model. prices: None if it has no model of its steps.
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
class Notice:
    """What an engine tells whoever watches it: what it has cached, and how busy it is.

    version: goes up by one with each. kept: (request id, tokens) of requests of which this has
    changed: so many of the first tokens of prompt and answer are cached, counted as far as the
    last block that this request was the first to compute, and no block after that; blocks that
    it found belong to whoever computed them. Later pairs hold where they contradict earlier ones.
    What has nothing more of its own is in one last notice, with the tokens before that.
    full: `kept` is everything, and what is not in it is not there: a digest.
    Applied twice, in any order, or not at all, notices lead to the same once the next digest is in.
    An answer's tokens may be cached a little before they are told.
    running, waiting: requests. used_blocks, cached_blocks: KV blocks that requests have, and those
    that nobody has but that can be found. slowdown: steps take so many times what is predicted.
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

    The objectives count finished requests and their tokens, as the engine committed them:
    ttft_met and tpot_met requests (mean time between tokens) of `finished`; tokens_on_time of
    output_tokens, each against its own deadline; deadlines_met of the `deadlines` that finished
    requests had for the whole answer. slack: deadline minus commit in seconds.
    relegated: requests of this class that came in as the other one. promoted: best-effort ones
    that became requests of this class later.
    preemptions: how often a request had to give up KV memory; kv_taken: how many tokens of it,
    kv_copied: how many of them were copied to the host for that, kv_restored: came back.
    prefix_tokens: prompt tokens that were cached when a request began. prefix_evicted: cached
    blocks that were given up for requests of this class. kv_blocks: those with tokens that one
    request has to itself; one that both classes are in counts for both.
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

    batch_size: rows the policy allows in the next step; batch_resets: how often it fell back.
    step_s, predicted_s, step_error_s: sums over steps of the time they took, of what the cost
    model said beforehand, and of the absolute difference.
    be_tax_s: how much shorter the steps with real-time work would have been without best-effort
    work in them, by the cost model. safety_factor: what predictions are multiplied by.
    abandoned_steps, abandoned_s: steps given up for a real-time request that arrived while they
    ran, and the time that went into them; they are not in the other figures.
    kv_blocks_used: blocks that requests have; kv_blocks_shared: those of prefixes that several
    may have. kv_blocks_cached: blocks that nobody has, but that may be asked for again.
    kv_blocks_parked: those of prefixes that are kept for somebody who will come back
    (Hints.keep_s), whether they are in use, idle, or had to be given up.
    host_kv_blocks: room for copies of KV that had to make way.
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
    "time" (the step had no time left for it), "rows" (the batch was full), "tokens" (the token
    budget was used up), "memory" (no KV blocks), "turn" (the policy served others first),
    "prefix" (another request was computing what its prompt begins with),
    "early" (nobody waits for it, and it would have cost others more than it spares),
    "made way" (it ran, but the step was given up for somebody's first token).
    ttft_s, tpot_s: None until there is a first and a second token.
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
        self, plan: StepPlan, abandon: Callable[[], bool] | None = None
    ) -> StepResult | None:
        """Run one iteration and return one sample per chunk that asked for one, in order.

        abandon: asked at safepoints (between layers, say). Once it says yes the step may be
        given up: then nothing is sampled, what was written to the plan's slots does not count,
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
    """One that only enqueues work on its device, so that the host can plan on meanwhile.

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
        """What a request has left is kept no longer (Hints.keep_s). Unknown ids are ignored."""
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


class WatchableClient(EngineClient, Protocol):
    """One that tells what its engine has cached, for whoever has several to choose from."""

    def watch(self, listener: Callable[[Notice], None]) -> None:
        """Have `listener` told every notice from now on, and from every engine that comes up
        later: its versions begin at 1 again, with a digest. Call it in the event loop, once."""
        ...
