"""What an engine says about itself at one moment."""

from __future__ import annotations

from collections.abc import Mapping

from bros.core.interfaces import EngineStats
from bros.core.request import ServiceClass
from bros.kvcache.manager import KvCacheManager
from bros.scheduler.counters import ClassCounters
from bros.scheduler.policies import Policy
from bros.scheduler.queues import Queues
from bros.scheduler.state import SIDES
from bros.scheduler.steps import StepLedger


def take_snapshot(
    steps: StepLedger,
    policy: Policy,
    kv: KvCacheManager,
    queues: Queues,
    counters: Mapping[ServiceClass, ClassCounters],
) -> EngineStats:
    """Steps, queues, memory and counters of a scheduler."""
    running = {cls: 0 for cls in ServiceClass}
    kv_blocks = {cls: 0 for cls in ServiceClass}
    for state in queues.running:
        running[state.service_class] += 1
        kv_blocks[state.service_class] += kv.blocks_of(state.request_id)
    rows, resets = policy.batch_size
    predictor = policy.predictor
    return EngineStats(
        steps=steps.count - steps.abandoned,
        step_s=steps.seconds,
        predicted_s=steps.predicted_s,
        step_error_s=steps.error_s,
        be_tax_s=steps.be_tax_s,
        abandoned_steps=steps.abandoned,
        abandoned_s=steps.abandoned_s,
        safety_factor=predictor.safety_factor if predictor else 1.0,
        batch_size=rows,
        batch_resets=resets,
        kv_blocks_used=kv.num_used_blocks,
        kv_blocks_total=kv.num_blocks,
        kv_blocks_shared=kv.num_shared_blocks,
        kv_blocks_cached=kv.num_cached_blocks,
        kv_blocks_parked=kv.num_parked_blocks,
        host_kv_blocks_used=kv.num_host_blocks_used,
        host_kv_blocks_total=kv.num_host_blocks,
        by_class={
            cls: each.snapshot(
                running[cls],
                len(queues.waiting[cls]),
                kv_blocks[cls],
                kv.num_evicted_blocks(SIDES[cls]),
            )
            for cls, each in counters.items()
        },
    )
