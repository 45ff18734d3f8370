"""The replicas behind a router as Prometheus metrics. Other engine metrics are sums over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bros.router.client import RouterClient
from bros.router.member import RUNNING, ReplicaState, ReplicaStatus
from bros.router.planned import PlanReport

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
            "Blocks that nobody has but that can be found, as it last said",
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
