"""Worker processes that hang are ended, counted and replaced."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from bros.core.worker_process import WorkerHungError, WorkerProcess
from bros.semantic.transforms.process import TransformProcess

HUNG_S = 0.3


@pytest.fixture
def hung() -> list[str]:
    """What was counted as hung."""
    return []


@pytest.fixture
def worker(hung: list[str]) -> Iterator[WorkerProcess]:
    module = "bros.semantic.transforms.process"
    made = WorkerProcess(module, on_hung=lambda: hung.append(module), answer_s=HUNG_S)
    yield made
    made.close()


def start(worker: WorkerProcess) -> int:
    """Its process has started, however long that takes; returns its id."""
    while True:
        try:
            assert worker.ask(b"upper", b"a") == b"+A"
        except WorkerHungError:
            continue
        assert worker._process is not None
        return worker._process.pid


@pytest.mark.parametrize("text", [b"b", b"b" * 4_000_000], ids=["answer", "text"])
def test_a_stopped_process_is_replaced(worker: WorkerProcess, hung: list[str], text: bytes) -> None:
    """Whether it stops before it answers, or before it has read a large text."""
    pid = start(worker)
    before = len(hung)
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(WorkerHungError, match="no sign for 0.3 s"):
        worker.ask(b"upper", text)
    assert len(hung) == before + 1 and worker.cpu_s == 0.0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert start(worker) != pid


def test_users_pass_on_what_counts(hung: list[str]) -> None:
    made = TransformProcess(lambda: hung.append("transforms"))
    made._worker._answer_s = 0.001  # it takes longer to start
    with pytest.raises(Exception, match="upper: the process gave no sign"):
        made.apply("upper", "a")
    made.close()
    assert hung == ["transforms"]
