"""Replicas that hang, are drained when others are lost, refuse what they had accepted, and what is
promoted meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from bros.core.errors import EngineDeadError, OverloadedError, QueueFullError
from bros.core.interfaces import EngineStats
from bros.core.request import FinishReason, ServiceClass, Slo
from bros.router.fleet import make_fleet
from bros.router.replica_set import ReplicaState
from bros.router.state import RouterSettings
from bros.simulator.virtual_loop import run_virtual
from support.killable_engine import STEP_S, KillableEngine, foretold
from support.router_group import HANGS_S, Group, ask, collect, in_group, tokens_of

RT, BE = ServiceClass.RT, ServiceClass.BE


def now() -> float:
    return asyncio.get_running_loop().time()


# An engine that hangs


@in_group
async def test_requests_of_a_hung_engine_are_moved(group: Group) -> None:
    begun = asyncio.create_task(collect(group.client, ask("begun")))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("begun")
    group.engines[where].hung = True
    # By turns, so that one of them is about to be accepted there.
    others = [asyncio.create_task(collect(group.client, ask(f"r{n}"))) for n in range(2)]
    await asyncio.sleep(1)
    assert not begun.done() and sum(reading.done() for reading in others) == 1
    began = now()
    group.client.drain(where, move=True, restart=True)
    for reading in (begun, *others):
        assert tokens_of(await reading) == foretold(ask())
    assert now() - began < 1.5
    await asyncio.sleep(1.5)
    status = group.client.replicas()[where]
    assert (status.state, group.engines[where].deaths) == (ReplicaState.UP, 1)
    assert (group.client.moved, group.client.continued) == (2, 0)


@in_group
async def test_a_request_that_is_to_move_before_it_is_accepted_moves_then(group: Group) -> None:
    """It need not wait until the engine counts as one that hangs."""
    reading = asyncio.create_task(collect(group.client, ask(max_tokens=50)))
    await asyncio.sleep(0.2 * STEP_S)
    (where,) = [status.number for status in group.client.replicas() if status.open]
    assert "r" not in group.engines[where].open_ids
    group.client.drain(where, move=True)
    await asyncio.sleep(5 * STEP_S)
    assert group.where("r") == 1 - where
    assert tokens_of(await reading) == foretold(ask(max_tokens=50))
    assert group.client.moved == 1


@in_group
async def test_a_slow_engine_may_get_a_request_again_once_it_has_aborted_it(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask(max_tokens=300)))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    slow, other = group.engines[where], group.engines[1 - where]
    slow.hung = True
    group.client.drain(where, move=True)
    await asyncio.sleep(1.2)
    assert "r" in slow.open_ids and "r" in other.open_ids
    group.client.resume(where)
    other.die()
    await asyncio.sleep(0.5)
    assert not reading.done()
    slow.hung = False
    assert tokens_of(await reading) == foretold(ask(max_tokens=300))


@in_group
async def test_what_hangs_is_waited_for_once_when_figures_are_asked_for(group: Group) -> None:
    await asyncio.sleep(5 * STEP_S)
    before = await group.client.stats()
    group.engines[0].hung = True
    took = []
    for _ in range(3):
        began = now()
        assert (await group.client.stats()).kv_blocks_total == before.kv_blocks_total
        took.append(now() - began)
    assert took[0] <= 2.0 and took[1:] == [0.0, 0.0]
    group.engines[0].hung = False
    await asyncio.sleep(2 * STEP_S)
    steps = (await group.client.stats()).steps
    await asyncio.sleep(5 * STEP_S)
    assert (await group.client.stats()).steps >= steps + 8, "both are asked again"


# Drained, and the others lost


@in_group
async def test_drained_replicas_serve_without_another_and_stay_drained(
    group: Group,
) -> None:
    group.client.drain(0)
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    group.engines[1].die()
    assert group.client.available
    assert tokens_of(await collect(group.client, ask("new"))) == foretold(ask())
    assert tokens_of(await reading) == foretold(ask())
    assert group.client.replicas()[0].state is ReplicaState.DRAINED
    group.engines[1].start()
    await asyncio.sleep(0.1)
    await asyncio.gather(*(collect(group.client, ask(f"r{n}", 2)) for n in range(4)))
    assert set(group.engines[0].submitted) == {"r", "new"}


@in_group
async def test_the_only_replica_that_runs_is_not_restarted_before_another_is(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    group.client.drain(where, restart=True)
    group.engines[1 - where].die()
    await reading
    await asyncio.sleep(1)
    assert group.engines[where].deaths == 0 and group.client.available
    group.engines[1 - where].start()
    await asyncio.sleep(2)
    assert group.engines[where].deaths == 1
    assert group.client.replicas()[where].state is ReplicaState.UP


@in_group
async def test_a_refused_request_is_told_when_to_retry_if_a_replica_starts(group: Group) -> None:
    for engine in group.engines:
        engine.die()
    assert not group.client.available
    with pytest.raises(EngineDeadError, match="takes requests") as refused:
        await group.client.submit(ask())
    assert refused.value.retry_after_s == 5.0


@in_group
async def test_a_request_that_is_aborted_as_its_engine_is_lost_ends(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    group.engines[group.where("r")].die()
    await group.client.abort("r")
    assert (await reading)[-1].finish_reason is FinishReason.ABORT
    assert group.client.num_open == 0


@in_group
async def test_a_request_ends_if_the_router_closes_as_its_engine_is_lost(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    group.engines[group.where("r")].die()
    await group.client.close()
    with pytest.raises(EngineDeadError, match="shutting down"):
        await reading


@in_group
async def test_a_request_ends_if_the_router_closes_while_an_engine_accepts_it(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    close = KillableEngine.close

    async def slowly(self: KillableEngine) -> None:
        await asyncio.sleep(1)
        await close(self)

    monkeypatch.setattr(KillableEngine, "close", slowly)
    reading = asyncio.create_task(collect(group.client, ask(max_tokens=900)))
    await asyncio.sleep(STEP_S / 4)
    await group.client.close()
    with pytest.raises(EngineDeadError, match="shutting down"):
        await reading


@in_group
async def test_an_engine_that_answers_and_dies_in_one_turn_counts_once(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client reads several messages in a turn of the event loop."""
    answers: dict[KillableEngine, asyncio.Future[EngineStats]] = {}

    async def stats(self: KillableEngine) -> EngineStats:
        answers[self] = asyncio.get_running_loop().create_future()
        return await answers[self]

    monkeypatch.setattr(KillableEngine, "stats", stats)

    async def asked(*, dies: bool = False) -> EngineStats:
        reading = asyncio.create_task(group.client.stats())
        while len(answers) < sum(engine.alive for engine in group.engines):
            await asyncio.sleep(0)
        for engine, answer in answers.items():
            answer.set_result(EngineStats(steps=engine.steps, kv_blocks_total=100))
            if dies and engine is lost:
                engine.die()
        answers.clear()
        return await reading

    await group.client.submit(ask(max_tokens=900))
    lost, other = group.engines[group.where("r")], group.engines[1 - group.where("r")]
    await asyncio.sleep(1)
    assert (await asked()).kv_blocks_total == 200
    known = lost.steps
    await asyncio.sleep(1)
    await asked(dies=True)
    after = await asked()
    assert (after.steps, after.kv_blocks_total) == (known + other.steps, 100)
    await group.client.abort("r")


# Refused after it was accepted


@in_group
async def test_what_one_replica_sheds_another_may_take(group: Group) -> None:
    group.engines[0].shed = {"r0", "r1"}
    made = [collect(group.client, ask(f"r{n}")) for n in range(2)]
    for outputs in await asyncio.gather(*made):
        assert tokens_of(outputs) == foretold(ask())
    assert len(group.engines[0].submitted) == 1
    for engine in group.engines:
        engine.shed = {"both"}
    (last,) = await collect(group.client, ask("both"))
    assert (last.finish_reason, last.retry_after_s) == (FinishReason.ERROR, 2.0)
    assert all("both" in engine.submitted for engine in group.engines)


@in_group
async def test_what_is_shed_and_refused_elsewhere_ends_with_the_refusal(group: Group) -> None:
    for engine in group.engines:
        engine.shed = {"r"}
    task = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(0.7 * STEP_S)
    group.engines[1 - group.where("r")].refusals = [QueueFullError(3, 7.0)]
    (last,) = await task
    assert (last.finish_reason, last.retry_after_s) == (FinishReason.ERROR, 2.0)


@in_group
async def test_the_shortest_wait_counts_after_a_shed_request_is_refused_elsewhere(
    group: Group,
) -> None:
    for engine in group.engines:
        engine.shed = {"r"}
    task = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(0.7 * STEP_S)
    group.engines[1 - group.where("r")].refusals = [QueueFullError(3, 1.0)]
    (last,) = await task
    assert (last.finish_reason, last.retry_after_s) == (FinishReason.ERROR, 1.0)


@in_group
async def test_a_refusal_counts_only_if_no_other_replica_takes_the_request(group: Group) -> None:
    async def num_refused() -> tuple[int, int]:
        by_class = (await group.client.stats()).by_class
        return by_class[RT].rejected, by_class[BE].rejected

    group.engines[0].refusals = [QueueFullError(3, 7.0)]
    for name in ("a", "b"):  # by turns, so that one of them is refused there
        assert tokens_of(await collect(group.client, ask(name))) == foretold(ask())
    assert not group.engines[0].refusals and await num_refused() == (0, 0)
    for engine in group.engines:
        engine.refusals, engine.shed = [OverloadedError("Too busy.", 2.0)], {"shed"}
    with pytest.raises(OverloadedError):
        await group.client.submit(ask("refused", service_class=BE))
    assert await num_refused() == (0, 1)
    await collect(group.client, ask("shed"))
    assert await num_refused() == (1, 1)


@in_group
async def test_what_was_shed_before_its_first_output_waits_for_room_if_it_is_lost_after_it(
    group: Group,
) -> None:
    for engine in group.engines:
        engine.shed = {"r"}
    reading = asyncio.create_task(collect(group.client, ask(max_tokens=50)))
    await asyncio.sleep(0.7 * STEP_S)
    where = group.where("r")
    first, second = group.engines[where], group.engines[1 - where]
    second.shed = set()
    await asyncio.sleep(5 * STEP_S)
    assert group.where("r") == 1 - where
    first.shed, first.refusals = set(), [QueueFullError(3, 0.1)]
    second.die()
    assert tokens_of(await reading) == foretold(ask(max_tokens=50))
    assert not first.refusals and first.submitted["r"].resumed > 0


# Promoted


@in_group
async def test_a_promoted_request_continues_as_a_real_time_one(group: Group) -> None:
    relaxed = ask(service_class=BE, slo=Slo(deadline_s=50.0), arrival_s=now())
    reading = asyncio.create_task(collect(group.client, relaxed))
    await asyncio.sleep(5 * STEP_S)
    promoted_s = now()
    await group.client.promote("r", Slo(ttft_s=0.2))
    where = group.where("r")
    group.engines[where].die()
    await reading
    again = group.engines[1 - where].submitted["r"]
    assert again.service_class is RT and again.resumed > 0
    assert again.slo.ttft_s == 0.2 and again.arrival_s == promoted_s
    assert again.slo.deadline_s == pytest.approx(50.0 - 5 * STEP_S)


@in_group
async def test_stricter_objectives_of_what_is_real_time_hold_on_the_next_engine(
    group: Group,
) -> None:
    asked, stricter = Slo(ttft_s=0.7, deadline_s=50.0), Slo(ttft_s=0.2, deadline_s=20.0)
    began_s = now()
    reading = asyncio.create_task(collect(group.client, ask(slo=asked, arrival_s=began_s)))
    await asyncio.sleep(5 * STEP_S)
    await group.client.promote("r", Slo(ttft_s=0.4), False)
    await group.client.promote("r", stricter)
    where = group.where("r")
    assert group.engines[where].promoted == {"r": stricter}
    group.engines[where].die()
    await reading
    again = group.engines[1 - where].submitted["r"]
    assert (again.slo.ttft_s, again.arrival_s) == (0.7, began_s)
    assert again.slo.deadline_s == pytest.approx(20.0 + 5 * STEP_S)
    assert group.engines[1 - where].promoted == {"r": stricter}


def test_promoted_work_counts_as_real_time_work() -> None:
    async def main() -> None:
        fleet = make_fleet("e2", RouterSettings())
        group = Group(2, fleet)
        async with asyncio.timeout(HANGS_S):
            reading = asyncio.create_task(collect(group.client, ask(service_class=BE)))
            await asyncio.sleep(5 * STEP_S)
            (busy,) = [replica for replica in fleet.replicas.values() if replica.works]
            assert busy.open_work.decode_s[BE] > 0.0 == busy.open_work.decode_s[RT]
            window = dict(busy.window_work.decode_s)
            await group.client.promote("r", Slo())
            await group.client.promote("r", Slo())
            assert busy.open_work.decode_s[RT] > 0.0 == busy.open_work.decode_s[BE]
            assert busy.window_work.decode_s == {RT: window[BE], BE: 0.0}
            await reading
            assert busy.open_work.num_requests == 0 and busy.window_work.num_requests == 1
            await group.client.close()

    run_virtual(main)


@in_group
async def test_requests_return_to_the_only_replica_once_it_answers_again(
    group: Group,
) -> None:
    reading = asyncio.create_task(collect(group.client, ask(max_tokens=300)))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    slow, other = group.engines[where], group.engines[1 - where]
    slow.hung = True
    group.client.drain(where, move=True)
    await asyncio.sleep(1.2)
    other.die()
    await asyncio.sleep(0.5)
    slow.hung = False
    await asyncio.sleep(5 * STEP_S)
    assert "r" not in slow.open_ids and not reading.done()
    slow.report()
    assert tokens_of(await reading) == foretold(ask(max_tokens=300))


@in_group
async def test_a_dropped_request_with_output_is_not_submitted_elsewhere(
    group: Group,
) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    group.engines[where].shed = {"r"}
    outputs = await reading
    assert 0 < len(tokens_of(outputs)) < 20
    assert (outputs[-1].finish_reason, outputs[-1].retry_after_s) == (FinishReason.ERROR, 2.0)
    assert "r" not in group.engines[1 - where].submitted


@in_group
async def test_a_replica_resumed_before_it_is_drained_is_not_restarted(
    group: Group,
) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    group.client.drain(where, restart=True)
    group.client.resume(where)
    assert tokens_of(await reading) == foretold(ask())
    await asyncio.sleep(2)
    assert group.client.replicas()[where].state is ReplicaState.UP
    assert group.engines[where].deaths == 0


@in_group
async def test_the_latest_of_several_drains_counts(group: Group) -> None:
    """A plain one after a resume does not inherit the restart of the one before."""
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    group.client.drain(where, restart=True)
    group.client.resume(where)
    group.client.drain(where)
    assert tokens_of(await reading) == foretold(ask())
    await asyncio.sleep(2)
    assert group.client.replicas()[where].state is ReplicaState.DRAINED
    assert group.engines[where].deaths == 0


@pytest.mark.parametrize("again", [False, True])
@in_group
async def test_a_replica_that_is_drained_while_it_restarts_stays_drained(
    group: Group, again: bool
) -> None:
    """Unless that restart is what the latest command asks for."""
    group.client.drain(0, restart=True)
    while group.client.replicas()[0].state is not ReplicaState.RESTARTING:
        await asyncio.sleep(STEP_S)
    group.client.drain(0)
    if again:
        group.client.drain(0, restart=True)
    await asyncio.sleep(10)
    state = ReplicaState.UP if again else ReplicaState.DRAINED
    assert group.client.replicas()[0].state is state
    assert group.engines[0].deaths == 1


def test_promotion_of_a_prefilled_request_counts_only_its_decode_time() -> None:
    async def main() -> None:
        fleet = make_fleet("e2", RouterSettings())
        group = Group(2, fleet)
        async with asyncio.timeout(HANGS_S):
            prompt = list(range(1, 41))
            asked = ask(service_class=BE, prompt_token_ids=prompt)
            reading = asyncio.create_task(collect(group.client, asked))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            (busy,) = [replica for replica in fleet.replicas.values() if replica.works]
            assert busy.open_work.prefill_s[BE] > 0.0
            await asyncio.sleep(5 * STEP_S)
            await group.client.promote("r", Slo())
            assert busy.open_work.prefill_s == {RT: 0.0, BE: 0.0}
            await reading
            await group.client.close()

    run_virtual(main)
