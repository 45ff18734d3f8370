"""What best-effort work may slow down streams, against its throughput, in virtual time.

    python benchmarks/slack.py [--seconds 300] [--seeds 3] [--json FILE] [--quick]

The embedded model on two cores (fp32), with chats of the BROS paper's LMSYS lengths, prompts cut at
200 tokens, at three rates.

curve      16 rows of a batch whose window is far are always in flight, with each --rt-slowdown.
           1000: only the objectives bound it, as for work in a hurry.
backlog    16 best-effort requests without a deadline are always in flight.
windows    One batch of 300 rows beside 0.25 chats per second, with tighter and tighter windows.

The slowdown of a stream is its time per token over what its steps would have taken without
best-effort work. "of alone" is the median time per token over that of a run without best-effort
work; it is more, since slower streams are more at a time.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import benchmark_parser, save, table_of
from rich.console import Console

from bros.core.request import ServiceClass
from bros.simulator.metrics import report_of
from bros.workload.arrivals import BE_SIZES, Arrival, PoissonLoad, Size
from bros.workload.attainment import Summary

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from support.batch_run import BatchRun, run_batch

RT, BE = ServiceClass.RT, ServiceClass.BE
RATES = (0.1, 0.25, 0.4)
TARGETS = (1.1, 1.25, 1.4, 1.5, 2.0, 3.0, 1000.0)
WINDOWS_S = (190.0, 220.0, 260.0, 300.0, 450.0, 900.0)
FAR_S, ENDLESS = 1e6, 10**6
LONGEST = 200


def chats(rate: float, seconds: float, seed: int) -> list[Arrival]:
    found = PoissonLoad(rate, "lmsys").arrivals(seconds, seed)
    return [
        Arrival(a.time_s, Size(min(a.size.prompt_tokens, LONGEST), a.size.output_tokens))
        for a in found
    ]


def run(rate: float, seconds: float, seed: int, **options: Any) -> BatchRun:
    """16 best-effort requests are always in flight. options: of run_batch."""
    return run_batch(
        chats(rate, seconds, seed),
        rows=ENDLESS,
        window_s=options.pop("window_s", FAR_S * ENDLESS),
        duration_s=seconds,
        sizes=BE_SIZES,
        seed=seed,
        **options,
    )


def figures(runs: Sequence[BatchRun]) -> dict[str, Any]:
    """The figures of several seeds together."""
    slowdowns, tpot_s, met, decided, rates = [], [], 0, 0, []
    for each in runs:
        report = report_of(each.result, each.slo)
        rt, be = report.by_class[RT], report.by_class[BE]
        slowdowns += [r.slowdown for r in each.result.records if r.slowdown is not None]
        tpot_s += each.paces()
        met, decided = met + rt.both_met.met, decided + rt.both_met.decided
        rates.append(be.tokens_per_s)
    slowdown = Summary.of(slowdowns)
    return {
        "slowdown_mean": slowdown.mean,
        "slowdown_p50": slowdown.p50,
        "slowdown_p99": slowdown.p99,
        "tpot_p50_s": Summary.of(tpot_s).p50,
        "both_met": met,
        "decided": decided,
        "be_tokens_per_s": statistics.fmean(rates),
    }


def text(value: float | None, scale: float = 1.0, form: str = ".2f") -> str:
    return "-" if value is None else f"{scale * value:{form}}"


def pace_alone_s(rate: float, seconds: float, seeds: Sequence[int]) -> float:
    """Median time per token of the chats beside one row."""
    paces = [
        pace
        for seed in seeds
        for pace in run_batch(
            chats(rate, seconds, seed), rows=1, window_s=FAR_S, duration_s=seconds, seed=seed
        ).paces(seconds)
    ]
    return Summary.of(paces).p50 or 1.0


def row(name: str, found: dict[str, Any], most: float, alone_s: float) -> tuple[str, ...]:
    """most: tokens per second that are 100 %. alone_s: time per token without best-effort work."""
    return (
        name,
        *(text(found[f"slowdown_{which}"]) for which in ("mean", "p50", "p99")),
        text(found["tpot_p50_s"], 1000.0, ".0f"),
        text(found["tpot_p50_s"] and found["tpot_p50_s"] / alone_s),
        f"{100 * found['both_met'] / max(found['decided'], 1):.1f}",
        f"{found['be_tokens_per_s']:.0f}",
        f"{100 * found['be_tokens_per_s'] / most:.0f}",
    )


HEADINGS = (
    *("", "slowdown mean", "median", "p99", "ms/token p50", "of alone", "both met %"),
    *("BE tokens/s", "of most %"),
)


def curve(console: Console, seconds: float, seeds: Sequence[int]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for rate in RATES:
        found = {
            f"{target:g}": figures([run(rate, seconds, s, rt_slowdown=target) for s in seeds])
            for target in TARGETS
        }
        alone_s = pace_alone_s(rate, seconds, seeds)
        most = found[f"{TARGETS[-1]:g}"]["be_tokens_per_s"]
        rows = [row(name, each, most, alone_s) for name, each in found.items()]
        console.print(table_of(f"batch with a far window, {rate:g} chats/s", HEADINGS, rows))
        results[f"{rate:g}"] = {"tpot_alone_s": alone_s, **found}
    return results


def backlog(console: Console, seconds: float, seeds: Sequence[int]) -> dict[str, Any]:
    """fcfs, only the objectives, and the default."""
    results: dict[str, Any] = {}
    for rate in RATES:
        cases: dict[str, dict[str, Any]] = {
            "fcfs": {"policy": "fcfs"},
            "objectives": {"rt_slowdown": TARGETS[-1]},
            "default": {},
        }
        found = {
            name: figures([run(rate, seconds, s, window_s=None, **case) for s in seeds])
            for name, case in cases.items()
        }
        alone_s = pace_alone_s(rate, seconds, seeds)
        most = found["objectives"]["be_tokens_per_s"]
        rows = [row(name, each, most, alone_s) for name, each in found.items()]
        console.print(table_of(f"backlog without deadlines, {rate:g} chats/s", HEADINGS, rows))
        results[f"{rate:g}"] = {"tpot_alone_s": alone_s, **found}
    return results


def windows(console: Console, scale: float) -> dict[str, Any]:
    """scale: of rows and windows."""
    results: dict[str, Any] = {}
    rows = []
    for window_s in WINDOWS_S:
        for name, target in (("objectives", TARGETS[-1]), ("default", None)):
            seconds = scale * window_s
            each = run_batch(
                chats(0.25, seconds, 1),
                rows=round(scale * 300),
                window_s=seconds,
                duration_s=seconds,
                rt_slowdown=target,
            )
            beside = [r for r in each.result.records if r.arrival_s < each.until_s]
            slowdowns = Summary.of([r.slowdown for r in beside if r.slowdown is not None])
            found = {
                "window_s": seconds,
                "ended_s": each.ended_s,
                "slowdown_mean": slowdowns.mean,
                "slowdown_p50": slowdowns.p50,
                "tpot_p50_s": Summary.of(each.paces()).p50,
            }
            results[f"{window_s:g} s, {name}"] = found
            rows.append(
                (
                    f"{seconds:g} s, {name}",
                    text(each.ended_s, form=".0f"),
                    *(text(found[f"slowdown_{which}"]) for which in ("mean", "p50")),
                    text(found["tpot_p50_s"], 1000.0, ".0f"),
                )
            )
    headings = (
        "window",
        "done after s (-: not in time)",
        "slowdown mean",
        "median",
        "ms/token p50",
    )
    console.print(table_of("a batch with a window beside 0.25 chats/s", headings, rows))
    return results


def main() -> None:
    parser = benchmark_parser(__doc__, seconds=10.0, seeds=1)
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each case")
    args = parser.parse_args()
    console, seeds = Console(), range(1, 1 + args.seeds)
    if not console.is_terminal:
        console.width = 100
    results = {
        "curve": curve(console, args.seconds, seeds),
        "backlog": backlog(console, args.seconds, seeds),
        "windows": windows(console, min(1.0, args.seconds / 300.0)),
    }
    save(args.json, {"seconds": args.seconds, "seeds": args.seeds, **results})


if __name__ == "__main__":
    main()
