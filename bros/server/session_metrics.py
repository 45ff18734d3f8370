"""Sessions as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bros.semantic.views import SessionFigures


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
