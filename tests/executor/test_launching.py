"""Steps that are launched before the one before has ended choose the same tokens."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.interfaces import LaunchingExecutor
from bros.core.plan import PENDING, StepPlan
from bros.core.request import SamplingParams
from support.device_runners import assemble
from support.growing_requests import (
    PARAMS,
    Request,
    make_requests,
    run_ahead,
    run_one_by_one,
    script,
)
from support.tier import examples


@settings(max_examples=examples(25))
@given(
    count=st.integers(1, 6),
    steps=st.integers(1, 8),
    graph_rows=st.sampled_from([None, 2, 8]),
    seed=st.integers(0, 2**32 - 1),
)
def test_running_ahead_chooses_the_same_tokens(
    count: int, steps: int, graph_rows: int | None, seed: int
) -> None:
    check_ahead(graph_rows, script(random.Random(seed), count, steps), count, seed)


def check_ahead(graph_rows: int | None, chosen: list[list[int]], count: int, seed: int) -> None:
    """chosen: which requests are in each step."""
    plain, ahead = assemble(), assemble(graph_rows=graph_rows)
    requests = [make_requests(random.Random(seed), count) for _ in range(2)]
    expected = run_one_by_one(plain.runner, requests[0], chosen)
    found = run_ahead(ahead.runner, requests[1], chosen)
    tokens = [[(s.request_id, s.token_id) for s in samples] for samples in expected]
    assert [[(s.request_id, s.token_id) for s in samples] for samples in found] == tokens
    for one, other in zip(plain.kv.layers, ahead.kv.layers, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=0)


EVERY = list(range(6))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "chosen",
    [
        pytest.param([EVERY, [1, 4], [1, 4], [4]], id="more samples than any graph has room for"),
        pytest.param([EVERY[:4], [0, 3], [3]], id="as many as there is room for"),
        pytest.param([EVERY, [2, 5], EVERY, [5], [5], EVERY], id="without a recording in between"),
        pytest.param([[0], [1], [0], [0, 1], [1]], id="rows that skip steps"),
    ],
)
def test_recorded_steps_take_the_tokens_of_the_step_before(
    chosen: list[list[int]], seed: int
) -> None:
    """Drawn ones and best ones, from steps of up to two rows, which are recorded, and others."""
    check_ahead(2, chosen, 6, seed)


def test_it_is_an_executor_that_launches() -> None:
    assert isinstance(assemble().runner, LaunchingExecutor)


@pytest.mark.parametrize("graph_rows", [None, 2])
@pytest.mark.parametrize("params", PARAMS)
def test_after_a_row_that_failed_any_token_will_do(
    params: SamplingParams, graph_rows: int | None
) -> None:
    """The next step may have been launched by the time the failure shows."""
    made = assemble(graph_rows=graph_rows)
    request = Request("a", [1, 2, 3], params, 0)
    made.runner.launch(StepPlan(0, (request.chunk(None),)))
    for layer in made.kv.layers:
        layer[0].fill_(float("nan"))
    failed = made.runner.launch(StepPlan(1, (request.chunk(PENDING),)))
    after = made.runner.launch(StepPlan(2, (request.chunk(PENDING),)))
    for launched in (failed, after):
        assert "the best logit is nan" in str(launched.result().samples[0].error)


def test_closing_with_steps_under_way() -> None:
    made = assemble()
    [request] = make_requests(random.Random(0), 1)
    made.runner.launch(StepPlan(0, (request.chunk(None),)))
    made.runner.launch(StepPlan(1, (request.chunk(PENDING),)))
    made.runner.close()
    made.runner.close()
    with pytest.raises(AssertionError, match="the executor is closed"):
        made.runner.launch(StepPlan(2, (request.chunk(3),)))
