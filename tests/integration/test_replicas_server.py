"""Servers with several engine processes, of which some are killed."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

import bros.semantic as P
from bros.cli.main import main
from support.json_schemas import schemas
from support.processes import descendants, engine_of_replica, wait_until_gone
from support.server_process import HTTP, ServerProcess, running_server, wait_until
from support.tier import by_tier, seed
from support.tiny_models import save_tiny_llama
from support.tiny_tokenizer import TEMPLATE, save_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SMALL = ("--policy", "fcfs", "--kv-blocks", "256", "--threads", "1")
STREAMS = 6
BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"{n} one two three",
        "max_tokens": 160,
        "ignore_eos": True,
        # Greedy ones and seeded ones, of which some look at what they have said.
        **({"temperature": 0} if n % 2 else {"temperature": 1, "seed": n}),
        **({"frequency_penalty": 0.5} if n % 4 < 2 else {}),
    }
    for n in range(STREAMS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    save_tiny_llama(folder, vocab_size=1000)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": 1}))
    save_tokenizer(folder, chat_template=TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[ServerProcess]:
    with running_server(str(model), *SMALL, "--replicas", "2") as server:
        assert server.url
        group = descendants(server.pid)
        yield server
        group += descendants(server.pid)
    wait_until_gone(group, 30)


@pytest.fixture
def server(shared: ServerProcess) -> ServerProcess:
    """With both engines, of which tests kill some."""
    wait_until(lambda: replicas_up(shared) == 2, 120, "both replicas are up")
    return shared


def replicas_of(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = HTTP.get(f"{server.url}/admin/replicas").json()["data"]
    return found


def replicas_up(server: ServerProcess) -> int:
    up: int = HTTP.get(f"{server.url}/health").json()["replicas_up"]
    return up


def lost(server: ServerProcess) -> int:
    """Engines that have died."""
    count: int = sum(replica["lost"] for replica in replicas_of(server))
    return count


def routed(server: ServerProcess) -> list[int]:
    """Requests that each replica was given."""
    return [sum(replica["routed"].values()) for replica in replicas_of(server)]


def stream(url: str, body: dict[str, Any], begun: threading.Event) -> tuple[str, str, int]:
    """The text, how it ended and how many tokens it has; `begun` is set on the way."""
    text, reason, tokens = "", "", 0
    asked = body | {"stream": True, "stream_options": {"include_usage": True}}
    with HTTP.stream("POST", f"{url}/v1/completions", json=asked, timeout=120) as reply:
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            begun.set()
            for choice in event["choices"]:
                text += choice["text"]
                reason = choice["finish_reason"] or reason
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
    return text, reason, tokens


def streams(server: ServerProcess) -> tuple[ThreadPoolExecutor, list[Future[Any]]]:
    """All of BODIES, begun."""
    pool = ThreadPoolExecutor(STREAMS)
    begun = [threading.Event() for _ in BODIES]
    pairs = zip(BODIES, begun, strict=True)
    futures = [pool.submit(stream, server.url, *pair) for pair in pairs]
    assert all(event.wait(60) for event in begun)
    return pool, futures


@pytest.mark.long
def test_streams_survive_the_engine_they_come_from(server: ServerProcess) -> None:
    pool, futures = streams(server)
    undisturbed = [future.result() for future in futures]
    assert {(reason, tokens) for _, reason, tokens in undisturbed} == {("length", 160)}
    pool.shutdown()
    lost_before = lost(server)
    pool, futures = streams(server)
    victim = engine_of_replica(server.pid, 0)
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: replicas_up(server) == 1, 120, "the view has dropped it")
    assert [future.result() for future in futures] == undisturbed
    pool.shutdown()
    wait_until(lambda: replicas_up(server) == 2, 120, "it is back")
    figures = HTTP.get(f"{server.url}/admin/replicas").json()
    assert figures["continued"] >= 1 and lost(server) == lost_before + 1
    assert [each["open"] for each in figures["data"]] == [0, 0]


SCHEMAS = schemas(by_tier(fast=12, long=60), seed(28))


def constrained(number: int, streams: bool) -> dict[str, Any]:
    """The body of a completion by a schema."""
    return {
        "prompt": f"{number} one two three",
        "max_tokens": 150,
        "temperature": number % 2,
        "seed": number,
        "service_tier": "flex" if number % 4 < 2 else "default",
        "n": 1 if streams or number % 3 else 3,
        "structured_outputs": {"json": SCHEMAS[number]},
    }


def assert_valid(number: int, text: str, reason: str) -> bool:
    """Whether the text is whole; raises if it is whole and wrong."""
    if reason == "stop":
        jsonschema.validate(json.loads(text), SCHEMAS[number])
    return reason == "stop"


def test_grammars_hold_on_each_replica(server: ServerProcess) -> None:
    before = routed(server)

    def row(number: int) -> list[tuple[str, str]]:
        if number % 2:
            body = constrained(number, streams=True)
            return [stream(server.url, body, threading.Event())[:2]]
        body = constrained(number, streams=False)
        reply = HTTP.post(f"{server.url}/v1/completions", json=body, timeout=120)
        choices = reply.raise_for_status().json()["choices"]
        return [(choice["text"], choice["finish_reason"]) for choice in choices]

    with ThreadPoolExecutor(STREAMS) as pool:
        answers = list(pool.map(row, range(len(SCHEMAS))))
    whole = [assert_valid(n, *each) for n, found in enumerate(answers) for each in found]
    assert sum(whole) > len(whole) / 4, "nearly all were cut"
    assert all(now > then for now, then in zip(routed(server), before, strict=True))


@pytest.mark.long
def test_outputs_by_a_schema_survive_the_engine_they_come_from(server: ServerProcess) -> None:
    """The other engine continues within the grammar, and as if nothing had happened."""
    words = {"enum": ["one", "two", "three", "four"]}
    schema = {"type": "array", "items": words, "minItems": 40, "maxItems": 40}

    def ask(kill: bool) -> list[tuple[str, str, int]]:
        with ThreadPoolExecutor(STREAMS) as pool:
            begun = [threading.Event() for _ in range(STREAMS)]
            fields = {"max_tokens": 600, "structured_outputs": {"json": schema}}
            futures = [
                pool.submit(stream, server.url, {**BODIES[n], **fields, "ignore_eos": False}, event)
                for n, event in enumerate(begun)
            ]
            assert all(event.wait(60) for event in begun)
            if kill:
                os.kill(engine_of_replica(server.pid, 0), signal.SIGKILL)
            return [future.result() for future in futures]

    undisturbed = ask(kill=False)
    for text, reason, _ in undisturbed:
        assert reason == "stop" and len(json.loads(text)) == 40
    assert ask(kill=True) == undisturbed
    assert HTTP.get(f"{server.url}/admin/replicas").json()["continued"] >= 1


@pytest.mark.long
def test_rows_of_a_batch_survive(server: ServerProcess) -> None:
    rows = [
        {"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(BODIES * 4)
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        upload = {"file": ("rows.jsonl", content)}
        file = client.post("/v1/files", files=upload, data={"purpose": "batch"}).json()
        wanted = {"endpoint": "/v1/completions", "completion_window": "24h"}
        batch = client.post("/v1/batches", json=wanted | {"input_file_id": file["id"]}).json()

        def look() -> dict[str, Any]:
            found: dict[str, Any] = client.get(f"/v1/batches/{batch['id']}").json()
            return found

        def open_there() -> bool:
            return all(replica["open"] > 0 for replica in replicas_of(server))

        wait_until(open_there, 120, "both replicas have rows")
        os.kill(engine_of_replica(server.pid, 1), signal.SIGKILL)
        wait_until(lambda: look()["status"] == "completed", 120, "the batch is completed")
        assert look()["request_counts"] == {"total": 24, "completed": 24, "failed": 0}
        lines = client.get(f"/v1/files/{look()['output_file_id']}/content").text.splitlines()
        texts: dict[int, set[str]] = {}
        for line in map(json.loads, lines):
            text = line["response"]["body"]["choices"][0]["text"]
            texts.setdefault(int(line["custom_id"]) % STREAMS, set()).add(text)
        assert all(len(same) == 1 for same in texts.values()), "each row as its copies"
        metrics = client.get("/metrics").text
        assert 'bros_batch_rows_total{outcome="interrupted"} 0.0' in metrics


def test_a_session_survives(server: ServerProcess) -> None:
    sampling = {"max_tokens": 200, "temperature": 0, "ignore_eos": True}

    @P.semantic_function(sampling=sampling)
    def first(topic: P.SemanticVariable) -> None:
        """one {{input:topic}} two {{output:draft}}"""

    @P.semantic_function(sampling=sampling)
    def second(draft: P.SemanticVariable) -> None:
        """three {{input:draft}} four {{output:answer}}"""

    def run(kill: bool) -> str:
        with P.Session(server.url):
            answer: Any = second(first("a"))
            if kill:
                answer.want(P.LATENCY)
                wait_until(lambda: any(r["open"] for r in replicas_of(server)), 120, "it runs")
                busy = next(r["number"] for r in replicas_of(server) if r["open"])
                os.kill(engine_of_replica(server.pid, busy), signal.SIGKILL)
            text: str = answer.get(timeout=60)
            return text

    expected = run(kill=False)
    assert run(kill=True) == expected and expected


def engines_of(server: ServerProcess) -> list[int]:
    return [engine_of_replica(server.pid, number) for number in (0, 1)]


def test_a_replica_is_drained_moved_and_restarted(
    server: ServerProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    def admin(*arguments: str) -> str:
        assert main(["admin", *arguments, "--url", server.url], {}) == 0
        return capsys.readouterr().out

    pool, futures = streams(server)
    undisturbed = [future.result() for future in futures]
    pool.shutdown()
    moved = 0
    while not moved:  # else the streams had ended before the command came
        engines = engines_of(server)
        pool, futures = streams(server)
        said = admin("drain", "0", "--move", "--restart")
        assert "replica-0 is restarting" in said and said.endswith("replica-0 is up\n")
        assert [future.result() for future in futures] == undisturbed
        pool.shutdown()
        assert engines_of(server)[1] == engines[1], "the other one is still the same"
        assert engines_of(server)[0] != engines[0]
        moved = HTTP.get(f"{server.url}/admin/replicas").json()["moved"]
    assert "replica-1 is drained" in admin("drain", "1")
    assert "drained" in admin("replicas")
    assert "replica-1 is up" in admin("resume", "1")


@pytest.mark.long
def test_the_server_ends_with_the_last_engine_that_is_not_to_come_back(model: Path) -> None:
    options = ("--replicas", "2", "--on-engine-death", "exit")
    with running_server(str(model), *SMALL, *options) as server:
        assert server.url
        first, second = engines_of(server)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: replicas_up(server) == 1, 120, "the view has dropped it")
        assert stream(server.url, BODIES[0], threading.Event())[1] == "length"
        assert sorted(each["state"] for each in replicas_of(server)) == ["gone", "up"]
        os.kill(second, signal.SIGKILL)
        assert server.wait(60) == 1


@pytest.mark.long
def test_a_batch_that_one_replica_cannot_finish_in_time_brings_another(model: Path) -> None:
    """Rows are short: those that are with the engine would be done in no time."""
    row = {"prompt": "one two three", "max_tokens": 4, "ignore_eos": True}
    lines = "".join(
        json.dumps({"custom_id": str(n), "method": "POST", "url": "/v1/completions", "body": row})
        + "\n"
        for n in range(20_000)
    )
    with running_server(str(model), *SMALL, "--max-replicas", "2") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        assert len(replicas_of(server)) == 1
        file = client.files.create(purpose="batch", file=("rows.jsonl", lines.encode()))
        batch = client.batches.create(
            input_file_id=file.id,
            endpoint="/v1/completions",
            completion_window="1m",  # type: ignore[arg-type]
        )
        wait_until(lambda: replicas_up(server) == 2, 240, "another replica")
        counts = client.batches.retrieve(batch.id).request_counts
        assert counts is not None and counts.completed < 10_000
        client.batches.cancel(batch.id)
