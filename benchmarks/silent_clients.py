"""What clients that send nothing, or too slowly, do to the requests of others.

    python benchmarks/silent_clients.py [--descriptors 256] [--seconds 20]
        [--out benchmarks/results] [-- OPTIONS]

A server process is started that may have few descriptors. For each attack this process opens
connections, repeats what the attack sends every 0.5 s, and meanwhile sends a request of one token
every 50 ms, each on a new connection. `idle` has no attack.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import httpx
from quick import add_quick

from bros.bench.results import environment
from bros.core.clock import SystemClock

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from support.held_connections import SLOW_BODY, SLOW_HEADERS, Held, holding
from support.server_process import ServerProcess, few_descriptors, running_server

ATTACKS = {
    "idle": Held(0),
    "silent": Held(300),
    "slow headers": Held(300, *SLOW_HEADERS),
    "slow bodies": Held(150, *SLOW_BODY),
}


async def others(url: str, seconds: float) -> tuple[list[float], int]:
    """Times of the requests that were answered, in ms, and the number of those that were not."""
    times, failed = [], 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        began = time.perf_counter()
        try:
            async with httpx.AsyncClient(base_url=url, timeout=5) as http:
                body = {"prompt": "Hi", "max_tokens": 1}
                (await http.post("/v1/completions", json=body)).raise_for_status()
            times.append((time.perf_counter() - began) * 1000)
        except httpx.HTTPError:
            failed += 1
        await asyncio.sleep(0.05)
    return times, failed


async def measure(name: str, server: ServerProcess, seconds: float) -> dict[str, object]:
    logged = len(server.output)
    async with holding(httpx.URL(server.url), ATTACKS[name], every_s=0.5):
        await asyncio.sleep(1)
        times, failed = await others(server.url, seconds)
    times.sort()
    return {
        "attack": name,
        "answered": len(times),
        "failed": failed,
        "p50_ms": round(times[len(times) // 2], 1) if times else None,
        "p99_ms": round(times[len(times) * 99 // 100], 1) if times else None,
        "logged_bytes": len(server.output) - logged,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--descriptors", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20, help="of each attack")
    add_quick(parser, seconds=2)
    parser.add_argument("--out", type=Path, help="folder for silent_clients_cpu.json")
    parser.add_argument("options", nargs="*", help="of bros serve, after --")
    args = parser.parse_args()
    launcher = few_descriptors(args.descriptors)
    with running_server("--log-level", "warning", *args.options, launcher=launcher) as server:
        results = []
        for name in ATTACKS:
            results.append(asyncio.run(measure(name, server, args.seconds)))
            print(json.dumps(results[-1]), flush=True)
    if args.out is not None:
        record = {
            "environment": asdict(environment(SystemClock())),
            "descriptors": args.descriptors,
            "attacks": results,
        }
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / "silent_clients_cpu.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
