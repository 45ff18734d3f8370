"""Real-time chats and best-effort load on one real engine, under each policy.

    python benchmarks/hybrid_load.py [--duration 120] [--warm-up 0] [--rate 0.25] [--burst 1]
        [--weights auto] [--only "fcfs;bros;bros, simulated"] [--json FILE]

The embedded model on this machine. Real-time requests arrive as a Poisson process with the
lengths of the BROS paper's LMSYS row; 16 best-effort requests are always in flight (prompts of
512 to 1024 tokens, outputs of 32 to 128). All policies get the same requests at the same times.
The driver is the simulator's on the wall clock; the executor is the real one, loaded once. Figures
are measured in the engine, from arrival to commit, without HTTP.

"fcfs, simulated" and "bros, simulated" are the same loads in virtual time, where a step takes what
the profile of this machine predicts, with the noise of the real run of the policy if that is made
first: they show how far `bros simulate --noise --noise-correlation --slowdown` can be trusted.

The first minutes (--warm-up) are not like the rest: best-effort work gets all that the objectives
leave only after half a minute (docs/decisions/0022), and streams of `fcfs`, which take up to 100 s,
have hardly begun to decode. In 120 s that is about 4 % of the best-effort throughput.
Steps, suspended steps and lost time are those of the whole run.

Prompts are cut at --longest-prompt tokens (200): on two cores the prefill of a longer one takes, in
fp32, more than half of the TTFT objective even on an idle engine, and would measure the machine
instead of the policy. Run nothing else on the machine.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from harness import TimedExecutor, benchmark_parser, chosen, save, table_of
from rich.console import Console

from bros.bench.metrics import confidence_interval
from bros.core import grammars
from bros.core.clock import Clock, ManualClock, SystemClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo, Executor, StopRule
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, ServiceClass, Slo
from bros.engine.engine import Engine
from bros.engine.grammars import Grammars
from bros.executor.loader import load_executor
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model
from bros.executor.runner import ModelRunner
from bros.profiling.measuring import step_time_profile
from bros.profiling.profiles import profile_folders
from bros.scheduler.build import build_scheduler
from bros.scheduler.cost_model import CostModel
from bros.scheduler.scheduler import Scheduler
from bros.simulator.metrics import report_of, timeline_of
from bros.simulator.simulation import (
    Disturbance,
    SimExecutor,
    SimulatedRequest,
    Simulation,
    SimulationResult,
    load_of,
)
from bros.text.chat_format import ChatFormat
from bros.text.tokenizer import Tokenizer
from bros.text.tools import Tool, ToolUse
from bros.workload.arrivals import Arrival, BeLoad, PoissonLoad, Size, generator
from bros.workload.attainment import Attainment, Summary, gaps_s, judge

RT, BE = ServiceClass.RT, ServiceClass.BE
IN_FLIGHT = 16
GRAMMARS = "bros, grammars"
SIMULATED = ", simulated"
# (label, policy, real-time requests per second as a share of --rate, best-effort in flight)
RUNS = (
    ("RT alone", "bros", 1, 0),
    ("BE alone", "fcfs", 0, IN_FLIGHT),
    ("fcfs", "fcfs", 1, IN_FLIGHT),
    ("priority", "priority", 1, IN_FLIGHT),
    ("rr", "rr", 1, IN_FLIGHT),
    ("edf", "edf", 1, IN_FLIGHT),
    ("bros", "bros", 1, IN_FLIGHT),
    ("fcfs" + SIMULATED, "fcfs", 1, IN_FLIGHT),
    ("bros" + SIMULATED, "bros", 1, IN_FLIGHT),
    (GRAMMARS, "bros", 1, IN_FLIGHT),
)
MOST_LATE = 40
"""How many late requests are listed."""
TARGETS = "asked of bros: at least 99 %, p99 gap <= 0.3 s, BE >= 95 % of fcfs"


class WallClock(SystemClock):
    """The machine's clock, starting at 0; advancing it sleeps."""

    def __init__(self) -> None:
        self._start_s = super().now()

    def now(self) -> float:
        return super().now() - self._start_s

    def advance(self, seconds: float) -> None:
        time.sleep(seconds)


PERSON: dict[str, object] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": {"type": "integer", "minimum": 1000, "maximum": 2100},
        "field": {"enum": ["physics", "music", "sports"]},
        "remark": {"type": "string", "maxLength": 200},
    },
    "required": ["name", "born", "field", "remark"],
    "additionalProperties": False,
}


_FEWEST_TIMES = 20
"""With fewer steps, their noise is not estimated."""


class StepTime(NamedTuple):
    """A step on the engine's clock.

    seconds: what it took, also if it was suspended then.
    predicted_s: by the cost model, without corrections.
    whole: it neither was suspended nor continued a suspended one.
    """

    began_s: float
    seconds: float
    predicted_s: float
    whole: bool


class RecordedExecutor(TimedExecutor):
    """Keeps the times of steps. recording_s: what that took."""

    def __init__(self, inner: ModelRunner, model: CostModel, clock: Clock) -> None:
        super().__init__(inner)
        self._model = model
        self._clock = clock
        self.times: list[StepTime] = []
        self.recording_s = 0.0

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        began_s = self._clock.now()
        result = super().execute(plan, should_abort)
        began = time.perf_counter()
        seconds, predicted_s = self._clock.now() - began_s, self._model.seconds(load_of(plan))
        whole = isinstance(result, StepResult) and plan.chunks[-1].kept is None
        self.times.append(StepTime(began_s, seconds, predicted_s, whole))
        self.recording_s += time.perf_counter() - began
        return result

    def disturbance(self) -> Disturbance:
        """How the times of whole steps differ from the predictions; not at all if there are hardly
        any."""
        whole = [(step.seconds, step.predicted_s) for step in self.times if step.whole]
        if len(whole) < _FEWEST_TIMES:
            return Disturbance()
        measured, predicted = map(np.array, zip(*whole, strict=True))
        logs = np.log(measured / predicted)
        return Disturbance(
            noise=float(np.std(logs)),
            correlation=min(max(0.0, float(np.corrcoef(logs[:-1], logs[1:])[0, 1])), 0.99),
            slowdown=float(measured.sum() / predicted.sum()),
        )


class MixedEngine(Engine):
    """Gives a third of the requests a schema and a tenth a tool that they have to call.

    Outputs have the lengths that they have without: they are lists and calls without an end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        clock: WallClock,
        info: EngineInfo,
        files: ModelFiles,
    ) -> None:
        compiler = Grammars(files.folder, info, clock)
        super().__init__(scheduler, executor, clock, info, grammars=compiler)
        tools = (Tool("keep", parameters=PERSON, strict=True),)
        use = ToolUse(tools=tools, allowed=frozenset({"keep"}), required=True)
        calls = ChatFormat(Tokenizer.load(files.folder)).answer_rules(use, None)
        self._calls = grammars.lark(f"start: main\n{calls}")
        people = {"type": "array", "items": PERSON, "minItems": 1000}
        self._people = grammars.json_schema(people)
        for grammar in (self._calls, self._people):  # compiled before the run
            compiler.state(grammar, StopRule(frozenset(), 0, info.eos_token_ids[0]))

    def submit(self, request: EngineRequest) -> ServiceClass:
        number = int(request.request_id.rpartition("-")[2])
        grammar = self._people if number % 3 == 0 else self._calls if number % 10 == 1 else None
        if grammar is not None:
            sampling = request.sampling.with_changes(grammar=grammar)
            request = dataclasses.replace(request, sampling=sampling)
        return super().submit(request)


def load(
    config: EngineConfig, files: ModelFiles, report: Callable[[str], None]
) -> tuple[ModelRunner, EngineInfo, CostModel]:
    """The executor, its description, and its cost model on this machine."""
    executor, info = load_executor(config, files)
    folders = profile_folders(default_cache_dir())
    profile = step_time_profile(config, executor, info, SystemClock(), folders, report)
    return executor, dataclasses.replace(info, default_slo=config.default_slo), profile.model


def arrivals(
    rate: float, duration_s: float, seed: int, longest: int, burst: int = 1
) -> list[Arrival]:
    """Arrivals with the lengths of the paper's row and prompts cut at `longest` tokens.

    burst: requests that arrive together; `rate` remains the mean.
    """
    found = PoissonLoad(rate, "lmsys").arrivals(duration_s, seed)
    return [
        Arrival(
            found[number - number % burst].time_s,
            Size(min(size.prompt_tokens, longest), size.output_tokens),
        )
        for number, (_, size) in enumerate(found)
    ]


def figures(
    result: SimulationResult, slo: Slo, scheduling_s: float, times: Sequence[StepTime]
) -> dict[str, object]:
    """The figures of one run. times: of its steps, in order; none in virtual time."""
    report = report_of(result, slo)
    rt, be = report.by_class[RT], report.by_class[BE]
    rt_records = [
        record
        for record in result.records
        if record.service_class is RT and record.arrival_s >= result.warm_up_s
    ]
    late = [late_of(record, slo, result.end_s, times) for record in rt_records]
    gaps = Summary.of([gap for record in rt_records for gap in gaps_s(record.token_times_s)])
    stats = result.stats
    return {
        "rt": dataclasses.asdict(rt),
        "be": dataclasses.asdict(be),
        "num_late": sum(found is not None for found in late),
        "late": [found for found in late if found is not None][:MOST_LATE],
        "gap_p50_s": gaps.p50,
        "gap_p99_s": gaps.p99,
        "steps": report.steps,
        "mean_step_s": report.mean_step_s,
        "busy": report.busy,
        "scheduling_share": scheduling_s / result.end_s,
        "step_prediction_error": stats.step_error_s / stats.step_s if stats.predicted_s else None,
        "safety_factor": stats.safety_factor,
        "rare_factor": stats.rare_factor,
        "aborted_steps": stats.aborted_steps,
        "aborted_s": stats.aborted_s,
        "suspended_steps": stats.suspended_steps,
        "suspended_s": stats.suspended_s,
        "lost_s": stats.lost_s,
        "yielding": dataclasses.asdict(stats.yielding),
        "be_added_s": stats.be_added_s,
        "forced_tokens": stats.forced_tokens,
        "mask_wait_s": stats.mask_wait_s,
        "end_s": result.end_s,
        "kv_tokens": {
            "taken": stats.by_class[BE].kv_preempted,
            "copied": stats.by_class[BE].kv_copied,
            "restored": stats.by_class[BE].kv_restored,
        },
    }


def late_of(
    record: SimulatedRequest, slo: Slo, end_s: float, times: Sequence[StepTime]
) -> dict[str, object] | None:
    """A real-time request that missed its TTFT or TPOT objective, with the steps that ran before
    its first token: (seconds from its arrival to their begin, what they took, what was predicted).
    None if it did not.
    """
    judged = judge(timeline_of(record), slo, end_s)
    if judged.both_met is not False:
        return None
    arrival_s = record.arrival_s
    first_s = record.token_times_s[0] if record.token_times_s else end_s
    return {
        "arrival_s": record.arrival_s,
        "prompt_tokens": record.size.prompt_tokens,
        "received_tokens": len(record.token_times_s),
        "ttft_s": judged.ttft_s,
        "tpot_s": judged.tpot_s,
        "steps": [
            (step.began_s - arrival_s, step.seconds, step.predicted_s)
            for step in times
            if step.began_s < first_s and step.began_s + step.seconds > arrival_s
        ],
    }


def run(
    executor: ModelRunner | None,
    info: EngineInfo,
    model: CostModel,
    config: EngineConfig,
    found: list[Arrival],
    in_flight: int,
    seed: int,
    duration_s: float,
    warm_up_s: float = 0.0,
    files: ModelFiles | None = None,
    disturbance: Disturbance | None = None,
) -> dict[str, object]:
    """Run one policy: a new scheduler on the shared executor; without one, in virtual time.

    files: of the model, if some requests have grammars.
    disturbance: of steps in virtual time.
    """
    info = dataclasses.replace(info, policy=config.policy)
    scheduler = build_scheduler(config, info, model)
    clock: Any
    timed: Any
    if executor is None:
        clock = ManualClock()
        rng = generator(seed, "noise")
        timed = SimExecutor(model, clock, disturbance=disturbance, rng=rng)
    else:
        clock = WallClock()
        timed = RecordedExecutor(executor, model, clock)
    if files is None:
        engine = Engine(scheduler, timed, clock, info)
    else:
        engine = MixedEngine(scheduler, timed, clock, info, files)
    simulation = Simulation(
        engine,
        timed,
        clock,
        rt={"": found},
        be={"": BeLoad(in_flight)},
        seed=seed,
        duration_s=duration_s,
        warm_up_s=warm_up_s,
    )
    result = simulation.run()
    scheduling_s = result.end_s - result.idle_s - timed.busy_s
    times: Sequence[StepTime] = ()
    if executor is not None:
        scheduling_s -= timed.recording_s
        disturbance, times = timed.disturbance(), timed.times
    found_figures = figures(result, info.default_slo, scheduling_s, times)
    return found_figures | {"disturbance": dataclasses.asdict(disturbance or Disturbance())}


def show(results: dict[str, dict[str, object]], console: Console) -> None:
    base = results.get("fcfs", {}).get("be", {}).get("tokens_per_s")  # type: ignore[attr-defined]
    rows = []
    for label, result in results.items():
        rt, be = result["rt"], result["be"]
        assert isinstance(rt, dict) and isinstance(be, dict)
        rate = be["tokens_per_s"]
        rows.append(
            (
                label,
                rt["requests"],
                *(percent(rt[name]) for name in ("both_met", "ttft_met", "tpot_met")),
                at_least(rt["both_met"]),
                f"{rt['ttft_s']['p50']:.2f} / {rt['ttft_s']['p99']:.2f}" if rt["requests"] else "-",
                f"{result['gap_p99_s']:.3f}" if result["gap_p99_s"] else "-",
                f"{rate:.0f}" if rate else "-",
                f"{rate / base:.0%}" if rate and base else "-",
                f"{1e3 * result['mean_step_s']:.0f}",  # type: ignore[operator]
                f"{result['scheduling_share']:.2%}",
            )
        )
    headings = (
        "",
        "RT",
        "both %",
        "TTFT %",
        "TPOT %",
        "at least %",
        "TTFT p50 / p99 s",
        "gap p99 s",
    )
    headings += ("BE tok/s", "of fcfs", "step ms", "scheduling")
    console.print(table_of(f"hybrid load ({TARGETS})", headings, rows))
    decimals = {"arrival_s": 1, "prompt_tokens": 0, "received_tokens": 0, "ttft_s": 4, "tpot_s": 4}
    late = [
        (label, *("-" if missed[f] is None else f"{missed[f]:.{d}f}" for f, d in decimals.items()))
        for label, result in results.items()
        if label.startswith("bros")
        for missed in result["late"]  # type: ignore[attr-defined]
    ]
    if late:
        headings = ("", "arrival s", "prompt tokens", "received tokens", "TTFT s", "TPOT s")
        console.print(table_of("late real-time requests", headings, late))


def percent(share: dict[str, int]) -> str:
    met, decided = share.values()
    return f"{100 * met / decided:.1f}" if decided else "-"


def at_least(share: dict[str, int]) -> str:
    """The lower end of Wilson's 95 % interval."""
    interval = confidence_interval(Attainment(share["met"], share["decided"]))
    return "-" if interval is None else f"{100 * interval.low:.1f}"


def main() -> None:
    parser = benchmark_parser(__doc__, duration=5.0, only="fcfs;bros, grammars;bros, simulated")
    parser.add_argument("--duration", type=float, default=120.0, help="seconds per policy")
    parser.add_argument(
        "--warm-up",
        type=float,
        default=0.0,
        help="seconds of these that do not count, see above",
    )
    parser.add_argument("--rate", type=float, default=0.25, help="real-time requests per second")
    parser.add_argument(
        "--burst", type=int, default=1, help="real-time requests that arrive together"
    )
    parser.add_argument(
        "--longest-prompt", type=int, default=200, help="maximum prompt in tokens, see above"
    )
    parser.add_argument("--weights", default="auto", help="as for `bros serve`")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="labels, with semicolons between them")
    args = parser.parse_args()
    labels = [label for label, *_ in RUNS]
    wanted = chosen(parser, "--only", args.only, labels, ";") if args.only else labels
    console = Console()
    if not console.is_terminal:
        console.width = 110
    files = resolve_model(None, default_cache_dir(), console.print)
    config = EngineConfig(weights=args.weights, max_model_len=2048)
    executor, info, model = load(config, files, console.print)
    results = {}
    for label, policy, share, in_flight in RUNS:
        if label not in wanted:
            continue
        console.print(f"{label}: {args.duration:g} s", style="dim")
        rate = share * args.rate
        found = arrivals(rate, args.duration, args.seed, args.longest_prompt, args.burst)
        policy_config = dataclasses.replace(config, policy=policy)
        real = results.get(policy, {}).get("disturbance", {}) if SIMULATED in label else {}
        results[label] = run(
            None if SIMULATED in label else executor,
            info,
            model,
            policy_config,
            found,
            in_flight,
            args.seed,
            args.duration,
            args.warm_up,
            files if label == GRAMMARS else None,
            Disturbance(**real),
        )
    show(results, console)
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    save(args.json, {"settings": settings, "results": results})


if __name__ == "__main__":
    main()
