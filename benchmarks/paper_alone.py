"""Figure 12: real-time requests alone, `bros` against `fcfs` (a stand-in for vLLM), simulated.

There is no best-effort load, as in the paper.

Rates are relative to the capacity of the device: the requests per second that `fcfs` finishes under
overload (OFFERED). They exceed the capacity, because below it policies hardly differ. Runs last ten
minutes, as in the paper. The length matters: beyond the capacity the queue grows until the end of
the run, and the latency with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from paper_common import (
    LENGTHS,
    MODELS,
    Case,
    Options,
    Part,
    Rendering,
    Results,
    Setting,
    Span,
    settings,
    simulate,
)
from paper_drawing import (
    LATENCY,
    RT_RATE,
    TTFT,
    Run,
    head,
    mean,
    model_grids,
    percent,
    row,
    runs_of,
    share,
)

Pair = tuple[Run, Run]
"""(run under `fcfs`, run under `bros`) of the same load."""

POLICIES = ("fcfs", "bros")
SHARES = (0.6, 0.75, 0.9, 1.05, 1.2)
OFFERED = 60.0
FULL, QUICK = Span(600.0, 0.0), Span(90.0, 0.0)
CAPACITY_FULL, CAPACITY_QUICK = Span(400.0, 150.0), Span(90.0, 45.0)


def measure(options: Options, span: Span) -> dict[str, Any]:
    overload = [Case(setting, "fcfs", OFFERED, be_in_flight=0) for setting in settings(options)]
    swamped = simulate(
        "finding capacities", overload, CAPACITY_QUICK if options.quick else CAPACITY_FULL, options
    )
    cases = [
        Case(Setting(run["profile"], run["lengths"]), policy, rate, be_in_flight=0)
        for run in swamped
        for policy in POLICIES
        for rate in rates_up_to(run["rt_requests_per_s"])
    ]
    return {
        "shares": SHARES,
        "runs": simulate("real-time work alone", cases, span, options),
        "swamped": swamped,
    }


def rates_up_to(capacity: float) -> list[float]:
    """SHARES of the capacity, in requests per second."""
    return [round(part * capacity, 2) for part in SHARES]


def render(results: Results) -> Rendering:
    pairs = _pairs(results)
    tables = {"table": _table(pairs), "runs": _run_table(pairs)}
    plots = model_grids(results["runs"], (LATENCY, RT_RATE, TTFT), "real-time requests alone")
    return Rendering({name: "\n".join(lines) for name, lines in tables.items()}, plots)


def _pairs(results: Results) -> list[tuple[float, Pair]]:
    """(load as a share of the capacity, (fcfs, bros)) of each load."""
    found: list[tuple[float, Pair]] = []
    for lengths in LENGTHS:
        for profile in MODELS:
            runs = runs_of(results["runs"], profile=profile, lengths=lengths)
            sides = [runs_of(runs, policy=policy) for policy in POLICIES]
            found += zip(results["shares"], zip(*sides, strict=True), strict=False)
    return found


def _table(pairs: Sequence[tuple[float, Pair]]) -> Iterator[str]:
    """Means over models and kinds of chats."""
    yield from head(
        "load / capacity", "normalized latency", "throughput", "TTFT in time, fcfs", "bros",
        "preemptions per 1000 requests, fcfs", "bros",
    )  # fmt: skip
    loads = {percent(part, 0): part for part, _ in pairs}
    for name, wanted in [*loads.items(), ("all", None)]:
        chosen = [pair for part, pair in pairs if wanted in (part, None)]
        yield row(name, *_means(chosen))


def _means(pairs: Sequence[Pair]) -> Iterator[str]:
    """The cells of a row: `bros` relative to `fcfs`."""
    latency = mean([_ratio(pair, "normalized_latency_s") for pair in pairs])
    yield f"{100 * (latency - 1):+.1f} %"
    yield f"{mean([_ratio(pair, 'rt_requests_per_s') for pair in pairs]):.2f}x"
    for side in zip(*pairs, strict=True):
        yield percent(mean([share(run["ttft_met"]) for run in side]))
    for side in zip(*pairs, strict=True):
        yield f"{1000 * mean([run['rt_preemptions'] / run['rt_requests'] for run in side]):.0f}"


def _ratio(pair: Pair, name: str) -> float:
    fcfs, bros = (run[name] for run in pair)
    return math.nan if None in (fcfs, bros) else bros / fcfs


def _run_table(pairs: Sequence[tuple[float, Pair]]) -> Iterator[str]:
    """Every load. The two numbers of a cell are those of `fcfs` and `bros`."""
    yield from head(
        "model", "chats", "load / capacity", "req/s", "normalized latency s", "finished req/s",
        "TTFT in time", "TPOT in time", "preemptions",
    )  # fmt: skip
    for part, pair in pairs:
        run = pair[0]
        model, chats = MODELS[run["profile"]].split(",")[0], LENGTHS[run["lengths"]]
        cells = (
            [f"{run['normalized_latency_s'] or math.nan:.4f}" for run in pair],
            [f"{run['rt_requests_per_s']:.2f}" for run in pair],
            [percent(share(run["ttft_met"])) for run in pair],
            [percent(share(run["tpot_met"])) for run in pair],
            [str(run["rt_preemptions"]) for run in pair],
        )
        shown = [" / ".join(cell) for cell in cells]
        yield row(model, chats, percent(part, 0), f"{run['rate']:g}", *shown)


PART = Part("alone", "12", "15 min", FULL, QUICK, measure, render)
