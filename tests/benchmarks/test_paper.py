"""benchmarks/paper_*.py: choice of rates, comparisons, tables, and the page made of them."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bros.bench.results import BenchResult
from bros.simulator.sweep import run_scenario

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def modules() -> Callable[[str], ModuleType]:
    """They import each other by name, as scripts in one folder do."""

    def found(name: str) -> ModuleType:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(str(BENCHMARKS))
            return importlib.import_module(f"paper_{name}")

    return found


@pytest.fixture(scope="module")
def settings(modules: Callable[[str], ModuleType]) -> ModuleType:
    return modules("settings")


@pytest.fixture(scope="module")
def common(modules: Callable[[str], ModuleType]) -> ModuleType:
    return modules("common")


@pytest.fixture(scope="module")
def report(modules: Callable[[str], ModuleType]) -> ModuleType:
    return modules("report")


def run(policy: str, rate: float, latency_s: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "policy": policy,
        "rate": rate,
        "profile": "2x-a100-40g/opt-13b-fp16",
        "lengths": "lmsys",
        "normalized_latency_s": latency_s,
        "ttft_met": [1, 2],
        "tpot_met": [2, 2],
        "tokens_on_time": [3, 4],
        "rt_requests": 5,
        "rt_finished": 4,
        "be_requests_per_s": 2.0,
        "rt_tokens_per_s": 500.0,
        "be_tokens_per_s": 1000.0,
        "mean_step_s": 0.1,
    } | changes


@given(st.integers(0, 40), st.integers(1, 40))
def test_bisection_finds_the_highest_rate_that_passes(
    settings: ModuleType, highest: int, count: int
) -> None:
    verdicts: dict[int, bool] = {}
    while (step := settings.highest_passing(verdicts, count)[1]) is not None:
        assert 1 <= step <= count and step not in verdicts
        verdicts[step] = step <= highest
    assert settings.highest_passing(verdicts, count)[0] == min(highest, count)
    assert len(verdicts) <= 1 + math.ceil(math.log2(count + 1))


def test_rates_are_even_and_end_at_the_highest(common: ModuleType) -> None:
    assert common.even_rates(7.5) == [1.5, 3.0, 4.5, 6.0, 7.5]


def test_results_are_one_json_value_with_a_run_per_line(common: ModuleType) -> None:
    results = {
        "seed": 1,
        "nested": {"a": [1, 2]},
        "runs": [{"x": 1}, {"x": 2}],
        "real_time_alone": [],
        "finding_rates": [{"y": None}],
    }
    text = common.as_text(results)
    assert json.loads(text) == results
    assert '    {"x": 1},\n    {"x": 2}\n' in text


def test_gains_average_over_loads(settings: ModuleType) -> None:
    pairs = [
        (run("bros", 1, 0.1, be_requests_per_s=1.0), run("fcfs", 1, 0.2)),  # -50 %, -50 %
        (
            run("bros", 2, 0.1, ttft_met=[2, 2]),
            run("fcfs", 2, 1.0, ttft_met=[0, 9], tpot_met=[0, 0]),
        ),  # -90 %, -0 %
    ]
    gains = settings.Gains.of(pairs)
    assert gains.latency_cut == pytest.approx(0.7)
    assert gains.be_loss == pytest.approx(0.25)
    assert gains.ttft_gain == pytest.approx((0.5 + 1.0) / (0.5 + 0.0))
    assert gains.tpot_gain == pytest.approx((1.0 + 1.0) / (1.0 + 0.0))


def test_nothing_attained_and_nothing_finished_are_told_apart(settings: ModuleType) -> None:
    gains = settings.Gains.of([(run("bros", 1, 0.1), run("fcfs", 1, None, ttft_met=[0, 5]))])
    assert math.isinf(gains.ttft_gain)
    assert math.isnan(gains.latency_cut)
    target = settings.TARGETS[0]
    assert target.show(gains.latency_cut) == "-" and not target.met(gains.latency_cut)


def test_a_loss_is_bounded_from_above_and_a_gain_from_below(settings: ModuleType) -> None:
    by_field = {target.field: target for target in settings.TARGETS}
    loss, gain = by_field["be_loss"], by_field["ttft_gain"]
    assert (loss.met(0.1), loss.met(0.11)) == (True, False)
    assert (gain.met(10.0), gain.met(9.9)) == (True, False)
    assert (loss.show(0.115), gain.show(9.9)) == ("11.5 %", "9.90x")


def test_pairs_have_the_same_rate_in_order(settings: ModuleType) -> None:
    runs = [run("bros", 2, 0.1), run("fcfs", 1, 0.3), run("fcfs", 2, 0.4), run("bros", 1, 0.2)]
    (pairs,) = settings.pairs_of(runs, "bros", "fcfs", "lmsys").values()
    assert [(ours["rate"], theirs["rate"]) for ours, theirs in pairs] == [(1, 1), (2, 2)]
    assert [ours["policy"] for ours, _ in pairs] == ["bros", "bros"]


def test_capacity_is_shared_out_below_and_above(modules: Callable[[str], ModuleType]) -> None:
    rates = modules("alone").rates_up_to(8.0)
    assert rates == sorted(rates)
    assert rates[0] < 8.0 < rates[-1]


def test_loads_without_best_effort_work_are_compared_in_pairs(
    modules: Callable[[str], ModuleType],
) -> None:
    alone = modules("alone")
    more = {"rt_requests_per_s": 2.0, "rt_preemptions": 1}
    runs = [
        run("bros", 4.0, 0.4, **more, ttft_met=[2, 2]),
        run("fcfs", 4.0, 0.2, **more | {"rt_requests_per_s": 1.0}),
        run("bros", 2.0, 0.1, **more),
        run("fcfs", 2.0, 0.2, **more),
    ]
    tables = alone.render({"shares": [0.5, 1.0], "runs": runs}).blocks
    assert tables["table"].splitlines()[2:] == [
        "| 50 % | -50.0 % | 1.00x | 50.0 % | 50.0 % | 200 | 200 |",
        "| 100 % | +100.0 % | 2.00x | 50.0 % | 100.0 % | 200 | 200 |",
        "| all | +25.0 % | 1.50x | 50.0 % | 75.0 % | 200 | 200 |",
    ]


def test_only_what_the_scheduler_does_after_the_warm_up_is_timed(
    modules: Callable[[str], ModuleType],
) -> None:
    overhead, common = modules("overhead"), modules("common")
    setting = common.Setting("2x-a100-40g/opt-13b-fp16", "lmsys")
    case = common.Case(setting, "bros", 4.0, be_in_flight=0)
    whole = overhead.time_run(case.scenario(common.Span(4.0, 0.0), 1))
    half = overhead.time_run(case.scenario(common.Span(4.0, 2.0), 1))
    simulated = common.figures(run_scenario(case.scenario(common.Span(4.0, 0.0), 1)))
    assert 0 < half["iterations"] < whole["iterations"]
    assert whole["step_s"] == pytest.approx(simulated["mean_step_s"], rel=1e-4)
    assert 0 < whole["schedule_s"] < whole["step_s"]
    pieces = [overhead.share_of(whole, piece) for piece in overhead.PIECES]
    assert sum(pieces) == pytest.approx(1.0)


def test_a_measured_run_has_the_fields_of_a_simulated_one(
    modules: Callable[[str], ModuleType],
) -> None:
    stored = (BENCHMARKS / "results" / "bench_cpu" / "result.json").read_text()
    results = BenchResult.from_json(stored).results
    (result,) = (r for r in results if (r.target, r.policy, r.scenario) == ("bros", "bros", "S3"))
    found = modules("real").run_of(result)
    assert (found["policy"], found["rate"]) == ("bros", result.rt_rate)
    assert found["ttft_met"] == [result.rt.ttft_met.met, result.rt.ttft_met.decided]
    assert found["be_requests_per_s"] == result.be.requests_per_s
    drawing = modules("drawing")
    for metric in (drawing.LATENCY, drawing.TTFT, drawing.TPOT, drawing.BE_RATE, drawing.RT_RATE):
        assert metric.value(found) > 0


def test_every_place_in_the_template_is_one_that_a_part_fills(
    report: ModuleType, tmp_path: Path
) -> None:
    text, pictures = report.page(report.TEMPLATE.read_text(), tmp_path)
    assert not pictures
    assert "{{" not in text
    for part in report.PARTS:
        assert f"--parts {part.name}" in text


def test_an_unknown_place_is_an_error(report: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(KeyError):
        report.page("{{settings.nothing}}", BENCHMARKS / "results")
    with pytest.raises(KeyError):
        report.page("{{nothing.table}}", tmp_path)


@pytest.mark.slow
def test_the_stored_page_is_made_of_the_stored_results(report: ModuleType) -> None:
    stored = BENCHMARKS / "results"
    text, pictures = report.page(report.TEMPLATE.read_text(), stored)
    assert text == (stored / "paper.md").read_text()
    assert {path.name for path in stored.glob("paper_*.png")} == set(pictures)


def test_tables_have_a_row_per_policy_and_model(settings: ModuleType, common: ModuleType) -> None:
    runs = [
        run(policy, rate, 0.1 * rate, lengths=lengths, profile=profile)
        for policy in common.POLICIES
        for lengths in common.LENGTHS
        for profile in common.MODELS
        for rate in (1, 2)
    ]
    blocks = settings.blocks({"runs": runs, "real_time_alone": []})
    expected = "| 2 | bros | 0.2000 | 50.0 | 100.0 | 75.0 | 80.0 | 2.00 | 1000 | 1500 |"
    assert f"| OPT-13B | LMSYS {expected}" in blocks["highest"].splitlines()
    assert len(blocks["means"].splitlines()) == 2 + 5 * 2 * 3
