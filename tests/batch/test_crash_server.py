"""The whole server, whose parts are killed in the middle of a job."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.executor.model_store import default_cache_dir, resolve_model
from support.batch_store import PostgresServer
from support.server_process import ServerProcess, running_server, wait_until
from support.tier import by_tier, is_long, seed
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.timeout(900)]

ROWS, KILLS = by_tier(fast=(40, 2), long=(500, 20))
TOKENS = by_tier(fast=100, long=2)
"""Per row: of a small model so many, and of so few rows at a time, that a job takes seconds."""
COMPLETIONS = "/v1/completions"
LEASE_S = 1.0


class Job:
    """A batch on a server that comes and goes."""

    def __init__(self, options: list[str]) -> None:
        self._options = options
        self._batch_id = ""
        self.ends = contextlib.ExitStack()
        self.start()

    def start(self) -> None:
        self.server = self.ends.enter_context(running_server(*self._options))
        self._http = self.ends.enter_context(httpx.Client(base_url=self.server.url, timeout=60))

    def submit(self, num_rows: int) -> None:
        content = b"".join(json.dumps(row(number)).encode() + b"\n" for number in range(num_rows))
        upload = {"file": ("rows.jsonl", content)}
        file = self._post("/v1/files", files=upload, data={"purpose": "batch"})
        wanted = {"input_file_id": file["id"], "endpoint": COMPLETIONS}
        self._batch_id = self._post("/v1/batches", json=wanted | {"completion_window": "24h"})["id"]

    def look(self) -> dict[str, Any]:
        found: dict[str, Any] = self._http.get(f"/v1/batches/{self._batch_id}").json()
        return found

    def done(self) -> int:
        counts = self.look()["request_counts"]
        return int(counts["completed"] + counts["failed"])

    def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        """Of an output or error file; none without a file."""
        if file_id is None:
            return []
        content = self._http.get(f"/v1/files/{file_id}/content").content
        assert content.endswith(b"\n")
        return [json.loads(line) for line in content.splitlines()]

    def respond(self, number: int, *, background: bool = True) -> dict[str, Any]:
        """A response, which has only begun if it is in the background."""
        body = {"input": f"The number {number} is", "background": background, "ignore_eos": True}
        limits = {"max_output_tokens": TOKENS, "seed": number, "temperature": 1.0}
        return self._post("/v1/responses", json=body | limits)

    def ended(self, response_ids: list[str]) -> dict[str, dict[str, Any]]:
        """Those of the responses that have ended."""
        found = {each: self._http.get(f"/v1/responses/{each}").json() for each in response_ids}
        return {
            each: response
            for each, response in found.items()
            if response["status"] not in ("queued", "in_progress")
        }

    def kill_engine(self) -> None:
        """If it runs; it may be starting."""
        with contextlib.suppress(ProcessLookupError, ValueError):
            os.kill(self.server.engine_pid, signal.SIGKILL)

    def kill_server(self) -> None:
        os.kill(self.server.pid, signal.SIGKILL)
        self.ends.close()

    def _post(self, path: str, **content: Any) -> dict[str, Any]:
        reply = self._http.post(path, **content)
        assert reply.status_code == 200, reply.text
        found: dict[str, Any] = reply.json()
        return found


def text_of(response: dict[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


def row(number: int) -> dict[str, Any]:
    body = {"prompt": f"The number {number} is", "max_tokens": TOKENS, "ignore_eos": True}
    return {"custom_id": f"row-{number}", "method": "POST", "url": COMPLETIONS, "body": body}


def data_dir(folder: Path) -> Path:
    """With the embedded model and the profiles of this machine as they are."""
    cache = default_cache_dir()
    folder.mkdir()
    for found in (resolve_model(None, cache).folder, cache / "profiles"):
        (folder / found.name).symlink_to(found)
    return folder


def options(folder: Path) -> list[str]:
    """Of a server with its data in `folder`. In the fast tier the model is a random one: this is
    about rows, and the embedded model takes seven times as long for them and to start."""
    if is_long():
        return ["--data-dir", str(data_dir(folder / "data"))]
    model = folder / "tiny"
    save_chat_llama(model)
    few = ("--threads", "1", "--max-num-seqs", "2")
    return [str(model), "--data-dir", str(folder / "data"), *few]


def wait(server: ServerProcess, seconds: float) -> None:
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(seconds)


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.long)])
def url(request: pytest.FixtureRequest) -> str | None:
    """Of the store. test_crash.py kills processes on both databases in any run."""
    if request.param == "sqlite":
        return None
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.new_url()


def test_a_job_outlives_its_engine_and_its_server(url: str | None, tmp_path: Path) -> None:
    rng = random.Random(seed(25))
    store = ["--store", url] if url else []
    job = Job([*options(tmp_path), "--batch-lease", str(LEASE_S), *store])
    with job.ends:
        job.submit(ROWS)
        killed, before = {"engine": 0, "server": 0, "both": 0}, 0
        for moment in sorted(rng.sample(range(ROWS * 4 // 5), KILLS)):
            # In between there is some progress, however far the job is.
            done = max(moment, before + 1)
            wait_until(lambda done=done: job.done() >= done, 120, f"{done} rows are done")
            wait(job.server, rng.uniform(0.0, 0.1))
            before = job.done()
            assert job.look()["status"] == "in_progress"
            (victim,) = rng.choices(list(killed), weights=[5, 3, 2])
            killed[victim] += 1
            if victim != "server":
                job.kill_engine()
            if victim != "engine":
                job.kill_server()
                job.start()
        wait_until(lambda: job.look()["status"] == "completed", 240, "the batch is completed")
        batch = job.look()
        output, errors = (job.lines(batch[f"{kind}_file_id"]) for kind in ("output", "error"))
    names = [line["custom_id"] for line in [*output, *errors]]
    assert sorted(names) == sorted(f"row-{number}" for number in range(ROWS))
    assert batch["request_counts"] == {
        "total": ROWS,
        "completed": len(output),
        "failed": len(errors),
    }
    # Only what the engine kept dying of is given up.
    assert {line["error"]["code"] for line in errors} <= {"engine_error"}
    assert {line["response"]["status_code"] for line in output} == {200}
    usages = [line["response"]["body"]["usage"] for line in output]
    for of_batch, of_row in (("input", "prompt"), ("output", "completion"), ("total", "total")):
        total = sum(usage[f"{of_row}_tokens"] for usage in usages)
        assert batch["usage"][f"{of_batch}_tokens"] == total
    print(f"killed: {killed}; {len(errors)} rows given up")


@pytest.mark.long
def test_a_server_that_is_told_to_stop_is_followed_at_once(tmp_path: Path) -> None:
    """The next server does not wait for a lease that lasts longer than any test. In any run,
    test_crash.py stops a process without an engine in this way."""
    job = Job([*options(tmp_path), "--batch-lease", "3600"])
    with job.ends:
        job.submit(100)
        wait_until(lambda: job.done() >= 10, 60, "the first server is at work")
        os.kill(job.server.pid, signal.SIGTERM)
        assert job.server.wait(60) == 0
        job.ends.close()
        job.start()
        assert 10 <= job.done() < 100
        wait_until(lambda: job.look()["status"] == "completed", 120, "the batch is completed")
        batch = job.look()
        names = [line["custom_id"] for line in job.lines(batch["output_file_id"])]
        assert names == [f"row-{number}" for number in range(100)]
        assert batch["error_file_id"] is None


RESPONSES = by_tier(fast=8, long=100)


@pytest.mark.long
def test_background_responses_outlive_their_server(tmp_path: Path) -> None:
    """Killed while some run and others are queued. Each is answered once, and stays as it is."""
    job = Job([*options(tmp_path), "--batch-lease", str(LEASE_S)])
    with job.ends:
        begun = [str(job.respond(number)["id"]) for number in range(RESPONSES)]
        wait_until(lambda: any(job.ended(begun)), 60, "some are done")
        before = job.ended(begun)
        assert len(before) < RESPONSES
        job.kill_server()
        job.start()
        wait_until(lambda: len(job.ended(begun)) == RESPONSES, 120, "all are done")
        after = job.ended(begun)
        assert all(after[name] == found for name, found in before.items())
        assert {found["status"] for found in after.values()} == {"incomplete"}
        assert {found["usage"]["output_tokens"] for found in after.values()} == {TOKENS}
        for number in (0, 1, RESPONSES // 2, RESPONSES - 1):
            at_once = job.respond(number, background=False)
            assert text_of(after[begun[number]]) == text_of(at_once)
        wait(job.server, 2 * LEASE_S)
        assert job.ended(begun) == after
