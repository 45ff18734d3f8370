"""Renders sessions.md: results of session_speed, shared_prefix, batched_tokens and session_paper.

python benchmarks/session_report.py [FOLDER]      (default: benchmarks/results)
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from harness import results_folder
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from session_paper import (
    GPTS_LITTLE_KV,
    GPTS_PAPER,
    GPTS_RATES,
    LATENCY,
    LEAST,
    LITTLE,
    MIXED_S,
    MIXED_SEEDS,
    OVERLOADED_S,
    RATE_STEP,
    gpts_baseline,
    mixed_paper,
    ratios_of,
    sustained,
    values_of,
)
from session_speed import (
    CHAT_RATES,
    DOCUMENT_TOKENS,
    FLOOD,
    KNOWN_AFTER,
    MAPS,
    PARTS,
    PROGRAMS,
    REPLICAS,
    ROUTERS,
    TPOT_S,
    TTFT_S,
    errors,
    ratios,
    slowdown,
    split_ratios,
    times_ours,
)

RESULTS = Path(__file__).with_name("results")
COLORS = ("#0072B2", "#E69F00", "#999999", "#CC79A7", "#009E73")
INTRODUCTION = """# Programs in sessions

The time of a program of many calls when a session runs it, and when a client makes every call.
Written by `benchmarks/session_report.py`.

"""

Row = Mapping[str, Any]
Page = Callable[[Row], Iterable[str]]
Plot = Callable[[Row], Figure]


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
        f"SmolLM2-135M in {results.get('weights', 'fp32')} over HTTP, {made(results)} Each client "
        f"request has an additional latency of {1e3 * results['delay_s']:.0f} ms. Medians of "
        f"{results['rounds']} rounds; `times ours` is the median of the ratios within a round.\n\n"
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


def beside_page(results: Row) -> Iterator[str]:
    yield "### Beside load of others\n\n"
    slow, fast = CHAT_RATES
    names = {
        "flood": f"{FLOOD} best-effort requests in flight",
        "steady_chats": f"{slow:g} chats per second",
        "busy_chats": f"{fast:g} chats per second",
        "flood_and_chats": f"{FLOOD} best-effort requests and {fast:g} chats per second",
    }
    yield (
        f"A map-reduce of 8 parts that a user waits for. SmolLM2-135M in "
        f"{results.get('weights', 'fp32')}, {made(results)} "
        "Clients are on the same machine and have no network delay. Medians of "
        f"{results['rounds']} rounds, with the median ratio to the session of the same round. "
        f"Chats are on time if TTFT is at most {1e3 * TTFT_S:.0f} ms and TPOT at most "
        f"{1e3 * TPOT_S:.0f} ms.\n\n"
    )
    rows = []
    for load, ways in results["beside"].items():
        for name, row in ways.items():
            seconds, times = row["seconds"], times_ours(ways, name)
            on_time = f"{row['both_met']} of {row['chats']}" if row["chats"] else ""
            first = name == "session"
            rows.append(
                [
                    names[load] if first else "",
                    name,
                    f"{statistics.median(seconds):.1f}",
                    "" if first else f"{times:.2f}",
                    on_time,
                ]
            )
    yield table(("beside", "way", "s", "times ours", "chats on time"), rows)


def replicas_page(results: Row) -> Iterator[str]:
    yield "### On three replicas\n\n"
    found = results["replicas"]
    ours, theirs = (statistics.median(found[name]["cached_tokens"]) for name in ROUTERS)
    yield (
        f"{PROGRAMS} map-reduce programs of {MAPS} maps, each over a document of "
        f"{DOCUMENT_TOKENS} tokens of its own, {REPLICAS} at a time on {REPLICAS} replicas with a "
        f"thread each. SmolLM2-135M in "
        f"{results.get('weights', 'fp32')}, {made(results)} {results['rounds']} round"
        f"{'s' * (results['rounds'] > 1)}. By prefix, {ours / theirs:.2f} times as many prompt "
        "tokens are found in caches as by turns (target: 1.5).\n\n"
    )
    rows = []
    for name, row in found.items():
        used = [len({replica for replica, _ in maps}) for maps in row["placements"]]
        rows.append(
            [
                name,
                f"{statistics.median(row['seconds']):.1f}",
                f"{statistics.median(row['cached_tokens']):,.0f}",
                *(f"{used.count(count)}" for count in range(1, REPLICAS + 1)),
            ]
        )
    counts = ("maps on 1 replica", *(f"on {count}" for count in range(2, REPLICAS + 1)))
    yield table(("placed", "s per program", "cached tokens per round", *counts), rows)
    ratios_of_split = split_ratios(found["by prefix"]) if "costs" in found["by prefix"] else []
    if ratios_of_split:
        yield (
            f"{len(ratios_of_split)} programs were split. The router expected this to cost "
            f"{statistics.median(ratios_of_split):.2f} times the cheapest other placement "
            f"(median), and {max(ratios_of_split):.2f} times in the worst of them.\n\n"
        )


def calibration_page(results: Row) -> Iterator[str]:
    found = results["calibration"]
    known = [
        error
        for kinds in found.values()
        for times in kinds.values()
        for error in errors(times[KNOWN_AFTER:])
    ]
    yield "### Predicted completion\n\n"
    yield (
        "The completion time that a session's view predicts right after a program has been "
        "submitted, against the actual one. SmolLM2-135M in "
        f"{results.get('weights', 'fp32')}, {made(results)} Medians of {results['rounds']} "
        f"programs of each kind after the first {KNOWN_AFTER}, for whose functions less is known. "
        f"Median error: {100 * statistics.median(known):.1f} % (asked: 15).\n\n"
    )
    loads = {"nothing": "alone", "flood": f"beside {FLOOD} best-effort requests"}
    rows = []
    for load, kinds in found.items():
        for kind, times in kinds.items():
            first, later = times[:KNOWN_AFTER], times[KNOWN_AFTER:]
            rows.append(
                [
                    loads.get(load, "beside chats"),
                    kind,
                    f"{statistics.median(predicted for predicted, _ in later):.1f}",
                    f"{statistics.median(actual for _, actual in later):.1f}",
                    f"{100 * statistics.median(errors(later)):.0f}",
                    f"{100 * statistics.median(errors(first)):.0f}",
                ]
            )
    head = ("load", "program", "predicted, s", "actual, s", "error, %", "of the first ones, %")
    yield table(head, rows)


def programs_page(results: Row) -> Iterator[str]:
    yield "## All programs on one and on four engines, simulated\n\n"
    profile = results["profile"]
    yield (
        f"`bros simulate --programs`: {profile['model']} ({profile['weights']}) on "
        f"{profile['device']} per engine, one chat per second beside the programs. These arrive at "
        "the rate of the column, as a session or call by call from a client with "
        f"{1e3 * results['runs'][0]['settings']['delay_s']:.0f} ms of network latency before each "
        "of its requests. A session takes two requests more than one call, so programs of one call "
        "are slower as sessions by that. Chats are on time by the server's default objectives.\n\n"
    )
    rows = []
    calls = {
        (run["programs"], run["replicas"]): run["results"]["latency_s"]
        for run in results["runs"]
        if run["run_as"] == "calls"
    }
    for run in results["runs"]:
        found, key = run["results"], (run["programs"], run["replicas"])
        mean_s, chats = found["latency_s"]["mean"], found["chats_met"]
        rows.append(
            [
                run["programs"],
                f"{run['replicas']}",
                run["run_as"],
                f"{run['settings']['rate']:g}",
                f"{mean_s:.1f}",
                f"{found['latency_s']['p99']:.1f}",
                f"{calls[key]['mean'] / mean_s:.2f}",
                f"{100 * chats['met'] / chats['decided']:.1f} %",
                f"{found['output_tokens_per_s']:.0f}",
                f"{100 * found['cached']:.0f} %",
            ]
        )
    head = (
        "programs",
        "engines",
        "as",
        "per s",
        "mean, s",
        "p99, s",
        "times faster",
        "chats on time",
    )
    yield table((*head, "tokens/s", "cached"), rows)


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


def batched_page(results: Row) -> Iterator[str]:
    yield "### Batched tokens and the time per output token: the paper's figure 10\n\n"
    yield (
        "Milliseconds per output token (TPOT) of rows of equal context that decode together, "
        "without a common prefix (`benchmarks/batched_tokens.py`), medians of "
        f"{results['rounds']} rounds. {made(results)} Batched tokens are rows times context; the "
        "paper's figure has the capacities 2,048 to 12,288 on an A100, where latency rises notably "
        "above 6,144.\n\n"
        "![ms per output token by batched tokens](batched_tokens_cpu.png)\n\n"
    )
    found = {(row["rows"], row["context"]): row["ms"] for row in results["decode"]}
    contexts = sorted({context for _, context in found})
    lines = []
    for rows in sorted({rows for rows, _ in found}):
        times = (found.get((rows, context)) for context in contexts)
        lines.append([str(rows), *("" if ms is None else f"{ms:.1f}" for ms in times)])
    yield table(("rows", *(f"context {context:,}" for context in contexts)), lines)


def batched_plot(results: Row) -> Figure:
    """A line for each number of rows."""
    figure = Figure(figsize=(6, 3.2), layout="constrained")
    axes = figure.subplots()
    counts = sorted({row["rows"] for row in results["decode"]})
    shades = matplotlib.colormaps["viridis"]
    for index, count in enumerate(counts):
        rows = [row for row in results["decode"] if row["rows"] == count]
        axes.plot(
            [row["batched_tokens"] for row in rows],
            [row["ms"] for row in rows],
            marker="o",
            markersize=4,
            color=shades(index / len(counts)),
            label=f"{count} row{'s' * (count > 1)}",
        )
    axes.set_xlabel("batched tokens")
    axes.set_ylabel("ms per output token")
    axes.set_ylim(bottom=0)
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
        head = (figure["x_label"], *(f"{x:g}" for x in figure["x"]))
        yield table(head, rows)
        yield from _paper_variations(name, figure, head)
        if name == "12b":
            yield from _paper_apps(figure)


NOTES = {
    "12a": "The text of the paper states 2.38 at most. Its factors here are the labels of its plot "
    "in order of rising rates from 0 to 3.5 per second; which rates these are, and how long the "
    "requests are, is not in the text.",
    "12b": "Called one by one on the session's engine, the programs take as long as in sessions: "
    "the factor is that of the engine, which runs as many rows as an interval of 40 ms between "
    "tokens allows, and the paper's engine 4,096 tokens. With that limit on both, most of the "
    "paper's factor comes from serving one program after another, which sessions do for values "
    "requested for throughput.",
    "14a": "The maps are real-time requests as any others, with 40 ms between tokens: most prompts "
    "are computed in pieces of about 200 tokens beside rows that decode. The paper's group is one "
    "batch without such an objective. Without it the factors are within 7 % of the paper's.",
    "14b": "The causes are those of figure 14a. 4,096 tokens have room for only one call with a "
    "chunk of 2,048.",
    "15": "The simulated device has no L2 cache, and its kernels no other cost than the memory's. "
    "Figure 16a of the paper gives about a quarter of that cost for reading a prefix again, and "
    "40 ms per token where 28 ms are simulated (32 rows). With both numbers, the factors of figure "
    "15 are within 10 % of the paper's.",
    "16a": "The causes are those of figure 15; both numbers are taken from this figure.",
    "16b": "The causes are those of figure 15, and its numbers come within 17 % of the paper's.",
    "18": "Rows that read again: the cost, as in figure 15, and from 16 files on the objective of "
    "40 ms, which bounds how many of them fit into a step. No sharing: the KV memory, too small "
    "for 16 files, and the policy are a part of it. The paper's factor for 16 files is reached if "
    "computing prompts also takes half as long, and steps 12 ms longer; the paper does not state "
    "these times. By calls, latency: the paper's factors are between those of two requests at a "
    "time, as above, and one.",
    "18b": "The paper's amounts are only in its plot, which ends at about 50 GB: without sharing "
    "16 files reach that ceiling there as well.",
}
"""Why factors differ from the paper's: figure -> what the variations show."""


def _paper_variations(name: str, figure: Row, head: Sequence[str]) -> Iterator[str]:
    if figure["variations"]:
        rows = [
            [variation["title"], *(f"{ratio:.2f}" for ratio in ratios_of(variation))]
            for variation in figure["variations"]
        ]
        yield table(("other assumptions, times ours", *head[1:]), rows)
    if name in NOTES:
        yield f"{NOTES[name]}\n\n"


def _paper_apps(figure: Row) -> Iterator[str]:
    """Figure 13, from the last column of figure 12b."""
    ours, theirs = (figure["ways"][way][-1]["each_s"] for way in ("session", LATENCY))
    earlier = sorted(b - a for a, b in zip(ours, theirs, strict=True))
    yield f"### Figure 13: the {len(earlier)} programs of figure 12b, one by one\n\n"
    yield (
        "Seconds by which a program in a session ends earlier than the same program by calls, "
        "latency. In the paper each ends earlier; the seconds are only in its plot.\n\n"
    )
    head = ("least", "median", "most", "programs that end earlier")
    cells = (f"{value:.1f}" for value in (earlier[0], statistics.median(earlier), earlier[-1]))
    count = sum(value > 0 for value in earlier)
    yield table(head, [[*cells, f"{count} of {len(earlier)}"]])


def _paper_gpts(figure: Row) -> Iterator[str]:
    placed, placed_in_little = (
        sustained(figure["session" + memory]) / sustained(figure[LEAST + memory])
        for memory in ("", LITTLE)
    )
    yield "### Figure 17: questions to four GPTs applications on four engines\n\n"
    yield (
        "Mean latency per output token in ms by requests per second. A rate is sustained if that "
        f"is at most {1e3 * OVERLOADED_S:.0f} ms; the highest one was found to within "
        f"{100 * (RATE_STEP - 1):.0f} %. With little KV memory an engine has room for "
        f"{GPTS_LITTLE_KV:,} tokens, as many as the four prompts have. The paper's ratios are "
        "those of its text. The system prompts have 3,000 tokens, the outputs 100 to 500; it does "
        f"not state lengths. Placement is worth {placed:.1f} times the rate here (with little "
        f"memory {placed_in_little:.1f}, in the paper 4.0): with all its memory an engine has room "
        "for all four prompts (12,000 of 62,769 tokens), and attention reads each of them once per "
        "step, not only one that all rows share. If reading again costs a quarter (figure 15), "
        "what reading once gains is nearer to the paper's 2.4.\n\n"
    )
    rows = []
    for way, measured in figure.items():
        cells = {row["rate"]: f"{1e3 * row['per_token_s']:.0f}" for row in measured}
        rate, baseline = sustained(measured), sustained(figure[gpts_baseline(way)])
        rows.append(
            [
                way,
                *(cells.get(rate, "") for rate in GPTS_RATES),
                f"{rate:g}",
                f"{rate / baseline:.1f}",
                f"{GPTS_PAPER[way]:.1f}" if way in GPTS_PAPER else "",
                f"{100 * max(row['cached'] for row in measured):.0f} %",
            ]
        )
    rates = (f"{rate:g}/s" for rate in GPTS_RATES)
    yield table(("way", *rates, "sustained", "times baseline", "in the paper", "cached"), rows)


def _paper_mixed(figure: Row) -> Iterator[str]:
    yield "### Figure 19: chats, one per second, beside map-reduce programs\n\n"
    yield (
        "On four engines, each with one map-reduce program at a time; the paper's figures in "
        "brackets. Documents have 20 chunks, or 52, with which programs take about as long as the "
        "paper's. Means over the chats and programs of "
        f"{len(MIXED_SEEDS)} runs of {MIXED_S:g} s. Sessions request the summaries for throughput, "
        "as the paper's applications, if nothing else is stated.\n\n"
    )
    rows = []
    for way, row in figure.items():
        published = mixed_paper(way)
        cells = [
            f"{row['normalized_ms']:.0f}",
            f"{row['decode_ms']:.1f}",
            f"{row['program_s']:.1f}",
        ]
        if published:
            cells = [f"{cell} ({value})" for cell, value in zip(cells, published, strict=True)]
        rows.append([way, *cells, f"{100 * row['both_met']:.0f} %"])
    head = ("way", "chat, ms per token", "TPOT, ms", "program, s", "chats on time")
    yield table(head, rows)
    yield f"{MIXED_NOTE}\n\n"


MIXED_NOTE = (
    "Chats are on time if TTFT is at most 1 s and TPOT at most 40 ms. Programs that a user waits "
    "for take longer, because their calls are real-time requests as the chats are: each row "
    "demands 40 ms between tokens, so that a step of these engines has room for 200 prompt tokens. "
    "With objectives of 80 ms the programs are faster, and the chats slower. With the longer "
    "documents, programs of sessions take longer than those by calls for throughput, since all "
    "chats keep their pace, beside the calls nearly none: where the chats' objective is 80 ms, "
    "both the programs and the chats are faster than by calls. Beside calls for latency a chat "
    "takes 5.6 times as long as beside sessions in the paper, here 2.2 times, and 6.2 times with "
    "the longer documents: it waits behind the calls of the programs, which are as many as "
    "documents have chunks."
)


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
    sections: tuple[tuple[str, Page, Plot | None], ...] = (
        ("sessions_cpu", speed_page, speed_plot),
        ("sessions_beside_cpu", beside_page, None),
        ("sessions_calibration_cpu", calibration_page, None),
        ("sessions_replicas_cpu", replicas_page, None),
        ("shared_prefix_cpu", prefix_page, prefix_plot),
        ("batched_tokens_cpu", batched_page, batched_plot),
        ("sessions_paper", paper_page, paper_plot),
        ("programs_sim", programs_page, None),
    )
    for stem, page, plot in sections:
        path = folder / f"{stem}.json"
        if path.exists():
            results = json.loads(path.read_text())
            text += "".join(page(results))
            if plot is not None:
                plot(results).savefig(folder / f"{stem}.png", dpi=110)
    (folder / "sessions.md").write_text(text.rstrip() + "\n")


def main() -> None:
    write(results_folder(__doc__, RESULTS))


if __name__ == "__main__":
    main()
