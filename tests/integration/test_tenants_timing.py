"""Whether a tenant can tell that another one has sent a prompt before, by what its own request is
told or how long it takes. test_tenants_cached.py looks at what it is told in more ways."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator

import httpx
import pytest

from support.server_process import ServerProcess, running_server
from support.tier import seed

pytestmark = [
    pytest.mark.slow, pytest.mark.multiprocess, pytest.mark.long, pytest.mark.timeout(1800),
]  # fmt: skip

PROMPTS = 200
TOKENS = 128
BLOCK = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("ann ann-key\nbob bob-key\n")
    with running_server("--api-keys", str(keys)) as server:
        yield server


class Asker:
    """Sends prompts as one of two tenants."""

    def __init__(self, server: ServerProcess, number: int) -> None:
        self.http = httpx.Client(base_url=server.url, timeout=120)
        self.rng = random.Random(seed(number))

    def prompt(self) -> list[int]:
        """Nothing has been sent that begins like it."""
        return [self.rng.randrange(1000, 40_000) for _ in range(TOKENS)]

    def send(self, name: str, prompt: list[int]) -> tuple[float, object]:
        """(seconds, usage)."""
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
        headers = {"authorization": f"Bearer {name}-key"}
        begun_s = time.perf_counter()
        response = self.http.post("/v1/completions", json=body, headers=headers)
        took_s = time.perf_counter() - begun_s
        assert response.status_code == 200, response.text
        return took_s, response.json()["usage"]

    def try_prompts(self, other: str, count: int) -> tuple[list[float], list[float], list[object]]:
        """(seconds of bob's requests after `other` has sent the prompt, after it has sent another
        one, and their usages)."""
        times: tuple[list[float], list[float]] = ([], [])
        usages = []
        for _ in range(count):
            prompt, unlike = self.prompt(), self.prompt()
            was_sent = self.rng.random() < 0.5
            self.send(other, prompt if was_sent else unlike)
            took_s, usage = self.send("bob", prompt)
            times[not was_sent].append(took_s)
            usages.append(usage)
        return *times, usages


def z_score(one: list[float], other: list[float]) -> float:
    """Of the rank sum of `one` (Mann-Whitney), under the hypothesis that they do not differ."""
    less = sum((a < b) + (a == b) / 2 for a in one for b in other)
    pairs = len(one) * len(other)
    return (less - pairs / 2) / (pairs * (len(one) + len(other) + 1) / 12) ** 0.5


def report(after: list[float], without: list[float]) -> str:
    return (
        f"median {1000 * statistics.median(after):.1f} ms after the prompt was sent, "
        f"{1000 * statistics.median(without):.1f} ms without, z = {z_score(after, without):.2f}"
    )


@pytest.fixture(scope="module")
def asker(server: ServerProcess) -> Iterator[Asker]:
    made = Asker(server, 5)
    with made.http:
        made.try_prompts("ann", 3)  # the first steps are slower
        yield made


def test_another_tenants_prompts_cannot_be_heard(asker: Asker) -> None:
    """By chance it fails once in 15,000 runs."""
    after, without, usages = asker.try_prompts("ann", PROMPTS)
    assert usages == [usages[0]] * PROMPTS
    assert usages[0]["prompt_tokens_details"]["cached_tokens"] == 0  # type: ignore[index]
    print(report(after, without))
    assert abs(z_score(after, without)) < 4.0


def test_ones_own_prompts_can_be_heard(asker: Asker) -> None:
    """So the test above could fail."""
    after, without, usages = asker.try_prompts("bob", PROMPTS // 4)
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]  # type: ignore[index]
    assert sorted(cached) == [0] * len(without) + [(TOKENS - 1) // BLOCK * BLOCK] * len(after)
    print(report(after, without))
    assert z_score(after, without) > 4.0
