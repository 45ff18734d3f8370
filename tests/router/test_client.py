"""Several engines as one: nothing is lost, doubled or left open, whatever happens to them."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.core.errors import (
    EngineDeadError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
    QueueFullError,
)
from bros.core.interfaces import ClassStats, EngineReport, EngineStats
from bros.core.request import (
    EngineRequest,
    FinishReason,
    RequestOutput,
    SamplingParams,
    ServiceClass,
    Slo,
)
from bros.core.slices import Slices
from bros.engine.client import OutputStream
from bros.router.fleet import Fleet, make_fleet
from bros.router.replica_set import ReplicaState, counters, total_stats
from bros.router.state import RouterSettings
from bros.simulator.virtual_loop import run_virtual
from support.killable_engine import STEP_S, KillableEngine, foretold
from support.router_group import HANGS_S, Group, ask, collect, in_group, tokens_of
from support.tier import examples
from support.turn_fleet import TurnFleet


class Unclosable(KillableEngine):
    async def close(self) -> None:
        await super().close()
        raise OSError("cannot")


# A replica is lost


@in_group
async def test_a_stream_continues_on_another_replica_where_it_was(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(7 * STEP_S)
    where = group.where("r")
    group.engines[where].die()
    outputs = await reading
    assert tokens_of(outputs) == foretold(ask())
    assert [output.finish_reason for output in outputs[-2:]] == [None, FinishReason.LENGTH]
    assert [entry.logprob for o in outputs for entry in o.logprobs] == [-n for n in range(20)]
    again = group.engines[1 - where].submitted["r"]
    assert 0 < again.resumed == len(again.prompt_token_ids) - 3
    assert {output.cached_tokens for output in outputs} == {0}, "of the prompt as it came"
    status = group.client.replicas()[where]
    assert (status.state, status.lost, group.client.continued) == (ReplicaState.DOWN, 1, 1)
    assert len(group.fleet.kept["r"]) == 20 - again.resumed, "the rest was routed as prompt"


@in_group
async def test_replicas_that_hang_are_counted_apart_from_those_that_end(group: Group) -> None:
    for engine, hung in zip(group.engines, (True, False), strict=True):
        engine.die()
        engine.hung = hung
    await asyncio.sleep(1.0)
    assert (group.client.num_lost, group.client.num_hung) == (2, 1)
    group.client.remove(0)
    await group.engines[0].close()
    assert (group.client.num_lost, group.client.num_hung) == (2, 1), "counters never fall"


@in_group
async def test_a_request_without_a_seed_continues_as_it_began(group: Group) -> None:
    drawn = ask(sampling=SamplingParams(temperature=1, max_tokens=30, min_tokens=30))
    reading = asyncio.create_task(collect(group.client, drawn))
    await asyncio.sleep(7 * STEP_S)
    where = group.where("r")
    seeded = group.engines[where].submitted["r"]
    assert seeded.sampling.seed is not None
    group.engines[where].die()
    assert tokens_of(await reading) == foretold(seeded)


@in_group
async def test_a_lost_replica_is_out_of_view_at_once_and_back_later(group: Group) -> None:
    group.engines[0].die()
    assert group.client.alive and len(group.fleet.facts) == 2
    await asyncio.sleep(0.06)
    assert len(group.fleet.facts) == 1, "without any request"
    outputs = await asyncio.gather(*(collect(group.client, ask(f"r{n}")) for n in range(4)))
    assert all(tokens_of(some) == foretold(ask()) for some in outputs)
    group.engines[0].start()
    await asyncio.sleep(0.06)
    assert len(group.fleet.facts) == 2 and 1 not in group.fleet.facts, "under a new number"
    assert group.fleet.reports[-1] == (3, EngineReport(version=1, full=True))


class PausingFleet(TurnFleet):
    """It pauses three times within each report."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[int] = []

    def applying_report(self, replica: int, report: EngineReport, now: float) -> Slices[None]:
        yield from (None, None, None)
        self.done.append(report.version)


async def test_reports_are_applied_in_their_order_with_pauses() -> None:
    fleet = PausingFleet()
    group = Group(size=1, made=fleet)
    (handle,) = group.client._replicas
    await asyncio.sleep(0.01)
    fleet.done.clear()
    for version in (11, 12, 13):
        group.client._replica_set._on_report(handle, EngineReport(version=version))
    assert not fleet.done, "other work runs before the first one has ended"
    await asyncio.sleep(0.01)
    assert fleet.done == [11, 12, 13]
    group.client._replica_set._on_report(handle, EngineReport(version=14))
    group.engines[0].die()
    group.client.replicas()
    await asyncio.sleep(0.01)
    assert fleet.done == [11, 12, 13], "the engine of the last one is lost"
    await group.client.close()


class FailingFleet(PausingFleet):
    """It fails in the report with version 11."""

    def applying_report(self, replica: int, report: EngineReport, now: float) -> Slices[None]:
        yield from super().applying_report(replica, report, now)
        assert report.version != 11


async def test_reports_are_applied_after_one_that_failed() -> None:
    fleet = FailingFleet()
    group = Group(size=1, made=fleet)
    (handle,) = group.client._replicas
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context))
    await asyncio.sleep(0.01)
    fleet.done.clear()
    for version in (11, 12):
        group.client._replica_set._on_report(handle, EngineReport(version=version))
    await asyncio.sleep(0.01)
    group.client._replica_set._on_report(handle, EngineReport(version=13))
    await asyncio.sleep(0.01)
    assert len(errors) == 1 and fleet.done == [11, 13] and not handle.applying
    await group.client.close()


@in_group
async def test_open_requests_wait_for_a_replica_but_new_ones_do_not(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    for engine in group.engines:
        engine.die()
    await asyncio.sleep(1)
    assert not group.client.alive and not reading.done()
    with pytest.raises(EngineDeadError, match="takes requests"):
        await group.client.submit(ask("new"))
    group.engines[0].start()
    assert tokens_of(await reading) == foretold(ask())


@in_group
async def test_requests_do_not_wait_for_replicas_that_do_not_come_back(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    for number, engine in enumerate(group.engines):
        assert group.deaths == []
        engine.die()
        group.client.mark_gone(number, f"It burnt {number}.")
    with pytest.raises(EngineDeadError, match="burnt 1"):
        await reading
    assert group.deaths == ["It burnt 1."]
    with pytest.raises(EngineDeadError, match="burnt 1"):
        await group.client.submit(ask("new"))
    assert group.client.info.num_kv_blocks == 200, "facts stay"
    with pytest.raises(EngineDeadError):
        await group.client.stats()


@in_group
async def test_a_request_that_kills_every_engine_fails_and_no_other_does(group: Group) -> None:
    for engine in group.engines:
        engine.killers.add("killer")

    async def nurse() -> None:
        while True:
            await asyncio.sleep(0.5)
            for engine in group.engines:
                if not engine.alive:
                    engine.start()

    nursing = asyncio.create_task(nurse())
    good = [asyncio.create_task(collect(group.client, ask(f"r{n}", 200))) for n in range(5)]
    bad = asyncio.create_task(collect(group.client, ask("killer")))
    (last,) = await bad
    assert last.finish_reason is FinishReason.ERROR and "3 engines" in (last.error or "")
    for outputs in await asyncio.gather(*good):
        assert tokens_of(outputs) == foretold(ask(max_tokens=200))
    assert sum(engine.deaths for engine in group.engines) == 3
    nursing.cancel()


@in_group
async def test_of_those_that_were_lost_with_two_engines_one_at_a_time_begins(group: Group) -> None:
    """So that the third one is lost with only the request that kills it."""
    engine, other = group.engines
    other.die()
    engine.killers.add("killer")
    names = ["killer", *(f"r{number}" for number in range(3))]
    bad, *good = [asyncio.create_task(collect(group.client, ask(name))) for name in names]
    for deaths in (1, 2, 3):
        await asyncio.sleep(0.5)
        assert engine.deaths == deaths
        engine.start()
    (last,) = await bad
    assert last.finish_reason is FinishReason.ERROR
    for outputs in await asyncio.gather(*good):
        assert tokens_of(outputs) == foretold(ask())


async def lose_twice(engine: KillableEngine, up_s: float) -> None:
    """Let it die and start again, twice, with so long until the next one."""
    for _ in range(2):
        engine.die()
        engine.start()
        await asyncio.sleep(up_s)


@in_group
async def test_those_that_were_lost_twice_before_they_were_accepted_begin_one_at_a_time(
    group: Group,
) -> None:
    engine, other = group.engines
    other.die()
    readings = [asyncio.create_task(collect(group.client, ask(name))) for name in "ab"]
    await asyncio.sleep(0.2 * STEP_S)  # they are accepted after 0.5
    await lose_twice(engine, 0.5 * STEP_S)
    assert sum(status.open for status in group.client.replicas()) == 1
    for outputs in await asyncio.gather(*readings):
        assert tokens_of(outputs) == foretold(ask())


@in_group
async def test_real_time_requests_begin_first_of_those_that_were_lost_twice(group: Group) -> None:
    """Best-effort ones may have to wait for them, and would have them wait meanwhile."""
    engine, other = group.engines
    other.die()
    slow = [ask(f"be{n}", service_class=ServiceClass.BE) for n in range(2)]
    readings = [asyncio.create_task(collect(group.client, each)) for each in (*slow, ask("rt"))]
    await asyncio.sleep(5 * STEP_S)
    await lose_twice(engine, 0.9 * STEP_S)
    assert engine.open_ids == {"rt"}
    for outputs in await asyncio.gather(*readings):
        assert tokens_of(outputs) == foretold(ask())


@in_group
async def test_one_that_waits_to_begin_can_be_aborted(group: Group) -> None:
    engine, other = group.engines
    other.die()
    readings = [asyncio.create_task(collect(group.client, ask(name))) for name in "abc"]
    await asyncio.sleep(5 * STEP_S)
    await lose_twice(engine, 0.9 * STEP_S)
    assert engine.open_ids == {"a"}
    await group.client.abort("b")
    first, aborted, last = await asyncio.gather(*readings)
    assert aborted[-1].finish_reason is FinishReason.ABORT
    assert tokens_of(first) == tokens_of(last) == foretold(ask())


@in_group
async def test_an_aborted_request_is_not_begun_again(group: Group) -> None:
    there = asyncio.create_task(collect(group.client, ask("there")))
    between = asyncio.create_task(collect(group.client, ask("between")))
    await asyncio.sleep(5 * STEP_S)
    await group.client.abort("there")
    for engine in group.engines:
        engine.die()
    await asyncio.sleep(1)
    await group.client.abort("between")
    await group.client.abort("unknown")
    for name, reading in (("there", there), ("between", between)):
        outputs = await reading
        assert outputs[-1].finish_reason is FinishReason.ABORT
        given = tokens_of(outputs)
        assert given == foretold(ask(name))[: len(given)] and len(given) < 20
    for engine in group.engines:
        engine.start()
    await asyncio.sleep(1)
    assert all(engine.open_ids == set() for engine in group.engines)


@in_group
async def test_an_abort_while_a_request_is_accepted_is_not_forgotten(
    group: Group,
) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(0.2 * STEP_S)
    assert group.client.num_open == 1 and all(not e.open_ids for e in group.engines)
    await group.client.abort("r")
    assert (await reading)[-1].finish_reason is FinishReason.ABORT


@in_group
async def test_a_promoted_request_stays_promoted(group: Group) -> None:
    slo = Slo(ttft_s=0.2)
    relaxed = ask(service_class=ServiceClass.BE)
    reading = asyncio.create_task(collect(group.client, relaxed))
    await asyncio.sleep(0)
    await group.client.promote("r", slo)  # before it is accepted
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    assert group.engines[where].promoted == {"r": slo}
    group.engines[where].die()
    await reading
    assert group.engines[1 - where].promoted == {"r": slo}
    await group.client.promote("r", slo)


@in_group
async def test_a_prefill_only_request_is_repeated(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask(prefill_only=True)))
    await asyncio.sleep(0.9 * STEP_S)
    where = group.where("r")
    group.engines[where].die()
    (only,) = await reading
    assert only.finish_reason is FinishReason.LENGTH and "r" in group.fleet.kept
    assert "r" in group.engines[1 - where].submitted


# Refusals


@in_group
async def test_others_are_asked_before_a_refusal_is_passed_on(group: Group) -> None:
    group.engines[0].refusals = [QueueFullError(9, 5.0)]
    outputs = await asyncio.gather(*(collect(group.client, ask(f"r{n}")) for n in range(4)))
    assert all(tokens_of(some) == foretold(ask()) for some in outputs)
    assert group.engines[0].refusals == []
    group.engines[0].refusals = [QueueFullError(9, 5.0)]
    group.engines[1].refusals = [OverloadedError("Too busy.", 2.0)]
    with pytest.raises(OverloadedError) as refused:
        await group.client.submit(ask("both refuse it"))
    assert refused.value.retry_after_s == 2.0


@in_group
async def test_an_invalid_request_is_refused_by_one_for_all(group: Group) -> None:
    for engine in group.engines:
        engine.refusals = [InvalidRequestError("Wrong.", "top_k")]
    with pytest.raises(InvalidRequestError, match="Wrong"):
        await group.client.submit(ask())
    assert sum(len(engine.refusals) for engine in group.engines) == 1
    for engine in group.engines:
        engine.refusals.clear()
    stream = await group.client.submit(ask("other", 1))
    with pytest.raises(InvalidRequestError, match="in use"):
        await group.client.submit(ask("other"))
    assert len([output async for output in stream]) == 1


@in_group
async def test_a_request_that_was_accepted_outlasts_refusals_elsewhere(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    group.engines[1 - where].refusals = [QueueFullError(9, 3.0), QueueFullError(9, 1.0)]
    group.engines[where].die()
    began = asyncio.get_running_loop().time()
    assert tokens_of(await reading) == foretold(ask())
    assert asyncio.get_running_loop().time() - began > 4.0


# Placing and asking


@in_group
async def test_requests_of_one_turn_are_placed_together(group: Group) -> None:
    await asyncio.gather(*(collect(group.client, ask(f"r{n}", 2)) for n in range(3)))
    await collect(group.client, ask("later", 2))
    assert group.fleet.groups == [("r0", "r1", "r2"), ("later",)]


@in_group
async def test_cancelling_a_submission_aborts_the_request(group: Group) -> None:
    for turns in range(4):
        submission = asyncio.create_task(group.client.submit(ask(f"r{turns}")))
        for _ in range(turns):
            await asyncio.sleep(0)
        submission.cancel()
        with pytest.raises(asyncio.CancelledError):
            await submission
        await asyncio.sleep(0)
        assert group.client.num_open == 0 and group.fleet.open == {}


@in_group
async def test_what_is_cancelled_just_as_an_engine_accepts_it_does_not_run_there(
    group: Group,
) -> None:
    """The caller is cancelled in each of the turns of the event loop around the acceptance."""
    outcomes = [await _submit_and_cancel(group, f"r{turns}", turns) for turns in range(5)]
    assert outcomes[0] and not outcomes[-1], "it is cancelled before its submission ends, and after"
    await asyncio.sleep(5 * STEP_S)
    assert group.client.num_open == 0 and group.fleet.open == {}
    assert not any(engine.open_ids for engine in group.engines)


async def _submit_and_cancel(group: Group, request_id: str, turns: int) -> bool:
    """Cancel a submission some turns of the loop after an engine has accepted it, or abort the
    request if it has ended by then. Returns whether it was cancelled."""
    loop, accept = asyncio.get_running_loop(), KillableEngine.submit

    def cancel(turns: int) -> None:
        if turns:
            loop.call_soon(cancel, turns - 1)
        else:
            submission.cancel()

    async def submit(engine: KillableEngine, request: EngineRequest) -> OutputStream:
        stream = await accept(engine, request)
        loop.call_soon(cancel, turns)
        return stream

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KillableEngine, "submit", submit)
        submission = asyncio.create_task(group.client.submit(ask(request_id, 100)))
        await asyncio.wait([submission])
    if not submission.cancelled():
        await group.client.abort(request_id)
    return submission.cancelled()


@in_group
async def test_pinned_kv_is_released_where_it_is(group: Group) -> None:
    await collect(group.client, ask("a", 2))
    await group.client.release("a")
    (had,) = [engine for engine in group.engines if "a" in engine.submitted]
    assert had.released == ["a"]
    assert [engine.released for engine in group.engines if engine is not had] == [[]]
    await group.client.release("of long ago")
    assert all(engine.released[-1] == "of long ago" for engine in group.engines)
    trace = await group.client.trace("a")
    assert trace is not None and trace.prompt_tokens == 3
    assert trace.placement == group.client.placement("a")
    assert trace.placement is not None and trace.placement.reason == "turn"
    assert group.client.placement("of long ago") is None
    assert await group.client.trace("of long ago") is None


@in_group
async def test_figures_are_sums_which_never_fall(group: Group) -> None:
    info = group.client.info
    assert (info.num_kv_blocks, info.max_queue, info.max_model_len) == (200, 20, 1000)
    await asyncio.sleep(10 * STEP_S)
    before = await group.client.stats()
    assert before.kv_blocks_total == 200 and before.steps >= 18
    group.engines[0].die()
    await asyncio.sleep(0.1)
    after = await group.client.stats()
    assert after.kv_blocks_total == 100 and after.steps > before.steps
    group.engines[0].start()
    await asyncio.sleep(0.1)
    assert (await group.client.stats()).steps > after.steps
    assert isinstance(after, EngineStats)


@in_group
async def test_replicas_come_and_go(group: Group) -> None:
    late = KillableEngine()
    late.start()
    assert group.client.add(late, name="late") == 2
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    before = await group.client.stats()
    group.client.drain(where, move=True)
    await group.client.wait_drained(where)
    group.client.remove(where)
    await group.engines[where].close()
    assert tokens_of(await reading) == foretold(ask())
    assert [status.number for status in group.client.replicas()] == [1 - where, 2]
    assert (await group.client.stats()).steps >= before.steps, "what was counted counts"
    with pytest.raises(NotFoundError, match=f"are {1 - where}, 2"):
        group.client.resume(where)
    await late.close()


# Draining


@in_group
async def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    group.client.drain(where)
    assert group.client.replicas()[where].state is ReplicaState.DRAINING
    await asyncio.gather(*(collect(group.client, ask(f"r{n}", 2)) for n in range(4)))
    assert set(group.engines[where].submitted) == {"r"}
    await group.client.wait_drained(where)
    assert tokens_of(await reading) == foretold(ask())
    assert group.client.replicas()[where].state is ReplicaState.DRAINED
    assert group.client.moved == 0
    with pytest.raises(InvalidRequestError, match="no other replica"):
        group.client.drain(1 - where)
    group.client.resume(where)
    await asyncio.gather(*(collect(group.client, ask(f"n{n}", 2)) for n in range(4)))
    assert len(group.engines[where].submitted) == 3
    with pytest.raises(NotFoundError):
        group.client.drain(7)


@in_group
async def test_what_is_open_can_be_moved_at_once(group: Group) -> None:
    readings = [asyncio.create_task(collect(group.client, ask(f"r{n}"))) for n in range(6)]
    await asyncio.sleep(5 * STEP_S)
    late = asyncio.create_task(collect(group.client, ask("late")))
    await asyncio.sleep(0)
    await asyncio.sleep(0)  # it is being accepted
    group.client.drain(0, move=True)
    began = asyncio.get_running_loop().time()
    await group.client.wait_drained(0)
    assert asyncio.get_running_loop().time() - began <= 3 * STEP_S
    for reading in (*readings, late):
        assert tokens_of(await reading) == foretold(ask())
    assert group.client.moved >= 3 and group.client.continued == 0


@in_group
async def test_tokens_that_an_engine_has_held_back_move_along(group: Group) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=30, min_tokens=30)
    request = ask(sampling=sampling, gathered=True, service_class=ServiceClass.BE)
    reading = asyncio.create_task(collect(group.client, request))
    await asyncio.sleep(10 * STEP_S)
    where = group.where("r")
    group.client.drain(where, move=True)
    assert tokens_of(await reading) == foretold(request)
    assert group.engines[1 - where].submitted["r"].resumed >= 8, "they are computed only once"


@in_group
async def test_an_engine_is_restarted_when_it_is_empty(group: Group) -> None:
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    where = group.where("r")
    group.client.drain(where, restart=True)
    assert tokens_of(await reading) == foretold(ask())
    await asyncio.sleep(0.5)
    status = group.client.replicas()[where]
    assert (status.state, status.lost) == (ReplicaState.RESTARTING, 0)
    await collect(group.client, ask("meanwhile", 2))
    await asyncio.sleep(1)
    assert group.client.replicas()[where].state is ReplicaState.UP
    assert group.engines[where].deaths == 1


@in_group
async def test_drained_replicas_are_used_when_there_are_no_others(group: Group) -> None:
    group.client.drain(0)
    reading = asyncio.create_task(collect(group.client, ask()))
    await asyncio.sleep(5 * STEP_S)
    group.engines[1].die()
    group.client.mark_gone(1, "It burnt.")
    assert tokens_of(await reading) == foretold(ask())
    assert group.client.replicas()[0].state is ReplicaState.UP and group.deaths == []


# Whatever happens

SAMPLINGS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    max_tokens=st.integers(1, 25),
    logprobs=st.sampled_from([None, 0]),
)
REQUESTS = st.builds(
    EngineRequest,
    request_id=st.just(""),
    prompt_token_ids=st.lists(st.integers(1, 9), min_size=1, max_size=6),
    sampling=SAMPLINGS,
    service_class=st.sampled_from(ServiceClass),
    prefill_only=st.sampled_from([False, False, False, True]),
)
TURNS = st.integers(0, 30)  # steps between what happens
HAPPENINGS = st.tuples(
    st.sampled_from(["die", "start", "refuse", "abort", "promote", "drain", "move", "resume"]),
    TURNS,
    st.integers(0, 20),  # whom it concerns
)


async def happen(group: Group, what: str, whom: int, name: str) -> None:
    """One of HAPPENINGS. name: of a request."""
    engine, number = group.engines[whom % 3], whom % 3
    if what == "die":
        engine.die()
    elif what == "start" and not engine.alive:
        engine.start()
    elif what == "refuse":
        engine.refusals.append(QueueFullError(1, 0.05))
    elif what == "abort":
        await group.client.abort(name)
    elif what == "promote":
        await group.client.promote(name, Slo())
    elif what == "resume":
        group.client.resume(number)
    elif what in ("drain", "move"):
        with contextlib.suppress(InvalidRequestError):  # the last one
            group.client.drain(number, move=what == "move")


async def recover(group: Group) -> None:
    """So that what waits for a replica has one in the end."""
    await asyncio.sleep(1)
    for number, engine in enumerate(group.engines):
        group.client.resume(number)
        if not engine.alive:
            engine.start()


async def live_through(
    fleet: Fleet, requests: list[tuple[int, EngineRequest]], happenings: list[tuple[str, int, int]]
) -> None:
    group = Group(3, fleet)

    async def one(turn: int, request: EngineRequest) -> list[RequestOutput] | None:
        await asyncio.sleep(turn * STEP_S)
        try:
            return await collect(group.client, request)
        except (EngineDeadError, QueueFullError):
            return None  # not accepted: nothing was given

    async def later(what: str, turn: int, whom: int) -> None:
        await asyncio.sleep((turn + 0.3) * STEP_S)
        await happen(group, what, whom, f"r{whom % len(requests)}")

    made = [
        (turn, dataclasses.replace(request, request_id=f"r{n}"))
        for n, (turn, request) in enumerate(requests)
    ]
    aborted = {f"r{whom % len(requests)}" for what, _, whom in happenings if what == "abort"}
    events = asyncio.gather(recover(group), *(later(*happening) for happening in happenings))
    results = await asyncio.gather(*(one(*item) for item in made))
    await events
    for (_, request), outputs in zip(made, results, strict=True):
        if outputs is not None:
            check(request, outputs, group.engines, request.request_id in aborted)
    assert group.client.num_open == 0
    await group.close()


def check(
    request: EngineRequest,
    outputs: list[RequestOutput],
    engines: list[KillableEngine],
    may_be_aborted: bool,
) -> None:
    """Ends exactly once, with exactly the tokens of an engine that nothing happened to."""
    reasons = [output.finish_reason for output in outputs]
    assert reasons[-1] is not None and set(reasons[:-1]) <= {None}
    asked = next(e.submitted[request.request_id] for e in engines
                 if request.request_id in e.submitted)  # fmt: skip
    expected = [] if request.prefill_only else foretold(
        dataclasses.replace(request, sampling=asked.sampling)
    )  # fmt: skip
    given = tokens_of(outputs)
    if reasons[-1] is FinishReason.ABORT:
        assert may_be_aborted and given == expected[: len(given)]
    elif reasons[-1] is FinishReason.ERROR:
        assert "3 engines" in (outputs[-1].error or "") and given == expected[: len(given)]
    else:
        assert given == expected
    if request.sampling.logprobs is not None:
        logprobs = [entry.logprob for output in outputs for entry in output.logprobs]
        assert logprobs == [-float(n) for n in range(len(given))]
    if request.sampling.seed is not None:
        assert asked.sampling.seed == request.sampling.seed


LIVES = (
    st.lists(st.tuples(TURNS, REQUESTS), min_size=1, max_size=8),
    st.lists(HAPPENINGS, max_size=14),
)


@settings(max_examples=examples(50, long=1000))
@given(*LIVES)
def test_streams_end_once_with_the_right_tokens_whatever_happens(
    requests: list[tuple[int, EngineRequest]], happenings: list[tuple[str, int, int]]
) -> None:
    async def main() -> None:
        fleet = TurnFleet()
        async with asyncio.timeout(HANGS_S):
            await live_through(fleet, requests, happenings)
        assert fleet.open == {}

    run_virtual(main)


@pytest.mark.parametrize("policy", ["e2", "rr", "least"])
@settings(max_examples=examples(25, long=500))
@given(*LIVES)
def test_streams_end_once_with_the_right_tokens_under_every_policy(
    policy: str,
    requests: list[tuple[int, EngineRequest]],
    happenings: list[tuple[str, int, int]],
) -> None:
    async def main() -> None:
        fleet = make_fleet(policy, RouterSettings(warm_up=2, plan="on"))
        async with asyncio.timeout(HANGS_S):
            await live_through(fleet, requests, happenings)
        assert not any(replica.works for replica in fleet.replicas.values())

    run_virtual(main)


def test_one_that_cannot_be_closed_keeps_no_other_from_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test() -> None:
        group = Group()
        for engine in (Unclosable(), KillableEngine()):
            engine.start()
            group.client.add(engine)
            group.engines.append(engine)
        await group.close()
        assert [engine.closed for engine in group.engines] == [True] * 4

    run_virtual(test)
    assert "closing an engine failed: cannot" in caplog.messages


@in_group
async def test_who_reads_late_finds_what_several_replicas_gave_in_one_output(group: Group) -> None:
    stream = await group.client.submit(ask())
    await asyncio.sleep(4 * STEP_S)
    where = group.where("r")
    group.engines[where].die()
    await asyncio.sleep(30 * STEP_S)
    assert group.client.num_open == 0 and group.client.continued == 1
    (output,) = [output async for output in stream]
    assert list(output.token_ids) == foretold(ask())
    assert output.finish_reason is not None


def test_traces_of_several_engines_are_those_of_the_one_with_the_most() -> None:
    parts = [EngineStats(steps=1, traces={"a": 3, "b": 1}), EngineStats(steps=2, traces={"b": 4})]
    total = total_stats(parts, before=[counters(EngineStats(steps=4, traces={"c": 9}))])
    assert (total.steps, total.traces) == (7, {"a": 3, "b": 4})


def test_factors_of_several_engines_are_the_largest_of_those_that_run() -> None:
    parts = [
        EngineStats(safety_factor=safety, rare_factor=rare)
        for safety, rare in ((1.1, 1.5), (1.3, 1.2), (1.9, 1.9))
    ]
    total = total_stats(parts[:2], before=[counters(parts[2])])
    assert (total.safety_factor, total.rare_factor) == (1.3, 1.5)


def test_the_device_time_of_a_tenant_is_that_of_all_engines_and_of_those_that_have_ended() -> None:
    parts = [
        EngineStats(by_class={ServiceClass.BE: ClassStats(device_s=used)})
        for used in ({"a": 1.0, "b": 2.0}, {"b": 0.5}, {"c": 4.0})
    ]
    total = total_stats(parts[:2], before=[counters(parts[2])])
    assert total.by_class[ServiceClass.BE].device_s == {"a": 1.0, "b": 2.5, "c": 4.0}
    assert total.by_class[ServiceClass.RT].device_s == {}
