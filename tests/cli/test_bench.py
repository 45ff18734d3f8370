"""`bros bench` from the command line to its files."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import shutil
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from bros.bench.planning import Case
from bros.bench.results import BenchResult, Scenario
from bros.bench.running import BenchRunner, MeasuredRun
from bros.cli.main import main
from bros.executor.model_store import default_cache_dir, resolve_model
from support.tiny_models import save_tiny_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a real tokenizer."""
    embedded = resolve_model(None, default_cache_dir())
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_llama(folder, vocab_size=49152)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded.folder / name, folder)
    return folder


GAP_S = 0.004
STATES = ("running", "waiting")


class FakeServer:
    """Answers completions at one token per `gap_s`, or with an error."""

    def __init__(self, gap_s: float = GAP_S, status: int = 200, version: object = "7.8") -> None:
        self._gap_s = gap_s
        self._status = status
        self._version = version
        self.bodies: list[dict[str, Any]] = []

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "fake", "max_model_len": 2048}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self._version})

    async def metrics(self, request: web.Request) -> web.Response:
        state = [f'bros_requests_{s}{{class="{c}"}} 0' for s in STATES for c in ("rt", "be")]
        return web.Response(text="\n".join([*state, ""]))

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if self._status != 200:
            return web.json_response({"error": {"message": "out of order"}}, status=self._status)
        with contextlib.suppress(ConnectionError):  # the client may leave at the end of a run
            return await self._stream(request, body)
        return web.Response()

    async def _stream(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        tokens = body["max_tokens"]
        for number in range(tokens):
            await asyncio.sleep(self._gap_s)
            reason = "length" if number == tokens - 1 else None
            choice = {"index": 0, "text": "x", "finish_reason": reason}
            await stream.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": tokens}
        last = json.dumps({"choices": [], "usage": usage}).encode()
        await stream.write(b"data: " + last + b"\n\ndata: [DONE]\n\n")
        return stream

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=1 << 24)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/version", self.version)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_post("/v1/completions", self.complete)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield runner.addresses[0] and f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


@dataclass(frozen=True)
class Measured:
    """What came of a run of every scenario."""

    out: Path
    shown: str
    bodies: list[dict[str, Any]]

    def copy(self, folder: Path) -> Path:
        shutil.copytree(self.out, folder)
        return folder


@pytest.fixture(scope="module", autouse=True)
def early_start() -> Iterator[None]:
    """Nothing here takes a second to prepare."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("load", "running"):
            patch.setattr(f"bros.bench.{module}.PREPARE_AHEAD_S", 0.1)
        yield


@pytest.fixture(scope="module")
def measured(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    server, out, shown = FakeServer(), tmp_path_factory.mktemp("measured") / "out", io.StringIO()
    arguments = ("--rates", "8", "--in-flight", "3", "--dialect", "vllm", "--target-name", "fake")
    loose = ("--slo-ttft", "60000", "--slo-tpot", "60000", "--scale", "0.03")
    with contextlib.redirect_stdout(shown):
        assert asyncio.run(bench(server, model, out, *arguments, *loose)) == 0
    return Measured(out, shown.getvalue(), server.bodies)


async def bench(server: FakeServer, model: Path, out: Path, *arguments: str) -> int:
    """The command in a thread, as it has an event loop of its own."""
    async with server.running() as url:
        common = ("bench", str(model), "--target", url, "--duration", "0.5", "--warm-up", "0.1")
        return await asyncio.to_thread(main, [*common, "--out", str(out), *arguments], {})


def result(out: Path) -> BenchResult:
    return BenchResult.from_json((out / "result.json").read_text())


@pytest.mark.slow
@pytest.mark.long
def test_a_target_is_measured_in_every_scenario(measured: Measured) -> None:
    out = measured.out
    found = result(out)
    assert [r.scenario for r in found.results] == [
        Scenario.S0, Scenario.S2, Scenario.S1, Scenario.S3,
    ]  # fmt: skip
    for run in found.results:
        assert run.target == "fake" and run.dialect == "vllm"
        if run.rt_rate is not None:
            assert run.rt.both_met.value == 1.0
            assert GAP_S <= (run.rt.ttft_s.p50 or 0) and GAP_S <= (run.rt.tpot_s.p50 or 0)
        assert run.be.tokens_per_s > 0 or run.scenario is Scenario.S0
    assert any("priority" in body for body in measured.bodies)
    rows = list(csv.DictReader((out / "summary.csv").read_text().splitlines()))
    assert len(rows) == 8
    page = (out / "report.html").read_text()
    assert "fake" in page and 'src="http' not in page and 'href="http' not in page
    requests = sorted(path.name for path in out.glob("requests_*.csv"))
    assert len(requests) == 4
    assert "S3" in measured.shown and "report.html" in measured.shown


@pytest.mark.slow
async def test_a_server_that_fails_shows_as_such(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("--rates", "8", "--scenarios", "S3", "--in-flight", "1")
    assert await bench(FakeServer(status=500), model, out, *arguments) == 0
    (run,) = result(out).results
    assert run.rt.completed == 0 and run.rt.errors == run.rt.requests > 0
    assert run.rt.both_met.value == 0.0
    assert any("out of order" in reason for reason in run.rt.reasons)
    assert "out of order" in capsys.readouterr().out
    assert "out of order" in (out / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.long
async def test_reports_are_added_to_and_runs_repeated_in_place(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--rates", "8", "--scenarios", "S0", "--in-flight", "0", "--scale", "0.03")
    requests = []
    for number, name in enumerate(("one", "two", "one")):
        how = (*arguments, "--target-name", name, "--seed", str(number))
        server = FakeServer(version=f"7.{number}" if number else 8)
        assert await bench(server, model, out, *how, "--append") == 0
        requests.append((out / f"requests_S0_{name}_8.0.csv").read_text())
    two, one = result(out).results
    assert (two.target, two.command.seed, two.server_version) == ("two", 1, "7.1")
    assert (one.target, one.command.seed, one.server_version) == ("one", 2, "7.2")
    assert one.rt_digest != two.rt_digest and requests[0] != requests[2]
    assert {path.name for path in out.glob("requests_*")} == {
        "requests_S0_one_8.0.csv", "requests_S0_two_8.0.csv",
    }  # fmt: skip


@pytest.mark.slow
async def test_another_objective_is_added_and_warned_of(
    measured: Measured, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = measured.copy(tmp_path / "out")
    arguments = ("--rates", "8", "--scenarios", "S0", "--in-flight", "0", "--scale", "0.03")
    assert "other objectives" not in measured.shown
    how = (*arguments, "--append", "--slo-ttft", "1234")
    assert await bench(FakeServer(), model, out, *how, "--target-name", "two") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "S0 two, 8/s: different objectives than S0 fake, 8/s" in shown
    assert [command.slo.ttft_s for command in result(out).commands] == [60.0, 1.234]


@pytest.mark.slow
async def test_runs_that_are_replaced_are_named_before(
    measured: Measured, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = measured.copy(tmp_path / "out [old]")
    date = result(out).results[0].command.environment.date
    arguments = ("--rates", "8,9", "--scenarios", "S0", "--in-flight", "0", "--scale", "0.03")
    how = (*arguments, "--append", "--target-name", "fake")
    assert await bench(FakeServer(), model, out, *how) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "replaces" in line] == [
        f"note: this replaces the run of S0 fake, 8/s from {date}"
    ]
    assert f"The report is in {out}/report.html" in lines


@pytest.mark.slow
async def test_a_new_report_takes_the_place_of_the_old_one_and_of_nothing_else(
    measured: Measured, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = measured.copy(tmp_path / "out")
    (out / "mine.png").write_text("x")
    (out / "requests_mine.csv").write_text("x")
    before = {path.name for path in out.iterdir()}
    of_runs = {path.name for path in measured.out.glob("requests_*")}
    assert "be_throughput.png" in before and len(of_runs) == 4
    alone = ("--rates", "8", "--scenarios", "S0", "--in-flight", "0", "--scale", "0.03")
    assert await bench(FakeServer(), model, out, *alone, "--target-name", "new") == 0
    assert capsys.readouterr().out.splitlines()[0] == (
        f"note: this replaces the report in {out} of S0 fake, 8/s; S2 fake; S1 fake, 8/s; "
        "S3 fake, 8/s; --append adds to it"
    )
    after = {path.name for path in out.iterdir()}
    assert before - after >= {"be_throughput.png", *of_runs}
    assert {"mine.png", "requests_mine.csv"} <= after
    assert after - before == {"requests_S0_new_8.0.csv"}


@pytest.mark.slow
def test_a_report_is_written_anew_without_a_server(
    measured: Measured, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = measured.copy(tmp_path / "out")
    names = ("result.json", "summary.csv", "report.html", "attainment.png")
    before = {name: (out / name).read_bytes() for name in names}
    for name in names[1:]:
        (out / name).write_text("spoilt")
    assert main(["bench", "--report-only", str(out)], {}) == 0
    assert {name: (out / name).read_bytes() for name in names} == before
    table = capsys.readouterr().out
    assert table.partition("The report is in")[0] in measured.shown and "S0 fake" in table


@pytest.mark.parametrize("text", [None, "{}", '{"schema_version": 1}', "\xff"])
def test_only_a_result_can_be_written_anew(
    text: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "result.json").write_text(text, encoding="latin-1")
    assert main(["bench", "--report-only", str(tmp_path)], {}) == 2
    assert "--report-only: the result.json in" in capsys.readouterr().err
    assert len(list(tmp_path.iterdir())) == (text is not None)


@pytest.mark.slow
def test_an_interrupted_comparison_has_a_report_of_its_runs(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run, saved = BenchRunner.run, list[BenchResult]()

    async def run_once(runner: BenchRunner, case: Case) -> MeasuredRun:
        if (tmp_path / "result.json").exists():
            saved.append(result(tmp_path))
            raise KeyboardInterrupt
        return await run(runner, case)

    monkeypatch.setattr(BenchRunner, "run", run_once)
    arguments = ("--rates", "8", "--scenarios", "S0,S3", "--in-flight", "1", "--scale", "0.03")
    assert asyncio.run(bench(FakeServer(), model, tmp_path, *arguments)) == 130
    [before] = saved
    assert [run.scenario for run in before.results] == [Scenario.S0]
    assert result(tmp_path).results == before.results
    assert "S0" in (tmp_path / "report.html").read_text()
    assert (tmp_path / "attainment.png").exists()
    shown = " ".join(capsys.readouterr().out.split())
    assert f"The report of the finished runs is in {tmp_path}/report.html" in shown


@pytest.mark.slow
def test_sigterm_is_an_interruption(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def terminated(runner: BenchRunner, case: Case) -> MeasuredRun:
        signal.raise_signal(signal.SIGTERM)
        await asyncio.sleep(60)
        raise AssertionError("it went on")

    monkeypatch.setattr(BenchRunner, "run", terminated)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:  # workers of pytest-xdist ignore SIGINT
        arguments = ["bench", str(model), "--target", "http://127.0.0.1:9", "--scenarios", "S0"]
        assert main([*arguments, "--out", str(tmp_path / "out")], {}) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.slow
async def test_the_capacity_of_a_target(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = ("--rates", "4:12:4", "--capacity", "0.9", "--in-flight", "0", "--scale", "0.03")
    loose = ("--slo-ttft", "60000", "--slo-tpot", "60000", "--drain", "60")
    assert await bench(FakeServer(), model, out, *arguments, *loose) == 0
    (capacity,) = result(out).capacities
    assert capacity.rate == 12.0 and [t.rate for t in capacity.tried] == [4.0, 12.0]


@pytest.mark.slow
async def test_a_trace_without_a_request_that_fits_is_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,90000,10\n")
    arguments = ("--rt", f"azure:{trace}", "--scenarios", "S0", "--skip-overlong")
    assert await bench(FakeServer(), model, tmp_path / "out", *arguments) == 2
    shown = capsys.readouterr().err
    assert "there is nothing to send: 1 of 1 real-time requests were left out" in shown


@pytest.mark.slow
async def test_the_servers_metrics_have_the_time_of_the_requests(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampling begins while the first requests are still prepared, before the run."""
    for module in ("load", "running"):
        monkeypatch.setattr(f"bros.bench.{module}.PREPARE_AHEAD_S", 0.5)
    monkeypatch.setattr("bros.bench.running._SAMPLE_S", 0.05)
    arguments = ("--rates", "8", "--scenarios", "S0", "--scale", "0.03")
    assert await bench(FakeServer(), model, tmp_path / "out", *arguments) == 0
    [run] = result(tmp_path / "out").results
    times = [sample.at_s for sample in run.timeline]
    assert -0.5 < times[0] < 0.0 < times[-1] and times == sorted(times)


@pytest.mark.slow
@pytest.mark.parametrize(("drain", "completed"), [("0", False), ("60", True)])
async def test_the_last_requests_may_end_after_the_run(
    drain: str, completed: bool, model: Path, tmp_path: Path
) -> None:
    """A response takes longer than the whole run."""
    arguments = ("--rates", "12", "--scenarios", "S0", "--scale", "0.03", "--drain", drain)
    assert await bench(FakeServer(gap_s=0.7), model, tmp_path / "out", *arguments) == 0
    [run] = result(tmp_path / "out").results
    assert run.rt.requests > 0
    assert run.rt.completed == (run.rt.requests if completed else 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policies", "bross"], "--policies: 'bross' is not one of"),
        (["--rates", "x"], "--rates: 'x' is not a number"),
        (["--rt", "lmsis"], "--rt: there is no workload 'lmsis'"),
        (["--be", "azure:/no/such.csv"], "--be: "),
        (["--duration", "5", "--warm-up", "5"], "--warm-up: must be shorter than"),
        (["--scenarios", "S9"], "--scenarios: 'S9' is not a list of S0,S1,S2,S3"),
        (["--endpoint", "chats"], "--endpoint: 'chats' is not one of completions, chat"),
        (["--target", "http://x", "--dialect", "vlm"], "no dialect is called 'vlm'"),
        (["--capacity", "0.99"], "--capacity: needs a share of at most 1, and a range"),
        (["--capacity", "2", "--rates", "1:2:1"], "--capacity: needs a share of at most 1"),
        (["--drain", "-1"], "--drain: -1 must be at least 0"),
        (["--out", "/proc/x"], "--out: the report cannot be written to /proc/x: No such file"),
        (["--scale", "2"], "--scale: 2 must be at most 1"),
        (["--in-flight", "-1"], "--in-flight: -1 must be at least 0"),
        (["--longest-prompt", "0"], "--longest-prompt: 0 must be at least 1"),
        (["--rate", "1"], "--rate: there is no such option; did you mean --rates"),
        (["--slo-ttft", "soon"], "--slo-ttft: 'soon' is not a number"),
    ],
)
def test_wrong_options(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", str(model), *arguments], {}) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("bros: error: ") and err.count("\n") == 1
    assert message in err


def test_no_server_is_an_error(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", str(model), "--target", "http://127.0.0.1:9", "--out", str(tmp_path)]
    assert main(arguments, {}) == 1
    assert "http://127.0.0.1:9 does not answer: cannot connect to 127.0.0.1:9: Conn" in (
        capsys.readouterr().err
    )


@pytest.mark.long
@pytest.mark.multiprocess
def test_policies_are_compared_on_servers_of_our_own(model: Path, tmp_path: Path) -> None:
    arguments = [
        *("bench", str(model), "--policies", "fcfs,bros", "--rates", "8", "--duration", "1.5"),
        *(
            "--warm-up",
            "0.5",
            "--in-flight",
            "2",
            "--scale",
            "0.05",
            "--out",
            str(tmp_path / "out"),
        ),
        *("--kv-blocks", "200", "--max-model-len", "128", "--data-dir", str(tmp_path)),
    ]
    assert main(arguments, {}) == 0
    found = result(tmp_path / "out")
    runs = [(run.scenario.value, run.policy) for run in found.results]
    assert runs == [("S2", "fcfs"), ("S1", "fcfs"), ("S0", "bros"), ("S3", "bros")]
    for run in found.results:
        assert run.rt.errors + run.be.errors == 0, (run.rt.reasons, run.be.reasons)
        assert run.timeline, "the server is asked how it is"
    [command] = found.commands
    assert command.settings["--kv-blocks"] == 200
    assert "torch" in command.environment.packages and found.results[0].server_version
