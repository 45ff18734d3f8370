"""Which engines schedule ahead, and in what order they do what."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bros.core.clock import ManualClock
from bros.core.errors import ConfigError
from bros.core.interfaces import LaunchingExecutor
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, ServiceClass, Slo, expanded
from bros.engine.engine import Engine
from bros.engine.loop import run_engine
from bros.engine.messages import Abort, Command, Outputs, Reply, Shutdown, Submit
from support.late_executor import LateExecutor
from support.scheduling import engine_info, make_scheduler, request
from support.toy_model import ToyModel


class Scripted:
    """Launches steps of a toy model, and writes down what is asked of it."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self._late = LateExecutor(ToyModel(4), ManualClock())

    def launch(self, plan: StepPlan) -> Result:
        self.said.append(f"launch {plan.step}")
        launched = self._late.launch(plan)
        return Result(plan.step, launched.result, self.said)

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        self.said.append(f"execute {plan.step}")
        return self._late.execute(plan, should_abort)

    def close(self) -> None:
        self.said.append("close")


class Result:
    def __init__(self, step: int, wait: Callable[[], StepResult], said: list[str]) -> None:
        self._step, self._wait, self._said = step, wait, said

    def result(self) -> StepResult:
        self._said.append(f"wait for {self._step}")
        return self._wait()


def engine_of(executor: object, async_scheduling: str = "auto") -> Engine:
    return Engine(
        make_scheduler("fcfs"), executor, ManualClock(), engine_info(policy="fcfs"),  # type: ignore[arg-type]
        async_scheduling=async_scheduling,
    )  # fmt: skip


def said(engine: Engine, executor: Scripted, asked: EngineRequest) -> list[str]:
    engine.submit(asked)
    while engine.has_work:
        engine.step()
    return executor.said


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_the_next_step_is_launched_before_the_result_is_awaited(mode: str) -> None:
    executor = Scripted()
    assert isinstance(executor, LaunchingExecutor)
    assert said(engine_of(executor, mode), executor, request("a", 3, max_tokens=3)) == [
        "launch 1", "launch 2", "wait for 1", "launch 3", "wait for 2", "wait for 3",
    ]  # fmt: skip


def test_off_is_off() -> None:
    executor = Scripted()
    asked = request("a", 3, max_tokens=3)
    assert said(engine_of(executor, "off"), executor, asked) == [f"execute {n}" for n in (1, 2, 3)]


def test_who_cannot_launch_executes() -> None:
    assert not isinstance(ToyModel(), LaunchingExecutor)
    engine = engine_of(ToyModel())
    engine.submit(request("a", 3, max_tokens=1))
    assert [output.token_ids for output in map(expanded, engine.step())] == [
        tuple(ToyModel.continuation([1, 2, 3], 1))
    ]
    with pytest.raises(ConfigError, match="--async-scheduling on"):
        engine_of(ToyModel(), "on")


def test_what_depends_on_the_last_token_is_launched_after_it_has_come() -> None:
    executor = Scripted()
    asked = request("a", 3, max_tokens=3, presence_penalty=1.0)
    assert said(engine_of(executor), executor, asked) == [
        "launch 1", "wait for 1", "launch 2", "wait for 2", "launch 3", "wait for 3",
    ]  # fmt: skip


def test_an_engine_without_work_does_nothing() -> None:
    executor = Scripted()
    engine = engine_of(executor)
    assert engine.step() == [] and not engine.has_work
    assert executor.said == []


class Calls:
    """A transport that gives one batch of commands per call."""

    has_arrivals = True

    def __init__(self, *batches: list[Command]) -> None:
        self._batches = list(batches)
        self.replies: list[Reply] = []

    def receive(self, *, wait: bool) -> list[Command]:
        assert self._batches or not wait, "nothing to do, and no request will come"
        return self._batches.pop(0) if self._batches else []

    def send(self, reply: Reply) -> None:
        self.replies.append(reply)


def test_what_comes_between_two_steps_is_in_the_one_after_the_next() -> None:
    """The loop comes around when one step runs and another is launched; an abort that late only
    keeps the request from being in a third one."""
    executor = Scripted()
    commands = Calls(
        [Submit(request("a", 3, max_tokens=9))], [], [Submit(request("b", [7, 8]))], [Abort("a")],
        [], [], [], [], [Shutdown()],
    )  # fmt: skip
    run_engine(engine_of(executor), commands)
    tokens: dict[str, tuple[int, ...]] = {"a": (), "b": ()}
    for reply in commands.replies:
        for output in map(expanded, reply.outputs if isinstance(reply, Outputs) else ()):
            tokens[output.request_id] += output.token_ids
    assert tokens["b"] == tuple(ToyModel.continuation([7, 8], 4))
    # Of steps 1 and 2; it was in 3 when it was withdrawn.
    assert tokens["a"] == tuple(ToyModel.continuation([1, 2, 3], 2))


@pytest.mark.parametrize("mode", ["on", "off"])
def test_who_is_promoted_while_a_step_runs_is_first_in_the_next_one(mode: str) -> None:
    """With a step of it under way, or waiting behind others."""
    clock = ManualClock()
    plans: list[list[str]] = []
    executor = LateExecutor(
        ToyModel(4), clock, watch=lambda plan: plans.append([c.request_id for c in plan.chunks])
    )
    info, scheduler = engine_info(), make_scheduler("bros", max_num_seqs=2)
    engine = Engine(scheduler, executor, clock, info, async_scheduling=mode)
    for name in "abcd":
        asked = request(name, 5, ServiceClass.BE, max_tokens=6, ignore_eos=True)
        engine.submit(asked)
    answers: dict[str, list[int]] = {name: [] for name in "abcd"}
    while engine.has_work:
        if len(plans) == 2:
            engine.promote("b", Slo(9.0, 9.0))
            engine.promote("d", Slo(9.0, 9.0))
        for output in map(expanded, engine.step()):
            answers[output.request_id] += output.token_ids
        scheduler.check_integrity()
    assert [set(plan) for plan in plans[:2]] == [{"a", "b"}, {"a", "b"}]
    assert "d" in plans[2] and not any("c" in plan for plan in plans[:4])
    for name, service_class in (("b", ServiceClass.RT), ("c", ServiceClass.BE)):
        trace = engine.trace(name)
        assert trace is not None and trace.service_class is service_class
    assert list(answers.values()) == [ToyModel.continuation(range(1, 6), 6)] * 4
