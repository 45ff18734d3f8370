"""Plots of a comparison, sized to be readable on a phone.

Several rates are drawn as lines over the rate, a single rate as bars per run. The colors are Okabe
and Ito's, which are distinguishable with any color vision; lines and markers differ as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager
from matplotlib.patheffects import withStroke

from bros.bench.metrics import Interval, confidence_interval
from bros.bench.report.words import NOTHING, file_name, name_of, ordered, server_name, short_name
from bros.bench.results import BenchResult, Scenario, ScenarioResult, ServerSample

# ---- The server's own metrics over time.


_RT, _BE, _LIMIT = "#0072B2", "#E69F00", "#D55E00"
_MAX_POINTS = 150
_SLACK, _STEP = "#009E73", "#CC79A7"


class _Line(NamedTuple):
    name: str
    color: str
    label: str
    pattern: str


_WAITING = (
    _Line("rt_waiting", _RT, "real-time", "-"),
    _Line("be_waiting", _BE, "best-effort", "--"),
)
_TIMES = (
    _Line("slack_ms", _SLACK, "mean slack of tokens", "-"),
    _Line("step_ms", _STEP, "mean step time", "--"),
)


def draw_timeline(figure: Figure, name: str, samples: Sequence[ServerSample]) -> None:
    """Running requests, waiting requests, slack and step time, as far as samples have them."""
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


def _draw_batch(ax: Axes, samples: Sequence[ServerSample]) -> None:
    """Stacked, so that the total is the batch size."""
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


def _draw_waiting(ax: Axes, samples: Sequence[ServerSample]) -> None:
    _draw_lines(ax, samples, _WAITING, "steps-post")
    ax.set_ylabel("waiting\nrequests")
    ax.set_ylim(bottom=0)


def _draw_times(ax: Axes, samples: Sequence[ServerSample]) -> None:
    _draw_lines(ax, samples, _TIMES, "default")
    ax.axhline(0, color=_LIMIT, linewidth=0.8)
    ax.set_ylabel("ms")


def _draw_lines(
    ax: Axes,
    samples: Sequence[ServerSample],
    lines: Sequence[_Line],
    style: Literal["default", "steps-post"],
) -> None:
    """Draws the lines that have values."""
    at = [sample.at_s for sample in samples]
    for line in lines:
        values = _values(samples, line.name, math.nan)
        if not all(map(math.isnan, values)):
            ax.plot(
                at, values, line.pattern, drawstyle=style, color=line.color, linewidth=1.4,
                label=line.label,
            )  # fmt: skip


def _thinned(samples: Sequence[ServerSample]) -> list[ServerSample]:
    """Averages neighbors down to at most _MAX_POINTS samples."""
    width = -(-len(samples) // _MAX_POINTS)
    groups = [samples[start : start + width] for start in range(0, len(samples), width)]
    return [ServerSample(group[0].at_s, _means(group)) for group in groups]


def _means(samples: Sequence[ServerSample]) -> dict[str, float]:
    """Name -> mean over the samples that have it."""
    names = dict.fromkeys(name for sample in samples for name in sample.values)
    return {
        name: fmean(sample.values[name] for sample in samples if name in sample.values)
        for name in names
    }


def _values(samples: Sequence[ServerSample], name: str, missing: float) -> list[float]:
    return [sample.values.get(name, missing) for sample in samples]


Value = Callable[[ScenarioResult], float | None]
Spread = Callable[[ScenarioResult], Interval | None]

_SIZE = (5.4, 3.7)
_DPI = 160
_LEGEND_CHARACTERS = 70
_LEGEND_ROW = 0.19  # inches
_BLUE, _GREY, _VERMILLION, _ORANGE = "#0072B2", "#7f7f7f", "#D55E00", "#E69F00"
_GREEN, _PURPLE, _SKY = "#009E73", "#CC79A7", "#56B4E9"
_POLICY_COLORS = {"bros": _BLUE, "fcfs": _GREY, "rr": _VERMILLION, "priority": _ORANGE}
_COLORS = (_BLUE, _VERMILLION, _GREEN, _ORANGE, _SKY, _GREY)
_OBJECTIVE = _PURPLE
_MARKERS = "os^DvPX"


@dataclass(frozen=True, slots=True)
class Theme:
    """Colors of everything but the data."""

    ink: str
    paper: str
    grid: str


LIGHT = Theme(ink="#1c2024", paper="#ffffff", grid="#e2e4e8")
DARK = Theme(ink="#e6e8eb", paper="#16191d", grid="#34393f")


class Panel(NamedTuple):
    """One plot.

    values: label -> figure of a run; the second one is drawn thinner.
    scenarios: those whose runs are drawn.
    asked: objectives, drawn as levels.
    log: logarithmic axis.
    spread: interval around the first value, drawn as a bar.
    """

    title: str
    unit: str
    values: dict[str, Value]
    scenarios: tuple[Scenario, ...]
    asked: tuple[float, ...] = ()
    log: bool = False
    spread: Spread | None = None


class Style(NamedTuple):
    color: str
    marker: str


_RT_RUNS = (Scenario.S0, Scenario.S1, Scenario.S3)
_BE_RUNS = (Scenario.S1, Scenario.S2, Scenario.S3)


def figures(bench: BenchResult, theme: Theme) -> dict[str, Figure]:
    """File name without suffix -> figure; plots without values are left out."""
    panels = {name: panel for name, panel in _panels(bench).items() if _has_figures(bench, panel)}
    found = {}
    several = len({run.rt_rate for run in bench.results if run.rt_rate is not None}) > 1
    with rc_context(_settings(theme)):
        for name, panel in panels.items():
            draw = _lines if several else _bars
            found[name] = _figure(theme, _SIZE[1] if several else _bar_height(bench, panel))
            draw(found[name], bench, panel, theme)
        for result in _with_timelines(bench):
            figure = _figure(theme, height=4.6)
            draw_timeline(figure, name_of(bench, result), result.timeline)
            server = server_name(bench, result.target, result.policy)
            found[f"timeline_{result.scenario}_{file_name(server)}"] = figure
    return found


def _panels(bench: BenchResult) -> dict[str, Panel]:
    return {
        "attainment": Panel(
            "Real-time requests within both objectives (thin: 95 % CI)", "%",
            {"": lambda r: _percent(r.rt.both_met.value)}, _RT_RUNS,
            spread=lambda r: _percents(confidence_interval(r.rt.both_met)),
        ),
        "be_throughput": Panel(
            "Best-effort throughput, prompt and output", "tokens/s",
            {"": lambda r: r.be.tokens_per_s if r.be.took_part else None}, _BE_RUNS,
        ),
        "ttft": Panel(
            "Time to first token (TTFT)", "ms",
            {"p50": lambda r: _ms(r.rt.ttft_s.p50), "p99": lambda r: _ms(r.rt.ttft_s.p99)},
            _RT_RUNS, _levels(slo.ttft_s for slo in bench.objectives), log=True,
        ),
        "tpot": Panel(
            "Time per output token (TPOT)", "ms",
            {"p50": lambda r: _ms(r.rt.tpot_s.p50), "p99": lambda r: _ms(r.rt.tpot_s.p99)},
            _RT_RUNS, _levels(slo.tpot_s for slo in bench.objectives), log=True,
        ),
        "normalized_latency": Panel(
            "Latency per output token", "ms",
            {"p50": lambda r: _ms(r.rt.normalized_latency_s.p50),
             "p99": lambda r: _ms(r.rt.normalized_latency_s.p99)},
            _RT_RUNS, log=True,
        ),
    }  # fmt: skip


_FONT = "DejaVu Sans"
_CJK_FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans CJK TC", "Noto Sans CJK KR", "Noto Sans SC",
    "Noto Sans JP", "Noto Sans KR", "Source Han Sans SC", "Source Han Sans", "WenQuanYi Zen Hei",
    "WenQuanYi Micro Hei", "IPAexGothic", "IPAGothic", "NanumGothic", "Droid Sans Fallback",
    "PingFang SC", "Hiragino Sans", "Apple SD Gothic Neo", "Microsoft YaHei", "SimHei", "Yu Gothic",
    "Malgun Gothic", "Arial Unicode MS", "Unifont",
)  # fmt: skip
"""Fonts with Chinese, Japanese or Korean characters, of which the first one has none."""


def _fonts(installed: Collection[str]) -> list[str]:
    """The fonts of a text: a character is drawn with the first one that has it."""
    return [_FONT, *(name for name in _CJK_FONTS if name in installed)]


def _settings(theme: Theme) -> dict[Any, Any]:
    return {
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.ink,
        "axes.titlecolor": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "axes.facecolor": theme.paper,
        "figure.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "grid.color": theme.grid,
        "grid.linewidth": 0.8,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "font.family": _fonts(fontManager.get_font_names()),
        "text.parse_math": False,  # a name may have two dollar signs
        "legend.frameon": False,
        "legend.fontsize": 9,
    }


def _figure(theme: Theme, height: float) -> Figure:
    return Figure(figsize=(_SIZE[0], height), dpi=_DPI, layout="constrained", facecolor=theme.paper)


def _lines(figure: Figure, bench: BenchResult, panel: Panel, theme: Theme) -> None:
    """A line per server and value over the real-time rate; S2 is a horizontal line."""
    measures = zip(panel.values, ("bold", "thin"), strict=False)
    how = ", ".join(f"{name} {look}" for name, look in measures if name)
    ax = _axes(figure, f"{panel.title}, {how}" if how else panel.title)
    styles = _styles(bench)
    several = len({run.target for run in bench.results}) > 1
    for (target, policy, alone), runs in _series(bench, panel).items():
        color, marker = styles[target, policy]
        color = theme.ink if alone and not several else color
        name = server_name(bench, target, policy) + (", alone" if alone else "")
        if name.startswith("_"):
            name = f" {name}"  # matplotlib would leave it out of the legend
        for number, value in enumerate(panel.values.values()):
            if number and alone and several:
                continue  # too many lines to distinguish; the tables have the figures
            label = name if number == 0 else None
            if runs[0].rt_rate is None:
                level = _number(value(runs[0]))
                ax.axhline(level, color=color, linestyle=":", linewidth=1.6, label=label)
                continue
            ax.plot(
                [run.rt_rate or 0.0 for run in runs], [_number(value(run)) for run in runs],
                color=color, marker=marker, markersize=7.5 if alone else 5.5,
                linestyle=(":" if alone else "-", (0, (1, 4)) if alone else "--")[number],
                linewidth=1.9 - 0.9 * number, zorder=1.8 if alone else 2 + number,
                markerfacecolor=theme.paper if alone or number else color, label=label,
            )  # fmt: skip
            if number == 0:
                _draw_spreads(ax, runs, panel, color)
    _draw_objectives(ax.axhline, panel)
    ax.grid(True)
    ax.set_xlabel("real-time requests per second")
    ax.set_ylabel(panel.unit)
    ax.set_xlim(left=0)
    _scale(ax, panel)
    _legend(figure, ax)


def _legend(figure: Figure, ax: Axes) -> None:
    """Below the plot, in as many columns as fit; further rows make the figure taller."""
    labels = ax.get_legend_handles_labels()[1]
    columns = max(1, min(3, _LEGEND_CHARACTERS // (max(map(len, labels)) + 6)))
    rows = math.ceil(len(labels) / columns)
    figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * (rows - 1))
    figure.legend(loc="outside lower left", ncols=columns)


def _bars(figure: Figure, bench: BenchResult, panel: Panel, theme: Theme) -> None:
    """A bar per run and value, labeled with its figure. All runs have the same rate or none."""
    [rate] = {run.rt_rate for run in bench.results if run.rt_rate is not None} or [None]
    ax = _axes(figure, panel.title)
    runs = [run for run in ordered(bench) if run.scenario in panel.scenarios]
    styles = _styles(bench)
    thickness = 0.72 / len(panel.values)
    halo = withStroke(linewidth=2.5, foreground=theme.paper)
    for number, (label, value) in enumerate(panel.values.items()):
        for row, run in enumerate(runs):
            at = row + (number - (len(panel.values) - 1) / 2) * thickness
            figure_of = value(run)
            interval = panel.spread(run) if panel.spread else None
            shown = f"{label} {_shown(figure_of, panel.unit)}".strip()
            color = styles[run.target, run.policy].color
            ax.barh(
                at, figure_of or 0.0, thickness * 0.9,
                color=color if number == 0 else _pale(color, theme),
            )  # fmt: skip
            if interval:
                ax.hlines(at, *interval, color=theme.ink, alpha=0.6, linewidth=1.2)
            ax.annotate(
                shown, (interval.high if interval else figure_of or 0.0, at), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=8.5, path_effects=[halo],
            )  # fmt: skip
    ax.set_yticks(range(len(runs)), [short_name(bench, run) for run in runs])
    _draw_objectives(ax.axvline, panel)
    ax.invert_yaxis()
    ax.grid(True, axis="x")
    at_rate = "" if rate is None else f", at {rate:g} real-time requests per second"
    ax.set_xlabel(panel.unit + at_rate, loc="right")  # beside long names the axis is short
    ax.margins(x=0.22)
    ax.set_xlim(left=0)
    if panel.unit == "%":
        ax.set_xticks(range(0, 101, 20))
    if panel.asked:
        figure.legend(loc="outside lower left")


def _bar_height(bench: BenchResult, panel: Panel) -> float:
    rows = sum(run.scenario in panel.scenarios for run in bench.results)
    return max(_SIZE[1], 1.3 + 0.32 * len(panel.values) * rows)


def _draw_objectives(draw: Callable[..., object], panel: Panel) -> None:
    for asked in panel.asked:
        label = f"objective, {asked:g} {panel.unit}"
        draw(asked, color=_OBJECTIVE, linewidth=1.2, linestyle="-.", label=label, zorder=1.5)


def _draw_spreads(ax: Axes, runs: Sequence[ScenarioResult], panel: Panel, color: str) -> None:
    """Thin bars behind the lines, so that they do not hide each other."""
    for run in runs:
        if panel.spread and (interval := panel.spread(run)):
            ax.vlines(run.rt_rate or 0.0, *interval, color=color, alpha=0.6, linewidth=1.2,
                      zorder=1.6)  # fmt: skip


def _pale(color: str, theme: Theme) -> tuple[float, ...]:
    pairs = zip(to_rgb(color), to_rgb(theme.paper), strict=True)
    return tuple(0.55 * own + 0.45 * paper for own, paper in pairs)


def _axes(figure: Figure, title: str) -> Axes:
    ax = figure.add_subplot()
    ax.set_axisbelow(True)
    figure.suptitle(title, x=0.02, ha="left", fontsize=11.5)
    return ax


def _scale(ax: Axes, panel: Panel) -> None:
    if panel.unit == "%":
        ax.set_ylim(-3, 104)
    elif panel.log and ax.dataLim.ymin > 0 and math.isfinite(ax.dataLim.ymax):
        ax.set_yscale("log")
        ends = (ax.dataLim.ymin, ax.dataLim.ymax)
        low, high = min(*ends, *panel.asked) / 1.3, max(*ends, *panel.asked) * 1.3
        ticks = _round_numbers(low, high)
        ax.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        ax.set_yticks([], minor=True)
        ax.set_ylim(low, high)
    else:
        # The margin that matplotlib takes is one of the range of the values, which may be small.
        ax.set_ylim(0, 1.05 * ax.dataLim.ymax if ax.dataLim.ymax > 0 else 1)


def _round_numbers(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten in [low, high]; only powers of ten over a wide range."""
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 3000 else (1,)
    found = [step * 10.0**exponent for exponent in exponents for step in steps]
    return [number for number in found if low <= number <= high]


def _series(
    bench: BenchResult, panel: Panel
) -> dict[tuple[str, str | None, bool], list[ScenarioResult]]:
    """(target, policy, alone) -> runs in order of rate; S0 and S2 last."""
    found: dict[tuple[str, str | None, bool], list[ScenarioResult]] = {}
    for run in ordered(bench):
        if run.scenario in panel.scenarios:
            key = (run.target, run.policy, not run.scenario.mixed)
            found.setdefault(key, []).append(run)
    return dict(sorted(found.items(), key=lambda item: item[0][2]))


def _styles(bench: BenchResult) -> dict[tuple[str, str | None], Style]:
    """Known policies have a fixed color on the first server that has them."""
    styles: dict[tuple[str, str | None], Style] = {}
    servers = dict.fromkeys((run.target, run.policy) for run in bench.results)
    reserved = {_POLICY_COLORS[policy] for _, policy in servers if policy in _POLICY_COLORS}
    free = [color for color in _COLORS if color not in reserved]
    for number, (target, policy) in enumerate(servers):
        used = {style.color for style in styles.values()}
        color = _POLICY_COLORS.get(policy or "")
        if color is None or color in used:
            unused = [other for other in free if other not in used]
            color = unused[0] if unused else _COLORS[number % len(_COLORS)]
        styles[target, policy] = Style(color, _MARKERS[number % len(_MARKERS)])
    return styles


def _with_timelines(bench: BenchResult) -> list[ScenarioResult]:
    """Mixed runs at the highest rate that has samples."""
    found = [run for run in bench.results if run.timeline and run.scenario.mixed]
    highest = max((run.rt_rate or 0.0 for run in found), default=0.0)
    return [run for run in found if (run.rt_rate or 0.0) == highest]


def _has_figures(bench: BenchResult, panel: Panel) -> bool:
    runs = [run for run in bench.results if run.scenario in panel.scenarios]
    return any(value(run) is not None for run in runs for value in panel.values.values())


def _shown(value: float | None, unit: str) -> str:
    """Percentages are rounded down, so that less than 100 % never shows as 100."""
    if value is None:
        return NOTHING
    if unit == "%":
        return f"{math.floor(10 * value + 1e-6) / 10:g}"
    return f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def _levels(seconds: Iterable[float | None]) -> tuple[float, ...]:
    return tuple(dict.fromkeys(1e3 * level for level in seconds if level is not None))


def _percents(interval: Interval | None) -> Interval | None:
    return None if interval is None else Interval(100 * interval.low, 100 * interval.high)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share
