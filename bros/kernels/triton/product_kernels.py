"""Device code of products of few rows with a matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from bros.kernels.triton.elementwise_kernels import await_predecessor


@triton.jit(do_not_specialize=["rows"])
def few_rows(
    out,  # [rows, OUTPUTS]
    x,  # [rows, INPUTS]
    weight,  # [OUTPUTS, INPUTS]
    rows,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_N outputs of all rows per program; sums are in fp32. EARLY: see elementwise_kernels."""
    if EARLY:
        await_predecessor()
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    there = (m < rows)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    inputs = x + m[:, None] * INPUTS + k[None, :]
    weights = weight + n.to(tl.int64)[None, :] * INPUTS + k[:, None]
    for first in range(0, INPUTS, BLOCK_K):
        a = tl.load(inputs + first, mask=there, other=0.0)
        b = tl.load(weights + first)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = out + m[:, None] * OUTPUTS + n[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=there)
