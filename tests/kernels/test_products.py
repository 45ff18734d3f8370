"""Products with packed weights: every instruction set of this machine, every format.

The oracle computes in fp64 from the values that the panels hold, and from activations as the
format and the instruction set round them.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.executor.models.layers import dense_linear, vocabulary_panels
from bros.executor.target import CPU, Target
from bros.kernels.panels import GROUP, Panels
from support.kernel_cases import (
    PAIR_LEVELS,
    TILE_LEVELS,
    cpu_kernels,
    each_level,
    torch_threads,
)
from support.packed_weights import activations, normal, packed, widened
from support.tier import examples

each_format = pytest.mark.parametrize("form", ["fp32", "bf16", "int8", "int4"])


BLOCK = 4 * GROUP
"""Activations that share a scale beside int8 weights, see csrc/linear_formats.h."""

OUTLIER = 1.1
"""Groups of int4 with so many times the mean largest magnitude of the row have codes of 16 bits."""


def rounded(x: Tensor, level: str, form: str) -> Tensor:
    """The activations that are multiplied, in fp64."""
    if (form == "bf16" and level in PAIR_LEVELS) or (form != "fp32" and level in TILE_LEVELS):
        return x.bfloat16().double()
    if form == "int8":
        inputs = x.shape[1]
        blocks = F.pad(x, (0, -inputs % BLOCK)).unflatten(1, (-1, BLOCK))
        largest = blocks.abs().amax(2, keepdim=True)
        return in_codes(blocks, largest, torch.tensor(32766.0))[:, :inputs]
    if form == "int4":
        groups = x.unflatten(1, (-1, GROUP))
        largest = groups.abs().amax(2, keepdim=True)
        outlier = largest > OUTLIER * largest.mean(1, keepdim=True)
        return in_codes(groups, largest, torch.where(outlier, 32639.0, 127.0))
    return x.double()


def panels_of(level: str, form: str, weight: Tensor) -> tuple[Panels, Tensor]:
    """The panels of a weight, and the values that the level multiplies."""
    panels, values = packed(form, weight, cpu_kernels(level).panel_layout)
    return panels, widened(form, values) if level in TILE_LEVELS else values


def in_codes(parts: Tensor, largest: Tensor, most: Tensor) -> Tensor:
    """[rows, parts, n] in steps of the largest magnitude / most, flat.

    most: a tensor, since torch divides a number by a tensor with two roundings.
    """
    codes = (parts * (most / largest)).nan_to_num().round()
    return (codes.double() * (largest / most)).flatten(1)


@each_level
@each_format
@settings(max_examples=examples(12, long=300))
@given(
    rows=st.integers(1, 40),
    outputs=st.integers(1, 150),
    groups=st.integers(1, 70),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_products_are_those_of_the_packed_values(
    level: str, form: str, rows: int, outputs: int, groups: int, biased: bool, seed: int
) -> None:
    kernels, inputs = cpu_kernels(level), groups * GROUP
    weight, x = normal(seed, outputs, inputs), activations(seed + 1, rows, inputs)
    x[:, :GROUP] *= 0 if biased else 1  # a group of zeros
    bias = normal(seed + 2, outputs) if biased else None
    panels, values = panels_of(level, form, weight)
    out = kernels.linear(x, panels, bias)
    exact = rounded(x, level, form) @ values.double().T + (0 if bias is None else bias.double())
    assert out.shape == (rows, outputs) and out.dtype == torch.float32
    # Rounding errors of a running sum grow with the square root of its length, squared at worst.
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6 * inputs)


@each_level
@each_format
@settings(max_examples=examples(10, long=200))
@given(
    rows=st.integers(2, 60),
    outputs=st.integers(1, 100),
    groups=st.integers(1, 40),
    data=st.data(),
    seed=st.integers(0, 2**31),
)
def test_a_row_has_the_same_bits_in_any_batch(
    level: str, form: str, rows: int, outputs: int, groups: int, data: st.DataObject, seed: int
) -> None:
    """Whatever the other rows are, and on any number of threads."""
    kernels, inputs = cpu_kernels(level), groups * GROUP
    panels, _ = packed(form, normal(seed, outputs, inputs), kernels.panel_layout)
    x = activations(seed + 1, rows, inputs)
    with torch_threads(data.draw(st.integers(1, 3))):
        whole = kernels.linear(x, panels, None)
    some = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=rows, unique=True))
    with torch_threads(1):
        part = kernels.linear(x[some], panels, None)
    assert torch.equal(whole[some], part)


@each_level
@each_format
@pytest.mark.parametrize("rows", [13, 20])
def test_a_row_that_is_not_finite_stays_alone(level: str, form: str, rows: int) -> None:
    kernels = cpu_kernels(level)
    panels, _ = packed(form, normal(0, 70, 96), kernels.panel_layout)
    x = normal(1, rows, 96)
    clean = kernels.linear(x, panels, None)
    x[4, 7], x[5, 9] = torch.nan, torch.inf
    out = kernels.linear(x, panels, None)
    others = [row for row in range(rows) if row not in (4, 5)]
    assert torch.equal(out[others], clean[others])
    assert out[4].isnan().all() and not out[5].isfinite().any()


@each_level
def test_nothing_is_multiplied_without_rows(level: str) -> None:
    kernels = cpu_kernels(level)
    panels, _ = packed("fp32", normal(0, 20, 32), kernels.panel_layout)
    assert kernels.linear(torch.empty(0, 32), panels, None).shape == (0, 20)


@each_level
def test_an_odd_number_of_inputs(level: str) -> None:
    kernels = cpu_kernels(level)
    weight, x = normal(0, 20, 33), normal(1, 3, 33)
    for values in (weight, weight.bfloat16()):
        layer = dense_linear(values, None, kernels)
        exact = x.double() @ values.double().T
        torch.testing.assert_close(layer(x).double(), exact, rtol=0, atol=1e-5)


@each_level
@each_format
@pytest.mark.parametrize("rows", [300, 1100])
def test_many_rows_in_blocks(level: str, form: str, rows: int) -> None:
    """Rows of several blocks, and inputs of two: the first rows and the last have their bits."""
    kernels, inputs = cpu_kernels(level), 1056
    panels, values = panels_of(level, form, normal(0, 40, inputs))
    x = activations(1, rows, inputs)
    out = kernels.linear(x, panels, None)
    exact = rounded(x, level, form) @ values.double().T
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6 * inputs)
    for some in (slice(0, 1), slice(rows - 3, rows), slice(rows // 2, rows // 2 + 9)):
        assert torch.equal(kernels.linear(x[some], panels, None), out[some])


@each_level
@each_format
def test_few_rows_have_the_bits_of_more(level: str, form: str) -> None:
    """Inputs of three blocks: each number of rows may have a kernel of its own."""
    kernels, inputs = cpu_kernels(level), 2208
    panels, values = panels_of(level, form, normal(0, 40, inputs))
    x = activations(1, 9, inputs)
    out = kernels.linear(x, panels, None)
    exact = rounded(x, level, form) @ values.double().T
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-6 * inputs)
    for rows in range(1, 9):
        assert torch.equal(kernels.linear(x[:rows], panels, None), out[:rows])


@each_level
@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("rows", [6, 20])
def test_activations_of_any_size(level: str, form: str, rows: int) -> None:
    """Groups as large and as small as fp32 allows without overflow of a sum."""
    kernels = cpu_kernels(level)
    panels, _ = packed(form, normal(0, 40, 96), kernels.panel_layout)
    x = activations(1, rows, 96)
    plain = kernels.linear(x, panels, None)
    for exponent in (-60, 60):
        scaled = kernels.linear(x * 2.0**exponent, panels, None)
        torch.testing.assert_close(scaled * 2.0**-exponent, plain, rtol=1e-5, atol=1e-5)
    assert kernels.linear(x * 1e-38, panels, None).isfinite().all()


@each_level
def test_int8_keeps_the_codes_of_values_that_were_rounded_before(level: str) -> None:
    """So the embedding of a converted GGUF model, Q8_0, is exact, and so is the lm_head, but for
    AMX."""
    codes = torch.randint(-127, 128, (40, 3, GROUP))
    codes[:, :, 0] = 127
    scale = (torch.rand(40, 3, 1) + 0.1).half().float()
    weight = (codes * scale).flatten(1)
    kernels = cpu_kernels(level)
    panels = vocabulary_panels(weight, Target(CPU, "int4", packed=True), kernels)
    product = kernels.linear(torch.eye(96), panels, None)
    multiplied = weight.bfloat16().float() if level in TILE_LEVELS else weight
    torch.testing.assert_close(product.T, multiplied, rtol=1e-6, atol=0)
    rows = kernels.embed(torch.arange(40).int(), panels)
    torch.testing.assert_close(rows, weight, rtol=1e-6, atol=0)


# ---- Rows of packed weights, as embeddings.


@each_level
@pytest.mark.parametrize("form", ["fp32", "bf16", "int8"])
@settings(max_examples=examples(12, long=300))
@given(
    vocab=st.integers(1, 150),
    groups=st.integers(1, 40),
    tokens=st.lists(st.integers(0, 149), max_size=60),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 2**31),
)
def test_embeddings_are_the_packed_values(
    level: str, form: str, vocab: int, groups: int, tokens: list[int], threads: int, seed: int
) -> None:
    kernels = cpu_kernels(level)
    panels, values = packed(form, normal(seed, vocab, groups * GROUP), kernels.panel_layout)
    ids = torch.tensor([token % vocab for token in tokens], dtype=torch.int32)
    with torch_threads(threads):
        assert torch.equal(kernels.embed(ids, panels), values[ids.long()].float())


@each_level
def test_embeddings_with_an_odd_number_of_inputs(level: str) -> None:
    kernels = cpu_kernels(level)
    weight = normal(0, 20, 33)
    panels = Panels.bf16(weight, kernels.panel_layout)
    rows = kernels.embed(torch.tensor([19, 0, 7], dtype=torch.int32), panels)
    assert torch.equal(rows, weight.bfloat16().float()[[19, 0, 7]])


@each_level
@pytest.mark.parametrize("token", [-1, 20, 10**6])
def test_a_token_outside_the_vocabulary_is_refused(level: str, token: int) -> None:
    kernels = cpu_kernels(level)
    panels, _ = packed("fp32", normal(0, 20, 32), kernels.panel_layout)
    with pytest.raises(IndexError, match="outside the vocabulary"):
        kernels.embed(torch.tensor([3, token], dtype=torch.int32), panels)


@each_level
def test_embeddings_are_never_int4(level: str) -> None:
    kernels = cpu_kernels(level)
    panels, _ = packed("int4", normal(0, 20, 32), kernels.panel_layout)
    with pytest.raises(IndexError, match="int4"):
        kernels.embed(torch.tensor([3], dtype=torch.int32), panels)
