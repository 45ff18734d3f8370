"""The parts of gpu_speed.py that measure bros itself; each yields lines."""

from __future__ import annotations

import dataclasses
import time
from array import array
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gpu_model import (
    BLOCK,
    VARIANTS,
    Bench,
    Model,
    batch_of,
    full_segments,
    shared_by_all,
)
from gpu_timing import Line, Run, Timing, timed_line

from bros.core.clock import SystemClock
from bros.core.collector import Collector
from bros.core.errors import ConfigError
from bros.core.plan import KvCopies, StepPlan
from bros.core.request import EngineRequest, SamplingParams, expanded
from bros.engine.engine import Engine
from bros.kernels.dispatch import select_kernels
from bros.kernels.interface import AttentionBatch
from bros.scheduler.build import build_scheduler


def decode(bench: Bench) -> Iterator[Line]:
    """Steps of one token per row, with and without CUDA graphs."""
    model = bench.model
    for context in model.sizes.contexts:
        for rows in model.sizes.batches:
            plans = [model.decode_plan(rows, context) for _ in range(VARIANTS)]
            contexts = [context] * rows
            floor = bench.ceilings.floor_s(
                model.bytes_of(contexts, rows), model.flops_of(contexts, [1] * rows)
            )
            name = f"{rows} x {context}"
            asked = 0.8 if rows <= 32 else None
            yield timed_line("decode", name, bench.steps_in_a_row(plans), floor, asked=asked)
            yield timed_line("decode", f"{name}, one at a time", bench.step(plans), floor)
            if model.has_graphs:
                with model.without_graphs():
                    alone = bench.steps_in_a_row(plans)
                yield timed_line("decode", f"{name}, without graphs", alone, floor)


def prefill(bench: Bench) -> Iterator[Line]:
    """One prompt in one step."""
    model = bench.model
    for tokens in model.sizes.prompts:
        plan = model.prefill_plan(tokens)
        floor = bench.ceilings.floor_s(model.bytes_of([0], tokens), model.flops_of([0], [tokens]))
        asked = 0.6 if tokens == 4096 else None
        yield timed_line("prefill", f"{tokens} tokens", bench.step([plan]), floor, asked=asked)


def mixed(bench: Bench) -> Iterator[Line]:
    """A chunk of a prompt beside decode rows: the whole step, and how long the host needs to launch
    it, with an idle device."""
    model = bench.model
    context = min(model.sizes.contexts)
    for rows, tokens in model.sizes.mixed:
        plans = [model.mixed_plan(rows, context, tokens) for _ in range(VARIANTS)]
        contexts, chunks = [context] * rows + [0], [1] * rows + [tokens]
        floor = bench.ceilings.floor_s(
            model.bytes_of(contexts, rows + tokens), model.flops_of(contexts, chunks)
        )
        name = f"{rows} x {context} and {tokens} tokens"
        yield timed_line("mixed", name, bench.steps_in_a_row(plans), floor)
        yield launching_line(bench, name, plans, asked_ms=2.0)
    rows = max(model.sizes.batches)
    plans = [model.decode_plan(rows, context) for _ in range(VARIANTS)]
    yield launching_line(bench, f"{rows} x {context}", plans, asked_ms=1.0)


def launching_line(bench: Bench, name: str, plans: list[StepPlan], asked_ms: float) -> Line:
    """How long the host needs to launch a step, while the device has nothing to do."""
    runner, synchronize = bench.model.runner, bench.timer.synchronize
    launch = getattr(runner, "launch", None)
    if launch is None:
        return Line("mixed", f"launch of {name}", skipped="only with CUDA")
    taken = []
    with Collector():  # as in the engine's process
        for number in range(3 + bench.timer.repeats):
            synchronize()
            began = time.perf_counter()
            launched = launch(plans[number % len(plans)])
            taken.append(time.perf_counter() - began)
            launched.result()
    return host_line("mixed", f"launch of {name}", Timing.of(taken[3:]), asked_ms)


def host_line(part: str, name: str, timing: Timing, asked_ms: float, note: str = "") -> Line:
    """The host's own time."""
    return Line(
        part,
        name,
        measured=timing.median * 1e3,
        share=timing.median * 1e3,
        share_of="ms of the host",
        asked=("<=", asked_ms),
        spread=(timing.low * 1e3, timing.high * 1e3),
        note=note,
    )


def attention(bench: Bench) -> Iterator[Line]:
    """The attention kernel of one layer alone."""
    model = bench.model
    asked_for = model.sizes.attention
    others = {(rows, context) for rows in model.sizes.batches for context in model.sizes.contexts}
    for rows, context in [asked_for, *sorted(others - {asked_for})]:
        runs = []
        for _ in range(VARIANTS):
            owned = model.blocks_for([-(-context // BLOCK)] * rows)
            batch = model.prepared(batch_of([full_segments(each, context) for each in owned]))
            runs.append((model.qkv(rows), batch))
        [timing] = bench.kernels([lambda i, runs=runs: model.attend(*runs[i % VARIANTS], i)])
        yield timed_line(
            "attention",
            f"{rows} x {context}",
            timing,
            model.attention_bytes([context] * rows) / bench.ceilings.copy,
            asked=0.85 if (rows, context) == asked_for else None,
        )
    yield from chunks(bench)


def chunks(bench: Bench) -> Iterator[Line]:
    """The attention kernel alone on a chunk of a prompt, without and with earlier context."""
    model, tokens = bench.model, max(bench.model.sizes.contexts)
    for context in (0, tokens):
        [blocks] = model.blocks_for([context // BLOCK])
        batch = dataclasses.replace(
            batch_of([full_segments(blocks, context)]),
            query_start=torch.tensor([0, tokens], dtype=torch.int32),
        )
        [timing] = bench.kernels(attending(model, tokens, [model.prepared(batch)]))
        flops = 4 * tokens * (context + (tokens + 1) / 2) * model.layout.q_size
        floor = bench.ceilings.floor_s(model.attention_bytes([context]), flops)
        yield timed_line("attention", f"chunk of {tokens} after {context}", timing, floor)


def layout(bench: Bench) -> Iterator[Line]:
    """The same number of tokens in blocks with one owner and in blocks with two.

    plain           each row has its own last block, filled from the left
    bidirectional   pairs of rows share their last block, filled from both sides
    reversed        all rows fill their last block from the right
    halves          two rows in every block, the worst case: twice as many segments
    """
    model = bench.model
    rows, context = model.sizes.layout
    context -= BLOCK // 2
    full, half = context // BLOCK, context % BLOCK
    owned = np.array(model.blocks_for([full + 1] * rows))
    plain = [full_segments(blocks, context) for blocks in owned]
    mixed, turned, halves = [], [], []
    for row, segments in enumerate(plain):
        right = segments.copy()
        right[-1] = right[-1, 0], BLOCK - half, BLOCK
        turned.append(right)
        both = segments.copy() if row % 2 == 0 else right.copy()
        both[-1, 0] = owned[row - row % 2, -1]
        mixed.append(both)
        pair = np.concatenate([owned[row - row % 2, :-1], owned[row - row % 2 + 1, :-1]])
        side = (0, BLOCK // 2) if row % 2 == 0 else (BLOCK // 2, BLOCK)
        part = np.stack([pair, *(np.full_like(pair, end) for end in side)], axis=1)
        halves.append(np.concatenate([part, both[-1:]]))
    cases = {"plain": plain, "bidirectional": mixed, "reversed": turned, "halves": halves}
    batches = [model.prepared(batch_of(each)) for each in cases.values()]
    taken = bench.kernels(attending(model, rows, batches))
    timings = dict(zip(cases, taken, strict=True))
    floor = model.attention_bytes([context] * rows) / bench.ceilings.copy
    for name, timing in timings.items():
        asked = ("<=", 1.02) if name in ("bidirectional", "reversed") else None
        yield compared(
            "layout",
            f"attention, {rows} x {context}, {name}",
            timing,
            floor,
            timings["plain"],
            "times plain",
            asked,
        )
    few = min(rows, 32)
    plans = {name: model.plan_of(cases[name][:few], context) for name in ("plain", "bidirectional")}
    rows_of = bench.rows_of_steps([[plan] for plan in plans.values()])
    times = dict(zip(plans, rows_of, strict=True))
    yield compared(
        "layout",
        f"step, {few} x {context}, bidirectional",
        times["bidirectional"],
        None,
        times["plain"],
        "times plain",
        ("<=", 1.02),
    )


def shared(bench: Bench) -> Iterator[Line]:
    """A long prefix shared by all rows, read once for all or once per row."""
    model, sizes = bench.model, bench.model.sizes
    prefix_blocks = sizes.prefix // BLOCK
    for rows in sizes.sharers:
        own = -(-sizes.suffix // BLOCK)
        prefix, *owned = model.blocks_for([prefix_blocks] + [own] * rows)
        suffixes = [full_segments(blocks, sizes.suffix) for blocks in owned]
        whole = full_segments(prefix, BLOCK * prefix_blocks)
        listed = [np.concatenate([whole, suffix]) for suffix in suffixes]
        grouped = model.prepared(batch_of(suffixes, shared_by_all(prefix, rows)))
        alone = model.prepared(batch_of(listed))
        together, apart = bench.kernels(attending(model, rows, [grouped, alone]))
        context = BLOCK * prefix_blocks + sizes.suffix
        read = model.attention_bytes([sizes.suffix] * rows) + model.attention_bytes(
            [BLOCK * prefix_blocks]
        )
        name = f"{rows} rows, prefix {sizes.prefix}"
        yield compared(
            "shared",
            f"attention, {name}",
            together,
            read / bench.ceilings.copy,
            apart,
            "as fast as ungrouped",
            (">=", 1.8) if rows >= 64 else None,
            faster=True,
        )
        step = bench.steps_in_a_row([model.plan_of(listed, context, shared=prefix_blocks)])
        ungrouped = bench.steps_in_a_row([model.plan_of(listed, context)])
        yield compared(
            "shared",
            f"step, {name}",
            step,
            None,
            ungrouped,
            "as fast as ungrouped",
            None,
            faster=True,
        )


def attending(model: Model, rows: int, batches: list[AttentionBatch]) -> list[Run]:
    """The attention kernel on each of these prepared batches, with the same queries."""
    qkv = model.qkv(rows)
    return [lambda i, batch=batch: model.attend(qkv, batch, i) for batch in batches]


def compared(
    part: str,
    name: str,
    timing: Timing,
    floor_s: float | None,
    other: Timing,
    words: str,
    asked: tuple[str, float] | None,
    *,
    faster: bool = False,
) -> Line:
    """A line whose share is its time over `other`'s; faster: the inverse."""
    share = other.median / timing.median if faster else timing.median / other.median
    return Line(
        part=part,
        name=name,
        measured=timing.median * 1e3,
        floor=None if floor_s is None else floor_s * 1e3,
        share=share,
        share_of=words,
        asked=asked,
        spread=(timing.low * 1e3, timing.high * 1e3),
    )


SPREAD = 3.0  # of logits: 5,000 of 128,256 tokens hold 0.9 of the mass, a hard case for top_p
TOP_K, TOP_P = 50, 0.9
WAYS = {
    "greedy": (0.0, 0, 1.0),
    "top_k": (1.0, TOP_K, 1.0),
    "top_p": (1.0, 0, TOP_P),
    "top_k and top_p": (1.0, TOP_K, TOP_P),
}
"""Temperature, top_k and top_p; 0 and 1.0 are off."""


def sampling(bench: Bench) -> Iterator[Line]:
    """Sample one token per row. The floor is reading the logits once."""
    device, vocab = bench.model.device, bench.model.spec.vocab_size
    try:
        select_kernels("triton", device)
    except ConfigError as error:
        yield Line("sampling", "by Triton", skipped=str(error))
        return
    # Lazy: it needs Triton.
    from bros.kernels.triton.sampling import SamplingTensors, sample_tokens

    for rows in bench.model.sizes.sampled:
        logits = [torch.randn(rows, vocab, device=device) * SPREAD for _ in range(VARIANTS)]
        starts = torch.randint(2**62, (rows,), device=device)
        for name, (temperature, top_k, top_p) in WAYS.items():
            params = SamplingTensors(
                torch.full((rows,), temperature, device=device),
                torch.zeros(rows, device=device),
                torch.full((rows,), top_k, dtype=torch.int32, device=device),
                torch.full((rows,), top_p, dtype=torch.float64, device=device),
                starts,
            )
            [timing] = bench.kernels(
                [lambda i, given=logits, params=params: sample_tokens(given[i % VARIANTS], params)]
            )
            yield timed_line(
                "sampling",
                f"{name}, {rows} rows",
                timing,
                bench.ceilings.floor_s(logits[0].nbytes),
            )


def copies(bench: Bench) -> Iterator[Line]:
    """KV copies to the host and back: bandwidth, and the time they add to a concurrent step."""
    model, sizes, kv = bench.model, bench.model.sizes, bench.model.runner._kv
    slots = _slots(model, sizes.copied)
    host = array("i", range(sizes.copied))
    out = KvCopies(out_device=slots, out_host=host)
    back = KvCopies(back_device=slots, back_host=host)

    def bandwidth(copies: KvCopies) -> Callable[[int], None]:
        def run(_: int) -> None:
            kv.copy(copies)
            kv.wait_for_layer(len(model.layers) - 1)
            bench.timer.synchronize()

        return run

    moved = sizes.copied * model.kv_token_bytes
    for name, copied, ceiling in (
        ("checkpoint", out, bench.ceilings.to_host),
        ("restore", back, bench.ceilings.to_device),
    ):
        timing = bench.timer.by_the_clock(bandwidth(copied))
        note = f"{moved / timing.median / 1e9:.1f} of {ceiling / 1e9:.1f} GB/s"
        yield timed_line(
            "copies",
            f"{name} of {sizes.copied} tokens",
            timing,
            moved / ceiling,
            asked=0.8,
            note=note,
        )
    plans = [model.decode_plan(*sizes.beside) for _ in range(VARIANTS)]
    alone = bench.steps_in_a_row(plans)
    for tokens in sizes.copied_beside:
        half = tokens // 2
        out = KvCopies(slots[:half], host[:half])
        both = KvCopies(slots[:half], host[:half], host[half : 2 * half], slots[half : 2 * half])
        for name, copied in ((f"{half} tokens out", out), (f"{half} tokens out and back", both)):
            beside = [StepPlan(plan.step, plan.chunks, copied) for plan in plans]
            timing = bench.steps_in_a_row(beside)
            yield Line(
                "copies",
                f"{name} in each step of {sizes.beside[0]} x {sizes.beside[1]}",
                measured=timing.median * 1e3,
                floor=alone.median * 1e3,
                share=(timing.median - alone.median) * 1e3,
                share_of="ms added",
                # A recorded step waits for all that comes back, however much that is.
                asked=("<=", 1.0) if copied is out else None,
                spread=(timing.low * 1e3, timing.high * 1e3),
            )


def _slots(model: Model, count: int) -> array[int]:
    """The slots of whole blocks that are scattered over the memory."""
    [blocks] = model.blocks_for([-(-count // BLOCK)])
    slots = (blocks[:, None] * BLOCK + np.arange(BLOCK, dtype=np.int32)).ravel()[:count]
    return array("i", slots.astype(np.int32).tobytes())


class TimedExecutor:
    """Forwards plans to an executor and sums up the host's time in it.

    waited_s: in results, for the device.
    seconds: in all calls.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.seconds = self.waited_s = 0.0
        if hasattr(inner, "launch"):
            self.launch = self._launch

    def execute(self, *arguments: Any) -> Any:
        return self._timed(self._inner.execute, *arguments)

    def _launch(self, plan: StepPlan) -> TimedStep:
        return TimedStep(self, self._timed(self._inner.launch, plan))

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        result = call(*arguments)
        self.seconds += time.perf_counter() - began
        return result

    def close(self) -> None:
        pass  # the model is still in use


class TimedStep:
    def __init__(self, timed: TimedExecutor, running: Any) -> None:
        self._executor, self._running = timed, running

    def result(self) -> Any:
        before = self._executor.seconds
        result = self._executor._timed(self._running.result)
        self._executor.waited_s += self._executor.seconds - before
        return result


def overhead(bench: Bench) -> Iterator[Line]:
    """The overhead of the engine per step, with a full batch.

    The time per step of a decoding engine is compared with that of the same pipelined steps
    without an engine. Scheduling: the host's time outside the executor. Host: with launching, but
    without waiting for the device.
    """
    model, sizes = bench.model, bench.model.sizes
    rows, prompt = sizes.engine_rows, 4 * BLOCK
    plans = [model.decode_plan(rows, prompt + sizes.engine_steps // 2) for _ in range(VARIANTS)]
    bare = bench.steps_in_a_row(plans)
    timed = TimedExecutor(model.runner)
    ahead = hasattr(timed, "launch")
    scheduler = build_scheduler(model.config, model.info, None, depth=2 if ahead else 1)
    engine = Engine(scheduler, timed, SystemClock(), model.info, async_scheduling="auto")
    sampling = SamplingParams(temperature=0, max_tokens=sizes.engine_steps + 20, ignore_eos=True)
    for row in range(rows):
        ids = [(31 * row + 7 * i) % model.spec.vocab_size for i in range(prompt)]
        engine.submit(EngineRequest(request_id=str(row), prompt_token_ids=ids, sampling=sampling))
    whole, host, busy = [], [], []
    with Collector():  # as in the engine's process
        while engine.has_work:
            before, waited, began = timed.seconds, timed.waited_s, time.perf_counter()
            outputs = engine.step()
            seconds = time.perf_counter() - began
            if sum(len(output.token_ids) for output in map(expanded, outputs)) == rows:
                whole.append(seconds)
                host.append(seconds - (timed.seconds - before))
                busy.append(seconds - (timed.waited_s - waited))
    step, work = Timing.of(whole[2:] or whole), Timing.of(host[2:] or host)
    added = (step.median - bare.median) * 1e3
    yield Line(
        "overhead",
        f"engine step, {rows} rows",
        measured=step.median * 1e3,
        floor=bare.median * 1e3,
        share=added,
        share_of="ms added",
        asked=("<=", 1.0),
        spread=(step.low * 1e3, step.high * 1e3),
    )
    yield Line(
        "overhead",
        f"scheduling, {rows} rows",
        measured=work.median * 1e3,
        spread=(work.low * 1e3, work.high * 1e3),
        note="hidden behind the device's work" if ahead else "before each step",
    )
    if ahead:
        own = Timing.of(busy[2:] or busy)
        note = "scheduling, launching, applying results"
        yield host_line("overhead", f"host, {rows} rows", own, asked_ms=1.0, note=note)
