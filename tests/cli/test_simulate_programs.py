"""`bros simulate --programs`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from bros.cli.flags import add_arguments
from bros.cli.main import main
from bros.cli.simulate import ProgramSettings, read_program_settings
from bros.profiling.profiles import Profile, ProfileKey
from bros.simulator.programs import PROGRAMS
from support.scenarios import STEPS

KEY = ProfileKey(
    device="toy", model="tiny", weights="fp16", kernels="cpu", kv_dtype="fp16", threads=0
)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    made = Profile(key=KEY, kind="analytic", model=STEPS, kv_capacity_tokens=64_000)
    return str(made.save(tmp_path))


def simulate(profile: str, *arguments: str) -> int:
    common = ("--profile", profile, "--requests", "3", "--jobs", "1", "--rate", "2")
    return main(["simulate", "--programs", *arguments, *common], {})


def settings(profile: str, *arguments: str) -> ProgramSettings:
    parser = argparse.ArgumentParser()
    add_arguments("simulate", parser)
    args = parser.parse_args(["--profile", profile, "--programs", *arguments])
    return read_program_settings(args, {}, pytest.fail)


def test_tables_have_a_line_per_run_and_fit_100_columns(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(profile, "gpts,copilot", "--replicas", "1,2", "--router", "e2,least") == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 100 and "…" not in out
    assert lines[0].startswith("tiny (fp16) on toy, analytic profile, each replica; 250 ms")
    for name in ("gpts", "copilot"):
        assert f"{name}: {PROGRAMS[name].title}; policy bros" in lines
    rows = [line.split() for line in lines if {"session", "calls"} & set(line.split()[:3])]
    assert len(rows) == 2 * 2 * 3
    baseline = next(row for row in rows if row[:2] == ["1", "calls"])
    assert baseline[6:8] == ["1.00", "1.00"]
    assert lines[-1].startswith("12 runs in")


def test_json_says_what_was_run_and_what_came_of_it(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("--replicas", "2", "--run-as", "calls", "--network-delay", "100", "--seed", "5")
    assert simulate(profile, "gpts", *arguments, "--json", str(path)) == 0
    content = json.loads(path.read_text())
    assert content["profile"]["model"] == "tiny"
    (run,) = content["runs"]
    assert (run["programs"], run["run_as"], run["replicas"]) == ("gpts", "calls", 2)
    assert (run["router"], run["policy"]) == ("e2", "bros")
    assert run["settings"]["delay_s"] == 0.1 and run["settings"]["seed"] == 5
    assert run["settings"]["rate"] == 2.0 and run["settings"]["count"] == 3
    assert run["settings"]["chats"] == {"rate": 1.0, "sizes": "lmsys"}
    assert run["results"]["programs"] == 3 and run["results"]["latency_s"]["count"] == 3
    assert sum(run["results"]["reasons"].values()) >= 3


def test_results_do_not_depend_on_the_number_of_processes(profile: str, tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        arguments = ("--replicas", "2", "--jobs", jobs, "--json", str(path))
        common = ("--profile", profile, "--requests", "2", "--rate", "2")
        assert main(["simulate", "--programs", "gpts", *arguments, *common], {}) == 0
        found.append([run["results"] for run in json.loads(path.read_text())["runs"]])
    assert found[0] == found[1]


def test_defaults_are_per_replica(profile: str) -> None:
    one, four = (
        settings(profile, "chain", "--replicas", n, "--run-as", "session").scenarios[0]
        for n in ("1", "4")
    )
    kind = PROGRAMS["chain"]
    assert (one.rate, one.count) == (kind.rate, kind.count)
    assert (four.rate, four.count) == (4 * kind.rate, 4 * kind.count)
    assert one.chats.label == four.chats.label == "1 req/s"


def test_one_replica_needs_no_router(profile: str) -> None:
    arguments = ("--replicas", "1,2", "--router", "rr,least", "--run-as", "session")
    found = [(s.replicas, s.router) for s in settings(profile, "gpts", *arguments).scenarios]
    assert found == [(1, "rr"), (2, "rr"), (2, "least")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("map-reduced",), "--programs: 'map-reduced' is not one of map-reduce"),
        (("gpts", "--run-as", "hand"), "--run-as: 'hand' is not one of session, calls"),
        (("gpts", "--router", "oracle"), "--router: 'oracle' is not one of e2, rr, least"),
        (("gpts", "--network-delay", "-1"), "--network-delay"),
        (("gpts", "--replicas", "0"), "--replicas"),
        (("gpts", "--kv-blocks", "8"), "--programs: gpts cannot be served"),
    ],
)
def test_what_cannot_be_run_is_refused(
    profile: str, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    assert simulate(profile, *arguments) != 0
    assert message in capsys.readouterr().err


def test_options_without_effect_are_named(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(profile, "gpts", "--run-as", "calls", "--be", "3", "--workload", "video") == 0
    assert "--be, --workload: without effect with --programs" in capsys.readouterr().err
    arguments = ["simulate", "--profile", profile, "--duration", "1", "--network-delay", "3"]
    assert main(arguments, {}) == 0
    assert "--network-delay: without effect, needs --programs" in capsys.readouterr().err
