"""Servers whose model is shared by several processes, however they were started."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros import LLM, SamplingParams
from bros.profiling.profiles import MEASURED, load_profile
from support.processes import children, descendants, ranks_below, wait_until_gone
from support.server_process import HTTP, ServerProcess, running_server, wait_until
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

RANKS = 2
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node", str(RANKS))
SMALL = ("--policy", "fcfs", "--kv-blocks", "64", "--threads", "1", "--tp-timeout", "2")
OPTIONS: dict[str, Any] = {"policy": "fcfs", "kv_blocks": 64, "threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = {"prompt": "one two", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
GONE_S = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    save_chat_llama(folder)
    return folder


@contextmanager
def shared_server(model: Path, way: str, *options: str) -> Iterator[ServerProcess]:
    """A server of several ranks, of which no process is left afterwards."""
    options = (str(model), *SMALL, *options)
    if way == "torchrun":
        running = running_server(*options, launcher=TORCHRUN)
    else:
        running = running_server(*options, "--tp", str(RANKS))
    with running as server:
        assert server.url
        group = descendants(server.pid)
        yield server
        group += descendants(server.pid)
    wait_until_gone(group, GONE_S)


def complete(server: ServerProcess) -> str:
    reply = HTTP.post(f"{server.url}/v1/completions", json=PROMPT, timeout=60)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text


def lines_until_death(server: ServerProcess, pid: int) -> list[str]:
    """The events of a stream in which a process was killed after the first."""
    body = PROMPT | {"max_tokens": 400, "stream": True}
    lines = []
    with HTTP.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line and not lines:
                os.kill(pid, signal.SIGKILL)
            if line:
                lines.append(line)
    return lines


def answers(url: str) -> bool:
    try:
        return HTTP.get(url).status_code == 200
    except httpx.TransportError:
        return False


def error_of(line: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(line.removeprefix("data: "))["error"]
    return found


@pytest.mark.long
def test_ranks_answer_as_one_process_does_and_none_is_left_of_them(model: Path) -> None:
    """A rank is killed in a stream, and then the server while it starts others."""
    with LLM(str(model), **OPTIONS) as llm:
        ((answer,),) = llm.generate("one two", GREEDY, progress=False)
    with shared_server(model, "--tp") as server:
        assert complete(server) == answer.text
        assert f"{RANKS} ranks" in server.output
        group = ranks_below(server.pid)
        assert "rank" in error_of(lines_until_death(server, group[1])[-1])["message"]
        wait_until_gone(list(group.values()), GONE_S)
        everything = [server.pid, *descendants(server.pid)]
        os.kill(server.pid, signal.SIGKILL)
        wait_until_gone(everything, GONE_S)


@pytest.mark.long
def test_all_ways_give_the_same_answer(model: Path) -> None:
    texts = []
    for way in ("alone", "--tp", "torchrun"):
        if way == "alone":
            with running_server(str(model), *SMALL) as server:
                texts.append(complete(server))
        else:
            with shared_server(model, way) as server:
                texts.append(complete(server))
                assert f"{RANKS} ranks" in server.output
                os.kill(server.pid, signal.SIGTERM)
                wait_until_gone([server.pid], GONE_S)
                if way == "--tp":
                    assert server.wait(GONE_S) == 0
    assert texts == [texts[0]] * 3
    # Other modules' fixtures keep servers that run until the last test.
    of_others = set(descendants(os.getpid()))
    with LLM(str(model), tp=RANKS, **OPTIONS) as llm:
        ((answer,),) = llm.generate("one two", GREEDY, progress=False)
        group = [pid for pid in descendants(os.getpid()) if pid not in of_others]
        assert list(ranks_below(os.getpid())) == list(range(RANKS))
    assert answer.text == texts[0]
    wait_until_gone(group, GONE_S)


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stream_ends_with_an_error_and_the_group_comes_back(model: Path, rank: int) -> None:
    with shared_server(model, "--tp") as server:
        before = complete(server)
        group = ranks_below(server.pid)
        lines = lines_until_death(server, group[rank])
        assert "rank" in error_of(lines[-1])["message"]
        wait_until_gone(list(group.values()), GONE_S)
        health = f"{server.url}/health"
        wait_until(lambda: HTTP.get(health).status_code == 200, 120, "the group is back")
        assert complete(server) == before
        assert set(ranks_below(server.pid).values()).isdisjoint(group.values())


@pytest.mark.long
def test_a_job_goes_on_when_a_rank_is_killed(model: Path) -> None:
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": PROMPT}
        for n in range(60)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    with (
        shared_server(model, "--tp") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        upload = {"file": ("rows.jsonl", content)}
        file = client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
        wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=wanted | {"input_file_id": file["id"]}).json()

        def look() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"/v1/batches/{batch['id']}").json()
            return found

        wait_until(lambda: look()["request_counts"]["completed"] > 0, 120, "rows are done")
        os.kill(ranks_below(server.pid)[1], signal.SIGKILL)
        wait_until(lambda: look()["status"] == "completed", 120, "the batch is completed")
        assert look()["request_counts"] == {"total": 60, "completed": 60, "failed": 0}


@pytest.mark.long
@pytest.mark.parametrize("victim", ["server", "engine", "follower", "torchrun"])
def test_under_torchrun_everything_ends_with_any_of_it(model: Path, victim: str) -> None:
    with shared_server(model, "torchrun") as server:
        group = descendants(server.pid)
        parts = dict(zip(("server", "follower"), children(server.pid), strict=True))
        parts |= {"engine": ranks_below(server.pid)[0], "torchrun": server.pid}
        if victim == "engine":
            assert "code -9" in error_of(lines_until_death(server, parts[victim])[-1])["message"]
        else:
            os.kill(parts[victim], signal.SIGKILL)
        wait_until_gone([*group, server.pid], GONE_S)


@pytest.mark.long
def test_torchrun_starts_everything_again_if_it_is_told_to(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    launcher = (*TORCHRUN, "--max-restarts", "2")
    options = (str(model), *SMALL, "--port", str(port))
    with running_server(*options, launcher=launcher) as server:
        before, health = complete(server), f"{server.url}/health"
        group = descendants(server.pid)
        for victim in range(2):
            os.kill(children(server.pid)[1 - victim], signal.SIGKILL)
            wait_until_gone(group, GONE_S)
            wait_until(lambda: answers(health), 120, "everything is back")
            assert complete(server) == before
            group = descendants(server.pid)
    wait_until_gone(group, GONE_S)


@pytest.mark.long
def test_a_profile_of_ranks_is_measured_and_found_by_as_many(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    limits = ("--max-model-len", "128", "--kv-blocks", "40", "--max-num-seqs", "8")
    options = (str(model), *limits, "--threads", "1")
    command = [sys.executable, "-m", "bros", "profile", *options, "--tp", str(RANKS)]
    subprocess.run([*command, "--repeats", "1", "--out", str(folder)], check=True, timeout=240)
    [stored] = folder.rglob("*.json")
    profile = load_profile(stored)
    assert profile.kind == MEASURED and profile.key.tp == RANKS
    for ranks in (RANKS, 1):
        place = ("--data-dir", str(tmp_path), "--tp", str(ranks))
        with running_server(*options, *place) as server:
            assert server.url
            assert ("Measuring step times" in server.output) == (ranks == 1)
