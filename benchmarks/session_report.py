"""Renders the results of session_speed.py, shared_prefix.py and session_paper.py: sessions.md.

python benchmarks/session_report.py [FOLDER]      (default: benchmarks/results)
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from session_paper import (
    GPTS_PAPER,
    GPTS_RATES,
    MIXED_PAPER,
    OVERLOADED_S,
    sustained,
    values_of,
)
from session_speed import PARTS, TPOT_S, TTFT_S, ratios, slowdown

RESULTS = Path(__file__).with_name("results")
COLORS = ("#0072B2", "#E69F00", "#999999", "#CC79A7", "#009E73")
INTRODUCTION = """# Programs in sessions

The time of a program of many calls when a session runs it, and when a client makes every call.
Written by `benchmarks/session_report.py`.

"""

Row = Mapping[str, Any]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines) + "\n"


def made(results: Row) -> str:
    here = results["environment"]
    return f"{here['cpu']}, {here['cores']} cores, torch {here['torch']}, commit {here['commit']}."


# Measured


def speed_page(results: Row) -> Iterator[str]:
    yield "## Measured\n\n"
    yield (
        f"SmolLM2-135M in fp32 over HTTP, {made(results)} Each client request has an additional "
        f"latency of {1e3 * results['delay_s']:.0f} ms. Medians of {results['rounds']} rounds; "
        "`times ours` is the median of the ratios within a round.\n\n"
        "![seconds of programs](sessions_cpu.png)\n\n"
    )
    rows = []
    for name, ways in results["parts"].items():
        seconds, gaps = ratios(ways, "seconds"), ratios(ways, "decode_s")
        for way, total, gap in zip(ways, seconds, gaps, strict=True):
            first = way is ways[0]
            rows.append(
                [
                    PARTS[name].title if first else "",
                    way["way"],
                    f"{_median(way, 'seconds'):.1f}",
                    "" if first else f"{statistics.median(total):.2f}",
                    f"{1e3 * _median(way, 'decode_s'):.0f}",
                    "" if first else f"{statistics.median(gap):.2f}",
                    f"{way['asked']:.1f}" if way["asked"] else "",
                ]
            )
    head = ("program", "way", "s", "times ours", "TPOT, ms", "times ours", "target")
    yield table(head, rows)
    if "mixed" in results:
        yield from _mixed_page(results["mixed"])


def _mixed_page(found: Row) -> Iterator[str]:
    yield "### Chats beside map-reduce programs\n\n"
    rows = []
    for name, row in found.items():
        programs = row["programs_s"]
        rows.append(
            [
                name,
                f"{row['both_met']} of {row['chats']}" if row["chats"] else "",
                f"{statistics.mean(programs):.1f}" if programs else "",
                f"{100 * row['engine_busy_s'] / row['seconds']:.0f} %",
            ]
        )
    yield table(("", "chats that met both objectives", "s per program", "engine busy"), rows)
    yield (
        f"Objectives: TTFT {1e3 * TTFT_S:.0f} ms, TPOT {1e3 * TPOT_S:.0f} ms. Beside chats a "
        f"program takes {slowdown(found):.2f} times the sum of its time alone and the engine time "
        "of the chats meanwhile (target: at most 1.15 and at least 97 % of the chats on time).\n\n"
    )


def speed_plot(results: Row) -> Figure:
    """A bar for the seconds of each way, grouped by program."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots()
    groups = [(PARTS[name].title, ways) for name, ways in results["parts"].items()]
    place, ticks, labels = 0.0, [], []
    for title, ways in groups:
        middle = place + (len(ways) - 1) / 2
        for index, way in enumerate(ways):
            height = _median(way, "seconds")
            axes.bar(place, height, 0.9, color=COLORS[min(index, 2)])
            times = statistics.median(ratios(ways, "seconds")[index])
            text = way["way"] + ("" if index == 0 else f"\n{times:.2f} x")
            axes.text(place, height, text, ha="center", va="bottom", fontsize=6.5)
            place += 1
        ticks.append(middle)
        labels.append(textwrap.fill(title, 20))
        place += 0.7
    axes.set_xticks(ticks, labels, fontsize=7.5)
    axes.set_ylabel("seconds (median)")
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def prefix_page(results: Row) -> Iterator[str]:
    yield "### Shared prefixes in attention\n\n"
    yield (
        "Decode steps of rows with a shared prefix, and the attention of all layers in them: the "
        "prefix read by each row, over read once (`benchmarks/shared_prefix.py`). "
        f"{made(results)} Target at 16 rows: 1.3. The rest of the step is the same in both, and "
        "dominates for this model on this machine.\n\n"
        "![how many times as fast](shared_prefix_cpu.png)\n\n"
    )
    rows = []
    for row in results["decode_steps"]:
        cells = [str(row["rows"]), str(row["prefix"]), row["kv_dtype"]]
        for part in ("step", "attention"):
            cells += [f"{row[f'{part}_off_ms']:.1f}", f"{row[f'{part}_on_ms']:.1f}"]
            cells.append(f"{row[f'{part}_ratio']:.2f}")
        rows.append(cells)
    head = ("rows", "shared", "KV", "step, ms", "read once", "times", "attention, ms")
    yield table((*head, "read once", "times"), rows)


def prefix_plot(results: Row) -> Figure:
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    kv_dtypes = sorted({row["kv_dtype"] for row in results["decode_steps"]})
    for color, kv_dtype in zip(COLORS, kv_dtypes, strict=False):
        rows = [row for row in results["decode_steps"] if row["kv_dtype"] == kv_dtype]
        for part, style in (("attention", "--"), ("step", "-")):
            axes.plot(
                [row["rows"] for row in rows],
                [row[f"{part}_ratio"] for row in rows],
                style,
                marker="o",
                markersize=4,
                color=color,
                label=f"{part}, {kv_dtype} KV",
            )
    axes.set_xlabel("rows with 1,500 tokens in common")
    axes.set_ylabel("read by each, over read once")
    axes.set_ylim(bottom=1)
    axes.legend(fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


# Simulated


def paper_page(results: Row) -> Iterator[str]:
    yield "## The Parrot paper's settings, simulated\n\n"
    yield (
        "LLaMA-13B (figures 15 and 16: 7B) on one A100 of 80 GB, and LLaMA-7B on four A6000 "
        "(figures 17 and 19), in simulated time: `benchmarks/session_paper.py`. Step times are "
        "derived from data sheets, and the paper measured other software, so compare shapes and "
        "not seconds. They have no L2 cache: each row that reads a shared prefix again takes the "
        "memory's full time, so the gain of reading it once is an upper bound. Ratios are relative "
        "to a session.\n\n"
        "![each figure by its parameter](sessions_paper.png)\n\n"
    )
    for name, figure in results["figures"].items():
        if name in SPECIAL:
            yield from SPECIAL[name](figure)
            continue
        yield f"### Figure {name}: {figure['title']}\n\n"
        rows = []
        ours, unit = values_of(figure, "session"), figure["measure"]["unit"]
        for way in figure["ways"]:
            values = values_of(figure, way)
            rows.append([f"{way}, {unit}", *(f"{value:.1f}" for value in values)])
            if way == "session":
                continue
            pairs = zip(values, ours, strict=True)
            rows.append(["times ours", *(f"{theirs / own:.2f}" for theirs, own in pairs)])
            if way in figure["paper"]:
                published = figure["paper"][way]
                rows.append(["in the paper", *("" if r is None else f"{r:.2f}" for r in published)])
        yield table((figure["x_label"], *(f"{x:g}" for x in figure["x"])), rows)


def _paper_gpts(figure: Row) -> Iterator[str]:
    yield "### Figure 17: questions to four GPTs applications on four engines\n\n"
    yield (
        "Mean latency per output token in ms by requests per second. A rate is sustained if that "
        f"is at most {1e3 * OVERLOADED_S:.0f} ms; higher rates were not tried. The paper's ratios "
        "are those of its text. The system prompts have 3,000 tokens, the outputs 100 to 500; the "
        "paper does not state its lengths. Placement matters less here: each engine has room for "
        "all four prompts (12,000 of 62,769 tokens), and attention reads each of them once per "
        "step, not only one that all rows share.\n\n"
    )
    baseline = sustained(figure["by calls, no sharing"])
    rows = []
    for way, measured in figure.items():
        cells = {row["rate"]: f"{1e3 * row['per_token_s']:.0f}" for row in measured}
        rate = sustained(measured)
        rows.append(
            [
                way,
                *(cells.get(rate, "") for rate in GPTS_RATES),
                f"{rate:g}",
                f"{rate / baseline:.1f}",
                f"{GPTS_PAPER[way]:.1f}",
                f"{100 * max(row['cached'] for row in measured):.0f} %",
            ]
        )
    rates = (f"{rate:g}/s" for rate in GPTS_RATES)
    yield table(("way", *rates, "sustained", "times baseline", "in the paper", "cached"), rows)


def _paper_mixed(figure: Row) -> Iterator[str]:
    yield "### Figure 19: chats, one per second, beside map-reduce programs\n\n"
    yield (
        "On four engines, each with one map-reduce program at a time; the paper's figures in "
        "brackets.\n\n"
    )
    rows = []
    for way, row in figure.items():
        normalized, decode, program = MIXED_PAPER[way]
        rows.append(
            [
                way,
                f"{row['normalized_ms']:.0f} ({normalized})",
                f"{row['decode_ms']:.1f} ({decode})",
                f"{row['program_s']:.1f} ({program})",
                f"{100 * row['both_met']:.0f} %",
            ]
        )
    head = ("way", "chat, ms per token", "TPOT, ms", "program, s", "chats on time")
    yield table(head, rows)


SPECIAL = {"17": _paper_gpts, "19": _paper_mixed}


def paper_plot(results: Row) -> Figure:
    """A panel per figure: its measure over the varied parameter."""
    figures = {name: f for name, f in results["figures"].items() if name not in SPECIAL}
    columns = 4
    lines = -(-len(figures) // columns)
    figure = Figure(figsize=(12, 2.9 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for axes, (name, drawn) in zip(panels, figures.items(), strict=False):
        _panel(axes, name, drawn)
    for axes in panels[len(figures) :]:
        axes.set_visible(False)
    return figure


def _panel(axes: Axes, name: str, drawn: Row) -> None:
    for color, way in zip(COLORS, drawn["ways"], strict=False):
        axes.plot(
            drawn["x"], values_of(drawn, way), marker="o", markersize=4, color=color, label=way
        )
    axes.set_title(f"{name}: {drawn['title']}", fontsize=8)
    axes.set_xlabel(drawn["x_label"], fontsize=8)
    unit = drawn["measure"]["unit"]
    axes.set_ylabel("seconds" if unit == "s" else unit, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=6)
    axes.spines[["top", "right"]].set_visible(False)


def _median(way: Row, key: str) -> float:
    return statistics.median(run[key] for run in way["runs"])


def write(folder: Path) -> None:
    text = INTRODUCTION
    for stem, page, plot in (
        ("sessions_cpu", speed_page, speed_plot),
        ("shared_prefix_cpu", prefix_page, prefix_plot),
        ("sessions_paper", paper_page, paper_plot),
    ):
        path = folder / f"{stem}.json"
        if path.exists():
            results = json.loads(path.read_text())
            text += "".join(page(results))
            plot(results).savefig(folder / f"{stem}.png", dpi=110)
    (folder / "sessions.md").write_text(text.rstrip() + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
