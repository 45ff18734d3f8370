"""The packing loop: what must hold for any load, and the choices each policy must make."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import KV_FIND, KV_LAYOUTS, PACKING, POLICIES, PREFIX_CACHE
from bros.core.errors import InvalidRequestError, PromptTooLongError, QueueFullError
from bros.core.plan import SampledToken, StepPlan, StepResult
from bros.core.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    ServiceClass,
    Slo,
    expanded,
)
from bros.scheduler.admission import Limits
from bros.scheduler.scheduler import Scheduler
from support.scheduling import EOS, MODEL, make_scheduler, request
from support.toy_model import VOCAB, ToyModel

RT, BE = ServiceClass.RT, ServiceClass.BE


def expected_output(asked: EngineRequest) -> list[int]:
    assert asked.sampling.max_tokens is not None
    return ToyModel.continuation(asked.prompt_token_ids, asked.sampling.max_tokens)


def step(
    scheduler: Scheduler,
    model: ToyModel,
    now: float = 0.0,
    seconds: float = 0.0,
    should_abort: Callable[[], bool] = lambda: False,
) -> tuple[StepPlan | None, list[RequestOutput]]:
    """One step that begins at `now` and takes `seconds`.

    should_abort: asked if it may be aborted.
    """
    plan = scheduler.schedule(now)
    scheduler.check_integrity()
    if plan is None:
        return None, scheduler.take_ended()
    result = model.execute(plan, should_abort if scheduler.may_abort else None)
    outputs = scheduler.take_ended()
    if result is None:
        scheduler.abort_step(plan, now + seconds)
    else:
        outputs += map(expanded, scheduler.apply(result, now + seconds))
    scheduler.check_integrity()
    return plan, outputs


def ids(plan: StepPlan | None) -> list[str]:
    return [chunk.request_id for chunk in plan.chunks] if plan else []


@given(data=st.data())
def test_any_load_is_served_right_and_to_the_end(data: st.DataObject) -> None:
    """Random arrivals, classes, lengths, limits, memory and step times, and steps aborted half
    way, under every policy: right tokens, the same ones for all policies; no loss, no deadlock."""
    block_size = data.draw(st.sampled_from([1, 4]))
    blocks = data.draw(st.integers(4, 24))
    rows, tokens = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 20))
    scheduler = make_scheduler(
        data.draw(st.sampled_from(POLICIES)),
        blocks=blocks,
        block_size=block_size,
        max_num_seqs=rows,
        max_batch_tokens=tokens,
        late=data.draw(st.sampled_from(["renew", "edf"])),
        packing=data.draw(st.sampled_from(PACKING)),
        be_share=data.draw(st.sampled_from([0.0, 0.1])),
        host_blocks=data.draw(st.sampled_from([0, 2, 64])),
        kv_layout=data.draw(st.sampled_from(KV_LAYOUTS)),
        kv_find=data.draw(st.sampled_from(KV_FIND)),
        prefix_cache=data.draw(st.sampled_from(PREFIX_CACHE)),
    )
    model = ToyModel(block_size)
    capacity = blocks * block_size
    pending: dict[str, EngineRequest] = {}
    produced: dict[str, list[int]] = {}
    arrivals = data.draw(
        st.lists(
            st.tuples(st.integers(1, capacity - 1), st.integers(1, 6), st.sampled_from([RT, BE])),
            min_size=1,
            max_size=10,
        )
    )
    aborted = data.draw(st.sets(st.integers(0, len(arrivals) - 1), max_size=2))
    slowness = data.draw(st.sampled_from([0.0, 1.0, 10.0]))
    aborting = data.draw(st.sampled_from([0.0, 0.1, 0.5]))
    rng = random.Random(data.draw(st.integers(0, 99)))
    now = 0.0

    def run_step() -> StepPlan | None:
        nonlocal now
        plan, outputs = step(
            scheduler, model, now, slowness * 0.02, lambda: rng.random() < aborting
        )
        now += slowness * 0.02
        collect(outputs, produced)
        return plan

    for number, (length, out, service_class) in enumerate(arrivals):
        out = min(out, capacity - length)
        name = f"r{number}"
        slo = data.draw(st.sampled_from([Slo(), Slo(0.05, 0.03), Slo(deadline_s=1.0)]))
        pending[name] = request(name, length, service_class, max_tokens=out, arrival_s=now, slo=slo)
        produced[name] = []
        scheduler.submit(pending[name], now)
        for _ in range(data.draw(st.integers(0, 3))):
            run_step()
        if number in aborted and scheduler.abort(name, now) is not None:
            del pending[name]
        scheduler.check_integrity()
    steps = 0
    while scheduler.has_work:
        plan = run_step()
        assert plan is not None, "deadlock"
        assert plan.num_tokens <= tokens
        # `bros` may exceed its batch size by rows that are due, and by one that is owed.
        assert len(plan.chunks) <= max(rows, tokens)
        steps += 1
        assert steps < 20_000, "no progress"
    for name, asked in pending.items():
        assert produced[name] == expected_output(asked)
    assert scheduler.stats().kv_blocks_used == 0


def collect(outputs: list[RequestOutput], produced: dict[str, list[int]]) -> None:
    for output in outputs:
        produced[output.request_id] += output.token_ids


def test_priority_runs_rt_first_and_fcfs_does_not() -> None:
    for policy, first in (("priority", "rt"), ("fcfs", "be")):
        scheduler = make_scheduler(policy)
        scheduler.submit(request("be", 20, BE), now=0.0)
        scheduler.submit(request("rt", 20, RT), now=0.0)
        assert ids(scheduler.schedule(0.0))[0] == first


def test_a_long_prompt_is_split_and_decodes_run_beside_it() -> None:
    scheduler, model = make_scheduler(max_batch_tokens=8), ToyModel(4)
    scheduler.submit(request("short", 3), now=0.0)
    step(scheduler, model)
    scheduler.submit(request("long", 20), now=0.0)
    plan, outputs = step(scheduler, model)
    assert plan is not None
    assert [(c.request_id, c.start, len(c.token_ids)) for c in plan.chunks] == [
        ("short", 3, 1),
        ("long", 0, 7),
    ]
    assert plan.chunks[1].sample is None
    assert [output.request_id for output in outputs] == ["short"]


def test_rt_takes_memory_from_be_which_starts_over() -> None:
    scheduler, model = make_scheduler(blocks=8), ToyModel(4)
    be, rt = request("be", 24, BE), request("rt", 24, RT)
    produced: dict[str, list[int]] = {"be": [], "rt": []}
    scheduler.submit(be, now=0.0)
    collect(step(scheduler, model)[1], produced)
    scheduler.submit(rt, now=0.0)
    plan, outputs = step(scheduler, model)
    collect(outputs, produced)
    assert ids(plan) == ["rt"]
    assert scheduler.stats().by_class[BE].preemptions == 1
    while scheduler.has_work:
        collect(step(scheduler, model)[1], produced)
    assert produced == {"be": expected_output(be), "rt": expected_output(rt)}


def test_be_never_takes_memory_from_rt() -> None:
    scheduler, model = make_scheduler(blocks=8), ToyModel(4)
    scheduler.submit(request("rt", 24, RT, max_tokens=8), now=0.0)
    step(scheduler, model)
    scheduler.submit(request("be", 24, BE), now=0.0)
    while scheduler.has_work:
        step(scheduler, model)
    assert scheduler.stats().by_class[RT].preemptions == 0


def test_no_request_overtakes_one_that_waits_for_memory() -> None:
    scheduler, model = make_scheduler("fcfs", blocks=8), ToyModel(4)
    scheduler.submit(request("first", 16, max_tokens=8), now=0.0)
    step(scheduler, model)
    scheduler.submit(request("big", 28), now=0.0)
    scheduler.submit(request("small", 2), now=0.0)
    plan, _ = step(scheduler, model)
    assert ids(plan) == ["first"]


@pytest.mark.parametrize(
    ("params", "reason", "length"),
    [
        ({"max_tokens": 3}, FinishReason.LENGTH, 3),
        ({"max_tokens": None}, FinishReason.LENGTH, 256 - 2),
        ({"max_tokens": 9, "stop_token_ids": (5,)}, FinishReason.STOP, 2),
        ({"max_tokens": 9, "stop_token_ids": (5,), "min_tokens": 2}, FinishReason.STOP, 2),
        ({"max_tokens": 9}, FinishReason.STOP, 4),
        ({"max_tokens": 9, "ignore_eos": True}, FinishReason.LENGTH, 9),
    ],
)
def test_why_a_request_ends(params: dict[str, object], reason: FinishReason, length: int) -> None:
    scheduler = make_scheduler()
    tokens = [4, 5, 6, EOS] if params["max_tokens"] else []
    scheduler.submit(request("a", 2, **params), now=0.0)
    outputs: list[RequestOutput] = []
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        assert plan is not None
        token = tokens[len(outputs)] if len(outputs) < len(tokens) else 7
        result = StepResult(plan.step, (SampledToken("a", token),))
        outputs += map(expanded, scheduler.apply(result, now=0.0))
    assert len(outputs) == length
    assert [output.finish_reason for output in outputs[:-1]] == [None] * (length - 1)
    assert outputs[-1].finish_reason is reason


def test_a_token_that_could_not_be_chosen_ends_its_own_request_only() -> None:
    scheduler = make_scheduler()
    for name in "ab":
        scheduler.submit(request(name, 2), now=0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    samples = (SampledToken("a", -1, error="broken logits"), SampledToken("b", 7))
    failed, fine = map(expanded, scheduler.apply(StepResult(plan.step, samples), now=0.0))
    assert (failed.finish_reason, failed.error) == (FinishReason.ERROR, "broken logits")
    assert fine.token_ids == (7,) and fine.finish_reason is None
    scheduler.check_integrity()
    assert ids(scheduler.schedule(0.0)) == ["b"]


def test_stop_tokens_are_forbidden_before_min_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.submit(request("a", 2, min_tokens=1, stop_token_ids=(5,)), now=0.0)
    first = scheduler.schedule(0.0)
    assert first is not None and first.chunks[0].sample is not None
    assert set(first.chunks[0].sample.forbidden) == {5, EOS}
    scheduler.apply(StepResult(first.step, (SampledToken("a", 9),)), now=0.0)
    second = scheduler.schedule(0.0)
    assert second is not None and second.chunks[0].sample is not None
    assert second.chunks[0].sample.forbidden == ()


def test_history_goes_along_only_where_a_penalty_needs_it() -> None:
    scheduler = make_scheduler()
    scheduler.submit(request("plain", [3, 4]), now=0.0)
    scheduler.submit(request("penalty", [3, 4], repetition_penalty=1.5), now=0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    specs = {chunk.request_id: chunk.sample for chunk in plan.chunks}
    assert specs["plain"] is not None and specs["plain"].token_ids == ()
    assert specs["penalty"] is not None and list(specs["penalty"].token_ids) == [3, 4]
    assert specs["penalty"].prompt_len == 2


def test_seeds_given_and_drawn() -> None:
    def seeds() -> dict[str, int]:
        scheduler = make_scheduler()
        for name, seed in (("a", 42), ("b", None), ("c", None)):
            scheduler.submit(request(name, 2, seed=seed), now=0.0)
        plan = scheduler.schedule(0.0)
        assert plan is not None
        return {c.request_id: c.sample.seed for c in plan.chunks if c.sample}

    first = seeds()
    assert first["a"] == 42
    assert len(set(first.values())) == 3
    assert seeds() == first, "drawn seeds come from the engine's own generator"


def test_what_is_refused() -> None:
    scheduler = make_scheduler(max_model_len=10, max_queue=2)
    with pytest.raises(InvalidRequestError, match="empty"):
        scheduler.submit(request("a", 0), now=0.0)
    with pytest.raises(PromptTooLongError, match="10 tokens, but the prompt has 10 tokens"):
        scheduler.submit(request("a", 10), now=0.0)
    for field, params in (
        ("prompt", {"prompt": [VOCAB]}),
        ("prompt", {"prompt": [-1]}),
        ("stop_token_ids", {"prompt": 1, "stop_token_ids": (VOCAB,)}),
        ("logit_bias", {"prompt": 1, "logit_bias": {VOCAB: 1.0}}),
    ):
        with pytest.raises(InvalidRequestError, match="outside the vocabulary") as caught:
            scheduler.submit(request("a", **params), now=0.0)  # type: ignore[arg-type]
        assert caught.value.param == field
    tiny = Limits(
        max_model_len=9, vocab_size=3, max_num_seqs=1, max_queue=1,
        eos_token_ids=frozenset({0}),
    )  # fmt: skip
    tiny.check(request("a", [1], stop_token_ids=(1, 2)))
    with pytest.raises(InvalidRequestError, match="no token to choose"):
        tiny.check(request("a", [1], stop_token_ids=(1, 2), min_tokens=1))
    scheduler.submit(request("a", 9), now=0.0)
    with pytest.raises(InvalidRequestError, match="in use"):
        scheduler.submit(request("a", 1), now=0.0)
    assert not scheduler.stats().kv_blocks_used


def test_a_full_queue_refuses_its_own_class_only_and_says_when_to_retry() -> None:
    scheduler = make_scheduler(max_queue=2)
    for name in "ab":
        scheduler.submit(request(name, 1), now=0.0)
    with pytest.raises(QueueFullError) as caught:
        scheduler.submit(request("c", 1), now=0.0)
    assert caught.value.waiting == 2 and caught.value.retry_after_s == 1.0
    scheduler.submit(request("d", 1, BE), now=0.0)
    scheduler.abort("a", now=10.0)
    scheduler.submit(request("e", 1), now=10.0)
    with pytest.raises(QueueFullError) as caught:
        scheduler.submit(request("f", 1), now=15.0)
    assert caught.value.retry_after_s == 5.0


def test_a_tenant_that_fills_the_queue_leaves_others_their_share() -> None:
    scheduler, names = make_scheduler(max_queue=6), itertools.count()

    def accepted(tenant: str, wanted: int) -> int:
        """How many of so many requests of a tenant are accepted."""
        count = 0
        for _ in range(wanted):
            each = dataclasses.replace(request(f"{next(names)}", 1, BE), tenant=tenant)
            with contextlib.suppress(QueueFullError):
                scheduler.submit(each, now=0.0)
                count += 1
        return count

    assert accepted("ann", 10) == 6
    assert accepted("bob", 10) == 3
    assert accepted("cid", 10) == 2
    assert accepted("ann", 1) == accepted("bob", 1) == 0


def test_aborting_frees_memory_at_once_and_unknown_ids_are_ignored() -> None:
    scheduler, model = make_scheduler(), ToyModel(4)
    scheduler.submit(request("a", 20, max_tokens=50), now=0.0)
    step(scheduler, model)
    assert scheduler.stats().kv_blocks_used == 5
    output = scheduler.abort("a", now=0.0)
    assert output is not None and output.finish_reason is FinishReason.ABORT
    assert scheduler.stats().kv_blocks_used == 0 and not scheduler.has_work
    assert scheduler.abort("a", now=0.0) is None


def test_stats_count_by_class() -> None:
    scheduler, model = make_scheduler(max_num_seqs=1), ToyModel(4)
    scheduler.submit(request("a", 5), now=0.0)
    scheduler.submit(request("b", 6, BE), now=0.0)
    step(scheduler, model)
    stats = scheduler.stats()
    assert (stats.by_class[RT].running, stats.by_class[RT].waiting) == (1, 0)
    assert (stats.by_class[BE].running, stats.by_class[BE].waiting) == (0, 1)
    while scheduler.has_work:
        step(scheduler, model)
    stats = scheduler.stats()
    for service_class, prompt in ((RT, 5), (BE, 6)):
        counted = stats.by_class[service_class]
        assert (counted.prompt_tokens, counted.output_tokens) == (prompt, 4)
        assert (counted.finished, counted.running, counted.waiting) == (1, 0, 0)
    assert stats.kv_blocks_total == 64


@pytest.mark.parametrize(
    ("changes", "copies"),
    [
        ({"swap_token_s": 1e-5, "swap_out_token_s": 1e-5}, True),
        ({"swap_token_s": 1e-3, "swap_out_token_s": 1e-3}, False),
        ({"swap_token_s": 1e-5, "swap_out_token_s": 2e-3}, False),
        # What a token takes once products are compute-bound is in the hinges.
        ({"swap_out_token_s": 1e-4, "token_s": 1e-6, "hinges": ((64, 1e-3),)}, True),
    ],
)
def test_kv_is_copied_only_where_that_is_faster_than_computing_it(
    changes: dict[str, Any], copies: bool
) -> None:
    steps = dataclasses.replace(MODEL, **changes)
    scheduler, model = make_scheduler(blocks=8, host_blocks=8, model=steps), ToyModel(4)
    scheduler.submit(request("be", 24, BE), now=0.0)
    step(scheduler, model)
    scheduler.submit(request("rt", 24, RT), now=0.0)
    step(scheduler, model)
    taken = scheduler.stats().by_class[BE]
    assert taken.kv_preempted > 0
    assert taken.kv_copied == (taken.kv_preempted if copies else 0)


def test_a_tenant_keeps_its_latest_traces() -> None:
    """Up to the number that its last request names."""
    scheduler, model = make_scheduler(), ToyModel(4)
    for index, tenant in enumerate(["ann", "bob", "ann", "ann", "bob"]):
        most = 2 if tenant == "ann" else None
        asked = request(f"r{index}", 3, max_tokens=1)
        scheduler.submit(dataclasses.replace(asked, tenant=tenant, max_traces=most), 0.0)
        while scheduler.has_work:
            step(scheduler, model)
    kept = [index for index in range(5) if scheduler.trace(f"r{index}") is not None]
    assert kept == [1, 2, 3, 4]
    assert scheduler.stats().traces == {"ann": 2, "bob": 2}
