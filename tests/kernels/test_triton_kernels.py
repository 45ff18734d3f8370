"""What only the Triton kernels do: 16-bit activations, tiles that are split, steps that are
replayed, and, on a GPU, all of it at real sizes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bros.core.errors import ConfigError
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import GraphLimits, HeadLayout, Kernels
from bros.kernels.reference import ReferenceKernels
from bros.kernels.triton.settings import (
    LaunchConfig,
    ProductLaunch,
    ProductShape,
    Shape,
    TritonSettings,
    as_json,
    file_name,
    with_tuned,
)
from support.kernel_cases import (
    SMALL_ATTENTION_CASES,
    AttentionCase,
    attend,
    exact_attention,
    make_case,
    needs_triton,
    triton_backend,
)

BACKEND = triton_backend()
REFERENCE = ReferenceKernels()

HALVES = (torch.bfloat16, torch.float16)
EPSILON = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-24}
"""The largest relative error of one rounding to nearest."""

# Softmax weights and the output are rounded once each, and |v| stays below 6. An interpreter cuts
# bits off, which is twice as far.
ATTENTION_ATOL = {
    torch.float32: 2e-5,
    torch.bfloat16: 6 * 4 * EPSILON[torch.bfloat16],
    torch.float16: 6 * 4 * EPSILON[torch.float16],
}

no_gpu = not torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(no_gpu, reason="there is no CUDA device")


def with_activations(case: AttentionCase, dtype: torch.dtype) -> AttentionCase:
    return replace(case, qkv=case.qkv.to(dtype))


def assert_matches(kernels: Kernels, case: AttentionCase) -> None:
    actual = attend(kernels, case, BACKEND.device)
    atol = ATTENTION_ATOL[case.qkv.dtype]
    assert actual.dtype == case.qkv.dtype
    torch.testing.assert_close(actual.double(), exact_attention(case), rtol=0, atol=atol)


@needs_triton
@settings(max_examples=BACKEND.examples, phases=BACKEND.phases)
@given(case=SMALL_ATTENTION_CASES, dtype=st.sampled_from(HALVES))
def test_16_bit_activations_with_any_cache(case: AttentionCase, dtype: torch.dtype) -> None:
    assert_matches(BACKEND.kernels(), with_activations(case, dtype))


@needs_triton
@pytest.mark.parametrize("group", [3, 20])
def test_items_are_split_into_smaller_tiles_of_queries(group: int) -> None:
    from bros.kernels.triton.ops import TritonKernels

    small = LaunchConfig(16, 16, 4, 1)
    shapes = product(("one", "tile"), (4,), (16,), (16, 32, 64, 128))
    tuned = {Shape(*shape): small for shape in shapes}  # type: ignore[arg-type]
    kernels = TritonKernels(BACKEND.device, TritonSettings("small", 4, 0, tuned=tuned))
    rows = [(5, 50), (1, 30), (1, 0), (2, 5)]
    parts = [((1, 2), 40)]
    case = make_case(rows, kv_heads=1, group=group, head_dim=16, parts=parts)
    assert_matches(kernels, case)


@needs_triton
def test_what_is_no_number_stays_in_its_row() -> None:
    case = make_case([(1, 200), (1, 20), (3, 30)], kv_heads=1, parts=[((0, 1), 200)])
    case.qkv[0, 5] = float("nan")
    actual = attend(BACKEND.kernels(), case, BACKEND.device)
    assert actual[0, :64].isnan().all()
    assert not actual[1:].isnan().any()


@needs_triton
def test_a_batch_that_was_not_prepared_is_refused() -> None:
    case = make_case([(1, 20)]).to(BACKEND.device)
    with pytest.raises(AssertionError, match="prepare"):
        BACKEND.kernels().attention(
            case.qkv, case.layout, case.k_cache, case.v_cache, case.batch, case.scale
        )


REPLAYED_CHUNKS = (
    ([(1, 300), (40, 90)], [((0,), 30)]),
    ([(1, 5)], []),
    ([(20, 0), (1, 600), (1, 2), (17, 333)], [((1, 2), 100)]),
    ([], []),
    ([(63, 0)], []),
    ([(1, 10)] * 4, [((0, 1, 2, 3), 130)]),
)
CHUNK_LIMITS = GraphLimits(rows=4, segments=300, shared_rows=6, chunks=2, tokens=63)

REPLAYED = (
    ([(1, 300), (1, 0), (1, 17), (1, 600)], [((0, 1, 3), 200), ((0, 3), 40)]),
    ([(1, 5)], []),
    ([], []),
    ([(1, 40), (1, 300), (1, 1)], []),
    ([(1, 0), (1, 700)], [((0, 1), 300), ((1,), 20)]),
    ([(1, 10)] * 4, [((0, 1, 2, 3), 130)]),
)
LIMITS = GraphLimits(rows=4, segments=300, shared_rows=6)

Rows = list[tuple[int, int]]


def check_replays(
    record: Callable[[Callable[[], None]], Callable[[], None]],
    replayed: Sequence[tuple[Rows, Any]] = REPLAYED,
    limits: GraphLimits = LIMITS,
) -> None:
    """Record the attention of one step, and replay it with the contents of others."""
    kernels, device = BACKEND.kernels(), BACKEND.device
    cases = [make_case(list(rows), kv_heads=1, parts=parts) for rows, parts in replayed]
    layout, scale = cases[0].layout, cases[0].scale
    blocks = max(len(case.k_cache) for case in cases)
    k_cache, v_cache = torch.zeros(2, blocks, *cases[0].k_cache.shape[1:], device=device)
    tokens = max(limits.rows, limits.tokens)
    qkv = torch.zeros(tokens, layout.qkv_size, device=device)
    buffers = kernels.graph_buffers(limits, layout, device)
    assert buffers is not None
    recorded = kernels.prepare(cases[1].batch, layout, device, buffers)
    out = torch.empty(tokens, layout.q_size, device=device)

    def run() -> None:
        out.copy_(kernels.attention(qkv, layout, k_cache, v_cache, recorded, scale))

    replay = record(run)
    for case in cases:
        rows = len(case.qkv)
        qkv.fill_(7.0)
        qkv[:rows] = case.qkv.to(device)
        k_cache[: len(case.k_cache)] = case.k_cache.to(device)
        v_cache[: len(case.v_cache)] = case.v_cache.to(device)
        assert buffers.fits(case.batch)
        kernels.prepare(case.batch, layout, device, buffers)
        replay()
        torch.testing.assert_close(
            out[:rows].cpu().double(), exact_attention(case), rtol=0, atol=2e-5
        )


@needs_triton
def test_a_recorded_step_computes_what_was_prepared_last() -> None:
    check_replays(lambda run: run)
    check_replays(lambda run: run, REPLAYED_CHUNKS, CHUNK_LIMITS)


@needs_triton
def test_what_does_not_fit_is_not_prepared() -> None:
    kernels = BACKEND.kernels()
    case = make_case([(1, 20)] * 200, kv_heads=1)
    buffers = kernels.graph_buffers(LIMITS, case.layout, BACKEND.device)
    assert buffers is not None and not buffers.fits(case.batch)
    with pytest.raises(ValueError, match="exceeds its capacity"):
        kernels.prepare(case.batch, case.layout, BACKEND.device, buffers)


@needs_triton
@pytest.mark.parametrize("dtype", HALVES)
def test_elementwise_operations_round_once(dtype: torch.dtype) -> None:
    kernels, device = BACKEND.kernels(), BACKEND.device
    generator = torch.Generator().manual_seed(1)
    x, residual, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 200), (5, 200), (200,))
    )
    # An interpreter may cut off instead of rounding, so the error is that of one bit, not of half.
    tolerance = {"rtol": 2 * EPSILON[dtype], "atol": 1e-6}
    actual = kernels.rms_norm(x.to(device), weight.to(device), 1e-5).cpu()
    expected = REFERENCE.rms_norm(x.double(), weight.double(), 1e-5)
    torch.testing.assert_close(actual.double(), expected, **tolerance)
    there = residual.to(device, copy=True)
    actual = kernels.add_rms_norm_(there, x.to(device), weight.to(device), 1e-5).cpu()
    total = there.cpu().double()
    torch.testing.assert_close(total, residual.double() + x.double(), **tolerance)
    expected = REFERENCE.rms_norm(total, weight.double(), 1e-5)  # of the sum as it was rounded
    torch.testing.assert_close(actual.double(), expected, **tolerance)
    actual = kernels.silu_and_mul(x.to(device)).cpu()
    expected = REFERENCE.silu_and_mul(x.double())
    torch.testing.assert_close(actual.double(), expected, **tolerance)


def test_settings_survive_a_file() -> None:
    settings = TritonSettings(
        "NVIDIA H200",
        132,
        9,
        {"one": 3, "tile": 2},
        {
            Shape("one", 2, 128, 16): LaunchConfig(16, 32, 4, 5),
            Shape("tile", 4, 64, 128): LaunchConfig(1, 2, 3, 4),
        },
        {ProductShape(16, 4096, 1024, 2): ProductLaunch(32, 256, 4, 6)},
    )
    plain = TritonSettings("NVIDIA H200", 132, 9)
    assert with_tuned(plain, as_json(settings)) == settings
    assert settings.launch(Shape("one", 2, 128, 16)) == LaunchConfig(16, 32, 4, 5)
    assert settings.launch(Shape("one", 2, 64, 16)) == plain.default(Shape("one", 2, 64, 16))


_UNEVEN = """{"programs_per_processor": {"one": 1, "tile": 1}, "launches": [], "products": [
 {"rows": 1, "outputs": 100, "inputs": 64, "element_bytes": 2,
  "block_n": 32, "block_k": 32, "warps": 4, "stages": 3}]}"""


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"launches": [{"kind": "two"}]}', "null", _UNEVEN]
)
def test_a_broken_file_of_settings_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="Launch configurations of X cannot be read"):
        with_tuned(TritonSettings("X", 1, 9), text)


def test_the_files_of_settings_can_be_read() -> None:
    folder = Path(__file__).parents[2] / "bros" / "kernels" / "triton" / "tuned"
    for path in folder.glob("*.json"):
        device = json.loads(path.read_text("utf-8"))["device"]
        assert path.name == file_name(device)
        assert with_tuned(TritonSettings(device, 1, 9), path.read_text("utf-8")).tuned


def test_file_names_have_no_odd_characters() -> None:
    assert file_name("NVIDIA RTX A6000/1 (x)") == "NVIDIA_RTX_A6000_1__x_.json"


@needs_triton
@pytest.mark.parametrize("kind", ["one", "tile"])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("rows", [16, 128])
@pytest.mark.parametrize(("major", "shared_kib"), [(8, 99), (9, 227)])
def test_defaults_fit_into_shared_memory(
    kind: str, element_bytes: int, head_dim: int, rows: int, major: int, shared_kib: int
) -> None:
    shape = Shape(kind, element_bytes, head_dim, rows)  # type: ignore[arg-type]
    launch = TritonSettings("x", 100, major).default(shape)
    tiles = launch.block_n * (launch.stages - 1) * 2 + launch.block_m
    assert tiles * head_dim * element_bytes <= shared_kib * 1024


@needs_triton
@pytest.mark.skipif(not no_gpu, reason="there is a CUDA device")
def test_without_a_gpu_triton_has_to_interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    assert select_kernels("triton").name == "triton"
    assert select_kernels("auto").name != "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ConfigError, match="triton needs a CUDA device, not cpu"):
        select_kernels("triton", torch.device("cpu"))


def test_triton_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match="triton is not installed"):
        select_kernels("triton")


def test_cpu_kernels_are_not_for_a_gpu() -> None:
    with pytest.raises(ConfigError, match="for the CPU"):
        select_kernels("cpu", torch.device("cuda"))


# --- on a GPU, at real sizes ---

LLAMA_8B = {"kv_heads": 8, "group": 4, "head_dim": 128}
REAL = {
    "decode": ([(1, 4000), (1, 17), (1, 1000), (1, 0)] * 8, []),
    "long decode": ([(1, 30000)], []),
    "prefill": ([(2048, 0), (500, 1500)], []),
    "mixed": ([(1, 700)] * 30 + [(300, 900), (7, 64)], []),
    "shared": ([(1, 100)] * 64, [(range(64), 6000)]),
    "nested": ([(1, 60)] * 32, [(range(32), 2000), (range(16), 700), (range(4, 9), 90)]),
}
MODELS = {
    "llama": LLAMA_8B,
    "smollm": {"kv_heads": 3, "group": 3, "head_dim": 64},
    "wide heads": {"kv_heads": 2, "group": 2, "head_dim": 256},
}


@needs_gpu
@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("shape", REAL)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_attention_at_real_sizes(model: str, shape: str, dtype: torch.dtype) -> None:
    rows, parts = REAL[shape]
    case = make_case(rows, parts=parts, kv_dtype=dtype, **MODELS[model])
    case = with_activations(case, dtype).to(BACKEND.device)
    kernels = BACKEND.kernels()
    batch = kernels.prepare(case.batch, case.layout, BACKEND.device)
    actual = kernels.attention(case.qkv, case.layout, case.k_cache, case.v_cache, batch, case.scale)
    expected = exact_attention(case)
    torch.testing.assert_close(actual.double(), expected, rtol=0, atol=ATTENTION_ATOL[dtype])
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 4 * EPSILON[dtype] + 1e-6


@needs_gpu
@needs_triton
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("tokens", [1, 256, 5000])
def test_elementwise_operations_at_real_sizes(dtype: torch.dtype, tokens: int) -> None:
    kernels, device = BACKEND.kernels(), BACKEND.device
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    # Sums of some thousand squares add rounding errors of fp32.
    tolerance = {"rtol": 1.5 * EPSILON[dtype] + 4e-6, "atol": 4e-6}
    residual, x, weight = random(tokens, 4096), random(tokens, 4096), random(4096)
    total = residual + x
    actual = kernels.add_rms_norm_(residual, x, weight, 1e-5)
    torch.testing.assert_close(residual, total, rtol=0, atol=0)
    expected = REFERENCE.rms_norm(total.double(), weight.double(), 1e-5)
    torch.testing.assert_close(actual.double(), expected, **tolerance)
    gate_up = random(tokens, 2 * 14336)
    expected = REFERENCE.silu_and_mul(gate_up.double())
    torch.testing.assert_close(kernels.silu_and_mul(gate_up).double(), expected, **tolerance)
    layout = HeadLayout(32, 8, 128)
    angles = torch.randn(9000, 64, generator=generator, device=device)
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1)
    qkv = random(tokens, layout.qkv_size)
    exact = qkv.double()
    slots = torch.randperm(tokens + 16, device=device)[:tokens].int()
    blocks = tokens // 16 + 2
    caches = torch.zeros(4, blocks, 8, 16, 128, device=device, dtype=dtype)
    positions = torch.randint(9000, (tokens,), device=device, dtype=torch.int32)
    norms = (random(128), random(128))
    arguments = (layout, positions, slots)
    kernels.rope_and_cache_(qkv, *arguments, cos_sin, caches[0], caches[1], *norms, 1e-5)
    REFERENCE.rope_and_cache_(
        *(exact, *arguments, cos_sin.double(), caches[2].double(), caches[3].double()),
        *(norms[0].double(), norms[1].double(), 1e-5),
    )
    scale = float(exact.abs().max())
    torch.testing.assert_close(qkv.double(), exact, rtol=1.5 * EPSILON[dtype], atol=4e-6 * scale)
    _, k, v = qkv.split([layout.q_size, layout.kv_size, layout.kv_size], dim=1)
    where = (slots.long() // 16, slice(None), slots.long() % 16)
    assert torch.equal(caches[0][where].flatten(1), k)
    assert torch.equal(caches[1][where].flatten(1), v)


@needs_gpu
@needs_triton
@pytest.mark.gpu
def test_a_cuda_graph_computes_what_was_prepared_last() -> None:
    def record(run: Callable[[], None]) -> Callable[[], None]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    check_replays(record)
    check_replays(record, REPLAYED_CHUNKS, CHUNK_LIMITS)
