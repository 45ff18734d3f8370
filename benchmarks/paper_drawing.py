"""Plots and Markdown tables in one style for all parts of the paper's reproduction."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter
from paper_common import LENGTHS, MODELS

Run = Mapping[str, Any]

# Policy -> color, line, marker. Variants of a policy have shades of its color. Lines and markers
# distinguish them as well, also without color vision.
STYLES = {
    "fcfs": ("#5f5f5f", "-", "s"),
    "rr": ("#D55E00", "-", "^"),
    "rr (no budget)": ("#E9A23B", ":", "v"),
    "bros": ("#0072B2", "-", "o"),
    "bros (paper)": ("#56B4E9", "--", "D"),
}


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of plots. label: includes the unit. is_log: logarithmic axis. is_percent: 0 to 100."""

    label: str
    value: Callable[[Run], float]
    is_log: bool = False
    is_percent: bool = False


def share(counts: Sequence[int]) -> float:
    """[met, decided] as a ratio; 0 if nothing was decided."""
    met, decided = counts
    return met / decided if decided else 0.0


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def runs_of(runs: Sequence[Run], **wanted: str) -> list[Run]:
    """The runs with these values (policy, lengths, profile), sorted by rate."""
    found = [run for run in runs if all(run[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda run: run["rate"])


def _latency(run: Run) -> float:
    value = run["normalized_latency_s"]
    return math.nan if value is None else float(value)


LATENCY = Metric("normalized latency, s/token", _latency, is_log=True)
TTFT = Metric("first token in time, %", lambda run: 100 * share(run["ttft_met"]), is_percent=True)
TPOT = Metric("TPOT in time, %", lambda run: 100 * share(run["tpot_met"]), is_percent=True)
BE_RATE = Metric("best-effort requests/s", lambda run: float(run["be_requests_per_s"]))
BE_TOKENS = Metric("best-effort tokens/s", lambda run: float(run["be_tokens_per_s"]))
RT_RATE = Metric("finished requests/s", lambda run: float(run["rt_requests_per_s"]))


def grid(
    columns: Mapping[str, Sequence[Run]], metrics: Sequence[Metric], title: str, x_label: str
) -> Figure:
    """A column per title, a row per metric, a curve per policy over the rates."""
    figure = new_figure(title, width=1.2 + 2.95 * len(columns), height=1.1 + 2.1 * len(metrics))
    axes = figure.subplots(len(metrics), len(columns), sharex="col", sharey="row", squeeze=False)
    for column, (name, runs) in enumerate(columns.items()):
        axes[0][column].set_title(name, fontsize=11)
        axes[-1][column].set_xlabel(x_label)
        for row, metric in enumerate(metrics):
            curves(axes[row][column], runs, metric)
    for metric, line in zip(metrics, axes, strict=True):
        line[0].set_ylabel(metric.label)
        for ax in line:
            scale(ax, metric)
    legend(figure, axes[0][0])
    return figure


def model_grids(
    runs: Sequence[Run], metrics: Sequence[Metric], about: str
) -> dict[str, tuple[str, Figure]]:
    """Key of LENGTHS -> (caption, grid with a column per model). about: the load, for the title."""
    found = {}
    for lengths, chats in LENGTHS.items():
        columns = {
            model: chosen
            for profile, model in MODELS.items()
            if (chosen := runs_of(runs, profile=profile, lengths=lengths))
        }
        if columns:
            title = f"{chats} lengths, {about}, simulated with analytic step times"
            found[lengths] = title, grid(columns, metrics, title, "real-time requests/s")
    return found


def new_figure(title: str, *, width: float, height: float) -> Figure:
    """Inches."""
    figure = Figure(figsize=(width, height), dpi=100, layout="constrained")
    figure.suptitle(title, fontsize=12, wrap=True)
    return figure


def curves(ax: Axes, runs: Sequence[Run], metric: Metric) -> None:
    for policy, (color, line, marker) in STYLES.items():
        found = runs_of(runs, policy=policy)
        if found:
            ax.plot(
                [run["rate"] for run in found],
                [metric.value(run) for run in found],
                color=color, linestyle=line, marker=marker, label=policy, linewidth=1.8,
                markersize=5, markerfacecolor="white" if line != "-" else color,
            )  # fmt: skip
    plain(ax)


def scale(ax: Axes, metric: Metric) -> None:
    """Set the scale and limits. Call it after everything on the shared axes has been drawn."""
    ax.set_xlim(left=0)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    if metric.is_log:
        ax.set_yscale("log")
        ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        ax.yaxis.set_minor_formatter(NullFormatter())
    elif metric.is_percent:
        ax.set_ylim(-4, 104)
    else:
        ax.set_ylim(bottom=0)


def plain(ax: Axes) -> None:
    """A light grid in the background, no frame."""
    ax.grid(color="#e3e3e3", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend(figure: Figure, *axes: Axes) -> None:
    """One legend below all panels, with each label once."""
    found: dict[str, Artist] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    widest = 0.7 + 0.085 * max(map(len, found))  # inches, with the sample before the text
    columns = min(len(found), int(figure.get_figwidth() // widest))
    figure.legend(
        list(found.values()), list(found),
        loc="outside lower center", ncols=columns, frameon=False,
    )  # fmt: skip


def head(*names: str) -> Iterator[str]:
    """The first two lines of a table."""
    yield row(*names)
    yield row(*("---" for _ in names))


def row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:.{digits}f} %"
