"""Compiles Triton kernels for a GPU that need not be there, exactly as they would be launched.

Run as a program (Triton must not interpret in that process): prints one JSON object per launch of
the typical models below.

    python tests/support/triton_compile.py [odd|one]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bros.kernels.interface import HeadLayout
from bros.kernels.triton import attention, elementwise_kernels, products, sampling
from bros.kernels.triton import ops as triton_ops
from bros.kernels.triton.settings import TritonSettings, file_name, with_tuned
from bros.kernels.xformers_attention import XformersAttention
from support.fake_xformers import FakeFmha
from support.kernel_cases import int32, make_case

HOPPER = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.bool: "*i1",
    torch.float64: "*fp64",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


OPTIONS = ("num_warps", "num_stages", "launch_pdl")
SETTINGS = TritonSettings("NVIDIA H200", 132, 9, early=True)


class Launches:
    """Stands in for a kernel: remembers how it is launched, and runs nothing."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: Any) -> Any:
        assert all(size > 0 for size in grid)
        return lambda *args, **kwargs: self.calls.append((args, kwargs))


@contextmanager
def recorded(*places: tuple[ModuleType, str]) -> Iterator[dict[str, Launches]]:
    """Within it, the kernels of those names in those modules only record."""
    before = [getattr(module, name) for module, name in places]
    launches = {name: Launches(kernel) for (_, name), kernel in zip(places, before, strict=True)}
    try:
        for module, name in places:
            setattr(module, name, launches[name])
        yield launches
    finally:
        for (module, name), kernel in zip(places, before, strict=True):
            setattr(module, name, kernel)


def compile_launch(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The compiled kernel, with pointers aligned to 16 bytes, as those of whole tensors are."""
    options = {k: v for k, v in kwargs.items() if k in OPTIONS}
    values = dict(zip(kernel.arg_names, args, strict=False))
    values.update({k: v for k, v in kwargs.items() if k not in options})
    constants = {p.name for p in kernel.params if p.is_constexpr}
    assert values.keys() == set(kernel.arg_names), "arguments are missing"
    signature = {
        name: "constexpr" if name in constants else _type(values[name]) for name in kernel.arg_names
    }
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if torch.is_tensor(values[name]) and values[name].data_ptr() % 16 == 0
    }
    source = ASTSource(
        kernel, signature, {(kernel.arg_names.index(n),): values[n] for n in constants}, attributes
    )
    return triton.compile(source, target=HOPPER, options=options)


def _type(value: Any) -> str:
    if torch.is_tensor(value):
        return TYPES[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def resources(compiled: Any) -> dict[str, int]:
    """Registers, stack and shared memory in bytes; local memory or a stack means spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return {**found, "SHARED": int(compiled.metadata.shared)}


Launched = tuple[str, Any, tuple[Any, ...], dict[str, Any]]
"""Name, kernel, args and kwargs."""


def launches_of_a_layer(
    layout: HeadLayout, dtype: torch.dtype, kv_dtype: torch.dtype
) -> list[Launched]:
    """What a mixed step of a layer launches on a Hopper GPU."""
    kernels = triton_ops.TritonKernels(torch.device("cpu"), SETTINGS)
    rows, parts = [(1, 300), (1, 2000), (40, 100)], [((0, 1), 600)]
    group = layout.num_heads // layout.num_kv_heads
    case = make_case(rows, layout.num_kv_heads, group, layout.head_dim, kv_dtype, parts=parts)
    case = replace(case, qkv=case.qkv.to(dtype))
    hidden, tokens = torch.zeros(len(case.qkv), 4096, dtype=dtype), len(case.qkv)
    cos_sin, some = (torch.zeros(8, layout.head_dim // of * 2) for of in (2, 4))
    numbers = int32([0] * tokens)
    places = [(attention, "attend"), (attention, "merge")]
    places += [(elementwise_kernels, n) for n in ("rms_norm", "rope_and_cache", "silu_and_mul")]
    with ExitStack() as stack:
        launches = stack.enter_context(recorded(*places))
        batch = kernels.prepare(case.batch, layout, torch.device("cpu"))
        kernels.attention(case.qkv, layout, case.k_cache, case.v_cache, batch, case.scale)
        kernels.rms_norm(hidden, hidden[0], 1e-5)
        kernels.add_rms_norm_(hidden, hidden, hidden[0], 1e-5)
        kernels.silu_and_mul(hidden)
        kernels.rope_and_cache_(
            case.qkv, layout, numbers, numbers, cos_sin, case.k_cache, case.v_cache
        )
        norm = hidden[0, : layout.head_dim].contiguous()
        kernels.rope_and_cache_(
            *(case.qkv, layout, numbers, numbers, some),
            *(case.k_cache, case.v_cache, norm, norm),
        )
    return [
        (name, found.kernel, args, kwargs)
        for name, found in launches.items()
        for args, kwargs in found.calls
    ]


MODELS = (
    (HeadLayout(32, 8, 128), torch.bfloat16, torch.bfloat16),
    (HeadLayout(9, 3, 64), torch.float32, torch.float32),
)


ODD_MODELS = (
    (HeadLayout(6, 2, 5), torch.float32, torch.float32),
    (HeadLayout(6, 2, 5), torch.float16, torch.bfloat16),
    (HeadLayout(8, 4, 256), torch.bfloat16, torch.bfloat16),
    (HeadLayout(8, 1, 256), torch.float32, torch.float32),
)
"""The smallest and the largest heads. Registers may not do for these, but memory has to."""


def launches_of_merges_with_xformers(layout: HeadLayout, dtype: torch.dtype) -> list[Launched]:
    """What merges a chunk's own part, which is not a Triton kernel, with its context."""
    device = torch.device("cpu")
    own = XformersAttention(FakeFmha((dtype,)), device)
    kernels = triton_ops.TritonKernels(device, SETTINGS, own)
    group = layout.num_heads // layout.num_kv_heads
    case = make_case([(64, 100)], layout.num_kv_heads, group, layout.head_dim, dtype)
    with recorded((attention, "attend"), (attention, "merge")) as launches:
        batch = kernels.prepare(case.batch, layout, device)
        qkv = case.qkv.to(dtype)
        kernels.attention(qkv, layout, case.k_cache, case.v_cache, batch, case.scale)
    found = launches["merge"]
    return [("merge", found.kernel, args, kwargs) for args, kwargs in found.calls]


def launches_of_products() -> list[Launched]:
    """Those that were tuned on an H100."""
    name = "NVIDIA H100 80GB HBM3"
    text = (Path(products.__file__).parent / "tuned" / file_name(name)).read_text("utf-8")
    settings = with_tuned(replace(SETTINGS, device=name), text)
    multiply = products.RowProducts(settings)
    with recorded((products, "few_rows")) as launches:
        for shape in settings.products:
            x = torch.zeros(shape.rows, shape.inputs, dtype=torch.bfloat16)
            weight = torch.zeros(shape.outputs, shape.inputs, dtype=torch.bfloat16)
            multiply(x, weight)
            multiply.gated(x, weight)
    found = launches["few_rows"]
    return [("few_rows", found.kernel, args, kwargs) for args, kwargs in found.calls]


def launches_of_sampling() -> list[Launched]:
    rows, vocab = 3, 128_256
    params = sampling.SamplingTensors(
        torch.zeros(rows),
        torch.zeros(rows),
        torch.zeros(rows, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.float64),
        torch.zeros(rows, dtype=torch.int64),
    )
    names = ("choose", "best_of_parts", "best_of_rows")
    with recorded(*[(sampling, name) for name in names]) as launches:
        sampling.sample_tokens(torch.zeros(rows, vocab), params)
        out = torch.zeros(2, rows, dtype=torch.int32)
        sampling.best_tokens(torch.zeros(rows, vocab), out)
    return [
        (name, found.kernel, args, kwargs)
        for name, found in launches.items()
        for args, kwargs in found.calls
    ]


def main() -> None:
    """Of odd models only, or one launch of each kernel, if that is the argument."""
    if "one" in sys.argv[1:]:
        launches = launches_of_a_layer(*MODELS[0])
        everything = [list({launch[0]: launch for launch in launches}.values())]
    elif "odd" in sys.argv[1:]:
        everything = [launches_of_a_layer(*model) for model in ODD_MODELS]
    else:
        everything = [launches_of_a_layer(*model) for model in MODELS]
        everything.append(launches_of_merges_with_xformers(*MODELS[0][:2]))
        everything.append(launches_of_sampling())
        everything.append(launches_of_products())
    for launches in everything:
        for name, kernel, args, kwargs in launches:
            compiled = compile_launch(kernel, args, kwargs)
            ptx = compiled.asm["ptx"]
            found = {
                "kernel": name,
                "types": " ".join(_type(arg).strip("*") for arg in args),
                "launch": {k: v for k, v in kwargs.items() if isinstance(v, int)},
                "mma": len(re.findall(r"wgmma\.mma_async|mma\.sync", ptx)),
                "wide_copies": len(re.findall(r"cp\.async\.c[ag].*0x10", ptx)),
                **resources(compiled),
            }
            sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
