"""Device code of products of few rows with a matrix."""

from __future__ import annotations

import triton
import triton.language as tl

from bros.kernels.triton.elementwise_kernels import await_predecessor, silu_times


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
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    """BLOCK_N outputs of all rows per program; sums are in fp32.

    GATED: the outputs are gates and then as many ups; out is silu(gate) * up [rows, OUTPUTS // 2].
        A program has the gates and the ups of the same columns:

            output    gate 0 | up 0 | gate 1 | up 1 | ...

    EARLY: see elementwise_kernels.
    """
    if EARLY:
        await_predecessor()
    m = tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    output = n // 2 + n % 2 * (OUTPUTS // 2) if GATED else n
    k = tl.arange(0, BLOCK_K)
    there = (m < rows)[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    inputs = x + m[:, None] * INPUTS + k[None, :]
    weights = weight + output.to(tl.int64)[None, :] * INPUTS + k[:, None]
    for first in range(0, INPUTS, BLOCK_K):
        a = tl.load(inputs + first, mask=there, other=0.0)
        b = tl.load(weights + first)
        total = tl.dot(a, b, total, input_precision="ieee")
    result = total.to(out.dtype.element_ty)
    if GATED:
        gate, up = tl.split(tl.reshape(result.to(tl.float32), [BLOCK_M, BLOCK_N // 2, 2]))
        column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        at = out + m[:, None] * (OUTPUTS // 2) + column[None, :]
        tl.store(at, silu_times(gate, up).to(out.dtype.element_ty), mask=there)
    else:
        tl.store(out + m[:, None] * OUTPUTS + n[None, :], result, mask=there)
