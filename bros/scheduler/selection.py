"""What packing is given, and what comes out of it: plain data and two protocols."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from bros.scheduler.cost_model import StepLoad


class Candidate(Protocol):
    """What packing looks at.

    remaining: tokens to compute before the next one is sampled, num_cached tokens before them,
    num_missing of which have to be brought back first. samples: one is sampled then at all.
    early: it is a filler that nobody waits for, see Hints. running: it holds memory already.
    late: its deadline is lost and counted already.
    """

    @property
    def remaining(self) -> int: ...

    @property
    def num_cached(self) -> int: ...

    @property
    def num_missing(self) -> int: ...

    @property
    def samples(self) -> bool: ...

    @property
    def early(self) -> bool: ...

    @property
    def running(self) -> bool: ...

    @property
    def deadline_s(self) -> float: ...

    @property
    def late(self) -> bool: ...


C = TypeVar("C", bound=Candidate)
_C = TypeVar("_C", bound=Candidate, contravariant=True)


class Reservations(Protocol[_C]):
    """KV memory for the step that is packed: what is reserved here is selected."""

    def look_up(self, candidate: _C) -> bool:
        """For who holds no memory yet: sees what is cached of its prompt, and moves `num_cached`
        and `remaining`. False if it should wait for others who compute more of it."""
        ...

    def reserve(self, candidate: _C, num_tokens: int) -> bool:
        """True if the next `num_tokens` tokens fit, after what was reserved before."""
        ...

    @property
    def refusal(self) -> str:
        """Why the last reservation was refused: "memory", or "rows" if too many hold some."""
        ...

    def is_tight(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step of so many rows and tokens may cause copies to the host."""
        ...

    def free_slots(self, candidate: _C) -> int:
        """Tokens of a candidate, missing ones included, for which nobody else's are copied to the
        host; for the others about as many are."""
        ...

    @property
    def num_copied(self) -> int:
        """Tokens that reservations so far have caused to be copied to the host."""
        ...

    @property
    def has_common_parts(self) -> bool:
        """Whether there are cached tokens at all that several have."""
        ...

    @property
    def sharing_changes(self) -> int:
        """Another number whenever `common_parts` of anybody may have become something else."""
        ...

    def common_parts(self, candidate: _C) -> Sequence[tuple[Hashable, int]]:
        """(what it is, tokens) of the pieces of its cached prefix that others have as well, in
        their order: whoever has one has all of it, and those before it."""
        ...

    def may_cancel(self, candidate: _C) -> bool:
        """False if others lost memory for its reservation, so that it stays."""
        ...

    def cancel(self, candidate: _C) -> None:
        """Give a reservation back."""
        ...


EARLY = "early"
"""Why a filler that nobody waits for does not begin: it would cost others too much now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Ablation switches. The defaults are what bros does.

    chunked: prompts may be cut. early_return: the first urgent candidate that does not fit ends
    the step, without filler (lines 11-12 of the algorithm). strict_rows: decode rows that
    would be late in the next step may not exceed the batch size either. replace: filler may
    take the row of the least urgent candidate that can wait (lines 25-32). abandon: a running
    step with filler in it may be given up for a request that arrives.
    min_chunk: smallest piece of a prompt worth a place, in tokens.
    """

    chunked: bool = True
    early_return: bool = False
    strict_rows: bool = False
    replace: bool = True
    abandon: bool = True
    min_chunk: int = 16

    @classmethod
    def paper(cls) -> Rules:
        return cls(chunked=False, early_return=True, strict_rows=True, abandon=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one step may hold.

    rows: batch size B. tokens: most tokens of all chunks. filler_s: most seconds of a step with
    filler in it, and of one that serves late prompts; filler is added up to filler_share of
    that. filler_credit_s: seconds that filler may take in any case; if there are any, also a
    row, and the tokens of a smallest chunk. tbar_s: usual time of a step, for what is left to
    the next ones.
    """

    rows: int
    tokens: int
    filler_s: float = math.inf
    filler_share: float = 1.0
    filler_credit_s: float = 0.0
    tbar_s: float = 0.0
    rules: Rules = field(default_factory=Rules)


@dataclass(slots=True)
class Packing(Generic[C]):
    """What came out.

    selected: (candidate, tokens), urgent first. load, urgent_s, seconds: the predicted step,
    its urgent part and the whole. violated: a decode row will be late because of the others
    (or the early return was taken). full: the batch size kept a candidate out. passed_over:
    (candidate, reason) of those looked at; urgent_stop, filler_stop: why the rest was not.
    owed: filler got time that it had been owed, so this step should not be given up.
    """

    selected: list[tuple[C, int]] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)
    num_urgent: int = 0
    urgent_s: float = 0.0
    seconds: float = 0.0
    violated: bool = False
    full: bool = False
    owed: bool = False
    passed_over: list[tuple[C, str]] = field(default_factory=list)
    urgent_stop: str | None = None
    filler_stop: str | None = None
