"""Step times of the engine and its host overhead, compared with transformers.

    python benchmarks/engine_speed.py [--rounds 5] [--json benchmarks/results/engine_speed.json]

Everything is measured in one run on the embedded model. Back ends alternate within each round, so
that a slow minute of the machine affects all of them; figures are medians. Decode: all rows have a
64-token prompt and generate greedily. Prefill: one prompt in one step. Host overhead: scheduling
(schedule + apply) and building the inputs; steps include it. Run nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from quick import add_quick
from rich.console import Console
from rich.table import Table
from transformers_reference import load_in_transformers

from bros.bench.results import environment as bench_environment
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, SamplingParams
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.executor.inputs import build_inputs
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model

PROMPT_TOKENS = 64
DECODE_STEPS = 12
DECODE_ROWS = (1, 8, 32)
PREFILL_TOKENS = (256, 1024)
TARGET_MS = {
    ("bros fp32", "decode 1"): 36,
    ("bros fp32", "decode 8"): 42,
    ("bros fp32", "decode 32"): 72,
    ("bros fp32", "prefill 256"): 270,
    ("bros fp32", "prefill 1024"): 1150,
    ("bros int4", "decode 1"): 12.5,
    ("bros int4", "decode 8"): 30,
    ("host overhead", "decode 32"): 1.5,
}

Samples = dict[str, list[float]]


class RecordingExecutor:
    """Forwards plans and records the last one and its time in the executor."""

    def __init__(self, inner: object) -> None:
        self._inner = inner
        self.plan: StepPlan | None = None
        self.seconds = 0.0

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        began = time.perf_counter()
        result: StepResult | None = self._inner.execute(plan, should_abort)  # type: ignore[attr-defined]
        self.plan, self.seconds = plan, time.perf_counter() - began
        return result

    def close(self) -> None:
        self._inner.close()  # type: ignore[attr-defined]


class BrosTarget:
    """A bros engine that the benchmark steps."""

    def __init__(self, files: ModelFiles, weights: str, policy: str = "bros") -> None:
        config = EngineConfig(
            device="cpu", weights=weights, policy=policy, max_batch_tokens=4096, max_model_len=2048
        )
        self._engine: Engine = build_engine(config, files, SystemClock())
        self._recorder = RecordingExecutor(self._engine._executor)
        self._engine._executor = self._recorder
        self._vocab = self._engine.info.vocab_size
        self._count = 0
        self.host_ms: Samples = {}

    def decode(self, rows: int) -> list[float]:
        """Milliseconds per decode step."""
        for _ in range(rows):
            self._submit(PROMPT_TOKENS, DECODE_STEPS + rows + 2)
        begun: set[str] = set()
        while len(begun) < rows:  # prefill may take several steps
            begun |= {output.request_id for output in self._engine.step()}
        times, host = [], []
        for _ in range(DECODE_STEPS):
            began = time.perf_counter()
            self._engine.step()
            total = time.perf_counter() - began
            times.append(total * 1e3)
            host.append((total - self._recorder.seconds + self._preparation_s()) * 1e3)
        while self._engine.has_work:
            self._engine.step()
        self.host_ms.setdefault(f"decode {rows}", []).append(statistics.median(host))
        return times

    def prefill(self, tokens: int) -> list[float]:
        """Milliseconds to the first token of one prompt."""
        self._submit(tokens, 1)
        began = time.perf_counter()
        while self._engine.has_work:  # a long prompt may take several steps
            self._engine.step()
        return [(time.perf_counter() - began) * 1e3]

    def _preparation_s(self) -> float:
        assert self._recorder.plan is not None
        began = time.perf_counter()
        build_inputs(self._recorder.plan)
        return time.perf_counter() - began

    def _submit(self, tokens: int, outputs: int) -> None:
        self._count += 1
        rng = random.Random(self._count)
        self._engine.submit(
            EngineRequest(
                request_id=str(self._count),
                prompt_token_ids=[rng.randrange(1000, self._vocab) for _ in range(tokens)],
                sampling=SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True),
            )
        )


class TransformersTarget:
    """The same weights in transformers: fp32, greedy, dynamic cache."""

    def __init__(self, files: ModelFiles) -> None:
        self._model = load_in_transformers(files)
        self._vocab = self._model.config.vocab_size

    @torch.inference_mode()
    def decode(self, rows: int) -> list[float]:
        out = self._model(self._ids(rows, PROMPT_TOKENS), use_cache=True)
        times = []
        for _ in range(DECODE_STEPS):
            began = time.perf_counter()
            ids = out.logits[:, -1:].argmax(-1)
            out = self._model(ids, past_key_values=out.past_key_values, use_cache=True)
            times.append((time.perf_counter() - began) * 1e3)
        return times

    @torch.inference_mode()
    def prefill(self, tokens: int) -> list[float]:
        ids = self._ids(1, tokens)
        began = time.perf_counter()
        self._model(ids, use_cache=True, logits_to_keep=1).logits.argmax(-1)
        return [(time.perf_counter() - began) * 1e3]

    def _ids(self, rows: int, tokens: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(rows * tokens)
        return torch.randint(1000, self._vocab, (rows, tokens), generator=generator)


def measure(files: ModelFiles, rounds: int, report: Callable[[str], None]) -> dict[str, Samples]:
    """Target -> case -> milliseconds. The first round is a warm-up and is dropped."""
    bros = {f"bros {weights}": BrosTarget(files, weights) for weights in ("fp32", "int4")}
    targets: dict[str, BrosTarget | TransformersTarget] = {
        **bros,
        "transformers fp32": TransformersTarget(files),
    }
    samples: dict[str, Samples] = {name: {} for name in targets}
    for number in range(rounds + 1):
        report(f"round {number} of {rounds}")
        for name, target in targets.items():
            cases = [(f"decode {rows}", target.decode, rows) for rows in DECODE_ROWS]
            cases += [(f"prefill {count}", target.prefill, count) for count in PREFILL_TOKENS]
            for case, run, size in cases:
                times = run(size)
                if number > 0:
                    samples[name].setdefault(case, []).extend(times)
    samples["host overhead"] = {
        case: times[1:] for case, times in bros["bros fp32"].host_ms.items()
    }
    return samples


def environment() -> dict[str, object]:
    """The machine and the versions of the measurement."""
    here = bench_environment(SystemClock())
    return {
        "cpu": here.cpu,
        "cores": here.cores,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": here.python,
        "commit": here.commit,
        "unix_time": int(time.time()),
    }


def show(medians: dict[str, dict[str, float]], console: Console) -> None:
    """Print medians, with their targets where there are any."""
    cases = [f"decode {rows}" for rows in DECODE_ROWS]
    cases += [f"prefill {count}" for count in PREFILL_TOKENS]
    table = Table(title="milliseconds per step, median (target: at most)")
    table.add_column("")
    for case in cases:
        table.add_column(case, justify="right")
    for name, row in medians.items():
        cells = []
        for case in cases:
            target_ms = TARGET_MS.get((name, case))
            value = f"{row[case]:.4g}" if case in row else "-"
            if target_ms is not None:
                color = "green" if row[case] <= target_ms else "red"
                value = f"[{color}]{value}[/] ({target_ms:g})"
            cells.append(value)
        table.add_row(name, *cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="where to save the figures")
    add_quick(parser, rounds=1)
    args = parser.parse_args()
    console = Console()
    files = resolve_model(None, default_cache_dir(), console.print)
    samples = measure(files, args.rounds, lambda line: console.print(line, style="dim"))
    medians = {
        name: {case: statistics.median(times) for case, times in row.items()}
        for name, row in samples.items()
    }
    show(medians, console)
    if args.json:
        result = {"environment": environment(), "rounds": args.rounds, "median_ms": medians}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"saved {args.json}")


if __name__ == "__main__":
    main()
