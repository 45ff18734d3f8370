"""Metrics of a run of one engine.

Objectives, TTFT and TPOT are those of workload/attainment.py, from the arrival of a request on.
Requests that the engine refused or dropped count as missed. No request is left out, except by a
warm-up.

The warm-up is the time until the load is steady. Requests that arrived in it are not counted. Rates
and counts of engine events are those of the time after it, whenever requests arrived. Counts also
exclude the step that was running at its end.

    normalized latency    (last token - arrival) / tokens, of finished requests
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

from bros.core.interfaces import ClassStats
from bros.core.request import ServiceClass, Slo
from bros.simulator.simulation import SimulatedRequest, SimulationResult
from bros.workload.attainment import (
    Attainment,
    Summary,
    Timeline,
    TimelineOutcome,
    judge,
    tokens_on_time,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """Metrics of one service class.

    requests = finished + unfinished + refused. All rates are per second after the warm-up.

    unfinished: open at the end.
    refused: refused on arrival, or dropped by the engine later.
    normalized_latency_s: mean of finished requests.
    ttft_s, tpot_s: overdue open requests count with the time so far, a lower bound.
    gap_s: longest time between two tokens of each request.
    slowdown: of finished real-time requests, see RequestTrace.
    ttft_met, tpot_met, both_met, gap_met: requests; a request with one token has only a TTFT.
    tokens_on_time: tokens within tpot of the previous one (the first: within ttft of arrival).
    requests_per_s: finished requests.
    tokens_per_s: prompt tokens of requests that got a first token, and output tokens.
    """

    requests: int
    finished: int
    unfinished: int
    refused: int
    relegated: int
    preemptions: int
    normalized_latency_s: float | None
    ttft_s: Summary
    tpot_s: Summary
    gap_s: Summary
    slowdown: Summary
    ttft_met: Attainment
    tpot_met: Attainment
    both_met: Attainment
    gap_met: Attainment
    tokens_on_time: Attainment
    requests_per_s: float
    tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Metrics of one run, after the warm-up.

    end_s: end of the run, counted from its start.
    busy: share of the time in which a step ran, suspended ones included.
    steps: completed steps.
    mean_step_s: of completed steps.
    suspended_steps: steps that were suspended for a first token.
    suspended_s: time of these steps.
    lost_s: time whose work was lost, because what was kept of these steps was dropped.
    skipped: requests that were too long to be served.
    digest: of all records.
    """

    end_s: float
    busy: float
    idle_s: float
    steps: int
    mean_step_s: float | None
    suspended_steps: int
    suspended_s: float
    lost_s: float
    skipped: int
    digest: str
    by_class: dict[ServiceClass, ClassReport]


def report_of(result: SimulationResult, slo: Slo) -> Report:
    """slo: objectives of real-time requests; best-effort requests have none."""
    by_class = {
        service_class: _class_report(
            result, service_class, slo if service_class is ServiceClass.RT else Slo()
        )
        for service_class in ServiceClass
    }
    before = result.warm_up
    seconds = result.end_s - before.time_s
    busy_s = result.busy_s - before.busy_s
    steps = result.steps - before.steps
    suspended_s = result.stats.suspended_s - before.stats.suspended_s
    return Report(
        end_s=result.end_s,
        busy=busy_s / seconds if seconds else 0.0,
        idle_s=result.idle_s - before.idle_s,
        steps=steps,
        mean_step_s=(busy_s - suspended_s) / steps if steps else None,
        suspended_steps=result.stats.suspended_steps - before.stats.suspended_steps,
        suspended_s=suspended_s,
        lost_s=result.stats.lost_s - before.stats.lost_s,
        skipped=result.skipped,
        digest=result.digest(),
        by_class=by_class,
    )


def _class_report(result: SimulationResult, service_class: ServiceClass, slo: Slo) -> ClassReport:
    since_s, end_s = result.warm_up_s, result.end_s
    stats = result.stats.by_class.get(service_class, ClassStats())
    before = result.warm_up.stats.by_class.get(service_class, ClassStats())
    all_records = [r for r in result.records if r.service_class is service_class]
    records = [record for record in all_records if record.arrival_s >= since_s]
    timelines = [timeline_of(record) for record in records]
    judged = [judge(timeline, slo, end_s) for timeline in timelines]
    on_time = [
        tokens_on_time(timeline, j.ttft_met, slo.tpot_s, end_s)
        for timeline, j in zip(timelines, judged, strict=True)
    ]
    finished = [record for record in records if record.finished]
    latencies = [(r.token_times_s[-1] - r.arrival_s) / len(r.token_times_s) for r in finished]
    refused = sum(timeline.outcome is TimelineOutcome.LOST for timeline in timelines)
    done = sum(r.finished and r.token_times_s[-1] >= since_s for r in all_records)
    output_tokens = sum(
        len(r.token_times_s) - bisect.bisect_left(r.token_times_s, since_s) for r in all_records
    )
    prompt_tokens = sum(
        r.size.prompt_tokens
        for r in all_records
        if r.token_times_s and r.token_times_s[0] >= since_s
    )
    seconds = end_s - since_s
    return ClassReport(
        requests=len(records),
        finished=len(finished),
        unfinished=len(records) - len(finished) - refused,
        refused=refused,
        relegated=stats.relegated - before.relegated,
        preemptions=stats.preemptions - before.preemptions,
        normalized_latency_s=math.fsum(latencies) / len(latencies) if latencies else None,
        ttft_s=Summary.of([j.ttft_s for j in judged if j.ttft_s is not None]),
        tpot_s=Summary.of([j.tpot_s for j in judged if j.tpot_s is not None]),
        gap_s=Summary.of([j.gap_s for j in judged if j.gap_s is not None]),
        slowdown=Summary.of([r.slowdown for r in finished if r.slowdown is not None]),
        ttft_met=Attainment.of([j.ttft_met for j in judged]),
        tpot_met=Attainment.of([j.tpot_met for j in judged]),
        both_met=Attainment.of([j.both_met for j in judged]),
        gap_met=Attainment.of([j.gap_met for j in judged]),
        tokens_on_time=Attainment.total(on_time),
        requests_per_s=done / seconds,
        tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        output_tokens_per_s=output_tokens / seconds,
    )


def timeline_of(record: SimulatedRequest) -> Timeline:
    """What its client saw."""
    outcome = TimelineOutcome.OPEN
    if record.finished:
        outcome = TimelineOutcome.COMPLETED
    elif record.refused or record.finish is not None:
        outcome = TimelineOutcome.LOST
    return Timeline(
        start_s=record.arrival_s,
        times_s=record.token_times_s,
        tokens=(
            record.size.output_tokens
            if outcome is TimelineOutcome.OPEN
            else len(record.token_times_s)
        ),
        outcome=outcome,
    )
