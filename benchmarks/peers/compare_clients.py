"""Compares the measurements of `bros bench` and `vllm bench serve`.

    python benchmarks/peers/compare_clients.py VLLM_VENV [--rounds 6] [--json FILE]
    python benchmarks/peers/compare_clients.py --quick      only tests the program

Both unmodified clients replay the same trace (Mooncake's format, which both read: lengths of LMSYS
chats, Poisson arrivals) against one bros server with the embedded model. They alternate, with a
different first client in every round, because the speed of the machine varies; then the medians
over all rounds are compared. The engine leaves a core to the clients (--threads): otherwise a
client that needs more processor time would measure a slower server. Run nothing else.

Without VLLM_VENV `bros bench` takes the part of the other client, too.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import export_model
from quick import add_quick
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bros.bench.results import environment
from bros.cli.bench import local_server
from bros.core.clock import SystemClock
from bros.core.machine import available_cores
from bros.workload.arrivals import BLOCK_TOKENS, PoissonLoad

TARGET = 0.05
TAIL_S = 15.0
"""Time for the last responses after the last arrival."""

NAMES = ("bros bench", "vllm bench serve")
Figures = dict[str, list[float]]
"""ttft_ms and tpot_ms of every request."""


def write_trace(path: Path, rate: float, duration_s: float, longest: int, seed: int) -> int:
    """Write a trace without shared prefixes; returns the number of requests."""
    rows: list[dict[str, Any]] = []
    blocks = 0
    for arrival in PoissonLoad(rate, "lmsys").arrivals(duration_s, seed):
        prompt = min(arrival.size.prompt_tokens, longest)
        count = -(-prompt // BLOCK_TOKENS)
        rows.append(
            {
                "timestamp": 1000.0 * arrival.time_s,
                "input_length": prompt,
                "output_length": max(2, min(arrival.size.output_tokens, longest)),
                "hash_ids": list(range(blocks, blocks + count)),
            }
        )
        blocks += count
    start_ms = rows[0]["timestamp"]
    for row in rows:
        row["timestamp"] -= start_ms  # both count from the first request
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return len(rows)


def ask_bros(url: str, trace: Path, out: Path, duration_s: float) -> Figures:
    run(
        [sys.executable, "-m", "bros", "bench", "--target", url, "--scenarios", "S0"]
        + ["--rt", f"mooncake:{trace}", "--duration", str(duration_s), "--warm-up", "0"]
        + ["--out", str(out)],
        out,
    )
    (path,) = out.glob("requests_*.csv")
    rows = list(csv.DictReader(path.open()))
    unfinished = [row["name"] for row in rows if row["outcome"] != "completed"]
    if unfinished:
        raise SystemExit(f"bros bench: {unfinished} did not finish; see {out}")
    # vLLM's times count from when a request was sent.
    lags_s = [float(row["sent_s"]) - float(row["due_s"]) for row in rows]
    return {
        "ttft_ms": [
            1e3 * (float(row["ttft_s"]) - lag_s) for row, lag_s in zip(rows, lags_s, strict=True)
        ],
        "tpot_ms": [1e3 * float(row["tpot_s"]) for row in rows],
    }


def ask_vllm(url: str, trace: Path, out: Path, venv: Path, model: Path, count: int) -> Figures:
    run(
        [str(venv / "bin" / "vllm"), "bench", "serve", "--base-url", url, "--backend", "openai"]
        + ["--model", str(model), "--served-model-name", model.name]
        + ["--dataset-name", "timed_trace", "--dataset-path", str(trace)]
        + ["--timed-trace-chunk-hash-size", str(BLOCK_TOKENS)]
        + ["--timed-trace-sec-multiplier", "0.001", "--num-prompts", str(count)]
        + ["--save-result", "--save-detailed", "--result-dir", str(out)]
        + ["--result-filename", "vllm.json"],
        out,
    )
    result = json.loads((out / "vllm.json").read_text())
    if result["completed"] != count:
        raise SystemExit(f"vllm bench serve: {result['completed']} of {count}; see {out}")
    found: Figures = {"ttft_ms": [1e3 * seconds for seconds in result["ttfts"]], "tpot_ms": []}
    for gaps, tokens in zip(result["itls"], result["output_lens"], strict=True):
        # Its own definition: the time after the first token, divided by tokens, not by chunks.
        found["tpot_ms"].append(1e3 * sum(gaps) / (tokens - 1))
    own = result["median_tpot_ms"]
    if abs(statistics.median(found["tpot_ms"]) - own) > 1e-3 * own:
        raise SystemExit(f"its TPOT median is {own} ms, but its requests have another; see {out}")
    return found


def run(command: Sequence[str], folder: Path) -> None:
    folder.mkdir(parents=True)
    with (folder / "log").open("w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        raise SystemExit((folder / "log").read_text()[-2000:])


async def measure(args: argparse.Namespace, folder: Path) -> tuple[int, list[dict[str, Figures]]]:
    """(requests per round, client -> figures for each round)"""
    trace, model = folder / "trace.jsonl", folder / "model"
    count = write_trace(trace, args.rate, args.duration, args.longest, args.seed)
    export_model.main(model)
    rounds: list[dict[str, Figures]] = []
    arguments = ("--served-model-name", model.name, "--weights", "fp32", "--threads", args.threads)
    async with local_server(arguments) as url:
        for number in track(range(args.rounds), "rounds", console=Console(stderr=True)):
            found = {}
            for name in NAMES if number % 2 == 0 else NAMES[::-1]:
                out = folder / f"{number} {name}"
                lasts_s = args.duration + TAIL_S
                work = (
                    (ask_bros, url, trace, out, lasts_s)
                    if name == NAMES[0] or args.vllm is None
                    else (ask_vllm, url, trace, out, args.vllm, model, count)
                )
                found[name] = await asyncio.to_thread(*work)
            rounds.append(found)
    return count, rounds


def compare(rounds: Sequence[dict[str, Figures]]) -> list[dict[str, Any]]:
    """A row per metric: the median of each client, their difference, and that of each round."""
    rows = []
    for metric in ("ttft_ms", "tpot_ms"):
        ours, theirs = (
            statistics.median([value for found in rounds for value in found[name][metric]])
            for name in NAMES
        )
        by_round = [
            statistics.median(found[NAMES[0]][metric]) / statistics.median(found[NAMES[1]][metric])
            - 1
            for found in rounds
        ]
        rows.append(
            {
                "metric": metric,
                NAMES[0]: round(ours, 2),
                NAMES[1]: round(theirs, 2),
                "difference": round(ours / theirs - 1, 4),
                "difference_by_round": [round(value, 4) for value in by_round],
            }
        )
    return rows


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    table = Table(title=f"medians in ms; target: within {TARGET:.0%}")
    for column in ("metric", *NAMES, "difference", "by round"):
        table.add_column(column, justify="left" if column == "metric" else "right")
    for row in rows:
        by_round = sorted(row["difference_by_round"])
        table.add_row(
            row["metric"].removesuffix("_ms").upper(),
            *(f"{row[name]:.1f}" for name in NAMES),
            f"{row['difference']:+.1%}",
            f"{by_round[0]:+.1%} to {by_round[-1]:+.1%}",
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("vllm", type=Path, nargs="?", help="virtual environment with vLLM")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--duration", type=float, default=30.0, help="seconds of arrivals")
    parser.add_argument("--rate", type=float, default=0.4, help="requests per second")
    parser.add_argument(
        "--longest", type=int, default=100, help="maximum tokens of prompt and of output"
    )
    parser.add_argument("--threads", default=str(max(1, available_cores() - 1)), metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="where to save the figures")
    add_quick(parser, rounds=1, duration=4.0, rate=2.0, longest=10)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        count, rounds = asyncio.run(measure(args, Path(folder)))
    rows = compare(rounds)
    show(rows, Console())
    if args.json:
        saved = {
            "environment": dataclasses.asdict(environment(SystemClock())),
            "settings": {
                "rate": args.rate,
                "duration_s": args.duration,
                "rounds": args.rounds,
                "requests_per_round": count,
                "longest": args.longest,
                "threads": args.threads,
                "seed": args.seed,
            },
            "medians": rows,
        }
        args.json.write_text(json.dumps(saved, indent=2) + "\n")
        print(f"saved {args.json}")


if __name__ == "__main__":
    main()
