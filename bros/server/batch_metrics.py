"""Batch jobs as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bros.batch.objects import BatchStatus
from bros.batch.pacing import RowCounts


@dataclass(frozen=True, slots=True)
class BatchFigures:
    """by_status: batches in the store; None if it does not answer. rows: of this process.
    in_flight: with the engine now."""

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
