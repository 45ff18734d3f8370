"""Device code of attention. plan.py defines the items; the softmax is in base 2 and fp32.

A program computes one item for one KV head. It has BLOCK_M rows, each a query token and one of the
KV head's query heads, HEADS of them per token, so that all heads of the group share the loaded K
and V. A larger group is divided among GROUP_TILES programs, an item with more than BLOCK_M // HEADS
tokens among TOKEN_TILES programs.

    tile of keys  [ block 7: slots 0..15 | block 3: 4..15 | block 9: 0..8 | (past the end) ]
    loaded if        lo <= slot < hi         other slots get no weight
"""

from __future__ import annotations

import triton
import triton.language as tl

from bros.kernels.triton.elementwise_kernels import await_predecessor


@triton.jit
def attend(
    out,  # [tokens, KV_HEADS * GROUP * HEAD_DIM]
    partial_out,
    partial_lse,
    qkv,
    k_cache,
    v_cache,
    counts,
    items,
    listed,
    segments,
    scale,  # times log2(e)
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    TOKEN_TILES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_TOKEN: tl.constexpr,
    COMPUTE: tl.constexpr,
    COUNT: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attention of counts[COUNT] items; programs for more items do nothing.

    listed: WorkList.listed, query tokens of shared parts.
    ONE_TOKEN: every item has one query, which is not listed, and at most its own token as chunk.
    EARLY: see elementwise_kernels.
    """
    pid = tl.program_id(0)
    kv_head = pid % KV_HEADS
    part = pid // KV_HEADS
    group_tile = part % GROUP_TILES
    part = part // GROUP_TILES
    token_tile = part % TOKEN_TILES
    index = part // TOKEN_TILES
    count = tl.load(counts + COUNT)
    item = items + index * 8
    query = tl.load(item)
    queries = tl.load(item + 1)
    segment = tl.load(item + 2)
    segment_end = tl.load(item + 3)
    own = tl.load(item + 4)
    own_end = tl.load(item + 5)
    partial = tl.load(item + 6)
    if EARLY:
        await_predecessor()  # no kernel of the step writes its work list
    if index >= count:
        return
    TOKENS: tl.constexpr = BLOCK_M // HEADS
    first_query = token_tile * TOKENS
    if first_query >= queries:
        return
    Q_SIZE: tl.constexpr = KV_HEADS * GROUP * HEAD_DIM
    QKV_SIZE: tl.constexpr = Q_SIZE + 2 * KV_HEADS * HEAD_DIM
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    nth = first_query + m // HEADS
    in_group = group_tile * HEADS + m % HEADS
    live = (nth < queries) & (m < TOKENS * HEADS) & (in_group < GROUP)
    token = query + nth
    if not ONE_TOKEN:
        is_listed = live & (tl.load(item + 7) + m * 0 > 0)
        token = tl.where(is_listed, tl.load(listed + token, mask=is_listed, other=0), token)
    head = kv_head * GROUP + in_group
    q_at = token.to(tl.int64) * QKV_SIZE + head * HEAD_DIM
    q = tl.load(qkv + q_at[:, None] + d[None, :], mask=live[:, None] & in_head[None, :], other=0.0)
    q = q.to(COMPUTE)
    k_own = qkv + Q_SIZE + kv_head * HEAD_DIM
    v_own = k_own + KV_HEADS * HEAD_DIM

    if ONE_TOKEN:
        peak, mass, acc = _first_own(q, k_own, v_own, own, own_end, scale, HEAD_DIM, QKV_SIZE)
    else:
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        mass = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # fmt: off
    peak, mass, acc = _attend_cached(
        q, k_cache, v_cache, segments, segment, segment_end, kv_head, scale, peak, mass, acc,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_SLOTS, BLOCK_N,
    )
    if not ONE_TOKEN:
        own_end = tl.minimum(own_end, query + first_query + TOKENS)
        peak, mass, acc = _attend_own(
            q, k_own, v_own, own, own_end, token, scale, peak, mass, acc,
            HEAD_DIM, QKV_SIZE, BLOCK_N,
        )
    # fmt: on
    # Without any key the mass is 0: so is the result, and its weight in a merge.
    acc = acc / tl.where(mass == 0, 1.0, mass)[:, None]
    written = live[:, None] & in_head[None, :]
    if partial < 0:
        out_at = token.to(tl.int64) * Q_SIZE + head * HEAD_DIM
        tl.store(out + out_at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=written)
    else:
        number = (partial + nth).to(tl.int64) * (KV_HEADS * GROUP) + head
        tl.store(partial_out + number[:, None] * HEAD_DIM + d[None, :], acc, mask=written)
        tl.store(partial_lse + number, peak + tl.log2(mass), mask=live)


@triton.jit
def _first_own(q, k_own, v_own, own, own_end, scale, HEAD_DIM: tl.constexpr, QKV: tl.constexpr):
    """The softmax state after token `own` of the step, which all rows see; if own_end <= own, the
    state after no token."""
    # Vectors, because the interpreter does not support scalar masks.
    m = tl.arange(0, q.shape[0])
    d = tl.arange(0, q.shape[1])
    there = own + m * 0 < own_end
    mask = (d < HEAD_DIM) & (own + d * 0 < own_end)
    at = own.to(tl.int64) * QKV + d
    k = tl.load(k_own + at, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(v_own + at, mask=mask, other=0.0).to(tl.float32)
    score = tl.sum(q.to(tl.float32) * k[None, :], 1) * scale
    peak = tl.where(there, score, float("-inf"))
    mass = tl.where(there, 1.0, tl.zeros([q.shape[0]], tl.float32))
    return peak, mass, tl.zeros([q.shape[0], q.shape[1]], tl.float32) + v[None, :]


@triton.jit
def _attend_cached(
    q,
    k_cache,
    v_cache,
    segments,
    segment,
    segment_end,
    kv_head,
    scale,
    peak,
    mass,
    acc,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to segments [segment, segment_end), BLOCK_N // BLOCK_SLOTS in each tile of keys."""
    BLOCK_D: tl.constexpr = acc.shape[1]
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    slot = n % BLOCK_SLOTS
    for first in range(segment, segment_end, BLOCK_N // BLOCK_SLOTS):
        nth_segment = first + n // BLOCK_SLOTS
        known = nth_segment < segment_end
        triple = segments + nth_segment * 3
        block = tl.load(triple, mask=known, other=0)
        lo = tl.load(triple + 1, mask=known, other=0)
        hi = tl.load(triple + 2, mask=known, other=0)
        valid = (slot >= lo) & (slot < hi)
        at = ((block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + slot) * HEAD_DIM
        where = at[:, None] + d[None, :]
        mask = valid[:, None] & in_head[None, :]
        k = tl.load(k_cache + where, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(valid[None, :], scores, float("-inf"))
        v = tl.load(v_cache + where, mask=mask, other=0.0).to(q.dtype)
        peak, mass, acc = _absorb(scores, v, peak, mass, acc)
    return peak, mass, acc


@triton.jit
def _attend_own(
    q,
    k_own,
    v_own,
    own,
    own_end,
    token,
    scale,
    peak,
    mass,
    acc,
    HEAD_DIM: tl.constexpr,
    QKV_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to tokens [own, own_end) of the step, causally."""
    BLOCK_D: tl.constexpr = acc.shape[1]
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    for first in range(own, own_end, BLOCK_N):
        key = first + n
        valid = key < own_end
        where = key.to(tl.int64)[:, None] * QKV_SIZE + d[None, :]
        mask = valid[:, None] & in_head[None, :]
        k = tl.load(k_own + where, mask=mask, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = valid[None, :] & (key[None, :] <= token[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        v = tl.load(v_own + where, mask=mask, other=0.0).to(q.dtype)
        peak, mass, acc = _absorb(scores, v, peak, mass, acc)
    return peak, mass, acc


@triton.jit
def _absorb(scores, v, peak, mass, acc):
    """Add a tile of keys to the softmax state: scores [BLOCK_M, BLOCK_N] in base 2, -inf where a
    key is not visible."""
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)  # avoids the NaN of inf - inf
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    mass = mass * shrink + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return higher, mass, acc


@triton.jit(do_not_specialize=["own_length"])
def merge(
    out,
    partial_out,
    partial_lse,
    counts,
    merge_tokens,
    merge_start,
    merge_slots,
    own_lse,  # [HEADS, own_length], to base e
    own_length,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    COUNT: tl.constexpr,
    OWN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the partial results of tokens, one head per program, weighted by their mass.

    There may be far more room for tokens than there are tokens, so programs take every so many-th.

    OWN: slot -1 - i stands for the result that the output already holds (PrecomputedChunks), with
        log-sum-exp i of its head.
    EARLY: see elementwise_kernels.
    """
    if EARLY:
        await_predecessor()
    pid = tl.program_id(0)
    head = pid % HEADS
    # fmt: off
    for index in range(pid // HEADS, tl.load(counts + COUNT), tl.num_programs(0) // HEADS):
        _merge_token(
            out, partial_out, partial_lse, merge_tokens, merge_start, merge_slots, own_lse,
            own_length, index, head, HEADS, HEAD_DIM, BLOCK_D, BLOCK_P, OWN,
        )
    # fmt: on


@triton.jit
def _merge_token(
    out,
    partial_out,
    partial_lse,
    merge_tokens,
    merge_start,
    merge_slots,
    own_lse,
    own_length,
    index,
    head,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    OWN: tl.constexpr,
):
    """Merge the partial results of token merge_tokens[index] for one head."""
    token = tl.load(merge_tokens + index).to(tl.int64)
    start = tl.load(merge_start + index)
    end = tl.load(merge_start + index + 1)
    p = tl.arange(0, BLOCK_P)
    d = tl.arange(0, BLOCK_D)
    in_head = d < HEAD_DIM
    peak = float("-inf")
    mass = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(start, end, BLOCK_P):
        known = first + p < end
        slot = tl.load(merge_slots + first + p, mask=known, other=0).to(tl.int64)
        if OWN:
            is_own = known & (slot < 0)
            known = known & (slot >= 0)
        at = slot * HEADS + head
        lse = tl.load(partial_lse + at, mask=known, other=float("-inf"))
        part = tl.load(
            partial_out + at[:, None] * HEAD_DIM + d[None, :],
            mask=known[:, None] & in_head[None, :],
            other=0.0,
        )
        if OWN:
            found = tl.load(own_lse + head * own_length - 1 - slot, mask=is_own, other=0.0)
            lse = tl.where(is_own, found * 1.4426950408889634, lse)  # times log2(e)
            own_at = (token * HEADS + head) * HEAD_DIM + d[None, :] + p[:, None] * 0
            own = tl.load(out + own_at, mask=is_own[:, None] & in_head[None, :], other=0.0)
            part = tl.where(is_own[:, None], own.to(tl.float32), part)
        higher = tl.maximum(peak, tl.max(lse, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(lse - base)
        shrink = tl.exp2(peak - base)
        mass = mass * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(part * weights[:, None], 0)
        peak = higher
    at = (token * HEADS + head) * HEAD_DIM + d
    tl.store(out + at, (acc / mass).to(out.dtype.element_ty), mask=in_head)
