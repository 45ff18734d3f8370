"""FairQueue against a naive model, and FairGate with real threads."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.fair import LONG_SIZE, CpuUse, FairGate, FairQueue, FairThreads
from support.held_work import Held
from support.tier import examples

TENANTS = ["a", "b", "c"]

changes = st.tuples(
    st.sampled_from(["add", "end", "remove"]),
    st.sampled_from(TENANTS),
    st.booleans(),
    st.integers(0, 5),
)
"""What happens, to a job of which tenant, whether it is an urgent one, and a number."""


@settings(max_examples=examples(200))
@given(st.integers(1, 3), st.data(), st.lists(changes, max_size=40))
def test_queue_starts_whatever_may_start_and_no_more(
    slots: int, data: st.DataObject, steps: list[tuple[str, str, bool, int]]
) -> None:
    per_tenant = data.draw(st.integers(1, slots))
    allowed = data.draw(st.sampled_from([TENANTS, TENANTS[1:]]))
    queue: FairQueue[tuple[int, bool]] = FairQueue(slots, per_tenant)
    waiting: dict[tuple[str, bool], list[tuple[int, bool]]] = {
        (tenant, urgent): [] for tenant in TENANTS for urgent in (False, True)
    }
    running: Counter[tuple[str, bool]] = Counter()

    def may_start(tenant: str, urgent: bool) -> bool:
        counted = running[tenant, True] + (0 if urgent else running[tenant, False])
        return bool(waiting[tenant, urgent]) and counted < per_tenant

    for number, (what, tenant, urgent, amount) in enumerate(steps):
        line = waiting[tenant, urgent]
        if what == "add":
            queue.add(tenant, (number, urgent), urgent=urgent)
            line.append((number, urgent))
        elif what == "remove":
            queue.remove(tenant, line.pop(amount) if amount < len(line) else (-1, urgent))
        elif running[tenant, urgent]:
            queue.end(tenant, float(amount), urgent=urgent)
            running[tenant, urgent] -= 1
        while (started := queue.start(allowed.__contains__)) is not None:
            owner, job = started
            assert job[1] == may_start(owner, True), "urgent jobs of a tenant go first"
            assert may_start(owner, job[1])
            assert job == waiting[owner, job[1]].pop(0), "else they start in their order"
            running[owner, job[1]] += 1
        queue.check_integrity()
        assert sorted(queue.waiting()) == [
            tenant for tenant in TENANTS if waiting[tenant, False] or waiting[tenant, True]
        ]
        assert running.total() <= slots and max(running.values(), default=0) <= per_tenant
        ready = [t for t in allowed if may_start(t, False) or may_start(t, True)]
        assert running.total() == slots or not ready


@given(st.lists(st.floats(0.1, 3.0), min_size=3, max_size=3))
def test_tenants_with_work_get_the_same_time(costs: list[float]) -> None:
    """While all have work, none has had more than one job's time more than another."""
    queue: FairQueue[int] = FairQueue(1, 1)
    cost_of = dict(zip(TENANTS, costs, strict=True))
    for tenant in TENANTS:
        for number in range(100):
            queue.add(tenant, number)
    used: Counter[str] = Counter()
    for _ in range(90):
        started = queue.start()
        assert started is not None
        tenant, _ = started
        used[tenant] += cost_of[tenant]  # type: ignore[assignment]
        queue.end(tenant, cost_of[tenant])
        assert max(used[t] for t in TENANTS) - min(used[t] for t in TENANTS) <= max(costs) + 1e-6


def test_urgent_jobs_use_up_the_time_of_their_tenant() -> None:
    queue: FairQueue[str] = FairQueue(1, 1)
    for number in range(3):
        queue.add("a", f"a{number}", urgent=True)
        queue.add("b", f"b{number}")
    order = []
    while (started := queue.start()) is not None:
        order.append(started[0])
        queue.end(started[0], 1.0, urgent=started[0] == "a")
    assert sorted(order[:2]) == sorted(order[2:4]) == sorted(order[4:]) == ["a", "b"]


def test_tenant_that_was_idle_is_not_owed_time() -> None:
    queue: FairQueue[int] = FairQueue(1, 1)
    for number in range(10):
        queue.add("busy", number)
        assert queue.start() == ("busy", number)
        queue.end("busy", 1.0)
    for number in range(4):
        queue.add("busy", number)
        queue.add("new", number)
    order = []
    while (started := queue.start()) is not None:
        order.append(started[0])
        queue.end(started[0], 1.0)
    assert sorted(order[:2]) == sorted(order[2:4]) == ["busy", "new"]


async def test_work_runs_on_another_thread_and_its_error_comes_back() -> None:
    gate = FairGate(1, 1)
    assert await gate.run("a", threading.get_ident) != threading.get_ident()

    def fail() -> None:
        raise ValueError("no")

    for _ in range(3):  # an error frees its slot
        try:
            await gate.run("a", fail)
        except ValueError as error:
            assert str(error) == "no"


async def test_one_tenant_does_not_take_all_slots() -> None:
    gate = FairGate(2, 1)
    held = [Held() for _ in range(20)]
    slow = [asyncio.create_task(gate.run("a", work)) for work in held]
    await held[0].begun.wait()
    await gate.run("b", lambda: None)
    assert not held[1].begun.is_set()
    for work in held:
        work.let_go()
    await asyncio.gather(*slow)


async def test_urgent_work_waits_for_no_other_of_its_tenant_and_leaves_a_slot() -> None:
    gate, slow = FairGate(3, 1), [Held() for _ in range(2)]
    other = [asyncio.create_task(gate.run("a", work)) for work in slow]
    await slow[0].begun.wait()
    urgent = [Held() for _ in range(2)]
    before = [asyncio.create_task(gate.run("a", work, urgent=True)) for work in urgent]
    await urgent[0].begun.wait()
    await gate.run("b", lambda: None)
    assert not urgent[1].begun.is_set()
    slow[0].let_go()
    await other[0]
    urgent[0].let_go()
    await urgent[1].begun.wait()
    assert not slow[1].begun.is_set(), "urgent work goes first"
    urgent[1].let_go()
    slow[1].let_go()
    await asyncio.gather(*other, *before)


@pytest.mark.parametrize("urgent", [False, True])
async def test_cancelled_work_frees_the_place_of_its_kind(urgent: bool) -> None:
    gate, work = FairGate(2, 1), Held()
    running = asyncio.create_task(gate.run("a", work, urgent=urgent))
    await work.begun.wait()
    waiting = asyncio.create_task(gate.run("a", lambda: None, urgent=urgent))
    await asyncio.sleep(0)
    waiting.cancel()
    work.let_go()
    await running
    for _ in range(3):
        await gate.run("a", lambda: None, urgent=urgent)
    gate._queue.check_integrity()


async def test_cancelled_work_that_waits_is_not_done_and_work_that_runs_keeps_its_slot() -> None:
    gate = FairGate(1, 1)
    running, waiting = Held(), Held()
    first = asyncio.create_task(gate.run("a", running))
    await running.begun.wait()
    second = asyncio.create_task(gate.run("a", waiting))
    third = asyncio.create_task(gate.run("b", lambda: 3))
    await asyncio.sleep(0)
    first.cancel()
    second.cancel()
    await asyncio.gather(first, second, return_exceptions=True)
    assert first.cancelled() and second.cancelled() and not third.done()
    running.let_go()
    assert await third == 3
    assert not waiting.begun.is_set()


async def test_an_error_after_the_caller_has_been_cancelled_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate, held = FairGate(1, 1), Held()

    def fail() -> None:
        held()
        raise ValueError("no")

    task = asyncio.create_task(gate.run("a", fail))
    await held.begun.wait()
    task.cancel()
    await asyncio.wait([task])
    held.let_go()
    await gate.run("a", threading.get_ident)  # after it
    del task  # its error refers to the work
    gc.collect()
    assert caplog.records == []


async def test_cancelled_in_the_turn_in_which_its_slot_is_free() -> None:
    gate = FairGate(1, 1)

    def nothing() -> None:
        pass

    for cancel_after in range(4):
        tasks = [asyncio.create_task(gate.run(tenant, nothing)) for tenant in ("a", "b", "a")]
        for _ in range(cancel_after):
            await asyncio.sleep(0)
        tasks[1].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await gate.run("a", nothing)  # no slot is lost


async def test_short_work_does_not_wait_for_long_work() -> None:
    threads, long = FairThreads(), Held()
    slow = asyncio.create_task(threads.run("a", long, LONG_SIZE + 1))
    await long.begun.wait()
    work: Callable[[], int] = threading.get_ident
    assert await threads.run("a", work, LONG_SIZE) != threading.get_ident()
    assert not slow.done()
    long.let_go()
    await slow


async def test_work_does_not_wait_for_that_of_other_gates_nor_of_the_loop() -> None:
    """Each gate has the threads for all of its slots."""
    executor = ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(executor)
    held = [Held() for _ in range(5)]
    gates = [FairGate(2, 2), FairGate(2, 2)]
    slow = [asyncio.to_thread(held[0])]
    slow += [gates[number // 2].run("a", work) for number, work in enumerate(held[1:])]
    tasks = [asyncio.create_task(each) for each in slow]
    try:
        for work in held:
            await asyncio.wait_for(work.begun.wait(), 10)
        await asyncio.wait_for(FairThreads().run("b", threading.get_ident, 1), 10)
    finally:
        for work in held:
            work.let_go()
    await asyncio.gather(*tasks)


class Budget:
    """spent: what work has used, by tenant. empty: tenants without CPU time. wait_s: for how long,
    by tenant."""

    def __init__(self, *empty: str) -> None:
        self.spent: Counter[str] = Counter()
        self.empty = set(empty)
        self.wait_s: dict[str, float] = {}

    def spend(self, tenant: str, cpu_s: float) -> None:
        self.spent[tenant] += cpu_s  # type: ignore[assignment]

    def cpu_wait_s(self, tenant: str) -> float:
        return self.wait_s.get(tenant, 0.01) if tenant in self.empty else 0.0


async def test_work_of_a_tenant_without_cpu_time_waits_and_that_of_others_does_not() -> None:
    budget = Budget("a")
    gate = FairGate(2, 1, budget)
    waiting = [asyncio.create_task(gate.run("a", threading.get_ident)) for _ in range(3)]
    for _ in range(3):
        await gate.run("b", threading.get_ident)
    assert not any(task.done() for task in waiting)
    waiting[0].cancel()
    budget.empty.clear()
    await asyncio.gather(*waiting[1:])  # a timer starts them
    assert waiting[0].cancelled()


async def test_work_waits_for_the_cpu_time_of_its_own_tenant_alone() -> None:
    """That of b has some again long before that of a, which came first."""
    budget = Budget("a", "b")
    budget.wait_s["a"] = 3600.0
    gate = FairGate(1, 1, budget)
    first = asyncio.create_task(gate.run("a", threading.get_ident))
    await asyncio.sleep(0)
    second = asyncio.create_task(gate.run("b", threading.get_ident))
    await asyncio.sleep(0)
    budget.empty.discard("b")
    await asyncio.wait_for(second, 10)
    assert not first.done()
    first.cancel()
    await asyncio.wait([first])


async def test_the_end_of_a_gate_waits_for_what_cancelled_callers_began_but_not_for_ever() -> None:
    gate, work = FairGate(2, 1), Held()
    call = asyncio.create_task(gate.run("a", work))
    await asyncio.wait_for(work.begun.wait(), 10)
    call.cancel()
    await asyncio.wait([call])
    await gate.end(0.05)  # it gives up
    ending = asyncio.create_task(gate.end(20.0))
    await asyncio.sleep(0.05)
    assert not ending.done()
    work.let_go()
    await ending


async def test_replies_are_written_without_cpu_time() -> None:
    budget = Budget("a")
    threads = FairThreads(budget)
    waiting = asyncio.create_task(threads.run("a", threading.get_ident, 1))
    await threads.write("a", lambda: sum(range(100_000)))
    assert not waiting.done() and budget.spent["a"] > 0
    waiting.cancel()
    await asyncio.wait([waiting])


async def test_cpu_time_is_counted_here_and_elsewhere_whether_work_fails_or_not() -> None:
    budget, elsewhere = Budget(), CpuUse()
    gate = FairGate(1, 1, budget)

    def work() -> None:
        sum(range(1_000_000))
        elsewhere.seconds = 100.0
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await gate.run("a", work, elsewhere)
    await gate.run("b", lambda: threading.Event().wait(0.2))  # waiting takes none
    assert 100.001 < budget.spent["a"] < 110 and budget.spent["b"] < 0.1
