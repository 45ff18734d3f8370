"""Fills: prompts that are computed for the prefix cache, and for no token."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import KV_LAYOUTS, POLICIES
from bros.core.errors import InvalidRequestError, PromptTooLongError
from bros.core.request import FinishReason, Hints, ServiceClass, Slo
from support.prefix_run import BE, RT, SIZE, Run


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("service_class", ServiceClass)
def test_what_was_filled_is_cached(policy: str, service_class: ServiceClass) -> None:
    """As whole blocks: the rest would not stay, so it is not computed."""
    run = Run(policy)
    run.submit("fill", 103, service_class, prefill_only=True, max_tokens=9)
    run.drain()
    assert (run.ends["fill"], run.answers["fill"]) == (FinishReason.LENGTH, [])
    assert run.computed["fill"] == 100
    run.submit("chat", [*range(1, 104), 500])
    run.drain()
    assert run.cached["chat"] == 100
    assert run.answers["chat"] == run.answer("chat")


def test_no_chunk_of_a_prefill_only_request_samples() -> None:
    run = Run(max_batch_tokens=16)
    run.submit("fill", 40, prefill_only=True)
    chunks = []
    while run.scheduler.has_work:
        chunks.append(run.step()["fill"])
    assert [len(chunk.token_ids) for chunk in chunks] == [16, 16, 8]
    assert all(chunk.sample is None for chunk in chunks)


def test_only_what_is_not_cached_yet_is_computed() -> None:
    run = Run()
    run.submit("before", 41)
    run.drain()
    run.submit("fill", 80, prefill_only=True)
    run.drain()
    assert (run.cached["fill"], run.computed["fill"]) == (40, 40)


@pytest.mark.parametrize(("prompt", "cached"), [(3, 0), (40, 40), (42, 40), (43, 40)])
def test_a_prefill_only_request_with_nothing_to_compute_ends_without_a_step(
    prompt: int, cached: int
) -> None:
    run = Run()
    run.submit("before", 41)
    run.drain()
    run.submit("fill", prompt, prefill_only=True)
    assert run.scheduler.has_work
    assert run.step() == {}
    assert (run.ends["fill"], run.cached["fill"]) == (FinishReason.LENGTH, cached)
    trace = run.scheduler.trace("fill")
    assert trace is not None and trace.finish_reason is FinishReason.LENGTH
    assert not run.scheduler.has_work


def test_without_a_prefix_cache_nothing_is_computed() -> None:
    run = Run(prefix_cache="off")
    run.submit("fill", 40, prefill_only=True)
    assert run.step() == {}
    assert (run.ends["fill"], run.cached["fill"]) == (FinishReason.LENGTH, 0)
    assert not run.scheduler.has_work


@pytest.mark.parametrize("cached", [0, 40])
def test_aborting_a_prefill_only_request_that_ended_at_once_changes_nothing(cached: int) -> None:
    """The last output, the trace and the counters say the same; and the prompt stays pinned."""
    run = Run()
    run.submit("before", cached + 1)
    run.drain()
    counted = run.scheduler.stats().by_class[RT].prompt_tokens
    run.submit("fill", cached + 3, prefill_only=True, hints=Hints(keep_s=9.0))
    with pytest.raises(InvalidRequestError, match="in use"):
        run.submit("fill", 3, prefill_only=True)
    run.abort("fill")
    assert (run.ends["fill"], run.cached["fill"]) == (FinishReason.LENGTH, cached)
    trace = run.scheduler.trace("fill")
    assert trace is not None and trace.finish_reason is FinishReason.LENGTH
    stats = run.scheduler.stats()
    assert stats.by_class[RT].prompt_tokens == counted + cached
    assert stats.kv_blocks_pinned == cached // SIZE
    assert not run.scheduler.has_work and run.scheduler.take_ended() == []
    assert run.scheduler.abort("fill", run.now) is None


def test_a_prefill_only_request_is_refused_as_any_prompt_is() -> None:
    run = Run()
    with pytest.raises(PromptTooLongError):
        run.submit("long", 1600, prefill_only=True)
    with pytest.raises(InvalidRequestError, match="vocabulary"):
        run.submit("wrong", [1, 2, 3, 5000], prefill_only=True)


def test_fills_are_no_finished_requests_and_have_no_first_token() -> None:
    """Objectives are shares of those; their prompts count, and what was cached of them."""
    run = Run()
    run.submit("fill", 40, prefill_only=True, slo=Slo(1e-6))
    run.drain()
    run.submit("again", 40, prefill_only=True)
    run.submit("more", 60, BE, prefill_only=True)
    run.drain()
    stats = run.scheduler.stats().by_class
    for each in stats.values():
        assert (each.finished, each.output_tokens, each.ttft_met, each.slack.total) == (0, 0, 0, 0)
    assert (stats[RT].prompt_tokens, stats[RT].prefix_tokens) == (80, 40)
    assert (stats[BE].prompt_tokens, stats[BE].prefix_tokens) == (60, 40)
    trace = run.scheduler.trace("fill")
    assert trace is not None and (trace.ttft_s, trace.late_tokens) == (None, 0)


def test_predictions_know_that_no_token_is_chosen() -> None:
    run = Run()
    run.submit("fill", 60, prefill_only=True)
    run.submit("more", range(500, 560), BE, prefill_only=True)
    run.drain()
    stats = run.scheduler.stats()
    assert stats.steps >= 2 and stats.step_error_s == pytest.approx(0.0, abs=1e-9)


def test_no_step_is_aborted_for_a_prefill_only_request() -> None:
    asked = []
    for prefill_only in (False, True):
        run = Run(max_batch_tokens=512)
        run.submit("be", 400, BE)
        plan = run.schedule()
        assert run.scheduler.may_abort
        run.submit("rt", range(600, 620), slo=Slo(0.06), prefill_only=prefill_only)
        asked.append(run.scheduler.yields([run.requests["rt"]], run.now + 0.02))
        run.finish(plan)
        run.drain()
    assert asked == [True, False]


def test_a_prefill_only_request_in_an_aborted_step_is_computed_later() -> None:
    run = Run()
    run.submit("fill", 40, BE, prefill_only=True)
    plan = run.schedule()
    assert run.scheduler.may_abort
    assert run.model.execute(plan, lambda: True) is None
    run.scheduler.abort_step(plan, run.now + 0.01)
    run.scheduler.check_integrity()
    assert "fill" not in run.ends
    run.drain()
    assert run.ends["fill"] is FinishReason.LENGTH
    run.submit("chat", 41)
    run.drain()
    assert run.cached["chat"] == 40


def test_what_an_aborted_prefill_only_request_has_computed_stays() -> None:
    run = Run(max_batch_tokens=16)
    run.submit("fill", 40, prefill_only=True)
    run.step()
    assert run.scheduler.abort("fill", run.now) is not None
    run.scheduler.check_integrity()
    run.submit("chat", 41)
    run.drain()
    assert run.cached["chat"] == 16


@given(data=st.data())
def test_any_mix_of_prefill_only_requests_and_others_ends_well(data: st.DataObject) -> None:
    """Under every policy, in much memory or in little, where fills lose theirs and get it back."""
    blocks = data.draw(st.sampled_from([20, 60, 400]))
    run = Run(
        data.draw(st.sampled_from(POLICIES)),
        blocks=blocks,
        host_blocks=data.draw(st.sampled_from([0, 64])),
        max_batch_tokens=data.draw(st.sampled_from([8, 32])),
        prefix_cache=data.draw(st.sampled_from(["class-aware", "lru", "off"])),
        kv_layout=data.draw(st.sampled_from(KV_LAYOUTS)),
    )
    for number in range(data.draw(st.integers(1, 8))):
        common = data.draw(st.integers(0, 50))
        tail = [900 + number] * data.draw(st.integers(1, 6))
        run.submit(
            f"{number}",
            [*range(1, common + 1), *tail],
            data.draw(st.sampled_from(ServiceClass)),
            prefill_only=data.draw(st.booleans()),
            slo=data.draw(st.sampled_from([Slo(), Slo(0.1), Slo(60.0)])),
        )
        for _ in range(data.draw(st.integers(0, 3))):
            if run.scheduler.has_work:
                run.step()
        if data.draw(st.integers(0, 9)) == 0:
            run.abort(f"{number}")
    run.drain()
    stats = run.scheduler.stats()
    assert (stats.kv_blocks_used, stats.host_kv_blocks_used) == (0, 0)
    for name, asked in run.requests.items():
        trace = run.scheduler.trace(name)
        assert trace is not None and trace.finish_reason is run.ends[name]
        if run.ends[name] is FinishReason.ABORT:
            continue
        assert run.ends[name] is FinishReason.LENGTH
        assert run.answers[name] == run.answer(name)
        whole = len(asked.prompt_token_ids) // SIZE * SIZE
        if asked.prefill_only and trace.preemptions == 0 and trace.prompt_tokens:
            # The last block is computed for nothing if another fill was faster with it.
            assert run.cached[name] + run.computed[name] == whole
