"""Figure 14: the share of scheduling in an iteration, under the hybrid load of section 7.2.

    schedule ──▶ the device's step ──▶ apply          (submit, on arrivals)
    measured     simulated             measured

The scheduler's time is measured on this machine; the step time comes from the analytic profile. So
the share is the cost of this scheduler on a CPU like this one beside such GPUs. Simulations run one
at a time, whatever --jobs says. Run nothing else on the machine.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from paper_common import (
    LENGTHS,
    MODELS,
    RESULTS,
    Case,
    Options,
    Part,
    Rendering,
    Results,
    Setting,
    Span,
    rounded,
)
from paper_drawing import Run, head, legend, mean, new_figure, percent, plain, row, runs_of

from bros.cli.simulate_tables import progress_bar
from bros.core.plan import StepPlan, StepResult, SuspendedStep
from bros.core.request import EngineRequest, Output, ServiceClass
from bros.scheduler.scheduler import Scheduler
from bros.simulator.simulation import SimulatedScenario, build_simulation
from bros.workload.attainment import Summary

T = TypeVar("T")

NUM_MODELS = 2
"""The first models of MODELS: the paper has no such figure for Llama."""
QUIET = 0.97
"""Minimum share of the measured time in which the scheduler has a core on an idle machine."""
PUBLISHED = {"OPT-13B": (0.0912, 0.0952), "OPT-30B": (0.0756, 0.0842)}
FULL, QUICK = Span(300.0, 100.0), Span(30.0, 10.0)
# Part of an iteration -> color
PIECES = {"step_s": "#bdbdbd", "schedule_s": "#0072B2", "bookkeeping_s": "#E69F00"}
NAMES = {
    "step_s": "step (simulated)",
    "schedule_s": "schedule (measured)",
    "bookkeeping_s": "bookkeeping (measured)",
}


class TimedScheduler:
    """A scheduler that records the wall time of its calls from simulated time `since_s` on.

    cpu_s: processor time of all of them. It is less than their wall time only if the thread had to
        wait for a core.
    counts: whether the latest step began after `since_s`.
    """

    def __init__(self, inner: Scheduler, since_s: float) -> None:
        self._inner = inner
        self._since_s = since_s
        self.schedule_s: list[float] = []
        self.bookkeeping_s: list[float] = []
        self.cpu_s = 0.0
        self.counts = False

    def schedule(self, now: float) -> StepPlan | None:
        self.counts = now >= self._since_s
        return self._timed(self.schedule_s, now, lambda: self._inner.schedule(now))

    def submit(self, request: EngineRequest, now: float) -> ServiceClass:
        return self._timed(self.bookkeeping_s, now, lambda: self._inner.submit(request, now))

    def apply(self, result: StepResult, now: float) -> list[Output]:
        return self._timed(self.bookkeeping_s, now, lambda: self._inner.apply(result, now))

    def abort_step(self, plan: StepPlan, now: float) -> None:
        self._timed(self.bookkeeping_s, now, lambda: self._inner.abort_step(plan, now))

    def suspend_step(self, plan: StepPlan, stopped: SuspendedStep, now: float) -> None:
        self._timed(self.bookkeeping_s, now, lambda: self._inner.suspend_step(plan, stopped, now))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _timed(self, recorded: list[float], now: float, call: Callable[[], T]) -> T:
        cpu_s, began = time.thread_time(), time.perf_counter()
        result = call()
        if now >= self._since_s:
            recorded.append(time.perf_counter() - began)
            self.cpu_s += time.thread_time() - cpu_s
        return result


def measure(options: Options, span: Span) -> dict[str, Any]:
    """Measure one run after the other, at the stored rates of figure 10."""
    stored = json.loads((RESULTS / "paper_settings.json").read_text())["runs"]
    cases = [
        Case(Setting(profile, lengths), "bros", run["rate"])
        for lengths in LENGTHS
        for profile in options.models[:NUM_MODELS]
        for run in runs_of(stored, profile=profile, lengths=lengths, policy="bros")
    ]
    runs = []
    with progress_bar(len(cases), "timing the scheduler") as on_progress:
        for index, case in enumerate(cases):
            runs.append({**case.labels, **time_run(case.scenario(span, options.seed))})
            on_progress(index, 1.0)
    return {"runs": runs}


def time_run(scenario: SimulatedScenario) -> dict[str, float | None]:
    """Seconds per iteration by PIECES after the warm-up, and percentiles of `schedule`.

    iterations: their number.
    cpu_s: processor time of scheduling and bookkeeping.
    rows: mean number of requests in a step.
    """
    steps: list[tuple[int, float]] = []
    timed: TimedScheduler

    def wrap_scheduler(scheduler: Scheduler) -> Scheduler:
        nonlocal timed
        timed = TimedScheduler(scheduler, scenario.warm_up_s)
        return timed  # type: ignore[return-value]

    def observe(plan: StepPlan, seconds: float) -> None:
        if timed.counts:
            steps.append((len(plan.chunks), seconds))

    build_simulation(scenario, observe=observe, wrap_scheduler=wrap_scheduler).run()
    rows, seconds = zip(*steps, strict=True)
    schedule = Summary.of(timed.schedule_s)
    found = {
        "step_s": mean(seconds),
        "schedule_s": math.fsum(timed.schedule_s) / len(steps),
        "bookkeeping_s": math.fsum(timed.bookkeeping_s) / len(steps),
        "cpu_s": timed.cpu_s / len(steps),
        "schedule_p50_s": schedule.p50,
        "schedule_p99_s": schedule.p99,
        "rows": mean(rows),
    }
    return {"iterations": len(steps), **{name: rounded(value) for name, value in found.items()}}


def share_of(run: Run, *pieces: str) -> float:
    """The share of these PIECES in an iteration."""
    whole = math.fsum(run[piece] for piece in PIECES)
    return math.fsum(run[piece] for piece in pieces) / whole


def render(results: Results) -> Rendering:
    title = "What an iteration consists of under a hybrid load with policy `bros`"
    plot = title, _plot(results["runs"], title.replace("`", ""))
    blocks = {"table": "\n".join(_table(results["runs"])), "quiet": _quiet(results["runs"])}
    return Rendering(blocks, {"breakdown": plot})


def _quiet(runs: Sequence[Run]) -> str:
    """Whether the machine was idle: the share of the measured time with a core."""
    wall_s = math.fsum(
        (run["schedule_s"] + run["bookkeeping_s"]) * run["iterations"] for run in runs
    )
    busy = math.fsum(run["cpu_s"] * run["iterations"] for run in runs) / wall_s
    text = f"The scheduler had a core for {percent(busy)} of the measured time"
    if busy >= QUIET:
        return text + "."
    return f"{text}: **other work was running, so these times are too long**; measure again."


def _groups(runs: Sequence[Run]) -> dict[tuple[str, str], list[Run]]:
    """(model, kind of chats) -> runs, sorted by rate."""
    return {
        (MODELS[profile].split(",")[0], LENGTHS[lengths]): found
        for profile in MODELS
        for lengths in LENGTHS
        if (found := runs_of(runs, profile=profile, lengths=lengths))
    }


def _table(runs: Sequence[Run]) -> Iterator[str]:
    yield from head(
        "model", "chats", "req/s", "requests per step", "step ms (simulated)",
        "schedule ms, mean", "p50", "p99", "bookkeeping ms", "share of schedule", "the paper",
        "with bookkeeping",
    )  # fmt: skip
    for (model, chats), found in _groups(runs).items():
        paper = " to ".join(percent(bound, 2) for bound in PUBLISHED[model])
        for run in found:
            names = ("step_s", "schedule_s", "schedule_p50_s", "schedule_p99_s", "bookkeeping_s")
            milliseconds = [f"{1e3 * run[name]:.2f}" for name in names]
            yield row(
                model, chats, f"{run['rate']:g}", f"{run['rows']:.0f}", *milliseconds,
                percent(share_of(run, "schedule_s"), 2), paper,
                percent(share_of(run, "schedule_s", "bookkeeping_s"), 2),
            )  # fmt: skip


def _plot(runs: Sequence[Run], title: str) -> Figure:
    """A column per model and kind of chats: milliseconds above, measured shares below."""
    groups = _groups(runs)
    figure = new_figure(title, width=1.2 + 2.6 * len(groups), height=5.6)
    axes = figure.subplots(2, len(groups), sharey="row", squeeze=False)
    for column, ((model, chats), found) in enumerate(groups.items()):
        above, below = axes[0][column], axes[1][column]
        above.set_title(f"{model}, {chats}", fontsize=11)
        below.set_xlabel("real-time requests/s")
        low, high = (100 * bound for bound in PUBLISHED[model])
        below.axhspan(low, high, color="#CC79A7", alpha=0.5, label="scheduling, in the paper")
        _bars(above, found, PIECES, lambda run, piece: 1e3 * run[piece])
        _bars(below, found, list(PIECES)[1:], lambda run, piece: 100 * share_of(run, piece))
    axes[0][0].set_ylabel("per iteration, ms")
    axes[1][0].set_ylabel("share of an iteration, %")
    legend(figure, axes[0][0], axes[1][0])
    return figure


def _bars(
    ax: Axes, runs: Sequence[Run], pieces: Iterable[str], value: Callable[[Run, str], float]
) -> None:
    """A bar per run of stacked pieces."""
    places = range(len(runs))
    bottom = [0.0] * len(runs)
    for piece in pieces:
        heights = [value(run, piece) for run in runs]
        ax.bar(places, heights, 0.7, bottom, color=PIECES[piece], label=NAMES[piece])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    ax.set_xticks(places, [f"{run['rate']:g}" for run in runs])
    plain(ax)


PART = Part(
    "overhead", "14", "3 min, with nothing else on the machine", FULL, QUICK, measure, render
)
