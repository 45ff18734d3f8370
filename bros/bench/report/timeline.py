"""What a server said of itself while it was measured, over time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bros.bench.results import Sample

_RT, _BE, _LIMIT = "#0072B2", "#E69F00", "#D55E00"
_MOST_POINTS = 150
_SLACK, _STEP = "#009E73", "#CC79A7"


class _Line(NamedTuple):
    name: str
    colour: str
    label: str
    pattern: str


_WAITING = (
    _Line("rt_waiting", _RT, "real-time", "-"),
    _Line("be_waiting", _BE, "best-effort", "--"),
)
_TIMES = (
    _Line("slack_ms", _SLACK, "time tokens had left", "-"),
    _Line("step_ms", _STEP, "time of a step", "--"),
)


def draw_timeline(figure: Figure, name: str, samples: Sequence[Sample]) -> None:
    """Requests in the batch, requests that wait, and time that is left: those that there are."""
    figure.suptitle(f"{name}: inside the server", x=0.02, ha="left", fontsize=11.5)
    samples = _thinned(samples)
    known = set().union(*(sample.values for sample in samples))
    drawers = []
    if known & {"rt_running", "be_running"}:
        drawers.append(_draw_batch)
    if known & {"rt_waiting", "be_waiting"}:
        drawers.append(_draw_waiting)
    if known & {"slack_ms", "step_ms"}:
        drawers.append(_draw_times)
    if not drawers:
        return
    axes = figure.subplots(len(drawers), 1, sharex=True, squeeze=False)[:, 0]
    for ax, draw in zip(axes, drawers, strict=True):
        draw(ax, samples)
        ax.grid(True)
        ax.set_axisbelow(True)
        handles, labels = ax.get_legend_handles_labels()
        ax.legend(
            handles, labels, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderpad=0,
            borderaxespad=0.2,
        )  # fmt: skip
    figure.align_ylabels(list(axes))
    axes[-1].set_xlabel("seconds after the start of the run")
    axes[-1].set_xlim(samples[0].at_s, max(samples[-1].at_s, samples[0].at_s + 1))


def _draw_batch(ax: Axes, samples: Sequence[Sample]) -> None:
    """Stacked: together they are the batch."""
    at = [sample.at_s for sample in samples]
    rt, be = (_values(samples, name, 0.0) for name in ("rt_running", "be_running"))
    ax.stackplot(
        at, rt, be, colors=(_RT, _BE), labels=("real-time", "best-effort"), alpha=0.85, step="post"
    )
    limits = _values(samples, "batch_size", math.nan)
    if not all(map(math.isnan, limits)):
        ax.step(at, limits, where="post", color=_LIMIT, linewidth=1.4, label="limit")
    ax.set_ylabel("running\nrequests")
    ax.set_ylim(bottom=0)


def _draw_waiting(ax: Axes, samples: Sequence[Sample]) -> None:
    _draw_lines(ax, samples, _WAITING, "steps-post")
    ax.set_ylabel("waiting\nrequests")
    ax.set_ylim(bottom=0)


def _draw_times(ax: Axes, samples: Sequence[Sample]) -> None:
    _draw_lines(ax, samples, _TIMES, "default")
    ax.axhline(0, color=_LIMIT, linewidth=0.8)
    ax.set_ylabel("mean, ms")


def _draw_lines(
    ax: Axes,
    samples: Sequence[Sample],
    lines: Sequence[_Line],
    style: Literal["default", "steps-post"],
) -> None:
    """Those of the lines that have figures."""
    at = [sample.at_s for sample in samples]
    for line in lines:
        values = _values(samples, line.name, math.nan)
        if not all(map(math.isnan, values)):
            ax.plot(
                at, values, line.pattern, drawstyle=style, color=line.colour, linewidth=1.4,
                label=line.label,
            )  # fmt: skip


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Means of neighbours, so that no more than _MOST_POINTS are left."""
    width = -(-len(samples) // _MOST_POINTS)
    groups = [samples[start : start + width] for start in range(0, len(samples), width)]
    return [Sample(group[0].at_s, _means(group)) for group in groups]


def _means(samples: Sequence[Sample]) -> dict[str, float]:
    """By name, of the samples that have it."""
    names = dict.fromkeys(name for sample in samples for name in sample.values)
    return {
        name: fmean(sample.values[name] for sample in samples if name in sample.values)
        for name in names
    }


def _values(samples: Sequence[Sample], name: str, missing: float) -> list[float]:
    return [sample.values.get(name, missing) for sample in samples]
