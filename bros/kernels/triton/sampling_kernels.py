"""Device code of sampling: one row of logits per program, without sorting it.

A bound is found digit by digit: a pass over the row counts for 16 candidates at once what is
within, which fixes 4 of its 31 bits. Parts of the row that lie beyond all candidates are skipped,
so that only the first of the eight passes reads everything.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0; bits of floats >= 0 are ordered as the floats
PAST_THE_END = tl.constexpr(0x7FFFFFFF)


@triton.jit
def choose(
    out,  # int32 [rows]
    logits,  # fp32 [rows, vocab]
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    starts,
    depths,  # int32 [rows, STRIDE], scratch
    weights,  # fp32 [rows, STRIDE], scratch
    nearest,  # int32 [rows, STRIDE // CHUNK], scratch
    masses,  # fp64 [rows, STRIDE // GROUP], scratch
    vocab,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    depths += row * STRIDE
    weights += row * STRIDE
    nearest += row * (STRIDE // CHUNK)
    masses += row * (STRIDE // GROUP)
    i = tl.arange(0, CHUNK)
    peak = float("-inf")
    best = 0
    broken = 0
    for first in range(0, STRIDE, CHUNK):
        x = tl.load(logits + first + i, mask=first + i < vocab, other=float("-inf"))
        broken += tl.sum((x != x).to(tl.int32), 0)
        highest = tl.max(x, 0)
        where = tl.min(tl.where(x == highest, first + i, PAST_THE_END), 0)
        best = tl.where(highest > peak, where, best)
        peak = tl.maximum(peak, highest)
    good = (broken == 0) & (peak > float("-inf")) & (peak < float("inf"))
    tl.store(out + row, tl.where(good, best, -1))
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        if good:
            _weigh(
                logits,
                depths,
                weights,
                nearest,
                peak,
                temperature,
                tl.load(min_ps + row),
                vocab,
                STRIDE,
                CHUNK,
            )
            top_k = tl.load(top_ks + row)
            if (top_k > 0) & (top_k < vocab):
                last = _last(depths, weights, nearest, top_k, STRIDE, CHUNK, True)
                _keep(depths, weights, last, STRIDE, CHUNK, True)
            top_p = tl.load(top_ps + row)
            if top_p < 1.0:
                total = _total(depths, weights, nearest, STRIDE, CHUNK)
                last = _last(depths, weights, nearest, top_p * total, STRIDE, CHUNK, False)
                _keep(depths, weights, last, STRIDE, CHUNK, False)
            start = tl.load(starts + row).to(tl.uint64)
            token = _draw(weights, masses, start, STRIDE, CHUNK, GROUP, GROUPS)
            tl.store(out + row, token)


@triton.jit
def _weigh(
    logits,
    depths,
    weights,
    nearest,
    peak,
    temperature,
    min_p,
    vocab,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Weights relative to the best, and bits of how far below it the scaled logits are."""
    i = tl.arange(0, CHUNK)
    for first in range(0, STRIDE, CHUNK):
        there = first + i < vocab
        x = tl.load(logits + first + i, mask=there, other=float("-inf"))
        depth = tl.div_rn(peak - x, temperature + tl.zeros([CHUNK], tl.float32))
        order = tl.where(there, depth.to(tl.int32, bitcast=True), PAST_THE_END)
        weight = tl.exp(-depth)
        weight = tl.where(weight >= min_p, weight, 0.0)
        tl.store(depths + first + i, order)
        tl.store(weights + first + i, weight)
        tl.store(nearest + first // CHUNK, tl.min(order, 0))
    tl.debug_barrier()


@triton.jit
def _order(depths, weights, at, COUNT: tl.constexpr):
    """The better the smaller: by scaled logit, or by weight."""
    if COUNT:
        order = tl.load(depths + at)
    else:
        order = ONE_BITS - tl.load(weights + at).to(tl.int32, bitcast=True)
    return order


@triton.jit
def _last(
    depths,
    weights,
    nearest,
    target,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT: tl.constexpr,
):
    """The smallest bound within which there are `target` tokens, or so much weight."""
    i = tl.arange(0, CHUNK)
    digits = tl.arange(0, 16)
    low = 0
    for step in range(8):
        shift = tl.maximum(27 - 4 * step, 0)
        bounds = low + ((digits + 1) << shift) - 1
        if COUNT:
            reached = tl.zeros([16], tl.int32)
        else:
            reached = tl.zeros([16], tl.float64)
        for first in range(0, STRIDE, CHUNK):
            if tl.load(nearest + first // CHUNK) <= tl.max(bounds, 0):
                order = _order(depths, weights, first + i, COUNT)
                within = order[None, :] <= bounds[:, None]
                if COUNT:
                    reached += tl.sum(within.to(tl.int32), 1)
                else:
                    weight = tl.load(weights + first + i).to(tl.float64)
                    reached += tl.sum(tl.where(within, weight[None, :], 0.0), 1)
        digit = tl.sum((reached < target).to(tl.int32), 0)
        low += tl.minimum(digit, 15) << shift
    return low


@triton.jit
def _keep(depths, weights, last, STRIDE: tl.constexpr, CHUNK: tl.constexpr, COUNT: tl.constexpr):
    """Take the weight of all that is beyond a bound."""
    i = tl.arange(0, CHUNK)
    for first in range(0, STRIDE, CHUNK):
        weight = tl.load(weights + first + i)
        order = _order(depths, weights, first + i, COUNT)
        tl.store(weights + first + i, tl.where(order <= last, weight, 0.0))
    tl.debug_barrier()


@triton.jit
def _total(depths, weights, nearest, STRIDE: tl.constexpr, CHUNK: tl.constexpr):
    """The sum of all weights; from now on `nearest` is in their order."""
    i = tl.arange(0, CHUNK)
    total = tl.zeros([CHUNK], tl.float64)
    for first in range(0, STRIDE, CHUNK):
        total += tl.load(weights + first + i).to(tl.float64)
        order = _order(depths, weights, first + i, False)
        tl.store(nearest + first // CHUNK, tl.min(order, 0))
    tl.debug_barrier()
    return tl.sum(total, 0)


@triton.jit
def _draw(
    weights,
    masses,
    start,
    STRIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """The token that wins an exponential race in the group of tokens that won one."""
    i = tl.arange(0, GROUP)
    rows = tl.arange(0, CHUNK // GROUP)
    for first in range(0, STRIDE, CHUNK):
        part = tl.load(weights + first + rows[:, None] * GROUP + i[None, :]).to(tl.float64)
        tl.store(masses + first // GROUP + rows, tl.sum(part, 1))
    tl.debug_barrier()
    groups = tl.arange(0, GROUPS)
    mass = tl.load(masses + groups, mask=groups < STRIDE // GROUP, other=0.0)
    group = tl.argmin(_noise(start, groups.to(tl.uint64) + 4294967296) / mass, 0)
    inner = tl.load(weights + group * GROUP + i).to(tl.float64)
    token = group * GROUP + i
    return group * GROUP + tl.argmin(_noise(start, token.to(tl.uint64)) / inner, 0)


@triton.jit
def _noise(start, number):
    """Exponential random numbers, the number-th of a SplitMix64 sequence. Both uint64."""
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    state = (number + 1) * golden + start
    state = (state ^ (state >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    state = state ^ (state >> 31)
    return -tl.log(((state >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16)
