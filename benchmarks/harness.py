"""Shared by the benchmarks: their options, requests, timing, tables and files of results."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import operator
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from quick import add_quick
from rich.console import Console
from rich.table import Table

from bros.bench.results import environment as bench_environment
from bros.core.clock import SystemClock
from bros.core.errors import ConfigError
from bros.core.interfaces import EngineInfo
from bros.core.plan import StepPlan, StepResult
from bros.core.request import EngineRequest, SamplingParams, ServiceClass
from bros.engine.engine import Engine
from bros.profiling.profiles import Profile
from bros.scheduler.cost_model import CostModel
from bros.simulator.simulation import read_profile

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


def chosen(
    parser: argparse.ArgumentParser,
    option: str,
    text: str,
    known: Iterable[str],
    separator: str = ",",
    matches: Callable[[str, str], bool] = operator.eq,
) -> list[str]:
    """The names in the text of an option. One that is not known ends the program with status 2.

    matches: of a known name and a given one.
    """
    known, names = list(known), [name.strip() for name in text.split(separator)]
    for name in names:
        if not any(matches(each, name) for each in known):
            glue = "; " if any("," in each for each in known) else f"{separator} "
            parser.error(f"argument {option}: no {name!r}, there are {glue.join(known)}")
    return names


def existing_file(text: str) -> Path:
    """The type of an option that is the path of a file to read."""
    path = Path(text)
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {path}")
    return path


def existing_folder(text: str) -> Path:
    """The type of an option that is the path of a folder to read."""
    path = Path(text)
    if not path.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {path}")
    return path


def folder_with(name: str) -> Callable[[str], Path]:
    """The type of an option that is the path of a folder with a file of this name."""

    def parsed(text: str) -> Path:
        existing_file(str(existing_folder(text) / name))
        return Path(text)

    return parsed


def results_folder(
    doc: str | None, default: Path, parse: Callable[[str], Path] = existing_folder
) -> Path:
    """The argument of a script that renders a page from the results in a folder."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument(
        "folder", type=parse, nargs="?", default=default, metavar="FOLDER",
        help="folder of the results and of the page (default: benchmarks/results)",
    )  # fmt: skip
    folder: Path = parser.parse_args().folder
    return folder


def profile_named(
    parser: argparse.ArgumentParser, option: str, text: str, folders: Sequence[Path]
) -> Profile:
    """The profile that an option names. Without such a one, the program ends with status 2."""
    try:
        return read_profile(text, folders)
    except ConfigError as error:
        parser.error(f"argument {option}: {str(error).removeprefix('--profile: ')}")


def in_process(run: Callable[..., None], *arguments: Any) -> Connection:
    """Call run(connection, *arguments) in another process; returns the other end of the connection
    when `run` has sent that it is ready. `run` returns when its `recv` raises EOFError.

    Raises EOFError if the process ends before that.
    """
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    context.Process(target=run, args=(there, *arguments), daemon=True).start()
    there.close()  # so that `recv` fails if the process ends
    here.recv()
    return here


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
