"""Products of tile registers (csrc/tiles.h): the model against NumPy, and the instructions against
the model where the CPU has them."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from bros.kernels.panels import GROUP
from support.kernel_cases import compiled_levels, cpu_kernels, torch_threads
from support.packed_weights import activations, normal, packed
from support.tier import examples

each_codes = pytest.mark.parametrize("form", ["int8", "int4"])

SIZE = 16
"""Most rows and columns of a tile."""

MODEL = "amx-emulated"

needs_amx = pytest.mark.skipif("avx512-amx" not in compiled_levels(), reason="this CPU has no AMX")
each_amx_level = pytest.mark.parametrize(
    "level", [MODEL, pytest.param("avx512-amx", marks=needs_amx)]
)

pytestmark = pytest.mark.skipif(not compiled_levels(), reason="the CPU kernels were not built")

SHAPES = st.tuples(st.integers(1, SIZE), st.integers(1, SIZE), st.integers(1, SIZE))
"""Rows, columns, depth."""

Floats = NDArray[np.float32]


def multiply(level: str, c: Tensor, a: Tensor, b: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """c after the product."""
    from bros.kernels.cpu_ops import tile_product

    out = c.clone()
    tile_product(level, out, a, b, shape)
    return out


def mul_add(a: Any, b: Any, c: Any) -> np.float32:
    """a * b + c in fp32, rounded once to nearest even, subnormals as zeros."""
    small = 2.0**-126
    a, b, c = (float(x) if not abs(x) < small else 0.0 for x in (a, b, c))
    if not np.isfinite([a, b, c]).all():
        return np.float32(a * b + c)  # no product of two of bf16 overflows in fp64
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return np.float32(0)
    exponent = abs(exact.numerator).bit_length() - exact.denominator.bit_length()
    exponent -= abs(exact) < Fraction(2) ** exponent
    step = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(exact / step) * step
    if abs(rounded) >= Fraction(2) ** 128:
        return np.float32(np.inf if rounded > 0 else -np.inf)
    return np.float32(float(rounded)) if abs(rounded) >= small else np.float32(0)


def product_in_order(c: Floats, a: Floats, b: Floats) -> Floats:
    """c + a . b as the manual of TDPBF16PS has it. a: [m, k, 2], b: [k, n, 2], c: [m, n]."""
    out = np.empty_like(c)
    for m, n in np.ndindex(*c.shape):
        sums = [np.float32(0), np.float32(0)]
        for k in range(a.shape[1]):
            for parity in (0, 1):
                sums[parity] = mul_add(a[m, k, parity], b[k, n, parity], sums[parity])
        out[m, n] = mul_add(1, mul_add(1, sums[0], sums[1]), c[m, n])
    return out


def pairs_of(seed: int, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """c, a and b of a product of bf16: usual numbers, or any bits, some of them no numbers."""
    generator = torch.Generator().manual_seed(seed)
    if kind == "usual":
        c = torch.randn(SIZE, SIZE, generator=generator)
        a, b = (torch.randn(SIZE, 2 * SIZE, generator=generator).bfloat16() for _ in range(2))
        return c, a, b

    def bits(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (SIZE, columns), generator=generator)

    c = bits(-(2**31), 2**31, SIZE).int().view(torch.float32)
    a, b = (bits(-(2**15), 2**15, 2 * SIZE).short().view(torch.bfloat16) for _ in range(2))
    if kind == "small":  # near the smallest normal number, in sums and products
        c = c * 0 + torch.randn(SIZE, SIZE, generator=generator) * 2.0**-125
        a, b = (torch.randn(SIZE, 2 * SIZE, generator=generator) * 2.0**-63 for _ in range(2))
        a, b = a.bfloat16(), b.bfloat16()
        c = c.nan_to_num(2.0**-126)
    return c, a, b


@pytest.mark.parametrize("kind", ["usual", "any", "small"])
@given(shape=SHAPES, seed=st.integers(0, 2**31))
@settings(max_examples=examples(10, long=300))
def test_products_of_bf16_are_rounded_in_their_order(
    kind: str, shape: tuple[int, int, int], seed: int
) -> None:
    rows, columns, depth = shape
    c, a, b = pairs_of(seed, kind)
    expected = c.numpy().copy()
    expected[:rows, :columns] = product_in_order(
        expected[:rows, :columns],
        a.float().numpy().reshape(SIZE, SIZE, 2)[:rows, :depth],
        b.float().numpy().reshape(SIZE, SIZE, 2)[:depth, :columns],
    )
    found = multiply(MODEL, c, a, b, shape).numpy()
    np.testing.assert_array_equal(found, expected)


def test_levels_without_tiles_have_no_products_of_them() -> None:
    c, a, b = pairs_of(0, "usual")
    with pytest.raises(IndexError, match="no tile registers"):
        multiply("generic", c, a, b, (1, 1, 1))


@pytest.mark.parametrize("shape", [(0, 1, 1), (1, 17, 1), (1, 1, -1)])
def test_other_shapes_are_refused(shape: tuple[int, int, int]) -> None:
    c, a, b = pairs_of(0, "usual")
    with pytest.raises(IndexError, match="1 to 16 rows and columns"):
        multiply(MODEL, c, a, b, shape)


# ---- Where the CPU has the instructions.


@needs_amx
@pytest.mark.parametrize("kind", ["usual", "any", "small"])
@given(shape=SHAPES, seed=st.integers(0, 2**31))
@settings(max_examples=examples(50, long=1000))
def test_the_instructions_have_the_bits_of_the_model(
    kind: str, shape: tuple[int, int, int], seed: int
) -> None:
    parts = pairs_of(seed, kind)
    found, expected = (multiply(level, *parts, shape) for level in ("avx512-amx", MODEL))
    np.testing.assert_array_equal(found.numpy(), expected.numpy())


def check_same_products(
    levels: tuple[str, str], form: str, rows: int, outputs: int, groups: int, seed: int
) -> None:
    x = activations(seed, rows, groups * GROUP)
    weight = normal(seed + 1, outputs, groups * GROUP)
    found, expected = (
        kernels.linear(x, packed(form, weight, kernels.panel_layout)[0], None)
        for kernels in map(cpu_kernels, levels)
    )
    assert torch.equal(found, expected)


products = given(
    rows=st.integers(1, 70),
    outputs=st.integers(1, 100),
    groups=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)


@needs_amx
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@products
@settings(max_examples=examples(15, long=300))
def test_products_of_tiles_have_the_bits_of_the_model(
    form: str, rows: int, outputs: int, groups: int, seed: int
) -> None:
    check_same_products(("avx512-amx", MODEL), form, rows, outputs, groups, seed)


@each_codes
@pytest.mark.parametrize("level", ["avx512-bf16", "avx512-vnni", "avx512"])
@products
@settings(max_examples=examples(15, long=300))
def test_products_of_codes_have_the_same_bits_by_all_vectors(
    level: str, form: str, rows: int, outputs: int, groups: int, seed: int
) -> None:
    for each in (level, "avx2"):
        if each not in compiled_levels():
            pytest.skip(f"this CPU has no {each}")
    check_same_products((level, "avx2"), form, rows, outputs, groups, seed)


# ---- Shapes that are no multiples of tiles.


@each_amx_level
@given(
    rows=st.integers(1, 80),
    outputs=st.integers(1, 150),
    pairs=st.integers(1, 600),
    threads=st.integers(1, 3),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=examples(20, long=400))
def test_bf16_of_any_shape(
    level: str, rows: int, outputs: int, pairs: int, threads: int, data: st.DataObject, seed: int
) -> None:
    """The values are those of fp64, and a row has the same bits with any others."""
    kernels, inputs = cpu_kernels(level), 2 * pairs
    x, weight = normal(seed, rows, inputs), normal(seed + 1, outputs, inputs)
    bias = normal(seed + 2, outputs)
    panels, values = packed("bf16", weight, kernels.panel_layout)
    with torch_threads(threads):
        out = kernels.linear(x, panels, bias)
    exact = x.bfloat16().double() @ values.double().T + bias.double()
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6 * inputs)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
    with torch_threads(1):
        assert torch.equal(kernels.linear(x[some], panels, bias), out[some])


@pytest.mark.parametrize("rows", [1, 16, 17, 33, 70])
def test_outputs_of_bf16_are_sums_of_tiles_in_their_order(rows: int) -> None:
    """Inputs of two blocks, the last tile of them padded."""
    kernels, inputs, outputs = cpu_kernels(MODEL), 512 + 32 + 10, 40
    x, weight = normal(0, rows, inputs), normal(1, outputs, inputs)
    panels, values = packed("bf16", weight, kernels.panel_layout)
    found = kernels.linear(x, panels, None)
    row = torch.zeros(1, 544 + 32)
    row[:, :inputs] = x[-1].bfloat16().float()
    columns = torch.zeros(outputs, 544 + 32)
    columns[:, :inputs] = values.float()
    expected: Floats = np.zeros((1, outputs), np.float32)
    for k in range(0, row.shape[1], 32):
        a = row[:, k : k + 32].numpy().reshape(1, SIZE, 2)
        b = columns[:, k : k + 32].numpy().reshape(outputs, SIZE, 2).transpose(1, 0, 2)
        expected = product_in_order(expected, a, b)
    np.testing.assert_array_equal(found[-1:].numpy(), expected)


# ---- Blocks of many rows. Those of the model are small; the sizes of csrc/linear_tiles.h are named
# ---- as (its own, the model's).

BLOCK_SHAPES = {
    # Rows about two row tiles, which few rows and blocks have in common, and about blocks of
    # (256, 64) rows; parts of the inputs of 1,024 or less; groups of (16, 2) panels.
    MODEL: [(32, 1120, 40), (33, 1120, 170), (64, 544, 97), (65, 2144, 65), (150, 1056, 170)],
    "avx512-amx": [(257, 2080, 40), (300, 4576, 1150), (520, 8224, 70), (272, 2048, 256)],
}


@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("level", "rows", "inputs", "outputs"),
    [
        pytest.param(level, *shape, marks=[] if level == MODEL else needs_amx)
        for level, shapes in BLOCK_SHAPES.items()
        for shape in shapes
    ],
)
def test_rows_of_blocks_have_the_bits_of_few(
    level: str, rows: int, inputs: int, outputs: int, threads: int, form: str
) -> None:
    kernels = cpu_kernels(level)
    x = activations(rows, rows, inputs)
    bias = normal(inputs + 1, outputs)
    panels, _ = packed(form, normal(inputs, outputs, inputs), kernels.panel_layout)
    with torch_threads(1):  # the memory for what is rounded must not have this x already
        kernels.linear(torch.zeros_like(x), panels, bias)
    with torch_threads(threads):
        out = kernels.linear(x, panels, bias)
    some = sorted(
        {*range(3), *range(min(60, rows), min(68, rows)), rows // 2, *range(rows - 5, rows)}
    )
    for part in torch.tensor(some).split(5):
        assert torch.equal(kernels.linear(x[part], panels, bias), out[part])


@each_amx_level
@pytest.mark.parametrize("inputs", [2, 30, 34, 512, 514, 1022, 1090])
@pytest.mark.parametrize("rows", [33, 70])
def test_blocks_of_bf16_with_any_number_of_inputs(level: str, rows: int, inputs: int) -> None:
    """The last step of 32 inputs is padded, in the only block or in one of several."""
    kernels, outputs = cpu_kernels(level), 70
    x = normal(rows, rows, inputs)
    panels, _ = packed("bf16", normal(inputs, outputs, inputs), kernels.panel_layout)
    few = torch.cat([kernels.linear(part, panels, None) for part in x.split(16)])
    assert torch.equal(kernels.linear(x, panels, None), few)


# ---- Few rows: those of codes are B instead of A, and x is rounded to other tiles.


@each_amx_level
@each_codes
@pytest.mark.parametrize("rows", [1, 2, 15, 16, 17, 18, 31, 32])
@pytest.mark.parametrize("outputs", [1, 15, 16, 17, 32, 48, 70])
def test_few_rows_of_codes_have_the_bits_of_many(
    level: str, form: str, rows: int, outputs: int
) -> None:
    kernels = cpu_kernels(level)
    for groups in (1, 2, 3, 5):
        weight = normal(groups, outputs, groups * GROUP)
        panels, _ = packed(form, weight, kernels.panel_layout)
        x = activations(rows, 40, groups * GROUP)
        few, many = (kernels.linear(part, panels, None) for part in (x[:rows], x))
        assert torch.equal(few, many[:rows])


@each_amx_level
@pytest.mark.parametrize("form", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("rows", [1, 5, 16, 17, 32])
def test_threads_round_all_of_x(level: str, form: str, threads: int, rows: int) -> None:
    """x has so many numbers that threads share it. One thread rounds zeros first, since the memory
    for what is rounded still has what it had."""
    kernels, inputs, outputs = cpu_kernels(level), -(-32768 // rows) // GROUP * GROUP + GROUP, 40
    panels, _ = packed(form, normal(rows, outputs, inputs), kernels.panel_layout)
    x = activations(rows, rows, inputs)
    found = []
    for count in (1, threads):
        with torch_threads(1):
            kernels.linear(torch.zeros_like(x), panels, None)
        with torch_threads(count):
            found.append(kernels.linear(x, panels, None))
    assert torch.equal(*found)


@each_amx_level
@each_codes
def test_codes_in_the_layout_for_vectors_are_refused(level: str, form: str) -> None:
    kernels = cpu_kernels(level)
    layout = kernels.panel_layout
    assert layout.tiles
    panels, _ = packed(form, normal(0, 40, 32), layout._replace(tiles=False))
    with pytest.raises(AssertionError):
        kernels.linear(normal(1, 2, 32), panels, None)
