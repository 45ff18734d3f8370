"""Packing: which requests a step holds, and how many tokens of each (BROS Algorithm 1).

`pack` reads candidates, looks up their cached prefixes and reserves KV memory; the scheduler
commits the result.

    urgent         candidates in order of urgency; real-time by absolute deadline under `bros`
    best_effort    candidates for the time that is left; best-effort requests under `bros`

                 now                              limit = deadline of the most urgent
                  |--- urgent work ---|-- best-effort work --|
                  |<----- predicted, with margin ----------->|

The published algorithm takes whole prompts, and ends the step as soon as one candidate does not
fit (`Rules.paper`). Here (docs/decisions/0005) prompts are cut to the largest chunk that fits,
candidates that do not fit are passed over, and a token that will be late in any case is computed
but does not limit the step.

Comments `Ablation:` name a load of benchmarks/ablation.py that needs a mechanism, and what leaving
it out costs there.
"""

from __future__ import annotations

import bisect
import itertools
import math
from array import array
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from bros.core.interfaces import Grouping
from bros.core.plan import SEGMENT_WIDTH, SharedPrefix
from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from bros.scheduler.memory import StepMemory
from bros.scheduler.state import RequestState

# ---- Input and output of packing.


EARLY = "early"
"""The reason for passing over an early prefill: others leave it no time, and it is owed none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Switches for ablations.

    chunked: prompts may be cut into chunks.
    early_return: the first urgent candidate that does not fit ends the step, without best-effort
        work (lines 11-12 of the algorithm).
    strict_rows: the batch size also bounds decode rows that would be late in the next step.
    replace: best-effort work may take the row of the least urgent candidate that can wait (lines
        25-32).
    aborts_steps: a running step with best-effort work may yield to an arrival.
    min_chunk: smallest chunk of a prompt, in tokens.
    """

    chunked: bool = True  # Ablation: cpu, throughput -71 %
    early_return: bool = False  # Ablation: tight, throughput -13 %
    strict_rows: bool = False  # Ablation: long prompts, attainment collapses with two of nine seeds
    replace: bool = True  # Ablation: relegated, throughput -64 %
    aborts_steps: bool = True  # Ablation: one-token flood, attainment -37 points
    min_chunk: int = 16

    @classmethod
    def paper(cls) -> Rules:
        return cls(chunked=False, early_return=True, strict_rows=True, aborts_steps=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Bounds of one step.

    rows: batch size B.
    tokens: most tokens of all chunks.
    best_effort_s: most seconds of a step with best-effort work, or with late prompts. If the urgent
        part takes longer, best-effort work may replace rows of it, but not make the step longer.
    best_effort_share: best-effort work is added up to this share of best_effort_s.
    stretch: most seconds of a step with best-effort work beside real-time rows, in times of what
        its urgent part takes.
    short_of_s: the shortest interval between tokens of streams that are short of their reserve.
        In a step as long as that, best-effort work leaves a part of its time free.
    saved_s: seconds by which such a step may be longer than that; negative: has to be shorter.
    best_effort_credit_s: seconds that best-effort work may take in any case. If positive,
        best-effort work may also take two rows and min_chunk tokens in any case. With one, a
        share of 10 % came to 6 where urgent rows fill all steps (tests/scheduler/test_policies.py).
    tbar_s: moving average of step times (Tbar). A candidate that is passed over is assumed to wait
        that long.
    rules: switches for ablations.
    """

    rows: int
    tokens: int
    best_effort_s: float = math.inf
    best_effort_share: float = 1.0
    stretch: float = math.inf
    short_of_s: float = math.inf
    saved_s: float = 0.0
    best_effort_credit_s: float = 0.0
    tbar_s: float = 0.0
    rules: Rules = field(default_factory=Rules)


@dataclass(slots=True)
class Packing:
    """The chunks of a step.

    selected: (candidate, tokens), urgent first.
    load: the step's load for the cost model.
    num_urgent: how many of `selected` are urgent.
    urgent_s: predicted time of the urgent part, with safety margin.
    seconds: predicted time of the whole step, with safety margin.
    violated: a decode row will be late because of the others, or early_return ended the step.
    full: the batch size kept a candidate out.
    spends_credit: best-effort work uses its credit, so the step should not yield.
    passed_over: (candidate, reason).
    urgent_stop: the reason that ended the search through urgent candidates; None: it reached the
        end.
    best_effort_stop: the same for best-effort candidates.
    """

    selected: list[tuple[RequestState, int]] = field(default_factory=list)
    load: StepLoad = field(default_factory=StepLoad)
    num_urgent: int = 0
    urgent_s: float = 0.0
    seconds: float = 0.0
    violated: bool = False
    full: bool = False
    spends_credit: bool = False
    passed_over: list[tuple[RequestState, str]] = field(default_factory=list)
    urgent_stop: str | None = None
    best_effort_stop: str | None = None

    @property
    def has_best_effort(self) -> bool:
        return len(self.selected) > self.num_urgent


def _is_whole_row(candidate: RequestState) -> bool:
    """Whether it is a decode row that holds all its memory, as most candidates are."""
    return (
        candidate.running
        and candidate.remaining == 1
        and not candidate.num_missing
        and candidate.suspended is None
    )


# ---- Packing without predicted times: in order, while rows, tokens and memory last.


def _take_in_order(
    packing: Packing,
    candidates: Iterable[RequestState],
    bounds: Bounds,
    memory: StepMemory,
    tokens_left: int,
) -> int:
    """Returns how many tokens of the budget are left."""
    selected = packing.selected
    for are_rows, group in itertools.groupby(candidates, _is_whole_row):
        rest, taken = list(group), 0
        if are_rows:
            taken = memory.reserve_rows(rest[: min(bounds.rows - len(selected), tokens_left)])
            selected += [(row, 1) for row in rest[:taken]]
            tokens_left -= taken
        for candidate in rest[taken:]:
            if tokens_left == 0 or len(selected) == bounds.rows:
                packing.full |= tokens_left > 0
                packing.urgent_stop = packing.best_effort_stop = "rows" if tokens_left else "tokens"
                return tokens_left
            if not (candidate.running or memory.look_up(candidate)):
                packing.passed_over.append((candidate, "prefix"))
                continue
            num_tokens = min(candidate.remaining, tokens_left)
            if num_tokens < candidate.remaining and not bounds.rules.chunked:
                packing.passed_over.append((candidate, "tokens"))
                continue
            if memory.reserve(candidate, num_tokens):
                selected.append((candidate, num_tokens))
                tokens_left -= num_tokens
            else:
                packing.passed_over.append((candidate, memory.refusal))
    return tokens_left


# ---- Shared prefixes, which the decode rows of a step read once: their effect on the step's load
# (CommonContext), and their form in the plan (shared_prefixes).
#
#     row 0   [ a  512 ][ b  64 ] ...        pieces of prefixes, see KvCacheManager.common_parts
#     row 1   [ a  512 ][ b  64 ] ...
#     row 2   [ a  512 ][ c  96 ] ...        2 x 512 + 64 tokens fewer; only row 2 reads c
#
# A piece counts if it is long enough and enough rows have it (Grouping.cut). Prompt chunks read
# their context by themselves.


class CommonContext:
    """The decode rows of the step being packed, and the pieces of prefixes that they share.

    exists: some requests share a prefix, and the cost model accounts for that. Otherwise `join`
        and `leave` count nothing.
    """

    def __init__(self, memory: StepMemory, predictor: StepTimePredictor) -> None:
        self._memory = memory
        self._grouping = predictor.grouping
        self.exists = self._grouping is not None and memory.has_common_parts
        self._changes = memory.sharing_changes
        self._rows: dict[RequestState, Sequence[tuple[Hashable, int, int]]] = {}
        self._counts: dict[Hashable, int] = {}

    @property
    def is_stale(self) -> bool:
        """Whether common parts may have changed since this was made."""
        return self._grouping is not None and self._memory.sharing_changes != self._changes

    def join(self, row: RequestState) -> int:
        """Add a row; returns how many fewer tokens the step reads because it shares prefixes."""
        parts = self._memory.common_parts(row) if self.exists else ()
        if not parts:
            return 0
        assert self._grouping is not None
        pieces = self._rows[row] = self._grouping.cut(parts)
        counts, saved = self._counts, 0
        for part, first, end in pieces:
            count = counts[part] = counts.get(part, 0) + 1
            saved += self._saved(count, end - first)
        return saved

    def leave(self, row: RequestState) -> int:
        """Remove a row; returns how many fewer tokens the step would read if it joined again."""
        saved = 0
        for part, first, end in self._rows.pop(row, ()):
            saved += self._saved(self._counts[part], end - first)
            self._counts[part] -= 1
        return saved

    def _saved(self, count: int, blocks: int) -> int:
        """Tokens saved by the last of `count` rows that have a piece."""
        assert self._grouping is not None
        least, tokens = self._grouping.min_rows, blocks * self._grouping.block_size
        if count <= least:
            return tokens * (count - 1) if count == least else 0
        return tokens


def load_of(chosen: Sequence[tuple[RequestState, int]], common: CommonContext) -> StepLoad:
    """The load of (candidate, tokens) pairs, without copies to the host. common: without rows."""
    load = StepLoad()
    rows = [candidate for candidate, n in chosen if n == 1 and candidate.suspended is None]
    load.add_rows(
        len(rows),
        sum([row.num_computed_tokens for row in rows]),
        sum([common.join(row) for row in rows]) if common.exists else 0,
        sum([row.num_missing for row in rows]),
    )
    if len(rows) < len(chosen):
        for candidate, num_tokens in chosen:
            if num_tokens > 1 or candidate.suspended is not None:
                _add_chunk(load, candidate, num_tokens, common)
    return load


def _add_chunk(
    load: StepLoad, candidate: RequestState, num_tokens: int, common: CommonContext
) -> None:
    """Add a chunk to a load, without copies to the host. A decode row joins `common`, unless a part
    of its layers is computed."""
    complete = candidate.samples and num_tokens == candidate.remaining
    context, held = candidate.num_computed_tokens, candidate.suspended
    if held is not None:
        load.add(num_tokens, context, complete, done=held.done)
    else:
        shared = common.join(candidate) if num_tokens == 1 else 0
        load.add(num_tokens, context, complete, shared, candidate.num_missing)


def shared_prefixes(
    rows: Sequence[tuple[int, Sequence[tuple[Hashable, int]], array[int]]], grouping: Grouping
) -> tuple[SharedPrefix, ...]:
    """The pieces that rows of a step read once, outer ones first.

    rows: (index in the plan, KvCacheManager.common_parts, segments) of each decode row. If a block
        became common after a row's segments were listed, it is elsewhere in them; that row reads
        the piece, and what comes after it, by itself.
    """
    found: dict[Hashable, tuple[int, int, array[int], array[int]]] = {}
    for place, parts, segments in rows:
        for part, first, end in grouping.cut(parts):
            piece = segments[first * SEGMENT_WIDTH : end * SEGMENT_WIDTH]
            known = found.get(part)
            if known is None:
                found[part] = first, end, piece, array("i", [place])
            elif known[2] == piece:
                known[3].append(place)
            else:
                break
    return tuple(
        SharedPrefix(places, first, end)
        for first, end, _, places in found.values()
        if len(places) >= grouping.min_rows
    )


def pack(
    urgent: Iterable[RequestState],
    best_effort: Iterable[RequestState],
    bounds: Bounds,
    memory: StepMemory,
    predictor: StepTimePredictor | None,
    now: float,
    *,
    exclusive: bool = False,
) -> Packing:
    """Choose the chunks of the next step.

    exclusive: take best-effort work only if no urgent candidate can run.

    Without a predictor, candidates are taken in order while rows, tokens and memory last; one
    that does not fit into memory is passed over.
    """
    if predictor is None:
        packing = Packing()
        tokens_left = _take_in_order(packing, urgent, bounds, memory, bounds.tokens)
        packing.num_urgent = len(packing.selected)
        if not (exclusive and packing.selected):
            _take_in_order(packing, best_effort, bounds, memory, tokens_left)
        return packing
    packer = _Packer(bounds, memory, predictor, now)
    if packer.take_urgent(urgent):
        packer.take_best_effort(best_effort)
        packer.finish_best_effort()
    packer.update_shared_context()
    return packer.packing


_PATIENT_STEPS, _PATIENT_PROMPTS = 5, 4
"""A first token has time if it is due later than this many of the longest steps with best-effort
work take, and later than this many times the time that its prompt takes alone. Ablation: no slack,
p99 gap +19 %."""


_FOR_RESERVES = 0.05
"""The share of its part of a step that best-effort work leaves to streams that are short of their
reserve, if the urgent part takes nothing; less in proportion to what that takes of the interval.
The same share of any part cost `no slack` 3 +- 2 % of its throughput, where rows alone take the
interval (docs/decisions/0026)."""


class _Packer:
    """The state of one call of `pack`."""

    def __init__(
        self,
        bounds: Bounds,
        memory: StepMemory,
        predictor: StepTimePredictor,
        now: float,
    ) -> None:
        self.packing = Packing()
        self._bounds = bounds
        self._rules = bounds.rules
        self._memory = memory
        self._predictor = predictor
        self._now = now
        self._tokens_left = bounds.tokens
        self._limit_s = math.inf
        self._replaced = False
        self._has_credit = bounds.best_effort_credit_s > 0.0
        # Whether this step may preempt, so that copies to the host have to be predicted. Ablation:
        # overload, throughput -1 %.
        self._memory_is_tight = memory.is_tight(bounds.rows, bounds.tokens)
        self._urgent_load = StepLoad()  # without rows that were replaced
        self._common = CommonContext(memory, predictor)
        self._safety_factor = predictor.safety_factor
        self._first_token_share = predictor.rare_share

    def take_urgent(self, candidates: Iterable[RequestState]) -> bool:
        """Algorithm 1, lines 5-15; False if best-effort work may not follow."""
        packing, bounds, now = self.packing, self._bounds, self._now
        selected, passed_over = packing.selected, packing.passed_over
        go_on = True
        kept = min(self._rules.min_chunk, bounds.tokens // 2) if self._has_credit else 0
        self._tokens_left -= kept
        for candidate in self._without_runs(candidates, bounds.rows):
            if self._tokens_left <= 0:
                packing.urgent_stop = "tokens"
                break
            if len(selected) >= bounds.rows:
                packing.full = True
                waits_s = packing.seconds + bounds.tbar_s
                if self._rules.strict_rows or candidate.deadline_s - now > waits_s:
                    packing.urgent_stop = "rows"
                    break
                if candidate.remaining > 1:
                    passed_over.append((candidate, "rows"))
                    continue
            if not candidate.running and self._waits_for_prefix(candidate):
                continue
            refused = self._take_one_urgent(candidate)
            if refused in ("time", "tokens") and self._rules.early_return:
                packing.urgent_stop = refused
                go_on = refused == "tokens"  # the token budget is no violation of an objective
                packing.violated |= not go_on
                break
        self._tokens_left += kept
        packing.num_urgent = len(packing.selected)
        packing.urgent_s = packing.seconds
        return go_on

    def take_best_effort(self, candidates: Iterable[RequestState]) -> None:
        """Algorithm 1, lines 17-32."""
        packing, bounds = self.packing, self._bounds
        self._urgent_load = packing.load.snapshot()
        free_s = self._best_effort_limit_s()
        limit_s = max(free_s, packing.urgent_s + bounds.best_effort_credit_s)
        rows = max(bounds.rows, packing.num_urgent + 2 * self._has_credit)
        for candidate in self._without_runs(candidates, rows, limit_s):
            if self._tokens_left == 0:
                packing.best_effort_stop = "tokens"
                return
            if len(packing.selected) >= rows:
                packing.full = True
                if self._rules.replace and self._replace(candidate, limit_s):
                    continue
                packing.best_effort_stop = "rows"
                return
            if not candidate.running and self._waits_for_prefix(candidate):
                continue
            first = not packing.selected or (self._has_credit and not packing.has_best_effort)
            if candidate.remaining == 1 and packing.selected:
                if self._take_row(candidate, math.inf if first else limit_s) == "time":
                    packing.best_effort_stop = "time"
                    return
                continue
            if candidate.early and not candidate.running and packing.selected:
                # Only the part that fits into the step without credit.
                if num_tokens := self._chunk_within(candidate, free_s):
                    self._take(candidate, num_tokens)
                else:
                    self._pass_over(candidate, EARLY)
                continue
            if self._is_refused(candidate, limit_s):
                continue
            num_tokens = self._chunk_within(candidate, limit_s)
            if num_tokens == 0 and not first:
                packing.best_effort_stop = "time"
                return
            # If nothing else is selected it must run, or it never would. With credit, the first
            # best-effort candidate runs in any case.
            self._take(candidate, num_tokens or min(self._min_tokens(candidate), self._tokens_left))

    def _best_effort_limit_s(self) -> float:
        """Limit of a step to which best-effort work is added without credit."""
        packing, bounds = self.packing, self._bounds
        limit_s = min(self._limit_s, bounds.best_effort_share * bounds.best_effort_s)
        interval_s, urgent_s = bounds.short_of_s, packing.urgent_s
        if urgent_s < interval_s < math.inf:  # else no stream gains anything
            left_s = _FOR_RESERVES * (interval_s - urgent_s) ** 2 / interval_s
            limit_s = min(limit_s, interval_s - left_s)
        if packing.load.decode_rows and bounds.stretch < math.inf:
            limit_s = min(limit_s, bounds.stretch * urgent_s + bounds.saved_s)
        return limit_s

    def _without_runs(
        self, candidates: Iterable[RequestState], most: int, limit_s: float | None = None
    ) -> Iterator[RequestState]:
        """Take runs of decode rows at once; yield the other candidates, in order.

            candidates   [ row row row row row row ] prompt [ row row row ] prompt ...
            yielded        row                       prompt   row           prompt

        Most candidates are decode rows that hold memory. The first row of a run is yielded, since
        it may set the limit of the step. `_take_run` takes the rest as far as one prediction shows
        that each would be taken; those that it leaves are yielded.

        most: rows of the step.
        limit_s: time limit of the step; None for urgent candidates, which move the limit.
        """
        for are_rows, group in itertools.groupby(candidates, _is_whole_row):
            if not are_rows:
                yield from group
                continue
            first, *rows = group
            yield first
            yield from rows[self._take_run(rows, most, limit_s) :]

    def _take_run(self, rows: Sequence[RequestState], most: int, limit_s: float | None) -> int:
        """Take the first ones of these decode rows; returns how many.

        Deciding row by row would take the same ones: the time of a step rises with every row, so
        if all rows keep the limit without shared prefixes, any of them do. An urgent row that is
        due after the limit does not move it.
        """
        packing, load, common = self.packing, self.packing.load, self._common
        rows = rows[: max(0, min(most - len(packing.selected), self._tokens_left))]
        if not rows or self._memory_is_tight:
            return 0
        if limit_s is None:
            limit_s, now = self._limit_s, self._now
            if min([row.deadline_s for row in rows]) - now < limit_s:
                return 0
        context = sum([row.num_computed_tokens for row in rows])
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
            context = sum([row.num_computed_tokens for row in rows[:count]])
        load.add_rows(count, context, sum(shared[:count]))
        if self._memory.num_copied != load.swap_out_tokens:
            self._count_copies()
        packing.selected += [(row, 1) for row in rows[:count]]
        packing.seconds = self._predictor.safe_seconds(load)
        self._tokens_left -= count
        return count

    def finish_best_effort(self) -> None:
        """Update `urgent_s` after urgent rows were replaced, and set `spends_credit`."""
        self.packing.spends_credit = self._has_credit and self.packing.has_best_effort
        if self._replaced:
            load = self._urgent_load
            if self._common.exists or self._common.is_stale:
                load = self._load_of(self.packing.num_urgent, load.swap_out_tokens)
            self.packing.urgent_s = self._predictor.safe_seconds(load)

    def update_shared_context(self) -> None:
        """Recompute the load if requests began or lost memory, which changes shared prefixes."""
        packing = self.packing
        if self._common.is_stale:
            packing.load = self._load_of(len(packing.selected), packing.load.swap_out_tokens)
            packing.seconds = self._predictor.safe_seconds(packing.load)

    def _load_of(self, count: int, copied: int) -> StepLoad:
        """The load of the first `count` selected, with `copied` tokens copied to the host."""
        common = CommonContext(self._memory, self._predictor)
        load = load_of(self.packing.selected[:count], common)
        load.copy_out(copied)
        return load

    def _take_one_urgent(self, candidate: RequestState) -> str | None:
        """Take an urgent candidate; returns why not if it is passed over."""
        due_s = candidate.deadline_s - self._now
        if candidate.remaining == 1:
            refused = self._take_row(candidate, self._limit_s)
            if refused is None and due_s < self._limit_s:
                self._bind(candidate, self.packing.seconds, due_s)
            return refused
        if self._exceeds_budget(candidate):
            return self._pass_over(candidate, "tokens")
        soft_limit_s = min(self._limit_s, self._bounds.best_effort_s)
        if self._is_refused(candidate, soft_limit_s):
            return self._memory.refusal
        num_tokens, finish_s = 0, math.inf
        if due_s > 0.0 or self._rules.early_return:  # else it is hopeless whatever its chunk
            num_tokens = self._chunk_within(candidate, self._limit_s)
            if num_tokens == 0:
                return self._pass_over(candidate, "time")
            finish_s = self._finish_s(candidate, num_tokens)
        hopeless = self._is_hopeless(finish_s, due_s)
        if not self._rules.early_return and (hopeless or self._has_time(candidate, due_s)):
            # It is late anyway, or has time: it must not make others late.
            num_tokens = self._chunk_within(candidate, soft_limit_s)
            if num_tokens == 0 and not (hopeless and self.packing.selected):
                # The smallest chunk fits, since a larger one did, or nothing is selected. A
                # hopeless candidate waits for a step in which nothing is selected before it.
                num_tokens = min(self._min_tokens(candidate), self._tokens_left)
        if num_tokens == 0:
            return self._pass_over(candidate, "time")
        refused = self._take(candidate, num_tokens)
        if refused is None:
            self._bind(candidate, finish_s, due_s)
        return refused

    def _is_hopeless(self, finish_s: float, due_s: float) -> bool:
        """Whether a token that takes `finish_s`, with safety margin, will be late in any case.
        Ablation: cpu, documents, attainment -4 points if such a prompt may fill the step."""
        return finish_s > due_s * self._safety_factor

    def _has_time(self, candidate: RequestState, due_s: float) -> bool:
        """Whether small chunks will do, even if others arrive meanwhile: it is due very late, or
        its first token is not waited for.

        Steps as long as the prompts of a whole group made 3.8 instead of 2.7 % of the chats beside
        it late, and the group ended no earlier (docs/decisions/0012).
        """
        if candidate.patient:
            return True
        if due_s <= _PATIENT_STEPS * self._bounds.best_effort_s:
            return False
        tokens, context = candidate.remaining, candidate.num_computed_tokens
        alone_s = self._predictor.prefill_seconds(tokens, context)
        return due_s > _PATIENT_PROMPTS * alone_s

    def _take_row(self, candidate: RequestState, limit_s: float) -> str | None:
        """`_take` for a decode row, with one prediction of the time."""
        if candidate.suspended is not None:
            fits = self._seconds_with(candidate, 1) <= limit_s
            return self._take(candidate, 1) if fits else self._pass_over(candidate, "time")
        packing, load = self.packing, self.packing.load
        copied = self._copies_for(candidate, 1) if self._memory_is_tight else 0
        shared = self._common.join(candidate) if self._common.exists else 0
        context, missing = candidate.num_computed_tokens, candidate.num_missing
        load.add_rows(1, context, shared, missing)
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
        load.add_rows(-1, -context, -shared, -missing)
        reason = self._memory.refusal if seconds <= limit_s else "time"
        return self._pass_over(candidate, reason)

    def _bind(self, candidate: RequestState, finish_s: float, due_s: float) -> None:
        """Limit the step by the deadline of a selected candidate, unless that deadline is lost.

        finish_s: seconds until its token, with safety margin, in this step or a later one. If that
        is too late but the expected time is not, nothing more is added to the step. A decode row
        can catch up with its pace but a first token cannot, so its margin is larger.
        """
        packing = self.packing
        if finish_s <= due_s:
            if candidate.remaining > 1 and not self._rules.early_return:
                due_s *= self._first_token_share
            limit_s = max(due_s - (finish_s - packing.seconds), packing.seconds)
            self._limit_s = min(self._limit_s, limit_s)
        elif finish_s <= due_s * self._safety_factor:
            self._limit_s = min(self._limit_s, packing.seconds)
        else:
            packing.violated |= self._late_because_of_others(candidate, due_s)
            if self._rules.early_return and len(packing.selected) == 1:
                self._limit_s = 1.1 * packing.seconds  # the first one runs although it is late

    def _waits_for_prefix(self, candidate: RequestState) -> bool:
        """Whether a new request is passed over to wait for the producer of its prefix."""
        if self._memory.look_up(candidate):
            return False
        self._pass_over(candidate, "prefix")
        return True

    def _late_because_of_others(self, candidate: RequestState, due_s: float) -> bool:
        """Whether a decode row that will be late would be on time alone in a step."""
        if candidate.remaining > 1 or candidate.late:
            return False
        alone = StepLoad()
        alone.add_rows(1, candidate.num_computed_tokens)
        return self._predictor.seconds(alone) <= due_s

    def _min_tokens(self, candidate: RequestState) -> int:
        """Tokens of the smallest chunk of a candidate: all, if it may not be cut."""
        remaining = candidate.remaining
        if candidate.suspended is not None:
            remaining = candidate.suspended.num_tokens
        return min(remaining, self._rules.min_chunk) if self._rules.chunked else remaining

    def _is_refused(self, candidate: RequestState, limit_s: float) -> bool:
        """Pass over a candidate that cannot start, without predictions: where many wait, these
        would take half of the time of packing.

        limit_s: of the step; only with the published rules, which ask for time first.
        """
        if candidate.running or self._memory.may_start(candidate):
            return False
        if self._rules.early_return and not self._smallest_fits(candidate, limit_s):
            return False
        self._pass_over(candidate, self._memory.refusal)
        return True

    def _smallest_fits(self, candidate: RequestState, limit_s: float) -> bool:
        if self._exceeds_budget(candidate):
            return False
        least = min(self._min_tokens(candidate), self._tokens_left)
        return self._seconds_with(candidate, least) <= limit_s

    def _chunk_within(self, candidate: RequestState, limit_s: float) -> int:
        """Most tokens of a candidate that keep the step within `limit_s`; 0 if its smallest chunk
        does not."""
        if not self._smallest_fits(candidate, limit_s):
            return 0
        most = min(candidate.remaining, self._tokens_left)
        if candidate.suspended is not None:
            most = min(most, candidate.suspended.num_tokens)
        if limit_s == math.inf or self._seconds_with(candidate, most) <= limit_s:
            return most
        sizes = range(min(self._min_tokens(candidate), most), most)
        fit = bisect.bisect_right(sizes, limit_s, key=lambda n: self._seconds_with(candidate, n))
        return sizes[fit - 1]

    def _seconds_with(self, candidate: RequestState, num_tokens: int) -> float:
        """Predicted time of the step with `num_tokens` of a candidate added, with safety margin."""
        load, held = self.packing.load, candidate.suspended
        missing, done, copied = candidate.num_missing, 0.0, 0
        if held is not None:
            missing, done = 0, held.done
        elif self._memory_is_tight:
            copied = self._copies_for(candidate, num_tokens)
        sampled = candidate.samples and num_tokens == candidate.remaining
        chunk = num_tokens, candidate.num_computed_tokens, sampled, 0, missing, done
        load.add(*chunk)
        load.copy_out(copied)
        seconds = self._predictor.safe_seconds(load)
        load.copy_out(-copied)
        load.add(*chunk, sign=-1)
        return seconds

    def _copies_for(self, candidate: RequestState, num_tokens: int) -> int:
        """About how many tokens of victims are copied to the host for it."""
        return max(0, candidate.num_missing + num_tokens - self._memory.free_slots(candidate))

    def _count_copies(self) -> None:
        """Set the load's copies to those that the reservations really cause."""
        load = self.packing.load
        load.copy_out(self._memory.num_copied - load.swap_out_tokens)

    def _finish_s(self, candidate: RequestState, num_tokens: int) -> float:
        """Seconds until its token: after this step, or after the rest of its prompt."""
        seconds = self._seconds_with(candidate, num_tokens)
        if rest := candidate.remaining - num_tokens:
            context = candidate.num_computed_tokens + num_tokens
            seconds += self._predictor.prefill_seconds(rest, context)
        return seconds

    def _exceeds_budget(self, candidate: RequestState) -> bool:
        """Whether its prompt exceeds the tokens left and may not be cut. One that no step has room
        for is cut in any case."""
        if self._rules.chunked or not self.packing.selected:
            return False
        return self._tokens_left < candidate.remaining <= self._bounds.tokens

    def _take(self, candidate: RequestState, num_tokens: int) -> str | None:
        """Reserve and select a chunk; returns why not if the candidate is passed over."""
        if not self._memory.reserve(candidate, num_tokens):
            return self._pass_over(candidate, self._memory.refusal)
        self._select(candidate, num_tokens)
        return None

    def _pass_over(self, candidate: RequestState, reason: str) -> str:
        self.packing.passed_over.append((candidate, reason))
        return reason

    def _select(self, candidate: RequestState, num_tokens: int) -> None:
        packing = self.packing
        packing.selected.append((candidate, num_tokens))
        self._tokens_left -= num_tokens
        _add_chunk(packing.load, candidate, num_tokens, self._common)
        self._count_copies()
        packing.seconds = self._predictor.safe_seconds(packing.load)

    def _replace(self, candidate: RequestState, limit_s: float) -> bool:
        """Replace the least urgent decode row by a best-effort candidate, if that row can wait.

        Never the most urgent row, never one whose reservation preempted, not for a new request
        (which would bring ever more requests into memory), and only if the step keeps its limit
        and the replaced row can still be on time in the next step.
        """
        packing, memory = self.packing, self._memory
        index = packing.num_urgent - 1
        waiting = packing.selected[index][0]
        if index < 1 or waiting.remaining > 1 or not (waiting.running and candidate.running):
            return False
        if waiting.suspended is not None or candidate.suspended is not None:
            return False
        # Its missing tokens stay in the load of the step, which restores them in any case.
        context, missing = waiting.num_computed_tokens, waiting.num_missing
        packing.load.add_rows(-1, -context, -self._common.leave(waiting))
        num_tokens = self._chunk_within(candidate, limit_s)
        after_s = self._seconds_with(candidate, num_tokens) + self._bounds.tbar_s
        on_time = self._now + after_s <= waiting.deadline_s
        may_go = num_tokens > 0 and on_time and memory.may_cancel(waiting)
        if may_go and memory.reserve(candidate, num_tokens):
            memory.cancel(waiting)
            del packing.selected[index]
            packing.num_urgent -= 1
            self._replaced = True
            self._urgent_load.add_rows(-1, -context, swapped=-missing)
            packing.passed_over.append((waiting, "rows"))
            self._tokens_left += 1
            self._select(candidate, num_tokens)
            return True
        packing.load.add_rows(1, context, self._common.join(waiting))
        return False
