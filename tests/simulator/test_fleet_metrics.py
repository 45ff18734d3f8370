"""Reports of runs on several replicas, worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from bros.core.request import FinishReason, ServiceClass, Slo
from bros.simulator.fleet import FleetRecord, FleetResult, fleet_report
from support.fleets import request

SLO = Slo(ttft_s=1.0, tpot_s=0.5)


def record(arrival_s: float, first_s: float, last_s: float, **changes: Any) -> FleetRecord:
    service_class = changes.pop("service_class", ServiceClass.RT)
    asked = request(arrival_s, own=100, output=3, service_class=service_class)
    own = {"replica": 0, "reason": "explore", "tokens": 3, "finish": FinishReason.LENGTH, **changes}
    return FleetRecord(asked, arrival_s, 100, first_s=first_s, last_s=last_s, **own)


def result(*records: FleetRecord, busy_s: tuple[float, ...] = (3.0, 1.0)) -> FleetResult:
    return FleetResult(
        records=records, end_s=10.0, busy_s=busy_s, steps=[5] * len(busy_s), preemptions=2
    )


def test_times_count_from_the_arrival() -> None:
    report = fleet_report(
        result(
            record(1.0, 1.5, 2.5), record(2.0, 4.0, 7.0, matched=50, cached=80, reason="exploit")
        ),
        SLO,
    )
    assert (report.requests, report.finished, report.steps, report.preemptions) == (2, 2, 10, 2)
    assert report.latency_s.mean == pytest.approx(3.25) and report.latency_s.p99 == pytest.approx(
        4.965
    )
    assert report.ttft_s.p50 == 1.25 and report.ttft_s.p99 == pytest.approx(1.985)
    assert report.tpot_s.p50 == 1.0 and report.tpot_s.p99 == pytest.approx(1.49)
    assert (report.hits, report.believed) == (0.4, 0.25)
    assert report.requests_per_s == 0.2
    assert report.busy == pytest.approx(0.2) and report.balance == 1.5
    assert report.reasons == {"exploit": 1, "explore": 1}


def test_objectives_are_those_of_real_time_requests() -> None:
    late_pace, late_first = record(0.0, 0.5, 1.6), record(0.0, 1.5, 1.6)
    refused = record(0.0, 0.0, 0.0, refused=True, finish=None, tokens=0)
    best_effort = record(0.0, 9.0, 10.0, service_class=ServiceClass.BE)
    report = fleet_report(
        result(record(0.0, 1.0, 2.0), late_pace, late_first, refused, best_effort), SLO
    )
    met = report.by_class[ServiceClass.RT].both_met
    assert met is not None and (met.met, met.decided) == (1, 4)
    assert report.by_class[ServiceClass.BE].both_met is None
    assert report.by_class[ServiceClass.BE].latency_s.mean == 10.0
    assert (report.requests, report.finished) == (5, 4)


def test_nothing_at_all_has_no_times() -> None:
    report = fleet_report(result(busy_s=(0.0,)), SLO)
    assert report.latency_s.mean is None and report.hits == 0.0 and report.balance == 1.0


def test_the_digest_depends_on_times_and_places() -> None:
    digests = {
        result(record(0.0, 1.0, 2.0)).digest(),
        result(record(0.0, 1.0, 2.5)).digest(),
        result(record(0.0, 1.0, 2.0, replica=1)).digest(),
        result(record(0.0, 1.0, 2.0, cached=16)).digest(),
    }
    assert len(digests) == 4
