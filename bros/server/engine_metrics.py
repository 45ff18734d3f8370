"""Engine statistics as Prometheus metrics. Help texts say what an operator does with them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bros.core.interfaces import Buckets, ClassStats, EngineStats
from bros.core.request import ServiceClass

_CLASS = "class"

_ENGINE_GAUGES: Mapping[str, str] = MappingProxyType(
    {
        "batch_size": "Requests allowed in the next iteration; --max-num-seqs is the most",
        "safety_factor": (
            "What predicted step times are multiplied by to be on the safe side; "
            "if it stays far above 1, measure the profile again on the idle machine"
        ),
    }
)
"""Names are those of EngineStats with bros_ before them, here and below."""

_ENGINE_COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "steps": ("engine_steps", "Iterations run"),
        "step_s": ("engine_step_seconds", "Time all iterations took; by bros_engine_steps: mean"),
        "predicted_s": (
            "engine_step_predicted_seconds",
            "What the cost model said iterations would take, 0 if the policy has none; compare "
            "with bros_engine_step_seconds: a lasting difference means that the profile is stale",
        ),
        "step_error_s": (
            "engine_step_error_seconds",
            "Sum of |predicted - actual|; by bros_engine_step_seconds: relative error of the "
            "cost model. The larger, the more objectives are missed or capacity is wasted",
        ),
        "be_tax_s": (
            "be_tax_seconds",
            "By how much best-effort work lengthened iterations of real-time requests; by "
            "bros_engine_step_seconds: what sharing costs. To lower it, lower --rt-wait",
        ),
        "abandoned_steps": (
            "engine_steps_abandoned",
            "Iterations given up for a real-time request that arrived while they ran",
        ),
        "abandoned_s": (
            "engine_steps_abandoned_seconds",
            "Time that went into them; by bros_engine_step_seconds: what that costs. To lower "
            "it, lower --rt-wait",
        ),
        "batch_resets": (
            "batch_resets",
            "How often the batch size fell back because real-time requests were getting late; "
            "if it rises steadily, the load is at the limit",
        ),
    }
)

_CLASS_GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "running": ("requests_running", "Requests being computed"),
        "waiting": ("requests_waiting", "Requests in the queue; at --max-queue, 429 follows"),
        "kv_blocks": (
            "kv_blocks_used",
            "KV blocks in use, without bros_kv_blocks_shared; one that both classes are in counts "
            "for both",
        ),
    }
)

_CLASS_COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "prompt_tokens": ("prompt_tokens", "Prompt tokens taken in"),
        "output_tokens": ("output_tokens", "Tokens generated"),
        "preemptions": (
            "preemptions",
            "How often requests gave up KV memory to others; if it rises quickly, raise "
            "--kv-memory",
        ),
        "kv_taken": ("kv_tokens_taken", "Tokens whose KV memory others were given"),
        "kv_copied": (
            "kv_tokens_copied",
            "Those that were copied to the host for it; the others had a copy already, or were "
            "lost (--host-kv-memory was full, or --on-pressure recompute) and are computed again",
        ),
        "kv_restored": ("kv_tokens_restored", "Tokens whose KV came back from the host"),
        "prefix_tokens": (
            "prefix_tokens",
            "Prompt tokens that were in the prefix cache; by bros_prompt_tokens: hit rate",
        ),
        "prefix_evicted": (
            "prefix_blocks_evicted",
            "Cached blocks given up for requests of this class; if it rises quickly while "
            "prompts have much in common, raise --kv-memory",
        ),
        "finished": (
            "requests_finished",
            "Requests the engine completed; what bros_slo_met is measured against",
        ),
        "tokens_on_time": (
            "tokens_on_time",
            "Tokens that were ready by their deadline; by bros_output_tokens: share on time",
        ),
        "deadlines": ("deadlines", "Finished requests that had a deadline for the whole answer"),
        "deadlines_met": (
            "deadlines_met",
            "Those whose last token was in time; by bros_deadlines: share in time. If it falls "
            "for class be, ask for later deadlines, raise --be-share or add capacity",
        ),
        "relegated": (
            "requests_relegated",
            "Requests served as this class that came in as the other one, because their "
            "objectives could not be met; needs --overload relegate. If it rises, add capacity",
        ),
        "promoted": (
            "requests_promoted",
            "Best-effort requests that were served as this class from some time on, because "
            "somebody came to wait for what follows from them",
        ),
        "rejected": (
            "requests_rejected",
            "Requests answered with 429 because of overload, on arrival or before their first "
            "token; if it rises, add capacity or relax the objectives",
        ),
    }
)

_OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {"ttft": "ttft_met", "tpot": "tpot_met", "both": "both_met"}
)


class EngineCollector(Collector):
    """Turns the latest EngineStats into metrics. Counters restart with the engine."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        up = stats is not None
        yield GaugeMetricFamily("bros_engine_up", "1 if the engine answers", value=up)
        if stats is None:
            return
        yield GaugeMetricFamily("bros_kv_blocks", "KV blocks there are", stats.kv_blocks_total)
        yield GaugeMetricFamily(
            "bros_kv_blocks_shared", "Those that several requests may have", stats.kv_blocks_shared
        )
        yield GaugeMetricFamily(
            "bros_kv_blocks_cached",
            "Those that nobody has, but that may be asked for again; they count as free",
            stats.kv_blocks_cached,
        )
        yield GaugeMetricFamily(
            "bros_kv_blocks_parked",
            "Those of prefixes that are kept for calls to come, in use or not; they go last",
            stats.kv_blocks_parked,
        )
        yield GaugeMetricFamily(
            "bros_host_kv_blocks",
            "Blocks for copies of KV on the host; 0 if what has to make way is computed again",
            stats.host_kv_blocks_total,
        )
        yield GaugeMetricFamily(
            "bros_host_kv_blocks_used",
            "Those with copies in them; old ones make way, so full is not yet short",
            stats.host_kv_blocks_used,
        )
        for field, text in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"bros_{field}", text, getattr(stats, field))
        for field, (name, text) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"bros_{name}", text, getattr(stats, field))
        yield from _by_class(stats)


def _by_class(stats: EngineStats) -> Iterator[Metric]:
    counts = {cls.value: stats.by_class.get(cls, ClassStats()) for cls in ServiceClass}
    for field, (name, text) in _CLASS_GAUGES.items():
        gauge = GaugeMetricFamily(f"bros_{name}", text, labels=(_CLASS,))
        for service_class, values in counts.items():
            gauge.add_metric((service_class,), getattr(values, field))
        yield gauge
    for field, (name, text) in _CLASS_COUNTERS.items():
        counter = CounterMetricFamily(f"bros_{name}", text, labels=(_CLASS,))
        for service_class, values in counts.items():
            counter.add_metric((service_class,), getattr(values, field))
        yield counter
    yield _kv_usage(counts, stats.kv_blocks_total)
    yield _objectives(counts)
    yield _slack(counts)


def _kv_usage(counts: Mapping[str, ClassStats], total: int) -> Metric:
    gauge = GaugeMetricFamily("bros_kv_usage_ratio", "Share of all KV blocks", labels=(_CLASS,))
    for service_class, values in counts.items():
        gauge.add_metric((service_class,), values.kv_blocks / max(total, 1))
    return gauge


def _objectives(counts: Mapping[str, ClassStats]) -> Metric:
    counter = CounterMetricFamily(
        "bros_slo_met",
        "Finished real-time requests that met an objective: time to first token (ttft), mean time "
        "between tokens (tpot), both. By bros_requests_finished of class rt: attainment, the "
        "figure to alert on; if it falls, lower --rt-wait, choose --overload relegate or reject, "
        "or add capacity",
        labels=(_CLASS, "objective"),
    )
    # Best-effort requests are held to no pace: each of them would count as one that met it.
    rt = ServiceClass.RT.value
    for objective, field in _OBJECTIVES.items():
        counter.add_metric((rt, objective), getattr(counts[rt], field))
    return counter


def _slack(counts: Mapping[str, ClassStats]) -> Metric:
    name = "bros_token_slack_seconds"
    histogram = HistogramMetricFamily(
        name,
        "Time left until a token's deadline when it was ready, negative if late. Much slack in "
        "class rt leaves room for best-effort work (raise --rt-wait); none is a warning",
        labels=(_CLASS,),
    )
    for service_class, values in counts.items():
        slack, labels = values.slack, {_CLASS: service_class}
        buckets = _cumulative(slack)
        histogram.add_metric((service_class,), buckets, sum_value=None)
        # The library leaves these two out where values may be negative, because the sum may
        # then fall. The mean over all time is still worth having, and clients expect a count.
        histogram.add_sample(f"{name}_count", labels, buckets[-1][1])
        histogram.add_sample(f"{name}_sum", labels, slack.total)
    return histogram


def _cumulative(buckets: Buckets) -> list[tuple[str, float]]:
    """(upper bound, values up to there), the last one for +Inf."""
    bounds = [*map(floatToGoString, buckets.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(buckets.counts), strict=True))
