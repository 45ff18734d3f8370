"""What a run on several replicas was like, in numbers that can be compared.

latency    arrival to last token         tpot    (last - first token) / (tokens - 1)
ttft       arrival to first token        balance    time that the busiest replica's steps took
                                                    / mean of all replicas
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bros.core.request import ServiceClass, Slo
from bros.simulator.fleet_simulation import FleetRecord, FleetResult
from bros.simulator.metrics import Share, Summary

_TOLERANCE_S = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetClassReport:
    """One service class. both_met: requests whose first token and pace met the objectives; None
    for a class that has none."""

    requests: int
    latency_s: Summary
    ttft_s: Summary
    tpot_s: Summary
    both_met: Share | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetReport:
    """One run; all figures are of requests that got all their tokens.

    hits: share of prompt tokens that were cached when their request began; believed: as many
    as the router thought when it decided. requests_per_s: from the start to the last end.
    busy: share of the time in which steps ran, mean of all replicas. reasons: of decisions.
    """

    requests: int
    finished: int
    end_s: float
    requests_per_s: float
    latency_s: Summary
    ttft_s: Summary
    tpot_s: Summary
    hits: float
    believed: float
    busy: float
    balance: float
    steps: int
    preemptions: int
    reasons: Mapping[str, int]
    by_class: Mapping[ServiceClass, FleetClassReport]
    digest: str


def fleet_report(result: FleetResult, slo: Slo) -> FleetReport:
    """slo: what real-time requests are held to."""
    done = [record for record in result.records if record.finished]
    prompt_tokens = sum(record.prompt_tokens for record in done) or 1
    mean_busy_s = math.fsum(result.busy_s) / len(result.busy_s)
    return FleetReport(
        requests=len(result.records),
        finished=len(done),
        end_s=result.end_s,
        requests_per_s=len(done) / result.end_s if result.end_s else 0.0,
        latency_s=Summary.of([_latency_s(record) for record in done]),
        ttft_s=Summary.of([_ttft_s(record) for record in done]),
        tpot_s=Summary.of([s for s in map(_tpot_s, done) if s is not None]),
        hits=sum(record.cached for record in done) / prompt_tokens,
        believed=sum(record.matched for record in done) / prompt_tokens,
        busy=mean_busy_s / result.end_s if result.end_s else 0.0,
        balance=max(result.busy_s) / mean_busy_s if mean_busy_s else 1.0,
        steps=sum(result.steps),
        preemptions=result.preemptions,
        reasons=dict(sorted(Counter(record.reason for record in result.records).items())),
        by_class={
            service_class: _class_report(
                [r for r in result.records if r.request.service_class is service_class],
                slo if service_class is ServiceClass.RT else None,
            )
            for service_class in ServiceClass
        },
        digest=result.digest(),
    )


def _class_report(records: Sequence[FleetRecord], slo: Slo | None) -> FleetClassReport:
    done = [record for record in records if record.finished]
    return FleetClassReport(
        requests=len(records),
        latency_s=Summary.of([_latency_s(record) for record in done]),
        ttft_s=Summary.of([_ttft_s(record) for record in done]),
        tpot_s=Summary.of([s for s in map(_tpot_s, done) if s is not None]),
        both_met=None if slo is None else Share.of([_met(record, slo) for record in records]),
    )


def _met(record: FleetRecord, slo: Slo) -> bool:
    if not record.finished:
        return False
    tpot_s = _tpot_s(record)
    return _within(_ttft_s(record), slo.ttft_s) and (tpot_s is None or _within(tpot_s, slo.tpot_s))


def _within(seconds: float, limit_s: float | None) -> bool:
    return limit_s is None or seconds <= limit_s + _TOLERANCE_S


def _latency_s(record: FleetRecord) -> float:
    assert record.last_s is not None, "it has finished"
    return record.last_s - record.arrival_s


def _ttft_s(record: FleetRecord) -> float:
    assert record.first_s is not None, "it has finished"
    return record.first_s - record.arrival_s


def _tpot_s(record: FleetRecord) -> float | None:
    if record.tokens < 2:
        return None
    assert record.last_s is not None and record.first_s is not None, "it has tokens"
    return (record.last_s - record.first_s) / (record.tokens - 1)
