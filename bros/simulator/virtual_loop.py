"""asyncio in virtual time: the clock jumps to the next timer whenever no task is ready."""

from __future__ import annotations

import asyncio
import dataclasses
import random
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
    Disturbance,
    SimExecutor,
    engine_info,
    load_of,
    with_step_bounds,
)

T = TypeVar("T")

START_S = 5000.0
"""Start of the virtual time. It is not 0, so that confusing absolute and relative times shows."""


class _JumpingSelector(selectors.DefaultSelector):
    """Advances the clock instead of waiting. Times are whole nanoseconds."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ns = round(START_S * 1e9)

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is None:
            raise RuntimeError("deadlock: no timer is pending, so virtual time cannot advance")
        self.now_ns += max(1, round(timeout * 1e9))
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """Only timers advance the time; code runs in zero time."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now_ns / 1e9

    def run_in_executor(  # type: ignore[override]
        self, executor: object, work: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run `work` immediately, in zero virtual time, instead of on a thread."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(work(*args))
        except Exception as error:
            done.set_exception(error)
        return done

    def advance(self, seconds: float) -> None:
        """Advance the time as if the processor had been busy."""
        self._jumping.now_ns += round(seconds * 1e9)


class LoopClock:
    """The clock of the running loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def unix_time(self) -> float:
        return 1_700_000_000.0 + self.now() - START_S


def run_virtual(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run `main` in virtual time; returns its result."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main())


# ---- An engine on a virtual loop, for sessions, clients, routers and servers.
#
#     loop     ......... handle the commands  | sleep ................ | deliver the tokens | ...
#     engine                                  | step: the clock moves  |
#
# Simulation (simulation.py) runs requests that are all known beforehand; here tasks on the loop
# submit them, e.g. sessions, or clients that wait for a response before their next request.


class VirtualEngineClient(MessageClient):
    """Runs `engine` on the running loop, whose time `clock` follows.

    engine: its executor advances the same clock, as SimExecutor does. Commands that arrive during
        a step are handled after it: no step is aborted.
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
        """Deliver a reply in the next iteration of the loop, as if from another process."""
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
            # At least one iteration of the loop, so that replies are delivered.
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
    reread: float = 0.0,
    disturbance: Disturbance | None = None,
    seed: int = 0,
) -> VirtualEngineClient:
    """An engine with these options on a simulated device.

    choose: see SimExecutor.
    grouped: decode rows read shared blocks once, at the device's cost per token of context, and
        the scheduler's cost model reflects that.
    reread: with `grouped`, what each further row pays for a shared token, relative to that cost:
        0 to 1. A cache of the device makes it less than 1 where rows read a prefix one by one.
    seed: of the noise of the disturbance.
    Call it in a running loop. Raises ConfigError.
    """
    model, grouping = device.steps, None
    if grouped:
        total_s = model.unique_context_s + model.context_s
        model = dataclasses.replace(
            model, context_s=reread * total_s, unique_context_s=(1 - reread) * total_s
        )
        grouping = Grouping(BLOCK_SIZE, min_blocks=1)
    info = dataclasses.replace(
        engine_info(config, device), vocab_size=vocab_size, grouping=grouping
    )
    clock = ManualClock(asyncio.get_running_loop().time())
    load = _grouped_load if grouped else load_of
    executor = SimExecutor(
        model,
        clock,
        choose=choose,
        load=load,
        disturbance=disturbance,
        rng=random.Random(seed),
    )
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
