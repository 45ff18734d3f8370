"""Compiles Triton kernels for a GPU that need not be there, exactly as they would be launched.

Run as a program (Triton must not interpret in that process): prints one JSON object per launch of
the typical models below.

    python tests/support/triton_compile.py [--only SUBSTRING]
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

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
    options = {k: v for k, v in kwargs.items() if k in ("num_warps", "num_stages")}
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
