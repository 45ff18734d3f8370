"""A server whose replicas are actors of a Ray instance of this machine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bros.cli.main import main
from support.processes import descendants, exists, wait_until_gone
from support.ray_cluster import actors
from support.server_process import HTTP, ServerProcess, running_server, wait_until
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

SMALL = ("--policy", "fcfs", "--kv-blocks", "256", "--threads", "1")
STREAMS = 4
BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"{n} one two three",
        "max_tokens": 160,
        "ignore_eos": True,
        **({"temperature": 0} if n % 2 else {"temperature": 1, "seed": n}),
    }
    for n in range(STREAMS)
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    save_chat_llama(folder)
    return folder


@pytest.fixture(scope="module")
def server(model: Path, ray_address: str) -> Iterator[ServerProcess]:
    flags = (*SMALL, "--cluster", ray_address, "--replicas", "2", "--min-replicas", "1")
    with running_server(str(model), *flags) as server:
        assert server.url
        yield server


def replicas_of(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = HTTP.get(f"{server.url}/admin/replicas").json()["data"]
    return found


def text_of(url: str, body: dict[str, Any]) -> str:
    """Of a stream, to its end."""
    text = ""
    with HTTP.stream(
        "POST", f"{url}/v1/completions", json={**body, "model": "tiny", "stream": True}, timeout=60
    ) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += chunk["choices"][0]["text"]
    return text


# In any run, test_ray_client.py kills actors and test_replicas_trouble.py replicas with streams.
@pytest.mark.long
def test_every_stream_survives_a_killed_actor(server: ServerProcess) -> None:
    assert server.url is not None
    with ThreadPoolExecutor(STREAMS) as pool:
        expected = list(pool.map(lambda body: text_of(server.url, body), BODIES))
        running = [pool.submit(text_of, server.url, body) for body in BODIES]
        wait_until(
            lambda: all(replica["open"] for replica in replicas_of(server)), 120, "both are busy"
        )
        [lost, other] = actors()
        engines = descendants(lost)
        os.kill(lost, signal.SIGKILL)
        assert [answer.result() for answer in running] == expected
    assert exists(other)
    wait_until_gone(engines, 20)
    wait_until(
        lambda: all(r["state"] == "up" for r in replicas_of(server)), 120, "it is started again"
    )
    assert sum(replica["lost"] for replica in replicas_of(server)) == 1


@pytest.mark.long
def test_nothing_is_left_on_the_cluster(server: ServerProcess) -> None:
    """After the one before; the server is asked to end while a stream is open."""
    assert server.url is not None
    everything = [pid for actor in actors() for pid in (actor, *descendants(actor))]
    assert len(everything) == 4
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(text_of, server.url, BODIES[1])
        wait_until(lambda: any(r["open"] for r in replicas_of(server)), 120, "it runs")
        os.kill(server.pid, signal.SIGTERM)
        assert answer.result()
    assert server.wait(60) == 0
    wait_until_gone(everything, 20)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--replicas", "2", "--max-replicas", "1"), "--max-replicas"),
        (("--min-replicas", "2"), "--min-replicas"),
    ],
)
def test_wrong_numbers_are_refused(
    flags: tuple[str, ...], words: str, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", str(model), "--port", "0", *flags], {}) == 2
    assert words in capsys.readouterr().err
