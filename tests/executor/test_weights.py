"""Parts of tensors: the same numbers as in the whole, and nothing else in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf.quants import quantize
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bros.core.errors import ModelError
from bros.executor.weights import RandomWeights, Weights, WeightSource, slices
from bros.kernels.panels import GROUP

SHAPE = (7, 5 * GROUP)
STORED = ("plain", "half", "q4_0", "q4_1", "q8_0", "drawn")
_GROUPS = {"q4_0": Type.Q4_0, "q4_1": Type.Q4_1, "q8_0": Type.Q8_0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    tensors = {"plain": values, "half": values.bfloat16()}
    for name, kind in _GROUPS.items():
        raw = np.asarray(quantize(values.numpy(), kind))
        tensors[f"{name}.{name}"] = torch.from_numpy(raw)
    folder = tmp_path_factory.mktemp("weights")
    save_file(tensors, folder / "model.safetensors")
    return folder


def source_of(folder: Path, name: str) -> Weights:
    return RandomWeights() if name == "drawn" else WeightSource(folder)


@st.composite
def ranges(draw: st.DrawFn, size: int) -> range:
    start = draw(st.integers(0, size - 1))
    return range(start, draw(st.integers(start + 1, size)))


@given(name=st.sampled_from(STORED), rows=ranges(SHAPE[0]), columns=ranges(SHAPE[1]))
def test_a_part_has_the_numbers_of_the_whole(
    folder: Path, name: str, rows: range, columns: range
) -> None:
    source, part = source_of(folder, name), (rows, columns)
    expected = source.dense(name, SHAPE)[slices(part)]
    assert torch.equal(source.dense(name, SHAPE, part), expected)
    out = torch.empty(len(rows), len(columns), dtype=torch.float16)
    source.copy_into(out, name, SHAPE, part)
    assert torch.equal(out, expected.half())


@given(name=st.sampled_from(STORED), rows=ranges(SHAPE[0]), groups=ranges(SHAPE[1] // GROUP))
def test_whole_groups_of_a_part_are_those_of_the_whole(
    folder: Path, name: str, rows: range, groups: range
) -> None:
    source = source_of(folder, name)
    part = rows, range(groups.start * GROUP, groups.stop * GROUP)
    expected = source.int4(name, SHAPE).dequantize()[slices(part)]
    assert torch.equal(source.int4(name, SHAPE, part).dequantize(), expected)


def test_groups_that_begin_elsewhere_are_rounded_anew(folder: Path) -> None:
    source = WeightSource(folder)
    part = range(2, 5), range(10, 10 + 2 * GROUP)
    groups = source.int4("q4_0", SHAPE, part)
    whole = source.dense("q4_0", SHAPE)[slices(part)]
    torch.testing.assert_close(groups.dequantize(), whole, atol=0.3, rtol=0)


@pytest.mark.parametrize("name", [name for name in STORED if name != "drawn"])
def test_a_part_of_a_tensor_of_another_shape_is_refused(folder: Path, name: str) -> None:
    source = WeightSource(folder)
    part = range(2), range(GROUP)
    for read in (source.dense, source.int4):
        with pytest.raises(ModelError, match=rf"{name}.* has shape \[7, 160\].*\[7, 192\]"):
            read(name, (7, 192), part)
    with pytest.raises(ModelError, match="no tensor named missing"):
        source.dense("missing", (7, 160), part)


_READS = """
import resource, sys
from pathlib import Path
from bros.executor.weights import WeightSource

MIB = 2**20
shape = (2048, 16384)
source = WeightSource(Path(sys.argv[1]))
source.dense("large", shape, (range(1), range(4)))  # whatever the first reading sets up
used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_DATA, (used + 60 * MIB,) * 2)
for part in ((range(512), range(16384)), (range(2048), range(4096, 8192))):
    assert source.dense("large", shape, part).nbytes == 32 * MIB
try:
    source.dense("large", shape)
except RuntimeError as error:
    assert "allocate" in str(error), error
else:
    sys.exit("there was memory for all of it, this shows nothing")
"""


@pytest.mark.multiprocess
def test_of_a_large_matrix_no_more_than_the_part_is_read(tmp_path: Path) -> None:
    """With 60 MiB left, which a quarter of 64 MiB needs 16 of, and 32 in fp32."""
    large = torch.zeros(2048, 16384, dtype=torch.bfloat16)
    save_file({"large": large}, tmp_path / "model.safetensors")
    command = [sys.executable, "-c", _READS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
