"""What requests leave in the cache for later ones, and which of them find it in which scope."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.core.config import KV_LAYOUTS, POLICIES
from bros.core.request import FinishReason, Hints, ServiceClass, Slo
from support.prefix_run import BE, RT, SIZE, Run

KEPT = Hints(keep_s=1000.0)


def pinned(run: Run) -> int:
    return run.scheduler.stats().kv_blocks_pinned


def crowd(run: Run, blocks: int) -> None:
    """Others use so many blocks, twice over, so that nothing idle of theirs is rare."""
    for number in range(2 * blocks // 4):
        run.submit(f"crowd {run.now}", range(500 + number, 517 + number), max_tokens=1)
        run.drain()


@pytest.mark.parametrize("rule", ["class-aware", "lru"])
@pytest.mark.parametrize("prefill_only", [False, True])
def test_what_is_kept_outlives_what_others_leave(rule: str, prefill_only: bool) -> None:
    """Prompt and answer: 42 tokens, of which the last one has not been computed."""
    cached = {}
    for hints in (Hints(), KEPT):
        run = Run(blocks=24, prefix_cache=rule)
        run.submit("first", 40, BE, max_tokens=2, prefill_only=prefill_only, hints=hints)
        run.drain()
        assert pinned(run) == (10 if hints.keep_s else 0)
        crowd(run, 24)
        run.submit("again", [*range(1, 41), *run.answers["first"], 7, 8, 9], BE)
        run.drain()
        cached[hints.keep_s] = run.cached["again"]
    assert cached == {0.0: 0, 1000.0: 40}


@pytest.mark.parametrize("tokens", [1, 4, 5, 6])
def test_answers_are_kept_with_their_prompts_but_for_the_last_token(tokens: int) -> None:
    run = Run()
    run.submit("first", 40, max_tokens=tokens, hints=KEPT)
    run.drain()
    assert pinned(run) == (40 + tokens - 1) // SIZE
    run.submit("again", [*range(1, 41), *run.answers["first"], 7], max_tokens=1)
    run.drain()
    assert run.cached["again"] == pinned(run) * SIZE


def test_released_and_expired_prefixes_are_kept_no_longer() -> None:
    run = Run()
    for name, keep_s in (("a", 1000.0), ("b", 1.0), ("c", 5.0)):
        run.submit(name, [ord(name)] * 9, max_tokens=1, hints=Hints(keep_s=keep_s))
        run.drain()
    assert pinned(run) == 6
    run.scheduler.release("a")
    run.scheduler.release("never heard of")
    assert pinned(run) == 4
    run.now += 2.0
    assert run.scheduler.schedule(run.now) is None
    assert pinned(run) == 2
    run.now += 5.0
    assert run.scheduler.schedule(run.now) is None
    assert pinned(run) == 0
    run.scheduler.check_integrity()


def test_what_two_have_kept_is_kept_until_both_are_released() -> None:
    run = Run()
    run.submit("parent", 20, prefill_only=True, hints=KEPT)
    run.drain()
    run.submit("child", 30, prefill_only=True, hints=KEPT)
    run.drain()
    assert pinned(run) == 7
    run.scheduler.release("parent")
    assert pinned(run) == 7
    run.scheduler.release("child")
    assert pinned(run) == 0


def test_a_prefill_only_request_with_nothing_to_compute_keeps_its_prefix() -> None:
    run = Run()
    run.submit("first", 20, prefill_only=True)
    run.drain()
    assert pinned(run) == 0
    run.submit("second", 20, prefill_only=True, hints=KEPT)
    run.drain()
    assert (run.computed["second"], pinned(run)) == (0, 5)


def test_what_is_aborted_or_fails_is_not_kept() -> None:
    run = Run()
    run.submit("aborted", 20, hints=KEPT)
    run.step()
    assert run.scheduler.abort("aborted", run.now) is not None
    assert pinned(run) == 0
    run.submit("stops", 20, hints=KEPT, stop_token_ids=(run.answer("aborted")[1],))
    run.drain()
    assert run.ends["stops"] is FinishReason.STOP
    assert pinned(run) == 5, "of the one that stopped"


def test_at_most_half_of_the_cache_is_kept_and_the_latest_of_it() -> None:
    run = Run(blocks=24)
    for name in ("a", "b", "c"):
        run.submit(name, [ord(name)] * 21, max_tokens=1, hints=KEPT)
        run.drain()
    assert pinned(run) == 10
    run.scheduler.release("a")
    assert pinned(run) == 10, "it is not kept any more"
    run.submit("long", range(200, 280), max_tokens=1, hints=KEPT)
    run.drain()
    assert pinned(run) == 12


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    run = Run(prefix_cache="off")
    run.submit("a", 21, hints=KEPT)
    run.drain()
    run.scheduler.release("a")
    assert pinned(run) == 0


@pytest.mark.parametrize(
    ("private_from", "salt", "cached"),
    [(None, "", 16), (18, "x", 16), (18, "y", 16), (33, "x", 32), (33, "y", 32), (37, "", 36)],
)
def test_scopes_say_what_is_found(private_from: int | None, salt: str, cached: int) -> None:
    """The first one is private from its fifth block on, or all others from where they say."""
    run = Run()
    hints = Hints(private_from=private_from, private_salt=salt)
    first = Hints(private_from=18, private_salt="x") if cached == 16 else Hints()
    run.submit("first", 40, hints=first)
    run.drain()
    run.submit("second", 41, hints=hints)
    run.drain()
    expected = 40 if hints == first else cached
    assert run.cached["second"] == expected
    run.submit("third", 41, hints=hints)
    run.drain()
    assert run.cached["third"] == 40


def test_answers_are_private_if_anything_is() -> None:
    run = Run()
    run.submit("first", 40, max_tokens=9, hints=Hints(private_from=40, private_salt="x"))
    run.drain()
    longer = [*range(1, 41), *run.answers["first"], 1]
    for name, salt in (("same", "x"), ("other", "y")):
        run.submit(name, longer, max_tokens=1, hints=Hints(private_from=40, private_salt=salt))
        run.drain()
    assert (run.cached["same"], run.cached["other"]) == (48, 40)


def test_scopes_count_when_a_step_is_aborted_for_a_first_token() -> None:
    """A request whose prompt is cached can have its first token in time if the step is aborted."""
    asked = {}
    for salt in ("same", "other"):
        run = Run(max_batch_tokens=512)
        run.submit("before", 40, hints=Hints(private_from=0, private_salt="same"))
        run.drain()
        run.submit("be", range(500, 900), BE)
        plan = run.schedule()
        hints = Hints(private_from=0, private_salt=salt)
        run.submit("rt", 41, slo=Slo(0.06), hints=hints)
        asked[salt] = run.scheduler.yields([run.requests["rt"]], run.now + 0.02)
        run.finish(plan)
        run.drain()
    assert asked == {"same": True, "other": False}


@given(data=st.data())
def test_any_load_with_scopes_and_keeping_gets_its_answers(data: st.DataObject) -> None:
    """Nothing of it is left that keeps others out; cached tokens are of requests that may share."""
    run = Run(
        data.draw(st.sampled_from(POLICIES)),
        blocks=data.draw(st.sampled_from([20, 60])),
        host_blocks=data.draw(st.sampled_from([0, 64])),
        max_batch_tokens=data.draw(st.sampled_from([8, 32])),
        prefix_cache=data.draw(st.sampled_from(["class-aware", "lru"])),
        kv_layout=data.draw(st.sampled_from(KV_LAYOUTS)),
    )
    names = [f"{number}" for number in range(data.draw(st.integers(1, 8)))]
    for name in names:
        hints = Hints(
            keep_s=data.draw(st.sampled_from([0.0, 0.5, 1e6])),
            private_from=data.draw(st.none() | st.integers(0, 40)),
            private_salt=data.draw(st.sampled_from(["", "x"])),
        )
        run.submit(
            name,
            data.draw(st.integers(1, 50)),
            data.draw(st.sampled_from(ServiceClass)),
            prefill_only=data.draw(st.booleans()),
            hints=hints,
            slo=data.draw(st.sampled_from([Slo(), Slo(0.1)])),
        )
        for _ in range(data.draw(st.integers(0, 6))):
            if run.scheduler.has_work:
                run.step()
        if data.draw(st.booleans()):
            run.scheduler.release(data.draw(st.sampled_from(names)))
        assert pinned(run) <= run.scheduler.stats().kv_blocks_total // 2
    run.drain()
    for name in names:
        assert run.answers[name] == run.answer(name)
        run.scheduler.release(name)
    stats = run.scheduler.stats()
    assert (stats.kv_blocks_used, stats.kv_blocks_pinned) == (0, 0)
    run.submit("all", range(300, 300 + stats.kv_blocks_total * SIZE - 1), RT, max_tokens=1)
    run.drain()
    assert run.answers["all"] == run.answer("all")
