"""Latency, attainment and throughput of a server, from the client's records.

Objectives, TTFT and TPOT are those of workload/attainment.py, from when a request was due; there
are times of chunks instead of tokens. So a request that the client has sent late has waited since
it was due, as a user's would have.

    itl                 each gap between two chunks
    e2e                 due to last chunk
    normalized latency  e2e / output tokens

Output tokens are taken from the server's `usage`; without it, chunks are counted. Counts and
latencies are of the requests that came due in the window; rates count every token and completion in
it, whenever the request came due.
"""

from __future__ import annotations

import bisect
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple

from bros.bench.client import Outcome, Record
from bros.bench.plan import BenchTenants
from bros.core.request import ServiceClass, Slo
from bros.workload.attainment import (
    Attainment,
    Judged,
    Summary,
    Timeline,
    TimelineOutcome,
    gaps_s,
    tokens_on_time,
)
from bros.workload.attainment import judge as judge_timeline

# ---- One request.


_TIMELINE_OUTCOMES = {
    Outcome.OPEN: TimelineOutcome.OPEN,
    Outcome.COMPLETED: TimelineOutcome.COMPLETED,
}


def judge(record: Record, slo: Slo | None, until_s: float) -> Judged:
    """slo: objectives where the request names none; None returns the latencies only.

    until_s: when the client stopped observing.
    """
    return judge_timeline(timeline(record), effective_slo(record, slo), until_s)


def timeline(record: Record) -> Timeline:
    is_open = record.outcome is Outcome.OPEN
    return Timeline(
        start_s=record.due_s,
        times_s=record.chunk_times_s,
        tokens=record.planned.output_tokens if is_open else output_tokens(record),
        outcome=_TIMELINE_OUTCOMES.get(record.outcome, TimelineOutcome.LOST),
        end_s=record.end_s,
    )


def finish_s(record: Record) -> float | None:
    """Arrival of the last chunk; without chunks the end, None while open."""
    return record.chunk_times_s[-1] if record.chunk_times_s else record.end_s


def output_tokens(record: Record) -> int:
    return len(record.chunk_times_s) if record.output_tokens is None else record.output_tokens


def prompt_tokens(record: Record) -> int:
    planned = record.planned.prompt_tokens
    return planned if record.prompt_tokens is None else record.prompt_tokens


def effective_slo(record: Record, slo: Slo | None) -> Slo:
    """The request's own objectives, else those of the run; empty if `slo` is None."""
    if slo is None:
        return Slo()
    own = record.planned.slo
    return Slo(
        ttft_s=slo.ttft_s if own.ttft_s is None else own.ttft_s,
        tpot_s=slo.tpot_s if own.tpot_s is None else own.tpot_s,
        gap_s=slo.gap_s if own.gap_s is None and own.tpot_s is None else own.gap_s,
    )


def e2e_s(record: Record) -> float:
    """Of a completed request."""
    end_s = finish_s(record)
    assert end_s is not None, f"{record.planned.name} was completed, but at no time"
    return end_s - record.due_s


# ---- The names under which `vllm bench serve` saves its figures, and its definitions of them.
#
# Latencies are of completed requests only, from when they were sent; failed and open requests are
# only counted. Our own figures beside them include those requests, and count from when one was due.


Fields = dict[str, float | None]

_COUNTS = ("completed", "failed", "open", "total_input_tokens", "total_output_tokens")
_RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
_STATISTICS = {
    "mean": "mean",
    "median": "p50",
    "std": "std",
    "p90": "p90",
    "p95": "p95",
    "p99": "p99",
}
_LATENCIES = ("ttft", "tpot", "itl", "e2el")
NAMES = (
    "duration",
    *_COUNTS,
    *_RATES,
    *(f"{statistic}_{latency}_ms" for latency in _LATENCIES for statistic in _STATISTICS),
)
"""In the order of the output."""


def vllm_fields(
    records: Sequence[Record],
    *,
    duration_s: float,
    requests_per_s: float,
    goodput_per_s: float | None,
    prompt_tokens_per_s: float,
    output_tokens_per_s: float,
) -> Fields:
    """A value for each of NAMES; None where there is nothing to measure."""
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    still_open = sum(record.outcome is Outcome.OPEN for record in records)
    fields: Fields = {
        "duration": duration_s,
        "completed": len(completed),
        "failed": len(records) - len(completed) - still_open,
        "open": still_open,
        "total_input_tokens": sum(map(prompt_tokens, completed)),
        "total_output_tokens": sum(map(output_tokens, completed)),
        "request_throughput": requests_per_s,
        "request_goodput": goodput_per_s,
        "output_throughput": output_tokens_per_s,
        "total_token_throughput": prompt_tokens_per_s + output_tokens_per_s,
    }
    judged = [(judge(record, None, math.inf), _lag_s(record)) for record in completed]
    summaries = (
        Summary.of([j.ttft_s - lag_s for j, lag_s in judged if j.ttft_s is not None]),
        Summary.of([j.tpot_s for j, _ in judged if j.tpot_s is not None]),
        Summary.of([gap for record in completed for gap in gaps_s(record.chunk_times_s)]),
        Summary.of([e2e_s(record) - _lag_s(record) for record in completed]),
    )
    for latency, summary in zip(_LATENCIES, summaries, strict=True):
        for name, statistic in _STATISTICS.items():
            seconds: float | None = getattr(summary, statistic)
            fields[f"{name}_{latency}_ms"] = None if seconds is None else 1e3 * seconds
    return fields


def _lag_s(record: Record) -> float:
    """How late a completed request was sent."""
    assert record.sent_s is not None
    return record.sent_s - record.due_s


ATTAINMENTS = ("ttft_met", "tpot_met", "both_met", "gap_met")
"""Fields of ClassMetrics: shares of requests that met their objectives."""

DUE, SENT = "due", "sent"
"""From when the latencies of a run count. Older versions counted from when a request was sent."""

_MAX_REASONS = 5
_OTHER_REASONS = "other reasons"
_RELEGATED_TIER = "flex"


@dataclass(frozen=True, slots=True)
class Window:
    """The measured time: [start_s, end_s] after the start of the run.

    seen_s: when the client stopped observing; None: at end_s. Chunks between end_s and seen_s
        count for latencies, not for rates.
    Raises ValueError unless 0 <= start_s < end_s <= seen_s.
    """

    start_s: float
    end_s: float
    seen_s: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s <= self.until_s:
            raise ValueError(f"not a window of time: {self}")

    @property
    def until_s(self) -> float:
        return self.end_s if self.seen_s is None else self.seen_s

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s

    def __contains__(self, at_s: float | None) -> bool:
        return at_s is not None and self.start_s <= at_s <= self.end_s


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassMetrics:
    """One service class of one run.

    All rates are per second of the window.

    requests: came due in the window; the sum of `outcomes`, which has every Outcome.
    outside: came due outside the window; rows of a batch that did not end in it.
    unsent: came due and were not sent because the client was too slow (they are OPEN).
    reasons: reason why requests were not completed -> count.
    tiers: service tier that the responses name -> count.
    relegated: real-time requests that the server served as best-effort, by its own account.
    overdue: open requests that are in ttft_s or tpot_s with their time so far, a lower bound.
    ttft_s, itl_s: of requests with text.
    gap_s: longest time between two chunks of each request.
    without_text: completed requests without any text.
    e2e_s, normalized_latency_s: of completed requests.
    tokens_on_time: chunks within tpot of the one before, the first within ttft; the next chunk of
        a lost request counts as missed.
    goodput_per_s: completed requests that met their objectives; None without objectives.
    prompt_tokens, output_tokens: of completed requests.
    cached_tokens: of completed requests; None if the server does not report them.
    """

    requests: int
    outside: int
    outcomes: dict[Outcome, int]
    unsent: int
    reasons: dict[str, int]
    tiers: dict[str, int]
    relegated: int
    overdue: int
    ttft_s: Summary
    tpot_s: Summary
    itl_s: Summary
    normalized_latency_s: Summary
    e2e_s: Summary
    ttft_met: Attainment
    tpot_met: Attainment
    both_met: Attainment
    tokens_on_time: Attainment
    goodput_per_s: float | None
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    vllm: dict[str, float | None]
    gap_s: Summary = Summary(0)  # older results do not have it
    gap_met: Attainment = Attainment(0, 0)
    without_text: int = 0

    @property
    def completed(self) -> int:
        return self.outcomes[Outcome.COMPLETED]

    @property
    def errors(self) -> int:
        """Requests that were refused, failed or cut short."""
        return self.requests - self.completed - self.outcomes[Outcome.OPEN]

    @property
    def tokens_per_s(self) -> float:
        return self.prompt_tokens_per_s + self.output_tokens_per_s

    @property
    def took_part(self) -> bool:
        """Whether there was load of this class. Slow requests may all have come due before the
        window, and still have got tokens in it, or none."""
        return bool(self.requests or self.outside) or self.tokens_per_s > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMetrics:
    """One run.

    vllm: both classes together, under the names of `vllm bench serve`.
    times_from: DUE or SENT, from when latencies of requests count.
    """

    window: Window
    by_class: dict[ServiceClass, ClassMetrics]
    vllm: dict[str, float | None]
    times_from: str = SENT  # older results do not say it


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantMetrics:
    """What one tenant got in one run.

    share: its part of the load.
    requests: real-time ones that came due in the window.
    ttft_s, both_met: of its real-time requests.
    rt_tokens_per_s, be_tokens_per_s: prompt and output tokens by class.
    """

    name: str
    share: float
    requests: int
    ttft_s: Summary
    both_met: Attainment
    rt_tokens_per_s: float
    be_tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RtTax:
    """The cost of best-effort load to real-time requests: mixed minus alone; None without a value.

    both_met: difference of the shares, negative if fewer met their objectives.
    *_s: differences in seconds.
    """

    both_met: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    normalized_latency_s: float | None


def measure(records: Sequence[Record], slo: Slo, window: Window) -> RunMetrics:
    """slo: for real-time requests without their own. Best-effort requests have no objectives."""
    by_class = {}
    for service_class in ServiceClass:
        part = [r for r in records if r.planned.service_class is service_class]
        objectives = slo if service_class is ServiceClass.RT else None
        by_class[service_class] = _class_metrics(part, objectives, window)
    parts = by_class.values()
    goodputs = [part.goodput_per_s for part in parts if part.goodput_per_s is not None]
    return RunMetrics(
        window=window,
        by_class=by_class,
        vllm=vllm_fields(
            [r for r in records if r.due_s in window],
            duration_s=window.seconds,
            requests_per_s=sum(part.requests_per_s for part in parts),
            goodput_per_s=sum(goodputs) if goodputs else None,
            prompt_tokens_per_s=sum(part.prompt_tokens_per_s for part in parts),
            output_tokens_per_s=sum(part.output_tokens_per_s for part in parts),
        ),
        times_from=DUE,
    )


def measure_tenants(
    records: Sequence[Record], slo: Slo, window: Window, tenants: BenchTenants
) -> tuple[TenantMetrics, ...]:
    """slo: as for `measure`."""
    found = []
    for name, share in tenants.shares.items():
        own = [record for record in records if tenants.tenant_of(record.planned) == name]
        by_class = measure(own, slo, window).by_class
        rt, be = by_class[ServiceClass.RT], by_class[ServiceClass.BE]
        found.append(
            TenantMetrics(
                name=name,
                share=share / sum(tenants.shares.values()),
                requests=rt.requests,
                ttft_s=rt.ttft_s,
                both_met=rt.both_met,
                rt_tokens_per_s=rt.tokens_per_s,
                be_tokens_per_s=be.tokens_per_s,
            )
        )
    return tuple(found)


def tokens_per_s(records: Sequence[Record], window: Window) -> tuple[float, float]:
    """(prompt, output) tokens per second in the window.

    The tokens of a prompt count when its first chunk arrives.
    """
    prompt = sum(prompt_tokens(record) for record in records if _first_chunk_s(record) in window)
    output = math.fsum(_output_tokens_in(record, window) for record in records)
    return prompt / window.seconds, output / window.seconds


def rt_tax(mixed: ClassMetrics, alone: ClassMetrics) -> RtTax:
    """Real-time requests beside best-effort work, against real-time requests alone."""
    return RtTax(
        both_met=_difference(mixed.both_met.value, alone.both_met.value),
        ttft_p50_s=_difference(mixed.ttft_s.p50, alone.ttft_s.p50),
        ttft_p99_s=_difference(mixed.ttft_s.p99, alone.ttft_s.p99),
        tpot_p50_s=_difference(mixed.tpot_s.p50, alone.tpot_s.p50),
        tpot_p99_s=_difference(mixed.tpot_s.p99, alone.tpot_s.p99),
        normalized_latency_s=_difference(
            mixed.normalized_latency_s.mean, alone.normalized_latency_s.mean
        ),
    )


def be_efficiency(mixed: ClassMetrics, other: ClassMetrics) -> float | None:
    """Best-effort throughput, prompt and output tokens, relative to that of another run."""
    return mixed.tokens_per_s / other.tokens_per_s if other.tokens_per_s else None


def _class_metrics(everything: Sequence[Record], slo: Slo | None, window: Window) -> ClassMetrics:
    records = [record for record in everything if record.due_s in window]
    judged = [judge(record, slo, window.until_s) for record in records]
    completed = [record for record in records if record.outcome is Outcome.COMPLETED]
    latencies = [(e2e_s(record), output_tokens(record)) for record in completed]
    outcomes = Counter(record.outcome for record in records)
    tiers = Counter(record.tier for record in records if record.tier is not None)
    on_time = [
        tokens_on_time(timeline(r), j.ttft_met, effective_slo(r, slo).tpot_s, window.until_s)
        for r, j in zip(records, judged, strict=True)
    ]
    rates = _rates(everything, slo, window)
    return ClassMetrics(
        requests=len(records),
        outside=len(everything) - len(records),
        outcomes={outcome: outcomes[outcome] for outcome in Outcome},
        unsent=sum(record.sent_s is None for record in records),
        reasons=_reasons(records),
        tiers=dict(sorted(tiers.items())),
        relegated=0 if slo is None else tiers[_RELEGATED_TIER],
        overdue=sum(j.overdue for j in judged),
        ttft_s=Summary.of([j.ttft_s for j in judged if j.ttft_s is not None]),
        tpot_s=Summary.of([j.tpot_s for j in judged if j.tpot_s is not None]),
        gap_s=Summary.of([j.gap_s for j in judged if j.gap_s is not None]),
        itl_s=Summary.of([gap for record in records for gap in gaps_s(record.chunk_times_s)]),
        normalized_latency_s=Summary.of([e2e / tokens for e2e, tokens in latencies if tokens]),
        e2e_s=Summary.of([e2e for e2e, _ in latencies]),
        ttft_met=Attainment.of([j.ttft_met for j in judged]),
        tpot_met=Attainment.of([j.tpot_met for j in judged]),
        both_met=Attainment.of([j.both_met for j in judged]),
        gap_met=Attainment.of([j.gap_met for j in judged]),
        without_text=sum(not record.chunk_times_s for record in completed),
        tokens_on_time=Attainment.total(on_time),
        **rates,
        prompt_tokens=sum(map(prompt_tokens, completed)),
        output_tokens=sum(map(output_tokens, completed)),
        cached_tokens=_cached_tokens(completed),
        vllm=vllm_fields(records, duration_s=window.seconds, **rates),
    )


def _rates(everything: Sequence[Record], slo: Slo | None, window: Window) -> dict[str, Any]:
    """The rates of ClassMetrics by name: float, and goodput_per_s None without objectives."""
    done = [
        record
        for record in everything
        if record.outcome is Outcome.COMPLETED and finish_s(record) in window
    ]
    has_slo = slo is not None and (
        slo != Slo() or any(effective_slo(r, slo) != Slo() for r in everything)
    )
    good = sum(judge(record, slo, window.until_s).both_met is True for record in done)
    prompt_per_s, output_per_s = tokens_per_s(everything, window)
    return {
        "requests_per_s": len(done) / window.seconds,
        "goodput_per_s": good / window.seconds if has_slo else None,
        "prompt_tokens_per_s": prompt_per_s,
        "output_tokens_per_s": output_per_s,
    }


def _first_chunk_s(record: Record) -> float | None:
    """When its prompt had been computed: the first chunk; without text, the end."""
    if record.chunk_times_s:
        return record.chunk_times_s[0]
    return record.end_s if record.outcome is Outcome.COMPLETED else None


def _output_tokens_in(record: Record, window: Window) -> float:
    """Output tokens that arrived in the window; all chunks count as equally long."""
    times = record.chunk_times_s
    if not times:
        return output_tokens(record) if _first_chunk_s(record) in window else 0
    chunks = bisect.bisect_right(times, window.end_s) - bisect.bisect_left(times, window.start_s)
    return chunks * output_tokens(record) / len(times)


def _reasons(records: Iterable[Record]) -> dict[str, int]:
    """Reason -> count, the most frequent first and the rest summed up."""
    lost = (r for r in records if r.outcome not in (Outcome.COMPLETED, Outcome.OPEN))
    counted = Counter(record.detail or _default_reason(record) for record in lost).most_common()
    reasons = dict(counted[:_MAX_REASONS])
    if rest := sum(count for _, count in counted[_MAX_REASONS:]):
        reasons[_OTHER_REASONS] = reasons.get(_OTHER_REASONS, 0) + rest
    return reasons


def _default_reason(record: Record) -> str:
    status = "" if record.status is None else f", HTTP {record.status}"
    return f"{record.outcome}{status}"


def _cached_tokens(completed: Iterable[Record]) -> int | None:
    known = [r.cached_tokens for r in completed if r.cached_tokens is not None]
    return sum(known) if known else None


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


# ---- The confidence interval of an attainment.


_Z = NormalDist().inv_cdf(0.975)


class Interval(NamedTuple):
    """Shares, 0 <= low <= high <= 1."""

    low: float
    high: float


def confidence_interval(share: Attainment) -> Interval | None:
    """Wilson's 95 % interval; None if nothing was decided.

    It holds every p with |met/n - p| <= z sqrt(p (1 - p) / n). It assumes that requests are late
    independently of each other; with bursts the true interval is wider.
    """
    if share.value is None:
        return None
    count, weight = share.decided, _Z * _Z / share.decided
    middle = share.value + weight / 2
    half = _Z * math.sqrt(share.value * (1 - share.value) / count + weight / (4 * count))
    low, high = (middle - half) / (1 + weight), (middle + half) / (1 + weight)
    # Exactly 0 and 1 where none or all were met, despite rounding.
    return Interval(low if share.met else 0.0, high if share.met < count else 1.0)
