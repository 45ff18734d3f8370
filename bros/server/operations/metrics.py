"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bros.batch.objects import BatchStatus
from bros.batch.pacing import RowCounts
from bros.core.clock import Clock
from bros.core.interfaces import Buckets, ClassStats, EngineStats
from bros.core.request import FinishReason, ServiceClass
from bros.router.balance import PlanReport
from bros.router.client import RouterClient
from bros.router.replica_set import RUNNING, ReplicaState, ReplicaStatus
from bros.semantic.schema import SessionFigures
from bros.text.generation import TextDelta

# ---- Engine statistics as Prometheus metrics. Help texts say what an operator does with them.


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
            "Iterations aborted for a real-time request that arrived while they ran",
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
            "Cached blocks evicted for requests of this class; if it rises quickly while "
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
            "Best-effort requests that were promoted to this class, because a user began to wait "
            "for a value that depends on them",
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
            "Idle blocks of the prefix cache; they count as free",
            stats.kv_blocks_cached,
        )
        yield GaugeMetricFamily(
            "bros_kv_blocks_parked",
            "Those of prefixes that are kept for calls to come, in use or not; they go last",
            stats.kv_blocks_parked,
        )
        yield GaugeMetricFamily(
            "bros_host_kv_blocks",
            "Blocks for copies of KV on the host; 0 if preempted KV is computed again",
            stats.host_kv_blocks_total,
        )
        yield GaugeMetricFamily(
            "bros_host_kv_blocks_used",
            "Those with copies in them; old copies are evicted, so a full pool is not short yet",
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


# ---- Batch jobs as Prometheus metrics.


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """by_status: batches in the store; None if it does not answer.
    rows: of this process.
    in_flight: with the engine now.
    """

    by_status: Mapping[str, int] | None
    rows: RowCounts
    in_flight: int


class BatchCollector(Collector):
    """Shows the figures it was given last; nothing without any."""

    figures: BatchFigures | None = None

    def collect(self) -> Iterator[Metric]:
        figures = self.figures
        if figures is None:
            return
        by_status = figures.by_status
        yield GaugeMetricFamily(
            "bros_batch_store_up",
            "Whether the store of batches answers; bros_batches is missing if not",
            by_status is not None,
        )
        if by_status is not None:
            batches = GaugeMetricFamily("bros_batches", "Batches in the store", labels=("status",))
            for status in BatchStatus:
                batches.add_metric((status.value,), by_status.get(status.value, 0))
            yield batches
        rows = CounterMetricFamily(
            "bros_batch_rows",
            "Rows of batches that this server has answered; interrupted: attempts that were "
            "repeated because the engine ended",
            labels=("outcome",),
        )
        for outcome in ("completed", "failed", "interrupted"):
            rows.add_metric((outcome,), getattr(figures.rows, outcome))
        yield rows
        yield GaugeMetricFamily(
            "bros_batch_rows_in_flight", "Rows that are with the engine now", figures.in_flight
        )


# ---- The replicas behind a router as Prometheus metrics. Other engine metrics are sums over them.


_REPLICA = "replica"

_GAUGES: Mapping[str, tuple[str, Callable[[ReplicaStatus], float]]] = MappingProxyType(
    {
        "up": ("1 if its engine answers", lambda status: status.state in RUNNING),
        "draining": (
            "1 if it gets nothing new, see bros admin drain",
            lambda status: status.state in (ReplicaState.DRAINING, ReplicaState.DRAINED),
        ),
        "open": ("Requests that are there", lambda status: status.open),
        "waiting": ("Those in its queue, as it last said", lambda status: status.waiting),
        "kv_blocks_used": ("KV blocks in use, as it last said", lambda status: status.used_blocks),
        "kv_blocks_cached": (
            "Idle blocks of its prefix cache, as it last reported",
            lambda status: status.cached_blocks,
        ),
    }
)
_COUNTERS: Mapping[str, tuple[str, Callable[[ReplicaStatus], float]]] = MappingProxyType(
    {
        "prompt_tokens": (
            "Prompt tokens of requests that began there",
            lambda status: status.prompt_tokens,
        ),
        "cached_tokens": (
            "Those that were cached; by bros_replica_prompt_tokens: hit rate. If it is lower than "
            "with one replica, compare --router e2 and rr",
            lambda status: status.cached_tokens,
        ),
        "lost": ("How often its engine was lost", lambda status: status.lost),
    }
)


class ReplicaCollector(Collector):
    """Nothing without a router."""

    def __init__(self) -> None:
        self.router: RouterClient | None = None

    def collect(self) -> Iterator[Metric]:
        router = self.router
        if router is None:
            return
        replicas = router.replicas()
        for name, (text, value) in _GAUGES.items():
            gauge = GaugeMetricFamily(f"bros_replica_{name}", text, labels=(_REPLICA,))
            for status in replicas:
                gauge.add_metric((str(status.number),), value(status))
            yield gauge
        for name, (text, value) in _COUNTERS.items():
            counter = CounterMetricFamily(f"bros_replica_{name}", text, labels=(_REPLICA,))
            for status in replicas:
                counter.add_metric((str(status.number),), value(status))
            yield counter
        yield _routed(replicas)
        yield CounterMetricFamily(
            "bros_router_requests_continued",
            "Requests that went on elsewhere because their replica was lost",
            router.continued,
        )
        yield CounterMetricFamily(
            "bros_router_requests_moved",
            "Requests that went on elsewhere because theirs was drained or had a longer queue",
            router.moved,
        )
        if (plan := router.plan_report) is not None:
            yield from _planned(plan)


def _planned(plan: PlanReport) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "bros_router_plan_prefill_seconds",
        "What prompts took to compute whose prefixes were planned",
        plan.prefill_s,
    )
    yield CounterMetricFamily(
        "bros_router_plan_planned_seconds",
        "What they would have taken by the plan: if that is much less, use --router-plan on",
        plan.planned_s,
    )


def _routed(replicas: Sequence[ReplicaStatus]) -> Metric:
    counter = CounterMetricFamily(
        "bros_router_requests",
        "Requests sent to a replica, by why: exploit (their prefix is cached there), explore (it "
        "costs least there), ...; docs/replicas.md has all reasons",
        labels=(_REPLICA, "reason"),
    )
    for status in replicas:
        for reason, count in status.routed.items():
            counter.add_metric((str(status.number), reason), count)
    return counter


# ---- Sessions as Prometheus metrics.


class SessionCollector(Collector):
    """Shows the figures it was given last; nothing without any."""

    figures: SessionFigures | None = None

    def collect(self) -> Iterator[Metric]:
        figures = self.figures
        if figures is None:
            return
        yield GaugeMetricFamily("bros_sessions", "Open sessions", figures.sessions)
        calls = CounterMetricFamily(
            "bros_session_calls",
            "Requests of sessions that have ended, by how, and what they were served as",
            labels=("state", "class"),
        )
        for (state, service_class), count in sorted(figures.calls.items()):
            calls.add_metric((state, service_class), count)
        yield calls
        yield CounterMetricFamily(
            "bros_session_prefills",
            "Beginnings of prompts that were computed while their other inputs were being made",
            figures.prefills,
        )


_TTFT_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0),
)
_TPOT_BUCKETS_S = (
    *(0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2),
    *(0.25, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0, 40.0),
)
_E2E_BUCKETS_S = (
    *(0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 20.0),
    *(30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 7200.0),
)


class ServerMetrics:
    """Counts what passes through the server; engine figures are added when it is rendered."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._batches = BatchCollector()
        self._sessions = SessionCollector()
        self._replicas = ReplicaCollector()
        for collector in (self._engine, self._batches, self._sessions, self._replicas):
            self._registry.register(collector)
        self._http = Counter(
            "bros_http_requests",
            "HTTP requests answered",
            ("path", "status"),
            registry=self._registry,
        )
        self._finished = Counter(
            "bros_requests",
            "Generated choices by how they ended",
            ("class", "finish_reason"),
            registry=self._registry,
        )
        gaps = _GapCollector()
        self._registry.register(gaps)
        self._histograms = {
            service_class: _ClassHistograms(bound, gaps.by_class[service_class])
            for service_class, bound in self._make_histograms().items()
        }

    def http_request(self, path: str, status: int) -> None:
        """One HTTP request was answered. `path` must come from a bounded set."""
        self._http.labels(path, str(status)).inc()

    def observer(self, arrival_s: float, classes: Sequence[ServiceClass]) -> RequestObserver:
        """For one request that arrived at `arrival_s` of the clock.

        classes: what each choice is served as, by index.
        """
        return RequestObserver(self, arrival_s, classes)

    def render(
        self,
        stats: EngineStats | None,
        batches: BatchFigures | None = None,
        sessions: SessionFigures | None = None,
        router: RouterClient | None = None,
    ) -> bytes:
        """Everything in Prometheus' text format. None: the engine gives no figures, there are no
        batches or no sessions here, or there is one engine."""
        self._engine.stats = stats
        self._batches.figures = batches
        self._sessions.figures = sessions
        self._replicas.router = router
        return generate_latest(self._registry)

    def _make_histograms(self) -> dict[ServiceClass, list[Histogram]]:
        kinds = (
            ("bros_time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS_S),
            (
                "bros_time_per_output_token_seconds",
                "Mean time between the tokens of one choice",
                _TPOT_BUCKETS_S,
            ),
            ("bros_request_duration_seconds", "Arrival to last token", _E2E_BUCKETS_S),
        )
        made = [
            Histogram(name, text, ("class",), registry=self._registry, buckets=buckets)
            for name, text, buckets in kinds
        ]
        return {
            service_class: [histogram.labels(service_class.value) for histogram in made]
            for service_class in ServiceClass
        }

    # For RequestObserver.

    def now(self) -> float:
        return self._clock.now()

    def of(self, service_class: ServiceClass) -> _ClassHistograms:
        return self._histograms[service_class]

    def count_finish(self, service_class: ServiceClass, reason: FinishReason) -> None:
        self._finished.labels(service_class.value, reason.value).inc()


class _Gaps:
    """Gaps between tokens, by bucket. Every token comes here: prometheus_client's own Histogram
    takes a lock twice and looks at bucket after bucket, which is a tenth of a stream's cost."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_TPOT_BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, gap_s: float) -> None:
        self.counts[bisect.bisect_left(_TPOT_BUCKETS_S, gap_s)] += 1
        self.total_s += gap_s


class _GapCollector(Collector):
    """bros_inter_token_seconds."""

    def __init__(self) -> None:
        self.by_class = {service_class: _Gaps() for service_class in ServiceClass}

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "bros_inter_token_seconds", "Each gap between two tokens", labels=(_CLASS,)
        )
        for service_class, gaps in self.by_class.items():
            buckets = Buckets(_TPOT_BUCKETS_S, tuple(gaps.counts), gaps.total_s)
            family.add_metric((service_class.value,), _cumulative(buckets), gaps.total_s)
        yield family


class _ClassHistograms:
    """The histograms of one class, looked up once."""

    __slots__ = ("duration", "gap", "tpot", "ttft")

    def __init__(self, histograms: Sequence[Histogram], gap: _Gaps) -> None:
        self.ttft, self.tpot, self.duration = histograms
        self.gap = gap


class RequestObserver:
    """Times the choices of one request. A choice is a request of its own to the engine."""

    def __init__(
        self, metrics: ServerMetrics, arrival_s: float, classes: Sequence[ServiceClass]
    ) -> None:
        self._metrics = metrics
        self._classes = classes
        self._histograms = [metrics.of(service_class) for service_class in classes]
        self._arrival_s = arrival_s
        self._open = set(range(len(classes)))
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def on_delta(self, delta: TextDelta) -> None:
        now = self._metrics.now()
        index = delta.index
        histograms = self._histograms[index]
        if delta.token_ids:
            last_s = self._last_s.get(index)
            if last_s is None:
                self._first_s[index] = now
                histograms.ttft.observe(now - self._arrival_s)
            else:
                histograms.gap.observe((now - last_s) / len(delta.token_ids))
            self._last_s[index] = now
        if delta.finish_reason is not None:
            self._finish(delta, delta.finish_reason, now)

    def on_error(self, message: str) -> None:
        """The engine died. Nothing is counted before `close`."""

    def close(self) -> None:
        """Nothing follows: choices without a finish reason were aborted."""
        for index in self._open:
            self._metrics.count_finish(self._classes[index], FinishReason.ABORT)
        self._open.clear()

    def _finish(self, delta: TextDelta, reason: FinishReason, now: float) -> None:
        self._open.discard(delta.index)
        service_class = self._classes[delta.index]
        histograms = self._metrics.of(service_class)
        self._metrics.count_finish(service_class, reason)
        histograms.duration.observe(now - self._arrival_s)
        if delta.num_output_tokens > 1:
            generating_s = now - self._first_s[delta.index]
            histograms.tpot.observe(generating_s / (delta.num_output_tokens - 1))
