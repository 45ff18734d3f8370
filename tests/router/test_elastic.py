"""The number of replicas: bounds, how soon it follows, and that it comes to rest, on replicas that
are only a queue and a number."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bros.router.elastic import ElasticSettings, FleetLoad, ScalingPolicy
from support.tier import examples

SETTINGS = ElasticSettings(min_replicas=1, max_replicas=16, start_s=15.0, calm_s=60.0)
TTFT_S = 0.4


class Queue:
    """Replicas as a fluid: so many seconds of work come per second, and what cannot be done at once
    waits. Each of them takes start_s to come up."""

    def __init__(self, settings: ElasticSettings, serving: int) -> None:
        self.policy = ScalingPolicy(settings)
        self.settings = settings
        self.serving = serving
        self.coming: list[float] = []
        self.waiting_s = 0.0
        self.now = 0.0
        self.history: list[int] = []

    @property
    def there(self) -> int:
        return self.serving + len(self.coming)

    def step(self, rt: float, due: list[tuple[float, float | None]] | None = None) -> None:
        """One second with `rt` seconds of real-time work."""
        self.now += 1.0
        self.serving += sum(at <= self.now for at in self.coming)
        self.coming = [at for at in self.coming if at > self.now]
        done = min(float(self.serving), self.waiting_s + rt)
        self.waiting_s += rt - done
        slack_s = TTFT_S - 0.1 - self.waiting_s / self.serving
        load = FleetLoad(
            serving=self.serving,
            starting=len(self.coming),
            rt_slack_s=slack_s if done else None,
            rt_busy=done,
            rt_waiting_s=self.waiting_s,
            be_due=due or (),
        )
        wanted = self.policy.wanted(load, self.now)
        assert (
            self.settings.min_replicas
            <= wanted
            <= max(self.settings.max_replicas, self.settings.min_replicas)
        )
        self.history.append(wanted)
        if wanted > self.there:
            self.coming += [self.now + self.settings.start_s] * (wanted - self.there)
        elif wanted < self.there:
            self.serving -= self.there - wanted

    def run(self, seconds: float, demand: Callable[[float], float]) -> None:
        for _ in range(int(seconds)):
            self.step(demand(self.now))

    def turns(self, last: int) -> int:
        """How often it went the other way than before, in the last seconds."""
        ways = [
            b > a
            for a, b in zip(self.history[-last:], self.history[-last + 1 :], strict=False)
            if a != b
        ]
        return sum(a != b for a, b in zip(ways, ways[1:], strict=False))


LOADS = st.builds(
    FleetLoad,
    serving=st.integers(0, 20),
    starting=st.integers(0, 5),
    rt_slack_s=st.none() | st.floats(-10, 2),
    rt_busy=st.floats(0, 20),
    rt_waiting_s=st.floats(0, 1000),
    be_due=st.lists(st.tuples(st.floats(0, 1e4), st.none() | st.floats(-100, 1e5)), max_size=4),
)


@given(
    st.lists(st.tuples(st.floats(0, 100), LOADS), max_size=40),
    st.integers(1, 6),
    st.integers(0, 10),
)
def test_it_never_leaves_its_bounds(
    loads: list[tuple[float, FleetLoad]], least: int, more: int
) -> None:
    """Whatever it is told."""
    policy = ScalingPolicy(ElasticSettings(min_replicas=least, max_replicas=least + more))
    now = 0.0
    for passed_s, load in loads:
        now += passed_s
        assert least <= policy.wanted(load, now) <= least + more


DEMANDS = st.integers(1, 240).map(lambda twentieths: twentieths / 20)
"""Of how many replicas. With next to nothing more than a whole number of them, an hour is too short
to see that one is missing."""


@settings(max_examples=examples(20))
@given(DEMANDS.filter(lambda demand: 0.05 <= demand <= 11.0), st.integers(1, 16))
def test_it_comes_to_rest_at_what_a_steady_load_needs(demand: float, serving: int) -> None:
    queue = Queue(SETTINGS, serving)
    queue.run(3600, lambda now: demand)
    tail = queue.history[-1200:]
    assert len(set(tail)) == 1, "it goes on changing"
    assert queue.waiting_s == 0.0
    assert tail[0] >= math.ceil(demand)
    # Not more than half as many again as it takes at `full` less the margin.
    assert tail[0] <= math.ceil(1.5 * math.ceil(demand / (SETTINGS.full - 0.1)))
    assert queue.turns(3600) <= 2


@settings(max_examples=examples(20))
@given(st.floats(0.1, 4.0), DEMANDS.filter(lambda demand: 1.5 <= demand <= 12.0))
def test_it_follows_a_rise_within_three_starts(before: float, after: float) -> None:
    queue = Queue(SETTINGS, math.ceil(before / SETTINGS.full))
    queue.run(100, lambda now: before)
    queue.run(1, lambda now: after)
    queue.run(3 * SETTINGS.start_s + 1, lambda now: after)
    assert queue.serving >= math.ceil(after) or queue.there == SETTINGS.max_replicas
    queue.run(600, lambda now: after)
    assert queue.waiting_s == 0.0


@settings(max_examples=examples(20))
@given(st.floats(2.0, 10.0))
def test_it_goes_back_to_the_least_when_nothing_comes(demand: float) -> None:
    queue = Queue(SETTINGS, 1)
    queue.run(400, lambda now: demand)
    most = queue.there
    assert most > 1
    queue.run((most + 1) * SETTINGS.calm_s + SETTINGS.start_s, lambda now: 0.0)
    assert queue.there == SETTINGS.min_replicas


@settings(max_examples=examples(20))
@given(st.floats(0.5, 6.0), st.floats(0.1, 0.9), st.integers(20, 400))
def test_a_load_that_swings_is_followed_more_and_more_calmly(
    mean: float, swing: float, period: int
) -> None:
    """Shrinking that turned out to be wrong is not tried again soon."""
    queue = Queue(SETTINGS, 1)
    queue.run(7200, lambda now: mean * (1 + swing * math.sin(2 * math.pi * now / period)))
    assert queue.turns(3600) <= 2 * 3600 / (2 * SETTINGS.calm_s)
    assert queue.waiting_s <= mean * period


def test_it_grows_before_anything_is_late() -> None:
    """Slack that falls steadily is looked at as far ahead as a new replica takes."""
    policy = ScalingPolicy(SETTINGS)
    for second in range(60):
        slack_s = 0.6 - 0.01 * second
        load = FleetLoad(serving=2, rt_slack_s=slack_s, rt_busy=1.0)
        if policy.wanted(load, float(second)) > 2:
            break
    assert slack_s > 0.1


def test_it_waits_for_what_is_coming_before_it_asks_for_more() -> None:
    policy = ScalingPolicy(SETTINGS)
    late = FleetLoad(serving=2, rt_slack_s=-1.0, rt_busy=2.0)
    assert policy.wanted(late, 0.0) == 3
    coming = FleetLoad(serving=2, starting=1, rt_slack_s=-1.0, rt_busy=2.0)
    assert {policy.wanted(coming, float(now)) for now in range(1, 15)} == {3}
    up = FleetLoad(serving=3, rt_slack_s=-1.0, rt_busy=3.0)  # what came before is still late
    assert policy.wanted(up, 15.5) == 3
    assert policy.wanted(up, 40.0) == 5  # it was not enough


def test_after_a_mistake_it_takes_longer_to_shrink() -> None:
    policy = ScalingPolicy(SETTINGS)

    def calm_until_smaller(start: float) -> float:
        now = start
        while policy.wanted(FleetLoad(serving=3, rt_slack_s=0.3, rt_busy=0.5), now) == 3:
            now += 1.0
            assert now < start + 1000
        return now - start

    assert calm_until_smaller(0.0) == SETTINGS.calm_s
    assert policy.wanted(FleetLoad(serving=2, rt_slack_s=-1.0, rt_busy=2.0), 80.0) == 3
    assert calm_until_smaller(100.0) == 2 * SETTINGS.calm_s


def test_what_no_replica_can_help_is_left_alone() -> None:
    """Objectives that an idle engine misses: more of them would miss them too."""
    policy = ScalingPolicy(SETTINGS)
    for now in range(1000):
        load = FleetLoad(serving=1, rt_slack_s=-0.5, rt_busy=0.02)
        assert policy.wanted(load, float(now)) == 1


@given(
    st.lists(
        st.tuples(st.floats(1, 2000), st.none() | st.floats(30, 4000)), min_size=1, max_size=8
    ),
    st.floats(0, 3),
)
def test_best_effort_work_gets_what_its_deadlines_need(
    work: list[tuple[float, float | None]], busy: float
) -> None:
    """Beside: all deadlines one by one, against what the replicas can do until then."""
    limits = ElasticSettings(min_replicas=1, max_replicas=1000)
    load = FleetLoad(serving=1, rt_slack_s=0.3, rt_busy=busy, be_due=work)
    wanted = ScalingPolicy(limits).wanted(load, 0.0)

    def enough(replicas: int) -> bool:
        room = replicas * limits.full - busy
        by = [limits.window_s if due is None else due for _, due in work]
        return all(
            sum(s for (s, _), d in zip(work, by, strict=True) if d <= limit)
            <= room * limit * (1 + 1e-9)
            for limit in by
        )

    assert enough(wanted)
    assert wanted == 1 or not enough(wanted - 1)


def test_work_without_a_deadline_may_take_its_window() -> None:
    policy = ScalingPolicy(ElasticSettings(min_replicas=1, max_replicas=8, window_s=3600.0))
    assert policy.wanted(FleetLoad(serving=1, be_due=[(2000.0, None)]), 0.0) == 1
    assert policy.wanted(FleetLoad(serving=1, be_due=[(2000.0, 600.0)]), 1.0) == 5
    assert policy.wanted(FleetLoad(serving=1, be_due=[(6000.0, None)]), 2.0) == 3


def test_there_must_be_a_number_to_choose() -> None:
    for least, most in ((0, 1), (3, 2)):
        with pytest.raises(ValueError, match="replicas"):
            ScalingPolicy(ElasticSettings(min_replicas=least, max_replicas=most))


def test_a_load_is_said_in_a_line() -> None:
    load = FleetLoad(
        serving=2, starting=1, rt_slack_s=0.0123, rt_busy=1.5, be_due=[(3, None), (4, 30), (1, 0)]
    )
    assert str(load) == (
        "2 serving, 1 starting; real-time slack: 12 ms, 1.5 replicas busy, 0.0 s waiting; "
        "best-effort backlog: 8 s, of which 1 s are due in 1 s"
    )
