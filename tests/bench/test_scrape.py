"""What is read from a server's own metrics."""

from __future__ import annotations

from bros.bench.running import SAMPLED, difference, is_idle, parse_metrics
from bros.core.clock import ManualClock
from bros.core.interfaces import ClassStats, EngineStats
from bros.core.request import ServiceClass
from bros.server.operations.metrics import ServerMetrics

PAGE = """# HELP bros_batch_size Requests allowed
# TYPE bros_batch_size gauge
bros_batch_size 24.0
bros_requests_running{class="rt"} 2.0
bros_requests_running{class="be"} 0.0
bros_unknown{class="rt"} 7.0
"""


def test_known_samples_are_read_and_others_left_out() -> None:
    assert parse_metrics(PAGE) == {"batch_size": 24.0, "rt_running": 2.0, "be_running": 0.0}
    assert parse_metrics("<html>no metrics here 1</html>") == {}


def test_every_name_is_one_that_a_server_has() -> None:
    metrics = ServerMetrics(ManualClock())
    stats = EngineStats(by_class={cls: ClassStats() for cls in ServiceClass})
    text = metrics.render(stats).decode()
    assert parse_metrics(text).keys() == set(SAMPLED.values())


def test_a_server_is_idle_only_if_it_says_so() -> None:
    nothing = {f"{c}_{s}": 0.0 for c in ("rt", "be") for s in ("running", "waiting")}
    assert is_idle(nothing)
    assert not is_idle({**nothing, "be_waiting": 1.0})
    assert not is_idle({})


def test_means_are_of_what_happened_between_two_samples() -> None:
    before = {"steps": 10.0, "step_seconds": 1.0, "slack_count": 5.0, "slack_sum_s": 2.0}
    after = {"steps": 14.0, "step_seconds": 1.5, "slack_count": 5.0, "slack_sum_s": 2.0}
    found = difference(before, {**after, "batch_size": 8.0})
    assert found == {"batch_size": 8.0, "busy_s": 0.5, "step_ms": 125.0}
    found = difference({"streams": 3.0, "slowdown_sum": 4.5}, {"streams": 5.0, "slowdown_sum": 8.0})
    assert found == {"streams": 2.0, "slowdown_sum": 3.5}
