"""The shape of figures 10 and 11 on the real engine, measured by `bros bench` over HTTP.

The embedded model in fp32 on this machine, which runs the server and the client. Two cores can
carry this load: LMSYS lengths with prompts cut at 200 tokens (the prefill of a longer one takes
more than half of the TTFT objective even on an idle engine), and 16 best-effort requests in flight.
Run nothing else on the machine. The full report of `bros bench` stays in build/.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure
from paper_common import ROOT, Options, Part, Rendering, Results, Span, rounded, rt_figures
from paper_drawing import (
    BE_TOKENS,
    LATENCY,
    STYLES,
    TPOT,
    TTFT,
    curves,
    head,
    legend,
    new_figure,
    percent,
    row,
    runs_of,
    scale,
    share,
)

from bros.bench.client import Outcome
from bros.bench.results import BenchResult, ScenarioResult

FULL, QUICK = Span(120.0, 20.0), Span(30.0, 5.0)
RATES_FULL, RATES_QUICK = "0.1,0.2,0.3", "0.2"
POLICIES = "fcfs,rr,bros"


def measure(options: Options, span: Span) -> dict[str, Any]:
    """Run `bros bench` and return its figures. Raises CalledProcessError if it fails."""
    command = command_line(options, span)
    print("$ bros", *command)
    subprocess.run([sys.executable, "-m", "bros", *command], cwd=ROOT, check=True)
    text = (ROOT / command[-1] / "result.json").read_text(encoding="utf-8")
    results = BenchResult.from_json(text).results
    runs = [run_of(result) for result in results]
    return {
        "environment": dataclasses.asdict(results[0].command.environment),
        "command": command,
        "runs": [run for run in runs if run["rate"] is not None],
        "best_effort_alone": [run for run in runs if run["rate"] is None],
    }


def command_line(options: Options, span: Span) -> list[str]:
    """The arguments of bros. S1 is `fcfs`, S2 best-effort load alone, S3 the other policies."""
    flags = {
        "--policies": POLICIES,
        "--scenarios": "S1,S2,S3",
        "--rates": RATES_QUICK if options.quick else RATES_FULL,
        "--rt": "lmsys",
        "--in-flight": "16",
        "--longest-prompt": "200",
        "--duration": f"{span.duration_s:g}",
        "--warm-up": f"{span.warm_up_s:g}",
        "--weights": "fp32",
        "--max-model-len": "2048",
        "--seed": str(options.seed),
        "--out": "build/paper_bench_quick" if options.quick else "build/paper_bench",
    }
    return ["bench", *(part for flag in flags.items() for part in flag)]


def run_of(result: ScenarioResult) -> dict[str, Any]:
    """The record of a run, with the field names of simulated runs."""
    rt, be = result.rt, result.be
    return {
        "policy": result.policy,
        "rate": result.rt_rate,
        **rt_figures(rt),
        "rt_finished": rt.outcomes[Outcome.COMPLETED],
        "normalized_latency_s": rounded(rt.normalized_latency_s.mean),
        "be_requests_per_s": rounded(be.requests_per_s),
        "be_tokens_per_s": rounded(be.prompt_tokens_per_s + be.output_tokens_per_s),
        "rt_digest": result.rt_digest[:16],
        "be_digest": result.be_digest[:16],
    }


def render(results: Results) -> Rendering:
    machine = results["environment"]
    title = f"The real engine on {machine['cores']} cores of {machine['cpu']}, LMSYS lengths"
    blocks = {
        "command": "```console\nbros " + " ".join(results["command"]) + "\n```",
        "table": "\n".join(_table(results)),
    }
    return Rendering(blocks, {"hybrid": (title, _plot(results, title))})


def _plot(results: Results, title: str) -> Figure:
    figure = new_figure(title, width=9, height=6)
    metrics = (LATENCY, TTFT, TPOT, BE_TOKENS)
    axes = figure.subplots(2, 2, sharex=True)
    for ax, metric in zip(axes.flat, metrics, strict=True):
        curves(ax, results["runs"], metric)
        ax.set_ylabel(metric.label)
    for run in results["best_effort_alone"]:
        axes.flat[-1].axhline(
            run["be_tokens_per_s"], color="#CC79A7", linestyle="-.", label="best-effort alone"
        )
    for ax, metric in zip(axes.flat, metrics, strict=True):
        scale(ax, metric)
    for ax in axes[-1]:
        ax.set_xlabel("real-time requests/s")
    legend(figure, *axes.flat)
    return figure


def _table(results: Results) -> Iterator[str]:
    yield from head(
        "req/s", "policy", "normalized latency s", "TTFT in time", "p50 / p99 s", "TPOT in time",
        "p50 / p99 s", "both in time", "BE req/s", "BE tokens/s", "of BE alone",
    )  # fmt: skip
    alone = results["best_effort_alone"][0]["be_tokens_per_s"]
    for rate in dict.fromkeys(run["rate"] for run in results["runs"]):
        for policy in STYLES:
            for run in runs_of(results["runs"], policy=policy):
                if run["rate"] == rate:
                    yield row(f"{rate:g}", policy, *_cells(run, alone))


def _cells(run: Mapping[str, Any], alone: float) -> Iterator[str]:
    yield _number(run["normalized_latency_s"])
    for name in ("ttft", "tpot"):
        met, decided = run[f"{name}_met"]
        yield f"{met} of {decided}"
        yield " / ".join(_number(run[f"{name}_{rank}_s"]) for rank in ("p50", "p99"))
    yield percent(share(run["both_met"]))
    yield f"{run['be_requests_per_s']:.2f}"
    yield f"{run['be_tokens_per_s']:.0f}"
    yield percent(run["be_tokens_per_s"] / alone, 0)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


PART = Part(
    "real", "10 and 11, measured", "25 min, with nothing else on the machine", FULL, QUICK, measure,
    render,
)  # fmt: skip
