"""What each mechanism of the scheduler is worth: simulated with and without it, over many loads.

    python benchmarks/ablation.py [--json FILE] [--report FILE] [--mechanisms "a;b"] [--loads "a;b"]

Each mechanism (ablation_mechanisms.py) is left out alone, in each load (ablation_loads.py), with
the same seeds as the complete scheduler. Intervals (95 %) are Student's t over the differences of
the seeds. A mechanism is needed by a load if leaving it out costs there, beyond the interval:

    attainment    0.5 points of the real-time requests that meet all their objectives
    throughput    1 % of the tokens of best-effort work
    worst case    a tenth more of the p99 of a first token's time, of the gap between two tokens or
                  of a best-effort request's wait for its first token, of the mean slowdown of
                  streams by best-effort work, or of the mean time of a program; or 1 point of the
                  best-effort deadlines that are met

`--stored FILE` renders the report of stored figures, without a simulation.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ablation_loads import LOADS, simulate
from ablation_mechanisms import DELETED, MECHANISMS
from harness import benchmark_parser, chosen, environment, existing_file
from rich.console import Console

from bros.core.request import EngineRequest, ServiceClass
from bros.scheduler.admission import objectives
from bros.simulator.metrics import timeline_of
from bros.simulator.simulation import SimulatedRequest, SimulationResult
from bros.simulator.sweep import run_all
from bros.workload.attainment import (
    Attainment,
    Summary,
    gaps_s,
    judge,
)

FIRST_SEEDS, SEEDS = 3, 9
"""Seeds of all runs, and of those whose loss may be chance. If the run of the first seed is the
same without a mechanism, all are taken to be."""
WARM_UP = 0.1
"""Share of a run that is not counted in the throughput."""
ATTAINMENT_POINTS, THROUGHPUT_PERCENT, WORST_PERCENT, DEADLINE_POINTS = 0.5, 1.0, 10.0, 1.0
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160)
"""Quantiles (0.975) of Student's t with 1, 2, ... degrees of freedom."""

_LABELS = {"mechanism", "load"}

# ---- Running.


class Task(NamedTuple):
    """A mechanism that is left out of one load; None: the complete scheduler.

    digests: of the run of the complete scheduler with the first seed. If it is the same without the
        mechanism, the other seeds are left out.
    """

    mechanism: str | None
    load: str
    seeds: tuple[int, ...]
    duration_s: float | None = None
    digests: tuple[str, ...] = ()


def run(task: Task, progress: Callable[[float], None]) -> list[dict[str, Any]]:
    """The figures of each seed."""
    load = LOADS[task.load]
    duration_s = task.duration_s or load.duration_s
    found: list[dict[str, Any]] = []
    for number, seed in enumerate(task.seeds):
        progress(number / len(task.seeds))
        if task.mechanism is None:
            runs = simulate(load, seed, duration_s, WARM_UP * duration_s)
        else:
            mechanism = MECHANISMS[task.mechanism]
            with mechanism.left_out():
                runs = simulate(load, seed, duration_s, WARM_UP * duration_s, **mechanism.options)
        found.append(figures(task.load, *runs))
        if task.digests and [each["digest"] for each in found] == list(task.digests):
            break
    return found


def figures(
    load: str, result: SimulationResult, requests: Mapping[str, EngineRequest]
) -> dict[str, Any]:
    """The figures of one run. requests: those that were submitted, by id."""
    slo = LOADS[load].config().default_slo
    verdicts: list[bool | None] = []
    first_s: list[float] = []
    gaps: list[float] = []
    waits: list[float] = []
    slowdowns: list[float | None] = []
    be_tokens = 0
    since_s = result.warm_up_s
    deadlines: list[bool | None] = []
    programs: dict[str, tuple[float, float]] = {}  # first arrival, last end
    for record in result.records:
        request = requests.get(record.request_id)
        if request is None or request.prefill_only:
            continue
        if name := request.hints.program:
            end_s = record.token_times_s[-1] if record.finished else result.end_s
            since, until = programs.get(name, (record.arrival_s, end_s))
            programs[name] = (since, max(until, end_s))
        if request.service_class is ServiceClass.BE:
            first = record.token_times_s[0] if record.token_times_s else result.end_s
            waits.append(first - record.arrival_s)
            be_tokens += sum(at_s >= since_s for at_s in record.token_times_s)
            if record.token_times_s and first >= since_s:
                be_tokens += record.size.prompt_tokens
            deadlines.append(_meets_deadline(record, request, result.end_s))
            continue
        if request.hints.group is not None:
            continue  # only the end of the last member counts
        asked = objectives(request, ServiceClass.RT, slo, 0.0)
        judged = judge(timeline_of(record), asked, result.end_s)
        verdicts.append(judged.both_met)
        if judged.ttft_s is not None:
            first_s.append(judged.ttft_s)
        gaps += gaps_s(record.token_times_s)
        slowdowns.append(record.slowdown)
    return {
        "attainment": _percent(verdicts),
        "be_tokens_per_s": be_tokens / (result.end_s - since_s),
        "ttft_p99_s": Summary.of(first_s).p99,
        "gap_p99_s": Summary.of(gaps).p99,
        "be_wait_p99_s": Summary.of(waits).p99,
        "be_deadlines": _percent(deadlines),
        "slowdown": Summary.of([s for s in slowdowns if s is not None]).mean,
        "program_s": _mean_program_s(programs.values(), result.end_s / 2),
        "rt_requests": len(verdicts),
        "digest": result.digest()[:12],
    }


def _mean_program_s(programs: Iterable[tuple[float, float]], until_s: float) -> float | None:
    """Mean time of the programs that began until then; of unfinished ones, the time so far."""
    return Summary.of([end_s - began_s for began_s, end_s in programs if began_s < until_s]).mean


def _percent(verdicts: Sequence[bool | None]) -> float | None:
    share = Attainment.of(verdicts).value
    return None if share is None else 100.0 * share


def _meets_deadline(record: SimulatedRequest, request: EngineRequest, end_s: float) -> bool | None:
    due_s = request.slo.deadline_s
    if due_s is None:
        return None
    if record.finished:
        return record.token_times_s[-1] - record.arrival_s <= due_s
    return False if end_s - record.arrival_s > due_s else None


def measure(
    mechanisms: Sequence[str], loads: Sequence[str], seeds: Sequence[int],
    duration_s: float | None, jobs: int,
) -> dict[str, Any]:  # fmt: skip
    """All runs, and everything that determines them beside the code."""
    first, rest = tuple(seeds[:FIRST_SEEDS]), tuple(seeds[FIRST_SEEDS:])
    complete = _run_all([Task(None, load, tuple(seeds), duration_s) for load in loads], jobs)
    digests = {each["load"]: tuple(each["digest"][:1]) for each in complete}
    found = _run_all(
        [
            Task(mechanism, load, first, duration_s, digests[load])
            for load in loads
            for mechanism in mechanisms
        ],
        jobs,
    )
    results: dict[str, Any] = {
        "environment": environment(),
        "seeds": list(seeds),
        "loads": {name: LOADS[name].about for name in loads},
        "mechanisms": {
            name: [MECHANISMS[name].part, MECHANISMS[name].without] for name in mechanisms
        },
        "runs": [*complete, *found],
    }
    if rest:
        _extend(results, rest, duration_s, jobs)
    return results


def _run_all(tasks: Sequence[Task], jobs: int) -> list[dict[str, Any]]:
    """A record of each task; of runs that change nothing only the digest."""
    found = []
    for task, runs in zip(tasks, run_all(run, tasks, jobs), strict=True):
        record: dict[str, Any] = {"mechanism": task.mechanism, "load": task.load}
        lists = _by_figure(runs)
        same = lists["digest"] == list(task.digests)
        found.append(record | ({"digest": lists["digest"]} if same else lists))
    return found


def _extend(
    results: Mapping[str, Any], seeds: tuple[int, ...], duration_s: float | None, jobs: int
) -> None:
    """Run more seeds where a loss may be chance, of mechanisms that no load is known to need."""
    tasks = [Task(*pair, seeds, duration_s) for pair in sorted(_undecided(results))]
    more = {(each["mechanism"], each["load"]): each for each in _run_all(tasks, jobs)}
    for each in results["runs"]:
        added = more.get((each["mechanism"], each["load"]))
        if added is not None:
            each.update({name: each[name] + added[name] for name in added.keys() - _LABELS})


def _undecided(results: Mapping[str, Any]) -> set[tuple[str, str]]:
    """(mechanism, load) pairs."""
    verdicts = {name: judge_mechanism(results, name) for name in results["mechanisms"]}
    return {
        (name, load)
        for name, verdict in verdicts.items()
        if not verdict.needed
        for load in verdict.unsure
    }


def _by_figure(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    return {
        name: [float(f"{r[name]:.5g}") if isinstance(r[name], float) else r[name] for r in runs]
        for name in runs[0]
    }


# ---- Comparing.


@dataclass(frozen=True, slots=True)
class Change:
    """A mean change with its interval, in points or percent."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> Change:
        mean, count = statistics.fmean(differences), len(differences)
        if count == 1:
            return cls(mean, -math.inf, math.inf)
        t = _T[count - 2] if count - 2 < len(_T) else 2.0
        half = t * statistics.stdev(differences) / math.sqrt(count)
        return cls(mean, mean - half, mean + half)

    def is_loss(self, least: float) -> bool:
        """Whether it is a fall by `least` or more, beyond the interval."""
        return self.mean <= -least and self.high < 0.0

    def is_gain(self, least: float) -> bool:
        return self.mean >= least and self.low > 0.0


class Figure(NamedTuple):
    """A figure that is compared.

    least: change that counts.
    relative: compared in percent, else in points.
    rises: whether more is better.
    """

    name: str
    label: str
    least: float
    relative: bool
    rises: bool


FIGURES = (
    Figure("attainment", "attainment", ATTAINMENT_POINTS, False, True),
    Figure("be_tokens_per_s", "throughput", THROUGHPUT_PERCENT, True, True),
    Figure("ttft_p99_s", "p99 TTFT", WORST_PERCENT, True, False),
    Figure("gap_p99_s", "p99 gap", WORST_PERCENT, True, False),
    Figure("be_wait_p99_s", "p99 wait", WORST_PERCENT, True, False),
    Figure("slowdown", "slowdown", WORST_PERCENT, True, False),
    Figure("program_s", "programs", WORST_PERCENT, True, False),
    Figure("be_deadlines", "deadlines", DEADLINE_POINTS, False, True),
)


def change(figure: Figure, with_it: Mapping[str, Any], without: Mapping[str, Any]) -> Change | None:
    """The change by leaving a mechanism out; None if there is no such figure.

    Without the mechanism, only the first seeds may have run.
    """
    pairs = [
        (before, after)
        for before, after in zip(
            with_it.get(figure.name, ()), without.get(figure.name, ()), strict=False
        )  # figures that were stored may lack some
        if before is not None and after is not None and (before or not figure.relative)
    ]
    if not pairs:
        return None
    if figure.relative:
        return Change.of([100.0 * (after / before - 1.0) for before, after in pairs])
    return Change.of([after - before for before, after in pairs])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What leaving a mechanism out changes.

    needed: texts of losses.
    harmful: texts of gains.
    changes: load -> figure name -> change.
    same: loads in which nothing changes at all.
    unsure: loads with a loss that may be chance.
    """

    needed: list[str]
    harmful: list[str]
    changes: dict[str, dict[str, Change]]
    same: set[str]
    unsure: set[str]


def judge_mechanism(results: Mapping[str, Any], mechanism: str) -> Verdict:
    complete = {run["load"]: run for run in results["runs"] if run["mechanism"] is None}
    verdict = Verdict([], [], {}, set(), set())
    for run in results["runs"]:
        if run["mechanism"] != mechanism:
            continue
        load, before = run["load"], complete[run["load"]]
        if run["digest"] == before["digest"][: len(run["digest"])]:
            verdict.same.add(load)
            continue
        changes = verdict.changes[load] = {}
        for figure in FIGURES:
            found = change(figure, before, run)
            if found is None:
                continue
            changes[figure.name] = found
            unit = "%" if figure.relative else "points"
            text = f"{load}: {figure.label} {found.mean:+.1f} {unit}"
            worse, better = found.is_loss(figure.least), found.is_gain(figure.least)
            if not figure.rises:
                worse, better = better, worse
            if worse:
                verdict.needed.append(text)
            elif better:
                verdict.harmful.append(text)
            elif (found.mean if figure.rises else -found.mean) <= -figure.least:
                verdict.unsure.add(load)
    return verdict


# ---- The report.


def report(results: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a Markdown page."""
    loads, seeds = list(results["loads"]), len(results["seeds"])
    first = min(FIRST_SEEDS, seeds)
    verdicts = {name: judge_mechanism(results, name) for name in results["mechanisms"]}
    yield "# Ablation of the scheduler"
    yield ""
    yield (
        f"Each mechanism is left out alone, in {len(loads)} loads with {first} seeds each; with "
        f"{seeds} where a loss may be chance of a mechanism that no load is known to need. "
        "Changes are those by leaving it out. A loss counts from "
        f"{ATTAINMENT_POINTS} points of attainment, {THROUGHPUT_PERCENT:g} % of best-effort "
        f"throughput, {WORST_PERCENT:g} % of a p99 (first token, gap between tokens, a best-effort "
        f"request's wait) or {DEADLINE_POINTS:g} point of best-effort deadlines on, if the 95 % "
        "interval over the seeds does not contain 0. Written by `benchmarks/ablation.py`."
    )
    yield ""
    yield "| load | what arrives | attainment % | BE tokens/s | p99 TTFT s | p99 gap s |"
    yield "|---|---|---|---|---|---|"
    for run in results["runs"]:
        if run["mechanism"] is None:
            shown = (_mean(run[f.name]) for f in FIGURES[:4])
            yield f"| {run['load']} | {results['loads'][run['load']]} | {' | '.join(shown)} |"
    yield ""
    yield "## Which loads need it"
    yield ""
    yield (
        "A mechanism that no load needs is deleted, unless it is named here why it stays, or until "
        "another run confirms it."
    )
    yield ""
    yield "| mechanism | part | without it | costs | gains |"
    yield "|---|---|---|---|---|"
    for name, verdict in verdicts.items():
        part, without = results["mechanisms"][name]
        kept = _why_kept(name, needed=bool(verdict.needed))
        costs = "; ".join([*verdict.needed, kept]).removesuffix("; ")
        yield f"| {name} | {part} | {without} | {costs} | {'; '.join(verdict.harmful)} |"
    yield ""
    yield "Deleted, with what leaving it out changed in the scheduler that had it:"
    yield ""
    yield "| mechanism | without it | costs | gains |"
    yield "|---|---|---|---|"
    for row in DELETED:
        yield f"| {' | '.join(row)} |"
    for title, names in (
        ("Attainment (points) / best-effort throughput (%)", ("attainment", "be_tokens_per_s")),
        ("p99 of first tokens / of gaps between tokens (%)", ("ttft_p99_s", "gap_p99_s")),
    ):
        yield ""
        yield f"## {title}"
        yield ""
        yield "`=`: the runs are the same, token by token; bold: beyond the 95 % interval."
        yield ""
        yield f"| without | {' | '.join(loads)} |"
        yield "|---" * (len(loads) + 1) + "|"
        for name, verdict in verdicts.items():
            cells = [_cell(verdict, load, names) for load in loads]
            yield f"| {name} | {' | '.join(cells)} |"


def _why_kept(name: str, *, needed: bool) -> str:
    """Why a mechanism stays although no load needs it; nothing if one does."""
    if needed:
        return ""
    mechanism = MECHANISMS.get(name)
    return f"nothing; it stays: {mechanism.kept}" if mechanism and mechanism.kept else "nothing"


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.fmean(known):.3g}" if known else "-"


def _cell(verdict: Verdict, load: str, names: Sequence[str]) -> str:
    if load in verdict.same:
        return "="
    found = [verdict.changes.get(load, {}).get(name) for name in names]
    return " / ".join("-" if each is None else _shown(each) for each in found)


def _shown(found: Change) -> str:
    text = f"{found.mean:+.1f}"
    return f"**{text}**" if found.low > 0.0 or found.high < 0.0 else text


def as_json(results: Mapping[str, Any]) -> str:
    """JSON with one line per run, so that diffs show the changed runs."""
    parts = []
    for name, value in results.items():
        text = json.dumps(value, indent=2).replace("\n", "\n  ")
        if name == "runs":
            text = "[\n" + ",\n".join("    " + json.dumps(each) for each in value) + "\n  ]"
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


_QUICK = {
    "seeds": 1, "duration": 2.0, "loads": "cpu", "mechanisms": "guaranteed share", "jobs": 1,
}  # fmt: skip


def main() -> None:
    parser = benchmark_parser(__doc__, **_QUICK)
    parser.add_argument("--report", type=Path, metavar="FILE", help="where to save the report")
    parser.add_argument("--stored", type=existing_file, metavar="FILE", help="figures to report")
    parser.add_argument(
        "--mechanisms", default=";".join(MECHANISMS), help="names, separated by semicolons"
    )
    parser.add_argument("--loads", default=";".join(LOADS), help="names, separated by semicolons")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="most seeds of a run")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--duration", type=float, help="virtual seconds of each run")
    parser.add_argument("--jobs", type=int, default=2, help="parallel simulations")
    args = parser.parse_args()
    if args.stored:
        results = json.loads(args.stored.read_text())
    else:
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        mechanisms = []
        if args.mechanisms:
            mechanisms = chosen(parser, "--mechanisms", args.mechanisms, MECHANISMS, ";")
        loads = chosen(parser, "--loads", args.loads, LOADS, ";")
        results = measure(mechanisms, loads, list(seeds), args.duration, args.jobs)
    console = Console(soft_wrap=True)
    for name in results["mechanisms"]:
        verdict = judge_mechanism(results, name)
        console.print(f"{name}: {'; '.join(verdict.needed) or 'nothing'}", highlight=False)
    if args.json and not args.stored:
        args.json.write_text(as_json(results))
    if args.report:
        args.report.write_text("\n".join(report(results)) + "\n")


if __name__ == "__main__":
    main()
