"""An engine process whose steps hang or slow down in native code when a prompt asks for it, or that
hangs or is slow while it loads.

`python hanging_engine.py LOADING FOLDER`, in place of `python -m bros.transport.process FOLDER`.
Every step takes STEP_S longer than it would.
"""

from __future__ import annotations

import ctypes
import faulthandler
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from bros.core.plan import StepPlan, StepResult
from bros.transport.engine_start import EngineProcess
from bros.transport.process import SHOW_STACKS
from bros.transport.process_client import ProcessEngineClient

if TYPE_CHECKING:
    from bros.engine.engine import Engine

HANG, HANG_WITH_GIL, SLOW, STOP_PYTHON = 91, 92, 93, 94
"""Prompt tokens: sleep for ever without the GIL; with it; sleep 10 times STEP_S; loop in Python."""

STEP_S = 0.05

Loading = Literal["usual", "sleeps", "sleeps deaf", "holds the GIL", "reads slowly", "computes"]
"""What it does while it loads: sleep for ever; the same before it handles the signal that asks for
its stacks, which then ends it; the same with the GIL; read 8 KiB ten times per second, or compute,
for SLOW_LOAD_S, and then go on."""

SLOW_LOAD_S = 6.0


class HangingEngineClient(ProcessEngineClient):
    """Starts such an engine. loading: what the next one does."""

    loading: Loading = "usual"

    def _next_process(self) -> EngineProcess:
        return EngineProcess(sys.executable, __file__, self.loading)


def load_as(loading: str) -> None:
    """Do it."""
    end_s = time.monotonic() + SLOW_LOAD_S
    match loading:
        case "sleeps":
            while True:  # a signal ends a sleep
                ctypes.CDLL(None).sleep(3600)
        case "sleeps deaf":
            faulthandler.unregister(SHOW_STACKS)
            time.sleep(3600)
        case "holds the GIL":
            while True:
                ctypes.PyDLL(None).sleep(3600)
        case "reads slowly":
            with open("/dev/zero", "rb", buffering=0) as file:
                while time.monotonic() < end_s:
                    file.read(8192)
                    time.sleep(0.1)
        case "computes":
            while time.monotonic() < end_s:
                pass


def main() -> int:
    from bros.engine import build
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

    def loading(*arguments: Any, **options: Any) -> Engine:
        load_as(load)
        return build_engine(*arguments, **options)

    load = sys.argv.pop(1)
    build_engine, build.build_engine = build.build_engine, loading
    ModelRunner.execute = hanging  # type: ignore[method-assign]
    return run_process()


if __name__ == "__main__":
    sys.exit(main())
