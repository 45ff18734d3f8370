"""What engines on the same cores, and other busy processes there, cost an engine.

    python benchmarks/engines_together.py [--json benchmarks/results/engines_together.json]

Each engine is a process that steps the embedded model, as a replica of a server does. By default it
has a thread for every core; replicas of one server divide the cores. The threads of an engine meet
hundreds of times in a step. Those that wait spin briefly and then sleep, and do the work of one
whose core runs something else (csrc/team.cpp). Figures are output tokens per second of all engines
together, in turns, medians of the rounds. Run nothing else on the machine.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

from harness import (
    benchmark_parser,
    finish,
    greedy_request,
    in_process,
    random_tokens,
    save,
    table_of,
)
from rich.console import Console

from bros.core.clock import SystemClock
from bros.core.config import EngineConfig
from bros.core.machine import available_cores
from bros.core.request import expanded
from bros.engine.build import build_engine
from bros.executor.model_store import ModelFiles, default_cache_dir, resolve_model

ROWS = (1, 8, 32)
PROMPT_TOKENS = 64
MOST_OUTPUTS = 1500


@dataclass(frozen=True)
class Setting:
    """What runs together.

    divided: the cores are divided among the engines; else each has a thread for every core.
    busy: processes beside them that never wait.
    """

    name: str
    engines: int
    divided: bool = False
    busy: int = 0

    def threads(self, cores: int) -> int:
        return max(1, cores // self.engines) if self.divided else cores


SETTINGS = (
    Setting("one", 1),
    Setting("two, all cores each", 2),
    Setting("two, cores divided", 2, divided=True),
    Setting("one beside a busy process", 1, busy=1),
)


class EngineProcess:
    """An engine in another process, which is idle but for calls of `begin`."""

    def __init__(self, files: ModelFiles, weights: str, threads: int) -> None:
        self._connection = in_process(_run_engine, files, weights, threads)

    def begin(self, rows: int, seconds: float) -> None:
        self._connection.send((rows, seconds))

    def tokens_per_s(self) -> float:
        """Of what `begin` began, when it has ended."""
        rate: float = self._connection.recv()
        return rate


def _run_engine(connection: Connection, files: ModelFiles, weights: str, threads: int) -> None:
    config = EngineConfig(
        device="cpu",
        weights=weights,
        threads=threads,
        policy="fcfs",
        max_model_len=2048,
        kv_memory="256MiB",
    )
    engine = build_engine(config, files, SystemClock())
    rng, count = random.Random(1), 0
    connection.send("ready")
    while True:
        try:
            rows, seconds = connection.recv()
        except EOFError:  # the benchmark has ended
            return
        names = [str(count + row) for row in range(rows)]
        count += rows
        for name in names:
            prompt = random_tokens(rng, PROMPT_TOKENS, engine.info.vocab_size)
            engine.submit(greedy_request(name, prompt, MOST_OUTPUTS))
        began, tokens = time.perf_counter(), 0
        while (now := time.perf_counter()) < began + seconds:
            outputs = list(map(expanded, engine.step()))
            if any(output.finish_reason for output in outputs):
                raise RuntimeError("a row has ended: take fewer --seconds")
            tokens += sum(len(output.token_ids) for output in outputs)
        for name in names:
            engine.abort(name)
        finish(engine)
        connection.send(tokens / (now - began))


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def rate(engines: Sequence[EngineProcess], rows: int, seconds: float, busy: int) -> float:
    """Output tokens per second of all engines, which begin at once."""
    with busy_processes(busy):
        for engine in engines:
            engine.begin(rows, seconds)
        return sum(engine.tokens_per_s() for engine in engines)


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1, seconds=1.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--weights", default="auto", help="precision (default: auto)")
    args = parser.parse_args()
    console = Console()
    files = resolve_model(None, default_cache_dir(), console.print)
    cores = available_cores()
    samples: dict[str, dict[int, list[float]]] = {}
    most = max(setting.engines for setting in SETTINGS)
    engines = {
        threads: [EngineProcess(files, args.weights, threads) for _ in range(most)]
        for threads in {setting.threads(cores) for setting in SETTINGS}
    }
    for number in range(args.rounds + 1):  # the first one is a warm-up
        for rows in ROWS:
            for setting in SETTINGS:
                group = engines[setting.threads(cores)][: setting.engines]
                value = rate(group, rows, args.seconds, setting.busy)
                if number > 0:
                    samples.setdefault(setting.name, {}).setdefault(rows, []).append(value)
    medians = {
        name: {rows: statistics.median(values) for rows, values in by_rows.items()}
        for name, by_rows in samples.items()
    }
    alone = medians[SETTINGS[0].name]
    table = [
        (name, *(f"{by_rows[rows]:.1f} ({by_rows[rows] / alone[rows]:.2f})" for rows in ROWS))
        for name, by_rows in medians.items()
    ]
    heads = ("engines", *(f"{rows} row{'s' * (rows > 1)} each" for rows in ROWS))
    console.print(table_of("output tokens per second of all (of one engine's)", heads, table))
    save(args.json, {"rounds": args.rounds, "cores": cores, "tokens_per_s": medians})


if __name__ == "__main__":
    main()
