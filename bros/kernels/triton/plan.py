"""The work list of a step's attention: what each program reads, and where it writes its result.

A unit is a tile of queries with all that it attends to. Long lists of segments are split, so a unit
becomes one or more items; one program (or a few) per KV head computes an item. If a token has one
item, the result goes directly to the output; otherwise items write partial results (output and
log-sum-exp), which a second kernel merges.

    row of one token        one unit
    row of several tokens   a unit per tile of tokens; shared parts are copied to its own segments
    shared part             a unit per tile of the one-token rows that read it: K and V are loaded
                            once for the whole tile

The host makes a list in every step. csrc/work_list.h makes the same one by a compiled call
(work_list.py); these functions define it, and make it where the extension was not built or where
some chunks are precomputed. There is no Python loop over rows, segments or items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bros.kernels.interface import AttentionBatch
from bros.kernels.offsets import Ints, lengths_of, offsets, ranges

QUERY, QUERIES, SEGMENT, SEGMENT_END, OWN, OWN_END, PARTIAL, LISTED = range(8)
"""Columns of an item; the kernels use the same numbers.

QUERY, QUERIES: the queries are tokens [QUERY, QUERY + QUERIES) of the step.
LISTED: if 1, the queries are these entries of `WorkList.listed` instead.
SEGMENT, SEGMENT_END: they attend to this range of segments,
OWN, OWN_END: and, causally, to this range of tokens of the step.
PARTIAL: query i writes partial result PARTIAL + i; -1: it writes to the output."""

ITEM_WIDTH = 8

_TOKENS_PER_SEGMENT = 8  # on average, to estimate how long an item takes


@dataclass(frozen=True, slots=True)
class Split:
    """How to split the segments of units into items. Lengths are in grains of `grain` segments.

    All segments are divided evenly among `programs`, the number of programs that the device runs at
    once, but no item has fewer than `least` grains. If items become longer than `long` grains, they
    are split into up to `waves` times as many: with short items, all processors finish at about the
    same time.
    """

    programs: int
    grain: int = 4
    least: int = 2
    long: int = 8
    waves: int = 1

    def item_length(self, total: int, programs_per_item: int) -> int:
        """Grains per item, if all units have `total` grains."""
        work = total * programs_per_item
        even = -(-work // self.programs)
        shortest = max(self.long, -(-work // (self.programs * self.waves)))
        return max(self.least, min(even, shortest))

    def extra_items(self, segments: int, programs_per_item: int) -> int:
        """The most items in excess of units, for units that have `segments` segments in all.

        This is grains / item_length(grains), counting the grains that are not the first of a unit.
        """
        grains = segments // self.grain
        in_waves = self.programs * self.waves // programs_per_item
        even = max(self.programs // programs_per_item, min(grains // self.long, in_waves))
        return min(grains // self.least, even)


@dataclass(frozen=True, slots=True)
class PlanRules:
    """How to divide a batch into items.

    one: for rows of one token.
    tile: for all other units.
    tile_tokens: the most queries of a unit.
    programs_per_one, programs_per_tile: programs of an item: KV heads, times the programs that a
        tile is divided among.
    """

    one: Split
    tile: Split
    tile_tokens: int
    programs_per_one: int
    programs_per_tile: int


@dataclass(frozen=True, slots=True)
class PrecomputedChunks:
    """Chunks whose attention within the chunk is computed before any item runs (by xformers).

    The output holds their results already, which are merged with the attention to the context:
    slot -1 - i of `WorkList.merge_slots` stands for the result of token first + i.

    rows: bool [rows of the step], the rows of these chunks.
    first: the token of the step at which their log-sum-exps start.
    """

    rows: NDArray[np.bool_]
    first: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """The items of a step, and how to merge their partial results. All arrays are int32.

    one_items, tile_items: [n, ITEM_WIDTH].
    listed: [k], query tokens of the readers of shared parts.
    merge_tokens: [t], the tokens to merge. Token merge_tokens[i] is merged from the partial results
        merge_slots[merge_start[i]:merge_start[i + 1]].
    merge_start: [t + 1].
    merge_slots: indexes of partial results; negative ones are of PrecomputedChunks.
    segments: [m, 3].
    partials: the number of partial results.
    """

    one_items: Ints
    tile_items: Ints
    listed: Ints
    merge_tokens: Ints
    merge_start: Ints
    merge_slots: Ints
    segments: Ints
    partials: int


@dataclass(frozen=True, slots=True)
class _Context:
    """The segments of rows, [segment_start[r], segment_start[r + 1]), then those of shared parts.

    part, rows, first, end: [k], one entry for each reader of a part that stays shared, sorted by
        part: row rows[i] reads segments[first[i]:end[i]] of part[i].
    """

    segment_start: Ints
    segments: Ints
    part: Ints
    rows: Ints
    first: Ints
    end: Ints


def plan_work(
    batch: AttentionBatch, rules: PlanRules, done: PrecomputedChunks | None = None
) -> WorkList:
    """The work list of a batch. It writes every query token once, except those of rows in `done`
    that have no context."""
    query_start = batch.query_start.numpy()
    single = lengths_of(query_start) == 1
    context = _context(batch, single)
    rows = _row_units(query_start, context, done)
    listed = query_start[context.rows]
    if done is None and not len(listed) and single.all():  # most steps: the host's time matters
        ones = _split(rows, rules.one, rules.programs_per_one)
        partials = _number_partials(ones)
        merges = _merges_in_order(ones[ones[:, PARTIAL] >= 0] if partials else rows[:0])
        return WorkList(ones, rows[:0], listed, *merges, context.segments, partials)
    single = rows[:, QUERIES] == 1
    ones = _split(rows[single], rules.one, rules.programs_per_one)
    tiles = _tile_items(rows[~single], context, rules)
    items = np.concatenate([ones, tiles])
    partials = _number_partials(items)
    own = np.zeros(0, np.int32) if done is None else _tokens(query_start, done.rows)
    first = 0 if done is None else done.first
    merges = _merges(items[items[:, PARTIAL] >= 0], listed, own, first)
    count = len(ones)
    return WorkList(items[:count], items[count:], listed, *merges, context.segments, partials)


def _context(batch: AttentionBatch, single: NDArray[np.bool_]) -> _Context:
    """Parts stay shared if two or more rows of one token read them. All other rows get copies of
    their segments: a tile of queries of one row reads K and V only once anyway."""
    start, segments = batch.segment_start.numpy(), batch.segments.numpy()
    shared = batch.shared
    if shared is None or not shared.num_parts:
        none = np.zeros(0, np.int32)
        return _Context(start, segments, none, none, none, none)
    part = np.repeat(
        np.arange(shared.num_parts, dtype=np.int32), lengths_of(shared.row_start.numpy())
    )
    rows = shared.rows.numpy()
    first = shared.segment_start.numpy()[part]
    end = shared.segment_start.numpy()[part + 1]
    stays = readers_that_share(part, single[rows] & (end > first), shared.num_parts)
    copied = ~stays
    shared_segments = shared.segments.numpy()
    start, segments = copy_parts_to_rows(
        start, segments, rows[copied], first[copied], end[copied], shared_segments
    )
    base = np.int32(len(segments))
    segments = np.concatenate([segments, shared_segments])
    return _Context(
        start, segments, part[stays], rows[stays], first[stays] + base, end[stays] + base
    )


def readers_that_share(
    part: NDArray[np.integer], single: NDArray[np.bool_], num_parts: int
) -> NDArray[np.bool_]:
    """Which readers of parts read them together with others: those of one token, if their part has
    two or more of these.

    part: [n], the part that a reader reads.
    single: bool [n], whether the reader is a row of one token.
    """
    stays: NDArray[np.bool_] = single & (np.bincount(part[single], minlength=num_parts)[part] > 1)
    return stays


def copy_parts_to_rows(
    start: Ints, segments: Ints, rows: Ints, first: Ints, end: Ints, shared: Ints
) -> tuple[Ints, Ints]:
    """Copy shared[first[i]:end[i]] to the segments of row rows[i], for all i.

    start: [rows + 1]; segments, shared: [n, 3]; rows, first, end: [k].
    Returns the new segment_start and segments.
    """
    num_rows = len(start) - 1
    owner = np.concatenate([rows, np.arange(num_rows, dtype=np.int32)])
    source = np.concatenate([first + len(segments), start[:-1]])
    length = np.concatenate([end - first, lengths_of(start)])
    order = np.argsort(owner, kind="stable")
    indexes = ranges(source[order], length[order])
    counts = np.bincount(owner, length, num_rows).astype(np.int32)
    return offsets(counts), np.concatenate([segments, shared])[indexes]


def _row_units(query_start: Ints, context: _Context, done: PrecomputedChunks | None) -> Ints:
    """One unit for each row with work to do. PARTIAL is 0 if the result has to be merged."""
    units = np.empty((len(query_start) - 1, ITEM_WIDTH), np.int32)
    units[:, QUERY] = units[:, OWN] = query_start[:-1]
    units[:, OWN_END] = query_start[1:]
    units[:, QUERIES] = lengths_of(query_start)
    units[:, SEGMENT] = context.segment_start[:-1]
    units[:, SEGMENT_END] = context.segment_start[1:]
    units[:, PARTIAL : LISTED + 1] = -1, 0
    units[context.rows, PARTIAL] = 0
    busy = units[:, QUERIES] > 0
    if done is not None:
        units[done.rows, OWN : OWN_END + 1] = 0
        units[done.rows, PARTIAL] = 0
        busy &= ~done.rows | (units[:, SEGMENT_END] > units[:, SEGMENT])
    return units if busy.all() else units[busy]


def _tokens(query_start: Ints, rows: NDArray[np.bool_]) -> Ints:
    """The tokens of these rows, in order."""
    first = query_start[:-1][rows]
    return ranges(first, query_start[1:][rows] - first)


def _tile_items(rows: Ints, context: _Context, rules: PlanRules) -> Ints:
    """The items of rows of several tokens and of shared parts."""
    if not len(rows) and not len(context.part):
        return rows  # most decode steps, where the time of the host matters most
    shared = _shared_units(context, rules.tile_tokens)
    units = np.concatenate([_tiled(rows, rules.tile_tokens), shared])
    items = _split(units, rules.tile, rules.programs_per_tile)
    # Long items first: short ones run last, so that all processors finish at about the same time.
    return items[np.argsort(-_weight(items), kind="stable")]


def _shared_units(context: _Context, tile_tokens: int) -> Ints:
    """The units of parts that stay shared, tiled. Their queries are entries of `listed`."""
    bounds = _bounds(context.part)
    starts = bounds[:-1]
    units = np.zeros((len(starts), ITEM_WIDTH), np.int32)
    units[:, QUERY] = starts
    units[:, QUERIES] = lengths_of(bounds)
    units[:, SEGMENT] = context.first[starts]
    units[:, SEGMENT_END] = context.end[starts]
    units[:, LISTED] = 1
    return _tiled(units, tile_tokens)


def _tiled(units: Ints, size: int) -> Ints:
    """The units divided into tiles of at most `size` queries, each with the own tokens up to its
    last query."""
    counts = -(-units[:, QUERIES] // size)
    tiles = np.repeat(units, counts, axis=0)
    skipped = ranges(np.zeros_like(counts), counts) * size
    tiles[:, QUERY] += skipped
    tiles[:, QUERIES] = np.minimum(tiles[:, QUERIES] - skipped, size)
    owning = tiles[:, OWN_END] > 0
    tiles[owning, OWN_END] = tiles[owning, QUERY] + tiles[owning, QUERIES]
    return tiles


def _split(units: Ints, rule: Split, programs_per_item: int) -> Ints:
    """The items of units. The last item of a unit gets its own tokens."""
    grains = -(-(units[:, SEGMENT_END] - units[:, SEGMENT]) // rule.grain)
    length = rule.item_length(int(grains.sum()), programs_per_item)
    if grains.max(initial=0) <= length:
        return units
    pieces = np.maximum(1, -(-grains // length))
    items = np.repeat(units, pieces, axis=0)
    piece, last = ranges(np.zeros_like(pieces), pieces), np.cumsum(pieces) - 1
    grains, pieces = np.repeat(grains, pieces), np.repeat(pieces, pieces)
    items[:, SEGMENT] += grains * piece // pieces * rule.grain
    items[:-1, SEGMENT_END] = items[1:, SEGMENT]
    items[:, OWN : OWN_END + 1] = 0
    items[last, SEGMENT_END : OWN_END + 1] = units[:, SEGMENT_END : OWN_END + 1]
    items[pieces > 1, PARTIAL] = 0
    return items


def _weight(items: Ints) -> Ints:
    """The approximate number of keys of each item."""
    cached = (items[:, SEGMENT_END] - items[:, SEGMENT]) * _TOKENS_PER_SEGMENT
    weight: Ints = cached + items[:, OWN_END] - items[:, OWN]
    return weight


def _number_partials(items: Ints) -> int:
    """Number the partial results, in `items`; returns how many there are."""
    partial = items[:, PARTIAL] >= 0
    ends = np.cumsum(items[partial, QUERIES], dtype=np.int32)
    items[partial, PARTIAL] = ends - items[partial, QUERIES]
    return int(ends[-1]) if len(ends) else 0


def _merges(items: Ints, listed: Ints, own: Ints, first: int) -> tuple[Ints, Ints, Ints]:
    """merge_tokens, merge_start and merge_slots for items with partial results.

    own: tokens whose output already holds a partial result, see PrecomputedChunks.
    """
    counts = items[:, QUERIES]
    tokens = ranges(items[:, QUERY], counts)
    from_list = np.repeat(items[:, LISTED] > 0, counts)
    tokens[from_list] = listed[tokens[from_list]]
    slots = ranges(items[:, PARTIAL], counts)
    if len(own):
        merged = np.intersect1d(tokens, own)
        tokens, slots = (
            np.concatenate([tokens, merged]),
            np.concatenate([slots, first - 1 - merged]),
        )
    order = np.argsort(tokens, kind="stable")
    slots = slots[order]
    ordered = tokens[order]
    bounds = _bounds(ordered)
    return ordered[bounds[:-1]], bounds, slots


def _merges_in_order(items: Ints) -> tuple[Ints, Ints, Ints]:
    """_merges for items of one query each, in the order of their tokens."""
    tokens = items[:, QUERY]
    bounds = _bounds(tokens)
    return tokens[bounds[:-1]], bounds, items[:, PARTIAL]


def _bounds(ordered: Ints) -> Ints:
    """The start of each run of equal numbers, and the end of the last one."""
    begins = np.ones(len(ordered) + 1, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:-1])
    return np.flatnonzero(begins).astype(np.int32)
