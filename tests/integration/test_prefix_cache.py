"""Prefix cache and preemption as clients and operators see them, with a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bros.cli.main import main
from support.server_process import ServerProcess, running_server, wait_until
from support.tiny_tokenizer import save_chat_llama

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

BLOCK = 16
BLOCKS = 32


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return save_chat_llama(folder)


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Objectives are loose, so that nothing depends on how fast this machine is."""
    options = ["--kernels", "reference", "--kv-blocks", str(BLOCKS)]
    options += ["--slo-ttft", "60000", "--slo-tpot", "60000"]
    options += ["--data-dir", str(tmp_path_factory.mktemp("data"))]  # steps are measured anew
    with running_server(str(model), *options) as server:
        yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def metric(client: httpx.Client, name: str) -> float:
    text = client.get("/metrics").text
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"no metric {name} in\n{text}"
    return float(found[1])


def post(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json={"temperature": 0, "ignore_eos": True, **body})
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def complete(client: httpx.Client, prompt: object, **body: Any) -> dict[str, Any]:
    return post(client, "/v1/completions", **{"prompt": prompt, "max_tokens": 4, **body})


def cached(answer: dict[str, Any]) -> int:
    tokens = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert isinstance(tokens, int)
    return tokens


def prompt_of(number: int, length: int) -> list[int]:
    """Token ids; no two numbers begin alike."""
    return [10 + (7 * number + i) % 400 for i in range(length)]


def test_the_second_turn_of_a_chat_reports_what_was_cached_of_the_first(
    client: httpx.Client,
) -> None:
    (z,) = client.post("/tokenize", json={"prompt": "z"}).json()["tokens"]
    forced = {"max_tokens": 40, "logit_bias": {str(z): 100}}
    messages = [{"role": "user", "content": "Tell me of rivers, hills and the sea, please."}]
    first = post(client, "/v1/chat/completions", messages=messages, **forced)
    assert cached(first) == 0
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "Go on."})
    second = post(client, "/v1/chat/completions", messages=messages, **forced)
    # The last token of an answer is never computed, and only whole blocks are found.
    computed = first["usage"]["total_tokens"] - 1
    assert cached(second) == computed // BLOCK * BLOCK > first["usage"]["prompt_tokens"]
    assert cached(second) < second["usage"]["prompt_tokens"]


@pytest.mark.parametrize(("length", "expected"), [(15, 0), (16, 0), (17, 16), (48, 32), (49, 48)])
def test_whole_blocks_before_the_last_token_are_found(
    client: httpx.Client, length: int, expected: int
) -> None:
    prompt = prompt_of(length, length)
    first, again = (complete(client, prompt) for _ in range(2))
    assert (cached(first), cached(again)) == (0, expected)
    assert first["choices"] == again["choices"]


def test_streams_report_the_same(client: httpx.Client) -> None:
    found = []
    for _ in range(2):
        body = {"prompt": prompt_of(1, 40), "max_tokens": 3, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True}
        lines = client.post("/v1/completions", json=body).text.split("\n\n")
        found.append(cached(json.loads(lines[-3].removeprefix("data: "))))
    assert found == [0, 32]


def test_choices_share_a_prompt_that_was_not_cached_before(client: httpx.Client) -> None:
    before = metric(client, 'bros_prefix_tokens_total{class="rt"}')
    first = complete(client, prompt_of(2, 100), n=3, temperature=1, seed=1)
    assert (first["usage"]["prompt_tokens"], cached(first)) == (100, 0)
    # Two of them began with what the first one had computed.
    assert metric(client, 'bros_prefix_tokens_total{class="rt"}') == before + 2 * 96
    again = complete(client, prompt_of(2, 100), n=3, temperature=1, seed=1)
    assert cached(again) == 96
    assert first["choices"] == again["choices"]


def test_of_several_prompts_each_counts(client: httpx.Client) -> None:
    """They are asked for one by one, so the second one finds the first one's."""
    answer = complete(client, [prompt_of(3, 100), prompt_of(3, 100), prompt_of(4, 20)])
    assert (answer["usage"]["prompt_tokens"], cached(answer)) == (220, 96)


def test_salts_keep_apart(client: httpx.Client) -> None:
    prompt = prompt_of(5, 40)
    for salt, expected in (("a", 0), ("b", 0), ("a", 32), (None, 0), ("", 32), ("b", 32)):
        assert cached(complete(client, prompt, cache_salt=salt)) == expected


def test_best_effort_requests_find_it_too_and_say_so_in_the_metrics(client: httpx.Client) -> None:
    name = 'bros_prefix_tokens_total{class="be"}'
    complete(client, prompt_of(6, 40))
    before = metric(client, name)
    answer = complete(client, prompt_of(6, 40), service_tier="flex")
    assert (answer["service_tier"], cached(answer)) == ("flex", 32)
    assert metric(client, name) == before + 32


def test_cached_blocks_count_as_free_and_are_evicted(client: httpx.Client) -> None:
    complete(client, prompt_of(7, 40))
    assert metric(client, "bros_kv_blocks_cached") >= 2
    assert metric(client, "bros_kv_blocks_shared") == 0
    assert metric(client, 'bros_kv_blocks_used{class="rt"}') == 0
    name = 'bros_prefix_blocks_evicted_total{class="be"}'
    before = metric(client, name)
    for number in range(8, 11):
        complete(client, prompt_of(number, 300), service_tier="flex")
    assert metric(client, name) > before
    assert metric(client, "bros_kv_blocks_cached") <= BLOCKS


def test_preempted_kv_of_a_best_effort_request_is_copied_and_restored(client: httpx.Client) -> None:
    """Each of the two needs most of the memory; the answer is the one of an idle server."""
    body = {"prompt": prompt_of(11, 200), "max_tokens": 200, "service_tier": "flex"}
    undisturbed = complete(client, **body, cache_salt="another")["choices"][0]["text"]
    names = [
        f'bros_kv_tokens_{what}_total{{class="be"}}' for what in ("preempted", "copied", "restored")
    ]
    before = [metric(client, name) for name in names]
    streamed = {**body, "temperature": 0, "ignore_eos": True, "stream": True}
    with client.stream("POST", "/v1/completions", json=streamed) as response:
        lines = response.iter_lines()
        first = next(lines)
        with httpx.Client(base_url=client.base_url, timeout=60) as other:
            complete(other, prompt_of(12, 400), max_tokens=8)
        events = [line.removeprefix("data: ") for line in [first, *lines] if line]
    assert events.pop() == "[DONE]"
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events)
    assert text == undisturbed
    preempted, copied, restored = (
        metric(client, name) - earlier for name, earlier in zip(names, before, strict=True)
    )
    assert preempted >= copied > 0 and restored > 0
    assert metric(client, 'bros_preemptions_total{class="be"}') > 0


def test_nothing_is_held_when_all_is_done(client: httpx.Client) -> None:
    """Last in this module."""
    for service_class in ("rt", "be"):
        name = f'bros_kv_blocks_used{{class="{service_class}"}}'
        wait_until(lambda name=name: metric(client, name) == 0, 120, "memory is freed")
    assert metric(client, "bros_kv_blocks_shared") == 0


@pytest.mark.long
def test_without_the_cache_nothing_is_found(model: Path) -> None:
    options = ("--policy", "fcfs", "--kernels", "reference", "--prefix-cache", "off")
    with (
        running_server(str(model), *options) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        for _ in range(2):
            assert cached(complete(client, prompt_of(1, 40))) == 0
        assert metric(client, "bros_kv_blocks_cached") == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--kv-layout", "diagonal"), "'diagonal' is not one of bidirectional, plain"),
        (("--on-pressure", "swap"), "'swap' is not one of checkpoint, recompute"),
        (("--kv-find", "best"), "'best' is not one of final, paper"),
        (("--prefix-cache", "on"), "'on' is not one of class-aware, lru, off"),
        (("--rt-cache-share", "0.95"), "0.95 must be at most 0.9"),
        (("--host-kv-memory", "plenty"), "'plenty' is not a size"),
        (("--host-kv-blocks", "-1"), "-1 must be at least 0"),
    ],
)
def test_a_wrong_option_names_itself(
    arguments: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *arguments], {}) == 2
    assert f"{arguments[0]}: {words}" in capsys.readouterr().err
