"""Speed of every kernel on SmolLM2-135M shapes: the reference and each compiled level.

    python benchmarks/kernels_speed.py [--threads 2] [--repeats 30] [--only TABLE]

Prints medians in microseconds. Calls alternate between the KV of 30 layers, so that decode reads
memory rather than the processor's cache, as in a real step. The second table is about decode steps
with a shared prefix: attention of all layers, with the prefix read by each row or read once; the
two alternate. The third table is about products of packed weights: matrices that the last cache
does not hold together take turns. Levels whose products no engine uses are left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from harness import benchmark_parser, save, table_of
from rich.console import Console
from torch import Tensor

from bros.core.clock import SystemClock
from bros.core.plan import SharedPrefix
from bros.executor.inputs import with_shared_parts
from bros.executor.models.layers import has_products
from bros.executor.weights import Int4Groups
from bros.kernels.interface import AttentionBatch, HeadLayout, Kernels, Products
from bros.kernels.panels import PanelFormat, PanelLayout, Panels
from bros.kernels.reference import ReferenceKernels

LAYOUT = HeadLayout(num_heads=9, num_kv_heads=3, head_dim=64)
HIDDEN, INTERMEDIATE, LAYERS, BLOCK_SIZE = 576, 1536, 30, 16
TOKENS = (1, 32, 256)
ATTENTION_ROWS = {
    "prefill 1024": [(1024, 0)],
    "prefill 256 after 768": [(256, 768)],
    "decode 1 x 512": [(1, 512)],
    "decode 32 x 512": [(1, 512)] * 32,
    "prefill 224 + decode 32 x 512": [(224, 0)] + [(1, 512)] * 32,
}
# (rows, tokens of the shared prefix); each row has PRIVATE_TOKENS more.
SHARED_PREFIXES = [(16, 64), (16, 256), (16, 1500), (16, 6000)]
SHARED_PREFIXES += [(2, 64), (2, 256), (2, 1500), (4, 64), (4, 1500), (8, 1500), (32, 1500)]
PRIVATE_TOKENS = 100
PRODUCT_ROWS = (1, 4, 8, 16, 32, 256)
PRODUCT_SHAPES = {"576 wide": (2 * INTERMEDIATE, HIDDEN), "2,048 wide": (16384, 2048)}
"""Outputs and inputs: gate and up of SmolLM2-135M, and of Llama-3.2-1B."""
PRODUCT_WEIGHTS = 128 * 1024 * 1024  # of all matrices that take turns
KV_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """One line of the table. run(kernels): runs once. note(seconds): text beside the median."""

    name: str
    run: Callable[[Kernels], object]
    note: Callable[[float], str] = lambda seconds: ""


def elementwise_cases(tokens: int) -> Iterator[Case]:
    """The four elementwise operations on activations of `tokens` tokens."""
    x, residual = torch.randn(tokens, HIDDEN), torch.randn(tokens, HIDDEN)
    weight = torch.ones(HIDDEN)
    gate_up = torch.randn(tokens, 2 * INTERMEDIATE)
    qkv = torch.randn(tokens, LAYOUT.qkv_size)
    slots = torch.arange(tokens, dtype=torch.int32)
    cos_sin = torch.randn(tokens, LAYOUT.head_dim)
    cache = torch.zeros(2, -(-tokens // BLOCK_SIZE), LAYOUT.num_kv_heads, BLOCK_SIZE, 64)
    yield Case(f"rms_norm, {tokens}", lambda k: k.rms_norm(x, weight, 1e-5))
    yield Case(f"add_rms_norm_, {tokens}", lambda k: k.add_rms_norm_(residual, x, weight, 1e-5))
    yield Case(f"silu_and_mul, {tokens}", lambda k: k.silu_and_mul(gate_up))
    yield Case(
        f"rope_and_cache_, {tokens}",
        lambda k: k.rope_and_cache_(qkv, LAYOUT, slots, slots, cos_sin, cache[0], cache[1]),
    )


def attention_case(name: str, rows: Sequence[tuple[int, int]], kv_dtype: str) -> Case:
    """rows: (chunk, context) tokens of each row of the step."""
    query_start, segment_start, segments = [0], [0], []
    num_blocks = sum(-(-context // BLOCK_SIZE) for _, context in rows) + 1
    blocks = iter(torch.randperm(num_blocks).tolist())
    for tokens, context in rows:
        query_start.append(query_start[-1] + tokens)
        for begin in range(0, context, BLOCK_SIZE):
            segments.append((next(blocks), 0, min(BLOCK_SIZE, context - begin)))
        segment_start.append(len(segments))
    batch = batch_of(query_start, segment_start, segments)
    caches = random_caches(num_blocks, kv_dtype)
    qkv = torch.randn(query_start[-1], LAYOUT.qkv_size)
    layer = itertools.cycle(range(LAYERS))

    def run(kernels: Kernels) -> Tensor:
        k_cache, v_cache = caches[next(layer)]
        return kernels.attention(qkv, LAYOUT, k_cache, v_cache, batch, LAYOUT.head_dim**-0.5)

    def note(seconds: float) -> str:
        if all(tokens == 1 for tokens, _ in rows):
            read = sum(context for _, context in rows) * caches.element_size()
            return f"{2 * read * LAYOUT.kv_size / seconds / 1e9:.1f} GB/s"
        pairs = sum(tokens * (context + (tokens + 1) / 2) for tokens, context in rows)
        return f"{4 * pairs * LAYOUT.q_size / seconds / 1e9:.0f} GFLOP/s"

    return Case(f"attention, {name}, {kv_dtype}", run, note)


def batch_of(
    query_start: Sequence[int], segment_start: Sequence[int], segments: Sequence[Sequence[int]]
) -> AttentionBatch:
    return AttentionBatch(
        torch.tensor(query_start, dtype=torch.int32),
        torch.tensor(segment_start, dtype=torch.int32),
        torch.tensor(segments, dtype=torch.int32).reshape(-1, 3),
    )


def random_caches(num_blocks: int, kv_dtype: str) -> Tensor:
    shape = (LAYERS, 2, num_blocks, LAYOUT.num_kv_heads, BLOCK_SIZE, LAYOUT.head_dim)
    return torch.randn(shape).to(KV_DTYPES[kv_dtype])


def batch_with_prefix(rows: int, prefix: int) -> tuple[AttentionBatch, int]:
    """A decode step whose rows share a prefix, and the number of its blocks."""
    num_common, num_own = prefix // BLOCK_SIZE, -(-(PRIVATE_TOKENS + prefix % BLOCK_SIZE) // 16)
    num_blocks = num_common + rows * num_own
    blocks = iter(torch.randperm(num_blocks).tolist())
    common = [(next(blocks), 0, BLOCK_SIZE) for _ in range(num_common)]
    segments = []
    for _ in range(rows):
        lengths = [BLOCK_SIZE] * (num_own - 1)
        lengths.append(prefix % BLOCK_SIZE + PRIVATE_TOKENS - sum(lengths))
        segments += common + [(next(blocks), 0, length) for length in lengths]
    per_row = num_common + num_own
    starts = range(0, rows * per_row + 1, per_row)
    return batch_of(range(rows + 1), starts, segments), num_blocks


def shared_seconds(
    kernels: Kernels, rows: int, prefix: int, kv_dtype: str, repeats: int
) -> dict[str, float]:
    """Median seconds of attention of all layers: "alone", each row reads the prefix; "together",
    it is read once; "grouping", the time to prepare the latter."""
    clock = SystemClock()
    alone, num_blocks = batch_with_prefix(rows, prefix)
    caches = random_caches(num_blocks, kv_dtype)
    qkv = torch.randn(rows, LAYOUT.qkv_size)
    durations: dict[str, list[float]] = {"alone": [], "grouping": [], "together": []}

    def attend(name: str, batch: AttentionBatch) -> None:
        before = clock.now()
        for k_cache, v_cache in caches:
            kernels.attention(qkv, LAYOUT, k_cache, v_cache, batch, LAYOUT.head_dim**-0.5)
        durations[name].append(clock.now() - before)

    for _ in range(1 + repeats):
        attend("alone", alone)
        before = clock.now()
        common = SharedPrefix(array("i", range(rows)), 0, prefix // BLOCK_SIZE)
        together = with_shared_parts(alone, [common])
        durations["grouping"].append(clock.now() - before)
        attend("together", together)
    return {name: statistics.median(values[1:]) for name, values in durations.items()}


def shared_rows(kernels: Kernels, repeats: int) -> Iterator[list[str]]:
    """The second table."""
    for kv_dtype, (rows, prefix) in itertools.product(KV_DTYPES, SHARED_PREFIXES):
        medians = shared_seconds(kernels, rows, prefix, kv_dtype, repeats)
        ratio = medians["alone"] / (medians["grouping"] + medians["together"])
        times = (f"{median * 1e6:,.0f}" for median in medians.values())
        yield [f"{rows} rows, {prefix} shared, {kv_dtype}", *times, f"{ratio:.2f}"]


def packed(form: PanelFormat, outputs: int, inputs: int, layout: PanelLayout) -> Panels:
    """Random weights."""
    weight = torch.randn(outputs, inputs)
    if form is PanelFormat.INT4:
        four = Int4Groups.from_dense(weight)
        return Panels.int4(four.codes, four.scale, four.minimum, layout)
    pack = {
        PanelFormat.FP32: Panels.fp32,
        PanelFormat.BF16: Panels.bf16,
        PanelFormat.INT8: Panels.int8,
    }
    return pack[form](weight, layout)


def product_rows(products: Sequence[Products], repeats: int) -> Iterator[list[str]]:
    """The third table."""
    for (name, (outputs, inputs)), form in itertools.product(PRODUCT_SHAPES.items(), PanelFormat):
        count = max(2, PRODUCT_WEIGHTS // (outputs * inputs))
        matrices = {}
        for layout in {each.panel_layout for each in products}:
            one = packed(form, outputs, inputs, layout)
            copies = [dataclasses.replace(one, data=one.data.clone()) for _ in range(count)]
            matrices[layout] = itertools.cycle(copies)

        def multiply(
            by: Products, x: Tensor, matrices: Mapping[PanelLayout, Iterator[Panels]]
        ) -> None:
            by.linear(x, next(matrices[by.panel_layout]), None)

        for rows in PRODUCT_ROWS:
            x = torch.randn(rows, inputs)
            medians = [median_s(partial(multiply, each, x, matrices), repeats) for each in products]
            times = (f"{median * 1e6:,.0f}" for median in medians)
            rate = 2 * rows * outputs * inputs / medians[-1] / 1e9
            yield [f"{name}, {form.name.lower()}, {rows}", *times, f"{rate:.0f} GFLOP/s"]


def all_cases() -> Iterator[Case]:
    for tokens in TOKENS:
        yield from elementwise_cases(tokens)
    for name, rows in ATTENTION_ROWS.items():
        for kv_dtype in KV_DTYPES:
            yield attention_case(name, rows, kv_dtype)


def back_ends() -> list[Kernels]:
    """The reference, then the compiled levels of this machine, slowest first."""
    try:
        # Optional: without a compiler there is only the reference to measure.
        from bros.kernels.cpu_ops import CpuKernels, levels
    except ImportError:
        return [ReferenceKernels()]
    return [ReferenceKernels(), *(CpuKernels(level) for level in reversed(levels()))]


def median_s(run: Callable[[], object], repeats: int) -> float:
    """Median duration of `repeats` calls after a warm-up."""
    clock = SystemClock()
    durations = []
    for _ in range(3 + repeats):
        before = clock.now()
        run()
        durations.append(clock.now() - before)
    return statistics.median(durations[3:])


def rows_of_all(kernels: Sequence[Kernels], repeats: int) -> Iterator[list[str]]:
    """The first table."""
    for case in all_cases():
        medians = [median_s(partial(case.run, each), repeats) for each in kernels]
        yield [case.name, *(f"{m * 1e6:,.0f}" for m in medians), case.note(medians[-1])]


def main() -> None:
    parser = benchmark_parser(__doc__, repeats=2)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--only", choices=["each", "shared", "products"], help="one table")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    kernels = back_ends()
    console = Console(width=120)
    results: dict[str, list[list[str]]] = {}
    if args.only in (None, "each"):
        names = [each.name for each in kernels]
        headings = ("operation, tokens", *names, f"{names[-1]} rate")
        results["each"] = list(rows_of_all(kernels, args.repeats))
        title = f"Median microseconds, {args.threads} threads"
        console.print(table_of(title, headings, results["each"]))
    if args.only in (None, "shared") and len(kernels) > 1:
        headings = ("rows, tokens", "read by each row", "grouping", "read once", "speed-up")
        results["shared"] = list(shared_rows(kernels[-1], max(1, args.repeats // 3)))
        title = f"Attention of a decode step, microseconds, {kernels[-1].name}"
        console.print(table_of(title, headings, results["shared"]))
    compiled = {
        each.name: each.products for each in kernels if each.products and has_products(each.name)
    }
    if args.only in (None, "products") and compiled:
        headings = ("weights, rows", *compiled, f"{[*compiled][-1]} rate")
        results["products"] = list(product_rows([*compiled.values()], args.repeats))
        title = f"Products, median microseconds, {args.threads} threads"
        console.print(table_of(title, headings, results["products"]))
    save(args.json, results)


if __name__ == "__main__":
    main()
