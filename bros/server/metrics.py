"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bros.core.clock import Clock
from bros.core.interfaces import ClassStats, EngineStats
from bros.core.request import FinishReason, ServiceClass
from bros.engine.generation import TextDelta

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
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
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
        self._histograms = {
            service_class: _ClassHistograms(*bound)
            for service_class, bound in self._make_histograms().items()
        }

    def http_request(self, path: str, status: int) -> None:
        """One HTTP request was answered. `path` must come from a bounded set."""
        self._http.labels(path, str(status)).inc()

    def observer(self, service_class: ServiceClass, arrival_s: float) -> RequestObserver:
        """For one request that arrived at `arrival_s` of the clock."""
        return RequestObserver(self, service_class, arrival_s)

    def render(self, stats: EngineStats | None) -> bytes:
        """Everything in Prometheus' text format. stats: None if the engine gives none."""
        self._engine.stats = stats
        return generate_latest(self._registry)

    def _make_histograms(self) -> dict[ServiceClass, list[Histogram]]:
        kinds = (
            ("bros_time_to_first_token_seconds", "Arrival to first token", _TTFT_BUCKETS_S),
            (
                "bros_time_per_output_token_seconds",
                "Mean time between the tokens of one choice",
                _TPOT_BUCKETS_S,
            ),
            ("bros_inter_token_seconds", "Each gap between two tokens", _TPOT_BUCKETS_S),
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


class _ClassHistograms:
    """The histograms of one class, looked up once."""

    __slots__ = ("duration", "gap", "tpot", "ttft")

    def __init__(
        self, ttft: Histogram, tpot: Histogram, gap: Histogram, duration: Histogram
    ) -> None:
        self.ttft = ttft
        self.tpot = tpot
        self.gap = gap
        self.duration = duration


class RequestObserver:
    """Times the choices of one request. A choice is a request of its own to the engine."""

    def __init__(
        self, metrics: ServerMetrics, service_class: ServiceClass, arrival_s: float
    ) -> None:
        self._metrics = metrics
        self._class = service_class
        self._histograms = metrics.of(service_class)
        self._arrival_s = arrival_s
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def on_delta(self, delta: TextDelta) -> None:
        now = self._metrics.now()
        index = delta.index
        if delta.token_ids:
            last_s = self._last_s.get(index)
            if last_s is None:
                self._first_s[index] = now
                self._histograms.ttft.observe(now - self._arrival_s)
            else:
                self._histograms.gap.observe((now - last_s) / len(delta.token_ids))
            self._last_s[index] = now
        if delta.finish_reason is not None:
            self._finish(delta, delta.finish_reason, now)

    def abandoned(self, choices: int) -> None:
        """So many choices were given up before they had a finish reason."""
        for _ in range(choices):
            self._metrics.count_finish(self._class, FinishReason.ABORT)

    def _finish(self, delta: TextDelta, reason: FinishReason, now: float) -> None:
        self._metrics.count_finish(self._class, reason)
        self._histograms.duration.observe(now - self._arrival_s)
        if delta.num_output_tokens > 1:
            generating_s = now - self._first_s[delta.index]
            self._histograms.tpot.observe(generating_s / (delta.num_output_tokens - 1))


class _EngineCollector(Collector):
    """Turns the latest EngineStats into metrics. Counters restart with the engine."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        yield GaugeMetricFamily(
            "bros_engine_up", "1 if the engine answers", value=stats is not None
        )
        if stats is None:
            return
        yield CounterMetricFamily("bros_engine_steps", "Iterations run", value=stats.steps)
        total = stats.kv_blocks_total
        yield GaugeMetricFamily("bros_kv_blocks", "KV blocks there are", value=total)
        yield from self._by_class(stats)

    def _by_class(self, stats: EngineStats) -> Iterator[Metric]:
        total = max(stats.kv_blocks_total, 1)
        gauges: dict[str, tuple[str, Callable[[ClassStats], float]]] = {
            "requests_running": ("Requests being computed", lambda counts: counts.running),
            "requests_waiting": ("Requests in the queue", lambda counts: counts.waiting),
            "kv_blocks_used": ("KV blocks in use", lambda counts: counts.kv_blocks),
            "kv_usage_ratio": ("Share of all KV blocks", lambda c: c.kv_blocks / total),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"bros_{name}", text, labels=("class",))
            for service_class in ServiceClass:
                counts = stats.by_class.get(service_class, ClassStats())
                gauge.add_metric((service_class.value,), value(counts))
            yield gauge
        counters = {
            "prompt_tokens": "Prompt tokens taken in",
            "output_tokens": "Tokens generated",
            "preemptions": "Requests interrupted for others",
        }
        for name, text in counters.items():
            counter = CounterMetricFamily(f"bros_{name}", text, labels=("class",))
            for service_class in ServiceClass:
                counts = stats.by_class.get(service_class, ClassStats())
                counter.add_metric((service_class.value,), getattr(counts, name))
            yield counter
