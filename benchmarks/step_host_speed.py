"""The host's work per step besides the model: schedule, build the inputs, apply.

    python benchmarks/step_host_speed.py [--rounds 5] [--quick] [--json FILE]

The scheduler, the KV cache, the engine and the runner are the real ones; the decoder and the
sampler are replaced by constants, so that a step consists of host work only. Cases are steady
decode steps of 32 and 128 rows with 300 to 1,000 tokens of context each, without a shared prefix
("alone") and with a prefix of 512 tokens shared by every 8 rows ("shared").

Garbage is collected as in an engine process.

To compare two versions, run the script with PYTHONPATH set to each of them in turn.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import replace
from typing import Any, cast

import torch
from harness import FAST, benchmark_parser, greedy_request, model_free_info, save

from bros.core.clock import SystemClock
from bros.core.collector import Collector
from bros.core.config import MAX_RT_SLOWDOWN, EngineConfig
from bros.core.interfaces import Grouping
from bros.core.plan import SampledToken
from bros.core.request import ServiceClass
from bros.engine.engine import Engine
from bros.executor.inputs import InputUploader
from bros.executor.models.decoder import DecoderOutputs
from bros.executor.runner import ModelRunner
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import HeadLayout
from bros.scheduler.build import build_scheduler

ROWS = (32, 128)
COMMON_TOKENS, GROUP = 512, 8
BLOCK_SIZE = 16
MODEL = replace(FAST, unique_context_s=1e-9)


class ConstantDecoder:
    """A decoder without layers."""

    def run(self, inputs: Any, layers: Any, before_layer: Any, joining: Any = ()) -> DecoderOutputs:
        logits = torch.empty(len(inputs.sample_rows), 1)
        return DecoderOutputs(logits, logits)


class ConstantSampler:
    """Chooses the same token for every row."""

    def __call__(self, logits: Any, samples: Any) -> tuple[SampledToken, ...]:
        return tuple(SampledToken(request_id, 7) for request_id, _, _ in samples)


class NoKv:
    """KV memory without content."""

    copies_in_background = False
    positions = None

    def __init__(self) -> None:
        self.layers = [(torch.empty(0), torch.empty(0))]

    def copy(self, copies: Any) -> None:
        pass

    def wait_for_layer(self, layer: int) -> None:
        pass

    def note(self, slots: Any, positions: Any) -> None:
        pass

    def clear(self) -> None:
        pass


def make(rows: int, shared: bool, outputs: int) -> Engine:
    """An engine in which `rows` requests have been submitted."""
    cpu = torch.device("cpu")
    kernels = select_kernels("cpu", cpu)
    grouping = Grouping(BLOCK_SIZE, min_blocks=16, min_rows=4)
    uploader = InputUploader(kernels, HeadLayout(9, 3, 64), cpu)
    runner = ModelRunner(
        cast(Any, ConstantDecoder()),
        cast(Any, NoKv()),
        uploader,
        cast(Any, ConstantSampler()),
        vocab_size=1,
    )
    info = model_free_info(20_000, grouping=grouping)
    # Best-effort rows are left out of steps that would slow down real-time ones too much.
    config = EngineConfig(
        policy="bros",
        max_num_seqs=rows,
        max_batch_tokens=4096,
        rt_slowdown=MAX_RT_SLOWDOWN,
        slo_tpot=10_000.0,
    )
    engine = Engine(build_scheduler(config, info, MODEL), runner, SystemClock(), info)
    rng = random.Random(rows)
    for number in range(rows):
        length = rng.randrange(300, 1000 - outputs)
        common: list[int] = []
        if shared:
            family = random.Random(number // GROUP)
            common = [family.randrange(1000) for _ in range(COMMON_TOKENS)]
            length = max(length - COMMON_TOKENS, 1)
        prompt = common + [rng.randrange(1000) for _ in range(length)]
        service_class = ServiceClass.RT if number % 2 else ServiceClass.BE
        engine.submit(greedy_request(str(number), prompt, outputs, service_class))
    return engine


def run(rows: int, shared: bool, steps: int) -> list[float]:
    """Milliseconds of processor time of each step in which every row decodes."""
    engine = make(rows, shared, outputs=steps + 60)
    while True:
        outputs = engine.step()
        if len(outputs) == rows:
            break
    times = []
    for _ in range(steps):
        began = time.process_time()
        outputs = engine.step()
        seconds = time.process_time() - began
        if len(outputs) == rows:
            times.append(seconds * 1e3)
    engine.close()
    return times


def main() -> None:
    parser = benchmark_parser(__doc__, rounds=1, steps=5)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100, help="steps of each case and round")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {}
    with Collector():
        for _ in range(args.rounds):
            for rows in ROWS:
                for shared in (False, True):
                    case = f"{rows} rows, {'shared' if shared else 'alone'}"
                    times.setdefault(case, []).extend(run(rows, shared, args.steps))
    medians = {case: statistics.median(found) for case, found in times.items()}
    for case, median in medians.items():
        print(f"{case:18} {median:7.3f} ms per step")
    save(args.json, {"median_ms": medians})


if __name__ == "__main__":
    main()
