"""Recorded steps give what steps that are not recorded give. Recording is made up: on the CPU."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.interfaces import Grouping
from bros.core.plan import StepPlan, StepResult
from bros.executor.cuda.graphs import (
    MIXED_PADDING,
    GraphSizes,
    StepGraphs,
    capture_or_warn,
    capture_sizes,
    mixed_sizes,
)
from bros.executor.loader import warm_up
from bros.kernels.reference import ReferenceKernels
from bros.scheduler.cost_model import CostModel
from support.common_prefixes import with_shared
from support.device_runners import BLOCK, Assembled, assemble, family_plans, mixed_plans
from support.tier import examples

SHARING = Grouping(BLOCK, min_blocks=1)
TOLERANCE = {"atol": 1e-4, "rtol": 0}


@pytest.mark.parametrize(
    ("rows", "buckets"),
    [
        (1, (1,)),
        (3, (1, 2, 4)),
        (5, (1, 2, 4, 8)),
        (9, (1, 2, 4, 8, 16)),
        (24, (1, 2, 4, 8, 16, 24)),
        (26, (1, 2, 4, 8, 16, 24, 32)),
        (4096, (1, 2, 4, *range(8, 257, 8))),
    ],
)
def test_buckets(rows: int, buckets: tuple[int, ...]) -> None:
    assert capture_sizes(rows) == buckets


@given(
    rows=st.integers(1, 300),
    length=st.integers(2, 10**5),
    blocks=st.integers(1, 10**5),
    bucket=st.integers(1, 256),
)
def test_what_a_recording_holds_is_bounded_by_requests_and_by_the_cache(
    rows: int, length: int, blocks: int, bucket: int
) -> None:
    sizes = GraphSizes.of(rows, length, blocks, BLOCK, shares=True)
    limits = sizes.limits(bucket, sharing=False)
    assert limits.rows == bucket and limits.shared_rows == 0
    assert limits.segments >= min(bucket * -(-length // BLOCK), blocks)
    assert limits.segments <= 2 * blocks + 16 * rows
    assert sizes.limits(bucket, sharing=True).shared_rows >= bucket


def check_same(plain: Assembled, recorded: Assembled, plans: list[StepPlan]) -> None:
    """Logits, chosen tokens, and every number in the cache: padding must not leave anything."""
    for plan in plans:
        logits = recorded.runner.logits(plan)
        assert not logits.isnan().any()
        torch.testing.assert_close(logits, plain.runner.logits(plan), **TOLERANCE)
        assert recorded.runner.execute(plan) == plain.runner.execute(plan)
    for one, other in zip(plain.kv.layers, recorded.kv.layers, strict=True):
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right, **TOLERANCE)


@settings(max_examples=examples(5))
@given(
    count=st.integers(1, 14),
    groups=st.booleans(),
    rng=st.randoms(use_true_random=False),
)
def test_recorded_steps_equal_others(count: int, groups: bool, rng: random.Random) -> None:
    """Steps of any size after each other, so that buffers hold more than is meant."""
    plans = family_plans(rng, count, kv_blocks=64)
    if groups:
        plans = [with_shared(plan, SHARING) for plan in plans]
    check_same(assemble(), assemble(graph_rows=12, groups=groups), plans)


@pytest.mark.parametrize(
    ("rows", "tokens", "sizes"),
    [
        (8, 0, []),
        (8, 1, [(16, 15)]),
        (8, 20, [(16, 15), (32, 16)]),
        (16, 40, [(16, 15), (32, 16), (48, 16)]),
        (20, 60, [(16, 15), (32, 16), (32, 31), (48, 16), (48, 47), (64, 16), (64, 63)]),
        (20, 80, [*mixed_sizes(20, 60), (80, 16), (80, 64)]),
    ],
)
def test_sizes_of_mixed_steps(rows: int, tokens: int, sizes: list[tuple[int, int]]) -> None:
    assert mixed_sizes(rows, tokens) == sizes


@given(st.data())
def test_a_mixed_step_has_as_much_padding_as_the_cost_model_expects(data: st.DataObject) -> None:
    tokens = data.draw(st.integers(2, MIXED_PADDING[-1][0]))
    samples = data.draw(st.integers(0, min(256, tokens - 1)))
    found = next(n for n, each in mixed_sizes(256, 2048) if n >= tokens and each >= samples)
    model = CostModel(
        constant_s=0, token_s=0, sample_s=0, pair_s=0, context_s=0, padding=MIXED_PADDING
    )
    assert found == model.padded(tokens)


@settings(max_examples=examples(5))
@given(groups=st.booleans(), rng=st.randoms(use_true_random=False))
def test_recorded_mixed_steps_equal_others(groups: bool, rng: random.Random) -> None:
    plans = mixed_plans(rng, 20, kv_blocks=64)
    if groups:
        plans = [with_shared(plan, SHARING) for plan in plans]
    recorded = assemble(graph_rows=12, graph_tokens=100, groups=groups)
    check_same(assemble(), recorded, plans)
    decode_graphs = len(capture_sizes(12)) + 2 * groups
    assert len(recorded.replays.counts) == decode_graphs + len(mixed_sizes(16, 100))
    mixed = sum(recorded.replays.counts[:-decode_graphs])
    # Graphs of mixed steps have room for 16 samples, and for 16 chunks of several tokens.
    replayed = [
        plan
        for plan in plans
        if len(plan.chunks) < plan.num_tokens <= 96
        and sum(chunk.sample is not None for chunk in plan.chunks) <= 16
        and sum(len(chunk.token_ids) > 1 for chunk in plan.chunks) <= 16
    ]
    assert mixed >= 2 * len(replayed)


def test_a_mixed_step_that_may_be_suspended_is_not_replayed() -> None:
    plans = mixed_plans(random.Random(0), 12, kv_blocks=64)
    recorded = assemble(graph_rows=12, graph_tokens=100)
    for plan in plans:
        asked: list[int] = []
        assert isinstance(
            recorded.runner.execute(plan, lambda asked=asked: bool(asked.append(1))), StepResult
        )
        only_decodes = plan.num_tokens == len(plan.chunks)
        assert only_decodes or len(asked) == recorded.runner.num_layers


def test_steps_without_a_recording_run_without() -> None:
    """More rows than recorded, more segments than there is room for, prompts, and no sample."""
    plans = family_plans(random.Random(0), 14, kv_blocks=64)
    few_rows, few_segments = assemble(graph_rows=2), assemble(graph_rows=16, segments=10)
    check_same(assemble(), few_rows, plans)
    check_same(assemble(), few_segments, plans)
    rows = [len(plan.chunks) for plan in plans if plan.num_tokens == len(plan.chunks)]
    assert max(rows) > 2 and min(rows) <= 2
    fitting = sum(count <= 2 for count in rows)
    assert sum(few_rows.replays.counts) == 2 * fitting, "once for logits and once for tokens"
    assert 0 < sum(few_segments.replays.counts) < 2 * len(rows)
    [chunk] = plans[0].chunks
    chunk.sample = None
    result = few_rows.runner.execute(plans[0])
    assert result is not None and result.samples == ()


def test_shared_prefixes_have_recordings_of_their_own() -> None:
    plans = family_plans(random.Random(3), 14, kv_blocks=64)
    plans = [with_shared(plan, SHARING) for plan in plans]
    assert any(plan.shared for plan in plans)
    recorded = assemble(graph_rows=12, groups=True)
    check_same(assemble(), recorded, plans)
    plain = assemble(graph_rows=12)
    assert len(recorded.replays.counts) == len(plain.replays.counts) + 2, "of 8 and of 16 rows"


def test_a_recorded_step_is_aborted_before_it_begins() -> None:
    plans = family_plans(random.Random(0), 3, kv_blocks=64)
    recorded = assemble(graph_rows=4)
    for plan in plans[:3]:
        recorded.runner.execute(plan)
    before = [[kv.clone() for kv in layer] for layer in recorded.kv.layers]
    assert recorded.runner.execute(plans[3], lambda: True) is None
    for layer, copies in zip(recorded.kv.layers, before, strict=True):
        assert all(map(torch.equal, layer, copies))
    asked = []
    result = recorded.runner.execute(plans[3], lambda: bool(asked.append(1)))
    assert result is not None and len(asked) == 1


def test_a_recorded_step_waits_for_the_copies_of_all_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans = family_plans(random.Random(0), 3, kv_blocks=64)
    recorded = assemble(graph_rows=4)
    for plan in plans[:3]:
        recorded.runner.execute(plan)
    assert sum(recorded.replays.counts) == 0
    waited: list[int] = []
    monkeypatch.setattr(recorded.kv, "wait_for_layer", waited.append)
    recorded.runner.execute(plans[3])
    assert sum(recorded.replays.counts) == 1
    assert max(waited) == recorded.runner.num_layers - 1 > 0


def test_kernels_that_cannot_be_recorded_say_so() -> None:
    with pytest.raises(RuntimeError, match="reference kernels cannot be captured"):
        assemble(kernels=ReferenceKernels(), graph_rows=2)


def test_a_recording_that_fails_is_done_without(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> StepGraphs:
        raise RuntimeError("operation not permitted\nwhen stream is capturing")

    assert capture_or_warn(fail) is None
    [record] = caplog.records
    assert record.getMessage() == (
        "Steps run without CUDA graphs, more slowly: operation not permitted"
    )


def test_warming_up_launches_what_is_not_recorded() -> None:
    """Kernels that no graph holds must not be compiled when requests come."""
    recorded = assemble(graph_rows=8, graph_tokens=256)
    warm_up(recorded.runner, 512, BLOCK)
    assert sum(recorded.replays.counts) == 0


def test_graphs_of_mixed_steps_can_be_dropped() -> None:
    """If another rank could not capture them."""
    plans = mixed_plans(random.Random(0), 12, kv_blocks=64)
    recorded = assemble(graph_rows=12, graph_tokens=100)
    graphs = recorded.runner._graphs
    assert graphs is not None and graphs.has_mixed
    graphs.drop_mixed()
    assert not graphs.has_mixed
    check_same(assemble(), recorded, plans)
    assert sum(recorded.replays.counts[: len(mixed_sizes(16, 100))]) == 0
