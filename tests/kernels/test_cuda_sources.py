"""The sources in csrc/ that are compiled on machines with a GPU, on machines without one."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bros.core.errors import ConfigError
from bros.kernels.cuda_ops import SCATTER_BLOCKS, CudaKvCopier, CupyDriver, kernel_source
from support.cuda_on_cpu import CpuDriver, compile_kernels
from support.kv_streams import Stream

SOURCES = sorted((Path(__file__).parents[2] / "csrc").glob("*.cu"))
NVCC = shutil.which("nvcc")
COMPILER = shutil.which("g++") or shutil.which("clang++")
ARCHITECTURES = ("sm_80", "sm_90")

each_source = pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


def nvrtc() -> ctypes.CDLL | None:
    """CUDA's run-time compiler, from wherever pip has put it; it needs no driver."""
    for folder in sys.path:
        for path in sorted(Path(folder or ".").glob("nvidia/*/lib/libnvrtc.so.*")):
            return ctypes.CDLL(str(path))
    return None


def test_there_are_sources() -> None:
    assert "kv_copy.cu" in [path.name for path in SOURCES]


@each_source
def test_no_header_is_needed(source: Path) -> None:
    """Where NVRTC compiles them there may be none."""
    assert "#include" not in source.read_text("utf-8")


@each_source
@each_architecture
@pytest.mark.skipif(NVCC is None, reason="there is no nvcc")
def test_nvcc_has_nothing_to_say(source: Path, architecture: str, tmp_path: Path) -> None:
    """And nothing is kept in slow memory for want of registers."""
    assert NVCC is not None
    flags = ["-std=c++17", f"-arch={architecture}", "-cubin", "-Werror", "all-warnings"]
    done = subprocess.run(
        [NVCC, *flags, "-Xptxas", "-v", "-o", str(tmp_path / "out.cubin"), str(source)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    properties = re.findall(r"(\d+) bytes stack frame, (\d+) .*?, (\d+) .*", done.stderr)
    assert properties, "ptxas says nothing of kernels"
    assert set(properties) == {("0", "0", "0")}, done.stderr
    assert max(map(int, re.findall(r"Used (\d+) registers", done.stderr))) <= 64


@each_source
@each_architecture
def test_nvrtc_compiles_it(source: Path, architecture: str) -> None:
    library = nvrtc()
    if library is None:
        pytest.skip("there is no NVRTC (pip package nvidia-cuda-nvrtc)")
    program = ctypes.c_void_p()
    text = source.read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"x.cu", 0, None, None) == 0
    options = (ctypes.c_char_p * 2)(b"-std=c++17", f"-arch={architecture}".encode())
    result = library.nvrtcCompileProgram(program, 2, options)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    library.nvrtcDestroyProgram(ctypes.byref(program))
    assert result == 0 and not log.value.strip(), log.value.decode()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if COMPILER is None:
        pytest.skip("there is no C++ compiler")
    return compile_kernels(COMPILER, tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize(
    ("head_dim", "dtype", "width"),
    [
        (128, torch.bfloat16, 16),
        (80, torch.float16, 16),
        (4, torch.float32, 16),
        (4, torch.float16, 8),
        (6, torch.float32, 8),
        (2, torch.bfloat16, 4),
        (5, torch.float32, 4),
        (3, torch.float16, 2),
    ],
)
@pytest.mark.parametrize("processors", [1, 132])
@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_kernels_move_each_token_to_its_place(
    library: ctypes.CDLL,
    head_dim: int,
    dtype: torch.dtype,
    width: int,
    processors: int,
    tokens: int,
) -> None:
    """By the widest vectors that fit, whatever the grid; and nothing else changes.

    There are more rows than a scatter has blocks, or a gather on one multiprocessor.
    """
    driver = CpuDriver(library, processors)
    copier, stream = CudaKvCopier(driver), Stream("any")
    generator = torch.Generator().manual_seed(tokens)
    layers, blocks, heads = 20, 4, 3
    shape = (layers, 2, blocks, heads, 16, head_dim)
    cache = torch.randn(shape, generator=generator).to(dtype)
    before = cache.clone()
    slots = torch.randperm(blocks * 16, generator=generator)[:tokens].int()
    pieces = torch.full((tokens, layers, 2, heads, head_dim), 9.0).to(dtype)
    copier.gather(cache, slots, pieces, stream)
    by_slot = before.transpose(3, 4).flatten(2, 3)  # [layers, 2, slots, heads, head_dim]
    assert torch.equal(pieces, by_slot[:, :, slots].permute(2, 0, 1, 3, 4))
    assert torch.equal(cache, before)

    copier.scatter(cache, slots, -pieces, stream)
    by_slot[:, :, slots] *= -1
    assert torch.equal(cache.transpose(3, 4).flatten(2, 3), by_slot)
    assert [name for name, _ in driver.launched] == [f"gather_{width}", f"scatter_{width}"]
    (_, gather_grid), (_, scatter_grid) = driver.launched
    assert np.prod(gather_grid) <= 8 * processors
    assert np.prod(scatter_grid) <= SCATTER_BLOCKS


def test_a_missing_cupy_is_said_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match="pip install cupy-cuda13x, or use --on-pressure"):
        CupyDriver(torch.device("cuda", 0))


class CompileException(Exception):
    """Like CuPy's, not a RuntimeError."""


def fake_cupy(
    calls: list[tuple[Any, ...]], error: Exception | None = None, broken: bool = False
) -> SimpleNamespace:
    """As far as copies need it. broken: sources do not compile."""

    def count() -> int:
        if error is not None:
            raise error
        return 1

    class Device:
        attributes = {"MultiProcessorCount": 132}

        def __init__(self, index: int) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *error: object) -> None: ...

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            self.code = code

        def compile(self) -> None:
            if broken:
                raise CompileException("expected a ;")

        def get_function(self, name: str) -> Callable[..., None]:
            kind, width = name.split("_")
            assert f"{kind}_##width" in self.code and f"KV_COPY_KERNELS({width}," in self.code

            def launch(grid: Any, block: Any, args: Any, *, stream: Any) -> None:
                calls.append((name, grid, block, args, stream.ptr))

            return launch

    runtime = SimpleNamespace(
        getDeviceCount=count,
        memcpyDefault=4,
        memcpyAsync=lambda *args: calls.append(("1d", *args)),
        memcpy2DAsync=lambda *args: calls.append(("2d", *args)),
    )
    return SimpleNamespace(
        cuda=SimpleNamespace(
            runtime=runtime,
            Device=Device,
            compiler=SimpleNamespace(CompileException=CompileException),
        ),
        RawModule=RawModule,
    )


def test_a_missing_driver_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("driver version is insufficient")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy([], error))
    with pytest.raises(ConfigError, match="cannot use this device: driver version"):
        CupyDriver(torch.device("cuda", 0))


def test_a_source_that_does_not_compile_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy([], broken=True))
    with pytest.raises(ConfigError, match="cannot use this device: expected a ;"):
        CupyDriver(torch.device("cuda", 0))


def test_the_installed_cupy_has_the_error_that_is_caught() -> None:
    cupy = pytest.importorskip("cupy")
    assert issubclass(cupy.cuda.compiler.CompileException, Exception)


def test_copies_without_gaps_are_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(calls))
    driver = CupyDriver(torch.device("cuda", 0))
    driver.copy(1000, 64, 2000, 64, width=64, rows=5, stream=7)
    driver.copy(1000, 256, 2000, 64, width=64, rows=5, stream=7)
    driver.copy(1000, 64, 2000, 256, width=64, rows=5, stream=7)
    assert calls == [
        ("1d", 1000, 2000, 5 * 64, 4, 7),
        ("2d", 1000, 256, 2000, 64, 64, 5, 4, 7),
        ("2d", 1000, 64, 2000, 256, 64, 5, 4, 7),
    ]


def test_kernels_get_what_they_declare_on_the_stream_they_are_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CuPy passes numbers on as wide as NumPy has them."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(calls))
    copier = CudaKvCopier(CupyDriver(torch.device("cuda", 0)))
    cache, pieces = torch.zeros(3, 2, 5, 4, 16, 8), torch.zeros(7, 3, 2, 4, 8)
    slots = torch.zeros(7, dtype=torch.int32)
    copier.gather(cache, slots, pieces, Stream("compute", 41))
    copier.scatter(cache, slots, pieces, Stream("scatter", 42))
    source = kernel_source("kv_copy.cu")
    declared = re.search(r"gather_##width\(([^)]*)\)", source)
    assert declared is not None
    widths = [
        8 if "*" in parameter or "long long" in parameter else 4
        for parameter in declared[1].replace("\\", "").split(",")
    ]
    for (name, grid, block, args, stream), (kind, expected) in zip(
        calls, (("gather_16", 41), ("scatter_16", 42)), strict=True
    ):
        assert (name, stream, block) == (kind, expected, (256,)) and len(grid) == 2
        assert [arg.itemsize for arg in args] == widths
        assert [int(arg) for arg in args] == [
            cache.data_ptr(), cache[0, 0].nbytes, pieces.data_ptr(), slots.data_ptr(), 7, 6, 4, 2,
        ]  # fmt: skip


def test_the_installed_cupy_takes_a_stream_for_its_address() -> None:
    """A launch asks it for `ptr` before anything else, and for nothing but that."""
    cupy = pytest.importorskip("cupy")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device, on which it would be launched")

    class Asked(Exception):
        pass

    class Address:
        @property
        def ptr(self) -> int:
            raise Asked

    function = cupy.cuda.Function.__new__(cupy.cuda.Function)
    with pytest.raises(Asked):
        function((1, 1), (256,), (np.int32(3),), stream=Address())


def test_the_installed_cupy_is_refused_where_there_is_no_device() -> None:
    pytest.importorskip("cupy")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="--device cuda: CuPy cannot use this device"):
        CupyDriver(torch.device("cuda", 0))


def test_the_source_that_is_compiled_is_the_one_in_the_tree() -> None:
    [path] = [path for path in SOURCES if path.name == "kv_copy.cu"]
    assert kernel_source("kv_copy.cu") == path.read_text("utf-8")
