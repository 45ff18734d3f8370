"""Prometheus metrics of one server, in a registry of its own."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from bros.core.clock import Clock
from bros.core.interfaces import EngineStats
from bros.core.request import FinishReason, ServiceClass
from bros.engine.generation import TextDelta
from bros.router.client import RouterClient
from bros.semantic.views import SessionFigures
from bros.server.batch_metrics import BatchCollector, BatchFigures
from bros.server.engine_metrics import EngineCollector
from bros.server.replica_metrics import ReplicaCollector
from bros.server.session_metrics import SessionCollector

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
        self._histograms = {
            service_class: _ClassHistograms(*bound)
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
        self, metrics: ServerMetrics, arrival_s: float, classes: Sequence[ServiceClass]
    ) -> None:
        self._metrics = metrics
        self._classes = classes
        self._arrival_s = arrival_s
        self._open = set(range(len(classes)))
        self._first_s: dict[int, float] = {}
        self._last_s: dict[int, float] = {}

    def on_delta(self, delta: TextDelta) -> None:
        now = self._metrics.now()
        index = delta.index
        histograms = self._metrics.of(self._classes[index])
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
        """Nothing follows: choices without a finish reason were given up."""
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
