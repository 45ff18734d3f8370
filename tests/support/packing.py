"""Candidates and memory for packing tests, and an independent judge of what comes out."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from bros.scheduler.cost_model import CostModel, StepTimePredictor
from bros.scheduler.packing import Bounds, Packing

BLOCK_SIZE = 4
SAFETY = 1.05
FIRST_TOKEN_SHARE = SAFETY / 1.1  # of a predictor that has seen no step
MODEL = CostModel(
    constant_s=0.020, token_s=0.001, sample_s=0.0002, pair_s=4e-7, context_s=2e-6
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Held:
    """Suspended tokens."""

    num_tokens: int
    done: float


@dataclass(frozen=True, slots=True)
class Item:
    """A candidate. Frozen, so packing cannot change it."""

    name: str
    remaining: int = 1
    num_computed_tokens: int = 0
    deadline_s: float = math.inf
    late: bool = False
    num_missing: int = 0
    samples: bool = True
    early: bool = False
    patient: bool = False
    suspended: Held | None = None

    @property
    def running(self) -> bool:
        return self.num_computed_tokens > 0 or self.suspended is not None


Chosen = Sequence[tuple[Item, int]]


def row(name: str, due_s: float = math.inf, context: int = 8) -> Item:
    """A decode row."""
    return Item(name, 1, context, due_s)


def blocks_for(item: Item, num_tokens: int) -> int:
    """New blocks that the next `num_tokens` tokens need."""
    held = -(-item.num_computed_tokens // BLOCK_SIZE)
    return -(-(item.num_computed_tokens + num_tokens) // BLOCK_SIZE) - held


class Blocks:
    """Plain block counts. sticky: names whose reservations cannot be given back.

    others: tokens that others hold and may lose when no block is free, and how many of them have
    no copy on the host yet.
    """

    refusal = "memory"
    has_common_parts = False
    sharing_changes = 0

    def __init__(
        self,
        free: int = 10**6,
        sticky: frozenset[str] = frozenset(),
        others: tuple[int, int] = (0, 0),
    ) -> None:
        self.free = free
        self.others, self.without_copy = others
        self.num_copied = 0
        self.reserved: dict[str, int] = {}
        self._sticky = sticky

    def look_up(self, item: Item) -> bool:
        return True

    def may_start(self, item: Item) -> bool:
        return True

    def reserve(self, item: Item, num_tokens: int) -> bool:
        assert num_tokens >= 1 and item.name not in self.reserved
        needed = 0 if item.suspended else blocks_for(item, num_tokens)
        if needed > self.free:
            lost = max(0, item.num_missing + num_tokens - self.free_slots(item))
            if lost > self.others:
                return False
            self.others -= lost
            copied = min(lost, self.without_copy)
            self.without_copy -= copied
            self.num_copied += copied
            needed = self.free
        self.free -= needed
        self.reserved[item.name] = needed
        return True

    def reserve_rows(self, items: Sequence[Item]) -> int:
        copied = self.num_copied
        for count, item in enumerate(items):
            if not self.reserve(item, 1):
                return count
            if self.num_copied > copied:
                return count + 1
        return len(items)

    def is_tight(self, num_rows: int, num_tokens: int) -> bool:
        return self.others > 0

    def free_slots(self, item: Item) -> int:
        """In its last block and in free ones."""
        return -item.num_computed_tokens % BLOCK_SIZE + self.free * BLOCK_SIZE

    def common_parts(self, item: Item) -> Sequence[tuple[Hashable, int]]:
        return ()

    def may_cancel(self, item: Item) -> bool:
        return item.name not in self._sticky

    def cancel(self, item: Item) -> None:
        self.free += self.reserved.pop(item.name)


def predictor(model: CostModel = MODEL) -> StepTimePredictor:
    return StepTimePredictor(model)


def seconds(chosen: Chosen) -> float:
    """The predicted time of a step, from the formula in the specification, on the safe side."""
    if not chosen:
        return 0.0
    total = MODEL.constant_s
    for item, count in chosen:
        total += MODEL.token_s * count
        if count == 1:
            total += MODEL.sample_s + MODEL.context_s * (item.num_computed_tokens + 1)
        else:
            total += MODEL.pair_s * (item.num_computed_tokens * count + count * (count + 1) / 2)
            total += MODEL.sample_s * (count == item.remaining)
    return SAFETY * total


def rest_seconds(item: Item, count: int) -> float:
    """Expected time of what is left of a prompt after a chunk of `count`, in a step of its own."""
    rest = item.remaining - count
    if rest == 0:
        return 0.0
    after = Item(item.name, rest, item.num_computed_tokens + count)
    return seconds([(after, rest)]) / SAFETY


def urgent_part(packing: Packing) -> list[tuple[Item, int]]:
    return packing.selected[: packing.num_urgent]


def best_effort_part(packing: Packing) -> list[tuple[Item, int]]:
    return packing.selected[packing.num_urgent :]


def replaced_rows(packing: Packing) -> list[tuple[Item, int]]:
    """Urgent decode rows that gave their places in the batch to best-effort work."""
    passed_over = packing.passed_over
    return [(item, 1) for item, why in passed_over if why == "rows" and item.remaining == 1]


def names(chosen: Chosen) -> list[str]:
    return [item.name for item, _ in chosen]


def check_resources(packing: Packing, bounds: Bounds, free_blocks: int) -> None:
    """Constraints (7) and (8), the token budget, and that the sums are the right ones."""
    chosen = packing.selected
    assert len({item.name for item, _ in chosen}) == len(chosen), "selected twice"
    assert all(1 <= count <= item.remaining for item, count in chosen)
    assert sum(count for _, count in chosen) <= bounds.tokens
    assert sum(blocks_for(item, count) for item, count in chosen) <= free_blocks
    assert math.isclose(packing.seconds, seconds(chosen), rel_tol=1e-9)
    assert math.isclose(predictor().safe_seconds(packing.load), packing.seconds, rel_tol=1e-9)
    urgent = packing.num_urgent + len(replaced_rows(packing))
    assert len(chosen) <= max(bounds.rows, urgent + 2 * (bounds.best_effort_credit_s > 0))
    for item, _ in urgent_part(packing)[bounds.rows :]:
        assert not bounds.rules.strict_rows
        assert item.remaining == 1, "only decode rows may exceed the batch size"


def check_deadlines(packing: Packing, bounds: Bounds, now: float) -> None:
    """Constraint (6): a request that could be on time when it was chosen is so in the final step.

    Follows the urgent part from the front: `limit_s` is what those before allow. Prompts must be
    cut to the largest chunk within it, found by linear search. A token that is on time only if the
    step takes no longer than expected (without the safety margin) allows nothing after it. One that
    is late even then allows anything, and is a violation if it is a decode row that would be on
    time alone.
    """
    chosen, limit_s, violated = urgent_part(packing), math.inf, False
    for index, (item, count) in enumerate(chosen):
        before, due_s = chosen[:index], item.deadline_s - now
        left = bounds.tokens - sum(n for _, n in before)
        largest = largest_chunk(item, before, left, limit_s)
        assert largest is not None, "selected beyond the limit"
        comes_s = seconds([*before, (item, largest)]) + rest_seconds(item, largest)
        if comes_s > due_s * SAFETY:
            alone_s = seconds([(item, 1)]) / SAFETY
            violated |= item.remaining == 1 and not item.late and alone_s <= due_s
            continue
        assert count == largest or has_time(item, due_s, bounds)
        now_s = seconds([*before, (item, count)])
        if comes_s > due_s:
            limit_s = min(limit_s, now_s)
        else:
            if item.remaining > 1 and not bounds.rules.early_return:
                due_s *= FIRST_TOKEN_SHARE
            limit_s = min(limit_s, max(due_s - rest_seconds(item, count), now_s))
        assert packing.seconds <= limit_s + 1e-9
    assert packing.violated == violated or (packing.violated and bounds.rules.early_return)


def has_time(item: Item, due_s: float, bounds: Bounds) -> bool:
    """Its prompt need not make a step longer than best-effort work may: it is due late enough, or
    only the end of its group counts."""
    if bounds.rules.early_return:
        return False
    alone_s = seconds([(item, item.remaining)]) / SAFETY
    return item.patient or due_s > max(5 * bounds.best_effort_s, 4 * alone_s)


def largest_chunk(item: Item, before: Chosen, left: int, limit_s: float) -> int | None:
    """Most tokens of an item, at most `left`, that keep the step within the limit."""
    fits = [
        count
        for count in range(1, min(item.remaining, left) + 1)
        if seconds([*before, (item, count)]) <= limit_s + 1e-12
    ]
    return max(fits, default=None)
