"""What one step holds: requests and how many tokens of each (spec: BROS Algorithm 1).

Reads candidates, and does nothing but ask for memory: for what is cached of newcomers, and for
reservations. The scheduler commits what comes out.

    urgent    candidates in order of urgency; real-time by absolute deadline under `bros`
    filler    candidates for what is left; best-effort under `bros`

                 now                      limit = deadline of the most urgent
                  |--- urgent work ---|-- filler --|
                  |<------- predicted, safe ------>|

The published algorithm takes whole prompts, and ends the step as soon as one candidate does not
fit (`Rules.paper`). Here (ambiguities A1-A4 of the specification) prompts are cut to the
largest chunk that fits, what does not fit is passed over, and a token that is late whatever
happens is still computed but no longer binds the others.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import Generic

from bros.scheduler.common_context import CommonContext, load_of
from bros.scheduler.cost_model import StepLoad, StepTimePredictor
from bros.scheduler.early import most_worthwhile
from bros.scheduler.selection import EARLY, Bounds, C, Packing, Reservations
from bros.scheduler.untimed import pack_untimed


def pack(
    urgent: Iterable[C],
    filler: Iterable[C],
    bounds: Bounds,
    memory: Reservations[C],
    predictor: StepTimePredictor | None,
    now: float,
    *,
    exclusive: bool = False,
) -> Packing[C]:
    """Choose the next step.

    exclusive: filler only if nothing urgent can run.

    Without a predictor time does not matter: candidates are taken in order while rows, tokens
    and memory last. A candidate that finds no memory is passed over.
    """
    if predictor is None:
        return pack_untimed(urgent, filler, bounds, memory, exclusive=exclusive)
    packer = _Packer(bounds, memory, predictor, now)
    if packer.take_urgent(urgent):
        packer.fill(filler)
        packer.account_for_replaced()
    packer.account_for_newcomers()
    return packer.packing


_PATIENT_STEPS, _PATIENT_PROMPTS = 5, 4
"""A first token is not urgent that is due after more than so many steps with filler, and more
than so many times what its prompt takes."""


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
        self._filler_waits = False
        self._replaced = False
        self._owes = False
        # Whether others may lose memory to this step, so that copies have to be expected.
        self._tight = memory.is_tight(bounds.rows, bounds.tokens)
        self._urgent_copied = 0
        self._common = CommonContext(memory, predictor)
        self._safety_factor = predictor.safety_factor
        self._rare_share = self._safety_factor / predictor.rare_factor

    def take_urgent(self, candidates: Iterable[C]) -> bool:
        """Algorithm 1, lines 5-15; False if filler may not follow."""
        packing, bounds = self.packing, self._bounds
        go_on = True
        kept = min(self._rules.min_chunk, bounds.tokens // 2) if bounds.filler_credit_s else 0
        self._tokens_left -= kept
        for candidate in candidates:
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
        self._owes = bounds.filler_credit_s > 0.0
        limit_s = min(self._limit_s, bounds.filler_share * bounds.filler_s)
        owed_s = packing.urgent_s + bounds.filler_credit_s
        limit_s = owed_s if self._filler_waits else max(limit_s, owed_s)
        rows = max(bounds.rows, packing.num_urgent + (bounds.filler_credit_s > 0))
        for candidate in candidates:
            if self._tokens_left == 0:
                packing.filler_stop = "tokens"
                return
            if len(packing.selected) >= rows:
                packing.full = True
                if self._rules.replace and self._replace(candidate, limit_s):
                    continue
                packing.filler_stop = "rows"
                return
            if not candidate.running and self._is_held_back(candidate):
                continue
            if candidate.early and not candidate.running and packing.selected:
                self._begin_early(candidate, limit_s)
                continue
            first = not packing.selected or (self._owes and not self._has_filler)
            if candidate.remaining == 1 and packing.selected:
                if self._take_row(candidate, math.inf if first else limit_s) == "time":
                    packing.filler_stop = "time"
                    return
                continue
            num_tokens = self._chunk_within(candidate, limit_s)
            if num_tokens == 0 and first:
                # Alone it must run, or it never would; and what is owed is paid.
                num_tokens = min(self._least(candidate), self._tokens_left)
            if num_tokens == 0:
                packing.filler_stop = "time"
                return
            self._take(candidate, num_tokens)

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
    def _has_filler(self) -> bool:
        return len(self.packing.selected) > self.packing.num_urgent

    def account_for_replaced(self) -> None:
        """Once for all rows that were given away: what is left of the urgent part takes less."""
        self.packing.owed = self._owes and self._has_filler
        if self._replaced:
            load = self._load_of(self.packing.num_urgent, self._urgent_copied)
            self.packing.urgent_s = self._predictor.safe_seconds(load)

    def account_for_newcomers(self) -> None:
        """Who has come, or lost memory, has changed what rows have in common with whom."""
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
            limit_s = min(self._limit_s, self._bounds.filler_s)
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
        if due_s <= _PATIENT_STEPS * self._bounds.filler_s:
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
        is in time. A prompt that is late is at least not made later by filler. Decode rows can
        catch up with their pace, a first token cannot: its step is not filled further than to a
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
            self._filler_waits |= candidate.remaining > 1 and is_new
            packing.violated |= self._is_others_fault(candidate, due_s)
            if self._rules.early_return and len(packing.selected) == 1:
                self._limit_s = 1.1 * packing.seconds  # A1: the head runs, late as it is

    def _is_held_back(self, candidate: C) -> bool:
        """A newcomer had better wait for what others compute of its prompt."""
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

        A4: never the most urgent, never one that others lost their memory for, not for a newcomer
        (which would bring ever more requests into memory), and only if the step keeps its limit
        and the one that waits can still be on time in the next step.
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
