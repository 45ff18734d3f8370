"""benchmarks/paper_settings.py and paper_report.py: choice of rates, comparisons, tables."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def settings() -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module("paper_settings")


@pytest.fixture(scope="module")
def report(settings: ModuleType) -> ModuleType:
    found = settings.paper_report
    assert isinstance(found, ModuleType)
    return found


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


def test_rates_are_even_and_end_at_the_highest(settings: ModuleType) -> None:
    assert settings.even_rates(7.5) == [1.5, 3.0, 4.5, 6.0, 7.5]


def test_results_are_one_json_value_with_a_run_per_line(settings: ModuleType) -> None:
    results = {
        "seed": 1,
        "nested": {"a": [1, 2]},
        "runs": [{"x": 1}, {"x": 2}],
        "real_time_alone": [],
        "finding_rates": [{"y": None}],
    }
    text = settings.as_text(results)
    assert json.loads(text) == results
    assert '    {"x": 1},\n    {"x": 2}\n' in text


def test_gains_average_over_loads(report: ModuleType) -> None:
    pairs = [
        (run("bros", 1, 0.1, be_requests_per_s=1.0), run("fcfs", 1, 0.2)),  # -50 %, -50 %
        (
            run("bros", 2, 0.1, ttft_met=[2, 2]),
            run("fcfs", 2, 1.0, ttft_met=[0, 9], tpot_met=[0, 0]),
        ),  # -90 %, -0 %
    ]
    gains = report.Gains.of(pairs)
    assert gains.latency_cut == pytest.approx(0.7)
    assert gains.be_loss == pytest.approx(0.25)
    assert gains.ttft_gain == pytest.approx((0.5 + 1.0) / (0.5 + 0.0))
    assert gains.tpot_gain == pytest.approx((1.0 + 1.0) / (1.0 + 0.0))


def test_nothing_attained_and_nothing_finished_are_told_apart(report: ModuleType) -> None:
    gains = report.Gains.of([(run("bros", 1, 0.1), run("fcfs", 1, None, ttft_met=[0, 5]))])
    assert math.isinf(gains.ttft_gain)
    assert math.isnan(gains.latency_cut)
    target = report.TARGETS[0]
    assert target.show(gains.latency_cut) == "-" and not target.met(gains.latency_cut)


def test_a_loss_is_bounded_from_above_and_a_gain_from_below(report: ModuleType) -> None:
    by_field = {target.field: target for target in report.TARGETS}
    loss, gain = by_field["be_loss"], by_field["ttft_gain"]
    assert (loss.met(0.1), loss.met(0.11)) == (True, False)
    assert (gain.met(10.0), gain.met(9.9)) == (True, False)
    assert (loss.show(0.115), gain.show(9.9)) == ("11.5 %", "9.90x")


def test_pairs_have_the_same_rate_in_order(report: ModuleType) -> None:
    runs = [run("bros", 2, 0.1), run("fcfs", 1, 0.3), run("fcfs", 2, 0.4), run("bros", 1, 0.2)]
    (pairs,) = report.pairs_of(runs, "bros", "fcfs", "lmsys").values()
    assert [(ours["rate"], theirs["rate"]) for ours, theirs in pairs] == [(1, 1), (2, 2)]
    assert [ours["policy"] for ours, _ in pairs] == ["bros", "bros"]


def test_written_text_above_the_mark_stays(report: ModuleType, tmp_path: Path) -> None:
    runs = [
        run(policy, rate, 0.1 * rate, lengths=lengths, profile=profile)
        for policy in report.STYLES
        for lengths in report.LENGTHS
        for profile in report.MODELS
        for rate in (1, 2)
    ]
    results = {
        "bros": "0",
        "commit": "c" * 40,
        "duration_s": 2.0,
        "warm_up_s": 1.0,
        "seed": 1,
        "best_effort": {"in_flight": 4},
        "runs": runs,
        "real_time_alone": [],
    }
    text = tmp_path / "paper_settings.md"
    text.write_text("mine\n" + report.MARK + "\nold")
    report.write(results, tmp_path)
    assert text.read_text().startswith("mine\n" + report.MARK)
    assert "old" not in text.read_text()
    assert (
        "| OPT-13B | LMSYS | 2 | bros | 0.2000 | 50.0 | 100.0 | 75.0 | 80.0 | 2.00 | 1000 | 1500 |"
        in (text.read_text())
    )
    assert (tmp_path / "paper_settings_lmsys.png").stat().st_size < 200_000
