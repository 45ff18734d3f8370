"""Prometheus metrics of one server, each server with its own registry."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from types import MappingProxyType

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
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
from bros.core.tenants import ALL_TENANTS, Resource, TenantFigure
from bros.router.balance import PlanReport
from bros.router.client import RouterClient
from bros.router.replica_set import RUNNING, ReplicaState, ReplicaStatus
from bros.semantic.schema import SessionFigures
from bros.text.generation import TextDelta

disable_created_metrics()  # type: ignore[no-untyped-call]  # a gauge beside each counter and histogram

# ---- Engine statistics. Help texts say what an operator does with a metric.


_CLASS = "class"

_Kind = type[GaugeMetricFamily] | type[CounterMetricFamily]


def _family(
    kind: _Kind,
    name: str,
    text: str,
    labels: Sequence[str],
    samples: Iterable[tuple[tuple[str, ...], float]],
) -> Metric:
    """The metric bros_<name>. samples: (values of the labels, value)."""
    family = kind(f"bros_{name}", text, labels=labels)
    for label_values, value in samples:
        family.add_metric(label_values, value)
    return family


_ENGINE_GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "kv_blocks_total": ("kv_blocks", "All KV blocks"),
        "kv_blocks_shared": (
            "kv_blocks_shared",
            "KV blocks in use that several requests may share",
        ),
        "kv_blocks_cached": (
            "kv_blocks_cached",
            "Idle blocks of the prefix cache; they count as free",
        ),
        "kv_blocks_pinned": (
            "kv_blocks_pinned",
            "Cached blocks pinned for later calls of a session, in use or idle; evicted last",
        ),
        "host_kv_blocks_total": (
            "host_kv_blocks",
            "Host blocks for copies of preempted KV; 0 if preempted KV is recomputed",
        ),
        "host_kv_blocks_used": (
            "host_kv_blocks_used",
            "Host blocks with copies. Old copies can be evicted, so a full pool is not a shortage",
        ),
        "batch_size": ("batch_size", "Most requests in the next step, up to --max-num-seqs"),
        "safety_factor": (
            "safety_factor",
            "Factor on predicted step times, as a safety margin. If it stays far above 1, measure "
            "the profile again on the idle machine",
        ),
        "rare_factor": (
            "rare_factor",
            "The margin before first tokens: 1 of 1,000 steps takes longer than predicted times "
            "this. Above 1.5 other processes probably use the device",
        ),
    }
)
"""Field of EngineStats or ClassStats -> (metric without bros_, help text); likewise below."""

_ENGINE_COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "steps": ("engine_steps", "Steps run"),
        "step_s": (
            "engine_step_seconds",
            "Total duration of all steps. Divided by bros_engine_steps_total: the mean",
        ),
        "predicted_s": (
            "engine_step_predicted_seconds",
            "Duration of steps as the cost model predicted it, 0 if the policy has no cost "
            "model. A lasting difference to bros_engine_step_seconds_total means a stale profile",
        ),
        "step_error_s": (
            "engine_step_error_seconds",
            "Sum of |predicted - actual|. Divided by bros_engine_step_seconds_total: relative "
            "error of the cost model. A large error means missed objectives or wasted capacity",
        ),
        "be_added_s": (
            "be_added_seconds",
            "Time that best-effort work added to steps with real-time requests. Divided by "
            "bros_engine_step_seconds_total: the cost of sharing. To reduce it, lower --rt-wait",
        ),
        "aborted_steps": (
            "engine_steps_aborted",
            "Steps aborted for a real-time request that arrived while they ran, so that their work "
            "was lost: only those that cannot be suspended",
        ),
        "aborted_s": (
            "engine_steps_aborted_seconds",
            "Time spent in aborted steps. Divided by bros_engine_step_seconds_total: their cost. "
            "To reduce it, lower --rt-wait",
        ),
        "suspended_steps": (
            "engine_steps_suspended",
            "Steps suspended between two layers for a real-time request that arrived while they "
            "ran, and continued later",
        ),
        "suspended_s": (
            "engine_steps_suspended_seconds",
            "Time spent in suspended steps; what they have computed is kept",
        ),
        "lost_s": (
            "engine_lost_seconds",
            "Time whose work was lost: of aborted steps, and of suspended ones whose requests were "
            "preempted. Divided by bros_engine_step_seconds_total: the cost of yielding",
        ),
        "forced_tokens": (
            "forced_tokens",
            "Output tokens that a grammar forced, so that they were not sampled",
        ),
        "grammars_compiled": (
            "grammars_compiled",
            "Grammars of outputs that were compiled. A steady rise means that clients send a new "
            "schema with each request",
        ),
        "grammar_compile_s": (
            "grammar_compile_seconds",
            "Time that compiling grammars took, beside the steps",
        ),
        "mask_wait_s": (
            "mask_wait_seconds",
            "Time that steps waited for what a grammar allows. Divided by "
            "bros_engine_step_seconds_total: the cost of grammars",
        ),
        "batch_resets": (
            "batch_resets",
            "How often the batch size was reduced because tokens would have been late. A steady "
            "rise means that the load is at the limit",
        ),
    }
)

_CLASS_GAUGES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "running": ("requests_running", "Running requests"),
        "waiting": (
            "requests_waiting",
            "Waiting requests. From --max-queue on, new requests get status 429",
        ),
        "kv_blocks": (
            "kv_blocks_used",
            "KV blocks in use, without bros_kv_blocks_shared. A block with tokens of both classes "
            "counts for both",
        ),
    }
)

_CLASS_COUNTERS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "prompt_tokens": ("prompt_tokens", "Prompt tokens of accepted requests"),
        "output_tokens": ("output_tokens", "Generated tokens"),
        "preemptions": (
            "preemptions",
            "Preemptions of requests of this class. If it rises quickly, raise --kv-memory",
        ),
        "kv_preempted": ("kv_tokens_preempted", "Tokens whose KV memory was preempted"),
        "kv_copied": (
            "kv_tokens_copied",
            "Preempted tokens that were copied to the host. The others had a copy already, or were "
            "lost (--host-kv-memory was full, or --on-pressure recompute) and are recomputed",
        ),
        "kv_restored": ("kv_tokens_restored", "Tokens whose KV was restored from the host"),
        "prefix_tokens": (
            "prefix_tokens",
            "Prompt tokens found in the prefix cache. Divided by bros_prompt_tokens: hit rate",
        ),
        "prefix_evicted": (
            "prefix_blocks_evicted",
            "Cached blocks evicted for requests of this class. If it rises quickly while prompts "
            "have long common prefixes, raise --kv-memory",
        ),
        "finished": (
            "requests_finished",
            "Requests that the engine completed; the denominator of bros_slo_met",
        ),
        "tokens_on_time": (
            "tokens_on_time",
            "Tokens ready by their deadline. Divided by bros_output_tokens: share on time",
        ),
        "deadlines": ("deadlines", "Finished requests that had a deadline for their last token"),
        "deadlines_met": (
            "deadlines_met",
            "Finished requests whose last token met its deadline. Divided by bros_deadlines: share "
            "on time. If it falls for class be, use later deadlines, raise --be-share or add "
            "capacity",
        ),
        "relegated": (
            "requests_relegated",
            "Requests of the other class served as this one because their objectives could not be "
            "met (--overload relegate). If it rises, add capacity",
        ),
        "promoted": (
            "requests_promoted",
            "Best-effort requests promoted to this class because a user waits for a value that "
            "depends on them",
        ),
        "rejected": (
            "requests_rejected",
            "Requests answered with 429 because of overload, on arrival or before their first "
            "token. If it rises, add capacity or relax the objectives",
        ),
    }
)

_OBJECTIVES: Mapping[str, str] = MappingProxyType(
    {"ttft": "ttft_met", "tpot": "tpot_met", "both": "both_met", "gap": "gap_met"}
)


class EngineCollector(Collector):
    """Metrics of the latest EngineStats. Counters restart at 0 with the engine."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None
        self.num_lost = self.num_hung = 0

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        up = stats is not None
        yield GaugeMetricFamily("bros_engine_up", "1 if the engine answers", value=up)
        yield _family(
            CounterMetricFamily,
            "engine_lost",
            "How often an engine ended without having been told to (exit), or made no progress for "
            "--hang-timeout (hang). Each time its open requests failed or continued on another "
            "replica; the log has the reason",
            ("cause",),
            [(("exit",), self.num_lost - self.num_hung), (("hang",), self.num_hung)],
        )
        if stats is None:
            return
        for field, (name, text) in _ENGINE_GAUGES.items():
            yield GaugeMetricFamily(f"bros_{name}", text, getattr(stats, field))
        for field, (name, text) in _ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"bros_{name}", text, getattr(stats, field))
        yield HistogramMetricFamily(
            "bros_engine_yield_seconds",
            "Time from the arrival of a real-time request until a step was suspended or aborted "
            "for it",
            buckets=_cumulative(stats.yielding),
            sum_value=stats.yielding.total,
        )
        yield from _by_class(stats)


def _by_class(stats: EngineStats) -> Iterator[Metric]:
    counts = {cls.value: stats.by_class.get(cls, ClassStats()) for cls in ServiceClass}

    def family(kind: _Kind, name: str, text: str, value: Callable[[ClassStats], float]) -> Metric:
        samples = [((service_class,), value(values)) for service_class, values in counts.items()]
        return _family(kind, name, text, (_CLASS,), samples)

    for field, (name, text) in _CLASS_GAUGES.items():
        yield family(GaugeMetricFamily, name, text, attrgetter(field))
    for field, (name, text) in _CLASS_COUNTERS.items():
        yield family(CounterMetricFamily, name, text, attrgetter(field))
    total = max(stats.kv_blocks_total, 1)
    text = "Share of all KV blocks"
    yield family(GaugeMetricFamily, "kv_usage_ratio", text, lambda values: values.kv_blocks / total)
    yield _objectives(counts)
    yield _slack(counts)
    yield _slowdown(counts[ServiceClass.RT.value].slowdown)


def _objectives(counts: Mapping[str, ClassStats]) -> Metric:
    # Best-effort requests have no such objectives; each would count as one that met them.
    rt = ServiceClass.RT.value
    return _family(
        CounterMetricFamily,
        "slo_met",
        "Finished real-time requests that met an objective: time to first token (ttft), mean time "
        "between tokens (tpot), or both. Divided by bros_requests_finished_total of class rt: "
        "attainment, the figure to alert on. If it falls, lower --rt-wait, use --overload relegate "
        "or reject, or add capacity",
        (_CLASS, "objective"),
        [((rt, name), getattr(counts[rt], field)) for name, field in _OBJECTIVES.items()],
    )


def _slack(counts: Mapping[str, ClassStats]) -> Metric:
    name = "bros_token_slack_seconds"
    histogram = HistogramMetricFamily(
        name,
        "Time left until a token's deadline when it was ready, negative if late. Much slack in "
        "class rt leaves room for best-effort work (raise --rt-wait); no slack is a warning",
        labels=(_CLASS,),
    )
    for service_class, values in counts.items():
        slack, labels = values.slack, {_CLASS: service_class}
        buckets = _cumulative(slack)
        histogram.add_metric((service_class,), buckets, sum_value=None)
        # prometheus_client omits count and sum if values can be negative, because the sum can then
        # fall. The mean over all time is still useful, and scrapers expect a count.
        histogram.add_sample(f"{name}_count", labels, buckets[-1][1])
        histogram.add_sample(f"{name}_sum", labels, slack.total)
    return histogram


def _slowdown(slowdown: Buckets) -> Metric:
    rt = ServiceClass.RT.value
    histogram = HistogramMetricFamily(
        "bros_stream_slowdown",
        "Of finished real-time streams: time from the first to the last token over what the steps "
        "would have taken without best-effort work, by the cost model. What users feel of "
        "best-effort work while all objectives are met. To reduce it, lower --rt-slowdown or "
        "--rt-wait, or give batches longer windows",
        labels=(_CLASS,),
    )
    histogram.add_metric((rt,), _cumulative(slowdown), sum_value=slowdown.total)
    return histogram


def _cumulative(buckets: Buckets) -> list[tuple[str, float]]:
    """(upper bound, number of values up to it), the last for +Inf."""
    bounds = [*map(floatToGoString, buckets.bounds), "+Inf"]
    return list(zip(bounds, itertools.accumulate(buckets.counts), strict=True))


# ---- Batch jobs.


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """Figures of batch jobs.

    by_status: batches in the store; None if the store does not answer.
    is_full: whether the disk of the store has no room for more.
    rows: rows that this process has run.
    in_flight: rows that the engine has now.
    """

    by_status: Mapping[str, int] | None
    is_full: bool
    rows: RowCounts
    in_flight: int


class BatchCollector(Collector):
    """Metrics of the latest figures; none without figures."""

    figures: BatchFigures | None = None

    def collect(self) -> Iterator[Metric]:
        figures = self.figures
        if figures is None:
            return
        by_status = figures.by_status
        yield GaugeMetricFamily(
            "bros_batch_store_up",
            "1 if the store of batches answers; if not, bros_batches is missing",
            by_status is not None,
        )
        yield GaugeMetricFamily(
            "bros_batch_store_full",
            "1 if the disk of the store has no room: files, batches and responses are refused, and "
            "results wait",
            figures.is_full,
        )
        if by_status is not None:
            samples = [((status.value,), by_status.get(status.value, 0)) for status in BatchStatus]
            yield _family(
                GaugeMetricFamily, "batches", "Batches in the store", ("status",), samples
            )
        outcomes = ("completed", "failed", "interrupted")
        yield _family(
            CounterMetricFamily,
            "batch_rows",
            "Rows of batches that this server has run, by outcome. interrupted counts attempts "
            "that ended because the engine died or failed",
            ("outcome",),
            [((outcome,), getattr(figures.rows, outcome)) for outcome in outcomes],
        )
        yield GaugeMetricFamily(
            "bros_batch_rows_in_flight", "Rows that the engine has now", figures.in_flight
        )


# ---- Replicas behind a router. The engine metrics above are then sums over all replicas.


_REPLICA = "replica"

_REPLICA_METRICS: Sequence[tuple[_Kind, str, str, Callable[[ReplicaStatus], float]]] = (
    (GaugeMetricFamily, "up", "1 if its engine answers", lambda status: status.state in RUNNING),
    (
        GaugeMetricFamily,
        "draining",
        "1 if the replica gets no new requests, see bros admin drain",
        lambda status: status.state in (ReplicaState.DRAINING, ReplicaState.DRAINED),
    ),
    (GaugeMetricFamily, "open", "Requests sent to it that have not ended", attrgetter("open")),
    (GaugeMetricFamily, "waiting", "Waiting requests in its last report", attrgetter("waiting")),
    (
        GaugeMetricFamily,
        "kv_blocks_used",
        "KV blocks in use in its last report",
        attrgetter("used_blocks"),
    ),
    (
        GaugeMetricFamily,
        "kv_blocks_cached",
        "Idle blocks of its prefix cache in its last report",
        attrgetter("cached_blocks"),
    ),
    (
        CounterMetricFamily,
        "prompt_tokens",
        "Prompt tokens of requests that started on it",
        attrgetter("prompt_tokens"),
    ),
    (
        CounterMetricFamily,
        "cached_tokens",
        "Prompt tokens found in its prefix cache. Divided by bros_replica_prompt_tokens: hit rate. "
        "If it is lower than with one replica, compare --router e2 and rr",
        attrgetter("cached_tokens"),
    ),
    (CounterMetricFamily, "lost", "How often the router lost its engine", attrgetter("lost")),
)


class ReplicaCollector(Collector):
    """Metrics of a router and its replicas; none without a router."""

    def __init__(self) -> None:
        self.router: RouterClient | None = None

    def collect(self) -> Iterator[Metric]:
        router = self.router
        if router is None:
            return
        replicas = router.replicas()
        for kind, name, text, value in _REPLICA_METRICS:
            samples = [((str(status.number),), value(status)) for status in replicas]
            yield _family(kind, f"replica_{name}", text, (_REPLICA,), samples)
        yield _routed(replicas)
        yield CounterMetricFamily(
            "bros_router_requests_continued",
            "Requests that continued on another replica because theirs was lost",
            router.continued,
        )
        yield CounterMetricFamily(
            "bros_router_requests_moved",
            "Requests that moved to another replica because of draining or rebalancing",
            router.moved,
        )
        if (plan := router.plan_report) is not None:
            yield from _planned(plan)


def _planned(plan: PlanReport) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "bros_router_plan_prefill_seconds",
        "Prefill time of requests whose prefixes were planned",
        plan.prefill_s,
    )
    yield CounterMetricFamily(
        "bros_router_plan_planned_seconds",
        "Prefill time that these requests would have taken by the plan. If it is much less, use "
        "--router-plan on",
        plan.planned_s,
    )


def _routed(replicas: Sequence[ReplicaStatus]) -> Metric:
    return _family(
        CounterMetricFamily,
        "router_requests",
        "Requests sent to a replica, by reason: exploit (it has their prefix cached), explore (the "
        "cost is lowest on it), ...; docs/replicas.md has all reasons",
        (_REPLICA, "reason"),
        [
            ((str(status.number), reason), count)
            for status in replicas
            for reason, count in status.routed.items()
        ],
    )


# ---- Sessions.


class SessionCollector(Collector):
    """Metrics of the latest figures; none without figures."""

    figures: SessionFigures | None = None

    def collect(self) -> Iterator[Metric]:
        figures = self.figures
        if figures is None:
            return
        yield GaugeMetricFamily("bros_sessions", "Open sessions", figures.sessions)
        yield _family(
            CounterMetricFamily,
            "session_calls",
            "Requests of sessions that have ended, by final state and the class they ran as",
            ("state", "class"),
            sorted(figures.calls.items()),
        )
        yield CounterMetricFamily(
            "bros_session_prefills",
            "Prefixes of prompts that were prefilled ahead, while other inputs were still missing",
            figures.prefills,
        )


# ---- Tenants.


_TENANT = "tenant"


class TenantCollector(Collector):
    """Metrics of the latest figures."""

    def __init__(self) -> None:
        self.figures: Sequence[TenantFigure] = ()
        self.server_figures: Sequence[TenantFigure] = ()
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        if self.stats is not None and self.figures:
            yield self._device_time(self.stats)
        yield from self._held()

    def _device_time(self, stats: EngineStats) -> Metric:
        """By tenant if the figures are, else of all tenants."""
        shown = {each.tenant for each in self.figures}
        seconds: dict[tuple[str, str], float] = {}
        for service_class, values in stats.by_class.items():
            for tenant, used_s in values.device_s.items():
                labels = ALL_TENANTS if ALL_TENANTS in shown else tenant, service_class.value
                seconds[labels] = seconds.get(labels, 0.0) + used_s
        return _family(
            CounterMetricFamily,
            "tenant_device_seconds",
            "Predicted time of the engine's steps, divided among the tenants in them. While "
            "several always have waiting requests of a class, it grows as their weights say",
            (_TENANT, _CLASS),
            sorted(seconds.items()),
        )

    def _held(self) -> Iterator[Metric]:
        labels = (_TENANT, "resource")
        if self.server_figures:
            yield _family(
                GaugeMetricFamily,
                "server_limit",
                "Most that is held for all tenants together, by resource: at this sum of "
                "bros_tenant_held, more gets status 429",
                ("resource",),
                [((each.resource,), each.limit) for each in self.server_figures if each.limit],
            )
            yield _family(
                CounterMetricFamily,
                "server_refusals",
                "Requests refused with 429 because all tenants together held as much as "
                "bros_server_limit. They count in bros_tenant_refusals, too",
                ("resource",),
                [((each.resource,), each.refused) for each in self.server_figures],
            )
        if not self.figures:
            return
        yield _family(
            GaugeMetricFamily,
            "tenant_held",
            "What is held for a tenant, by resource. At bros_tenant_limit, more gets status 429; "
            "old responses, traces and cached_grammars make room instead",
            labels,
            [((each.tenant, each.resource), each.used) for each in self.figures],
        )
        yield _family(
            GaugeMetricFamily,
            "tenant_limit",
            "Most that is held for a tenant; without a sample there is no limit",
            labels,
            [
                ((each.tenant, each.resource), each.limit)
                for each in self.figures
                if each.limit is not None
            ],
        )
        yield _family(
            CounterMetricFamily,
            "tenant_refusals",
            "Requests refused because of a limit of their tenant, with 429, or with 400 if one "
            "alone exceeds it, and batches that failed because of one. If it rises, raise the "
            "limit in the file of --api-keys, or talk to the tenant",
            labels,
            [((each.tenant, each.resource), each.refused) for each in self.figures],
        )


def sum_of_tenants(figures: Sequence[TenantFigure]) -> list[TenantFigure]:
    """One figure per resource, without a limit: of all tenants together."""
    return [
        TenantFigure(
            tenant=ALL_TENANTS,
            resource=resource,
            used=sum(each.used for each in figures if each.resource is resource),
            limit=None,
            refused=sum(each.refused for each in figures if each.resource is resource),
        )
        for resource in Resource
    ]


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
_LAG_BUCKETS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


# ---- Requests that this server has answered, and the page of all metrics.


class ServerMetrics:
    """Counts requests and times tokens; `render` adds the figures of the collectors above."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._registry = CollectorRegistry()
        self._engine = EngineCollector()
        self._batches = BatchCollector()
        self._sessions = SessionCollector()
        self._replicas = ReplicaCollector()
        self._tenants = TenantCollector()
        for collector in (
            self._engine, self._batches, self._sessions, self._replicas, self._tenants,
        ):  # fmt: skip
            self._registry.register(collector)
        self._http = Counter(
            "bros_http_requests",
            "HTTP requests answered",
            ("path", "status"),
            registry=self._registry,
        )
        self._connections = Gauge(
            "bros_http_connections",
            "Open connections. At --max-connections, new ones replace idle ones or are refused",
            registry=self._registry,
        )
        self._closed = Counter(
            "bros_http_connections_closed",
            "Connections that the server refused, or closed before their client did, by reason",
            ("reason",),
            registry=self._registry,
        )
        self._finished = Counter(
            "bros_requests",
            "Choices by class and finish reason",
            ("class", "finish_reason"),
            registry=self._registry,
        )
        self._loop_lag = Histogram(
            "bros_event_loop_lag_seconds",
            "How late the server's event loop was, measured 20 times a second. Every stream pauses "
            "for as long; the log says what ran when it was 0.05 s or more",
            registry=self._registry,
            buckets=_LAG_BUCKETS_S,
        )
        self._hung = Counter(
            "bros_workers_hung",
            "Processes that check grammars or apply transforms which gave no sign for 30 s, and "
            "were replaced. The log has the module; if it rises, find out what stops them",
            ("work",),
            registry=self._registry,
        )
        self._loop_tasks = Gauge(
            "bros_event_loop_tasks",
            "Tasks of the server's event loop. A steady rise without load is a leak",
            registry=self._registry,
        )
        gaps = _GapCollector()
        self._registry.register(gaps)
        self._histograms = {
            service_class: _ClassHistograms(bound, gaps.by_class[service_class])
            for service_class, bound in self._make_histograms().items()
        }

    def http_request(self, path: str, status: int) -> None:
        """Count an HTTP response. `path` is a label, so it must come from a bounded set."""
        self._http.labels(path, str(status)).inc()

    def connection_closed(self, reason: str) -> None:
        """Count a connection that the server has refused, or closed before its client did."""
        self._closed.labels(reason).inc()

    def count_connections(self, count: Callable[[], int]) -> None:
        """count: the number of open connections."""
        self._connections.set_function(count)

    def worker_hung(self, work: str) -> None:
        """Count a worker process that was replaced because it hung; on any thread."""
        self._hung.labels(work).inc()

    def loop_lag(self, lag_s: float) -> None:
        """Count a lag of the event loop."""
        self._loop_lag.observe(lag_s)

    def observer(self, arrival_s: float, classes: Sequence[ServiceClass]) -> RequestObserver:
        """An observer of one request.

        arrival_s: on the clock of the metrics.
        classes: service class of each choice, by index.
        """
        return RequestObserver(self, self._clock.now, arrival_s, classes)

    def render(
        self,
        stats: EngineStats | None,
        batches: BatchFigures | None = None,
        sessions: SessionFigures | None = None,
        router: RouterClient | None = None,
        loop_tasks: int = 0,
        engines_lost: int = 0,
        engines_hung: int = 0,
        tenants: Sequence[TenantFigure] = (),
        server_figures: Sequence[TenantFigure] = (),
    ) -> bytes:
        """All metrics in Prometheus' text format.

        stats: None if the engine does not answer.
        batches, sessions: None if the server has none.
        router: None with a single engine.
        loop_tasks: tasks of the event loop.
        engines_lost: how often an engine was lost.
        engines_hung: how often because it hung.
        tenants: what each tenant holds.
        server_figures: what all of them hold together, where this has a limit.
        """
        self._loop_tasks.set(loop_tasks)
        self._engine.stats = stats
        self._engine.num_lost, self._engine.num_hung = engines_lost, engines_hung
        self._batches.figures = batches
        self._sessions.figures = sessions
        self._replicas.router = router
        self._tenants.figures, self._tenants.server_figures = tenants, server_figures
        self._tenants.stats = stats
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

    def of(self, service_class: ServiceClass) -> _ClassHistograms:
        return self._histograms[service_class]

    def count_finish(self, service_class: ServiceClass, reason: FinishReason) -> None:
        self._finished.labels(service_class.value, reason.value).inc()


class _Gaps:
    """A histogram of gaps between tokens, updated for every token. prometheus_client's Histogram
    takes a lock twice and searches the buckets linearly: a tenth of a stream's CPU time."""

    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(_TPOT_BUCKETS_S) + 1)
        self.total_s = 0.0


class _GapCollector(Collector):
    """The metric bros_inter_token_seconds."""

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
    """The histograms of one class, so that label lookups happen only once."""

    __slots__ = ("duration", "gap", "tpot", "ttft")

    def __init__(self, histograms: Sequence[Histogram], gap: _Gaps) -> None:
        self.ttft, self.tpot, self.duration = histograms
        self.gap = gap


class RequestObserver:
    """Times the choices of one request; each choice is a separate request to the engine."""

    def __init__(
        self,
        metrics: ServerMetrics,
        now: Callable[[], float],
        arrival_s: float,
        classes: Sequence[ServiceClass],
    ) -> None:
        self._metrics = metrics
        self._now = now
        self._classes = classes
        self._histograms = [metrics.of(service_class) for service_class in classes]
        self._arrival_s = arrival_s
        self._open = set(range(len(classes)))
        self._first_s = [0.0] * len(classes)
        self._last_s: list[float | None] = [None] * len(classes)

    def on_delta(self, delta: TextDelta) -> None:
        if delta.token_ids:
            self.on_text(delta.index, delta.text, len(delta.token_ids))
        if delta.finish_reason is not None:
            self._finish(delta, delta.finish_reason, self._now())

    def on_text(self, index: int, text: str, num_tokens: int) -> None:
        now, last_s, histograms = self._now(), self._last_s[index], self._histograms[index]
        self._last_s[index] = now
        if last_s is None:
            self._first_s[index] = now
            histograms.ttft.observe(now - self._arrival_s)
        else:
            # Tokens that come together (EngineRequest.gathered) count with their mean.
            gaps = histograms.gap
            gap_s = (now - last_s) / num_tokens
            gaps.counts[bisect_left(_TPOT_BUCKETS_S, gap_s)] += num_tokens
            gaps.total_s += now - last_s

    def on_error(self, message: str) -> None:
        """The engine died. `close` counts the unfinished choices."""

    def close(self) -> None:
        """The request has ended: count choices without a finish reason as aborted."""
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
