"""What several tenants get of one scheduler, and what it says of that."""

from __future__ import annotations

import pytest

from bros.core.request import Slo
from support.virtual_time import BE, RT, VirtualRun


def chat(run: VirtualRun, name: str, tenant: str, prompt: int = 40, tokens: int = 4) -> None:
    run.submit(name, prompt, tenant=tenant, salt=len(run.requests) * 7, max_tokens=tokens)


def job(run: VirtualRun, name: str, tenant: str, slo: Slo | None = None) -> None:
    salt = len(run.requests) * 7
    run.submit(name, 30, BE, tenant=tenant, salt=salt, slo=slo, max_tokens=8)


def test_a_tenant_with_one_job_need_not_wait_for_all_of_another() -> None:
    run = VirtualRun(max_num_seqs=1)
    for number in range(10):
        job(run, f"many{number}", "many")
    run.steps(3)
    job(run, "one", "few")
    run.drain()
    assert list(run.first_run)[:3] == ["many0", "one", "many1"]
    trace = run.scheduler.trace("many1")
    assert trace is not None and trace.waits["share"] > 0.0
    before = run.scheduler.trace("one")
    assert before is not None and "share" not in before.waits


def test_jobs_of_a_tenant_with_a_deadline_still_come_first() -> None:
    run = VirtualRun(max_num_seqs=1)
    for number in range(4):
        job(run, f"many{number}", "many")
    run.steps(3)
    job(run, "one", "few")
    job(run, "urgent", "many", Slo(deadline_s=3.0))
    run.now += 2.0  # it is pressing now
    run.drain()
    assert list(run.first_run).index("urgent") < list(run.first_run).index("one")


@pytest.mark.parametrize(("weights", "expected"), [(None, 0.5), ("a=3", 0.75), ("b=3", 0.25)])
def test_best_effort_device_time_is_in_proportion_to_weights(
    weights: str | None, expected: float
) -> None:
    run = VirtualRun(max_num_seqs=4, max_queue=500, tenant_weights=weights)
    for number in range(150):
        for tenant in "ab":
            job(run, f"{tenant}{number}", tenant)
    run.steps(300)
    used_s = run.scheduler.stats().by_class[BE].device_s
    assert run.waiting(BE) > 10
    assert used_s["a"] / sum(used_s.values()) == pytest.approx(expected, abs=0.05)


def test_under_overload_only_the_tenant_that_sends_too_much_is_late() -> None:
    """The other one's first tokens are all on time, as if it was alone."""
    run = VirtualRun(max_num_seqs=16, max_queue=2000)
    number = 0
    while run.now < 8.0:
        for _ in range(6):
            chat(run, f"many{number}", "many", prompt=120)
            number += 1
        if number % 30 == 0:
            chat(run, f"few{number}", "few", prompt=40)
        run.step()
    waits = {
        name: (times[0] if times else run.now) - run.requests[name].arrival_s
        for name, times in run.token_times.items()
    }
    few = [wait for name, wait in waits.items() if name.startswith("few")][:-1]
    many = [wait for name, wait in waits.items() if name.startswith("many")]
    assert len(few) > 5 and max(few) <= 0.4
    assert sum(wait > 0.4 for wait in many) > len(many) / 2


def test_a_request_that_fits_only_alone_runs_although_its_tenant_is_over_its_share() -> None:
    run = VirtualRun(max_num_seqs=4, blocks=40)
    chat(run, "little", "few")
    chat(run, "first", "many", prompt=100)
    run.drain()
    run.submit("all", 150, RT, tenant="many", salt=3, max_tokens=4)
    chat(run, "after", "few")
    run.drain()
    assert len(run.token_times["all"]) == 4


def test_the_seconds_of_all_tenants_are_those_of_the_steps() -> None:
    run = VirtualRun(max_num_seqs=8)
    for number in range(12):
        chat(run, f"c{number}", "abc"[number % 3], prompt=20 + number)
        job(run, f"j{number}", "ab"[number % 2])
        run.step()
    run.drain()
    stats = run.scheduler.stats()
    charged_s = sum(s for each in stats.by_class.values() for s in each.device_s.values())
    assert stats.predicted_s == pytest.approx(charged_s, rel=0.02)
    assert set(stats.by_class[RT].device_s) == set("abc")
    assert set(stats.by_class[BE].device_s) == set("ab")
    run.scheduler.check_integrity()


@pytest.mark.parametrize("blocks", [60, 4000])
def test_with_one_tenant_the_steps_are_those_without_any(blocks: int) -> None:
    def steps(tenant: str) -> list[list[tuple[str, int, int]]]:
        run = VirtualRun(max_num_seqs=12, blocks=blocks, max_queue=500)
        for number in range(60):
            chat(run, f"c{number}", tenant, prompt=20 + 7 * (number % 9), tokens=6)
            if number % 3 == 0:
                job(run, f"j{number}", tenant)
            run.step()
        run.drain()
        return [[(c.request_id, c.start, len(c.token_ids)) for c in p.chunks] for p in run.plans]

    assert steps("ann") == steps("")


def test_memory_full_of_a_tenant_that_sends_too_much_is_given_to_others() -> None:
    run = VirtualRun(max_num_seqs=64, blocks=80, max_queue=2000)
    for number in range(40):
        chat(run, f"many{number}", "many", prompt=60, tokens=60)
    while run.now < 2.0:
        run.step()
    chat(run, "few", "few", prompt=60)
    asked_s = run.now
    while not run.token_times["few"]:
        run.step()
    assert run.token_times["few"][0] - asked_s <= 0.4
    stats = run.scheduler.stats().by_class[RT]
    assert stats.kv_preempted > 0
    run.drain()
    assert all(len(times) == 60 for name, times in run.token_times.items() if name != "few")


def test_a_tenant_with_one_job_does_not_wait_for_rows_of_another_that_fill_each_step() -> None:
    run = VirtualRun(max_num_seqs=100, max_batch_tokens=256, rt_wait=0.1, slo_ttft=500, slo_tpot=80)
    for number in range(80):
        run.submit(f"many{number}", 30, BE, tenant="many", salt=number * 7, max_tokens=400)
    run.steps(100)
    started = len(run.first_run)
    run.steps(50)
    assert len(run.first_run) == started < 80  # the rows leave no time for another prompt
    job(run, "one", "few")
    run.submit("long", 150, BE, tenant="few", salt=999, max_tokens=8)
    run.steps(60)  # their prompts count as much as many steps of the rows
    assert [len(run.token_times[name]) for name in ("one", "long")] == [8, 8]
