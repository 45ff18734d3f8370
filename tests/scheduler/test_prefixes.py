"""Requests with a common prefix: one computes it, the others wait for it or find it cached."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import KV_FIND, KV_LAYOUTS, POLICIES
from bros.core.plan import SEGMENT_WIDTH, SampledToken, StepResult
from bros.core.request import ServiceClass, Slo
from support.prefix_run import BE, RT, SIZE, Run

# Later requests


@pytest.mark.parametrize(("prompt", "cached"), [(4, 0), (5, 4), (37, 36), (40, 36), (41, 40)])
def test_the_same_prompt_again_is_computed_from_its_last_block_on(prompt: int, cached: int) -> None:
    """The last token is always computed: the first one of the answer comes out of it."""
    run = Run()
    run.submit("first", prompt)
    run.drain()
    assert run.cached["first"] == 0
    run.submit("again", prompt)
    chunk = run.step()["again"]
    assert (chunk.start, len(chunk.token_ids)) == (cached, prompt - cached)
    run.drain()
    assert run.cached["again"] == cached
    assert run.answers["again"] == run.answers["first"] == run.answer("first")
    assert run.scheduler.stats().by_class[RT].prefix_tokens == cached


def test_the_second_turn_of_a_chat_finds_the_first_one_and_its_answer() -> None:
    run = Run()
    run.submit("first", 10, max_tokens=7)
    run.drain()
    # 16 tokens were computed: the last one of an answer never is.
    history = [*range(1, 11), *run.answers["first"]]
    run.submit("second", [*history, 500, 501, 502])
    assert run.step()["second"].start == 16
    run.drain()


def test_prompts_that_part_in_a_block_share_the_blocks_before_it() -> None:
    run = Run()
    run.submit("first", 40)
    run.drain()
    run.submit("second", [*range(1, 15), 900, *range(16, 41)])
    assert run.step()["second"].start == 12
    run.drain()


def test_different_salts_share_nothing() -> None:
    run = Run()
    for salt, cached in (("", 0), ("mine", 0), ("yours", 0), ("mine", 36), ("", 36)):
        name = f"{len(run.requests)}"
        run.submit(name, 40, cache_salt=salt)
        run.drain()
        assert run.cached[name] == cached


@pytest.mark.parametrize("rule", ["class-aware", "lru"])
def test_both_classes_find_what_the_other_has_computed(rule: str) -> None:
    run = Run(prefix_cache=rule)
    for number, service_class in enumerate((BE, RT, BE)):
        run.submit(f"{number}", 40, service_class)
        run.drain()
    assert run.cached == {"0": 0, "1": 36, "2": 36}


@pytest.mark.parametrize(("rule", "cached"), [("class-aware", 36), ("lru", 0)])
def test_a_best_effort_sweep_does_not_push_out_real_time_prompts(rule: str, cached: int) -> None:
    run = Run(prefix_cache=rule, blocks=40)
    run.submit("before", 40)
    run.drain()
    for number in range(10):
        run.submit(f"be{number}", range(100 * number, 100 * number + 90), BE)
        run.drain()
    run.submit("after", 40)
    run.drain()
    assert run.cached["after"] == cached
    assert run.scheduler.stats().by_class[BE].prefix_evicted > 100


@pytest.mark.parametrize(("share", "kept"), [(0.25, True), (0.0, False)])
def test_real_time_prompts_are_kept_even_if_best_effort_ones_have_to_wait(
    share: float, kept: bool
) -> None:
    """18 blocks for each of the two, of 40; 10 hold the real-time prompt."""
    run = Run(blocks=40, rt_cache_share=share)
    run.submit("before", 40)
    run.drain()
    for number in range(2):
        run.submit(f"be{number}", range(100 + 100 * number, 172 + 100 * number), BE)
    run.step()
    assert ("be1" not in run.step()) is kept
    run.drain()
    run.submit("after", 40)
    run.drain()
    assert (run.cached["after"] == 36) is kept


def test_without_the_cache_nothing_is_shared() -> None:
    run = Run(prefix_cache="off")
    for name in ("first", "again"):
        run.submit(name, 40)
        run.drain()
    assert run.cached == {"first": 0, "again": 0}
    assert run.scheduler.stats().kv_blocks_cached == 0


def test_what_a_request_that_failed_has_computed_is_not_found() -> None:
    run = Run()
    run.submit("fails", 40)
    plan = run.schedule()
    (output,) = run.finish(plan, StepResult(plan.step, (SampledToken("fails", 0, error="NaN"),)))
    assert output.error == "NaN"
    run.submit("again", 40)
    assert run.step()["again"].start == 0
    run.drain()


def test_blocks_of_a_request_that_failed_do_not_replace_those_of_others_in_its_step() -> None:
    """Both compute the same short prompt in one step, and keep one copy if both succeed."""
    run = Run()
    for name in ("fails", "goes on"):
        run.submit(name, 15)
    plan = run.schedule()
    result = run.model.execute(plan)
    assert result is not None
    broken = SampledToken(result.samples[0].request_id, -1, error="NaN")
    run.finish(plan, StepResult(plan.step, (broken, *result.samples[1:])))
    read = run.step()["goes on"].segments[::SEGMENT_WIDTH]
    assert {*read} == {slot // SIZE for slot in plan.chunks[1].slots}
    run.drain()


# At once


@pytest.mark.parametrize("service_class", ServiceClass)
@pytest.mark.parametrize("policy", POLICIES)
def test_of_two_that_come_at_once_the_second_waits_and_computes_the_rest(
    policy: str, service_class: ServiceClass
) -> None:
    run = Run(policy)
    run.submit("first", 40, service_class, slo=Slo(2.0))
    run.submit("second", [*range(1, 41), 900, 901], service_class, slo=Slo(2.0))
    assert run.step().keys() == {"first"}
    chunks = run.step()
    assert chunks.keys() == {"first", "second"}
    assert (chunks["second"].start, len(chunks["second"].token_ids)) == (40, 2)
    stats = run.scheduler.stats()
    assert stats.kv_blocks_shared == 10 and stats.by_class[service_class].prefix_tokens == 40
    assert run.prefix_wait_s("first") is None
    assert run.prefix_wait_s("second") == pytest.approx(0.06, abs=0.002)
    run.drain()
    assert (run.cached["first"], run.cached["second"]) == (0, 40)


def test_sixteen_with_one_long_prefix_compute_it_once_and_hold_it_once() -> None:
    run = Run(max_num_seqs=16)
    for number in range(16):
        run.submit(f"{number}", [*range(1, 65), 900 + number], BE)
    while len(run.cached) < 16:
        run.step()
    # 16 blocks of the prefix, and at most two for each.
    assert run.scheduler.stats().kv_blocks_used <= 16 + 2 * 16
    run.drain()
    assert sum(run.computed.values()) == 64 + 16


def test_what_is_soon_computed_is_not_waited_for() -> None:
    run = Run()
    run.submit("first", 15)
    run.submit("second", 15)
    assert run.step().keys() == {"first", "second"}
    run.drain()


def test_a_prompt_in_several_steps_is_waited_for_to_its_end() -> None:
    run = Run(max_batch_tokens=16)
    run.submit("first", 48, BE)
    run.submit("second", 48, BE)
    for _ in range(3):
        assert run.step().keys() == {"first"}
    assert run.step()["second"].start == 44
    run.drain()


def test_real_time_requests_do_not_wait_for_best_effort_ones() -> None:
    run = Run(max_batch_tokens=16)
    run.submit("be", 200, BE)
    run.step()
    run.submit("rt", 200, slo=Slo(60.0))
    assert run.step()["rt"].start == 16, "but they begin with what is there"
    run.drain()


@pytest.mark.parametrize(("ttft_s", "waits"), [(5.0, True), (0.5, False)])
def test_real_time_requests_do_not_wait_for_too_long(ttft_s: float, waits: bool) -> None:
    """300 tokens take 0.3 s, and others may come in between."""
    run = Run(max_batch_tokens=30)
    run.submit("first", 300, slo=Slo(5.0))
    run.step()
    run.submit("second", 300, slo=Slo(ttft_s))
    assert ("second" not in run.step()) is waits
    run.drain()


@given(
    ttft_s=st.floats(0.05, 2.0),
    count=st.integers(2, 6),
    prefix=st.integers(100, 400),
    tokens=st.sampled_from([64, 2048]),
)
def test_real_time_requests_that_come_together_compute_a_common_prefix_once(
    ttft_s: float, count: int, prefix: int, tokens: int
) -> None:
    """Whatever their objective: in one step with the first one, the others would be later."""
    run = Run(max_batch_tokens=tokens)
    for number in range(count):
        prompt = [*range(1, prefix + 1), 900 + number, 901]
        run.submit(f"{number}", prompt, slo=Slo(ttft_s, 1.0), max_tokens=1)
    run.drain()
    first, *others = sorted(run.computed.values(), reverse=True)
    assert first == prefix + 2
    assert max(others) <= 24, "but for a few blocks that are not worth waiting for"


@pytest.mark.parametrize("service_class", ServiceClass)
def test_a_waiting_request_continues_when_the_producer_is_aborted(
    service_class: ServiceClass,
) -> None:
    run = Run(max_batch_tokens=32)
    for name in ("first", "second"):
        run.submit(name, 200, service_class, slo=Slo(60.0))
    assert run.step().keys() == {"first"}
    assert run.scheduler.abort("first", run.now) is not None
    assert run.step()["second"].start == 32, "with what that has left"
    run.drain()
    assert run.answers["second"] == run.answer("second")


def test_a_waiting_request_continues_when_the_producer_is_preempted() -> None:
    """Both prompts take 10 blocks of 14; what the first one has is taken for a real-time one."""
    run = Run(max_batch_tokens=16, blocks=14, host_blocks=14)
    run.submit("first", 39, BE)
    run.submit("second", 39, BE)
    assert run.step().keys() == {"first"}
    run.submit("rt", range(800, 850), max_tokens=2)
    while not run.answers["rt"]:
        assert run.step().keys() == {"rt"}
    trace = run.scheduler.trace("first")
    assert trace is not None and trace.preemptions == 1
    run.drain()
    assert run.answers["first"] == run.answers["second"] == run.answer("first")


def test_an_older_request_does_not_wait_for_a_younger_one() -> None:
    """It may take the memory of that one, which would not be there for it any more."""
    run = Run()
    run.submit("older", 100, slo=Slo(60.0))
    run.submit("more urgent", 100, slo=Slo(0.3))
    assert run.step().keys() == {"more urgent"}
    chunks = run.step()
    assert chunks.keys() == {"older", "more urgent"} and chunks["older"].start == 64
    run.drain()


def test_who_waits_does_not_keep_out_others() -> None:
    run = Run()
    run.submit("first", 40, BE)
    run.submit("second", 40, BE)
    run.submit("other", [900, 901, 902], BE)
    assert run.step().keys() == {"first", "other"}
    run.drain()


# Steps and memory that are taken back


def test_nothing_is_left_of_an_aborted_step_that_began_in_the_cache() -> None:
    run = Run()
    run.submit("before", 40)
    run.drain()
    before = run.scheduler.stats()
    run.submit("be", 60, BE)
    plan = run.schedule()
    assert run.scheduler.may_abort and plan.chunks[0].start == 40
    assert run.model.execute(plan, lambda: True) is None
    run.scheduler.abort_step(plan, run.now + 0.01)
    run.scheduler.check_integrity()
    after = run.scheduler.stats()
    assert (after.kv_blocks_used, after.kv_blocks_shared) == (0, 0)
    assert after.kv_blocks_cached == before.kv_blocks_cached
    again = run.schedule().chunks
    assert [(c.start, c.token_ids) for c in again] == [(c.start, c.token_ids) for c in plan.chunks]


def test_requests_that_wait_for_an_aborted_newcomer_still_wait() -> None:
    run = Run()
    run.submit("first", 40, BE)
    run.submit("second", 40, BE)
    plan = run.schedule()
    assert run.model.execute(plan, lambda: True) is None
    run.scheduler.abort_step(plan, run.now + 0.01)
    assert run.step().keys() == {"first"}
    assert run.step()["second"].start == 36
    run.drain()
    assert sum(run.computed.values()) == 40 + 4


def test_who_loses_everything_begins_with_what_is_left_of_its_prefix() -> None:
    """20 blocks: 8 that "be" shares and 5 of its own; the other one needs 16 in the end."""
    run = Run(blocks=20, on_pressure="recompute")
    run.submit("before", 33, BE)
    run.drain()
    run.submit("be", [*range(1, 33), *range(500, 517)], BE, max_tokens=30)
    assert run.step()["be"].start == 32
    run.submit("rt", range(700, 720), max_tokens=44)
    while run.scheduler.stats().by_class[RT].finished == 0:
        run.step()
    trace = run.scheduler.trace("be")
    assert trace is not None and "starts over" in [what for _, what in trace.events]
    start = run.step()["be"].start
    assert 0 < start < 32, "what is evicted first is the end of it"
    run.drain()
    assert run.answers["be"] == run.answer("be")
    assert run.cached["be"] == 32, "as when it began"


def test_who_starts_over_finds_what_of_its_answer_is_left_too() -> None:
    """20 blocks: 13 hold what two requests have computed alike, and 9 are needed in the end."""
    run = Run(blocks=20, on_pressure="recompute")
    run.submit("before", 33, BE, max_tokens=20)
    run.drain()
    run.submit("be", 33, BE, max_tokens=30)
    while len(run.answers["be"]) < 21:
        run.step()
    assert run.answers["be"][:20] == run.answers["before"]
    assert run.scheduler.stats().kv_blocks_shared == 13
    run.submit("rt", range(700, 724), max_tokens=10)
    while run.scheduler.stats().by_class[RT].finished == 0:
        run.step()
    assert run.step()["be"].start == 44
    run.drain()
    assert run.answers["be"] == run.answer("be")
    assert run.cached["be"] == 32


# Any load


@given(data=st.data())
def test_cached_tokens_are_those_that_were_not_computed(data: st.DataObject) -> None:
    """Prompts from one family, with salts, under every policy, in much memory or in little."""
    run = Run(
        data.draw(st.sampled_from(POLICIES)),
        blocks=data.draw(st.sampled_from([20, 60, 400])),
        host_blocks=data.draw(st.sampled_from([0, 64])),
        max_batch_tokens=data.draw(st.sampled_from([8, 32])),
        prefix_cache=data.draw(st.sampled_from(["class-aware", "lru"])),
        kv_layout=data.draw(st.sampled_from(KV_LAYOUTS)),
        kv_find=data.draw(st.sampled_from(KV_FIND)),
    )
    for number in range(data.draw(st.integers(1, 8))):
        common = data.draw(st.integers(0, 50))
        tail = [900 + number] * data.draw(st.integers(1, 6))
        run.submit(
            f"{number}",
            [*range(1, common + 1), *tail],
            data.draw(st.sampled_from(ServiceClass)),
            cache_salt=data.draw(st.sampled_from(["", "", "a"])),
            slo=data.draw(st.sampled_from([Slo(), Slo(0.1), Slo(60.0)])),
        )
        for _ in range(data.draw(st.integers(0, 3))):
            if run.scheduler.has_work:
                run.step()
    run.drain()
    for name, asked in run.requests.items():
        trace = run.scheduler.trace(name)
        assert trace is not None
        assert run.answers[name] == run.answer(name)
        assert run.cached[name] % SIZE == 0
        if trace.preemptions == 0:
            assert run.cached[name] + run.computed[name] == len(asked.prompt_token_ids)


def test_memory_that_only_best_effort_requests_share_is_real_time_requests_to_take() -> None:
    run = Run(blocks=20)
    run.submit("before", 33, BE)
    run.drain()
    run.submit("be", [*range(1, 33), *range(500, 520)], BE, max_tokens=25)
    run.step()
    run.submit("rt", range(700, 762), max_tokens=2)
    run.step()
    assert run.answers["rt"], "its first token came with its first step"
    run.drain()


def test_what_was_cached_counts_when_it_was_used() -> None:
    """Not when the step that would have used it was aborted, and it was evicted after that."""
    run = Run(blocks=24, rt_cache_share=0.0)
    run.submit("before", 40, BE)
    run.drain()
    run.submit("be", 60, BE)
    run.scheduler.abort_step(run.schedule(), run.now)
    assert run.scheduler.stats().by_class[BE].prefix_tokens == 0
    run.submit("rt", range(100, 190), max_tokens=2)
    run.drain()
    assert run.cached["be"] + run.computed["be"] == 60


def test_real_time_requests_that_are_late_anyway_wait_for_what_others_compute() -> None:
    """Their own deadline lets them not wait, but computing all of it takes longer yet."""
    run = Run()
    prompt = range(1, 200)
    for number in range(3):
        run.submit(f"r{number}", [*prompt, 300 + number], slo=Slo(0.05, 1.0), max_tokens=1)
    run.drain()
    first, *others = sorted(run.cached.values())
    assert first == 0 and min(others) >= 184, "but for a few blocks that are not worth waiting for"


def test_best_effort_work_is_not_kept_out_for_ever_by_what_is_kept_for_real_time_prompts() -> None:
    """It needs more than their share leaves, and real-time requests never stop coming."""
    run = Run(blocks=40, rt_cache_share=0.5)
    for number in range(4):
        run.submit(f"old{number}", range(100 * number, 100 * number + 30), max_tokens=2)
    run.drain()
    run.submit("big", range(500, 590), BE, max_tokens=2)
    run.submit("small", range(600, 608), BE, max_tokens=2)
    for number in range(60):
        run.submit(f"chat{number}", range(700 + 2 * number, 703 + 2 * number), max_tokens=3)
        run.step()
        run.step()
    assert run.answers["big"] and run.answers["small"]
    run.drain()


def test_blocks_that_real_time_requests_left_do_not_count_against_requests_that_share_them() -> (
    None
):
    """Half of the memory is kept for such prompts, and it begins with one."""
    run = Run(blocks=40, rt_cache_share=0.5)
    run.submit("before", 81, RT, max_tokens=1)
    run.drain()
    run.submit("be", range(900, 904), BE, max_tokens=40)
    run.step()
    run.submit("shares", [*range(1, 81), *range(950, 980)], BE, max_tokens=1)
    run.step()
    run.step()
    assert run.answers["shares"]
    run.drain()


def test_best_effort_is_not_stopped_by_a_prefix_that_many_real_time_requests_share() -> None:
    run = Run(blocks=400, max_batch_tokens=2000, rt_slowdown=1000)
    run.submit("before", 401, max_tokens=1)
    run.drain()
    for number in range(6):
        prompt = [*range(1, 401), 500 + number]
        run.submit(f"rt{number}", prompt, max_tokens=60, slo=Slo(9.0, 0.2))
    run.submit("be", range(600, 900), BE, max_tokens=1)
    for _ in range(20):
        run.step()
    assert run.answers["be"]
    run.drain()


def test_two_best_effort_prompts_in_one_step_do_not_evict_protected_blocks() -> None:
    """Of 40 blocks, 10 hold the real-time prompt and are protected; each other prompt needs 18."""
    run = Run(blocks=40, rt_cache_share=0.5, max_batch_tokens=400)
    run.submit("before", 40)
    run.drain()
    for number in range(2):
        run.submit(f"be{number}", range(100 + 100 * number, 172 + 100 * number), BE)
    assert list(run.step()) == ["be0"]
    run.drain()
    run.submit("after", 40)
    run.drain()
    assert run.cached["after"] == 36
