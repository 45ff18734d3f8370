"""Replicas that come and go: no request notices, and none is left that is not wanted."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from bros.core.errors import EngineDeadError
from bros.core.interfaces import ClassStats, EngineReport, EngineStats
from bros.core.request import EngineRequest, SamplingParams, ServiceClass, Slo
from bros.router.elastic import ElasticReplicas, ElasticSettings
from bros.router.replica_set import ReplicaState
from bros.simulator.virtual_loop import LoopClock, run_virtual
from support.killable_engine import KillableEngine, foretold
from support.turn_fleet import TurnFleet

START_S = 8.0
SLOTS = 8


class SlowStarter(KillableEngine):
    """Takes START_S to come up; `fails` says whether it does."""

    def __init__(self, place: int, fails: bool, step_s: float) -> None:
        super().__init__(step_s)
        self.place = place
        self.fails = fails

    async def start(self) -> None:  # type: ignore[override]
        await asyncio.sleep(START_S)
        if self.fails:
            raise EngineDeadError("no room")
        super().start()

    async def restart(self) -> None:
        raise NotImplementedError


class SlowEnder(SlowStarter):
    async def close(self) -> None:
        await asyncio.sleep(5.0)
        await super().close()


class Experienced(SlowStarter):
    """Ten best-effort requests have taken it 90 ms each."""

    async def stats(self) -> EngineStats:
        be = ClassStats(prompt_tokens=4000, output_tokens=500, finished=10)
        return replace(await super().stats(), by_class={ServiceClass.BE: be})


class QueueingStarter(SlowStarter):
    """Serves SLOTS requests at a time, and says how many wait."""

    async def _work(self) -> None:
        for version in itertools.count(2):
            await asyncio.sleep(self.step_s)
            self.steps += 1
            served = list(self._open)[:SLOTS]
            for name in [name for name in self._open if name in served or name in self._aborted]:
                stream, tokens = self._open[name]
                output = self._output(name, tokens)
                if output.finish_reason is not None:
                    del self._open[name]
                stream.put(output)
            waiting = max(0, len(self._open) - SLOTS)
            self._listener(EngineReport(version=version, full=True, waiting=waiting))


class Group:
    """Replicas, and all engines that were ever made for them."""

    def __init__(
        self, step_s: float = 0.01, first: int = 1, replaces: bool = True, **settings: object
    ) -> None:
        self.engines: list[SlowStarter] = []
        self.made_at: list[float] = []
        self.fails = False
        self.step_s = step_s
        self.kind: type[SlowStarter] = SlowStarter
        self.clock = LoopClock()
        self.deaths: list[str] = []
        self.client = ElasticReplicas(
            TurnFleet(),
            self.clock,
            random.Random(0),
            self._make,
            ElasticSettings(**settings),  # type: ignore[arg-type]
            first,
            self.deaths.append,
            replaces=replaces,
        )

    def _make(self, place: int, on_final_death: Callable[[str], None]) -> SlowStarter:
        self.engines.append(self.kind(place, self.fails, self.step_s))
        self.engines[-1].on_final_death = on_final_death  # type: ignore[attr-defined]
        self.made_at.append(self.clock.now())
        return self.engines[-1]

    @property
    def states(self) -> list[ReplicaState]:
        return [status.state for status in self.client.replicas()]

    @property
    def up(self) -> int:
        return self.states.count(ReplicaState.UP)


def in_virtual_time(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        async def main() -> None:
            await test(**fixtures)
            assert len(asyncio.all_tasks()) == 1, "a task is left"

        run_virtual(main)

    return run


def ask(name: str, now: float, deadline_s: float | None, max_tokens: int = 20) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt_token_ids=[5, 6, len(name)],
        sampling=SamplingParams(temperature=0, max_tokens=max_tokens, min_tokens=max_tokens),
        service_class=ServiceClass.BE,
        slo=Slo(deadline_s=deadline_s),
        arrival_s=now,
    )


async def tokens_of(client: ElasticReplicas, request: EngineRequest) -> list[int]:
    stream = await client.submit(request)
    return [token async for output in stream for token in output.token_ids]


@in_virtual_time
async def test_deadlines_bring_replicas_and_calm_takes_them_away() -> None:
    group = Group(step_s=0.2, min_replicas=1, max_replicas=4, calm_s=30.0)
    await group.client.start()
    assert group.up == 1
    await asyncio.sleep(60)
    assert len(group.engines) == 1, "for nothing there is one"
    requests = [ask(f"r{n}", group.clock.now(), 30.0, 100) for n in range(800)]
    answers = [asyncio.create_task(tokens_of(group.client, each)) for each in requests]
    await asyncio.sleep(2.5 + START_S)
    assert group.up == len(group.engines) == 3  # 800 * 90 ms within 30 s, at 0.8
    assert [engine.place for engine in group.engines] == [0, 1, 2]
    assert await asyncio.gather(*answers) == [foretold(each) for each in requests]
    await asyncio.sleep(100)
    assert group.states == [ReplicaState.UP]
    assert sum(engine.closed for engine in group.engines) == 2
    assert all(status.lost == 0 for status in group.client.replicas())
    await group.client.close()
    assert all(engine.closed for engine in group.engines) and not group.deaths


@in_virtual_time
async def test_work_that_is_yet_to_come_brings_replicas() -> None:
    """As the rows of a batch do that are not with an engine."""
    group = Group(min_replicas=1, max_replicas=4, calm_s=30.0)
    group.kind = Experienced
    backlog = [(800, 30.0), (0, 1.0)]
    group.client.set_backlog(lambda: backlog)
    await group.client.start()
    await asyncio.sleep(2.5 + START_S)
    assert group.up == len(group.engines) == 3  # 800 * 90 ms within 30 s, at 0.8
    backlog[:] = [(800, 3600.0)]
    await asyncio.sleep(100)
    assert group.up == 1, "there is time enough"
    await group.client.close()


@in_virtual_time
async def test_new_replicas_relieve_those_that_were_there() -> None:
    group = Group(step_s=0.1, min_replicas=1, max_replicas=4)
    group.kind = QueueingStarter
    await group.client.start()
    await asyncio.sleep(2)
    began_s = group.clock.now()
    requests = [ask(f"r{n}", began_s, 30.0) for n in range(800)]
    answers = [asyncio.create_task(tokens_of(group.client, each)) for each in requests]
    assert await asyncio.gather(*answers) == [foretold(each) for each in requests]
    took_s = group.clock.now() - began_s
    assert len(group.engines) >= 3
    alone_s = 800 * 20 * 0.1 / SLOTS
    assert took_s < 0.5 * alone_s
    assert all(len(engine.submitted) > 50 for engine in group.engines)
    assert group.client.moved < 800, "nothing goes back and forth"
    assert group.client.continued == 0
    await group.client.close()


@in_virtual_time
async def test_a_long_request_is_moved_when_its_replica_is_to_be_stopped() -> None:
    group = Group(step_s=1.0, first=2, min_replicas=1, max_replicas=2, calm_s=30.0)
    await group.client.start()
    requests = [ask(f"r{n}", group.clock.now(), None, 400) for n in range(2)]
    answers = [asyncio.create_task(tokens_of(group.client, each)) for each in requests]
    await asyncio.sleep(100)
    assert sorted(group.states) == [ReplicaState.DRAINING, ReplicaState.UP]
    await asyncio.sleep(100)
    assert group.states == [ReplicaState.UP]
    assert group.client.moved == 1
    assert await asyncio.gather(*answers) == [foretold(each) for each in requests]
    await group.client.close()


@in_virtual_time
async def test_a_draining_replica_is_used_again_before_another_is_started() -> None:
    group = Group(step_s=1.0, first=2, min_replicas=1, max_replicas=2, calm_s=30.0)
    await group.client.start()
    requests = [ask(f"r{n}", group.clock.now(), None, 400) for n in range(2)]
    answers = [asyncio.create_task(tokens_of(group.client, each)) for each in requests]
    await asyncio.sleep(60)
    assert sorted(group.states) == [ReplicaState.DRAINING, ReplicaState.UP]
    requests += [ask(f"l{n}", group.clock.now(), 1.0, 50) for n in range(200)]
    answers += [asyncio.create_task(tokens_of(group.client, each)) for each in requests[2:]]
    await asyncio.sleep(3)
    assert group.up == 2 == len(group.engines)
    assert await asyncio.gather(*answers) == [foretold(each) for each in requests]
    await group.client.close()


@in_virtual_time
async def test_one_that_an_operator_resumes_stays_though_it_is_drained_at_once() -> None:
    group = Group(step_s=0.1, first=2, min_replicas=1, max_replicas=2, calm_s=30.0)
    await group.client.start()
    requests = [ask(f"r{n}", group.clock.now(), None, 4000) for n in range(2)]
    answers = [asyncio.create_task(tokens_of(group.client, each)) for each in requests]
    while ReplicaState.DRAINING not in group.states:
        await asyncio.sleep(0.5)
    (drained,) = [
        status for status in group.client.replicas() if status.state is ReplicaState.DRAINING
    ]
    group.client.resume(drained.number)
    for request in requests:
        await group.client.abort(request.request_id)
    await asyncio.gather(*answers)
    await asyncio.sleep(0.3)  # less than until the number of replicas is looked at again
    assert group.up == 2 and not any(engine.closed for engine in group.engines)
    await group.client.close()


@pytest.mark.parametrize("most", [2, 3])
@in_virtual_time
async def test_what_an_operator_drains_counts(most: int) -> None:
    group = Group(first=2, min_replicas=2, max_replicas=most)
    await group.client.start()
    group.client.drain(0)
    await asyncio.sleep(30)
    assert len(group.engines) == most, "two are to serve, but there is room for so many"
    assert group.up == most - 1
    await group.client.close()


@in_virtual_time
async def test_the_last_replica_that_takes_requests_is_not_stopped() -> None:
    group = Group(step_s=1.0, first=2, min_replicas=1, max_replicas=2, calm_s=30.0)
    await group.client.start()
    requests = [ask(f"r{n}", group.clock.now(), None, 400) for n in range(2)]
    answers = [asyncio.create_task(tokens_of(group.client, each)) for each in requests]
    await asyncio.sleep(60)
    states = [status.state for status in group.client.replicas()]
    group.engines[states.index(ReplicaState.UP)].die()
    await asyncio.sleep(200)
    assert sorted(group.states) == [ReplicaState.DOWN, ReplicaState.UP]
    assert await asyncio.gather(*answers) == [foretold(each) for each in requests]
    await group.client.close()


@in_virtual_time
async def test_one_that_does_not_come_up_is_tried_again_later() -> None:
    group = Group(step_s=1.0, min_replicas=1, max_replicas=2)
    await group.client.start()
    group.fails = True
    request = ask("r", group.clock.now(), 1.0, 200)  # long due
    answer = asyncio.create_task(tokens_of(group.client, request))
    others = [
        asyncio.create_task(tokens_of(group.client, ask(f"o{n}", group.clock.now(), 1.0, 200)))
        for n in range(200)
    ]
    await asyncio.sleep(60)
    assert len(group.engines) == 3, "at once, and half a minute after that has failed"
    assert group.made_at[2] - group.made_at[1] >= START_S + 30
    group.fails = False
    await asyncio.sleep(60)
    assert group.up == 2 and group.engines[-1].place == 1
    assert await answer == foretold(request)
    await asyncio.gather(*others)
    await group.client.close()


@in_virtual_time
async def test_one_that_does_not_come_back_is_replaced() -> None:
    group = Group(first=2, min_replicas=2, max_replicas=3)
    await group.client.start()
    lost = group.engines[0]
    lost.die()
    await asyncio.sleep(20)
    assert len(group.engines) == 2, "it may come back"
    lost.on_final_death("three times")  # type: ignore[attr-defined]
    await asyncio.sleep(2 + START_S)
    assert group.up == 2 == len(group.states) and lost.closed and not group.deaths
    assert group.engines[-1].place == 0
    await group.client.close()


@pytest.mark.parametrize("replaces", [True, False])
@in_virtual_time
async def test_one_that_is_gone_is_shown_until_there_is_another_one(replaces: bool) -> None:
    """Also where the number is fixed."""
    group = Group(replaces=replaces, first=2, min_replicas=2, max_replicas=2)
    await group.client.start()
    group.engines[0].die()
    group.engines[0].on_final_death("three times")  # type: ignore[attr-defined]
    await asyncio.sleep(START_S / 2)
    assert group.states == [ReplicaState.GONE, ReplicaState.UP] and group.engines[0].closed
    await asyncio.sleep(START_S)
    assert len(group.engines) == (3 if replaces else 2)
    expected = [ReplicaState.UP] * 2 if replaces else [ReplicaState.GONE, ReplicaState.UP]
    assert group.states == expected and not group.deaths
    if not replaces:
        group.engines[1].die()
        group.engines[1].on_final_death("the last one")  # type: ignore[attr-defined]
        assert group.deaths == ["the last one"]
    await group.client.close()


@in_virtual_time
async def test_closing_waits_for_one_that_ends() -> None:
    group = Group(first=2, min_replicas=1, max_replicas=2, calm_s=30.0)
    group.kind = SlowEnder
    await group.client.start()
    while len(group.states) == 2:
        await asyncio.sleep(0.1)
    assert not any(engine.closed for engine in group.engines), "it is ending"
    await group.client.close()
    assert all(engine.closed for engine in group.engines)


@in_virtual_time
async def test_closing_ends_what_is_on_its_way() -> None:
    group = Group(min_replicas=2, max_replicas=3)
    await group.client.start()
    await asyncio.sleep(3)
    assert len(group.engines) == 2 and group.up == 1
    await group.client.close()


@in_virtual_time
async def test_a_first_one_that_does_not_come_up_says_why() -> None:
    group = Group(first=2, min_replicas=2, max_replicas=3)
    group.fails = True
    with pytest.raises(EngineDeadError, match="no room"):
        await group.client.start()
    await group.client.close()


@in_virtual_time
async def test_a_replica_that_fails_for_good_while_it_is_drained_is_closed_once() -> None:
    group = Group(step_s=1.0, first=2, min_replicas=1, max_replicas=2, calm_s=30.0)
    await group.client.start()
    requests = [ask(f"r{n}", group.clock.now(), None, 400) for n in range(2)]
    answers = [asyncio.create_task(tokens_of(group.client, each)) for each in requests]
    await asyncio.sleep(60)
    lost = group.engines[group.states.index(ReplicaState.DRAINING)]
    lost.die()
    lost.on_final_death("three times")  # type: ignore[attr-defined]
    await asyncio.sleep(5)
    assert sorted(group.states) == [ReplicaState.GONE, ReplicaState.UP] and lost.closed
    assert await asyncio.gather(*answers) == [foretold(each) for each in requests]
    await group.client.close()
