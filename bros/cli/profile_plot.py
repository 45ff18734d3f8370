"""The plot of `bros profile`: predicted against measured step times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, PercentFormatter

from bros.profiling.fitting import Sample, relative_errors
from bros.profiling.measuring import Measured

_BAND = 0.05
_KINDS = (
    # name, color, marker; the colors are distinguishable with any color vision and in gray
    ("decode rows", "#0072B2", "o"),
    ("prompt chunks", "#D55E00", "s"),
    ("both", "#009E73", "^"),
)


def plot(measured: Measured, title: str) -> Figure:
    """Predicted against measured times, and relative errors, by kind of step."""
    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    held_out = measured.profile.held_out
    assert held_out is not None
    figure.suptitle(
        f"{title}\n"
        f"mean error {held_out.mape:.1%}, largest {held_out.max:.1%} on steps not fitted to"
    )
    _plot_times(left, measured)
    _plot_errors(right, measured)
    return figure


def _plot_times(axes: Axes, measured: Measured) -> None:
    model = measured.profile.model
    samples = measured.fitted + measured.held_out
    low = 0.8e3 * min(sample.seconds for sample in samples)
    high = 1.25e3 * max(sample.seconds for sample in samples)
    ends = [low, high]
    axes.plot(ends, ends, color="0.3", linewidth=0.8)
    axes.fill_between(
        ends,
        [end * (1 - _BAND) for end in ends],
        [end * (1 + _BAND) for end in ends],
        color="0.85",
        label=f"±{_BAND:.0%}",
        linewidth=0,
    )
    for series in _series(measured):
        times = np.array([sample.seconds for sample in series.samples])
        errors = relative_errors(model, series.samples)
        series.draw(axes, times, times * (1 + errors) * 1e3)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), aspect="equal")
    axes.set(xlabel="measured, ms", ylabel="predicted, ms", title="step time")
    _plain_ticks(axes, both=True)
    axes.legend(loc="upper left", fontsize=8, frameon=False)


def _plot_errors(axes: Axes, measured: Measured) -> None:
    model = measured.profile.model
    axes.axhspan(-_BAND, _BAND, color="0.85", linewidth=0)
    axes.axhline(0, color="0.3", linewidth=0.8)
    for series in _series(measured):
        times = [sample.seconds for sample in series.samples]
        series.draw(axes, times, relative_errors(model, series.samples))
    axes.set(xscale="log", xlabel="measured, ms", title="predicted / measured - 1")
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    _plain_ticks(axes, both=False)


def _plain_ticks(axes: Axes, both: bool) -> None:
    """20, 50, 100, 200 ... instead of powers of ten, which are too far apart here."""
    for axis in (axes.xaxis, axes.yaxis) if both else (axes.xaxis,):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True, slots=True)
class _Series:
    """Samples of one kind.

    filled: held out; hollow markers: the model was fitted to them.
    """

    label: str
    samples: list[Sample]
    color: str
    marker: str
    filled: bool

    def draw(self, axes: Axes, times_s: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Points at (times in ms, values)."""
        axes.scatter(
            np.asarray(times_s) * 1e3,
            values,
            s=16,
            label=self.label,
            marker=self.marker,
            facecolors=self.color if self.filled else "none",
            edgecolors=self.color,
            linewidths=0.8,
        )


def _series(measured: Measured) -> list[_Series]:
    series = []
    for kind, (name, color, marker) in enumerate(_KINDS):
        for label, samples, filled in (
            (name, measured.fitted, False),
            (f"{name}, held out", measured.held_out, True),
        ):
            points = [sample for sample in samples if _kind(sample) == kind]
            if points:
                series.append(_Series(label, points, color, marker, filled))
    return series


def _kind(sample: Sample) -> int:
    decodes = sum(chunk.tokens == 1 for chunk in sample.chunks)
    if decodes == len(sample.chunks):
        return 0
    return 1 if decodes == 0 else 2
