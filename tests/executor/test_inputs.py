"""build_inputs against the same thing written as plain loops."""

from __future__ import annotations

import random
from array import array

import torch
from hypothesis import given
from hypothesis import strategies as st

from bros.core.plan import Chunk, StepPlan
from bros.executor.inputs import build_inputs
from support.checkpoints import GREEDY

INT32 = torch.int32


def random_chunk(name: str, rng: random.Random) -> Chunk:
    num_tokens = rng.choice([1, 1, 1, rng.randint(2, 40)])
    segments = [rng.randrange(1000) for _ in range(3 * rng.choice([0, 1, 5]))]
    return Chunk(
        request_id=name,
        start=rng.randrange(100),
        token_ids=rng.choice([tuple, list])(rng.randrange(50000) for _ in range(num_tokens)),
        segments=array("i", segments),
        slots=array("i", [rng.randrange(1000) for _ in range(num_tokens)]),
        sample=rng.choice([GREEDY, None]),
    )


@given(count=st.integers(1, 12), rng=st.randoms(use_true_random=False))
def test_lays_chunks_end_to_end(count: int, rng: random.Random) -> None:
    plan = StepPlan(0, tuple(random_chunk(str(index), rng) for index in range(count)))
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    rows: list[int] = []
    query_start, segment_start, segments = [0], [0], []
    for chunk in plan.chunks:
        tokens += chunk.token_ids
        positions += range(chunk.start, chunk.start + len(chunk.token_ids))
        slots += chunk.slots
        segments += [list(chunk.segments[i : i + 3]) for i in range(0, len(chunk.segments), 3)]
        query_start.append(len(tokens))
        segment_start.append(len(segments))
        if chunk.sample is not None:
            rows.append(len(tokens) - 1)
    inputs = build_inputs(plan)
    assert inputs.token_ids.tolist() == tokens
    assert inputs.positions.tolist() == positions
    assert inputs.slots.tolist() == slots
    assert inputs.sample_rows.tolist() == rows
    assert [name for name, _ in inputs.samples] == [
        chunk.request_id for chunk in plan.chunks if chunk.sample is not None
    ]
    batch = inputs.attention
    assert batch.num_rows == count
    assert batch.query_start.tolist() == query_start
    assert batch.segment_start.tolist() == segment_start
    assert batch.segments.tolist() == segments
    assert batch.segments.shape == (len(segments), 3)
    for tensor in (inputs.token_ids, inputs.positions, inputs.slots, batch.query_start):
        assert tensor.dtype == INT32 and tensor.is_contiguous()
    for tensor in (batch.segment_start, batch.segments):
        assert tensor.dtype == INT32 and tensor.is_contiguous()


def test_inputs_do_not_share_memory_with_the_plan() -> None:
    chunk = Chunk("a", 0, [7], array("i", [1, 0, 4]), array("i", [3]), None)
    inputs = build_inputs(StepPlan(0, (chunk,)))
    inputs.slots.add_(1)
    inputs.attention.segments.add_(1)
    assert chunk.slots == array("i", [3])
    assert chunk.segments == array("i", [1, 0, 4])
