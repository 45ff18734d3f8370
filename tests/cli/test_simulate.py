"""`bros simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bros.cli.flags import DEFAULT_PROFILE
from bros.cli.main import main
from bros.core.errors import ConfigError
from bros.profiling.profiles import Profile, ProfileKey
from bros.simulator.metrics import Report
from bros.simulator.simulation import SimulatedScenario, read_profile, stored_profiles
from bros.simulator.sweep import run_scenario
from support.scenarios import SLOW, STEPS

KEY = ProfileKey(
    device="toy", model="tiny", weights="fp32", kernels="cpu", kv_dtype="fp32", threads=0
)
QUICK = ("--duration", "5", "--jobs", "1")


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    return Profile(key=KEY, kind="analytic", model=STEPS, kv_capacity_tokens=64_000).save(tmp_path)


def simulate(*arguments: str, **environ: str) -> int:
    return main(["simulate", *arguments], environ)


def test_tables_have_a_line_per_policy_and_fit_100_columns(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--policy", "bros,fcfs,rr", "--rt-rate", "2,6", "--profile", str(profile))
    assert simulate(*arguments, *QUICK) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert max(len(line) for line in lines) <= 100
    assert "…" not in out
    assert lines[0] == "tiny (fp32) on toy, analytic profile; 5 s simulated, seed 0"
    for heading in ("Real-time, 2 req/s", "Best-effort beside 6 req/s: always 16 in flight"):
        assert sum(line.startswith(heading) for line in lines) == 1
    for policy in ("bros", "fcfs", "rr"):
        assert sum(line.split()[:1] == [policy] for line in lines) == 4
    assert "first token within 400 ms, then one every 200 ms" in out


def test_classes_that_do_not_take_part_have_no_table(
    profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("--policy", "fcfs", "--profile", str(profile), *QUICK)
    assert simulate("--be", "0", *common) == 0
    assert "Best-effort" not in capsys.readouterr().out
    assert simulate("--rt-rate", "0", "--be-batches", *common) == 0
    out = capsys.readouterr().out
    assert "Real-time" not in out and "batches of 16 in flight" in out


def run_json(path: Path, *arguments: str, **environ: str) -> dict[str, object]:
    assert simulate(*arguments, "--json", str(path), **environ) == 0
    content: dict[str, object] = json.loads(path.read_text())
    return content


def test_json_says_what_was_run_and_what_came_of_it(profile: Path, tmp_path: Path) -> None:
    content = run_json(
        tmp_path / "out.json",
        *("--policy", "bros,fcfs", "--rt-rate", "3", "--rt-lengths", "sharegpt", "--seed", "7"),
        *(
            "--slo-ttft",
            "250",
            "--noise",
            "0.1",
            "--noise-correlation",
            "0.5",
            "--profile",
            str(profile),
            *QUICK,
        ),
        BROS_MAX_NUM_SEQS="32",
    )
    assert content["profile"] == json.loads(profile.read_text())
    bros, fcfs = content["runs"]  # type: ignore[misc]
    assert (bros["policy"], fcfs["policy"]) == ("bros", "fcfs")
    settings = bros["settings"]
    assert settings["seed"] == 7 and settings["duration_s"] == 5.0
    assert settings["rt"] == {"rate": 3.0, "sizes": "sharegpt"}
    assert settings["engine"]["slo_ttft"] == 250.0
    assert settings["engine"]["max_num_seqs"] == 32
    assert settings["engine"]["max_batch_tokens"] == 256, "whatever the device of the profile is"
    assert settings["disturbance"] == {"noise": 0.1, "correlation": 0.5, "slowdown": 1.0}
    assert settings["kv_blocks"] == 4000
    results = bros["results"]
    assert results["end_s"] >= 5.0
    assert results["by_class"]["rt"]["ttft_met"]["decided"] > 0
    assert set(results["by_class"]) == {"rt", "be"}


@pytest.mark.parametrize("number", [0, 2])
def test_ctrl_c_keeps_the_runs_that_had_finished(
    number: int,
    profile: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[SimulatedScenario] = []

    def run_some(scenario: SimulatedScenario, progress: Callable[[float], None]) -> Report:
        if len(done) == number:
            raise KeyboardInterrupt
        done.append(scenario)
        return run_scenario(scenario, progress)

    monkeypatch.setattr("bros.cli.simulate.run_scenario", run_some)
    out = tmp_path / "out.json"
    arguments = ("--policy", "bros,fcfs,rr", "--profile", str(profile), "--json", str(out))
    assert simulate(*arguments, *QUICK) == 130
    shown = capsys.readouterr().out
    if not number:
        assert shown == "" and not out.exists()
        return
    content = json.loads(out.read_text())
    assert [run["policy"] for run in content["runs"]] == ["bros", "fcfs"]
    assert content["unfinished"] == 1 and "interrupted after 2 of 3 runs" in shown
    assert "fcfs" in shown and "rr" not in shown.replace("interrupted", "")


@pytest.mark.multiprocess
def test_results_are_the_same_in_every_run_and_with_any_number_of_jobs(
    profile: Path, tmp_path: Path
) -> None:
    arguments = ("--policy", "bros,fcfs", "--rt-rate", "1:5:4", "--profile", str(profile))
    contents = [
        run_json(tmp_path / "out.json", *arguments, "--duration", "3", "--jobs", jobs)
        for jobs in ("1", "2", "1")
    ]
    for content in contents:
        del content["wall_s"]
    assert contents[0] == contents[1] == contents[2]


def test_a_trace_takes_the_place_of_the_rate(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "chat [new].csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46,374,44\n2023-11-16 18:15:48,90000,10\n2023-11-16 18:15:50,20,10\n"
    )
    arguments = ("--trace", str(trace), "--trace-speed", "4", "--policy", "fcfs")
    assert simulate(*arguments, "--profile", str(profile), *QUICK) == 0
    out = capsys.readouterr().out
    assert "Real-time, chat [new].csv x4: 2 requests" in out
    assert "1 more were left out as too long" in out
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46,90000,10\n2023-11-16 18:15:48,90000,10\n"
    )
    assert simulate(*arguments, "--profile", str(profile), *QUICK) == 0
    assert "chat [new].csv x4: all 2 requests were left out as too long" in capsys.readouterr().out


def test_options_of_bros_alone_are_not_asked_of_the_others(profile: Path, tmp_path: Path) -> None:
    arguments = ("--policy", "bros,fcfs", "--overload", "reject", "--profile", str(profile))
    content = run_json(tmp_path / "out.json", *arguments, *QUICK)
    used = [run["settings"]["engine"]["overload"] for run in content["runs"]]  # type: ignore[attr-defined]
    assert used == ["reject", "late"]


@pytest.mark.parametrize(
    ("policies", "options", "lines"),
    [
        ("bros,fcfs,rr", "--late shed", {"fcfs": "--late", "rr": "--late"}),
        ("fcfs", "--late shed --be-share 0.2", {"fcfs": "--be-share, --late"}),
        ("bros,edf", "--overload reject", {"edf": "--overload"}),
        ("bros", "--late shed --overload reject", {}),
    ],
)
def test_options_without_effect_are_named_for_each_policy(
    profile: Path,
    capsys: pytest.CaptureFixture[str],
    policies: str,
    options: str,
    lines: dict[str, str],
) -> None:
    arguments = ("--policy", policies, *options.split(), "--profile", str(profile))
    assert simulate(*arguments, "--duration", "1", "--jobs", "1") == 0
    assert capsys.readouterr().err.splitlines() == [
        f"bros: warning: {unused}: without effect with --policy {policy}"
        for policy, unused in lines.items()
    ]


def test_a_profile_of_several_ranks_is_simulated_as_any_other(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = dataclasses.replace(KEY, tp=3)
    shared = Profile(key=key, kind="measured", model=STEPS, kv_capacity_tokens=64_000).save(
        tmp_path
    )
    assert shared != profile
    found = [
        run_json(tmp_path / "out.json", *QUICK, "--profile", str(path))
        for path in (profile, shared)
    ]
    digests = [[run["results"]["digest"] for run in each["runs"]] for each in found]
    assert digests[0] == digests[1]
    assert "3 ranks" in capsys.readouterr().out


def test_suspended_steps_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = Profile(key=KEY, kind="analytic", model=SLOW, kv_capacity_tokens=64_000).save(tmp_path)
    arguments = ("--policy", "bros,fcfs", "--rt-rate", "1", "--duration", "60", "--jobs", "1")
    content = run_json(tmp_path / "out.json", *arguments, "--profile", str(slow))
    bros, fcfs = (run["results"] for run in content["runs"])  # type: ignore[attr-defined]
    assert bros["suspended_steps"] > 0 and bros["suspended_s"] > 0
    assert (fcfs["suspended_steps"], fcfs["suspended_s"]) == (0, 0)
    line = f"bros {bros['suspended_steps']} ({bros['suspended_s']:.1f} s, of which"
    assert f"Steps suspended for a first token: {line}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "bross"], "--policy: 'bross' is not one of bros, fcfs"),
        (["--policy", "bross"], "; did you mean bros?"),
        (["--policy", "fcfs", "--overload", "reject"], "--overload reject needs --policy bros"),
        (["--rt-rat", "3"], "--rt-rat: there is no such option; did you mean --rt-rate"),
        (["--rt-rate", "many"], "--rt-rate: 'many' is not a number"),
        (["--rt-rate=-1"], "--rt-rate: -1 must be at least 0"),
        (["--rt-rate", "5:1"], "--rt-rate: '5:1' is not a range"),
        (["--rt-rate", "1:5:0"], "--rt-rate: '1:5:0' is not a range"),
        (["--rt-rate", "1:5:1:1"], "--rt-rate: '1:5:1:1' is not a range"),
        (["--rt-lengths", "lmsis"], "--rt-lengths: 'lmsis' is not one of lmsys, sharegpt; did"),
        (["--be", "1.5"], "--be: '1.5' is not a whole number"),
        (["--be=-1"], "--be: -1 must be at least 0"),
        (["--be", "9", "--max-queue", "8"], "--be: 9 requests in flight need --max-queue 9"),
        (["--duration", "0"], "--duration: 0 must be more than 0"),
        (["--duration", "inf"], "--duration: 'inf' is not a finite number"),
        (["--duration", "nan"], "--duration: 'nan' is not a finite number"),
        (["--slowdown", "0"], "--slowdown: 0 must be at least 0.01"),
        (["--noise-correlation", "1"], "--noise-correlation: 1 must be less than 1"),
        (["--noise-correlation", "0.5"], "--noise-correlation: has no effect without --noise"),
        (["--jobs", "0"], "--jobs: 0 must be at least 1"),
        (["--kv-blocks", "10"], "--be: requests of up to 1152 tokens do not fit"),
        (["--slo-ttft", "soon"], "--slo-ttft: 'soon' is not a number"),
        (["--json", "/no/such/folder/out.json"], "--json: /no/such/folder/out.json cannot be"),
        (["--trace", "/no/such/file.csv"], "--trace: /no/such/file.csv cannot be read"),
        (["--port", "1"], "--port: there is no such option"),
        (["extra"], "unexpected argument 'extra'"),
    ],
)
def test_mistakes_are_named_in_one_line(
    profile: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert simulate("--profile", str(profile), *arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("bros: error: ") and err.count("\n") == 1
    assert message in err


def test_a_warm_up_is_not_counted(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--policy", "bros", "--rt-rate", "5", "--profile", str(profile))
    arguments += ("--duration", "6")
    (whole,) = run_json(tmp_path / "a.json", *arguments)["runs"]  # type: ignore[misc]
    capsys.readouterr()
    (rest,) = run_json(tmp_path / "b.json", *arguments, "--warm-up", "4")["runs"]  # type: ignore[misc]
    assert "6 s simulated, the first 4 s not counted" in capsys.readouterr().out
    assert rest["settings"]["warm_up_s"] == 4.0
    assert rest["results"]["digest"] == whole["results"]["digest"]
    counted = [run["results"]["by_class"]["rt"]["requests"] for run in (whole, rest)]
    assert 0 < counted[1] < counted[0] / 2


def test_profiles_are_found_by_path_and_by_name(tmp_path: Path, profile: Path) -> None:
    other = tmp_path / "other"
    Profile(key=KEY, kind="measured", model=STEPS).save(other)
    assert read_profile(str(profile), []).kind == "analytic"
    assert read_profile("toy/tiny-fp32", [tmp_path, other]).kind == "analytic"
    assert read_profile("toy/tiny-fp32.json", [other, tmp_path]).kind == "measured"
    assert list(stored_profiles([tmp_path])) == ["toy/tiny-fp32"]


@pytest.mark.parametrize(
    ("name", "hint"),
    [("toy/tiny-fp23", "; did you mean toy/tiny-fp32?"), ("x", "; there are toy/tiny-fp32")],
)
def test_unknown_profiles_are_refused_with_what_there_is(
    tmp_path: Path, profile: Path, name: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_profile(name, [tmp_path])
    assert str(caught.value).startswith(f"--profile: {name} is neither")
    assert str(caught.value).endswith(hint)


def test_a_profile_without_memory_needs_kv_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(Profile(key=KEY, kind="measured", model=STEPS).save(tmp_path))
    assert simulate("--policy", "fcfs", "--profile", path, *QUICK) == 2
    assert "--kv-blocks: the profile of tiny on toy does not say" in capsys.readouterr().err
    assert simulate("--policy", "fcfs", "--profile", path, "--kv-blocks", "500", *QUICK) == 0


def test_the_default_profile_comes_with_bros(tmp_path: Path) -> None:
    content = run_json(tmp_path / "out.json", "--policy", "fcfs", "--duration", "1")
    device = content["profile"]
    assert isinstance(device, dict)
    assert f"{device['device']}/{device['model']}-{device['weights']}" == DEFAULT_PROFILE


HEAVY = "torch transformers zmq msgspec pydantic starlette uvicorn prometheus_client".split()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "arguments", [["--help"], ["--policy", "bros,fcfs", "--duration", "2", "--jobs", "1"]]
)
def test_nothing_heavy_is_imported(arguments: list[str], profile: Path) -> None:
    code = (
        "import sys\n"
        "from bros.cli.main import main\n"
        "try:\n"
        "    status = main(sys.argv[1:], {})\n"
        "except SystemExit as end:\n"  # argparse leaves --help that way
        "    status = end.code\n"
        f"print(sorted(set(sys.modules).intersection({HEAVY!r})), status, file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "simulate", *arguments, "--profile", str(profile)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stderr.splitlines()[-1] == "[] 0"
    assert done.stdout
