"""The work list of one step's attention: what each program reads and where its result goes.

A unit is a tile of queries with everything it attends to. Long lists of segments are split, so a
unit becomes one or more items; each item is run by one program per KV head (or a few). The result
of a token with one item goes straight to the output; all others leave partial results (output and
log-sum-exp), which a second kernel merges.

    row of one token        one unit
    row of several tokens   a unit per tile of tokens; what it shares, it reads as its own
    shared part             a unit per tile of the one-token rows that read it: K and V are loaded
                            once for the whole tile

Runs on the host in every step: no Python loop over rows, segments or items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bros.kernels.interface import AttentionBatch
from bros.kernels.parts import Ints, lengths_of, ranges, with_own_copies

QUERY, QUERIES, SEGMENT, SEGMENT_END, OWN, OWN_END, PARTIAL, LISTED = range(8)
"""Columns of an item; the kernels know the numbers, too.

QUERIES tokens from QUERY on, or if LISTED, that many of `Work.listed`; they attend to segments
[SEGMENT, SEGMENT_END) and, causally, to tokens [OWN, OWN_END) of the step. The partial result of
the i-th query is number PARTIAL + i; -1: the result goes to the output."""

ITEM_WIDTH = 8

_HALF_BLOCK = 8  # about how many tokens a segment has, to guess how long an item takes


@dataclass(frozen=True, slots=True)
class Split:
    """How far the segments of units are split. Lengths are in grains of `grain` segments.

    As many programs as the device runs at once share all segments evenly, but none gets fewer
    than `least` grains. Where that makes items longer than `long` grains, they are cut into up to
    `waves` times as many, because short items fill the device better at the end.
    """

    programs: int
    grain: int = 4
    least: int = 2
    long: int = 8
    waves: int = 1

    def item_length(self, total: int, programs_per_item: int) -> int:
        """Grains per item, of `total` in all units."""
        work = total * programs_per_item
        even = -(-work // self.programs)
        shortest = max(self.long, -(-work // (self.programs * self.waves)))
        return max(self.least, min(even, shortest))

    def extra_items(self, segments: int, programs_per_item: int) -> int:
        """How many more items than units there can be, if units have no more segments in all.

        This is grains / item_length(grains), of as many grains as are not a unit's first.
        """
        grains = segments // self.grain
        in_waves = self.programs * self.waves // programs_per_item
        even = max(self.programs // programs_per_item, min(grains // self.long, in_waves))
        return min(grains // self.least, even)


@dataclass(frozen=True, slots=True)
class PlanRules:
    """one: for rows of one token.
    tile: for all else, in units of up to tile_tokens queries.

    programs_per_item: KV heads, times what a tile of queries is split into.
    """

    one: Split
    tile: Split
    tile_tokens: int
    programs_per_one: int
    programs_per_tile: int


@dataclass(frozen=True, slots=True)
class OwnDone:
    """Rows whose tokens have attended to each other before any item runs: `rows` says so of each.

    That result is in the output already. Its log-sum-exps start at token `first` of the step; the
    one of token first + i is number -1 - i of `Work.merge_slots`.
    """

    rows: NDArray[np.bool_]
    first: int


@dataclass(frozen=True, slots=True)
class WorkList:
    """All int32.

    one_items, tile_items: [n, ITEM_WIDTH].
    listed: [k] tokens.
    segments: [m, 3].

    Token merge_tokens[i] is merged of the partial results
    merge_slots[merge_start[i]:merge_start[i + 1]], of which negative ones are those of OwnDone, and
    partials is the number of all others.
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
    """Segments of every row, [segment_start[r], segment_start[r + 1]), then those of shared parts.

    The entries of shared parts that stay shared: row `rows[i]` reads
    segments[first[i]:end[i]], sorted by part.
    """

    segment_start: Ints
    segments: Ints
    part: Ints
    rows: Ints
    first: Ints
    end: Ints


def plan_work(batch: AttentionBatch, rules: PlanRules, done: OwnDone | None = None) -> WorkList:
    """The items of a batch: together they write every query token of every row once, except those
    of done rows without context."""
    query_start = batch.query_start.numpy()
    context = _context(batch, lengths_of(query_start) == 1)
    rows = _row_units(query_start, context, done)
    single = rows[:, QUERIES] == 1
    listed = query_start[context.rows]
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
    """Shared segments stay shared where two or more one-token rows read them. Other rows get them
    as their own: a tile of queries of one row already reads K and V once."""
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
    stays = single[rows] & (end > first)
    stays &= np.bincount(part[stays], minlength=shared.num_parts)[part] > 1
    goes = ~stays
    shared_segments = shared.segments.numpy()
    start, segments = with_own_copies(
        start, segments, rows[goes], first[goes], end[goes], shared_segments
    )
    base = np.int32(len(segments))
    segments = np.concatenate([segments, shared_segments])
    return _Context(
        start, segments, part[stays], rows[stays], first[stays] + base, end[stays] + base
    )


def _row_units(query_start: Ints, context: _Context, done: OwnDone | None) -> Ints:
    """One unit per row that has anything to do. PARTIAL is 0 where the result has to be merged."""
    units = np.zeros((len(query_start) - 1, ITEM_WIDTH), np.int32)
    units[:, QUERY] = units[:, OWN] = query_start[:-1]
    units[:, OWN_END] = query_start[1:]
    units[:, QUERIES] = lengths_of(query_start)
    units[:, SEGMENT] = context.segment_start[:-1]
    units[:, SEGMENT_END] = context.segment_start[1:]
    units[:, PARTIAL] = -1
    units[context.rows, PARTIAL] = 0
    busy = units[:, QUERIES] > 0
    if done is not None:
        units[done.rows, OWN : OWN_END + 1] = 0
        units[done.rows, PARTIAL] = 0
        busy &= ~done.rows | (units[:, SEGMENT_END] > units[:, SEGMENT])
    return units[busy]


def _tokens(query_start: Ints, rows: NDArray[np.bool_]) -> Ints:
    """Those of some rows, in order."""
    first = query_start[:-1][rows]
    return ranges(first, query_start[1:][rows] - first)


def _tile_items(rows: Ints, context: _Context, rules: PlanRules) -> Ints:
    """Items of rows of several tokens and of shared parts."""
    if not len(rows) and not len(context.part):
        return rows  # as in most steps that only decode, which are the short ones
    shared = _shared_units(context, rules.tile_tokens)
    units = np.concatenate([_tiled(rows, rules.tile_tokens), shared])
    items = _split(units, rules.tile, rules.programs_per_tile)
    # Long items first: the last to run are short, and no processor waits long for another.
    return items[np.argsort(-_weight(items), kind="stable")]


def _shared_units(context: _Context, tile_tokens: int) -> Ints:
    """Units of the parts that stay shared, tiled. Queries are entries of `listed`."""
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
    """The same with at most `size` queries per unit. A tile needs own tokens up to its last."""
    counts = -(-units[:, QUERIES] // size)
    tiles = np.repeat(units, counts, axis=0)
    skipped = ranges(np.zeros_like(counts), counts) * size
    tiles[:, QUERY] += skipped
    tiles[:, QUERIES] = np.minimum(tiles[:, QUERIES] - skipped, size)
    owning = tiles[:, OWN_END] > 0
    tiles[owning, OWN_END] = tiles[owning, QUERY] + tiles[owning, QUERIES]
    return tiles


def _split(units: Ints, rule: Split, programs_per_item: int) -> Ints:
    """Items: the units with their segments split. Own tokens go to the last piece of each."""
    grains = -(-(units[:, SEGMENT_END] - units[:, SEGMENT]) // rule.grain)
    length = rule.item_length(int(grains.sum()), programs_per_item)
    pieces = np.maximum(1, -(-grains // length))
    items = np.repeat(units, pieces, axis=0)
    piece = ranges(np.zeros_like(pieces), pieces)
    grains, pieces = np.repeat(grains, pieces), np.repeat(pieces, pieces)
    first, end = items[:, SEGMENT].copy(), items[:, SEGMENT_END].copy()
    items[:, SEGMENT] = first + grains * piece // pieces * rule.grain
    items[:, SEGMENT_END] = np.minimum(first + grains * (piece + 1) // pieces * rule.grain, end)
    items[piece < pieces - 1, OWN : OWN_END + 1] = 0
    items[pieces > 1, PARTIAL] = 0
    return items


def _weight(items: Ints) -> Ints:
    """About how long each item takes."""
    cached = (items[:, SEGMENT_END] - items[:, SEGMENT]) * _HALF_BLOCK
    weight: Ints = cached + items[:, OWN_END] - items[:, OWN]
    return weight


def _number_partials(items: Ints) -> int:
    """Place the partial results one after the other, in `items`; returns how many there are."""
    partial = items[:, PARTIAL] >= 0
    ends = np.cumsum(items[partial, QUERIES], dtype=np.int32)
    items[partial, PARTIAL] = ends - items[partial, QUERIES]
    return int(ends[-1]) if len(ends) else 0


def _merges(items: Ints, listed: Ints, own: Ints, first: int) -> tuple[Ints, Ints, Ints]:
    """merge_tokens, merge_start and merge_slots of items with partial results. Those of tokens in
    `own` are merged with what is in the output, too."""
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


def _bounds(ordered: Ints) -> Ints:
    """Where the runs of equal numbers begin, and where the last one ends."""
    begins = np.ones(len(ordered) + 1, np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=begins[1:-1])
    return np.flatnonzero(begins).astype(np.int32)
