"""Finds in the integers of a plan what its rows have in common: plans for runners without a
scheduler, and what the scheduler's own shared prefixes are checked against.

Rows with a common prefix list the same full blocks first. Sorted by these blocks, rows with a
common prefix are neighbours, and what each has in common with the next one gives nested groups.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from bros.core.interfaces import Grouping
from bros.core.plan import SEGMENT_WIDTH, SharedPrefix, StepPlan
from bros.executor.inputs import with_shared_parts
from bros.kernels.interface import AttentionBatch


def with_shared(plan: StepPlan, grouping: Grouping) -> StepPlan:
    """The plan with all common prefixes of its chunks, of prompts too, that are long enough."""
    rows = [
        [
            tuple(chunk.segments[at : at + SEGMENT_WIDTH])
            for at in range(0, len(chunk.segments), SEGMENT_WIDTH)
        ]
        for chunk in plan.chunks
    ]
    return replace(plan, shared=tuple(find_shared(rows, grouping)))


def group_shared(batch: AttentionBatch, grouping: Grouping) -> AttentionBatch:
    """The same attention, with common prefixes as shared parts."""
    start, segments = batch.segment_start.tolist(), batch.segments.tolist()
    rows = [
        [tuple(segment) for segment in segments[start[row] : start[row + 1]]]
        for row in range(batch.num_rows)
    ]
    return with_shared_parts(batch, find_shared(rows, grouping))


def find_shared(rows: Sequence[Sequence[tuple[int, ...]]], rule: Grouping) -> list[SharedPrefix]:
    """rows: the (block, lo, hi) of each."""
    listed = []
    for row, segments in enumerate(rows):
        full = [high - low == rule.block_size for _, low, high in segments] + [False]
        listed.append(([block for block, _, _ in segments[: full.index(False)]], row))
    listed.sort()
    found: list[SharedPrefix] = []
    todo = [(listed, 0)]
    while todo:
        rows, first = todo.pop()
        if len(rows) < max(rule.min_rows, 2):
            continue
        end = first
        while all(len(b) > end for b, _ in rows) and len({b[end] for b, _ in rows}) == 1:
            end += 1
        last = end - end % rule.step_blocks
        if last - first >= max(rule.min_blocks, 1):
            places = array("i", sorted(row for _, row in rows))
            found.append(SharedPrefix(places, first, last))
            first = last
        families: dict[int, list[tuple[list[int], int]]] = {}
        for blocks, row in rows:
            if len(blocks) > end:
                families.setdefault(blocks[end], []).append((blocks, row))
        todo += [(family, first) for _, family in sorted(families.items())]
    return found
