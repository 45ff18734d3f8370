"""/metrics, read by Prometheus' own parser."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from bros.core.clock import ManualClock
from bros.core.interfaces import Buckets, ClassStats, EngineStats
from bros.core.request import ServiceClass
from bros.server.operations.metrics import ServerMetrics
from support.scripted_server import Server

FIGURES = EngineStats(
    steps=11,
    step_s=2.5,
    predicted_s=2.25,
    step_error_s=0.5,
    be_added_s=0.75,
    aborted_steps=4,
    aborted_s=0.375,
    suspended_steps=6,
    suspended_s=0.875,
    lost_s=0.4375,
    yielding=Buckets(bounds=(0.01, 0.1), counts=(7, 2, 1), total=0.75),
    forced_tokens=41,
    grammars_compiled=3,
    grammar_compile_s=0.125,
    mask_wait_s=0.0625,
    safety_factor=1.125,
    rare_factor=1.25,
    batch_size=24,
    batch_resets=3,
    kv_blocks_used=25,
    kv_blocks_total=100,
    kv_blocks_shared=12,
    kv_blocks_cached=33,
    kv_blocks_pinned=21,
    host_kv_blocks_total=9,
    host_kv_blocks_used=4,
    by_class={
        ServiceClass.RT: ClassStats(
            running=2, waiting=1, prompt_tokens=70, output_tokens=30, finished=9, preemptions=1,
            kv_blocks=20, ttft_met=8, tpot_met=7, both_met=6, gap_met=5,
            tokens_on_time=28, rejected=4, prefix_tokens=48, prefix_evicted=3, promoted=11,
            deadlines=5, deadlines_met=3,
            slack=Buckets(bounds=(-0.5, 0.0, 0.25), counts=(1, 2, 20, 5), total=4.5),
            slowdown=Buckets(bounds=(1.0, 1.5), counts=(1, 3, 2), total=9.0),
        ),
        ServiceClass.BE: ClassStats(
            running=3, waiting=9, prompt_tokens=7, output_tokens=5, kv_blocks=5, relegated=2,
            kv_preempted=60, kv_copied=40, kv_restored=30, prefix_tokens=16, prefix_evicted=14,
            ttft_met=6, tpot_met=6, both_met=6, gap_met=5,
        ),
    },
)  # fmt: skip


def parse(text: str) -> dict[tuple[str, ...], float]:
    """(name, label values...) -> value."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def samples(server: Server) -> dict[tuple[str, ...], float]:
    return parse((await server.http.get("/metrics")).text)


def rendered(stats: EngineStats) -> str:
    return ServerMetrics(ManualClock()).render(stats).decode()


async def test_the_engine_is_shown(server: Server) -> None:
    server.engine.figures = FIGURES
    found = await samples(server)
    others = ("bros_session", "bros_event_loop", "bros_http_connections")
    engine = {key: value for key, value in found.items() if not key[0].startswith(others)}
    assert {name: value for (name, *labels), value in engine.items() if not labels} == {
        "bros_engine_up": 1,
        "bros_kv_blocks": 100,
        "bros_kv_blocks_shared": 12,
        "bros_kv_blocks_cached": 33,
        "bros_kv_blocks_pinned": 21,
        "bros_host_kv_blocks": 9,
        "bros_host_kv_blocks_used": 4,
        "bros_batch_size": 24,
        "bros_safety_factor": 1.125,
        "bros_rare_factor": 1.25,
        "bros_batch_resets_total": 3,
        "bros_engine_steps_total": 11,
        "bros_engine_step_seconds_total": 2.5,
        "bros_engine_step_predicted_seconds_total": 2.25,
        "bros_engine_step_error_seconds_total": 0.5,
        "bros_be_added_seconds_total": 0.75,
        "bros_engine_steps_aborted_total": 4,
        "bros_engine_steps_aborted_seconds_total": 0.375,
        "bros_engine_steps_suspended_total": 6,
        "bros_engine_steps_suspended_seconds_total": 0.875,
        "bros_engine_lost_seconds_total": 0.4375,
        "bros_engine_yield_seconds_count": 10,
        "bros_engine_yield_seconds_sum": 0.75,
        "bros_forced_tokens_total": 41,
        "bros_grammars_compiled_total": 3,
        "bros_grammar_compile_seconds_total": 0.125,
        "bros_mask_wait_seconds_total": 0.0625,
    }


@pytest.mark.parametrize(
    ("name", "rt", "be"),
    [
        ("bros_requests_running", 2, 3),
        ("bros_requests_waiting", 1, 9),
        ("bros_kv_blocks_used", 20, 5),
        ("bros_kv_usage_ratio", 0.2, 0.05),
        ("bros_prompt_tokens_total", 70, 7),
        ("bros_output_tokens_total", 30, 5),
        ("bros_preemptions_total", 1, 0),
        ("bros_kv_tokens_preempted_total", 0, 60),
        ("bros_kv_tokens_copied_total", 0, 40),
        ("bros_kv_tokens_restored_total", 0, 30),
        ("bros_prefix_tokens_total", 48, 16),
        ("bros_prefix_blocks_evicted_total", 3, 14),
        ("bros_requests_finished_total", 9, 0),
        ("bros_tokens_on_time_total", 28, 0),
        ("bros_deadlines_total", 5, 0),
        ("bros_deadlines_met_total", 3, 0),
        ("bros_requests_relegated_total", 0, 2),
        ("bros_requests_promoted_total", 11, 0),
        ("bros_requests_rejected_total", 4, 0),
    ],
)
async def test_each_class_is_shown(server: Server, name: str, rt: float, be: float) -> None:
    server.engine.figures = FIGURES
    found = await samples(server)
    assert (found[(name, "rt")], found[(name, "be")]) == (rt, be)


async def test_attainment_can_be_computed_for_each_objective(server: Server) -> None:
    server.engine.figures = FIGURES
    found = await samples(server)
    met = {key[1:]: value for key, value in found.items() if key[0] == "bros_slo_met_total"}
    # Not of class be: its requests have no such objectives, whatever the engine counts.
    assert met == {("rt", "ttft"): 8, ("rt", "tpot"): 7, ("rt", "both"): 6, ("rt", "gap"): 5}


async def test_slack_is_a_histogram_that_may_begin_below_zero(server: Server) -> None:
    server.engine.figures = FIGURES
    found = await samples(server)
    name = "bros_token_slack_seconds"
    slack = {key[1:]: value for key, value in found.items() if key[0] == f"{name}_bucket"}
    assert slack == {
        ("rt", "-0.5"): 1, ("rt", "0.0"): 3, ("rt", "0.25"): 23, ("rt", "+Inf"): 28,
        ("be", "+Inf"): 0,
    }  # fmt: skip
    assert (found[(f"{name}_count", "rt")], found[(f"{name}_sum", "rt")]) == (28, 4.5)


async def test_slowdowns_of_streams_are_a_histogram(server: Server) -> None:
    server.engine.figures = FIGURES
    found = await samples(server)
    name = "bros_stream_slowdown"
    buckets = {key[1:]: value for key, value in found.items() if key[0] == f"{name}_bucket"}
    assert buckets == {("rt", "1.0"): 1, ("rt", "1.5"): 4, ("rt", "+Inf"): 6}
    assert (found[(f"{name}_count", "rt")], found[(f"{name}_sum", "rt")]) == (6, 9.0)


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8, unique=True).map(sorted),
    st.data(),
)
def test_histograms_add_up_whatever_the_bounds(bounds: list[float], data: st.DataObject) -> None:
    size = len(bounds) + 1
    counts = data.draw(st.lists(st.integers(0, 2**40), min_size=size, max_size=size))
    slack = Buckets(bounds=tuple(bounds), counts=tuple(counts), total=1.5)
    text = rendered(EngineStats(by_class={ServiceClass.RT: ClassStats(slack=slack)}))
    (family,) = (f for f in families(text) if f.name == "bros_token_slack_seconds")
    found = [
        (float(sample.labels["le"]), sample.value)
        for sample in family.samples
        if sample.name.endswith("_bucket") and sample.labels["class"] == "rt"
    ]
    expected = zip([*bounds, float("inf")], itertools.accumulate(counts), strict=True)
    assert found == list(expected)
    assert parse(text)[("bros_token_slack_seconds_count", "rt")] == sum(counts)


def families(text: str) -> list[Metric]:
    return list(text_string_to_metric_families(text))


def test_every_metric_is_described_once_and_labels_are_few() -> None:
    found = families(rendered(FIGURES))
    names = [family.name for family in found]
    assert len(names) == len(set(names))
    for family in found:
        assert family.documentation, family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
    exported = {sample.name for family in found for sample in family.samples}
    for family in found:
        for name in re.findall(r"\bbros_\w+", family.documentation):
            assert name in exported | set(names), f"{family.name} tells of {name}"
    labels = {label for family in found for sample in family.samples for label in sample.labels}
    assert labels <= {"class", "objective", "le", "cause"}


def test_an_engine_that_reports_nothing_yet_is_shown_with_zeros() -> None:
    found = parse(rendered(EngineStats()))
    assert found[("bros_slo_met_total", "rt", "both")] == 0
    assert found[("bros_kv_usage_ratio", "be")] == 0
    assert found[("bros_token_slack_seconds_count", "rt")] == 0


async def test_requests_are_timed_by_class(server: Server) -> None:
    await server.chat(max_tokens=4)
    await server.chat(n=2, service_tier="flex")
    found = await samples(server)
    assert found[("bros_requests_total", "rt", "length")] == 1
    assert found[("bros_requests_total", "be", "stop")] == 2
    for service_class, choices, gaps in (("rt", 1, 3), ("be", 2, 22)):
        assert found[("bros_time_to_first_token_seconds_count", service_class)] == choices
        assert found[("bros_time_per_output_token_seconds_count", service_class)] == choices
        assert found[("bros_request_duration_seconds_count", service_class)] == choices
        assert found[("bros_inter_token_seconds_count", service_class)] == gaps
    assert found[("bros_http_requests_total", "/v1/chat/completions", "200")] == 2


async def test_paths_with_an_id_in_them_are_counted_as_one(server: Server) -> None:
    for path in ("/v1/requests/a/trace", "/v1/requests/b/trace", "/v1/requests/a/b/trace", "/x"):
        await server.http.get(path)
    found = await samples(server)
    counted = {key[1:]: n for key, n in found.items() if key[0] == "bros_http_requests_total"}
    assert counted[("/v1/requests/{id}/trace", "404")] == 2
    assert counted[("other", "404")] == 2


async def test_times_are_those_of_the_clock(server: Server) -> None:
    server.engine.step_s = 0.125
    await server.chat(max_tokens=5)
    found = await samples(server)
    assert found[("bros_request_duration_seconds_sum", "rt")] == 5 * 0.125
    ttft_s = found[("bros_time_to_first_token_seconds_sum", "rt")]
    assert ttft_s >= 0.125
    assert found[("bros_time_per_output_token_seconds_sum", "rt")] == (5 * 0.125 - ttft_s) / 4
    assert found[("bros_inter_token_seconds_sum", "rt")] == 5 * 0.125 - ttft_s


async def test_a_dead_engine_leaves_what_the_server_knows(server: Server) -> None:
    server.engine.alive, server.engine.num_lost, server.engine.num_hung = False, 3, 1
    found = await samples(server)
    assert found[("bros_engine_up",)] == 0
    lost = {cause: found[("bros_engine_lost_total", cause)] for cause in ("exit", "hang")}
    assert lost == {"exit": 2, "hang": 1}
    assert ("bros_kv_usage_ratio",) not in found


async def test_requests_count_as_the_class_that_served_them(server: Server) -> None:
    server.engine.relegates = "-1"
    await server.chat(n=2, max_tokens=3)
    found = await samples(server)
    for service_class in ("rt", "be"):
        assert found[("bros_requests_total", service_class, "length")] == 1
        assert found[("bros_time_to_first_token_seconds_count", service_class)] == 1
        assert found[("bros_inter_token_seconds_count", service_class)] == 2
        assert found[("bros_request_duration_seconds_count", service_class)] == 1


async def test_a_choice_that_fails_and_those_it_takes_along_are_counted(server: Server) -> None:
    server.engine.fail_after, server.engine.fails, server.engine.relegates = 0, "-0", "-1"
    assert (await server.chat(n=2)).status_code == 500
    found = await samples(server)
    ends = {key[1:]: value for key, value in found.items() if key[0] == "bros_requests_total"}
    assert ends == {("rt", "error"): 1, ("be", "abort"): 1}
