"""What attention leaves in memory between its tasks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.kernel_cases import compiled_levels

GROWTH = """
import torch
from bros.kernels.cpu_ops import CpuKernels
from bros.kernels.interface import AttentionBatch, HeadLayout, SharedParts

def int32(values):
    return torch.tensor(values, dtype=torch.int32)

def most_memory(blocks):
    segments = int32([[number % 4, 0, 16] for number in range(blocks)])
    shared = SharedParts(int32([0, 2]), int32([0, 1]), int32([0, blocks]), segments)
    none = torch.empty(0, 3, dtype=torch.int32)
    batch = AttentionBatch(int32([0, 256, 512]), int32([0, 0, 0]), none, shared)
    layout, cache = HeadLayout(8, 1, 32), torch.zeros(4, 1, 16, 32)
    CpuKernels().attention(torch.zeros(512, layout.qkv_size), layout, cache, cache, batch, 0.1)
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))

short = most_memory(32)
print((most_memory(2048) - short) * 1024)
"""


@pytest.mark.skipif(not compiled_levels(), reason="the CPU kernels were not built")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_long_parts_that_many_queries_read_take_little_memory() -> None:
    """All queries have a result of 0.6 MB for every 1,024 keys, not for every tile of 64."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 24 * 2**20
