"""Step times of the engine and its host overhead, compared with transformers.

    python benchmarks/engine_speed.py [--rounds 5] [--json benchmarks/results/engine_speed.json]

Everything is measured in one run on the embedded model. Back ends alternate within each case, so
that a slow minute of the machine affects all of them; figures are medians of the rounds. Each case
first runs once without being measured: memory that was not read for a while is slow at first.
Decode: all rows have a 64-token prompt and generate greedily; of a round, the mean of all steps.
Prefill: one prompt in one step. Host overhead: scheduling (schedule + apply) and building the
inputs; steps include it. "LLM" is `bros.LLM.generate`, in a process of its own, as offline programs
run it: a decode step is what a further token of each row takes. Run nothing else on the machine.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import torch
from harness import (
    TimedExecutor,
    benchmark_parser,
    finish,
    greedy_request,
    in_process,
    judged,
    random_tokens,
    save,
    table_of,
)
from rich.console import Console
from transformers_reference import load_in_transformers

from bros import LLM, SamplingParams
from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.request import expanded
from bros.engine.build import build_engine
from bros.engine.engine import Engine
from bros.executor.inputs import build_inputs
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model

PROMPT_TOKENS = 64
DECODE_STEPS = 48  # so many that the difference of two calls of bros.LLM is exact enough
MOST_OUTPUTS = 512  # of a row: it must not end while others begin
DECODE_ROWS = (1, 8, 32)
FORMATS = ("fp32", "bf16", "int4")
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


class BrosTarget:
    """A bros engine that the benchmark steps."""

    def __init__(self, files: ModelFiles, weights: str, policy: str = "fcfs") -> None:
        config = EngineConfig(
            device="cpu", weights=weights, policy=policy, max_batch_tokens=4096, max_model_len=2048
        )
        self._engine: Engine = build_engine(config, files, SystemClock())
        self._timed = TimedExecutor(self._engine._executor)
        self._engine._executor = self._timed
        self._vocab = self._engine.info.vocab_size
        self._count = 0
        self.host_ms: Samples = {}

    def decode(self, rows: int) -> list[float]:
        """Milliseconds per decode step of all rows, the mean of DECODE_STEPS.

        Raises RuntimeError if rows end before all have begun and enough steps are measured.
        """
        names = [self._submit(PROMPT_TOKENS, MOST_OUTPUTS) for _ in range(rows)]
        times: list[float] = []
        host: list[float] = []
        while len(times) < DECODE_STEPS:
            began, busy_s = time.perf_counter(), self._timed.busy_s
            outputs = self._engine.step()
            total = time.perf_counter() - began
            if any(output.finish_reason for output in map(expanded, outputs)):
                raise RuntimeError(f"a row ended after {len(times)} decode steps of {rows} rows")
            # Prompts may take several steps, between which the rows that have begun get tokens.
            plan = self._timed.plan
            assert plan is not None
            if len(outputs) < rows or plan.num_tokens > rows:
                continue
            times.append(total * 1e3)
            outside_s = total - (self._timed.busy_s - busy_s)
            host.append((outside_s + self._preparation_s()) * 1e3)
        for name in names:
            self._engine.abort(name)
        finish(self._engine)
        self.host_ms.setdefault(f"decode {rows}", []).append(statistics.median(host))
        return [statistics.fmean(times)]

    def prefill(self, tokens: int) -> list[float]:
        """Milliseconds to the first token of one prompt."""
        self._submit(tokens, 1)
        began = time.perf_counter()
        finish(self._engine)  # a long prompt may take several steps
        return [(time.perf_counter() - began) * 1e3]

    def _preparation_s(self) -> float:
        assert self._timed.plan is not None
        began = time.perf_counter()
        build_inputs(self._timed.plan)
        return time.perf_counter() - began

    def _submit(self, tokens: int, outputs: int) -> str:
        """Returns the id of the request."""
        self._count += 1
        prompt = random_tokens(random.Random(self._count), tokens, self._vocab)
        self._engine.submit(greedy_request(str(self._count), prompt, outputs))
        return str(self._count)


class LlmTarget:
    """bros.LLM in another process, which is idle while other targets are measured."""

    def __init__(self, files: ModelFiles, weights: str) -> None:
        self._connection = in_process(_run_llm, str(files.folder), weights)

    def decode(self, rows: int) -> list[float]:
        """Milliseconds per decode step, the mean of DECODE_STEPS."""
        short_s = self._seconds(rows, PROMPT_TOKENS, 1)
        long_s = self._seconds(rows, PROMPT_TOKENS, 1 + DECODE_STEPS)
        return [(long_s - short_s) / DECODE_STEPS * 1e3]

    def prefill(self, tokens: int) -> list[float]:
        """Milliseconds to the first token of one prompt."""
        return [self._seconds(1, tokens, 1) * 1e3]

    def _seconds(self, rows: int, tokens: int, outputs: int) -> float:
        self._connection.send((rows, tokens, outputs))
        seconds: float = self._connection.recv()
        return seconds


def _run_llm(connection: Connection, folder: str, weights: str) -> None:
    """Measure what an LlmTarget asks for: rows, tokens of each prompt, output tokens."""
    rng = random.Random(1)
    options = {"device": "cpu", "weights": weights, "max_batch_tokens": 4096, "max_model_len": 2048}
    with LLM(folder, **options) as llm:
        vocab = llm._engine.client.info.vocab_size
        connection.send("ready")
        while True:
            try:
                rows, tokens, outputs = connection.recv()
            except EOFError:  # the benchmark has ended
                return
            prompts = [random_tokens(rng, tokens, vocab) for _ in range(rows)]
            sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
            began = time.perf_counter()
            llm.generate(prompts, sampling, progress=False)
            connection.send(time.perf_counter() - began)


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
        return [statistics.fmean(times)]

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
    bros = {f"bros {weights}": BrosTarget(files, weights) for weights in FORMATS}
    targets: dict[str, BrosTarget | LlmTarget | TransformersTarget] = {
        **bros,
        **{f"LLM {weights}": LlmTarget(files, weights) for weights in FORMATS},
        "transformers fp32": TransformersTarget(files),
    }
    samples: dict[str, Samples] = {name: {} for name in targets}
    for number in range(rounds + 1):
        report(f"round {number} of {rounds}")
        for kind, sizes in (("decode", DECODE_ROWS), ("prefill", PREFILL_TOKENS)):
            for size in sizes:
                for name, target in targets.items():
                    run = target.decode if kind == "decode" else target.prefill
                    run(size)
                    times = run(size)
                    if number > 0:
                        samples[name].setdefault(f"{kind} {size}", []).extend(times)
    samples["host overhead"] = {
        case: times[3::2] for case, times in bros["bros fp32"].host_ms.items()
    }
    return samples


def show(medians: dict[str, dict[str, float]], console: Console) -> None:
    """Print medians, with their targets where there are any."""
    cases = [f"decode {rows}" for rows in DECODE_ROWS]
    cases += [f"prefill {count}" for count in PREFILL_TOKENS]

    def cell(name: str, case: str) -> str:
        target_ms, ms = TARGET_MS.get((name, case)), medians[name].get(case)
        if ms is None or target_ms is None:
            return "-" if ms is None else f"{ms:.4g}"
        return f"{judged(ms, target_ms, '.4g')} ({target_ms:g})"

    rows = [(name, *(cell(name, case) for case in cases)) for name in medians]
    rows += [
        (f"LLM / bros, {form}", *(f"{ratio:.3f}" for ratio in llm_of_engine(medians, form, cases)))
        for form in FORMATS
    ]
    console.print(table_of("milliseconds per step, median (target: at most)", ("", *cases), rows))


def llm_of_engine(
    medians: dict[str, dict[str, float]], form: str, cases: Sequence[str]
) -> list[float]:
    """The times of bros.LLM, of those of an engine that is stepped by hand."""
    return [medians[f"LLM {form}"][case] / medians[f"bros {form}"][case] for case in cases]


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    console = Console()
    files = resolve_model(None, default_cache_dir(), console.print)
    samples = measure(files, args.rounds, lambda line: console.print(line, style="dim"))
    medians = {
        name: {case: statistics.median(times) for case, times in row.items()}
        for name, row in samples.items()
    }
    show(medians, console)
    save(args.json, {"rounds": args.rounds, "median_ms": medians})


if __name__ == "__main__":
    main()
