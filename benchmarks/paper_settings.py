"""The set-ups of the BROS paper (section 7), simulated with the scheduler of this engine.

    python benchmarks/paper_settings.py [--duration 900] [--warm-up 300] [--jobs 2] [--out FOLDER]

Three models, two kinds of chats, five rates, the policies side by side on the same requests.
Step times come from analytic profiles (benchmarks/analytic_profiles.py): nothing here was measured
on a GPU. Writes paper_settings.json, from which paper_report.py makes the tables and plots.

Rates are not chosen by hand. The highest one of a model and a kind of chats is the highest
multiple of RATE_STEP, up to the paper's 15 requests per second, at which `bros` still
has the first token of 99 % in time under the full best-effort load; beyond it real-time work
alone comes close to what the device can do. The others divide it evenly.

Every load lasts, so a policy that puts real-time work off has to do it in the end. How long it
can put it off shows for minutes at the beginning, which therefore does not count (--warm-up).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import platform
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paper_report
from rich.console import Console
from rich.progress import Progress

from bros import __version__
from bros.core.config import EngineConfig
from bros.core.request import ServiceClass
from bros.scheduler.profiles import Profile
from bros.simulator.build import Scenario
from bros.simulator.devices import device_of, read_profile
from bros.simulator.metrics import Report, Share
from bros.simulator.sweep import Progress as Told
from bros.simulator.sweep import run_sweep
from bros.simulator.workload import RT_SIZES, BeLoad, PoissonLoad

ROOT = Path(__file__).resolve().parents[1]
MODELS = (
    "2x-a100-40g/opt-13b-fp16",
    "4x-a100-40g/opt-30b-fp16",
    "8x-a100-80g/llama-3-70b-fp16",
)
RATE_STEP, HIGHEST_RATE, NUM_RATES = 0.5, 15.0, 5
TTFT_ASKED = 0.99
BE_IN_FLIGHT = 256
COMMON = EngineConfig(max_num_seqs=512, max_batch_tokens=2048, max_queue=100_000)
_PAPER: dict[str, Any] = {"packing": "paper", "late": "edf", "batch_growth": "additive"}
POLICIES: dict[str, EngineConfig] = {
    "fcfs": dataclasses.replace(COMMON, policy="fcfs"),
    "rr": dataclasses.replace(COMMON, policy="rr"),
    # The paper's RR runs whole prompts and knows no token budget.
    "rr (no budget)": dataclasses.replace(COMMON, policy="rr", max_batch_tokens=1 << 20),
    "bros": COMMON,
    "bros (paper)": dataclasses.replace(COMMON, **_PAPER),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """A model on its machine, and a kind of chats (key of RT_SIZES)."""

    profile: str
    lengths: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What is the same in all runs."""

    duration_s: float
    warm_up_s: float
    seed: int
    jobs: int


def highest_passing(verdicts: Mapping[int, bool], count: int) -> tuple[int, int | None]:
    """Bisection on 1..count: (highest known to pass or 0, next one to try or None at the end)."""
    passed = max((n for n, good in verdicts.items() if good), default=0)
    failed = min((n for n, good in verdicts.items() if not good), default=count + 1)
    if failed <= passed + 1:
        return passed, None
    return passed, count if not verdicts else (passed + failed) // 2


def even_rates(highest: float) -> list[float]:
    """NUM_RATES even steps up to `highest`, in requests per second."""
    return [round(highest * i / NUM_RATES, 3) for i in range(1, NUM_RATES + 1)]


class Runner:
    """Builds scenarios and runs them on `jobs` processes."""

    def __init__(self, options: Options, profiles: Mapping[str, Profile]) -> None:
        self._options = options
        self._profiles = profiles

    def run(
        self,
        text: str,
        wanted: Sequence[tuple[Setting, str, float]],
        be_in_flight: int = BE_IN_FLIGHT,
    ) -> list[dict[str, Any]]:
        """One record per (setting, policy's label, requests per second), in their order."""
        be = BeLoad(be_in_flight, batches=True)
        scenarios = [
            Scenario(
                config=POLICIES[policy],
                device=device_of(self._profiles[setting.profile], None),
                rt=PoissonLoad(rate, setting.lengths),
                be=be,
                seed=self._options.seed,
                duration_s=self._options.duration_s,
                warm_up_s=self._options.warm_up_s,
            )
            for setting, policy, rate in wanted
        ]
        with progress(text, len(scenarios)) as told:
            reports = run_sweep(scenarios, self._options.jobs, told)
        return [
            {"policy": policy, "rate": rate, **dataclasses.asdict(setting), **figures(report)}
            for (setting, policy, rate), report in zip(wanted, reports, strict=True)
        ]

    def find_highest(
        self, settings: Sequence[Setting]
    ) -> tuple[dict[Setting, float], list[dict[str, Any]]]:
        """Highest rate of each setting, and the runs it took to find them.

        Raises RuntimeError if a setting cannot even have the lowest one.
        """
        count = round(HIGHEST_RATE / RATE_STEP)
        verdicts: dict[Setting, dict[int, bool]] = {setting: {} for setting in settings}
        tried: list[dict[str, Any]] = []
        while True:
            rounds = [
                (setting, step)
                for setting, known in verdicts.items()
                if (step := highest_passing(known, count)[1]) is not None
            ]
            if not rounds:
                break
            wanted = [(setting, "bros", step * RATE_STEP) for setting, step in rounds]
            records = self.run("finding rates", wanted)
            tried += records
            for (setting, step), record in zip(rounds, records, strict=True):
                verdicts[setting][step] = paper_report.share(record["ttft_met"]) >= TTFT_ASKED
        found = {s: highest_passing(known, count)[0] * RATE_STEP for s, known in verdicts.items()}
        for setting, rate in found.items():
            if not rate:
                raise RuntimeError(f"{setting} is too much at {RATE_STEP} requests per second")
        return found, tried


def figures(report: Report) -> dict[str, Any]:
    """What is kept of a run. Shares as [met, decided]; times in seconds."""
    rt, be = report.by_class[ServiceClass.RT], report.by_class[ServiceClass.BE]

    def counts(share: Share) -> list[int]:
        return [share.met, share.decided]

    return {
        "rt_requests": rt.requests,
        "rt_finished": rt.finished,
        "normalized_latency_s": rounded(rt.normalized_latency_s),
        "ttft_p50_s": rounded(rt.ttft_s.p50),
        "ttft_p99_s": rounded(rt.ttft_s.p99),
        "tpot_p50_s": rounded(rt.tpot_s.p50),
        "tpot_p99_s": rounded(rt.tpot_s.p99),
        "ttft_met": counts(rt.ttft_met),
        "tpot_met": counts(rt.tpot_met),
        "both_met": counts(rt.both_met),
        "tokens_on_time": counts(rt.tokens_on_time),
        "rt_tokens_per_s": rounded(rt.tokens_per_s),
        "be_requests_per_s": rounded(be.requests_per_s),
        "be_tokens_per_s": rounded(be.tokens_per_s),
        "rt_preemptions": rt.preemptions,
        "be_preemptions": be.preemptions,
        "mean_step_s": rounded(report.mean_step_s),
        "busy": rounded(report.busy),
        "digest": report.digest[:16],
    }


def rounded(value: float | None) -> float | None:
    """Five significant digits."""
    return None if value is None else float(f"{value:.5g}")


@contextmanager
def progress(text: str, runs: int) -> Iterator[Told]:
    """A bar on stderr while the block runs, if that is a terminal."""
    shares = [0.0] * runs
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(text, total=runs)

        def told(index: int, share: float) -> None:
            shares[index] = share
            bar.update(task, completed=sum(shares))

        yield told


def commit() -> str:
    """Of the package and the profiles, with a plus if they were changed since."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], capture_output=True, text=True, check=False, cwd=ROOT
        )
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", "bros", "profiles")
    return git("rev-parse", "HEAD") + ("+" if changed else "")


def measure(options: Options) -> dict[str, Any]:
    """All runs, and everything that determines them."""
    began = time.perf_counter()
    profiles = {name: read_profile(name, [ROOT / "profiles"]) for name in MODELS}
    runner = Runner(options, profiles)
    settings = [Setting(profile, lengths) for lengths in RT_SIZES for profile in MODELS]
    highest, tried = runner.find_highest(settings)
    wanted = [
        (setting, policy, rate)
        for setting in settings
        for policy in POLICIES
        for rate in even_rates(highest[setting])
    ]
    runs = runner.run("simulating", wanted)
    top = [(setting, "bros", highest[setting]) for setting in settings]
    alone = runner.run("real-time work alone", top, be_in_flight=0)
    return {
        "bros": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "duration_s": options.duration_s,
        "warm_up_s": options.warm_up_s,
        "seed": options.seed,
        "best_effort": dataclasses.asdict(BeLoad(BE_IN_FLIGHT, batches=True)),
        "real_time": {name: dataclasses.asdict(sizes) for name, sizes in RT_SIZES.items()},
        "policies": {label: dataclasses.asdict(config) for label, config in POLICIES.items()},
        "profiles": {
            name: {"kind": profile.kind, "kv_capacity_tokens": profile.kv_capacity_tokens}
            for name, profile in profiles.items()
        },
        "wall_s": round(time.perf_counter() - began, 1),
        "runs": runs,
        "real_time_alone": alone,
        "finding_rates": tried,
    }


def as_text(results: Mapping[str, Any]) -> str:
    """JSON with one line per run, so that changes of a run are changes of a line."""
    lists = ("runs", "real_time_alone", "finding_rates")
    head = json.dumps({k: v for k, v in results.items() if k not in lists}, indent=2)
    parts = [head.removesuffix("\n}")]
    for name in lists:
        lines = ",\n".join("    " + json.dumps(run) for run in results[name])
        parts.append(f'  "{name}": [\n{lines}\n  ]')
    return ",\n".join(parts) + "\n}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--duration", type=float, default=900.0, help="seconds simulated per run")
    parser.add_argument(
        "--warm-up", type=float, default=300.0, help="how many of them not to count"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    options = Options(
        duration_s=args.duration, warm_up_s=args.warm_up, seed=args.seed, jobs=args.jobs
    )
    results = measure(options)
    path = args.out / "paper_settings.json"
    path.write_text(as_text(results))
    print(f"saved {path}: {len(results['runs'])} runs in {results['wall_s']:.0f} s")
    paper_report.write(results, args.out)


if __name__ == "__main__":
    main()
