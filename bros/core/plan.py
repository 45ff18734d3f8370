"""One step as data: what to run (StepPlan) and the sampled tokens (StepResult).

    plan = scheduler.schedule(now) -> result = executor.execute(plan) -> scheduler.apply(result)

KV memory is `num_blocks` blocks of `block_size` slots; slot s is offset s % block_size of
block s // block_size. A request's cached tokens are a list of segments (block, lo, hi): slots
[lo, hi) of that block, in any order, because positions are applied when K is written. (Only the
last bits of sums depend on the order: see Kernels.prepare.)

Where the executor can, plan t + 1 is made while plan t runs (interfaces.LaunchingExecutor):

    scheduler   schedule 1 | schedule 2 ........ | apply 1, schedule 3 ..... | apply 2, schedule 4
    device                 [ plan 1 ............ ][ plan 2 ................. ][ plan 3 ...

So a plan may have a chunk of a request that has meanwhile ended at a stop token. The scheduler
ignores its sample. The next plan may already give its slots to other requests, so the executor must
run plans, copies included, in order (see KvCopies).

Where plans are not launched, a step may be suspended between two layers (see Kept).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from bros.core.request import (
    PooledTokens,
    Pooling,
    PromptLogprobs,
    SamplingParams,
    TokenLogprobs,
)

# The records below that are made per row and step are not frozen, because that would triple the
# time to make them. No code changes them afterwards.

SEGMENT_WIDTH = 3
"""Integers per segment in `Chunk.segments`: block, lo, hi."""

PENDING = -1
"""In `Chunk.token_ids`: the token that the plan right before this one samples for the request.

    plan 7   chunk of "a"   start 0   [ 4, 8, 15 ]  -> sample
    plan 8   chunk of "a"   start 3   [ PENDING  ]  -> sample     made before plan 7 is done

Always the only token of its chunk, and only in plans that are launched. The executor fills it in on
the device. If sampling failed (SampledToken.error), it may fill in any token.
"""


class TokenConstraint(Protocol):
    """Which tokens may come next in an output that has a grammar.

    It speaks for one position of the output, and is asked when the token there is sampled; with
    asynchronous scheduling that is later than it is made. Its methods raise ValueError if the
    grammar cannot say, because it has become too complex.
    """

    def allows(self, token_id: int) -> bool:
        """Whether this token may come next."""
        ...

    def mask(self) -> bytes | bytearray | memoryview:
        """One bit per token of the vocabulary, the first token in the lowest bit of the first byte:
        whether it may come next. Tokens beyond its end may not."""
        ...


@dataclass(slots=True)
class SampleSpec:
    """How to sample the token after a chunk; the same one in all steps of most requests.

    seed: determines the random number, together with the index of the token in the output, so a
        draw depends on nothing else.
    prompt_len: number of tokens before the output, from which that index is counted.
    token_ids: prompt and output so far if params.needs_history, else empty.
    forbidden: tokens that must not be sampled (stop tokens before min_tokens).
    constraint: what the request's grammar allows; None without a grammar.
    """

    params: SamplingParams
    seed: int
    prompt_len: int = 0
    token_ids: Sequence[int] = ()
    forbidden: Sequence[int] = ()
    constraint: TokenConstraint | None = None


@dataclass(slots=True)
class Readout:
    """Which hidden states of a chunk are read for results about the prompt itself.

        tokens of the chunk   0 ........ first ........ end ........ n
        hidden states                    [ read        )

    A position is read once per request: not again when its KV is recomputed, and not by the engine
    that continues a request of another one. KV from the prefix cache has no hidden states, so the
    scheduler does not use it for positions that are still to be read.

    first, end: the tokens of the chunk whose hidden states are read.
    targets: one token per position: the prompt token after it, whose log-probability is asked for.
    top: how many of the most likely tokens are asked for as well.
    pooling: the hidden states are summed for an embedding, or scored; there are no targets.
    second_from: as in EngineRequest.
    """

    first: int
    end: int
    targets: Sequence[int] = ()
    top: int = 0
    pooling: Pooling | None = None
    second_from: int | None = None


class Kept(NamedTuple):
    """What an executor keeps of a chunk whose step was suspended: the hidden states of its tokens
    before a layer. K and V of the layers below are cached.

        plan 7   layers 0 .. 11              suspended before layer 12: its chunks are kept
        plan 8   layers 0 .............. 29
        plan 9   layers 0 .. 11              without the chunk that has Kept(7, row, 12)
                         layers 12 ..... 29  with it

    The scheduler and the executor agree on what is kept: of a SuspendedStep, every chunk that had
    begun. The executor keeps it until a plan has a chunk that continues it, or drops it. A chunk
    may continue the first tokens only: n of them leave Kept(step, row, layer, first + n).

    step: number of the suspended plan.
    row: index of the chunk in that plan.
    layer: the first layer that is still to be computed, at least 1.
    first: how many tokens of the chunk come before these.
    """

    step: int
    row: int
    layer: int
    first: int = 0


@dataclass(slots=True)
class Chunk:
    """Tokens [start, start + n) of one request, n = len(token_ids) >= 1; decode is n = 1.

        positions   0 ........ start ........ start+n
                    [ segments )[ token_ids   )  -> sample (or None: more chunks follow)

    token_ids: may be [PENDING] if the plan is launched.
    readout: None if no hidden states are read but that of the sample.
    segments: int32 (block, lo, hi) triples, flattened; together they cover [0, start).
    slots: int32, one per token: where its K and V are written.
    kept: where it continues; None if it begins with the first layer. Its tokens and slots are
        those of the plan that was suspended, or the first of them.
    """

    request_id: str
    start: int
    token_ids: Sequence[int]
    segments: array[int]
    slots: array[int]
    sample: SampleSpec | None
    readout: Readout | None = None
    kept: Kept | None = None


def _no_slots() -> array[int]:
    return array("i")


@dataclass(slots=True)
class KvCopies:
    """Checkpoints (`out`: device to host) and restores (`back`: host to device) of one step.

    Each list has int32 slots, one per token: out_device[k] is copied to out_host[k], and
    back_host[k] to back_device[k]. All `out` copies come before all `back` copies. No chunk of the
    plan reads a slot of `out_device`; no host slot is in both host lists or twice in one.

    An executor that copies concurrently with the computation must keep this order:

        `out` reads a slot of `out_device`         before a chunk or `back` writes to it
        `back` has restored a slot                 before a chunk reads it
        `out` has written a host slot, in any plan before `back` reads it
        the computation of all earlier plans       before `out`, `back` and the chunks
        copies to one host slot                    in the order of plans, even if no request needs
                                                   them: the slot may have a new owner in the next
    """

    out_device: array[int] = field(default_factory=_no_slots)
    out_host: array[int] = field(default_factory=_no_slots)
    back_host: array[int] = field(default_factory=_no_slots)
    back_device: array[int] = field(default_factory=_no_slots)

    def __len__(self) -> int:
        """Number of tokens to copy, in both directions."""
        return len(self.out_device) + len(self.back_device)


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A part of the context that several chunks of a plan share and the kernel reads once.

    rows: int32, ascending, two or more indices into StepPlan.chunks.
    first, end: segments [first, end) of each of these chunks are the same full blocks, in the same
        order. The shared prefixes of one row do not overlap.
    """

    rows: array[int]
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything an executor needs for one step. It has at least one chunk.

    chunks: those that continue what is kept come last, in the order of their layers.
    copies: the executor makes them before it computes, even if the step is aborted or suspended
        later.
    shared: prefixes that kernels read once (chosen by EngineInfo.grouping); of chunks that begin
        with the first layer.
    dropped: what is not needed any more of what the executor keeps. No chunk continues it.
    """

    step: int
    chunks: tuple[Chunk, ...]
    copies: KvCopies | None = None
    shared: tuple[SharedPrefix, ...] = ()
    dropped: tuple[Kept, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(slots=True)
class SampledToken:
    """The token sampled after a chunk.

    error: why sampling failed.
    of_grammar: with an error: the request's grammar allows no token, or has become too complex.
    """

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    error: str | None = None
    of_grammar: bool = False


@dataclass(slots=True)
class ReadPositions:
    """What was read of a chunk with a readout.

    end: one more than the last position that was read, counted from the start of the prompt.
    error: why it could not be read.
    """

    request_id: str
    end: int
    prompt_logprobs: PromptLogprobs | None = None
    pooled: PooledTokens | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step has produced.

    samples: one for each chunk with a sample spec, in plan order.
    readouts: one for each chunk with a readout, in any order.
    """

    step: int
    samples: tuple[SampledToken, ...]
    readouts: tuple[ReadPositions, ...] = ()


@dataclass(frozen=True, slots=True)
class SuspendedStep:
    """A step that was suspended before `layer`, one of 0 .. num_layers - 1, instead of a result.

    Chunks that had begun, at a layer below, are kept: from now on as Kept(step, row, layer). Those
    that would have continued later are kept as before.
    """

    step: int
    layer: int
    num_layers: int
