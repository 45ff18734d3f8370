"""Renders the results of replicas_sim.py: replicas.md and its plot.

python benchmarks/replicas_report.py [FOLDER]      (default: benchmarks/results)
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import folder_with, results_folder
from matplotlib.figure import Figure
from session_report import COLORS, table

RESULTS = Path(__file__).with_name("results")
STEM = "replicas_sim"
INTRODUCTION = """# Several replicas behind a router

Latencies on several replicas under different routers, in simulated time. The router and the
engines' schedulers, KV memory and prefix caches are the real ones; step times are those of Preble's
published simulator for Mistral-7B on one A6000 and Llama-3-70B on four H100 (`profiles/`); no text
is generated. Prompts follow the statistics of the paper's Table 1
(`bros/simulator/prefix_workloads.py`). The paper measured real GPUs and other software, so compare
ratios and not seconds. Written by `benchmarks/replicas_report.py` from the results of
`benchmarks/replicas_sim.py`.

"""

PAPER_RATIOS = {
    "toolbench": "1.5 to 14.5, p99 2 to 10",
    "embodied": "1.5 to 14.5, p99 2 to 10",
    "programming": "1.56 to 1.8, p99 3 to 4",
    "video": "1.5 to 14.5, p99 2 to 10",
    "loogle": "1.5 to 14.5, p99 2 to 10",
}
"""Latency with round robin over that with Preble, in the paper. Programming has its own figure, the
others share one."""

NAMES = {"rr": "round robin", "least": "least loaded", "oracle": "oracle partition", "e2": "e2"}

Row = Mapping[str, Any]
Groups = Mapping[str, Sequence[Row]]


def groups_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Group -> the rows that are compared with each other."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return groups


def of_router(rows: Sequence[Row], router: str) -> Row | None:
    return next((row for row in rows if row["router"] == router), None)


def seconds(row: Row, which: str, key: str = "latency_s") -> str:
    value = row[key][which]
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def times(row: Row, base: Row, which: str, key: str = "latency_s") -> float:
    """The latency of `row` relative to `base`."""
    found: float = row[key][which] / base[key][which]
    return found


def ratio(row: Row, base: Row, which: str, key: str = "latency_s") -> str:
    return f"{times(row, base, which, key):.2f}"


def rivals(ways: Sequence[Row]) -> tuple[Row, Row, Row]:
    """The rows of e2, round robin and the oracle partition."""
    ours, rr, oracle = (of_router(ways, name) for name in ("e2", "rr", "oracle"))
    assert ours is not None and rr is not None and oracle is not None
    return ours, rr, oracle


def workloads_page(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Preble's workloads (its figure 7)\n\n![mean latency](replicas_sim.png)\n\n"
    yield (
        "Rates are requests/s over all replicas. `rr / e2` and `oracle / e2`: latency with "
        "round robin, or with a partition that knows the workload, relative to e2 (target: at "
        "least 1.5, p99 2; and e2 at most 5 % longer than the partition). Of the programming "
        "responses, 1 % are longer than 1,700 tokens, which takes as long behind any router: there "
        "the p99 latency reflects these responses, and the p99 TTFT reflects the queueing.\n\n"
    )
    lines = []
    for group, ways in groups_of(rows).items():
        ours, rr, oracle = rivals(ways)
        lines.append(
            [
                group,
                *(f"{seconds(row, 'mean')} / {seconds(row, 'p99')}" for row in (rr, oracle, ours)),
                *(ratio(rr, ours, which) for which in ("mean", "p99")),
                ratio(rr, ours, "p99", "ttft_s"),
                *(ratio(oracle, ours, which) for which in ("mean", "p99")),
                " / ".join(f"{100 * row['hits']:.0f}" for row in (rr, oracle, ours)),
                PAPER_RATIOS[group.split(",")[0]],
            ]
        )
    head = ["", "rr, mean / p99 s", "oracle", "e2", "rr / e2, mean", "p99", "p99 of first tokens"]
    head += ["oracle / e2, mean", "p99", "cached, % (rr / oracle / e2)", "rr / Preble in the paper"]
    yield table(head, lines)
    yield _verdict(groups_of(rows))


def _verdict(groups: Groups) -> str:
    """A sentence on how many cases meet the targets."""
    cases = {group: rivals(ways) for group, ways in groups.items()}
    quicker = sum(times(rr, ours, "mean") >= 1.5 for ours, rr, _ in cases.values())
    tails = sum(times(rr, ours, "p99") >= 2.0 for ours, rr, _ in cases.values())
    behind = [(times(ours, oracle, "mean"), group) for group, (ours, _, oracle) in cases.items()]
    near = sum(found <= 1.05 for found, _ in behind)
    worst, where = max(behind)
    return (
        f"Of {len(groups)} cases, round robin takes at least 1.5 times as long in {quicker}, and "
        f"twice as long at p99 in {tails}; e2 takes at most 5 % longer than the partition in "
        f"{near}, and {worst:.3f} times as long in the worst ({where}). In the other cases of "
        "round robin, replicas are underutilized or decoding dominates the latency.\n\n"
    )


def ablation_page(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Ablation (its figure 10)\n\n"
    yield (
        "ToolBench with 320 tools, Zipf 1.1, on four A6000. All requests are best-effort, so that "
        "there is a queue which the priority groups of policy bros can order. In the paper each "
        "step improves the mean and p99, the last one p99 only. Here E2 alone bounds the wait of "
        "requests for their prefix, which balances the load so well that the next two steps change "
        "nothing; priority groups improve the mean.\n\n"
    )
    lines = []
    for group, ways in groups_of(rows).items():
        lines += [
            [
                group,
                row["way"],
                seconds(row, "mean"),
                seconds(row, "p99"),
                f"{100 * row['hits']:.1f}",
                f"{row['balance']:.2f}",
            ]
            for row in ways
        ]
    yield table(("", "router", "mean, s", "p99, s", "cached, %", "busiest / mean"), lines)


def regimes_page(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Workloads with few, or too popular, shared prefixes\n\n"
    yield (
        "Four A6000. Without shared prefixes, or with a single one for all requests, spreading "
        "requests evenly is optimal. Mean / p99 seconds.\n\n"
    )
    lines = []
    for group, ways in groups_of(rows).items():
        cells = [f"{seconds(row, 'mean')} / {seconds(row, 'p99')}" for row in ways]
        lines.append([group, ways[0]["load"].split(",")[0], *cells])
    head = [NAMES[row["router"]] for row in next(iter(groups_of(rows).values()))]
    yield table(("", "load", *head), lines)


def classes_page(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Real-time and best-effort requests\n\n"
    yield (
        "ToolBench on two A6000 with policy bros; half of the requests are best-effort. Objectives "
        "of the real-time ones: TTFT 1 s, TPOT 200 ms.\n\n"
    )
    lines = []
    for row in rows:
        rt, be = row["by_class"]["rt"], row["by_class"]["be"]
        lines.append(
            [
                NAMES[row["router"]],
                f"{100 * rt['both_met']:.1f} %",
                f"{rt['ttft_p99_s']:.2f}",
                f"{rt['latency_mean_s']:.2f}",
                f"{be['latency_mean_s']:.2f}",
                f"{100 * row['hits']:.1f}",
            ]
        )
    head = ("router", "on time", "first token p99, s", "mean, s", "best-effort, mean s")
    yield table((*head, "cached, %"), lines)


def scaling_page(rows: Sequence[Row]) -> Iterator[str]:
    yield "## From 1 replica to 1,024\n\n"
    yield (
        "ToolBench, 8 requests per second and replica. Runs with more replicas are shorter, so a "
        "larger share of their requests has a new prefix.\n\n"
    )
    lines = []
    for group, ways in groups_of(rows).items():
        cells: list[str] = []
        for row in ways:
            cells += [seconds(row, "mean"), seconds(row, "p99"), f"{100 * row['hits']:.0f}"]
        lines.append([group, str(ways[0]["requests"]), *cells])
    routers = [NAMES[row["router"]] for row in next(iter(groups_of(rows).values()))]
    head = [cell for name in routers for cell in (f"{name}, mean s", "p99 s", "cached, %")]
    yield table(("replicas", "requests", *head), lines)


def azure_page(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Tools and videos at the times of the Azure traces (its figure 8)\n\n"
    yield "Four A6000; the rates are averages. Mean / p99 seconds.\n\n"
    lines = []
    for group, ways in groups_of(rows).items():
        ours, rr, _ = rivals(ways)
        cells = [f"{seconds(row, 'mean')} / {seconds(row, 'p99')}" for row in ways]
        lines.append([group, *cells, *(ratio(rr, ours, which) for which in ("mean", "p99"))])
    head = [NAMES[row["router"]] for row in next(iter(groups_of(rows).values()))]
    yield table(("", *head, "rr / e2, mean", "p99"), lines)


def mooncake_page(rows: Sequence[Row]) -> Iterator[str]:
    yield "## Mooncake's conversations\n\n"
    yield "The first requests of the trace (Apache-2.0), slowed down. Mean / p99 seconds.\n\n"
    lines = []
    for group, ways in groups_of(rows).items():
        for row in ways:
            times = [seconds(row, which) for which in ("mean", "p99")]
            lines.append([group, NAMES[row["router"]], *times, f"{100 * row['hits']:.1f}"])
    yield table(("", "router", "mean, s", "p99, s", "cached, %"), lines)


PAGES = {
    "workloads": workloads_page,
    "ablation": ablation_page,
    "regimes": regimes_page,
    "classes": classes_page,
    "scaling": scaling_page,
    "azure": azure_page,
    "mooncake": mooncake_page,
}


def plot(rows: Sequence[Row]) -> Figure:
    """A group of bars for each case: the mean, and a line up to p99."""
    groups = groups_of(rows)
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    axes = figure.subplots()
    for index, (color, router) in enumerate(zip(COLORS, ("e2", "oracle", "rr"), strict=False)):
        found = [of_router(ways, router) for ways in groups.values()]
        places = [place + 0.27 * (index - 1) for place in range(len(groups))]
        means = [row["latency_s"]["mean"] if row else 0.0 for row in found]
        tails = [row["latency_s"]["p99"] if row else 0.0 for row in found]
        axes.bar(places, means, 0.25, color=color, label=NAMES[router])
        axes.vlines(places, means, tails, color=color, linewidth=1)
    axes.set_yscale("log")
    axes.set_ylabel("latency in seconds: mean, and p99 (line)")
    axes.set_xticks(range(len(groups)), list(groups), rotation=60, ha="right", fontsize=7)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def write(folder: Path) -> None:
    parts = json.loads((folder / f"{STEM}.json").read_text())["parts"]
    text = INTRODUCTION
    for name, page in PAGES.items():
        if name in parts:
            text += "".join(page(parts[name]["rows"]))
            if name == "workloads":
                plot(parts[name]["rows"]).savefig(folder / f"{STEM}.png", dpi=110)
    (folder / "replicas.md").write_text(text.rstrip() + "\n")


def main() -> None:
    write(results_folder(__doc__, RESULTS, folder_with(f"{STEM}.json")))


if __name__ == "__main__":
    main()
