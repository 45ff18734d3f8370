"""Tables of runs on several replicas."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console

from bros.cli.simulate_tables import print_fleet_reports
from bros.core.config import EngineConfig
from bros.core.request import FinishReason, ServiceClass, Slo
from bros.simulator.fleet import FleetRecord, FleetReport, FleetResult, FleetScenario, fleet_report
from bros.simulator.prefix_workloads import published
from bros.simulator.simulation import Device
from bros.workload.attainment import Attainment
from support.fleets import request
from support.scenarios import STEPS

DEVICE = Device(name="toy", model="tiny", weights="fp16", steps=STEPS, kv_blocks=4000)
FIGURES = {"hits": 1.0, "busy": 1.0, "balance": 64.0, "requests_per_s": 12345.0}


def scenario(router: str) -> FleetScenario:
    return FleetScenario(
        config=EngineConfig(policy="bros"),
        device=DEVICE,
        replicas=64,
        router=router,
        load=published("toolbench", 64),
        seed=0,
        classes=True,
    )


def report(latency_s: float) -> FleetReport:
    """Of two requests, one of each class, with other figures that are as wide as they get."""
    records = [
        FleetRecord(
            request(0.0, own=100, output=1, service_class=service_class),
            arrival_s=0.0,
            prompt_tokens=100,
            tokens=1,
            first_s=latency_s,
            last_s=latency_s,
            finish=FinishReason.LENGTH,
        )
        for service_class in ServiceClass
    ]
    result = FleetResult(records=records, end_s=1.0, busy_s=[1.0], steps=[1], preemptions=0)
    return dataclasses.replace(fleet_report(result, Slo(ttft_s=1e9)), **FIGURES)


def printed(width: int = 100, **latencies: float) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, highlight=False)
    print_fleet_reports(console, [(scenario(name), report(s)) for name, s in latencies.items()])
    return out.getvalue().splitlines()


def test_nothing_is_cut_off_with_both_classes_and_wide_figures() -> None:
    lines = printed(rr=87654.0, oracle=9.4567, least=0.0123456)
    assert max(map(len, lines)) <= 100 and not any("…" in line for line in lines)
    (head,) = (line for line in lines if line.split()[:1] == ["router"])
    assert head.split()[-4:] == ["met", "%", "mean", "s"]
    rows = {line.split()[0]: line.split()[1:] for line in lines if "12345" in line}
    assert rows["rr"][:4] == ["87654", "87654", "1.00", "1.00"]
    assert rows["oracle"][:4] == ["9.46", "9.46", "9269", "9269"]
    assert rows["least"][-3:] == ["12345", "100.0", "0.012"]


def test_nothing_is_cut_off_in_a_narrow_terminal() -> None:
    lines = printed(80, rr=87654.0, oracle=9.4567, least=0.0123456)
    assert max(map(len, lines)) <= 80 and not any("…" in line for line in lines)
    shown = [line.split()[1:] for line in lines if line.split()[:1] == ["least"]]
    assert len(shown) == 2 and shown[1][-2:] == ["100.0", "0.012"]


def test_one_missed_request_is_never_rounded_away() -> None:
    found = report(1.0)
    real_time = dataclasses.replace(
        found.by_class[ServiceClass.RT], both_met=Attainment(met=9999, decided=10000)
    )
    by_class = {**found.by_class, ServiceClass.RT: real_time}
    out = io.StringIO()
    console = Console(file=out, width=100, highlight=False)
    rows = [(scenario("rr"), dataclasses.replace(found, by_class=by_class))]
    print_fleet_reports(console, rows)
    assert out.getvalue().splitlines()[-2].split()[-2] == "99.9"


@pytest.mark.parametrize(
    ("latency_s", "times"), [(5.0, "2.00"), (10.0, "1.00"), (0.5, "20.0"), (40.0, "0.25")]
)
def test_more_than_one_is_faster_than_round_robin(latency_s: float, times: str) -> None:
    lines = printed(rr=10.0, e2=latency_s)
    assert any("x faster" in line for line in lines) and any("than rr" in line for line in lines)
    (row,) = (line.split() for line in lines if line.split()[:1] == ["e2"])
    assert row[3:5] == [times, times]
