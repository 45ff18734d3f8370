"""The threads of the kernels (csrc/team.cpp): results do not depend on them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bros.kernels.panels import Panels
from support.kernel_cases import attend, compiled_levels, cpu_kernels, make_case, torch_threads

pytestmark = pytest.mark.skipif(not compiled_levels(), reason="the CPU kernels were not built")


@pytest.fixture(autouse=True)
def torch_threads_of_later_tests() -> Iterator[None]:
    """The number that a thread sets is that of all threads that begin to compute later."""
    with torch_threads(torch.get_num_threads()):
        yield


class Product:
    """A product whose outputs are shared among threads."""

    def __init__(self, outputs: int = 1000, inputs: int = 512) -> None:
        from bros.kernels.cpu_ops import CpuKernels

        self._kernels = CpuKernels()
        generator = torch.Generator().manual_seed(outputs)
        weight = torch.randn(outputs, inputs, generator=generator)
        self._panels = Panels.fp32(weight, self._kernels.panel_layout)
        self._x = torch.randn(3, inputs, generator=generator)

    def __call__(self) -> Tensor:
        return self._kernels.linear(self._x, self._panels, None)


def test_any_number_of_threads_computes_the_same() -> None:
    """Also more than there are cores, than a team can have, and than there are parts of the work;
    and fewer than before, of whom the others sleep on."""
    products = [Product(outputs) for outputs in (100, 1000, 12_000)]
    with torch_threads(1):
        expected = [product() for product in products]
    for threads in (2, 7, 3, 300, 5, 2):
        with torch_threads(threads):
            for _ in range(20):
                for product, wanted in zip(products, expected, strict=True):
                    assert torch.equal(product(), wanted)


@pytest.mark.parametrize("threads", [2, 5])
def test_tasks_that_outnumber_the_threads(threads: int) -> None:
    """Attention has many, whose scratch memory belongs to the thread that does them."""
    case = make_case([(1, 300), (40, 100), (1, 7), (129, 0)] * 5, kv_heads=2, group=2)
    kernels = cpu_kernels(compiled_levels()[0])
    with torch_threads(1):
        expected = attend(kernels, case, torch.device("cpu"))
    with torch_threads(threads):
        for _ in range(20):
            assert torch.equal(attend(kernels, case, torch.device("cpu")), expected)


def test_several_threads_compute_at_the_same_time() -> None:
    """Each has a team of its own."""
    products = [Product(200 + 300 * number) for number in range(4)]
    with torch_threads(1):
        expected = [product() for product in products]
    begin = threading.Barrier(len(products))
    right: list[bool] = []

    def run(index: int) -> None:
        torch.set_num_threads(3)  # OpenMP's number belongs to the thread
        begin.wait()
        right.extend(torch.equal(products[index](), expected[index]) for _ in range(200))

    runners = [threading.Thread(target=run, args=[index]) for index in range(len(products))]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join()
    assert len(right) == 800 and all(right)


def _threads_of_this_process() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_a_team_ends_with_its_thread() -> None:
    product = Product()

    def run() -> None:
        torch.set_num_threads(5)
        before = _threads_of_this_process()
        product()
        added.append(_threads_of_this_process() - before)

    added: list[int] = []
    before = _threads_of_this_process()
    for _ in range(3):
        runner = threading.Thread(target=run)
        runner.start()
        runner.join()
    assert max(added) == 4
    limit = time.monotonic() + 30
    while _threads_of_this_process() > before and time.monotonic() < limit:
        pass  # a team ends, and the system removes its threads, a moment after `join`
    assert _threads_of_this_process() <= before


_FORKS = """
import os, threading
import torch
from kernels.test_team import Product

torch.set_num_threads(4)
product = Product()
expected = product()

def compute():  # so that a fork comes in the middle of it
    other = Product()
    while True:
        other()

threading.Thread(target=compute, daemon=True).start()
for _ in range(3):  # a child has none of the threads; it makes its own, and so does its child
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert torch.equal(product(), expected)
        os._exit(os.waitstatus_to_exitcode(status))
    assert torch.equal(product(), expected)
os._exit(7)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_child_of_a_fork_computes_without_the_threads_of_its_parent() -> None:
    folder = Path(__file__).parents[1]
    command = [sys.executable, "-c", _FORKS]
    found = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert found.returncode == 7, found.stderr


_COMPILER = shutil.which("g++") or shutil.which("clang++")


@pytest.mark.skipif(_COMPILER is None, reason="there is no C++ compiler")
def test_nobody_waits_for_a_thread_that_is_held_up(tmp_path: Path) -> None:
    """Its tasks are done by the others, and later it takes part again."""
    assert _COMPILER is not None
    source, program = Path(__file__).with_name("held_member.cpp"), tmp_path / "held_member"
    command = [_COMPILER, "-std=c++17", "-O1", "-pthread", str(source), "-o", str(program)]
    subprocess.run(command, check=True, timeout=120)
    found = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, check=False)
    assert (found.returncode, found.stdout) == (0, "ended\n")
