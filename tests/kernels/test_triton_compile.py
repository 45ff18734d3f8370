"""Triton kernels are compiled for Hopper, on machines without a GPU, too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.kernel_cases import needs_triton

pytestmark = [needs_triton, pytest.mark.slow, pytest.mark.multiprocess]

MOST_SHARED = 227 * 1024
"""Bytes of shared memory that a program can have there."""


def compiled(*arguments: str) -> list[dict[str, Any]]:
    """What support/triton_compile.py says, in a process in which Triton does not interpret."""
    tests = Path(__file__).parents[1]
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(tests.parent), str(tests)]),
    }
    program = subprocess.run(
        [sys.executable, "-W", "ignore", str(tests / "support" / "triton_compile.py"), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert program.returncode == 0, program.stderr[-4000:]
    return [json.loads(line) for line in program.stdout.splitlines()]


LAYER = {"attend", "merge", "rms_norm", "rope_and_cache", "silu_and_mul"}
ALL = {*LAYER, "choose", "best_of_parts", "best_of_rows", "few_rows"}


@pytest.mark.parametrize(
    ("models", "names"),
    [
        pytest.param("one", LAYER, id="one"),
        pytest.param("all", ALL, marks=pytest.mark.long, id="all"),
    ],
)
def test_kernels_compile_for_hopper_without_spilled_registers(models: str, names: set[str]) -> None:
    kernels = compiled(models)
    assert {each["kernel"] for each in kernels} == names
    for each in kernels:
        # The logarithm in double precision has a stack frame of its own; Triton 3.9 reserves eight
        # bytes in merge, which nothing reads.
        stack = {"choose": 32, "merge": 8}.get(each["kernel"], 0)
        assert each["LOCAL"] == 0 and each["STACK"] <= stack, each
        assert each["SHARED"] <= MOST_SHARED, each
    halves = [each for each in kernels if each["kernel"] == "attend" and "bf16" in each["types"]]
    assert halves
    for each in halves:
        assert each["mma"] > 0, each  # matrix units
        assert each["wide_copies"] > 0, each  # 16 bytes per copy to shared memory


@pytest.mark.long
def test_the_smallest_and_the_largest_heads_fit_into_shared_memory() -> None:
    kernels = compiled("odd")
    attends = [each for each in kernels if each["kernel"] == "attend"]
    assert {each["launch"]["HEAD_DIM"] for each in attends} == {5, 256}
    for each in kernels:
        assert each["SHARED"] <= MOST_SHARED, each
