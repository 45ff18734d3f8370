"""Applies transforms off the event loop: in processes of their own, or on a thread.

    event loop ── FairGate ── thread ══ source, text ══▶ process: parses, applies
                                     ◀══ result ═══════
    `python -m bros.semantic.transforms.process FD`

A process, because a step over a text of megabytes is one call that holds the interpreter, and since
a client's regular expression and its memory cannot be bounded well from within. Its limits are the
kernel's.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Protocol

from bros.core.fair import CpuBudget, CpuUse, FairGate, FairThreads
from bros.core.worker_process import (
    WorkerClosedError,
    WorkerEndedError,
    WorkerHungError,
    WorkerProcess,
    answer_jobs,
    cpu_used_s,
    settle,
)
from bros.semantic.transforms.pipeline import PIPELINE_S, Transforms, parse_transforms
from bros.semantic.transforms.steps import TransformError

_MEMORY_BYTES = 2**30
_GRACE_S = 2
"""CPU time after PIPELINE_S until the kernel ends a process whose transform does not return."""
_PARSED = 256


class TransformRunner(Protocol):
    """Applies transforms that may take long."""

    async def apply(self, tenant: str, transforms: Transforms, text: str) -> str:
        """The transformed text. tenant: whose work it is. Raises TransformError."""
        ...

    def close(self) -> None:
        """End the work. Callers that still wait get a TransformError."""
        ...


class TransformThreads:
    """A TransformRunner on threads of this process, for a program with one user."""

    def __init__(self, threads: FairThreads) -> None:
        self._threads = threads

    async def apply(self, tenant: str, transforms: Transforms, text: str) -> str:
        return await self._threads.run(tenant, lambda: transforms(text), len(text))

    def close(self) -> None:
        pass


class TransformProcesses:
    """A TransformRunner on processes, which start when they are needed first.

    One tenant never has all of them, so its slow transforms do not keep others waiting.
    """

    def __init__(
        self,
        budget: CpuBudget | None = None,
        count: int = 2,
        on_hung: Callable[[], None] = lambda: None,
    ) -> None:
        """budget: None: CPU time is not limited. count: most processes, at least 2.
        on_hung: called on a thread when a process hung."""
        assert count >= 2
        self._gate = FairGate(count, count - 1, budget, name="transforms")
        self._all = [TransformProcess(on_hung) for _ in range(count)]
        self._free = list(self._all)

    async def apply(self, tenant: str, transforms: Transforms, text: str) -> str:
        used = CpuUse()

        def work() -> str:
            process = self._free.pop()
            try:
                return process.apply(transforms.source, text)
            finally:
                used.seconds = process.cpu_s
                self._free.append(process)

        return await self._gate.run(tenant, work, used)

    def close(self) -> None:
        for process in self._all:
            process.close()


class TransformProcess:
    """One process. `apply` may be called from any thread, by one at a time."""

    def __init__(self, on_hung: Callable[[], None] = lambda: None) -> None:
        self._worker = WorkerProcess("bros.semantic.transforms.process", on_hung=on_hung)

    def apply(self, source: str, text: str) -> str:
        """The text transformed by the pipeline `source`. Raises TransformError."""
        try:
            reply = self._worker.ask(_encoded(source), _encoded(text))
        except WorkerClosedError as error:
            raise TransformError(str(error)) from error
        except WorkerHungError as error:
            raise TransformError(f"{source}: {error}") from error
        except WorkerEndedError as error:
            raise TransformError(f"{source}: took too long or too much memory") from error
        result = _decoded(reply[1:])
        if reply[:1] == _FAILED:
            raise TransformError(result)
        return result

    @property
    def cpu_s(self) -> float:
        """CPU time that the last `apply` took."""
        return self._worker.cpu_s

    def close(self) -> None:
        """End the process, and with it a running `apply`."""
        self._worker.close()


_DONE, _FAILED = b"+", b"-"


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # the transforms report half characters


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass")


def main() -> None:
    """Answer until the server closes its end."""
    import resource  # late: not on every system, and only needed here

    connection = settle(int(sys.argv[1]))
    if sys.platform == "linux":  # elsewhere it does not limit, or cannot be set
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    parse = functools.lru_cache(_PARSED)(parse_transforms)

    def transformed(source: str, text: str) -> bytes:
        end_s = int(cpu_used_s() + PIPELINE_S) + _GRACE_S
        # Of a pipeline that does not return, the kernel ends the process.
        resource.setrlimit(resource.RLIMIT_CPU, (end_s, resource.RLIM_INFINITY))
        try:
            transforms = parse(source)
            assert transforms is not None, "a blank pipeline is not sent"
            return _DONE + _encoded(transforms(text))
        except TransformError as error:
            return _FAILED + _encoded(str(error))
        except MemoryError:
            return _FAILED + _encoded(f"{source}: took too much memory")

    answer_jobs(connection, 2, lambda *parts: transformed(*map(_decoded, parts)))


if __name__ == "__main__":
    main()
