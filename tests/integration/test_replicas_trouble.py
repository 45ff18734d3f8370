"""Two replicas: engines that are killed or stopped while they serve, one or all of them. The long
tier does it with the embedded model and the default policy, the fast one with a tiny model."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from support.machine_speed import slowdown
from support.processes import children, descendants, engine_of_replica, wait_until_gone
from support.server_process import HTTP, ServerProcess, running_server, wait_until
from support.tier import by_tier, is_long
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STREAMS = 4
TOKENS = by_tier(fast=400, long=24)
GAP_S = 90.0
"""A stream goes on within about a second; with all cores busy it takes much longer."""

HANG_S = 4
NOTICED_S, ANSWERED_S = 10.0 * HANG_S / 8, 1.0
"""As tests/transport/test_hangs.py has it: the longest time until a hang is noticed, with
this --hang-timeout, and from then until streams go on, on an idle machine of nominal speed."""

BODIES: list[dict[str, Any]] = [
    {
        "prompt": f"The story number {n} is about",
        "max_tokens": TOKENS,
        "ignore_eos": True,
        **({"temperature": 0} if n % 2 else {"temperature": 1, "seed": n}),
    }
    for n in range(STREAMS)
]


class Reading:
    """A stream that is read on a thread. begun: its first token is there."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.begun = threading.Event()
        self.text, self.reason, self.gap_s = "", "", 0.0
        self.error: dict[str, Any] | None = None
        self._url, self._body = url, body | {"stream": True}

    def run(self) -> Reading:
        last_s = time.monotonic()
        url = f"{self._url}/v1/completions"
        with HTTP.stream("POST", url, json=self._body, timeout=120) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    now_s = time.monotonic()
                    self.gap_s, last_s = max(self.gap_s, now_s - last_s), now_s
                    self._take(json.loads(line.removeprefix("data: ")))
        return self

    def _take(self, event: dict[str, Any]) -> None:
        self.error = event.get("error", self.error)
        for choice in event.get("choices", ()):
            self.text += choice["text"]
            self.reason = choice["finish_reason"] or self.reason
        self.begun.set()


class Streams:
    """All of BODIES, which have begun if they are to."""

    def __init__(self, url: str, bodies: list[dict[str, Any]] = BODIES) -> None:
        self._pool = ThreadPoolExecutor(len(bodies))
        self.readings = [Reading(url, body) for body in bodies]
        self._futures: list[Future[Reading]] = [self._pool.submit(r.run) for r in self.readings]

    def begin(self) -> None:
        assert all(reading.begun.wait(60) for reading in self.readings)

    def texts(self) -> list[str]:
        """Once all have ended as they should."""
        found = [future.result() for future in self._futures]
        self._pool.shutdown()
        assert [(reading.reason, reading.error) for reading in found] == (
            [("length", None)] * len(found)
        )
        return [reading.text for reading in found]

    @property
    def gap_s(self) -> float:
        return max(reading.gap_s for reading in self.readings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    options = ("--replicas", "2", "--kv-blocks", "256", "--threads", "1")
    options += ("--hang-timeout", str(HANG_S))
    if not is_long():
        folder = tmp_path_factory.mktemp("tiny")
        tiny = save_chat_llama(folder)
        options = (str(tiny), "--policy", "fcfs", *options)
    with running_server(*options) as server:
        assert server.url
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> list[str]:
    return Streams(server.url).texts()


@pytest.fixture(autouse=True)
def both_up(server: ServerProcess) -> None:
    wait_until(lambda: up(server) == 2, 120, "both replicas are up")


def up(server: ServerProcess) -> int:
    count: int = HTTP.get(f"{server.url}/health").json()["replicas_up"]
    return count


def continued(server: ServerProcess) -> int:
    """Streams that went on elsewhere."""
    count: int = HTTP.get(f"{server.url}/admin/replicas").json()["continued"]
    return count


def states(server: ServerProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = HTTP.get(f"{server.url}/admin/replicas").json()["data"]
    return found


def busiest(server: ServerProcess) -> int:
    number: int = max(states(server), key=lambda status: status["open"])["number"]
    return number


@pytest.mark.long
def test_streams_survive_a_killed_engine(server: ServerProcess, undisturbed: list[str]) -> None:
    streams = Streams(server.url)
    streams.begin()
    os.kill(engine_of_replica(server.pid, busiest(server)), signal.SIGKILL)
    assert streams.texts() == undisturbed
    print(f"longest gap: {streams.gap_s:.2f} s")
    assert streams.gap_s < GAP_S


@pytest.mark.long
def test_prompts_that_are_being_computed_survive(server: ServerProcess) -> None:
    bodies = [
        {"prompt": f"{n} and " * 150, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        for n in range(2)
    ]
    streams = Streams(server.url, bodies)
    wait_until(lambda: any(each["open"] for each in states(server)), 120, "one is there")
    assert not streams.readings[0].begun.is_set(), "its prompt is not done"
    os.kill(engine_of_replica(server.pid, busiest(server)), signal.SIGKILL)
    assert streams.texts() == Streams(server.url, bodies).texts()


def test_streams_survive_one_engine_and_then_all(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    before = continued(server)
    streams = Streams(server.url)
    streams.begin()
    os.kill(engine_of_replica(server.pid, busiest(server)), signal.SIGKILL)
    wait_until(lambda: continued(server) > before, 120, "the other one goes on")
    for pid in children(server.pid):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: HTTP.get(f"{server.url}/health").status_code == 503, 120, "none is left")
    refused = HTTP.post(f"{server.url}/v1/completions", json=BODIES[1])
    assert (refused.status_code, refused.headers.get("retry-after")) == (503, "5")
    assert streams.texts() == undisturbed


@pytest.mark.long
def test_a_drained_replica_takes_over_what_the_other_loses(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    HTTP.post(f"{server.url}/admin/replicas/0/drain").raise_for_status()
    streams = Streams(server.url)
    streams.begin()
    os.kill(engine_of_replica(server.pid, 1), signal.SIGKILL)
    assert streams.texts() == undisturbed
    assert states(server)[0]["state"] == "drained"
    HTTP.post(f"{server.url}/admin/replicas/0/resume").raise_for_status()


def test_a_hung_engine_is_emptied_and_restarted(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    streams = Streams(server.url)
    streams.begin()
    number = busiest(server)
    stopped = engine_of_replica(server.pid, number)
    os.kill(stopped, signal.SIGSTOP)
    wanted = {"move": True, "restart": True}
    HTTP.post(f"{server.url}/admin/replicas/{number}/drain", json=wanted).raise_for_status()
    assert streams.texts() == undisturbed
    print(f"longest gap: {streams.gap_s:.2f} s")
    assert streams.gap_s < GAP_S
    wait_until_gone([stopped], 30)


@pytest.mark.long
def test_a_hung_engine_is_noticed(server: ServerProcess, undisturbed: list[str]) -> None:
    streams = Streams(server.url)
    streams.begin()
    stopped = engine_of_replica(server.pid, busiest(server))
    os.kill(stopped, signal.SIGSTOP)
    assert streams.texts() == undisturbed
    print(f"longest gap: {streams.gap_s:.2f} s")
    assert streams.gap_s <= (NOTICED_S + ANSWERED_S) * max(1.0, slowdown())
    wait_until_gone([stopped], 30)
    assert f"has not answered for {HANG_S} s" in server.output


@pytest.mark.long
def test_open_streams_end_before_a_server_that_is_told_to(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    # The last one.
    streams = Streams(server.url)
    streams.begin()
    group = descendants(server.pid)
    os.kill(server.pid, signal.SIGTERM)
    assert streams.texts() == undisturbed
    assert server.wait(60) == 0
    wait_until_gone(group, 30)
