"""`bros profile`: measures how long steps take and stores a model of that, with a picture."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from bros.core.clock import Clock
from bros.core.config import Config, EngineConfig
from bros.core.errors import ConfigError
from bros.core.place import Place
from bros.engine.group import Group
from bros.engine.profiling import MAX_STORED_ERROR, Measured, full_profile
from bros.executor.model_store import ModelFiles, cache_dir_of, resolve_model
from bros.executor.target import choose_target, find_cuda
from bros.scheduler.fitting import Sample, relative_errors
from bros.scheduler.profiles import Profile, checkout_profiles
from bros.terminal import print_table, progress_bar

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEP_TOKENS = 1024
"""Steps of up to so many tokens are measured, or of --max-batch-tokens if that is more."""


def run_profile(
    config: Config, out: str | None, repeats: int, clock: Clock, place: Place | None = None
) -> int:
    """Measure, store JSON and PNG, and print how well the model fits; returns the exit status.

    out: the folder of profiles; by default the one of the source tree bros runs from, or else
    the user's. place: of this process among several ranks. All of them call this, rank 0 does it.
    Raises ConfigError or ModelError if the engine cannot run or nothing be stored, RanksLostError.
    """
    cache_dir = cache_dir_of(config.server.data_dir)
    folder = Path(out).expanduser() if out else checkout_profiles() or cache_dir / "profiles"
    _check_writable(folder)  # now, and not after minutes of measuring
    device = choose_target(config.engine, find_cuda()).device.type
    tokens = max(config.engine.step_bounds(device).tokens, STEP_TOKENS)
    engine = dataclasses.replace(config.engine, max_batch_tokens=tokens)
    with Group.join(engine, place) as group:
        files = resolve_model(engine.model, cache_dir, print)
        if group.rank > 0:
            group.log_to_stderr(config.server.log_level)
            group.follow(files)
            return 0
        print(f"Loading {files.name} ...")
        measured = _measure(engine, group, files, repeats, clock)
    _store(measured, folder, print)
    _show(measured)
    return 0


def _measure(
    engine: EngineConfig, group: Group, files: ModelFiles, repeats: int, clock: Clock
) -> Measured:
    executor, info = group.lead(files)
    with progress_bar("measuring", "steps") as advance:

        def progress(done: int, total: int) -> None:
            advance(done, total, "")

        measured = full_profile(engine, executor, info, clock, repeats=repeats, progress=progress)
    executor.close()
    return measured


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise _not_storable(folder, error) from None


def _not_storable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--out: profiles cannot be stored in {folder}: {error.strerror}")


def _store(measured: Measured, folder: Path, report: Callable[[str], None]) -> None:
    try:
        path = measured.profile.save(folder)
        report(str(path))
        try:
            # Optional: the profile is what the engine needs, the picture is for people.
            pass
        except ImportError as error:
            report(f"No picture of it was drawn: {error}")
            return
        picture = path.with_suffix(".png")
        plot(measured, _title(measured.profile)).savefig(picture)
    except OSError as error:
        raise _not_storable(folder, error) from None
    report(str(picture))


def _show(measured: Measured) -> None:
    profile = measured.profile
    rows = []
    for name, samples, error in (
        ("fitted to", measured.fitted, profile.fitted),
        ("held out", measured.held_out or measured.fitted, profile.held_out),
    ):
        assert error is not None
        rows.append((name, str(len(samples)), f"{error.mape:.1%}", f"{error.max:.1%}"))
    print_table(_title(profile), ("", "steps", "mean error", "largest"), rows)
    if measured.copies:
        model = profile.model
        print(
            f"Copies of KV to the host take {model.swap_out_token_s * 1e6:.2f} µs per token and "
            f"{model.swap_out_constant_s * 1e3:.1f} ms in a step with any; those back "
            f"{model.swap_token_s * 1e6:.2f} µs and {model.swap_constant_s * 1e3:.1f} ms."
        )
    if profile.held_out is not None and profile.held_out.mape > MAX_STORED_ERROR:
        print(
            "The times vary a lot. If the machine was busy, measure again when it is not, or "
            "with more --repeats."
        )


def _title(profile: Profile) -> str:
    key = profile.key
    ranks = f", {key.tp} ranks" if key.tp > 1 else ""
    return f"{key.model}, {key.weights}, on {key.device} ({key.kernels}{ranks})"


# ---- The picture of `bros profile`: what a model of step times predicts against what was measured.


_BAND = 0.05
_KINDS = (
    # name, colour, marker; colours that differ for the colour-blind and in grey
    ("decode rows", "#0072B2", "o"),
    ("prompt chunks", "#D55E00", "s"),
    ("both", "#009E73", "^"),
)


def plot(measured: Measured, title: str) -> Figure:
    """Predictions against measurements, and what is left, each by kind of step."""
    # Late: matplotlib takes a second to import, and GPU machines may lack it.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=130, layout="constrained")
    left, right = figure.subplots(1, 2)
    held_out = measured.profile.held_out
    assert held_out is not None
    figure.suptitle(
        f"{title}: mean error {held_out.mape:.1%}, "
        f"largest {held_out.max:.1%} on steps not fitted to"
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
    from matplotlib.ticker import PercentFormatter  # late, as in plot

    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    _plain_ticks(axes, both=False)


def _plain_ticks(axes: Axes, both: bool) -> None:
    """20, 50, 100, 200 ... instead of powers of ten, which are too far apart here."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter  # late, as in plot

    for axis in (axes.xaxis, axes.yaxis) if both else (axes.xaxis,):
        axis.set_major_locator(LogLocator(10, subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


@dataclass(frozen=True, slots=True)
class _Series:
    """Samples of one kind. Hollow marks: the model was fitted to them."""

    label: str
    samples: list[Sample]
    colour: str
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
            facecolors=self.colour if self.filled else "none",
            edgecolors=self.colour,
            linewidths=0.8,
        )


def _series(measured: Measured) -> list[_Series]:
    series = []
    for kind, (name, colour, marker) in enumerate(_KINDS):
        for label, samples, filled in (
            (name, measured.fitted, False),
            (f"{name}, held out", measured.held_out, True),
        ):
            points = [sample for sample in samples if _kind(sample) == kind]
            if points:
                series.append(_Series(label, points, colour, marker, filled))
    return series


def _kind(sample: Sample) -> int:
    decodes = sum(chunk.tokens == 1 for chunk in sample.chunks)
    if decodes == len(sample.chunks):
        return 0
    return 1 if decodes == 0 else 2
