"""Products with fp32 results, which logits are."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bros.executor.models.decoder import GatedMlp
from bros.executor.models.layers import (
    NativeLinear,
    PlainLinear,
    dense_linear,
    fp32_product,
    has_products,
    make_lm_head,
    vocabulary_panels,
)
from bros.executor.target import CPU, Target
from bros.kernels.dispatch import compiled_kernels
from bros.kernels.reference import ReferenceKernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def matrices(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=generator)
    return x.to(dtype), torch.randn(100, 64, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_without_cuda_it_is_the_product_in_its_own_type(rows: int, dtype: torch.dtype) -> None:
    x, weight = matrices(rows, dtype)
    before = x.clone()
    out = fp32_product(x, weight)
    assert out.dtype == torch.float32 and out.shape == (rows, 100)
    assert torch.equal(out, F.linear(x, weight).float())
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bias_is_added(dtype: torch.dtype) -> None:
    x, weight = matrices(4, dtype)
    bias = torch.arange(100.0)
    out = PlainLinear(weight, bias)(x.float())
    exact = F.linear(x.double(), weight.double(), bias.double())
    assert out.dtype == torch.float32
    # Products of 64 numbers are below 64; bf16 keeps 8 bits of them.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=64 * 2**-8)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [0, 1, 200])
def test_on_cuda_sums_are_not_rounded_to_16_bits(rows: int, dtype: torch.dtype) -> None:
    x, weight = matrices(rows, dtype)
    out = fp32_product(x.cuda(), weight.cuda())
    assert out.dtype == torch.float32
    exact = x.double() @ weight.double().T
    torch.testing.assert_close(out.cpu().double(), exact, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_without_products_torch_multiplies_in_fp32(rows: int, dtype: torch.dtype) -> None:
    x, weight = matrices(rows, torch.float32)
    weight = weight.to(dtype)
    bias = torch.arange(100.0)
    out = dense_linear(weight, bias)(x)
    assert out.dtype == torch.float32
    exact = F.linear(x.double(), weight.double(), bias.double())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("weights", ["fp32", "bf16", "int8", "int4"])
@pytest.mark.parametrize("compiled", [True, False])
def test_logits_are_not_rounded_to_16_bits(weights: str, compiled: bool) -> None:
    kernels = compiled_kernels() if compiled else None
    if compiled and kernels is None:
        pytest.skip("the kernels were not compiled")
    x, weight = matrices(3, torch.float32)
    target = Target(CPU, weights, packed=True)
    if kernels is None:
        out = make_lm_head(weight, target)(x)
    else:
        out = kernels.linear(x, vocabulary_panels(weight, target, kernels), None)
    assert out.dtype == torch.float32
    assert (out != out.bfloat16().float()).float().mean() > 0.9
    torch.testing.assert_close(out, F.linear(x, weight), rtol=0, atol=0.5)


def test_kernels_for_avx2_and_later_have_products() -> None:
    for level in ("avx2", "avx512", "avx512-vnni", "avx512-bf16", "avx512-amx"):
        assert has_products(f"cpu-{level}")
    for kernels in ("cpu-generic", "reference", "triton"):
        assert not has_products(kernels)


class FewRows:
    """Row products that count their calls, and compute up to `most` rows."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.calls = {"product": 0, "gated": 0}

    def shapes(self, dtype: torch.dtype) -> list[tuple[int, int, int]]:
        return []

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor | None:
        self.calls["product"] += 1
        return F.linear(x, weight) if len(x) <= self.most else None

    def gated(self, x: Tensor, weight: Tensor) -> Tensor | None:
        self.calls["gated"] += 1
        return ReferenceKernels().silu_and_mul(F.linear(x, weight)) if len(x) <= self.most else None


@pytest.mark.parametrize(
    ("rows", "bias", "calls"),
    [
        (2, False, {"product": 1, "gated": 1}),  # the second product is down
        (3, False, {"product": 2, "gated": 1}),  # torch computes both, and the activation is apart
        (2, True, {"product": 1, "gated": 0}),
    ],
)
def test_an_mlp_multiplies_few_rows_and_activates_them_in_one_kernel(
    rows: int, bias: bool, calls: dict[str, int]
) -> None:
    x, gate_up = matrices(rows, torch.float32)
    down = torch.randn(64, 50, generator=torch.Generator().manual_seed(9))
    found = FewRows(most=2)
    added = torch.randn(100, generator=torch.Generator().manual_seed(8)) if bias else None
    kernels = ReferenceKernels()
    mlp = GatedMlp(kernels, NativeLinear(gate_up, added, found), NativeLinear(down, None, found))
    expected = F.linear(kernels.silu_and_mul(F.linear(x, gate_up, added)), down)
    torch.testing.assert_close(mlp(x), expected)
    assert found.calls == calls
