"""Device code of norms, rotary embedding with cache writes, and activation. Computes in fp32.

EARLY: the kernel may be launched before the one before it has ended, and waits for it itself; its
own successor may be launched as well. That hides most of the time between two kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def await_predecessor():
    """Wait until all that was launched before is done, and let the next kernel be launched."""
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def rms_norm(
    out,
    residual,
    x,
    weight,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row per program. ADD: residual += x, rounded to its dtype; then the norm of residual."""
    if EARLY:
        await_predecessor()
    row = tl.program_id(0).to(tl.int64) * SIZE
    i = tl.arange(0, BLOCK)
    mask = i < SIZE
    value = tl.load(x + row + i, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row + i, mask=mask, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row + i, rounded, mask=mask)
        value = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 0) / SIZE + eps)
    factor = tl.load(weight + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row + i, (value * scale * factor).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope_and_cache(
    qkv,
    positions,
    slots,
    cos_sin,
    k_cache,
    v_cache,
    q_norm,
    k_norm,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    NORM_Q: tl.constexpr,
    NORM_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_HEADS heads of one token per program; the heads of Q come first, then K, then V.

        one head    [ first: HALF | second: HALF | rest: HEAD_DIM - 2 * HALF ]

    One thread holds both elements of a rotated pair, so it reads both before it writes.
    """
    if EARLY:
        await_predecessor()
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_q = head < HEADS
    is_k = (head >= HEADS) & (head < HEADS + KV_HEADS)
    is_v = (head >= HEADS + KV_HEADS) & (head < HEADS + 2 * KV_HEADS)
    there = is_q | is_k | is_v
    at = qkv + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    slot = tl.load(slots + token)
    kept = slot + head * 0 >= 0  # a vector: the interpreter does not support scalar masks
    kv_head = tl.where(is_k, head - HEADS, head - HEADS - KV_HEADS)
    block = (slot // BLOCK_SIZE).to(tl.int64)
    cached_at = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM
    REST: tl.constexpr = HEAD_DIM - 2 * HALF
    total = tl.zeros([BLOCK_HEADS], tl.float32)
    if HALF > 0:
        i = tl.arange(0, BLOCK_HALF)
        half = there[:, None] & (i < HALF)[None, :]
        first = tl.load(at[:, None] + i[None, :], mask=half, other=0.0).to(tl.float32)
        second = tl.load(at[:, None] + HALF + i[None, :], mask=half, other=0.0).to(tl.float32)
        total += tl.sum(first * first, 1) + tl.sum(second * second, 1)
    if REST > 0:
        j = 2 * HALF + tl.arange(0, BLOCK_REST)
        tail = there[:, None] & (j < HEAD_DIM)[None, :]
        rest = tl.load(at[:, None] + j[None, :], mask=tail, other=0.0).to(tl.float32)
        total += tl.sum(rest * rest, 1)
    scale = tl.rsqrt(total / HEAD_DIM + eps)
    turned = is_q | is_k
    if HALF > 0:
        first = _normed(first, scale, is_q, is_k, q_norm, k_norm, i, i < HALF, NORM_Q, NORM_K)
        second = _normed(
            second, scale, is_q, is_k, q_norm, k_norm, HALF + i, i < HALF, NORM_Q, NORM_K
        )
        angle = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF)
        cos = tl.load(angle + i, mask=i < HALF, other=0.0)[None, :]
        sin = tl.load(angle + HALF + i, mask=i < HALF, other=0.0)[None, :]
        new_first = tl.where(turned[:, None], first * cos - second * sin, first)
        new_second = tl.where(turned[:, None], second * cos + first * sin, second)
        _store(at, cached_at, i, half, new_first, turned, is_k, is_v, kept, qkv, k_cache, v_cache)
        k = HALF + i
        _store(at, cached_at, k, half, new_second, turned, is_k, is_v, kept, qkv, k_cache, v_cache)
    if REST > 0:
        rest = _normed(rest, scale, is_q, is_k, q_norm, k_norm, j, j < HEAD_DIM, NORM_Q, NORM_K)
        _store(at, cached_at, j, tail, rest, turned, is_k, is_v, kept, qkv, k_cache, v_cache)


@triton.jit
def _normed(
    x, scale, is_q, is_k, q_norm, k_norm, i, mask, NORM_Q: tl.constexpr, NORM_K: tl.constexpr
):
    """x [heads, n], times scale and weight in the heads that are normalized."""
    if NORM_Q:
        weight = tl.load(q_norm + i, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(is_q[:, None], x * scale[:, None] * weight[None, :], x)
    if NORM_K:
        weight = tl.load(k_norm + i, mask=mask, other=0.0).to(tl.float32)
        x = tl.where(is_k[:, None], x * scale[:, None] * weight[None, :], x)
    return x


@triton.jit
def _store(at, cached_at, i, mask, x, turned, is_k, is_v, kept, qkv, k_cache, v_cache):
    """Store Q and K back into qkv, and K and V, rounded as in qkv, into the cache."""
    rounded = x.to(qkv.dtype.element_ty)
    tl.store(at[:, None] + i[None, :], rounded, mask=mask & turned[:, None])
    where = cached_at[:, None] + i[None, :]
    k = rounded.to(k_cache.dtype.element_ty)
    tl.store(k_cache + where, k, mask=mask & (is_k & kept)[:, None])
    v = rounded.to(v_cache.dtype.element_ty)
    tl.store(v_cache + where, v, mask=mask & (is_v & kept)[:, None])


@triton.jit
def silu_and_mul(out, gate_up, SIZE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """BLOCK columns of one row per program."""
    if EARLY:
        await_predecessor()
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = i < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + i, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + i, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + i, silu_times(gate, up).to(out.dtype.element_ty), mask=mask)


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up, all in fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up
