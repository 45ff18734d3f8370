"""Decode steps of requests with a shared prefix: its KV read once, or by each row.

    python benchmarks/shared_prefix.py [--rows 16] [--prefix 1500] [--kv-dtype fp32 bf16]
        [--json benchmarks/results/shared_prefix_cpu.json]

Two engines with the embedded model, --shared-attention on and off, alternate step by step, so that
a slow minute of the machine affects both. Figures are medians of whole steps, and of the attention
of all layers alone. The requests have the cached prefix and 100 tokens of their own. Run nothing
else on the machine.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence

from harness import benchmark_parser, finish, greedy_request, random_tokens, save, table_of
from kernels_speed import shared_seconds
from rich.console import Console

from bros.core.clock import SystemClock
from bros.core.config import SHARED_ATTENTION, EngineConfig
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.kernels.dispatch import select_kernels

Row = dict[str, float | str]

PRIVATE_TOKENS = 100
VOCAB = 49152


def measure(engines: dict[str, Engine], rows: int, prefix: int, steps: int) -> dict[str, float]:
    """Engine -> median milliseconds of a decode step."""
    rng = random.Random(rows * 100_000 + prefix)
    common = random_tokens(rng, prefix, VOCAB)
    prompts = [common + random_tokens(rng, PRIVATE_TOKENS, VOCAB) for _ in range(rows)]
    for engine in engines.values():
        engine.submit(greedy_request("first", common, 1))
        finish(engine)  # from now on the prefix is cached
        for row, tokens in enumerate(prompts):
            engine.submit(greedy_request(str(row), tokens, 2 * steps + 100))
        for _ in range(1 + rows * PRIVATE_TOKENS // 1024 + 4):
            engine.step()
    clock = SystemClock()
    times: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(steps):
        for name, engine in engines.items():
            began = clock.now()
            engine.step()
            times[name].append((clock.now() - began) * 1e3)
    for engine in engines.values():
        for row in range(rows):
            engine.abort(str(row))
        finish(engine)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(kv_dtype: str, weights: str, cases: Sequence[tuple[int, int]], steps: int) -> list[Row]:
    """The times in milliseconds and their ratios for each case (rows, prefix tokens)."""
    files = resolve_model(None, default_cache_dir())
    engines = {
        choice: build_engine(
            EngineConfig(
                device="cpu",
                weights=weights,
                kv_dtype=kv_dtype,
                policy="fcfs",
                max_batch_tokens=1024,
                shared_attention=choice,
            ),
            files,
            SystemClock(),
        )
        for choice in SHARED_ATTENTION
    }
    kernels = select_kernels("cpu")
    found: list[Row] = []
    for rows, prefix in cases:
        ms = measure(engines, rows, prefix, steps)
        alone = shared_seconds(kernels, rows, prefix, kv_dtype, steps)
        on_ms = (alone["grouping"] + alone["together"]) * 1e3
        found.append(
            {
                "weights": weights,
                "kv_dtype": kv_dtype,
                "rows": rows,
                "prefix": prefix,
                "step_on_ms": ms["on"],
                "step_off_ms": ms["off"],
                "step_ratio": ms["off"] / ms["on"],
                "attention_on_ms": on_ms,
                "attention_off_ms": alone["alone"] * 1e3,
                "attention_ratio": alone["alone"] * 1e3 / on_ms,
            }
        )
    for engine in engines.values():
        engine.close()
    return found


def main() -> None:
    parser = benchmark_parser(__doc__, rows=[4], prefix=[256], steps=3)
    parser.add_argument("--rows", type=int, nargs="+", default=[16])
    parser.add_argument("--prefix", type=int, nargs="+", default=[1500])
    parser.add_argument("--kv-dtype", nargs="+", default=["fp32"])
    parser.add_argument("--weights", default="fp32")
    parser.add_argument("--steps", type=int, default=30)
    args = parser.parse_args()
    cases = [(rows, prefix) for rows in args.rows for prefix in args.prefix]
    found = []
    for kv_dtype in args.kv_dtype:
        found += compare(kv_dtype, args.weights, cases, args.steps)
    shared = f"{args.weights} weights, prefix read once (on) and by each row (off)"
    names = {"kv_dtype": "KV", "rows": "rows", "prefix": "shared"}
    for part in ("step", "attention"):
        names |= {f"{part}_on_ms": f"{part} on", f"{part}_off_ms": "off", f"{part}_ratio": "ratio"}
    rows = [
        [f"{row[name]:.2f}" if isinstance(row[name], float) else row[name] for name in names]
        for row in found
    ]
    title = f"Milliseconds of decode steps, {shared}"
    Console().print(table_of(title, list(names.values()), rows, left=0))
    save(args.json, {"private_tokens": PRIVATE_TOKENS, "decode_steps": found})


if __name__ == "__main__":
    main()
