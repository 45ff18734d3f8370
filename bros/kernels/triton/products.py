"""Products of few rows with a matrix, where they are about as fast as those of torch at least.

A decode step reads every weight once, so its products take as long as reading them does. torch's
library divides the sum of such a product among processors, which takes a second kernel. This kernel
does not: a program computes some outputs of all rows, and reads their weights from end to end.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bros.kernels.triton.product_kernels import few_rows
from bros.kernels.triton.settings import MIN_ROWS, ProductShape, TritonSettings, rows_step


class RowProducts:
    """Implements interface.RowProducts with the launch configurations of a device."""

    def __init__(self, settings: TritonSettings) -> None:
        self._products = settings.products
        self._launching = settings.launching

    def shapes(self, dtype: torch.dtype) -> Sequence[tuple[int, int, int]]:
        """See interface.RowProducts."""
        return [shape[:3] for shape in self._products if shape.element_bytes == dtype.itemsize]

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """See interface.RowProducts."""
        return self._product(x, weight, gated=False)

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        """See interface.RowProducts."""
        return self._product(x, weight, gated=True)

    def _product(self, x: Tensor, weight: Tensor, *, gated: bool) -> Tensor | None:
        rows, inputs = x.shape
        step = rows_step(rows)
        if step is None:
            return None
        outputs = weight.shape[0]
        shape = ProductShape(step, outputs, inputs, weight.element_size())
        launch = self._products.get(shape)
        if launch is None:
            return None
        assert x.dtype == weight.dtype and x.is_contiguous() and weight.is_contiguous()
        assert outputs % launch.block_n == 0 and inputs % launch.block_k == 0
        out = x.new_empty(rows, outputs // 2 if gated else outputs)
        few_rows[(outputs // launch.block_n,)](
            out,
            x,
            weight,
            rows,
            OUTPUTS=outputs,
            INPUTS=inputs,
            BLOCK_M=max(step, MIN_ROWS),
            BLOCK_N=launch.block_n,
            BLOCK_K=launch.block_k,
            GATED=gated,
            num_warps=launch.warps,
            num_stages=launch.stages,
            **self._launching,
        )
        return out
