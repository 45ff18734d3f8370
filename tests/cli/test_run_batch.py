"""bros run-batch: a file of requests answered without a server, by a tiny model."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from bros.batch.objects import BatchStatus, RowOutcome, RowRef, StoreError
from bros.batch.rows import RowReply, reply_line
from bros.batch.store import BatchStore, open_store
from bros.cli import run_batch
from bros.cli.batch import write_atomically
from bros.cli.main import main
from bros.cli.run_batch import RequestedRun, begin
from bros.core.clock import SystemClock
from bros.engine.engine import Engine
from support.tiny_tokenizer import save_chat_llama

COMPLETIONS = "/v1/completions"
FLAGS = ("--kernels", "reference", "--kv-blocks", "64", "--threads", "1", "--policy", "fcfs")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return save_chat_llama(folder)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def row(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": f"prompt {number}", "max_tokens": 3, "temperature": 0, **fields}
    return {"custom_id": f"row-{number}", "method": "POST", "url": COMPLETIONS, "body": body}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in rows), encoding="utf-8")
    return path


def run(model: Path, *arguments: str) -> int:
    return main(["run-batch", *arguments, "--model", str(model), *FLAGS], {})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_answers_come_in_the_order_of_the_input(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", *(row(number) for number in (3, 1, 2)))
    assert run(model, "in.jsonl", "out.jsonl") == 0
    found = lines(folder / "out.jsonl")
    assert [line["custom_id"] for line in found] == ["row-3", "row-1", "row-2"]
    for line in found:
        assert line["error"] is None and line["response"]["status_code"] == 200
        assert line["response"]["body"]["usage"]["completion_tokens"] <= 3
    assert sorted(path.name for path in folder.iterdir()) == ["in.jsonl", "out.jsonl"]
    assert "3 of 3 rows done; wrote out.jsonl" in capsys.readouterr().err


def test_what_a_server_has_replicas_for_runs_on_one_engine(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its options may come from a file for a server; how many replicas that has does not matter."""
    write(folder / "in.jsonl", *(row(number) for number in range(40)))
    options = ("--max-queue", "8", "--max-num-seqs", "1", "--max-replicas", "16")
    assert run(model, "in.jsonl", "out.jsonl", *options, "--min-replicas", "2") == 0
    assert "40 of 40 rows done" in capsys.readouterr().err


def test_a_complete_output_stays_as_it_is(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", row(1, temperature=1), row(2, temperature=1, prompt=[5] * 5000))
    assert run(model, "in.jsonl", "out.jsonl") == 3
    before = (folder / "out.jsonl").read_bytes()
    capsys.readouterr()
    assert run(model, "in.jsonl", "out.jsonl") == 3
    assert (folder / "out.jsonl").read_bytes() == before
    assert capsys.readouterr().err == (
        "out.jsonl has the responses to all 2 requests; --overwrite processes them again\n"
    )
    assert run(model, "in.jsonl", "out.jsonl", "--overwrite") == 3
    assert (folder / "out.jsonl").read_bytes() != before
    assert [path.name for path in sorted(folder.iterdir())] == ["in.jsonl", "out.jsonl"]


def test_a_complete_output_is_not_held_in_memory(model: Path, folder: Path) -> None:
    prompt = list(range(1_000))
    write(folder / "in.jsonl", *(row(number, prompt=prompt) for number in range(500)))
    reply = {"status_code": 200, "body": {"numbers": prompt}}
    write(
        folder / "out.jsonl",
        *({"custom_id": f"row-{n}", "error": None, "response": reply} for n in range(500)),
    )
    tracemalloc.start()
    try:
        assert run(model, "in.jsonl", "out.jsonl") == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 2**20


@pytest.mark.parametrize(
    "content",
    [
        "",
        "my notes\n",
        '{"custom_id": "row-1"}\n',
        '{"custom_id": "row-2", "error": null, "response": {"status_code": 200}}\n',
        '{"custom_id": "row-1", "error": null, "response": {"status_code": 200}}\nmore\n',
    ],
)
def test_another_file_is_not_overwritten(
    model: Path, folder: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", row(1))
    (folder / "out.jsonl").write_text(content)
    assert run(model, "in.jsonl", "out.jsonl") == 2
    assert "out.jsonl exists and is not the output for in.jsonl" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == content
    assert not (folder / "out.jsonl.partial").exists()


def test_a_row_that_fails_is_in_its_place(model: Path, folder: Path) -> None:
    write(folder / "in.jsonl", row(1), row(2, prompt=[5] * 5000), row(3))
    assert run(model, "in.jsonl", "out.jsonl") == 3
    first, bad, last = lines(folder / "out.jsonl")
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    assert bad["custom_id"] == "row-2" and bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_an_input_with_mistakes_is_not_run(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", row(1), {**row(2), "method": "GET"}, row(1))
    assert run(model, "in.jsonl", "out.jsonl") == 4
    said = capsys.readouterr().err
    assert "line 2" in said and "line 3" in said
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


def begun(folder: Path, source: Path, model: Path) -> None:
    """What a run leaves that was killed after the first row; its answer is an unlikely one."""
    clock, store = SystemClock(), open_store(folder / "out.jsonl.partial")
    (folder / "out.jsonl.partial" / "lock").touch()
    begin(store, RequestedRun(source, COMPLETIONS, model.name), clock)
    now = clock.unix_time()
    ((lease, batch),) = store.batches.claim("killed", now, lease_s=3600.0)

    places, offset = [], 0
    for number, line in enumerate(source.read_bytes().splitlines(keepends=True), start=1):
        places.append(RowRef(number, f"row-{number}", offset, len(line), rank=number))
        offset += len(line)
    store.batches.admit(lease, places, model="tiny", tokens=1, max_tokens=100, now=now)
    answer = reply_line("batch_req_1", "row-1", "req-1", RowReply(200, '{"made": "before"}'))
    store.batches.commit(lease, [RowOutcome(1, True, answer)], None)
    assert store.batches.get("", batch.id).status is BatchStatus.IN_PROGRESS
    store.close()


def test_an_interrupted_run_goes_on_where_it_was(model: Path, folder: Path) -> None:
    begun(folder, write(folder / "in.jsonl", row(1), row(2)), model)
    assert run(model, "in.jsonl", "out.jsonl") == 0
    first, second = lines(folder / "out.jsonl")
    assert first["response"]["body"] == {"made": "before"}
    assert second["response"]["body"]["object"] == "text_completion"
    assert not (folder / "out.jsonl.partial").exists()


def test_what_is_kept_of_another_input_is_not_taken(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(folder, write(folder / "in.jsonl", row(1), row(2)), model)
    write(folder / "in.jsonl", row(1), row(3))
    assert run(model, "in.jsonl", "out.jsonl") == 2
    assert "out.jsonl.partial is of another input" in capsys.readouterr().err
    write(folder / "in.jsonl", row(1), row(2))
    assert run(model, "in.jsonl", "out.jsonl", "--served-model-name", "other") == 2
    assert "out.jsonl.partial is of another model" in capsys.readouterr().err
    assert run(model, "in.jsonl", "out.jsonl", "--endpoint", "/v1/chat/completions") == 2
    assert "out.jsonl.partial is of another endpoint" in capsys.readouterr().err
    assert run(model, "in.jsonl", "out.jsonl") == 0


def test_two_runs_do_not_work_on_one_output(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", row(1))
    (folder / "out.jsonl.partial").mkdir()
    with (folder / "out.jsonl.partial" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run(model, "in.jsonl", "out.jsonl") == 2
    assert "another process is using" in capsys.readouterr().err


def test_an_engine_that_ends_ends_the_run(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(folder / "in.jsonl", row(1), row(2))

    def overflow(engine: Engine, **_: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", overflow)
        assert run(model, "in.jsonl", "out.jsonl") == 1
    assert "The engine has died; run the same command to continue" in capsys.readouterr().err
    assert run(model, "in.jsonl", "out.jsonl") == 0
    assert len(lines(folder / "out.jsonl")) == 2


def test_what_is_answered_is_written_even_if_the_rest_cannot_be(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun(folder, write(folder / "in.jsonl", row(1), row(2)), model)

    def broken(*_: object) -> None:
        raise StoreError("the store cannot be used: a page is damaged")

    monkeypatch.setattr(BatchStore, "pending", broken)
    assert run(model, "in.jsonl", "out.jsonl", "--batch-lease", "1") == 4
    answered, lost = lines(folder / "out.jsonl")
    assert answered["response"]["body"] == {"made": "before"}
    assert (lost["custom_id"], lost["error"]["code"]) == ("row-2", "batch_failed")
    said = capsys.readouterr().err
    assert "1 error, 1 of 2 rows succeeded, 1 failed or not run" in said
    assert "internal_error" in said
    assert not (folder / "out.jsonl.partial").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("none.jsonl", "out.jsonl"), "none.jsonl cannot be read: No such file"),
        (("none.jsonl", "out.jsonl", "--endpoint", COMPLETIONS), "none.jsonl cannot be read"),
        (("~nobody/none.jsonl", "out.jsonl"), "none.jsonl cannot be read: No such file"),
        ((".", "out.jsonl", "--endpoint", COMPLETIONS), "cannot be read: it is a folder"),
        (("/dev/null", "out.jsonl"), "/dev/null cannot be read: it is not a file"),
        (("in.jsonl", "o" * 255), "cannot be written"),
        (("in.jsonl", "/proc/out.jsonl"), "cannot be written"),
        (("in.jsonl", "-"), "is not the name of a file"),
        (("in.jsonl", "no/such/out.jsonl"), "cannot be written"),
        (("in.jsonl", "."), "cannot be written"),
        (("in.jsonl", "./in.jsonl"), "is the input"),
        (
            ("in.jsonl", "out.jsonl", "--endpoint", "/v1/foo"),
            "--endpoint: The endpoint '/v1/foo' d",
        ),
    ],
)
def test_files_that_cannot_be_used(
    model: Path,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    write(folder / "in.jsonl", row(1))
    assert run(model, *arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


def test_a_run_that_fails_before_its_first_answer_leaves_nothing(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", row(1))
    assert run(model, "in.jsonl", "out.jsonl", "--max-model-len", "1000000") == 2
    assert "max-model-len" in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["in.jsonl"]


def test_another_file_is_not_overwritten_by_a_run_that_goes_on(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun(folder, write(folder / "in.jsonl", row(1), row(2)), model)
    (folder / "out.jsonl").write_text("precious")
    assert run(model, "in.jsonl", "out.jsonl") == 2
    assert "out.jsonl exists and is not the output for in.jsonl" in capsys.readouterr().err
    assert (folder / "out.jsonl").read_text() == "precious"
    assert run(model, "in.jsonl", "out.jsonl", "--overwrite") == 0
    first, _ = lines(folder / "out.jsonl")
    assert first["response"]["body"] == {"made": "before"}


def test_a_run_that_was_killed_after_it_had_written_is_over(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --overwrite the next one does not take its answers."""
    begun(folder, write(folder / "in.jsonl", row(1), row(2)), model)
    with monkeypatch.context() as patch:
        patch.setattr(run_batch.shutil, "rmtree", lambda *_, **__: None)
        assert run(model, "in.jsonl", "out.jsonl") == 0
    first, _ = lines(folder / "out.jsonl")
    assert first["response"]["body"] == {"made": "before"}
    shutil.copytree(folder / "out.jsonl.partial", folder / "kept")
    assert run(model, "in.jsonl", "out.jsonl") == 0
    assert not (folder / "out.jsonl.partial").exists()
    (folder / "kept").rename(folder / "out.jsonl.partial")
    assert run(model, "in.jsonl", "out.jsonl", "--overwrite") == 0
    first, _ = lines(folder / "out.jsonl")
    assert first["response"]["body"]["object"] == "text_completion"
    assert not (folder / "out.jsonl.partial").exists()


def test_a_folder_of_something_else_is_not_touched(
    model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(folder / "in.jsonl", row(1))
    (folder / "out.jsonl.partial").mkdir()
    (folder / "out.jsonl.partial" / "mine").write_text("precious")
    assert run(model, "in.jsonl", "out.jsonl", "--max-model-len", "1000000") == 2
    assert "out.jsonl.partial is not of a batch" in capsys.readouterr().err
    assert (folder / "out.jsonl.partial" / "mine").read_text() == "precious"


def test_a_link_stays_and_its_target_is_written(model: Path, folder: Path) -> None:
    write(folder / "in.jsonl", row(1))
    (folder / "link.jsonl").symlink_to("real.jsonl")
    assert run(model, "in.jsonl", "link.jsonl") == 0
    assert (folder / "link.jsonl").is_symlink()
    assert len(lines(folder / "real.jsonl")) == 1


def test_a_name_that_is_not_utf8(model: Path, folder: Path) -> None:
    name = os.fsdecode(b"in\xff.jsonl")
    write(folder / name, row(1))
    assert run(model, name, "out.jsonl") == 0
    assert len(lines(folder / "out.jsonl")) == 1


def test_what_was_written_is_on_the_disk_before_its_store_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure might leave neither the answers nor what they were made from."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def noted_fsync(handle: int) -> None:
        calls.append("flush folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "flush file")
        fsync(handle)

    def noted_replace(source: Any, target: Any) -> None:
        assert Path(source).read_bytes() == b"ab", "all of it is written"
        calls.append("rename")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write_atomically(tmp_path / "out.jsonl", [b"a", b"b"])
    assert calls == ["flush file", "rename", "flush folder"]
    assert (tmp_path / "out.jsonl").read_bytes() == b"ab"
