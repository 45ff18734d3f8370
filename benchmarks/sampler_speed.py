"""What sampling on the host costs: per row, and as a share of a decode step.

    python benchmarks/sampler_speed.py [--turns N] [--rounds N] [--steps N] [--quick] [--json FILE]

    rows    milliseconds of a step's sampling, by kind of sampling and number of rows. The logits
            are those of the embedded model in the middle of answers; `flat` are random ones, which
            no sampler can leave out
    step    a step in which 32 rows decode one token each: greedy, and with temperature 0.7 and
            top_p 0.95

NumpySampler and NativeSampler alternate in both. Medians. Run it on an idle machine.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any

import torch
from harness import benchmark_parser, finish, save, table_of
from rich.console import Console
from torch import Tensor

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.plan import SampledToken, SampleSpec
from bros.core.request import EngineRequest, SamplingParams
from bros.engine.engine import Engine
from bros.executor.loader import load_executor
from bros.executor.model_store import default_cache_dir, resolve_model
from bros.executor.native_sampler import NativeSampler
from bros.executor.sampler import HostStepSampler, NumpySampler, SampleRequest, StepSampler
from bros.kernels.cpu_ops import CpuKernels
from bros.scheduler.build import build_scheduler
from bros.text.tokenizer import Tokenizer

ROWS = (1, 8, 32, 64)
DRAWN = SamplingParams(temperature=0.7, top_p=0.95)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 0.7": SamplingParams(temperature=0.7),
    "+ top_p 0.95": DRAWN,
    "+ top_k 50": SamplingParams(temperature=0.7, top_k=50),
    "+ min_p 0.05": SamplingParams(temperature=0.7, min_p=0.05),
    "+ all three": SamplingParams(temperature=0.7, top_p=0.95, top_k=50, min_p=0.05),
    "+ penalties": SamplingParams(
        temperature=0.7, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.2
    ),
    "+ logprobs 5": SamplingParams(temperature=0.7, logprobs=5),
    "flat, top_p 0.95": DRAWN,
}
SUBJECTS = ("the sea", "a small town", "old clocks", "bread", "winter", "trains", "a good book")
STEP_ROWS = 32
_KEPT = 24  # tokens of an answer before its logits are kept


class Bench:
    """An engine whose step sampler is exchanged."""

    def __init__(self) -> None:
        config = EngineConfig(policy="fcfs", max_num_seqs=64, max_batch_tokens=4096)
        files = resolve_model(None, default_cache_dir())
        self.runner, info = load_executor(config, files)
        self.samplers: dict[str, StepSampler] = {
            "numpy": HostStepSampler(NumpySampler()),
            "native": HostStepSampler(NativeSampler(CpuKernels())),
        }
        scheduler = build_scheduler(config, info, None)
        self.engine = Engine(scheduler, self.runner, SystemClock(), info)
        self._tokenizer = Tokenizer.load(files.folder)
        self._count = 0

    def steps(
        self, rows: int, params: SamplingParams, steps: int, sampler: StepSampler
    ) -> list[float]:
        """Milliseconds of the steps in which each row decodes one token."""
        self.runner._step_sampler = sampler
        for row in range(rows):
            self._count += 1
            text = f"Write a story about {SUBJECTS[row % len(SUBJECTS)]}. Number {row}."
            prompt = self._tokenizer.apply_chat_template([{"role": "user", "content": text}])
            sampling = params.with_changes(seed=row, max_tokens=steps, ignore_eos=True)
            self.engine.submit(
                EngineRequest(
                    request_id=str(self._count), prompt_token_ids=prompt, sampling=sampling
                )
            )
        times = []
        while self.engine.has_work:
            began_s = time.perf_counter()
            outputs = self.engine.step()
            seconds = time.perf_counter() - began_s
            if len(outputs) == rows:
                times.append(seconds * 1e3)
        finish(self.engine)
        return times[2:-1]

    def logits(self, rows: int) -> Tensor:
        """Of the embedded model, one row of each of `rows` answers."""
        kept: list[Tensor] = []

        def keep(logits: Tensor, asked: Sequence[SampleRequest]) -> tuple[SampledToken, ...]:
            if len(asked) == rows:
                kept[:] = [logits.clone()]
            return self.samplers["numpy"](logits, asked)

        self.steps(rows, DRAWN, _KEPT, keep)
        return kept[0]


def measure_rows(bench: Bench, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """kind -> rows -> sampler -> milliseconds."""
    real = bench.logits(max(ROWS))
    flat = torch.randn(real.shape, generator=torch.Generator().manual_seed(1))
    history = list(range(1000, 1400))
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (kind, params), rows in itertools.product(KINDS.items(), ROWS):
        logits = (flat if kind.startswith("flat") else real)[:rows]
        times: dict[str, list[float]] = {name: [] for name in bench.samplers}
        for turn in range(rounds + 1):
            tokens = history if params.needs_history else ()
            asked = [(str(row), SampleSpec(params, row, 100, tokens), turn) for row in range(rows)]
            for name, sampler in bench.samplers.items():
                began_s = time.perf_counter()
                sampler(logits, asked)
                times[name].append((time.perf_counter() - began_s) * 1e3)
        found.setdefault(kind, {})[str(rows)] = {
            name: statistics.median(each[1:]) for name, each in times.items()
        }
    return found


def measure_step(bench: Bench, turns: int, steps: int) -> dict[str, dict[str, float]]:
    """kind -> sampler -> milliseconds."""
    times: dict[str, dict[str, list[float]]] = {}
    cases = list(itertools.product(("greedy", "+ top_p 0.95"), bench.samplers))
    for turn in range(turns):
        for kind, name in cases if turn % 2 else reversed(cases):
            sampler, params = bench.samplers[name], KINDS[kind]
            found = bench.steps(STEP_ROWS, params, steps, sampler)
            times.setdefault(kind, {}).setdefault(name, []).extend(found)
    return {
        kind: {name: statistics.median(each) for name, each in by_name.items()}
        for kind, by_name in times.items()
    }


def main() -> None:
    parser = benchmark_parser(__doc__, turns=1, rounds=2, steps=6)
    parser.add_argument("--turns", type=int, default=4, help="of each kind of step")
    parser.add_argument("--rounds", type=int, default=30, help="of each kind of rows")
    parser.add_argument("--steps", type=int, default=16, help="of each turn")
    given = parser.parse_args()
    console, bench = Console(), Bench()
    found: dict[str, Any] = {"rows": measure_rows(bench, given.rounds)}
    cells = [
        (kind, *(f"{t['numpy']:.2f} / {t['native']:.3f}" for t in by_rows.values()))
        for kind, by_rows in found["rows"].items()
    ]
    headings = ("", *(f"{rows} rows" for rows in ROWS))
    console.print(table_of("milliseconds per step, NumPy / native", headings, cells))
    found["step"] = measure_step(bench, given.turns, given.steps)
    lines = [
        (kind, *(f"{each[name]:.2f}" for name in bench.samplers))
        for kind, each in found["step"].items()
    ]
    title = f"milliseconds of a step that decodes {STEP_ROWS} rows"
    console.print(table_of(title, ("", *bench.samplers), lines))
    save(given.json, found)


if __name__ == "__main__":
    main()
