"""Part of prefix_cache.py: the cost of copying KV to the host and back."""

from __future__ import annotations

import random
import statistics
import time
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from harness import table_of
from rich.console import Console

from bros.core.plan import Chunk, KvCopies, SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.kv_storage import DTYPES, KV_BLOCK_SIZE, KvStorage
from bros.executor.models.spec import ModelSpec
from bros.executor.runner import ModelRunner

SIZE = KV_BLOCK_SIZE
COPIED_TOKENS = (16, 256, 2048)
DECODING_ROWS, CONTEXT = 8, 512

Result = dict[str, float]
Row = dict[str, Any]
"""Row of a table: a Result and its label."""
Report = Callable[[str], None]


def medians(samples: list[Result]) -> Result:
    return {name: statistics.median(found[name] for found in samples) for name in samples[0]}


class Copier:
    """Copies within its own KV memory, which steps do not touch."""

    def __init__(self, spec: ModelSpec, kv_dtype: str) -> None:
        blocks = max(COPIED_TOKENS) // SIZE
        self._blocks = 4 * blocks
        self._storage = KvStorage(spec, self._blocks, DTYPES[kv_dtype], blocks)
        for keys, values in self._storage.layers:
            keys.fill_(1.0)
            values.fill_(1.0)
        self._random = random.Random(1)

    def copies(self, tokens: int, *, out: bool) -> KvCopies:
        """Copies of scattered blocks, last token first, as preemption takes them from victims."""
        blocks = self._random.sample(range(self._blocks), tokens // SIZE)
        device = array("i")
        for block in blocks:
            device.extend(range((block + 1) * SIZE - 1, block * SIZE - 1, -1))
        host = array("i", range(tokens))
        if out:
            return KvCopies(out_device=device, out_host=host)
        return KvCopies(back_device=device, back_host=host)

    @torch.inference_mode()
    def copy(self, copies: KvCopies) -> None:
        self._storage.copy(copies)


def timed_ms(call: Callable[..., object], *args: object) -> float:
    began = time.perf_counter()
    call(*args)
    return (time.perf_counter() - began) * 1e3


def step_plan(rows: int, context: int, tokens: int) -> StepPlan:
    """A step of rows with `context` tokens each and `tokens` new ones, in contiguous blocks."""
    chunks = []
    blocks = -(-(context + tokens) // SIZE)
    for row in range(rows):
        first = row * blocks
        segments = array("i")
        for index in range(context // SIZE):
            segments.extend((first + index, 0, SIZE))
        start = first * SIZE + context
        sample = SampleSpec(SamplingParams(temperature=0), seed=0, output_index=0)
        slots = array("i", range(start, start + tokens))
        chunks.append(Chunk(str(row), context, [7] * tokens, segments, slots, sample))
    return StepPlan(step=0, chunks=tuple(chunks))


def copy_costs(
    executor: ModelRunner, spec: ModelSpec, kv_dtype: str, rounds: int, report: Report
) -> list[Row]:
    """One row per number of tokens: milliseconds of copies, steps with copies, and recomputing."""
    copier, execute = Copier(spec, kv_dtype), executor.execute
    decoding = step_plan(DECODING_ROWS, CONTEXT, 1)
    # The copying thread uses one torch thread: more would only contend with the model's.
    threads = torch.get_num_threads()
    pool = ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    pool.submit(copier.copy, copier.copies(SIZE, out=True)).result()
    torch.set_num_threads(threads)

    def inline(copies: KvCopies) -> None:
        copier.copy(copies)
        execute(decoding)

    def beside(copies: KvCopies) -> None:
        done = pool.submit(copier.copy, copies)
        execute(decoding)
        done.result()

    rows: list[Row] = []
    for tokens in COPIED_TOKENS:
        report(f"copies of {tokens} tokens")
        computing = step_plan(1, 0, tokens)
        samples: list[Result] = []
        for _ in range(rounds + 1):
            found = {"step_ms": timed_ms(execute, decoding)}
            for name, out in (("out", True), ("back", False)):
                copies = copier.copies(tokens, out=out)
                for way, call in (("", copier.copy), ("_inline", inline), ("_beside", beside)):
                    found[f"{name}{way}_ms"] = timed_ms(call, copies)
            found["compute_ms"] = timed_ms(execute, computing)
            samples.append(found)
        rows.append({"tokens": tokens, **medians(samples[1:])})  # the first one warms up
    pool.shutdown()
    return rows


def show_copies(rows: list[Row], console: Console) -> None:
    names = {
        "out_ms": "out",
        "back_ms": "back",
        "step_ms": "step",
        "out_inline_ms": "out, then step",
        "out_beside_ms": "out, concurrent",
        "back_inline_ms": "back, then step",
        "back_beside_ms": "back, concurrent",
        "compute_ms": "recompute",
    }
    title = f"milliseconds to copy KV; the step decodes {DECODING_ROWS} rows of {CONTEXT} tokens"
    cells = [(row["tokens"], *(f"{row[name]:.3g}" for name in names)) for row in rows]
    console.print(table_of(title, ("tokens", *names.values()), cells, left=0))
