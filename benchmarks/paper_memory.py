"""Figure 13: the benefit of bidirectional blocks and checkpoints, simulated at the paper's setting.

OPT-30B at 10 real-time requests per second, as in the paper, and at 8, which the model can just
serve alone. "plain + recompute" stands for the paper's "No Bi-cache": blocks have one owner, and
preempted tokens are recomputed. All other settings are the same in all runs. Real-time requests
alone are the upper bound for any memory management.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from matplotlib.figure import Figure
from paper_common import (
    BE_IN_FLIGHT,
    LENGTHS,
    POLICIES,
    Case,
    Options,
    Part,
    Rendering,
    Results,
    Setting,
    Span,
    simulate,
)
from paper_drawing import (
    BE_TOKENS,
    TTFT,
    Run,
    head,
    legend,
    new_figure,
    percent,
    plain,
    row,
    share,
)

PROFILE = "4x-a100-40g/opt-30b-fp16"
RATES = (8.0, 10.0)
RT_ALONE = "real-time alone"
BASE, OURS = "plain + recompute", "bidirectional + checkpoint"
KINDS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        BASE: {"kv_layout": "plain", "on_pressure": "recompute"},
        "bidirectional + recompute": {"on_pressure": "recompute"},
        "plain + checkpoint": {"kv_layout": "plain"},
        OURS: {},
        "the same, paper's search": {"kv_find": "paper"},
    }
)
FULL, QUICK = Span(400.0, 100.0), Span(60.0, 20.0)
_PANELS = (TTFT, BE_TOKENS)
_COLORS = dict(
    zip(
        [*KINDS, RT_ALONE],
        ("#5f5f5f", "#d55e00", "#cc79a7", "#0072b2", "#56b4e9", "#d9d9d9"),
        strict=True,
    )
)


def measure(options: Options, span: Span) -> dict[str, Any]:
    rates = RATES[-1:] if options.quick else RATES
    settings = [Setting(PROFILE, lengths) for lengths in LENGTHS]
    runs = []
    for kind, changes in {**KINDS, RT_ALONE: {}}.items():
        config = dataclasses.replace(POLICIES["bros"], **changes)
        in_flight = 0 if kind == RT_ALONE else BE_IN_FLIGHT
        cases = [
            Case(setting, "bros", rate, in_flight, config) for setting in settings for rate in rates
        ]
        runs += [{"kind": kind, **run} for run in simulate(kind, cases, span, options)]
    return {"runs": runs}


def render(results: Results) -> Rendering:
    runs = results["runs"]
    title = "OPT-30B: memory management, simulated with analytic step times"
    return Rendering({"table": "\n".join(table(runs, OURS))}, {"bars": (title, bars(runs, title))})


def table(runs: Sequence[Run], ours: str) -> Iterator[str]:
    """Every run, and the ratios of `ours` to BASE."""
    yield from head(
        "load", "memory", "TTFT in time", "TPOT in time", "BE tokens/s", "RT preemptions",
        "BE preemptions",
    )  # fmt: skip
    for load, found in by_load(runs).items():
        for kind, run in found.items():
            yield row(
                load, kind,
                *(percent(share(run[name])) for name in ("ttft_met", "tpot_met")),
                f"{run['be_tokens_per_s'] or 0.0:.0f}",
                *(str(run[name]) for name in ("rt_preemptions", "be_preemptions")),
            )  # fmt: skip
        yield row(load, f"*{ours} / {BASE}*", *_ratios(found[BASE], found[ours]), "", "")


def _ratios(base: Run, ours: Run) -> Iterator[str]:
    for name in ("ttft_met", "tpot_met"):
        yield _ratio(share(ours[name]), share(base[name]))
    yield _ratio(ours["be_tokens_per_s"], base["be_tokens_per_s"])


def _ratio(ours: float | None, base: float | None) -> str:
    return f"{ours / base:.2f}x" if ours is not None and base else "-"


def by_load(runs: Sequence[Run]) -> dict[str, dict[str, Run]]:
    """load -> kind -> run, both in the order of the measurement."""
    found: dict[str, dict[str, Run]] = {}
    for run in runs:
        load = f"{LENGTHS[run['lengths']]}, {run['rate']:g} req/s"
        found.setdefault(load, {})[run["kind"]] = run
    return found


def bars(runs: Sequence[Run], title: str) -> Figure:
    """A group of bars per load, a bar per kind of memory management."""
    loads = by_load(runs)
    kinds = list(dict.fromkeys(run["kind"] for run in runs))
    figure = new_figure(title, width=9.0, height=5.5)
    axes = figure.subplots(len(_PANELS), 1, sharex=True)
    for ax, metric in zip(axes, _PANELS, strict=True):
        for index, kind in enumerate(kinds):
            places = [group + 0.8 * (index + 0.5) / len(kinds) - 0.4 for group in range(len(loads))]
            values = [metric.value(found[kind]) for found in loads.values()]
            ax.bar(places, values, width=0.76 / len(kinds), color=_COLORS[kind], label=kind)
        ax.set_ylabel(metric.label)
        ax.set_xticks(range(len(loads)), list(loads))
        plain(ax)
        ax.grid(visible=False, axis="x")
    legend(figure, axes[0])
    return figure


PART = Part("memory", "13", "8 min", FULL, QUICK, measure, render)
