"""Steps that are run once before serving, so that no request waits for what comes only once.

Triton compiles a kernel when it is first launched with a new size, which takes a second or more;
recorded steps launch those of decoding only. Libraries set themselves up in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from bros.core.plan import SampleSpec, StepPlan
from bros.core.request import SamplingParams
from bros.executor.gpu_memory import chunk_in_block_0
from bros.executor.runner import ModelRunner

_LONGEST_CHUNK = 128
"""Tiles of queries have 16 to 128 rows, of which a token has one at least."""

_CONTEXT_BLOCKS = 64  # enough for a context in several parts that are merged

_GREEDY = SampleSpec(SamplingParams(temperature=0.0), seed=0, output_index=0)
_DRAWN = replace(_GREEDY, params=SamplingParams(temperature=1.0, top_p=0.9, top_k=50))


def warm_up(runner: ModelRunner, max_length: int, block_size: int) -> None:
    """Run what serving may launch. Only for a runner whose KV cache holds nothing yet: this leaves
    numbers in block 0 that mean nothing."""
    for plan in warm_up_plans(max_length, block_size):
        runner.execute(plan)


def warm_up_plans(max_length: int, block_size: int) -> list[StepPlan]:
    """Steps with a chunk of 2, 4, 8, ... tokens beside a row that decodes, as far as max_length
    tokens go: whatever the number of heads, one for each size of a tile. In the first one both
    rows are drawn; then one is greedy, so that both ways of choosing meet in a step."""
    plans: list[StepPlan] = []
    size = 2
    while size <= min(_LONGEST_CHUNK, max_length):
        context = min((max_length - size) // block_size, _CONTEXT_BLOCKS)
        chunks = (
            chunk_in_block_0("chunk", size, context, block_size, _DRAWN),
            chunk_in_block_0("decode", 1, context, block_size, _GREEDY if plans else _DRAWN),
        )
        plans.append(StepPlan(len(plans), chunks))
        size *= 2
    return plans
