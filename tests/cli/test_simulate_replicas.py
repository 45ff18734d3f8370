"""`bros simulate --replicas`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from bros.cli.flags import MAX_REQUESTS, REPLICA_PROFILE, add_arguments
from bros.cli.main import main
from bros.cli.simulate import ReplicaSettings, read_replica_settings
from bros.profiling.profiles import Profile, ProfileKey
from support.scenarios import STEPS

KEY = ProfileKey(
    device="toy", model="tiny", weights="fp16", kernels="cpu", kv_dtype="fp16", threads=0
)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    made = Profile(key=KEY, kind="analytic", model=STEPS, kv_capacity_tokens=64_000)
    return str(made.save(tmp_path))


def simulate(profile: str, *arguments: str) -> int:
    common = ("--profile", profile, "--requests", "20", "--jobs", "1")
    return main(["simulate", "--replicas", *arguments, *common], {})


def settings(profile: str, *arguments: str) -> ReplicaSettings:
    parser = argparse.ArgumentParser()
    add_arguments("simulate", parser)
    args = parser.parse_args(["--profile", profile, "--replicas", *arguments])
    return read_replica_settings(args, {}, pytest.fail)


def trace_of(tmp_path: Path, *times: int) -> str:
    line = {"timestamp": 0, "input_length": 600, "output_length": 4, "hash_ids": [0, 1]}
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps({**line, "timestamp": t}) + "\n" for t in times))
    return str(path)


def test_tables_have_a_line_per_router_and_fit_100_columns(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(profile, "1:3", "--be-requests", "0.5", "--policy", "fcfs,bros") == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 100 and "…" not in out
    assert lines[0] == "tiny (fp16) on toy, analytic profile, each replica; seed 0"
    for head in (
        "1 replica, toolbench, 4.5 req/s: 20 requests, policy fcfs",
        "2 replicas, toolbench, 9 req/s: 20 requests, policy bros",
    ):
        assert head in lines
    for router in ("e2", "rr", "least", "oracle"):
        assert sum(line.split()[:1] == [router] for line in lines) == 4
    baseline = next(line.split() for line in lines if line.split()[:1] == ["rr"])
    assert baseline[3:5] == ["1.00", "1.00"]
    assert "met %" in out and lines[-1].startswith("16 runs in")


def test_without_round_robin_nothing_is_compared_with_it(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(profile, "2", "--router", "least", "--workload", "loogle") == 0
    row = next(s for s in capsys.readouterr().out.splitlines() if s.startswith(" least"))
    assert row.split()[3:5] == ["-", "-"]


def test_a_line_says_how_many_requests_were_refused(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--router", "e2,rr", "--policy", "bros", "--rate", "1000", "--slo-ttft", "10")
    assert simulate(profile, "2", *arguments, "--be-requests", "0.1") == 0
    assert "Refused" not in capsys.readouterr().out
    assert simulate(profile, "2", *arguments, "--overload", "reject", "--be-requests", "0.1") == 0
    found = [s for s in capsys.readouterr().out.splitlines() if s.startswith("Refused")]
    assert len(found) == 1 and re.search(r"e2 \d+, rr \d+$", found[0])


def test_json_says_what_was_run_and_what_came_of_it(profile: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    arguments = ("--router", "rr,e2", "--workload", "embodied", "--rate", "7", "--families", "3")
    assert simulate(profile, "2", *arguments, "--seed", "5", "--json", str(path)) == 0
    content = json.loads(path.read_text())
    assert content["profile"]["model"] == "tiny"
    rr, e2 = content["runs"]
    assert (rr["router"], e2["router"], e2["replicas"], e2["policy"]) == ("rr", "e2", 2, "fcfs")
    assert e2["settings"]["load"]["rate"] == 7.0 and e2["settings"]["load"]["families"] == 3
    assert e2["settings"]["seed"] == 5 and e2["settings"]["engine"]["max_batch_tokens"] == 512
    assert e2["results"]["requests"] == e2["results"]["finished"] == 20
    assert rr["results"]["reasons"] == {"turn": 20}
    assert rr["results"]["digest"] != e2["results"]["digest"]


def test_results_do_not_depend_on_the_number_of_processes(profile: str, tmp_path: Path) -> None:
    found = []
    for jobs in ("1", "2"):
        path = tmp_path / f"{jobs}.json"
        assert simulate(profile, "2", "--router", "rr,e2", "--json", str(path)) == 0
        found.append([run["results"] for run in json.loads(path.read_text())["runs"]])
    assert found[0] == found[1]


def test_a_trace_is_played(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--workload", "mooncake", "--trace", trace_of(tmp_path, 0, 500, 1000))
    assert simulate(profile, "2", *arguments, "--rate", "2") == 0
    assert "2 replicas, t.jsonl, 2 req/s: 3 requests, policy fcfs" in capsys.readouterr().out
    assert simulate(profile, "2", *arguments, "--router", "rr") == 0
    assert "2 replicas, t.jsonl, 0.16 req/s: 3 requests" in capsys.readouterr().out


def test_runs_that_are_cut_short_are_named(profile: str, tmp_path: Path) -> None:
    """ToolBench's 1,350 requests for each of 64 replicas are too many, for 32 they are not."""
    assert settings(profile, "16:128").shortened == (64, 128)
    assert settings(profile, "47", "--families", "9").shortened == ()
    assert settings(profile, "48", "--families", "9").shortened == (48,)
    assert settings(profile, "128", "--requests", str(MAX_REQUESTS)).shortened == ()
    trace = ("--workload", "mooncake", "--trace", trace_of(tmp_path, 0, 500))
    assert settings(profile, "4096", *trace).shortened == ()


def test_a_run_that_is_cut_short_says_so(
    profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bros.cli.simulate.MAX_REQUESTS", 20)
    common = ("--router", "rr", "--profile", profile, "--jobs", "1")
    assert main(["simulate", "--replicas", "2,4", *common], {}) == 0
    out, _ = capsys.readouterr()
    assert "With 2, 4 replicas: limited to 20 requests" in " ".join(out.split())
    assert max(len(line) for line in out.splitlines()) <= 100
    assert simulate(profile, "1", "--router", "rr") == 0
    assert "only 20 requests" not in capsys.readouterr().out


def test_help_has_the_defaults_of_several_replicas(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"], {})
    text = " ".join(capsys.readouterr().out.split())
    config = settings(profile, "2").scenarios[0].config
    for default in (
        f"(default; with --replicas {REPLICA_PROFILE}, unless with --programs)",
        f"requests per step (default: 64; with --replicas or --programs {config.max_num_seqs})",
        f"are chunked (default: 256; with --replicas or --programs {config.max_batch_tokens})",
        f"--kv-blocks; with --replicas or --programs {config.host_kv_blocks})",
        "JSON lines of a Mooncake trace",
        "mooncake: 0.08; azure: 1.5)",
    ):
        assert default in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("0",), "--replicas: 0 must be at least 1"),
        (("1:x",), "--replicas: 'x' is not a whole number"),
        (("8:2",), "--replicas: '8:2' is not a range; write 1:1024"),
        (("5000",), "--replicas: 5000 must be at most 4096"),
        (("2", "--router", "e3"), "--router: 'e3' is not one of e2, rr, least, oracle"),
        (("2", "--workload", "videos"), "--workload: 'videos' is not one of toolbench"),
        (("2", "--workload", "mooncake"), "--workload mooncake: requires --trace"),
        (("2", "--workload", "azure"), "--workload azure: requires --trace"),
        (
            ("2", "--workload", "azure", "--trace", "a.csv"),
            "azure requires two files, CODE,CONVERSATIONS",
        ),
        (
            ("2", "--workload", "mooncake", "--families", "3"),
            "not available with --workload mooncake",
        ),
        (
            ("2", "--workload", "azure", "--popularity", "zipf"),
            "not available with --workload azure",
        ),
        (("2", "--trace", "x"), "--trace: requires --workload mooncake or azure"),
        (("2", "--popularity", "odd"), "--popularity: 'odd' is not one of even, zipf, dataset"),
        (("2", "--be-requests", "2"), "--be-requests: 2 must be at most 1"),
        (("2", "--rate", "0"), "--rate: 0 must be at least 1e-06"),
        (("2", "--notice-delay", "-1"), "--notice-delay: -1 must be at least 0"),
        (("2", "--kv-blocks", "4"), "the longest that can be served is 64"),
    ],
)
def test_wrong_values_are_named(
    arguments: tuple[str, ...], said: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(profile, *arguments) == 2
    assert said in capsys.readouterr().err


def test_flags_of_the_other_kind_of_run_are_without_effect_and_that_is_said(
    profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(profile, "2", "--router", "rr", "--duration", "5", "--be-batches") == 0
    assert "--duration, --be-batches: without effect with --replicas" in capsys.readouterr().err
    alone = ["simulate", "--policy", "fcfs", "--duration", "1", "--profile", profile]
    assert main([*alone, "--router", "rr", "--jobs", "1"], {}) == 0
    assert "--router: without effect, needs --replicas" in capsys.readouterr().err
