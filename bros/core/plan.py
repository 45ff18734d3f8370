"""One step as data: what to run (StepPlan) and what came of it (StepResult).

    plan = scheduler.schedule(now) -> result = executor.execute(plan) -> scheduler.apply(result)

KV memory is `num_blocks` blocks of `block_size` slots; slot s is offset s % block_size of
block s // block_size. A request's cached tokens are a list of segments (block, lo, hi): slots
[lo, hi) of that block, in any order, because attention inside the context is order-free
(positions are applied when K is written).

Where the executor can, plan t + 1 is made while plan t runs (interfaces.LaunchingExecutor):

    scheduler   schedule 1 | schedule 2 ........ | apply 1, schedule 3 ..... | apply 2, schedule 4
    device                 [ plan 1 ............ ][ plan 2 ................. ][ plan 3 ...

So a plan may have a chunk of a request that has ended meanwhile, at a stop token that was not known
yet. The chunk runs for nothing, and its sample is ignored. Its slots may belong to other requests
in the next plan already, which is why plans touch the device in their order (see KvCopies).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

from bros.core.request import SamplingParams, TokenLogprobs

# One of each is made per row and step. Freezing them would triple the time that takes, so they
# are not frozen; no code changes them after they are made.

SEGMENT_WIDTH = 3
"""Integers per segment in `Chunk.segments`: block, lo, hi."""

PENDING = -1
"""In `Chunk.token_ids`: the token that the plan right before this one samples for the request.

    plan 7   chunk of "a"   start 0   [ 4, 8, 15 ]  -> sample
    plan 8   chunk of "a"   start 3   [ PENDING  ]  -> sample     made before plan 7 is done

Always the only token of its chunk, and only in plans that are launched. The executor fills it in
where the token is, on the device. If there is none (SampledToken.error), any token will do.
"""


@dataclass(slots=True)
class SampleSpec:
    """How to choose the token after a chunk.

    `seed` and `output_index` name the random number, so a draw depends on nothing else.
    `token_ids` is the whole history (prompt and output) if params.needs_history, else empty;
    its first `prompt_len` tokens are the prompt. `forbidden` must not be chosen (stop tokens
    before min_tokens).
    """

    params: SamplingParams
    seed: int
    output_index: int
    prompt_len: int = 0
    token_ids: Sequence[int] = ()
    forbidden: Sequence[int] = ()


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + n) of one request, n = len(token_ids) >= 1; decode is n = 1.

        positions   0 ........ start ........ start+n
                    [ segments )[ token_ids   )  -> sample (or None: more chunks follow)

    segments: int32 (block, lo, hi) triples, flattened; together they cover [0, start).
    slots:    int32, one per token: where its K and V are written.
    token_ids may be [PENDING] if the plan is launched.
    """

    request_id: str
    start: int
    token_ids: Sequence[int]
    segments: array[int]
    slots: array[int]
    sample: SampleSpec | None


def _no_slots() -> array[int]:
    return array("i")


@dataclass(slots=True)
class KvCopies:
    """KV that moves between device and host: first everything `out` is copied, then `back`.

    int32 slots, one per token; the k-th of a device list belongs to the k-th of its host list.
    No slot is in `out_device` whose contents a chunk of the same plan reads, and no host slot is in
    both host lists, or twice in one. What makes copies beside the computation has to wait, though
    (hazards H1-H7 of the specification):

        a write (of a chunk or `back`) to a slot of `out_device`, for its contents to be read
        a chunk, for what `back` brings
        `back`, for the copy that put its contents on the host, in whichever plan that was
        `out`, `back` and the chunks, for the computation of all plans before
        copies to one host slot for each other, in the order of plans; they are made even if
        no request needs them any more, since the slot may have a new owner in the next plan
    """

    out_device: array[int] = field(default_factory=_no_slots)
    out_host: array[int] = field(default_factory=_no_slots)
    back_host: array[int] = field(default_factory=_no_slots)
    back_device: array[int] = field(default_factory=_no_slots)

    def __len__(self) -> int:
        """Tokens that are copied."""
        return len(self.out_device) + len(self.back_device)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A piece of the context that several chunks of a plan have in common, to be read once.

    rows: int32, ascending, two or more places in StepPlan.chunks. Segments [first, end) of each of
    these chunks are the same full blocks, in the same order. Pieces of one row do not overlap.
    """

    rows: array[int]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything an executor needs for one iteration. Never empty.

    copies: made before anything is computed, also if the step is aborted later.
    shared: prefixes that the scheduler counts as read once (EngineInfo.grouping says what pays);
        kernels read just these once.
    """

    step: int
    chunks: tuple[Chunk, ...]
    copies: KvCopies | None = None
    shared: tuple[SharedPrefix, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(slots=True)
class SampledToken:
    """The token chosen after a chunk that asked for one; with `error`, that none could be."""

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One SampledToken per chunk with a sample spec, in plan order."""

    step: int
    samples: tuple[SampledToken, ...]
