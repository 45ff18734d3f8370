"""Builds a scheduler from its options, for engines and for the simulator."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from bros.core.config import EngineConfig, StepBounds
from bros.core.errors import ConfigError
from bros.core.interfaces import EngineInfo
from bros.core.request import ServiceClass
from bros.kvcache.manager import KvCacheManager
from bros.kvcache.prefix_cache import PrefixCache
from bros.scheduler.admission import Limits
from bros.scheduler.cost_model import CostModel, StepLoad, StepTimePredictor
from bros.scheduler.metrics import ClassCounters
from bros.scheduler.packing import Bounds, Rules
from bros.scheduler.policies import Policy
from bros.scheduler.policies.baselines import (
    EdfPolicy,
    FcfsPolicy,
    PriorityPolicy,
    RoundRobinPolicy,
)
from bros.scheduler.policies.best_effort_order import BestEffortOrder, PrefixGroups, StartOrder
from bros.scheduler.policies.bros import BrosPolicy, OverloadGuard
from bros.scheduler.prefixes import look_up
from bros.scheduler.scheduler import Scheduler
from bros.scheduler.state import RequestState

_ORDER_POLICIES = (FcfsPolicy, PriorityPolicy, RoundRobinPolicy, EdfPolicy)
_BROS_ONLY = (
    *("rt_wait", "rt_slowdown", "be_share", "be_order", "be_max_wait", "tenant_weights"),
    *("tenant_rt_slowdowns", "late", "packing", "batch_growth"),
)
_MANY_TOKENS = 1024
"""A prompt of so many tokens is compute-bound."""
_UNKNOWN_OUTPUT_TOKENS = 128
"""Expected output of a class until a request of it has finished."""


def needs_cost_model(config: EngineConfig) -> bool:
    """Whether the policy asks how long steps take."""
    return config.policy == BrosPolicy.name


def best_effort_yields(config: EngineConfig) -> bool:
    """Whether best-effort work gets only the time and memory that real-time requests leave."""
    return config.policy == BrosPolicy.name


def unused_options(config: EngineConfig) -> list[str]:
    """Flags that differ from their defaults but have no effect under the policy."""
    if config.policy == BrosPolicy.name:
        return []
    defaults = EngineConfig()
    changed = (name for name in _BROS_ONLY if getattr(config, name) != getattr(defaults, name))
    return ["--" + name.replace("_", "-") for name in changed]


def without_effect(flags: Sequence[str], policy: str) -> str:
    """A warning about `unused_options`."""
    return f"{', '.join(flags)}: without effect with --policy {policy}"


def objectives_too_tight(config: EngineConfig, model: CostModel) -> str:
    """A warning if a step with a single row takes longer than the objectives allow; else empty."""
    row = StepLoad()
    row.add_rows(1, 0)
    row_s, slo = model.seconds(row), config.default_slo
    takes = f"a step with one request takes {1000 * row_s:.0f} ms here"
    if slo.tpot_s is not None and row_s > slo.tpot_s:
        return f"{takes}, so no stream keeps --slo-tpot ({1000 * slo.tpot_s:.0f} ms)"
    if slo.ttft_s is not None and row_s > config.rt_wait * slo.ttft_s:
        wait_ms = 1000 * config.rt_wait * slo.ttft_s
        return (
            f"{takes}, longer than --rt-wait times --slo-ttft ({wait_ms:.0f} ms): beside streams "
            "best-effort work gets little more than --be-share"
        )
    return ""


def step_bounds(config: EngineConfig, info: EngineInfo) -> StepBounds:
    """The bounds of a step. Where prompts are computed whole, the longest one fits."""
    rows, tokens = config.step_bounds(info.device)
    return StepBounds(rows, max(tokens, info.max_model_len) if info.whole_prompts else tokens)


def build_scheduler(
    config: EngineConfig, info: EngineInfo, model: CostModel | None, *, depth: int = 1
) -> Scheduler:
    """A scheduler for an engine with `info`. depth: most steps in flight, 1 or 2.

    `model` may be None unless the policy `needs_cost_model`. Raises ConfigError if options
    contradict each other.
    """
    bounds = step_bounds(config, info)
    limits = Limits(
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_num_seqs=bounds.rows,
        max_queue=config.max_queue,
        eos_token_ids=frozenset(info.eos_token_ids),
        generates=info.generates,
        poolings=info.poolings,
    )
    counters = {service_class: ClassCounters() for service_class in ServiceClass}
    kv = KvCacheManager(
        info.num_kv_blocks,
        info.block_size,
        shared=config.kv_layout == "bidirectional",
        num_host_blocks=info.num_host_kv_blocks if _copies_kv(config, model) else 0,
        literal=config.kv_find == "paper",
        prefixes=_prefix_cache(config, info, model),
    )
    return Scheduler(
        _policy(config, info, bounds, kv, model, counters, depth),
        kv,
        limits,
        info.default_slo,
        counters,
        random.Random(config.seed),
        info.grouping,
        max_kept_tokens=bounds.tokens,
    )


def _copies_kv(config: EngineConfig, model: CostModel | None) -> bool:
    """Whether preempted KV is copied to the host and back; else it is recomputed.

    Both take time in proportion to the tokens, so the faster one depends only on the device.
    """
    if config.on_pressure == "recompute":
        return False
    if model is None:
        return True
    computing_s = model.prefill_seconds(2 * _MANY_TOKENS) - model.prefill_seconds(_MANY_TOKENS)
    swapping_s = model.swap_out_token_s + model.swap_token_s
    return swapping_s <= computing_s / _MANY_TOKENS


def _prefix_cache(
    config: EngineConfig, info: EngineInfo, model: CostModel | None
) -> PrefixCache | None:
    if config.prefix_cache == "off" or info.whole_prompts:
        return None
    size, protected = info.block_size, int(config.rt_cache_share * info.num_kv_blocks)
    if model is None:
        return PrefixCache(config.prefix_cache, protected)

    @functools.cache
    def cost(depth: int) -> float:
        """Seconds to recompute a block in a step that runs anyway, so without its constant part."""
        return model.prefill_seconds(size, depth * size) - model.constant_s

    return PrefixCache(config.prefix_cache, protected, cost)


def _policy(
    config: EngineConfig,
    info: EngineInfo,
    step: StepBounds,
    kv: KvCacheManager,
    model: CostModel | None,
    counters: Mapping[ServiceClass, ClassCounters],
    depth: int,
) -> Policy:
    bounds = Bounds(rows=step.rows, tokens=step.tokens, rules=_rules(config, info))
    for kind in _ORDER_POLICIES:
        if kind.name == config.policy:
            if config.overload != "late":
                raise ConfigError(f"--overload {config.overload} needs --policy bros")
            return kind(bounds)
    assert model is not None, "this policy predicts step times"
    grouping = info.grouping if model.unique_context_s else None
    predictor = StepTimePredictor(model, grouping=grouping)

    def expected_tokens(state: RequestState) -> int:
        """Output tokens still to come, by the request's hint or the recent mean of its class.
        Ablation: deadlines, 7 points fewer are met without the mean.

        At least 1, at most what its length limit allows.
        """
        counted = counters[state.service_class]
        mean = state.request.hints.expected_tokens or counted.mean_output_tokens
        mean = mean or _UNKNOWN_OUTPUT_TOKENS
        longest = state.max_length - len(state.token_ids)
        return max(min(round(mean) - state.num_outputs, longest), min(longest, 1))

    guard = OverloadGuard(config.overload, predictor, bounds.rows, kv, expected_tokens)
    make_order: Callable[[], StartOrder] = partial(BestEffortOrder, config.be_max_wait)
    if config.be_order == "prefix-groups":
        make_order = partial(PrefixGroups, config.be_max_wait, partial(look_up, kv))
    return BrosPolicy(config, bounds, predictor, guard, expected_tokens, make_order, depth=depth)


def _rules(config: EngineConfig, info: EngineInfo) -> Rules:
    if config.policy == BrosPolicy.name and config.packing == "paper":
        return Rules.paper()
    return Rules(chunked=not info.whole_prompts)
