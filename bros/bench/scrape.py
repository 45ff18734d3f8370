"""What a bros server says about itself: a few of its metrics, sampled while it is measured."""

from __future__ import annotations

import re
from collections.abc import Mapping

SAMPLED = {
    'bros_requests_running{class="rt"}': "rt_running",
    'bros_requests_running{class="be"}': "be_running",
    'bros_requests_waiting{class="rt"}': "rt_waiting",
    'bros_requests_waiting{class="be"}': "be_waiting",
    'bros_kv_usage_ratio{class="rt"}': "rt_kv",
    'bros_kv_usage_ratio{class="be"}': "be_kv",
    'bros_preemptions_total{class="rt"}': "rt_preemptions",
    'bros_preemptions_total{class="be"}': "be_preemptions",
    'bros_token_slack_seconds_sum{class="rt"}': "slack_sum_s",
    'bros_token_slack_seconds_count{class="rt"}': "slack_count",
    "bros_batch_size": "batch_size",
    "bros_safety_factor": "safety_factor",
    "bros_engine_steps_total": "steps",
    "bros_engine_step_seconds_total": "step_seconds",
    "bros_engine_step_predicted_seconds_total": "predicted_seconds",
    "bros_engine_steps_abandoned_total": "abandoned_steps",
    "bros_be_tax_seconds_total": "be_tax_seconds",
}
"""Prometheus sample -> short name."""

_GAUGES = ("rt_running", "be_running", "rt_waiting", "be_waiting", "batch_size", "rt_kv", "be_kv")
_LINE = re.compile(r"^(\w+(?:\{[^}]*\})?) (\S+)$", re.MULTILINE)


def parse_metrics(text: str) -> dict[str, float]:
    """Those of SAMPLED that a page of metrics has, by their short names."""
    found = {}
    for name, value in _LINE.findall(text):
        short = SAMPLED.get(name)
        if short is not None:
            found[short] = float(value)
    return found


def is_idle(sample: Mapping[str, float]) -> bool:
    """Whether the server has nothing to do; a sample without these figures says nothing."""
    names = [f"{cls}_{state}" for cls in ("rt", "be") for state in ("running", "waiting")]
    return all(sample.get(name, 1.0) == 0.0 for name in names)


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """A sample for a timeline: gauges as they are, and means of what happened in between.

    busy_s: time that went into steps. step_ms: mean time of a step; slack_ms: mean time that
    tokens had left; both only if there was one.
    """
    found = {name: after[name] for name in _GAUGES if name in after}
    if "step_seconds" in after and "step_seconds" in before:
        found["busy_s"] = after["step_seconds"] - before["step_seconds"]
    ratios = (("step_ms", "step_seconds", "steps"), ("slack_ms", "slack_sum_s", "slack_count"))
    for name, total, count in ratios:
        events = after.get(count, 0.0) - before.get(count, 0.0)
        if events > 0:
            found[name] = 1e3 * (after.get(total, 0.0) - before.get(total, 0.0)) / events
    return found
