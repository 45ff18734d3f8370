"""An engine process whose steps hang or slow down in native code when a prompt asks for it.

`python hanging_engine.py FOLDER`, in place of `python -m bros.transport.process FOLDER`. Every step
takes STEP_S longer than it would.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
from collections.abc import Callable
from pathlib import Path

from bros.core.plan import StepPlan, StepResult
from bros.transport.process_client import ProcessEngineClient

HANG, HANG_WITH_GIL, SLOW, STOP_PYTHON = 91, 92, 93, 94
"""Prompt tokens: sleep for ever without the GIL; with it; sleep 10 times STEP_S; loop in Python."""

STEP_S = 0.05


class HangingEngineClient(ProcessEngineClient):
    """Starts such an engine."""

    async def _spawn(self, folder: Path) -> asyncio.subprocess.Process:
        self._launch.write(folder)
        return await asyncio.create_subprocess_exec(
            sys.executable, __file__, str(folder), stdin=asyncio.subprocess.PIPE
        )


def main() -> int:
    from bros.executor.runner import ModelRunner
    from bros.transport.process import main as run_process

    execute = ModelRunner.execute

    def hanging(
        self: ModelRunner, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        tokens = {token for chunk in plan.chunks for token in chunk.token_ids}
        if HANG in tokens:
            ctypes.CDLL(None).sleep(3600)
        if HANG_WITH_GIL in tokens:
            ctypes.PyDLL(None).sleep(3600)
        while STOP_PYTHON in tokens:
            pass
        ctypes.CDLL(None).usleep(int(STEP_S * 1e6) * (10 if SLOW in tokens else 1))
        return execute(self, plan, should_abort)

    ModelRunner.execute = hanging  # type: ignore[method-assign]
    return run_process()


if __name__ == "__main__":
    sys.exit(main())
