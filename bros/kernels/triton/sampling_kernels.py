"""Device code of sampling: one row of logits per program, without sorting.

A program reads the whole row once, in groups of tokens, to find the best token of each group. The
allowed tokens then lie in few groups, and only these are read again:

    top_k    k groups have a token at least as good as the k-th best of the groups' best tokens, so
             worse tokens are not allowed, and groups whose best token is worse are skipped
    top_p    the same by weight, if the groups' best tokens alone have the mass top_p
    min_p    groups whose best token has too little weight are skipped

A key is the bits of a float >= 0, which are ordered like the float; smaller keys are better tokens.
A token is allowed if its key is at most a bound. The program collects the keys that may be within
the bound and finds the bound among them by bisection. With top_k it collects few more than k keys,
unless k exceeds the number of groups; with top_p alone, few keys if few tokens have the mass, else
up to a large part of the row.
"""

from __future__ import annotations

import triton
import triton.language as tl

ONE_BITS = tl.constexpr(0x3F800000)  # of 1.0
PAST_THE_END = tl.constexpr(0x7FFFFFFF)


@triton.jit
def best_of_parts(
    peaks,  # fp32 [rows, PARTS]
    tokens,  # int32 [rows, PARTS]
    logits,  # fp32 [rows, vocab]
    vocab,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
):
    """The largest logit of PART tokens of a row, NaN if any is NaN, and the first token with it."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    i = part * PART + tl.arange(0, PART)
    x = tl.load(logits + row * vocab + i, mask=i < vocab, other=float("-inf"))
    peak, first = _first_best(x, i)
    tl.store(peaks + row * PARTS + part, peak)
    tl.store(tokens + row * PARTS + part, tl.minimum(first, vocab - 1))


@triton.jit(do_not_specialize=["rows"])
def best_of_rows(
    out,  # int32 [2, rows]
    peaks,  # fp32 [rows, PARTS]
    tokens,  # int32 [rows, PARTS]
    rows,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The best token of a row and the bits of its logit, from those of its parts."""
    row = tl.program_id(0)
    p = tl.arange(0, BLOCK)
    at = row.to(tl.int64) * PARTS + p
    x = tl.load(peaks + at, mask=p < PARTS, other=float("-inf"))
    token = tl.load(tokens + at, mask=p < PARTS, other=PAST_THE_END)
    peak, first = _first_best(x, token)
    tl.store(out + row, tl.where(first == PAST_THE_END, 0, first))
    tl.store(out + rows + row, peak.to(tl.int32, bitcast=True))


@triton.jit
def _first_best(x, token):
    """The largest of x, NaN if any is NaN, and the smallest token that has it."""
    is_nan = x != x
    peak = tl.max(tl.where(is_nan, float("-inf"), x), 0)
    first = tl.min(tl.where(x == peak, token, PAST_THE_END), 0)
    return tl.where(tl.max(is_nan.to(tl.int32), 0) > 0, float("nan"), peak), first


@triton.jit
def choose(
    out,  # int32 [rows]
    logits,  # fp32 [rows, vocab]
    temperatures,
    min_ps,
    top_ks,
    top_ps,
    starts,
    keys,  # int32 [rows, NUM_GROUPS * GROUP], scratch
    weights,  # fp32 [rows, NUM_GROUPS * GROUP], scratch
    peaks,  # fp32 [rows, GROUPS], scratch
    listed,  # int32 [rows, GROUPS], scratch
    masses,  # fp64 [rows, GROUPS], scratch
    vocab,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sample one row per program.

    GROUPS: NUM_GROUPS rounded up to a power of two.
    TILE: groups that are read at once.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * vocab
    keys += row * (NUM_GROUPS * GROUP)
    weights += row * (NUM_GROUPS * GROUP)
    peaks += row * GROUPS
    listed += row * GROUPS
    masses += row * GROUPS
    best, peak, good = _best(logits, peaks, vocab, NUM_GROUPS, GROUP, TILE)
    tl.store(out + row, tl.where(good, best, -1))
    temperature = tl.load(temperatures + row)
    if temperature > 0.0:
        if good:
            min_p = tl.load(min_ps + row)
            top_k = tl.load(top_ks + row)
            top_p = tl.load(top_ps + row)
            g = tl.arange(0, GROUPS)
            known = g < NUM_GROUPS
            highest = tl.load(peaks + g, mask=known, other=float("-inf"))
            depth, weight = _weighed(highest, peak, temperature, min_p)
            weight = tl.where(known, weight, 0.0)
            limited = (top_k > 0) & (top_k < vocab)
            bound = PAST_THE_END
            if limited & (top_k <= NUM_GROUPS):
                bound = _within(tl.where(known, depth, PAST_THE_END), known.to(tl.int32), top_k)
            count = _list(listed, g, (weight > 0) & (depth <= bound))
            # fmt: off
            found = _weigh(
                logits, keys, weights, listed, count, limited, bound, peak, temperature, min_p,
                vocab, GROUP, TILE,
            )
            if limited:
                bound = _bound(keys, found, bound, top_k, GROUP * TILE, True)
                _keep_best(
                    logits, weights, listed, count, bound, peak, temperature, vocab, GROUP, TILE
                )
                weight = tl.where(depth <= bound, weight, 0.0)  # excludes groups not in `listed`
            # fmt: on
            if top_p < 1.0:
                total = _total(weights, listed, count, GROUP, TILE)
                share = top_p * total
                # All tokens lighter than this together have less mass than top_p may exclude.
                least = 0.99 * (total - share) / (count * GROUP)
                bound = tl.minimum(_key(least.to(tl.float32)), ONE_BITS - 1)
                key = _key(weight)
                if tl.sum(weight.to(tl.float64), 0) >= share:
                    bound = tl.minimum(bound, _within(key, weight.to(tl.float64), share))
                count = _list(listed, g, key <= bound)
                found = _collect(keys, weights, listed, count, bound, GROUP, TILE)
                bound = _bound(keys, found, bound, share, GROUP * TILE, False)
                _keep_heaviest(weights, listed, count, bound, GROUP, TILE)
            start = tl.load(starts + row).to(tl.uint64)
            token = _draw(weights, masses, listed, count, start, NUM_GROUPS, GROUPS, GROUP, TILE)
            tl.store(out + row, token)


@triton.jit
def _best(
    logits,
    peaks,
    vocab,
    NUM_GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first best token, its logit, and whether that is finite and no logit is NaN.
    Writes the largest logit of each group to `peaks`."""
    r = tl.arange(0, TILE)
    i = tl.arange(0, GROUP)
    highest = tl.full([TILE, GROUP], float("-inf"), tl.float32)
    where = tl.zeros([TILE, GROUP], tl.int32)
    broken = tl.zeros([TILE, GROUP], tl.int32)
    for first in range(0, NUM_GROUPS, TILE):
        number = first + r
        at = number[:, None] * GROUP + i[None, :]
        x = tl.load(logits + at, mask=at < vocab, other=float("-inf"))
        broken |= (x != x).to(tl.int32)
        where = tl.where(x > highest, at, where)
        highest = tl.where(x > highest, x, highest)
        tl.store(peaks + number, tl.max(x, 1), mask=number < NUM_GROUPS)
    peak = tl.max(tl.max(highest, 1), 0)
    best = tl.min(tl.min(tl.where(highest == peak, where, PAST_THE_END), 1), 0)
    whole = tl.max(tl.max(broken, 1), 0) == 0
    tl.debug_barrier()
    return best, peak, whole & (peak > float("-inf")) & (peak < float("inf"))


@triton.jit
def _weighed(x, peak, temperature, min_p):
    """Keys by depth, (peak - x) / temperature, and weights exp(-depth), 0 if below min_p."""
    depth = tl.div_rn(peak - x, temperature + tl.zeros(x.shape, tl.float32))
    weight = tl.exp(-depth)
    return depth.to(tl.int32, bitcast=True), tl.where(weight >= min_p, weight, 0.0)


@triton.jit
def _key(weight):
    """Keys by weight: smaller for larger weights, 0 for the best token's weight of 1."""
    return -weight.to(tl.int32, bitcast=True) + ONE_BITS


@triton.jit
def _list(listed, g, chosen):
    """Writes the chosen groups to `listed`; returns how many there are."""
    tl.debug_barrier()  # all threads have read the old list
    flags = chosen.to(tl.int32)
    tl.store(listed + tl.cumsum(flags, 0) - 1, g, mask=chosen)
    tl.debug_barrier()
    return tl.sum(flags, 0)


@triton.jit
def _tile(listed, first, count, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Tokens [TILE, GROUP] of TILE listed groups, starting with number `first`, and their mask."""
    r = first + tl.arange(0, TILE)
    i = tl.arange(0, GROUP)
    number = tl.load(listed + r, mask=r < count, other=0)
    there = (r < count)[:, None] & (i >= 0)[None, :]
    return number[:, None] * GROUP + i[None, :], there


@triton.jit
def _append(keys, found, key, chosen):
    """Appends the chosen keys of a tile to the `found` keys; returns the new number of keys."""
    size: tl.constexpr = key.shape[0] * key.shape[1]
    flags = tl.reshape(chosen.to(tl.int32), [size])
    places = found + tl.cumsum(flags, 0) - 1
    tl.store(keys + places, tl.reshape(key, [size]), mask=flags > 0)
    return found + tl.sum(flags, 0)


@triton.jit
def _weigh(
    logits,
    keys,
    weights,
    listed,
    count,
    limited,
    bound,
    peak,
    temperature,
    min_p,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Writes the weights of all tokens in the listed groups. With `limited` (top_k), also collects
    the keys within the bound; returns their number."""
    found = 0
    for first in range(0, count, TILE):
        at, there = _tile(listed, first, count, GROUP, TILE)
        known = there & (at < vocab)
        x = tl.load(logits + at, mask=known, other=float("-inf"))
        key, weight = _weighed(x, peak, temperature, min_p)
        tl.store(weights + at, tl.where(known, weight, 0.0), mask=there)
        if limited:
            found = _append(keys, found, key, known & (key <= bound))
    tl.debug_barrier()
    return found


@triton.jit
def _collect(keys, weights, listed, count, bound, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Collects the keys of weights within the bound; returns their number."""
    tl.debug_barrier()  # all threads have read the old keys
    found = 0
    for first in range(0, count, TILE):
        at, there = _tile(listed, first, count, GROUP, TILE)
        key = _key(tl.load(weights + at, mask=there, other=0.0))
        found = _append(keys, found, key, there & (key <= bound))
    tl.debug_barrier()
    return found


@triton.jit
def _within(key, share, target):
    """The smallest bound for which the shares of keys <= bound sum up to the target."""
    low = 0
    high = PAST_THE_END
    while low < high:
        middle = low + (high - low) // 2
        reached = tl.sum(tl.where(key <= middle, share, 0), 0) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return high


@triton.jit
def _bound(keys, found, high, target, SIZE: tl.constexpr, COUNT: tl.constexpr):
    """The same for the `found` keys, at most `high`. The target is a number of tokens if COUNT,
    else a mass."""
    i = tl.arange(0, SIZE)
    low = 0
    while low < high:
        middle = low + (high - low) // 2
        if COUNT:
            within = tl.zeros([SIZE], tl.int32)
        else:
            within = tl.zeros([SIZE], tl.float64)
        for first in range(0, found, SIZE):
            key = tl.load(keys + first + i, mask=first + i < found, other=PAST_THE_END)
            if COUNT:
                within += (key <= middle).to(tl.int32)
            else:
                weight = (-key + ONE_BITS).to(tl.float32, bitcast=True)
                within += tl.where(key <= middle, weight, 0.0).to(tl.float64)
        reached = tl.sum(within, 0) >= target
        high = tl.where(reached, middle, high)
        low = tl.where(reached, low, middle + 1)
    return high


@triton.jit
def _keep_best(
    logits,
    weights,
    listed,
    count,
    bound,
    peak,
    temperature,
    vocab,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Set the weights of tokens beyond the bound on depth to 0."""
    for first in range(0, count, TILE):
        at, there = _tile(listed, first, count, GROUP, TILE)
        x = tl.load(logits + at, mask=there & (at < vocab), other=float("-inf"))
        key, _ = _weighed(x, peak, temperature, 0.0)
        tl.store(weights + at, tl.zeros([TILE, GROUP], tl.float32), mask=there & (key > bound))
    tl.debug_barrier()


@triton.jit
def _keep_heaviest(weights, listed, count, bound, GROUP: tl.constexpr, TILE: tl.constexpr):
    """Set the weights beyond the bound on weight keys to 0."""
    for first in range(0, count, TILE):
        at, there = _tile(listed, first, count, GROUP, TILE)
        weight = tl.load(weights + at, mask=there, other=0.0)
        tl.store(weights + at, tl.where(_key(weight) <= bound, weight, 0.0), mask=there)
    tl.debug_barrier()


@triton.jit
def _total(weights, listed, count, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The sum of the weights in the listed groups."""
    total = tl.zeros([TILE, GROUP], tl.float64)
    for first in range(0, count, TILE):
        at, there = _tile(listed, first, count, GROUP, TILE)
        total += tl.load(weights + at, mask=there, other=0.0).to(tl.float64)
    return tl.sum(tl.sum(total, 1), 0)


@triton.jit
def _draw(
    weights,
    masses,
    listed,
    count,
    start,
    NUM_GROUPS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE: tl.constexpr,
):
    """Draw a token: an exponential race among the listed groups, then one within the winner."""
    r = tl.arange(0, TILE)
    i = tl.arange(0, GROUP)
    for first in range(0, count, TILE):
        at, there = _tile(listed, first, count, GROUP, TILE)
        part = tl.load(weights + at, mask=there, other=0.0).to(tl.float64)
        tl.store(masses + first + r, tl.sum(part, 1), mask=first + r < count)
    tl.debug_barrier()
    nth = tl.arange(0, GROUPS)
    number = tl.load(listed + nth, mask=nth < count, other=NUM_GROUPS)
    mass = tl.load(masses + nth, mask=nth < count, other=0.0)
    winner = tl.argmin(_noise(start, number.to(tl.uint64) + 4294967296) / mass, 0)
    group = tl.load(listed + winner)
    token = group * GROUP + i
    inner = tl.load(weights + token).to(tl.float64)
    return group * GROUP + tl.argmin(_noise(start, token.to(tl.uint64)) / inner, 0)


@triton.jit
def _noise(start, number):
    """Exponential random numbers from values `number` of a SplitMix64 sequence. Both uint64."""
    golden = tl.full([1], 0x9E3779B97F4A7C15, tl.uint64)
    state = (number + 1) * golden + start
    state = (state ^ (state >> 30)) * tl.full([1], 0xBF58476D1CE4E5B9, tl.uint64)
    state = (state ^ (state >> 27)) * tl.full([1], 0x94D049BB133111EB, tl.uint64)
    state = state ^ (state >> 31)
    return -tl.log(((state >> 11).to(tl.float64) + 0.5) * 1.1102230246251565e-16)
