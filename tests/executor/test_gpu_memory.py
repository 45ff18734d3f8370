"""How KV memory is sized on a GPU, as arithmetic."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.executor.inputs import build_inputs
from bros.executor.loader import MemoryUse, largest_step
from support.device_runners import assemble

GIB = 2**30


def test_room_is_what_others_the_model_and_its_largest_step_leave() -> None:
    use = MemoryUse(total=100 * GIB, used_by_others=2 * GIB, peak=20 * GIB)
    assert use.kv_cache_bytes(0.9) == pytest.approx(68 * GIB, abs=1)
    assert use.kv_cache_bytes(0.2) == pytest.approx(-2 * GIB, abs=1)


def test_the_error_without_free_memory_names_its_users() -> None:
    error = MemoryUse(total=16 * GIB, used_by_others=GIB, peak=15 * GIB).no_room_error(0.9)
    assert str(error) == (
        "--gpu-memory-utilization: 0.9 of 16.0 GiB leave no room for a KV cache; the model and its "
        "largest step take 15.0 GiB and other processes 1.0 GiB. Raise it, or lower "
        "--max-batch-tokens or --max-num-seqs"
    )


@given(
    rows=st.integers(1, 300),
    tokens=st.integers(1, 2000),
    length=st.integers(2, 4000),
)
def test_the_largest_step_is_as_large_as_steps_get(rows: int, tokens: int, length: int) -> None:
    plan = largest_step(rows, tokens, length, 16)
    assert len(plan.chunks) == min(rows, tokens)
    assert plan.num_tokens == min(tokens, len(plan.chunks) * length)
    for chunk in plan.chunks:
        assert chunk.sample is not None and len(chunk.slots) == len(chunk.token_ids) >= 1
        assert chunk.start + len(chunk.token_ids) <= length
        assert len(chunk.segments) // 3 * 16 == chunk.start
        assert set(chunk.segments[::3]) <= {0} and set(chunk.slots) == {0}
        left = length - chunk.start - len(chunk.token_ids)
        assert left < 16 or sum(len(c.segments) // 3 for c in plan.chunks) > 2**15


def test_the_largest_step_runs_in_a_cache_of_one_block() -> None:
    plan = largest_step(5, 37, 200, 16)
    assert build_inputs(plan).positions.max() < 200
    result = assemble(kv_blocks=1).runner.execute(plan)
    assert result is not None and len(result.samples) == 5
