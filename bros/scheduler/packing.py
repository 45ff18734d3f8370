"""What one step holds: requests and how many tokens of each (spec: BROS Algorithm 1).

Reads candidates, and does nothing but ask for memory: for what is cached of new requests, and for
reservations. The scheduler commits what comes out.

    urgent         candidates in order of urgency; real-time by absolute deadline under `bros`
    best_effort    candidates for the time that is left; best-effort requests under `bros`

                 now                              limit = deadline of the most urgent
                  |--- urgent work ---|-- best-effort work --|
                  |<----------- predicted, safe ------------>|

The published algorithm takes whole prompts, and ends the step as soon as one candidate does not
fit (`Rules.paper`). Here (ambiguities A1-A4 of the specification) prompts are cut to the
largest chunk that fits, what does not fit is passed over, and a token that is late whatever
happens is still computed but no longer binds the others.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from bros.core.interfaces import Grouping
from bros.core.plan import SEGMENT_WIDTH, SharedPrefix
from bros.scheduler.cost_model import StepLoad, StepTimePredictor

# ---- What packing is given, and what comes out of it: plain data and two protocols.


class Candidate(Protocol):
    """What packing looks at.

    remaining: tokens to compute before the next one is sampled.
    num_cached: tokens before these.
    num_missing: cached tokens that must be restored first.
    samples: a token is sampled then; False if it is prefill-only.
    early: it is an early prefill, see Hints.
    running: it holds memory already.
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

    def reserve_rows(self, candidates: Sequence[_C]) -> int:
        """`reserve` one token for each of these decode rows, in their order; how many have it.

        Stops before the first row that finds no room, and after the first one for which others
        lost memory.
        """
        ...

    @property
    def refusal(self) -> str:
        """Why the last reservation was refused: "memory", or "rows" if too many hold some."""
        ...

    def is_tight(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a step of so many rows and tokens may cause copies to the host."""
        ...

    def free_slots(self, candidate: _C) -> int:
        """Tokens of a candidate, missing ones included, for which no other request's are copied to
        the host; for the others about as many are."""
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
        """Another number whenever `common_parts` of any request may have changed."""
        ...

    def common_parts(self, candidate: _C) -> Sequence[tuple[Hashable, int]]:
        """(what it is, tokens) of the pieces of its cached prefix that others have as well, in
        their order: a request that has one part has all of it, and the parts before it."""
        ...

    def may_cancel(self, candidate: _C) -> bool:
        """False if others lost memory for its reservation, so that it stays."""
        ...

    def cancel(self, candidate: _C) -> None:
        """Give a reservation back."""
        ...


EARLY = "early"
"""Why an early prefill does not begin: it would cost others too much now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Ablation switches. The defaults are what bros does.

    chunked: prompts may be cut.
    early_return: the first urgent candidate that does not fit ends the step, without best-effort
        work (lines 11-12 of the algorithm).
    strict_rows: decode rows that would be late in the next step may not exceed the batch size.
    replace: best-effort work may take the row of the least urgent candidate that can wait (lines
        25-32).
    aborts_steps: a running step with best-effort work in it may be aborted for an arrival.
    min_chunk: smallest piece of a prompt that is worth a row, in tokens.
    """

    chunked: bool = True
    early_return: bool = False
    strict_rows: bool = False
    replace: bool = True
    aborts_steps: bool = True
    min_chunk: int = 16

    @classmethod
    def paper(cls) -> Rules:
        return cls(chunked=False, early_return=True, strict_rows=True, aborts_steps=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one step may hold.

    rows: batch size B.
    tokens: most tokens of all chunks.
    best_effort_s: most seconds of a step with best-effort work in it, and of one that serves late
        prompts.
    best_effort_share: best-effort work is added up to this share of best_effort_s.
    best_effort_credit_s: seconds that best-effort work may take in any case; if there are any, also
        a row, and the tokens of a smallest chunk.
    tbar_s: usual time of a step: so long a request that is left out waits for the next one.
    rules: switches for ablations.
    """

    rows: int
    tokens: int
    best_effort_s: float = math.inf
    best_effort_share: float = 1.0
    best_effort_credit_s: float = 0.0
    tbar_s: float = 0.0
    rules: Rules = field(default_factory=Rules)


@dataclass(slots=True)
class Packing(Generic[C]):
    """What came out.

    selected: (candidate, tokens), urgent first.
    load: of the predicted step.
    num_urgent: how many of `selected` are urgent.
    urgent_s: predicted time of the urgent part.
    seconds: predicted time of the whole step.
    violated: a decode row will be late because of the others (or the early return was taken).
    full: the batch size kept a candidate out.
    owed: best-effort work spent its credit in this step, which should therefore not be aborted.
    passed_over: (candidate, reason) of candidates that were looked at.
    urgent_stop: why the remaining urgent candidates were not looked at.
    best_effort_stop: the same of the best-effort ones.
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
    best_effort_stop: str | None = None


# ---- Packing for policies that do not ask how long a step takes: in order, while there is room.


def pack_untimed(
    urgent: Iterable[C],
    best_effort: Iterable[C],
    bounds: Bounds,
    memory: Reservations[C],
    *,
    exclusive: bool,
) -> Packing[C]:
    """See packing.pack. A candidate that finds no memory is passed over."""
    packing: Packing[C] = Packing()
    tokens_left = _fill(packing, urgent, bounds, memory, bounds.tokens)
    packing.num_urgent = len(packing.selected)
    if not (exclusive and packing.selected):
        _fill(packing, best_effort, bounds, memory, tokens_left)
    return packing


def _fill(
    packing: Packing[C],
    candidates: Iterable[C],
    bounds: Bounds,
    memory: Reservations[C],
    tokens_left: int,
) -> int:
    """Returns how many tokens are left then."""
    selected = packing.selected
    for candidate in candidates:
        if tokens_left == 0 or len(selected) == bounds.rows:
            packing.full |= tokens_left > 0
            packing.urgent_stop = packing.best_effort_stop = "rows" if tokens_left else "tokens"
            break
        if not (candidate.running or memory.look_up(candidate)):
            packing.passed_over.append((candidate, "prefix"))
            continue
        num_tokens = min(candidate.remaining, tokens_left)
        if memory.reserve(candidate, num_tokens):
            selected.append((candidate, num_tokens))
            tokens_left -= num_tokens
        else:
            packing.passed_over.append((candidate, memory.refusal))
    return tokens_left


# ---- How much of a prompt whose rest is not there yet is computed beside others (Hints.early).
#
# What it costs the step, against what it spares one full of prompts later:
#
#     seconds                                      seconds
#       |          ____ step with n more tokens      |               / step with n more tokens
#       |        .'                                  |            .'
#       |_______'.....  half of what n tokens        |          .'  ..  half of what n tokens spare
#       |    ....'      spare                        |        .' ...
#       |....                                        |______.'..
#       +-----------|--------- n                     +---------------- n
#          weights are read: up to here              every token costs the same: nothing


_WORTH = 0.5
"""Others are made slower by no more than this share of what is spared."""

_MANY_TOKENS = 512
"""In a step with so many the weights are no longer what takes the time."""


def most_worthwhile(
    sizes: range, added_seconds: Callable[[int], float], predictor: StepTimePredictor
) -> int:
    """The largest of the sizes (in tokens, rising) that costs others little; 0 if none does.

    added_seconds: by which so many tokens make the step longer, on the safe side.
    """
    spared_s = predictor.safety_factor * predictor.added_prefill_seconds(_MANY_TOKENS)
    worth_s = _WORTH * spared_s / _MANY_TOKENS
    count = bisect.bisect_left(sizes, True, key=lambda n: added_seconds(n) > n * worth_s)
    return sizes[count - 1] if count else 0


# ---- What decode rows of a step have in common in their caches, and read once for all: as it is
# counted while a step is packed (CommonContext), and as the plan says it (shared_prefixes).
#
#     row 0   [ a  512 ][ b  64 ] ...        pieces of prefixes, see KvCacheManager.common_parts
#     row 1   [ a  512 ][ b  64 ] ...
#     row 2   [ a  512 ][ c  96 ] ...        2 x 512 + 64 tokens fewer; c is only read by row 2
#
# Pieces count that are long enough by themselves, and that enough rows have (Grouping). Prompt
# chunks
# read for themselves.


class CommonContext(Generic[C]):
    """The rows of a step that is packed, and which pieces they have.

    exists: two requests have something in common, and the predictor asks what. Else nothing is
    counted.
    """

    def __init__(self, memory: Reservations[C], predictor: StepTimePredictor) -> None:
        self._memory = memory
        self._grouping = predictor.grouping
        self.exists = self._grouping is not None and memory.has_common_parts
        self._changes = memory.sharing_changes
        self._rows: dict[C, Sequence[tuple[Hashable, int]]] = {}
        self._counts: dict[Hashable, int] = {}
        if self._grouping is not None:
            self._least_tokens = self._grouping.min_blocks * self._grouping.block_size
            self._least_rows = self._grouping.min_rows

    @property
    def is_stale(self) -> bool:
        """Whether requests that share prefixes have joined or left the batch meanwhile."""
        return self._grouping is not None and self._memory.sharing_changes != self._changes

    def join(self, row: C) -> int:
        """One more row; how many fewer tokens are read than if it and the others before it had
        nothing to do with each other."""
        parts = self._memory.common_parts(row) if self.exists else ()
        if not parts:
            return 0
        self._rows[row] = parts
        counts, saved = self._counts, 0
        for part, tokens in parts:
            if tokens >= self._least_tokens:
                count = counts[part] = counts.get(part, 0) + 1
                saved += self._saved(count, tokens)
        return saved

    def leave(self, row: C) -> int:
        """One of them is not in the step any more; what it would save by joining again."""
        saved = 0
        for part, tokens in self._rows.pop(row, ()):
            if tokens >= self._least_tokens:
                saved += self._saved(self._counts[part], tokens)
                self._counts[part] -= 1
        return saved

    def _saved(self, count: int, tokens: int) -> int:
        """By the last of so many rows that have a piece."""
        if count <= self._least_rows:
            return tokens * (count - 1) if count == self._least_rows else 0
        return tokens


def load_of(chosen: Sequence[tuple[C, int]], common: CommonContext[C]) -> StepLoad:
    """Of candidates and so many tokens of each; without copies to the host.

    common: without rows so far.
    """
    load = StepLoad()
    for candidate, num_tokens in chosen:
        complete = candidate.samples and num_tokens == candidate.remaining
        shared = common.join(candidate) if num_tokens == 1 else 0
        load.add(num_tokens, candidate.num_cached, complete, shared, candidate.num_missing)
    return load


def shared_prefixes(
    rows: Sequence[tuple[int, Sequence[tuple[Hashable, int]], array[int]]], grouping: Grouping
) -> tuple[SharedPrefix, ...]:
    """The pieces that rows of a step read together, outer ones first.

    rows: of each decode row its place in the plan, its common parts (Reservations.common_parts)
    and its segments. Blocks may have become common after a row's segments were listed, so that
    they are in another place there; such a row reads the piece for itself.
    """
    found: dict[Hashable, tuple[int, int, array[int], array[int]]] = {}
    size, least = grouping.block_size, grouping.min_blocks
    for place, parts, segments in rows:
        end = 0
        for part, tokens in parts:
            first, end = end, end + tokens // size
            if end - first < least:
                continue
            piece = segments[first * SEGMENT_WIDTH : end * SEGMENT_WIDTH]
            known = found.get(part)
            if known is None:
                found[part] = first, end, piece, array("i", [place])
            elif known[2] == piece:
                known[3].append(place)
    return tuple(
        SharedPrefix(places, first, end)
        for first, end, _, places in found.values()
        if len(places) >= grouping.min_rows
    )


def pack(
    urgent: Iterable[C],
    best_effort: Iterable[C],
    bounds: Bounds,
    memory: Reservations[C],
    predictor: StepTimePredictor | None,
    now: float,
    *,
    exclusive: bool = False,
) -> Packing[C]:
    """Choose the next step.

    exclusive: best-effort work only if nothing urgent can run.

    Without a predictor time does not matter: candidates are taken in order while rows, tokens
    and memory last. A candidate that finds no memory is passed over.
    """
    if predictor is None:
        return pack_untimed(urgent, best_effort, bounds, memory, exclusive=exclusive)
    packer = _Packer(bounds, memory, predictor, now)
    if packer.take_urgent(urgent):
        packer.fill(best_effort)
        packer.account_for_replaced()
    packer.account_for_new_requests()
    return packer.packing


_PATIENT_STEPS, _PATIENT_PROMPTS = 5, 4
"""A first token is not urgent that is due after more than so many steps with best-effort work, and
more than so many times what its prompt takes."""


class _Packer(Generic[C]):
    """The state of one call of `pack`."""

    def __init__(
        self,
        bounds: Bounds,
        memory: Reservations[C],
        predictor: StepTimePredictor,
        now: float,
    ) -> None:
        self.packing: Packing[C] = Packing()
        self._bounds = bounds
        self._rules = bounds.rules
        self._memory = memory
        self._predictor = predictor
        self._now = now
        self._tokens_left = bounds.tokens
        self._limit_s = math.inf
        self._best_effort_waits = False
        self._replaced = False
        self._owes = False
        # Whether others may lose memory to this step, so that copies have to be expected.
        self._tight = memory.is_tight(bounds.rows, bounds.tokens)
        self._urgent_copied = 0
        self._common = CommonContext(memory, predictor)
        self._safety_factor = predictor.safety_factor
        self._rare_share = self._safety_factor / predictor.rare_factor

    def take_urgent(self, candidates: Iterable[C]) -> bool:
        """Algorithm 1, lines 5-15; False if best-effort work may not follow."""
        packing, bounds = self.packing, self._bounds
        go_on = True
        kept = min(self._rules.min_chunk, bounds.tokens // 2) if bounds.best_effort_credit_s else 0
        self._tokens_left -= kept
        for candidate in self._apart_from_runs(candidates, bounds.rows):
            if self._tokens_left <= 0:
                packing.urgent_stop = "tokens"
                break
            if len(packing.selected) >= bounds.rows:
                packing.full = True
                due_s = candidate.deadline_s - self._now
                if self._rules.strict_rows or due_s > packing.seconds + bounds.tbar_s:
                    packing.urgent_stop = "rows"
                    break
                if candidate.remaining > 1:
                    packing.passed_over.append((candidate, "rows"))
                    continue
            if not candidate.running and self._is_held_back(candidate):
                continue
            refused = self._take_one_urgent(candidate)
            if refused in ("time", "tokens") and self._rules.early_return:
                packing.urgent_stop = refused
                go_on = refused == "tokens"  # which is no fault of the objectives
                packing.violated |= not go_on
                break
        self._tokens_left += kept
        packing.num_urgent = len(packing.selected)
        packing.urgent_s = packing.seconds
        self._urgent_copied = packing.load.swap_out_tokens
        return go_on

    def fill(self, candidates: Iterable[C]) -> None:
        """Algorithm 1, lines 17-32."""
        packing, bounds = self.packing, self._bounds
        self._owes = bounds.best_effort_credit_s > 0.0
        limit_s = min(self._limit_s, bounds.best_effort_share * bounds.best_effort_s)
        owed_s = packing.urgent_s + bounds.best_effort_credit_s
        limit_s = owed_s if self._best_effort_waits else max(limit_s, owed_s)
        rows = max(bounds.rows, packing.num_urgent + (bounds.best_effort_credit_s > 0))
        for candidate in self._apart_from_runs(candidates, rows, limit_s):
            if self._tokens_left == 0:
                packing.best_effort_stop = "tokens"
                return
            if len(packing.selected) >= rows:
                packing.full = True
                if self._rules.replace and self._replace(candidate, limit_s):
                    continue
                packing.best_effort_stop = "rows"
                return
            if not candidate.running and self._is_held_back(candidate):
                continue
            if candidate.early and not candidate.running and packing.selected:
                self._begin_early(candidate, limit_s)
                continue
            first = not packing.selected or (self._owes and not self._has_best_effort)
            if candidate.remaining == 1 and packing.selected:
                if self._take_row(candidate, math.inf if first else limit_s) == "time":
                    packing.best_effort_stop = "time"
                    return
                continue
            num_tokens = self._chunk_within(candidate, limit_s)
            if num_tokens == 0 and first:
                # Alone it must run, or it never would; and what is owed is paid.
                num_tokens = min(self._least(candidate), self._tokens_left)
            if num_tokens == 0:
                packing.best_effort_stop = "time"
                return
            self._take(candidate, num_tokens)

    def _apart_from_runs(
        self, candidates: Iterable[C], most: int, limit_s: float | None = None
    ) -> Iterator[C]:
        """The candidates that have to be decided one by one, in their order.

            candidates   [ row row row row row row ] prompt [ row row row ] prompt ...
            decided      first, then the rest at once

        Most candidates are decode rows that hold memory already. The first of a run of them is
        decided like any other, for it may set the limit of the step; the rest is taken here, as
        far as one look shows that each of them would be (`_take_run`).

        most: rows of the step. limit_s: seconds that the step is kept within; None for urgent
        candidates, whose limit moves.
        """
        run: list[C] = []
        for candidate in candidates:
            if candidate.remaining == 1 and candidate.running and not candidate.num_missing:
                run.append(candidate)
                continue
            if run:
                yield run[0]
                yield from run[1 + self._take_run(run[1:], most, limit_s) :]
                run.clear()
            yield candidate
        if run:
            yield run[0]
            yield from run[1 + self._take_run(run[1:], most, limit_s) :]

    def _take_run(self, rows: Sequence[C], most: int, limit_s: float | None) -> int:
        """Take the first ones of these decode rows; how many. The others have to be asked about.

        Takes what deciding them one by one would take, for the time of a step rises with every
        row: if it keeps the limit with all of them, and nothing read together, so it does with
        some. An urgent row that is due after the limit does not move it.
        """
        packing, load, common = self.packing, self.packing.load, self._common
        rows = rows[: max(0, min(most - len(packing.selected), self._tokens_left))]
        if not rows or self._tight:
            return 0
        if limit_s is None:
            limit_s, now = self._limit_s, self._now
            if any(row.deadline_s - now < limit_s for row in rows):
                return 0
        context = sum([row.num_cached for row in rows])
        load.add_rows(len(rows), context)
        seconds = self._predictor.safe_seconds(load)
        load.add_rows(-len(rows), -context)
        if seconds > limit_s:
            return 0
        shared = [common.join(row) for row in rows] if common.exists else []
        count = self._memory.reserve_rows(rows)
        if count < len(rows):
            for row in reversed(rows[count:]):
                common.leave(row)
            context = sum([row.num_cached for row in rows[:count]])
        load.add_rows(count, context, sum(shared[:count]))
        if self._memory.num_copied != load.swap_out_tokens:
            self._count_copies()
        packing.selected += [(row, 1) for row in rows[:count]]
        packing.seconds = self._predictor.safe_seconds(load)
        self._tokens_left -= count
        return count

    def _begin_early(self, candidate: C, limit_s: float) -> None:
        """Take as much of it as the others can spare."""
        sizes = range(self._least(candidate), self._chunk_within(candidate, limit_s) + 1)
        without_s = self.packing.seconds
        num_tokens = most_worthwhile(
            sizes, lambda n: self._seconds_with(candidate, n) - without_s, self._predictor
        )
        if num_tokens:
            self._take(candidate, num_tokens)
        else:
            self._pass_over(candidate, EARLY)

    @property
    def _has_best_effort(self) -> bool:
        return len(self.packing.selected) > self.packing.num_urgent

    def account_for_replaced(self) -> None:
        """Once for all rows that were given away: what is left of the urgent part takes less."""
        self.packing.owed = self._owes and self._has_best_effort
        if self._replaced:
            load = self._load_of(self.packing.num_urgent, self._urgent_copied)
            self.packing.urgent_s = self._predictor.safe_seconds(load)

    def account_for_new_requests(self) -> None:
        """Find shared prefixes again: requests have joined, or lost memory."""
        packing = self.packing
        if self._common.is_stale:
            packing.load = self._load_of(len(packing.selected), packing.load.swap_out_tokens)
            packing.seconds = self._predictor.safe_seconds(packing.load)

    def _load_of(self, count: int, copied: int) -> StepLoad:
        """The first `count` of those selected, and what is copied to the host for them."""
        common = CommonContext(self._memory, self._predictor)
        load = load_of(self.packing.selected[:count], common)
        load.copy_out(copied)
        return load

    def _take_one_urgent(self, candidate: C) -> str | None:
        """Why it is not in the step, if it is not."""
        due_s = candidate.deadline_s - self._now
        if candidate.remaining == 1:
            refused = self._take_row(candidate, self._limit_s)
            if refused is None and due_s < self._limit_s:
                self._bind(candidate, self.packing.seconds, due_s)
            return refused
        if self._is_cut_off(candidate):
            return self._pass_over(candidate, "tokens")
        num_tokens = self._chunk_within(candidate, self._limit_s)
        finish_s = self._finish_s(candidate, num_tokens)
        hopeless = finish_s > due_s * self._safety_factor
        apart = hopeless or self._has_time(candidate, due_s)
        if num_tokens > 0 and apart and not self._rules.early_return:
            # It is late anyway, or has much time: let it not make others late.
            limit_s = min(self._limit_s, self._bounds.best_effort_s)
            num_tokens = self._chunk_within(candidate, limit_s)
            if num_tokens == 0 and not (hopeless and self.packing.selected):
                # It fits, as more of it did; only hopeless ones wait for a step of their own.
                num_tokens = min(self._least(candidate), self._tokens_left)
        if num_tokens == 0:
            return self._pass_over(candidate, "time")
        refused = self._take(candidate, num_tokens)
        if refused is None:
            self._bind(candidate, finish_s, due_s)
        return refused

    def _has_time(self, candidate: C, due_s: float) -> bool:
        """Due so late that short steps will do, even if others come in between."""
        if due_s <= _PATIENT_STEPS * self._bounds.best_effort_s:
            return False
        alone_s = self._predictor.prefill_seconds(candidate.remaining, candidate.num_cached)
        return due_s > _PATIENT_PROMPTS * alone_s

    def _take_row(self, candidate: C, limit_s: float) -> str | None:
        """The same as `_take` for a decode row, which asks for the time once; why not, if not."""
        packing, load = self.packing, self.packing.load
        copied = self._copies_for(candidate, 1) if self._tight else 0
        shared = self._common.join(candidate) if self._common.exists else 0
        load.add_row(candidate.num_cached, candidate.num_missing, shared)
        if copied:
            load.copy_out(copied)
        seconds = self._predictor.safe_seconds(load)
        if seconds <= limit_s and self._memory.reserve(candidate, 1):
            packing.selected.append((candidate, 1))
            if self._memory.num_copied != load.swap_out_tokens:
                self._count_copies()
                seconds = self._predictor.safe_seconds(load)
            packing.seconds = seconds
            self._tokens_left -= 1
            return None
        load.copy_out(-copied)
        self._common.leave(candidate)
        load.remove_row(candidate.num_cached, candidate.num_missing, shared)
        reason = self._memory.refusal if seconds <= limit_s else "time"
        return self._pass_over(candidate, reason)

    def _bind(self, candidate: C, finish_s: float, due_s: float) -> None:
        """Hold the step to the deadline of a selected candidate, unless that is lost already.

        finish_s: when its token is there on the safe side, in this step or a later one. If that
        is too late but the expected time is not, nothing more is added, in the hope that it
        is in time. A late prompt is at least not made later by best-effort work. Decode rows
        can catch up with their pace, a first token cannot: its step is not filled beyond a
        time that is exceeded yet more rarely.
        """
        packing = self.packing
        if finish_s <= due_s:
            if candidate.remaining > 1 and not self._rules.early_return:
                due_s *= self._rare_share
            limit_s = max(due_s - (finish_s - packing.seconds), packing.seconds)
            self._limit_s = min(self._limit_s, limit_s)
        elif finish_s <= due_s * self._safety_factor:
            self._limit_s = min(self._limit_s, packing.seconds)
        else:
            is_new = not (candidate.late or self._rules.early_return)
            self._best_effort_waits |= candidate.remaining > 1 and is_new
            packing.violated |= self._is_others_fault(candidate, due_s)
            if self._rules.early_return and len(packing.selected) == 1:
                self._limit_s = 1.1 * packing.seconds  # A1: the head runs, late as it is

    def _is_held_back(self, candidate: C) -> bool:
        """A new request had better wait for its prefix, which another request computes."""
        if self._memory.look_up(candidate):
            return False
        self._pass_over(candidate, "prefix")
        return True

    def _is_others_fault(self, candidate: C, due_s: float) -> bool:
        """A decode row will be late, and would not be if it were alone."""
        if candidate.remaining > 1 or candidate.late:
            return False
        alone = StepLoad()
        alone.add_row(candidate.num_cached)
        return self._predictor.seconds(alone) <= due_s

    def _least(self, candidate: C) -> int:
        """Tokens of the smallest piece of a prompt: all, if it may not be cut."""
        remaining = candidate.remaining
        return min(remaining, self._rules.min_chunk) if self._rules.chunked else remaining

    def _chunk_within(self, candidate: C, limit_s: float) -> int:
        """Most tokens of a candidate that keep the step within `limit_s`; 0 if too few."""
        most = min(candidate.remaining, self._tokens_left)
        if self._is_cut_off(candidate):
            return 0
        if limit_s == math.inf or self._seconds_with(candidate, most) <= limit_s:
            return most
        least = self._least(candidate)
        if most <= least or self._seconds_with(candidate, least) > limit_s:
            return 0
        sizes = range(least, most)
        fit = bisect.bisect_right(sizes, limit_s, key=lambda n: self._seconds_with(candidate, n))
        return sizes[fit - 1]

    def _seconds_with(self, candidate: C, num_tokens: int) -> float:
        """The step with `num_tokens` more of a candidate, on the safe side."""
        load, context, missing = self.packing.load, candidate.num_cached, candidate.num_missing
        sampled = candidate.samples and num_tokens == candidate.remaining
        copied = self._copies_for(candidate, num_tokens) if self._tight else 0
        load.add(num_tokens, context, sampled, swapped=missing)
        load.copy_out(copied)
        seconds = self._predictor.safe_seconds(load)
        load.copy_out(-copied)
        load.remove(num_tokens, context, sampled, swapped=missing)
        return seconds

    def _copies_for(self, candidate: C, num_tokens: int) -> int:
        """About how many tokens of others are copied to the host to make room for it."""
        return max(0, candidate.num_missing + num_tokens - self._memory.free_slots(candidate))

    def _count_copies(self) -> None:
        """The copies that reservations have really caused, instead of what was expected."""
        load = self.packing.load
        load.copy_out(self._memory.num_copied - load.swap_out_tokens)

    def _finish_s(self, candidate: C, num_tokens: int) -> float:
        """When its token would be there: after this step, or after the rest of its prompt."""
        seconds = self._seconds_with(candidate, num_tokens)
        if rest := candidate.remaining - num_tokens:
            seconds += self._predictor.prefill_seconds(rest, candidate.num_cached + num_tokens)
        return seconds

    def _is_cut_off(self, candidate: C) -> bool:
        """Its prompt may not be cut, and there are too few tokens left for all of it."""
        too_long = candidate.remaining > self._tokens_left
        return too_long and not self._rules.chunked and bool(self.packing.selected)

    def _take(self, candidate: C, num_tokens: int) -> str | None:
        """Why it is not in the step, if it is not."""
        if not self._memory.reserve(candidate, num_tokens):
            return self._pass_over(candidate, self._memory.refusal)
        self._select(candidate, num_tokens)
        return None

    def _pass_over(self, candidate: C, reason: str) -> str:
        self.packing.passed_over.append((candidate, reason))
        return reason

    def _select(self, candidate: C, num_tokens: int) -> None:
        packing = self.packing
        packing.selected.append((candidate, num_tokens))
        self._tokens_left -= num_tokens
        complete = candidate.samples and num_tokens == candidate.remaining
        shared = self._common.join(candidate) if num_tokens == 1 else 0
        missing = candidate.num_missing
        packing.load.add(num_tokens, candidate.num_cached, complete, shared, missing)
        self._count_copies()
        packing.seconds = self._predictor.safe_seconds(packing.load)

    def _replace(self, candidate: C, limit_s: float) -> bool:
        """Give the candidate the row of the least urgent decode row, if that one can wait.

        A4: never the most urgent, never one that others lost their memory for, not for a new
        request (which would bring ever more requests into memory), and only if the step keeps its
        limit and the one that waits can still be on time in the next step.
        """
        packing, memory = self.packing, self._memory
        index = packing.num_urgent - 1
        waiting = packing.selected[index][0]
        if index < 1 or waiting.remaining > 1 or not (waiting.running and candidate.running):
            return False
        # What comes back for it does so in any case.
        packing.load.remove_row(waiting.num_cached, shared=self._common.leave(waiting))
        num_tokens = self._chunk_within(candidate, limit_s)
        after_s = self._seconds_with(candidate, num_tokens) + self._bounds.tbar_s
        on_time = self._now + after_s <= waiting.deadline_s
        may_go = num_tokens > 0 and on_time and memory.may_cancel(waiting)
        if may_go and memory.reserve(candidate, num_tokens):
            memory.cancel(waiting)
            del packing.selected[index]
            packing.num_urgent -= 1
            self._replaced = True
            packing.passed_over.append((waiting, "rows"))
            self._tokens_left += 1
            self._select(candidate, num_tokens)
            return True
        packing.load.add_row(waiting.num_cached, shared=self._common.join(waiting))
        return False
