"""What people and programs get to see of a comparison."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import json
import random
import re
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from warnings import catch_warnings

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from bros.bench.client import Outcome, Record
from bros.bench.metrics import NAMES, Window, confidence_interval, judge, tokens_per_s
from bros.bench.report.files import (
    _png,
    page,
    requests_file_name,
    write_report,
    write_requests,
    write_summary,
)
from bros.bench.report.plots import DARK, LIGHT, _fonts, figures
from bros.bench.report.terminal import COLUMNS, LiveView, cells, print_report
from bros.bench.report.words import verdict, warnings
from bros.bench.results import (
    BadResultsError,
    BenchResult,
    CapacityResult,
    CapacityTrial,
    Command,
    Scenario,
    ServerSample,
)
from bros.core.request import Slo
from bros.workload.attainment import Attainment, Judged
from support.bench_records import (
    BE,
    COMMAND,
    HEALTHY,
    RT,
    SLO,
    make_bench,
    make_load,
    make_record,
    make_result,
    typical_bench,
)
from support.tier import by_tier

WINDOW = Window(10.0, 60.0, 70.0)
REFUSAL = "refused: <b>429</b> & busy"


def healthy_records() -> list[Record]:
    return make_load(random.Random(3), duration_s=70.0, rt_rate=0.4, be_in_flight=2)


def failing_bench() -> BenchResult:
    """S3 refuses most and stalls on the rest, with a client that fell behind; S1 is well."""
    refused = [
        make_record(name=f"x{n}", due_s=12.0 + n, outcome=Outcome.REFUSED, detail=REFUSAL)
        for n in range(5)
    ]
    stalled = [make_record(due_s=20.0, outcome=Outcome.OPEN, gaps_s=gaps) for gaps in ([], [0.1])]
    late = dataclasses.replace(HEALTHY, fell_behind=True, lateness_max_s=3.2)
    return make_bench(
        [
            make_result(Scenario.S3, refused + stalled, window=WINDOW, rt_rate=0.4, client=late),
            make_result(
                Scenario.S1, healthy_records(), window=WINDOW, rt_rate=0.4, policy=None,
                target="vllm",
            ),
        ]
    )  # fmt: skip


def only(scenario: Scenario, records: list[Record], rate: float | None = None) -> BenchResult:
    return make_bench([make_result(scenario, records, window=WINDOW, rt_rate=rate)])


ONE_TOKEN = [make_record(due_s=20.0, gaps_s=[0.1])]
BENCHES: Mapping[str, Callable[[], BenchResult]] = {
    "typical": lambda: typical_bench((0.2, 0.4)),
    "one rate": lambda: typical_bench((0.3,)),
    "failing": failing_bench,
    "nothing run": lambda: make_bench([]),
    "nothing sent": lambda: only(Scenario.S3, [], 0.5),
    "one token": lambda: only(Scenario.S0, ONE_TOKEN, 0.1),
    "no real-time": lambda: only(Scenario.S2, [make_record(BE, due_s=20.0, gaps_s=[0.1, 0.1])]),
    "open only": lambda: only(Scenario.S0, [make_record(due_s=20.0, outcome=Outcome.OPEN)], 0.1),
}


@functools.cache
def bench_named(name: str) -> BenchResult:
    """Made when it is needed: some take seconds, and every worker of the tests imports this."""
    return BENCHES[name]()


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> BenchResult:
    return bench_named(request.param)


each_bench = pytest.mark.parametrize("bench", list(BENCHES), indirect=True)


class Page(HTMLParser):
    """Texts, and everything that a browser would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        assert self._open == [], "tags that were not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "source"):
            self._open.append(tag)
        found = ("src", "srcset", "href", "data", "action", "poster", "background")
        self.links += [value or "" for name, value in attrs if name in found]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@functools.cache
def page_named(name: str) -> str:
    """Drawing takes a while."""
    return page(bench_named(name))


def terminal(bench: BenchResult, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    print_report(console, bench)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@each_bench
def test_json_comes_back_as_it_was(bench: BenchResult) -> None:
    assert BenchResult.from_json(bench.to_json()) == bench


def test_json_has_the_names_of_vllm_beside_ours() -> None:
    bench = bench_named("typical")
    for tree, result in zip(json.loads(bench.to_json())["results"], bench.results, strict=True):
        assert set(NAMES) <= set(tree)
        assert tree["label"] == result.scenario.label
        assert tree["completed"] == result.rt.completed + result.be.completed
        rt = tree["by_class"]["rt"]
        if result.rt.requests:
            assert rt["median_ttft_ms"] == pytest.approx(1e3 * rt["ttft_s"]["p50"], rel=0.2)
        assert tree["output_throughput"] == pytest.approx(
            sum(tree["by_class"][kind]["output_tokens_per_s"] for kind in ("rt", "be"))
        )


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.update(schema_version=1),
        lambda tree: tree.pop("schema_version"),
        lambda tree: tree.pop("results"),
        lambda tree: tree["results"][0].pop("median_ttft_ms"),
        lambda tree: tree["results"][0].update(scenario="S9"),
        lambda tree: tree["results"][0].update(target=3),
        lambda tree: tree["results"][0].pop("command"),
        lambda tree: tree["results"][0]["command"]["environment"].update(cores="8"),
        lambda tree: tree["results"][0]["command"]["settings"].update(model=[]),
    ],
)
def test_other_json_is_refused(change: object) -> None:
    tree = json.loads(bench_named("one rate").to_json())
    assert callable(change)
    change(tree)
    with pytest.raises(BadResultsError):
        BenchResult.from_json(json.dumps(tree))


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '"x"'])
def test_what_is_no_result_is_refused(text: str) -> None:
    with pytest.raises(BadResultsError):
        BenchResult.from_json(text)


@pytest.mark.parametrize("name", ["failing", "nothing run", "one token"])
def test_all_files_are_written(name: str, tmp_path: Path) -> None:
    bench = bench_named(name)
    paths = write_report(tmp_path / "new" / "folder", bench)
    assert all(path.stat().st_size for path in paths if bench.results)
    names = {path.name for path in paths}
    assert {"result.json", "summary.csv", "report.html"} <= names
    requests = {requests_file_name(result) for result in bench.results}
    assert names == {path.name for path in (tmp_path / "new" / "folder").iterdir()}
    for path in paths:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
    saved = (tmp_path / "new" / "folder" / "result.json").read_text(encoding="utf-8")
    found = BenchResult.from_json(saved)
    assert dataclasses.replace(found, files=()) == bench
    assert set(found.files) == requests | {name for name in names if name.endswith(".png")}


@each_bench
def test_summary_parses_back(bench: BenchResult, tmp_path: Path) -> None:
    rows = read_csv(write_summary(tmp_path / "summary.csv", bench))
    assert len(rows) == 2 * len(bench.results)
    found = {(result.scenario, result.policy, result.rt_rate): result for result in bench.results}
    for row in rows:
        rate = float(row["rt_rate"]) if row["rt_rate"] else None
        result = found[Scenario(row["scenario"]), row["policy"] or None, rate]
        part = result.rt if row["class"] == "rt" else result.be
        assert sum(int(row[outcome]) for outcome in Outcome) == int(row["requests"])
        assert int(row["refused"]) == part.outcomes[Outcome.REFUSED]
        shown = float(row["ttft_p99_s"]) if row["ttft_p99_s"] else None
        assert shown == part.ttft_s.p99
        assert (int(row["both_met"]), int(row["both_met_of"])) == (
            part.both_met.met,
            part.both_met.decided,
        )
        interval = confidence_interval(part.both_met) or ("", "")
        assert (row["both_met_low"], row["both_met_high"]) == tuple(map(str, interval))
        assert row["slo_ttft_s"] == "0.4" and row["seed"] == "1" and row["commit"] == "0123abc"
        assert "nan" not in row.values()


def test_file_of_requests_has_a_line_for_each(tmp_path: Path) -> None:
    records = healthy_records()
    records.append(
        make_record(name='odd, "name"', due_s=5.0, outcome=Outcome.FAILED, detail="a\nb")
    )
    path = write_requests(tmp_path / "requests.csv", records, SLO, WINDOW)
    rows = read_csv(path)
    assert [row["name"] for row in rows] == [record.planned.name for record in records]
    for row, record in zip(rows, records, strict=True):
        assert row["outcome"] == record.outcome
        assert float(row["due_s"]) == record.due_s
        assert int(row["pieces"]) == len(record.chunk_times_s)
        times = record.chunk_times_s
        assert row["first_s"] == (str(times[0]) if times else "")
        assert row["in_window"] == str(10.0 <= record.due_s <= 60.0)
        undecided = record.outcome is Outcome.OPEN and row["ttft_met"] in ("", "True")
        best_effort = record.planned.service_class is BE
        assert (row["both_met"] == "") == (best_effort or undecided)
    assert rows[-1]["detail"] == "a\nb"


def test_names_of_request_files_are_plain() -> None:
    result = make_result(
        Scenario.S3, [], window=WINDOW, rt_rate=0.5, target="http://a:8000/v1", policy=None
    )
    assert requests_file_name(result) == "requests_S3_http-a-8000-v1_0.5.csv"


def test_servers_with_names_in_other_scripts_have_files_of_their_own() -> None:
    samples = [ServerSample(float(at), {"rt_running": 1.0}) for at in range(3)]
    runs = [
        make_result(
            Scenario.S3, [], window=WINDOW, rt_rate=0.5, target=name, policy=None, timeline=samples
        )
        for name in ("日本", "北京")
    ]
    names = [requests_file_name(run) for run in runs]
    assert len(set(names)) == 2 and all(map(str.isascii, names))
    found = figures(make_bench(runs), LIGHT)
    titles = [figure.get_suptitle().split(",")[0] for figure in found.values()]
    assert titles == ["S3 日本", "S3 北京"]


@pytest.mark.parametrize(
    "name",
    by_tier(
        fast=["failing"],
        long=[name for name in BENCHES if name != "typical"],
    ),
)
def test_page_needs_nothing_else(name: str) -> None:
    html, bench = page_named(name), bench_named(name)
    found = Page(html)
    assert all(link.startswith("data:image/png;base64,") for link in found.links)
    assert not {"script", "link", "iframe", "object", "base", "form"} & set(found.tags)
    assert not re.search(r"url\(|@import|https?:|[\"'=]//", html)
    assert found.text.count(verdict(bench)) == 1
    assert "None" not in found.text and "nan" not in found.text.split()
    assert found.text.index("Method") > found.text.index("Runs")
    assert ("Example 9000" in found.text) == bool(bench.results)


@pytest.mark.parametrize("where", ["terminal", "page"])
def test_failing_server_is_shown_as_such(where: str) -> None:
    shown = (
        terminal(bench_named("failing"))
        if where == "terminal"
        else Page(page_named("failing")).text
    )
    text = " ".join(shown.split())
    assert f"5 of 7 real-time requests were not completed: 5 x {REFUSAL}" in text
    assert "none of 7 real-time requests was completed; 2 are open" in text
    assert "2 of 7 real-time requests were still open and overdue at the end" in text
    assert "fell behind its schedule" in text and "3200 ms at most" in text
    assert "bros met the objectives of 0.0 % of real-time requests (0 of 7)" in text


def test_failing_server_is_in_the_json() -> None:
    [failing, well] = json.loads(bench_named("failing").to_json())["results"]
    assert (failing["completed"], failing["failed"], failing["open"]) == (0, 5, 2)
    assert failing["median_ttft_ms"] is None
    assert failing["by_class"]["rt"]["reasons"] == {REFUSAL: 5}
    both_met = failing["by_class"]["rt"]["both_met"]
    assert (both_met["met"], both_met["decided"], both_met["low"]) == (0, 7, 0.0)
    assert both_met["high"] == pytest.approx(0.3543, abs=1e-4)
    assert failing["client"]["fell_behind"] is True
    assert well["failed"] == 0 and well["completed"] > 0


def test_a_server_that_does_well_gives_no_warning() -> None:
    bench = bench_named("one token")
    assert warnings(bench) == []
    assert "warning" not in terminal(bench)
    assert "Warnings" not in page_named("one token")


@each_bench
def test_terminal_output_fits(bench: BenchResult) -> None:
    text = terminal(bench)
    assert max(map(len, text.splitlines())) <= 100
    assert "nan" not in text and "None" not in text
    assert "…" not in text


@pytest.mark.parametrize("width", [80, 50])
def test_nothing_is_cut_off_in_a_narrow_terminal(width: int) -> None:
    wide, narrow = (terminal(bench_named("one rate"), each) for each in (100, width))
    assert max(map(len, narrow.splitlines())) <= width and "…" not in narrow
    figures = re.findall(r"^ S\d \w+ (.*)$", wide, re.MULTILINE)
    assert len(figures) == 4
    for name in ("S0 bros", "S1 fcfs", "S3 bros", "S2 bros"):
        (row,) = re.findall(rf"^ {name} (.*)$", wide, re.MULTILINE)
        shown = re.findall(rf"^ {name} (.*)$", narrow, re.MULTILINE)
        assert len(shown) > 1 and " ".join(shown).split() == row.split()
    live = live_output(is_terminal=True, at=[30.0], width=width)
    assert "…" not in live and "best-effort" in live and "TPOT" in live


def test_requests_that_were_not_sent_or_not_served_as_asked_are_warned_of() -> None:
    records = [make_record(due_s=20.0, gaps_s=[0.1], tier="flex") for _ in range(30)]
    records.append(make_record(due_s=59.0, outcome=Outcome.OPEN, never_sent=True))
    texts = warnings(only(Scenario.S3, records, 0.5))
    assert texts == [
        "S3 bros, 0.5/s: 1 of 31 real-time requests came due and were never sent",
        "S3 bros, 0.5/s: 30 of 31 real-time requests were served as best-effort",
    ]


def test_answers_without_text_are_warned_of() -> None:
    """They may be those of a server that does not work."""
    records = [make_record(due_s=20.0, end_s=20.1), make_record(due_s=20.0, gaps_s=[0.1])]
    assert warnings(only(Scenario.S3, records, 0.5)) == [
        "S3 bros, 0.5/s: 1 of 2 real-time requests were completed without text"
    ]


def test_client_that_takes_too_much_of_the_machine_is_warned_of() -> None:
    for share, count in ((0.05, 0), (0.06, 1)):
        client = dataclasses.replace(HEALTHY, cpu_share=share)
        result = make_result(Scenario.S0, ONE_TOKEN, window=WINDOW, rt_rate=0.1, client=client)
        assert len(warnings(make_bench([result]))) == count


def test_terminal_shows_the_share_of_best_effort_work_alone() -> None:
    bench = bench_named("one rate")
    text = terminal(bench)
    mixed = next(result for result in bench.results if result.scenario is Scenario.S3)
    share = bench.be_efficiency(mixed, Scenario.S2)
    assert share is not None
    [line] = [line for line in text.splitlines() if line.strip().startswith("S3 bros")]
    assert line.split()[-2:] == [f"{100 * share:.0f}", "0"]


@pytest.mark.parametrize(("gaps_s", "tokens"), [([5.0, 20.0, 20.0], "2"), ([], "0")])
def test_best_effort_requests_from_before_the_window_count(
    gaps_s: list[float], tokens: str
) -> None:
    """A slow server finishes none of them in a short run, and sends few tokens, or none."""
    slow = make_record(
        BE, due_s=0.0, gaps_s=gaps_s, outcome=Outcome.OPEN, prompt_tokens=8, output_tokens=150
    )
    mixed = make_result(Scenario.S3, [slow, *ONE_TOKEN], window=WINDOW, rt_rate=0.1)
    alone = make_result(Scenario.S2, [make_record(BE, gaps_s=[0.1] * 500)], window=WINDOW)
    bench = make_bench([mixed, alone])
    row = dict(zip(COLUMNS, cells(bench, mixed), strict=True))
    assert row["BE\ntok/s"] == tokens
    efficiency = bench.be_efficiency(mixed, Scenario.S2)
    assert efficiency is not None and (efficiency > 0) == bool(gaps_s)
    assert f"with {100 * efficiency:.0f} % of the best-effort throughput" in verdict(bench)


def test_verdict_names_no_best_effort_work_that_was_not_sent() -> None:
    bench = only(Scenario.S3, [make_record(due_s=20.0, gaps_s=[0.1] * 4)], 1.0)
    assert "beside best-effort work" in verdict(bench)
    [run] = bench.results
    alone = dataclasses.replace(bench, results=(dataclasses.replace(run, be_digest=""),))
    assert verdict(alone).startswith("Real-time requests alone: at 1/s bros met")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("typical", ["At 0.4 real-time requests/s", "of S2; fcfs met those of "]),
        ("nothing run", ["Nothing was measured."]),
        ("nothing sent", ["Nothing was measured."]),
        ("one token", ["Real-time requests alone: at 0.1/s bros met", "100.0 %", "(1 of 1)"]),
        ("no real-time", ["Best-effort requests alone: 0 tokens/s."]),
    ],
)
def test_verdict_is_one_sentence(name: str, words: list[str]) -> None:
    text = verdict(bench_named(name))
    assert all(word in text for word in words), text
    assert text.endswith(".") and ". " not in text


def test_one_missed_request_is_never_rounded_away() -> None:
    records = [make_record(due_s=20.0, gaps_s=[0.1]) for _ in range(2999)]
    records.append(make_record(due_s=20.0, gaps_s=[0.9]))
    assert " 99.9 % " in verdict(only(Scenario.S3, records, 1.0))


def test_capacity_is_said_in_words() -> None:
    tried = (
        CapacityTrial(rate=0.1, both_met=Attainment(80, 100)),
        CapacityTrial(rate=0.2, both_met=Attainment(0, 0)),
    )
    none = CapacityResult(
        command=COMMAND, target="bros", policy="rr", asked=0.99, rate=None, tried=tried
    )
    some = dataclasses.replace(none, policy="bros", rate=0.1, asked=0.75)
    bench = make_bench(bench_named("one rate").results, [none, some])
    for text in (Page(page(bench)).text, " ".join(terminal(bench).split())):
        assert "At no rate tried does rr keep at least 99 %" in text
        assert "within their objectives: 80 of 100 decided requests at 0.1/s." in text
        assert (
            "bros keeps at least 75 % of real-time requests within their objectives up to 0.1 "
            "requests/s: 80 of 100 decided requests at 0.1/s, 0 of 0 decided requests at 0.2/s."
        ) in text


def test_comparison_finds_the_runs_that_belong_together() -> None:
    bench = bench_named("typical")
    mixed = [result for result in bench.results if result.scenario is Scenario.S3]
    for result in mixed:
        alone, bound = bench.like(result, Scenario.S0), bench.like(result, Scenario.S2)
        unprotected = bench.like(result, Scenario.S1)
        assert alone and bound and unprotected
        assert (alone.scenario, alone.rt_rate) == (Scenario.S0, result.rt_rate)
        assert (unprotected.scenario, unprotected.rt_rate) == (Scenario.S1, result.rt_rate)
        assert bound.scenario is Scenario.S2
        assert bench.rt_tax(result) is not None
        assert bench.be_efficiency(result, Scenario.S1) is not None
    other = make_result(Scenario.S3, [], window=WINDOW, rt_rate=0.2, target="vllm")
    assert bench.like(other, Scenario.S0) is bench.like(other, Scenario.S2) is None
    assert bench.rt_tax(other) is None


def changed(command: Command, **settings: str) -> Command:
    return dataclasses.replace(command, settings={**command.settings, **settings})


MACHINE = dataclasses.replace(COMMAND.environment, cores=4)
LATER = dataclasses.replace(COMMAND.environment, commit="feed", date="2026-11-30")
LONGER = Window(10.0, 65.0, 70.0)
FIRST = make_result(Scenario.S0, ONE_TOKEN, window=WINDOW, rt_rate=0.1)
SECOND = make_result(Scenario.S3, ONE_TOKEN, window=WINDOW, rt_rate=0.1)


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ({"command": dataclasses.replace(COMMAND, slo=Slo(0.3, 0.2))}, "different objectives"),
        ({"rt_digest": "c" * 64}, "different real-time requests"),
        ({"command": changed(COMMAND, **{"--endpoint": "chat"})}, "a different endpoint"),
        ({"command": changed(COMMAND, **{"--model": "b"})}, "a different model"),
        ({"command": changed(COMMAND, **{"--kv-blocks": "9"})}, "different server options"),
        ({"command": dataclasses.replace(COMMAND, environment=MACHINE)}, "a different machine"),
        ({"server_version": "9"}, "a different server version"),
        (
            {"command": dataclasses.replace(COMMAND, environment=LATER)},
            "different versions of bros or its packages",
        ),
    ],
)
def test_runs_that_were_made_differently_are_warned_of(
    second: dict[str, object], text: str
) -> None:
    one = dataclasses.replace(FIRST, command=changed(COMMAND, **{"--endpoint": "completions"}))
    like = dataclasses.replace(SECOND, command=one.command)
    assert warnings(make_bench([one, like])) == []
    unlike = dataclasses.replace(SECOND, **{"command": one.command, **second})  # type: ignore[arg-type]
    found = f"S3 bros, 0.1/s: {text} than S0 bros, 0.1/s"
    bench = make_bench([one, unlike])
    assert found in warnings(bench)
    assert found in " ".join(terminal(bench).split())


def test_other_loads_and_times_are_warned_of() -> None:
    other = make_result(Scenario.S3, ONE_TOKEN, window=LONGER, rt_rate=0.2)
    busier = dataclasses.replace(other, be_load="32 in flight")
    assert warnings(make_bench([SECOND, busier])) == [
        "S3 bros, 0.2/s: different best-effort requests than S3 bros, 0.1/s",
        "S3 bros, 0.2/s: a different measured time than S3 bros, 0.1/s",
    ]


def test_latencies_of_older_versions_count_from_another_moment() -> None:
    tree = json.loads(make_bench([FIRST, SECOND]).to_json())
    del tree["results"][0]["times_from"]
    bench = BenchResult.from_json(json.dumps(tree))
    [text] = warnings(bench)
    assert text == (
        "S3 bros, 0.1/s: latencies from another moment (due or sent) than S0 bros, 0.1/s"
    )
    assert "when a request was sent, when a request was due" in Page(page(bench)).text


def test_what_is_meant_to_differ_is_not_warned_of() -> None:
    """Other rates have other requests, other servers other options, versions and commits."""
    later = dataclasses.replace(changed(COMMAND, **{"--kv-blocks": "9"}), environment=LATER)
    fast = make_result(Scenario.S3, ONE_TOKEN, window=WINDOW, rt_rate=0.2)
    vllm = make_result(
        Scenario.S3, ONE_TOKEN, window=WINDOW, rt_rate=0.2, target="vLLM", command=later
    )
    alone = make_result(Scenario.S2, [], window=WINDOW)
    vllm = dataclasses.replace(vllm, server_version="0.9")
    assert warnings(make_bench([FIRST, SECOND, fast, vllm, alone])) == []


def test_page_says_how_each_run_was_made() -> None:
    later = dataclasses.replace(changed(COMMAND, **{"--kv-blocks": "9"}), environment=LATER)
    bench = make_bench([FIRST, dataclasses.replace(SECOND, command=later)])
    html = page(bench)
    text = Page(html).text
    assert "setting command 1 command 2 runs S0 bros at 0.1/s S3 bros at 0.1/s" in text
    assert "commit 0123abc feed" in text and "--kv-blocks 90 9 " in text
    assert "server version bros 1.2.3 bros 1.2.3" in text
    marked = re.findall(r'<tr class=marked><th scope="row">([^<]*)', html)
    assert marked == ["runs", "date", "commit", "--kv-blocks"]


def test_a_run_and_a_search_take_the_place_of_their_like() -> None:
    bench = bench_named("one rate")
    old = bench.results[1]
    new = dataclasses.replace(old, server_version="new")
    other = dataclasses.replace(old, rt_rate=9.0)
    found = bench.with_run(new).with_run(other)
    assert found.results == (bench.results[0], *bench.results[2:], new, other)
    [search] = bench.capacities
    again = dataclasses.replace(search, rate=0.7)
    harder = dataclasses.replace(search, asked=0.999)
    assert bench.with_capacity(again).with_capacity(harder).capacities == (again, harder)


def test_only_files_of_the_report_before_are_removed(tmp_path: Path) -> None:
    wide = make_bench([FIRST, make_result(Scenario.S2, healthy_records(), window=WINDOW)])
    write_report(tmp_path, wide)
    (tmp_path / requests_file_name(FIRST)).write_text("x")
    (tmp_path / "tpot.png").write_text("my own")
    outside = tmp_path.parent / "outside.png"
    outside.write_text("x")
    assert (tmp_path / "be_throughput.png").exists()
    path = tmp_path / "result.json"
    tree = json.loads(path.read_text())
    tree["files"] += ["../outside.png", "..", "notes.txt", str(outside)]
    path.write_text(json.dumps(tree))
    (tmp_path / "notes.txt").write_text("x")
    write_report(tmp_path, make_bench([SECOND]))
    left = {path.name for path in tmp_path.iterdir() if path.suffix in (".png", ".csv", ".txt")}
    assert left >= {"tpot.png", "notes.txt", "summary.csv", "ttft.png"}
    assert not left & {requests_file_name(FIRST)} and outside.exists()
    write_report(tmp_path, make_bench([]))
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"tpot.png", "notes.txt", "summary.csv", "report.html", "result.json"}


def texts_of(figure: Figure) -> str:
    axes = figure.get_axes()
    labels = [text for ax in axes for text in (ax.get_xlabel(), ax.get_ylabel())]
    legends = [*figure.legends, *(ax.get_legend() for ax in axes)]
    entries = [text.get_text() for legend in legends if legend for text in legend.get_texts()]
    return "\n".join([figure.get_suptitle(), *labels, *entries])


@pytest.mark.parametrize("name", ["typical", "one rate"])
def test_plots_have_titles_units_and_every_server(name: str) -> None:
    found = figures(bench_named(name), LIGHT)
    assert list(found)[:5] == ["attainment", "be_throughput", "ttft", "tpot", "normalized_latency"]
    assert len([key for key in found if key.startswith("timeline")]) == 2
    units = dict(zip(found, ("%", "tokens/s", "ms", "ms", "ms"), strict=False))
    for key, unit in units.items():
        text = texts_of(found[key]).splitlines()
        assert text[0] and any(line.split(",")[0] == unit for line in text)
        names = text + [label.get_text() for label in found[key].get_axes()[0].get_yticklabels()]
        assert any("fcfs" in label for label in names) and any("bros" in label for label in names)
    assert "objective, 400 ms" in texts_of(found["ttft"])
    timeline = texts_of(found["timeline_S3_bros"])
    assert all(word in timeline for word in ("seconds", "limit", "mean slack of tokens", "ms"))


def test_lines_are_those_of_the_runs() -> None:
    bench = bench_named("typical")
    [ax] = figures(bench, DARK)["attainment"].get_axes()
    lines = {line.get_label(): line for line in ax.get_lines()}
    runs = sorted(
        (r for r in bench.results if r.scenario is Scenario.S1), key=lambda r: r.rt_rate or 0.0
    )
    assert list(lines["fcfs"].get_xdata()) == [run.rt_rate for run in runs]
    expected = [100 * (run.rt.both_met.value or 0.0) for run in runs]
    assert list(lines["fcfs"].get_ydata()) == pytest.approx(expected)
    bars = [tuple(segment[:, 1]) for bar in ax.collections for segment in bar.get_segments()]
    for run in runs:
        interval = confidence_interval(run.rt.both_met)
        assert interval is not None
        assert (100 * interval.low, 100 * interval.high) in bars


def test_every_server_is_in_the_legend_and_no_line_is_cut() -> None:
    names = ("_one", "cost $1 or $2", "日本")
    runs = [
        make_result(
            Scenario.S3, healthy_records(), window=WINDOW, rt_rate=rate, target=name, policy=None
        )
        for name in names
        for rate in (0.5, 1.0)
    ]
    figure = figures(make_bench(runs), LIGHT)["be_throughput"]
    with catch_warnings(action="error"):
        _png(figure)
    assert [line.strip() for line in texts_of(figure).splitlines()[-3:]] == list(names)
    [ax] = figure.get_axes()
    assert ax.get_ylim() == (0, pytest.approx(1.05 * runs[0].be.tokens_per_s))


def test_names_in_chinese_japanese_and_korean_are_drawn_where_a_font_has_them() -> None:
    """Fonts that are not installed must not be asked for: each would be a line in the log."""
    assert _fonts(["DejaVu Sans", "Arial"]) == ["DejaVu Sans"]
    assert _fonts(["NanumGothic", "Arial", "IPAGothic"]) == [
        "DejaVu Sans",
        "IPAGothic",
        "NanumGothic",
    ]


def test_no_plot_of_nothing() -> None:
    assert figures(bench_named("nothing run"), LIGHT) == {}
    assert set(figures(bench_named("no real-time"), LIGHT)) == {"be_throughput"}
    assert "tpot" not in figures(bench_named("one token"), LIGHT)


def test_timeline_shows_only_what_the_server_says() -> None:
    samples = [ServerSample(float(at), {"rt_running": 1.0} if at % 3 else {}) for at in range(1000)]
    result = make_result(Scenario.S3, [], window=WINDOW, rt_rate=1.0, timeline=samples)
    [figure] = figures(make_bench([result]), LIGHT).values()
    assert len(figure.get_axes()) == 1
    silent = dataclasses.replace(result, timeline=(ServerSample(0.0, {}), ServerSample(1.0, {})))
    [figure] = figures(make_bench([silent]), LIGHT).values()
    assert figure.get_axes() == []


def live_output(*, is_terminal: bool, at: list[float], width: int = 100) -> str:
    console = Console(
        width=width, file=io.StringIO(), force_terminal=is_terminal, color_system=None
    )
    records = [r for r in healthy_records() if r.due_s < 30.0]
    records.append(make_record(due_s=1.0, outcome=Outcome.FAILED))
    with LiveView(console, "S3 [bros]", SLO) as view:
        for elapsed_s in at:
            view.update(elapsed_s, 70.0, records)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_live_view_prints_a_line_every_ten_seconds_without_a_terminal() -> None:
    lines = live_output(is_terminal=False, at=[0.0, 1.0, 9.9, 10.2, 15.0, 20.1, 29.0, 70.0])
    found = [line.split(";")[0] for line in lines.splitlines()]
    assert found == [f"S3 [bros]: {at} of 70 s" for at in (10, 20, 70)]
    assert "1 errors" in lines and "best-effort" in lines and "both met" in lines


def test_live_view_is_a_panel_on_a_terminal() -> None:
    text = live_output(is_terminal=True, at=[0.0, 1.0, 30.0])
    assert "S3 [bros]" in text and "30 of 70 s" in text
    assert "real-time" in text and "best-effort" in text and "errors" in text


def test_live_view_judges_each_request_once_when_it_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[Record] = []

    def counted(record: Record, slo: Slo | None, until_s: float) -> Judged:
        judged.append(record)
        return judge(record, slo, until_s)

    monkeypatch.setattr("bros.bench.report.terminal.judge", counted)
    ended = [r for r in healthy_records() if r.due_s < 30.0]
    going = make_record(due_s=1.0, gaps_s=[0.1, 0.1], outcome=Outcome.OPEN)
    late = make_record(due_s=31.0, gaps_s=[0.1, 0.1])
    console = Console(width=100, file=io.StringIO(), force_terminal=False)
    with LiveView(console, "S3", SLO) as view:
        for at, records in ((20.0, [*ended, going]), (30.0, [*ended, going])):
            view.update(at, 70.0, records)
        going.outcome = Outcome.COMPLETED
        view.update(40.0, 70.0, [*ended, going, late])
    assert [judged.count(record) for record in (ended[0], going, late)] == [1, 3, 1]
    assert isinstance(console.file, io.StringIO)
    last = console.file.getvalue().splitlines()[-1]
    everything = [*ended, going, late]
    for kind, name in ((RT, "real-time"), (BE, "best-effort")):
        part = [record for record in everything if record.planned.service_class is kind]
        done = [record for record in part if record.outcome is Outcome.COMPLETED]
        tokens = sum(tokens_per_s(part, Window(10.0, 40.0)))
        running = len(part) - len(done)
        assert f"{name} {len(done)} done, {running} running, 0 errors, {tokens:.0f} tok" in last


def test_page_says_what_was_left_out_of_the_load() -> None:
    note = "3 of 60 real-time requests were cut to fit the context of 512 tokens"
    [run] = bench_named("one token").results
    bench = make_bench([dataclasses.replace(run, notes=(note,))])
    assert f"S0 bros, 0.1/s: {note}" in Page(page(bench)).text
    assert BenchResult.from_json(bench.to_json()) == bench


def test_classes_are_kept_apart_in_the_details() -> None:
    bench = bench_named("one rate")
    text = Page(page_named("one rate")).text
    for result in bench.results:
        for kind, part in zip((RT, BE), (result.rt, result.be), strict=True):
            if part.requests:
                found = f"{part.requests} requests in the window: {part.completed} completed"
                assert found in text, kind
