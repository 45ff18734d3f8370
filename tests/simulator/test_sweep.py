"""Many runs on several processes: the same results, whatever their number."""

from __future__ import annotations

import dataclasses
import multiprocessing

import pytest

from bros.core.errors import ConfigError
from bros.simulator.metrics import Report
from bros.simulator.sweep import WorkerError, _work, run_all, run_scenario
from bros.workload.arrivals import BeLoad, PoissonLoad
from support.scenarios import DeadlyLoad, scenario

SCENARIOS = [
    scenario(policy, rate=rate, duration_s=3.0)
    for policy in ("bros", "fcfs")
    for rate in (2.0, 8.0, 4.0)
]


@pytest.mark.multiprocess
@pytest.mark.parametrize("jobs", [2, pytest.param(3, marks=pytest.mark.long)])
def test_reports_do_not_depend_on_the_number_of_processes(jobs: int) -> None:
    told: list[tuple[int, float]] = []
    alone = run_all(run_scenario, SCENARIOS, 1)
    results: dict[int, Report] = {}
    together = run_all(
        run_scenario,
        SCENARIOS,
        jobs,
        lambda index, share: told.append((index, share)),
        results.__setitem__,
    )
    assert together == alone == [results[index] for index in range(len(SCENARIOS))]
    assert len({report.digest for report in alone}) == len(SCENARIOS)
    assert {index for index, share in told if share == 1.0} == set(range(len(SCENARIOS)))


def test_one_process_tells_its_progress_too() -> None:
    told: list[tuple[int, float]] = []
    reports = run_all(
        run_scenario, SCENARIOS[:2], 1, lambda index, share: told.append((index, share))
    )
    assert reports == [run_scenario(each) for each in SCENARIOS[:2]]
    assert {index for index, share in told if share == 1.0} == {0, 1}


def test_no_scenarios_are_no_reports() -> None:
    assert run_all(run_scenario, [], 4) == []


@pytest.mark.multiprocess
def test_a_scenario_that_cannot_run_is_the_caller_s_mistake() -> None:
    wrong = scenario(be=BeLoad(20), max_queue=10)
    with pytest.raises(ConfigError, match="--max-queue"):
        run_all(run_scenario, [*SCENARIOS[:1], wrong], 2)


@pytest.mark.multiprocess
def test_a_failing_worker_is_reported_with_its_traceback() -> None:
    wrong = dataclasses.replace(SCENARIOS[0], rt=PoissonLoad(1.0, "no such lengths"))
    with pytest.raises(WorkerError, match="KeyError: 'no such lengths'"):
        run_all(run_scenario, [*SCENARIOS[:1], wrong], 2)


@pytest.mark.multiprocess
def test_a_worker_that_dies_is_noticed() -> None:
    deadly = dataclasses.replace(SCENARIOS[0], rt=DeadlyLoad())
    with pytest.raises(WorkerError, match="the process that ran simulation 2 died"):
        run_all(run_scenario, [SCENARIOS[0], deadly], 2)


@pytest.mark.multiprocess
def test_a_worker_without_its_parent_ends_silently(capfd: pytest.CaptureFixture[str]) -> None:
    context = multiprocessing.get_context("spawn")
    parent_end, worker_end = context.Pipe()
    worker = context.Process(target=_work, args=(worker_end, run_scenario))
    worker.start()
    worker_end.close()
    parent_end.send(SCENARIOS[0])
    parent_end.close()
    worker.join()
    assert worker.exitcode == 0 and capfd.readouterr().err == ""
