"""Metrics of a run of one engine.

Whether a request met an objective is *decided* once its tokens are there, or once they are
certain to be late. A request that is open at the end counts as missed if it is overdue by then, and
otherwise not at all. Requests that the engine refused or dropped count as missed. No other request
is left out, except by a warm-up.

The warm-up is the time until the load is steady. Requests that arrived in it are not counted. Rates
and counts of engine events are those of the time after it, whenever requests arrived. Counts also
exclude the step that was running at its end.

    ttft    arrival to first token
    tpot    (last token - first token) / (tokens - 1), of requests with two tokens or more
    normalized latency    (last token - arrival) / tokens, of finished requests
"""

from __future__ import annotations

import bisect
import math
import operator
from dataclasses import dataclass

from bros.core.interfaces import ClassStats
from bros.core.request import ServiceClass, Slo
from bros.simulator.simulation import SimulatedRequest, SimulationResult
from bros.workload.attainment import Attainment, Summary, within


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassReport:
    """Metrics of one service class.

    requests = finished + unfinished + refused. All rates are per second after the warm-up.

    unfinished: open at the end.
    refused: refused on arrival, or dropped by the engine later.
    normalized_latency_s: mean of finished requests.
    ttft_s, tpot_s: overdue open requests count with the time so far, a lower bound.
    ttft_met, tpot_met, both_met: requests; a request with one token has only a TTFT.
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
    ttft_met: Attainment
    tpot_met: Attainment
    both_met: Attainment
    tokens_on_time: Attainment
    requests_per_s: float
    tokens_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Metrics of one run, after the warm-up.

    end_s: end of the run, counted from its start.
    busy: share of the time in which a step ran, aborted ones included.
    steps: completed steps.
    mean_step_s: of completed steps.
    abandoned_steps: steps that were aborted for a first token.
    abandoned_s: time of these steps.
    skipped: requests that were too long to be served.
    digest: of all records.
    """

    end_s: float
    busy: float
    idle_s: float
    steps: int
    mean_step_s: float | None
    abandoned_steps: int
    abandoned_s: float
    skipped: int
    digest: str
    by_class: dict[ServiceClass, ClassReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judgement:
    """Whether one request met its objectives; None where that is not decided."""

    ttft_s: float | None
    tpot_s: float | None
    ttft_met: bool | None
    tpot_met: bool | None
    both_met: bool | None
    tokens_met: int = 0
    tokens_decided: int = 0


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
    abandoned_s = result.stats.abandoned_s - before.stats.abandoned_s
    return Report(
        end_s=result.end_s,
        busy=busy_s / seconds if seconds else 0.0,
        idle_s=result.idle_s - before.idle_s,
        steps=steps,
        mean_step_s=(busy_s - abandoned_s) / steps if steps else None,
        abandoned_steps=result.stats.abandoned_steps - before.stats.abandoned_steps,
        abandoned_s=abandoned_s,
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
    judgements = [_judge(record, slo, end_s) for record in records]
    finished = [record for record in records if record.finished]
    latencies = [(r.token_times_s[-1] - r.arrival_s) / len(r.token_times_s) for r in finished]
    refused = sum(_never_finishes(record) for record in records)
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
    has_slo = slo.ttft_s is not None
    return ClassReport(
        requests=len(records),
        finished=len(finished),
        unfinished=len(records) - len(finished) - refused,
        refused=refused,
        relegated=stats.relegated - before.relegated,
        preemptions=stats.preemptions - before.preemptions,
        normalized_latency_s=math.fsum(latencies) / len(latencies) if latencies else None,
        ttft_s=Summary.of([j.ttft_s for j in judgements if j.ttft_s is not None]),
        tpot_s=Summary.of([j.tpot_s for j in judgements if j.tpot_s is not None]),
        ttft_met=Attainment.of([j.ttft_met for j in judgements if has_slo]),
        tpot_met=Attainment.of([j.tpot_met for j in judgements if has_slo]),
        both_met=Attainment.of([j.both_met for j in judgements if has_slo]),
        tokens_on_time=Attainment(
            sum(j.tokens_met for j in judgements), sum(j.tokens_decided for j in judgements)
        ),
        requests_per_s=done / seconds,
        tokens_per_s=(prompt_tokens + output_tokens) / seconds,
        output_tokens_per_s=output_tokens / seconds,
    )


def _judge(record: SimulatedRequest, slo: Slo, end_s: float) -> _Judgement:
    ttft_s, ttft_met = _first_token(record, slo.ttft_s, end_s)
    tpot_s, tpot_met = _later_tokens(record, slo.tpot_s, end_s)
    if slo.ttft_s is None or slo.tpot_s is None:
        return _Judgement(ttft_s=ttft_s, tpot_s=tpot_s, ttft_met=None, tpot_met=None, both_met=None)
    both_met: bool | None = None
    if ttft_met is False or tpot_met is False:
        both_met = False
    elif record.finished:
        both_met = True
    met, decided = _tokens_on_time(record, ttft_met, slo.tpot_s, end_s)
    return _Judgement(
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        ttft_met=ttft_met,
        tpot_met=tpot_met,
        both_met=both_met,
        tokens_met=met,
        tokens_decided=decided,
    )


def _first_token(
    record: SimulatedRequest, limit_s: float | None, end_s: float
) -> tuple[float | None, bool | None]:
    """TTFT, and whether it met its objective."""
    if record.token_times_s:
        seconds = record.token_times_s[0] - record.arrival_s
        return seconds, limit_s is not None and within(seconds, limit_s)
    if _never_finishes(record):
        return None, False
    waited = end_s - record.arrival_s
    if limit_s is not None and not within(waited, limit_s):
        return waited, False
    return None, None


def _later_tokens(
    record: SimulatedRequest, limit_s: float | None, end_s: float
) -> tuple[float | None, bool | None]:
    """TPOT, and whether it met its objective."""
    times = record.token_times_s
    if record.finished:
        if len(times) < 2:
            return None, None
        mean = (times[-1] - times[0]) / (len(times) - 1)
        return mean, limit_s is not None and within(mean, limit_s)
    if _never_finishes(record):
        return None, False
    if times and limit_s is not None:
        at_best = (end_s - times[0]) / len(times)  # if the next token came right now
        if not within(at_best, limit_s):
            return at_best, False
    return None, None


def _tokens_on_time(
    record: SimulatedRequest, ttft_met: bool | None, limit_s: float, end_s: float
) -> tuple[int, int]:
    """(met, decided) tokens, the overdue next one of an open request included."""
    times = record.token_times_s
    met, decided = int(ttft_met is True), int(ttft_met is not None)
    gaps = map(operator.sub, times[1:], times)
    met += sum(within(gap, limit_s) for gap in gaps)
    decided += max(0, len(times) - 1)
    overdue = times and not record.finished and not within(end_s - times[-1], limit_s)
    return met, decided + bool(overdue)


def _never_finishes(record: SimulatedRequest) -> bool:
    """Whether it was refused or dropped."""
    return record.refused or (record.finish is not None and not record.finished)
