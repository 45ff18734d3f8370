"""The operations of a decode step, measured one by one; for gpu_speed.py.

If a step is far above its floor, these lines show which kernels take the time, and their sum shows
the time lost between kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_model import BLOCK, VARIANTS, Bench, Model, batch_of, full_segments
from gpu_timing import Line, Timing, timed_line
from torch import Tensor

from bros.executor.models.decoder import Block, Blocks, GatedMlp


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation.

    times: how often a step runs it.
    run: run(layer) runs it once.
    bytes, flops: the minimum for one run.
    """

    name: str
    times: int
    run: Callable[[int], object]
    bytes: float
    flops: float = 0.0


def layer(bench: Bench) -> Iterator[Line]:
    """Every operation of a layer, alternating between all layers, and the head."""
    model, context = bench.model, bench.model.sizes.contexts[0]
    for rows in model.sizes.layer_rows:
        spent = floor = 0.0
        for operation in operations(model, rows, context):
            [timing] = bench.kernels([operation.run])
            least = bench.ceilings.floor_s(operation.bytes, operation.flops)
            yield timed_line("layer", f"{operation.name}, {rows} rows", timing, least)
            spent += operation.times * timing.median
            floor += operation.times * least
        whole = bench.steps_in_a_row([model.decode_plan(rows, context) for _ in range(VARIANTS)])
        yield timed_line(
            "layer", f"all of a step, {rows} x {context}", _constant_timing(spent), floor
        )
        yield Line(
            "layer",
            f"the step, {rows} x {context}",
            measured=whole.median * 1e3,
            share=spent / whole.median,
            share_of="of it in these",
            spread=(whole.low * 1e3, whole.high * 1e3),
        )


def operations(model: Model, rows: int, context: int) -> list[Operation]:
    """The operations of a decode step between the embedding and sampling."""
    decoder, spec, size = model.runner._decoder, model.spec, model.dtype.itemsize
    assert decoder is not None and decoder.final_norm is not None
    hidden, inner, layers = spec.hidden_size, spec.intermediate_size, spec.num_layers
    layout, kernels = model.layout, model.kernels

    def some(columns: int) -> Tensor:
        return torch.randn(rows, columns, device=model.device).to(model.dtype)

    def block(index: int) -> Block:
        assert isinstance(decoder.layers, Blocks)
        found = decoder.layers.blocks[index % layers]
        assert isinstance(found.mlp, GatedMlp)
        return found

    x, wide, both, qkv = some(hidden), some(inner), some(2 * inner), some(layout.qkv_size)
    residual, attended = some(hidden), some(layout.q_size)
    positions = torch.full((rows,), context, dtype=torch.int32, device=model.device)
    slots = torch.arange(rows, dtype=torch.int32, device=model.device)
    owned = model.blocks_for([-(-context // BLOCK)] * rows)
    batch = model.prepared(batch_of([full_segments(each, context) for each in owned]))

    def rope(index: int) -> None:
        attention = block(index).attention
        kernels.rope_and_cache_(
            qkv, layout, positions, slots, attention.cos_sin, *model.layers[index % layers]
        )

    def product(name: str, times: int, run: Callable[[int], object], k: int, n: int) -> Operation:
        """The matrix product of x [rows, k] and a matrix [n, k]."""
        moved = (rows * k + n * k + rows * n) * size
        return Operation(name, times, run, moved, 2 * rows * n * k)

    return [
        Operation(
            "sum and norm",
            2 * layers + 1,
            lambda i: block(i).mlp_norm.add_(residual, x),
            4 * x.nbytes,
        ),
        product("QKV", layers, lambda i: block(i).attention.qkv(x), hidden, layout.qkv_size),
        # Reads and writes Q and K, reads V, and writes K and V to the cache.
        Operation(
            "rotation and cache", layers, rope, 2 * qkv.nbytes + rows * layout.kv_size * size
        ),
        Operation(
            "attention",
            layers,
            lambda i: model.attend(qkv, batch, i),
            model.attention_bytes([context] * rows),
        ),
        product(
            "output", layers, lambda i: block(i).attention_out(attended), layout.q_size, hidden
        ),
        product("gate and up", layers, lambda i: block(i).mlp.gate_up(x), hidden, 2 * inner),
        Operation(
            "activation", layers, lambda i: kernels.silu_and_mul(both), both.nbytes + wide.nbytes
        ),
        product("down", layers, lambda i: block(i).mlp.down(wide), inner, hidden),
        product("head", 1, lambda i: decoder.lm_head(x), hidden, spec.vocab_size),
    ]


def _constant_timing(seconds: float) -> Timing:
    return Timing(seconds, seconds, seconds)
