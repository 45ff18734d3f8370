"""Products of few rows against those in double precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from bros.kernels.interface import RowProducts
from bros.kernels.self_test import check_kernels
from support.kernel_cases import needs_triton, triton_backend

BACKEND = triton_backend()
OUTPUTS, INPUTS = 48, 128
STEPS = (1, 16, 32, 64)


def products(dtype: torch.dtype) -> RowProducts:
    """With a configuration for one shape and up to 64 rows."""
    # Late: it needs Triton.
    from bros.kernels.triton.products import RowProducts
    from bros.kernels.triton.settings import ProductLaunch, ProductShape, settings_for

    launch = ProductLaunch(block_n=16, block_k=32, warps=2, stages=3)
    size = dtype.itemsize
    tuned = {ProductShape(rows, OUTPUTS, INPUTS, size): launch for rows in STEPS}
    return RowProducts(replace(settings_for(BACKEND.device), products=tuned))


def matrices(rows: int, dtype: torch.dtype, outputs: int = OUTPUTS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, INPUTS, generator=generator).to(BACKEND.device, dtype)
    return x, torch.randn(outputs, INPUTS, generator=generator).to(BACKEND.device, dtype)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 64])
def test_products_are_those_of_the_definition(rows: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and BACKEND.device.type == "cpu":
        pytest.skip("the interpreter's product takes the bits of bf16 for integers")
    x, weight = matrices(rows, dtype)
    out = products(dtype)(x, weight)
    assert out is not None and out.dtype == dtype and out.shape == (rows, OUTPUTS)
    exact = x.cpu().double() @ weight.cpu().double().T
    tolerance = 1e-4 if dtype is torch.float32 else 64 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.cpu().double(), exact, rtol=0, atol=tolerance)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 17, 64])
def test_gated_products_have_the_bits_of_two_kernels(rows: int, dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16 and BACKEND.device.type == "cpu":
        pytest.skip("the interpreter's product takes the bits of bf16 for integers")
    x, weight = matrices(rows, dtype)
    multiply = products(dtype)
    out, apart = multiply.gated(x, weight), multiply(x, weight)
    assert out is not None and apart is not None
    assert out.shape == (rows, OUTPUTS // 2)
    assert torch.equal(out, BACKEND.kernels().silu_and_mul(apart))


@needs_triton
def test_other_shapes_are_left_to_torch() -> None:
    multiply = products(torch.float16)
    assert multiply.gated(*matrices(65, torch.float16)) is None
    assert multiply(*matrices(0, torch.float16)) is None
    assert multiply(*matrices(65, torch.float16)) is None
    assert multiply(*matrices(1, torch.float32)) is None
    assert multiply(*matrices(1, torch.float16, outputs=OUTPUTS + 16)) is None


@needs_triton
@pytest.mark.parametrize("wrong", [False, True])
def test_the_self_test_checks_them(wrong: bool) -> None:
    dtype = torch.float32
    kernels = BACKEND.kernels()
    multiply = products(dtype)

    class Halved:
        shapes = staticmethod(multiply.shapes)

        def __call__(self, x: Tensor, weight: Tensor) -> Tensor | None:
            out = multiply(x, weight)
            return None if out is None else out / 2

        def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
            out = multiply.gated(x, weight)
            return None if out is None else out / 2

    found = Halved() if wrong else multiply
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(kernels), "row_products", property(lambda self: found))
        checks = list(check_kernels(kernels, BACKEND.device, [(dtype, dtype)], 0))
    passed = {each.operation: each.passed for each in checks if "product" in each.operation}
    names = [f"{kind}product, {rows} rows" for rows in STEPS for kind in ("", "gated ")]
    assert passed == dict.fromkeys(names, not wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 7, 16, 20, 32, 33, 64, 100, 128])
def test_the_tuned_products_of_this_gpu(rows: int) -> None:
    # Late: it needs Triton.
    from bros.kernels.triton.products import RowProducts
    from bros.kernels.triton.settings import rows_step, settings_for

    settings = settings_for(BACKEND.device)
    shapes = [shape for shape in settings.products if shape.rows == rows_step(rows)]
    for shape in shapes:
        x, weight = (
            torch.randn(count, shape.inputs, device=BACKEND.device, dtype=torch.bfloat16)
            for count in (rows, shape.outputs)
        )
        out = RowProducts(settings)(x, weight)
        assert out is not None
        torch.testing.assert_close(out, x @ weight.T, rtol=2**-7, atol=0.5)
        gated = RowProducts(settings).gated(x, weight)
        assert gated is not None
        assert torch.equal(gated, BACKEND.kernels().silu_and_mul(out))
    if not shapes:
        pytest.skip(f"no products of {rows} rows are tuned on this GPU")
