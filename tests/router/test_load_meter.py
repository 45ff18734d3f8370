"""Loads from counters."""

from __future__ import annotations

import pytest

from bros.core.interfaces import Buckets, ClassStats, EngineStats, Prices
from bros.core.request import ServiceClass
from bros.router.elastic import LoadMeter

PRICES = Prices(constant_s=0.0, token_s=0.001, row_s=0.01)
BOUNDS = (-1.0, 0.0, 0.1, 0.5)


def stats(rt: ClassStats, be: ClassStats | None = None) -> EngineStats:
    return EngineStats(by_class={ServiceClass.RT: rt, ServiceClass.BE: be or ClassStats()})


def slack(*counts: int) -> Buckets:
    return Buckets(BOUNDS, counts)


def test_work_is_what_was_done_between_two_looks() -> None:
    meter = LoadMeter(PRICES, 0.4)
    before = ClassStats(prompt_tokens=5000, prefix_tokens=1000, output_tokens=70)
    assert meter.read(stats(before), (), 2, 0, 100.0) is None
    after = ClassStats(prompt_tokens=6000, prefix_tokens=1500, output_tokens=120)
    load = meter.read(stats(after), (), 2, 1, 102.0)
    assert load is not None
    assert load.rt_busy == pytest.approx((500 * 0.001 + 50 * 0.01) / 2)
    assert (load.serving, load.starting, load.rt_slack_s) == (2, 1, None)


@pytest.mark.parametrize(
    ("before", "after", "worst"),
    [
        ((0, 0, 0, 0, 0), (0, 0, 0, 0, 100), 0.5),
        ((9, 0, 0, 0, 0), (9, 0, 0, 96, 104), 0.1),  # what was late before does not count
        ((0, 0, 0, 0, 0), (0, 5, 0, 95, 0), -1.0),
        ((0, 0, 0, 0, 0), (0, 4, 0, 96, 0), 0.1),
        ((0, 0, 0, 0, 0), (100, 0, 0, 0, 0), -1.0),
        ((1, 2, 3, 4, 5), (1, 2, 3, 4, 5), None),
    ],
)
def test_slack_is_that_of_the_worst_twentieth(
    before: tuple[int, ...], after: tuple[int, ...], worst: float | None
) -> None:
    meter = LoadMeter(PRICES, 0.4)
    meter.read(stats(ClassStats(slack=slack(*before))), (), 1, 0, 1.0)
    load = meter.read(stats(ClassStats(slack=slack(*after))), (), 1, 0, 2.0)
    assert load is not None and load.rt_slack_s == worst


def test_who_waits_and_gets_nothing_is_later_every_second() -> None:
    meter = LoadMeter(PRICES, 0.4)
    waits = stats(ClassStats(waiting=3))
    found = [meter.read(waits, (), 1, 0, float(now)) for now in range(4)]
    assert [load.rt_slack_s for load in found if load] == pytest.approx([0.4, -0.6, -1.6])
    moves = stats(ClassStats(waiting=3, slack=slack(0, 0, 0, 0, 1)))
    load = meter.read(moves, (), 1, 0, 4.0)
    assert load is not None and load.rt_slack_s == 0.5


def test_what_waits_costs_what_such_requests_did() -> None:
    meter = LoadMeter(PRICES, 0.4)
    rt = ClassStats(prompt_tokens=1000, output_tokens=100, finished=4, waiting=6)
    be = ClassStats(prompt_tokens=8000, output_tokens=200, finished=2)
    meter.read(stats(rt, be), (), 1, 0, 0.0)
    load = meter.read(stats(rt, be), [(1.0, 60.0), (0.5, None)], 1, 0, 1.0)
    assert load is not None
    assert load.rt_waiting_s == pytest.approx(6 * (1.0 + 1.0) / 4)
    assert list(load.be_due) == [(pytest.approx(5.0), 60.0), (pytest.approx(2.5), None)]


def test_what_runs_is_not_taken_for_what_has_ended() -> None:
    """The usual case: of those that run, some have just begun and some are nearly done."""
    meter = LoadMeter(PRICES, 0.4)
    be = ClassStats(prompt_tokens=64 * 100, output_tokens=34 * 10, running=60, finished=4)
    meter.read(stats(ClassStats(), be), (), 1, 0, 0.0)
    load = meter.read(stats(ClassStats(), be), [(1.0, 9.0)], 1, 0, 1.0)
    assert load is not None and list(load.be_due) == [(pytest.approx((6.4 + 3.4) / 34), 9.0)]


def test_what_is_yet_to_come_counts_once_it_is_known_what_it_takes() -> None:
    meter = LoadMeter(PRICES, 0.4)
    found = []
    for finished in (0, 3, 4):
        be = ClassStats(prompt_tokens=1000 * finished, finished=finished)
        load = meter.read(stats(ClassStats(), be), (), 1, 0, float(finished), [(500, 60.0)])
        found.append([] if load is None else list(load.be_due))
    assert found == [[], [], [(pytest.approx(500 * 1.0), 60.0)]]
