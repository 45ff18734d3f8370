"""`bros batch` against a server that is told what becomes of each batch."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.cli.batch import NOT_COMPLETED, SOME_ROWS_FAILED
from bros.cli.main import main
from bros.core.errors import BrosError, ConfigError
from support.batch_desk import (
    CANCELLED,
    COMPLETED,
    ERRORS,
    EXPIRED,
    INVALID,
    OUTPUT,
    ROW,
    RUNNING,
    SOME_FAILED,
    Desk,
    write_rows,
)
from support.fake_batches import CREATED_AT, FakeBatches, counts, refusal, served


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return str(write_rows(tmp_path / "rows.jsonl", ROW))


# Submitting.


def test_submit_uploads_the_file_and_prints_only_the_id(desk: Desk, rows: str) -> None:
    ran = desk.run("submit", rows, "--metadata", "run=7", "--metadata", "by=a=b")
    assert (ran.status, ran.out) == (0, "batch_1\n")
    batch = desk.fake.batches["batch_1"]
    assert desk.fake.files[batch["input_file_id"]] == Path(rows).read_bytes()
    assert desk.fake.filenames == ["rows.jsonl"]
    assert batch["endpoint"] == "/v1/chat/completions"
    assert batch["completion_window"] == "24h"
    assert batch["metadata"] == {"run": "7", "by": "a=b"}
    assert "bros batch status batch_1 --wait" in ran.err


def test_submit_takes_endpoint_and_window_from_the_flags(desk: Desk, rows: str) -> None:
    desk.run("submit", rows, "--endpoint", "/v1/completions", "--window", "90m")
    batch = desk.fake.batches["batch_1"]
    assert (batch["endpoint"], batch["completion_window"]) == ("/v1/completions", "90m")
    assert batch["metadata"] is None


def test_endpoint_is_that_of_the_first_line_with_something_in_it(
    desk: Desk, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n \n" + json.dumps(ROW | {"url": "/v1/completions"}).encode())
    desk.run("submit", str(path))
    assert desk.fake.batches["batch_1"]["endpoint"] == "/v1/completions"


@pytest.mark.parametrize("content", ["", "\n \n", "no json\n", '["url"]\n', '{"url": 3}\n', "{}"])
def test_without_an_endpoint_nothing_is_sent(desk: Desk, tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError, match='has no requests|with a "url"; correct it'):
        desk.run("submit", str(path))
    assert desk.fake.requests == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--window", "soon"], "--window: 'soon' is not a completion window"),
        (["--rt-slowdown", "0.5"], "--rt-slowdown: '0.5' is not a slowdown from 1 to 1000"),
        (["--metadata", "a"], "--metadata: 'a' is not KEY=VALUE"),
        (["--metadata", "=a"], "--metadata: '=a' is not KEY=VALUE"),
        (["--metadata", "a=1", "--metadata", "a=2"], "--metadata: a is given twice"),
        (["-o", "x"], "-o: requires --wait"),
        (["--wait", "-o", "x" * 300], "-o: xxx"),
        (["--wait", "-o", "/no/such/folder/x"], "-o: /no/such/folder/x cannot be written"),
        (["--url", "localhost:8000"], "--url: 'localhost:8000' must start with http://"),
        (["--url", "http://a:b"], "--url"),
    ],
)
def test_wrong_usage_is_found_before_anything_is_sent(
    desk: Desk, rows: str, arguments: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        desk.run("submit", rows, *arguments)
    assert str(raised.value).startswith(message)
    assert desk.fake.requests == []


def test_missing_file_is_named(desk: Desk, tmp_path: Path) -> None:
    for extra in ([], ["--endpoint", "/v1/completions"]):
        with pytest.raises(ConfigError, match="none cannot be read: No such file"):
            desk.run("submit", str(tmp_path / "none"), *extra)


@pytest.mark.parametrize(("status", "is_kept"), [(400, False), (429, False), (502, True)])
def test_file_of_a_batch_that_is_certainly_refused_is_deleted(
    desk: Desk, rows: str, status: int, is_kept: bool
) -> None:
    def refuse(request: httpx.Request) -> httpx.Response | None:
        if request.method == "POST" and request.url.path == "/v1/batches":
            return refusal(status, "No.")
        return None

    desk.fake.before = refuse
    with pytest.raises(BrosError, match=f"^{status}: No.$"):
        desk.run("submit", rows)
    assert ("file-3" in desk.fake.files) == is_kept


def test_large_file_is_sent_in_pieces_with_a_bar(desk: Desk, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", *[ROW | {"pad": "x" * 10_000}] * 600)
    ran = desk.run("submit", str(path), terminal=True)
    assert desk.fake.files["file-3"] == path.read_bytes()
    assert "uploading" in ran.err and "6.1/6.1 MB" in ran.err
    assert "uploading" not in desk.run("submit", str(path)).err
    write_rows(path, ROW)
    assert "uploading" not in desk.run("submit", str(path), terminal=True).err


# Looking.


def test_status_is_a_block_of_all_that_is_known(desk: Desk) -> None:
    desk.fake.add(
        **RUNNING | {"request_counts": counts(50_000, 1200, 2)},
        model="smol",
        metadata={"run": "7"},
        bros={"expected_at": CREATED_AT + 720, "at_risk": False},
        usage={
            "input_tokens": 123456,
            "input_tokens_details": {"cached_tokens": 1000},
            "output_tokens": 7,
            "total_tokens": 123463,
        },
    )
    status, out, err = desk.run("status", "batch_1")
    assert (status, err) == (0, "")
    clock = r"[\d: -]+"
    for line in (
        r"batch_1  in progress",
        r"  requests    1,202 of 50,000 rows done, 2 failed",
        r"  endpoint    /v1/chat/completions",
        r"  model       smol",
        rf"  created     {clock} \(in 0 s\)",
        rf"  window      24h, ends {clock} \(in 24 h\)",
        rf"  expected    to end {clock} \(in 12 min\)",
        r"  input file  file-in",
        r"  tokens      123,456 read \(1,000 from the cache\), 7 written",
        r"  metadata    run=7",
    ):
        assert re.search(f"^{line}$", out, re.MULTILINE), (line, out)


def test_status_says_in_words_that_a_batch_is_at_risk(desk: Desk) -> None:
    desk.fake.add(**RUNNING, bros={"expected_at": CREATED_AT + 90_000, "at_risk": True})
    shown = desk.run("status", "batch_1").out
    assert re.search(r"at risk +may not be done in time: expected to end .*, but its window", shown)
    desk.fake.add(**RUNNING, bros={"expected_at": CREATED_AT + 86_000, "at_risk": True})
    shown = desk.run("status", "batch_2").out
    assert re.search(r"at risk +may not be done in time: expected to end .*\), its window", shown)
    desk.fake.add(**RUNNING, bros={"expected_at": None, "at_risk": True})
    shown = desk.run("status", "batch_3").out
    assert re.search(r"at risk +may not be done in time: its window ends ", shown)


def test_status_of_a_batch_that_has_ended_looks_back(desk: Desk) -> None:
    outlook = {"expected_at": CREATED_AT + 90_000, "at_risk": True}
    desk.fake.add(**COMPLETED, bros=outlook)
    desk.clock.advance(180)
    shown = desk.run("status", "batch_1").out
    assert re.search(r"^  ended +.* \(2 min ago\)$", shown, re.MULTILINE)
    assert "  output file file-out\n" in shown and "  window      24h\n" in shown
    assert "expected" not in shown and "risk" not in shown


def test_status_without_wait_says_nothing_by_its_exit_status(desk: Desk) -> None:
    desk.fake.add(**EXPIRED)
    assert desk.run("status", "batch_1").status == 0
    assert "2 of 3 rows succeeded, 1 failed or not run" in desk.run("status", "batch_1").out


def test_json_is_what_the_server_sent(desk: Desk) -> None:
    batch = desk.fake.add(**RUNNING, something="else")
    assert json.loads(desk.run("status", "batch_1", "--json").out) == batch
    other = desk.fake.add(**COMPLETED)
    assert json.loads(desk.run("list", "--json").out) == [other, batch]
    desk.fake.script = [{}, SOME_FAILED]
    ran = desk.run("status", "batch_1", "--wait", "--json")
    assert ran.status == SOME_ROWS_FAILED
    assert json.loads(ran.out)["status"] == "completed"


def test_list_is_a_table_newest_first(desk: Desk) -> None:
    desk.fake.add(**COMPLETED)
    soon = {"expected_at": CREATED_AT + 600, "at_risk": True}
    desk.fake.add(**RUNNING | {"request_counts": counts(50_000, 1200, 2)}, bros=soon)
    desk.clock.advance(180)
    status, out, err = desk.run("list")
    assert (status, err) == (0, "")
    assert [re.split(r"\s{2,}", line.strip()) for line in out.splitlines()] == [
        ["batch", "status", "succeeded", "failed", "created", "expected end"],
        ["batch_2", "in progress", "1,200/50,000", "2", "3 min ago", "in 7 min, at risk"],
        ["batch_1", "completed", "2/2", "0", "3 min ago", "-"],
    ]


def test_list_fits_80_columns(desk: Desk) -> None:
    soon = {"expected_at": CREATED_AT + 600, "at_risk": True}
    going = RUNNING | {"id": f"batch_{'x' * 24}", "request_counts": counts(50_000, 1200, 2)}
    desk.fake.add(**going, bros=soon)
    desk.clock.advance(180)
    out = desk.run("list", terminal=True).out
    assert "…" not in out and max(map(len, out.splitlines())) <= 80
    assert "in progress  1,200/50,000" in out and "in 7 min, at risk" in out


def test_list_goes_on_over_pages_up_to_the_limit(desk: Desk) -> None:
    for _ in range(250):
        desk.fake.add()
    for limit, found in (("205", 205), ("1000", 250), ("7", 7)):
        batches = json.loads(desk.run("list", "--json", "--limit", limit).out)
        assert [batch["id"] for batch in batches] == [f"batch_{250 - n}" for n in range(found)]
    assert len(desk.run("list").out.splitlines()) == 1 + 20
    desk.fake.requests.clear()
    desk.run("list", "--limit", "1000")
    assert len(desk.fake.requests) == 3  # the last page says that it is the last
    with pytest.raises(ConfigError, match="--limit: 0 must be at least 1"):
        desk.run("list", "--limit", "0")


def test_no_batches_are_said_to_be_none(desk: Desk) -> None:
    assert desk.run("list") == (0, "", "There are no batches.\n")


def test_text_of_the_server_cannot_steer_the_terminal(desk: Desk) -> None:
    desk.fake.add(model="\x1b[2J[red]m", metadata={"a": "\x9bb\n"}, **INVALID)
    out = desk.run("status", "batch_1").out
    assert " [2J[red]m" in out and "a= b " in out
    assert not set(out) & {"\x1b", "\x9b"}


# Cancelling.


def test_cancel_asks_and_may_wait(desk: Desk) -> None:
    desk.fake.add(**RUNNING)
    status, out, err = desk.run("cancel", "batch_1")
    assert (status, out) == (0, "")
    assert err == "batch_1 is being cancelled: 0 of 3 rows done\n"
    desk.fake.script = [{}, CANCELLED]
    desk.fake.batches["batch_1"]["request_counts"] = counts(3, 1)
    ran = desk.run("cancel", "batch_1", "--wait")
    assert ran.status == 0  # which is what was asked for
    assert "batch_1 cancelled: 2 of 3 rows succeeded" in ran.err


def test_cancel_of_a_batch_that_is_ending_in_another_way_says_so(desk: Desk) -> None:
    batch = desk.fake.add(**RUNNING)
    desk.fake.before = lambda request: httpx.Response(200, json=batch)
    assert desk.run("cancel", "batch_1").err == "batch_1 is ending already: 0 of 3 rows done\n"


def test_batch_that_is_cancelled_before_it_began_has_nothing(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(status="cancelled")
    ran = desk.run("results", "batch_1", "-o", str(tmp_path / "out"))
    assert (ran.status, (tmp_path / "out").read_bytes()) == (NOT_COMPLETED, b"")
    assert "batch_1 cancelled: nothing was run\n" in ran.err


def test_cancel_that_comes_too_late_tells_what_became_of_the_batch(desk: Desk) -> None:
    desk.fake.add(**RUNNING)
    desk.fake.script = [SOME_FAILED]
    assert desk.run("cancel", "batch_1", "--wait").status == SOME_ROWS_FAILED
    with pytest.raises(BrosError, match="^400: Cannot cancel a batch with status 'completed'.$"):
        desk.run("cancel", "batch_1")


# Results.


@pytest.mark.parametrize(
    ("end", "status"),
    [
        (COMPLETED, 0),
        (SOME_FAILED, SOME_ROWS_FAILED),
        (EXPIRED, NOT_COMPLETED),
        (CANCELLED, NOT_COMPLETED),
    ],
)
def test_results_go_to_standard_output_or_files(
    desk: Desk,
    tmp_path: Path,
    capfdbinary: pytest.CaptureFixture[bytes],
    end: dict[str, Any],
    status: int,
) -> None:
    desk.fake.add(**end)
    ran = desk.run("results", "batch_1")
    assert (ran.status, capfdbinary.readouterr().out) == (status, OUTPUT)
    assert ("2 of 3 rows succeeded" in ran.err) == (status != 0)
    output, errors = tmp_path / "out", tmp_path / "err"
    output.write_bytes(b"old")
    ran = desk.run("results", "batch_1", "-o", str(output), "--errors", str(errors))
    assert (ran.status, capfdbinary.readouterr().out) == (status, b"")
    assert output.read_bytes() == OUTPUT
    assert errors.read_bytes() == (ERRORS if "error_file_id" in end else b"")
    assert {path.name for path in tmp_path.iterdir()} == {"out", "err"}


def test_no_answers_make_an_empty_file(desk: Desk, tmp_path: Path) -> None:
    nothing = {"request_counts": counts(3, 0, 3), "output_file_id": None}
    desk.fake.add(**SOME_FAILED | nothing)
    (tmp_path / "out").write_text("of another batch")
    assert desk.run("results", "batch_1", "-o", str(tmp_path / "out")).status == SOME_ROWS_FAILED
    assert (tmp_path / "out").read_bytes() == b""


def test_results_of_a_running_batch_are_not_there_yet(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(**RUNNING)
    with pytest.raises(BrosError, match="batch_1 has not ended, it is in progress: 0 of 3 rows"):
        desk.run("results", "batch_1", "-o", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_results_of_a_failed_batch_are_its_errors(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(**INVALID)
    ran = desk.run("results", "batch_1", "-o", str(tmp_path / "out"))
    assert (ran.status, ran.out) == (NOT_COMPLETED, "")
    assert "line 3: invalid_json_line: Not JSON." in ran.err
    assert not (tmp_path / "out").exists()


def test_a_server_that_failed_at_a_batch_has_what_it_did_before(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(**SOME_FAILED | {"status": "failed", "errors": INVALID["errors"]})
    ran = desk.run("results", "batch_1", "-o", str(tmp_path / "out"))
    assert ran.status == NOT_COMPLETED
    assert "batch_1 failed: 2 errors, 2 of 3 rows succeeded, 1 failed or not run\n" in ran.err
    assert "invalid_json_line: Not JSON." in ran.err
    assert (tmp_path / "out").read_bytes() == OUTPUT


def test_two_results_in_one_file_are_refused(desk: Desk, tmp_path: Path) -> None:
    for name in ("-", str(tmp_path / "x")):
        with pytest.raises(ConfigError, match="--errors: the responses go there"):
            desk.run("results", "batch_1", "-o", name, "--errors", name)


class Breaking(httpx.SyncByteStream):
    """A body that ends too early."""

    def __iter__(self) -> Iterator[bytes]:
        yield OUTPUT[:10]
        raise httpx.RemoteProtocolError("peer closed connection")


def broken_downloads(times: int, fake: FakeBatches) -> None:
    left = list(range(times))

    def before(request: httpx.Request) -> httpx.Response | None:
        if request.url.path.endswith("/content") and left:
            left.pop()
            return httpx.Response(200, stream=Breaking())
        return None

    fake.before = before


def test_broken_download_leaves_the_old_file(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(**COMPLETED)
    (tmp_path / "out").write_text("old")
    broken_downloads(1, desk.fake)
    with pytest.raises(BrosError, match="does not answer: peer closed connection"):
        desk.run("results", "batch_1", "-o", str(tmp_path / "out"))
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_broken_download_after_waiting_is_begun_again(
    desk: Desk, rows: str, tmp_path: Path
) -> None:
    desk.fake.script = [COMPLETED]
    broken_downloads(2, desk.fake)
    assert desk.run("submit", rows, "--wait", "-o", str(tmp_path / "out")).status == 0
    assert (tmp_path / "out").read_bytes() == OUTPUT


def test_output_may_be_a_device_or_a_link(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(**COMPLETED)
    assert desk.run("results", "batch_1", "-o", os.devnull).status == 0
    assert Path(os.devnull).is_char_device()
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    desk.run("results", "batch_1", "-o", str(tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == OUTPUT


def test_output_that_cannot_be_written_is_an_error_in_words(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(**COMPLETED)
    with pytest.raises(BrosError, match="/dev/full cannot be written: No space left on device"):
        desk.run("results", "batch_1", "-o", "/dev/full")

    def remove_folder(request: httpx.Request) -> None:
        if request.url.path.endswith("/content"):
            (tmp_path / "folder").rmdir()

    (tmp_path / "folder").mkdir()
    desk.fake.before = remove_folder
    with pytest.raises(BrosError, match="x cannot be written: No such file or directory"):
        desk.run("results", "batch_1", "-o", str(tmp_path / "folder" / "x"))


def test_output_may_have_the_longest_name_there_is(desk: Desk, tmp_path: Path) -> None:
    desk.fake.add(**COMPLETED)
    desk.run("results", "batch_1", "-o", str(tmp_path / ("x" * 255)))
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [OUTPUT]


# The server.


def test_empty_id_is_not_sent(desk: Desk) -> None:
    for action in ("status", "cancel", "results"):
        with pytest.raises(ConfigError, match="ID: it is empty"):
            desk.run(action, "")
    assert desk.fake.requests == []


def test_id_cannot_lead_elsewhere(desk: Desk) -> None:
    with pytest.raises(BrosError, match="404"):
        desk.run("status", "../files?x")
    assert desk.fake.requests == ["GET /v1/batches/../files?x"]


def test_damaged_answer_is_an_error_in_words(desk: Desk) -> None:
    damaged = httpx.ByteStream(b"no gzip")
    desk.fake.before = lambda request: httpx.Response(
        200, headers={"content-encoding": "gzip"}, stream=damaged
    )
    with pytest.raises(BrosError, match="cannot be asked: "):
        desk.run("list")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (httpx.Response(404, json={"detail": "Not Found"}), "does this server have a batch API?"),
        (httpx.Response(200, text="<html>"), "does not speak OpenAI's batch API"),
        (httpx.Response(200, json=[]), "does not speak OpenAI's batch API"),
        (httpx.Response(200, json={"id": 1}), "does not speak OpenAI's batch API"),
        (httpx.Response(502, text="Bad Gateway"), "502: Bad Gateway"),
        (refusal(429, "Too much is queued."), "^429: Too much is queued.$"),
    ],
)
def test_strange_answers_are_errors_in_words(
    desk: Desk, answer: httpx.Response, message: str
) -> None:
    desk.fake.before = lambda request: answer
    for arguments in (["status", "batch_1"], ["list"], ["cancel", "batch_1"]):
        with pytest.raises(BrosError, match=message.replace("?", r"\?")):
            desk.run(*arguments)


def test_key_and_address_come_from_flags_or_variables(desk: Desk) -> None:
    desk.fake.expected_key = "secret"
    hosts: list[str] = []
    desk.fake.before = lambda request: hosts.append(str(request.url))
    assert desk.run("list", BROS_API_KEY="secret", BROS_URL="http://a:1/v1/").status == 0
    asked = ("list", "--api-key", "secret", "--url", "https://b")
    assert desk.run(*asked, BROS_API_KEY="wrong", BROS_URL="http://a:1").status == 0
    assert hosts == ["http://a:1/v1/batches?limit=20", "https://b/v1/batches?limit=20"]
    with pytest.raises(BrosError, match="^401: Incorrect API key provided.$"):
        desk.run("list")


def test_hints_lead_to_the_same_server(desk: Desk, rows: str) -> None:
    ran = desk.run("submit", rows, "--url", "http://a:1")
    assert "bros batch status batch_1 --url http://a:1 --wait" in ran.err


# All of it, through the program and a real connection.


def test_whole_program_and_all_its_exit_statuses(
    rows: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fake = FakeBatches()
    fake.files |= {"file-out": OUTPUT, "file-err": ERRORS}
    with served(fake) as url:
        environ = {"BROS_URL": url}
        assert main(["batch", "submit", rows], environ) == 0
        assert capfd.readouterr().out == "batch_1\n"
        assert fake.files["file-3"] == Path(rows).read_bytes()
        assert main(["batch", "status", "none"], environ) == 1
        out, err = capfd.readouterr()
        assert (out, err) == ("", "bros: error: 404: No batch found with id 'none'.\n")
        assert main(["batch", "list", "--limit", "x"], environ) == 2
        assert capfd.readouterr().err == "bros: error: --limit: 'x' is not a whole number\n"
        fake.batches["batch_1"] |= SOME_FAILED
        target = str(tmp_path / "out")
        assert main(["batch", "results", "batch_1", "-o", target], environ) == SOME_ROWS_FAILED
        assert Path(target).read_bytes() == OUTPUT
        fake.batches["batch_1"] |= INVALID
        assert main(["batch", "status", "batch_1", "--wait"], environ) == NOT_COMPLETED
    assert main(["batch", "list"], environ) == 1
    assert f"bros: error: {url}/v1 does not answer: " in capfd.readouterr().err


@pytest.mark.multiprocess
def test_full_disk_behind_standard_output_is_an_error_in_words() -> None:
    fake = FakeBatches()
    fake.files["file-out"] = OUTPUT
    fake.add(**COMPLETED)
    with served(fake) as url, open("/dev/full", "wb") as full:
        command = [sys.executable, "-m", "bros", "batch", "results", "batch_1", "--url", url]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert ran.returncode == 1
    assert ran.stderr == (
        "bros: error: standard output cannot be written: No space left on device\n"
    )


@pytest.mark.multiprocess
def test_reader_that_has_had_enough_is_no_fault() -> None:
    fake = FakeBatches()
    fake.files["file-out"] = OUTPUT * 100_000
    fake.add(**COMPLETED)
    with served(fake) as url:
        command = [sys.executable, "-m", "bros", "batch", "results", "batch_1", "--url", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
            assert child.stdout is not None and child.stderr is not None
            assert child.stdout.readline() == OUTPUT.splitlines(keepends=True)[0]
            child.stdout.close()
            assert child.stderr.read() == b""
            assert child.wait() == 1


@pytest.mark.multiprocess
def test_ctrl_c_on_a_terminal_leaves_the_batch_alone(rows: str) -> None:
    # Opening the terminal by name makes it the controlling one, so that Ctrl-C is a signal.
    code = (
        "import os, sys; os.close(os.open(os.ttyname(2), os.O_RDWR))\n"
        "from bros.cli.main import main; raise SystemExit(main())"
    )
    fake = FakeBatches()
    with served(fake) as url:
        ours, theirs = pty.openpty()
        # In the background SIGINT is ignored, and children inherit that.
        code = f"import signal; signal.signal(2, signal.default_int_handler); {code}"
        command = [sys.executable, "-c", code, "batch", "submit", rows, "--wait", "--url", url]
        with subprocess.Popen(
            command, stdin=theirs, stdout=subprocess.PIPE, stderr=theirs, start_new_session=True
        ) as child:
            os.close(theirs)
            screen = read_until(ours, "validating")
            os.write(ours, b"\x03")
            screen = read_until(ours, "bros batch cancel")
            assert child.stdout is not None
            assert child.stdout.read() == b"batch_1\n"
            assert child.wait() == 130
        os.close(ours)
    assert "No longer waiting; batch_1 continues." in screen
    assert fake.batches["batch_1"]["status"] == "validating"


def read_until(fd: int, text: str) -> str:
    read = ""
    while text not in read:
        ready, _, _ = select.select([fd], [], [], 30.0)
        assert ready, read
        read += os.read(fd, 65536).decode(errors="replace")
    return read
