"""Tables and plots of paper_settings.json, beside the figures that the BROS paper gives.

    python benchmarks/paper_report.py [FOLDER]      (default: benchmarks/results)

Writes paper_settings.md and a PNG for each kind of chats next to the JSON file. Text above MARK
in paper_settings.md is somebody's own, and stays.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Run = Mapping[str, Any]
Pair = tuple[Run, Run]
"""Two runs of the same load under different policies."""

MARK = "<!-- Below: made by benchmarks/paper_report.py from paper_settings.json -->"
MODELS = {
    "2x-a100-40g/opt-13b-fp16": "OPT-13B, 2x A100 40 GB",
    "4x-a100-40g/opt-30b-fp16": "OPT-30B, 4x A100 40 GB",
    "8x-a100-80g/llama-3-70b-fp16": "Llama-3-70B, 8x A100 80 GB",
}
LENGTHS = {"sharegpt": "ShareGPT", "lmsys": "LMSYS"}
# label -> colour, line, marker; two of a kind have shades of a colour
STYLES = {
    "fcfs": ("#5f5f5f", "-", "s"),
    "rr": ("#D55E00", "-", "^"),
    "rr (no budget)": ("#E9A23B", ":", "v"),
    "bros": ("#0072B2", "-", "o"),
    "bros (paper)": ("#56B4E9", "--", "D"),
}


@dataclass(frozen=True, slots=True)
class Gains:
    """What one policy is to another over some loads.

    latency_cut, be_loss: means over the loads of 1 - ours / theirs, of normalized latency and of
    best-effort requests per second. ttft_gain, tpot_gain: our mean attainment over theirs; inf
    if theirs is nothing.
    """

    latency_cut: float
    be_loss: float
    ttft_gain: float
    tpot_gain: float

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Gains:
        """pairs: (ours, theirs), at least one."""
        return cls(
            latency_cut=_mean_loss(pairs, "normalized_latency_s"),
            be_loss=_mean_loss(pairs, "be_requests_per_s"),
            ttft_gain=_gain(pairs, "ttft_met"),
            tpot_gain=_gain(pairs, "tpot_met"),
        )


@dataclass(frozen=True, slots=True)
class Target:
    """What is asked of `bros`: at least (a loss: at most) `asked` of `field` against `base`.

    published: kind of chats -> the paper's mean over rates and models.
    """

    text: str
    field: str
    base: str
    asked: float
    published: Mapping[str, float]

    @property
    def is_loss(self) -> bool:
        return self.field == "be_loss"

    @property
    def is_ratio(self) -> bool:
        return self.field.endswith("_gain")

    def met(self, value: float) -> bool:
        return value <= self.asked if self.is_loss else value >= self.asked

    def show(self, value: float) -> str:
        if math.isnan(value):
            return "-"
        if not self.is_ratio:
            return f"{100 * value:.1f} %"
        return "infinite" if math.isinf(value) else f"{value:.2f}x"

    @property
    def shown_bound(self) -> str:
        bound = f"{self.asked:g}x" if self.is_ratio else f"{100 * self.asked:g} %"
        return ("at most " if self.is_loss else "at least ") + bound


_TPOT_PUBLISHED = {"sharegpt": 1.47, "lmsys": 2.28}
_RR_CUT_PUBLISHED = {"sharegpt": 0.5431, "lmsys": 0.2577}
TARGETS = (
    Target("normalized latency cut", "latency_cut", "fcfs", 0.70,
           {"sharegpt": 0.742, "lmsys": 0.6961}),
    Target("TTFT attainment", "ttft_gain", "fcfs", 10.0, {"sharegpt": 36.38, "lmsys": 21.42}),
    Target("best-effort loss", "be_loss", "fcfs", 0.10, {"sharegpt": 0.1129, "lmsys": 0.1767}),
    Target("normalized latency cut", "latency_cut", "rr", 0.25, _RR_CUT_PUBLISHED),
    Target("TPOT attainment", "tpot_gain", "rr", 1.4, _TPOT_PUBLISHED),
    Target("normalized latency cut", "latency_cut", "rr (no budget)", 0.25, _RR_CUT_PUBLISHED),
    Target("TPOT attainment", "tpot_gain", "rr (no budget)", 1.4, _TPOT_PUBLISHED),
)  # fmt: skip
# Attainments that the paper states: policy, field, kind of chats (None: mean of both), value
PUBLISHED_ATTAINMENTS = (
    ("fcfs", "ttft_met", None, 0.0128),
    ("rr", "ttft_met", None, 0.1055),
    ("rr", "tpot_met", "sharegpt", 0.4734),
    ("rr", "tpot_met", "lmsys", 0.4281),
    ("bros", "tpot_met", "sharegpt", 0.6549),
    ("bros", "tpot_met", "lmsys", 0.7538),
)


def share(counts: Sequence[int]) -> float:
    """[met, decided] as a number; 0 of nothing is 0."""
    met, decided = counts
    return met / decided if decided else 0.0


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def runs_of(runs: Sequence[Run], **wanted: str) -> list[Run]:
    """Those with these values (policy, lengths, profile), by rate."""
    found = [run for run in runs if all(run[key] == value for key, value in wanted.items())]
    return sorted(found, key=lambda run: run["rate"])


def pairs_of(runs: Sequence[Run], ours: str, theirs: str, lengths: str) -> dict[str, list[Pair]]:
    """profile -> the runs of two policies at the same rates, by rate."""
    found = {}
    for profile in dict.fromkeys(run["profile"] for run in runs):
        sides = [
            runs_of(runs, policy=policy, lengths=lengths, profile=profile)
            for policy in (ours, theirs)
        ]
        found[profile] = list(zip(*sides, strict=True))
    return found


def write(results: Mapping[str, Any], folder: Path) -> None:
    """Tables and plots into `folder`."""
    path = folder / "paper_settings.md"
    kept = "# The paper's set-ups, simulated\n\n"
    if path.exists():
        kept = path.read_text().partition(MARK)[0]
    path.write_text(kept + MARK + "\n\n" + "\n".join(tables(results)) + "\n")
    print(f"saved {path}")
    for lengths in LENGTHS:
        picture = folder / f"paper_settings_{lengths}.png"
        plot(results["runs"], lengths).savefig(picture)
        print(f"saved {picture}")


def tables(results: Mapping[str, Any]) -> Iterator[str]:
    """Lines of Markdown."""
    runs = results["runs"]
    yield f"bros {results['bros']}, commit {results['commit'][:12]};"
    yield f"{results['duration_s']:g} s simulated per run, of which the first"
    yield f"{results['warm_up_s']:g} s do not count; seed {results['seed']},"
    yield f"{results['best_effort']['in_flight']} best-effort requests per batch.\n"
    yield "## Targets\n"
    yield "Means over three models. In brackets: how many of the three meet it by themselves.\n"
    yield from _target_table(runs, "bros")
    yield "\nThe same for the algorithm in its published form, `bros (paper)`:\n"
    yield from _target_table(runs, "bros (paper)")
    yield "\n## Attainments that the paper states\n"
    yield "Means over rates and models.\n"
    yield from _attainment_table(runs)
    yield "\n## At the highest rate\n"
    yield from _run_table(runs, highest_only=True)
    yield "\n## Means over the five rates\n"
    yield from _run_table(runs, highest_only=False)
    yield "\n## Real-time work alone at the highest rate, under `bros`\n"
    yield from _alone_table(results["real_time_alone"])


def _target_table(runs: Sequence[Run], ours: str) -> Iterator[str]:
    header = ("chats", "asked", "the paper", "mean over rates", "highest rate")
    yield from _head(f"{ours} against", "of", *header)
    for target in TARGETS:
        for lengths, name in LENGTHS.items():
            by_model = list(pairs_of(runs, ours, target.base, lengths).values())
            cells = (
                _verdict(target, by_model),
                _verdict(target, [pairs[-1:] for pairs in by_model]),
            )
            published = target.show(target.published[lengths])
            bound = target.shown_bound
            yield _row(target.base, target.text, name, bound, published, *cells)


def _verdict(target: Target, by_model: Sequence[Sequence[Pair]]) -> str:
    """The value over all models, whether that is enough, and for how many models it is."""
    value = getattr(Gains.of([pair for pairs in by_model for pair in pairs]), target.field)
    each = [target.met(getattr(Gains.of(pairs), target.field)) for pairs in by_model]
    word = "met" if target.met(value) else "**missed**"
    return f"{target.show(value)}, {word} ({sum(each)})"


def _attainment_table(runs: Sequence[Run]) -> Iterator[str]:
    yield from _head("policy", "objective", "chats", "the paper", "here")
    for policy, field, lengths, value in PUBLISHED_ATTAINMENTS:
        found = runs_of(runs, policy=policy, **({"lengths": lengths} if lengths else {}))
        here = mean([share(run[field]) for run in found])
        label = "vLLM / fcfs" if policy == "fcfs" else policy
        chats = LENGTHS[lengths] if lengths else "both"
        yield _row(
            label, field.removesuffix("_met").upper(), chats, f"{100 * value:.1f} %",
            f"{100 * here:.1f} %",
        )  # fmt: skip


def _run_table(runs: Sequence[Run], *, highest_only: bool) -> Iterator[str]:
    yield from _head(
        "model", "chats", "req/s", "policy", "normalized latency s", "TTFT %", "TPOT %",
        "tokens on time %", "RT finished %", "BE req/s", "BE tokens/s", "all tokens/s",
    )  # fmt: skip
    for lengths, chats in LENGTHS.items():
        for profile, model in MODELS.items():
            for policy in STYLES:
                found = runs_of(runs, policy=policy, lengths=lengths, profile=profile)
                if not found:
                    continue
                used = found[-1:] if highest_only else found
                rates = "-".join(
                    f"{r:g}" for r in dict.fromkeys((used[0]["rate"], used[-1]["rate"]))
                )
                yield _row(model.split(",")[0], chats, rates, policy, *_figures(used))


def _figures(runs: Sequence[Run]) -> list[str]:
    latencies = [run["normalized_latency_s"] for run in runs]
    shown = [f"{mean(latencies):.4f}" if None not in latencies else "-"]
    for field in ("ttft_met", "tpot_met", "tokens_on_time"):
        shown.append(f"{100 * mean([share(run[field]) for run in runs]):.1f}")
    finished = [run["rt_finished"] / run["rt_requests"] for run in runs]
    shown.append(f"{100 * mean(finished):.1f}")
    shown.append(f"{mean([run['be_requests_per_s'] for run in runs]):.2f}")
    shown.append(f"{mean([run['be_tokens_per_s'] for run in runs]):.0f}")
    everything = [run["rt_tokens_per_s"] + run["be_tokens_per_s"] for run in runs]
    shown.append(f"{mean(everything):.0f}")
    return shown


def _alone_table(runs: Sequence[Run]) -> Iterator[str]:
    yield from _head(
        "model", "chats", "req/s", "normalized latency s", "TTFT %", "TPOT %", "step ms"
    )
    for run in runs:
        yield _row(
            MODELS[run["profile"]].split(",")[0], LENGTHS[run["lengths"]], f"{run['rate']:g}",
            *_figures([run])[:3], f"{1e3 * run['mean_step_s']:.0f}",
        )  # fmt: skip


def _head(*names: str) -> Iterator[str]:
    yield _row(*names)
    yield _row(*("---" for _ in names))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _mean_loss(pairs: Sequence[Pair], field: str) -> float:
    """nan if one of the runs has no such figure: nothing finished."""
    figures = [[run[field] or math.nan for run in pair] for pair in pairs]
    return mean([1 - ours / theirs for ours, theirs in figures])


def _gain(pairs: Sequence[Pair], field: str) -> float:
    ours, theirs = (mean([share(pair[side][field]) for pair in pairs]) for side in (0, 1))
    if theirs:
        return ours / theirs
    return math.inf if ours else 1.0


def plot(runs: Sequence[Run], lengths: str) -> Figure:
    """A column per model, a row per metric."""
    figure = Figure(figsize=(10, 9.5), dpi=100, layout="constrained")
    axes = figure.subplots(4, len(MODELS), sharex="col", sharey="row")
    titles = ("normalized latency, s", "first token in time, %", "TPOT in time, %",
              "best-effort requests/s")  # fmt: skip
    for column, (profile, model) in enumerate(MODELS.items()):
        axes[0][column].set_title(model, fontsize=11)
        axes[-1][column].set_xlabel("real-time requests/s")
        for row in range(len(titles)):
            _draw(axes[row][column], runs_of(runs, lengths=lengths, profile=profile), row)
    for row, title in enumerate(titles):
        axes[row][0].set_ylabel(title)
    _scale(axes)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.suptitle(
        f"Chats with {LENGTHS[lengths]} lengths beside best-effort batches, simulated "
        "with analytic step times",
        fontsize=12,
    )
    return figure


def _draw(ax: Axes, runs: Sequence[Run], row: int) -> None:
    for policy, (color, line, marker) in STYLES.items():
        found = runs_of(runs, policy=policy)
        ax.plot(
            [run["rate"] for run in found],
            [_metric(run, row) for run in found],
            color=color, linestyle=line, marker=marker, label=policy, linewidth=1.8, markersize=5,
            markerfacecolor="white" if line != "-" else color,
        )  # fmt: skip
    ax.grid(color="#e3e3e3", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _metric(run: Run, row: int) -> float:
    if row == 0:
        value = run["normalized_latency_s"]
        return math.nan if value is None else float(value)
    if row == 3:
        return float(run["be_requests_per_s"])
    return 100 * share(run["ttft_met" if row == 1 else "tpot_met"])


def _scale(axes: Sequence[Sequence[Axes]]) -> None:
    latency = axes[0][0]
    latency.set_yscale("log")
    latency.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    latency.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    latency.yaxis.set_minor_formatter(NullFormatter())
    for row in (1, 2):
        axes[row][0].set_ylim(-4, 104)
    for ax in axes[-1]:
        ax.set_xlim(left=0)
    axes[-1][0].set_ylim(bottom=0)


def main() -> None:
    default = Path(__file__).resolve().parent / "results"
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else default
    write(json.loads((folder / "paper_settings.json").read_text()), folder)


if __name__ == "__main__":
    main()
