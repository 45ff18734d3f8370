"""Shared by the benchmarks: their options, requests, timing, tables and files of results."""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from quick import add_quick
from rich.console import Console
from rich.table import Table

from bros.bench.results import environment as bench_environment
from bros.core.clock import SystemClock
from bros.core.interfaces import EngineInfo
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, SamplingParams, ServiceClass
from bros.engine.engine import Engine
from bros.scheduler.cost_model import CostModel

FAST = CostModel(
    constant_s=0.008, token_s=2e-6, sample_s=1e-6, pair_s=1e-10, context_s=1e-9,
    hinges=((256, 2e-5),), padding=((16, 1), (128, 8), (256, 16)),
)  # fmt: skip
"""A fast device, so that rows and not time bound the steps: the worst case for the scheduler."""


def benchmark_parser(doc: str | None, **quick: Any) -> argparse.ArgumentParser:
    """A parser with `--json` and, if `quick` names the smallest values of options, `--quick`.

    doc: of the script; its first line describes it in --help.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to save the figures")
    if quick:
        add_quick(parser, **quick)
    return parser


def environment() -> dict[str, object]:
    """The machine and the versions of the measurement."""
    here = bench_environment(SystemClock())
    return {
        "cpu": here.cpu,
        "cores": here.cores,
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "python": here.python,
        "commit": here.commit,
        "unix_time": int(time.time()),
    }


def save(path: Path | None, results: Mapping[str, Any]) -> None:
    """Write the results with their environment as JSON. None: write nothing."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"environment": environment(), **results}, indent=2) + "\n")
        Console().print(f"saved {path}")


def table_of(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], left: int = 1
) -> Table:
    """A table whose first `left` columns are left-aligned. Cells may have rich's markup."""
    table = Table(title=title)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < left else "right", no_wrap=index < left)
    for row in rows:
        table.add_row(*map(str, row))
    return table


def judged(value: float, most: float, form: str = ".2f") -> str:
    """The value in green, or in red if it is larger than its target."""
    return f"[{'green' if value <= most else 'red'}]{value:{form}}[/]"


def random_tokens(rng: random.Random, count: int, vocab_size: int) -> list[int]:
    """Token ids that are not special."""
    return [rng.randrange(1000, vocab_size) for _ in range(count)]


def greedy_request(
    request_id: str,
    prompt: Sequence[int],
    outputs: int,
    service_class: ServiceClass = ServiceClass.RT,
    **fields: Any,
) -> EngineRequest:
    """A request for exactly `outputs` tokens. fields: further ones of EngineRequest."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True),
        service_class=service_class,
        **fields,
    )


def finish(engine: Engine) -> None:
    """Step until no request is left."""
    while engine.has_work:
        engine.step()


def model_free_info(num_kv_blocks: int, **fields: Any) -> EngineInfo:
    """An engine without a model, of which only the host's work is measured."""
    known = {"policy": "bros", "vocab_size": 1000, "block_size": 16, "max_model_len": 4096}
    return EngineInfo(
        model="none",
        weights="",
        kernels="",
        kv_dtype="",
        device="",
        num_kv_blocks=num_kv_blocks,
        **(known | fields),
    )


class TimedExecutor:
    """Forwards plans to an executor that others use as well, and sums up their time.

    plan: the latest.
    steps: completed ones.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.plan: StepPlan | None = None
        self.busy_s = 0.0
        self.steps = 0

    def execute(
        self, plan: StepPlan, should_abort: Callable[[], bool] | None = None
    ) -> StepResult | None:
        began = time.perf_counter()
        result: StepResult | None = self._inner.execute(plan, should_abort)
        self.busy_s += time.perf_counter() - began
        self.steps += result is not None
        self.plan = plan
        return result

    def close(self) -> None:
        """The executor stays open."""
