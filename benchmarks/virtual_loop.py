"""asyncio on a clock that jumps to the next timer whenever nothing is ready."""

from __future__ import annotations

import asyncio
import dataclasses
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.interfaces import Grouping
from bros.core.plan import SEGMENT_WIDTH, Chunk, StepPlan
from bros.engine.client import MessageClient
from bros.engine.engine import Engine
from bros.engine.loop import handle
from bros.engine.messages import Command, Outputs, Ready, Reply, Reported
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import StepLoad
from bros.simulator.simulation import (
    BLOCK_SIZE,
    Device,
    SimExecutor,
    engine_info,
    load_of,
    with_step_bounds,
)

T = TypeVar("T")

START_S = 5000.0
"""Where time begins: not at 0, so that absolute times are noticed where relative ones belong."""


class _JumpingSelector(selectors.DefaultSelector):
    """Takes no time: instead of waiting, moves the clock on. Whole nanoseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = round(START_S * 1e9)

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("nothing is left to wait for, so no time would ever pass")
        self.now_ns += max(1, round(timeout * 1e9))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Timers are the only way for time to pass; what runs takes none."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_ns / 1e9

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """At once: a thread takes time of another kind, which nobody here waits for."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def advance(self, seconds: float) -> None:
        """As if something had kept the processor busy for so long."""
        self._jumping.now_ns += round(seconds * 1e9)


class LoopClock:
    """The clock of the loop that runs."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def unix_time(self) -> float:
        return 1_700_000_000.0 + self.now() - START_S


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """What `main` returns, as quickly as it can be computed."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


# ---- An engine in the time of a virtual loop, for programs and servers that are made of tasks.
#
#     loop     ......... handle what has come | sleep ................ | deliver the tokens | ...
#     engine                                  | step: the clock moves  |
#
# Simulation (simulation.py) drives requests that are all known beforehand; here whatever runs on
# the
# loop submits them: sessions, clients that wait for an answer before they ask again.


class VirtualEngineClient(MessageClient):
    """Runs `engine` on the running loop, whose time `clock` follows.

    engine: its executor moves the same clock, as SimExecutor does. What arrives during a step
    is looked at after it: no step is given up.
    """

    def __init__(self, engine: Engine, clock: ManualClock) -> None:
        super().__init__(self._take)
        self._engine = engine
        self._clock = clock
        self._commands: deque[Command] = deque()
        self._come = asyncio.Event()
        self.on_reply(Ready(engine.info))
        self._task = asyncio.create_task(self._run(), name="virtual engine")

    def send(self, reply: Reply) -> None:
        """What the engine says outside of steps: in the next turn of the loop, as from afar."""
        asyncio.get_running_loop().call_soon(self.on_reply, reply)

    async def close(self) -> None:
        """End after the current step."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._engine.close()
        self.on_death("The engine was closed.")

    def _take(self, command: Command) -> None:
        self._commands.append(command)
        self._come.set()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not (self._commands or self._engine.has_work):
                await self._come.wait()
            self._come.clear()
            self._clock.advance(max(0.0, loop.time() - self._clock.now()))
            while self._commands:
                handle(self._commands.popleft(), self._engine, self)
            outputs = self._engine.step()
            # At least one turn of the loop, so that replies are heard.
            await asyncio.sleep(max(0.0, self._clock.now() - loop.time()))
            if outputs:
                self.on_reply(Outputs(tuple(outputs)))
            report = self._engine.due_report()
            if report is not None:
                self.on_reply(Reported(report))


def virtual_engine(
    config: EngineConfig,
    device: Device,
    *,
    vocab_size: int,
    choose: Callable[[Chunk], int],
    grouped: bool = False,
) -> VirtualEngineClient:
    """An engine with these options on a device of which only step times are known.

    choose, grouped: see SimExecutor; if grouped, steps take by unique context what the device's
    model says they take by context, and the scheduler knows. Call it in a running loop. Raises
    ConfigError.
    """
    model, grouping = device.steps, None
    if grouped:
        unique_s = model.unique_context_s + model.context_s
        model = dataclasses.replace(model, context_s=0.0, unique_context_s=unique_s)
        grouping = Grouping(BLOCK_SIZE, min_blocks=1)
    info = dataclasses.replace(
        engine_info(config, device), vocab_size=vocab_size, grouping=grouping
    )
    clock = ManualClock(asyncio.get_running_loop().time())
    load = _grouped_load if grouped else load_of
    executor = SimExecutor(model, clock, choose=choose, load=load)
    scheduler = build_scheduler(with_step_bounds(config), info, model)
    return VirtualEngineClient(Engine(scheduler, executor, clock, info), clock)


def _grouped_load(plan: StepPlan) -> StepLoad:
    load = load_of(plan)
    load.unique_context -= common_context(plan)
    return load


def common_context(plan: StepPlan) -> int:
    """Cached tokens that several rows share, counted once for each row but one."""
    common = 0
    for piece in plan.shared:
        numbers = plan.chunks[piece.rows[0]].segments
        triples = numbers[piece.first * SEGMENT_WIDTH : piece.end * SEGMENT_WIDTH]
        tokens = sum(triples[2::SEGMENT_WIDTH]) - sum(triples[1::SEGMENT_WIDTH])
        common += (len(piece.rows) - 1) * tokens
    return common
