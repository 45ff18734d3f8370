"""Shared by the parts of the BROS paper's reproduction: models, policies, simulated runs, files.

A part measures one or two of the paper's figures. It stores its measurements as JSON and renders
tables and plots from that file alone, so that the page can be rewritten without new measurements.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bros.bench.metrics import ClassMetrics
from bros.bench.results import environment
from bros.cli.simulate_tables import progress_bar
from bros.core.clock import SystemClock
from bros.core.config import MAX_RT_SLOWDOWN, EngineConfig
from bros.core.request import ServiceClass
from bros.profiling.profiles import Profile
from bros.simulator.metrics import ClassReport, Report
from bros.simulator.simulation import SimulatedScenario, device_of, read_profile
from bros.simulator.sweep import run_all, run_scenario
from bros.workload.arrivals import BeLoad, PoissonLoad

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {
    "2x-a100-40g/opt-13b-fp16": "OPT-13B, 2x A100 40 GB",
    "4x-a100-40g/opt-30b-fp16": "OPT-30B, 4x A100 40 GB",
    "8x-a100-80g/llama-3-70b-fp16": "Llama-3-70B, 8x A100 80 GB",
}
"""Analytic profile (analytic_profiles.py) -> name in tables and plots."""
LENGTHS = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
NUM_RATES = 5
BE_IN_FLIGHT = 256
_COMMON = EngineConfig(max_num_seqs=512, max_batch_tokens=2048, max_queue=100_000)
_PAPER: dict[str, Any] = {
    "packing": "paper",
    "late": "edf",
    "batch_growth": "additive",
    "rt_slowdown": MAX_RT_SLOWDOWN,
}
POLICIES: dict[str, EngineConfig] = {
    "fcfs": dataclasses.replace(_COMMON, policy="fcfs"),
    "rr": dataclasses.replace(_COMMON, policy="rr"),
    # The paper's RR runs whole prompts without a token budget.
    "rr (no budget)": dataclasses.replace(_COMMON, policy="rr", max_batch_tokens=1 << 20),
    "bros": _COMMON,
    "bros (paper)": dataclasses.replace(_COMMON, **_PAPER),
}

Results = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """quick: a short run that only tests the program. jobs: parallel simulations."""

    quick: bool = False
    jobs: int = 2
    seed: int = 1

    @property
    def models(self) -> list[str]:
        return list(MODELS)[: 1 if self.quick else None]


@dataclass(frozen=True, slots=True)
class Span:
    """Duration of a run, and the warm-up at its start that is not measured."""

    duration_s: float
    warm_up_s: float


@dataclass(frozen=True, slots=True)
class Setting:
    """profile: key of MODELS. lengths: key of LENGTHS."""

    profile: str
    lengths: str


@dataclass(frozen=True, slots=True)
class Case:
    """One simulated run.

    policy: key of POLICIES.
    rate: real-time requests per second.
    config: replaces the policy's options.
    """

    setting: Setting
    policy: str
    rate: float
    be_in_flight: int = BE_IN_FLIGHT
    config: EngineConfig | None = None

    def scenario(self, span: Span, seed: int) -> SimulatedScenario:
        return SimulatedScenario(
            config=self.config or POLICIES[self.policy],
            device=device_of(stored_profile(self.setting.profile), None),
            rt=PoissonLoad(self.rate, self.setting.lengths),
            be=BeLoad(self.be_in_flight, batches=True),
            seed=seed,
            duration_s=span.duration_s,
            warm_up_s=span.warm_up_s,
        )

    @property
    def labels(self) -> dict[str, Any]:
        """The fields that identify this run among the records."""
        return {"policy": self.policy, "rate": self.rate, **dataclasses.asdict(self.setting)}


@dataclass(frozen=True, slots=True)
class Rendering:
    """A part on the page. blocks: name -> Markdown. plots: name -> (caption, figure)."""

    blocks: Mapping[str, str]
    plots: Mapping[str, tuple[str, Figure]]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the reproduction.

    name: of its files and of its placeholders in the page.
    figures: numbers of the paper's figures.
    takes: human-readable duration of the full measurement.
    full, quick: duration of each run, and with --quick.
    measure: returns all runs, and everything that determines them.
    render: renders the stored results.
    """

    name: str
    figures: str
    takes: str
    full: Span
    quick: Span
    measure: Callable[[Options, Span], dict[str, Any]]
    render: Callable[[Results], Rendering]

    def run(self, options: Options) -> dict[str, Any]:
        """The results, which are stored as JSON with one line per list element."""
        began = time.perf_counter()
        span = self.quick if options.quick else self.full
        found = self.measure(options, span)
        wall_s = round(time.perf_counter() - began, 1)
        return {**provenance(span, options), **found, "wall_s": wall_s}

    def path(self, folder: Path) -> Path:
        return folder / f"paper_{self.name}.json"


def stored_profile(name: str) -> Profile:
    return read_profile(name, [ROOT / "profiles"])


def settings(options: Options) -> list[Setting]:
    return [Setting(profile, lengths) for lengths in LENGTHS for profile in options.models]


def simulate(
    text: str, cases: Sequence[Case], span: Span, options: Options
) -> list[dict[str, Any]]:
    """One record per case, in their order. text: label of the progress bar."""
    scenarios = [case.scenario(span, options.seed) for case in cases]
    with progress_bar(len(scenarios), text) as on_progress:
        reports = run_all(run_scenario, scenarios, options.jobs, on_progress)
    return [{**case.labels, **figures(report)} for case, report in zip(cases, reports, strict=True)]


def figures(report: Report) -> dict[str, Any]:
    """The record of a simulated run."""
    rt, be = report.by_class[ServiceClass.RT], report.by_class[ServiceClass.BE]
    return {
        **rt_figures(rt),
        "rt_finished": rt.finished,
        "normalized_latency_s": rounded(rt.normalized_latency_s),
        "rt_tokens_per_s": rounded(rt.tokens_per_s),
        "be_requests_per_s": rounded(be.requests_per_s),
        "be_tokens_per_s": rounded(be.tokens_per_s),
        "rt_preemptions": rt.preemptions,
        "be_preemptions": be.preemptions,
        "mean_step_s": rounded(report.mean_step_s),
        "busy": rounded(report.busy),
        "digest": report.digest[:16],
    }


def rt_figures(rt: ClassReport | ClassMetrics) -> dict[str, Any]:
    """Figures of real-time requests, simulated or not. Shares are [met, decided]."""
    found: dict[str, Any] = {"rt_requests": rt.requests}
    for name, summary in (("ttft", rt.ttft_s), ("tpot", rt.tpot_s)):
        found[f"{name}_p50_s"] = rounded(summary.p50)
        found[f"{name}_p99_s"] = rounded(summary.p99)
    for name in ("ttft_met", "tpot_met", "both_met", "tokens_on_time"):
        share = getattr(rt, name)
        found[name] = [share.met, share.decided]
    return {**found, "rt_requests_per_s": rounded(rt.requests_per_s)}


def rounded(value: float | None) -> float | None:
    """Five significant digits."""
    return None if value is None else float(f"{value:.5g}")


def even_rates(highest: float) -> list[float]:
    """NUM_RATES even steps up to `highest`, in requests per second."""
    return [round(highest * i / NUM_RATES, 3) for i in range(1, NUM_RATES + 1)]


def provenance(span: Span, options: Options) -> dict[str, Any]:
    """The environment, the seed and the duration of the runs."""
    return {
        "environment": dataclasses.asdict(environment(SystemClock())),
        "seed": options.seed,
        **dataclasses.asdict(span),
    }


def as_text(results: Results) -> str:
    """JSON with one line per run, so that diffs show the changed runs."""
    parts = []
    for name, value in results.items():
        if isinstance(value, list):
            lines = ",\n".join("    " + json.dumps(element) for element in value)
            text = f"[\n{lines}\n  ]" if lines else "[]"
        else:
            text = json.dumps(value, indent=2).replace("\n", "\n  ")
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
