"""Facts and figures of several engines as those of one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from bros.core.interfaces import Buckets, ClassStats, EngineInfo, EngineStats
from bros.core.request import ServiceClass

_MOST_QUEUED = 2**31 - 1

_GAUGES = frozenset(
    {
        *("batch_size", "kv_blocks_used", "kv_blocks_total", "kv_blocks_shared"),
        *("kv_blocks_cached", "kv_blocks_parked", "host_kv_blocks_used", "host_kv_blocks_total"),
        *("running", "waiting", "kv_blocks"),
    }
)
"""What ends with an engine; everything else counts on."""

_NO_SUMS = frozenset({"by_class", "slack", "safety_factor"})

_Figures = TypeVar("_Figures", EngineStats, ClassStats)


def total_info(infos: Sequence[EngineInfo]) -> EngineInfo:
    """Of at least one engine. What cannot be added up is that of the first."""
    return dataclasses.replace(
        infos[0],
        max_model_len=min(info.max_model_len for info in infos),
        num_kv_blocks=sum(info.num_kv_blocks for info in infos),
        num_host_kv_blocks=sum(info.num_host_kv_blocks for info in infos),
        max_queue=min(sum(info.max_queue for info in infos), _MOST_QUEUED),
    )


def total_stats(parts: Sequence[EngineStats], before: Sequence[EngineStats] = ()) -> EngineStats:
    """Sums; of the safety factor the largest.

    before: counters of engines that are no more (`counters`), so that sums never fall.
    """
    total = _sum(EngineStats(), [*parts, *before])
    by_class = {}
    for service_class in ServiceClass:
        of_class = [stats.by_class.get(service_class, ClassStats()) for stats in (*parts, *before)]
        slack = total_buckets([values.slack for values in of_class])
        by_class[service_class] = dataclasses.replace(_sum(ClassStats(), of_class), slack=slack)
    safety = max((stats.safety_factor for stats in parts), default=1.0)
    return dataclasses.replace(total, by_class=by_class, safety_factor=safety)


def counters(stats: EngineStats) -> EngineStats:
    """The same without what ends with the engine."""
    by_class = {name: _without_gauges(values) for name, values in stats.by_class.items()}
    return dataclasses.replace(_without_gauges(stats), by_class=by_class)


def total_buckets(parts: Sequence[Buckets]) -> Buckets:
    """Those that count nothing need not have the bounds of the others."""
    parts = [part for part in parts if any(part.counts)] or list(parts[:1])
    if not parts:
        return Buckets()
    bounds = parts[0].bounds
    assert all(part.bounds == bounds for part in parts), "engines of one kind"
    counts = tuple(map(sum, zip(*(part.counts for part in parts), strict=True)))
    return Buckets(bounds, counts, sum(part.total for part in parts))


def _sum(none: _Figures, parts: Sequence[_Figures]) -> _Figures:
    """Of what are numbers that can be added."""
    names = {field.name for field in dataclasses.fields(none)} - _NO_SUMS
    sums: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in names}
    return dataclasses.replace(none, **sums)


def _without_gauges(figures: _Figures) -> _Figures:
    names = {field.name for field in dataclasses.fields(figures)} & _GAUGES
    nothing: dict[str, Any] = dict.fromkeys(names, 0)
    return dataclasses.replace(figures, **nothing)
