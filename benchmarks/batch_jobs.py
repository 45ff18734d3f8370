"""The cost of batch jobs, and their effect on real-time requests, over HTTP.

    python benchmarks/batch_jobs.py [--parts validation,prefixes,interference] [--json FILE]

`bros serve` with the embedded model in fp32 on this machine. Run nothing else on it.

validation    Files of 50,000 rows of about 0.5 kB or 4 kB: seconds until they are validated, and
              the latency of GET /health meanwhile.
prefixes      200 rows that alternate between 4 system prompts of 800 tokens: the job with rows
              grouped by prefix and the prefix cache, and without either.
interference  Real-time requests beside a batch job, without it, and the job alone: attainment of
              both objectives, and throughput of the job.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from harness import chosen, environment, table_of
from quick import add_quick
from rich.console import Console

from bros.bench.results import BenchResult, Scenario
from bros.bench.running import batch_job
from bros.cli.bench import local_server
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("validation", "prefixes", "interference")
ENDPOINT = "/v1/chat/completions"
SERVER = ("--weights", "fp32", "--max-model-len", "2048")
ROWS, SYSTEM_PROMPTS, SYSTEM_TOKENS, ANSWER_TOKENS = 50_000, 4, 800, 16
PING_EVERY_S = 0.005
ASKED = {"seconds": 20.0, "blocked_ms": 50.0, "speedup": 2.0, "both_met": 0.97, "job_share": 0.85}

Row = dict[str, Any]


def line(custom_id: str, messages: Sequence[dict[str, str]], max_tokens: int) -> bytes:
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0}
    row = {"custom_id": custom_id, "method": "POST", "url": ENDPOINT, "body": body}
    return json.dumps(row).encode() + b"\n"


def words(rng: random.Random, count: int) -> str:
    return " ".join(f"{rng.choice('bcdfgklmnprst')}{rng.randrange(10_000)}" for _ in range(count))


def large_file(bytes_per_row: int) -> list[bytes]:
    rng = random.Random(bytes_per_row)
    text = words(rng, bytes_per_row)
    lines = []
    for i in range(ROWS):
        begin = rng.randrange(bytes_per_row)
        message = {"role": "user", "content": text[begin : begin + bytes_per_row - 150]}
        lines.append(line(f"row-{i}", [message], 16))
    return lines


async def ping(url: str, latencies_ms: list[float]) -> None:
    """Poll /health on one connection."""
    async with aiohttp.ClientSession() as session:
        while True:
            began = time.perf_counter()
            async with session.get(f"{url}/health") as response:
                await response.read()
            latencies_ms.append(1e3 * (time.perf_counter() - began))
            await asyncio.sleep(PING_EVERY_S)


async def validation(report: Callable[[str], None]) -> list[Row]:
    rows = []
    async with local_server(SERVER) as url:
        idle: list[float] = []
        pinging = asyncio.create_task(ping(url, idle))
        await asyncio.sleep(2.0)
        pinging.cancel()
        for bytes_per_row in (500, 4000):
            report(f"validation of {ROWS} rows of {bytes_per_row} bytes")
            rows.append(await validated(url, large_file(bytes_per_row), bytes_per_row, idle))
    return rows


async def validated(url: str, lines: list[bytes], bytes_per_row: int, idle: list[float]) -> Row:
    content, busy = b"".join(lines), []
    form = aiohttp.FormData({"purpose": "batch"})
    form.add_field("file", content, filename="large.jsonl")
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        began = time.perf_counter()
        async with session.post(f"{url}/v1/files", data=form) as response:
            file = await response.json()
        uploaded = time.perf_counter()
        wanted = {"input_file_id": file["id"], "endpoint": ENDPOINT, "completion_window": "24h"}
        pinging = asyncio.create_task(ping(url, busy))
        async with session.post(f"{url}/v1/batches", json=wanted) as response:
            batch = await response.json()
        while batch["status"] == "validating":
            await asyncio.sleep(0.05)
            async with session.get(f"{url}/v1/batches/{batch['id']}") as response:
                batch = await response.json()
        ended = time.perf_counter()
        pinging.cancel()
        assert batch["request_counts"]["total"] == ROWS, batch
        async with session.post(f"{url}/v1/batches/{batch['id']}/cancel") as response:
            batch = await response.json()
        while batch["status"] == "cancelling":
            await asyncio.sleep(0.2)
            async with session.get(f"{url}/v1/batches/{batch['id']}") as response:
                batch = await response.json()
    return {
        "bytes_per_row": bytes_per_row,
        "megabytes": len(content) / 1e6,
        "upload_s": uploaded - began,
        "validation_s": ended - uploaded,
        "health_ms": {"idle": spread(idle), "validating": spread(busy)},
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    at = {f"p{q}": ordered[min(len(ordered) * q // 100, len(ordered) - 1)] for q in (50, 99)}
    return {**at, "max": ordered[-1], "count": len(ordered)}


def prefix_job(tokenizer: Tokenizer, rows: int) -> list[bytes]:
    """Rows that alternate between the system prompts."""
    rng = random.Random(7)
    systems = []
    for _ in range(SYSTEM_PROMPTS):
        tokens = tokenizer.encode(words(rng, SYSTEM_TOKENS), add_special_tokens=False)
        systems.append(tokenizer.decode(tokens[:SYSTEM_TOKENS]))
    lines = []
    for i in range(rows):
        system = {"role": "system", "content": systems[i % SYSTEM_PROMPTS]}
        user = {"role": "user", "content": f"What about {words(rng, 3)}?"}
        lines.append(line(f"row-{i}", [system, user], ANSWER_TOKENS))
    return lines


async def prefixes(report: Callable[[str], None], rounds: int, job_rows: int) -> list[Row]:
    files = resolve_model(None, default_cache_dir())
    lines = prefix_job(Tokenizer.load(files.folder), job_rows)
    cases = {
        "together, cached": ("--batch-order", "prefix"),
        "as in the file, cached": ("--batch-order", "file"),
        "as in the file, not cached": ("--batch-order", "file", "--prefix-cache", "off"),
    }
    taken: dict[str, list[Row]] = {name: [] for name in cases}
    for number in range(rounds):
        for name, flags in cases.items():
            report(f"prefixes, round {number + 1} of {rounds}: {name}")
            async with local_server((*SERVER, *flags)) as url:
                taken[name].append(await timed_job(url, lines))
    return [
        {
            "case": name,
            "seconds": statistics.median(row["seconds"] for row in rows),
            **{key: rows[0][key] for key in ("prompt_tokens", "cached_tokens", "computed_tokens")},
        }
        for name, rows in taken.items()
    ]


async def timed_job(url: str, lines: list[bytes]) -> Row:
    began = time.perf_counter()
    async with batch_job(url, None, ENDPOINT, lines) as job, aiohttp.ClientSession() as session:
        batch: Any = {"status": "in_progress"}
        while batch["status"] in ("in_progress", "finalizing"):
            await asyncio.sleep(0.1)
            async with session.get(f"{url}/v1/batches/{job.id}") as response:
                batch = await response.json()
        seconds = time.perf_counter() - began
        assert batch["request_counts"]["completed"] == len(lines), batch
    usage = batch["usage"]
    prompt, cached = usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
    computed = prompt - cached
    counted = {"prompt_tokens": prompt, "cached_tokens": cached, "computed_tokens": computed}
    return {"seconds": seconds, **counted}


def interference(options: argparse.Namespace) -> Row:
    """`bros bench` with the job as its best-effort load."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {
            "--policies": "bros",
            "--scenarios": "S0,S2,S3",
            "--rates": f"{options.rate:g}",
            "--be-as": "batch",
            "--longest-prompt": "128",
            "--duration": f"{options.duration:g}",
            "--warm-up": "20",
            "--context": "2048",
            "--seed": "1",
            "--out": folder,
        }
        command = ["bench", *(part for flag in flags.items() for part in flag), *SERVER]
        subprocess.run([sys.executable, "-m", "bros", *command], cwd=ROOT, check=True)
        text = (Path(folder) / "result.json").read_text(encoding="utf-8")
    runs = {result.scenario: result for result in BenchResult.from_json(text).results}
    alone, both, job = (runs[Scenario(name)] for name in ("S0", "S3", "S2"))
    samples = [sample for sample in alone.timeline if sample.at_s > 20.0]
    busy = sum(sample.values["busy_s"] for sample in samples[1:])
    share = busy / (samples[-1].at_s - samples[0].at_s)
    left = (1.0 - share) * job.be.requests_per_s
    return {
        "command": [part for part in command if part != folder],
        "both_met": dataclasses.asdict(both.rt.both_met),
        "both_met_alone": dataclasses.asdict(alone.rt.both_met),
        "rt_share_of_time": share,
        "job_share_of_what_is_left": both.be.requests_per_s / left,
        "job_rows_per_s": [both.be.requests_per_s, job.be.requests_per_s],
        "job_tokens_per_s": [both.be.tokens_per_s, job.be.tokens_per_s],
    }


def show(results: Row, console: Console) -> None:
    for name, part in results.items():
        if isinstance(part, list):
            cells = [
                [f"{v:.2f}" if isinstance(v, float) else v for v in row.values()] for row in part
            ]
            console.print(table_of(name, list(part[0]), cells, left=0))
        else:
            console.print(name, part)


def parts(
    wanted: Sequence[str], options: argparse.Namespace, report: Callable[[str], None]
) -> Iterator[tuple[str, Any]]:
    if "validation" in wanted:
        yield "validation", asyncio.run(validation(report))
    if "prefixes" in wanted:
        yield "prefixes", asyncio.run(prefixes(report, options.rounds, options.job_rows))
    if "interference" in wanted:
        yield "interference", interference(options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--rounds", type=int, default=3, help="rounds of prefixes")
    parser.add_argument("--job-rows", type=int, default=200, help="rows of the job of prefixes")
    parser.add_argument("--rate", type=float, default=0.25, help="real-time requests per second")
    parser.add_argument("--duration", type=float, default=300.0, help="duration of each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="add the figures to this file")
    add_quick(parser, parts="prefixes", rounds=1, job_rows=12)
    options = parser.parse_args()
    wanted = chosen(parser, "--parts", options.parts, PARTS)
    console = Console()
    results = dict(parts(wanted, options, lambda text: console.print(f"[dim]{text}[/]")))
    show(results, console)
    if options.json is not None:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(
            json.dumps({**known, "environment": environment(), "asked": ASKED, **results}, indent=1)
            + "\n"
        )


if __name__ == "__main__":
    main()
