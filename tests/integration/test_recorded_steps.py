"""A whole engine over a runner as on a GPU: steps recorded, launched ahead and grouped by prefix.

Memory is far too little for all requests at once, so KV makes way, is copied and comes back.
"""

from __future__ import annotations

import itertools
import logging
import random
from array import array
from collections.abc import Sequence

import pytest

from bros.core.clock import ManualClock
from bros.core.config import EngineConfig
from bros.core.interfaces import EngineInfo, Grouping
from bros.core.plan import SEGMENT_WIDTH, Chunk, StepPlan
from bros.core.request import EngineRequest, SamplingParams, ServiceClass, Slo, expanded
from bros.engine.engine import Engine
from bros.executor.loader import random_executor
from bros.executor.runner import ModelRunner
from bros.scheduler.build import build_scheduler
from support.checkpoints import GREEDY
from support.device_runners import BLOCK, VOCAB, assemble, tiny_spec
from support.scheduling import MODEL
from support.tier import by_tier

REQUESTS = 20
KV_BLOCKS, HOST_BLOCKS, LONGEST = 11, 20, 160
CLEAR = 1e-3
"""By how much the best logit has to lead for the token to be certain."""
BF16_CLEAR = 0.1
"""Likewise in bf16 on a GPU."""


def requests() -> list[EngineRequest]:
    """Greedy; for some the host chooses, who are told log-probabilities."""
    rng = random.Random(8)
    common = [rng.randrange(VOCAB) for _ in range(6 * BLOCK)]
    asked = []
    for number in range(REQUESTS):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 20))]
        logprobs = 0 if number % 5 == 4 else None
        asked.append(
            EngineRequest(
                request_id=str(number),
                prompt_token_ids=[*common[: rng.choice([0, 5, 6]) * BLOCK], *own],
                sampling=SamplingParams(
                    temperature=0, max_tokens=rng.randint(2, 30), ignore_eos=True, logprobs=logprobs
                ),
                service_class=rng.choice(list(ServiceClass)),
                slo=Slo(1.0, 0.3),
            )
        )
    return asked


def check_shared(plan: StepPlan) -> None:
    """What rows are said to read together are the same full blocks in all of them."""
    for piece in plan.shared:
        places = slice(piece.first * SEGMENT_WIDTH, piece.end * SEGMENT_WIDTH)
        chunks = [plan.chunks[row] for row in piece.rows]
        assert len(chunks) >= 2 and {len(chunk.token_ids) for chunk in chunks} == {1}
        (numbers,) = {tuple(chunk.segments[places]) for chunk in chunks}
        assert len(numbers) == (piece.end - piece.first) * SEGMENT_WIDTH
        assert set(numbers[1::SEGMENT_WIDTH]) == {0}
        assert set(numbers[2::SEGMENT_WIDTH]) == {BLOCK}


def serve(runner: ModelRunner, mode: str, grouping: Grouping | None = None) -> dict[str, list[int]]:
    config = EngineConfig(
        policy="fcfs", kv_blocks=KV_BLOCKS, host_kv_blocks=HOST_BLOCKS, max_batch_tokens=64
    )
    info = EngineInfo(
        model="tiny", weights="fp32", kernels="reference", kv_dtype="fp32", device="toy",
        max_model_len=LONGEST, vocab_size=VOCAB, block_size=BLOCK, num_kv_blocks=KV_BLOCKS,
        num_host_kv_blocks=HOST_BLOCKS, policy="fcfs", grouping=grouping,
    )  # fmt: skip
    scheduler = build_scheduler(config, info, MODEL, depth=1 if mode == "off" else 2)
    schedule, pieces = scheduler.schedule, 0

    def checked(now: float) -> StepPlan | None:
        nonlocal pieces
        plan = schedule(now)
        if plan is not None:
            check_shared(plan)
            pieces += len(plan.shared)
        return plan

    scheduler.schedule = checked  # type: ignore[method-assign]
    engine = Engine(scheduler, runner, ManualClock(), info, async_scheduling=mode)
    tokens: dict[str, list[int]] = {str(number): [] for number in range(REQUESTS)}
    waiting = requests()
    while engine.has_work or waiting:
        for asked in waiting[:2]:
            engine.submit(asked)
        del waiting[:2]
        for output in map(expanded, engine.step()):
            assert output.error is None
            tokens[output.request_id] += output.token_ids
        scheduler.check_integrity()
    assert sum(counts.kv_preempted for counts in engine.stats().by_class.values()) > 0
    assert sum(counts.kv_restored for counts in engine.stats().by_class.values()) > 0
    assert sum(counts.prefix_tokens for counts in engine.stats().by_class.values()) > 0
    assert (pieces > 0) == (grouping is not None)
    engine.close()
    return tokens


def check_same(
    plain: dict[str, list[int]], found: dict[str, list[int]], reference: ModelRunner, clear: float
) -> None:
    """Tokens, up to where the best logit of `reference` leads by less than `clear`."""
    for asked in requests():
        left, right = plain[asked.request_id], found[asked.request_id]
        assert len(left) == len(right)
        for index, pair in enumerate(zip(left, right, strict=True)):
            if pair[0] != pair[1]:
                assert lead(reference, [*asked.prompt_token_ids, *left[:index]]) < clear
                break


def lead(runner: ModelRunner, tokens: Sequence[int]) -> float:
    """Of the best token after these."""
    plan = StepPlan(0, (Chunk("a", 0, tokens, array("i"), array("i", range(len(tokens))), GREEDY),))
    best, second = runner.logits(plan)[0].topk(2).values.tolist()
    return best - second


@pytest.fixture(scope="module")
def plain() -> dict[str, list[int]]:
    return serve(assemble(kv_blocks=KV_BLOCKS, host_blocks=HOST_BLOCKS).runner, "off")


@pytest.mark.parametrize(
    ("graph_rows", "mode"),
    by_tier(
        fast=[(None, "off"), (4, "on"), (64, "on")],
        long=list(itertools.product([None, 4, 64], ["off", "on"])),
    ),
)
def test_the_same_tokens_as_one_plain_step_after_the_other(
    plain: dict[str, list[int]], mode: str, graph_rows: int | None
) -> None:
    made = assemble(
        kv_blocks=KV_BLOCKS, host_blocks=HOST_BLOCKS, graph_rows=graph_rows, groups=True
    )
    found = serve(made.runner, mode, Grouping(BLOCK, min_blocks=1))
    assert sum(made.replays.counts) > 0 or graph_rows is None
    check_same(plain, found, assemble().runner, CLEAR)


def executor(device: str, cuda_graphs: str = "off", weights: str = "fp32") -> ModelRunner:
    """The same model on every device."""
    config = EngineConfig(
        device=device,
        cuda_graphs=cuda_graphs,
        weights=weights,
        kv_blocks=KV_BLOCKS,
        host_kv_blocks=HOST_BLOCKS,
        max_num_seqs=32,
        max_batch_tokens=64,
        threads=1,
    )
    return random_executor(tiny_spec(), config, rng_device="cpu")[0]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_on_a_gpu_preempted_kv_changes_no_token(
    cuda_graphs: str, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Preempted and restored by streams and kernels of the device, with the tokens of the CPU."""
    pytest.importorskip("cupy")
    with caplog.at_level(logging.WARNING):
        runner = executor("cuda", cuda_graphs)
    assert not caplog.records, "recording failed"
    reference = serve(executor("cpu"), "off")
    # Both are in fp32 and add up in another order.
    check_same(reference, serve(runner, mode), executor("cpu"), 6 * CLEAR)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["off", "on"])
@pytest.mark.parametrize("cuda_graphs", ["off", "on"])
def test_on_a_gpu_in_bf16_graphs_and_running_ahead_change_no_token(
    cuda_graphs: str, mode: str
) -> None:
    """Up to where two tokens are about as good: products of other numbers of rows may round
    otherwise."""
    pytest.importorskip("cupy")
    plain = executor("cuda", weights="bf16")
    reference = serve(plain, "off")
    found = serve(executor("cuda", cuda_graphs, "bf16"), mode)
    check_same(reference, found, executor("cuda", weights="bf16"), BF16_CLEAR)
