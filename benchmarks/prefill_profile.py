"""The time of a prefill by operation, and the speed of its matrix products.

    python benchmarks/prefill_profile.py [--tokens 256 1024] [--weights fp32] [--json FILE]

The kernels of bros, its own products included, are timed by a wrapper around each call, and where
torch multiplies, its products by its profiler; the rest is Python, sampling and scheduling. The
reference is the fastest of several large square fp32 products of torch, measured in the same run.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from engine_speed import BrosTarget
from harness import benchmark_parser, save, table_of
from rich.console import Console

from bros.executor import loader
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import Kernels

OPERATIONS = ("rms_norm", "add_rms_norm_", "rope_and_cache_", "attention", "silu_and_mul")
ROUNDS = 5


class TimedKernels:
    """Kernels that sum up the seconds of each operation."""

    def __init__(self, inner: Kernels) -> None:
        self._inner = inner
        self.seconds: dict[str, float] = defaultdict(float)
        for operation in OPERATIONS:
            setattr(self, operation, self._timed(operation))
        self.products = None
        if inner.products is not None:
            self.linear = self._timed("linear")
            self.panel_layout = inner.products.panel_layout
            self.products = self

    def layers(self, *args: Any) -> None:
        """None: layers call these operations."""

    def __getattr__(self, name: str) -> Any:
        """Everything else is forwarded untimed."""
        return getattr(self._inner, name)

    def _timed(self, operation: str) -> Callable[..., Any]:
        function = getattr(self._inner, operation)

        def call(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **kwargs)
            self.seconds[operation] += time.perf_counter() - began
            return result

        return call


def best_gflops() -> float:
    """The speed of the fastest large fp32 product of this machine."""
    best = 0.0
    for size in (1024, 2048, 3072):
        a, b = torch.randn(size, size), torch.randn(size, size)
        for _ in range(5):
            began = time.perf_counter()
            torch.mm(a, b)
            best = max(best, 2 * size**3 / (time.perf_counter() - began) / 1e9)
    return best


def profile(target: BrosTarget, kernels: TimedKernels, tokens: int) -> dict[str, float]:
    """Median milliseconds by part over several prefills, and their total."""
    target.prefill(tokens)
    rounds: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        kernels.seconds.clear()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            (total,) = target.prefill(tokens)
        events = {event.key: event.cpu_time_total / 1e3 for event in profiler.key_averages()}
        own_ms = kernels.seconds["linear"] * 1e3
        parts = {"products": events.get("aten::linear", 0.0) + own_ms}
        parts |= {name: kernels.seconds[name] * 1e3 for name in OPERATIONS}
        parts["rest"] = total - sum(parts.values())
        for name, value in {**parts, "total": total}.items():
            rounds[name].append(value)
    return {name: statistics.median(values) for name, values in rounds.items()}


def product_gflop(config: dict[str, Any], tokens: int) -> float:
    """1e9 operations of all linear layers but the head and the skipped part of the last block."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    qkv = (config["num_attention_heads"] + 2 * config["num_key_value_heads"]) * head_dim * hidden
    rest = config["num_attention_heads"] * head_dim * hidden + 3 * hidden * inner
    layers = config["num_hidden_layers"]
    return 2 * tokens * (layers * qkv + (layers - 1) * rest) / 1e9


def main() -> None:
    parser = benchmark_parser(__doc__, tokens=[64])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--weights", default="fp32")
    args = parser.parse_args()
    console = Console()
    files = resolve_model(None, default_cache_dir(), console.print)
    config = json.loads((files.folder / "config.json").read_text())
    kernels = TimedKernels(select_kernels("auto", torch.device("cpu")))
    with mock.patch.object(loader, "select_kernels", autospec=True, return_value=kernels):
        # fcfs runs a whole prompt in one step; bros would chunk a long one.
        target = BrosTarget(files, args.weights, policy="fcfs")
    best = best_gflops()
    results: dict[str, dict[str, float]] = {}
    for tokens in args.tokens:
        parts = profile(target, kernels, tokens)
        parts["product_gflops"] = product_gflop(config, tokens) / parts["products"] * 1e3
        results[str(tokens)] = parts
    names = next(iter(results.values()))
    rows = [(name, *(f"{parts[name]:.1f}" for parts in results.values())) for name in names]
    title = f"prefill, {args.weights}: milliseconds by part, median of {ROUNDS}"
    console.print(table_of(title, ("", *(f"{tokens} tokens" for tokens in results)), rows))
    console.print(f"best large fp32 product of torch here: {best:.0f} GFLOP/s")
    save(args.json, {"best_gflops": best, "median_ms": results})


if __name__ == "__main__":
    main()
